"""Settings as variables and files give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgpu_magic.config import load_settings
from sgpu_magic.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SGPU_STAND_IN", "a10:4", "'a10:4'; it can be cpu or cpu,cuda."),
        ("SGPU_ENVIRONMENTS", "build", "'build'; it can be auto or built."),
        ("SGPU_RAY_SELECT", "labels", "'labels'; it can be auto, label or resource."),
        ("SGPU_TRACK", "some", "'some'; it can be auto, all or off."),
        ("SGPU_CPU_SLOTS", "many", "'many'; a value of type int is needed."),
    ],
)  # fmt: skip
def test_a_value_that_means_nothing_is_refused(tmp_path: Path, name: str, value: str, says: str):
    """A word that was ignored would leave a user with an error that advises what they have done."""
    with pytest.raises(UsageError) as refused:
        load_settings({"SGPU_CONFIG": str(tmp_path / "none.toml"), name: value})
    assert str(refused.value) == f"{name} in the environment is {says}"


def test_a_file_may_say_that_a_setting_is_not_used(tmp_path: Path):
    file = tmp_path / "config.toml"
    file.write_text('stand_in = ""\n')
    assert load_settings({"SGPU_CONFIG": str(file)}).stand_in == ""


@pytest.mark.parametrize(
    "text", ["a10", "a10:", ":4", "a10:0", "a10:-1", "a10:x", "2xA10", "a10:4,", "a10:9999", "a10:٣", "cpu:4", "any:1"]
)
def test_simulated_devices_that_mean_nothing_are_refused_where_they_are_set(tmp_path: Path, text: str):
    with pytest.raises(UsageError, match=r"the setting simulate can't be read: .*write it like a10:4,h100:8"):
        load_settings({"SGPU_CONFIG": str(tmp_path / "none.toml"), "SGPU_SIMULATE": text})


def test_a_type_is_simulated_once_and_has_a_name(tmp_path: Path):
    for text, says in (("a10:1,A10G:2", "a10 is listed twice"), ("zzz:1", "zzz")):
        with pytest.raises(UsageError, match=says):
            load_settings({"SGPU_CONFIG": str(tmp_path / "none.toml"), "SGPU_SIMULATE": text})

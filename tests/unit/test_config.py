"""Settings from variables and files."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sgpu_magic.config import Settings, load_settings, private_dir
from sgpu_magic.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SGPU_STAND_IN", "a10:4", "'a10:4'; it can be cpu or cpu,cuda."),
        ("SGPU_ENVIRONMENTS", "build", "'build'; it can be auto or built."),
        ("SGPU_RAY_SELECT", "labels", "'labels'; it can be auto, label or resource."),
        ("SGPU_TRACK", "true", "'true'; it can be auto, all or off."),
        ("SGPU_CPU_SLOTS", "many", "'many'; a value of type int is needed."),
    ],
)  # fmt: skip
def test_a_value_that_means_nothing_is_refused(tmp_path: Path, name: str, value: str, says: str):
    """If a word were ignored, the error would advise users to do what they have already done."""
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


def test_the_file_is_utf_8_whatever_the_locale_is(tmp_path: Path):
    file = tmp_path / "config.toml"
    file.write_text('currency = "€"\n', encoding="utf-8")
    code = "from sgpu_magic.config import load_settings; print(ascii(load_settings().currency))"
    environ = os.environ | {"SGPU_CONFIG": str(file), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("'\\u20ac'\n", "")
    file.write_bytes('currency = "€"\n'.encode("latin-1", "replace") + b"\xe9")
    with pytest.raises(UsageError, match="can't be read"):
        load_settings({"SGPU_CONFIG": str(file)})


def test_a_setting_that_is_no_text_is_refused(tmp_path: Path):
    given = os.fsdecode(b"/tmp/caf\xe9")
    with pytest.raises(UsageError, match=r"SGPU_STATE_DIR in the environment is .* not UTF-8"):
        load_settings({"SGPU_CONFIG": str(tmp_path / "none"), "SGPU_STATE_DIR": given})


def test_directories_that_are_made_are_private_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        made = private_dir(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    for path in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def in_the_way(folder: Path) -> None:
    for name in ("sgpu", f"sgpu-{os.getuid()}"):
        (folder / name).symlink_to("/tmp")


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
@pytest.mark.parametrize("kind", ["usable", "missing", "relative", "too long", "squatted", "a file", "no text", ""])
def test_sockets_have_a_place_whatever_the_variables_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, kind: str
):
    folder = tmp_path / "f"
    folder.mkdir(mode=0o700)
    named = {
        "missing": str(tmp_path / "no" / "such"),
        "relative": "run",
        "too long": str(folder / ("x" * 90)),
        "a file": str(folder / "file"),
        "no text": str(folder / os.fsdecode(b"caf\xe9")),
        "": "",
    }.get(kind, str(folder))
    (folder / "file").touch()
    if kind in ("too long", "no text"):
        os.mkdir(named)
    if kind == "squatted":
        in_the_way(folder)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setenv(variable, named)
    settings = Settings(state_dir=str(tmp_path / "state"))
    path = settings.runtime_path
    assert path == settings.runtime_path
    assert path.is_relative_to(folder) == (kind == "usable")
    assert Settings(state_dir=str(tmp_path / "other")).runtime_path != path
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(private_dir(path) / "pool.sock"))
    (path / "pool.sock").unlink()
    path.rmdir()


def test_a_path_that_a_setting_names_is_taken(tmp_path: Path):
    assert Settings(runtime_dir=str(tmp_path)).runtime_path == tmp_path

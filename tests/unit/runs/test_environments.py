"""Lock files of a run's packages, created once and not retried immediately after a failure; `%sgpu_env`'s report."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgpu_magic.config import load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.packages.distributions import Distribution, InstalledPackages, Kind
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.runs import environments
from sgpu_magic.runs.environments import lock_of, report, requirements_of, since_connected
from sgpu_magic.wire.attachments import Environment

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory, and an index that does not answer."""
    for name, value in {
        "SGPU_STATE_DIR": str(tmp_path / "state"),
        "SGPU_CONFIG": str(tmp_path / "config.toml"),
        "SGPU_INDEX_URL": "http://127.0.0.1:9/simple",
        "SGPU_LOCK_ENVIRONMENTS": "on",
        "UV_NO_CACHE": "1",
        "UV_HTTP_RETRIES": "0",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "state"


def test_a_lock_file_is_made_once(state: Path, monkeypatch: pytest.MonkeyPatch):
    # nothing for which the index is queried
    described = InstalledPackages(
        (Distribution("tool", "1.0", Kind.EDITABLE, url=state.as_uri()),), executable=sys.executable
    )
    assert lock_of(described, make=False) is None
    made = lock_of(described)
    assert made is not None
    assert (made.problem, "tool" in made.pylock) == ("", True)
    assert [file.name for file in (state / "locks").iterdir()] == [f"{described.digest}.json"]
    monkeypatch.setattr(environments, "make_lock", lambda *_, **__: pytest.fail("it is made again"))
    assert lock_of(described, make=False) == lock_of(described, gently=True) == made
    monkeypatch.setenv("SGPU_LOCK_ENVIRONMENTS", "off")
    assert lock_of(described) is None


def test_after_a_failure_the_index_is_left_alone_for_a_while(state: Path):
    # the process remembers failures by digest
    described = Environment(digest=secrets.token_hex(4), requirements=("six==1.17.0",), python=HERE)
    failed = lock_of(described, gently=True)
    assert failed is not None
    assert failed.problem.startswith("uv could not create it: ")
    assert "six==1.17.0" in requirements_of(described, failed)
    assert lock_of(described) is failed
    assert lock_of(described, make=False) is None
    assert not (state / "locks").exists()
    assert lock_of(described, retry_after_s=0.0) is not failed


# ---------------------------------------------------------------- the report


def test_the_report_names_the_setting_and_compares_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGPU_ENV_VERSION", "4")
    settings = load_settings()
    now = take_snapshot()
    six = next(found for found in now.distributions if found.key == "six")
    pins = [found.pin for found in now.distributions if found.key not in ("six", "msgspec")]
    team = tmp_path / "team.txt"
    team.write_text("\n".join(("# Python 3.8 on any machine, digest 00", *pins, "six==0.1", "only-there>2")))
    found = report(settings, [], str(team))
    assert found.lines[0].startswith("packages: ")
    assert found.lines[1] == "runs have the packages of 4 (setting env_version)"
    rows = {row[0]: row[1:] for row in found.differences}
    assert rows["Python"] == (HERE, "3.8", "")
    assert rows["six"] == (six.version, "0.1", "")
    assert rows["only-there"] == ("-", "any", "")
    assert rows["msgspec"][1] == "-"
    assert len(rows) == 4
    with pytest.raises(UsageError, match=r"--diff 'gone': there is no such environment or file\. There are: 4, ai-4"):
        report(settings, [], "gone")


def test_a_session_is_told_what_changed_since_unless_it_has_its_own_packages():
    before = InstalledPackages((Distribution("six", "0.1", Kind.REGISTRY), *[_tool(n) for n in range(9)]))
    now = InstalledPackages((Distribution("six", "0.2", Kind.REGISTRY),))

    def session(label: str, packages: InstalledPackages) -> Any:
        return SimpleNamespace(name="train", packages=packages, spec=SimpleNamespace(environment_label=label))

    assert since_connected(now, [session("4", before), session("", now)]) == []
    (reported,) = since_connected(now, [session("", before)])
    assert reported.startswith("since session train was connected: six 0.1 ")
    assert "more. Modules that its ranks have imported stay as they were: %sgpu_restart restarts its ranks." in reported


def _tool(number: int) -> Distribution:
    return Distribution(f"tool{number}", "1.0", Kind.REGISTRY)

"""uv and pip: where they are configured, and the errors when they are missing or do not end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.uv_command import call_pip, call_uv, index_variables


def configured(home: Path, **environ: str) -> dict[str, str]:
    return index_variables("", {"HOME": str(home), "PIP_CONFIG_FILE": str(home / "own.conf"), **environ})


def test_pips_indexes_are_for_a_uv_without_its_own(tmp_path: Path):
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".pip" / "pip.conf").write_text("[global]\nindex-url = http://first\n")
    (tmp_path / "own.conf").write_text("[global]\nindex-url = http://second\n[install]\nfind-links = /a\n /b\n")
    found = configured(tmp_path)
    assert (found["UV_DEFAULT_INDEX"], found["UV_FIND_LINKS"]) == ("http://second", "/a,/b")
    found = configured(tmp_path, PIP_EXTRA_INDEX_URL="http://more", UV_INDEX_STRATEGY="first-index")
    assert (found["UV_INDEX"], found["UV_INDEX_STRATEGY"]) == ("http://more", "first-index")
    # a broken file, which pip itself reports
    (tmp_path / "own.conf").write_bytes(b"index-url = \xff\n")
    assert configured(tmp_path, PIP_INDEX_URL="http://third")["UV_DEFAULT_INDEX"] == "http://third"
    assert configured(tmp_path, UV_CONFIG_FILE="uv.toml") == {}


def test_without_uv_the_message_says_how_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "uv", None)
    with pytest.raises(EnvironmentFailed) as raised:
        call_uv(["pip", "list"], {}, 30)
    assert raised.value.message == (
        "uv, which makes lock files and wheels, can't be started: uv is not installed. `pip install uv` in the "
        "notebook's environment installs it."
    )


def test_pip_is_this_pythons_and_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch):
    done = call_pip(["--version"], {}, 60)
    assert (done.status, done.words) == (0, "")
    assert f"(python {sys.version_info.major}.{sys.version_info.minor})" in done.output
    with pytest.raises(EnvironmentFailed) as raised:
        call_pip(["install", "six"], {}, 0.001)
    assert raised.value.message.startswith("`pip install` was stopped after 0.001 s. Check that this machine reaches")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EnvironmentFailed, match=r"^pip can't be started: No such file or directory\.$"):
        call_pip(["--version"], {}, 60)

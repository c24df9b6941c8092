"""Hosts of the user's ssh configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgpu_magic.ssh.config_hosts import config_hosts


@pytest.fixture(autouse=True)
def user_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    return tmp_path


def test_names_without_patterns_are_hosts(user_home: Path) -> None:
    (user_home / ".ssh/config").write_text(
        "# Host commented\nHost gpu1 gpu2 # two of them\n  User ann\n  HostName 10.0.0.1\nhost=gpu3\nHost *.lab !bad\n"
        'Match host x exec "true"\n  User git\nHost "gpu4" gpu1\nHost github.com\n  User git\nHost *\n  User git\n'
    )
    assert config_hosts() == ("gpu1", "gpu2", "gpu3", "gpu4")


def test_included_files_have_hosts_too(user_home: Path) -> None:
    (user_home / ".ssh/config").write_text("Include conf.d/* ~/other\nHost last\n")
    (user_home / ".ssh/conf.d").mkdir()
    (user_home / ".ssh/conf.d/b").write_text("Host second\n")
    (user_home / ".ssh/conf.d/a").write_text("Host first\nInclude ~/.ssh/config\n")
    (user_home / "other").write_text("Host third\n")
    assert set(config_hosts()) == {"first", "second", "third", "last"}


def test_the_command_names_another_file(user_home: Path) -> None:
    (user_home / ".ssh/config").write_text("Host usual\n")
    (user_home / "with blanks").write_text("Host other\n")
    assert config_hosts(f"ssh -F '{user_home}/with blanks' -v") == ("other",)


@pytest.mark.parametrize("text", ["", "Host", "Host \n", 'Host "open\n', "\0\xff\n"])
def test_anything_may_stand_there(user_home: Path, text: str) -> None:
    (user_home / ".ssh/config").write_text(text)
    config_hosts()


def test_no_file_has_no_hosts() -> None:
    assert config_hosts() == ()
    assert config_hosts("ssh -F /nowhere") == ()
    assert config_hosts("ssh -F 'open") == ()

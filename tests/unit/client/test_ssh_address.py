"""Addresses of machines behind ssh, the command that logs in, and what failed logins mean."""

from __future__ import annotations

import pytest

from sgpu_magic.client.ssh.address import SshAddress, login_command, parse_address
from sgpu_magic.client.ssh.failures import failure_of_machine, failure_of_ssh
from sgpu_magic.errors import KeyRefused

BOX = SshAddress("gpubox")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ssh://gpubox", BOX),
        ("ssh://gpubox/", BOX),
        ("ssh://ann@gpubox", SshAddress("gpubox", "ann")),
        ("ssh://ann@gpu1.example.org:2222", SshAddress("gpu1.example.org", "ann", 2222)),
        ("ssh://10.0.0.7:22", SshAddress("10.0.0.7", port=22)),
        ("ssh://[fe80::1%eth0]:2222", SshAddress("fe80::1%eth0", port=2222)),
    ],
)
def test_an_address_has_user_host_and_port(text: str, address: SshAddress) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpubox",
        "ssh://",
        "ssh://-oProxyCommand=touch x",
        "ssh://-l@gpubox",
        "ssh://gpubox:0",
        "ssh://gpubox:65536",
        "ssh://gpu box",
        "ssh://gpubox/home",
        "ssh://ann:secret@gpubox",
        "ssh://gpubox\n",
        "tcp://gpubox:8700",
    ],
)
def test_anything_else_is_no_address(text: str) -> None:
    assert parse_address(text) is None


def test_the_command_is_the_users_ssh_and_can_ask_nothing() -> None:
    command = login_command(SshAddress("gpubox", "ann", 2222), "ssh -F '/my configs/ssh'")
    assert command[:3] == ["ssh", "-F", "/my configs/ssh"]
    assert "BatchMode=yes" in command
    # what begins with a dash can't be taken for an option
    assert command[command.index("--") :] == ["--", "ann@gpubox", "exec /bin/sh -s"]
    assert command[command.index("-p") + 1] == "2222"


@pytest.mark.parametrize(
    ("errors", "advice", "is_final"),
    [
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R", True),
        ("Host key verification failed.", "`ssh gpubox` once in a terminal", True),
        ("ann@gpubox: Permission denied (publickey,password).", "ssh-copy-id gpubox", True),
        ("ssh: Could not resolve hostname gpubox: Name or service not known", "~/.ssh/config", False),
        ("ssh: connect to host gpubox port 22: Connection refused", "nothing listens", False),
        ("ssh: connect to host gpubox port 22: Connection timed out", "does not answer", False),
        ("Connection timed out during banner exchange", "does not answer", False),
        ("This account is currently not available.", "/bin/sh", False),
    ],
)
def test_a_failed_login_says_what_helps(errors: str, advice: str, is_final: bool) -> None:
    error = failure_of_ssh("box", BOX, errors, "")
    assert isinstance(error, KeyRefused) == is_final
    assert "the pool box" in error.message
    assert advice in error.message
    assert errors.splitlines()[-1] in error.message
    assert "\n" not in error.message


def test_what_the_login_shell_printed_is_shown_when_nothing_else_is() -> None:
    error = failure_of_ssh("box", BOX, "", "Welcome!\nThis account is limited to sftp.\n")
    assert "This account is limited to sftp." in error.message


@pytest.mark.parametrize(
    ("word", "text", "seen", "expected"),
    [
        (
            "no-python",
            "",
            ["/usr/bin/python3 (Python 3.12) has no torch"],
            "/usr/bin/python3 (Python 3.12) has no torch",
        ),
        ("no-python", "", [], "none on its path"),
        ("space", "/home/ann has 3 MB free", [], "/home/ann has 3 MB free"),
        ("disk", "/home/ann: Read-only file system", [], "Read-only file system"),
        ("install", "No matching distribution found for msgspec", [], "No matching distribution"),
        ("idle", "", [], "`--pool box` starts one"),
        ("pool", "the local pool could not be started: no.", [], "could not be started: no."),
        ("of-a-later-version", "anything", [], "anything"),
    ],
)
def test_a_failed_step_there_is_told_with_its_reason(word: str, text: str, seen: list[str], expected: str) -> None:
    error = failure_of_machine("box", BOX, word, text, seen)
    assert expected in error.message
    assert "gpubox" in error.message
    assert "\n" not in error.message

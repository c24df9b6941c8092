"""Addresses of machines behind ssh, the command that logs in, and what failed logins mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpu_magic.errors import KeyRefused
from sgpu_magic.ssh.address import SshAddress, login_command, parse_address, parse_addresses
from sgpu_magic.ssh.failures import failure_of_machine, failure_of_ssh
from sgpu_magic.ssh.machines import Machine, Machines, from_word, to_word

BOX = SshAddress("gpubox")
CHANGED = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @"


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


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("ssh://gpubox", ["gpubox"]),
        ("ssh://a,me@b:2222,c", ["a", "me@b:2222", "c"]),
        ("ssh://node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("ssh://me@n[1-2].lab:7,other", ["me@n1.lab:7", "me@n2.lab:7", "other"]),
        ("ssh://[fe80::1]", ["[fe80::1]"]),
        ("ssh://a,a", []),
        ("ssh://a,,b", []),
        ("ssh://a,-b", []),
        ("ssh://node[3-1]", []),
        ("tcp://a:8700", []),
        ("", []),
    ],
)
def test_several_machines_are_named_in_one_address(text: str, names: list[str]) -> None:
    assert [address.name for address in parse_addresses(text)] == names


def test_a_range_of_machines_has_an_end() -> None:
    assert len(parse_addresses("ssh://n[1-999999]")) == 1001


@given(
    st.lists(st.builds(SshAddress, st.text(min_size=1), st.text(), st.integers(0, 65535)), min_size=1).map(tuple),
    st.text(),
    st.text(),
)
def test_machines_travel_as_one_word(addresses: tuple[SshAddress, ...], python: str, prologue: str) -> None:
    machines = Machines(addresses, python, prologue)
    word = to_word(machines)
    assert word.split() == [word]
    assert word.isascii()
    assert from_word(word) == machines


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
        (f"{CHANGED}\nHost key verification failed.", "(in ~/.ssh/known_hosts)", True),
        (f"{CHANGED}\nOffending RSA key in /home/ann/known:7\nHost key is bad.", "(/home/ann/known:7)", True),
        (f"{CHANGED}\n  ssh-keygen -f '/a b' -R 'c'\nHost key is bad.", "(`ssh-keygen -f '/a b' -R 'c'`)", True),
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
    error = failure_of_ssh(Machine("box", BOX), errors, "")
    assert isinstance(error, KeyRefused) == is_final
    assert "the pool box" in error.message
    assert advice in error.message
    assert errors.splitlines()[-1] in error.message
    assert "\n" not in error.message


def test_what_the_login_shell_printed_is_shown_when_nothing_else_is() -> None:
    error = failure_of_ssh(Machine("box", BOX), "", "Welcome!\nThis account is limited to sftp.\n")
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
    error = failure_of_machine(Machine("box", BOX), word, text, seen)
    assert expected in error.message
    assert "gpubox" in error.message
    assert "\n" not in error.message

"""Key files, the list of authorized keys, and the commands that write them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgpu_magic.cli import main as cli
from sgpu_magic.errors import UsageError
from sgpu_magic.pool.clients import AuthorizedClient, AuthorizedClients, authorize, read_clients, revoke
from sgpu_magic.system.secure_sockets import KeyPair, is_public_key, new_key_pair, read_key_pair, write_key_pair

ANN, BEN, EVE = (new_key_pair().public for _ in range(3))


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    return tmp_path / "clients.toml"


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "own/config.toml"}.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    return tmp_path


def follow(message: str) -> None:
    """Run the command that an error names."""
    (command,) = re.findall(r"chmod \d+ \S+", message)
    subprocess.run(command.split(), check=True)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---------------------------------------------------------------- key files


def test_a_key_file_is_read_as_it_was_written_and_is_private(tmp_path: Path):
    pair = new_key_pair()
    path = tmp_path / "new" / "client.key"
    write_key_pair(path, pair)
    assert read_key_pair(path) == pair
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert [entry.name for entry in path.parent.iterdir()] == ["client.key"]
    assert pair.secret not in repr(pair)


def test_a_key_is_not_overwritten_by_accident(tmp_path: Path):
    first, second = new_key_pair(), new_key_pair()
    path = tmp_path / "client.key"
    write_key_pair(path, first)
    with pytest.raises(UsageError, match="there is already a key in"):
        write_key_pair(path, second)
    assert read_key_pair(path) == first
    write_key_pair(path, second, replace=True)
    assert read_key_pair(path) == second
    assert [entry.name for entry in tmp_path.iterdir()] == ["client.key"]


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o602])
def test_a_key_that_others_can_reach_is_refused(tmp_path: Path, bits: int):
    path = tmp_path / "client.key"
    pair = new_key_pair()
    write_key_pair(path, pair)
    path.chmod(bits)
    with pytest.raises(UsageError, match="can be read or written by other users") as refused:
        read_key_pair(path)
    follow(refused.value.message)
    assert read_key_pair(path) == pair


@pytest.mark.needs_root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file away")
def test_a_key_of_another_user_is_refused(tmp_path: Path):
    path = tmp_path / "client.key"
    write_key_pair(path, new_key_pair())
    os.chown(path, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to another user"):
        read_key_pair(path)


@pytest.mark.parametrize("text", ["", "public = 1", 'public = "x"\nsecret = "y"', "\xff\xfe", "not toml at all ="])
def test_what_is_no_key_pair_is_told(tmp_path: Path, text: str):
    path = tmp_path / "client.key"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(UsageError, match="does not contain a key pair"):
        read_key_pair(path)


def test_halves_of_two_pairs_are_no_pair(tmp_path: Path):
    path = tmp_path / "client.key"
    write_key_pair(path, KeyPair(new_key_pair().public, new_key_pair().secret))
    with pytest.raises(UsageError, match="its halves do not match"):
        read_key_pair(path)


def test_what_can_be_a_key():
    assert is_public_key(ANN)
    for text in ("", "x" * 39, "x" * 41, ANN[:-1] + "\n", ANN[:-1] + " ", "é" * 40, "#" * 40):
        assert not is_public_key(text), text


# ---------------------------------------------------------------- authorized keys


def test_keys_are_listed_and_taken_away(clients: Path):
    authorize(clients, "ann", ANN)
    authorize(clients, "b.en", BEN, admin=True)
    authorize(clients, "ann", EVE)
    assert read_clients(clients) == {
        ANN: AuthorizedClient("ann"),
        EVE: AuthorizedClient("ann"),
        BEN: AuthorizedClient("b.en", admin=True),
    }
    assert mode(clients) == 0o600
    assert revoke(clients, "ann") == 2
    assert read_clients(clients) == {BEN: AuthorizedClient("b.en", admin=True)}
    with pytest.raises(UsageError, match=r"has no user 'ann'. It has: b\.en"):
        revoke(clients, "ann")


def test_a_list_of_the_same_inode_on_another_disk_is_another_list(clients: Path, monkeypatch: pytest.MonkeyPatch):
    authorize(clients, "ann", ANN)
    seen, status = AuthorizedClients(clients), clients.stat()
    assert (seen.is_changed(), seen.users.get(ANN)) == (True, AuthorizedClient("ann"))
    clients.write_text(clients.read_text().replace("ann", "ben"))
    os.utime(clients, ns=(status.st_atime_ns, status.st_mtime_ns))
    true = os.stat
    fields = {
        name: getattr(status, name) for name in ("st_mtime_ns", "st_ctime_ns", "st_ino", "st_size", "st_uid", "st_mode")
    }
    there = SimpleNamespace(**fields, st_dev=status.st_dev + 1)
    monkeypatch.setattr(os, "stat", lambda path, **named: there if path == clients else true(path, **named))
    assert (seen.is_changed(), seen.users.get(ANN)) == (True, AuthorizedClient("ben"))


def test_what_a_person_wrote_stays(clients: Path):
    clients.write_text(f'# the first floor\nann = "{ANN}"  # since May\n\n[ops]\nkey = "{BEN}"\nadmin = true\n')
    clients.chmod(0o600)
    authorize(clients, "eve", EVE)
    assert "# the first floor" in clients.read_text()
    assert "# since May" in clients.read_text()
    assert read_clients(clients)[EVE] == AuthorizedClient("eve")
    assert read_clients(clients)[BEN] == AuthorizedClient("ops", admin=True)
    revoke(clients, "ops")
    assert read_clients(clients) == {ANN: AuthorizedClient("ann"), EVE: AuthorizedClient("eve")}


def test_a_key_is_one_users(clients: Path):
    authorize(clients, "ann", ANN)
    with pytest.raises(UsageError, match="already listed, for user ann"):
        authorize(clients, "ben", ANN)


@pytest.mark.parametrize(
    "text",
    [
        "ann = ",
        'ann = "short"',
        "ann = 3",
        f'ann = "{ANN}"\nben = "{ANN}"',
        f'ann = {{key = "{ANN}", adnim = true}}',
        f'ann = {{key = "{ANN}", admin = "yes"}}',
        f'"../ann" = "{ANN}"',
    ],
    # the keys differ in each process, so they can't be part of an id
    ids=["broken", "short", "number", "twice", "unknown name", "admin as a text", "a path"],
)
def test_a_list_that_means_nothing_lets_in_nobody(clients: Path, text: str):
    authorize(clients, "ben", BEN)
    listed = AuthorizedClients(clients)
    assert listed.is_changed()
    assert listed.users.get(BEN) == AuthorizedClient("ben")
    clients.write_text(f"{clients.read_text()}\n{text}\n")
    assert listed.is_changed()
    assert listed.users.get(BEN) is None
    assert "can't be read" in listed.problem
    assert not listed.is_changed()


def test_a_list_that_others_can_write_lets_in_nobody(clients: Path):
    authorize(clients, "ann", ANN)
    clients.chmod(0o666)
    listed = AuthorizedClients(clients)
    listed.is_changed()
    assert listed.users.get(ANN) is None
    assert "can be written by other users" in listed.problem
    follow(listed.problem)
    assert (listed.is_changed(), listed.users.get(ANN), listed.problem) == (True, AuthorizedClient("ann"), "")


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a b", "a/b", "x" * 65, "é"])
def test_a_users_name_is_plain(clients: Path, name: str):
    with pytest.raises(UsageError, match="is not a user name"):
        authorize(clients, name, ANN)
    assert not clients.exists()


# ---------------------------------------------------------------- commands


def test_keygen_makes_one_key_and_says_what_to_send(own_places: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["pool", "keygen"]) == 0
    output = capsys.readouterr().out
    pair = read_key_pair(own_places / "own" / "client.key")
    assert f"your public key: {pair.public}" in output
    assert f"sgpu pool authorize NAME '{pair.public}'" in output
    assert pair.secret not in output
    assert cli.main(["pool", "keygen"]) == 2
    refusal = capsys.readouterr().err
    assert pair.public in refusal
    assert pair.secret not in refusal
    assert "--force replaces it" in refusal
    assert read_key_pair(own_places / "own" / "client.key") == pair
    assert cli.main(["pool", "keygen", "--force"]) == 0
    assert read_key_pair(own_places / "own" / "client.key") != pair


def test_authorize_and_revoke_write_the_pools_list(own_places: Path, capsys: pytest.CaptureFixture[str]):
    path = own_places / "state" / "pools" / "team" / "clients.toml"
    assert cli.main(["pool", "authorize", "ann", ANN]) == 0
    assert cli.main(["pool", "authorize", "ops", BEN, "--admin", "--name", "team"]) == 0
    assert read_clients(path) == {ANN: AuthorizedClient("ann"), BEN: AuthorizedClient("ops", admin=True)}
    assert cli.main(["pool", "authorize", "eve", "no key"]) == 2
    assert "is not a public key" in capsys.readouterr().err
    assert cli.main(["pool", "revoke", "ann"]) == 0
    assert re.search(r"ann may no longer use the pool team: 1 key removed", capsys.readouterr().out)
    assert read_clients(path) == {BEN: AuthorizedClient("ops", admin=True)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "0.0.0.0:8700"], "--listen takes tcp://"),
        (["--listen", "tcp://0.0.0.0:70000"], "--listen takes tcp://"),
        (["--listen", "tcp://0.0.0.0:8700", "--name", "local"], "is not a pool name"),
        (["--listen", "tcp://0.0.0.0:8700", "--name", "../x"], "is not a pool name"),
        (["--listen", "tcp://0.0.0.0:8700", "--engine", "slurm"], "--engine has no value `slurm`"),
        ([], "--listen"),
    ],
)
def test_serve_says_what_means_nothing(
    own_places: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
):
    assert cli.main(["pool", "serve", *arguments]) == 2
    assert says in capsys.readouterr().err

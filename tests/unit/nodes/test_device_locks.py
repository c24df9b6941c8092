"""Device locks between real processes: of one user, of two users, killed processes, and hostile lock files.

The promises hold for both places of locks: names in the kernel, and files in a directory.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sgpu_magic.config import Settings
from sgpu_magic.errors import CapacityError
from sgpu_magic.nodes.device_locks import DeviceLocks, DevicesLocked
from sgpu_magic.nodes.lock_obstacle import Obstacle

ROOT = Path(__file__).parents[3]
# kernel names are machine-wide: these belong to this test process alone
OWN = f"{os.getpid():08x}"
FIRST = f"GPU-{OWN}-0000-0000-0000-000000000001"
SECOND = f"GPU-{OWN}-0000-0000-0000-000000000002"
SLICE = f"MIG-{OWN}-0000-0000-0000-000000000003"
OTHER_UID = 65534

needs_root = pytest.mark.needs_root
skip_for_users = pytest.mark.skipif(os.getuid() != 0, reason="another user's process needs root")

# Locks the devices in its arguments, prints the result, and runs until the end of its input.
HOLD = """
import os, sys
from pathlib import Path
directory, uid, *uuids = sys.argv[1:]
from sgpu_magic.nodes.device_locks import DeviceLocks, DevicesLocked
os.umask(0o077)
if int(uid):
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
try:
    locks = DeviceLocks(Path(directory) if directory else None)
    locks.acquire(uuids)
    print("held", flush=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(directory: Path | None, *uuids: str, uid: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that requests the locks: (process, its first line of output)."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory or ""), str(uid), *uuids],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The folder of lock files; other users can access it."""
    if os.getuid() == 0:
        for parent in (tmp_path, *tmp_path.parents):
            if parent.name.startswith(("pytest-", "popen-", "test_")):
                parent.chmod(0o755)
    return tmp_path / "locks"


@pytest.fixture(params=["names", "files"])
def where(request: pytest.FixtureRequest, directory: Path) -> Path | None:
    """The location of the locks: None for names in the kernel."""
    return directory if request.param == "files" else None


@pytest.fixture
def locks(where: Path | None) -> Iterator[DeviceLocks]:
    with closing(DeviceLocks(where)) as made:
        yield made


@pytest.fixture
def files(directory: Path) -> Iterator[DeviceLocks]:
    with closing(DeviceLocks(directory)) as made:
        yield made


def holders(locks: DeviceLocks, *uuids: str) -> dict[str, str]:
    """The holder of each device."""
    found = locks.obstacles(uuids)
    assert not any(obstacle.problem for obstacle in found.values())
    return {uuid: obstacle.holder for uuid, obstacle in found.items()}


def me() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_two_processes_never_hold_one_device(where: Path | None, locks: DeviceLocks) -> None:
    with holder(where, FIRST) as (other, output):
        assert output == "held"
        with pytest.raises(DevicesLocked) as caught:
            locks.acquire([FIRST])
        assert set(caught.value.obstacles) == {FIRST}
        assert caught.value.obstacles[FIRST].holder.startswith(f"process {other.pid} of user {me()}")
        assert f"{FIRST} is held by process {other.pid}" in caught.value.message
        assert isinstance(caught.value, CapacityError)
        locks.acquire([SECOND])
    locks.acquire([FIRST])
    assert locks.held == {FIRST, SECOND}


def test_all_or_nothing(where: Path | None, locks: DeviceLocks) -> None:
    with holder(where, SECOND, SLICE):
        locks.obstacles([SECOND, SLICE])
        before = descriptors()
        with pytest.raises(DevicesLocked) as caught:
            locks.acquire([FIRST, SECOND, SLICE])
        assert set(caught.value.obstacles) == {SECOND, SLICE}
        assert locks.held == frozenset()
        assert descriptors() == before
        with holder(where, FIRST) as (_, output):
            assert output == "held"


def test_a_killed_holder_leaves_nothing_locked(where: Path | None, locks: DeviceLocks) -> None:
    with holder(where, FIRST) as (other, output):
        assert output == "held"
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert locks.obstacles([FIRST]) == {}
        locks.acquire([FIRST])


def test_release_lets_the_next_in(where: Path | None, locks: DeviceLocks) -> None:
    locks.acquire([FIRST, SECOND])
    locks.release([FIRST, SLICE])
    with holder(where, FIRST) as (_, output):
        assert output == "held"
    with holder(where, SECOND) as (_, output):
        assert output.startswith(f"DevicesLocked: {SECOND} is held by process {os.getpid()} of user {me()}")


def test_close_releases_everything_and_keeps_no_descriptor(where: Path | None) -> None:
    before = descriptors()
    locks = DeviceLocks(where)
    locks.acquire([FIRST, SECOND])
    locks.close()
    locks.close()
    assert descriptors() == before
    with holder(where, FIRST, SECOND) as (_, output):
        assert output == "held"


def test_probing_tells_who_and_keeps_nothing(where: Path | None, locks: DeviceLocks) -> None:
    locks.acquire([SECOND])
    assert locks.obstacles([FIRST, SECOND, SLICE, "SIM-a10-0"]) == {}
    with holder(where, FIRST) as (other, _):
        # one connection to each holder, whose end shows that the lock was released
        holders(locks, FIRST, SECOND, SLICE)
        before = descriptors()
        for _ in range(3):
            found = holders(locks, FIRST, SECOND, SLICE)
            assert list(found) == [FIRST]
            assert found[FIRST].startswith(f"process {other.pid} of user {me()}")
        assert descriptors() == before
    assert locks.obstacles([FIRST]) == {}


def test_probing_never_refuses_somebody_else_a_free_device(where: Path | None, locks: DeviceLocks) -> None:
    locks.acquire([FIRST])
    locks.release([FIRST])
    code = """
import sys
from pathlib import Path
from sgpu_magic.nodes.device_locks import DeviceLocks
locks = DeviceLocks(Path(sys.argv[1]) if sys.argv[1] else None)
print("probing", flush=True)
while True:
    locks.obstacles([sys.argv[2]])
"""
    command = [sys.executable, "-c", code, str(where or ""), FIRST]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as prober:
        try:
            assert prober.stdout is not None
            assert prober.stdout.readline() == "probing\n"
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                locks.acquire([FIRST])
                locks.release([FIRST])
        finally:
            prober.kill()


def test_a_started_program_does_not_keep_the_lock(where: Path | None, locks: DeviceLocks) -> None:
    locks.acquire([FIRST])
    with subprocess.Popen(["sleep", "300"], close_fds=False) as child:
        locks.release([FIRST])
        try:
            with holder(where, FIRST) as (_, output):
                assert output == "held"
        finally:
            child.kill()


def test_simulated_devices_are_each_pools_own(directory: Path, files: DeviceLocks) -> None:
    files.acquire(["SIM-a10-0", "SIM-nvidia-gb10-0"])
    with holder(directory, "SIM-a10-0") as (_, output):
        assert output == "held"
    assert not directory.exists()


def test_a_device_is_locked_once(locks: DeviceLocks) -> None:
    locks.acquire([FIRST])
    with pytest.raises(ValueError, match="already locked here"):
        locks.acquire([SECOND, FIRST])
    with pytest.raises(ValueError, match="already locked here"):
        locks.acquire([SECOND, SECOND])
    assert locks.held == {FIRST}


@pytest.mark.parametrize(
    "uuid", ["", "GPU-", "../GPU-1", "GPU-../../etc/passwd", "GPU-1/../2", "GPU-1\n", "GPU-1\0", "0"]
)
def test_no_path_is_made_of_what_is_no_uuid(directory: Path, files: DeviceLocks, uuid: str) -> None:
    for call in (files.acquire, files.obstacles):
        with pytest.raises(ValueError, match="is not a device UUID"):
            call([FIRST, uuid])
    assert files.held == frozenset()
    assert not directory.exists()


def test_modes_are_for_all_users_whatever_the_umask(directory: Path) -> None:
    with holder(directory, FIRST) as (_, output):
        assert output == "held"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o1777
        assert stat.S_IMODE((directory / f"{FIRST}.lock").stat().st_mode) == 0o666


def test_what_somebody_wrote_into_a_file_is_not_repeated(directory: Path, files: DeviceLocks) -> None:
    with holder(directory, FIRST):
        for text in ("", "\x1b[31mred", "1 2", "1 <script> \x1b[0m", "x" * 5000):
            (directory / f"{FIRST}.lock").write_text(text)
            assert holders(files, FIRST) == {FIRST: "another process"}


# ---------------------------------------------------------------- hostile lock files


@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory", "hard link"])
def test_a_trap_in_the_place_of_a_lock_is_refused_and_left_alone(
    directory: Path, files: DeviceLocks, tmp_path: Path, kind: str
) -> None:
    assert files.obstacles([SECOND]) == {}
    victim = tmp_path / "victim"
    victim.write_text("precious")
    context = directory / f"{SECOND}.lock"
    match kind:
        case "symlink":
            context.symlink_to(victim)
        case "dangling":
            context.symlink_to(tmp_path / "made")
        case "fifo":
            os.mkfifo(context)
        case "directory":
            context.mkdir()
        case _:
            os.link(victim, context)
    before = descriptors()
    with pytest.raises(DevicesLocked) as caught:
        files.acquire([FIRST, SECOND])
    for found in (caught.value.obstacles, files.obstacles([FIRST, SECOND, SLICE])):
        # only that device is affected
        assert list(found) == [SECOND]
        assert f"{context} is not a regular file with a single link" in found[SECOND].problem
        assert "Have its owner or root remove it." in found[SECOND].problem
    assert victim.read_text() == "precious"
    assert not (tmp_path / "made").exists()
    assert descriptors() == before
    files.acquire([FIRST])
    with holder(directory, SLICE) as (_, output):
        assert output == "held"


def test_a_lock_can_be_used_again_when_its_trap_is_gone(
    directory: Path, files: DeviceLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgpu_magic.nodes.lock_files._TRIED_AGAIN_S", 0.0)
    assert files.obstacles([FIRST]) == {}
    (directory / f"{FIRST}.lock").symlink_to("/etc/passwd")
    assert files.obstacles([FIRST])
    (directory / f"{FIRST}.lock").unlink()
    assert files.obstacles([FIRST]) == {}
    files.acquire([FIRST])


def test_a_file_removed_under_the_holder_is_made_anew(directory: Path, files: DeviceLocks) -> None:
    files.acquire([FIRST])
    (directory / f"{FIRST}.lock").unlink()
    files.release([FIRST])
    files.acquire([FIRST])
    with holder(directory, FIRST) as (_, output):
        assert output.startswith("DevicesLocked")


@pytest.mark.parametrize("kind", ["file", "symlink", "not sticky"])
def test_a_place_that_is_no_shared_directory_is_refused_with_a_remedy(
    directory: Path, tmp_path: Path, kind: str
) -> None:
    before = descriptors()
    match kind:
        case "file":
            directory.write_text("")
        case "symlink":
            (tmp_path / "elsewhere").mkdir()
            directory.symlink_to(tmp_path / "elsewhere")
        case _:
            directory.mkdir()
            (directory / "something").write_text("")
            directory.chmod(0o777)
    with closing(DeviceLocks(directory)) as locks:
        # every device is reported as unavailable, with the reason, and the pool keeps running
        for found in (locks.obstacles([FIRST, SECOND]), locks.obstacles([FIRST, SECOND])):
            assert list(found) == [FIRST, SECOND]
            assert all("SGPU_LOCK_DIR" in obstacle.problem for obstacle in found.values())
        with pytest.raises(DevicesLocked, match="SGPU_LOCK_DIR"):
            locks.acquire([FIRST])
        locks.acquire(["SIM-a10-0"])
    assert descriptors() == before


def test_a_private_directory_in_use_keeps_its_mode(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / "something").write_text("")
    with closing(DeviceLocks(directory)) as locks:
        locks.acquire([FIRST])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


# ---------------------------------------------------------------- two users


@needs_root
@skip_for_users
def test_two_users_share_the_directory_in_either_order(directory: Path) -> None:
    name = pwd.getpwuid(OTHER_UID).pw_name
    with closing(DeviceLocks(directory)) as locks:
        assert locks.obstacles([FIRST]) == {}
        with holder(directory, FIRST, uid=OTHER_UID) as (other, output):
            assert output == "held"
            assert (directory / f"{FIRST}.lock").stat().st_uid == OTHER_UID
            assert holders(locks, FIRST)[FIRST].startswith(f"process {other.pid} of user {name} on host ")
            with pytest.raises(DevicesLocked, match=f"of user {name}"):
                locks.acquire([FIRST])
        locks.acquire([FIRST, SECOND])  # FIRST's file belongs to the other user
        with holder(directory, SECOND, uid=OTHER_UID) as (_, output):
            assert output.startswith(f"DevicesLocked: {SECOND} is held by process {os.getpid()} of user {me()}")
        locks.release([SECOND])
        with holder(directory, SECOND, uid=OTHER_UID) as (_, output):
            assert output == "held"


@needs_root
@skip_for_users
def test_protected_regular_files_do_not_lock_the_other_user_out(directory: Path) -> None:
    setting = Path("/proc/sys/fs/protected_regular")
    before = setting.read_text()
    try:
        setting.write_text("2")
    except OSError as error:
        pytest.skip(f"fs.protected_regular can't be set here: {error}")
    try:
        with holder(directory, FIRST, uid=OTHER_UID):
            pass
        with closing(DeviceLocks(directory)) as locks:
            locks.acquire([FIRST])
    finally:
        setting.write_text(before)


@needs_root
@skip_for_users
def test_an_unwritable_lock_file_is_said_with_its_remedy(directory: Path) -> None:
    with closing(DeviceLocks(directory)) as locks:
        locks.acquire([FIRST])
        locks.release([FIRST])
        (directory / f"{FIRST}.lock").chmod(0o600)
        with holder(directory, FIRST, uid=OTHER_UID) as (_, output):
            assert output.startswith(
                f"DevicesLocked: the device lock {directory}/{FIRST}.lock can't be opened by this user."
            )


@needs_root
@skip_for_users
def test_a_directory_of_another_user_that_is_not_shared_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    (directory / "something").write_text("")
    with holder(directory, FIRST, uid=OTHER_UID) as (_, output):
        assert output.startswith(
            f"DevicesLocked: the device lock directory {directory} must let this user create files"
        )
        assert "SGPU_LOCK_DIR" in output


@needs_root
@skip_for_users
def test_names_exclude_another_user_who_is_named() -> None:
    name = pwd.getpwuid(OTHER_UID).pw_name
    with closing(DeviceLocks(None)) as locks, holder(None, FIRST, uid=OTHER_UID) as (other, output):
        assert output == "held"
        # the kernel supplies the peer's identity, so it can't be forged
        assert holders(locks, FIRST) == {FIRST: f"process {other.pid} of user {name}"}
        locks.acquire([SECOND])
        with holder(None, SECOND, uid=OTHER_UID) as (_, output):
            assert output.startswith(f"DevicesLocked: {SECOND} is held by process {os.getpid()} of user {me()}")


def test_a_name_that_somebody_occupies_without_a_word_is_that_devices_state() -> None:
    with closing(DeviceLocks(None)) as locks, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
        squatter.bind(f"\0sgpu-magic/device/{FIRST}")
        with pytest.raises(DevicesLocked) as caught:
            locks.acquire([FIRST, SECOND])
        assert caught.value.obstacles == {FIRST: Obstacle(holder="another process")}
        locks.acquire([SECOND])


def test_names_do_not_depend_on_where_temporary_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(DeviceLocks(Settings().lock_path)) as locks:
        locks.acquire([FIRST])
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        with holder(Settings().lock_path, FIRST) as (_, output):
            assert output.startswith("DevicesLocked")


# ---------------------------------------------------------------- handed over


def test_a_lock_lasts_as_long_as_any_copy_of_its_descriptor(where: Path | None):
    first = DeviceLocks(where)
    first.acquire([FIRST, SECOND])
    copies = [os.dup(descriptor) for descriptor in first.descriptors([FIRST, SECOND])]
    # a killed process releases everything without a message
    for descriptor in first.descriptors([FIRST, SECOND]):
        os.close(descriptor)
    with closing(DeviceLocks(where)) as heir:
        with pytest.raises(DevicesLocked):
            heir.acquire([FIRST])
        heir.take_over([FIRST, SECOND], copies)
        assert heir.held == {FIRST, SECOND}
        assert heir.obstacles([FIRST, SECOND]) == {}
        with holder(where, FIRST) as (_, output):
            assert output.startswith("DevicesLocked")
        heir.release([FIRST])
        with holder(where, FIRST) as (_, output):
            assert output == "held"


def test_taking_over_needs_a_descriptor_for_each_device(where: Path | None):
    with closing(DeviceLocks(where)) as locks, pytest.raises(ValueError, match="shorter"):
        locks.take_over([FIRST, SECOND], [])

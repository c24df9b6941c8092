"""The node's cache: whole entries, one filler, a budget, and no removal of entries that a running process uses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import eventually

from sgpu_magic import runtime
from sgpu_magic.config import load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.files.node_cache import NodeCache, node_cache

MB = 1_000_000

# prints each step and waits for a line before the next one
PROCESS = """
import sys
from pathlib import Path
from sgpu_magic.files.node_cache import NodeCache
root, budget, kind, name, size = sys.argv[1:]
cache = NodeCache(Path(root), int(budget))
def fill(path):
    print("filling", flush=True)
    sys.stdin.readline()
    path.write_bytes(b"x" * int(size))
if kind == "folder":
    cache.folder()
    print("has it", flush=True)
    sys.stdin.readline()
else:
    with cache.entry(name, fill) as path:
        print("uses", path.stat().st_size, flush=True)
        sys.stdin.readline()
print("done", flush=True)
"""


class Other:
    """Another process with the cache."""

    def __init__(self, root: Path, budget: int, kind: str, name: str = "-", size: int = 0) -> None:
        command = [sys.executable, "-c", PROCESS, str(root), str(budget), kind, name, str(size)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def waits_for_a_lock(self) -> bool:
        lines = Path("/proc/locks").read_text().splitlines()
        return any("->" in line and str(self.process.pid) in line.split() for line in lines)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., Other]]:
    """Starts processes with a cache in `tmp_path / "cache"`: `other(budget, kind, name, size)`."""
    made: list[Other] = []

    def start(*arguments: object) -> Other:
        made.append(Other(tmp_path / "cache", *arguments))
        return made[-1]

    yield start
    for process in made:
        process.end()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def writes(size: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(b"x" * size)


def never(path: Path) -> None:
    raise AssertionError(f"{path.name} is there already")


def names(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir() if entry.name != ".sgpu"}


def leftovers(root: Path) -> set[str]:
    return {f"{folder}/{entry}" for folder in ("filling", "trash") for entry in os.listdir(root / ".sgpu" / folder)}


# ---------------------------------------------------------------- entries


def test_an_entry_is_filled_once_and_stays(root: Path):
    with NodeCache(root, MB).entry("a", writes(10)) as path:
        assert path == root / "a"
        assert path.read_bytes() == b"x" * 10
    with NodeCache(root, MB).entry("a", never) as path:
        assert path.stat().st_size == 10


def test_a_folder_can_be_an_entry_and_counts_with_all_its_files(root: Path):
    def fill(path: Path) -> None:
        (path / "deep").mkdir(parents=True)
        for number in range(3):
            (path / "deep" / str(number)).write_bytes(b"x" * 300)

    cache = NodeCache(root, 1000)
    with cache.entry("tree", fill) as path:
        assert sorted(file.name for file in (path / "deep").iterdir()) == ["0", "1", "2"]
    with cache.entry("small", writes(90)):
        assert names(root) == {"tree", "small"}
    with cache.entry("too much", writes(20)):
        assert names(root) == {"small", "too much"}
    assert leftovers(root) == set()


def test_what_was_not_used_for_longest_goes_first(root: Path):
    cache = NodeCache(root, 300)
    for name in "abc":
        with cache.entry(name, writes(100)):
            pass
    with cache.entry("a", never):
        pass
    with cache.entry("d", writes(100)):
        pass
    assert names(root) == {"a", "c", "d"}


def test_what_is_in_use_stays_even_above_the_budget(root: Path):
    cache = NodeCache(root, 250)
    with cache.entry("a", writes(100)), cache.entry("b", writes(100)), cache.entry("c", writes(100)):
        assert names(root) == {"a", "b", "c"}
    with cache.entry("d", writes(100)):
        assert names(root) == {"a", "d"}


def test_a_name_is_there_only_when_it_is_whole(root: Path):
    seen: list[set[str]] = []

    def fill(path: Path) -> None:
        with path.open("wb") as file:
            file.write(b"half")
            seen.append(names(root))
            file.write(b" and half")

    with NodeCache(root, MB).entry("a", fill) as path:
        assert path.read_text() == "half and half"
    assert seen == [set()]


def test_a_failed_fill_leaves_nothing_and_the_next_fills(root: Path):
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("the link broke")

    cache = NodeCache(root, MB)
    with pytest.raises(OSError, match="the link broke"), cache.entry("a", fail):
        pass
    assert names(root) == leftovers(root) == set()
    with cache.entry("a", writes(5)) as path:
        assert path.stat().st_size == 5


def test_a_fill_that_writes_elsewhere_is_told(root: Path):
    with pytest.raises(UsageError, match=r"'a' of the node's cache wrote nothing.*exactly that path"):
        NodeCache(root, MB).entry("a", lambda path: path.with_suffix(".npy").touch()).__enter__()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".sgpu", ".hidden", "x" * 201])
def test_a_bad_name_is_told(root: Path, name: str):
    with pytest.raises(UsageError, match="can't be a name in the node's cache"):
        NodeCache(root, MB).entry(name, never).__enter__()


# ---------------------------------------------------------------- several processes


def test_one_fills_and_the_others_wait(other: Callable[..., Other]):
    first = other(MB, "entry", "a", 7)
    assert first.says() == "filling"
    second = other(MB, "entry", "a", 8)
    eventually(second.waits_for_a_lock, what="the second waits for the first")
    first.go_on()
    assert first.says() == "uses 7"
    # while the first still uses it
    assert second.says() == "uses 7"


def test_when_the_filler_is_killed_another_fills(other: Callable[..., Other], root: Path):
    first = other(MB, "entry", "a", 7)
    assert first.says() == "filling"
    (root / ".sgpu" / "filling" / "a").write_bytes(b"half")
    second = other(MB, "entry", "a", 8)
    eventually(second.waits_for_a_lock, what="the second waits for the first")
    first.process.send_signal(signal.SIGKILL)
    assert second.says() == "filling"
    assert not (root / ".sgpu" / "filling" / "a").exists()
    second.go_on()
    assert second.says() == "uses 8"


def test_the_half_of_a_killed_filler_is_swept(other: Callable[..., Other], root: Path):
    killed, alive = other(MB, "entry", "killed", 7), other(MB, "entry", "alive", 7)
    assert killed.says() == alive.says() == "filling"
    for name in ("killed", "alive"):
        (root / ".sgpu" / "filling" / name).mkdir()
    killed.end()
    with NodeCache(root, MB).entry("other", writes(1)):
        assert leftovers(root) == {"filling/alive"}
    assert sorted(os.listdir(root / ".sgpu" / "locks")) == ["alive", "other"]


def test_what_another_process_uses_is_not_taken_out_until_it_is_dead(other: Callable[..., Other], root: Path):
    user = other(250, "entry", "a", 200)
    assert user.says() == "filling"
    user.go_on()
    assert user.says() == "uses 200"
    cache = NodeCache(root, 250)
    with cache.entry("b", writes(100)):
        assert names(root) == {"a", "b"}
    user.end()
    with cache.entry("c", writes(100)):
        assert names(root) == {"b", "c"}


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold one of the cache's locks, as another process would."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_who_waited_for_a_lock_that_is_gone_is_not_a_second_filler(other: Callable[..., Other], root: Path):
    NodeCache(root, MB)
    lock = root / ".sgpu" / "locks" / "a"
    with held(lock):
        first = other(MB, "entry", "a", 7)
        eventually(first.waits_for_a_lock, what="it waits for the lock")
        lock.unlink()
    assert first.says() == "filling"
    second = other(MB, "entry", "a", 8)
    eventually(second.waits_for_a_lock, what="the second waits for the first")


def test_who_waited_for_a_lock_that_is_gone_uses_the_new_one(other: Callable[..., Other], root: Path):
    cache = NodeCache(root, 100)
    with cache.entry("a", writes(100)):
        pass
    lock = root / ".sgpu" / "locks" / "a"
    with held(lock):
        user = other(100, "entry", "a", 7)
        eventually(user.waits_for_a_lock, what="it waits for the lock")
        lock.unlink()
        lock.touch()
    assert user.says() == "uses 100"
    with cache.entry("b", writes(100)):
        assert names(root) == {"a", "b"}


def test_one_makes_room_at_a_time(other: Callable[..., Other], root: Path):
    NodeCache(root, MB)
    with held(root / ".sgpu" / "room"):
        first = other(MB, "entry", "a", 7)
        assert first.says() == "filling"
        first.go_on()
        eventually(first.waits_for_a_lock, what="it waits for its turn")
        assert names(root) == set()
    assert first.says() == "uses 7"


def test_many_processes_at_once_keep_the_budget(root: Path):
    """Each walks over all entries; the total stays within the budget plus the entries in use."""
    walker = (
        "import sys, random\nfrom pathlib import Path\nfrom sgpu_magic.files.node_cache import NodeCache\n"
        "cache = NodeCache(Path(sys.argv[1]), 80_000)\n"
        "order = list(range(40)); random.Random(int(sys.argv[2])).shuffle(order)\n"
        "for number in order:\n"
        "    with cache.entry(f'{number:02}', lambda path: path.write_bytes(bytes([number]) * 10_000)) as path:\n"
        "        assert path.read_bytes() == bytes([number]) * 10_000\n"
    )
    command = [sys.executable, "-c", walker, str(root)]
    walkers = [subprocess.Popen([*command, str(seed)], stderr=subprocess.PIPE, text=True) for seed in range(4)]
    most = 0
    watching = threading.Event()

    def watch() -> None:
        nonlocal most
        while not watching.is_set():
            if root.is_dir():
                most = max(most, len(names(root)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for process in walkers:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
    finally:
        watching.set()
        watcher.join()
    assert 8 <= most <= 8 + 4
    NodeCache(root, 80_000).folder()
    assert len(names(root)) <= 8
    assert leftovers(root) == set()


# ---------------------------------------------------------------- the folder itself


def test_the_folder_is_the_users_alone(root: Path):
    before = os.umask(0)
    try:
        assert NodeCache(root, MB).folder() == root
    finally:
        os.umask(before)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"the node's cache can't be at .*SGPU_CACHE_DIR"):
        NodeCache(tmp_path / "link", MB)


def test_what_was_put_there_by_hand_is_taken_out_when_nobody_has_the_folder(other: Callable[..., Other], root: Path):
    user = other(100, "folder")
    assert user.says() == "has it"
    (root / "mine").mkdir()
    (root / "mine" / "data").write_bytes(b"x" * 200)
    second = other(100, "folder")
    assert second.says() == "has it"
    assert names(root) == {"mine"}
    with NodeCache(root, 100).entry("a", writes(10)):
        assert names(root) == {"mine", "a"}
    user.end()
    third = other(100, "folder")
    assert third.says() == "has it"
    assert names(root) == {"mine"}
    second.end()
    third.end()
    fourth = other(100, "folder")
    assert fourth.says() == "has it"
    assert names(root) == set()


def test_what_was_put_there_by_hand_can_become_an_entry(root: Path):
    NodeCache(root, MB)
    (root / "mine").mkdir()
    (root / "mine" / "data").write_bytes(b"x" * 200)
    cache = NodeCache(root, 250)
    with cache.entry("mine", never):
        pass
    with cache.entry("a", writes(100)):
        assert names(root) == {"a"}


# ---------------------------------------------------------------- where it is


def test_the_settings_say_where_it_is_and_how_large(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SGPU_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("SGPU_CACHE_DIR", str(root))
    monkeypatch.setenv("SGPU_CACHE_BYTES", "100")
    for name in ("a", "b"):
        with runtime.cached(name, writes(100)) as path:
            assert path == root / name
    assert names(root) == {"b"}


def test_by_default_it_is_in_the_platforms_cache_by_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = load_settings({"SGPU_CONFIG": str(tmp_path / "none.toml")})
    with node_cache(settings).entry("a", writes(1)) as path:
        assert path.parent.parent == tmp_path / "sgpu-magic"

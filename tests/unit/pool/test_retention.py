"""What a state directory keeps: ended runs within a budget, uploads and growing logs. The directories are real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpu_magic.config import Settings
from sgpu_magic.pool import retention as retention_module
from sgpu_magic.pool.retention import (
    JUST_ENDED_S,
    Retention,
    RunOnDisk,
    Why,
    cap_log,
    choose_removals,
    measure,
    remove_directory,
)

NOW = 1_800_000_000.0
NOBODY = 65534 if os.getuid() == 0 else os.getuid()
HOUR, DAY = 3600.0, 24 * 3600.0
PLENTY = Settings(keep_runs=500, keep_days=30, keep_bytes=20_000_000_000)


def settings(keep_runs: int = 500, keep_days: float = 30.0, keep_bytes: int = 20_000_000_000) -> Settings:
    return Settings(keep_runs=keep_runs, keep_days=keep_days, keep_bytes=keep_bytes)


def runs(*ages_and_sizes: tuple[float, int]) -> list[RunOnDisk]:
    """Runs 00000000, 00000001 ... that ended this many seconds ago."""
    return [RunOnDisk(f"{at:08x}", NOW - age, size) for at, (age, size) in enumerate(ages_and_sizes)]


def removed(found: list[RunOnDisk], budget: Settings) -> list[tuple[int, Why]]:
    return [(int(run_id, 16), why) for run_id, why in choose_removals(found, budget, NOW)]


# ---------------------------------------------------------------- the decision


def test_within_the_budget_nothing_goes():
    assert removed(runs((HOUR, 10), (29 * DAY, 10), (2 * HOUR, 10)), PLENTY) == []


def test_by_age():
    found = runs((31 * DAY, 1), (29 * DAY, 1), (90 * DAY, 1))
    assert removed(found, PLENTY) == [(2, Why.AGE), (0, Why.AGE)]


def test_by_count_the_oldest_go_first():
    found = runs((3 * HOUR, 1), (1 * HOUR, 1), (4 * HOUR, 1), (2 * HOUR, 1))
    assert removed(found, settings(keep_runs=2)) == [(2, Why.COUNT), (0, Why.COUNT)]


def test_cells_of_sessions_do_not_push_runs_out():
    cells = [RunOnDisk(f"{number:08x}", NOW - HOUR - number, 1, is_cell=True) for number in range(100, 104)]
    found = [*runs((5 * HOUR, 1), (6 * HOUR, 1), (7 * HOUR, 1)), *cells]
    gone = choose_removals(found, settings(keep_runs=2), NOW)
    assert gone == [("00000002", Why.COUNT), ("00000067", Why.COUNT), ("00000066", Why.COUNT)]
    # equal in age and bytes
    assert len(choose_removals(found, settings(keep_bytes=3), NOW)) == 4


def test_by_bytes_no_older_run_outlives_a_newer_one():
    # the third does not fit; the fourth would, but it is older
    found = runs((1 * HOUR, 60), (2 * HOUR, 40), (3 * HOUR, 1), (4 * HOUR, 0))
    assert removed(found, settings(keep_bytes=100)) == [(3, Why.BYTES), (2, Why.BYTES)]


def test_newest_run_may_be_larger_than_the_budget():
    found = runs((HOUR, 1000), (2 * HOUR, 1))
    assert removed(found, settings(keep_bytes=100)) == [(1, Why.BYTES)]
    assert removed(found, settings(keep_bytes=0)) == [(1, Why.BYTES)]


def test_run_that_has_just_ended_stays_but_counts():
    found = runs((1, 80), (JUST_ENDED_S - 1, 80), (JUST_ENDED_S + 1, 80))
    assert removed(found, settings(keep_bytes=100)) == [(2, Why.BYTES)]
    assert removed(found, settings(keep_runs=0)) == [(2, Why.COUNT)]
    assert removed(runs((2, 80)), settings(keep_days=0)) == []


def test_time_in_the_future_is_the_newest():
    found = [RunOnDisk("0000000f", NOW + 5 * DAY, 1), *runs((HOUR, 1))]
    assert removed(found, settings(keep_runs=1)) == [(0, Why.COUNT)]


@given(
    st.lists(st.tuples(st.floats(0, 60 * DAY), st.integers(0, 50)), max_size=30),
    st.integers(0, 12),
    st.integers(0, 300),
)
def test_what_stays_is_newer_than_what_goes_and_fits(
    ages_and_sizes: list[tuple[float, int]], keep_runs: int, keep_bytes: int
):
    found = runs(*ages_and_sizes)
    budget = settings(keep_runs, 30, keep_bytes)
    gone = {run_id for run_id, _ in choose_removals(found, budget, NOW)}
    stay = [run for run in found if run.run_id not in gone]
    assert not {run.run_id for run in found if NOW - run.ended_at < JUST_ENDED_S} & gone
    assert all(run.ended_at <= kept.ended_at for run in found if run.run_id in gone for kept in stay)
    settled = [run for run in stay if NOW - run.ended_at >= JUST_ENDED_S]
    if settled:
        assert len(stay) <= keep_runs
        assert sum(run.bytes for run in stay) <= keep_bytes or len(stay) == 1
        assert all(NOW - run.ended_at <= 30 * DAY for run in settled)


# ---------------------------------------------------------------- the disk


def make_run(runs_path: Path, run_id: str, age_s: float, size: int = 5000) -> Path:
    """A run's directory, last written `age_s` ago."""
    directory = runs_path / run_id
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "run.json").write_bytes(b"{}")
    (directory / "rank-0.log").write_bytes(b"x" * size)
    (directory / "checkpoints" / "step-1.pt").write_bytes(b"x" * size)
    (directory / "cell.py").symlink_to("/etc")
    changed = time.time() - age_s
    for path in (*directory.rglob("*"), directory):
        os.utime(path, (changed, changed), follow_symlinks=False)
    return directory


def test_measure_counts_what_the_disk_holds(tmp_path: Path):
    directory = make_run(tmp_path, "00000001", 1000)
    alone, changed = measure(directory)
    assert 10_000 <= alone < 60_000, "both files, not what the link points to"
    assert changed == pytest.approx(time.time() - 1000, abs=30)
    os.link(directory / "rank-0.log", directory / "checkpoints" / "the-same")
    (directory / "rank-0.log").write_bytes(b"x" * 50_000)
    alone += 50_000 - 5000
    with open(directory / "sparse", "wb") as file:
        file.truncate(1 << 30)
    assert measure(directory)[0] <= alone + 8192, "neither the second name nor the hole takes room"
    grown = make_run(tmp_path, "00000002", 1000)
    os.utime(grown / "rank-0.log", (time.time() - 500,) * 2)
    assert measure(grown)[1] == pytest.approx(time.time() - 500, abs=30), "a file that grew tells when"
    assert measure(tmp_path / "gone") == (0, 0.0)


def test_removal_hides_before_it_deletes(tmp_path: Path):
    make_run(tmp_path, "00000001", 0)
    seen: list[list[str]] = []

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("os.remove", "os.rmdir") and watching:
            seen.append(os.listdir(tmp_path))

    watching = True
    sys.addaudithook(look)
    assert remove_directory(tmp_path, "00000001")
    watching = False
    assert seen
    assert all("00000001" not in names for names in seen)
    assert os.listdir(tmp_path) == []
    assert not remove_directory(tmp_path, "00000001"), "one that is gone is no error"
    assert os.path.isdir("/etc")


def test_directories_that_the_users_code_closed_go_too():
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / "00000001" / "checkpoints" / "deep"
        inner.mkdir(parents=True)
        (inner / "step-1.pt").write_bytes(b"x")
        for path in (inner, inner.parent, inner.parent.parent, Path(folder)):
            os.chown(path, NOBODY, -1)
        inner.chmod(0)
        inner.parent.chmod(0o555)
        inner.parent.parent.chmod(0o500)
        pid = os.fork()
        if pid == 0:
            # root is not restricted by permissions
            os.setresuid(NOBODY, NOBODY, NOBODY)
            done = remove_directory(Path(folder), "00000001")
            os._exit(0 if done and os.listdir(folder) == [] else 1)
        assert os.waitpid(pid, 0)[1] == 0, os.listdir(folder)


def test_log_begins_anew_for_a_writer_that_has_it_open(tmp_path: Path):
    log = tmp_path / "pool.log"
    with open(log, "ab", buffering=0) as writer:
        writer.write(b"".join(b"line %06d\n" % number for number in range(200_000)))
        cap_log(log, 3_000_000)
        assert log.stat().st_size == 2_400_000, "it was within its size"
        cap_log(log, 2_000_000)
        assert log.stat().st_size == 0
        writer.write(b"next\n")
    assert log.read_bytes() == b"next\n"
    old = (tmp_path / "pool.log.old").read_bytes()
    assert len(old) == 1_000_000
    assert old.endswith(b"line 199999\n")
    assert sorted(os.listdir(tmp_path)) == ["pool.log", "pool.log.old"]
    cap_log(tmp_path / "none.log", 1)


# ---------------------------------------------------------------- in a pool's loop


class Place:
    """A state directory, and which of its runs are live."""

    def __init__(self, path: Path, **budget: float) -> None:
        self.settings = Settings(state_dir=str(path), **budget)
        self.live: set[str] = set()
        self.asked_in: set[int] = set()
        self.runs = self.settings.runs_path
        for folder in (self.runs, path / "uploads", path / "logs"):
            folder.mkdir(mode=0o700)

    def is_live(self, run_id: str) -> bool:
        self.asked_in.add(threading.get_ident())
        return run_id in self.live

    def left(self) -> list[str]:
        return sorted(os.listdir(self.runs))

    @contextlib.contextmanager
    def retention(self, **options: Any) -> Iterator[Retention]:
        made = Retention(self.settings, self.is_live, **options)
        try:
            yield made
        finally:
            made.close()


async def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, f"not within 10 s: {what}"
        await asyncio.sleep(0.01)


def test_oldest_ended_runs_go_and_live_ones_stay(tmp_path: Path):
    context = Place(tmp_path, keep_runs=2)
    for number in range(6):
        make_run(context.runs, f"{number:08x}", (10 - number) * HOUR)
    context.live = {"00000000", "00000005"}
    (context.runs / "notes").mkdir()
    (context.runs / ".removing-000000ff").mkdir()

    async def pool() -> None:
        with context.retention(delay_s=0) as retention:
            retention.schedule()
            await until(lambda: len(context.left()) == 5, f"two runs are gone; there are {context.left()}")

    asyncio.run(pool())
    # other files are left alone; a removal that an earlier pool began is completed
    assert context.left() == ["00000000", "00000003", "00000004", "00000005", "notes"]
    assert context.asked_in == {threading.get_ident()}, "the ledger belongs to the pool's own thread"


def test_a_cleanup_measures_what_is_new_and_not_every_run_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    context = Place(tmp_path, keep_runs=9)
    for number in range(8):
        make_run(context.runs, f"{number:08x}", (10 - number) * HOUR)
    measured: list[str] = []
    cleanups: list[int] = []

    def counted(directory: Path) -> tuple[int, float]:
        measured.append(directory.name)
        return measure(directory)

    monkeypatch.setattr(retention_module, "measure", counted)

    async def pool() -> None:
        async def look() -> list[str]:
            measured.clear()
            before = len(cleanups)
            retention.schedule()
            await until(lambda: len(cleanups) > before, "a cleanup")
            return sorted(measured)

        with context.retention(delay_s=0, removed=lambda: cleanups.append(1)) as retention:
            assert len(await look()) == 8
            make_run(context.runs, "0000000a", 1)
            (context.runs / "00000003" / "added").write_bytes(b"x" * 100)
            assert await look() == ["00000003", "0000000a"]
            # recently changed directories may change again
            assert await look() == ["00000003", "0000000a"]
            # the budget still applies to all runs
            make_run(context.runs, "0000000b", HOUR)
            assert await look() == ["00000003", "0000000a", "0000000b"]
            assert "00000000" not in context.left()
            assert len(context.left()) == 9

    asyncio.run(pool())


def test_calls_are_one_look_and_those_during_it_one_more(tmp_path: Path):
    context = Place(tmp_path)
    make_run(context.runs, "00000001", HOUR)
    looks: list[str] = []

    async def pool() -> None:
        def is_live(run_id: str) -> bool:
            looks.append(run_id)
            if len(looks) == 1:
                call()
            return False

        def call() -> None:
            for _ in range(5):
                retention.schedule()

        retention = Retention(context.settings, is_live, delay_s=0.05)
        call()
        await until(lambda: len(looks) == 2, "the second look")
        call()
        await until(lambda: len(looks) > 2, "the third look")
        retention.close()

    asyncio.run(pool())
    assert len(looks) == 3


def test_a_closed_one_does_nothing_more(tmp_path: Path):
    context = Place(tmp_path, keep_runs=0)
    make_run(context.runs, "00000001", HOUR)

    looked: list[str] = []

    async def pool() -> None:
        with context.retention(delay_s=0) as retention:
            retention.schedule()
        retention.schedule()
        another = Retention(Settings(state_dir=str(tmp_path)), lambda run_id: bool(looked.append(run_id)), delay_s=0)
        another.schedule()
        await until(lambda: looked, "another one has looked, which was asked later")
        another.close()

    asyncio.run(pool())
    assert context.left() == ["00000001"]
    assert not context.asked_in


def test_payload_files_of_dead_kernels_go(tmp_path: Path):
    context = Place(tmp_path)
    context.live = {"00000002"}
    uploads = tmp_path / "uploads"
    for name, age in (
        ("00000001.bin", 2 * HOUR),
        ("00000002.bin", 2 * HOUR),
        ("00000003.bin", HOUR / 2),
        (".00000004.bin.4711", 2 * HOUR),
    ):
        (uploads / name).write_bytes(b"x")
        os.utime(uploads / name, (time.time() - age,) * 2)

    async def pool() -> None:
        with context.retention(delay_s=0) as retention:
            retention.schedule()
            await until(lambda: len(os.listdir(uploads)) == 2, "two files are gone")

    asyncio.run(pool())
    # one run still waits in the queue, the other is just being submitted
    assert sorted(os.listdir(uploads)) == ["00000002.bin", "00000003.bin"]


def test_logs_of_the_pool_and_of_zygotes_do_not_grow_for_ever(tmp_path: Path):
    context = Place(tmp_path, keep_days=30)
    for name in ("pool.log", "logs/zygote-aa.log"):
        with open(tmp_path / name, "wb") as log:
            log.truncate(10_000_001)
    (tmp_path / "logs" / "zygote-bb.log").write_bytes(b"x")
    (tmp_path / "logs" / "zygote-cc.log").write_bytes(b"x")
    os.utime(tmp_path / "logs" / "zygote-cc.log", (time.time() - 31 * DAY,) * 2)

    async def pool() -> None:
        with context.retention(delay_s=0) as retention:
            retention.schedule()
            await until(lambda: not (tmp_path / "logs" / "zygote-cc.log").exists(), "the log of long ago is gone")

    asyncio.run(pool())
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "pool.log", *(tmp_path / "logs").iterdir())}
    assert sizes == {"pool.log": 0, "zygote-aa.log": 0, "zygote-aa.log.old": 1_000_000, "zygote-bb.log": 1}

"""The ledger: written rows are read back, and damage costs history but never the pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgpu_magic.errors import PoolError
from sgpu_magic.pool.ledger import Ledger, in_one_line
from sgpu_magic.pool.ledger_database import SCHEMA_VERSION
from sgpu_magic.wire.base import FailureKind, RunKind, RunState
from sgpu_magic.wire.devices import Lease, Placement
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import CellSource, Owner, RunSpec


def spec(
    run_id: str,
    *,
    name: str = "cell",
    ranks: int = 2,
    at: float = 1.0,
    kind: RunKind = RunKind.CELL,
    session: str = "",
    kernel: str = "",
) -> RunSpec:
    return RunSpec(
        run_id=run_id,
        name=name,
        cell=CellSource(body="1 + 1"),
        placement=Placement(ranks=ranks),
        outputs=(),
        owner=Owner(pid=4711, host="here", user="me", notebook="train.ipynb", kernel=kernel),
        timeout_s=60.0,
        submitted_at=at,
        kind=kind,
        session=session,
    )


LOST = Failure(kind=FailureKind.NODE_LOST, message="the node was lost\nsince yesterday", rank=1)
RAISED = Failure(
    kind=FailureKind.USER_CODE, message="NaN in batch 118\nand more", rank=1, type_name="builtins.ValueError"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.sqlite3"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    book = Ledger(path)
    yield book
    book.close()


def test_a_run_is_read_as_it_was_written(ledger: Ledger) -> None:
    ledger.record(spec("7f3a0001", name="train — ünï", ranks=4, at=100.5), RunState.QUEUED)
    lease = Lease(lease_id="00000001", device_type="a10", ranks=4, uuids=("GPU-b", "GPU-a"), simulated=True)
    ledger.update("7f3a0001", state=RunState.STARTING, lease=lease)
    ledger.update("7f3a0001", state=RunState.RUNNING, started_at=101.0)
    ledger.update("7f3a0001", state=RunState.FAILED, ended_at=110.25, failure="rank 1: ValueError: NaN")
    assert ledger.summary("7f3a0001") == RunSummary(
        run_id="7f3a0001",
        name="train — ünï",
        ranks=4,
        device_type="a10",
        simulated=True,
        state=RunState.FAILED,
        submitted_at=100.5,
        started_at=101.0,
        ended_at=110.25,
        failure="rank 1: ValueError: NaN",
        uuids=("GPU-b", "GPU-a"),
        owner_pid=4711,
        notebook="train.ipynb",
        user="me",
    )
    assert ledger.problem == ""


def test_sessions_and_their_cells_are_told_apart(ledger: Ledger) -> None:
    ledger.record(spec("5e550000", kind=RunKind.SESSION, kernel="kernel-7"), RunState.RUNNING)
    ledger.record(spec("0000000a", kind=RunKind.PUSH, session="5e550000"), RunState.RUNNING)
    cell, session = ledger.recent(2)
    assert (session.kind, session.session, session.kernel) == (RunKind.SESSION, "", "kernel-7")
    assert (cell.kind, cell.session, cell.kernel) == (RunKind.PUSH, "5e550000", "")


@pytest.mark.parametrize(
    ("ended", "line"),
    [
        (RunEnded(state=RunState.SUCCEEDED), ""),
        (RunEnded(state=RunState.CANCELLED, reason="cancelled by me"), "cancelled by me"),
        (RunEnded(state=RunState.FAILED, failure=LOST), "the node was lost"),
        (RunEnded(state=RunState.FAILED, failure=RAISED), "rank 1: ValueError: NaN in batch 118"),
    ],
)
def test_an_end_is_told_in_one_line(ended: RunEnded, line: str) -> None:
    assert in_one_line(ended) == line


def test_a_new_run_has_what_was_asked_for(ledger: Ledger) -> None:
    ledger.record(spec("0000000a"), RunState.QUEUED)
    summary = ledger.summary("0000000a")
    assert summary is not None
    assert (summary.device_type, summary.state, summary.uuids) == ("any", RunState.QUEUED, ())
    assert (summary.started_at, summary.ended_at, summary.failure) == (None, None, "")


def test_unknown_runs_are_none_and_updates_of_them_do_nothing(ledger: Ledger) -> None:
    ledger.update("ffffffff", state=RunState.RUNNING)
    assert ledger.summary("ffffffff") is None
    assert ledger.recent(10) == []


def test_an_empty_update_changes_nothing(ledger: Ledger) -> None:
    ledger.record(spec("0000000a"), RunState.QUEUED)
    before = ledger.summary("0000000a")
    ledger.update("0000000a")
    assert ledger.summary("0000000a") == before


def test_recent_is_newest_first_and_limited(ledger: Ledger) -> None:
    # equal and even decreasing submission times: rows are ordered by recording
    for number, at in enumerate((5.0, 5.0, 3.0)):
        ledger.record(spec(f"{number:08x}", at=at), RunState.QUEUED)
    assert [summary.run_id for summary in ledger.recent(2)] == ["00000002", "00000001"]
    assert ledger.recent(0) == []
    assert len(ledger.recent(100)) == 3


def test_rows_are_complete_when_there_are_more_than_are_cached(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite3", cached_rows=3)
    ids = [f"{number:08x}" for number in range(6)]
    for run_id in ids:
        ledger.record(spec(run_id), RunState.QUEUED)
    assert [summary.run_id for summary in ledger.summaries(ids[:5])] == ids[:5]
    assert [summary.run_id for summary in ledger.summaries(ids)] == ids
    ledger.close()


def test_find_takes_a_prefix(ledger: Ledger) -> None:
    for run_id in ("7f3a0000", "7f3affff", "7f3b0000", "ffffffff"):
        ledger.record(spec(run_id), RunState.QUEUED)
    assert ledger.find("7f3a") == ["7f3affff", "7f3a0000"]
    assert ledger.find("7f3b0000") == ["7f3b0000"]
    assert ledger.find("f") == ["ffffffff"]
    assert ledger.find("0") == []


@pytest.mark.parametrize("bad", ["", "%", "7F3A", "7f3a/..", "123456789", "7f3a\n", "_"])
def test_what_begins_no_id_finds_nothing(ledger: Ledger, bad: str) -> None:
    ledger.record(spec("7f3a0000"), RunState.QUEUED)
    assert ledger.find(bad) == []


@pytest.mark.parametrize("bad", ["", "7f3a", "../../etc", "7F3A0000"])
def test_ids_are_checked(ledger: Ledger, bad: str) -> None:
    with pytest.raises(ValueError, match="not a run id"):
        ledger.record(spec(bad), RunState.QUEUED)
    with pytest.raises(ValueError, match="not a run id"):
        ledger.update(bad, state=RunState.RUNNING)
    assert ledger.summary(bad) is None


def test_an_id_can_be_recorded_once(ledger: Ledger) -> None:
    ledger.record(spec("0000000a", name="first"), RunState.QUEUED)
    with pytest.raises(ValueError, match="0000000a is in the ledger already"):
        ledger.record(spec("0000000a", name="second"), RunState.QUEUED)
    summary = ledger.summary("0000000a")
    assert summary is not None
    assert summary.name == "first"


def test_unfinished_are_those_in_no_final_state(ledger: Ledger) -> None:
    for number, state in enumerate(RunState):
        ledger.record(spec(f"{number:08x}"), RunState.QUEUED)
        ledger.update(f"{number:08x}", state=state)
    expected = [f"{number:08x}" for number, state in enumerate(RunState) if not state.is_final]
    assert ledger.unfinished() == expected


def test_the_file_and_what_lies_beside_it_are_private(ledger: Ledger, path: Path) -> None:
    ledger.record(spec("0000000a"), RunState.QUEUED)
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "ledger.sqlite3",
        "ledger.sqlite3-shm",
        "ledger.sqlite3-wal",
    ]
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_could_read_is_made_private(path: Path) -> None:
    Ledger(path).close()
    path.chmod(0o644)
    Ledger(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_closing_leaves_one_file_that_opens_again(path: Path) -> None:
    first = Ledger(path)
    first.record(spec("0000000a"), RunState.RUNNING)
    first.close()
    assert [file.name for file in path.parent.iterdir()] == ["ledger.sqlite3"]
    again = Ledger(path)
    assert again.unfinished() == ["0000000a"]
    assert again.problem == ""
    again.close()


def test_a_killed_service_loses_nothing_it_wrote(path: Path) -> None:
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from test_ledger import spec; from sgpu_magic.pool.ledger import Ledger\n"
        "from sgpu_magic.wire.base import RunState\n"
        "book = Ledger(Path(sys.argv[1])); book.record(spec('0000000a'), RunState.QUEUED)\n"
        "book.update('0000000a', state=RunState.RUNNING); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    here = Path(__file__).parent
    environ = {**os.environ, "PYTHONPATH": str(here.parents[2])}
    done = subprocess.run([sys.executable, "-c", code, str(path), str(here)], env=environ, check=False)
    assert done.returncode == -9
    book = Ledger(path)
    assert book.problem == ""
    assert book.unfinished() == ["0000000a"]
    book.close()


# ---------------------------------------------------------------- schema


@pytest.mark.parametrize("change", [-1, 1])
def test_a_ledger_of_another_schema_is_moved_aside(path: Path, change: int) -> None:
    version = SCHEMA_VERSION + change
    other = Ledger(path)
    other.record(spec("0000000a"), RunState.QUEUED)
    other.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"PRAGMA user_version = {version}")
    book = Ledger(path)
    kept = path.with_name(f"ledger.sqlite3.schema-{version}-1")
    assert f"schema {version} of another version of sgpu-magic" in book.problem
    assert str(kept) in book.problem
    assert kept.exists()
    assert book.recent(5) == []
    book.close()


# ---------------------------------------------------------------- damage


def damaged_files(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir() if "damaged" in file.name)


def test_a_file_that_is_no_database_is_moved_aside(path: Path) -> None:
    path.parent.mkdir()
    for number in (1, 2):
        path.write_bytes(b"this is no database, it only has the name of one" * 100)
        book = Ledger(path)
        assert damaged_files(path)[-1] == f"ledger.sqlite3.damaged-{number}"
        assert f"moved to {path}.damaged-{number} and a new one was created" in book.problem
        book.record(spec("0000000a"), RunState.QUEUED)
        assert book.find("0") == ["0000000a"]
        book.close()
    assert path.with_name("ledger.sqlite3.damaged-1").read_bytes().startswith(b"this is no database")


def fill(path: Path, runs: int = 300) -> None:
    book = Ledger(path)
    for number in range(runs):
        book.record(spec(f"{number:08x}", name="n" * 50), RunState.SUCCEEDED)
    book.close()


def spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))


def test_damage_within_a_file_left_by_a_kill_is_seen_at_the_start(path: Path) -> None:
    fill(path)
    spoil(path)
    path.with_name("ledger.sqlite3-wal").touch()  # left behind by a killed service
    book = Ledger(path)
    assert "ledger.sqlite3.damaged-1" in damaged_files(path)
    assert "is damaged" in book.problem
    assert book.recent(5) == []
    book.close()


def test_damage_found_later_does_not_stop_the_pool(path: Path) -> None:
    fill(path)
    spoil(path)
    book = Ledger(path)
    assert book.problem == ""
    book.record(spec("0000000a"), RunState.QUEUED)
    assert "ledger.sqlite3.damaged-1" in damaged_files(path)
    assert "is damaged" in book.problem
    assert book.find("0") == ["0000000a"]
    book.update("0000000a", state=RunState.RUNNING)
    assert book.unfinished() == ["0000000a"]
    book.close()


def test_a_truncated_file_is_moved_aside(path: Path) -> None:
    fill(path)
    os.truncate(path, 5000)
    book = Ledger(path)
    assert book.recent(5) == []
    assert "is damaged" in book.problem
    book.record(spec("0000000a"), RunState.QUEUED)
    assert book.find("0") == ["0000000a"]
    book.close()


def test_a_write_that_fails_is_told_and_does_not_raise(ledger: Ledger, path: Path) -> None:
    ledger.record(spec("0000000a"), RunState.QUEUED)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ledger.update("0000000a", state=RunState.RUNNING)
    assert "can't be used: database is locked" in ledger.problem
    other.execute("ROLLBACK")
    other.close()
    ledger.update("0000000a", state=RunState.RUNNING)
    assert ledger.unfinished() == ["0000000a"]


def test_what_the_database_does_not_take_is_told_at_once_and_written_later(path: Path) -> None:
    async def go() -> None:
        book = Ledger(path, asyncio.get_running_loop())
        book.record(spec("0000000a"), RunState.QUEUED)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        book.update("0000000a", state=RunState.SUCCEEDED, ended_at=7.0)
        book.record(spec("0000000b"), RunState.QUEUED)
        book.update(
            "0000000b", state=RunState.RUNNING, lease=Lease(lease_id="l", device_type="cpu", ranks=2, uuids=("u",))
        )
        reported = [(row.run_id, row.state, row.uuids) for row in book.recent(9)]
        assert reported == [("0000000b", RunState.RUNNING, ("u",)), ("0000000a", RunState.SUCCEEDED, ())]
        assert (book.has("0000000b"), book.find("0000000")) == (True, ["0000000b", "0000000a"])
        assert "can't be used" in book.problem
        other.execute("ROLLBACK")
        other.close()
        with contextlib.closing(sqlite3.connect(path)) as reader:
            query = "SELECT run_id, state FROM runs ORDER BY seq"
            deadline = time.monotonic() + 10
            while reader.execute(query).fetchall() != [("0000000a", "succeeded"), ("0000000b", "running")]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        assert book.problem == ""
        book.close()

    asyncio.run(go())


def test_its_log_of_changes_stays_small(path: Path) -> None:
    book = Ledger(path)
    log = path.with_name("ledger.sqlite3-wal")
    for number in range(1200):
        book.record(spec(f"{number:08x}"), RunState.QUEUED)
    assert log.stat().st_size > 2_000_000
    book.checkpoint()
    assert log.stat().st_size == 0
    assert len(book.recent(5000)) == 1200
    book.close()


def test_its_log_of_changes_stays_small_while_it_is_written(path: Path) -> None:
    book = Ledger(path)
    log = path.with_name("ledger.sqlite3-wal")
    for number in range(1200):
        book.record(spec(f"{number:08x}"), RunState.QUEUED)
    thread = threading.Thread(target=book.checkpoint_in_background)
    thread.start()
    for number in range(1200, 1300):
        book.record(spec(f"{number:08x}"), RunState.QUEUED)
    thread.join()
    # rows written meanwhile may have to wait for the next checkpoint
    book.checkpoint_in_background()
    book.record(spec(f"{1300:08x}"), RunState.QUEUED)
    assert log.stat().st_size <= 1 << 20
    assert (len(book.recent(5000)), book.problem) == (1301, "")
    book.close()
    # the file no longer exists, and is not created
    path.unlink()
    book.checkpoint_in_background()
    assert not path.exists()


def test_a_ledger_that_can_not_be_made_names_the_remedy(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(PoolError, match="SGPU_STATE_DIR"):
        Ledger(path)


def test_a_link_in_its_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PoolError, match=r"ledger\.sqlite3 can't be opened"):
        Ledger(path)
    assert not (tmp_path / "elsewhere").exists()


def test_writes_are_quick(ledger: Ledger) -> None:
    seconds: list[float] = []
    for number in range(200):
        start = time.thread_time()
        ledger.record(spec(f"{number:08x}"), RunState.QUEUED)
        ledger.update(f"{number:08x}", state=RunState.RUNNING, started_at=1.0)
        seconds.append((time.thread_time() - start) / 2)
    # the median of some 0.05 ms of processor time
    assert sorted(seconds)[100] < 1e-3


# ---------------------------------------------------------------- cells in sessions


def rows_in(path: Path) -> dict[str, str]:
    """State by run, as another process reads the file."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return dict(database.execute("SELECT run_id, state FROM runs"))


def test_a_cell_in_a_session_is_written_a_moment_later_and_others_at_once(path: Path) -> None:
    async def use() -> None:
        book = Ledger(path, asyncio.get_running_loop())
        book.record(spec("0000000a", session="5e550000"), RunState.QUEUED)
        book.update("0000000a", state=RunState.RUNNING, started_at=2.0)
        book.update("0000000a", state=RunState.SUCCEEDED, ended_at=3.0)
        assert book.has("0000000a")
        assert rows_in(path) == {}
        book.record(spec("0000000b"), RunState.QUEUED)
        book.update("0000000b", state=RunState.RUNNING)
        assert rows_in(path) == {"0000000b": "running"}
        async with asyncio.timeout(5):
            while "0000000a" not in rows_in(path):
                await asyncio.sleep(0.01)
        assert rows_in(path)["0000000a"] == "succeeded"
        (row,) = [row for row in book.recent(2) if row.run_id == "0000000a"]
        assert (row.started_at, row.ended_at, row.session) == (2.0, 3.0, "5e550000")
        # changes after its end are written immediately again
        book.update("0000000a", failure="rank 1: ValueError")
        changed = book.summary("0000000a")
        assert changed is not None
        assert changed.failure == "rank 1: ValueError"
        book.close()

    asyncio.run(use())


@pytest.mark.parametrize("ask", ["summary", "find", "recent", "unfinished"])
def test_whoever_asks_finds_what_waits_to_be_written(path: Path, ask: str) -> None:
    async def use() -> None:
        book = Ledger(path, asyncio.get_running_loop())
        book.record(spec("0000000a", session="5e550000"), RunState.QUEUED)
        found = {
            "summary": lambda: [row.run_id for row in [book.summary("0000000a")] if row is not None],
            "find": lambda: book.find("0000"),
            "recent": lambda: [row.run_id for row in book.recent(5)],
            "unfinished": book.unfinished,
        }[ask]()
        assert found == ["0000000a"]
        book.close()

    asyncio.run(use())


def test_a_ledger_that_is_closed_has_written_all(path: Path) -> None:
    async def use() -> None:
        book = Ledger(path, asyncio.get_running_loop())
        for number in range(100):
            book.record(spec(f"{number:08x}", session="5e550000"), RunState.QUEUED)
            book.update(f"{number:08x}", state=RunState.SUCCEEDED)
        book.close()

    asyncio.run(use())
    assert list(rows_in(path).values()) == ["succeeded"] * 100


def test_damage_found_while_cells_are_written_does_not_stop_the_pool(path: Path) -> None:
    fill(path)
    spoil(path)

    async def use() -> None:
        book = Ledger(path, asyncio.get_running_loop())
        for number in range(400, 420):
            book.record(spec(f"{number:08x}", session="5e550000"), RunState.QUEUED)
        book.write()
        book.record(spec("0000000b"), RunState.QUEUED)
        assert book.summary("0000000b") is not None
        book.close()

    asyncio.run(use())

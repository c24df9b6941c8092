"""Sessions in a real pool with real ranks, asked as a kernel asks it: turns, refusals, kills, restarts, deaths."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from homes import Home
from lasting_ranks import Lasting
from pool_client import ClientSession, FollowedRun, PoolClient
from process_table import is_alive
from waiting import eventually

from sgpu_magic.cli.runs import runs_table
from sgpu_magic.client.result import RunResult
from sgpu_magic.client.this_machine import this_owner
from sgpu_magic.errors import CapacityError, SessionError, UsageError
from sgpu_magic.files.run_directory import RUN_BYTES, RUN_INODES
from sgpu_magic.views.pool_tables import status_text
from sgpu_magic.wire.base import FailureKind, RunKind, RunState, short
from sgpu_magic.wire.events import (
    Detached,
    Placed,
    QueueMoved,
    RanksRestarted,
    RanksStarted,
    RunEnded,
    StateChanged,
    Submitted,
)
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.run import RankAnswer, RankQuestion

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4"}
UNSTOPPABLE = """
import time
while rank == 1:
    try:
        print('on', flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print('no', flush=True)
"""


@pytest.fixture(scope="module")
def client(home: Home) -> Iterator[PoolClient]:
    made = PoolClient(home)
    # the first run starts resources that stay
    made.begin("pass").ended()
    yield made
    made.close()


@pytest.fixture
def session(client: PoolClient) -> Iterator[ClientSession]:
    made = client.connect(2)
    yield made
    if not any(isinstance(event, RunEnded) for event in made.run.events):
        made.end()


def waits(run: FollowedRun) -> str:
    moved: QueueMoved = run.wait_for(QueueMoved)
    return moved.reason


# ---------------------------------------------------------------- cells


def test_state_stays_from_cell_to_cell(session: ClientSession):
    assert session.do("x = rank * 10").ended().state is RunState.SUCCEEDED
    assert session.do("x + 1").values == [1, 11]


def test_the_events_of_a_cell_begin_with_its_submission_and_tell_where_it_runs(session: ClientSession):
    run = session.do("rank")
    kinds = [type(event) for event in run.events]
    assert kinds[:2] == [Submitted, Placed]
    placed: Placed = run.wait_for(Placed)
    session_placed: Placed = session.run.wait_for(Placed)
    assert placed.lease == session_placed.lease
    assert len(placed.labels) == 2


def test_a_subset_of_ranks_brings_its_results_in_their_order(session: ClientSession):
    run = session.do("y = rank + 5\ny", only=(1,), out=("y:all",))
    assert run.values == [6]
    result = RunResult(run.run.spec, run.ended(), run.values, run.run.directory)
    assert (result.ranks, result.values, result[1], list(result)) == ([1], [6], 6, [6])
    assert repr(result) == f"run {short(run.run_id)} on rank 1: [6]"
    assert result.logs(1).name == "rank-1.log"
    with pytest.raises(IndexError, match="ran on rank 1, not on rank 0"):
        result[0]


def test_cells_of_a_session_take_turns(session: ClientSession):
    first = session.begin("import time\ntime.sleep(0.5)\nprint('a', flush=True)", name="train")
    second = session.begin("print('b', flush=True)")
    assert waits(second) == f"run {short(first.run_id)} (train) is still running in its session"
    second.ended()
    first.ended()
    assert (first.printed[0], second.printed[0]) == ("a\n", "b\n")


def test_what_runs_and_cells_leave_on_the_disk_is_small(home: Home, client: PoolClient, session: ClientSession):
    run = client.begin("print('a little')")
    run.ended()
    for run_id, most_files, most_bytes in (
        (run.run_id, 8, 32 * 1024),
        (session.do("x = rank").run_id, 6, 24 * 1024),
    ):
        directory = home.run_dir(run_id)
        # the others are shared by all runs
        found = [status for path in directory.iterdir() if (status := path.stat()).st_nlink == 1]
        size = sum(status.st_blocks * 512 for status in (*found, directory.stat()))
        assert (len(found) + 1 <= most_files, size <= most_bytes) == (True, True), (len(found), size)
        assert 2 * size <= RUN_BYTES
        assert 2 * most_files <= RUN_INODES


def test_fresh_runs_have_processes_of_their_own_on_the_same_lease(session: ClientSession):
    session.do("here = True\nimport os")
    busy = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)")
    busy.wait_for(OutputWritten)
    fresh = session.do("import os\n('here' in globals(), os.getpid())", fresh=True)
    assert fresh.ended().state is RunState.SUCCEEDED, fresh.ended()
    assert [str(value)[1:6] for value in fresh.values] == ["False", "False"]
    placed: Placed = fresh.wait_for(Placed)
    lease = session.run.wait_for(Placed).lease
    assert placed.lease == lease
    one = session.do("rank", fresh=True, ranks=1)
    assert one.wait_for(Placed).lease.uuids == lease.uuids[:1]
    busy.run.cancel("interrupted")
    assert busy.ended().state is RunState.CANCELLED


def test_not_to_wait_for_a_busy_session(session: ClientSession):
    busy = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)", name="train")
    busy.wait_for(OutputWritten)
    with pytest.raises(CapacityError, match=r"\(train\) is still running in its session, and the run does not wait"):
        session.begin("1", wait_s=0.0)
    busy.run.cancel("interrupted")
    busy.ended()


def test_four_threads_of_one_kernel_submit_at_once(session: ClientSession):
    """Each with a payload that is too large to go inline, and each gets its own back."""
    results: dict[int, list[object]] = {}

    def work(number: int) -> None:
        runs = [
            session.client.begin(
                "len(data), data[0]", names={"data": bytes([number]) * 3_000_000}, session=of, fresh=fresh
            )
            for of, fresh in ((session.run_id, False), (session.run_id, True), ("", False))
        ]
        results[number] = [value for run in runs for value in run.values]
        for run in runs:
            session.client.pool.reuse_payload(run.run_id)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: [(3_000_000, number)] * 6 for number in range(4)}


def test_submitting_from_threads_leaves_the_umask_alone(session: ClientSession):
    before = os.umask(0o022)
    try:
        threads = [threading.Thread(target=session.begin, args=("1",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"ranks": 3}, "session work has 2 ranks, and the run asks for 3"),
        ({"only": (0, 5)}, "session work has ranks 0 to 1, and the cell names 5"),
        ({"ranks": 3, "fresh": True}, "asks for 3 new ones"),
    ],
)
def test_what_does_not_fit_the_session_is_refused(session: ClientSession, fields: dict[str, Any], says: str):
    with pytest.raises(SessionError, match=says):
        session.begin("1", **fields)


def test_what_a_session_and_its_cells_can_not_do(client: PoolClient, session: ClientSession):
    with pytest.raises(UsageError, match="Leave --retries out"):
        session.begin("1", retries=1)
    with pytest.raises(UsageError, match="a session ends with its notebook"):
        client.begin(kind=RunKind.SESSION, name="other", detach=True)
    with pytest.raises(UsageError, match="pushed to and pulled from a session"):
        client.begin(kind=RunKind.PUSH)
    run = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)")
    run.wait_for(OutputWritten)
    for run_id in (run.run_id, session.run_id):
        with pytest.raises(UsageError, match="ends with its notebook"):
            client.pool.detach(run_id)
    # runs that other tests cancelled may not have ended yet
    eventually(lambda: client.pool.detach("") == "no run to detach")
    run.run.cancel("interrupted")
    assert not any(isinstance(event, Detached) for event in run.events)


def test_a_session_that_has_ended_says_when_and_why(client: PoolClient):
    session = client.connect(1)
    session.end()
    remedy = "Start another with %sgpu_connect."
    with pytest.raises(SessionError, match=rf"session work .*ended.*: %sgpu_disconnect\. {remedy}"):
        session.begin("1")

    def refused() -> str:
        with pytest.raises(SessionError) as error:
            session.begin("1")
        return error.value.message

    # once its ranks are gone
    eventually(
        lambda: re.search(rf"session work ended at \d\d:\d\d: %sgpu_disconnect\. {remedy}", refused()), what=refused
    )
    with pytest.raises(SessionError, match="there is no session ffff in this pool"):
        client.begin("1", session="ffff0000")


# ---------------------------------------------------------------- the end of a session


def test_cells_end_with_their_session(client: PoolClient):
    session = client.connect(2)
    inside = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)")
    inside.wait_for(OutputWritten)
    waiting = session.begin("1")
    fresh = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)", fresh=True)
    fresh.wait_for(OutputWritten)
    waits(waiting)
    assert session.end().state is RunState.CANCELLED
    assert waiting.ended().state is RunState.CANCELLED
    assert waiting.ended().reason == "session work ended before the run could start: %sgpu_disconnect"
    assert inside.ended().state is RunState.CANCELLED
    assert fresh.ended().state is RunState.CANCELLED
    assert "session" in fresh.ended().reason
    # the devices are free again, all four
    assert client.begin("rank", ranks=4, wait_s=10.0).ended().state is RunState.SUCCEEDED


def test_a_session_in_which_nothing_runs_ends_by_itself(client: PoolClient):
    session = client.connect(1, idle_s=1.0)
    session.do("1")
    ended = session.run.ended()
    assert (ended.state, ended.reason) == (RunState.CANCELLED, "nothing ran in it for 1 s (--idle)")


# ---------------------------------------------------------------- interrupts, kills, restarts, questions


def test_a_rank_that_does_not_stop_holds_the_next_cell_until_it_is_killed(client: PoolClient):
    session = client.connect(2)
    run = session.begin(UNSTOPPABLE, name="train")
    run.wait_for(OutputWritten)
    run.run.cancel("interrupted")
    assert run.ended().unstopped == (1,)
    waiting = session.begin("rank", only=(0,))
    assert waits(waiting).startswith(f"rank 1 still runs {short(run.run_id)}, which was interrupted:")
    run.run.cancel("interrupted again", kill=True)
    assert waiting.values == [0]
    assert client.pool.restart_ranks(session.run_id, (1,)) == "rank 1 of session work is new"
    session.run.wait_for(RanksRestarted)
    assert session.do("rank").values == [0, 1]
    session.end()


def test_a_first_kill_is_only_a_cancel(session: ClientSession):
    session.do("x = 1")
    run = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)")
    run.wait_for(OutputWritten)
    run.run.cancel("interrupted", kill=True)
    assert run.ended().state is RunState.CANCELLED
    assert session.do("x").values == [1, 1]


def test_ranks_are_not_restarted_under_a_cell(session: ClientSession):
    pool = session.client.pool
    run = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)", name="train")
    run.wait_for(OutputWritten)
    with pytest.raises(SessionError, match=r"\(train\) is running in session work. Cancel it first"):
        pool.restart_ranks(session.run_id, (0,))
    run.run.cancel("interrupted")
    run.ended()
    with pytest.raises(SessionError, match="session work has ranks 0 to 1, not 7"):
        pool.restart_ranks(session.run_id, (7,))
    with pytest.raises(SessionError, match="there is no session ffff"):
        pool.restart_ranks("ffff0000")


def test_cells_wait_while_ranks_are_restarted(session: ClientSession):
    session.do("x = 1")
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(session.client.pool.restart_ranks(session.run_id)))
    thread.start()
    cell = None
    while thread.is_alive():
        cell = session.do("('x' in globals(), rank)")
        if cell.values[0] == (False, 0):
            break
    thread.join(60)
    assert texts == ["all ranks of session work are new"]
    assert session.do("'x' in globals()").values == [False, False]


def test_an_idle_rank_answers_and_a_busy_or_absent_one_says_why(client: PoolClient, session: ClientSession):
    session.do("weights = 1")
    question = RankQuestion(rank=0, what="complete", code="weig", cursor=4)
    # the rank is idle a moment after the cell's end is reported
    answer = eventually(lambda: _answer(client, session, question))
    assert [match.text for match in answer.matches] == ["weights"], answer
    assert "has no rank 9" in client.pool.ask_rank(session.run_id, RankQuestion(rank=9, what="names")).problem
    assert "no session ffff" in client.pool.ask_rank("ffff0000", RankQuestion(rank=0, what="names")).problem
    run = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)")
    run.wait_for(OutputWritten)
    assert client.pool.ask_rank(session.run_id, RankQuestion(rank=0, what="names")).problem
    run.run.cancel("interrupted")
    assert run.ended().state is RunState.CANCELLED, "nothing waited for the cell's end"


def _answer(client: PoolClient, session: ClientSession, question: RankQuestion) -> RankAnswer | None:
    answer = client.pool.ask_rank(session.run_id, question, 10.0)
    print("ANSWER", answer)
    return None if answer.problem else answer


# ---------------------------------------------------------------- lists


def test_lists_tell_sessions_from_cells(client: PoolClient, session: ClientSession):
    run = session.begin("1", name="train", owner=msgspec.structs.replace(this_owner(), kernel="kernel-7"))
    run.ended()
    status = client.pool.status()
    assert status is not None
    rows = {row.run_id: row for row in status.runs}
    assert (rows[session.run_id].kind, rows[session.run_id].session) == (RunKind.SESSION, "")
    assert len(rows[session.run_id].uuids) == 2
    assert (rows[run.run_id].kind, rows[run.run_id].session) == (RunKind.CELL, session.run_id)
    assert rows[run.run_id].kernel == "kernel-7"
    assert status.idle_ends_at is None
    table = runs_table([rows[session.run_id], rows[run.run_id]], time.time()).splitlines()
    assert "session work" in table[1]
    assert table[2].startswith(short(run.run_id))
    assert table[3].strip() == f"in session {short(session.run_id)}"


# ---------------------------------------------------------------- deaths


@pytest.mark.slow
def test_a_session_and_its_cell_outlive_a_killed_pool(new_home: Callable[..., Home]):
    home = new_home({})
    client = PoolClient(home)
    try:
        session = client.connect(2)
        session.do("x = rank + 3")
        inside = session.begin("import time\nprint('in', flush=True)\ntime.sleep(2)\nx")
        inside.wait_for(OutputWritten)
        waiting = session.begin("x * 10")
        waits(waiting)
        pool = home.pool_pid()
        assert pool is not None
        os.kill(pool, signal.SIGKILL)
        eventually(lambda: not is_alive(pool))
        # the notebook's threads reconnect in any order
        client.find_again(session.run.run)
        assert waiting.ended().state is RunState.SUCCEEDED, waiting.events
        assert inside.ended().state is RunState.SUCCEEDED, inside.events
        assert (inside.values, waiting.values) == ([3, 4], [30, 40])
        assert session.do("x").values == [3, 4]
        rows = home.ledger()
        assert {run.run_id for run in (session.run, inside, waiting)} <= set(rows)
        session.end()
    finally:
        client.close()


@pytest.mark.slow
def test_the_next_pool_knows_a_sessions_dead_ranks(new_home: Callable[..., Home]):
    home = new_home({})
    client = PoolClient(home)

    def dead_ranks() -> list[tuple[int, ...]]:
        return [run.dead_ranks for run in client.pool.status().runs if run.kind is RunKind.SESSION]

    try:
        session = client.connect(2)
        struck = session.begin("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
        assert struck.ended().state is RunState.FAILED
        eventually(lambda: dead_ranks() == [(1,)])
        pool = home.pool_pid()
        assert pool is not None
        os.kill(pool, signal.SIGKILL)
        eventually(lambda: not is_alive(pool))
        client.find_again(session.run.run)
        assert dead_ranks() == [(1,)]
        session.end()
    finally:
        client.close()


@pytest.mark.slow
def test_cells_come_back_before_their_queued_session(new_home: Callable[..., Home]):
    """Both waited in the queue of a pool that was killed; the cell's thread is the first to come back."""
    home = new_home({"SGPU_SIMULATE": "a10:2"})
    client = PoolClient(home)
    try:
        holder = client.begin("import time\nprint('in', flush=True)\ntime.sleep(4)", ranks=2)
        holder.wait_for(OutputWritten)
        session_run = client.begin(ranks=2, kind=RunKind.SESSION, name="work")
        session = ClientSession(client, session_run, 2)
        cell = session.begin("rank + 1")
        assert "its session waits for devices: needs 2 more A10" in waits(cell)
        pool = home.pool_pid()
        assert pool is not None
        os.kill(pool, signal.SIGKILL)
        eventually(lambda: not is_alive(pool))
        back = threading.Thread(target=client.find_again, args=(cell.run,))
        back.start()
        back.join(0.5)
        client.find_again(session_run.run)
        back.join(20)
        client.find_again(holder.run)
        assert holder.ended().state is RunState.SUCCEEDED
        session_run.wait_for(RanksStarted)
        assert cell.values == [1, 2]
        session.end()
    finally:
        client.close()


@pytest.mark.slow
def test_a_killed_agent_ends_the_session_and_all_its_cells(new_home: Callable[..., Home]):
    home = new_home({})
    client = PoolClient(home)
    try:
        session = client.connect(2)
        inside = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)")
        inside.wait_for(OutputWritten)
        waiting = session.begin("1")
        fresh = session.begin("import time\nprint('in', flush=True)\ntime.sleep(30)", fresh=True, retries=3)
        fresh.wait_for(OutputWritten)
        waits(waiting)
        (agent,) = home.agent_pids()
        os.kill(agent, signal.SIGKILL)
        for run in (session.run, inside, fresh):
            failure = run.ended().failure
            assert failure is not None
            assert (failure.kind, run.ended().state) == (FailureKind.NODE_LOST, RunState.FAILED)
        failure = waiting.ended().failure
        assert failure is not None
        assert failure.kind is FailureKind.SESSION
        assert "session work ended before the run could start: the agent on this machine ended unexpectedly" in (
            failure.message
        )
        with pytest.raises(SessionError, match="session work ended at"):
            session.begin("1")
        assert client.begin("rank").values == [0, 1]
    finally:
        client.close()


def test_a_client_that_goes_takes_its_session_along(home: Home, client: PoolClient):
    other = PoolClient(home)
    session = other.connect(2)
    session.do("1")
    other.close()
    watched, _ = client.pool.attach(session.run_id)
    run = FollowedRun(client, watched)
    assert run.ended().state is RunState.CANCELLED
    states = [event.state for event in run.events if isinstance(event, StateChanged)]
    assert RunState.CANCELLING in states


@pytest.mark.slow
def test_devices_of_a_killed_rank_that_does_not_end_stay_leased_and_the_next_run_learns_why(
    new_home: Callable[..., Home], tmp_path: Path
):
    home = new_home({"SGPU_SIMULATE": "a10:2"})
    client, lasting = PoolClient(home), Lasting(tmp_path)
    try:
        first = client.begin(lasting.code((1,), "time.sleep(600)"), ranks=2, grace_s=0.0)
        first.wait_for(OutputWritten, 2)
        pid = int(first.printed[1].split()[1])
        client.pool.cancel(first.run.run_id, "the user's wish")
        assert first.ended().state is RunState.CANCELLED
        second = client.begin("rank", ranks=2)
        why = f"rank 1 (process {pid}) was killed and does not end"
        moves = (second.wait_for(QueueMoved, count) for count in itertools.count(1))
        assert any(why in move.reason for move in itertools.islice(moves, 5)), second.events
        status = client.pool.status()
        assert status is not None
        assert f"{why}, its devices stay leased" in status_text(status, time.time())
        lasting.release()
        assert second.ended().state is RunState.SUCCEEDED
        assert not is_alive(pid)
    finally:
        lasting.release()
        client.close()

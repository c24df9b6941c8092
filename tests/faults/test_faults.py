"""Every fault of the table in every state of a run: what is seen, how soon, and that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fault_states import RANKS, STATES, Situation, Stage
from fault_table import ADOPT_S, FAULTS, GRACE_S, Ending, Fault
from kernels import Cell, Home, Reply, eventually, is_alive, listening
from strikes import all_gone

HOME_VARIABLES = {
    "SGPU_CPU_SLOTS": str(RANKS),
    "SGPU_GRACE_S": str(GRACE_S),
    "SGPU_ADOPT_TIMEOUT_S": str(ADOPT_S),
}
_FINAL = {"succeeded", "failed", "cancelled", "timed out"}

# `make test` runs most faults in the state `running`, except those that resemble others
_IN_SHORT = {(fault, "running") for fault in FAULTS}
_IN_SHORT -= {
    ("kernel-and-pool-killed", "running"),
    ("kernel-pool-and-agent-killed", "running"),
    ("rank-stopped-until-the-timeout", "running"),
    ("rank-aborted", "running"),
    ("rank-segfaulted", "running"),
    ("pool-ended", "running"),
    ("kernel-of-a-detached-run-killed", "running"),
    ("kernel-restarted", "running"),
    ("pool-and-agent-killed", "running"),
}
CASES = [
    pytest.param(
        fault,
        state,
        id=f"{fault}-while-{state}",
        marks=[] if (fault, state) in _IN_SHORT else [pytest.mark.slow],
    )
    for fault in FAULTS
    for state in FAULTS[fault].expected
]


@pytest.fixture(scope="module")
def stage(home: Home) -> Iterator[Stage]:
    made = Stage(home)
    try:
        made.warm()
        yield made
    finally:
        made.close()


def test_the_table_is_complete():
    assert len(FAULTS) >= 12
    assert all(list(fault.expected) == list(STATES) for fault in FAULTS.values())


@pytest.mark.parametrize(("name", "state"), CASES)
def test_fault(stage: Stage, name: str, state: str):
    fault = FAULTS[name]
    expected = fault.expected[state]
    with stage.clean():
        situation = STATES[state](stage, fault.options_of.get(state, fault.options))
        victim = {"rank": situation.victims_rank, "pid": situation.victim}
        if fault.kills_kernel:
            stage.prepare_spare()
        fault.strike(stage, situation)
        struck_at = time.monotonic()
        situation.survivors = [pid for pid in situation.ranks if not (fault.hits_rank and pid == victim["pid"])]
        if fault.kills_kernel:
            stage.killed()
        watcher = _watcher(stage, fault, situation)
        ended_at_once = not expected.run.continues or expected.run.frees_cell
        if ended_at_once and expected.ahead is not None and expected.ahead.continues:
            _check_run(stage, situation, expected.run, watcher, victim, struck_at)
        if expected.run.frees_cell:
            assert watcher is not None
            _check_reply(watcher.wait(_left(expected.run, struck_at)), expected.run, victim)
        if expected.run.continues or (expected.ahead is not None and expected.ahead.continues):
            _let_finish(stage, fault, situation, watcher)
            struck_at = time.monotonic()
        _check_run(stage, situation, expected.run, watcher, victim, struck_at)
        if situation.ahead is not None and expected.ahead is not None:
            _check_reply(situation.ahead[0].wait(_left(expected.ahead, struck_at)), expected.ahead, victim)
        all_gone(situation.doomed, _left(expected.run, struck_at))
        if fault.reported == "nobody" and stage.home.pool_pid() is None:
            # no service is left for the agent to wait for; one that starts before the agent ends would still adopt it
            eventually(lambda: not stage.home.agent_pids(), _left(expected.run, struck_at), "the agent does not end")
        stage.home.check_leaks()
        assert not situation.sockets & listening().keys(), "a port is still open"
        _next_cell_runs(stage)
        _check_rows(stage, situation, expected.run, expected.ahead, in_words=fault.reported == "nobody")


# ---------------------------------------------------------------- what is seen


def _watcher(stage: Stage, fault: Fault, situation: Situation) -> Cell | None:
    """The cell that waits for the run's end."""
    match fault.reported:
        case "cell":
            return situation.cell
        case "attaches":
            return stage.kernel.start(f"%sgpu_attach {situation.run_id[:8]}")
        case _:
            return None


def _left(ending: Ending, since: float) -> float:
    return max(0.1, since + ending.within_s - time.monotonic())


def _check_run(
    stage: Stage, situation: Situation, ending: Ending, watcher: Cell | None, victim: dict[str, int], since: float
) -> None:
    """Within its time the run ends as it should."""
    if watcher is not None:
        reply = watcher.wait(_left(ending, since))
        _check_reply(reply, ending, victim)
    elif situation.ahead is not None and stage.home.pool_pid() is not None:
        row_of = lambda: stage.home.ledger()[situation.run_id]  # noqa: E731
        eventually(lambda: row_of().state == ending.state, _left(ending, since), lambda: str(row_of()))
    if ending.continues and ending.state == "cancelled":
        for rank, pid in enumerate(situation.ranks):
            if pid in situation.survivors:
                stage.printed(situation.run_id, "saving\nsaved\n", (rank,))


def _check_reply(reply: Reply, ending: Ending, victim: dict[str, int]) -> None:
    if ending.error:
        assert (reply.status, reply.ename) == ("error", ending.error), reply.story
        assert ending.says.format(**victim) in reply.evalue, reply.story
        return
    assert reply.status == "ok", reply.story
    for rank in range(RANKS):
        lines = reply.lines(rank)
        numbers = [line for line in lines if line.startswith("line ")]
        assert numbers == [f"line {number}" for number in range(len(numbers))], reply.story
        assert lines[-1] == f"done {len(numbers)}", reply.story
        assert "weighs 300000" in lines, reply.story


def _let_finish(stage: Stage, fault: Fault, situation: Situation, watcher: Cell | None) -> None:
    """The fault is overcome and the ranks still work: let them end."""
    working = watcher if situation.ahead is None else situation.ahead[0]
    if fault.reported == "attaches" and watcher is not None:
        watcher.until_shown(f"run {situation.run_id[:4]}", 10)
    if fault.until_over and working is not None:
        working.until_shown(fault.until_over, 10)
    assert all(map(is_alive, situation.survivors)), "ranks ended that had to go on"
    stage.finish(situation)


# ---------------------------------------------------------------- what is left


def _next_cell_runs(stage: Stage) -> None:
    """On all the slots there are, so that none is still held."""
    reply = stage.kernel.check(f"%%distributed -n {RANKS} --out word\nword = f'fine {{world_size}}'")
    assert "Error" not in reply.text
    assert stage.kernel.value("word") == f"fine {RANKS}"


def _check_rows(stage: Stage, situation: Situation, run: Ending, ahead: Ending | None, *, in_words: bool) -> None:
    """The ledger says how every run ended."""
    # a cell ends a moment before the ledger is written
    eventually(lambda: {row.state for row in stage.home.ledger().values()} <= _FINAL, 10, "the last row")
    rows = stage.home.ledger()
    assert rows[situation.run_id].state == run.state, rows[situation.run_id]
    if in_words:
        assert run.says in rows[situation.run_id].failure, rows[situation.run_id]
    if situation.ahead is not None and ahead is not None:
        assert rows[situation.ahead[1]].state == ahead.state, rows[situation.ahead[1]]

"""Sessions in the scheduler: what their cells wait for and get, and how they end; then all of it at random."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from examples import examples
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from scheduler_requests import SESSION as S
from scheduler_requests import (
    Instruction,
    QueueMoved,
    Scheduler,
    cell,
    changed,
    gpus,
    launched,
    node,
    refusal,
    running,
    session,
    spec,
    submit,
)

from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.stimuli import (
    CancelRequested,
    EndUnstartedRun,
    InventoryChanged,
    LaunchRun,
    MoveRun,
    RanksReaped,
    RanksRemain,
    RefuseRun,
    RunAdopted,
    RunMoved,
    RunSubmitted,
    SessionPaused,
    SessionResumed,
    Stimulus,
    StopRun,
    TimePassed,
)
from sgpu_magic.wire.base import FailureKind, RunKind, RunLimit, RunState, can_move
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import RemainingRank
from sgpu_magic.wire.run import Owner, RunSpec

A, B, C, D = "aaaa0000", "bbbb0000", "cccc0000", "dddd0000"


def connected(ranks: int = 2, devices: int = 4, **fields: Any) -> Scheduler:
    """A session that has been RUNNING since 0.0."""
    scheduler = Scheduler(node(*gpus(devices)))
    assert list(launched(submit(scheduler, session(ranks, **fields)))) == [S]
    running(scheduler, S)
    return scheduler


def waits_for(instructions: Sequence[Instruction], run_id: str) -> tuple[int, str]:
    (reported,) = [one for one in instructions if isinstance(one, QueueMoved) and one.run_id == run_id]
    return reported.position, reported.reason


# ---------------------------------------------------------------- what only the own sessions could free


def blocking(run_id: str, ranks: int, **fields: Any) -> RunSpec:
    """A run that the session's notebook waits for."""
    return replace(spec(run_id, ranks, **fields), blocks_owner=True)


def test_a_run_that_only_its_own_notebooks_session_could_let_start_is_refused() -> None:
    scheduler = connected(3, devices=4)
    text = str(refusal(submit(scheduler, blocking(A, 2), 1.0)).reason)
    assert "needs 2 A10, with 1 free" in text
    assert "3 are held by session" in text
    assert "%sgpu_disconnect" in text
    # what is free is given, and so is what the session leaves once it has ended
    assert list(launched(submit(scheduler, blocking(B, 1), 2.0))) == [B]


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(blocking(A, 2, wait_s=60.0), id="it asked to wait"),
        pytest.param(spec(A, 2), id="nothing waits for it"),
        pytest.param(
            replace(blocking(A, 2), owner=Owner(pid=2, host="here", user="me")), id="the session is another notebook's"
        ),
    ],
)
def test_a_run_that_may_get_the_devices_waits_for_the_session(wanted: RunSpec) -> None:
    scheduler = connected(3, devices=4)
    assert waits_for(submit(scheduler, wanted, 1.0), A)[0] == 1


def test_a_run_waits_while_other_runs_could_let_it_start() -> None:
    scheduler = connected(2, devices=4)
    assert list(launched(submit(scheduler, spec(B, 2), 1.0))) == [B]
    running(scheduler, B)
    waits_for(submit(scheduler, blocking(A, 2), 2.0), A)
    assert [held.session for held in scheduler.statuses()[A].own_sessions] == ["work"]
    assert list(launched(scheduler.handle(RanksReaped(B, RunState.SUCCEEDED), 3.0))) == [A]


def test_a_run_whose_wait_has_become_useless_fails() -> None:
    scheduler = connected(2, devices=4)
    submit(scheduler, spec(B, 2), 1.0)
    running(scheduler, B)
    submit(scheduler, session(2, C), 2.0)
    waits_for(submit(scheduler, blocking(A, 2), 3.0), A)
    # the second session gets what the other run has left
    done = scheduler.handle(RanksReaped(B, RunState.SUCCEEDED), 4.0)
    assert list(launched(done)) == [C]
    (ended,) = [one for one in done if isinstance(one, EndUnstartedRun)]
    assert (ended.run_id, ended.state, ended.kind) == (A, RunState.FAILED, FailureKind.CAPACITY)
    assert "2 are held by session work, 2 are held by session work" in str(ended.reason)


# ---------------------------------------------------------------- lease and turns


def test_a_cell_gets_the_sessions_lease_and_takes_no_device_of_its_own() -> None:
    scheduler = connected(2, devices=3)
    session_run = scheduler.run(S)
    assert session_run is not None
    assert launched(submit(scheduler, cell(A))) == {A: session_run.lease}
    assert scheduler.holder("GPU-a10-0") == S
    # the third device is free for any run
    assert launched(submit(scheduler, spec(D, 1)))[D].uuids == ("GPU-a10-2",)


def test_a_cell_on_some_ranks_has_the_whole_lease() -> None:
    scheduler = connected(4)
    lease = launched(submit(scheduler, cell(A, 4, only=(0, 2))))[A]
    assert (lease.ranks, len(lease.uuids)) == (4, 4)


def test_cells_take_turns_and_say_who_is_before_them() -> None:
    scheduler = connected()
    submit(scheduler, cell(A))
    assert waits_for(submit(scheduler, cell(B)), B) == (1, "run aaaa (train) is still running in its session")
    assert waits_for(submit(scheduler, cell(C)), C) == (2, "run aaaa (train) is still running in its session")
    running(scheduler, A)
    moved = scheduler.handle(RunMoved(A, RunState.SUCCEEDED), 2.0)
    assert waits_for(moved, B) == (1, "run aaaa (train) is ending in its session")
    out = scheduler.handle(RanksReaped(A, RunState.SUCCEEDED), 2.1)
    assert list(launched(out)) == [B]
    assert waits_for(out, C) == (1, "run bbbb (train) is still running in its session")


def test_cells_on_different_ranks_take_turns_too() -> None:
    scheduler = connected(4)
    submit(scheduler, cell(A, 4, only=(0,)))
    assert not launched(submit(scheduler, cell(B, 4, only=(1,))))


def test_fresh_runs_begin_beside_the_cell_and_beside_each_other() -> None:
    scheduler = connected(4)
    submit(scheduler, cell(A, 4))
    whole = launched(submit(scheduler, cell(B, 4, fresh=True)))[B]
    part = launched(submit(scheduler, cell(C, 2, fresh=True)))[C]
    assert whole.uuids == ("GPU-a10-0", "GPU-a10-1", "GPU-a10-2", "GPU-a10-3")
    assert part.uuids == ("GPU-a10-0", "GPU-a10-1")
    assert (part.ranks, part.lease_id) == (2, whole.lease_id)


def test_a_fresh_run_on_cpu_gets_fewer_slots_and_takes_none() -> None:
    scheduler = Scheduler(node(slots=4))
    submit(scheduler, changed(session(4), placement=spec(S, 4, "cpu").placement))
    running(scheduler, S)
    part = launched(submit(scheduler, cell(A, 2, fresh=True)))[A]
    assert (part.ranks, part.cpu_slots, part.uuids) == (2, 2, ())
    assert scheduler.cpu_slots_free == 0


def test_two_sessions_know_nothing_of_each_other() -> None:
    scheduler = connected(2)
    submit(scheduler, session(2, run_id="5e550001"))
    running(scheduler, "5e550001")
    submit(scheduler, cell(A))
    assert list(launched(submit(scheduler, cell(B, of="5e550001")))) == [B]


# ---------------------------------------------------------------- waiting for the session itself


def test_a_cell_waits_with_its_session_for_devices() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, spec(D, 2))
    submit(scheduler, session(2))
    assert waits_for(submit(scheduler, cell(A)), A) == (
        1,
        "its session waits for devices: needs 2 more A10; 2 are held by run dddd",
    )
    out = scheduler.handle(RanksReaped(D, RunState.SUCCEEDED), 1.0)
    assert list(launched(out)) == [S]
    assert waits_for(out, A) == (1, "its session's ranks are starting")
    scheduler.handle(RunMoved(S, RunState.STARTING), 2.0)
    assert list(launched(scheduler.handle(RunMoved(S, RunState.RUNNING), 3.0))) == [A]


def test_a_cell_submitted_before_the_devices_are_known() -> None:
    scheduler = Scheduler()
    submit(scheduler, session(2))
    assert waits_for(submit(scheduler, cell(A)), A)[1].startswith("its session waits for devices")
    assert list(launched(scheduler.handle(InventoryChanged(node(*gpus(2))), 1.0))) == [S]
    scheduler.handle(RunMoved(S, RunState.STARTING), 1.0)
    assert list(launched(scheduler.handle(RunMoved(S, RunState.RUNNING), 2.0))) == [A]


def test_a_session_whose_devices_do_not_exist_takes_its_cells_along() -> None:
    scheduler = Scheduler()
    submit(scheduler, session(8))
    submit(scheduler, cell(A, 8))
    out = scheduler.handle(InventoryChanged(node(*gpus(2))), 1.0)
    assert [type(one) for one in out] == [RefuseRun, MoveRun, EndUnstartedRun]
    end = out[-1]
    assert isinstance(end, EndUnstartedRun)
    assert (end.run_id, end.state, end.kind) == (A, RunState.FAILED, FailureKind.SESSION)
    assert scheduler.runs == ()


def test_nothing_begins_while_ranks_are_restarted() -> None:
    scheduler = connected()
    assert scheduler.handle(SessionPaused(S, (1,)), 1.0) == []
    assert waits_for(submit(scheduler, cell(A)), A) == (1, "rank 1 of its session is being restarted")
    assert not launched(submit(scheduler, cell(B, fresh=True)))
    assert list(launched(scheduler.handle(SessionResumed(S), 2.0))) == [A, B]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (cell(A, of="ffff0000"), "no session ffff"),
        (cell(A, 3), "has 2 ranks, and the run asks for 3"),
        (cell(A, 1), "has 2 ranks, and the run asks for 1"),
        (cell(A, only=(0, 2)), "has ranks 0 to 1, and the cell names 2"),
        (cell(A, 3, fresh=True), "asks for 3 new ones"),
        (cell(A, only=(0,), fresh=True), "--fresh starts new ones"),
    ],
)
def test_what_can_not_run_in_the_session_is_refused(wanted: RunSpec, says: str) -> None:
    one = refusal(submit(connected(), wanted))
    assert one.error == "SessionError"
    assert says in str(one.reason)


def test_an_ordinary_run_is_no_session() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, spec(D, 2))
    assert "no session dddd" in refusal(submit(scheduler, cell(A, of=D))).reason


def test_a_session_that_ends_takes_no_cell_and_says_why() -> None:
    scheduler = connected()
    scheduler.handle(CancelRequested(S, "%sgpu_disconnect"), 1.0)
    one = refusal(submit(scheduler, cell(A), 1.0))
    assert str(one.reason) == "session work is ending: %sgpu_disconnect. Start another with %sgpu_connect."
    scheduler.handle(RunMoved(S, RunState.CANCELLED), 2.0)
    assert "session work has ended: %sgpu_disconnect." in refusal(submit(scheduler, cell(B), 2.0)).reason


# ---------------------------------------------------------------- runs that do not wait


def test_who_would_not_wait_is_refused_with_what_is_in_the_way() -> None:
    scheduler = connected()
    submit(scheduler, cell(A))
    one = refusal(submit(scheduler, cell(B, wait_s=0.0)))
    assert one.error == "CapacityError"
    assert str(one.reason).startswith("run aaaa (train) is still running in its session, and the run does not wait.")


def test_who_would_not_wait_waits_for_a_cell_that_is_ending() -> None:
    """A cell's end is reported before its ranks are idle again; the next cell is submitted in between."""
    scheduler = connected()
    submit(scheduler, cell(A))
    running(scheduler, A)
    scheduler.handle(RunMoved(A, RunState.SUCCEEDED), 1.0)
    assert waits_for(submit(scheduler, cell(B, wait_s=0.0), 1.0), B)[1] == "run aaaa (train) is ending in its session"
    assert list(launched(scheduler.handle(RanksReaped(A, RunState.SUCCEEDED), 1.1))) == [B]


def test_who_would_not_wait_does_not_wait_for_others_that_are_ending() -> None:
    scheduler = connected()
    submit(scheduler, spec(C, 1))
    running(scheduler, C)
    scheduler.handle(RunMoved(C, RunState.SUCCEEDED), 1.0)
    submit(scheduler, cell(A), 1.0)
    assert refusal(submit(scheduler, cell(B, wait_s=0.0), 1.0)).run_id == B


def test_who_would_not_wait_gives_up_at_once_when_its_session_begins_to_start() -> None:
    """It waited while runs were ending; from now on it waits for its session's ranks."""
    scheduler = Scheduler(node(*gpus(2)))
    for one in (C, D):
        submit(scheduler, spec(one, 1))
        running(scheduler, one)
    submit(scheduler, session(1))
    scheduler.handle(RunMoved(D, RunState.SUCCEEDED), 1.0)
    waits_for(submit(scheduler, cell(A, 1, wait_s=0.0), 1.0), A)
    out = scheduler.handle(RanksReaped(C, RunState.SUCCEEDED), 1.1)
    assert list(launched(out)) == [S]
    assert [one.run_id for one in out if isinstance(one, EndUnstartedRun)] == [A]
    assert (scheduler.next_deadline() or 9.0) > 1.1


def test_waiting_ends_at_its_time() -> None:
    scheduler = connected()
    submit(scheduler, cell(A))
    submit(scheduler, cell(B, wait_s=30.0), 5.0)
    assert scheduler.next_deadline() == 35.0
    moved, ended = scheduler.handle(TimePassed(), 35.0)
    assert isinstance(ended, EndUnstartedRun)
    assert moved == MoveRun(B, RunState.FAILED, str(ended.reason))
    assert str(ended.reason) == (
        "it has waited for 30 s: run aaaa (train) is still running in its session. Wait longer with --wait."
    )


# ---------------------------------------------------------------- interrupted cells


def test_a_rank_that_does_not_stop_keeps_the_session_busy_and_is_named() -> None:
    scheduler = connected(4)
    submit(scheduler, cell(A, 4))
    running(scheduler, A)
    submit(scheduler, cell(B, 4))
    stopped = scheduler.handle(CancelRequested(A, "interrupted"), 1.0)
    assert StopRun(A, RunState.CANCELLED, "interrupted") in stopped
    assert waits_for(stopped, B)[1] == "run aaaa (train) is being stopped in its session"
    ended = scheduler.handle(RunMoved(A, RunState.CANCELLED, unstopped=(2,)), 2.0)
    assert waits_for(ended, B) == (
        1,
        "rank 2 still runs aaaa, which was interrupted: interrupt again within 5 s, or %sgpu_restart --rank 2, "
        "kills it",
    )
    assert list(launched(scheduler.handle(RanksReaped(A, RunState.CANCELLED), 9.0))) == [B]


def test_a_killed_rank_that_does_not_end_is_named_to_the_next_cell_until_it_is_replaced() -> None:
    scheduler = connected(4)
    submit(scheduler, cell(A, 4))
    running(scheduler, A)
    submit(scheduler, cell(B, 4))
    scheduler.handle(RunMoved(A, RunState.CANCELLED, unstopped=(2,)), 2.0)
    kept = (RemainingRank(rank=2, pid=123, host="here"),)
    reported = scheduler.handle(RanksRemain(A, kept), 5.0)
    assert waits_for(reported, B)[1] == "rank 2 (process 123) was killed and does not end; it still runs aaaa"
    assert list(launched(scheduler.handle(RanksReaped(A, RunState.CANCELLED), 9.0))) == [B]
    submit(scheduler, cell(C, 4), 10.0)
    scheduler.handle(SessionPaused(S, (2,)), 10.0)
    scheduler.handle(RanksReaped(B, RunState.SUCCEEDED), 10.0)
    reported = scheduler.handle(RanksRemain(S, kept), 12.0)
    assert waits_for(reported, C)[1].endswith("; rank 2 (process 123) was killed and does not end")
    scheduler.handle(RanksRemain(S, ()), 13.0)
    assert list(launched(scheduler.handle(SessionResumed(S), 13.0))) == [C]


def test_several_ranks_that_do_not_stop() -> None:
    scheduler = connected(4)
    submit(scheduler, cell(A, 4))
    submit(scheduler, cell(B, 4))
    ended = scheduler.handle(RunMoved(A, RunState.FAILED, unstopped=(1, 3)), 2.0)
    assert waits_for(ended, B)[1] == (
        "ranks 1, 3 still run aaaa, which was interrupted: interrupt again within 5 s, or %sgpu_restart --rank 1,3, "
        "kills them"
    )


def test_cancelling_a_waiting_cell_leaves_the_others() -> None:
    scheduler = connected()
    for run_id in (A, B, C):
        submit(scheduler, cell(run_id))
    out = scheduler.handle(CancelRequested(B, "interrupted"), 1.0)
    assert EndUnstartedRun(B, RunState.CANCELLED, "interrupted") in out
    assert waits_for(out, C) == (1, "run aaaa (train) is still running in its session")


# ---------------------------------------------------------------- the session's end


def test_cells_that_wait_are_cancelled_with_their_session() -> None:
    scheduler = connected()
    submit(scheduler, cell(A))
    submit(scheduler, cell(B))
    out = scheduler.handle(CancelRequested(S, "%sgpu_disconnect"), 1.0)
    assert out == [
        MoveRun(S, RunState.CANCELLING, "%sgpu_disconnect"),
        StopRun(S, RunState.CANCELLED, "%sgpu_disconnect"),
        MoveRun(B, RunState.CANCELLED, "session work ended before the run could start: %sgpu_disconnect"),
        EndUnstartedRun(
            B,
            RunState.CANCELLED,
            "session work ended before the run could start: %sgpu_disconnect",
            FailureKind.SESSION,
        ),
    ]
    # the cell in its ranks ends with them, and the agent reports it
    assert scheduler.run(A) is not None


def test_cells_that_wait_fail_with_a_session_that_failed() -> None:
    scheduler = connected()
    submit(scheduler, cell(A))
    submit(scheduler, cell(B))
    out = scheduler.handle(RunMoved(S, RunState.FAILED, "the agent on this machine ended unexpectedly"), 1.0)
    end = next(one for one in out if isinstance(one, EndUnstartedRun))
    assert (end.run_id, end.state, end.kind) == (B, RunState.FAILED, FailureKind.SESSION)
    assert "session work ended before the run could start: the agent on this machine ended unexpectedly" in end.reason


def test_cells_of_a_queued_session_end_with_it() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, spec(D, 2))
    submit(scheduler, session(2, wait_s=10.0))
    submit(scheduler, cell(A))
    out = scheduler.handle(TimePassed(), 10.0)
    assert [one.run_id for one in out if isinstance(one, EndUnstartedRun)] == [S, A]
    assert [run.run_id for run in scheduler.runs] == [D]


def test_a_session_keeps_its_devices_until_the_last_fresh_process_on_them_is_gone() -> None:
    scheduler = connected(2, devices=2)
    submit(scheduler, cell(A, fresh=True))
    running(scheduler, A)
    submit(scheduler, spec(D, 2))
    out = scheduler.handle(CancelRequested(S, "%sgpu_disconnect"), 1.0)
    why = "session work, whose devices it uses, ended: %sgpu_disconnect"
    assert StopRun(A, RunState.CANCELLED, why) in out
    assert not launched(scheduler.handle(RanksReaped(S, RunState.CANCELLED), 2.0))
    assert scheduler.holder("GPU-a10-0") == S
    assert "has ended" in refusal(submit(scheduler, cell(B), 2.0)).reason
    assert list(launched(scheduler.handle(RanksReaped(A, RunState.CANCELLED), 3.0))) == [D]
    assert scheduler.run(S) is None


def test_a_cell_that_is_still_told_of_holds_no_device_of_a_session_that_is_gone() -> None:
    scheduler = connected(2, devices=2)
    submit(scheduler, cell(A))
    submit(scheduler, spec(D, 2))
    scheduler.handle(CancelRequested(S, ""), 1.0)
    assert list(launched(scheduler.handle(RanksReaped(S, RunState.CANCELLED), 2.0))) == [D]
    assert scheduler.handle(RanksReaped(A, RunState.FAILED), 2.0) == [MoveRun(A, RunState.FAILED)]


def test_the_sessions_time_limit_ends_it_and_fails_what_waits() -> None:
    scheduler = connected(timeout_s=100.0)
    submit(scheduler, cell(A))
    submit(scheduler, cell(B))
    out = scheduler.handle(TimePassed(), 100.0)
    assert StopRun(S, RunState.TIMED_OUT, "reached its 100 s time limit", RunLimit.TIME) in out
    end = next(one for one in out if isinstance(one, EndUnstartedRun))
    assert (end.run_id, end.state) == (B, RunState.FAILED)


# ---------------------------------------------------------------- idle sessions


def test_a_session_in_which_nothing_runs_ends() -> None:
    scheduler = connected(idle_s=3600.0)
    assert scheduler.next_deadline() == 3600.0
    submit(scheduler, cell(A), 100.0)
    assert scheduler.next_deadline() == 7200.0  # only the session's time limit applies: it is in use
    running(scheduler, A, 100.0)
    assert not scheduler.handle(TimePassed(), 4000.0)
    scheduler.handle(RanksReaped(A, RunState.SUCCEEDED), 5000.0)
    assert scheduler.next_deadline() == 7200.0
    scheduler = connected(idle_s=3600.0, timeout_s=100_000.0)
    submit(scheduler, cell(A, fresh=True), 100.0)
    scheduler.handle(RanksReaped(A, RunState.SUCCEEDED), 5000.0)
    assert scheduler.next_deadline() == 8600.0
    assert StopRun(S, RunState.CANCELLED, "nothing ran in it for 1 h (--idle)") in scheduler.handle(
        TimePassed(), 8600.0
    )
    assert "nothing ran in it for 1 h" in refusal(submit(scheduler, cell(B), 8600.0)).reason


def test_a_session_that_still_waits_or_starts_is_not_idle() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(D, timeout_s=1e6))
    submit(scheduler, session(1, idle_s=60.0))
    assert not scheduler.handle(TimePassed(), 1000.0)
    scheduler.handle(RanksReaped(D, RunState.SUCCEEDED), 1000.0)
    scheduler.handle(RunMoved(S, RunState.STARTING), 1000.0)
    assert not scheduler.handle(TimePassed(), 1100.0)
    scheduler.handle(RunMoved(S, RunState.RUNNING), 1100.0)
    assert scheduler.next_deadline() == 1160.0


def test_a_session_whose_time_and_quiet_are_over_at_one_moment_is_stopped_once() -> None:
    out = connected(idle_s=60.0, timeout_s=60.0).handle(TimePassed(), 60.0)
    assert [one for one in out if isinstance(one, StopRun)] == [
        StopRun(S, RunState.TIMED_OUT, "reached its 1 min time limit", RunLimit.TIME)
    ]


def test_restarting_ranks_is_use() -> None:
    scheduler = connected(idle_s=60.0)
    scheduler.handle(SessionPaused(S, (1,)), 50.0)
    assert not scheduler.handle(TimePassed(), 70.0)
    scheduler.handle(SessionResumed(S), 80.0)
    assert scheduler.next_deadline() == 140.0


# ---------------------------------------------------------------- adoption


def test_an_adopted_session_and_its_cell_go_on() -> None:
    scheduler = Scheduler()
    lease = Lease(lease_id="l", device_type="a10", ranks=2, uuids=("GPU-a10-0", "GPU-a10-1"))
    scheduler.handle(RunAdopted(ScheduledRun(session(2, idle_s=60.0), RunState.RUNNING), lease, 0.0), 40.0)
    scheduler.handle(RunAdopted(ScheduledRun(cell(A), RunState.RUNNING), lease, 30.0), 40.0)
    scheduler.handle(InventoryChanged(node(*gpus(3))), 40.0)
    assert scheduler.holder("GPU-a10-1") == S
    assert not launched(submit(scheduler, cell(B), 41.0))
    assert list(launched(scheduler.handle(RanksReaped(A, RunState.SUCCEEDED), 50.0))) == [B]
    scheduler.handle(RanksReaped(B, RunState.SUCCEEDED), 51.0)
    assert scheduler.next_deadline() == 111.0


def test_new_processes_whose_session_nobody_knows_keep_their_devices() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    lease = Lease(lease_id="l", device_type="a10", ranks=1, uuids=("GPU-a10-0",))
    for run_id in (A, B):
        scheduler.handle(RunAdopted(ScheduledRun(cell(run_id, 1, fresh=True), RunState.RUNNING), lease, 0.0), 1.0)
    assert launched(submit(scheduler, spec(D)))[D].uuids == ("GPU-a10-1",)


# ---------------------------------------------------------------- all at once, at random


class Sessions(RuleBasedStateMachine):
    """Users with sessions, cells and runs, and an agent that ends them in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = Scheduler(node(*gpus(4), slots=4))
        self.specs: dict[str, RunSpec] = {}
        self.states: dict[str, RunState] = {}
        self.leases: dict[str, Lease] = {}
        self.gone: set[str] = set()

    def feed(self, stimulus: Stimulus) -> None:
        for instruction in self.scheduler.handle(stimulus, self.now):
            run_id = instruction.run_id
            assert run_id not in self.gone, "the last word on a run was said"
            match instruction:
                case LaunchRun(lease=lease):
                    self.launched(run_id, lease)
                    self.leases[run_id] = lease
                case MoveRun(state=state):
                    assert can_move(self.states[run_id], state)
                    self.states[run_id] = state
                case StopRun():
                    assert run_id in self.leases
                case RefuseRun(reason=message):
                    assert message
                    assert run_id not in self.leases
                    self.gone.add(run_id)
                case EndUnstartedRun(state=state, reason=reason):
                    assert state is self.states[run_id]
                    assert run_id not in self.leases
                    assert reason
                    self.gone.add(run_id)
                case QueueMoved(position=position, reason=reason):
                    assert position >= 1
                    assert reason
                    assert run_id not in self.leases

    def uses(self, run_id: str) -> bool:
        """Whether it has processes of its own."""
        return run_id in self.leases and not self.specs[run_id].in_session

    def launched(self, run_id: str, lease: Lease) -> None:
        wanted = self.specs[run_id]
        assert self.states[run_id] is RunState.QUEUED
        owner = wanted.session or run_id
        for other in self.leases:
            if self.uses(other) and (self.specs[other].session or other) != owner:
                assert set(self.leases[other].uuids).isdisjoint(lease.uuids), "a device was leased twice"
        if wanted.session:
            assert self.states[wanted.session] is RunState.RUNNING
            assert set(lease.uuids) <= set(self.leases[wanted.session].uuids)
            assert lease.ranks == wanted.placement.ranks
        if wanted.in_session:
            others = [o for o in self.leases if self.specs[o].in_session and self.specs[o].session == wanted.session]
            assert not others, "two cells in one session's ranks"
            waiting = [r for r in self.scheduler.runs if r.spec.in_session and r.spec.session == wanted.session]
            assert waiting[0].run_id == run_id, "a cell was passed over"

    def add(self, wanted: RunSpec) -> None:
        self.specs[wanted.run_id] = wanted
        self.states[wanted.run_id] = RunState.QUEUED
        self.feed(RunSubmitted(ScheduledRun(wanted)))

    @initialize()
    def begin(self) -> None:
        self.connect(2, None, 1000.0)

    @rule(
        ranks=st.integers(1, 4), idle_s=st.sampled_from([None, 30.0, 200.0]), timeout_s=st.sampled_from([60.0, 1000.0])
    )
    def connect(self, ranks: int, idle_s: float | None, timeout_s: float) -> None:
        self.add(session(ranks, run_id=f"{len(self.specs):08x}", idle_s=idle_s, timeout_s=timeout_s))

    @rule(ranks=st.integers(1, 4), wait_s=st.sampled_from([None, 0.0, 30.0]))
    def run_alone(self, ranks: int, wait_s: float | None) -> None:
        self.add(spec(f"{len(self.specs):08x}", ranks, "any", wait_s=wait_s))

    @rule(
        data=st.data(),
        fresh=st.booleans(),
        fewer=st.integers(0, 1),
        wait_s=st.sampled_from([None, None, 0.0, 30.0]),
        timeout_s=st.sampled_from([40.0, 1000.0]),
    )
    def run_in_session(
        self, data: st.DataObject, fresh: bool, fewer: int, wait_s: float | None, timeout_s: float
    ) -> None:
        sessions = [run_id for run_id, wanted in self.specs.items() if wanted.kind is RunKind.SESSION]
        chosen = data.draw(st.sampled_from(sessions))
        ranks = max(1, self.specs[chosen].placement.ranks - (fewer if fresh else 0))
        run_id = f"{len(self.specs):08x}"
        self.add(cell(run_id, ranks, of=chosen, fresh=fresh, wait_s=wait_s, timeout_s=timeout_s))

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(TimePassed())

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        state=st.sampled_from([RunState.STARTING, RunState.RUNNING, RunState.RUNNING, RunState.SUCCEEDED]),
    )
    def report(self, data: st.DataObject, state: RunState) -> None:
        self.feed(RunMoved(data.draw(st.sampled_from(sorted(self.leases))), state))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), state=st.sampled_from([state for state in RunState if state.is_final]))
    def over(self, data: st.DataObject, state: RunState) -> None:
        self.reap(data.draw(st.sampled_from(sorted(self.leases))), state)

    def reap(self, run_id: str, state: RunState) -> None:
        del self.leases[run_id]
        if self.specs[run_id].kind is RunKind.SESSION:
            # the agent first reports the end of the cells in its ranks
            for other in [o for o in self.leases if self.specs[o].in_session and self.specs[o].session == run_id]:
                self.feed(RunMoved(run_id, RunState.FAILED))
                self.reap(other, RunState.FAILED)
        self.feed(RanksReaped(run_id, state))
        assert self.states[run_id].is_final
        self.gone.add(run_id)

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.feed(CancelRequested(data.draw(st.sampled_from(sorted(self.specs))), "interrupted"))

    @rule(data=st.data(), is_paused=st.booleans())
    def pause(self, data: st.DataObject, is_paused: bool) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.specs)))
        self.feed(SessionPaused(run_id, (1,)) if is_paused else SessionResumed(run_id))

    @rule()
    def service_is_killed_and_another_takes_over(self) -> None:
        kept = [run for run in self.scheduler.runs if not run.have_ranks_exited]
        held_on = {run.run_id for run in self.scheduler.runs if run.have_ranks_exited}
        if held_on:
            # the next service does not know a session whose ranks are gone: another test covers that
            return
        self.scheduler = Scheduler()
        for run in sorted(kept, key=lambda run: bool(run.spec.session)):
            if run.run_id in self.leases:
                if self.states[run.run_id] is RunState.QUEUED:
                    self.states[run.run_id] = RunState.STARTING
                adopted = RunAdopted(ScheduledRun(run.spec, self.states[run.run_id]), self.leases[run.run_id], self.now)
                self.feed(adopted)
        for run in kept:
            if run.run_id not in self.leases:
                self.feed(RunSubmitted(ScheduledRun(run.spec)))
        self.feed(InventoryChanged(node(*gpus(4), slots=4)))

    @invariant()
    def no_run_is_lost(self) -> None:
        kept = {run.run_id: run for run in self.scheduler.runs if not run.have_ranks_exited}
        assert kept.keys() | self.gone == set(self.specs)
        for run_id, run in kept.items():
            assert run.state is self.states[run_id]
            assert run.lease == self.leases.get(run_id)
            assert (run_id in self.scheduler.published) == (run.lease is None)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        for run in self.scheduler.runs:
            if (published := self.scheduler.published.get(run.run_id)) is not None:
                assert re.match(r"needs [1-9]|its session|run |rank", published.reason)
            if run.have_ranks_exited:
                assert any(self.specs[o].session == run.run_id and self.specs[o].fresh for o in self.leases)

    @invariant()
    def deadlines_are_not_past(self) -> None:
        deadline = self.scheduler.next_deadline()
        assert deadline is None or deadline > self.now

    def teardown(self) -> None:
        """Ranks start and end normally: every run ends."""
        for run_id in sorted(self.specs):
            self.feed(SessionResumed(run_id))
        for _ in range(2 * len(self.specs) + 1):
            for run_id in sorted(self.leases):
                self.feed(RunMoved(run_id, RunState.RUNNING))
            cells = [run_id for run_id in sorted(self.leases) if self.specs[run_id].kind is not RunKind.SESSION]
            waiting = {run.spec.session for run in self.scheduler.runs if run.lease is None}
            sessions = [run_id for run_id in sorted(self.leases) if run_id not in cells and run_id not in waiting]
            for run_id in cells or sessions[:1]:
                if run_id in self.leases:
                    self.reap(run_id, RunState.SUCCEEDED)
        assert not self.scheduler.runs
        assert self.gone == set(self.specs)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_a_run_that_waits_for_a_sessions_devices_is_told_its_name() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, session(2))
    assert waits_for(submit(scheduler, spec(D, 1)), D) == (1, "needs 1 more A10; 2 are held by session work")

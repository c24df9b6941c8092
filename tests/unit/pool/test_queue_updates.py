"""Updates of many waiting runs: which followers get theirs at once, and when the others do."""

from __future__ import annotations

from scheduler_requests import QueueMoved, Scheduler, gpus, node, running, spec, submit

from sgpu_magic.pool.scheduling.stimuli import RanksReaped, TimePassed
from sgpu_magic.wire.base import RunState


def test_of_many_waiting_runs_the_first_are_updated_at_once_and_the_others_later() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    run_ids = [f"{number:08x}" for number in range(102)]
    for run_id in run_ids:
        submit(scheduler, spec(run_id))
    assert [moved.position for moved in scheduler.published.values()] == list(range(1, 102))
    running(scheduler, run_ids[0])
    out = scheduler.handle(RanksReaped(run_ids[0], RunState.SUCCEEDED), 0.5)
    moved = [one for one in out if isinstance(one, QueueMoved)]
    assert [(one.run_id, one.position) for one in moved] == list(zip(run_ids[2:6], range(1, 5), strict=True))
    # queries are always current
    assert scheduler.worded_statuses()[run_ids[101]] == (100, f"needs 1 more A10; 1 is held by run {run_ids[1][:4]}")
    due = scheduler.next_deadline()
    assert due is not None
    assert 0.5 < due < 1.1
    late = scheduler.handle(TimePassed(), due)
    assert {one.run_id for one in late if isinstance(one, QueueMoved)} == set(run_ids[6:])
    assert [moved.position for moved in scheduler.published.values()] == list(range(1, 101))
    assert scheduler.next_deadline() is None or scheduler.next_deadline() > due

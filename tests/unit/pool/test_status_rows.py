"""Status rows: what the scheduler adds to the ledger's, without new objects for unchanged rows."""

from __future__ import annotations

from msgspec.structs import replace

from sgpu_magic.pool.status import RowsWithTimes
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.pool_status import RunSummary

A, B, C = (
    RunSummary(
        run_id=run_id, name="cell", ranks=1, device_type="a10", simulated=True, state=state, submitted_at=1.0,
        metered_at=metered_at,
    )
    for run_id, state, metered_at in (
        ("a", RunState.RUNNING, 100.0),
        ("b", RunState.QUEUED, None),
        ("c", RunState.SUCCEEDED, None),
    )
)  # fmt: skip


def test_what_the_scheduler_knows_is_added_and_the_order_stays() -> None:
    rows = RowsWithTimes().complete([C, B, A], {"b": (2, "a10 is in use")}, {"a": 500}, {"a": 100.4}, {})
    assert rows == (C, replace(B, position=2, waiting_for="a10 is in use"), replace(A, idle_ends_at=500.0))


def test_dead_ranks_are_shown_until_they_are_replaced() -> None:
    made = RowsWithTimes()
    assert [row.dead_ranks for row in made.complete([A, B], {}, {}, {}, {"b": (1, 3)})] == [(), (1, 3)]
    assert made.complete([A, B], {}, {}, {}, {}) == (A, B)


def test_rows_that_stay_the_same_are_the_same_objects() -> None:
    made = RowsWithTimes()
    first = made.complete([A, B, C], {"b": (2, "x")}, {"a": 500}, {"a": 100.4}, {})
    again = made.complete([A, B, C], {"b": (2, "x")}, {"a": 500}, {"a": 100.6}, {})
    assert all(had is has for had, has in zip(first, again, strict=True))
    assert made.complete([B], {"b": (1, "x")}, {}, {}, {})[0].position == 1
    changed = replace(B, name="other")
    assert made.complete([changed], {"b": (1, "x")}, {}, {}, {}) == (replace(changed, position=1, waiting_for="x"),)


def test_a_wall_clock_that_was_set_moves_the_begin_of_metering() -> None:
    made = RowsWithTimes()
    for now in (100.9, 160.0, 161.0):
        (row,) = made.complete([A], {}, {}, {"a": now}, {})
        assert row.metered_at == (100.0 if now < 101 else now)

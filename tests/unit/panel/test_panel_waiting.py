"""When devices will be free: an estimate that never decreases for more devices, and is 0 only for free ones."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from status_rows import run_summary

from sgpu_magic.panel.device_rows import Claim, Durations, holders_of, queue_of, waits
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.pool_status import RunSummary

NOW = 1_000_000.0
SECONDS = st.floats(0, 1e6)
GUESSES = st.none() | SECONDS


def run(
    name: str = "train", *, took: float | None = None, running: float | None = None, **others: object
) -> RunSummary:
    """A run that ended after `took` seconds, or one that has been running for `running` seconds, or one that waits."""
    began = None if took is None and running is None else NOW - (running or 0.0) - (5000.0 if took is not None else 0.0)
    state = RunState.SUCCEEDED if took is not None else RunState.QUEUED if running is None else RunState.RUNNING
    base = run_summary(
        name=name,
        simulated=True,
        state=state,
        submitted_at=NOW - 9000.0,
        started_at=began,
        ended_at=None if took is None or began is None else began + took,
        metered_at=began,
        uuids=("SIM-a10-0", "SIM-a10-1") if running is not None else (),
    )
    return msgspec.structs.replace(base, **others)


@st.composite
def pools(
    draw: st.DrawFn, guesses: st.SearchStrategy[float | None] = GUESSES
) -> tuple[int, int, list[Claim], list[Claim]]:
    """A pool: all devices, free ones, claims of runs (which add up with the free ones to all), and the queue."""
    held = draw(st.lists(st.builds(Claim, st.integers(1, 8), guesses), max_size=6))
    free = draw(st.integers(0, 8))
    total = free + sum(one.count for one in held)
    queue = draw(st.lists(st.builds(Claim, st.integers(1, 10), guesses), max_size=6))
    return total, free, held, queue


@given(pools())
def test_the_wait_is_nothing_exactly_for_what_is_free(pool: tuple[int, int, list[Claim], list[Claim]]):
    total, free, held, queue = pool
    found = waits(total, free, held, queue)
    assert len(found) == total
    assert [wait == 0 for wait in found] == [number <= free for number in range(1, total + 1)]


@given(pools())
def test_more_devices_never_come_sooner_than_fewer(pool: tuple[int, int, list[Claim], list[Claim]]):
    found = [float("inf") if wait is None else wait for wait in waits(*pool)]
    assert found == sorted(found)


@given(pools(SECONDS))
def test_only_what_nobody_knows_is_not_guessed(pool: tuple[int, int, list[Claim], list[Claim]]):
    assert None not in waits(*pool)


@given(pools(SECONDS))
def test_who_waits_before_makes_nothing_sooner(pool: tuple[int, int, list[Claim], list[Claim]]):
    total, free, held, queue = pool
    alone, behind = waits(total, free, held, []), waits(total, free, held, queue)
    assert all((first or 0) <= (second or 0) for first, second in zip(alone, behind, strict=True))


def test_devices_come_back_one_run_after_the_other():
    assert waits(4, 1, [Claim(1, 40.0), Claim(2, 720.0)], []) == (0.0, 40.0, 720.0, 720.0)


def test_those_who_wait_get_theirs_first():
    # the two devices that are free after 40 s go to the queued run, for a minute
    assert waits(2, 0, [Claim(2, 40.0)], [Claim(2, 60.0)]) == (120.0, 120.0)
    # a request for more devices than are free lets others pass
    assert waits(4, 1, [Claim(3, 40.0)], [Claim(4, 60.0)])[0] == 0.0


def test_devices_of_which_nobody_knows_anything_are_not_waited_for():
    assert waits(3, 1, [Claim(1, None), Claim(1, 25.0)], []) == (0.0, 30.0, None)
    # in use outside the pool
    assert waits(3, 1, [], []) == (0.0, None, None)


@pytest.mark.parametrize(("left", "text"), [(0.0, 10.0), (12.0, 20.0), (61.0, 90.0), (601.0, 660.0)])
def test_nobody_is_told_seconds(left: float, text: float):
    assert waits(1, 0, [Claim(1, left)], []) == (text,)


def test_a_run_takes_as_long_as_those_of_its_name_took():
    known = Durations([run(took=100.0), run(took=300.0), run(took=200.0), run("eval", took=7.0)])
    assert known.left_s(run(running=0.0), "a10", 0.0) == 200.0
    assert known.left_s(run(running=50.0), "a10", 50.0) == 150.0
    # the median of the runs that took longer than this one has so far
    assert known.left_s(run(running=150.0), "a10", 150.0) == 100.0
    # it has run for longer than all of them
    assert known.left_s(run(running=400.0), "a10", 400.0) == 400.0


def test_a_run_of_another_name_takes_as_long_as_all_of_its_type():
    known = Durations(
        [run(took=100.0), run(took=300.0), run("eval", took=200.0), run("work", took=9000.0, kind=RunKind.SESSION)]
    )
    assert known.left_s(run("new", running=0.0), "a10", 0.0) == 200.0
    assert known.left_s(run("new", running=0.0, kind=RunKind.SESSION), "a10", 0.0) == 9000.0
    assert known.left_s(run("new", running=0.0), "h100", 0.0) is None


def test_what_never_held_devices_of_its_own_is_no_example():
    cell = run(took=100.0, session="00000002")
    waited = run(took=None, state=RunState.CANCELLED, ended_at=NOW)
    assert Durations([cell, waited]).left_s(run(running=0.0), "a10", 0.0) is None


def test_an_idle_session_is_over_when_its_idle_time_is():
    session = run("work", running=600.0, kind=RunKind.SESSION, idle_ends_at=NOW + 90.0)
    uuids = frozenset(session.uuids)
    assert holders_of("a10", [session], Durations([]), NOW, uuids) == [Claim(2, 90.0)]
    # a cell in a session holds no devices of its own
    cell = run(running=5.0, session=session.run_id)
    assert holders_of("a10", [session, cell], Durations([]), NOW, uuids) == [Claim(2, 90.0)]


def test_ranks_without_devices_hold_cpu_slots():
    stands_in = run(running=5.0, uuids=(), device_type="h100")
    assert holders_of("cpu", [stands_in, run(running=5.0)], Durations([]), NOW, frozenset()) == [Claim(2, None)]


def test_the_queue_stands_in_its_order():
    first = run("a", position=1, ranks=1)
    second = run("b", position=2, ranks=3)
    any_type = run("c", position=3, ranks=4, device_type="any")
    elsewhere = run("d", position=1, device_type="h100")
    inside = run("e", position=1, session="00000002")
    found = queue_of("a10", [any_type, second, inside, elsewhere, first], Durations([]), "a10")
    assert [one.count for one in found] == [1, 3, 4]

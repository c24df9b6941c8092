"""Changes of a status: applied to the previous status, they give the new one, whatever has changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from status_rows import pool_status, run_summary

from sgpu_magic.wire import codec
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Device, Inventory
from sgpu_magic.wire.pool_status import DeviceHistory, PoolStatus, RunSummary, changes_between, with_changes

IDS = [f"{number:08x}" for number in range(6)]


def run(run_id: str, state: RunState) -> RunSummary:
    return run_summary(run_id=run_id, state=state)


def device(number: int, memory_bytes: int) -> Device:
    return Device(type="a10", uuid=f"GPU-{number}", index=number, memory_bytes=memory_bytes)


RUNS = st.lists(
    st.builds(run, st.sampled_from(IDS), st.sampled_from([RunState.QUEUED, RunState.RUNNING, RunState.SUCCEEDED])),
    unique_by=lambda each: each.run_id,
).map(tuple)
INVENTORIES = st.builds(
    lambda numbers, memory, slots: Inventory(
        host="here", devices=tuple(device(number, memory + number % 2) for number in numbers), cpu_slots=slots
    ),
    st.lists(st.integers(0, 3), unique=True),
    st.integers(1, 2),
    st.integers(1, 2),
)


@st.composite
def statuses(draw: st.DrawFn, version: str) -> PoolStatus:
    return pool_status(
        *draw(RUNS),
        request=draw(st.integers(1, 9)),
        inventory=draw(INVENTORIES),
        cpu_slots_free=draw(st.integers(0, 2)),
        clients=draw(st.integers(1, 2)),
        version=version,
    )


@given(old=statuses("1"), new=statuses("2"))
def test_changes_give_the_new_status(old: PoolStatus, new: PoolStatus):
    reported = codec.pool_messages.decode(codec.encode(changes_between(old, new)))
    assert isinstance(reported, PoolStatus)
    assert with_changes(old, reported) == new


@given(old=statuses("1"))
def test_what_is_the_same_is_not_told(old: PoolStatus):
    reported = changes_between(old, replace(old, version="2"))
    assert (reported.runs, reported.inventory.devices) == ((), ())
    assert reported.changes is not None
    assert (reported.changes.listed, reported.changes.devices) == (None, ())


def test_of_many_devices_and_runs_the_changed_ones_are_told():
    devices = tuple(device(number, 1) for number in range(100))
    runs = tuple(run(f"{number:08x}", RunState.RUNNING) for number in range(100))
    old = pool_status(*runs, version="1", inventory=Inventory(host="", devices=devices))
    changed = device(7, 2)
    new = replace(
        old,
        version="2",
        inventory=Inventory(host="", devices=(*devices[:7], changed, *devices[8:])),
        runs=(run("ffffffff", RunState.QUEUED), *runs[:5], replace(runs[5], state=RunState.FAILED), *runs[6:]),
    )
    reported = changes_between(old, new)
    assert reported.changes is not None
    assert reported.changes.devices == (changed,)
    assert [each.run_id for each in reported.runs] == ["ffffffff", "00000005"]
    assert with_changes(old, reported) == new


def test_changes_of_another_status_are_not_taken():
    status = pool_status(version="1")
    reported = changes_between(status, replace(status, version="2"))
    assert with_changes(None, status) is status
    for known in (None, replace(status, version="0")):
        with pytest.raises(ValueError, match="not known"):
            with_changes(known, reported)


def test_a_history_is_complete_in_each_answer():
    old = pool_status(version="1", history=(DeviceHistory(uuid="GPU-0", type="a10"),))
    newer = (DeviceHistory(uuid="GPU-0", type="a10", utilization_pct=(1, None, 3)),)
    reply = replace(changes_between(old, replace(old, version="2")), history=newer)
    assert with_changes(old, codec.pool_messages.decode(codec.encode(reply))).history == newer
    # without a question for it there is none, even if there was one before
    reply = changes_between(old, replace(old, version="2", history=()))
    assert with_changes(old, codec.pool_messages.decode(codec.encode(reply))).history == ()

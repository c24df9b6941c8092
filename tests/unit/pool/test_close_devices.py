"""Which of a node's free GPUs a run gets: those that are close together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
import msgspec
import pytest
from examples import examples
from hypothesis import given, settings
from scheduler_requests import Scheduler, gpus, launched, node, spec, submit

from sgpu_magic.pool.scheduling.placement import close_together
from sgpu_magic.wire.devices import Device

A, B = "aaaa0000", "bbbb0000"
# NVML's levels
NVLINK, SWITCH, SOCKET, OTHER_SOCKET = 0, 10, 40, 50


def connected(distances: Sequence[Sequence[int]], *, outside: Sequence[int] = ()) -> tuple[Device, ...]:
    devices = gpus(len(distances), outside=outside)
    return tuple(msgspec.structs.replace(one, distances=tuple(distances[one.index])) for one in devices)


def tree(*parts: Sequence[int], within: int, between: int) -> list[list[int]]:
    """Distances of devices in groups."""
    group = {index: at for at, part in enumerate(parts) for index in part}
    return [
        [0 if one == other else within if group[one] == group[other] else between for other in sorted(group)]
        for one in sorted(group)
    ]


PAIRS = tree((0, 2), (1, 3), within=NVLINK, between=OTHER_SOCKET)
SOCKETS = tree((0, 1, 2), (3, 4, 5, 6, 7), within=SOCKET, between=OTHER_SOCKET)


def indices(scheduler: Scheduler, run_id: str, count: int) -> list[int]:
    lease = launched(submit(scheduler, spec(run_id, count)))[run_id]
    return [int(uuid.rpartition("-")[2]) for uuid in lease.uuids]


@pytest.mark.parametrize(
    ("distances", "count", "expected"),
    [
        (PAIRS, 2, [0, 2]),
        (PAIRS, 3, [0, 1, 2]),
        (PAIRS, 4, [0, 1, 2, 3]),
        (SOCKETS, 2, [0, 1]),
        (SOCKETS, 3, [0, 1, 2]),
        (SOCKETS, 4, [3, 4, 5, 6]),
        (tree(range(8), within=NVLINK, between=NVLINK), 3, [0, 1, 2]),
    ],
)
def test_a_run_gets_devices_that_are_close_together(
    distances: list[list[int]], count: int, expected: list[int]
) -> None:
    assert indices(Scheduler(node(*connected(distances))), A, count) == expected


def test_a_single_rank_leaves_a_pair_to_others() -> None:
    alone = tree((0, 1), (2,), (3, 4), within=NVLINK, between=SOCKET)
    scheduler = Scheduler(node(*connected(alone)))
    assert indices(scheduler, A, 1) == [2]
    assert indices(scheduler, B, 2) == [0, 1]


def test_idle_devices_come_before_close_ones_that_others_use() -> None:
    scheduler = Scheduler(node(*connected(PAIRS, outside=(2,))))
    wanted = spec(A, 4, allow_busy=True)
    assert len(launched(submit(scheduler, wanted))[A].uuids) == 4
    scheduler = Scheduler(node(*connected(PAIRS, outside=(2,))))
    lease = launched(submit(scheduler, spec(A, 2, allow_busy=True)))[A]
    assert lease.uuids == ("GPU-a10-1", "GPU-a10-3")


def test_devices_of_unknown_distances_are_chosen_in_bus_order() -> None:
    assert indices(Scheduler(node(*gpus(4))), A, 2) == [0, 1]
    # as from an agent that lists fewer devices now
    short = tuple(msgspec.structs.replace(one, distances=(0, 10)) for one in gpus(3))
    assert [one.index for one in close_together(short, 2)] == [0, 1]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=2, max_size=8), st.data())
@settings(max_examples=examples(200))
def test_no_other_choice_has_a_shorter_longest_way(places: list[tuple[bool, int]], data: st.DataObject) -> None:
    """On a machine with sockets and switches."""
    distances = [
        [
            0 if at == other_at else SWITCH if one == other else SOCKET if one[0] == other[0] else OTHER_SOCKET
            for other_at, other in enumerate(places)
        ]
        for at, one in enumerate(places)
    ]
    devices = connected(distances)
    count = data.draw(st.integers(1, len(devices) - 1))

    def longest(chosen: Sequence[Device]) -> int:
        return max(one.distances[other.index] for one in chosen for other in chosen)

    chosen = close_together(devices, count)
    assert len({device.uuid for device in chosen}) == count
    assert longest(chosen) == min(map(longest, itertools.combinations(devices, count)))

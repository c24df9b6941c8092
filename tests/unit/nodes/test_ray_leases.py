"""A Ray cluster as the scheduler sees it, without Ray."""

from __future__ import annotations

import msgspec
import pytest

from sgpu_magic.nodes.ray.agent_main import as_ray_counts
from sgpu_magic.nodes.ray.driver import LeasePart, NodeDevice, NodeFacts
from sgpu_magic.nodes.ray.leases import devices_of, is_worth_a_note, shares_of

SEEN = NodeFacts(node="a", host="a", address="10.0.0.1", probed=True)
UNSEEN = NodeFacts(node="b", host="b", address="10.0.0.2")
BROKEN = NodeFacts(node="c", host="c", address="10.0.0.3", problem="nobody could look")


@pytest.mark.parametrize(
    ("nodes", "waited_s", "reported"),
    [
        ([], 0.0, True),
        ([SEEN, BROKEN], 0.0, True),
        # one slow node delays the others only briefly
        ([SEEN, UNSEEN], 14.0, False),
        ([SEEN, UNSEEN], 15.0, True),
        # without any known node, a run would be refused: "It has: nothing"
        ([UNSEEN, UNSEEN], 15.0, False),
        ([UNSEEN, UNSEEN], 45.0, True),
    ],
)
def test_a_pool_says_what_it_has_once_nodes_were_looked_at(nodes: list[NodeFacts], waited_s: float, reported: bool):
    assert is_worth_a_note(nodes, waited_s) is reported


GPUS = [{"uuid": f"GPU-{letter}000", "name": "NVIDIA A10", "memory_bytes": 24 << 30} for letter in "abcd"]


@pytest.mark.parametrize(
    ("visible", "counted"),
    [
        (None, {"0": "GPU-a000", "1": "GPU-b000", "2": "GPU-c000", "3": "GPU-d000"}),
        ("2,3", {"2": "GPU-c000", "3": "GPU-d000"}),
        # in the order of the variable
        ("3,1", {"3": "GPU-d000", "1": "GPU-b000"}),
        ("GPU-d,GPU-b000", {"GPU-d": "GPU-d000", "GPU-b000": "GPU-b000"}),
        ("1,7,2", {"1": "GPU-b000"}),
        ("", {}),
        ("none", {}),
    ],
)
def test_the_gpus_that_ray_counts_are_those_that_its_raylet_sees(visible: str | None, counted: dict[str, str]):
    found = as_ray_counts(GPUS, visible)
    assert {device["ray_id"]: device["uuid"] for device in found} == counted
    facts = NodeFacts(
        node="n", host="n", address="10.0.0.1", gpus=len(found), probed=True, label="A10",
        devices=tuple(msgspec.convert(device, NodeDevice) for device in found),
    )  # fmt: skip
    assert [device.uuid for device in devices_of(facts)] == list(counted.values())
    # the rank sees exactly the devices that Ray grants, in any order
    parts = [LeasePart(node="n", ranks=1, gpus=(ray_id,)) for ray_id in reversed(counted)]
    assert [share.uuids for share in shares_of(parts, {"n": facts})] == [
        (counted[ray_id],) for ray_id in reversed(counted)
    ]


def test_gpus_that_are_not_real_are_numbered():
    facts = NodeFacts(node="node-of-ray", host="n", address="10.0.0.1", gpus=2, probed=True, label="A10")
    (share,) = shares_of([LeasePart(node="node-of-ray", ranks=1, gpus=("1",))], {"node-of-ray": facts})
    assert share.uuids == ("SIM-a10-node-of-ra-1",)

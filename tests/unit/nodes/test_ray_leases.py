"""What a Ray cluster is to the scheduler, without Ray."""

from __future__ import annotations

import pytest

from sgpu_magic.nodes.ray.driver import NodeFacts
from sgpu_magic.nodes.ray.leases import is_told

SEEN = NodeFacts(node="a", host="a", address="10.0.0.1", probed=True)
UNSEEN = NodeFacts(node="b", host="b", address="10.0.0.2")
BROKEN = NodeFacts(node="c", host="c", address="10.0.0.3", problem="nobody could look")


@pytest.mark.parametrize(
    ("nodes", "waited_s", "told"),
    [
        ([], 0.0, True),
        ([SEEN, BROKEN], 0.0, True),
        # one is slow, and does not hold the others up for long
        ([SEEN, UNSEEN], 14.0, False),
        ([SEEN, UNSEEN], 15.0, True),
        # with nothing known a run would be refused: "It has: nothing"
        ([UNSEEN, UNSEEN], 15.0, False),
        ([UNSEEN, UNSEEN], 45.0, True),
    ],
)
def test_a_pool_says_what_it_has_once_nodes_were_looked_at(nodes: list[NodeFacts], waited_s: float, told: bool):
    assert is_told(nodes, waited_s) is told

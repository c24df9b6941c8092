"""Pools of many nodes: how devices are placed, which requests are impossible, and the reasons given to queued runs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from scheduler_requests import Scheduler
from simulated_cluster import Driven, cluster, spec

from sgpu_magic.config.pool_terms import read_prices
from sgpu_magic.pool.scheduling.costs import Tariff
from sgpu_magic.pool.scheduling.stimuli import (
    EndUnstartedRun,
    InventoryChanged,
    LaunchRun,
    LeaseGranted,
    LeaseRefused,
    MoveRun,
    RunRequeued,
)
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.devices import Inventory, NodeShare
from sgpu_magic.wire.run import RunSpec

A, B, C, D, E = "aaaa0000", "bbbb0000", "cccc0000", "dddd0000", "eeee0000"
TWO: Mapping[str, tuple[str, int]] = {"n1": ("h100", 8), "n2": ("h100", 8)}
FOUR: Mapping[str, tuple[str, int]] = dict.fromkeys(("n1", "n2", "n3", "n4"), ("h100", 8))


def driven(inventory: Inventory, **options: float) -> Driven:
    return Driven(Scheduler(inventory, **options))


# ---------------------------------------------------------------- placement on nodes


def test_a_run_takes_the_node_where_the_least_is_left_over() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 5), spec(B, 3), spec(C, 8))
    assert pool.parts(A) == [("n1", 5)]
    assert pool.parts(B) == [("n1", 3)]
    assert pool.parts(C) == [("n2", 8)]


def test_what_is_left_of_a_node_is_used_before_an_empty_one() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 5), spec(B, 2), spec(C, 8))
    assert pool.parts(B) == [("n1", 2)]
    assert pool.parts(C) == [("n2", 8)]


def test_a_packed_run_takes_few_nodes_and_its_largest_part_has_the_first_ranks() -> None:
    pool = driven(cluster(FOUR))
    pool.submit(spec(A, 6), spec(B, 4), spec(C, 18))
    # 8 from each of the two empty nodes, and 2 from the node that has exactly 2 free
    assert pool.parts(C) == [("n3", 8), ("n4", 8), ("n1", 2)]
    lease = pool.leases[C]
    assert lease.uuids == tuple(uuid for share in lease.shares for uuid in share.uuids)
    assert [share.host for share in lease.shares] == ["host-n3", "host-n4", "host-n1"]
    assert lease.shares[0].address == "10.0.0.3"
    assert lease.shares[2].uuids == ("GPU-n1-6", "GPU-n1-7")


def test_a_spread_run_takes_every_node_evenly() -> None:
    pool = driven(cluster(FOUR))
    pool.submit(spec(A, 6, strategy="spread"))
    assert pool.parts(A) == [("n1", 2), ("n2", 2), ("n3", 1), ("n4", 1)]


def test_so_many_nodes_get_as_many_ranks_each() -> None:
    pool = driven(cluster(FOUR))
    pool.submit(spec(A, 6), spec(B, 8, nodes=2), spec(C, 2, nodes=1))
    assert pool.parts(B) == [("n2", 4), ("n3", 4)]
    assert pool.parts(C) == [("n1", 2)]


def test_a_strictly_packed_run_waits_for_one_node_though_enough_is_free() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 4, nodes=1), spec(B, 8, nodes=2), spec(C, 4, strategy="strict_pack"))
    assert pool.parts(A) == [("n1", 4)]
    assert pool.parts(B) == [("n1", 4), ("n2", 4)]
    assert pool.parts(C) == [("n2", 4)]
    pool.end(A)
    pool.submit(spec(D, 8, strategy="strict_pack"))
    pool.end(C)
    # eight are free, four on each node
    assert D not in pool.leases
    pool.end(B)
    assert pool.parts(D) == [("n1", 8)]


def test_cpu_slots_are_those_of_nodes_and_no_two_ranks_share_one() -> None:
    pool = driven(cluster(TWO, slots=4))
    pool.submit(spec(A, 6, "cpu"), spec(B, 1, "cpu"), spec(C, 2, "cpu"))
    assert pool.parts(A) == [("n1", 4), ("n2", 2)]
    assert pool.leases[A].cpu_slots == 6
    assert pool.parts(B) == [("n2", 1)]
    assert pool.reason(C) == (
        "needs 2 CPU ranks; 1 is free of 8, the largest node has 1 free of 4 (2 are held by run aaaa, 1 is held by "
        "run bbbb)"
    )


def test_a_lease_has_devices_of_one_type() -> None:
    pool = driven(cluster({"n1": ("a10", 4), "n2": ("h100", 8)}))
    pool.submit(spec(A, 5, "any"), spec(B, 7, "any"))
    assert {uuid[:6] for uuid in pool.leases[A].uuids} == {"GPU-n2"}
    assert pool.leases[A].device_type == "h100"
    assert B not in pool.leases


# ---------------------------------------------------------------- memory


def test_the_cheapest_type_with_enough_memory_is_taken() -> None:
    inventory = cluster({"n1": ("h100", 8), "n2": ("a100", 4, 80), "n3": ("l4", 8, 24)})
    prices = read_prices("h100=9.0,a100=4.0,l4=1.0")
    pool = Driven(Scheduler(inventory, tariff=Tariff(prices)))
    pool.submit(spec(A, 2, "any", memory=40), spec(B, 2, "any", memory=16), spec(C, 8, "any", memory=40))
    assert [pool.leases[run].device_type for run in (A, B, C)] == ["a100", "l4", "h100"]


def test_of_types_that_cost_the_same_the_one_with_more_free_is_taken() -> None:
    pool = driven(cluster({"n1": ("h100", 4), "n2": ("a100", 6, 80)}))
    pool.submit(spec(A, 4, "any", memory=40), spec(B, 3, "any", memory=40))
    assert [pool.leases[run].device_type for run in (A, B)] == ["a100", "h100"]


def test_devices_with_less_memory_are_not_taken() -> None:
    pool = driven(cluster({"n1": ("a100", 4, 40), "n2": ("a100", 4, 80)}))
    pool.submit(spec(A, 3, "a100", memory=60), spec(B, 2, "a100", memory=60), spec(C, 2, "a100"))
    assert pool.parts(A) == [("n2", 3)]
    assert pool.parts(C) == [("n1", 2)]
    assert pool.reason(B) == ("needs 2 A100 with 60 GB; 1 is free of 4, the largest node has 1 free of 4")


# ---------------------------------------------------------------- impossible requests


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            spec(A, 9, strategy="strict_pack"),
            "no node of this pool has 9 H100: the largest, host-n1, has 8. Leave --placement strict_pack and --nodes 1 "
            "out to take several nodes, use --gpus 8 or fewer, or choose another pool with --pool.",
        ),
        (
            spec(A, 5, nodes=2),
            "5 ranks can't be spread evenly over --nodes 2. Make --gpus a multiple of --nodes, or leave --nodes out.",
        ),
        (
            spec(A, 3, nodes=3),
            "2 nodes of this pool have 1 H100 or more, and the run asks for 1 on each of 3 (--nodes). The largest "
            "node, host-n1, has 8. Ask for other --gpus or --nodes, or choose another pool with --pool.",
        ),
        (
            spec(A, 17),
            "this pool has 16 H100, and the run asks for 17. Use --gpus 16 or fewer, another --type, or another pool "
            "with --pool. It has: 16 H100, 8 CPU ranks.",
        ),
        (
            spec(A, 2, memory=90),
            "no H100 of this pool has 90 GB of memory (--min-memory), and the run asks for 2: they have 80 GB. Ask for "
            "less memory, fewer with --gpus, or leave --type out so that the pool chooses.",
        ),
        (
            spec(A, 2, "any", memory=90),
            "this pool can't place 2 ranks on devices of one type with 90 GB of memory (--min-memory). It has: 16 H100 "
            "with 80 GB. Ask for less memory, fewer with --gpus, or choose another pool with --pool.",
        ),
        (
            spec(A, 2, strategy="zigzag"),
            "--placement 'zigzag' is not known. Use one of pack, strict_pack, spread.",
        ),
        (
            spec(A, 2, nodes=2, strategy="strict_pack"),
            "--placement strict_pack uses one node, and --nodes 2 asks for more. Leave one of them out.",
        ),
        (
            spec(A, 2, "l4"),
            "this pool has no L4. It has: 16 H100, 8 CPU ranks. Run the ranks on CPU instead with "
            "SGPU_STAND_IN=cpu, leave --type out to use what is there, or choose another pool with --pool. "
            "`%env NAME=VALUE` sets a variable in a notebook.",
        ),
        (
            spec(A, 9, "cpu"),
            "this pool has 8 CPU ranks, and the run asks for 9. Use --gpus 8 or fewer, another --type, or another pool "
            "with --pool. It has: 16 H100, 8 CPU ranks.",
        ),
        (
            spec(A, 9, session=True),
            "a session's ranks are all on one node, and no node of this pool has 9 H100: the largest, host-n1, has 8. "
            "Connect with --gpus 8 or fewer, run cells without a session to take several nodes, or choose another "
            "pool with --pool.",
        ),
    ],
    ids=lambda value: value.placement.strategy if isinstance(value, RunSpec) else "",
)
def test_what_can_never_be_is_refused_at_once(asked: RunSpec, message: str) -> None:
    pool = driven(cluster(TWO))
    pool.submit(asked)
    error = "SessionError" if asked.kind is RunKind.SESSION else "UsageError"
    assert (pool.refused[A].error, pool.refused[A].reason) == (error, message)
    assert pool.scheduler.runs == ()


def test_one_machine_has_no_nodes_to_ask_for() -> None:
    inventory = msgspec.structs.replace(cluster({"": ("h100", 8)}), nodes=())
    pool = driven(inventory)
    pool.submit(spec(A, 4, nodes=2), spec(B, 4, nodes=1), spec(C, 4, strategy="spread"))
    assert pool.refused[A].reason == (
        "this pool is one machine, and the run asks for 2 nodes. Leave --nodes out, or choose another pool with --pool."
    )
    assert pool.leases[B].shares == pool.leases[C].shares == ()


def test_a_session_is_on_one_node() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 6), spec(B, 4), spec(C, 6, session=True), spec(D, 8, nodes=2, session=True))
    assert pool.refused[D].error == "SessionError"
    assert pool.refused[D].reason == (
        "the ranks of session cell are all on one node, and --nodes 2 asks for more. Leave it out, or run the cell "
        "without a session (%%distributed with the same options)."
    )
    assert pool.reason(C).startswith("needs 6 H100 on one node; 6 are free of 16")
    pool.end(A)
    assert pool.parts(C) == [("n1", 6)]


def test_a_session_that_asks_for_memory_is_on_one_node_too() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 9, "any", memory=40, session=True), spec(B, 6, memory=40), spec(C, 6, "any", memory=40))
    pool.submit(spec(D, 4, "any", memory=40, session=True))
    assert "no node of this pool has 9 H100" in pool.refused[A].reason
    assert pool.reason(D).startswith("needs 4 H100 with 40 GB on one node; 4 are free of 16")


# ---------------------------------------------------------------- reasons given to queued runs


def test_who_needs_one_node_is_told_how_full_the_largest_is_and_of_whom() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 6), spec(B, 4), spec(C, 8, strategy="strict_pack"))
    assert pool.reason(C) == (
        "needs 8 H100 on one node; 6 are free of 16, the largest node has 4 free of 8 (4 are held by run bbbb)"
    )


def test_who_needs_several_nodes_is_told_how_many_have_enough() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 6), spec(B, 8, nodes=2))
    assert pool.reason(B) == (
        "needs 4 H100 on each of 2 nodes; 10 are free of 16, 1 node has 4 or more free, the largest node has 8 free "
        "of 8"
    )


def test_who_needs_more_than_is_free_is_told_how_much_there_is() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 6), spec(B, 7), spec(C, 12, wait_s=0.0))
    pool.submit(spec(D, 4, strategy="spread"))
    assert pool.reason(D) == (
        "needs 4 H100 (spread); 3 are free of 16, the largest node has 2 free of 8 (6 are held by run aaaa)"
    )
    assert pool.refused[C].reason == (
        "the run needs 12 H100, 3 are free, and it does not wait: needs 12 H100; 3 are free of 16, the largest node "
        "has 2 free of 8 (6 are held by run aaaa). Queue it with --wait 10m, ask for fewer with --gpus, or choose "
        "another pool with --pool."
    )


def test_the_one_node_that_is_next_to_be_free_is_kept_for_who_was_passed_for_long() -> None:
    pool = driven(cluster(TWO), pass_over_s=100.0)
    pool.submit(spec(A, 8), spec(B, 5), spec(C, 8, strategy="strict_pack", user="bob"), spec(D, 3, user="carol"))
    assert D in pool.leases
    pool.submit(spec(E, 2, user="carol"))
    pool.wait(100.0)
    pool.end(D)
    # three devices are free, on the node that bob's session needs completely
    assert E not in pool.leases
    assert pool.reason(C) == (
        "needs 8 H100 on one node; 3 are free of 16, the largest node has 3 free of 8 (5 are held by run bbbb); node "
        "host-n2 is reserved for it"
    )
    assert pool.reason(E) == (
        "needs 2 H100: enough are free, but on a node reserved for run cccc, which has waited longer"
    )
    pool.end(A)
    assert pool.parts(C) == [("n1", 8)]
    assert pool.parts(E) == [("n2", 2)]


# ---------------------------------------------------------------- nodes that an autoscaler brings


def elastic(coming: str = "") -> Inventory:
    return cluster(TWO, elastic=(("h100", 32), ("l4", 8)), coming=coming)


def test_what_an_autoscaler_may_bring_is_asked_of_the_engine() -> None:
    pool = driven(elastic())
    pool.submit(spec(A, 20), spec(B, 4, "l4"))
    for run in (A, B):
        lease = pool.leases[run]
        assert (lease.uuids, lease.shares) == ((), ())
    assert pool.reason(A) == (
        "needs 20 H100, 16 are free of 16 there now, 32 at most, the largest node has 8 free of 8; the cluster was "
        "asked for more nodes"
    )
    pool.feed(InventoryChanged(elastic("4 nodes are starting.")))
    assert pool.reason(A).endswith("the cluster was asked for more nodes; 4 nodes are starting")


def test_nothing_is_asked_for_beyond_what_may_come() -> None:
    pool = driven(elastic())
    pool.submit(spec(A, 20), spec(B, 14), spec(C, 33))
    assert pool.refused[C].reason.startswith("this pool has up to 32 H100, and the run asks for 33.")
    # 14 are free while A's nodes have not joined, but if B took them, A's nodes would never be requested
    assert B not in pool.leases
    pool.end(A)
    assert pool.parts(B) == [("n1", 8), ("n2", 6)]


def test_what_the_engine_gave_takes_the_place_of_what_was_asked() -> None:
    pool = driven(elastic())
    pool.submit(spec(A, 20))
    more = cluster({**TWO, "n3": ("h100", 8)}, elastic=(("h100", 32), ("l4", 8)))
    pool.feed(InventoryChanged(more))
    shares = tuple(
        NodeShare(node=name, host=f"host-{name}", ranks=count, uuids=tuple(f"GPU-{name}-{at}" for at in range(count)))
        for name, count in (("n3", 8), ("n1", 8), ("n2", 4))
    )
    uuids = tuple(uuid for share in shares for uuid in share.uuids)
    pool.feed(LeaseGranted(A, msgspec.structs.replace(pool.leases[A], uuids=uuids, shares=shares)))
    assert A not in pool.scheduler.worded_statuses()
    assert pool.scheduler.holder("GPU-n3-7") == A
    pool.submit(spec(B, 4))
    assert pool.leases[B].uuids == ("GPU-n2-4", "GPU-n2-5", "GPU-n2-6", "GPU-n2-7")


def test_a_type_that_the_cluster_does_not_bring_is_not_asked_for_again_until_it_was_looked_at() -> None:
    pool = driven(elastic())
    pool.submit(spec(A, 4, "l4"))
    del pool.leases[A]
    pool.feed(LeaseRefused(A, (), "no such node type"))
    assert A not in pool.leases
    assert pool.reason(A).startswith("needs 4 L4; 0 are free of 0 there now, 8 at most; the cluster added no more: no")
    pool.feed(InventoryChanged(elastic()))
    assert pool.leases[A].uuids == ()


def test_who_waits_for_nodes_gives_up_in_time_and_tells_the_engine() -> None:
    pool = driven(elastic())
    pool.submit(spec(A, 20, wait_s=60.0))
    out = pool.wait(61.0)
    assert [one.reason for one in out if isinstance(one, MoveRun)] == ["the cluster added nothing within 1 min"]
    assert pool.run(A).state is RunState.CANCELLING


# ---------------------------------------------------------------- later reports from the engine


def test_other_devices_than_were_proposed_are_those_that_the_run_holds() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 2))
    proposed = pool.leases[A]
    share = NodeShare(node="n2", host="host-n2", ranks=2, uuids=("GPU-n2-3", "GPU-n2-4"))
    pool.feed(LeaseGranted(A, msgspec.structs.replace(proposed, uuids=share.uuids, shares=(share,))))
    assert pool.scheduler.holder("GPU-n1-0") is None
    assert pool.scheduler.holder("GPU-n2-3") == A
    pool.submit(spec(B, 8, strategy="strict_pack"))
    assert pool.parts(B) == [("n1", 8)]
    pool.end(A)
    assert pool.scheduler.holder("GPU-n2-3") is None


def test_a_refused_device_is_barred_until_the_next_inventory() -> None:
    pool = driven(cluster({"n1": ("h100", 2)}))
    pool.submit(spec(A, 2))
    pool.feed(LeaseRefused(A, ("GPU-n1-1",), "in use by pid 7"))
    assert "1 is in use outside the pool (in use by pid 7)" in pool.reason(A)
    pool.feed(InventoryChanged(cluster({"n1": ("h100", 2)})))
    assert pool.scheduler.holder("GPU-n1-1") == A


def test_a_run_whose_node_was_lost_waits_in_its_old_place_and_begins_elsewhere() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 8), spec(B, 8), spec(C, 8))
    pool.begin(A)
    left = cluster({"n2": ("h100", 8)})
    pool.feed(InventoryChanged(left))
    out = pool.feed(RunRequeued(A, "node host-n1 was lost"))
    assert MoveRun(A, RunState.QUEUED, "node host-n1 was lost") in out
    assert not any(isinstance(one, LaunchRun) for one in out)
    assert [pool.scheduler.worded_statuses()[run][0] for run in (A, C)] == [1, 2]
    pool.end(B)
    assert pool.launched[-1] == A
    assert pool.parts(A) == [("n2", 8)]


def test_a_run_that_was_being_cancelled_when_its_node_was_lost_does_not_come_back() -> None:
    pool = driven(cluster(TWO))
    pool.submit(spec(A, 8))
    pool.begin(A)
    pool.cancel(A)
    out = pool.feed(RunRequeued(A, "node host-n1 was lost"))
    assert any(isinstance(one, EndUnstartedRun) and one.state is RunState.CANCELLED for one in out)
    assert pool.scheduler.runs == ()
    assert pool.scheduler.holder("GPU-n1-0") is None

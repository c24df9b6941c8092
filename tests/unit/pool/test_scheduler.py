"""The scheduler's rules, first one by one, then all at once under random traffic."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from scheduler_requests import QueueMoved, Scheduler, gpus, launched, node, refusal, running, spec, submit

from sgpu_magic import errors, pool
from sgpu_magic.formatting import format_exact_span
from sgpu_magic.pool.scheduling.capacity import CPU_LINE, QueueKey, ResourceRequest, line_of
from sgpu_magic.pool.scheduling.placement import FreeCapacity
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.stimuli import (
    CancelRequested,
    EndUnstartedRun,
    InventoryChanged,
    LaunchRun,
    LeaseFreed,
    LeaseRefused,
    MoveRun,
    RanksReaped,
    RanksRemain,
    RefuseRun,
    RunAdopted,
    RunMoved,
    RunSubmitted,
    Stimulus,
    StopRun,
    TimePassed,
)
from sgpu_magic.wire.base import RunLimit, RunState, can_move, is_valid_id
from sgpu_magic.wire.devices import Inventory, Lease, SharedCores
from sgpu_magic.wire.events import RemainingRank

A, B, C, D = "aaaa0000", "bbbb0000", "cccc0000", "dddd0000"


# ---------------------------------------------------------------- devices and types


def test_a_run_gets_devices_by_uuid_in_bus_order() -> None:
    devices = tuple(reversed(gpus(4)))
    lease = launched(submit(Scheduler(node(*devices)), spec(A, 3)))[A]
    assert lease.uuids == ("GPU-a10-0", "GPU-a10-1", "GPU-a10-2")
    assert (lease.device_type, lease.ranks, lease.cpu_slots, lease.simulated, lease.shared_cores) == (
        "a10",
        3,
        0,
        False,
        None,
    )
    assert is_valid_id(lease.lease_id)


def test_two_runs_never_share_a_device_and_a_freed_one_is_used_again() -> None:
    scheduler = Scheduler(node(*gpus(3)))
    first = launched(submit(scheduler, spec(A, 2)))[A]
    second = launched(submit(scheduler, spec(B, 1)))[B]
    assert set(first.uuids).isdisjoint(second.uuids)
    assert first.lease_id != second.lease_id
    assert scheduler.holder("GPU-a10-2") == B
    running(scheduler, A)
    assert scheduler.handle(RanksReaped(A, RunState.SUCCEEDED), 1.0) == [MoveRun(A, RunState.SUCCEEDED)]
    assert scheduler.holder("GPU-a10-0") is None
    assert launched(submit(scheduler, spec(C, 2)))[C].uuids == first.uuids


def test_ranks_that_are_done_hold_their_devices_until_they_are_reaped() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    submit(scheduler, spec(B))
    running(scheduler, A)
    assert scheduler.handle(RunMoved(A, RunState.SUCCEEDED), 1.0) == [MoveRun(A, RunState.SUCCEEDED)]
    assert scheduler.holder("GPU-a10-0") == A
    out = scheduler.handle(RanksReaped(A, RunState.FAILED), 2.0)
    assert list(launched(out)) == [B]
    assert not [one for one in out if isinstance(one, MoveRun)]  # A ended in the state that it reported first


def test_devices_that_are_given_back_before_the_last_word_are_the_next_runs() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A, timeout_s=100.0))
    running(scheduler, A)
    lease = launched(submit(scheduler, spec(B))) or launched(scheduler.handle(LeaseFreed(A), 1.0))
    assert list(lease) == [B]
    assert scheduler.holder("GPU-a10-0") == B
    assert scheduler.handle(LeaseFreed(A), 2.0) == []
    assert scheduler.next_deadline() is None, "no process of it is left that could be stopped"
    running(scheduler, B, 2.0)
    assert scheduler.handle(RunMoved(A, RunState.SUCCEEDED), 3.0) == [MoveRun(A, RunState.SUCCEEDED)]
    assert scheduler.handle(RanksReaped(A, RunState.FAILED), 4.0) == []
    assert scheduler.holder("GPU-a10-0") == B
    # both are adopted by another service, the first before its end was reported
    another = Scheduler(node(*gpus(1)))
    another.handle(RunAdopted(ScheduledRun(spec(B), RunState.RUNNING), lease[B], 2.0), 5.0)
    another.handle(RunAdopted(ScheduledRun(spec(A), RunState.RUNNING), lease[B], 0.0, freed=True), 5.0)
    assert another.holder("GPU-a10-0") == B
    another.handle(RanksReaped(A, RunState.SUCCEEDED), 6.0)
    assert another.holder("GPU-a10-0") == B


def test_any_takes_the_smallest_gpus_that_are_enough_and_free() -> None:
    scheduler = Scheduler(node(*gpus(2, "a10"), *gpus(4, "h100")))
    assert launched(submit(scheduler, spec(A, 2, "any")))[A].device_type == "a10"
    assert launched(submit(scheduler, spec(B, 2, "any")))[B].device_type == "h100"
    assert launched(submit(Scheduler(node(*gpus(2, "a10"), *gpus(4, "h100"))), spec(A, 3, "any")))[A].ranks == 3
    scheduler = Scheduler(node(*gpus(2, "a10"), *gpus(2, "h100", simulated=True)))
    assert launched(submit(scheduler, spec(A, 2, "any")))[A].device_type == "a10"


def test_any_is_cpu_where_there_are_no_gpus_and_is_refused_where_they_are_too_few() -> None:
    lease = launched(submit(Scheduler(node()), spec(A, 4, "any")))[A]
    assert (lease.device_type, lease.cpu_slots, lease.uuids, lease.shared_cores) == ("cpu", 4, (), None)
    refused = refusal(submit(Scheduler(node(*gpus(2))), spec(A, 4, "any")))
    assert refused.error == "UsageError"
    assert "this pool has 2 A10, and the run asks for 4" in str(refused.reason)


def test_any_waits_for_gpus_that_exist_rather_than_take_cpu() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, spec(A, 2))
    assert submit(scheduler, spec(B, 2, "any")) == [QueueMoved(B, 1, "needs 2 more A10; 2 are held by run aaaa")]


def test_a_type_that_the_pool_lacks_is_refused_with_what_it_has() -> None:
    refused = refusal(submit(Scheduler(node()), spec(A, 2, "h100")))
    assert refused.error == "UsageError"
    assert str(refused.reason) == (
        "this pool has no H100. It has: 16 CPU ranks. Run the ranks on CPU instead with SGPU_STAND_IN=cpu, "
        "leave --type out to use what is there, simulate devices on this machine's pool with SGPU_SIMULATE=h100:8, or "
        "choose another pool with --pool. `%env NAME=VALUE` sets a variable in a notebook."
    )
    pool = node(*gpus(4), *gpus(8, "a100", simulated=True), problem="the driver is too old.")
    message = refusal(submit(Scheduler(pool), spec(A, 12, "h100"))).reason
    assert "It has: 4 A10, 8 A100 (simulated), 16 CPU ranks. " in message
    assert "Its GPUs could not be read: the driver is too old. Run the" in message
    assert "SGPU_SIMULATE=h100:12," in message


def test_a_pool_without_cpu_slots_has_no_cpu() -> None:
    message = refusal(submit(Scheduler(node(*gpus(1), slots=0)), spec(A, 1, "cpu"))).reason
    assert message.startswith("this pool has no CPU. It has: 1 A10. Leave --type out")
    message = refusal(submit(Scheduler(node(slots=0)), spec(A, 1, "any"))).reason
    assert message.startswith("this pool can't place 1 rank. It has: nothing.")


def test_cpu_stands_in_for_a_missing_type_only_where_it_may() -> None:
    scheduler = Scheduler(node())
    lease = launched(submit(scheduler, spec(A, 4, "h100", stand_in=True)))[A]
    assert (lease.device_type, lease.simulated, lease.cpu_slots, lease.uuids) == ("h100", True, 4, ())
    assert scheduler.cpu_slots_free == 12
    # a type that exists is used, and a run that asks for more of it is refused
    scheduler = Scheduler(node(*gpus(2)))
    assert launched(submit(scheduler, spec(A, 2, stand_in=True)))[A].uuids == ("GPU-a10-0", "GPU-a10-1")
    assert refusal(submit(scheduler, spec(B, 3, stand_in=True))).error == "UsageError"


def test_more_gpus_than_exist_are_refused_with_how_many_do() -> None:
    scheduler = Scheduler(node(*gpus(4)))
    submit(scheduler, spec(A, 4))  # whether they are busy does not matter
    refused = refusal(submit(scheduler, spec(B, 8)))
    assert refused.error == "UsageError"
    assert str(refused.reason).startswith("this pool has 4 A10, and the run asks for 8. Use --gpus 4 or fewer,")


def test_no_ranks_are_refused() -> None:
    assert refusal(submit(Scheduler(node()), spec(A, 0, "cpu"))).error == "UsageError"


def test_far_more_cpu_ranks_than_cores_are_refused_on_one_machine() -> None:
    scheduler = Scheduler(replace(node(), cpu_slots=16, cores=2))
    assert launched(submit(scheduler, spec(A, 64, "cpu")))
    refused = refusal(submit(scheduler, spec(B, 65, "cpu")))
    assert refused.error == "UsageError"
    assert str(refused.reason) == (
        "this pool starts at most 64 ranks of one run on CPU, since the machine has 2 cores, and the run asks for 65. "
        "Ask for fewer with --gpus, or raise the setting cpu_slots from 16 to 17 (SGPU_CPU_SLOTS=17) and restart the "
        "pool with `sgpu pool stop`."
    )
    assert launched(submit(Scheduler(replace(node(), cpu_slots=17, cores=2)), spec(A, 65, "cpu")))


def test_simulated_devices_are_leased_like_devices_and_marked() -> None:
    scheduler = Scheduler(node(*gpus(2, "h100", simulated=True)))
    lease = launched(submit(scheduler, spec(A, 2, "h100")))[A]
    assert (lease.uuids, lease.simulated, lease.cpu_slots) == (("SIM-h100-0", "SIM-h100-1"), True, 0)
    assert submit(scheduler, spec(B, 1, "h100")) == [
        QueueMoved(B, 1, "needs 1 more H100 (simulated); 2 are held by run aaaa")
    ]


def test_a_lease_never_mixes_real_and_simulated_devices() -> None:
    scheduler = Scheduler(node(*gpus(2), *gpus(4, simulated=True)))
    assert not launched(submit(scheduler, spec(A, 2)))[A].simulated
    assert launched(submit(scheduler, spec(B, 3)))[B].simulated
    assert (
        "has 2 A10 and 4 A10 (simulated), and the run asks for 5. Use --gpus 4"
        in refusal(submit(scheduler, spec(C, 5))).reason
    )


# ---------------------------------------------------------------- CPU slots


def test_cpu_runs_take_slots() -> None:
    scheduler = Scheduler(node(slots=4))
    assert launched(submit(scheduler, spec(A, 3, "cpu")))[A].cpu_slots == 3
    assert scheduler.cpu_slots_free == 1
    assert submit(scheduler, spec(B, 2, "cpu")) == [QueueMoved(B, 1, "needs 1 more CPU rank; 3 are held by run aaaa")]
    assert list(launched(submit(scheduler, spec(C, 1, "cpu")))) == [C]


def test_more_ranks_than_slots_take_them_all_and_the_lease_says_so() -> None:
    scheduler = Scheduler(node(slots=16, cores=2))
    submit(scheduler, spec(A, 1, "cpu"))
    assert submit(scheduler, spec(B, 64, "cpu")) == [QueueMoved(B, 1, "needs 1 more CPU rank; 1 is held by run aaaa")]
    lease = launched(scheduler.handle(RanksReaped(A, RunState.FAILED), 1.0))[B]
    assert (lease.ranks, lease.cpu_slots, lease.shared_cores) == (64, 16, SharedCores(2, 16))
    assert scheduler.cpu_slots_free == 0
    lease = launched(submit(Scheduler(node(slots=1, cores=1)), spec(A, 2, "cpu")))[A]
    assert lease.shared_cores == SharedCores(1, 1)


def test_more_ranks_than_cores_within_the_slots_need_no_note() -> None:
    assert launched(submit(Scheduler(node(slots=16, cores=2)), spec(A, 16, "cpu")))[A].shared_cores is None


# ---------------------------------------------------------------- use from outside


def test_devices_in_use_outside_the_pool_are_left_alone() -> None:
    scheduler = Scheduler(node(*gpus(3, outside=[0])))
    assert launched(submit(scheduler, spec(A, 2)))[A].uuids == ("GPU-a10-1", "GPU-a10-2")
    shown = submit(scheduler, spec(B, 1))
    outside = "1 is in use outside the pool (python (pid 9) holds 12 GB; the option allow-busy takes it)"
    reason = f"needs 1 more A10; 2 are held by run aaaa; {outside}"
    assert shown == [QueueMoved(B, 1, reason)]


def test_allow_busy_takes_them_last() -> None:
    scheduler = Scheduler(node(*gpus(3, outside=[0])))
    assert launched(submit(scheduler, spec(A, 2, allow_busy=True)))[A].uuids == ("GPU-a10-1", "GPU-a10-2")
    assert launched(submit(scheduler, spec(B, 1, allow_busy=True)))[B].uuids == ("GPU-a10-0",)


def test_an_unavailable_device_is_for_no_request() -> None:
    inventory = node(*gpus(2))
    odd = replace(inventory.devices[0], unavailable="its lock is a link. Have root remove it.")
    scheduler = Scheduler(replace(inventory, devices=(odd, inventory.devices[1])))
    why = "1 is unavailable (its lock is a link. Have root remove it)"
    assert QueueMoved(A, 1, f"needs 1 more A10; {why}") in submit(scheduler, spec(A, 2, allow_busy=True))
    assert launched(submit(scheduler, spec(B, 1)))[B].uuids == ("GPU-a10-1",)
    scheduler.handle(RanksReaped(B, RunState.FAILED), 5.0)
    assert list(launched(scheduler.handle(InventoryChanged(inventory), 6.0))) == [A]


def test_the_pools_own_use_is_no_use_from_outside() -> None:
    scheduler = Scheduler(node(*gpus(2)), pass_over_s=10.0)
    submit(scheduler, spec(A, 1))
    submit(scheduler, spec(B, 2))
    submit(scheduler, spec(C, 1))
    assert scheduler.handle(InventoryChanged(node(*gpus(2, outside=[0, 1]))), 20.0) == [
        QueueMoved(
            B, 1, "needs 2 more A10; 1 is held by run aaaa; 1 is held by run cccc; freed ones are reserved for it"
        )
    ]


def test_a_device_that_others_leave_is_given_out() -> None:
    scheduler = Scheduler(node(*gpus(1, outside=[0])))
    submit(scheduler, spec(A))
    assert list(launched(scheduler.handle(InventoryChanged(node(*gpus(1))), 5.0))) == [A]


def test_a_refused_lease_goes_back_to_its_place_with_the_devices_barred() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, spec(A, 2))
    submit(scheduler, spec(B, 1, allow_busy=True))
    out = scheduler.handle(LeaseRefused(A, ("GPU-a10-0",), "another user's pool holds it"), 1.0)
    # B may pass on the remaining device, and even --allow-busy does not get the locked one
    assert launched(out)[B].uuids == ("GPU-a10-1",)
    why = "1 is in use outside the pool (another user's pool holds it)"
    held = "1 is held by run bbbb"
    assert QueueMoved(A, 1, f"needs 2 more A10; {held}; {why}") in out
    assert submit(scheduler, spec(C, 1, allow_busy=True)) == [QueueMoved(C, 2, f"needs 1 more A10; {held}; {why}")]
    scheduler.handle(CancelRequested(C, ""), 2.0)
    scheduler.handle(RanksReaped(B, RunState.FAILED), 2.0)
    # the next inventory retries it, first in its queue
    out = scheduler.handle(InventoryChanged(node(*gpus(2))), 3.0)
    assert launched(out)[A].uuids == ("GPU-a10-0", "GPU-a10-1")
    assert launched(out).keys() == {A}


@pytest.mark.parametrize("named", [(), ("GPU-of-nobody",)])
def test_a_refusal_that_names_none_of_its_devices_bars_them_all(named: tuple[str, ...]) -> None:
    scheduler = Scheduler(node(*gpus(3)))
    submit(scheduler, spec(A, 2))
    out = scheduler.handle(LeaseRefused(A, named, ""), 1.0)
    assert out == [QueueMoved(A, 1, "needs 1 more A10; 2 are in use outside the pool")]


def test_a_refused_cpu_lease_waits_for_the_next_inventory() -> None:
    scheduler = Scheduler(node())
    submit(scheduler, spec(A, 2, "cpu"))
    out = scheduler.handle(LeaseRefused(A, (), "no memory"), 1.0)
    assert out == [QueueMoved(A, 1, "needs 2 more CPU ranks; the engine refuses more: no memory")]
    assert list(launched(scheduler.handle(InventoryChanged(node()), 2.0))) == [A]


def test_a_refused_lease_of_a_run_that_would_not_wait_ends_it() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A, wait_s=0.0))
    moved, ended = scheduler.handle(LeaseRefused(A, ("GPU-a10-0",), "locked"), 1.0)
    assert isinstance(ended, EndUnstartedRun)
    assert moved == MoveRun(A, RunState.FAILED, str(ended.reason))
    assert moved.reason.startswith("the run needs 1 A10, 0 are free, and it does not wait: 1 is in use outside")
    assert moved.reason.count("the pool (locked). Queue it with --wait 10m")
    assert scheduler.runs == ()


def test_a_lease_that_ranks_run_on_can_not_be_refused() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    running(scheduler, A)
    assert scheduler.handle(LeaseRefused(A, ("GPU-a10-0",), "late"), 1.0) == []
    assert scheduler.holder("GPU-a10-0") == A


# ---------------------------------------------------------------- the queue


def test_first_come_first_served_with_positions_told_once() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    assert submit(scheduler, spec(B), 1.0) == [QueueMoved(B, 1, "needs 1 more A10; 1 is held by run aaaa")]
    assert submit(scheduler, spec(C), 2.0) == [QueueMoved(C, 2, "needs 1 more A10; 1 is held by run aaaa")]
    assert scheduler.handle(TimePassed(), 3.0) == []
    out = scheduler.handle(RanksReaped(A, RunState.FAILED), 4.0)
    assert list(launched(out)) == [B]
    assert QueueMoved(C, 1, "needs 1 more A10; 1 is held by run bbbb") in out


def test_each_type_has_a_line_of_its_own() -> None:
    scheduler = Scheduler(node(*gpus(1), *gpus(1, "h100"), slots=2))
    for number, kind in enumerate(("a10", "h100", "cpu")):
        submit(scheduler, spec(f"0000000{number}", 1 if kind != "cpu" else 2, kind))
    for number, kind in enumerate(("a10", "h100", "cpu")):
        (shown,) = submit(scheduler, spec(f"1000000{number}", 1, kind))
        assert isinstance(shown, QueueMoved)
        assert shown.position == 1
    assert list(launched(scheduler.handle(RanksReaped("00000001", RunState.FAILED), 1.0))) == ["10000001"]


def test_a_later_run_that_fits_passes_one_that_does_not() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, spec(A, 1))
    assert submit(scheduler, spec(B, 2)) == [QueueMoved(B, 1, "needs 1 more A10; 1 is held by run aaaa")]
    out = submit(scheduler, spec(C, 1))
    assert list(launched(out)) == [C]
    assert QueueMoved(B, 1, "needs 2 more A10; 1 is held by run aaaa; 1 is held by run cccc") in out


def test_a_run_passed_over_for_long_keeps_freed_devices() -> None:
    scheduler = Scheduler(node(*gpus(2), slots=4), pass_over_s=600.0)
    submit(scheduler, spec(A, 1))
    submit(scheduler, spec(B, 2), 100.0)
    assert scheduler.next_deadline() is None  # waiting alone is not being passed over
    assert list(launched(submit(scheduler, spec(C, 1), 200.0))) == [C]
    assert scheduler.next_deadline() == 800.0
    scheduler.handle(RanksReaped(C, RunState.FAILED), 300.0)
    assert list(launched(submit(scheduler, spec(C, 1), 799.0))) == [C]  # within the limit, it still passes
    assert scheduler.handle(TimePassed(), 800.0) == [
        QueueMoved(
            B, 1, "needs 2 more A10; 1 is held by run aaaa; 1 is held by run cccc; freed ones are reserved for it"
        )
    ]
    assert scheduler.next_deadline() is None
    scheduler.handle(RanksReaped(C, RunState.FAILED), 900.0)
    kept = "the free ones are reserved for run bbbb, which has waited longer"
    assert submit(scheduler, spec(D, 1), 901.0) == [QueueMoved(D, 2, kept)]
    # other queues are not affected
    assert list(launched(submit(scheduler, spec("eeee0000", 1, "cpu"), 902.0))) == ["eeee0000"]
    # a run that does not wait gets the same reason
    refused = refusal(submit(scheduler, spec("ffff0000", 1, wait_s=0.0), 903.0))
    assert f"the run needs 1 A10, 1 is free, and it does not wait: {kept}." in str(refused.reason)
    out = scheduler.handle(RanksReaped(A, RunState.FAILED), 904.0)
    assert list(launched(out)) == [B]
    assert QueueMoved(D, 1, "needs 1 more A10; 2 are held by run bbbb") in out


def test_when_the_run_that_devices_were_kept_for_is_cancelled_the_next_goes() -> None:
    scheduler = Scheduler(node(*gpus(2)), pass_over_s=0.0)
    submit(scheduler, spec(A, 1))
    submit(scheduler, spec(B, 2))
    submit(scheduler, spec(C, 1))
    scheduler.handle(RanksReaped(C, RunState.FAILED), 1.0)
    assert launched(submit(scheduler, spec(D, 1), 1.0)) == {}
    assert list(launched(scheduler.handle(CancelRequested(B, "enough"), 2.0))) == [D]


def test_when_the_run_that_devices_were_kept_for_gives_up_the_next_goes() -> None:
    scheduler = Scheduler(node(*gpus(2)), pass_over_s=0.0)
    submit(scheduler, spec(A, 1))
    submit(scheduler, spec(B, 2, wait_s=10.0))
    submit(scheduler, spec(C, 1))
    scheduler.handle(RanksReaped(C, RunState.FAILED), 1.0)
    submit(scheduler, spec(D, 1), 1.0)
    out = scheduler.handle(TimePassed(), 10.0)
    assert [type(one) for one in out] == [MoveRun, EndUnstartedRun, LaunchRun]
    assert list(launched(out)) == [D]


def test_nothing_is_kept_for_a_run_that_could_not_use_it() -> None:
    scheduler = Scheduler(node(*gpus(2)), pass_over_s=0.0)
    submit(scheduler, spec(A, 1))
    submit(scheduler, spec(B, 2))
    submit(scheduler, spec(C, 1))
    scheduler.handle(RanksReaped(C, RunState.FAILED), 1.0)
    assert launched(submit(scheduler, spec(D, 1), 1.0)) == {}
    # a device disappears: no ended run would let B start now, so B blocks no other run
    out = scheduler.handle(InventoryChanged(node(*gpus(2)[1:])), 2.0)
    assert list(launched(out)) == [D]
    assert QueueMoved(B, 1, "needs 2 more A10; 1 is held by run dddd; the pool has only 1 A10 now") in out
    # the device returns, and B gets its turn back
    scheduler.handle(InventoryChanged(node(*gpus(2))), 3.0)
    scheduler.handle(RanksReaped(A, RunState.FAILED), 4.0)
    assert list(launched(scheduler.handle(RanksReaped(D, RunState.FAILED), 5.0))) == [B]


def test_a_large_run_gets_its_turn_under_a_stream_of_small_ones() -> None:
    scheduler = Scheduler(node(*gpus(4)), pass_over_s=600.0)
    started: dict[str, float] = {}
    for step in range(100):
        now = step * 30.0
        out = submit(scheduler, spec(A, 4) if step == 5 else spec(f"{step:08x}", 1), now)
        for run in scheduler.runs:  # each small run lasts 120 s, so 4 run at any time
            if run.lease is not None and run.run_id != A and now >= started.get(run.run_id, now) + 120.0:
                out += scheduler.handle(RanksReaped(run.run_id, RunState.FAILED), now)
        started |= dict.fromkeys(launched(out), now)
        if A in started:
            break
    # first passed over when a device becomes free, then for 10 min, then those four runs finish
    assert 750.0 <= started[A] <= 150.0 + 30.0 + 600.0 + 120.0


def test_any_run_that_waits_takes_up_with_the_devices_that_come() -> None:
    scheduler = Scheduler(node(slots=2))
    submit(scheduler, spec(A, 2, "cpu"))
    assert submit(scheduler, spec(B, 1, "any")) == [QueueMoved(B, 1, "needs 1 more CPU rank; 2 are held by run aaaa")]
    assert launched(scheduler.handle(InventoryChanged(node(*gpus(1), slots=2)), 1.0))[B].uuids == ("GPU-a10-0",)


def test_a_waiting_run_whose_devices_vanish_goes_on_waiting_and_says_why() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    submit(scheduler, spec(B, wait_s=60.0))
    assert scheduler.handle(InventoryChanged(node(problem="NVML: unknown error")), 1.0) == [
        QueueMoved(B, 1, "needs 1 more A10; the pool has only 0 A10 now")
    ]
    assert scheduler.run(A) is not None  # the agent reports its end
    moved, ended = scheduler.handle(TimePassed(), 60.0)
    assert (type(moved), type(ended)) == (MoveRun, EndUnstartedRun)


def test_an_id_is_submitted_once() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    assert "already submitted" in refusal(submit(scheduler, spec(A))).reason
    assert scheduler.holder("GPU-a10-0") == A


# ---------------------------------------------------------------- before the first inventory


def test_runs_are_held_until_the_devices_are_known() -> None:
    scheduler = Scheduler()
    looking = "the pool is still looking for its devices"
    assert submit(scheduler, spec(A)) == [QueueMoved(A, 1, looking)]
    assert submit(scheduler, spec(B, 1, "h100")) == [QueueMoved(B, 2, looking)]
    assert submit(scheduler, spec(C, 1, wait_s=0.0)) == [QueueMoved(C, 3, looking)]
    assert (scheduler.cpu_slots_free, scheduler.holder("GPU-a10-0"), scheduler.next_deadline()) == (
        0,
        None,
        None,
    )
    assert scheduler.handle(CancelRequested("eeee0000", ""), 0.5) == []
    out = scheduler.handle(InventoryChanged(node(*gpus(1))), 1.0)
    assert list(launched(out)) == [A]
    refused = {one.run_id: one.error for one in out if isinstance(one, RefuseRun)}
    assert refused == {B: "UsageError", C: "CapacityError"}
    assert [run.run_id for run in scheduler.runs] == [A]


def test_a_held_run_can_be_cancelled() -> None:
    scheduler = Scheduler()
    submit(scheduler, spec(A))
    out = scheduler.handle(CancelRequested(A, "enough"), 0.5)
    assert out == [MoveRun(A, RunState.CANCELLED, "enough"), EndUnstartedRun(A, RunState.CANCELLED, "enough")]


# ---------------------------------------------------------------- times


def test_who_would_not_wait_is_refused_with_what_is_in_the_way() -> None:
    scheduler = Scheduler(node(*gpus(4, outside=[3])))
    submit(scheduler, spec(A, 2))
    refused = refusal(submit(scheduler, spec(B, 3, wait_s=0.0)))
    assert refused.error == "CapacityError"
    assert str(refused.reason) == (
        "the run needs 3 A10, 1 is free, and it does not wait: 2 are held by run aaaa, 1 is in use outside "
        "the pool (python (pid 9) holds 12 GB; the option allow-busy takes it). Queue it with --wait 10m, ask for "
        "fewer with --gpus, or choose another pool with --pool."
    )
    assert scheduler.run(B) is None
    assert list(launched(submit(scheduler, spec(B, 1, wait_s=0.0)))) == [B]


def test_a_long_list_of_holders_is_cut() -> None:
    scheduler = Scheduler(node(slots=6))
    for number in range(6):
        submit(scheduler, spec(f"{number}0000000", 1, "cpu"))
    message = refusal(submit(scheduler, spec(A, 1, "cpu", wait_s=0.0))).reason
    assert "run 0000, 1 is held by run 1000, 1 is held by run 2000, 3 more runs hold others. Queue" in message


def test_waiting_ends_at_its_time_as_a_failure_of_capacity() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    submit(scheduler, spec(B, wait_s=600.0), 10.0)
    assert scheduler.next_deadline() == 610.0
    assert scheduler.handle(TimePassed(), 609.9) == []
    moved, ended = scheduler.handle(TimePassed(), 610.0)
    assert isinstance(ended, EndUnstartedRun)
    assert (ended.run_id, ended.state) == (B, RunState.FAILED)
    assert str(ended.reason) == (
        "1 A10 did not become free within 10 min: 1 is held by run aaaa. Wait longer with --wait, ask for "
        "fewer with --gpus, or choose another pool with --pool."
    )
    assert moved == MoveRun(B, RunState.FAILED, str(ended.reason))
    assert scheduler.next_deadline() is None


def test_devices_that_come_at_the_last_moment_are_taken() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    submit(scheduler, spec(B, wait_s=600.0))
    assert list(launched(scheduler.handle(RanksReaped(A, RunState.FAILED), 600.0))) == [B]


def test_the_time_limit_counts_from_the_start_and_stops_the_run() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A, timeout_s=90.0))
    scheduler.handle(RunMoved(A, RunState.PREPARING), 5.0)
    assert scheduler.next_deadline() is None  # building an environment does not count
    running(scheduler, A, 10.0)
    assert scheduler.next_deadline() == 100.0
    assert scheduler.handle(TimePassed(), 99.0) == []
    reason = "reached its 90 s time limit"
    assert scheduler.handle(TimePassed(), 100.0) == [
        MoveRun(A, RunState.CANCELLING, reason),
        StopRun(A, RunState.TIMED_OUT, reason, RunLimit.TIME),
    ]
    assert scheduler.next_deadline() is None
    assert scheduler.handle(TimePassed(), 200.0) == []
    assert scheduler.holder("GPU-a10-0") == A  # until its ranks are gone
    assert scheduler.handle(RanksReaped(A, RunState.TIMED_OUT), 201.0) == [MoveRun(A, RunState.TIMED_OUT)]


def test_spans_are_exact() -> None:
    assert [format_exact_span(s) for s in (0.0, 0.5, 90.0, 600.0, 7200.0, 604800.0, 3601.0)] == [
        "0 s",
        "0.5 s",
        "90 s",
        "10 min",
        "2 h",
        "7 d",
        "3601 s",
    ]


# ---------------------------------------------------------------- cancel, late reports


def test_cancelling_a_queued_run_ends_it_and_moves_up_the_rest() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    for run_id in (A, B, C):
        submit(scheduler, spec(run_id))
    assert scheduler.handle(CancelRequested(B, "interrupted"), 1.0) == [
        MoveRun(B, RunState.CANCELLED, "interrupted"),
        EndUnstartedRun(B, RunState.CANCELLED, "interrupted"),
        QueueMoved(C, 1, "needs 1 more A10; 1 is held by run aaaa"),
    ]


def test_cancelling_a_running_run_takes_the_stop_path_once() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    submit(scheduler, spec(B))
    running(scheduler, A)
    assert scheduler.handle(CancelRequested(A, "interrupted"), 1.0) == [
        MoveRun(A, RunState.CANCELLING, "interrupted"),
        StopRun(A, RunState.CANCELLED, "interrupted"),
    ]
    assert scheduler.handle(CancelRequested(A, "interrupted again"), 2.0) == []
    assert scheduler.handle(RunMoved(A, RunState.RUNNING), 2.5) == []  # sent before the stop arrived
    out = scheduler.handle(RanksReaped(A, RunState.CANCELLED), 3.0)
    assert out[0] == MoveRun(A, RunState.CANCELLED)
    assert list(launched(out)) == [B]


def test_a_run_that_a_cancel_overtook_may_have_succeeded() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    running(scheduler, A)
    scheduler.handle(CancelRequested(A, ""), 1.0)
    assert scheduler.handle(RanksReaped(A, RunState.SUCCEEDED), 1.1) == [MoveRun(A, RunState.SUCCEEDED)]


def test_cancel_between_launch_and_a_refused_lease() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    assert scheduler.handle(CancelRequested(A, "enough"), 1.0) == [
        MoveRun(A, RunState.CANCELLING, "enough"),
        StopRun(A, RunState.CANCELLED, "enough"),
    ]
    out = scheduler.handle(LeaseRefused(A, ("GPU-a10-0",), "locked"), 2.0)
    assert out == [MoveRun(A, RunState.CANCELLED), EndUnstartedRun(A, RunState.CANCELLED, "")]


def test_cancelling_a_run_that_is_done_changes_nothing() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    running(scheduler, A)
    scheduler.handle(RunMoved(A, RunState.FAILED), 1.0)
    assert scheduler.handle(CancelRequested(A, ""), 2.0) == []


def test_reports_that_skip_the_start_still_follow_the_table() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, spec(A, timeout_s=50.0))
    submit(scheduler, spec(B))
    both = [MoveRun(A, RunState.STARTING), MoveRun(A, RunState.RUNNING)]
    assert scheduler.handle(RunMoved(A, RunState.RUNNING), 1.0) == both
    assert scheduler.next_deadline() == 51.0
    over = [MoveRun(B, RunState.STARTING), MoveRun(B, RunState.SUCCEEDED)]
    assert scheduler.handle(RanksReaped(B, RunState.SUCCEEDED), 2.0) == over


@pytest.mark.parametrize("state", [RunState.QUEUED, RunState.PREPARING, RunState.RUNNING])
def test_reports_that_lead_back_are_ignored(state: RunState) -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    running(scheduler, A)
    assert scheduler.handle(RunMoved(A, state), 1.0) == []


def test_a_launch_that_failed_frees_the_lease() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    assert scheduler.handle(RanksReaped(A, RunState.FAILED), 1.0) == [MoveRun(A, RunState.FAILED)]
    assert scheduler.runs == ()


def test_what_is_said_of_unknown_runs_changes_nothing() -> None:
    scheduler = Scheduler(node())
    stimuli: list[Stimulus] = [
        RunMoved(A, RunState.RUNNING),
        CancelRequested(A, ""),
        RanksReaped(A, RunState.FAILED),
        LeaseRefused(A, (), ""),
    ]
    for stimulus in stimuli:
        assert scheduler.handle(stimulus, 1.0) == []


def test_a_run_is_over_in_a_final_state_only() -> None:
    scheduler = Scheduler(node(*gpus(1)))
    submit(scheduler, spec(A))
    with pytest.raises(ValueError, match="final state is needed"):
        scheduler.handle(RanksReaped(A, RunState.RUNNING), 1.0)


def test_nobody_but_the_table_changes_what_the_scheduler_knows_of_a_run() -> None:
    names = {field.name for field in dataclasses.fields(ScheduledRun)} - {"spec"}
    for path in Path(pool.__file__).parent.rglob("*.py"):
        for found in ast.walk(ast.parse(path.read_text())):
            if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store) and found.attr in names:
                of_whom = ast.unparse(found.value)
                assert of_whom not in ("run", "session", "cell"), (
                    f"{path.name}:{found.lineno} sets {ast.unparse(found)}"
                )


def test_an_adopted_run_keeps_its_devices_and_its_time() -> None:
    scheduler = Scheduler()
    lease = Lease(lease_id="l", device_type="a10", ranks=2, uuids=("GPU-a10-0", "GPU-a10-1"))
    adopted = spec("aaaaaaaa", 2, "a10", timeout_s=100.0)
    assert not launched(scheduler.handle(RunAdopted(ScheduledRun(adopted, RunState.RUNNING), lease, 0.0), 40.0))
    out = scheduler.handle(InventoryChanged(node(*gpus(2))), 40.0)
    out += submit(scheduler, spec("bbbbbbbb", 1, "a10"), 41.0)
    assert not launched(out)
    assert scheduler.next_deadline() == 100.0
    assert StopRun("aaaaaaaa", RunState.TIMED_OUT, "reached its 100 s time limit", RunLimit.TIME) in scheduler.handle(
        TimePassed(), 100.0
    )
    assert list(launched(scheduler.handle(RanksReaped("aaaaaaaa", RunState.TIMED_OUT), 101.0))) == ["bbbbbbbb"]


def test_a_group_that_is_started_again_keeps_its_lease_and_its_time() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, spec("aaaaaaaa", 2, "a10", timeout_s=100.0), 0.0)
    for state, now in ((RunState.STARTING, 1.0), (RunState.RUNNING, 2.0)):
        scheduler.handle(RunMoved("aaaaaaaa", state), now)
    assert scheduler.handle(RunMoved("aaaaaaaa", RunState.STARTING), 50.0) == [MoveRun("aaaaaaaa", RunState.STARTING)]
    run = scheduler.run("aaaaaaaa")
    assert run is not None
    assert run.lease is not None
    assert run.time_limit == 101.0


def test_a_device_can_not_be_counted_twice() -> None:
    lease = Lease(lease_id="00000000", device_type="a10", ranks=1, uuids=("GPU-a10-0",))
    room = FreeCapacity(node(*gpus(1)))
    room.add(A, lease)
    with pytest.raises(ValueError, match="takes devices twice"):
        room.add(B, lease)


@settings(max_examples=examples(200), deadline=None, database=None)
@given(
    traffic=st.lists(
        # ranks, seconds since the previous submission, seconds of run time
        st.tuples(st.sampled_from([1, 1, 1, 2, 4]), st.sampled_from([0.0, 5.0, 10.0]), st.sampled_from([10.0, 30.0])),
        max_size=60,
    )
)
def test_nobody_starves(traffic: list[tuple[int, float, float]]) -> None:
    scheduler = Scheduler(node(*gpus(4)), pass_over_s=50.0)
    arrivals: list[tuple[float, str]] = []
    arrived = 0.0
    for number, (_, gap, _) in enumerate(traffic):
        arrived += gap
        arrivals.append((arrived, f"{number:08x}"))
    ends: list[tuple[float, str]] = []
    started: dict[str, float] = {}
    passed: dict[str, tuple[float, int]] = {}  # when first, and how many runs were still ahead of it then
    while arrivals or ends:
        if arrivals and (not ends or arrivals[0] < min(ends)):
            now, run_id = arrivals.pop(0)
            out = submit(scheduler, spec(run_id, traffic[int(run_id, 16)][0]), now)
        else:
            now, run_id = min(ends)
            ends.remove((now, run_id))
            out = scheduler.handle(RanksReaped(run_id, RunState.FAILED), now)
        for launch in launched(out):
            started[launch] = now
            ends.append((now + traffic[int(launch, 16)][2], launch))
            waiting = [run.run_id for run in scheduler.runs if run.lease is None]
            for context, other in enumerate(waiting):
                if other < launch:
                    passed.setdefault(other, (now, context))
    assert len(started) == len(traffic)
    for run_id, (first, ahead) in passed.items():
        # afterwards no run passes it: only those ahead of it, each in turn, and the last ranks to leave
        assert started[run_id] <= first + 50.0 + 30.0 * (ahead + 1), run_id


# ---------------------------------------------------------------- everything at once

PASS_OVER_S = 50.0
TYPES = st.sampled_from(["a10", "h100", "cpu", "any"])


class Pool(RuleBasedStateMachine):
    """A service, an engine and users that act at random times; each step is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = Scheduler(pass_over_s=PASS_OVER_S)
        self.inventory: Inventory | None = None
        self.states: dict[str, RunState] = {}  # only as the instructions set them
        self.leases: dict[str, Lease] = {}
        self.freed: dict[str, Lease] = {}  # freed before the run's end was reported
        self.gone: set[str] = set()
        self.submitted: list[str] = []
        self.reported: set[str] = set()
        self.stopped: set[str] = set()
        self.first_passed: dict[str, float] = {}
        self.barred: set[str] = set()

    def feed(self, stimulus: Stimulus) -> None:
        if isinstance(stimulus, InventoryChanged):
            self.inventory = stimulus.inventory
            self.barred.clear()
        before = {run.run_id: run.request and run.request.line for run in self.scheduler.runs}
        for instruction in self.scheduler.handle(stimulus, self.now):
            run_id = instruction.run_id
            assert run_id in self.submitted
            assert run_id not in self.gone
            match instruction:
                case LaunchRun(lease=lease):
                    self.launched(run_id, lease, before)
                    self.leases[run_id] = lease
                case MoveRun(state=state):
                    assert can_move(self.states[run_id], state)
                    self.states[run_id] = state
                case StopRun():
                    assert run_id in self.leases or run_id in self.freed
                    assert run_id not in self.stopped
                    self.stopped.add(run_id)
                case RefuseRun(error=error, reason=message):
                    # the reply to its submission, or to the inventory that it was held for
                    assert run_id not in before or before[run_id] is None
                    assert issubclass(getattr(errors, error), errors.SgpuError)
                    assert message
                    self.gone.add(run_id)
                case EndUnstartedRun(state=state):
                    assert state is self.states[run_id]
                    assert state.is_final
                    assert run_id not in self.leases
                    self.gone.add(run_id)
                case QueueMoved(position=position, reason=reason):
                    assert position >= 1
                    assert reason
                    assert run_id not in self.leases
        for run in self.scheduler.runs:
            line = run.request and run.request.line
            if before.get(run.run_id) != line and self.first_passed.get(run.run_id, self.now) < self.now:
                del self.first_passed[run.run_id]  # it moved to another queue, where no run has passed it yet

    def launched(self, run_id: str, lease: Lease, before: dict[str, QueueKey | None]) -> None:
        assert self.inventory is not None
        assert run_id not in self.leases
        assert self.states[run_id] is RunState.QUEUED
        held = {uuid for other in self.leases.values() for uuid in other.uuids}
        assert held.isdisjoint(lease.uuids)
        devices = {device.uuid: device for device in self.inventory.devices}
        run = self.scheduler.run(run_id)
        assert run is not None
        assert run.request is not None
        if lease.cpu_slots:
            assert not lease.uuids
            taken = sum(other.cpu_slots for other in self.leases.values())
            assert taken + lease.cpu_slots <= self.inventory.cpu_slots
            assert lease.cpu_slots == min(lease.ranks, self.inventory.cpu_slots)
        else:
            assert len(set(lease.uuids)) == len(lease.uuids) == lease.ranks
            for uuid in lease.uuids:
                assert line_of(devices[uuid]) == run.request.line
                assert uuid not in self.barred
                assert run.request.allow_busy or not devices[uuid].outside_use
        # no run may pass another of the same queue that was first passed long ago and could run here
        for other in self.scheduler.runs:
            if other.run_id == run_id:
                break
            if other.lease is not None or other.request is None or other.request.line != run.request.line:
                continue
            if before.get(other.run_id) != other.request.line:
                self.first_passed[other.run_id] = self.now  # new in this queue
            first = self.first_passed.setdefault(other.run_id, self.now)
            assert self.now < first + PASS_OVER_S or not self.could_run(other.request)

    def could_run(self, request: ResourceRequest) -> bool:
        assert self.inventory is not None
        if request.line == CPU_LINE:
            return self.inventory.cpu_slots > 0 and "cpu" not in self.barred
        held = {uuid for lease in self.leases.values() for uuid in lease.uuids}
        return request.ranks <= sum(
            line_of(device) == request.line
            and device.uuid not in self.barred
            and (request.allow_busy or not device.outside_use or device.uuid in held)
            for device in self.inventory.devices
        )

    # ------------------------------------------------------------ actions of users, the engine and the environment

    @rule(
        ranks=st.integers(1, 6),
        kind=TYPES,
        wait_s=st.sampled_from([None, 0.0, 30.0, 200.0]),
        timeout_s=st.sampled_from([40.0, 1000.0]),
        allow_busy=st.booleans(),
        stand_in=st.booleans(),
    )
    def submit(
        self, ranks: int, kind: str, wait_s: float | None, timeout_s: float, allow_busy: bool, stand_in: bool
    ) -> None:
        run_id = f"{len(self.submitted):08x}"
        self.submitted.append(run_id)
        self.states[run_id] = RunState.QUEUED
        wanted = spec(run_id, ranks, kind, wait_s=wait_s, timeout_s=timeout_s, allow_busy=allow_busy, stand_in=stand_in)
        self.feed(RunSubmitted(ScheduledRun(wanted)))

    @initialize(late=st.booleans())
    def first_look(self, late: bool) -> None:
        if not late:
            self.feed(InventoryChanged(node(*gpus(4), *gpus(2, "h100"), slots=4)))

    @rule(
        a10=st.integers(0, 4),
        h100=st.integers(0, 2),
        simulated=st.booleans(),
        outside=st.lists(st.integers(0, 3), max_size=2),
        slots=st.sampled_from([0, 2, 4]),
    )
    def look(self, a10: int, h100: int, simulated: bool, outside: list[int], slots: int) -> None:
        devices = (*gpus(a10, outside=outside), *gpus(h100, "h100", simulated=simulated))
        self.feed(InventoryChanged(node(*devices, slots=slots)))

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(TimePassed())

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), state=st.sampled_from(list(RunState)))
    def report(self, data: st.DataObject, state: RunState) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.reported.add(run_id)
        self.feed(RunMoved(run_id, state))

    @precondition(lambda self: self.leases or self.freed)
    @rule(data=st.data(), state=st.sampled_from([state for state in RunState if state.is_final]))
    def over(self, data: st.DataObject, state: RunState) -> None:
        self.reap(data.draw(st.sampled_from(sorted(self.leases | self.freed))), state)

    @precondition(lambda self: self.leases.keys() & self.reported)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.leases.keys() & self.reported)))
        self.freed[run_id] = self.leases.pop(run_id)
        self.feed(LeaseFreed(run_id))

    def reap(self, run_id: str, state: RunState) -> None:
        del (self.leases if run_id in self.leases else self.freed)[run_id]
        self.feed(RanksReaped(run_id, state))
        assert self.states[run_id].is_final
        self.gone.add(run_id)

    @precondition(lambda self: self.leases.keys() - self.reported)
    @rule(data=st.data(), count=st.integers(0, 3))
    def refuse_lease(self, data: st.DataObject, count: int) -> None:
        run_id = data.draw(st.sampled_from(sorted(self.leases.keys() - self.reported)))
        lease = self.leases.pop(run_id)
        self.barred |= set(lease.uuids[:count]) or set(lease.uuids) or {"cpu"}
        self.feed(LeaseRefused(run_id, lease.uuids[:count], "locked"))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        run_id = data.draw(st.sampled_from(self.submitted))
        self.feed(CancelRequested(run_id, "interrupted"))
        state = self.states[run_id]
        assert run_id in self.gone or state is RunState.CANCELLING or state.is_final

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), state=st.sampled_from(list(RunState)))
    def late_report(self, data: st.DataObject, state: RunState) -> None:
        run_id = data.draw(st.sampled_from(self.submitted))
        if run_id not in self.leases:
            self.feed(RunMoved(run_id, state))

    @precondition(lambda self: self.inventory is not None)
    @rule()
    def service_is_killed_and_another_takes_over(self) -> None:
        """Runs with ranks are adopted in the agent's state; queued ones are submitted again."""
        specs = {run.run_id: run.spec for run in self.scheduler.runs}
        self.scheduler = Scheduler(pass_over_s=PASS_OVER_S)
        self.first_passed.clear()
        for run_id in list(specs):
            if lease := self.leases.get(run_id) or self.freed.get(run_id):
                self.reported.add(run_id)
                if self.states[run_id] is RunState.QUEUED:
                    self.states[run_id] = RunState.STARTING
                freed = run_id in self.freed
                self.feed(RunAdopted(ScheduledRun(specs[run_id], self.states[run_id]), lease, self.now, freed))
            else:
                self.feed(RunSubmitted(ScheduledRun(specs[run_id])))
        assert self.inventory is not None
        self.feed(InventoryChanged(self.inventory))

    # ------------------------------------------------------------ invariants

    @invariant()
    def no_run_is_lost(self) -> None:
        kept = {run.run_id: run for run in self.scheduler.runs}
        assert kept.keys() | self.gone == set(self.submitted)
        assert kept.keys().isdisjoint(self.gone)
        for run_id, run in kept.items():
            assert run.state is self.states[run_id]
            assert run.held_lease == self.leases.get(run_id)
            # each waiting run has been given a reason
            assert (run_id in self.scheduler.published) == (run.lease is None)

    @invariant()
    def positions_count_from_one(self) -> None:
        by_line: dict[object, list[int]] = {}
        for run in self.scheduler.runs:
            if (published := self.scheduler.published.get(run.run_id)) is not None:
                by_line.setdefault(run.request and run.request.line, []).append(published.position)
        for positions in by_line.values():
            assert positions == list(range(1, len(positions) + 1))

    @invariant()
    def nothing_is_left_idle_for_the_first_in_line(self) -> None:
        seen: set[object] = set()
        for run in self.scheduler.runs:
            if run.lease is None and run.request is not None and run.request.line not in seen:
                seen.add(run.request.line)
                assert re.match(r"needs [1-9]\d* more ", self.scheduler.published[run.run_id].reason)

    @invariant()
    def deadlines_are_not_past(self) -> None:
        deadline = self.scheduler.next_deadline()
        assert deadline is None or deadline > self.now

    def teardown(self) -> None:
        """With every device back, and ranks that end on request or by themselves, every run ends."""
        self.feed(InventoryChanged(node(*gpus(6), *gpus(6, "h100"), slots=4)))
        for _ in range(len(self.submitted) + 1):
            for run_id in sorted(self.leases | self.freed):
                self.reap(run_id, RunState.CANCELLED if run_id in self.stopped else RunState.SUCCEEDED)
        waiting = {run.run_id for run in self.scheduler.runs}
        # types that were only simulated at times are real now, and nothing else can be missing
        assert waiting == set()
        assert self.gone == set(self.submitted)


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# ---------------------------------------------------------------- killed ranks that do not end


def test_a_waiting_run_learns_of_killed_ranks_that_keep_their_devices() -> None:
    scheduler = Scheduler(node(*gpus(4)))
    submit(scheduler, spec(A, 3))
    running(scheduler, A)
    scheduler.handle(RunMoved(A, RunState.CANCELLED), 1.0)
    submit(scheduler, spec(B, 2, wait_s=60.0), 2.0)
    kept = (RemainingRank(rank=2, pid=123, host="here"),)
    shown = [one for one in scheduler.handle(RanksRemain(A, kept), 3.0) if isinstance(one, QueueMoved)]
    why = "needs 1 more A10; run aaaa still holds 3 A10: rank 2 (process 123) was killed and does not end"
    assert shown == [QueueMoved(B, 1, why)]
    assert scheduler.worded_remaining() == {A: "rank 2 (process 123) was killed and does not end"}
    # a new inventory changes nothing
    scheduler.handle(InventoryChanged(node(*gpus(4), cores=3)), 4.0)
    assert scheduler.worded_statuses()[B] == (1, why)
    (given_up,) = [one for one in scheduler.handle(TimePassed(), 62.0) if isinstance(one, EndUnstartedRun)]
    assert "rank 2 (process 123) was killed and does not end" in str(given_up.reason)
    submit(scheduler, spec(C, 4), 63.0)
    assert list(launched(scheduler.handle(RanksReaped(A, RunState.CANCELLED), 64.0))) == [C]
    assert scheduler.worded_remaining() == {}


def test_killed_ranks_of_several_nodes_are_named_with_their_hosts() -> None:
    scheduler = Scheduler(node(*gpus(2)))
    submit(scheduler, spec(A, 2))
    running(scheduler, A)
    for rank, host in enumerate(("a", "b")):
        scheduler.handle(RanksRemain(A, (RemainingRank(rank=rank, pid=7, host=host),)), 1.0)
    assert scheduler.worded_remaining() == {
        A: "rank 0 (process 7 on a), rank 1 (process 7 on b) were killed and do not end"
    }

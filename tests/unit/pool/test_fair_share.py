"""Several users share a pool: order, quotas, and no starvation."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from scheduler_requests import Scheduler
from simulated_cluster import Driven, cluster, spec

from sgpu_magic.config.pool_terms import read_limits, read_priorities, read_quotas
from sgpu_magic.pool.scheduling.capacity import QueueKey
from sgpu_magic.pool.scheduling.fair_share import FairShare
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.run import RunSpec

ONE_NODE = cluster({"n1": ("h100", 4)})
PASS_OVER_S = 600.0
_ROUNDS = 200


def driven(*, priorities: str = "", quotas: str = "", gpus: int = 4) -> Driven:
    inventory = cluster({"n1": ("h100", gpus), "n2": ("a10", 4)})
    return Driven(Scheduler(inventory, pass_over_s=PASS_OVER_S, limits=read_limits(priorities, quotas)))


def runs(user: str, count: int, ranks: int = 1, kind: str = "h100") -> list[RunSpec]:
    return [spec(f"{user}{number:04d}", ranks, kind, user=user) for number in range(count)]


def drained(pool: Driven) -> list[str]:
    """End runs in the order in which they began until none is left; return the start order."""
    begun = 0
    while begun < len(pool.launched):
        pool.end(pool.launched[begun])
        begun += 1
    return pool.launched


# ---------------------------------------------------------------- order of users


def test_one_run_of_another_comes_before_the_fifty_that_were_there_first() -> None:
    pool = driven(gpus=1)
    pool.submit(*runs("alice", 50), *runs("bob", 1))
    assert pool.scheduler.worded_statuses()["bob0000"][0] == 1
    pool.end("alice0000")
    assert pool.launched == ["alice0000", "bob0000"]


def test_users_take_turns_and_each_of_them_first_come_first_served() -> None:
    pool = driven(gpus=1)
    pool.submit(*runs("alice", 4), *runs("bob", 3))
    order = [run for run, _ in sorted(pool.scheduler.worded_statuses().items(), key=lambda item: item[1][0])]
    # computed as if all devices became free now, while alice has one
    assert order == ["bob0000", "bob0001", "alice0001", "bob0002", "alice0002", "alice0003"]
    begun = drained(pool)
    assert [run for run in begun if run.startswith("alice")] == [f"alice{number:04d}" for number in range(4)]
    assert [run for run in begun if run.startswith("bob")] == [f"bob{number:04d}" for number in range(3)]


def test_who_has_fewer_devices_is_next_however_many_runs_those_are() -> None:
    pool = driven(gpus=4)
    pool.submit(*runs("alice", 1, ranks=3), *runs("bob", 1), spec("bob0001", user="bob"), spec("alice0001"))
    assert [run for run, _ in pool.scheduler.worded_statuses().items()] == ["bob0001", "alice0001"]
    pool.end("alice0000")
    assert pool.launched[2:] == ["bob0001", "alice0001"]


def test_what_was_used_lately_counts_and_is_forgotten_with_time() -> None:
    def next_after(rest_s: float) -> str:
        pool = driven(gpus=1)
        pool.submit(*runs("alice", 1))
        pool.wait(3600.0)
        pool.end("alice0000")
        pool.wait(rest_s)
        pool.submit(spec("bob0000", user="bob"))
        pool.wait(600.0)
        # both wait, alice for longer
        pool.submit(spec("alice0001"), spec("bob0001", user="bob"))
        pool.end("bob0000")
        return pool.launched[-1]

    assert next_after(0.0) == "bob0001"
    assert next_after(10 * 3600.0) == "alice0001"


def test_what_was_used_counts_half_after_the_half_life() -> None:
    share = FairShare(half_life_s=3600.0)
    run = ScheduledRun(spec("alice0000", 4, user="alice"))
    lease = Lease(lease_id="l", device_type="h100", ranks=4, uuids=("GPU-0", "GPU-1", "GPU-2", "GPU-3"))
    share.took(run, lease, 0.0)
    share.gave_back(run, lease, 3600.0)
    assert share.share(QueueKey("h100"), "alice", 3600.0) == pytest.approx(2.0)
    assert share.share(QueueKey("h100"), "alice", 7200.0) == pytest.approx(1.0)


def test_devices_of_another_type_are_another_matter() -> None:
    pool = driven(gpus=1)
    pool.submit(*runs("alice", 1, 4, "a10"), spec("carol0000", user="carol"), spec("alice0001"))
    pool.wait(60.0)
    pool.submit(spec("carol0001", user="carol"))
    pool.end("carol0000")
    assert pool.launched[-1] == "alice0001"


def test_one_user_alone_is_served_first_come_first_served() -> None:
    pool = driven(gpus=1)
    pool.submit(*runs("alice", 9))
    assert [context for context, _ in pool.scheduler.worded_statuses().values()] == list(range(1, 9))
    assert drained(pool) == [f"alice{number:04d}" for number in range(9)]


# ---------------------------------------------------------------- priorities


def test_the_higher_priority_comes_first() -> None:
    pool = driven(priorities="bob=5,carol=-1", gpus=1)
    pool.submit(*runs("alice", 2), *runs("carol", 1), *runs("bob", 2))
    assert drained(pool) == ["alice0000", "bob0000", "bob0001", "alice0001", "carol0000"]


def test_everybody_elses_priority() -> None:
    pool = driven(priorities="alice=1,*=10", gpus=1)
    pool.submit(*runs("alice", 2), *runs("bob", 2), *runs("carol", 1))
    assert drained(pool)[-1] == "alice0001"


# ---------------------------------------------------------------- quotas


def test_who_has_used_up_the_quota_waits_for_himself_and_keeps_nobody() -> None:
    pool = driven(quotas="alice=2", gpus=4)
    pool.submit(*runs("alice", 2), spec("alice0002"), spec("bob0000", 2, user="bob"))
    assert pool.launched == ["alice0000", "alice0001", "bob0000"]
    assert pool.reason("alice0002") == (
        "user alice may have 2 devices at once (the pool's setting user_quotas): 2 are in use by run alic, run alic, "
        "and it needs 1 H100"
    )
    pool.wait(2 * PASS_OVER_S)
    pool.end("bob0000")
    pool.submit(spec("bob0001", 2, user="bob"))
    assert pool.launched[-1] == "bob0001"
    pool.end("alice0000")
    assert pool.launched[-1] == "alice0002"


def test_a_quota_of_one_type_leaves_the_others_alone() -> None:
    pool = driven(quotas="*:h100=1", gpus=4)
    pool.submit(*runs("alice", 2), spec("alice0003", 4, "a10"), spec("bob0000", user="bob"))
    assert pool.launched == ["alice0000", "alice0003", "bob0000"]
    assert pool.reason("alice0001").startswith(
        "user alice may have 1 H100 at once (the pool's setting user_quotas): 1 is in use by run alic, and it needs 1"
    )


def test_all_types_count_together_where_none_is_named_and_slots_never() -> None:
    pool = driven(quotas="alice=3", gpus=4)
    pool.submit(spec("aaaa0000", 2), spec("bbbb0000", 2, "a10"), spec("cccc0000", 4, "cpu"))
    assert pool.launched == ["aaaa0000", "cccc0000"]
    assert "may have 3 devices at once" in pool.reason("bbbb0000")


def test_more_than_the_quota_is_refused_at_once() -> None:
    pool = driven(quotas="*=2,boss=4", gpus=4)
    pool.submit(spec("aaaa0000", 3), spec("bbbb0000", 4, user="boss"))
    assert pool.refused["aaaa0000"].error == "CapacityError"
    assert pool.refused["aaaa0000"].reason == (
        "user alice may have 2 devices at once in this pool (its setting user_quotas), and the run asks for 3. Ask for "
        "2 or fewer with --gpus, choose another pool with --pool, or ask this pool's operator for more."
    )
    assert pool.launched == ["bbbb0000"]


def test_what_waits_over_its_quota_has_the_last_places() -> None:
    pool = driven(quotas="alice=1", gpus=1)
    pool.submit(*runs("alice", 3), *runs("bob", 2))
    places = {run: context for run, (context, _) in pool.scheduler.worded_statuses().items()}
    assert places == {"bob0000": 1, "bob0001": 2, "alice0001": 3, "alice0002": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice", "'alice' is invalid; write it like alice=8,alice:h100=4,*=16"),
        ("alice=many", "'many' is not a quota for 'alice'; it must be a whole number"),
        ("alice=-1", "-1 is not a quota for 'alice'; it must be 0 or more"),
        ("alice=1,alice=2", "'alice' has more than one quota"),
        (":h100=1", "':h100' does not name a user and type; write quotas like alice=8,alice:h100=4,*=16"),
    ],
)
def test_quotas_that_mean_nothing(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_quotas(text)
    assert str(caught.value) == message


def test_settings_are_read() -> None:
    assert read_priorities(" alice = 10 , * = -1 ") == {"alice": 10, "*": -1}
    assert read_quotas("alice=8,alice:H100=4,*=16") == {("alice", ""): 8, ("alice", "h100"): 4, ("*", ""): 16}
    limits = read_limits("", "alice=8,*=16,*:h100=2")
    assert (limits.quota("alice"), limits.quota("bob"), limits.quota("alice", "h100")) == (8, 16, 2)


# ---------------------------------------------------------------- no starvation


def test_a_large_run_gets_its_node_though_small_ones_of_others_keep_coming() -> None:
    pool = driven(gpus=4)
    pool.submit(*runs("bob", 4), spec("alice0000", 4))
    for number in range(4, _ROUNDS):
        pool.wait(PASS_OVER_S / 20)
        pool.submit(spec(f"bob{number:04d}", user="bob"))
        if "alice0000" in pool.leases:
            break
        pool.end(next(iter(pool.leases)))
    # the run was passed over early; after PASS_OVER_S, freed devices are reserved for it
    assert "alice0000" in pool.leases
    assert number < 40


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["alice", "bob", "carol", "dave"]),
            st.integers(1, 8),
            st.sampled_from(["pack", "strict_pack", "spread"]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(["", "alice=5,bob=-5", "*=1,carol=9"]),
    st.sampled_from(["", "bob=8,*=12", "*:h100=8,carol=9"]),
    st.integers(1, 4),
)
def test_everybody_who_waits_begins_whatever_the_others_send(
    asked: list[tuple[str, int, str]], priorities: str, quotas: str, small: int
) -> None:
    """One more user, of the highest priority, submits small runs endlessly; no other run may starve."""
    inventory = cluster({"n1": ("h100", 8), "n2": ("h100", 8)})
    limits = read_limits(f"{priorities},eve=99".strip(","), quotas)
    pool = Driven(Scheduler(inventory, pass_over_s=PASS_OVER_S, limits=limits))
    pool.submit(*(spec(f"eve{number:05d}", small, user="eve") for number in range(20)))
    waiting = [
        spec(f"run{number:05d}", ranks, user=user, strategy=strategy)
        for number, (user, ranks, strategy) in enumerate(asked)
    ]
    pool.submit(*waiting)
    for number in range(20, 20 + _ROUNDS):
        left = [one.run_id for one in waiting if one.run_id not in pool.launched]
        if not left:
            return
        pool.wait(PASS_OVER_S / 2)
        pool.submit(spec(f"eve{number:05d}", small, user="eve"))
        # every run ends eventually: here the oldest one
        pool.end(next(iter(pool.leases)))
        in_use = [uuid for lease in pool.leases.values() for uuid in lease.uuids]
        assert len(set(in_use)) == len(in_use)
    pytest.fail(f"{left} wait for ever: {[pool.reason(run) for run in left]}")

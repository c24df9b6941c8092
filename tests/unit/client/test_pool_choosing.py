"""Which of several pools takes a run that names none; `--min-memory`, `--nodes` and `--placement`."""

from __future__ import annotations

import msgspec
import pytest
from status_rows import pool_status, run_summary

from sgpu_magic.client.pool_choosing import (
    DeviceRequest,
    PoolSelection,
    PriceBook,
    TypeCount,
    cheapest_type,
    check_memory,
    choose,
    counts,
    describe_devices,
)
from sgpu_magic.client.pools import PoolStatusReply
from sgpu_magic.client.pools_file import PoolEntry
from sgpu_magic.config.pool_terms import read_prices
from sgpu_magic.errors import CapacityError, UsageError
from sgpu_magic.options.values import check_spread, memory_bytes, node_count, strategy_of
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Device, Inventory
from sgpu_magic.wire.pool_status import PoolStatus

GB = 10**9
MONEY = PriceBook(read_prices("a10=2.00,h100=8.00"), read_prices("a10=1.00"), "USD")
SIZES = {"a10": 24 * GB, "h100": 80 * GB, "t4": 16 * GB}


def entry(name: str, *, reserved: bool = False, types: str = "", prices: dict[str, float] | None = None) -> PoolEntry:
    return PoolEntry(name, "tcp://h:1", "k" * 40, reserved, tuple(types.split()), prices or {})


def status(
    types: str = "", *, slots: int = 4, slots_free: int = 4, held: int = 0, elastic: dict[str, int] | None = None
) -> PoolStatus:
    """A pool with these device counts (`"a10:4 h100:2"`); one run holds the first `held` devices."""
    devices = [
        Device(uuid=f"{kind}-{number}", type=kind, memory_bytes=SIZES[kind], index=number)
        for kind, _, count in (each.partition(":") for each in types.split())
        for number in range(int(count))
    ]
    run = run_summary(ranks=held, uuids=tuple(device.uuid for device in devices[:held]))
    inventory = Inventory(host="h", devices=tuple(devices), cpu_slots=slots, elastic=tuple((elastic or {}).items()))
    return pool_status(*((run,) if held else ()), inventory=inventory, cpu_slots_free=slots_free)


def asked(pool: PoolEntry | None, types: str = "", **options: object) -> PoolStatusReply:
    return PoolStatusReply("local" if pool is None else pool.name, pool, status(types, **options))  # type: ignore[arg-type]


def silent(pool: PoolEntry) -> PoolStatusReply:
    return PoolStatusReply(pool.name, pool, problem=f"the pool {pool.name} can't be reached.")


TEAM, CLOUD, OTHER = entry("team", reserved=True), entry("cloud"), entry("other", prices={"h100": 5.0})


# ---------------------------------------------------------------- available devices


def test_devices_are_counted_with_what_may_come():
    found = counts(status("a10:4 h100:2", held=3, elastic={"a10": 8, "t4": 2, "cpu": 99}, slots_free=1))
    assert found == {
        "a10": TypeCount(8, 1, 24 * GB),
        "h100": TypeCount(2, 2, 80 * GB),
        "t4": TypeCount(2, 0, found["t4"].memory_bytes),
        "cpu": TypeCount(4, 1, 0),
    }
    assert found["t4"].memory_bytes > 15 * GB
    assert set(counts(status("a10:4 h100:2"), 40 * GB)) == {"h100"}
    assert describe_devices(status("a10:4 h100:2")) == "4 A10 (24 GB), 2 H100 (80 GB), 4 CPU ranks"


def test_the_vendors_number_is_enough_as_a_least_memory():
    devices = tuple(Device(uuid=f"G{at}", type="h100", memory_bytes=81559 << 20) for at in range(2))
    of_driver = msgspec.structs.replace(status("h100:2"), inventory=Inventory(host="h", devices=devices, cpu_slots=4))
    assert describe_devices(of_driver) == "2 H100 (80 GB), 4 CPU ranks"
    for least in ("80GB", "79GiB", "80 GB"):
        assert counts(of_driver, memory_bytes("--min-memory", least))["h100"].total == 2
    assert "h100" not in counts(of_driver, memory_bytes("--min-memory", "90GB"))


def test_what_others_use_outside_is_not_free():
    used = status("a10:2")
    devices = (replace_used(used.inventory.devices[0]), used.inventory.devices[1])
    inventory = Inventory(host="h", devices=devices, cpu_slots=0)
    assert counts(pool_status(inventory=inventory, cpu_slots_free=0)) == {"a10": TypeCount(2, 1, 24 * GB)}


def replace_used(device: Device) -> Device:
    return Device(uuid=device.uuid, type=device.type, memory_bytes=device.memory_bytes, outside_use="someone's")


# ---------------------------------------------------------------- the choice


def test_reserved_before_on_demand_and_it_says_so():
    answers = [asked(CLOUD, "a10:8"), asked(TEAM, "a10:4")]
    assert choose(answers, DeviceRequest(2, "a10"), MONEY) == PoolSelection(
        "team", None, "reserved, and has 2 A10 free"
    )
    # a busy reserved pool is paid for too
    busy = [asked(CLOUD, "a10:8"), asked(TEAM, "a10:4", held=4)]
    chosen = choose(busy, DeviceRequest(2, "a10"), MONEY)
    assert chosen.name == "team"
    assert chosen.why == "reserved, and its A10 are in use: the run waits there (--pool names another)"


def test_on_demand_where_the_reserved_ones_lack_the_type():
    chosen = choose([asked(TEAM, "a10:4"), asked(CLOUD, "h100:8")], DeviceRequest(2, "h100"), MONEY)
    assert chosen.name == "cloud"
    assert chosen.why == "on demand at $8.00 an hour for each, and has 2 H100 free; team has no 2 H100"


def test_of_on_demand_ones_the_free_and_then_the_cheapest():
    assert choose([asked(CLOUD, "h100:8"), asked(OTHER, "h100:8")], DeviceRequest(2, "h100"), MONEY).name == "other"
    busy = [asked(CLOUD, "h100:8"), asked(OTHER, "h100:8", held=7)]
    assert choose(busy, DeviceRequest(2, "h100"), MONEY).name == "cloud"
    # pools without a known price come after those with one
    unpriced = [asked(entry("first"), "t4:8"), asked(entry("second", prices={"t4": 3.0}), "t4:8")]
    assert choose(unpriced, DeviceRequest(1, "t4"), MONEY).name == "second"


def test_this_machines_own_is_for_what_none_has_and_what_is_silent_is_named():
    chosen = choose([asked(TEAM, "a10:4"), silent(CLOUD)], DeviceRequest(2, "h100"), MONEY)
    assert chosen == PoolSelection("local", None, "team has no 2 H100; cloud can't be reached")
    assert chosen.note == "on this machine; team has no 2 H100; cloud can't be reached"
    chosen = choose([silent(TEAM), asked(CLOUD, "a10:4")], DeviceRequest(2, "a10"), MONEY)
    assert chosen.name == "cloud"
    assert chosen.why.endswith("; team can't be reached")


def test_a_pool_with_too_few_is_none():
    assert choose([asked(TEAM, "a10:4")], DeviceRequest(5, "a10"), MONEY).name == "local"
    # but an autoscaling pool that can grow enough is chosen
    chosen = choose([asked(TEAM, "a10:4", elastic={"a10": 8})], DeviceRequest(5, "a10"), MONEY)
    assert chosen.name == "team"


def test_types_that_a_pool_is_said_to_have_are_believed():
    only = entry("only", types="h100")
    assert choose([asked(only, "a10:4")], DeviceRequest(1, "a10"), MONEY).name == "local"


def test_any_device_and_pools_without_gpus():
    assert choose([asked(TEAM), asked(CLOUD, "a10:1")], DeviceRequest(2, None), MONEY).name == "team"
    assert choose([asked(TEAM, "a10:1"), asked(CLOUD, "a10:4")], DeviceRequest(2, "any"), MONEY).name == "cloud"
    assert choose([asked(TEAM, "a10:4")], DeviceRequest(2, "cpu"), MONEY).name == "team"


@pytest.mark.parametrize("kind", [None, "any"])
def test_of_several_types_a_run_that_names_none_gets_the_cheapest_that_is_free(kind: str | None):
    """Not the most frequent type."""
    chosen = choose([asked(CLOUD, "a10:4 h100:8", held=3)], DeviceRequest(1, kind), MONEY)
    assert (chosen.device_type, chosen.why) == ("a10", "on demand at $2.00 an hour for each, and has 1 A10 free")
    assert chosen.type_note == "A10: cheapest free type (--type to choose)"
    busy = choose([asked(CLOUD, "a10:4 h100:8", held=3)], DeviceRequest(2, kind), MONEY)
    assert (busy.device_type, busy.type_note) == ("h100", "H100: cheapest free type (--type to choose)")
    assert choose([asked(CLOUD, "a10:4")], DeviceRequest(1, kind), MONEY).type_note is None
    # pools are compared by the cost of this run
    others = [asked(entry("a"), "h100:8"), asked(entry("b"), "h100:8 a10:1")]
    assert choose(others, DeviceRequest(1, kind), MONEY).name == "b"


@pytest.mark.parametrize(("kind", "taken"), [("reserved", "team"), ("on-demand", "cloud")])
def test_only_pools_of_a_kind(kind: str, taken: str):
    answers = [asked(TEAM, "a10:4"), asked(CLOUD, "a10:4")]
    assert choose(answers, DeviceRequest(2, "a10", kind=kind), MONEY).name == taken
    with pytest.raises(CapacityError) as raised:
        choose([silent(TEAM), silent(CLOUD)], DeviceRequest(2, "a10", kind=kind), MONEY)
    assert f"no {kind} pool can take the run" in raised.value.message
    assert "can't be reached" in raised.value.message


# ---------------------------------------------------------------- by memory


def test_the_cheapest_free_type_with_so_much_memory():
    pool = asked(CLOUD, "t4:4 a10:4 h100:4")
    assert cheapest_type(pool, DeviceRequest(2, min_memory_bytes=20 * GB), MONEY) == "a10"
    assert cheapest_type(pool, DeviceRequest(2, min_memory_bytes=40 * GB), MONEY) == "h100"
    # a free, more expensive type is preferred to a busy, cheaper one
    assert cheapest_type(asked(CLOUD, "a10:4 h100:4", held=3), DeviceRequest(2, min_memory_bytes=GB), MONEY) == "h100"
    # a run that was just submitted holds no devices yet
    before = status("a10:4 h100:4", held=3)
    (run,) = before.runs
    submitted = msgspec.structs.replace(run, state=RunState.QUEUED, device_type="a10", uuids=())
    queued = msgspec.structs.replace(before, runs=(submitted,))
    assert (
        cheapest_type(PoolStatusReply("cloud", CLOUD, queued), DeviceRequest(2, min_memory_bytes=GB), MONEY) == "h100"
    )
    with pytest.raises(CapacityError) as raised:
        cheapest_type(pool, DeviceRequest(2, min_memory_bytes=90 * GB), MONEY)
    assert raised.value.message == (
        "the pool cloud has no 2 devices of one type with 90.0 GB of memory each. It has: 4 T4 (16 GB), "
        "4 A10 (24 GB), 4 H100 (80 GB), 4 CPU ranks. Ask for less with --min-memory, or for fewer with --gpus."
    )


def test_a_choice_by_memory_tells_the_type():
    chosen = choose([asked(TEAM, "a10:4"), asked(CLOUD, "h100:4")], DeviceRequest(2, None, 40 * GB), MONEY)
    assert (chosen.name, chosen.device_type) == ("cloud", "h100")
    assert chosen.why.endswith("team has no 2 devices with 40.0 GB")


def test_a_type_that_is_named_is_checked():
    pool = asked(CLOUD, "a10:4")
    check_memory(pool, DeviceRequest(2, "a10", 20 * GB))
    with pytest.raises(CapacityError) as raised:
        check_memory(pool, DeviceRequest(2, "a10", 40 * GB))
    assert "the pool cloud has 4 A10 with 24 GB of memory or more, and 0 of them have 40.0 GB; 2 are asked for." in str(
        raised.value
    )
    with pytest.raises(CapacityError, match=r"--min-memory 40\.0 GB is GPU memory, and ranks on CPU have none"):
        check_memory(pool, DeviceRequest(2, "cpu", 40 * GB))


# ---------------------------------------------------------------- options


def test_memory_as_people_write_it():
    written = ["40GB", "40 gb", "40G", "40GiB", ".5TB", 40 * GB, None, ""]
    assert [memory_bytes("--min-memory", each) for each in written] == [
        40 * GB, 40 * GB, 40 * GB, 40 << 30, 500 * GB, 40 * GB, 0, 0,
    ]  # fmt: skip
    for wrong in ("1.5e0", "40", 40, "much", True, "-4GB", "nan", float("nan"), float("inf"), "9999TB"):
        with pytest.raises(UsageError, match=r"--min-memory .* is not a memory size: .* such as 40GB"):
            memory_bytes("--min-memory", wrong)


def test_nodes_and_how_ranks_are_spread():
    assert [node_count("--nodes", each) for each in ("2", 3)] == [2, 3]
    for wrong in ("0", 0, "-1", "two", 1.5, True, 5000):
        with pytest.raises(UsageError, match="is not a number of nodes from 1 to 4096"):
            node_count("--nodes", wrong)
    assert [strategy_of("--placement", each) for each in ("STRICT-PACK", "spread")] == ["strict_pack", "spread"]
    with pytest.raises(UsageError, match="it can be pack, strict_pack, spread"):
        strategy_of("--placement", "scatter")
    check_spread(8, 2, "pack")
    check_spread(None, 0, "spread")
    check_spread(4, 1, "strict_pack")
    with pytest.raises(UsageError, match=r"8 ranks can't be spread evenly over 3 nodes.*--gpus 9"):
        check_spread(8, 3, "pack")
    with pytest.raises(UsageError, match=r"--nodes 2 needs the number of ranks too: add --gpus N, a multiple of 2"):
        check_spread(None, 2, "pack")
    with pytest.raises(UsageError, match="strict_pack keeps them on one"):
        check_spread(4, 2, "strict_pack")


def test_what_is_chosen_holds_as_the_lists_order_changes():
    answers = [asked(TEAM, "a10:4", held=4), asked(CLOUD, "a10:4"), asked(OTHER, "h100:2")]
    for wanted in (
        DeviceRequest(2, "a10"),
        DeviceRequest(1),
        DeviceRequest(2, "h100"),
        DeviceRequest(4, None, 20 * GB),
    ):
        named = {choose(order, wanted, MONEY).name for order in (answers, answers[::-1])}
        assert len(named) == 1, wanted

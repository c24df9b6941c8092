"""Which pool a run goes to, and what it asks for there."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pool_choosing import (
    KINDS,
    Choice,
    Money,
    Wanted,
    cheapest_type,
    check_memory,
    choose,
    money_of,
    one_of_several,
)
from sgpu_magic.client.pools import PATIENCE_S, Asked, Pools
from sgpu_magic.client.pools_file import LOCAL, PoolEntry
from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.options.asked import Devices
from sgpu_magic.options.values import STRATEGIES, check_spread
from sgpu_magic.wire.devices import Placement

CPU_RANKS = 2
"""Ranks on CPU of a run that does not say how many."""

# a pool is asked for the runs that hold its devices
_HOLDERS = 1


class Found(msgspec.Struct, frozen=True):
    """Where a run goes.

    Args:
        pool: Its pool.
        placement: What it asks for there.
        notes: Sentences for its view: why it goes there, and which settings the pool does not have.
    """

    pool: Pool
    placement: Placement
    notes: tuple[str, ...] = ()


def find_place(pools: Pools, settings: Settings, name: str, devices: Devices) -> Found:
    """Return where a run goes. A pool that it names is the one; else one is chosen.

    Args:
        pools: This process's.
        settings: As they are now.
        name: The pool that options, the notebook's choice or the settings name, or a kind: `reserved`, `on-demand`; ""
            leaves the choice to us.
        devices: What it asks for.

    Raises:
        UsageError: There is no such pool, or it asks for what can't be.
        CapacityError: The pool, or every pool, lacks what it asks for.
        PoolError: The pool that it names can't be reached.
    """
    check_spread(devices.ranks, devices.nodes, devices.strategy)
    entries = pools.entries() if name != LOCAL else ()
    choice: Choice | None = None
    if name in KINDS or (not name and entries):
        choice = _chosen(pools, settings, entries, devices, name)
        name = choice.name
    pool = pools.named(name or LOCAL)
    kept_settings = pool.apply_settings()
    entry = next((each for each in entries if each.name == name), None)
    device_type, told = devices.device_type, "" if choice is None else choice.told
    if choice is not None and choice.device_type is not None:
        device_type = choice.device_type
    elif devices.min_memory_bytes:
        device_type = _type_by_memory(pool, entry, devices, money_of(settings))
    elif device_type in (None, "any") and (choice is None or entry is None):
        kind, told = one_of_several(_asked(pool, entry), Wanted(devices.ranks), money_of(settings))
        device_type = kind or device_type
    ranks = devices.ranks or default_ranks(pool, entry, device_type)
    check_spread(ranks, devices.nodes, devices.strategy)
    placement = Placement(
        ranks=ranks,
        device_type=device_type or "any",
        allow_busy=devices.allow_busy,
        stand_in=settings.stand_in == "cpu",
        nodes=devices.nodes,
        strategy=devices.strategy or STRATEGIES[0],
        min_memory_bytes=devices.min_memory_bytes,
    )
    notes = () if choice is None else (f"pool {choice.name}: {choice.why}",)
    return Found(pool, placement, (*notes, *filter(None, [told, kept_settings])))


def default_ranks(pool: Pool, entry: PoolEntry | None, device_type: str | None) -> int:
    """Ranks without `--gpus`: all devices of this machine's one type, else two on CPU.

    Args:
        pool: Where.
        entry: As `pools.toml` has it; None for this machine's own.
        device_type: What is asked for; None for anything.

    Raises:
        UsageError: The pool is shared with others.
    """
    if device_type == "cpu":
        return CPU_RANKS
    if entry is not None:
        kind = "" if device_type in (None, "any") else f" {device_type}"
        raise UsageError(f"the pool {entry.name} is shared with others: say how many{kind} with --gpus N.")
    status = pool.status(recent=0)
    types: dict[str, int] = {}
    for device in status.inventory.devices if status is not None else ():
        types[device.type] = types.get(device.type, 0) + 1
    if device_type not in (None, "any"):
        return types.get(str(device_type), 0) or CPU_RANKS
    return sum(types.values()) or CPU_RANKS


def _chosen(pools: Pools, settings: Settings, entries: tuple[PoolEntry, ...], devices: Devices, kind: str) -> Choice:
    """Ask all pools that may have what is wanted, and choose one."""
    if kind and not entries:
        raise UsageError(
            f"--pool {kind} asks for a pool of that kind, and none is listed. `sgpu pool add NAME tcp://host:port "
            "--key KEY` lists one; leave --pool out to use this machine's own."
        )
    wanted = Wanted(devices.ranks, devices.device_type, devices.min_memory_bytes, kind)
    may = [entry for entry in entries if _may_have(entry, wanted)]
    answers = pools.asked(may, local=False, recent=_HOLDERS)
    lacking = [Asked(entry.name, entry) for entry in entries if entry not in may]
    return choose([*answers, *lacking], wanted, money_of(settings))


def _may_have(entry: PoolEntry, wanted: Wanted) -> bool:
    """Whether it is worth asking: of a pool whose types are listed one knows without."""
    if wanted.kind and entry.reserved != (wanted.kind == KINDS[0]):
        return False
    return not entry.types or wanted.device_type in (None, "any", *entry.types)


def _asked(pool: Pool, entry: PoolEntry | None) -> Asked:
    if entry is None:
        return Asked(pool.name, None, pool.status(_HOLDERS))
    return Asked(entry.name, entry, pool.status(_HOLDERS, timeout_s=PATIENCE_S))


def _type_by_memory(pool: Pool, entry: PoolEntry | None, devices: Devices, money: Money) -> str | None:
    """Return the type that is asked for, or the cheapest that fits; checked."""
    asked = _asked(pool, entry)
    wanted = Wanted(devices.ranks, devices.device_type, devices.min_memory_bytes)
    if devices.device_type in (None, "any"):
        if devices.ranks is None:
            wanted = replace(wanted, ranks=1)
        return cheapest_type(asked, wanted, money)
    check_memory(asked, wanted)
    return devices.device_type

"""Chooses a run's pool, and the placement to request there."""

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
from sgpu_magic.wire.events import as_warning

CPU_RANKS = 2
"""Default number of ranks on CPU."""

# `recent` of 1 includes all active runs, which hold the pool's devices
_HOLDERS = 1


class Found(msgspec.Struct, frozen=True):
    """A run's pool and placement.

    Args:
        pool: The pool.
        placement: The devices to request there.
        notes: Notes for the run's view: the reason for the choice, and settings that the pool does not apply.
    """

    pool: Pool
    placement: Placement
    notes: tuple[str, ...] = ()


def find_place(pools: Pools, settings: Settings, name: str, devices: Devices) -> Found:
    """Return the pool and placement of a run: the named pool, else one chosen by `pool_choosing.choose`.

    Args:
        pools: The process's pools.
        settings: The current settings.
        name: The pool named by the options, the notebook's choice or the settings, or a kind: `reserved`, `on-demand`;
            "" to choose one.
        devices: The devices that the run requests.

    Raises:
        UsageError: There is no such pool, or the request is invalid.
        CapacityError: The pool, or every pool, lacks the devices.
        PoolError: The named pool can't be reached.
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
        stand_in=bool(settings.stand_in),
        nodes=devices.nodes,
        strategy=devices.strategy or STRATEGIES[0],
        min_memory_bytes=devices.min_memory_bytes,
    )
    notes = () if choice is None else (f"pool {choice.name}: {choice.why}",)
    kept = (as_warning(kept_settings),) if kept_settings else ()
    return Found(pool, placement, (*notes, *filter(None, [told]), *kept))


def default_ranks(pool: Pool, entry: PoolEntry | None, device_type: str | None) -> int:
    """Return the number of ranks without `--gpus`: all devices of the type in the local pool, else 2 on CPU.

    Args:
        pool: The pool.
        entry: Its entry in `pools.toml`; None for the local pool.
        device_type: The requested type; None for any.

    Raises:
        UsageError: The pool is remote, and so shared with others: the number is required.
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
    """Ask all pools that may have the devices, and choose one."""
    if kind and not entries:
        raise UsageError(
            f"--pool {kind} asks for a pool of that kind, but none is listed. `sgpu pool add NAME tcp://host:port "
            "--key KEY` lists one; leave --pool out to use this machine's own."
        )
    wanted = Wanted(devices.ranks, devices.device_type, devices.min_memory_bytes, kind)
    may = [entry for entry in entries if _may_have(entry, wanted)]
    answers = pools.asked(may, local=False, recent=_HOLDERS)
    lacking = [Asked(entry.name, entry) for entry in entries if entry not in may]
    return choose([*answers, *lacking], wanted, money_of(settings))


def _may_have(entry: PoolEntry, wanted: Wanted) -> bool:
    """Whether the pool may have the devices, according to its entry in `pools.toml`."""
    if wanted.kind and entry.reserved != (wanted.kind == KINDS[0]):
        return False
    return not entry.types or wanted.device_type in (None, "any", *entry.types)


def _asked(pool: Pool, entry: PoolEntry | None) -> Asked:
    if entry is None:
        return Asked(pool.name, None, pool.status(_HOLDERS))
    return Asked(entry.name, entry, pool.status(_HOLDERS, timeout_s=PATIENCE_S))


def _type_by_memory(pool: Pool, entry: PoolEntry | None, devices: Devices, money: Money) -> str | None:
    """Return the requested type after a check of its memory, else the cheapest type with enough memory."""
    asked = _asked(pool, entry)
    wanted = Wanted(devices.ranks, devices.device_type, devices.min_memory_bytes)
    if devices.device_type in (None, "any"):
        if devices.ranks is None:
            wanted = replace(wanted, ranks=1)
        return cheapest_type(asked, wanted, money)
    check_memory(asked, wanted)
    return devices.device_type

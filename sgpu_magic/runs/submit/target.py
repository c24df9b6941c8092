"""Resolves where a run goes: fills in the notebook's choice, chooses the pool, and the placement to request there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from sgpu_magic.client import pool_choosing
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pool_choosing import (
    KINDS,
    DeviceRequest,
    PriceBook,
    cheapest_type,
    check_memory,
    choose,
    money_of,
    one_of_several,
)
from sgpu_magic.client.pools import PATIENCE_S, Pools, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL, PoolEntry, default_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.options.notebook_job import with_job
from sgpu_magic.options.option_records import OWN_PACKAGES, Devices, RunOptions
from sgpu_magic.options.values import STRATEGIES, check_spread
from sgpu_magic.runs.choice.schema import Choice, describe_choice
from sgpu_magic.wire.devices import Placement, type_label
from sgpu_magic.wire.events import as_warning
from sgpu_magic.wire.option_text import OptionName, TextWithOptions, text_of

if TYPE_CHECKING:
    from sgpu_magic.runs.choice.keeper import CurrentChoice
    from sgpu_magic.runs.kernel_context import KernelContext

R = TypeVar("R", bound=RunOptions)

CPU_RANKS = 2
"""Default number of ranks on CPU."""

# `recent` of 1 includes all active runs, which hold the pool's devices
_HOLDERS = 1

# the last choice with changed packages, and the file of its environment
_found: tuple[tuple[Choice, str, int], str] | None = None


class ResolvedTarget(msgspec.Struct, frozen=True):
    """A run's pool and placement.

    Args:
        pool: The pool.
        placement: The devices to request there.
        notes: Notes for the run's view: the reason for the choice, and settings that the pool does not apply.
        type_note: Which of several types was chosen and why; None if there was no choice.
    """

    pool: Pool
    placement: Placement
    notes: tuple[str, ...] = ()
    type_note: str | None = None


def resolve_target(pools: Pools, settings: Settings, name: str, devices: Devices) -> ResolvedTarget:
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
    choice: pool_choosing.PoolSelection | None = None
    if name in KINDS or (not name and entries):
        choice = _choose_pool(pools, settings, entries, devices, name)
        name = choice.name
    pool = pools.get(name or LOCAL)
    kept_settings = pool.apply_settings()
    entry = next((each for each in entries if each.name == name), None)
    device_type, type_note = devices.device_type, None if choice is None else choice.type_note
    if choice is not None and choice.device_type is not None:
        device_type = choice.device_type
    elif devices.min_memory_bytes:
        device_type = _type_by_memory(pool, entry, devices, money_of(settings))
    elif device_type in (None, "any") and (choice is None or entry is None):
        kind, type_note = one_of_several(_ask(pool, entry), DeviceRequest(devices.ranks), money_of(settings))
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
    notes = () if choice is None else (choice.note,)
    kept = (as_warning(kept_settings),) if kept_settings else ()
    simulation = filter(None, [pool.new_simulation()])
    return ResolvedTarget(pool, placement, (*notes, *kept, *simulation), type_note)


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
        kind = f" {type_label(device_type or '')}".rstrip()
        raise UsageError(
            text_of(
                f"the pool {entry.name} is shared with others: say how many{kind} with ", OptionName("gpus", "N"), "."
            )
        )
    status = pool.status(recent=0)
    there = status.inventory.devices if status is not None else ()
    return sum(device_type in (None, "any", device.type) for device in there) or CPU_RANKS


def _choose_pool(
    pools: Pools, settings: Settings, entries: tuple[PoolEntry, ...], devices: Devices, kind: str
) -> pool_choosing.PoolSelection:
    """Ask all pools that may have the devices, and choose one."""
    if kind and not entries:
        raise UsageError(
            text_of(
                OptionName("pool", kind),
                " asks for a pool of that kind, but none is listed. `sgpu pool add NAME tcp://host:port --key KEY` "
                "lists one; leave ",
                OptionName("pool"),
                " out to use this machine's own.",
            )
        )
    wanted = DeviceRequest(devices.ranks, devices.device_type, devices.min_memory_bytes, kind)
    may = [entry for entry in entries if _may_have(entry, wanted)]
    answers = pools.ask_status(may, local=False, recent=_HOLDERS)
    lacking = [PoolStatusReply(entry.name, entry) for entry in entries if entry not in may]
    return choose([*answers, *lacking], wanted, money_of(settings))


def _may_have(entry: PoolEntry, wanted: DeviceRequest) -> bool:
    """Whether the pool may have the devices, according to its entry in `pools.toml`."""
    if wanted.kind and entry.reserved != (wanted.kind == KINDS[0]):
        return False
    return not entry.types or wanted.device_type in (None, "any", *entry.types)


def _ask(pool: Pool, entry: PoolEntry | None) -> PoolStatusReply:
    if entry is None:
        return PoolStatusReply(pool.name, None, pool.status(_HOLDERS))
    return PoolStatusReply(entry.name, entry, pool.status(_HOLDERS, timeout_s=PATIENCE_S))


def _type_by_memory(pool: Pool, entry: PoolEntry | None, devices: Devices, money: PriceBook) -> str | None:
    """Return the requested type after a check of its memory, else the cheapest type with enough memory."""
    asked = _ask(pool, entry)
    wanted = DeviceRequest(devices.ranks, devices.device_type, devices.min_memory_bytes)
    if devices.device_type in (None, "any"):
        return cheapest_type(asked, wanted, money)
    check_memory(asked, wanted)
    return devices.device_type


# ---------------------------------------------------------------- the notebook's choice


def with_choice(context: KernelContext, asked: R) -> R:
    """Fill in options that were not given: from the defaults of `sgpu run`, then from the notebook's choice.

    Args:
        context: The kernel's context.
        asked: The options of a cell, a call or a session.

    Raises:
        UsageError: This user did not make the choice in this notebook and has not confirmed it, or it names a pool
            or environment that does not exist.
        EnvironmentFailed: Its packages are for another Python.
    """
    asked = with_job(asked)
    held = context.choice.now()
    if (choice := held.choice) is None:
        return asked
    devices = asked.devices
    ranks = choice.gpus if devices.ranks is None else 0
    # a requested amount of memory overrides the chosen type
    device_type = choice.type if devices.device_type is None and not devices.min_memory_bytes else ""
    pool = choice.pool if not asked.pool else ""
    packages = not asked.environment.env_version
    changes = packages and bool(choice.env_version or choice.dependencies or choice.removed)
    if not held.confirmed:
        if ranks or device_type or changes or (pool and pool != pool_name(context)):
            raise UsageError(_foreign(context, held, choice, packages=changes))
        return asked
    if pool and pool not in (known := context.pools.names()):
        raise UsageError(
            text_of(
                f"this notebook's choice names the pool {pool!r}, but you have: {', '.join(known)}. Choose another in "
                "the panel, or name one with ",
                OptionName("pool"),
                ".",
            )
        )
    environment = asked.environment
    if packages:
        environment = replace(environment, env_version=_env_version(context.pool.settings, choice))
    devices = replace(
        devices, ranks=devices.ranks or ranks or None, device_type=devices.device_type or device_type or None
    )
    return replace(asked, devices=devices, environment=environment, pool=asked.pool or pool)


def with_target(context: KernelContext, asked: R) -> tuple[R, ResolvedTarget]:
    """Return the options completed by `with_choice`, and the pool and placement for them.

    Args:
        context: The kernel's context.
        asked: The options of a cell, a call or a session.

    Raises:
        SgpuError: As `with_choice` and `resolve_target`.
    """
    asked = with_choice(context, asked)
    found = context.resolve_target(context.wanted_pool(asked.pool), asked.devices)
    if found.type_note is not None and found.type_note not in context.type_notes:
        context.type_notes.add(found.type_note)
        found = msgspec.structs.replace(found, notes=(*found.notes, found.type_note))
    return asked, found


def pool_name(context: KernelContext) -> str:
    """Return the name of the default pool, to show with a choice that names none."""
    try:
        return default_pool(context.current_settings().pool, context.pools.entries())
    except UsageError:
        # an error in the list of pools is reported when one of them is used
        return LOCAL


def _env_version(settings: Settings, choice: Choice) -> str:
    if not choice.env_version:
        # the choice takes precedence over the setting
        return "" if settings.env_version in OWN_PACKAGES else "none"
    if not (choice.dependencies or choice.removed):
        return choice.env_version
    global _found
    key = (choice, str(settings.state_path), _changed_ns(choice.env_version))
    found = _found
    if found is not None and found[0] == key and os.path.exists(found[1]):
        return found[1]
    # imported here: only needed for changed packages
    from sgpu_magic.runs.choice.packages import env_version_of

    file = env_version_of(settings, choice)
    _found = (key, file)
    return file


def _changed_ns(name: str) -> int:
    try:
        return os.stat(os.path.expanduser(name)).st_mtime_ns
    except OSError:
        return 0


def _foreign(context: KernelContext, held: CurrentChoice, choice: Choice, *, packages: bool) -> TextWithOptions:
    instead: list[str | OptionName] = ["`", OptionName("gpus", "N"), "`, `", OptionName("type", "TYPE"), "`"]
    if packages:
        instead += [", `", OptionName("env-version", "none"), "`"]
    return text_of(
        f"this notebook asks for {describe_choice(choice, pool_name(context))}, and {_who(held)}, so nothing was "
        "started. If it is what you want, confirm it in the panel or with `%sgpu_env --accept`. Otherwise say "
        "what you want instead: ",
        *instead,
        ".",
    )


def _who(held: CurrentChoice) -> str:
    return (
        f"you chose that in {held.other_notebook}, not here"
        if held.other_notebook
        else "you have not chosen that on this machine"
    )


def describe_held(held: CurrentChoice, pool: str) -> str:
    """Return the line of `%sgpu_env` about the choice; "" if there is none."""
    if held.choice is None:
        return held.problem
    whose = "" if held.confirmed else f"; {_who(held)}: %sgpu_env --accept confirms it"
    problem = f" {held.problem}" if held.problem else ""
    return f"this notebook asks for {describe_choice(held.choice, pool)}{whose}.{problem}"

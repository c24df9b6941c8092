"""Converts a pool's status and the ledger's rows to what a panel shows. Pure functions."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from sgpu_magic.client.pool_choosing import PriceBook, money_of
from sgpu_magic.client.pools_file import LOCAL, PoolEntry, default_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import SgpuError
from sgpu_magic.formatting import count_of, format_money
from sgpu_magic.panel.device_rows import (
    NO_HISTORIES,
    Durations,
    PanelHistories,
    Use,
    file_name,
    holders_of,
    panel_devices,
    queue_of,
    waits,
    with_use,
)
from sgpu_magic.panel.schema import (
    VERSION,
    PanelPool,
    PanelType,
    PoolChoice,
    PoolState,
    Remedy,
    RunParameter,
    RunRow,
)
from sgpu_magic.views.format_pool import (
    Holders,
    device_holders,
    failure_line,
    format_budget,
    format_cpu,
    format_idle,
    format_problem,
    is_free,
)
from sgpu_magic.views.run_notes import run_name
from sgpu_magic.wire.base import RunKind, RunState, short
from sgpu_magic.wire.costs import Prices
from sgpu_magic.wire.devices import CPU, Device, memory_bytes, vendor_bytes
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary

if TYPE_CHECKING:
    from sgpu_magic.client.pools import PoolStatusReply

NO_GPU = "No GPU on this machine: ranks run on CPU."
NO_GPU_THERE = "No GPU in this pool: ranks run on CPU."

# runs in all other states are active
_TONES: Mapping[RunState, str] = {
    RunState.QUEUED: "waiting",
    RunState.SUCCEEDED: "good",
    RunState.FAILED: "bad",
    RunState.TIMED_OUT: "bad",
    RunState.CANCELLED: "plain",
}
_NO_USE: Use = {}
_IN_OTHER_WORDS = ("name", "kind", "state", "notebook")
_AS_IN_SUMMARY = frozenset(RunRow.__struct_fields__).intersection(RunSummary.__struct_fields__) - {*_IN_OTHER_WORDS}


class RunDirectoryInfo(msgspec.Struct, frozen=True):
    """What is known from a run's directory on this machine.

    Args:
        here: The directory exists.
        tracked_url: The URL of its MLflow page, "" for none.
        parameters: Its scalar arguments and variables; None while they can't be read.
    """

    here: bool = False
    tracked_url: str = ""
    parameters: tuple[RunParameter, ...] | None = None


def pool_snapshot(
    status: PoolStatus,
    rates: PriceBook,
    now: float,
    *,
    durations: Durations,
    use: Use = _NO_USE,
    histories: PanelHistories = NO_HISTORIES,
    usage: str = "",
    notice: str = "",
) -> PanelPool:
    """Return the state of a pool that has answered.

    Args:
        status: Its answer.
        rates: Prices of its devices.
        now: Wall-clock time, seconds since the epoch.
        durations: Durations of earlier runs.
        use: The use of devices that do not report it themselves.
        histories: The devices' last ten minutes.
        usage: This month's usage, a line.
        notice: A notice from the pool.
    """
    holders = device_holders(status)
    inventory = status.inventory
    types = _types(status, rates, now, holders, durations, histories)
    order = {each.type: at for at, each in enumerate(types)}
    return PanelPool(
        version=VERSION,
        pool=status.pool,
        state="up",
        now=now,
        about=f"{status.pool} · {_location_of(status.pool, inventory.host)} · {format_cpu(inventory)}",
        types=types,
        devices=panel_devices(with_use(inventory, use), order, holders, histories),
        cpu_slots=inventory.cpu_slots,
        cpu_slots_free=status.cpu_slots_free,
        usage=usage,
        notes=tuple(_notes(status, now, notice)),
    )


def away_snapshot(
    pool: str, state: PoolState, sentence: str, remedy: Remedy, remedy_words: str, now: float, usage: str = ""
) -> PanelPool:
    """Return the state of a pool that can't be reached; arguments as in `PanelPool`."""
    return PanelPool(
        version=VERSION,
        pool=pool,
        state=state,
        sentence=sentence,
        remedy=remedy,
        remedy_words=remedy_words,
        now=now,
        about=" · ".join(part for part in (pool, _location_of(pool, "")) if part),
        usage=usage,
    )


def rates_of(settings: Settings, entry: PoolEntry | None = None) -> PriceBook:
    """Return the prices of a pool's devices; those of its entry take precedence over the settings.

    Args:
        settings: The user's settings.
        entry: Its entry in `pools.toml`; None for this machine's pool.
    """
    rates = money_of(settings)
    if entry is None:
        return rates
    own = {(entry.name, kind): price for kind, price in entry.prices.items()}
    if entry.reserved:
        # general hourly prices do not apply to a pool that is already paid for
        return replace(rates, prices=Prices(), reserved=Prices({**rates.reserved.hourly, **own}))
    return replace(rates, prices=Prices({**rates.prices.hourly, **own}), reserved=Prices())


def pool_choices(
    settings: Settings, entries: Sequence[PoolEntry] = (), answers: Iterable[PoolStatusReply] = ()
) -> tuple[PoolChoice, ...]:
    """Return the pools that can be chosen: reserved ones first, then the default, then by name.

    Args:
        settings: The user's settings, with the default pool and prices.
        entries: The entries of `pools.toml`.
        answers: The latest answers of these pools.
    """
    found = {answer.name: answer for answer in answers}
    lost = {answer.name for answer in found.values() if answer.problem}
    # as a run without `--pool`, which passes over pools that do not answer
    default = default_pool(settings.pool, [entry for entry in entries if entry.name not in lost])
    about = _location_of(LOCAL, "")
    pools = [PoolChoice(name=LOCAL, about=about, reserved=False, default=default == LOCAL, reachable=True)]
    for entry in entries:
        choice = PoolChoice(
            name=entry.name,
            about=_describe_pool(entry, found.get(entry.name), rates_of(settings, entry)),
            reserved=entry.reserved,
            default=default == entry.name,
            reachable=entry.name not in lost,
        )
        pools.append(choice)
    return tuple(sorted(pools, key=lambda pool: (not pool.reserved, not pool.default, pool.name)))


def _describe_pool(entry: PoolEntry, answer: PoolStatusReply | None, rates: PriceBook) -> str:
    """Return `reserved · 4 of 8 H100 free · from $3.90`."""
    if answer is not None and answer.problem:
        return f"{entry.kind} · can't be reached"
    if answer is None or answer.status is None:
        types = ", ".join(kind.upper() for kind in entry.types)
        return " · ".join(filter(None, (entry.kind, types)))
    status = answer.status
    holders = device_holders(status)
    totals = Counter(device.type for device in status.inventory.devices)
    free = Counter(device.type for device in status.inventory.devices if is_free(device, holders))
    named = [f"{free[kind]} of {total} {kind.upper()} free" for kind, total in totals.items()]
    slots = f"{status.cpu_slots_free} of {count_of(status.inventory.cpu_slots, 'CPU rank')} free"
    parts = [entry.kind, ", ".join(named) or slots]
    prices = [price for kind in totals or (CPU,) if (price := _price(entry.name, kind, rates)[0]) is not None]
    if prices:
        several = "from " if len(set(prices)) > 1 else ""
        parts.append(f"{several}{format_money(min(prices), rates.currency)}")
    return " · ".join(parts)


def run_row(run: RunSummary, location: RunDirectoryInfo) -> RunRow:
    """Return one row of the list; it depends only on the run and its directory."""
    tone = _TONES.get(run.state, "going")
    return RunRow(
        **{name: getattr(run, name) for name in _AS_IN_SUMMARY},
        short_id=short(run.run_id),
        name=run_name(run),
        kind=run.kind.value,
        state=run.state.value,
        tone="plain" if run.kind is RunKind.SESSION and tone == "good" else tone,
        final=run.state.is_final,
        reason=_reason(run),
        notebook=file_name(run.notebook),
        tracked_url=location.tracked_url,
        here=location.here,
        parameters=location.parameters or (),
    )


def _reason(run: RunSummary) -> str:
    if run.state is RunState.QUEUED:
        position = f"position {run.position}" if run.position else ""
        return ", ".join(filter(None, (run.waiting_for, position)))
    return failure_line(run) if run.state.is_final else ""


def _location_of(pool: str, host: str) -> str:
    return "this machine" if pool == LOCAL else host


def _types(
    status: PoolStatus,
    rates: PriceBook,
    now: float,
    holders: Holders,
    durations: Durations,
    histories: PanelHistories,
) -> tuple[PanelType, ...]:
    """Return the pool's types: most expensive first, those without a price by memory, CPU last."""
    by_type: dict[str, list[Device]] = {}
    for device in status.inventory.devices:
        by_type.setdefault(device.type, []).append(device)
    # the type that the pool chooses for runs that name none
    main = max(by_type, key=lambda kind: len(by_type[kind]), default=CPU)

    def type_of(kind: str, total: int, free: int, devices: Sequence[Device]) -> PanelType:
        price, reserved = _price(status.pool, kind, rates)
        uuids = frozenset(device.uuid for device in devices)
        held = holders_of(kind, status.runs, durations, now, uuids)
        return PanelType(
            type=kind,
            label=kind.upper(),
            total=total,
            free=free,
            memory_bytes=vendor_bytes(max(map(memory_bytes, devices), default=0)),
            price=price,
            currency=rates.currency,
            simulated=any(device.simulated for device in devices),
            reserved=reserved,
            waits_s=waits(total, free, held, queue_of(kind, status.runs, durations, main)),
            history=histories.types.get(kind),
        )

    types = [
        type_of(kind, len(devices), sum(is_free(device, holders) for device in devices), devices)
        for kind, devices in by_type.items()
    ]
    types.sort(key=lambda one: (one.price is None, -(one.price or 0.0), -one.memory_bytes, one.type))
    slots = status.inventory.cpu_slots
    cpu = [type_of(CPU, slots, max(0, min(slots, status.cpu_slots_free)), ())] if slots > 0 else []
    return (*types, *cpu)


def _price(pool: str, device_type: str, rates: PriceBook) -> tuple[float | None, bool]:
    """Return the hourly price of one device, and whether it is that of reserved devices."""
    price = rates.prices.price_of(pool, device_type)
    if price is not None:
        return price, False
    reserved = rates.reserved.price_of(pool, device_type)
    return reserved, reserved is not None


def _notes(status: PoolStatus, now: float, notice: str) -> Sequence[str]:
    no_gpu = NO_GPU if status.pool == LOCAL else NO_GPU_THERE
    words = [] if any(not device.simulated for device in status.inventory.devices) else [no_gpu]
    words += format_problem(status) + format_budget(status, nearly_used=True)
    words += [notice] if notice else format_idle(status, now)
    return [as_sentence(text) for text in words]


def as_sentence(text: str) -> str:
    """Return a message as a sentence, with a capital letter and a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".") if text else ""


def format_failure(error: Exception) -> str:
    """Return why a page's request failed. Prints the traceback of an error that is not expected."""
    if isinstance(error, SgpuError):
        return as_sentence(error.message)
    if isinstance(error, msgspec.DecodeError):
        return f"This request is not valid: {error}."
    traceback.print_exc(file=sys.__stderr__)
    return f"The request failed: {type(error).__name__}: {error}"

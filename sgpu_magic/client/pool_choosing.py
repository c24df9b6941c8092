"""Chooses the pool for a run that names none, and the device type where only memory was requested. Pure.

Reserved pools come first, because they are paid for in any case: even a busy one before a free on-demand pool. Among
on-demand pools, those with free devices come first, then the cheapest. The local pool is the last resort.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.client.pools_file import LOCAL, PoolEntry
from sgpu_magic.config import Settings
from sgpu_magic.config.pool_terms import read_prices
from sgpu_magic.errors import CapacityError
from sgpu_magic.formatting import count_of, format_bytes, format_money, plural
from sgpu_magic.wire.costs import Prices
from sgpu_magic.wire.devices import ANY, CPU, memory_bytes, memory_of, memory_text, type_label
from sgpu_magic.wire.option_text import OptionName, text_of
from sgpu_magic.wire.pool_status import PoolStatus

if TYPE_CHECKING:
    from sgpu_magic.client.pools import PoolStatusReply

RESERVED, ON_DEMAND = "reserved", "on-demand"
"""Values of `--pool` that mean any pool of that kind."""

KINDS = (RESERVED, ON_DEMAND)


class PriceBook(msgspec.Struct, frozen=True):
    """Prices of devices according to the settings.

    Args:
        prices: Prices of on-demand devices.
        reserved: Prices of reserved devices.
        currency: Currency of both.
    """

    prices: Prices
    reserved: Prices
    currency: str

    def price_of(self, entry: PoolEntry | None, device_type: str) -> float | None:
        """Return the price of one device per hour in a pool, None if unknown; prices of the pool's entry come first."""
        name = LOCAL if entry is None else entry.name
        if entry is not None and device_type in entry.prices:
            return entry.prices[device_type]
        first, second = (self.prices, self.reserved)
        if entry is not None and entry.reserved:
            first, second = second, first
        price = first.price_of(name, device_type)
        return second.price_of(name, device_type) if price is None else price


def money_of(settings: Settings) -> PriceBook:
    """Return the price book of the settings."""
    return PriceBook(read_prices(settings.prices), read_prices(settings.reserved_prices), settings.currency)


class DeviceRequest(msgspec.Struct, frozen=True):
    """The devices that a run requests.

    Args:
        ranks: Number of ranks; None if not given.
        device_type: Canonical device type; None if not given.
        min_memory_bytes: Least memory of each device in bytes; 0 for any.
        kind: `reserved` or `on-demand`, for pools of that kind only; "" for any.
    """

    ranks: int | None = None
    device_type: str | None = None
    min_memory_bytes: int = 0
    kind: str = ""


class TypeCount(msgspec.Struct, frozen=True):
    """The devices of one type in a pool.

    Args:
        total: Number of devices, including those that an autoscaler may add.
        free: Number of devices that are free now.
        memory_bytes: Memory of the smallest of these devices in bytes; 0 if unknown.
    """

    total: int
    free: int
    memory_bytes: int


class PoolSelection(msgspec.Struct, frozen=True):
    """The pool chosen for a run.

    Args:
        name: The pool's name.
        device_type: The device type to request there; None to request none.
        why: The reason; "" if it is the only pool.
        type_note: As `one_of_several`, for a run that names no type.
    """

    name: str
    device_type: str | None
    why: str
    type_note: str | None = None

    @property
    def note(self) -> str:
        """The choice and its reason, for the run's view."""
        if self.name == LOCAL:
            return f"on this machine; {self.why}" if self.why else "on this machine"
        return f"pool {self.name}: {self.why}"


def counts(status: PoolStatus, min_memory_bytes: int = 0) -> dict[str, TypeCount]:
    """Count a pool's devices by type, including `cpu`.

    Args:
        status: The pool's status, requested with `recent` of 1 or more; otherwise all devices count as free.
        min_memory_bytes: Count only devices with at least this memory; CPU slots have none.
    """
    held = {uuid for run in status.runs if not run.state.is_final for uuid in run.uuids}
    found: dict[str, TypeCount] = {}
    for device in status.inventory.devices:
        if (memory := memory_bytes(device)) < min_memory_bytes:
            continue
        known = found.get(device.type, TypeCount(0, 0, memory))
        free = device.uuid not in held and not device.outside_use and not device.unavailable
        found[device.type] = TypeCount(known.total + 1, known.free + free, min(memory, known.memory_bytes))
    for kind, most in status.inventory.elastic:
        memory = memory_of(kind)
        if kind != CPU and memory >= min_memory_bytes:
            known = found.get(kind, TypeCount(0, 0, memory))
            found[kind] = TypeCount(max(most, known.total), known.free, known.memory_bytes)
    if not min_memory_bytes and status.inventory.cpu_slots:
        found[CPU] = TypeCount(status.inventory.cpu_slots, max(0, status.cpu_slots_free), 0)
    return found


def _remaining(status: PoolStatus, min_memory_bytes: int = 0) -> dict[str, TypeCount]:
    """Count as `counts`, without CPU; of the free devices only those that no run in the queue waits for."""
    left = {kind: count for kind, count in counts(status, min_memory_bytes).items() if kind != CPU}
    for run in status.runs:
        if not run.state.is_final and not run.uuids and not run.session and run.device_type in left:
            count = left[run.device_type]
            left[run.device_type] = TypeCount(count.total, max(0, count.free - run.ranks), count.memory_bytes)
    return left


def cheapest_type(asked: PoolStatusReply, wanted: DeviceRequest, money: PriceBook) -> str:
    """Return the device type for a run that names none, or only a least memory: the cheapest, free ones first.

    Raises:
        CapacityError: The pool does not have enough devices of any such type.
    """
    if asked.status is None:
        raise CapacityError(
            text_of(
                f"the pool {asked.name} does not report which devices it has. Name one with ", OptionName("type"), "."
            )
        )
    fitting = _remaining(asked.status, wanted.min_memory_bytes)
    ranks = wanted.ranks or 1
    if not (enough := [kind for kind, count in fitting.items() if count.total >= ranks]):
        raise CapacityError(
            text_of(
                f"the pool {asked.name} has no {count_of(ranks, 'device')} of one type with "
                f"{format_bytes(wanted.min_memory_bytes)} of memory each. It has: {describe_devices(asked.status)}. "
                "Ask for less with ",
                OptionName("min-memory"),
                ", or for fewer with ",
                OptionName("gpus"),
                ".",
            )
        )

    def rank_of(kind: str) -> tuple[bool, bool, float, int, str]:
        price, count = money.price_of(asked.entry, kind), fitting[kind]
        return count.free < ranks, price is None, price or 0.0, count.memory_bytes, kind

    return min(enough, key=rank_of)


def one_of_several(asked: PoolStatusReply, wanted: DeviceRequest, money: PriceBook) -> tuple[str | None, str | None]:
    """Return the device type for a run that names none, as `cheapest_type`, and the note that reports it.

    Returns None twice if the pool has only one type, or too few devices of each type: the pool then decides.
    """
    there = {} if asked.status is None else _remaining(asked.status)
    ranks = wanted.ranks or 1
    if len(there) < 2 or all(count.total < ranks for count in there.values()):
        return None, None
    chosen = cheapest_type(asked, DeviceRequest(ranks), money)
    how = "smallest" if money.price_of(asked.entry, chosen) is None else "cheapest"
    free = "free " if there[chosen].free >= ranks else ""
    return chosen, f"{type_label(chosen)}: {how} {free}type (--type to choose)"


def check_memory(asked: PoolStatusReply, wanted: DeviceRequest) -> None:
    """Check that enough devices of the requested type have the requested memory.

    Raises:
        CapacityError: They do not.
    """
    kind = wanted.device_type
    if asked.status is None or kind is None or not wanted.min_memory_bytes:
        return
    needs = format_bytes(wanted.min_memory_bytes)
    if kind == CPU:
        raise CapacityError(
            text_of(OptionName("min-memory", needs), " is GPU memory, and ranks on CPU have none. Leave it out.")
        )
    with_memory = counts(asked.status, wanted.min_memory_bytes)
    fitting, every = with_memory.get(kind), counts(asked.status).get(kind)
    ranks = wanted.ranks or 1
    if every is not None and (fitting is None or fitting.total < ranks):
        there = 0 if fitting is None else fitting.total
        others = any(count.total >= ranks for other, count in with_memory.items() if other != CPU)
        leave = ("Leave ", OptionName("type"), " out to take any type with that much, or ask") if others else ("Ask",)
        raise CapacityError(
            text_of(
                f"the pool {asked.name} has {every.total} {type_label(kind)} with {memory_text(every.memory_bytes)} of "
                f"memory or more, and {there} of them {'has' if there == 1 else 'have'} {needs}; {ranks} are asked for."
                f" It has: {describe_devices(asked.status)}. ",
                *leave,
                " for less with ",
                OptionName("min-memory"),
                ".",
            )
        )


def choose(answers: Sequence[PoolStatusReply], wanted: DeviceRequest, money: PriceBook) -> PoolSelection:
    """Choose the pool for a run that names none.

    Args:
        answers: Answers of the pools in `pools.toml`, in order, without the local pool.
        wanted: The devices that the run requests.
        money: Prices of devices.

    Raises:
        CapacityError: A kind of pool was requested, and no pool of that kind can be used.
    """
    ways: list[tuple[tuple[bool, bool, bool, float], PoolStatusReply, str | None]] = []
    without: list[str] = []
    unreached = [each.name for each in answers if each.problem]
    for each in answers:
        entry = each.entry
        if entry is None or each.status is None or wanted.kind not in ("", RESERVED if entry.reserved else ON_DEMAND):
            continue
        there = counts(each.status, wanted.min_memory_bytes)
        kind = _fitting(each, there, wanted, money)
        if kind is None or (entry.types and wanted.device_type not in (None, ANY, *entry.types)):
            without.append(each.name)
            continue
        busy = there[kind].free < (wanted.ranks or 1)
        price = money.price_of(entry, kind)
        # a reserved pool is paid for, whether its devices are free or not
        order = (not entry.reserved, busy, price is None, price or 0.0)
        ways.append((order, each, kind))
    asks = _what(wanted)
    if not ways:
        return _for_local(answers, wanted, asks, without, unreached)
    order, chosen, kind = min(ways, key=lambda way: way[0])
    why = _why(chosen, kind, order, wanted, money)
    passed = [each.name for each in answers if each.entry is not None and each.entry.reserved and each.name in without]
    if order[0] and passed:
        why += f"; {', '.join(passed)} {'has' if len(passed) == 1 else 'have'} no {asks}"
    if unreached:
        why += f"; {', '.join(unreached)} can't be reached"
    if wanted.min_memory_bytes:
        return PoolSelection(chosen.name, kind if wanted.device_type is None else None, why)
    several, note = one_of_several(chosen, wanted, money) if wanted.device_type in (None, ANY) else (None, None)
    return PoolSelection(chosen.name, several, why, note)


def describe_devices(status: PoolStatus) -> str:
    """Return `4 A10 (24 GB), 16 CPU ranks`."""
    parts = [
        f"{count.total} {type_label(kind)}" + (f" ({memory_text(count.memory_bytes)})" if count.memory_bytes else "")
        for kind, count in counts(status).items()
        if kind != CPU
    ]
    return ", ".join([*parts, f"{status.inventory.cpu_slots} CPU ranks"])


def _fitting(
    asked: PoolStatusReply, there: Mapping[str, TypeCount], wanted: DeviceRequest, money: PriceBook
) -> str | None:
    """Return the device type that the run would get in a pool with these devices, None if it can't run there."""
    enough = [name for name, count in there.items() if count.total >= (wanted.ranks or 1)]
    if wanted.device_type not in (None, ANY):
        return wanted.device_type if wanted.device_type in enough else None
    if any(name != CPU for name in enough):
        return cheapest_type(asked, wanted, money)
    # ranks run on CPU only in a pool without any GPUs
    return CPU if CPU in enough and not any(name != CPU for name in there) else None


def _for_local(
    answers: Sequence[PoolStatusReply],
    wanted: DeviceRequest,
    asks: str,
    without: Sequence[str],
    unreached: Sequence[str],
) -> PoolSelection:
    reasons = [f"no pool of {', '.join(without)} has {asks}"] if len(without) > 1 else []
    reasons += [f"{without[0]} has no {asks}"] if len(without) == 1 else []
    reasons += [f"{', '.join(unreached)} can't be reached"] if unreached else []
    if wanted.kind:
        why = "; ".join(reasons) or "none is listed"
        problems = " ".join(each.problem for each in answers if each.problem)
        raise CapacityError(
            f"no {wanted.kind} pool can take the run: {why}. `sgpu pool list` shows the pools. {problems}".strip()
        )
    return PoolSelection(LOCAL, None, "; ".join(reasons))


def _why(
    asked: PoolStatusReply,
    kind: str | None,
    order: tuple[bool, bool, bool, float],
    wanted: DeviceRequest,
    money: PriceBook,
) -> str:
    on_demand, busy, _, _ = order
    price = money.price_of(asked.entry, kind or "")
    text = "on demand" if on_demand else "reserved"
    if price is not None and on_demand:
        text += f" at {format_money(price, money.currency)} an hour for each"
    name = type_label(kind or "") or "device"
    if busy:
        return f"{text}, and its {name} are in use: the run waits there (--pool names another)"
    return f"{text}, and has {f'{wanted.ranks} ' if wanted.ranks else ''}{name} free"


def _what(wanted: DeviceRequest) -> str:
    kind = wanted.device_type
    many = f"{wanted.ranks} " if wanted.ranks else ""
    memory = f" with {format_bytes(wanted.min_memory_bytes)}" if wanted.min_memory_bytes else ""
    if kind == CPU:
        noun = f"CPU {plural(wanted.ranks or 0, 'rank')}"
    else:
        noun = type_label(kind or ANY) or plural(wanted.ranks or 0, "device")
    return f"{many}{noun}{memory}"

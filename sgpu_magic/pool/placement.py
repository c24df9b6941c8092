"""What a run's request means in this pool, and whether there is room for it now. Pure: no clock, no I/O.

`resolve` turns a request into a `Want` in one line of the queue or says why it can't ever be placed.
`Room` is what is free at one moment; it grants leases and names what is in the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sgpu_magic.protocol.device_types import ANY, CPU
from sgpu_magic.protocol.devices import Device, Inventory, Lease, Placement
from sgpu_magic.protocol.ids import short


@dataclass(frozen=True, slots=True)
class Line:
    """What one first-come-first-served line of the queue is for.

    Args:
        device_type: Canonical type, `cpu` for slots.
        simulated: Simulated devices; a lease never mixes them with real ones of the same type.
    """

    device_type: str
    simulated: bool = False

    def __str__(self) -> str:
        return self.device_type.upper() + (" (simulated)" if self.simulated else "")


CPU_LINE = Line(CPU)


@dataclass(frozen=True, slots=True)
class Want:
    """A request as this pool understands it.

    Args:
        line: Where it waits and what it takes.
        ranks: Number of ranks.
        device_type: The type that its lease names: the asked one where CPU stands in for it.
        simulated: CPU stands in for the type.
        allow_busy: Also take devices that others use.
        note: What the lease shall tell the user, "" when nothing.
    """

    line: Line
    ranks: int
    device_type: str
    simulated: bool = False
    allow_busy: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can't be placed, now or ever. `error` names the class in `errors`."""

    error: str
    message: str


def resolve(placement: Placement, inventory: Inventory) -> Want | Refusal:
    """Return what the request takes here, whether or not it is free now."""
    ranks, asked = placement.ranks, placement.device_type
    if ranks < 1:
        return Refusal("UsageError", f"{ranks} ranks were asked for; a run has at least 1. Mend --gpus.")
    counts = _counts(inventory)
    if asked == ANY:
        return _resolve_any(placement, inventory, counts)
    if asked == CPU:
        return _on_cpu(placement, CPU) if inventory.cpu_slots > 0 else _lacking(placement, inventory)
    lines = sorted((line for line in counts if line.device_type == asked), key=lambda line: line.simulated)
    for line in lines:
        if counts[line] >= ranks:
            return _on_devices(placement, line)
    if lines:
        most = max(counts[line] for line in lines)
        has = " and ".join(f"{counts[line]} {line}" for line in lines)
        return Refusal(
            "UsageError",
            f"this pool has {has}, and the run asks for {ranks}. Use --gpus {most} or fewer, another --type, "
            f"or another pool with --pool. It has: {describe(inventory)}.",
        )
    if placement.stand_in and inventory.cpu_slots > 0:
        return _on_cpu(placement, asked, simulated=True)
    return _lacking(placement, inventory)


def describe(inventory: Inventory) -> str:
    """What a pool has, for a person: `4 a10, 8 h100 (simulated), cpu (16 slots)`."""
    parts = [
        f"{count} {line.device_type}{' (simulated)' if line.simulated else ''}"
        for line, count in _counts(inventory).items()
    ]
    if inventory.cpu_slots > 0:
        parts.append(f"cpu ({inventory.cpu_slots} slots)")
    return ", ".join(parts) or "nothing"


def _counts(inventory: Inventory) -> Counter[Line]:
    return Counter(line_of(device) for device in inventory.devices)


def line_of(device: Device) -> Line:
    return Line(device.type, device.simulated)


def _resolve_any(placement: Placement, inventory: Inventory, counts: Counter[Line]) -> Want | Refusal:
    enough = [line for line, count in counts.items() if count >= placement.ranks]
    if enough:
        return _on_devices(placement, max(enough, key=lambda line: (counts[line], not line.simulated)))
    if counts:
        has = " and ".join(f"{count} {line}" for line, count in counts.items())
        most = max(counts.values())
        return Refusal(
            "UsageError",
            f"this pool has {has}, and the run asks for {placement.ranks}. Use --gpus {most} or fewer, run on CPU "
            "with --type cpu, or choose another pool with --pool.",
        )
    if inventory.cpu_slots <= 0:
        return Refusal(
            "UsageError",
            f"this pool can't place {placement.ranks} ranks. It has: {describe(inventory)}. "
            "Ask for fewer with --gpus or choose another pool with --pool.",
        )
    return _on_cpu(placement, CPU)


def _on_devices(placement: Placement, line: Line) -> Want:
    return Want(line, placement.ranks, line.device_type, line.simulated, placement.allow_busy)


def _on_cpu(placement: Placement, device_type: str, *, simulated: bool = False, note: str = "") -> Want:
    return Want(CPU_LINE, placement.ranks, device_type, simulated, note=note)


def _lacking(placement: Placement, inventory: Inventory) -> Refusal:
    asked = placement.device_type
    problem = f" Its GPUs could not be read: {inventory.problem.rstrip('.')}." if inventory.problem else ""
    ways = ["Leave --type out to use what is there", "choose another pool with --pool"]
    if asked != CPU:
        if inventory.cpu_slots > 0:
            ways.append("run the ranks on CPU instead with SGPU_STAND_IN=cpu")
        simulate = f'SGPU_SIMULATE="{asked}:{max(8, placement.ranks)}"'
        ways.append(f"or declare simulated devices with {simulate} to try things out")
    else:
        ways[-1] = f"or {ways[-1]}"
    return Refusal(
        "UsageError",
        f"this pool has no {asked}. It has: {describe(inventory)}.{problem} {', '.join(ways)}.",
    )


class Room:
    """What is free at one moment, derived from the leases alone so that it can't drift away from them.

    Args:
        inventory: What the node has.
        leases: The leases held, by run id.
        refused: Devices (or `cpu`) whose locks the engine could not take, with the reason.
    """

    def __init__(self, inventory: Inventory, leases: Mapping[str, Lease], refused: Mapping[str, str]) -> None:
        self._inventory = inventory
        self._refused = refused
        self._holders: dict[str, str] = {}
        self._slots: dict[str, int] = {}
        for run_id, lease in leases.items():
            self.take(run_id, lease)

    @property
    def cpu_slots_free(self) -> int:
        return max(0, self._inventory.cpu_slots - sum(self._slots.values()))

    def holder(self, uuid: str) -> str | None:
        return self._holders.get(uuid)

    def take(self, run_id: str, lease: Lease) -> None:
        """Count `lease` as held.

        Raises:
            ValueError: One of its devices is held already.
        """
        taken = [uuid for uuid in lease.uuids if uuid in self._holders]
        if taken or len(set(lease.uuids)) != len(lease.uuids):
            raise ValueError(f"lease {lease.lease_id} of run {run_id} takes devices twice: {lease.uuids}")
        self._holders.update(dict.fromkeys(lease.uuids, run_id))
        if lease.cpu_slots:
            self._slots[run_id] = lease.cpu_slots

    def grant(self, want: Want, lease_id: str) -> Lease | None:
        """Return a lease for `want` that is not yet taken, None when it does not fit now."""
        if self.missing(want) > 0:
            return None
        if want.line == CPU_LINE:
            inventory, notes = self._inventory, [want.note]
            if want.ranks > inventory.cpu_slots:
                cores = f"{inventory.cores} core{'s' if inventory.cores != 1 else ''}"
                notes.append(f"{want.ranks} ranks share {cores} ({inventory.cpu_slots} slots)")
            return Lease(
                lease_id=lease_id,
                device_type=want.device_type,
                ranks=want.ranks,
                cpu_slots=self._need(want),
                simulated=want.simulated,
                note="; ".join(filter(None, notes)),
            )
        # untouched devices before those that others use; then in bus order: neighbours are near each other
        free = sorted(self._free(want), key=lambda device: (device.outside_use != "", device.index, device.uuid))
        chosen = sorted(free[: want.ranks], key=lambda device: (device.index, device.uuid))
        return Lease(
            lease_id=lease_id,
            device_type=want.device_type,
            ranks=want.ranks,
            uuids=tuple(device.uuid for device in chosen),
            simulated=want.simulated,
            note=want.note,
        )

    def free(self, want: Want) -> int:
        """How many devices or slots this request could take now."""
        if want.line == CPU_LINE:
            return 0 if CPU in self._refused else self.cpu_slots_free
        return len(self._free(want))

    def missing(self, want: Want) -> int:
        """How many more must become free; 0 when it fits."""
        return max(0, self._need(want) - self.free(want))

    def fits_when_empty(self, want: Want) -> bool:
        """Whether it would fit if all runs were over: only then is keeping devices for it any use."""
        if want.line == CPU_LINE:
            return CPU not in self._refused and self._inventory.cpu_slots > 0
        return len(self._usable(want)) >= want.ranks

    def amount(self, want: Want, count: int | None = None) -> str:
        """`4 A10` or `1 CPU slot`; the run's whole need when `count` is left out."""
        count = self._need(want) if count is None else count
        if want.line == CPU_LINE:
            return f"{count} CPU slot{'s' if count != 1 else ''}"
        return f"{count} {want.line}"

    def obstacles(self, want: Want) -> str:
        """What is in the way, for a person: `2 are held by run 7f3a, 1 is in use outside the pool (...)`."""
        if want.line == CPU_LINE:
            held = Counter(self._slots)
        else:
            line = [device.uuid for device in self._line(want)]
            held = Counter(self._holders[uuid] for uuid in line if uuid in self._holders)
        parts = [f"{_are(count)} held by run {short(run)}" for run, count in held.items()]
        if len(parts) > 4:
            parts[3:] = [f"{len(parts) - 3} more runs hold others"]
        return ", ".join(parts + self.not_the_pools(want))

    def not_the_pools(self, want: Want) -> list[str]:
        """What is in the way and no run of this pool can free."""
        if want.line == CPU_LINE:
            return [f"the engine refuses more: {self._refused[CPU]}"] if CPU in self._refused else []
        parts: list[str] = []
        idle = [device for device in self._line(want) if device.uuid not in self._holders]
        if locked := [device for device in idle if device.uuid in self._refused]:
            why = self._refused[locked[0].uuid]
            parts.append(f"{_are(len(locked))} in use outside the pool{f' ({why})' if why else ''}")
        busy = [device for device in idle if device.outside_use and device.uuid not in self._refused]
        if busy and not want.allow_busy:
            takes = f"--allow-busy takes {'it' if len(busy) == 1 else 'them'}"
            parts.append(f"{_are(len(busy))} in use outside the pool ({busy[0].outside_use}; {takes})")
        if (count := len(self._line(want))) < want.ranks:
            parts.append(f"the pool has only {self.amount(want, count)} now")
        return parts

    def _need(self, want: Want) -> int:
        if want.line == CPU_LINE:
            return max(1, min(want.ranks, self._inventory.cpu_slots))
        return want.ranks

    def _line(self, want: Want) -> list[Device]:
        return [device for device in self._inventory.devices if line_of(device) == want.line]

    def _usable(self, want: Want) -> list[Device]:
        return [
            device
            for device in self._line(want)
            if device.uuid not in self._refused
            # what the pool's own runs hold is theirs, whatever the driver says about its use
            and (want.allow_busy or not device.outside_use or device.uuid in self._holders)
        ]

    def _free(self, want: Want) -> list[Device]:
        return [device for device in self._usable(want) if device.uuid not in self._holders]


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"

"""Whether there is room for a request now, which devices it gets, and what is in the way. Pure: no clock, no I/O.

`Room` follows the leases as they are taken and released, and counts nothing anew: a pool may have ten thousand devices.
What requests mean here is in `placement_request`, how ranks are laid over nodes in `node_layout`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from sgpu_magic.pool.scheduling.capacity import (
    ASKED,
    CPU_LINE,
    Line,
    Stock,
    elastic_key,
    is_asked,
    line_of,
    memory_bytes,
)
from sgpu_magic.pool.scheduling.node_layout import Parts, Shelves, laid_out
from sgpu_magic.pool.scheduling.placement_request import Want, amount
from sgpu_magic.wire.devices import CPU, Device, Inventory, Lease, NodeShare
from sgpu_magic.wire.ids import short


class Room:
    """What is free at one moment.

    Args:
        inventory: What the pool has.
        leases: The leases held, by run id.
        refused: Devices (or `cpu`, or `cpu@` and a node) whose locks the engine could not take, with the reason.

    Attributes:
        stock: What the pool has, counted.
        refused: As given, and what was barred since.
    """

    def __init__(self, inventory: Inventory, leases: Mapping[str, Lease], refused: Mapping[str, str]) -> None:
        self.stock = Stock(inventory)
        self.refused = dict(refused)
        self._holders: dict[str, tuple[str, ...]] = {}
        self._slots: dict[str, dict[str, int]] = {}
        # what an autoscaler is to bring first: by run, its line and number
        self._asked: dict[str, tuple[Line, int]] = {}
        self._numbers: dict[str, int] = {}
        self._held: Counter[Line] = Counter()
        self._shelves = Shelves(self.stock, self._holders, self.refused, self._slots)
        self._fit_when_empty: dict[Want, bool] = {}
        for run_id, lease in leases.items():
            self.take(run_id, lease)

    def empty(self) -> None:
        """Count nothing as held."""
        for counts in (self._holders, self._slots, self._asked, self._numbers, self._held):
            counts.clear()
        self._shelves.forget()
        self._fit_when_empty.clear()

    @property
    def cpu_slots_free(self) -> int:
        return max(0, self.stock.inventory.cpu_slots - sum(sum(parts.values()) for parts in self._slots.values()))

    def holder(self, uuid: str) -> str | None:
        return next(iter(self._holders.get(uuid, ())), None)

    # ------------------------------------------------------------ as leases come and go

    def take(self, run_id: str, lease: Lease, number: int = 0) -> None:
        """Count `lease` as held.

        Args:
            run_id: The run's.
            lease: Its lease.
            number: Of the run, in order of submission.

        Raises:
            ValueError: One of its devices is held already. Where an engine gives other devices than were proposed,
                two leases may name one until it has said so of both.
        """
        taken = [uuid for uuid in lease.uuids if uuid in self._holders]
        if (taken and not lease.shares) or len(set(lease.uuids)) != len(lease.uuids):
            raise ValueError(f"lease {lease.lease_id} of run {run_id} takes devices twice: {lease.uuids}")
        self._numbers[run_id] = number
        for uuid in lease.uuids:
            holders = self._holders.get(uuid, ())
            self._holders[uuid] = (*holders, run_id)
            if not holders:
                self._count(uuid, -1)
        if is_asked(lease, self.stock):
            self._asked[run_id] = (CPU_LINE if lease.cpu_slots else Line(lease.device_type), lease.ranks)
        elif lease.cpu_slots:
            self._slots[run_id] = {share.node: share.ranks for share in lease.shares} or {"": lease.cpu_slots}
            self._shelves.count_slots(self._slots[run_id], -1)

    def release(self, run_id: str, lease: Lease) -> None:
        """Count a lease that was taken as free again."""
        for uuid in lease.uuids:
            holders = tuple(holder for holder in self._holders.get(uuid, ()) if holder != run_id)
            if holders:
                self._holders[uuid] = holders
            elif self._holders.pop(uuid, ()):
                self._count(uuid, +1)
        if run_id in self._slots:
            self._shelves.count_slots(self._slots[run_id], +1)
            del self._slots[run_id]
        self._asked.pop(run_id, None)
        self._numbers.pop(run_id, None)

    def bar(self, key: str, why: str) -> None:
        """The engine can't have this device, or these slots: nobody gets them from now on."""
        device = self.stock.devices.get(key)
        if device is not None and key not in self.refused and key not in self._holders:
            self._shelves.count(device, -1)
        self.refused[key] = why
        self._fit_when_empty.clear()

    # ------------------------------------------------------------ who gets what

    def grant(self, want: Want, lease_id: str, *, without: Collection[str] = ()) -> Lease | None:
        """Return a lease for `want` that is not yet taken, None when it does not fit now.

        Args:
            want: The request.
            lease_id: The lease's id.
            without: Nodes that are kept for others.
        """
        parts = self._parts(want, without)
        if parts is None or not self._within_limit(want):
            return None
        if want.line == CPU_LINE:
            return self._grant_slots(want, lease_id, parts)
        chosen = [(node, self._choose(want, node, count)) for node, count in parts]
        uuids = tuple(uuid for _, each in chosen for uuid in each)
        shares = tuple(self._share(node, each, len(each)) for node, each in chosen) if self.stock.many else ()
        return Lease(
            lease_id=lease_id,
            device_type=want.device_type,
            ranks=want.ranks,
            uuids=uuids,
            simulated=want.simulated,
            note=want.note,
            shares=shares,
        )

    def ask(self, want: Want, lease_id: str) -> Lease | None:
        """Return a lease without devices, with which the engine asks for nodes; None where it can't bring them."""
        elastic = self.stock.elastic(want.line)
        if elastic <= self.stock.total(want.line, want.min_memory_bytes) or not self._within_limit(want):
            return None
        if elastic_key(want.line) in self.refused:
            return None
        return Lease(
            lease_id=lease_id,
            device_type=want.device_type,
            ranks=want.ranks,
            cpu_slots=want.ranks if want.line == CPU_LINE else 0,
            simulated=want.simulated,
            note="; ".join(filter(None, (want.note, ASKED))),
        )

    def fits(self, want: Want) -> bool:
        """Whether it could have a lease now if nobody came before it."""
        return self._within_limit(want) and self._parts(want) is not None

    def free(self, want: Want) -> int:
        """How many devices or slots this request could take now, were they where it needs them."""
        if want.line == CPU_LINE and CPU in self.refused:
            return 0
        return self._shelves.of(want).total

    def free_by_node(self, want: Want) -> Mapping[str, int]:
        return self._shelves.of(want).free

    def missing(self, want: Want) -> int:
        """How many more must become free; 0 when there are enough, wherever they are."""
        return max(0, self._need(want) - self.free(want))

    def fits_when_empty(self, want: Want) -> bool:
        """Whether it would fit if all runs were over: only then is keeping devices for it any use."""
        if want not in self._fit_when_empty:
            self._fit_when_empty[want] = self._would_fit(want)
        return self._fit_when_empty[want]

    def _would_fit(self, want: Want) -> bool:
        if want.line == CPU_LINE:
            if CPU in self.refused or self.stock.inventory.cpu_slots <= 0:
                return False
            return not self.stock.many or laid_out(want, self.stock.slots_by_node) is not None
        usable: dict[str, int] = {}
        for device in self._usable(want):
            usable[device.node] = usable.get(device.node, 0) + 1
        return laid_out(want, usable) is not None

    def kept_node(self, want: Want, without: Collection[str]) -> str | None:
        """The node that is to be kept for a request that needs one, because it is the nearest to being free enough."""
        if not (self.stock.many and want.on_one_node):
            return None
        large = {
            node for node, size in self.stock.sizes(want.line, want.min_memory_bytes).items() if size >= want.ranks
        }
        free = self.free_by_node(want)
        return max((node for node in free if node in large and node not in without), key=free.__getitem__, default=None)

    # ------------------------------------------------------------ in words

    def amount(self, want: Want, count: int | None = None) -> str:
        """`4 A10` or `1 CPU slot`; the run's whole need when `count` is left out."""
        return amount(self._need(want) if count is None else count, want.line)

    def obstacles(self, want: Want) -> str:
        """What is in the way, for a person: `2 are held by run 7f3a, 1 is in use outside the pool (...)`."""
        return ", ".join([*self.held_by(want), *self.not_the_pools(want)])

    def held_by(self, want: Want, node: str | None = None, *, most: int = 4) -> list[str]:
        """Which runs hold how many, on one node or anywhere: `2 are held by run 7f3a`."""
        held: Counter[str] = Counter()
        if want.line == CPU_LINE:
            for run_id in sorted(self._slots, key=self._numbers.__getitem__):
                count = sum(self._slots[run_id].values()) if node is None else self._slots[run_id].get(node, 0)
                held.update({run_id: count} if count else {})
        else:
            devices = self.stock.line(want.line) if node is None else self.stock.on_node(want.line, node)
            held.update(self._holders[device.uuid][0] for device in devices if device.uuid in self._holders)
        parts = [f"{_are(count)} held by run {short(run)}" for run, count in held.items()]
        if len(parts) > most:
            parts[most - 1 :] = [f"{len(parts) - most + 1} more runs hold others"]
        return parts

    def not_the_pools(self, want: Want) -> list[str]:
        """What is in the way and no run of this pool can free."""
        if want.line == CPU_LINE:
            return [f"the engine refuses more: {self.refused[CPU]}"] if CPU in self.refused else []
        parts: list[str] = []
        line = self.stock.line(want.line) if self.refused else ()
        locked = [device for device in line if device.uuid in self.refused and device.uuid not in self._holders]
        if locked:
            why = self.refused[locked[0].uuid]
            parts.append(f"{_are(len(locked))} in use outside the pool{f' ({why})' if why else ''}")
        used = [device for device in self.stock.used_outside(want.line) if device.uuid not in self.refused]
        busy = [device for device in used if device.uuid not in self._holders]
        if busy and not want.allow_busy:
            takes = f"--allow-busy takes {'it' if len(busy) == 1 else 'them'}"
            parts.append(f"{_are(len(busy))} in use outside the pool ({busy[0].outside_use}; {takes})")
        if (count := self.stock.total(want.line)) < want.ranks and self.stock.elastic(want.line) < want.ranks:
            parts.append(f"the pool has only {self.amount(want, count)} now")
        if (key := elastic_key(want.line)) in self.refused:
            parts.append(f"the cluster brought no more: {self.refused[key]}")
        return parts

    # ------------------------------------------------------------ within

    def _parts(self, want: Want, without: Collection[str] = ()) -> Parts | None:
        if not self.stock.many:
            # all devices are on one node, where a rank may even share a CPU slot
            return [("", want.ranks)] if self.missing(want) == 0 else None
        if want.line == CPU_LINE and CPU in self.refused:
            return None
        shelf = self._shelves.of(want)
        if shelf.total < want.ranks:
            return None
        free = shelf.free
        return laid_out(want, {node: free[node] for node in free if node not in without} if without else free)

    def _within_limit(self, want: Want) -> bool:
        """Whether what an autoscaler was asked for still comes when this gets its own."""
        elastic = self.stock.elastic(want.line)
        if not elastic:
            return True
        asked = sum(ranks for line, ranks in self._asked.values() if line == want.line)
        held = sum(map(sum, (parts.values() for parts in self._slots.values())))
        in_use = held if want.line == CPU_LINE else self._held[want.line]
        return in_use + asked + want.ranks <= max(elastic, self.stock.total(want.line))

    def _grant_slots(self, want: Want, lease_id: str, parts: Parts) -> Lease:
        inventory, notes = self.stock.inventory, [want.note]
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
            shares=tuple(self._share(node, (), count) for node, count in parts) if self.stock.many else (),
        )

    def _choose(self, want: Want, node: str, count: int) -> tuple[str, ...]:
        shelf = self._shelves.of(want)
        free = [
            device
            for device in self.stock.on_node(want.line, node)
            if device.uuid not in self._holders and device.uuid not in self.refused and shelf.takes(device)
        ]
        # untouched devices before those that others use; then in bus order: neighbours are near each other
        free.sort(key=lambda device: (device.outside_use != "", device.index, device.uuid))
        return tuple(device.uuid for device in sorted(free[:count], key=lambda device: (device.index, device.uuid)))

    def _share(self, node: str, uuids: tuple[str, ...], ranks: int) -> NodeShare:
        found = self.stock.nodes[node]
        return NodeShare(node=node, host=found.host, address=found.address, ranks=ranks, uuids=uuids)

    def _need(self, want: Want) -> int:
        if want.line == CPU_LINE and not self.stock.many:
            return max(1, min(want.ranks, self.stock.inventory.cpu_slots))
        return want.ranks

    def _usable(self, want: Want) -> list[Device]:
        shelf = self._shelves.of(want)
        return [
            device
            for device in self.stock.line(want.line)
            if device.uuid not in self.refused
            # what the pool's own runs hold is theirs, whatever the driver says about its use
            and (
                shelf.takes(device) or (device.uuid in self._holders and memory_bytes(device) >= shelf.min_memory_bytes)
            )
        ]

    def _count(self, uuid: str, change: int) -> None:
        """A device is taken (-1) or free again."""
        device = self.stock.devices.get(uuid)
        if device is None:
            return
        line = line_of(device)
        self._held[line] -= change
        if device.outside_use:
            # while the pool's own runs hold it, it is theirs
            self._fit_when_empty.clear()
        if uuid not in self.refused:
            self._shelves.count(device, change)


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"

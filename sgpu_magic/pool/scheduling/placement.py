"""Whether a request fits now, which devices it gets, and what blocks it. Pure: no clock, no I/O.

A pool may have ten thousand devices, so `FreeCapacity` counts the free ones once for each kind of request, and updates
the counts as leases are taken and released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from sgpu_magic.pool.scheduling.capacity import (
    CPU_LINE,
    Free,
    Parts,
    QueueKey,
    ResourceRequest,
    Stock,
    laid_out,
    line_of,
    line_of_lease,
)
from sgpu_magic.pool.scheduling.wait_reason import (
    DeviceBlocker,
    DevicesUnavailable,
    DevicesUsedOutside,
    HeldByRun,
    Holders,
    LockedDevices,
    NoNodesAdded,
    SlotsRefused,
    TooFewDevices,
)
from sgpu_magic.wire.devices import CPU, Device, Inventory, Lease, NodeShare, SharedCores, memory_bytes


class FreeCapacity:
    """What is free in a pool now.

    Args:
        inventory: What the pool has.

    Attributes:
        stock: The counted inventory.
        refused: What the engine could not get, with the reason: devices by UUID, `cpu`, `cpu@` and a node, or
            `elastic` and a type that the autoscaler could not provide.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.stock = Stock(inventory)
        self.refused: dict[str, str] = {}
        self._holders: dict[str, tuple[str, ...]] = {}
        # (run's number, its slots on each node) by run
        self._slots: dict[str, tuple[int, Mapping[str, int]]] = {}
        # the names of the sessions among the runs that hold anything
        self._sessions: dict[str, str] = {}
        # (line, number of ranks) of each run that waits for an autoscaler
        self._asked: dict[str, tuple[QueueKey, int]] = {}
        self._in_use: Counter[QueueKey] = Counter()
        self._free: dict[tuple[QueueKey, bool, int], Free] = {}
        self._fit_when_empty: dict[ResourceRequest, bool] = {}

    @property
    def cpu_slots_free(self) -> int:
        return max(0, self.stock.inventory.cpu_slots - self._in_use[CPU_LINE])

    def holder(self, uuid: str) -> str | None:
        return next(iter(self._holders.get(uuid, ())), None)

    # ------------------------------------------------------------ leases

    def add(
        self, run_id: str, lease: Lease, number: int = 0, *, shared: bool = False, session: str | None = None
    ) -> None:
        """Count `lease` as held.

        Args:
            run_id: The run.
            lease: Its lease.
            number: The run's number, in order of submission.
            shared: Whether other runs may hold the same devices.
            session: The run's name, if it is a session.

        Raises:
            ValueError: One of its devices is already held. This is not checked for leases with shares: an engine may
                grant other devices than proposed, so two leases may name one until it has granted both.
        """
        taken = [uuid for uuid in lease.uuids if uuid in self._holders]
        if (taken and not lease.shares and not shared) or len(set(lease.uuids)) != len(lease.uuids):
            raise ValueError(f"lease {lease.lease_id} of run {run_id} takes devices twice: {lease.uuids}")
        if session is not None:
            self._sessions[run_id] = session
        for uuid in lease.uuids:
            holders = self._holders.get(uuid, ())
            self._holders[uuid] = (*holders, run_id)
            if not holders:
                self._count(uuid, -1)
        if self._is_asked(lease):
            self._asked[run_id] = line_of_lease(lease), lease.ranks
        elif lease.cpu_slots:
            parts = {share.node: share.ranks for share in lease.shares} or {"": lease.cpu_slots}
            self._slots[run_id] = number, parts
            self._count_slots(parts, -1)

    def release(self, run_id: str, lease: Lease) -> None:
        """Count a held lease as free again."""
        for uuid in lease.uuids:
            if holders := tuple(holder for holder in self._holders.get(uuid, ()) if holder != run_id):
                self._holders[uuid] = holders
            elif self._holders.pop(uuid, ()):
                self._count(uuid, +1)
        _, slots = self._slots.pop(run_id, (0, {}))
        self._count_slots(slots, +1)
        self._asked.pop(run_id, None)
        self._sessions.pop(run_id, None)

    def refuse(self, lease: Lease, uuids: Collection[str], why: str) -> None:
        """Exclude what the engine could not get for a lease: devices, CPU slots or nodes of an autoscaler.

        If `uuids` has none of the lease's devices, the whole lease is excluded. Otherwise the same lease would be
        granted again and again.
        """
        keys = set(uuids) & set(lease.uuids) or set(lease.uuids)
        if not keys and self._is_asked(lease):
            keys = {_elastic_key(line_of_lease(lease))}
        keys = keys or {f"{CPU}@{share.node}" for share in lease.shares} or {CPU}
        self.refused |= dict.fromkeys(keys, why)
        self._free.clear()
        self._fit_when_empty.clear()

    # ------------------------------------------------------------ grants

    def grant(self, request: ResourceRequest, lease_id: str, *, without: Collection[str] = ()) -> Lease | None:
        """Return a lease for `request`, not yet counted as held; None when the request does not fit now.

        Args:
            request: The request.
            lease_id: The lease's ID.
            without: Nodes that are kept for other runs.
        """
        if (parts := self._parts(request, without)) is None or not self._within_limit(request):
            return None
        return self._lease(request, lease_id, parts)

    def ask(self, request: ResourceRequest, lease_id: str) -> Lease | None:
        """Return a lease without devices, which asks the autoscaler for nodes; None if it can't provide them."""
        elastic = self.stock.elastic(request.line)
        if elastic <= self.stock.total(request.line, request.min_memory_bytes) or not self._within_limit(request):
            return None
        return None if _elastic_key(request.line) in self.refused else self._lease(request, lease_id, [])

    def fits(self, request: ResourceRequest) -> bool:
        """Whether the request would get a lease now if no other run were first."""
        return self._within_limit(request) and self._parts(request) is not None

    def free(self, request: ResourceRequest) -> int:
        """Return how many devices or slots the request could take now, regardless of their nodes."""
        return 0 if request.line == CPU_LINE and CPU in self.refused else self._free_for(request).total

    def free_by_node(self, request: ResourceRequest) -> Mapping[str, int]:
        return self._free_for(request).by_node

    def missing(self, request: ResourceRequest) -> int:
        """Return how many more must become free; 0 when enough are free, regardless of their nodes."""
        return max(0, self.need(request) - self.free(request))

    def fits_when_empty(self, request: ResourceRequest) -> bool:
        """Whether the request would fit if all runs were over; otherwise keeping devices for it is useless."""
        if request not in self._fit_when_empty:
            self._fit_when_empty[request] = self._would_fit(request)
        return self._fit_when_empty[request]

    def fits_beside(self, request: ResourceRequest, held: Iterable[HeldByRun]) -> bool:
        """Return whether the request would fit if all runs but these were over."""
        return self._would_fit(request, frozenset(each.run_id for each in held))

    def _would_fit(self, request: ResourceRequest, beside: Collection[str] = ()) -> bool:
        if request.line == CPU_LINE:
            if CPU in self.refused or self.stock.inventory.cpu_slots <= 0:
                return False
            kept = [self._slots[run_id][1] for run_id in beside if run_id in self._slots]
            if self.stock.many:
                slots = Counter(self.stock.slots_by_node)
                for each in kept:
                    slots.subtract(each)
                return laid_out(request, slots) is not None
            return self.need(request) <= self.stock.inventory.cpu_slots - sum(sum(each.values()) for each in kept)
        free = self._free_for(request)
        usable = Counter(
            device.node
            for device in self.stock.line(request.line)
            if device.uuid not in self.refused
            and not any(holder in beside for holder in self._holders.get(device.uuid, ()))
            # devices that the pool's own runs hold count, even if the driver reports them as in use
            and (free.takes(device) or (device.uuid in self._holders and memory_bytes(device) >= free.min_memory_bytes))
        )
        return laid_out(request, usable) is not None

    def kept_node(self, request: ResourceRequest, without: Collection[str]) -> str | None:
        """Return the node to keep for a request that needs a single node: the one that is closest to free enough."""
        if not (self.stock.many and request.on_one_node):
            return None
        sizes, free = self.stock.sizes(request.line, request.min_memory_bytes), self.free_by_node(request)
        large = (node for node in free if sizes.get(node, 0) >= request.ranks and node not in without)
        return max(large, key=free.__getitem__, default=None)

    # ------------------------------------------------------------ what blocks a request

    def need(self, request: ResourceRequest) -> int:
        """Return how many devices or slots the request takes; on one machine, ranks may share CPU slots."""
        if request.line == CPU_LINE and not self.stock.many:
            return max(1, min(request.ranks, self.stock.inventory.cpu_slots))
        return request.ranks

    def holders(
        self, request: ResourceRequest, node: str | None = None, *, most: int = 4, without: Collection[str] = ()
    ) -> Holders:
        """Return which runs hold how many of a request's devices, on one node or anywhere.

        Args:
            request: The request.
            node: The node; None for all.
            most: How many entries to return at most; the last one may be the number of further runs.
            without: Runs to leave out.
        """
        held: Counter[str] = Counter()
        if request.line == CPU_LINE:
            for run_id, (_, slots) in sorted(self._slots.items(), key=lambda item: item[1][0]):
                count = sum(slots.values()) if node is None else slots.get(node, 0)
                held.update({run_id: count} if count else {})
        else:
            devices = self.stock.line(request.line) if node is None else self.stock.by_node(request.line).get(node, ())
            held.update(self._holders[device.uuid][0] for device in devices if device.uuid in self._holders)
        runs = tuple(
            HeldByRun(run_id, count, self._sessions.get(run_id))
            for run_id, count in held.items()
            if run_id not in without
        )
        return Holders(runs) if len(runs) <= most else Holders(runs[: most - 1], len(runs) - most + 1)

    def held_by(self, request: ResourceRequest, run_ids: Collection[str]) -> tuple[HeldByRun, ...]:
        """Return what these runs hold of a request's devices, without those that hold none."""
        if not run_ids:
            return ()
        held = self.holders(request, most=self.stock.total(request.line) + 1).runs
        return tuple(each for each in held if each.run_id in run_ids)

    def blockers(self, request: ResourceRequest) -> tuple[DeviceBlocker, ...]:
        """Return what blocks the request that no run of this pool can free."""
        if request.line == CPU_LINE:
            return (SlotsRefused(self.refused[CPU]),) if CPU in self.refused else ()
        found: list[DeviceBlocker] = []
        line = self.stock.line(request.line) if self.refused else ()
        refused = [device for device in line if device.uuid in self.refused and not device.unavailable]
        if locked := [device for device in refused if device.uuid not in self._holders]:
            found.append(LockedDevices(len(locked), self.refused[locked[0].uuid] or None))
        broken = [
            device.unavailable
            for device in self.stock.unavailable.get(request.line, ())
            if device.unavailable is not None and device.uuid not in self._holders
        ]
        if broken:
            found.append(DevicesUnavailable(len(broken), broken[0]))
        used = [
            device.outside_use
            for device in self.stock.used_outside.get(request.line, ())
            if device.outside_use is not None
            and device.unavailable is None
            and device.uuid not in self.refused
            and device.uuid not in self._holders
        ]
        if used and not request.allow_busy:
            found.append(DevicesUsedOutside(len(used), used[0]))
        if (count := self.stock.total(request.line)) < request.ranks and self.stock.elastic(
            request.line
        ) < request.ranks:
            found.append(TooFewDevices(count, request.line))
        if (key := _elastic_key(request.line)) in self.refused:
            found.append(NoNodesAdded(self.refused[key]))
        return tuple(found)

    # ------------------------------------------------------------ internals

    def _parts(self, request: ResourceRequest, without: Collection[str] = ()) -> Parts | None:
        if request.line == CPU_LINE and not self.stock.many:
            # on one machine ranks may share CPU slots
            return [("", request.ranks)] if self.missing(request) == 0 else None
        if self.free(request) < request.ranks:
            return None
        return laid_out(
            request, {node: count for node, count in self.free_by_node(request).items() if node not in without}
        )

    def _within_limit(self, request: ResourceRequest) -> bool:
        """Whether the autoscaler's limit allows this request in addition to the devices in use and pending requests."""
        if not (elastic := self.stock.elastic(request.line)):
            return True
        asked = sum(ranks for line, ranks in self._asked.values() if line == request.line)
        return self._in_use[request.line] + asked + request.ranks <= max(elastic, self.stock.total(request.line))

    def _lease(self, request: ResourceRequest, lease_id: str, parts: Parts) -> Lease:
        on_cpu = request.line == CPU_LINE
        here = self.stock.inventory
        is_crowded = on_cpu and bool(parts) and request.ranks > here.cpu_slots
        shares: list[NodeShare] = []
        for node, ranks in parts:
            at = self.stock.nodes[node]
            uuids = () if on_cpu else self._choose(request, node, ranks)
            shares.append(NodeShare(node=node, host=at.host, address=at.address, ranks=ranks, uuids=uuids))
        return Lease(
            lease_id=lease_id,
            device_type=request.device_type,
            ranks=request.ranks,
            uuids=tuple(uuid for share in shares for uuid in share.uuids),
            cpu_slots=self.need(request) if on_cpu else 0,
            simulated=request.simulated,
            shared_cores=SharedCores(here.cores, here.cpu_slots) if is_crowded else None,
            shares=tuple(shares) if self.stock.many else (),
        )

    def _choose(self, request: ResourceRequest, node: str, count: int) -> tuple[str, ...]:
        free = self._free_on(self._free_for(request), self.stock.by_node(request.line)[node])
        free.sort(key=lambda device: (device.index, device.uuid))
        # idle devices before those in use outside the pool
        idle = [device for device in free if not device.outside_use]
        used = [device for device in free if device.outside_use]
        chosen = close_together(idle, count) if count < len(idle) else [*idle, *used[: count - len(idle)]]
        return tuple(device.uuid for device in sorted(chosen, key=lambda device: (device.index, device.uuid)))

    def _free_for(self, request: ResourceRequest) -> Free:
        key = (request.line, request.allow_busy, request.min_memory_bytes)
        if (free := self._free.get(key)) is None:
            free = self._free[key] = Free(request.allow_busy, request.min_memory_bytes)
            for node, devices in self.stock.by_node(request.line).items():
                free.add(node, len(self._free_on(free, devices)))
            if request.line == CPU_LINE:
                held: Counter[str] = Counter()
                for _, slots in self._slots.values():
                    held.update(slots)
                for node, count in self.stock.slots_by_node.items():
                    if f"{CPU}@{node}" not in self.refused:
                        free.add(node, count - held[node])
        return free

    def _free_on(self, free: Free, devices: Collection[Device]) -> list[Device]:
        return [
            device
            for device in devices
            if device.uuid not in self._holders and device.uuid not in self.refused and free.takes(device)
        ]

    def _count(self, uuid: str, change: int) -> None:
        """Update the counts for a device that was taken (-1) or freed (+1)."""
        if (device := self.stock.devices.get(uuid)) is None:
            return
        line = line_of(device)
        self._in_use[line] -= change
        if device.outside_use or device.unavailable:
            # the result of `_would_fit` depends on whether the pool's own runs hold it
            self._fit_when_empty.clear()
        if uuid not in self.refused:
            for free in self._of_line(line):
                if free.takes(device):
                    free.add(device.node, change)

    def _count_slots(self, by_node: Mapping[str, int], sign: int) -> None:
        """Update the counts for CPU slots that were taken (-1) or freed (+1)."""
        self._in_use[CPU_LINE] -= sign * sum(by_node.values())
        for free in self._of_line(CPU_LINE):
            for node, count in by_node.items():
                if node in free.by_node:
                    free.add(node, sign * count)

    def _of_line(self, line: QueueKey) -> list[Free]:
        return [free for (other, _, _), free in self._free.items() if other == line]

    def _is_asked(self, lease: Lease) -> bool:
        """Whether the lease has no devices yet, because the engine asked for nodes."""
        return self.stock.many and not lease.shares and not lease.uuids


def close_together(devices: Sequence[Device], count: int) -> list[Device]:
    """Choose devices with short distances to each other, which leave the others close together too.

    The longest distance counts first, since the slowest connection limits a collective. Devices of unknown distances,
    and those that are equally far from each other, are chosen in bus order. Not all choices are compared, only one for
    each device: the one that starts with it and always adds the nearest device.

    Args:
        devices: The devices of one node, by index.
        count: How many to choose, less than there are.
    """
    if any(max(other.index for other in devices) >= len(device.distances) for device in devices):
        return list(devices[:count])

    def grown_from(first: Device) -> list[Device]:
        chosen, left = [first], [device for device in devices if device is not first]
        while len(chosen) < count:
            # the first of several that are equally near: they are in bus order
            nearest = min(left, key=lambda device: sum(device.distances[other.index] for other in chosen))
            chosen.append(nearest)
            left.remove(nearest)
        return chosen

    def cost(chosen: list[Device]) -> tuple[int, int, int, list[int]]:
        among = [one.distances[other.index] for one in chosen for other in chosen]
        left = [device for device in devices if device not in chosen]
        to_left = sum(one.distances[other.index] for one in chosen for other in left)
        return max(among), sum(among), -to_left, sorted(device.index for device in chosen)

    return min(map(grown_from, devices), key=cost)


def _elastic_key(line: QueueKey) -> str:
    """Return the key in `FreeCapacity.refused` for a type that the autoscaler could not provide."""
    return f"elastic {line.device_type}"

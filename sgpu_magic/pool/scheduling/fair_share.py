"""Fair sharing of a line among users, and users' quotas. Pure.

- The user with the highest priority (a setting) is first, then the one with the least use: devices in use now plus
  recent use. Use of an hour ago (`half_life_s`) counts half.
- The runs of one user are served in order of submission.
- A run over its user's quota waits only for that user's own runs, and does not count as passed over by others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from sgpu_magic.config.pool_terms import UserLimits, quota_types
from sgpu_magic.pool.scheduling.capacity import QueueKey, ResourceRequest, line_of_lease
from sgpu_magic.pool.scheduling.placement_refusal import PlacementRefusal, QuotaTooSmall
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.wait_reason import OverQuota
from sgpu_magic.wire.base import ErrorKind
from sgpu_magic.wire.devices import CPU, Lease
from sgpu_magic.wire.run import RunSpec

NO_LIMITS = UserLimits()
_NAMED_RUNS = 3


class FairShare:
    """Accounts for users' present and past use of devices.

    Args:
        limits: Priorities and quotas.
        half_life_s: Seconds after which past use counts half.
    """

    def __init__(self, limits: UserLimits = NO_LIMITS, half_life_s: float = 3600.0) -> None:
        self._limits = limits
        self._rate = math.log(2) / half_life_s
        self._uses: dict[tuple[QueueKey, str], _Use] = {}
        # by user and run: the type and number of its devices
        self._leases: dict[str, dict[str, tuple[str, int]]] = {}

    def took(self, run: ScheduledRun, lease: Lease, now: float) -> None:
        """Count a run's lease as in use."""
        count, user = _count(lease), run.spec.owner.user
        self._use(lease, user).add(count, now, self._rate)
        self._leases.setdefault(user, {})[run.run_id] = (CPU if lease.cpu_slots else lease.device_type, count)

    def gave_back(self, run: ScheduledRun, lease: Lease, now: float) -> None:
        """Count a run's lease as past use."""
        user = run.spec.owner.user
        self._use(lease, user).add(-_count(lease), now, self._rate)
        self._leases.get(user, {}).pop(run.run_id, None)

    def share(self, line: QueueKey, user: str, now: float) -> float:
        """Return the user's present and recent use of the line, as a number of devices."""
        use = self._uses.get((line, user))
        return 0.0 if use is None else use.share(now, self._rate)

    def rank(self, line: QueueKey, user: str, now: float) -> tuple[float, float]:
        """Return a sort key for users: the next one has the smallest."""
        return -self._limits.priority(user), self.share(line, user, now)

    # ------------------------------------------------------------ quotas

    def refusal(self, spec: RunSpec, request: ResourceRequest) -> PlacementRefusal | None:
        """Return why the request exceeds the user's quota by itself; None when it does not."""
        user, ranks = spec.owner.user, request.ranks
        for kind in quota_types(request.line.device_type):
            if (quota := self._limits.quota(user, kind)) is not None and ranks > quota:
                return PlacementRefusal(ErrorKind.CAPACITY, QuotaTooSmall(user, quota, kind or None, ranks))
        return None

    def over_quota(self, run: ScheduledRun, request: ResourceRequest) -> OverQuota | None:
        """Return why the run must wait for other runs of its user; None when it need not."""
        user = run.spec.owner.user
        for kind in quota_types(request.line.device_type) if self._limits.quotas else ():
            if (quota := self._limits.quota(user, kind)) is None:
                continue
            held = {one: count for one, (of, count) in self._leases.get(user, {}).items() if kind in quota_types(of)}
            if (in_use := sum(held.values())) and in_use + request.ranks > quota:
                run_ids = tuple(held)
                named, others = run_ids[:_NAMED_RUNS], max(0, len(run_ids) - _NAMED_RUNS)
                return OverQuota(user, quota, kind or None, in_use, named, others, request.ranks, request.line)
        return None

    # ------------------------------------------------------------ order

    def in_order(
        self,
        line: QueueKey,
        runs: Sequence[tuple[ScheduledRun, ResourceRequest]],
        first: Iterable[str],
        now: float,
        most: int | None = None,
    ) -> list[ScheduledRun]:
        """Return a line's waiting runs in the order in which they would start if its devices became free.

        Args:
            line: The line.
            runs: All runs that wait in it, in order of submission.
            first: The runs that devices are kept for, in order.
            now: The present.
            most: How many to return at most; None for all.
        """
        if len({run.spec.owner.user for run, _ in runs}) < 2:
            return [run for run, _ in runs[:most]]
        by_id = {run.run_id: run for run, _ in runs}
        ordered = [by_id.pop(run_id) for run_id in first if run_id in by_id]
        groups: dict[str, list[tuple[ScheduledRun, ResourceRequest]]] = {}
        last: list[ScheduledRun] = []
        for run, request in runs:
            if run.run_id in by_id and self.over_quota(run, request):
                last.append(run)
            elif run.run_id in by_id:
                groups.setdefault(run.spec.owner.user, []).append((run, request))
        positions = {run.run_id: position for position, (run, _) in enumerate(runs)}
        ranks = {user: self.rank(line, user, now) for user in groups}
        for run in ordered:
            priority, share = ranks.get(run.spec.owner.user, (0.0, 0.0))
            ranks[run.spec.owner.user] = priority, share + run.spec.placement.ranks
        heap = [(ranks[user], positions[group[0][0].run_id], user, 0) for user, group in groups.items()]
        heapq.heapify(heap)
        while heap and (most is None or len(ordered) < most):
            (priority, share), _, user, at = heapq.heappop(heap)
            group = groups[user]
            run, request = group[at]
            ordered.append(run)
            if at + 1 < len(group):
                heapq.heappush(
                    heap, ((priority, share + request.ranks), positions[group[at + 1][0].run_id], user, at + 1)
                )
        return (ordered + last)[:most]

    # ------------------------------------------------------------ internals

    def _use(self, lease: Lease, user: str) -> _Use:
        return self._uses.setdefault((line_of_lease(lease), user), _Use())


class _Use:
    """One user's use of one line: devices in use, and the decayed past use."""

    __slots__ = ("_at", "_devices", "_past")

    def __init__(self) -> None:
        self._devices = 0
        # decayed average of the number of devices in use: constant use of n devices converges to n
        self._past = 0.0
        self._at = 0.0

    def add(self, devices: int, now: float, rate: float) -> None:
        self._past = self._faded(now, rate)
        self._at = max(self._at, now)
        self._devices += devices

    def share(self, now: float, rate: float) -> float:
        return self._devices + self._faded(now, rate)

    def _faded(self, now: float, rate: float) -> float:
        left = math.exp(-rate * max(0.0, now - self._at))
        return self._past * left + self._devices * (1.0 - left)


def _count(lease: Lease) -> int:
    return len(lease.uuids) or lease.cpu_slots or lease.ranks

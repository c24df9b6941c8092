"""Which runs use which leases on a node, so that a device stays locked until its last process is gone. Pure."""

from __future__ import annotations

from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.records import RunSpec


class HeldLeases:
    """The leases of the runs that have ranks.

    A session's stays held after its own ranks are gone, until the new processes that `--fresh` runs have on its
    devices are gone too.
    """

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        # whose devices new processes are on: run id -> session
        self._sessions: dict[str, str] = {}
        self._kept: dict[str, Lease] = {}

    @property
    def runs(self) -> list[str]:
        """Ids of the runs that have processes of their own."""
        return [*self._leases, *self._sessions]

    def take(self, spec: RunSpec, lease: Lease) -> None:
        """The run's ranks are about to use the lease; a run in the ranks of a session adds nothing to that."""
        if not spec.session:
            self._leases[spec.run_id] = lease
        elif spec.fresh:
            self._sessions[spec.run_id] = spec.session

    def gone(self, run_id: str) -> list[Lease]:
        """The run's ranks are gone. Returns the leases that nobody uses any more."""
        session = self._sessions.pop(run_id, run_id)
        lease = self._leases.pop(run_id, None)
        if lease is not None:
            self._kept[run_id] = lease
        if session in self._leases or session in self._sessions.values():
            return []
        free = self._kept.pop(session, None)
        return [] if free is None else [free]


def has_locks(lease: Lease) -> bool:
    """Whether its devices are locked on the machine: real ones are."""
    return bool(lease.uuids) and not lease.simulated

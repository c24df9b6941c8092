"""Which run a client means by the beginning of its id, among those that are there and that it may know of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.permissions import Permissions
from sgpu_magic.pool.run_book import PoolRun, RunBook
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.wire.messages import Attach
from sgpu_magic.wire.records import RunSpec

# a user's own newest run is looked for among so many
_LOOK_BACK = 200


class RunLookup:
    """Finds runs, and tells the client why there is none.

    Args:
        server: Where clients are connected.
        book: The runs that go on.
        ledger: All runs there ever were.
        permissions: Say whom a run is no business of.
        resubmittable: Runs that an earlier service lost with its queue, until their clients submit them again.
    """

    def __init__(
        self,
        server: Server,
        book: RunBook,
        ledger: Ledger,
        permissions: Permissions,
        resubmittable: Callable[[], Mapping[str, RunSpec]],
    ) -> None:
        self._server = server
        self._book = book
        self._ledger = ledger
        self._permissions = permissions
        self._resubmittable = resubmittable

    def to_follow(self, client: ConnectedClient, message: Attach) -> str | None:
        """Return the id of the run that the client wants to follow: one that goes on, or one that is over.

        Where it names none: the newest detached one that goes on, else the newest of all.
        """
        if not message.run:
            detached = [run for run in self._book.going if run.spec.detach and client.may_see(run.spec.owner.user)]
            going_on = [run.run_id for run in detached]
            newest = [row.run_id for row in self._ledger.recent(1 if client.same_host else _LOOK_BACK)][::-1]
            newest = [run_id for run_id in newest if self._permissions.may_see(client, run_id)]
            chosen = (going_on[-1:] or newest[-1:] or [None])[0]
            if chosen is None:
                self._server.refuse(client, message.request, "this pool has had no run yet.", "RunUnknown")
            return chosen
        found = {run.run_id for run in self._book.going if run.run_id.startswith(message.run)}
        # a run that was lost with the queue of an earlier service is not there until it is submitted again
        found |= set(self._known(message.run)) - set(self._resubmittable())
        found = {run_id for run_id in found if self._permissions.may_see(client, run_id)}
        if len(found) == 1:
            return found.pop()
        self._server.refuse(client, message.request, _not_one(message.run, found, "that this pool has"), "RunUnknown")
        return None

    def going(self, client: ConnectedClient, request: int, prefix: str, *, ends: bool = False) -> PoolRun | None:
        """The one run of that prefix that goes on; None, and the client told why, when there is none.

        Args:
            ends: It is to be ended, which an admin may do to everybody's.
        """
        may = client.may_end if ends else client.may_see
        found = [run for run in self._book.going if run.run_id.startswith(prefix) and may(run.spec.owner.user)]
        if len(found) == 1:
            return found[0]
        ids = [run.run_id for run in found]
        self._server.refuse(client, request, _not_one(prefix, ids, "that is going on here"), "RunUnknown")
        return None

    def own_going(self, client: ConnectedClient, prefix: str) -> PoolRun | str:
        """The one run of that prefix that goes on and is this client's user's; else a sentence why there is none."""
        found = [
            run for run in self._book.going if run.run_id.startswith(prefix) and client.may_see(run.spec.owner.user)
        ]
        if len(found) == 1 and prefix:
            return found[0]
        return _not_one(prefix, [run.run_id for run in found], "of yours that is going on here")

    def _known(self, prefix: str) -> list[str]:
        try:
            return self._ledger.find(prefix)
        except ValueError:
            return []


def _not_one(prefix: str, found: Collection[str], which: str) -> str:
    if found:
        listed = ", ".join(sorted(found))
        return f"{prefix!r} begins the ids of {len(found)} runs: {listed}. Give more digits."
    return f"no run {which} has an id that begins with {prefix!r}. `sgpu runs` lists them."

"""What a client may ask for, and which run it means by an ID prefix.

On the service's machine everything is permitted: a client that reaches the socket also owns the files. A client on
another machine acts as the user that its key is listed for. It sees only the status rows of other users' runs; an admin
may also end them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from sgpu_magic.config import host_name
from sgpu_magic.errors import PoolError, RunUnknown, SessionError
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.server import ConnectedClient
from sgpu_magic.wire.base import OfRun, short
from sgpu_magic.wire.client import (
    AskRank,
    ClientMessage,
    KeepEnvironment,
    OpenLine,
    RestartRanks,
    StopPool,
    Submit,
    Warm,
)
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary

# number of recent runs that are searched for a remote user's newest run
_LOOK_BACK = 200


class Permissions:
    """Checks the requests of remote clients, and finds runs for all clients.

    Args:
        ledger: The rows of all runs.
        active: The active runs.
    """

    def __init__(self, *, ledger: Ledger, active: ActiveRuns) -> None:
        self._ledger = ledger
        self._active = active

    def permitted(self, client: ConnectedClient, message: ClientMessage) -> ClientMessage | None:
        """Return the message, adjusted to what is permitted; None when it is refused and needs no reply.

        Raises:
            SgpuError: The request is not permitted.
        """
        if client.same_host:
            return message
        match message:
            case Submit():
                return self._submitted(client, message)
            case KeepEnvironment(runs=runs):
                return msgspec.structs.replace(message, runs=tuple(run for run in runs if self.may_see(client, run)))
            case Warm():
                # the client's interpreter is on another machine
                return None
            case StopPool() if not client.admin:
                raise PoolError(
                    f"user {client.user} is not allowed to stop this pool: ask its operator, or `sgpu cancel` your "
                    "runs."
                )
            case RestartRanks() | AskRank() | OpenLine():
                self._check_session(client, message.session)
                return message
            case OfRun(run_id=run):
                return message if self.may_see(client, run) else None
            case _:
                return message

    def user_of(self, run_id: str) -> str | None:
        """Return the user of an active or finished run; None when there is no such run."""
        if (run := self._active.speaker(run_id)) is not None:
            return run.spec.owner.user
        row = self._ledger.summary(run_id)
        return row.user if row is not None else None

    def may_see(self, client: ConnectedClient, run_id: str) -> bool:
        """Whether the client may see a run's content."""
        return client.same_host or client.user == self.user_of(run_id)

    def visible_status(self, client: ConnectedClient, status: PoolStatus) -> PoolStatus:
        """Return a status without the details of other users' runs."""
        if client.same_host:
            return status
        rows = tuple(row if row.user == client.user else _row_of_another(row) for row in status.runs)
        return msgspec.structs.replace(status, runs=rows)

    # ------------------------------------------------------------ resolving run IDs

    def to_follow(self, client: ConnectedClient, prefix: str) -> str:
        """Return the ID of the active or finished run that the client wants to follow.

        Without a prefix: the newest active detached run, else the newest run.

        Raises:
            RunUnknown: No run matches, or more than one does.
        """
        if not prefix:
            active = [run.run_id for run in self._of_prefix("", client.may_see) if run.spec.detach]
            newest = [row.run_id for row in self._ledger.recent(1 if client.same_host else _LOOK_BACK)][::-1]
            newest = [run_id for run_id in newest if self.may_see(client, run_id)]
            if (chosen := (active[-1:] or newest[-1:] or [None])[0]) is None:
                raise RunUnknown("this pool has no runs yet.")
            return chosen
        found = {run.run_id for run in self._active.going if run.run_id.startswith(prefix)}
        # runs from an earlier service's queue do not count until they are submitted again
        found |= set(self._ledger.find(prefix)) - set(self._active.resubmittable)
        found = {run_id for run_id in found if self.may_see(client, run_id)}
        if len(found) == 1:
            return found.pop()
        raise RunUnknown(_not_one(prefix, found, "of this pool"))

    def going(self, client: ConnectedClient, prefix: str, *, ends: bool = False) -> PoolRun:
        """Return the one active run with that prefix.

        Args:
            client: The client that asks.
            prefix: The beginning of a run ID.
            ends: Whether the run is to be ended, which an admin may do to all users' runs.

        Raises:
            RunUnknown: No run matches, or more than one does.
        """
        found = self._of_prefix(prefix, client.may_end if ends else client.may_see)
        if len(found) == 1:
            return found[0]
        raise RunUnknown(_not_one(prefix, [run.run_id for run in found], "that is active here"))

    def own_going(self, client: ConnectedClient, prefix: str) -> PoolRun | str:
        """Return the one active run with that prefix that the client may see; else a sentence that says why not."""
        found = self._of_prefix(prefix, client.may_see)
        if len(found) == 1 and prefix:
            return found[0]
        return _not_one(prefix, [run.run_id for run in found], "of yours that is active here")

    def _of_prefix(self, prefix: str, may: Callable[[str], bool]) -> list[PoolRun]:
        going = self._active.going
        return [run for run in going if run.run_id.startswith(prefix) and may(run.spec.owner.user)]

    def _check_session(self, client: ConnectedClient, session: str) -> None:
        if not self.may_see(client, session):
            raise SessionError(f"there is no session {short(session)} of yours in this pool.")

    def _submitted(self, client: ConnectedClient, submit: Submit) -> Submit:
        spec = submit.spec
        if spec.session:
            self._check_session(client, spec.session)
        # the client's process is on another machine, even if that has the same name
        host = spec.owner.host if spec.owner.host != host_name() else f"{spec.owner.host} (another machine)"
        owner = msgspec.structs.replace(spec.owner, user=client.user, host=host)
        context = msgspec.structs.replace(submit.context, is_remote=True)
        return msgspec.structs.replace(submit, spec=msgspec.structs.replace(spec, owner=owner), context=context)


def _not_one(prefix: str, found: Collection[str], which: str) -> str:
    if found:
        listed = ", ".join(sorted(found))
        return f"{prefix!r} matches the ids of {len(found)} runs: {listed}. Give more digits."
    return f"no run {which} has an id that begins with {prefix!r}. `sgpu runs` lists them."


def _row_of_another(row: RunSummary) -> RunSummary:
    return msgspec.structs.replace(row, name="", failure="", notebook="", kernel="", waiting_for="", owner_pid=0)

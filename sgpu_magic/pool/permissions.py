"""What a client may ask for. On the service's machine everything: who reaches its socket owns its files.

A client of another machine is the user that its key is listed for. Of other users' runs it sees rows in the status, and
nothing else; an admin may also end them.
"""

from __future__ import annotations

import msgspec

from sgpu_magic.config import host_name
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.run_book import RunBook
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.wire.comms import TellComms
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.messages import (
    ClientMessage,
    Describe,
    KeepEnvironment,
    ReclaimPayload,
    ResultsReceived,
    StopPool,
    Submit,
    TrackRun,
    Unfollow,
    Warm,
)
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary
from sgpu_magic.wire.session_messages import AskRank, RestartRanks


class Permissions:
    """Looks at what clients of other machines ask, before anybody else does.

    Args:
        server: Where they are connected.
        book: The runs that go on.
        ledger: All runs there ever were.
    """

    def __init__(self, server: Server, book: RunBook, ledger: Ledger) -> None:
        self._server = server
        self._book = book
        self._ledger = ledger

    def permitted(self, client: ConnectedClient, message: ClientMessage) -> ClientMessage | None:
        """Return the message as it may be acted upon; None when it may not, and the client knows."""
        if client.same_host:
            return message
        match message:
            case Submit():
                return self._submitted(client, message)
            case KeepEnvironment(runs=runs):
                return msgspec.structs.replace(message, runs=tuple(run for run in runs if self.may_see(client, run)))
            case Warm():
                # its interpreter is on another machine
                return None
            case StopPool() if not client.admin:
                text = f"user {client.user} may not stop this pool: ask who runs it, or `sgpu cancel` your runs."
                self._server.refuse(client, message.request, text, "PoolError")
                return None
            case RestartRanks() | AskRank():
                if self.may_see(client, message.session):
                    return message
                text = f"there is no session {short(message.session)} of yours in this pool."
                self._server.refuse(client, message.request, text, "SessionError")
                return None
            case (
                Describe(run_id=run)
                | TrackRun(run_id=run)
                | Unfollow(run_id=run)
                | ReclaimPayload(run_id=run)
                | ResultsReceived(run_id=run)
                | TellComms(run_id=run)
            ):
                return message if self.may_see(client, run) else None
            case _:
                return message

    def may_see(self, client: ConnectedClient, run_id: str) -> bool:
        """Whether a run's content is the client's business."""
        return client.same_host or client.user == self._user_of(run_id)

    def may_end(self, client: ConnectedClient, run_id: str) -> bool:
        return client.admin or self.may_see(client, run_id)

    def shown(self, client: ConnectedClient, status: PoolStatus) -> PoolStatus:
        """Return a status without what other users' runs are about."""
        if client.same_host:
            return status
        rows = tuple(row if row.user == client.user else _row_of_another(row) for row in status.runs)
        return msgspec.structs.replace(status, runs=rows)

    def _submitted(self, client: ConnectedClient, submit: Submit) -> Submit | None:
        spec = submit.spec
        if spec.session and not self.may_see(client, spec.session):
            text = f"there is no session {short(spec.session)} of yours in this pool."
            self._server.refuse(client, submit.request, text, "SessionError")
            return None
        # its process is on another machine, whatever that is called
        host = spec.owner.host if spec.owner.host != host_name() else f"{spec.owner.host} (another machine)"
        owner = msgspec.structs.replace(spec.owner, user=client.user, host=host)
        context = msgspec.structs.replace(submit.context, elsewhere=True)
        return msgspec.structs.replace(submit, spec=msgspec.structs.replace(spec, owner=owner), context=context)

    def _user_of(self, run_id: str) -> str | None:
        run = self._book.speaker(run_id)
        if run is not None:
            return run.spec.owner.user
        try:
            row = self._ledger.summary(run_id)
        except ValueError:
            return None
        return row.user if row is not None else None


def _row_of_another(row: RunSummary) -> RunSummary:
    return msgspec.structs.replace(row, name="", failure="", notebook="", kernel="", waiting_for="", owner_pid=0)

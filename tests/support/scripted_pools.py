"""Pools at the other end of a real link, whose replies, events and end a test controls."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable
from typing import Any

from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.send_queue import SendQueue
from sgpu_magic.errors import PoolError
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import Record, RunState
from sgpu_magic.wire.client import Accepted, Attach, Attached, Refused, Submit
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import Event, EventBody
from sgpu_magic.wire.pool_status import Welcome
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

RUN = "0000abcd"
Answer = Callable[[Any], Iterable[Record] | None]


def spec_of(run_id: str = RUN, **fields: Any) -> RunSpec:
    defaults: dict[str, Any] = {
        "name": "train",
        "cell": CellSource(body="print(1)"),
        "placement": Placement(ranks=1),
        "outputs": (),
        "owner": Owner(pid=1, host="h", user="u"),
        "timeout_s": 60.0,
    }
    return RunSpec(run_id=run_id, **defaults | fields)


def has_run(message: Any) -> Iterable[Record]:
    """Return the replies of a pool that accepts every run, and has every requested run."""
    match message:
        case Submit(request=request, spec=spec):
            return [Accepted(request=request, run_id=spec.run_id)]
        case Attach(request=request, run=run):
            return [Attached(request=request, spec=spec_of(run), state=RunState.RUNNING)]
        case _:
            return []


def lacks_runs(message: Any) -> Iterable[Record]:
    """Return the replies of a pool that accepts every run, but has no earlier ones."""
    if isinstance(message, Attach):
        return [Refused(request=message.request, error="RunUnknown", message=f"there is no run {message.run}.")]
    return has_run(message)


class ScriptedPool:
    """A pool, which is the transport of its `link`.

    Args:
        answer: Returns the answers to a message; None ends the pool.

    Attributes:
        sent: The messages that it has received.
    """

    title = "the pool of this test"
    is_network = False
    hello_timeout_s = 10.0
    silent_s = 0.0

    def __init__(self, answer: Answer = has_run) -> None:
        self.sent: list[Any] = []
        self._answer = answer
        self._dead = False
        self._seq = 0
        self.link = PoolLink(self)  # type: ignore[arg-type]

    def apply(self, *bodies: EventBody, run_id: str = RUN) -> None:
        """Send events of a run."""
        for body in bodies:
            self._seq += 1
            self._say(self.link, Event(run_id=run_id, seq=self._seq, at=float(self._seq), body=body))

    def die(self) -> None:
        self._dead = True
        self.link._outgoing.put(None)  # pyright: ignore[reportPrivateUsage]
        assert self.link.lost.wait(10)

    def kinds(self) -> list[str]:
        """The types of the messages that it has received, without the greeting."""
        return [type(message).__name__ for message in self.sent if type(message).__name__ != "Hello"]

    # the interface that a link requires of its transport

    def carry(self, outgoing: SendQueue, link: PoolLink) -> None:
        self._say(link, Welcome(protocol_version=4, package_version="0", pid=1))
        while not outgoing.closed and not self._dead:
            select.select([outgoing], [], [])
            for parcel in outgoing.drain():
                message = codec.client_messages.decode(parcel.parts[0])
                self.sent.append(message)
                answers = self._answer(message)
                if answers is None:
                    return
                for answer in answers:
                    self._say(link, answer)

    def answered(self, request: int) -> None: ...

    def lost_message(self) -> str:
        return "the pool ended"

    def mute(self) -> PoolError:
        return PoolError("the pool is silent")

    def _say(self, link: PoolLink, message: Record) -> None:
        link.received([codec.encode(message)])


class Services:
    """Connects to the successive services of a pool.

    Args:
        pools: The services, or why none could be reached.
    """

    def __init__(self, *pools: ScriptedPool | Exception) -> None:
        self._pools = list(pools)

    def get_link(self, *, start: bool) -> PoolLink:
        """As `Connector.get_link`; the next service once the first one's link is lost."""
        now = self._pools[0]
        if isinstance(now, Exception):
            raise self._pools.pop(0)  # type: ignore[misc]
        if now.link.lost.is_set() and len(self._pools) > 1:
            self._pools.pop(0)
            return self.get_link(start=start)
        return now.link

    def close(self) -> None:
        for pool in self._pools:
            if isinstance(pool, ScriptedPool):
                pool.link.close()

"""The way to a pool of another machine, over connections that break.

Each TCP connection is made, greeted and known by itself: the pool learns in its first message which client comes back,
and is then asked for what may have been lost. A request is sent again until it is answered; the pool does it once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import zmq

from sgpu_magic.client.outgoing import Outgoing, Parcel
from sgpu_magic.client.remote_connection import RemoteConnection
from sgpu_magic.client.wire import Receiver
from sgpu_magic.errors import KeyRefused, PoolError
from sgpu_magic.system.secure_sockets import Endpoint, KeyPair
from sgpu_magic.wire import codec
from sgpu_magic.wire.messages import Hello, Ping, Pong, Welcome

_TICK_MS = 1000
_PING_S = 3.0
# some pings, and the time that a large frame takes on a slow line
_SILENT_S = 10.0
_WELCOME_S = 10.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0
_LINGER_MS = 1000
# what nobody waits for, kept while there is no connection
_MOST_KEPT = 1000


class RemoteWire:
    """Carries messages to a pool of another machine (a `Wire`).

    Args:
        name: The pool's name in `pools.toml`.
        endpoint: Where it listens, and its key.
        own: This user's keys.
        hello: What each connection begins with.
        timeout_s: Seconds of silence after which the pool is given up.
    """

    says_hello = True

    def __init__(self, name: str, endpoint: Endpoint, own: KeyPair, hello: Hello, timeout_s: float) -> None:
        self.title = f"the pool {name} ({endpoint.address})"
        self._name = name
        self._endpoint = endpoint
        self._own = own
        self._hello = [codec.encode(hello)]
        self._timeout_s = timeout_s
        self._service = ""
        self._heard_at = self._pinged_at = time.monotonic()
        self._silent_s = 0.0
        # not answered yet, by their numbers
        self._requests: dict[int, Sequence[bytes]] = {}
        self._others: list[Sequence[bytes]] = []

    @property
    def silent_s(self) -> float:
        silent_s = time.monotonic() - self._heard_at
        return silent_s if silent_s > _SILENT_S else 0.0

    def lost(self) -> str:
        if self._silent_s > self._timeout_s:
            return (
                f"{self.title} has not been heard for {self._silent_s / 60:.0f} min and is given up. By now it has "
                "cancelled what was not detached; `sgpu runs` tells when it can be reached again."
            )
        return (
            f"the link to {self.title} ended: it was started again, or it no longer admits this user's key. Run the "
            "cell again."
        )

    def mute(self) -> PoolError:
        return PoolError(
            f"{self.title} does not answer, although something listens there. Ask who runs it to look at its log."
        )

    def answered(self, request: int) -> None:
        self._requests.pop(request, None)

    # ------------------------------------------------------------ the link's thread

    def carry(self, outgoing: Outgoing, receiver: Receiver) -> None:
        context = zmq.Context()
        pause_s = _FIRST_PAUSE_S
        try:
            while not outgoing.closed:
                connection = RemoteConnection(
                    context, self._name, self._endpoint, self._own, proven=bool(self._service)
                )
                try:
                    connection.make(lambda: self._has_ended(outgoing))
                    if not self._talk(connection, outgoing, receiver):
                        return
                    pause_s = _FIRST_PAUSE_S
                except PoolError as error:
                    receiver.failed(error)
                    if not self._service or isinstance(error, KeyRefused):
                        return
                finally:
                    connection.close(_LINGER_MS if outgoing.closed else 0)
                self._silent_s = time.monotonic() - self._heard_at
                if self._silent_s > self._timeout_s:
                    return
                self._pause(outgoing, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            context.term()

    def _talk(self, connection: RemoteConnection, outgoing: Outgoing, receiver: Receiver) -> bool:
        """Live through one connection. False when it was the last: another service answers, or it is time to end."""
        connection.send(self._hello)
        began_at = time.monotonic()
        welcomed = False
        while True:
            alive, readable = connection.wait(outgoing, _TICK_MS)
            if readable:
                for parts in connection.received():
                    self._heard_at = time.monotonic()
                    message = receiver.received(parts)
                    if isinstance(message, Welcome) and not welcomed:
                        welcomed = True
                        if not self._is_same_service(message):
                            return False
                        self._send_again(connection, receiver)
                    elif isinstance(message, Pong) and message.behind:
                        self._send_again(connection, receiver)
            for parcel in outgoing.take():
                self._remember(parcel)
                if welcomed:
                    connection.send(parcel.parts)
                    self._others.clear()
            now = time.monotonic()
            self._silent_s = now - self._heard_at
            if outgoing.closed or self._silent_s > self._timeout_s:
                return False
            if not alive:
                return True
            if not welcomed:
                if now - began_at > _WELCOME_S:
                    raise self.mute()
            elif now - self._pinged_at >= _PING_S:
                self._pinged_at = now
                connection.send([codec.encode(Ping())])

    def _is_same_service(self, welcome: Welcome) -> bool:
        known, self._service = self._service, welcome.service
        return known in ("", welcome.service)

    def _send_again(self, connection: RemoteConnection, receiver: Receiver) -> None:
        """What may have been lost in the last connection: events, requests and their answers."""
        for question in receiver.questions_after_gap():
            connection.send([codec.encode(question)])
        wanted: Collection[int] = receiver.awaited()
        self._requests = {number: parts for number, parts in self._requests.items() if number in wanted}
        for number in sorted(self._requests):
            connection.send(self._requests[number])
        for parts in self._others:
            connection.send(parts)
        self._others.clear()

    def _has_ended(self, outgoing: Outgoing) -> bool:
        for parcel in outgoing.take():
            self._remember(parcel)
        return outgoing.closed

    def _remember(self, parcel: Parcel) -> None:
        if parcel.request:
            self._requests[parcel.request] = parcel.parts
        elif len(self._others) < _MOST_KEPT:
            self._others.append(parcel.parts)

    def _pause(self, outgoing: Outgoing, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        poller = zmq.Poller()
        poller.register(outgoing.fileno(), zmq.POLLIN)
        while (left_s := until - time.monotonic()) > 0 and not self._has_ended(outgoing):
            poller.poll(int(left_s * 1000) + 1)

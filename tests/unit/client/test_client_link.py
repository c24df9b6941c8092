"""A kernel's connection to a pool while a user interrupts a call or waits for the connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from waiting import eventually

from sgpu_magic import errors
from sgpu_magic.client.connector import Connector
from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.send_queue import OutboundMessage, SendQueue
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError
from sgpu_magic.pool.health import kind_of
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import ErrorKind, Record, RunState
from sgpu_magic.wire.client import Attach, Attached, Refused, Unfollow
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.pool_status import Welcome
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

RUN = "0123456789abcdef0123456789abcdef"


class Line:
    """A transport to a pool whose other end is the test."""

    title = "the pool of this test"
    is_network = False
    hello_timeout_s = 10.0
    silent_s = 0.0

    def __init__(self) -> None:
        self.sent: list[Record] = []
        self.link: PoolLink | None = None

    def carry(self, outgoing: SendQueue, link: PoolLink) -> None:
        self.link = link
        self.says(Welcome(protocol_version=4, package_version="0", pid=1))
        while not outgoing.closed:
            for parcel in outgoing.drain():
                self._take(parcel)
            time.sleep(0.001)

    def says(self, message: Record) -> None:
        assert self.link is not None
        self.link.received([codec.encode(message)])

    def _take(self, parcel: OutboundMessage) -> None:
        self.sent.append(codec.client_messages.decode(parcel.parts[0]))

    def answered(self, request: int) -> None: ...

    def lost_message(self) -> str:
        return "it ended"

    def mute(self) -> PoolError:
        return PoolError("it is silent")


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def link(line: Line) -> Iterator[PoolLink]:
    made = PoolLink(line)
    yield made
    made.close()


def attached(request: int) -> Attached:
    spec = RunSpec(
        run_id=RUN,
        name="x",
        cell=CellSource(body=""),
        placement=Placement(ranks=1),
        outputs=(),
        owner=Owner(pid=1, host="h", user="u"),
        timeout_s=1.0,
        wait_s=None,
        env_names=(),
    )
    return Attached(request=request, spec=spec, state=RunState.RUNNING)


@pytest.mark.parametrize("answer_first", [False, True])
def test_an_attach_that_is_given_up_leaves_no_queue(line: Line, link: PoolLink, answer_first: bool):
    request, _ = link.new_request()
    link.send(Attach(request=request, run=RUN))
    for answers in (answer_first, not answer_first):
        if answers:
            line.says(attached(request))
        else:
            link.give_up(request)
    assert eventually(lambda: [each for each in line.sent if isinstance(each, Unfollow)]) == [Unfollow(run_id=RUN)]
    assert not link._followers
    assert not link._attached


@pytest.mark.parametrize("kind", ErrorKind)
def test_a_refusal_is_raised_as_the_class_that_it_names(line: Line, link: PoolLink, kind: ErrorKind):
    request, reply = link.new_request()
    link.send(Attach(request=request, run=RUN))
    line.says(Refused(request=request, error=kind, message="because."))
    error = reply.exception(5)
    assert type(error) is getattr(errors, kind)
    assert kind_of(error) is kind


def test_each_error_is_refused_as_the_nearest_class_that_a_client_knows():
    found = {cls.__name__: kind_of(cls.__new__(cls)) for cls in (errors.NoSuchName, errors.PoolVersionError)}
    assert found == {"NoSuchName": ErrorKind.USAGE, "PoolVersionError": ErrorKind.POOL}


class Slow(Connector):
    """A pool that takes a long time to connect to."""

    begun = threading.Event()
    go_on = threading.Event()
    exists = True

    def warm_up(self) -> None: ...

    def _made_anew(self, start: bool) -> PoolLink:
        self.begun.set()
        self.go_on.wait(30)
        raise PoolError("not reached")


def test_nobody_waits_for_a_thread_that_connects():
    connector = Slow(Settings(), lambda: None, lambda text: None)

    def connect() -> None:
        with pytest.raises(PoolError):
            connector.get_link(start=True)

    thread = threading.Thread(target=connect)
    thread.start()
    assert connector.begun.wait(5)
    began = time.monotonic()
    assert connector.alive is None
    connector.close()
    assert time.monotonic() - began < 5
    assert thread.is_alive()
    connector.go_on.set()
    thread.join(5)

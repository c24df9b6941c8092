"""Events from a run's log to clients: whole, in order, and with a bounded number waiting."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from launches import launch

from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.billing import Billing
from sgpu_magic.pool.clients import ConnectedClient
from sgpu_magic.pool.event_feed import EventFeed
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.permissions import Permissions
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.rank_requests import Forwarding, RankRequests
from sgpu_magic.pool.requests import Requests
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.scheduling.costs import Tariff
from sgpu_magic.pool.server import Server
from sgpu_magic.wire import codec
from sgpu_magic.wire.client import AskStacks, Attach, Attached, Notice, Stacks, Submit
from sgpu_magic.wire.events import Event, Noted
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION, Hello
from sgpu_magic.wire.rank_events import RankStack

RUN = "0123abcd"


class Reader:
    """A client whose connection accepts this many events until the test allows more."""

    def __init__(self, takes: int = 1 << 30) -> None:
        self.client = ConnectedClient(b"x", os.getpid())
        self.takes = takes
        self.seen: list[int] = []

    def offer(self, client: ConnectedClient, event: Event, frames: Sequence[bytes]) -> bool:
        if client is not self.client or len(self.seen) >= self.takes:
            return False
        self.seen.append(event.seq)
        return True


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not within its time"
        await asyncio.sleep(0.005)


def in_loop(body: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        await body()

    asyncio.run(asyncio.wait_for(go(), 60))


def filled(directory: Path, count: int, size: int = 10) -> RunLog:
    log = RunLog(directory, RUN)
    for _ in range(count):
        log.append(Noted(text="x" * size), 1.0)
    return log


def test_who_begins_late_gets_all_of_it_and_then_what_comes(tmp_path: Path):
    async def body() -> None:
        log, reader = filled(tmp_path, 1000), Reader()
        feed = EventFeed(reader.offer, lambda _: log)
        feed.catch_up(reader.client, RUN, tmp_path, 0)
        for _ in range(500):
            event = log.append(Noted(text="live"), 2.0)
            feed.publish([reader.client], event, (), tmp_path)
            await asyncio.sleep(0)
        await until(lambda: len(reader.seen) == 1500)
        assert reader.seen == list(range(1, 1501))
        feed.publish([reader.client], log.append(Noted(text="at once"), 3.0), (), tmp_path)
        assert reader.seen[-1] == 1501
        log.close()

    in_loop(body)


def test_a_slow_client_goes_on_where_it_was(tmp_path: Path):
    async def body() -> None:
        log, reader = filled(tmp_path, 5), Reader(takes=3)
        feed = EventFeed(reader.offer, lambda _: log)
        for number in range(2000):
            feed.publish([reader.client], log.append(Noted(text=f"{number}" * 500), 2.0), (), tmp_path)
        assert reader.seen == [6, 7, 8]
        for takes in (4, 50, 1 << 30):
            reader.takes = takes
            await until(lambda takes=takes: len(reader.seen) == min(takes, 2000))
        assert reader.seen == list(range(6, 2006))
        log.close()

    in_loop(body)


def test_what_is_not_on_disk_yet_is_sent_from_memory(tmp_path: Path):
    async def body() -> None:
        reader = Reader()
        (tmp_path / "run").touch()
        broken = RunLog(tmp_path / "run", RUN)
        broken.append(Noted(text="in memory"), 1.0)
        assert broken.unwritten
        feed = EventFeed(reader.offer, lambda _: broken)
        feed.catch_up(reader.client, RUN, tmp_path / "run", 0)
        await until(lambda: not feed.lags)
        feed.publish([reader.client], broken.append(Noted(text="more"), 1.0), (), tmp_path / "run")
        assert reader.seen == [1, 2]

    in_loop(body)


def test_of_a_run_that_is_over_the_end_is_the_end(tmp_path: Path):
    async def body() -> None:
        filled(tmp_path, 300).close()
        reader = Reader()
        feed = EventFeed(reader.offer, lambda _: None)
        feed.catch_up(reader.client, RUN, tmp_path, 100)
        await until(lambda: not feed.lags)
        assert reader.seen == list(range(101, 301))
        feed.catch_up(reader.client, RUN, tmp_path, 0)
        feed.forget(reader.client)
        assert not feed.lags

    in_loop(body)


def test_a_client_that_has_gone_before_it_is_greeted_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Its descriptor may belong to a file by then."""
    asked: list[int] = []

    def no_socket(connection: socket.socket) -> None:
        asked.append(connection.fileno())
        raise OSError(errno.ENOTSOCK, "Socket operation on non-socket")

    async def body() -> None:
        sent: list[ConnectedClient] = []
        server = Server(tmp_path / "s", lambda client, message, frames: sent.append(client), lambda client: None)
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{tmp_path / 's'}")
        hello = Hello(protocol_version=PROTOCOL_VERSION, package_version="", pid=os.getpid(), host="", user="u")
        with monkeypatch.context() as patched:
            patched.setattr("sgpu_magic.pool.server.peer_of", no_socket)
            dealer.send(codec.encode(hello))
            await until(lambda: bool(asked))
        assert sent == []
        dealer.send(codec.encode(hello))
        await until(lambda: bool(sent))
        dealer.close(0)
        server.close()
        context.term()

    in_loop(body)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_client_that_does_not_read_fills_no_memory_and_misses_nothing(tmp_path: Path):
    def used() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def body() -> None:
        sent: list[ConnectedClient] = []
        server = Server(tmp_path / "s", lambda client, message, frames: sent.append(client), lambda client: None)
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.rcvhwm = 1
        dealer.connect(f"ipc://{tmp_path / 's'}")
        hello = Hello(protocol_version=PROTOCOL_VERSION, package_version="", pid=os.getpid(), host="", user="u")
        dealer.send(codec.encode(hello))
        await until(lambda: bool(sent))
        log = filled(tmp_path / "run", 4000, 60_000)
        feed = EventFeed(server.offer, lambda _: log)
        before = used()
        feed.catch_up(sent[0], RUN, log.directory, 0)
        lag = next(iter(feed.lags.values()))
        await until(lambda: lag.next is not None)
        server.send(sent[0], Notice(text="an answer"))
        assert used() - before < 100_000_000
        seen: list[int] = []
        answers = 0
        while len(seen) < 4000 or not answers:
            if not dealer.poll(0):
                await asyncio.sleep(0.001)
                continue
            message = codec.pool_messages.decode(dealer.recv_multipart()[0])
            if isinstance(message, Event):
                seen.append(message.seq)
            else:
                answers += 1
        assert (seen, answers) == (list(range(1, 4001)), 1)
        dealer.close(0)
        context.term()
        server.close()
        log.close()

    in_loop(body)


# ---------------------------------------------------------------- clients that ask for a run


class Asking:
    """Requests of clients to a pool that has one run, whose ranks exist nowhere.

    Attributes:
        sent: To whom what was answered.
        numbers: Of the questions to the ranks.
    """

    def __init__(self, path: Path, reader: Reader) -> None:
        self.sent: list[tuple[ConnectedClient, object]] = []
        self.numbers: list[int] = []
        server = SimpleNamespace(
            send=lambda client, record, frames=(): self.sent.append((client, record)),
            refuse=lambda client, request, text, kind="": self.sent.append((client, text)),
        )
        engine = SimpleNamespace(take_stacks=lambda number, run_id: self.numbers.append(number))
        absent: Any = None
        ledger = Ledger(path / "ledger.sqlite3")
        runs = path / "runs"
        runs.mkdir()
        self.book = ActiveRuns(
            ledger=ledger,
            runs_path=runs,
            send=server.send,
            offer=reader.offer,
            billing=Billing(ledger, Tariff()),
            on_end=lambda run, ended: None,
            on_forgotten=lambda run_id: None,
            on_written=lambda run_id: None,
        )
        self.book.settled = True
        shared: dict[str, Any] = {"server": server, "engine": engine, "ledger": ledger, "active": self.book}
        self.ranks = ranks = RankRequests(**shared, feed=absent)
        parts = dict.fromkeys(inspect.signature(Requests).parameters) | shared | {"ranks": ranks}
        parts["permissions"] = Permissions(ledger=ledger, active=self.book)
        parts["forwarding"] = Forwarding(server=shared["server"], engine=shared["engine"], find=absent)
        self.requests = Requests(**parts)
        order = launch()
        submit = Submit(
            request=0,
            spec=order.spec,
            interpreter=order.interpreter,
            context=order.context,
            payload=order.payload,
        )
        self.run = PoolRun(submit, (), None)
        self.book.add(self.run)


def test_who_follows_a_run_before_it_is_recorded_gets_all_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    async def body() -> None:
        reader = Reader()
        asking = Asking(tmp_path, reader)
        asking.requests.on_message(reader.client, Attach(request=1, run=asking.run.run_id), ())
        ((client, answer),) = asking.sent
        assert client is reader.client
        assert isinstance(answer, Attached)
        await asyncio.sleep(0.01)
        assert capfd.readouterr().err == "", "no log is read that is not there"
        assert asking.book.accept(asking.run) is None
        asking.book.publish(asking.run, Noted(text="on"), 1.0)
        await until(lambda: reader.seen == [1, 2])

    in_loop(body)


def test_an_answer_of_ranks_that_comes_late_is_for_nobody(tmp_path: Path):
    async def body() -> None:
        first, second = Reader(), Reader()
        asking = Asking(tmp_path, first)
        run, requests = asking.run, asking.requests
        run.placed_at = 1.0
        question = AskStacks(request=7, run=run.run_id)
        requests.on_message(first.client, question, ())
        requests.ranks_exited(run.run_id)
        assert [client for client, _ in asking.sent] == [first.client], "it is told that nobody answers"
        # the group was restarted
        requests.on_message(second.client, question, ())
        late, asked = asking.numbers
        asking.ranks.stacks_taken(late, (RankStack(rank=0, problem="of the first group"),))
        assert len(asking.sent) == 1
        asking.ranks.stacks_taken(asked, ())
        client, answer = asking.sent[-1]
        assert client is second.client
        assert isinstance(answer, Stacks)
        assert answer.stacks == ()

    in_loop(body)

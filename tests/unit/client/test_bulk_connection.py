"""File data over the second connection to a remote pool, and over the link where that is not possible."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from file_pool import STORE, FilePool
from strangers import Stranger, has_ended
from tcp_proxy import Proxy
from waiting import eventually

from sgpu_magic.client import bulk_connection
from sgpu_magic.client.blob_sender import BlobContent, BlobSender, Sending
from sgpu_magic.client.bulk_connection import BulkConnection
from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.mirror import Mirror
from sgpu_magic.files.content_store import blob_digest, blob_path
from sgpu_magic.pool import bulk_port
from sgpu_magic.system.bulk_stream import BulkStream, client_context, server_context
from sgpu_magic.wire import codec
from sgpu_magic.wire.client import Unfollow
from sgpu_magic.wire.files import CHUNK_BYTES, AskBlobs, BlobsHeld, BlobTaken, PutBlob, ReadRunFile
from sgpu_magic.wire.pool_status import AskBulk, BulkOffered, OpenBulk

MB = 1 << 20


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a handshake may take long."""
    monkeypatch.setattr(bulk_connection, "_OPEN_S", 60.0)
    monkeypatch.setattr(bulk_port, "TOKEN_S", 60.0)
    monkeypatch.setattr(bulk_port, "GREETING_S", 60.0)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FilePool]:
    made = FilePool(tmp_path)
    yield made
    made.close()


@pytest.fixture
def link(pool: FilePool) -> Iterator[PoolLink]:
    made = pool.link()
    yield made
    made.close()


def lane_of(link: PoolLink) -> BulkConnection:
    return link.transport._bulk  # type: ignore[union-attr]


def upload(link: PoolLink, data: bytes) -> str:
    (digest,) = BlobSender(link).send([BlobContent(len(data), lambda: memoryview(data))])
    return digest


def stored(pool: FilePool, digest: str) -> bytes:
    return blob_path(pool.store._root, STORE, digest).read_bytes()


def opened(link: PoolLink) -> None:
    """Open the second connection by a first upload."""

    def is_open() -> bool:
        upload(link, os.urandom(1000))
        return lane_of(link).is_open

    eventually(is_open, 20, lambda: lane_of(link).problem)


def redirected(monkeypatch: pytest.MonkeyPatch, change: Callable[[BulkOffered], BulkOffered]) -> None:
    """Change each offer before the client receives it."""
    offered = BulkConnection.offered
    monkeypatch.setattr(BulkConnection, "offered", lambda self, offer, *rest: offered(self, change(offer), *rest))


def moved(offer: BulkOffered, port: int) -> BulkOffered:
    return msgspec.structs.replace(offer, port=port)


# ---------------------------------------------------------------- over the connection


def test_an_upload_goes_over_the_connection(pool: FilePool, link: PoolLink):
    opened(link)
    data = os.urandom(20 * MB)
    before = lane_of(link).sent_bytes
    digest = upload(link, data)
    assert stored(pool, digest) == data
    assert lane_of(link).sent_bytes - before > len(data)
    assert link.transport.slow_why == ""


def test_a_file_comes_over_the_connection(pool: FilePool, link: PoolLink, tmp_path: Path):
    opened(link)
    pool.folder.mkdir()
    data = os.urandom(10 * MB + 17)
    (pool.folder / "result-0.bin").write_bytes(data)
    (pool.folder / "empty").touch()
    received: list[int] = []
    turn = BulkStream.turn

    def counted(self: BulkStream, most: int) -> object:
        messages = turn(self, most)
        received.extend(len(part) for parts in messages for part in parts[1:])
        return messages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BulkStream, "turn", counted)
        mirror = Mirror(tmp_path / "mirrors" / "team" / "run", "0badcafe", lambda: link)
        assert mirror.bring("result-0.bin").read_bytes() == data
        assert mirror.bring("empty").read_bytes() == b""
    # the upload direction uses the same class, but received no data
    assert sum(received) == len(data)


def test_the_connection_takes_over_while_an_upload_is_under_way(pool: FilePool, link: PoolLink):
    """Its chunks still arrive in order, so none is sent twice."""
    data = os.urandom(30 * MB)
    sender = BlobSender(link)
    (digest,) = sender.send([BlobContent(len(data), lambda: memoryview(data))])
    assert stored(pool, digest) == data
    assert sender.sent_bytes == len(data)
    assert lane_of(link).is_open, link.transport.slow_why
    assert lane_of(link).sent_bytes > 0


def test_nothing_overtakes_what_went_over_the_link(pool: FilePool, link: PoolLink):
    pool.do(lambda: setattr(pool, "holds", True))
    question = AskBlobs(request=0, blobs=((blob_digest(memoryview(b"x")), 1),))
    first = link.ask(question)
    eventually(lambda: lane_of(link).is_open, 20, lambda: link.transport.slow_why)
    second = link.ask(question)
    # by then, the link's thread has handled the second question too
    link.send(Unfollow(run_id="0badcafe"))
    eventually(lambda: "Unfollow" in pool.kinds, 20, "nothing arrives")
    assert lane_of(link).sent_bytes == 0
    pool.release()
    assert [answer.wait(BlobsHeld, 20).bytes for answer in (first, second)] == [(0,), (0,)]
    assert lane_of(link).sent_bytes > 0


def test_what_the_pool_refuses_is_told(link: PoolLink):
    opened(link)
    data = os.urandom(1000)
    wrong = blob_digest(memoryview(os.urandom(1000)))
    answer = link.ask(PutBlob(request=0, digest=wrong, size=1000, offset=0), [data])
    with pytest.raises(Exception, match="does not have the digest that was announced"):
        answer.wait(BlobTaken, 20)
    assert lane_of(link).is_open


# ---------------------------------------------------------------- over the link


def test_an_upload_goes_on_over_the_link_where_the_connection_broke(
    pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch
):
    line = Proxy(pool.bulk_port, keeps=False)
    redirected(monkeypatch, lambda offer: moved(offer, line.port))
    opened(link)
    data = os.urandom(40 * MB)
    before = line.sent_bytes
    line.slow(40 * MB)
    digests: list[str] = []
    sending = threading.Thread(target=lambda: digests.append(upload(link, data)))
    sending.start()
    try:
        eventually(lambda: line.sent_bytes - before > 5 * MB, 30, "the upload does not get on", poll_s=0.002)
    finally:
        line.close()
        sending.join(100)
    assert stored(pool, digests[0]) == data
    assert not lane_of(link).is_open
    assert f"port {pool.bulk_port} of the pool team can't be used" in link.transport.slow_why


def test_a_port_that_nothing_listens_on_costs_no_upload(
    pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    redirected(monkeypatch, lambda offer: moved(offer, port))
    data = os.urandom(3 * MB)
    assert stored(pool, upload(link, data)) == data
    eventually(lambda: "Connection refused" in link.transport.slow_why, 20, lambda: link.transport.slow_why)
    asked = pool.kinds.count("AskBulk")
    # there is no immediate retry
    upload(link, os.urandom(3 * MB))
    assert pool.kinds.count("AskBulk") == asked
    reported: list[str] = []
    with Sending("team", link, reported.append) as sending:
        sending._due = 0.0
        sending.part("variables", 10)(5)
    assert f"it takes the slower way: port {pool.bulk_port} of the pool team can't be used" in reported[0]


def test_a_port_that_can_not_exist_costs_no_upload(pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch):
    redirected(monkeypatch, lambda offer: moved(offer, 70_000))
    data = os.urandom(1 * MB)
    assert stored(pool, upload(link, data)) == data
    eventually(lambda: "port must be 0-65535" in link.transport.slow_why, 20, lambda: link.transport.slow_why)
    assert stored(pool, upload(link, data[:1000])) == data[:1000]


def test_a_port_that_swallows_everything_costs_no_upload(
    pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bulk_connection, "_OPEN_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        redirected(monkeypatch, lambda offer: moved(offer, port))
        data = os.urandom(3 * MB)
        assert stored(pool, upload(link, data)) == data
        eventually(lambda: "it does not answer" in link.transport.slow_why, 20, lambda: link.transport.slow_why)


def test_a_connection_that_falls_silent_is_given_up(pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch):
    line = Proxy(pool.bulk_port, keeps=False)
    redirected(monkeypatch, lambda offer: moved(offer, line.port))
    opened(link)
    monkeypatch.setattr(bulk_connection, "_SILENT_S", 0.5)
    line.hold()
    data = os.urandom(3 * MB)
    try:
        assert stored(pool, upload(link, data)) == data
        assert "it has been silent" in link.transport.slow_why
    finally:
        line.close()


def test_it_is_tried_again_later(pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bulk_connection, "_FIRST_PAUSE_S", 0.0)
    lane_of(link)._pause_s = 0.0
    offers = iter([1])
    redirected(monkeypatch, lambda offer: moved(offer, next(offers, offer.port)))
    opened(link)
    assert link.transport.slow_why == ""


def test_another_server_at_the_port_gets_nothing(pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch):
    """It has a different certificate, as a man in the middle would."""
    context, _ = server_context()
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            try:
                with context.wrap_socket(connection, server_side=True) as tls:
                    got.append(tls.recv(1000))
            except OSError:
                pass

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        redirected(monkeypatch, lambda offer: moved(offer, port))
        data = os.urandom(3 * MB)
        assert stored(pool, upload(link, data)) == data
        eventually(lambda: "certificate" in link.transport.slow_why, 20, lambda: link.transport.slow_why)
        thread.join(10)
    assert got in ([], [b""])


def test_a_pool_of_an_earlier_version_is_asked_for_nothing(tmp_path: Path):
    pool = FilePool(tmp_path, tells=False)
    link = pool.link()
    try:
        data = os.urandom(3 * MB)
        assert stored(pool, upload(link, data)) == data
        assert (link.transport.slow_why, link.transport.chunk_bytes) == ("", CHUNK_BYTES)
        assert lane_of(link).sent_bytes == 0
    finally:
        link.close()
        pool.close()


def test_a_pool_without_the_port_takes_file_data_over_the_link(tmp_path: Path):
    pool = FilePool(tmp_path, bulk_port=-1)
    link = pool.link()
    try:
        assert (pool.bulk_port, link.welcome.bulk_port) == (0, 0)
        data = os.urandom(3 * MB)
        assert stored(pool, upload(link, data)) == data
    finally:
        link.close()
        pool.close()


def test_a_client_of_an_earlier_version_uses_the_link(pool: FilePool):
    client = Stranger(pool.remote.address, pool.keys.public, pool.user)
    try:
        client.hello()
        data = os.urandom(1000)
        digest = blob_digest(memoryview(data))
        client.say(PutBlob(request=1, digest=digest, size=1000, offset=0), data)
        answer = client.answer()
        assert isinstance(answer, BlobTaken)
        assert answer.up_to == 1000
    finally:
        client.close()


def test_a_broken_link_ends_the_connection_and_loses_nothing(pool: FilePool):
    line = Proxy(int(pool.remote.address.rpartition(":")[2]), keeps=False)
    link = pool.link(line.address)
    try:
        opened(link)
        pool.do(lambda: setattr(pool, "holds", True))
        answer = link.ask(AskBlobs(request=0, blobs=((blob_digest(memoryview(b"x")), 1),)))
        eventually(lambda: len(pool.held_back) == 1, 20, "the question does not arrive")
        line.reset()
        # the question is repeated over the new link
        eventually(lambda: len(pool.held_back) == 2, 30, "the question is not repeated")
        pool.release()
        assert answer.wait(BlobsHeld, 20).bytes == (0,)
        opened(link)
    finally:
        link.close()
        line.close()


def test_the_port_is_known_beforehand_unless_it_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = f"tcp://127.0.0.1:{port - 1000}"
    with bulk_port._listener(listen, 0) as first, bulk_port._listener(listen, 0) as second:
        assert first.getsockname()[1] == port
        assert second.getsockname()[1] != port
        with pytest.raises(OSError, match="in use"):
            bulk_port._listener(listen, port)


# ---------------------------------------------------------------- rejected clients


class Caller:
    """A client of the second port that sends what the test wants."""

    def __init__(self, pool: FilePool, offer: BulkOffered | None = None) -> None:
        self.offer = offer or offered(pool)
        raw = socket.create_connection(("127.0.0.1", pool.bulk_port))
        self.tls = client_context(self.offer.certificate).wrap_socket(raw)

    def say(self, *parts: bytes) -> None:
        sizes = b"".join(len(part).to_bytes(4, "little") for part in parts)
        self.tls.sendall(len(parts).to_bytes(4, "little") + sizes + b"".join(parts))

    def open(self, token: str) -> None:
        self.say(codec.encode(OpenBulk(token=token)))

    def is_let_in(self) -> None:
        self.tls.settimeout(20)
        got = b""
        while b"bulk-opened" not in got:
            more = self.tls.recv(1000)
            assert more, got
            got += more

    def hears_nothing(self) -> bool:
        """Whether the pool closes the connection without a reply."""
        self.tls.settimeout(20)
        try:
            return self.tls.recv(1000) == b""
        except (ConnectionError, OSError) as error:
            return not isinstance(error, TimeoutError)


def offered(pool: FilePool) -> BulkOffered:
    """Return an offer to the pool's first client."""
    port = pool.remote._bulk
    assert port is not None
    return pool.do(lambda: port.offer(pool.remote.clients[0]))


@pytest.fixture
def caller(pool: FilePool, link: PoolLink) -> Iterator[Caller]:
    made = Caller(pool)
    yield made
    made.tls.close()


def test_the_token_opens_the_connection(caller: Caller):
    caller.open(caller.offer.token)
    caller.is_let_in()


@pytest.mark.parametrize("token", ["", "0" * 64, "\udcff"], ids=["none", "wrong", "odd"])
def test_a_wrong_token_ends_the_connection(caller: Caller, token: str):
    caller.open(token)
    assert caller.hears_nothing()


def test_a_token_is_for_once(pool: FilePool, caller: Caller):
    caller.open(caller.offer.token)
    caller.is_let_in()
    again = Caller(pool, caller.offer)
    again.open(caller.offer.token)
    assert again.hears_nothing()
    again.tls.close()


def test_a_later_token_ends_an_earlier_one(pool: FilePool, caller: Caller):
    offered(pool)
    caller.open(caller.offer.token)
    assert caller.hears_nothing()


def test_a_token_has_its_time(pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bulk_port, "TOKEN_S", -1.0)
    made = Caller(pool)
    made.open(made.offer.token)
    assert made.hears_nothing()
    made.tls.close()


def test_a_stranger_who_only_stands_there_is_sent_away(pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bulk_port, "GREETING_S", 0.3)
    made = Caller(pool)
    with socket.create_connection(("127.0.0.1", pool.bulk_port)) as silent:
        eventually(lambda: has_ended(silent), 20, "it still stands there")
        # nor a client that completes the handshake but sends no token
        assert made.hears_nothing()
    made.tls.close()
    opened(link)


def test_the_oldest_strangers_go_when_they_are_too_many(
    pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bulk_port, "MOST_UNKNOWN", 3)
    crowd = [socket.create_connection(("127.0.0.1", pool.bulk_port)) for _ in range(10)]
    try:
        eventually(lambda: sum(map(has_ended, crowd)) == 7, 20, "they all stay")
        opened(link)
    finally:
        for each in crowd:
            each.close()


@pytest.mark.parametrize("opens", [False, True], ids=["stranger", "client"])
def test_a_message_that_says_it_is_huge_ends_its_connection(caller: Caller, opens: bool):
    if opens:
        caller.open(caller.offer.token)
        caller.is_let_in()
    caller.tls.sendall((1).to_bytes(4, "little") + (0xFFFFFFFF).to_bytes(4, "little") + b"x")
    assert caller.hears_nothing()


def test_raw_bytes_do_nothing(pool: FilePool, link: PoolLink, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        # bytes that look like a TLS record make the server wait for the rest
        patch.setattr(bulk_port, "GREETING_S", 0.3)
        text = (b"\x16\x03\x01\x10\x00" + os.urandom(500), b"GET / HTTP/1.1\r\n\r\n", os.urandom(10_000))
        for data in text:
            with socket.create_connection(("127.0.0.1", pool.bulk_port)) as raw:
                raw.sendall(data)
                eventually(lambda raw=raw: has_ended(raw), 20, "it still listens")
    opened(link)


def test_only_file_requests_are_heard(pool: FilePool, caller: Caller):
    caller.open(caller.offer.token)
    caller.is_let_in()
    before = list(pool.kinds)
    caller.say(codec.encode(AskBulk()))
    assert caller.hears_nothing()
    assert pool.kinds == before


def test_a_client_that_reads_no_answers_is_not_read_further(pool: FilePool, caller: Caller):
    """Further requests wait in the client; otherwise the answers would fill the pool's memory."""
    pool.folder.mkdir()
    (pool.folder / "file").write_bytes(bytes(2 * MB))
    caller.open(caller.offer.token)
    caller.is_let_in()
    before = len(pool.kinds)
    for number in range(1, 200):
        caller.say(codec.encode(ReadRunFile(request=number, run="0badcafe", name="file", size=MB)))
    seen: list[int] = []

    def settled() -> bool:
        seen.append(len(pool.kinds) - before)
        return len(seen) > 20 and seen[-1] == seen[-20]

    eventually(settled, 30, "it is still heard", poll_s=0.05)
    assert seen[-1] < 100


def test_a_revoked_user_loses_the_connection(pool: FilePool, caller: Caller):
    caller.open(caller.offer.token)
    caller.is_let_in()
    pool.revoke()
    # the list of authorized keys is read every two seconds
    assert caller.hears_nothing()


def test_a_client_that_leaves_takes_the_connection_along(pool: FilePool, caller: Caller):
    caller.open(caller.offer.token)
    caller.is_let_in()
    pool.do(lambda: pool.remote.drop(pool.remote.clients[0]))
    assert caller.hears_nothing()

"""A pool that only receives and sends files, in a thread of this process: real router and store, without an engine."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.remote_transport import RemoteTransport
from sgpu_magic.client.this_machine import this_hello
from sgpu_magic.files.content_store import BlobRefused, BlobStore
from sgpu_magic.pool.clients import AuthorizedClients, ConnectedClient, authorize, revoke
from sgpu_magic.pool.remote_clients import Listening, RemoteClients
from sgpu_magic.system.secure_sockets import Endpoint, KeyPair, new_key_pair
from sgpu_magic.wire.client import ClientMessage, Refused
from sgpu_magic.wire.files import AskBlobs, BlobsHeld, BlobTaken, PutBlob, ReadRunFile, RunFileRead
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION, Hello, Welcome

T = TypeVar("T")
STORE = "ann"


class FilePool:
    """The pool.

    Args:
        folder: For the store and the list of clients.
        bulk_port: As the setting.
        tells: The pool tells clients about its second port; earlier versions have none.

    Attributes:
        remote: The router, for calls by `do`.
        kinds: The type of each message, in order.
        held_back: Requests with file data are kept here without a reply while `holds` is set.
    """

    def __init__(self, folder: Path, *, bulk_port: int = 0, tells: bool = True) -> None:
        self.keys = new_key_pair()
        self.user = new_key_pair()
        self._list = folder / "clients.toml"
        authorize(self._list, STORE, self.user.public)
        self._tells = tells
        self.store = BlobStore(folder / "blobs", 1 << 40)
        self.folder = folder / "runs"
        self.kinds: list[str] = []
        self.holds = False
        self.held_back: list[Callable[[], None]] = []
        self.instance = secrets.token_hex(8)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.remote = self.do(lambda: self._made(bulk_port))

    def _made(self, bulk_port: int) -> RemoteClients:
        listening = Listening("tcp://127.0.0.1:*", self.keys, AuthorizedClients(self._list), 60.0, bulk_port)
        return RemoteClients(listening, self._on_message, lambda _: None)

    def do(self, call: Callable[[], T]) -> T:
        """Make a call in the pool's thread."""

        async def made() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(made(), self._loop).result(30)

    @property
    def bulk_port(self) -> int:
        return self.remote.bulk_port

    def wire(self, own: KeyPair | None = None, address: str = "") -> RemoteTransport:
        endpoint = Endpoint(address or self.remote.address, self.keys.public)
        return RemoteTransport("team", endpoint, own or self.user, this_hello(instance=secrets.token_hex(16)), 60.0)

    def link(self, address: str = "") -> PoolLink:
        return PoolLink(self.wire(address=address))

    def revoke(self) -> None:
        revoke(self._list, STORE)

    def close(self) -> None:
        self.do(self.remote.close)
        self.store.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # ------------------------------------------------------------ the pool's thread

    def _on_message(self, client: ConnectedClient, message: ClientMessage, frames: Sequence[bytes]) -> None:
        self.kinds.append(type(message).__name__)
        if isinstance(message, Hello):
            port = self.remote.bulk_port if self._tells else 0
            self.remote.send(
                client,
                Welcome(
                    protocol_version=PROTOCOL_VERSION, package_version="test", pid=os.getpid(),
                    same_host=False, service=self.instance, bulk_port=port,
                ),
            )  # fmt: skip
        elif self.holds:
            self.held_back.append(lambda: self._answer(client, message, frames))
        else:
            self._answer(client, message, frames)

    def release(self) -> None:
        """Answer what was held back, and hold nothing more."""

        def release() -> None:
            self.holds = False
            for call in self.held_back:
                call()
            self.held_back.clear()

        self.do(release)

    def _answer(self, client: ConnectedClient, message: ClientMessage, frames: Sequence[bytes]) -> None:
        match message:
            case AskBlobs(request=request, blobs=blobs):
                sizes = tuple(self.store.stored_bytes(STORE, digest, size) for digest, size in blobs)
                self.remote.send(client, BlobsHeld(request=request, bytes=sizes))
            case PutBlob(request=request):
                try:
                    up_to = self.store.put(STORE, message.digest, message.size, message.offset, frames[0])
                except BlobRefused as error:
                    self.remote.send(client, Refused(request=request, error="UsageError", message=str(error)))
                else:
                    self.remote.send(client, BlobTaken(request=request, up_to=up_to))
            case ReadRunFile(request=request):
                with open(self.folder / message.name, "rb") as file:
                    data = os.pread(file.fileno(), message.size, message.offset)
                    size = os.fstat(file.fileno()).st_size
                self.remote.send(client, RunFileRead(request=request, size=size), [data])
            case _:
                pass

"""Blobs on this node: read where the pool keeps them, or fetched from there once and kept for a while."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from sgpu_magic.agent.background_call import call_in_background
from sgpu_magic.agent.reports import Send
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.files.content_store import blob_path, digest_of
from sgpu_magic.files.kept_folders import evict
from sgpu_magic.files.whole_file import appearing, write_at
from sgpu_magic.wire.files import CHUNK_BYTES, DIGEST_BYTES, WINDOW, BlobFetched, FetchBlob

# so many blobs come at once: one is hashed while another comes
_AT_ONCE = 2


class BlobMissing(Exception):
    """A blob can't be had; the message is the reason."""


class BlobCache:
    """All blobs that runs of this agent need. Used in the loop's thread.

    Args:
        settings: Where the pool's stores are, on this machine, and this node's own cache is.
        send: Sends to the pool service of now.
    """

    def __init__(self, settings: Settings, send: Send) -> None:
        self._stores = settings.state_path / "blobs"
        self._folder = settings.state_path / "blob-cache"
        self._most_bytes = settings.blobs_bytes
        self._send = send
        self._requests = itertools.count(1)
        self._asked: dict[int, tuple[FetchBlob, asyncio.Future[bytes]]] = {}
        self._coming: dict[str, asyncio.Future[Path]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._users: dict[str, set[str]] = {}

    async def path(self, run_id: str, store: str, digest: str, size: int, *, far: bool) -> Path:
        """Where a blob lies on this node; it comes first if need be. Once, whoever asks.

        Args:
            run_id: Who needs it, until `leave`.
            store: As `Launch.store`.
            digest: The blob's.
            size: Its size in bytes.
            far: The pool's stores are not on this machine.

        Raises:
            BlobMissing: It can't be had.
            OSError: It can't be written.
        """
        here = blob_path(self._stores, store, digest)
        if not far:
            if not here.is_file():
                raise BlobMissing("a part of them is not in the pool's store any more. Run the cell again")
            return here
        self._users.setdefault(digest, set()).add(run_id)
        coming = self._coming.get(digest)
        if coming is None:
            coming = self._coming[digest] = asyncio.ensure_future(self._fetched(store, digest, size))
            coming.add_done_callback(lambda _: self._coming.pop(digest, None))
        # whoever gives up does not stop it for the others
        return await asyncio.shield(coming)

    def leave(self, run_id: str) -> None:
        """The run has what it needs, or is over."""
        for digest, users in list(self._users.items()):
            users.discard(run_id)
            if not users:
                del self._users[digest]
                if (coming := self._coming.get(digest)) is not None:
                    coming.cancel()

    def fetched(self, answer: BlobFetched, frames: Sequence[bytes]) -> None:
        """A part has come."""
        _, part = self._asked.pop(answer.request, (None, None))
        if part is None or part.done():
            return
        if answer.problem or not frames:
            part.set_exception(BlobMissing(answer.problem or "a part of them came without its bytes"))
        else:
            part.set_result(frames[0])

    def service_came(self) -> None:
        """What the last service was asked for and has not sent, the one of now is asked for."""
        for question, _ in self._asked.values():
            self._send(question)

    # ------------------------------------------------------------ within

    async def _fetched(self, store: str, digest: str, size: int) -> Path:
        path = self._folder / digest
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == size:
                os.utime(path)
                return path
        async with self._turns:
            private_dir(self._folder.parent)
            private_dir(self._folder)
            self._make_room(size)
            with appearing(path) as file:
                await self._fetch_into(file.fileno(), store, digest, size)
                hashed, _ = await call_in_background(lambda: digest_of(file.fileno()), "sgpu-hash")
                if hashed.hexdigest() != digest:
                    raise BlobMissing("a part of them was damaged on its way from the pool. Run the cell again")
        return path

    async def _fetch_into(self, file: int, store: str, digest: str, size: int) -> None:
        under_way: list[tuple[int, asyncio.Future[bytes]]] = []
        at = 0
        try:
            while at < size or under_way:
                while at < size and len(under_way) < WINDOW // _AT_ONCE:
                    length = min(CHUNK_BYTES, size - at)
                    under_way.append((at, self._ask(store, digest, at, length)))
                    at += length
                offset, part = under_way[0]
                data = await part
                del under_way[0]
                write_at(file, data, offset)
        finally:
            for _, part in under_way:
                part.cancel()

    def _ask(self, store: str, digest: str, offset: int, size: int) -> asyncio.Future[bytes]:
        number = next(self._requests)
        question = FetchBlob(request=number, store=store, digest=digest, offset=offset, size=size)
        part: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        part.add_done_callback(lambda _: self._asked.pop(number, None))
        self._asked[number] = question, part
        self._send(question)
        return part

    def _make_room(self, size: int) -> None:
        """Remove the longest unused ones beyond the budget that no run waits for."""
        kept: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                kept.append((status.st_mtime, status.st_size, path))

        def remove(path: Path) -> bool:
            # one that is coming has a name before it is there: `.<digest>-...`
            if path.name.lstrip(".")[: 2 * DIGEST_BYTES] in self._users:
                return False
            path.unlink(missing_ok=True)
            return True

        evict(kept, self._most_bytes - size, remove)

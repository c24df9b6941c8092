"""The handle of a run: its events, its cancelling, and what it returns."""

from __future__ import annotations

import hmac
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.mirror import Mirror
from sgpu_magic.client.wires import EventQueue
from sgpu_magic.errors import PoolError, RunFileUnknown, SerializationError
from sgpu_magic.payload import unpack
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, PackedLayout, Payload, PayloadSource, SharedPayload
from sgpu_magic.wire.client import Cancel, ResultsReceived, Submit, TellComms, Unfollow
from sgpu_magic.wire.events import Event, Placed, RunEnded
from sgpu_magic.wire.record import short
from sgpu_magic.wire.run import RunSpec


class Run:
    """A run that a pool has taken.

    Args:
        spec: What was submitted.
        key: The run's HMAC key; empty when it is not known any more.
        link: The connection to its pool.
        events: Where its events come in.
        directory: The run's directory.
        submission: What submits it again when its pool dies before it was placed; None for a run that was only
            attached to.

    Attributes:
        last_seq: Number of the last event that was taken.
        owned: This process has submitted it.
        pool: The name of the pool that has it.
        ask_tracked: Asks the pool to make it an MLflow run; None where it is not to be one.
        mirror: Brings files of its directory from a pool of another machine; None where that is this machine's.
    """

    def __init__(
        self,
        spec: RunSpec,
        key: bytes,
        link: PoolLink,
        events: EventQueue,
        directory: Path,
        submission: tuple[Submit, Sequence[bytes]] | None = None,
    ) -> None:
        self.spec = spec
        self.run_id = spec.run_id
        self.directory = directory
        self.last_seq = 0
        self.owned = submission is not None
        self.submission = submission
        self.pool = "local"
        self.ask_tracked: Callable[[], None] | None = None
        self.mirror = None if link.welcome.same_host else Mirror(directory, spec.run_id, lambda: self._link)
        self._key = key
        self._link = link
        self._events = events
        self._woken: Callable[[], None] | None = None

    @property
    def link_lost(self) -> bool:
        return self._link.lost.is_set()

    @property
    def pool_title(self) -> str:
        """Its pool as sentences name it."""
        return self._link.title

    @property
    def silent_s(self) -> float:
        """Seconds since its pool, of another machine, was heard; 0 as long as that is no cause for a word."""
        return self._link.silent_s

    def wake(self, woken: Callable[[], None]) -> None:
        """Have `woken` called after every event that comes, in the link's thread: it must only wake somebody."""
        self._woken = woken
        self._events.woken = woken
        woken()

    def next_event(self, timeout_s: float) -> tuple[Event, Sequence[bytes]] | None:
        """Return the next event and its raw frames, None when none came in time or the pool is lost."""
        while True:
            try:
                item = self._events.get(timeout=timeout_s)
            except queue.Empty:
                return None
            if item is None:
                return None
            event = item[0]
            if event.seq <= self.last_seq:
                # a pool that was told to send them again may have sent some already
                continue
            self.last_seq = event.seq
            if isinstance(event.body, Placed):
                # from now on a pool that does not know it can't be given it again
                self.submission = None
            return item

    def moved(self, link: PoolLink, events: EventQueue, *, from_start: bool = False) -> None:
        """Another pool service has the run now.

        Args:
            link: The connection to it.
            events: Where its events come in.
            from_start: It was submitted again, so that its events begin anew.
        """
        self._link, self._events = link, events
        if from_start:
            self.last_seq = 0
        if self._woken is not None:
            self.wake(self._woken)

    def cancel(self, reason: str, kill: bool = False) -> None:
        """Ask the pool to stop the run; its events tell when it has.

        Args:
            reason: Who or what wants that.
            kill: KILL the ranks that were asked before and have not stopped, also after the run's end.
        """
        self._link.ask(Cancel(request=0, run=self.run_id, reason=reason, kill=kill))

    def tell_comms(self, message: TellComms, frames: Sequence[bytes]) -> None:
        """Pass on what the front end says to widgets of a rank. Nobody waits for it."""
        self._link.send(message, frames)

    def load_results(self, ended: RunEnded, frames: Sequence[bytes], namespace: dict[str, object]) -> list[RankValues]:
        """Unpack what the ranks returned, by rank, then let the pool free its side.

        Raises:
            SerializationError: Something can't be rebuilt in the notebook, or lies nowhere any more.
        """
        inline = iter(frames)
        loaded: list[RankValues] = []
        received = True
        try:
            for result in ended.results:
                if result.payload is None:
                    loaded.append(RankValues({}, None))
                else:
                    found = self._unpack_result(result.rank, result.payload, inline, namespace)
                    loaded.append(RankValues.of(found, result.rank))
        except PoolError:
            # they can be fetched later
            received = False
            raise
        finally:
            if received:
                self._link.send(ResultsReceived(run_id=self.run_id))
        return loaded

    def _unpack_result(
        self, rank: int, payload: Payload, inline: Iterator[bytes], namespace: dict[str, object]
    ) -> object:
        if not self._key:
            raise SerializationError(
                f"what run {short(self.run_id)} returned can't be checked any more: its key is gone with its "
                f"directory {self.directory}. Run the cell again."
            )
        source = payload.source
        if isinstance(source, InlinePayload):
            data = next(inline, None)
            if data is None:
                raise self._results_gone(rank)
            return unpack.unpack(memoryview(bytearray(data)), payload.layout, self._key, namespace)
        if self.mirror is not None:
            return unpack.unpack(self._brought(rank, self.mirror), payload.layout, self._key, namespace)
        kept = str(self.directory / f"result-{rank}.bin")
        in_memory = _path_of(source)
        inode = source.inode if isinstance(source, SharedPayload) else 0
        # of a run that ended long ago the memory's number may be another file's: its copy comes first then
        # (and is looked for again: memory goes as soon as its copy is there)
        for path in (in_memory, kept) if self.owned else (kept, in_memory, kept):
            try:
                data = map_file(path, inode if path == in_memory else 0)
            except (OSError, ValueError):
                continue
            if self.owned or _is_signed(data, payload.layout, self._key):
                return unpack.unpack(data, payload.layout, self._key, namespace)
        raise self._results_gone(rank)

    def _brought(self, rank: int, mirror: Mirror) -> memoryview:
        """Bring a rank's result from a pool of another machine."""
        try:
            descriptor = mirror.in_memory(f"result-{rank}.bin")
        except RunFileUnknown:
            raise self._results_gone(rank) from None
        except OSError as error:
            raise SerializationError(
                f"what rank {rank} of run {short(self.run_id)} returned has no room here: {error.strerror}. Free some "
                "memory or disk; `%sgpu_attach` fetches it again."
            ) from error
        try:
            return memoryview(unpack.map_private(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    def _results_gone(self, rank: int) -> SerializationError:
        return SerializationError(
            f"what rank {rank} of run {short(self.run_id)} returned is gone: it was fetched by another notebook or its "
            f"pool was stopped, and {self.directory} has no copy (the setting keep_results is the most that is "
            "kept). Its output is above; run the cell again for its values."
        )

    def load_exception(
        self, layout: PackedLayout | None, frames: Sequence[bytes], namespace: dict[str, object]
    ) -> BaseException | None:
        """Unpack the culprit's exception, None when it did not travel or its type does not exist here."""
        if layout is None or not frames or not self._key:
            return None
        try:
            error = unpack.unpack(memoryview(bytearray(frames[0])), layout, self._key, namespace)
        except (SerializationError, SystemExit):
            # rebuilding it runs its class's code
            return None
        return error if isinstance(error, BaseException) else None

    def close(self) -> None:
        """Stop following it. The pool goes on telling its owner what it needs to know."""
        last = self._link.unfollow(self.run_id, self._events)
        if last and not self.owned and not self.link_lost:
            self._link.send(Unfollow(run_id=self.run_id))


class RankValues(msgspec.Struct):
    """What one rank returned: names of `--out`, and the last expression's value."""

    names: dict[str, object]
    value: object

    @classmethod
    def of(cls, content: object, rank: int) -> RankValues:
        """Check what a rank sent: `{"names": {...}, "value": ...}`."""
        if not isinstance(content, dict):
            raise SerializationError(f"rank {rank}'s result is not what a rank sends.")
        parts = cast("dict[str, Any]", content)
        return cls(parts["names"], parts["value"])


def _is_signed(data: memoryview, layout: PackedLayout, key: bytes) -> bool:
    """Whether these are the run's bytes at all: a descriptor's number may long be another file's."""
    if layout.pickle_size > data.nbytes:
        return False
    return hmac.compare_digest(unpack.compute_mac(key, data[: layout.pickle_size], layout.buffers), layout.mac)


def _path_of(source: PayloadSource) -> str:
    """Where bytes lie on this machine, "" where they don't."""
    match source:
        case FilePayload(path=path):
            return path
        case SharedPayload(pid=pid, fd=fd):
            return f"/proc/{pid}/fd/{fd}"
        case _:
            return ""


def map_file(path: str, inode: int = 0) -> memoryview:
    """Map a file that holds packed bytes; changes to the memory are the caller's own.

    Args:
        path: The file, or a descriptor of another process.
        inode: Which memory file that has to be; 0 for any file.

    Raises:
        OSError: It is gone, or its number is another file's.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if inode and (status.st_ino, status.st_nlink) != (inode, 0):
            raise FileNotFoundError(path)
        return memoryview(unpack.map_private(descriptor, status.st_size))
    finally:
        os.close(descriptor)

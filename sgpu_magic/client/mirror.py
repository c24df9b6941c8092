"""Local copies of remote runs' files, fetched on request; logs are copied as far as they were read.

It also records which runs were submitted to remote pools, so that a run's pool can be found later.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.send_queue import A, Answer, FilePart
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.errors import PoolError, RunFileUnknown, UsageError
from sgpu_magic.files.atomic_file import appearing, write_at, write_whole
from sgpu_magic.files.disk_usage import keep_newest
from sgpu_magic.files.run_directory import open_below, parts_of
from sgpu_magic.system.processes import fits_memory
from sgpu_magic.wire.base import RunState, is_valid_id
from sgpu_magic.wire.decoding import MsgpackDecoder
from sgpu_magic.wire.files import CHUNK_BYTES, ListRunFiles, ReadRunFile, RunFiles
from sgpu_magic.wire.run import RunSpec

MIRRORS = "remote"
"""Folder of all mirrors in the state directory: `remote/<pool>/<run>`."""

_MOST_RUNS = 200
_WINDOW = 16
_ANSWER_TIMEOUT_S = 60.0
# after this long without a reply, readers of a log show its local part
_LOG_PATIENCE_S = 5.0
SENT = "sent"
"""Folder in the state directory with one file per run: `sent/<run>.msgpack`."""
_SENT_END = ".msgpack"
_MOST_SENT = 500


def mirror_path(settings: Settings, pool: str, run_id: str) -> Path:
    """Return the local directory for the files of a run of that pool."""
    return settings.state_path / MIRRORS / pool / run_id


class Mirror:
    """The local copies of one run's files. Thread-safe.

    Args:
        directory: The local directory.
        run_id: The run's id.
        link: Returns the link to its pool.
    """

    def __init__(self, directory: Path, run_id: str, link: Callable[[], PoolLink]) -> None:
        self.directory = directory
        self.run_id = run_id
        self._link = link
        self._lock = threading.Lock()

    def list(self, under: str = "") -> RunFiles:
        """Return the files that the run has at its pool; `under` as in `ListRunFiles`.

        Raises:
            RunFileUnknown: There is no such folder or file.
            PoolError: The pool does not answer.
        """
        link = self._link()
        return _wait_for_answer(link, link.ask(ListRunFiles(request=0, run=self.run_id, under=under)), RunFiles)

    def bring(self, name: str) -> Path:
        """Fetch a file's current content and return its local path.

        Raises:
            RunFileUnknown: The run has no such file.
            PoolError: The pool does not answer.
            OSError: The file can't be written.
        """
        self._make_folder(name)
        target = self.directory.joinpath(*parts_of(name))
        with appearing(target) as file:
            self.copy_into(name, file.fileno(), 0)
        return target

    def follow(self, name: str) -> None:
        """Fetch what was appended to a growing file, such as a log. Errors are ignored; the next call retries."""
        with contextlib.suppress(UsageError, PoolError, OSError):
            self.bring_more(name)

    def bring_more(self, name: str, sure_bytes: int | None = None) -> None:
        """As `follow`, but raises errors.

        Args:
            name: The file's name.
            sure_bytes: Bytes of the local copy that are known to equal the pool's; None means all.

        Raises:
            UsageError: The pool has no such run or file, or it refuses this key or name.
            PoolError: The pool does not answer.
            OSError: The file can't be written.
        """
        with self._lock:
            # check for new content before creating the file
            here = self.directory.joinpath(*parts_of(name))
            begin = here.stat().st_size if here.is_file() else 0
            if sure_bytes is not None:
                begin = min(begin, sure_bytes)
            if self._size(name, _LOG_PATIENCE_S) <= begin:
                return
            self._make_folder(name)
            descriptor = open_below(self.directory, name, os.O_WRONLY | os.O_CREAT)
            try:
                if sure_bytes is not None:
                    os.ftruncate(descriptor, begin)
                self.copy_into(name, descriptor, begin, _LOG_PATIENCE_S)
            finally:
                os.close(descriptor)

    def in_memory(self, name: str) -> int:
        """Fetch a file into memory, or into the mirror if memory is short, and return its descriptor.

        Raises:
            RunFileUnknown: The run has no such file.
            PoolError: The pool does not answer.
            OSError: There is not enough space.
        """
        if not fits_memory(self._size(name)):
            return os.open(self.bring(name), os.O_RDONLY | os.O_CLOEXEC)
        descriptor = os.memfd_create("sgpu-payload", os.MFD_CLOEXEC)
        try:
            self.copy_into(name, descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def copy_into(self, name: str, target: int, begin: int, patience_s: float | None = None) -> None:
        """Write a file's bytes from `begin` to its current end into a descriptor, at the same offsets.

        Args:
            name: The file's name.
            target: The descriptor.
            begin: Offset in the file, in bytes.
            patience_s: Time to wait for each reply, in seconds; None waits 60 s, and longer while the link is broken.

        Raises:
            RunFileUnknown: The run has no such file, or it became shorter while it was read.
            PoolError: The pool does not answer.
            OSError: The bytes can't be written.
        """
        link = self._link()
        # (offset, size, pending reply) of each part in flight
        under_way: deque[tuple[int, int, Answer]] = deque()
        at, whole = begin, None
        try:
            while whole is None or at < whole or under_way:
                while len(under_way) < (1 if whole is None else _WINDOW) and (whole is None or at < whole):
                    # with a short timeout, request small parts so that one arrives in time on a slow link
                    size = link.transport.chunk_bytes if patience_s is None else CHUNK_BYTES
                    under_way.append((at, size, self._ask(link, name, at, size)))
                    at += size
                offset, size, answer = under_way.popleft()
                part = _wait_for_answer(link, answer, FilePart, patience_s)
                whole = part.about.size if whole is None else whole
                write_at(target, part.data, offset)
                if len(part.data) < min(size, whole - offset):
                    raise RunFileUnknown(f"{name} of the run has become shorter at its pool while it was read.")
        finally:
            for *_, answer in under_way:
                answer.give_up()

    # ------------------------------------------------------------ internals

    def _make_folder(self, name: str) -> None:
        if not self.directory.exists():
            private_dir(self.directory.parent.parent)
            # the least recently used mirrors are removed; the pool still has their files
            keep_newest(private_dir(self.directory.parent), _MOST_RUNS - 1)
        folder = private_dir(self.directory)
        for part in parts_of(name)[:-1]:
            folder = private_dir(folder / part)

    def _size(self, name: str, patience_s: float | None = None) -> int:
        link = self._link()
        return _wait_for_answer(link, self._ask(link, name, 0, 0), FilePart, patience_s).about.size

    def _ask(self, link: PoolLink, name: str, offset: int, size: int) -> Answer:
        return link.ask(ReadRunFile(request=0, run=self.run_id, name=name, offset=offset, size=size))


def _wait_for_answer(link: PoolLink, answer: Answer, kind: type[A], patience_s: float | None = None) -> A:
    """Wait for an answer; without `patience_s`, also wait for a broken link to be restored."""
    wait_s = _ANSWER_TIMEOUT_S if patience_s is None else patience_s
    with answer:
        while True:
            try:
                return answer.wait(kind, wait_s)
            except TimeoutError:
                # a broken link reconnects and repeats the request; a working but silent one does not
                if patience_s is not None or not link.transport.silent_s:
                    raise PoolError(
                        f"{link.title} did not send a run's file within {wait_s:.0f} s. Check your network; what is "
                        "stored there is not affected."
                    ) from None


# ---------------------------------------------------------------- records of runs submitted to remote pools


class SentRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that this machine submitted to a remote pool.

    Args:
        pool: The pool's name in `pools.toml`.
        spec: What was submitted.
        state: Its final state; None while its end is not known.
        ended_at: When it ended, in seconds since the epoch; None while its end is not known.
    """

    pool: str
    spec: RunSpec
    state: RunState | None = None
    ended_at: float | None = None


_decoder = MsgpackDecoder(SentRun)


def note_sent(settings: Settings, pool: str, spec: RunSpec) -> None:
    """Record that a pool accepted a run; the newest 500 records are kept. Write errors are ignored."""
    with contextlib.suppress(OSError, UsageError):
        private_dir(settings.state_path)
        private_dir(_sent_folder(settings))
        _write_sent(settings, SentRun(pool=pool, spec=spec))
        keep_newest(_sent_folder(settings), _MOST_SENT)


def note_end(settings: Settings, run_id: str, state: RunState, ended_at: float) -> None:
    """Record how a run ended, if it has a record without an end."""
    if (sent := sent_run(settings, run_id)) is not None and sent.ended_at is None:
        with contextlib.suppress(OSError):
            _write_sent(settings, msgspec.structs.replace(sent, state=state, ended_at=ended_at))


def sent_run(settings: Settings, run_id: str) -> SentRun | None:
    """Return a run's record, None if there is none."""
    if not is_valid_id(run_id):
        return None
    try:
        return _decoder.decode(_sent_folder(settings).joinpath(f"{run_id}{_SENT_END}").read_bytes())
    except (OSError, msgspec.DecodeError):
        # missing, or written by another version
        return None


def sent_run_ids(settings: Settings) -> list[str]:
    """Return the ids of all recorded runs, in no particular order."""
    return [path.stem for path in _sent_folder(settings).glob(f"*{_SENT_END}")]


def _sent_folder(settings: Settings) -> Path:
    return settings.state_path / SENT


def _write_sent(settings: Settings, sent: SentRun) -> None:
    # written atomically: a kernel and a Jupyter server may record an end at the same time
    write_whole(_sent_folder(settings) / f"{sent.spec.run_id}{_SENT_END}", msgspec.msgpack.encode(sent))

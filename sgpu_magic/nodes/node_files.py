"""File access for nodes on other machines: they read blobs and run files, and store files of their runs.

A log that an earlier attempt of a run began on another node is appended to, and a result appears once it is complete.
A node's other files are staged, and moved into place once all of them have arrived.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.atomic_file import read_json, write_at
from sgpu_magic.files.content_store import blob_path
from sgpu_magic.files.run_directory import (
    STAGED,
    BadName,
    link_stays_within,
    make_folder_below,
    make_link_below,
    open_below,
    parts_of,
    publish_staged,
    remove_below,
    replace_below,
)
from sgpu_magic.system.serial_threads import FileThread
from sgpu_magic.wire.base import is_valid_id
from sgpu_magic.wire.files import (
    CHUNK_BYTES,
    BlobFetched,
    FetchBlob,
    FetchRunFile,
    NodeFileReply,
    NodeFileRequest,
    RunFileStored,
    Store,
    StoreRunFile,
)

Answer = Callable[[NodeFileReply, Sequence[bytes]], None]

# the file that holds the offset of each node's part of a log
_SOURCES = ".log-sources"
_SOURCE = re.compile(r"[0-9a-f]{1,32}")


class _Begins(msgspec.Struct):
    """By log and by source (a node's own file), the offset at which that begins in the pool's file."""

    at: dict[str, dict[str, int]] = {}


class NodeFiles:
    """Serves reads and writes in a separate thread, in the order of the requests. Use it from the loop's thread.

    Args:
        settings: The pool's settings, which name the directories of blobs and runs.
    """

    def __init__(self, settings: Settings) -> None:
        self._stores = settings.state_path / "blobs"
        self._runs = settings.runs_path
        self._thread = FileThread("sgpu-node-files")

    def on_request(self, message: NodeFileRequest, frames: Sequence[bytes], answer: Answer) -> None:
        """Handle a node's request.

        Args:
            message: The request.
            frames: Its raw frames.
            answer: Sends a reply to that node.
        """
        match message:
            case FetchBlob(request=request) | FetchRunFile(request=request):
                self._thread.do(
                    lambda: self._read(message),
                    lambda data: answer(BlobFetched(request=request), (data,)),
                    lambda error: answer(BlobFetched(request=request, problem=_reason(error)), ()),
                )
            case StoreRunFile(request=request):
                data = frames[0] if frames else b""
                self._thread.do(
                    lambda: self._write(message, data),
                    lambda _: answer(RunFileStored(request=request), ()),
                    lambda error: answer(RunFileStored(request=request, problem=_reason(error)), ()),
                )

    def close(self) -> None:
        """Finish pending requests and stop the thread."""
        self._thread.close()

    # ------------------------------------------------------------ in the thread

    def _read(self, message: FetchBlob | FetchRunFile) -> bytes:
        descriptor = self._open(message)
        try:
            return os.pread(descriptor, min(message.size, CHUNK_BYTES), message.offset)
        finally:
            os.close(descriptor)

    def _open(self, message: FetchBlob | FetchRunFile) -> int:
        if isinstance(message, FetchRunFile):
            if not is_valid_id(message.run_id):
                raise BadName("that is not a run's ID")
            return open_below(self._runs / message.run_id, message.name)
        path = blob_path(self._stores, message.store, message.digest)
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError("a part of them is no longer in the pool's store. Run the cell again") from None

    def _write(self, message: StoreRunFile, data: bytes) -> None:
        directory = self._runs / message.run_id
        if not is_valid_id(message.run_id) or not directory.is_dir():
            raise FileNotFoundError("the pool no longer has a directory of this run")
        if message.offset < 0:
            raise BadName("a part of a file can't begin before the file's start")
        if message.action is not Store.PART:
            _stage(directory, message, data)
            return
        if message.size is None:
            begin = _begin_of(directory, message)
            _put(directory, message.name, data, begin + message.offset)
            return
        *folders, last = parts_of(message.name)
        temporary = f".{last}.{message.source}.part"
        path = "/".join([*folders, temporary])
        if message.offset < message.size or not message.size:
            _put(directory, path, data, message.offset)
        if message.offset >= message.size:
            _finish(directory, message, path, temporary)


def _stage(directory: Path, message: StoreRunFile, data: bytes) -> None:
    """Stage something that a node has sent, or move everything that is staged into place."""
    if _SOURCE.fullmatch(message.source) is None:
        raise BadName("that is not the id of a node's copy of a run's files")
    staged = f"{STAGED}{message.source}"
    path = f"{staged}/{message.name}"
    match message.action:
        case Store.STAGED:
            _stage_file(directory, path, message, data)
        case Store.LINK:
            if not link_stays_within(message.name, message.target):
                # below the staged folder's name it could lead one folder further up
                raise BadName("the link leads out of the run's directory")
            make_link_below(directory, path, message.target)
        case Store.FOLDER:
            make_folder_below(directory, path)
        case Store.DROP:
            remove_below(directory, path)
        case Store.PUBLISH | Store.PART:
            publish_staged(directory, staged)


def _stage_file(directory: Path, path: str, message: StoreRunFile, data: bytes) -> None:
    """Write a part of a staged file. The last part is empty, and the file must be whole then."""
    size = message.size or 0
    if message.offset < size or not size:
        _put(directory, path, data, message.offset)
    if message.offset < size:
        return
    descriptor = open_below(directory, path)
    try:
        whole = os.fstat(descriptor).st_size == size
        os.fchmod(descriptor, 0o700 if message.executable else 0o600)
    finally:
        os.close(descriptor)
    if not whole:
        raise OSError("its size is not the announced size")


def _finish(directory: Path, message: StoreRunFile, path: str, temporary: str) -> None:
    try:
        descriptor = open_below(directory, path)
    except FileNotFoundError:
        # the request was repeated after a broken link; the file was completed before
        return
    try:
        whole = os.fstat(descriptor).st_size == message.size
        os.fchmod(descriptor, 0o700 if message.executable else 0o600)
    finally:
        os.close(descriptor)
    if not whole:
        remove_below(directory, path)
        raise OSError("its size is not the announced size")
    replace_below(directory, temporary, message.name)


def _begin_of(directory: Path, message: StoreRunFile) -> int:
    """The offset at which a node's own log begins in the pool's."""
    begins = read_json(directory / _SOURCES, _Begins) or _Begins()
    of_log = begins.at.setdefault(message.name, {})
    if message.source not in of_log:
        of_log[message.source] = 0
        with contextlib.suppress(FileNotFoundError):
            descriptor = open_below(directory, message.name)
            of_log[message.source] = os.fstat(descriptor).st_size
            os.close(descriptor)
        temporary = f"{_SOURCES}.part"
        remove_below(directory, temporary)
        _put(directory, temporary, msgspec.json.encode(begins), 0)
        replace_below(directory, temporary, _SOURCES)
    return of_log[message.source]


def _put(directory: Path, name: str, data: bytes, offset: int) -> None:
    descriptor = open_below(directory, name, os.O_WRONLY | os.O_CREAT, make=True)
    try:
        write_at(descriptor, data, offset)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

"""Blobs (named by their BLAKE3 digests) and files of run directories, carried over the links.

client -> pool     blobs that the pool lacks; reads of runs' files          with a raw frame
agent  -> pool     reads of blobs; files for run directories at the pool    with a raw frame

Data is split into chunks, each the only raw frame of its message. A sender keeps at most `WINDOW` chunks in flight, and
resumes at the receiver's offset.
"""

from __future__ import annotations

import enum
import re

from sgpu_magic.wire.base import Numbered, Record
from sgpu_magic.wire.streams import OpenStream, StreamClosed, StreamData, StreamEnded, StreamOpened, StreamTaken

CHUNK_BYTES = 1 << 18
"""Size of a chunk on a link with other messages: on a slow line, a heartbeat waits behind only a few."""
BULK_CHUNK_BYTES = 1 << 20
"""Size of a chunk on a connection of its own, and the maximum on any."""

WINDOW = 32
"""Maximum number of chunks in flight in one direction; fewer if their answers take longer."""
PIECE_BYTES = 64 << 20
"""Larger files are split into blobs of this size, so that little is hashed again after a broken link."""
DIGEST_BYTES = 32

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NODE = re.compile(r"node-\d+")
_STORE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
PAYLOAD = "payload.bin"
PAYLOAD_PARTS = "payload"
"""In place of `payload.bin` where the payload came in blobs: a file for each, named by its offset in the payload."""
KEY = "key"
EVENTS = "events.msgpack"
TRACKING = "tracking.json"
REQUIREMENTS = "requirements.txt"
WORK = "work"
CHECKPOINTS = "checkpoints"
MOST_LINKS = 1000
STREAM_CHUNK_BYTES = 1 << 16
"""Maximum number of bytes in one message."""
WINDOW_BYTES = 1 << 20
"""Maximum number of bytes in flight in one direction of one stream."""


def is_digest(text: str) -> bool:
    """Whether `text` has the form of a blob's digest: 64 hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def is_store_name(text: str) -> bool:
    """Whether `text` is valid as the name of a user's store: a plain file name, not hidden and without separators."""
    return _STORE.fullmatch(text) is not None


# ---------------------------------------------------------------- names in a run's directory


def work_folders(node: int) -> tuple[str, ...]:
    """Return where a node's ranks may have their working directory in the run directory at the pool, likeliest first.

    Each node on another machine has its own; nodes that can read the pool's files share one.

    Args:
        node: Index of the node in the run, from 0.
    """
    return (f"node-{node}/{WORK}", WORK) if node else (WORK,)


def is_written_by_ranks(name: str) -> bool:
    """Whether a name in a run's directory is that of a file in its ranks' working directories or checkpoint folders."""
    folder, _, rest = name.partition("/")
    if _NODE.fullmatch(folder):
        folder, _, rest = rest.partition("/")
    return folder in (WORK, CHECKPOINTS) and rest != ""


# ---------------------------------------------------------------- client -> pool


class AskBlobs(Numbered, frozen=True, tag="ask-blobs", kw_only=True):
    """Ask how many bytes of these blobs the pool has for this user, and keep them for minutes. Answered by `BlobsHeld`.

    Args:
        blobs: (digest, size) of each.
    """

    blobs: tuple[tuple[str, int], ...]


class PutBlob(Numbered, frozen=True, tag="put-blob", kw_only=True):
    """Upload the next chunk of a blob. Answered by `BlobTaken`.

    Args:
        digest: Digest of the whole blob.
        size: Size of the whole blob in bytes.
        offset: Where the chunk begins: the number of bytes that the pool already has. Other chunks are ignored.
    """

    digest: str
    size: int
    offset: int


class ReadRunFile(Numbered, frozen=True, tag="read-run-file", kw_only=True):
    """Read a part of a file in a run's directory. Answered by `RunFileRead`.

    Args:
        run: The run's id.
        name: Path below the run's directory, with `/` as separator. Links are not followed, and paths that lead outside
            are rejected. `result-N.bin` is also found while it is only in memory.
        offset: Where the part begins.
        size: Maximum size of the part; the answer has at most `BULK_CHUNK_BYTES`.
    """

    run: str
    name: str
    offset: int = 0
    size: int = CHUNK_BYTES


class ListRunFiles(Numbered, frozen=True, tag="list-run-files", kw_only=True):
    """List the files of a run's directory. Answered by `RunFiles`.

    Args:
        run: The run's id.
        under: Only the files below this folder, or only this file; "" for all.
    """

    run: str
    under: str = ""


FileRequest = AskBlobs | PutBlob | ReadRunFile | ListRunFiles

# ---------------------------------------------------------------- pool -> client


class BlobsHeld(Numbered, frozen=True, tag="blobs-held", kw_only=True):
    """The number of bytes that the pool has of each requested blob, in that order; the full size if it is complete."""

    bytes: tuple[int, ...]


class BlobTaken(Numbered, frozen=True, tag="blob-taken", kw_only=True):
    """The answer to `PutBlob`, whether or not the chunk was taken.

    Args:
        up_to: Number of bytes of the blob that the pool now has.
    """

    up_to: int


class RunFileRead(Numbered, frozen=True, tag="run-file-read", kw_only=True):
    """The requested part of the file is the raw frame; empty at the end of the file.

    Args:
        size: Current size of the file in bytes.
        changed_at: When it was last written, seconds since the epoch; 0 for a file that is only in memory.
    """

    size: int
    changed_at: float = 0.0


class RunFile(Record, frozen=True, kw_only=True):
    """One file of a run.

    Args:
        name: Path below the run's directory, with `/` as separator.
        size: Size in bytes.
        changed_at: When it was last written, seconds since the epoch.
        executable: Whether its owner may execute it.
        target: For a symbolic link that stays within the run's directory: what it points to, relative to its folder. ""
            for a file. Clients get only the names of links, in `RunFiles`.
        folder: It is an empty folder. Clients get none.
    """

    name: str
    size: int
    changed_at: float
    executable: bool = False
    target: str = ""
    folder: bool = False


class RunFiles(Numbered, frozen=True, tag="run-files", kw_only=True):
    """Files of a run, sorted by name.

    Args:
        more: The list is truncated.
        links: The symbolic links there, at most `MOST_LINKS`. They are not followed.
    """

    files: tuple[RunFile, ...]
    more: bool = False
    links: tuple[str, ...] = ()


FileReply = BlobsHeld | BlobTaken | RunFileRead | RunFiles

# ---------------------------------------------------------------- agent -> pool


class FetchBlob(Numbered, frozen=True, tag="fetch-blob", kw_only=True):
    """Read a part of a blob. Answered by `BlobFetched`.

    Args:
        store: The user's store, as in `Launch.store`.
        offset: Where the part begins.
        size: Size of the part, at most `CHUNK_BYTES`.
    """

    store: str
    digest: str
    offset: int
    size: int


class FetchRunFile(Numbered, frozen=True, tag="fetch-run-file", kw_only=True):
    """Read a part of a file in the run's directory at the pool. Answered by `BlobFetched`.

    Args:
        name: As in `ReadRunFile`.
        offset: Where the part begins.
        size: Its size, at most `CHUNK_BYTES`.
    """

    run_id: str
    name: str
    offset: int
    size: int


class Store(enum.StrEnum):
    """What `StoreRunFile` does.

    The files of a node's part of a run are staged and then moved into place, so that a node that is lost in between
    leaves no partial checkpoint for the next attempt.
    """

    PART = "part"
    """Write a part of a file."""
    STAGED = "staged"
    """Write a part of a staged file."""
    LINK = "link"
    """Stage a symbolic link to `target`."""
    FOLDER = "folder"
    """Stage an empty folder."""
    DROP = "drop"
    """Remove a staged file that did not arrive whole."""
    PUBLISH = "publish"
    """Move everything that is staged into place."""


class StoreRunFile(Numbered, frozen=True, tag="store-run-file", kw_only=True):
    """Write a part of a run's file into the run's directory at the pool. Answered by `RunFileStored`.

    Args:
        name: As in `ReadRunFile`; "" for `PUBLISH`.
        offset: Where the part belongs.
        source: Identifies the node's own file: parts of a log that another node wrote earlier stay before its own.
        size: Size of the whole file, which appears once it is complete; the sender ends it with an empty part. None for
            a growing file such as a log, which appears at once.
        executable: Whether its owner may execute it.
        action: What to do; all but `PART` concern what is staged for this `source`.
        target: As in `RunFile`, for a `LINK`.
    """

    run_id: str
    name: str
    offset: int
    source: str = ""
    size: int | None = None
    executable: bool = False
    action: Store = Store.PART
    target: str = ""


NodeFileRequest = FetchBlob | FetchRunFile | StoreRunFile

# ---------------------------------------------------------------- pool -> agent


class BlobFetched(Numbered, frozen=True, tag="blob-fetched", kw_only=True):
    """The requested part is the raw frame. `problem` says why there is none."""

    problem: str | None = None


class RunFileStored(Numbered, frozen=True, tag="run-file-stored", kw_only=True):
    """The part was written. `problem` says why it was not."""

    problem: str | None = None


NodeFileReply = BlobFetched | RunFileStored

# ---------------------------------------------------------------- TCP connections

# The same messages are used between client and pool and between pool and agent:
#
# client -> pool -> agent   OpenStream
# client <- pool <- agent   StreamOpened
# both ways                 StreamData, StreamTaken, StreamEnded, StreamClosed
#
# Each side has at most `WINDOW_BYTES` in flight that the other has not taken, so a slow reader slows its writer and
# fills no memory in between. The client numbers its streams; towards an agent, the pool service does.


StreamMessage = StreamData | StreamTaken | StreamEnded | StreamClosed
"""Messages of an open stream, in both directions."""

ToStream = OpenStream | StreamMessage
FromStream = StreamOpened | StreamMessage
"""Messages to the node of a stream's rank, and messages from it."""

"""Bytes that travel over the links: blobs, kept under their BLAKE2b-256, files of runs' directories, TCP connections.

client -> pool     blobs that the pool lacks; parts of runs' files      a frame beside
agent  -> pool     parts of blobs; files that the pool shall have       a frame beside

What travels is cut into chunks of at most `CHUNK_BYTES`, each the message's one raw frame. Whoever sends many has at
most `WINDOW` of them under way, and begins again where the other side has got to.
"""

from __future__ import annotations

import re

from sgpu_magic.wire.record import Record

CHUNK_BYTES = 1 << 18
"""Most bytes of one chunk: on a slow line a heartbeat waits behind no more than a few of them."""

WINDOW = 32
"""Most chunks under way in one direction; fewer where their answers take longer."""

PIECE_BYTES = 64 << 20
"""Larger things are cut into blobs of this size, so that little is hashed again after a broken link."""

DIGEST_BYTES = 32

_DIGEST = re.compile(r"[0-9a-f]{64}")
_STORE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


def is_digest(text: str) -> bool:
    """Whether it can be the digest of a blob: 64 hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def is_store_name(text: str) -> bool:
    """Whether it can be the name of a user's store: a file's name that hides nothing and leads nowhere."""
    return _STORE.fullmatch(text) is not None


# ---------------------------------------------------------------- names in a run's directory

PAYLOAD = "payload.bin"
KEY = "key"
EVENTS = "events.msgpack"
TRACKING = "tracking.json"
REQUIREMENTS = "requirements.txt"
WORK = "work"


def work_folders(node: int) -> tuple[str, ...]:
    """Where the working directory of a node's ranks is in a run's directory at its pool, the likelier first.

    Nodes of other machines have one each; those that see the pool's files have the same.

    Args:
        node: The node's number in the run, from 0.
    """
    return (f"node-{node}/{WORK}", WORK) if node else (WORK,)


# ---------------------------------------------------------------- client -> pool


class AskBlobs(Record, frozen=True, tag="ask-blobs", kw_only=True):
    """How much of these blobs does the pool have of this user's? Answered by `BlobsHeld`.

    What is asked for is not removed for the next minutes.

    Args:
        blobs: (digest, size) of each.
    """

    request: int
    blobs: tuple[tuple[str, int], ...]


class PutBlob(Record, frozen=True, tag="put-blob", kw_only=True):
    """The next chunk of a blob. Answered by `BlobTaken`.

    Args:
        digest: The whole blob's.
        size: The whole blob's, in bytes.
        offset: Where the chunk begins: where the pool has got to. Another one is not taken.
    """

    request: int
    digest: str
    size: int
    offset: int


class ReadRunFile(Record, frozen=True, tag="read-run-file", kw_only=True):
    """A part of a file in a run's directory. Answered by `RunFileRead`.

    Args:
        run: The run's id.
        name: Below its directory, with `/` between; no link is followed and nothing leads out of it. `result-N.bin`
            is also found while it is only in memory.
        offset: Where the part begins.
        size: Its size at most; the answer has no more than `CHUNK_BYTES`.
    """

    request: int
    run: str
    name: str
    offset: int = 0
    size: int = CHUNK_BYTES


class ListRunFiles(Record, frozen=True, tag="list-run-files", kw_only=True):
    """The files of a run's directory. Answered by `RunFiles`.

    Args:
        run: The run's id.
        under: Only those below this folder, or this one file; "" is all.
    """

    request: int
    run: str
    under: str = ""


FileRequest = AskBlobs | PutBlob | ReadRunFile | ListRunFiles

# ---------------------------------------------------------------- pool -> client


class BlobsHeld(Record, frozen=True, tag="blobs-held", kw_only=True):
    """How many bytes the pool has of each blob that was asked for, in that order; all of them when it is whole."""

    request: int
    bytes: tuple[int, ...]


class BlobTaken(Record, frozen=True, tag="blob-taken", kw_only=True):
    """A chunk was taken, or why not.

    Args:
        up_to: So many bytes of the blob are there now.
    """

    request: int
    up_to: int


class RunFileRead(Record, frozen=True, tag="run-file-read", kw_only=True):
    """The part of the file is the raw frame; empty at its end.

    Args:
        size: The file's now, in bytes.
        changed_at: When it was last written, seconds since the epoch; 0 for what is only in memory.
    """

    request: int
    size: int
    changed_at: float = 0.0


class RunFile(Record, frozen=True, kw_only=True):
    """One file of a run.

    Args:
        name: Below its directory, with `/` between.
        size: In bytes.
        changed_at: When it was last written, seconds since the epoch.
        executable: Its owner may execute it.
    """

    name: str
    size: int
    changed_at: float
    executable: bool = False


class RunFiles(Record, frozen=True, tag="run-files", kw_only=True):
    """Files of a run, by name.

    Args:
        more: There are more of them than are listed.
    """

    request: int
    files: tuple[RunFile, ...]
    more: bool = False


FileReply = BlobsHeld | BlobTaken | RunFileRead | RunFiles

# ---------------------------------------------------------------- agent -> pool


class FetchBlob(Record, frozen=True, tag="fetch-blob", kw_only=True):
    """A part of a blob. Answered by `BlobFetched`.

    Args:
        store: Whose, as `Launch.store` has it.
        offset: Where the part begins.
        size: Its size, at most `CHUNK_BYTES`.
    """

    request: int
    store: str
    digest: str
    offset: int
    size: int


class StoreRunFile(Record, frozen=True, tag="store-run-file", kw_only=True):
    """A part of a file of a run, for the run's directory at the pool. Answered by `RunFileStored`.

    Args:
        name: As in `ReadRunFile`.
        offset: Where the part belongs.
        source: Stands for the node's own file: what another node has written to a log before stays before it.
        size: The whole file's. It appears when all is there, which the sender says by an empty part at its end. None
            for one that grows, such as a log: it is there at once.
        executable: Its owner may execute it.
    """

    request: int
    run_id: str
    name: str
    offset: int
    source: str = ""
    size: int | None = None
    executable: bool = False


NodeFileRequest = FetchBlob | StoreRunFile

# ---------------------------------------------------------------- pool -> agent


class BlobFetched(Record, frozen=True, tag="blob-fetched", kw_only=True):
    """The part is the raw frame. `problem` says why there is none."""

    request: int
    problem: str = ""


class RunFileStored(Record, frozen=True, tag="run-file-stored", kw_only=True):
    """The part is written. `problem` says why not."""

    request: int
    problem: str = ""


NodeFileReply = BlobFetched | RunFileStored

# ---------------------------------------------------------------- TCP connections

# The same messages between client and pool, and between pool and agent:
#
# client -> pool -> agent   OpenStream
# client <- pool <- agent   StreamOpened
# both ways                 StreamData, StreamTaken, StreamEnded, StreamClosed
#
# Each side has at most `WINDOW_BYTES` under way that the other has not taken, so a slow reader slows its writer and
# fills no memory between them. A stream's number is its client's; towards an agent it is the pool's.

STREAM_CHUNK_BYTES = 1 << 16
"""Most bytes of one message."""

WINDOW_BYTES = 1 << 20
"""Most bytes under way in one direction of one stream."""


class OpenStream(Record, frozen=True, tag="open-stream", kw_only=True):
    """Connect to a port that a process of the run listens on. Answered by `StreamOpened` or `StreamClosed`.

    Args:
        stream: Its number.
        run: A unique prefix of the run's id; the id itself towards an agent.
        rank: On whose node.
        port: The TCP port there.
        watches: Connect to nothing: only say whether the port is there, and tell by `StreamClosed` when the run ends.
    """

    stream: int
    run: str
    port: int
    rank: int = 0
    watches: bool = False


class StreamOpened(Record, frozen=True, tag="stream-opened", kw_only=True):
    """It is connected, or watched.

    Args:
        run_id: The run's.
        problem: Of one that watches: why nobody can connect yet, "" when one can.
    """

    stream: int
    run_id: str
    problem: str = ""


class StreamData(Record, frozen=True, tag="stream-data", kw_only=True):
    """The next bytes are the raw frame. `offset`: where they belong; a gap is an end."""

    stream: int
    offset: int


class StreamTaken(Record, frozen=True, tag="stream-taken", kw_only=True):
    """The receiver's program has taken the bytes up to `offset`."""

    stream: int
    offset: int


class StreamEnded(Record, frozen=True, tag="stream-ended", kw_only=True):
    """No more bytes in this direction: there were `offset`. The other direction goes on."""

    stream: int
    offset: int


class StreamClosed(Record, frozen=True, tag="stream-closed", kw_only=True):
    """It is over in both directions. `problem` says why, "" when its programs have ended it."""

    stream: int
    problem: str = ""


StreamMessage = StreamData | StreamTaken | StreamEnded | StreamClosed
"""What both sides say of a stream that is open."""

ToStream = OpenStream | StreamMessage
FromStream = StreamOpened | StreamMessage
"""What goes to the node of a stream's rank, and what comes from there."""

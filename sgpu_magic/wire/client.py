"""Messages between clients and the pool service, and a table of all links.

client <-> pool     ClientMessage / PoolMessage     here         ZeroMQ, with raw frames
client <-> pool     ToBulk / FromBulk               here         TLS, with raw frames: file data
client <-> agent    ToLine / FromLine               session_line Unix socket: cells of a session
pool <-> agent      ToAgent / FromAgent             node         socketpair, with descriptors
agent <-> zygote    ToZygote / FromZygote           rank         socketpair, with descriptors
agent <-> rank      ToRank / FromRank               rank         socketpair, with descriptors
pool <-> tracker    ToTracker / FromTracker         tracking     socketpair

The handshake (`Hello`, `Welcome`) and the pool's status are in pool_status.
"""

from __future__ import annotations

from sgpu_magic.wire.attachments import CodeBundle, Environment, Payload, Upload
from sgpu_magic.wire.base import ErrorKind, Numbered, OfRun, Record, RunState
from sgpu_magic.wire.events import Event
from sgpu_magic.wire.files import FileReply, FileRequest, FromStream, ToStream
from sgpu_magic.wire.option_text import Text
from sgpu_magic.wire.pool_status import (
    AskBulk,
    AskStatus,
    BulkOffered,
    BulkOpened,
    Hello,
    OpenBulk,
    PoolStatus,
    Welcome,
)
from sgpu_magic.wire.rank_events import CommMessage, RankStack
from sgpu_magic.wire.run import CellSource, Interpreter, RankAnswer, RankContext, RankQuestion, RunSpec
from sgpu_magic.wire.tracking import Tracking

# ---------------------------------------------------------------- client -> pool


class Warm(Record, frozen=True, tag="warm", kw_only=True):
    """Start an interpreter's zygote in the background, and a standby group of `ranks` ranks (0 for none)."""

    interpreter: Interpreter
    ranks: int = 0


class Submit(Numbered, frozen=True, tag="submit", kw_only=True):
    """Submit a run. Answered by `Accepted` or `Refused`. An inline payload is the first raw frame.

    Args:
        environment: The ranks' packages. None for a session's cells, whose ranks already have theirs, and if the
            packages are unknown: the kernel's interpreter is used then.
        code: Bundles of local code, for nodes that cannot read the kernel's files.
        tracking: Where the run is tracked; None if it is not.
        uploads: Folders and files to upload with the run.
    """

    spec: RunSpec
    interpreter: Interpreter
    context: RankContext
    payload: Payload
    environment: Environment | None = None
    code: tuple[CodeBundle, ...] = ()
    tracking: Tracking | None = None
    uploads: tuple[Upload, ...] = ()


class KeepEnvironment(Record, frozen=True, tag="keep-environment", kw_only=True):
    """Store these files of an environment and copy them into the directory of each run with its digest.

    Args:
        digest: Digest of the environment.
        files: (name, text) of each file: `requirements.txt`, `pylock.toml`. Replaces an earlier file of that name.
        runs: Runs that were submitted before the digest was known.
    """

    digest: str
    files: tuple[tuple[str, str], ...]
    runs: tuple[str, ...] = ()


class Describe(OfRun, frozen=True, tag="describe", kw_only=True):
    """Add tags that were found after the run was submitted, such as the state of its git repository."""

    tags: tuple[tuple[str, str], ...]


class TrackRun(OfRun, frozen=True, tag="track-run", kw_only=True):
    """Track this run in MLflow even if `track = "auto"` would not, because its MLflow run id was requested."""

    tracking: Tracking


class Cancel(Numbered, frozen=True, tag="cancel", kw_only=True):
    """Stop a run. Answered by `Accepted`. `run` may be a unique prefix of its id.

    Args:
        kill: KILL the ranks that an earlier `Cancel` did not stop. Ranks of a session are dead afterwards.
    """

    run: str
    reason: str = ""
    kill: bool = False


class SendComms(OfRun, frozen=True, tag="tell-comms", kw_only=True):
    """Pass comm messages from the front end to a rank's widgets. Dropped if the rank is gone.

    Args:
        run_id: The run, or the session that the rank belongs to.
    """

    rank: int
    messages: tuple[CommMessage, ...]


class ReclaimPayload(OfRun, frozen=True, tag="reclaim", kw_only=True):
    """Stop copying the payload's memory file: the client wants to overwrite it. Answered by `PayloadReleased`."""


class ResultsReceived(OfRun, frozen=True, tag="results-received", kw_only=True):
    """The client has mapped the results: the agent may close its descriptors."""


class RestartRanks(Numbered, frozen=True, tag="restart-ranks", kw_only=True):
    """Replace ranks of a session with new processes. Answered by `Accepted` when they have joined, or `Refused`.

    Args:
        session: The session's run id.
        ranks: The ranks to replace; empty for all.
    """

    session: str
    ranks: tuple[int, ...] = ()


class AskRank(Numbered, frozen=True, tag="ask-rank", kw_only=True):
    """Ask an idle rank of a session about its namespace. Answered by `RankAnswered`."""

    session: str
    question: RankQuestion


class OpenLine(Numbered, frozen=True, tag="open-line", kw_only=True):
    """Ask for a direct connection to the agent of a session that this client owns. Answered by `LineOpened`.

    Args:
        session: The session's run id.
    """

    session: str


class Attach(Numbered, frozen=True, tag="attach", kw_only=True):
    """Follow a run from its start, or from the last event received. Answered by `Attached`, then the run's events.

    Args:
        run: Unique prefix of the run's id; "" for the newest active detached run, else the newest run of all.
        after: Sequence number of the last event that the client has; 0 requests all.
        owns: The client submitted the run: when the client exits, the run is cancelled unless it is detached.
    """

    run: str = ""
    after: int = 0
    owns: bool = False


class Unfollow(OfRun, frozen=True, tag="unfollow", kw_only=True):
    """Stop sending this client the run's events. The run continues."""


class Detach(Numbered, frozen=True, tag="detach", kw_only=True):
    """Keep a run going after its notebook exits. Answered by `Accepted`.

    Args:
        run: Unique prefix of the run's id; "" for all runs that this client owns.
    """

    run: str = ""


class AskStacks(Numbered, frozen=True, tag="ask-stacks", kw_only=True):
    """Ask where each rank of an active run is. Answered by `Stacks`.

    Args:
        run: Unique prefix of the run's id; "" for the newest run with ranks.
    """

    run: str = ""


class Ping(Record, frozen=True, tag="ping", kw_only=True):
    """Keepalive, sent every few seconds over links between machines. Answered by `Pong`."""


class Goodbye(Record, frozen=True, tag="goodbye", kw_only=True):
    """The client is unloading. The pool service cancels the client's runs that are not detached."""


class StopPool(Numbered, frozen=True, tag="stop-pool", kw_only=True):
    """Stop the pool service, after the ranks of ended runs. Refused while runs are active, unless `force` is set."""

    force: bool = False


SessionRequest = RestartRanks | AskRank | OpenLine
FollowRequest = Attach | Unfollow | Detach | AskStacks
ClientNews = SendComms | ReclaimPayload | ResultsReceived
RunRequest = Submit | KeepEnvironment | Describe | TrackRun | Cancel | SessionRequest | FollowRequest | ClientNews
ClientMessage = Hello | Warm | RunRequest | AskStatus | FileRequest | Ping | AskBulk | Goodbye | ToStream | StopPool

# ---------------------------------------------------------------- pool -> client


class Accepted(Numbered, frozen=True, tag="accepted", kw_only=True):
    """A request was accepted; the run's events follow. `text` is human-readable."""

    run_id: str = ""
    text: str = ""


class LineOpened(Numbered, frozen=True, tag="line-opened", kw_only=True):
    """The session's agent admits one connection that presents the token.

    Args:
        path: The agent's socket.
        token: 32 random bytes.
    """

    path: str
    token: bytes


class Attached(Numbered, frozen=True, tag="attached", kw_only=True):
    """The run that the client follows from now on.

    Args:
        spec: What was submitted.
        state: The current state.
        key: The run's HMAC key, which verifies its results; empty if it is no longer known.
    """

    spec: RunSpec
    state: RunState
    key: bytes = b""


class Stacks(Numbered, frozen=True, tag="stacks", kw_only=True):
    """Where the ranks are. `cell` is the run's cell, which the line numbers of the stacks refer to."""

    run_id: str
    stacks: tuple[RankStack, ...]
    cell: CellSource = CellSource(body="")


class RankAnswered(Numbered, frozen=True, tag="rank-answered", kw_only=True):
    """The rank's answer to `AskRank`."""

    answer: RankAnswer


class Refused(Numbered, frozen=True, tag="refused", kw_only=True):
    """A request was refused."""

    error: ErrorKind
    message: Text


class Pong(Record, frozen=True, tag="pong", kw_only=True):
    """The answer to `Ping`.

    Args:
        behind: The client reads too slowly and messages to it were dropped: it has to request them again.
    """

    behind: bool = False


class Notice(Record, frozen=True, tag="notice", kw_only=True):
    """A sentence for all connected users, such as that idle processes are about to be released. "" withdraws it."""

    text: str


# messages of a client's second connection
ToBulk = OpenBulk | FileRequest
FromBulk = BulkOpened | FileReply | Refused
Reply = Accepted | Attached | Stacks | RankAnswered | LineOpened | Refused
PoolMessage = Welcome | Reply | Pong | BulkOffered | Notice | PoolStatus | FileReply | FromStream | Event

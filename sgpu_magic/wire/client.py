"""Commands and replies between clients and the pool service. All links and where their messages are:

client <-> pool     ClientMessage / PoolMessage     here         ZeroMQ, raw frames beside
pool <-> agent      ToAgent / FromAgent             node         socketpair, descriptors beside
agent <-> zygote    ToZygote / FromZygote           zygote       socketpair, descriptors beside
agent <-> rank      ToRank / FromRank               rank         socketpair, descriptors beside
pool <-> tracker    ToTracker / FromTracker         tracking     socketpair

How the two greet each other and what the pool says of itself is in pool_status.
"""

from __future__ import annotations

from sgpu_magic.wire.attachments import CodeBundle, Environment, Payload, Upload
from sgpu_magic.wire.events import Event
from sgpu_magic.wire.failures import RankStack
from sgpu_magic.wire.files import FileReply, FileRequest, FromStream, ToStream
from sgpu_magic.wire.pool_status import AskStatus, Hello, PoolStatus, Welcome
from sgpu_magic.wire.rank import RankAnswer, RankQuestion
from sgpu_magic.wire.rank_events import CommMessage
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.run import CellSource, Interpreter, RankContext, RunSpec
from sgpu_magic.wire.states import RunState
from sgpu_magic.wire.tracking import Tracking

# ---------------------------------------------------------------- client -> pool


class Warm(Record, frozen=True, tag="warm", kw_only=True):
    """Start this interpreter's zygote in the background, and a standby group of `ranks` (0 for none)."""

    interpreter: Interpreter
    ranks: int = 0


class Submit(Record, frozen=True, tag="submit", kw_only=True):
    """Run this. An inline payload is the first raw frame.

    Args:
        environment: The ranks' packages; None in a session's ranks, which have theirs, and where nothing is known of
            them: then the kernel's interpreter is used.
        code: Bundles of local code, for a node that does not see the kernel's files.
        tracking: Where it is tracked; None where it is not.
        uploads: Folders and files that go along.
    """

    request: int
    spec: RunSpec
    interpreter: Interpreter
    context: RankContext
    payload: Payload
    environment: Environment | None = None
    code: tuple[CodeBundle, ...] = ()
    tracking: Tracking | None = None
    uploads: tuple[Upload, ...] = ()


class KeepEnvironment(Record, frozen=True, tag="keep-environment", kw_only=True):
    """Keep these files of an environment, and put them into the directory of each run that has its digest.

    Args:
        digest: The environment's.
        files: (name, text): `requirements.txt`, `pylock.toml`. What came before under such a name is replaced.
        runs: Runs that were submitted before the digest was known.
    """

    digest: str
    files: tuple[tuple[str, str], ...]
    runs: tuple[str, ...] = ()


class Describe(Record, frozen=True, tag="describe", kw_only=True):
    """What was found out about a run after it was submitted, such as the state of its git repository."""

    run_id: str
    tags: tuple[tuple[str, str], ...]


class TrackRun(Record, frozen=True, tag="track-run", kw_only=True):
    """Make this run an MLflow run, although nothing else would: its id there was asked for."""

    run_id: str
    tracking: Tracking


class Cancel(Record, frozen=True, tag="cancel", kw_only=True):
    """Stop a run by the one stop path. `run` may be a unique prefix of its id.

    Args:
        kill: KILL the ranks that were asked before and have not stopped. Those of a session are dead then.
    """

    request: int
    run: str
    reason: str = ""
    kill: bool = False


class TellComms(Record, frozen=True, tag="tell-comms", kw_only=True):
    """Pass on what the front end says to widgets of a rank; lost when the rank is gone.

    Args:
        run_id: The run, or the session whose rank it is.
    """

    run_id: str
    rank: int
    messages: tuple[CommMessage, ...]


class ReclaimPayload(Record, frozen=True, tag="reclaim", kw_only=True):
    """The client wants to write its memory file again: stop copying it; answered by `PayloadReleased`."""

    run_id: str


class ResultsReceived(Record, frozen=True, tag="results-received", kw_only=True):
    """The client has mapped the results: the agent may close its own descriptors."""

    run_id: str


class RestartRanks(Record, frozen=True, tag="restart-ranks", kw_only=True):
    """Replace ranks of a session by new processes; answered by `Accepted` when they have joined, or `Refused`.

    Args:
        session: The session's run id.
        ranks: Which; empty means all.
    """

    request: int
    session: str
    ranks: tuple[int, ...] = ()


class AskRank(Record, frozen=True, tag="ask-rank", kw_only=True):
    """Ask an idle rank of a session about its namespace; answered by `RankAnswered`."""

    request: int
    session: str
    question: RankQuestion


class Attach(Record, frozen=True, tag="attach", kw_only=True):
    """Follow a run from its beginning, or from where the client lost it. Answered by `Attached`, then its events.

    Args:
        run: A unique prefix of its id; "" is the newest run that goes on without a notebook, else the newest of all.
        after: Number of the last event that the client has; 0 asks for all.
        owns: The client submitted the run: its death ends the run unless that is detached.
    """

    request: int
    run: str = ""
    after: int = 0
    owns: bool = False


class Unfollow(Record, frozen=True, tag="unfollow", kw_only=True):
    """Send this client no more events of the run; it goes on."""

    run_id: str


class Detach(Record, frozen=True, tag="detach", kw_only=True):
    """Let a run go on whatever becomes of its notebook. `run` may be a unique prefix of its id.

    Args:
        run: As in `Cancel`; "" is every run that this client owns.
    """

    request: int
    run: str = ""


class AskStacks(Record, frozen=True, tag="ask-stacks", kw_only=True):
    """Where every rank of a run is now. `run` as in `Attach`, but only of runs that go on."""

    request: int
    run: str = ""


class Ping(Record, frozen=True, tag="ping", kw_only=True):
    """The client is there. Sent over links between machines every few seconds; answered by `Pong`."""


class Goodbye(Record, frozen=True, tag="goodbye", kw_only=True):
    """The client unloads; its runs that it does not wait for are cancelled."""


class StopPool(Record, frozen=True, tag="stop-pool", kw_only=True):
    """End the service; refused while runs go on unless `force`."""

    request: int
    force: bool = False


SessionRequest = RestartRanks | AskRank
FollowRequest = Attach | Unfollow | Detach | AskStacks
ClientNews = TellComms | ReclaimPayload | ResultsReceived
RunRequest = Submit | KeepEnvironment | Describe | TrackRun | Cancel | SessionRequest | FollowRequest | ClientNews
ClientMessage = Hello | Warm | RunRequest | AskStatus | FileRequest | Ping | Goodbye | ToStream | StopPool

# ---------------------------------------------------------------- pool -> client


class Accepted(Record, frozen=True, tag="accepted", kw_only=True):
    """A request was taken; its events follow. `text` is for a person."""

    request: int
    run_id: str = ""
    text: str = ""


class Attached(Record, frozen=True, tag="attached", kw_only=True):
    """The run that is followed from now on.

    Args:
        spec: What was submitted.
        state: Its state now.
        key: The run's HMAC key, for its results; empty when it is not known any more.
    """

    request: int
    spec: RunSpec
    state: RunState
    key: bytes = b""


class Stacks(Record, frozen=True, tag="stacks", kw_only=True):
    """Where the ranks are. `cell` is the run's, for the lines that the stacks name."""

    request: int
    run_id: str
    stacks: tuple[RankStack, ...]
    cell: CellSource = CellSource(body="")


class RankAnswered(Record, frozen=True, tag="rank-answered", kw_only=True):
    """What the rank said."""

    request: int
    answer: RankAnswer


class Refused(Record, frozen=True, tag="refused", kw_only=True):
    """A request was not taken. `error` names the class in `errors`."""

    request: int
    error: str
    message: str


class Pong(Record, frozen=True, tag="pong", kw_only=True):
    """The answer to `Ping`.

    Args:
        behind: The client read too slowly, and something that was meant for it was dropped: it is to ask again.
    """

    behind: bool = False


class Notice(Record, frozen=True, tag="notice", kw_only=True):
    """A sentence for whoever is connected, such as that idle processes are about to be given back. "" takes it back."""

    text: str


Reply = Accepted | Attached | Stacks | RankAnswered | Refused
PoolMessage = Welcome | Reply | Pong | Notice | PoolStatus | FileReply | FromStream | Event

"""Orders to a rank and its reports. Descriptors travel beside them on the socketpair."""

from __future__ import annotations

from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.failures import Collective, Failure
from sgpu_magic.wire.rank_events import CommMessage
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.run import CellSource, OutputName, RankContext, RankResult
from sgpu_magic.wire.states import RunKind
from sgpu_magic.wire.tracking import MetricPoint, TrackedRun, Tracking

# ---------------------------------------------------------------- what an idle rank is asked


class RankQuestion(Record, frozen=True, kw_only=True):
    """What is asked of a rank while it is idle.

    Args:
        rank: The rank.
        what: `complete` (names at `cursor` in `code`), `inspect` (the object there) or `names` (what its cells have
            set).
        code: The code.
        cursor: Position in it, in characters.
        detail: 0, or 1 for the source too, as in Jupyter's `inspect_request`.
    """

    rank: int
    what: str
    code: str = ""
    cursor: int = 0
    detail: int = 0


class Match(Record, frozen=True):
    """One completion: the text, and what it is (`function`, `module`, "" when unknown)."""

    text: str
    type: str = ""


class RankAnswer(Record, frozen=True, kw_only=True):
    """What a rank answers.

    Args:
        problem: Why it does not, such as that it is busy; "" when it does.
        matches: For `complete`.
        start: Where in the code the matches begin, in characters.
        end: Where they end.
        bundle: For `inspect`: a MIME bundle, JSON; empty when there is no such object.
        names: For `names`: names in its namespace that it did not have when it was new.
    """

    problem: str = ""
    matches: tuple[Match, ...] = ()
    start: int = 0
    end: int = 0
    bundle: bytes = b""
    names: tuple[str, ...] = ()


# ---------------------------------------------------------------- agent -> rank


class Prepare(Record, frozen=True, tag="prepare", kw_only=True):
    """Stand where the kernel stands, take the device, join the process group; answered by `Joined`.

    For the ranks of a session, and for a standby group on a session's GPUs. What comes next is `Execute`.

    Args:
        context: As in `Execute`.
        device: As in `Execute`.
        rank_variables: As in `Execute`; rank 0 gets the descriptor of the bound socket behind `MASTER_PORT`.
        renewal: The store at hand is one of `Renew`: the other ranks of the session are in a process group already.
        stays: The rank belongs to a session: it executes cell after cell.
    """

    context: RankContext
    device: str
    rank_variables: dict[str, str]
    renewal: bool = False
    stays: bool = False


class Renew(Record, frozen=True, tag="renew", kw_only=True):
    """Connect the process groups anew over a new store, whose descriptor comes along; answered by `Renewed`.

    Args:
        replaced: Ranks that are new processes: groups that the user made with them can't be renewed.
        store_path: The store's file where memory files do not exist; "" when its descriptor comes along.
    """

    replaced: tuple[int, ...] = ()
    store_path: str = ""


class PrivateRay(Record, frozen=True, kw_only=True):
    """A run's own Ray cluster, as one node has a part in it.

    Args:
        directory: Sockets and logs of Ray's processes; made for the run, 0700, and short, as a socket's path ends at
            107 bytes. The agent removes it when the ranks are gone.
        disk_directory: For what may be large: objects that are spilled, and all objects where `/dev/shm` is small.
        address: Where the other nodes reach this one; the loopback address where there are none.
        gpus: GPUs that Ray may give away here.
        cpus: The same of CPUs.
        simulated: The GPUs are simulated: Ray counts them, and code computes on the CPU.
        object_store_bytes: Most memory of Ray's objects here.
        objects_on_disk: `/dev/shm` is too small for them.
        dashboard: The head has Ray's dashboard.
    """

    directory: str
    disk_directory: str
    address: str = "127.0.0.1"
    gpus: int = 0
    cpus: int = 1
    simulated: bool = False
    object_store_bytes: int = 0
    objects_on_disk: bool = False
    dashboard: bool = True


class Execute(Record, frozen=True, tag="execute", kw_only=True):
    """Run a cell in this rank. The payload's descriptor comes along unless it is inline (the first raw frame).

    Rank 0 of a run that is not in a session also gets the descriptor of the bound socket behind `MASTER_PORT`,
    unless it was prepared before.

    Args:
        run_dir: Where a result goes that memory has no room for.
        device: `cpu`, or `cuda` when the rank has a GPU of its own.
        rank_variables: torchrun's variables for this rank. `MASTER_PORT` is a bound loopback socket kept for user
            code that rendezvouses again; rank 0 gets its listening descriptor.
        tracking: The run is tracked: what its code does with MLflow reaches the run's own MLflow run. Its URI is the
            default store's where `Launch` has "".
        profile: Keep a trace of torch's profiler in `run_dir`.
        ray: The cell is the driver of a Ray cluster on the run's nodes, and runs in rank 0 alone; None where it runs
            in every rank.
    """

    run_id: str
    cell: CellSource
    context: RankContext
    layout: PackedLayout
    inline: bool
    outputs: tuple[OutputName, ...]
    run_dir: str
    device: str
    rank_variables: dict[str, str]
    kind: RunKind = RunKind.CELL
    in_session: bool = False
    reload: bool = False
    only: tuple[int, ...] = ()
    tracking: Tracking | None = None
    profile: bool = False
    ray: PrivateRay | None = None


class AnswerQuestion(Record, frozen=True, tag="answer-question", kw_only=True):
    """Answer this; sent to an idle rank only. Answered by `QuestionAnswered`."""

    request: int
    question: RankQuestion


class Release(Record, frozen=True, tag="release", kw_only=True):
    """Shut these connected sockets down (numbers in the rank), which frees it from a collective."""

    fds: tuple[int, ...]


class Leave(Record, frozen=True, tag="leave", kw_only=True):
    """All ranks have finished: exit."""


class InPlace(Record, frozen=True, tag="in-place", kw_only=True):
    """The rank's last display or clearing has its place: what is written from now on comes after it."""


class TrackingAnswered(Record, frozen=True, tag="tracking-answered", kw_only=True):
    """The answer to `AskTracking`; None when the run is not tracked, and `problem` says why.

    Args:
        run_id: The run that it is about: a rank of a session may have its next cell by now.
    """

    run_id: str
    tracked: TrackedRun | None = None
    problem: str = ""


class CommsHeard(Record, frozen=True, tag="comms-heard", kw_only=True):
    """What the front end says to the rank's widgets. Buffers are raw frames."""

    messages: tuple[CommMessage, ...]


class TellCollectives(Record, frozen=True, tag="tell-collectives", kw_only=True):
    """Look into torch's flight recorder; answered by `Collectives` with the same number."""

    request: int


CellOrder = Prepare | Renew | Execute | AnswerQuestion | Release | Leave
ToRank = CellOrder | InPlace | TrackingAnswered | CommsHeard | TellCollectives


# ---------------------------------------------------------------- rank -> agent


class Joined(Record, frozen=True, tag="joined", kw_only=True):
    """The rank is in the process group."""


class Renewed(Record, frozen=True, tag="renewed", kw_only=True):
    """The rank's process groups are connected anew.

    Args:
        problem: Why not, "" when they are.
        lost: What could not be kept, a sentence; "" when everything goes on.
    """

    problem: str = ""
    lost: str = ""


class Raised(Record, frozen=True, tag="raised", kw_only=True):
    """The cell has raised; `Failed` follows when its traceback is drawn, which takes a tenth of a second for big files.

    A hint only: code that runs cells of its own may go on after it.
    """


class Remarked(Record, frozen=True, tag="remarked", kw_only=True):
    """A sentence for the user; the agent makes it a `Noted` of the run."""

    text: str


class QuestionAnswered(Record, frozen=True, tag="question-answered", kw_only=True):
    """What an idle rank says to `AnswerQuestion`."""

    request: int
    answer: RankAnswer


class Displayed(Record, frozen=True, tag="displayed", kw_only=True):
    """Something rich; the agent adds the rank."""

    bundle: bytes
    metadata: bytes = b"{}"
    display_id: str = ""
    update: bool = False


class Cleared(Record, frozen=True, tag="cleared", kw_only=True):
    """`clear_output` was called; with `wait` the output goes when the next one comes."""

    wait: bool = False


class CommsSaid(Record, frozen=True, tag="comms-said", kw_only=True):
    """What the rank's widgets say; the agent adds the rank. Buffers are raw frames."""

    messages: tuple[CommMessage, ...]


class Finished(Record, frozen=True, tag="finished", kw_only=True):
    """The cell is done. The result's descriptor comes along unless it is inline (the first raw frame).

    Args:
        result: Without `lines` and `output_bytes`, which the agent counts.
        grouped: The rank is still in its process group: the cell has not destroyed it.
    """

    result: RankResult
    grouped: bool = True


class Failed(Record, frozen=True, tag="failed", kw_only=True):
    """The cell raised. The pickled exception, if any, is the first raw frame. `grouped` as in `Finished`."""

    failure: Failure
    grouped: bool = True


class Collectives(Record, frozen=True, tag="collectives", kw_only=True):
    """What the flight recorder has: the collective that the rank is in, or its last one.

    Args:
        current: None when it has recorded none, or this torch has no recorder for the backend.
        entered_at: When the rank called it, seconds since the epoch; 0.0 when unknown.
    """

    request: int
    current: Collective | None = None
    entered_at: float = 0.0


class AskTracking(Record, frozen=True, tag="ask-tracking", kw_only=True):
    """The cell uses MLflow and waits for the run's place there; answered by `TrackingAnswered`."""


class MetricsReported(Record, frozen=True, tag="metrics-reported", kw_only=True):
    """What the cell told MLflow about its run; the agent makes it a `MetricsLogged` of the run.

    Args:
        metrics: Values.
        params: (name, value), both text.
        tags: (name, value), both text.
    """

    metrics: tuple[MetricPoint, ...] = ()
    params: tuple[tuple[str, str], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()


ShownByCell = Displayed | Cleared | CommsSaid
CellReport = Joined | Renewed | Raised | Remarked | QuestionAnswered | ShownByCell | Finished | Failed
FromRank = CellReport | Collectives | AskTracking | MetricsReported

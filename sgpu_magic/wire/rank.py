"""Messages between an agent and its zygotes and ranks. Descriptors are sent along on the socketpairs."""

from __future__ import annotations

from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.base import Numbered, OfRun, Record, RunKind
from sgpu_magic.wire.rank_events import Collective, CommMessage, Failure, Unfinished
from sgpu_magic.wire.run import CellSource, OutputName, PrivateRay, RankAnswer, RankContext, RankQuestion, RankResult
from sgpu_magic.wire.tracking import MetricPoint, TrackedRun, Tracking

ZYGOTE_MODULE = "sgpu_magic.worker.process.zygote"
"""The module that an agent starts with a client's Python; renaming it requires a new protocol version."""

# ---------------------------------------------------------------- agent -> rank


class Prepare(Record, frozen=True, tag="prepare", kw_only=True):
    """Apply the kernel's context, take the device and join the process group. Answered by `Joined`.

    Sent to the ranks of a session, and to a standby group on a session's GPUs. `Execute` comes next.

    Args:
        context: As in `Execute`.
        device: As in `Execute`.
        rank_variables: As in `Execute`; rank 0 gets the descriptor of the bound socket behind `MASTER_PORT`.
        renewal: The rank's store is one of `Renew`: the session's other ranks are already in a process group.
        stays: The rank belongs to a session: it executes one cell after another.
    """

    context: RankContext
    device: str
    rank_variables: dict[str, str]
    renewal: bool = False
    stays: bool = False


class Renew(Record, frozen=True, tag="renew", kw_only=True):
    """Reconnect the process groups over a new store, whose descriptor is sent along. Answered by `Renewed`.

    Args:
        replaced: Ranks that are new processes: user-created groups with them cannot be reconnected.
        store_path: Path of the store's file on systems without memory files; "" if its descriptor is sent along.
    """

    replaced: tuple[int, ...] = ()
    store_path: str = ""


class Execute(OfRun, frozen=True, tag="execute", kw_only=True):
    """Run a cell in this rank. The payload's descriptor is sent along unless it is inline (the first raw frame).

    Rank 0 of a run that is not in a session also gets the descriptor of the bound socket behind `MASTER_PORT`, unless
    it was prepared before.

    Args:
        mapped: (offset, size) of the ranges of the payload whose bytes are in files of their own; their descriptors
            follow the payload's.
        run_dir: Where to write results that do not fit into memory.
        device: `cpu`, or `cuda` if the rank has its own GPU.
        rank_variables: torchrun's variables for this rank. `MASTER_PORT` is a bound loopback socket, reserved for user
            code that calls rendezvous again; rank 0 gets its listening descriptor.
        tracking: Set if the run is tracked: MLflow calls in its code reach the run's own MLflow run. Its URI is that of
            the default store where `Launch` has "".
        profile: Write a torch profiler trace to `run_dir`.
        ray: The cell is the driver of a Ray cluster on the run's nodes and runs on rank 0 only; None if it runs on
            every rank.
    """

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
    mapped: tuple[tuple[int, int], ...] = ()


class AnswerQuestion(Numbered, frozen=True, tag="answer-question", kw_only=True):
    """Answer this question. Sent to idle ranks only. Answered by `QuestionAnswered`."""

    question: RankQuestion


class Release(Record, frozen=True, tag="release", kw_only=True):
    """Shut down these connected sockets (descriptor numbers in the rank), which releases it from a collective.

    Args:
        fds: The descriptors.
        interrupt: An interrupt follows. A rank whose collectives end without an error interrupts itself first.
    """

    fds: tuple[int, ...]
    interrupt: bool = False


class Finish(Record, frozen=True, tag="finish", kw_only=True):
    """Finish what the session's cells have started, as Python does before it exits. Answered by `Finishing`.

    The ranks of a run that is not a session do so by themselves after their cell.
    """


class Exit(Record, frozen=True, tag="leave", kw_only=True):
    """All ranks have finished: exit."""


class InPlace(Record, frozen=True, tag="in-place", kw_only=True):
    """The rank's last `Displayed` or `Cleared` has its position: output written from now on comes after it."""


class TrackingAnswered(OfRun, frozen=True, tag="tracking-answered", kw_only=True):
    """The answer to `AskTracking`. `tracked` is None if the run is not tracked; `problem` says why.

    Args:
        run_id: The run in question: a rank of a session may already execute its next cell.
    """

    tracked: TrackedRun | None = None
    problem: str | None = None


class CommsFromFrontEnd(Record, frozen=True, tag="comms-heard", kw_only=True):
    """Comm messages from the front end to the rank's widgets. Buffers are raw frames."""

    messages: tuple[CommMessage, ...]


class AskCollectives(Numbered, frozen=True, tag="tell-collectives", kw_only=True):
    """Read torch's flight recorder. Answered by `Collectives` with the same number."""


CellOrder = Prepare | Renew | Execute | AnswerQuestion | Release | Finish | Exit
ToRank = CellOrder | InPlace | TrackingAnswered | CommsFromFrontEnd | AskCollectives


# ---------------------------------------------------------------- rank -> agent


class Joined(Record, frozen=True, tag="joined", kw_only=True):
    """The rank has joined the process group."""


class StandsBy(Record, frozen=True, tag="stands-by", kw_only=True):
    """The rank waits for its first order. Only sent if `Fork.announce` asks for it."""


class Renewed(Record, frozen=True, tag="renewed", kw_only=True):
    """The rank's process groups are reconnected.

    Args:
        problem: Why they are not; None if they are.
        lost: A sentence about what could not be preserved; None if nothing was lost.
    """

    problem: str | None = None
    lost: str | None = None


class Raised(Record, frozen=True, tag="raised", kw_only=True):
    """The cell has raised. `CellFailed` follows once its traceback is formatted, which takes 0.1 s for large files.

    Only a hint: code that itself runs cells may continue afterwards.
    """


class Remarked(Record, frozen=True, tag="remarked", kw_only=True):
    """A sentence for the user. The agent turns it into a `Noted` of the run."""

    text: str


class QuestionAnswered(Numbered, frozen=True, tag="question-answered", kw_only=True):
    """An idle rank's answer to `AnswerQuestion`."""

    answer: RankAnswer


class Displayed(Record, frozen=True, tag="displayed", kw_only=True):
    """Rich output. The agent adds the rank."""

    bundle: bytes
    metadata: bytes = b"{}"
    display_id: str = ""
    update: bool = False


class Cleared(Record, frozen=True, tag="cleared", kw_only=True):
    """`clear_output` was called. With `wait`, the output is cleared when the next output arrives."""

    wait: bool = False


class CommsFromRank(Record, frozen=True, tag="comms-said", kw_only=True):
    """Comm messages from the rank's widgets. The agent adds the rank. Buffers are raw frames."""

    messages: tuple[CommMessage, ...]


class Finished(Record, frozen=True, tag="finished", kw_only=True):
    """The cell has finished. The result's descriptor is sent along unless it is inline (the first raw frame).

    Args:
        result: The result without `lines` and `output_bytes`, which the agent counts.
        grouped: The rank is still in its process group: the cell has not destroyed it.
    """

    result: RankResult
    grouped: bool = True


class CellFailed(Record, frozen=True, tag="failed", kw_only=True):
    """The cell raised. The pickled exception, if any, is the first raw frame. `grouped` as in `Finished`."""

    failure: Failure
    grouped: bool = True


class Finishing(Record, frozen=True, tag="finishing", kw_only=True):
    """The rank finishes what its cell has started. The first one comes before `Finished` or `CellFailed`, if any does.

    Args:
        work: What has not ended; None once everything has.
        leaves_processes: Whether the rank has child processes, which end with it; only when everything has ended.
    """

    work: tuple[Unfinished, ...] | None = None
    leaves_processes: bool = False


class Collectives(Numbered, frozen=True, tag="collectives", kw_only=True):
    """The flight recorder's entry for the collective that the rank is in, or for its last one.

    Args:
        current: None if nothing is recorded, or if this torch has no recorder for the backend.
        entered_at: When the rank called it, seconds since the epoch; 0.0 if unknown.
    """

    current: Collective | None = None
    entered_at: float = 0.0


class AskTracking(Record, frozen=True, tag="ask-tracking", kw_only=True):
    """The cell uses MLflow and waits for the run's MLflow run. Answered by `TrackingAnswered`."""


class MetricsReported(Record, frozen=True, tag="metrics-reported", kw_only=True):
    """What the cell logged to MLflow. The agent turns it into a `MetricsLogged` of the run.

    Args:
        metrics: Metric values.
        params: (name, value), both text.
        tags: (name, value), both text.
    """

    metrics: tuple[MetricPoint, ...] = ()
    params: tuple[tuple[str, str], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()


class HeavyImported(Record, frozen=True, tag="heavy-imported", kw_only=True):
    """Cells of this rank have imported these installed modules, and each import took long.

    Args:
        modules: As they were imported, in order, such as `transformers.trainer`.
    """

    modules: tuple[str, ...]


ShownByCell = Displayed | Cleared | CommsFromRank
CellReport = Joined | Renewed | Raised | Remarked | QuestionAnswered | ShownByCell | Finished | CellFailed | Finishing
FromRank = StandsBy | CellReport | Collectives | AskTracking | MetricsReported | HeavyImported

# ---------------------------------------------------------------- agent <-> zygote


class OfFork(Record, frozen=True, kw_only=True):
    """Base of the messages that concern the fork of one rank."""

    group_id: str
    rank: int


class Fork(OfFork, frozen=True, tag="fork", kw_only=True):
    """Fork one rank of a group.

    Its descriptors are sent along: control socket, output pipe, error pipe, stack file, store file.

    Args:
        store_path: Path of the store's file on systems without memory files; "" if its descriptor is sent along.
        join_early: Join the process group before `Execute` arrives.
        warm_up: Also run a small warm-up cell before it arrives. All ranks of a group do, or none.
        announce: Send `StandsBy` after that.
    """

    ranks: int
    join_early: bool
    warm_up: bool = False
    announce: bool = False
    store_path: str = ""


class Preload(Record, frozen=True, tag="preload", kw_only=True):
    """Execute these imports, and hide their modules until a rank imports them. Answered by `Preloaded`.

    The first message to a zygote, if it is sent at all.

    Args:
        roots: Modules, in order.
        tried: For modules that a zygote of this interpreter has tried before: what to import for them.
        environ: The environment of the runs, without the variables of their ranks.
        rank_variables: Names of the variables whose values are each rank's own.
        cwd: Working directory of the runs.
        sys_path: `sys.path` of the runs.
        limit_bytes: Memory above which no further module is imported.
    """

    roots: tuple[str, ...]
    tried: dict[str, tuple[str, ...]]
    environ: dict[str, str]
    rank_variables: tuple[str, ...]
    cwd: str
    sys_path: tuple[str, ...]
    limit_bytes: int


class PausePreload(Record, frozen=True, tag="pause-preload", kw_only=True):
    """Wait with further imports while ranks compute, or go on. Of no meaning after `Preloaded`.

    Args:
        paused: Whether to wait.
    """

    paused: bool


class Preloaded(Record, frozen=True, tag="preloaded", kw_only=True):
    """The zygote has executed imports, and forks ranks from now on.

    Args:
        roots: Those of the order of which something was executed.
        modules: Number of modules that were executed.
        bytes: Memory that they take.
        reads: Environment variables that they read.
        reads_directory: Whether one of them asked for the working directory.
        tried: For each module of the order that was tried: what to import for it; nothing if nothing is safe.
        refused: For each module of which not all was executed: why, as the end of a sentence.
    """

    roots: tuple[str, ...]
    modules: int
    bytes: int
    reads: tuple[str, ...]
    reads_directory: bool
    tried: dict[str, tuple[str, ...]]
    refused: dict[str, str]


class Forked(OfFork, frozen=True, tag="forked", kw_only=True):
    """The rank was forked with this pid."""

    pid: int


class ForkRefused(OfFork, frozen=True, tag="fork-refused", kw_only=True):
    """The rank was not forked: the zygote has more than one thread, or the machine has no process left."""

    message: str


class ZygoteReady(Record, frozen=True, tag="zygote-ready", kw_only=True):
    """The zygote is ready. Stable across versions: its interpreter may have another sgpu-magic than the pool."""

    pid: int
    torch_version: str
    protocol_version: int


class ZygoteFailed(Record, frozen=True, tag="zygote-failed", kw_only=True):
    """The interpreter cannot be preloaded. The zygote exits after this message."""

    message: str


class Exited(Record, frozen=True, tag="exited", kw_only=True):
    """A rank ended.

    Args:
        status: Exit code, negative for a signal.
        peak_bytes: Peak memory of the process; 0 if unknown.
        descendants: Whether processes that it has started still exist. They are being ended, and `DescendantsEnded`
            follows.
    """

    pid: int
    status: int
    peak_bytes: int = 0
    descendants: bool = False


class DescendantsEnded(Record, frozen=True, tag="descendants-ended", kw_only=True):
    """The processes that a dead rank has left behind are gone.

    Args:
        pid: The rank's process id.
        killed: Commands of those that did not end by themselves and were killed.
        stuck: Commands of those that could not be killed.
    """

    pid: int
    killed: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()


ToZygote = Fork | Preload | PausePreload
FromZygote = Forked | ForkRefused | ZygoteReady | ZygoteFailed | Preloaded | Exited | DescendantsEnded

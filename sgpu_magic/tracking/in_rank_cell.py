"""A tracked cell on this rank: its MLflow run, which is requested once, and remarks about it to the user.

What its code logs is sent to the agent in batches, from all threads and forked children.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import MsgpackDecoder
from sgpu_magic.wire.rank import AskTracking, MetricsReported, Remarked, TrackingAnswered
from sgpu_magic.wire.tracking import MetricPoint, TrackedRun, Tracking

# a batch is sent when it is this old ...
_INTERVAL_S = 0.1
# ... or this large, by the thread that filled it, which blocks while the agent is behind
_MOST = 1000
# per message from a forked child: well below a datagram's limit, as a tag may have 8,000 characters
_CHILD_METRICS = 100
_CHILD_PAIRS = 5
_DATAGRAM_BYTES = 1 << 18

# creating the default store takes seconds; the writer gives up a dead server sooner
_PATIENCE_S = 20.0

Pair = tuple[str, str]
T = TypeVar("T")


class LogCollector:
    """Collects what is logged and sends it about ten times a second. Used by all threads and forked children.

    A forked child must not write to the agent's connection, which its parent uses. It sends datagrams to its parent,
    which arrive whole from any number of senders.

    Args:
        send: Sends a message to the agent; blocks while the agent is behind.
    """

    def __init__(self, send: Callable[[Record], None]) -> None:
        self._send = send
        self._metrics: list[MetricPoint] = []
        self._params: list[Pair] = []
        self._tags: list[Pair] = []
        self._lock = threading.Lock()
        # held while a batch is sent: batches are sent in the order in which they were made
        self._order = threading.Lock()
        # held from receiving a child's datagram to adding it to the batch: `flush` misses none
        self._hearing = threading.Lock()
        self._work = threading.Event()
        self._running = False
        self._is_child = False
        self._here, self._there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._here.setblocking(False)
        self._listening = False
        self._may_send = True
        os.register_at_fork(after_in_child=self._become_child)

    def add(self, metrics: Sequence[MetricPoint] = (), params: Sequence[Pair] = (), tags: Sequence[Pair] = ()) -> None:
        """Add this to the next batch."""
        if self._is_child:
            self._send_to_parent(metrics, params, tags)
            return
        with self._lock:
            self._metrics += metrics
            self._params += params
            self._tags += tags
            is_full = len(self._metrics) + len(self._params) + len(self._tags) >= _MOST
            if not self._running:
                self._running = True
                # invisible to user code that lists threads, like the helper thread
                _thread.start_new_thread(self._go_on, ())
        if is_full:
            self._send_batch()
        else:
            self._work.set()

    def listen_to_children(self) -> None:
        """Start the thread that receives from forked children."""
        with self._lock:
            if not self._listening and not self._is_child:
                self._listening = True
                _thread.start_new_thread(self._hear_children, ())

    def flush(self) -> None:
        """Send everything collected so far, including from children.

        Raises:
            OSError: The agent is gone.
        """
        if self._is_child:
            return
        self._take_from_children()
        self._send_batch()

    def begin(self) -> None:
        """Start sending: a cell begins."""
        self._may_send = True
        self._work.set()

    def end(self) -> None:
        """Send everything and stop sending: the cell ends. What is logged until the next cell belongs to that cell.

        Raises:
            OSError: The agent is gone.
        """
        self._take_from_children()
        with self._order:
            self._send_within_order()
            self._may_send = False

    # ------------------------------------------------------------ within the rank

    def _go_on(self) -> None:
        pause = threading.Event()
        # a dead agent is noticed by the receiving thread
        with contextlib.suppress(OSError):
            while True:
                self._work.wait()
                pause.wait(_INTERVAL_S)
                self._work.clear()
                self._send_batch()

    def _send_batch(self) -> None:
        with self._order:
            if self._may_send:
                self._send_within_order()

    def _send_within_order(self) -> None:
        with self._lock:
            metrics, self._metrics = self._metrics, []
            params, self._params = self._params, []
            tags, self._tags = self._tags, []
        for start in range(0, max(len(metrics), len(params), len(tags)), _MOST):
            cut = slice(start, start + _MOST)
            self._send(MetricsReported(metrics=tuple(metrics[cut]), params=tuple(params[cut]), tags=tuple(tags[cut])))

    # ------------------------------------------------------------ from and in children

    def _hear_children(self) -> None:
        while True:
            select.select([self._here], [], [])
            self._take_from_children()

    def _take_from_children(self) -> None:
        with self._hearing:
            while True:
                try:
                    data = self._here.recv(_DATAGRAM_BYTES)
                except (BlockingIOError, InterruptedError):
                    return
                try:
                    report = _decoder.decode(data)
                except msgspec.DecodeError:
                    # not from a child's own client
                    continue
                self.add(report.metrics, report.params, report.tags)

    def _become_child(self) -> None:
        self._is_child = True
        self._lock, self._order, self._hearing = threading.Lock(), threading.Lock(), threading.Lock()
        self._metrics, self._params, self._tags = [], [], []
        # otherwise the parent's death would never be noticed
        self._here.close()

    def _send_to_parent(self, metrics: Sequence[MetricPoint], params: Sequence[Pair], tags: Sequence[Pair]) -> None:
        batches = [
            *(MetricsReported(metrics=part) for part in _parts(metrics, _CHILD_METRICS)),
            *(MetricsReported(params=part) for part in _parts(params, _CHILD_PAIRS)),
            *(MetricsReported(tags=part) for part in _parts(tags, _CHILD_PAIRS)),
        ]
        # the parent may be gone
        with contextlib.suppress(ConnectionError):
            for batch in batches:
                self._there.send(_encoder.encode(batch))


def _parts(items: Sequence[T], most: int) -> Iterator[tuple[T, ...]]:
    for start in range(0, len(items), most):
        yield tuple(items[start : start + most])


_encoder = msgspec.msgpack.Encoder()
_decoder = MsgpackDecoder(MetricsReported)


@dataclass(eq=False)
class CellHere:
    """One tracked cell on this rank.

    Args:
        run_id: The run's id.
        tracking: Where the run is tracked; its URI is never "".
        leads: Whether this is the first rank that runs the cell: only it handles child runs, models and autologging.
        run_dir: The run's directory, which keeps artifacts that no store accepts.
        say: Sends a message to the agent.
        reports: Collects what is logged.

    Attributes:
        alias: Placeholder for the MLflow run's id while it is unknown.
        own: Whether user code has chosen another store or experiment, so MLflow is left alone.
        has_ended: Whether the cell has ended.
    """

    run_id: str
    tracking: Tracking
    leads: bool
    run_dir: str
    say: Callable[[Record], None]
    reports: LogCollector

    def __post_init__(self) -> None:
        self.alias = uuid.uuid4().hex
        self.own = False
        self.has_ended = False
        self._pid = os.getpid()
        self._answer: TrackingAnswered | None = None
        self._answered = threading.Event()
        self._asked = False
        self._ask_lock = threading.Lock()
        self._joined = False

    # ------------------------------------------------------------ the run in MLflow

    def ask(self) -> None:
        """Ask the agent for the MLflow run, once."""
        with self._ask_lock:
            if self._asked or self.has_ended or os.getpid() != self._pid:
                return
            self._asked = True
        self.say(AskTracking())

    def on_answer(self, answer: TrackingAnswered) -> None:
        """Take the agent's answer. Called in the helper thread."""
        if answer.run_id == self.run_id:
            self._answer = answer
            self._answered.set()

    @property
    def known_run(self) -> TrackedRun | None:
        """The MLflow run if it is known already, else None."""
        return self._answer.tracked if self._answer is not None else None

    def wait(self) -> TrackedRun | None:
        """Wait for the MLflow run and return it; None if there is none, which is reported to the user once."""
        if self._answer is None and os.getpid() == self._pid and not self.has_ended:
            self.ask()
            self._answered.wait(_PATIENCE_S)
            if self._answer is None:
                problem = f"the pool did not report the run's MLflow id within {_PATIENCE_S:g} s"
                self._answer = TrackingAnswered(run_id=self.run_id, problem=problem)
        if self._answer is None:
            # a forked child has no thread that could receive the answer
            return None
        if self._answer.tracked is None:
            problem = self._answer.problem or "the run is not tracked"
            self.remark(
                "no-store",
                f"MLflow: {problem.rstrip('.')}. The run continues; its metrics, parameters and tags are "
                f"kept for `sgpu sync`, artifacts in {self.kept_artifacts}. Models, child runs and calls that "
                "read from MLflow are not available.",
            )
        return self._answer.tracked

    def is_this(self, run_id: object) -> bool:
        """Whether this is the id of the MLflow run, or its placeholder."""
        return not self.has_ended and run_id in (self.alias, self.known_id)

    @property
    def known_id(self) -> str:
        """The MLflow run's id, or its placeholder if the id is not known yet."""
        return self.known_run.mlflow_run_id if self.known_run is not None else self.alias

    @property
    def true_id(self) -> str:
        """The MLflow run's id, or its placeholder if there is none. Waits for it."""
        self.wait()
        return self.known_id

    @property
    def kept_artifacts(self) -> str:
        return os.path.join(self.run_dir, "artifacts")

    def may_join_once(self) -> bool:
        """Return True on the first call: the first logger that creates a run gets this one."""
        joined, self._joined = self._joined, True
        return not joined

    # ------------------------------------------------------------ remarks

    def remark(self, about: str, text: str) -> None:
        """Show the user a remark, once per subject in this process."""
        if about in _remarked or self.has_ended or os.getpid() != self._pid:
            return
        _remarked.add(about)
        self.say(Remarked(text=text))

    def begin_own(self, what: str) -> None:
        """Leave MLflow alone from now on: user code has chosen another store or experiment."""
        if self.own:
            return
        self.own = True
        self.remark(
            "own",
            f"the cell has set {what}: from then on MLflow follows the cell, and the MLflow runs that it starts are "
            "separate, one for each rank that starts one. The run's own MLflow run keeps the rest.",
        )


_remarked: set[str] = set()
_current: CellHere | None = None


def current() -> CellHere | None:
    """Return the tracked cell that is running, or None."""
    return _current if _current is not None and not _current.has_ended else None


def hold(cell: CellHere | None) -> None:
    """Set the tracked cell that is running, or None."""
    global _current
    _current = cell

"""A tracked cell on this rank: its place in MLflow, asked for once, and what the user is told of it.

What its code tells MLflow goes to the agent in batches, from all threads and forked children.
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
from typing import TypeVar

import msgspec

from sgpu_magic.wire.rank import AskTracking, MetricsReported, Remarked, TrackingAnswered
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.tracking import MetricPoint, TrackedRun, Tracking

# a batch is sent when it is this old ...
_INTERVAL_S = 0.1
# ... or this large, by who has added to it: that one waits when the agent is behind
_MOST = 1000
# of one message from a forked child: well below what a datagram holds, a tag may have 8,000 characters
_CHILD_METRICS = 100
_CHILD_PAIRS = 5
_DATAGRAM_BYTES = 1 << 18

# the store that has to be made first takes seconds; a server that does not answer is given up sooner
_PATIENCE_S = 20.0

Pair = tuple[str, str]
T = TypeVar("T")


class Reports:
    """Collects, and sends about ten times a second. Used by all threads of the rank and by its forked children.

    A child must not write to the agent's connection, which its parent uses: it has a way to its parent, as datagrams,
    which stay whole whoever sends them.

    Args:
        send: Sends to the agent; blocks while the agent is behind.
    """

    def __init__(self, send: Callable[[Record], None]) -> None:
        self._send = send
        self._metrics: list[MetricPoint] = []
        self._params: list[Pair] = []
        self._tags: list[Pair] = []
        self._lock = threading.Lock()
        # held while a batch is on its way: batches leave in the order in which they were made
        self._order = threading.Lock()
        # held from a child's datagram to its place in the batch: who flushes misses none
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
        """Take this along with the next batch."""
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
                # as the helper: user code that lists threads need not see it
                _thread.start_new_thread(self._go_on, ())
        if is_full:
            self._send_batch()
        else:
            self._work.set()

    def listen_to_children(self) -> None:
        """Forked children may log from now on."""
        with self._lock:
            if not self._listening and not self._is_child:
                self._listening = True
                _thread.start_new_thread(self._hear_children, ())

    def flush(self) -> None:
        """Send what there is, what children have sent included.

        Raises:
            OSError: The agent is gone.
        """
        if self._is_child:
            return
        self._take_from_children()
        self._send_batch()

    def begin(self) -> None:
        """A cell runs from now on."""
        self._may_send = True
        self._work.set()

    def end(self) -> None:
        """No cell runs after this: what threads and children tell until the next one belongs to that.

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
        # the agent's end is noticed by who receives
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
                report = _decoder.decode(data)
                self.add(report.metrics, report.params, report.tags)

    def _become_child(self) -> None:
        self._is_child = True
        self._lock = threading.Lock()
        self._order = threading.Lock()
        self._hearing = threading.Lock()
        self._metrics, self._params, self._tags = [], [], []
        # else the end of the parent would never be noticed
        self._here.close()

    def _send_to_parent(self, metrics: Sequence[MetricPoint], params: Sequence[Pair], tags: Sequence[Pair]) -> None:
        batches = [
            *(MetricsReported(metrics=part) for part in _parts(metrics, _CHILD_METRICS)),
            *(MetricsReported(params=part) for part in _parts(params, _CHILD_PAIRS)),
            *(MetricsReported(tags=part) for part in _parts(tags, _CHILD_PAIRS)),
        ]
        # the parent may be gone, and the run's ranks with it
        with contextlib.suppress(ConnectionError):
            for batch in batches:
                self._there.send(_encoder.encode(batch))


def _parts(items: Sequence[T], most: int) -> Iterator[tuple[T, ...]]:
    for start in range(0, len(items), most):
        yield tuple(items[start : start + most])


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MetricsReported)


class CellHere:
    """One tracked cell on this rank.

    Args:
        run_id: The run.
        tracking: Where it is tracked; its URI is never "".
        leads: It is the first of those that run the cell: children, models and autolog are its affair.
        run_dir: Where artifacts stay that no store takes.
        say: Tells the agent something.
        reports: Takes what is logged.

    Attributes:
        alias: Stands for the MLflow run's id until that is known, or for good.
        own: The user's code has chosen another store or experiment: MLflow does as it says.
        over: The cell has ended.
    """

    def __init__(
        self,
        run_id: str,
        tracking: Tracking,
        *,
        leads: bool,
        run_dir: str,
        say: Callable[[Record], None],
        reports: Reports,
    ) -> None:
        self.run_id = run_id
        self.tracking = tracking
        self.leads = leads
        self.run_dir = run_dir
        self.reports = reports
        self.alias = uuid.uuid4().hex
        self.own = False
        self.over = False
        self._say = say
        self._pid = os.getpid()
        self._answer: TrackingAnswered | None = None
        self._answered = threading.Event()
        self._asked = False
        self._ask_lock = threading.Lock()
        self._joined = False

    # ------------------------------------------------------------ the run's place in MLflow

    def ask(self) -> None:
        """Ask for the run's place in MLflow, once."""
        with self._ask_lock:
            if self._asked or self.over or os.getpid() != self._pid:
                return
            self._asked = True
        self._say(AskTracking())

    def take(self, answer: TrackingAnswered) -> None:
        """The answer has come (in the helper's thread)."""
        if answer.run_id == self.run_id:
            self._answer = answer
            self._answered.set()

    @property
    def known(self) -> TrackedRun | None:
        """The run's place as far as it is known, without waiting."""
        return self._answer.tracked if self._answer is not None else None

    def wait(self) -> TrackedRun | None:
        """Return the run's place; None when it has none, which the user is told once."""
        if self._answer is None and os.getpid() == self._pid and not self.over:
            self.ask()
            self._answered.wait(_PATIENCE_S)
            if self._answer is None:
                problem = f"the pool has not told the run's MLflow id within {_PATIENCE_S:g} s"
                self._answer = TrackingAnswered(run_id=self.run_id, problem=problem)
        if self._answer is None:
            # a forked child has no thread that would hear the answer
            return None
        if self._answer.tracked is None:
            self.remark(
                "no-store",
                f"MLflow: {self._answer.problem.rstrip('.')}. The run goes on; its metrics, parameters and tags are "
                f"kept for `sgpu sync`, artifacts in {self.kept_artifacts}. Models, child runs and what reads from "
                "MLflow are not available.",
            )
        return self._answer.tracked

    def is_this(self, run_id: object) -> bool:
        """Whether this is the id of the run in MLflow."""
        if self.over or not run_id:
            return False
        return run_id == self.alias or (self.known is not None and run_id == self.known.mlflow_run_id)

    @property
    def true_id(self) -> str:
        """The MLflow run's id; its stand-in where there is none."""
        tracked = self.wait()
        return tracked.mlflow_run_id if tracked is not None else self.alias

    @property
    def kept_artifacts(self) -> str:
        return os.path.join(self.run_dir, "artifacts")

    def may_join_once(self) -> bool:
        """True for the first caller: a logger that makes a run of its own gets this one."""
        joined, self._joined = self._joined, True
        return not joined

    # ------------------------------------------------------------ words

    def remark(self, about: str, text: str) -> None:
        """Tell the user, once for each subject in this process."""
        if about in _remarked or self.over or os.getpid() != self._pid:
            return
        _remarked.add(about)
        self._say(Remarked(text=text))

    def begin_own(self, what: str) -> None:
        """The user's code has chosen another store or experiment."""
        if self.own:
            return
        self.own = True
        self.remark(
            "own",
            f"the cell has set {what}: from then on MLflow does as the cell says, and runs that it starts are its own, "
            "one for each rank that starts one. The run's own MLflow run keeps the rest.",
        )


_remarked: set[str] = set()
_current: CellHere | None = None


def current() -> CellHere | None:
    """The tracked cell that runs, None while none does."""
    return _current if _current is not None and not _current.over else None


def hold(cell: CellHere | None) -> None:
    """This cell runs from now on, or none."""
    global _current
    _current = cell

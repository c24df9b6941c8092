"""What a tracked cell tells MLflow, on its way to the agent: in batches, from all threads and forked children."""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from sgpu_magic.wire.rank import MetricsReported
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.tracking import MetricPoint

# a batch is sent when it is this old ...
_INTERVAL_S = 0.1
# ... or this large, by who has added to it: that one waits when the agent is behind
_MOST = 1000
# of one message from a forked child: well below what a datagram holds, a tag may have 8,000 characters
_CHILD_METRICS = 100
_CHILD_PAIRS = 5
_DATAGRAM_BYTES = 1 << 18

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

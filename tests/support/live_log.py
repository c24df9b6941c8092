"""Ranks that write logs and report them in events as an agent does, and the lines that a front end must show."""

from __future__ import annotations

import codecs
from contextlib import closing
from itertools import islice
from pathlib import Path

from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.answers import Answers
from sgpu_magic.views.live.feed import Feed
from sgpu_magic.views.live.log_reader import LogReader, line_text
from sgpu_magic.views.live.log_streams import is_stderr_text
from sgpu_magic.views.live.messages import AskLines, LineRow, LinesAnswer, NewLines
from sgpu_magic.wire import events as ev
from sgpu_magic.wire import rank_events
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Lease, Placement
from sgpu_magic.wire.run import CellSource, Owner, RunSpec, Shipped

RUN_ID = "7f3a90c1"
CELL = CellSource(
    magic_line="%%distributed -n 4",
    body="def load_batch(f):\n    # a slow disk\n    x = f.read()\n    return x\n\nwhile True:\n    loss.backward()\n",
    execution_count=7,
)
SEVEN_DAYS_S = 7 * 24 * 3600.0


class LiveRun:
    """A run's view and feed, and its logs in a directory.

    Args:
        directory: The directory of the logs.
        ranks: World size.
        spec: Further fields of the run's spec.
    """

    def __init__(self, directory: Path, ranks: int = 4, **spec: object) -> None:
        self.directory = directory
        self.at = 1000.0
        fields: dict[str, object] = {
            "run_id": RUN_ID,
            "name": "train_digits",
            "cell": CELL,
            "placement": Placement(ranks=ranks),
            "outputs": (),
            "owner": Owner(pid=1, host="h", user="u"),
            "timeout_s": SEVEN_DAYS_S,
            "shipped": Shipped(names=("model", "loader"), total_bytes=45_100_000, seconds=0.038),
            "submitted_at": self.at,
        }
        self.view = RunView(RunSpec(**{**fields, **spec}), pool="team")
        self.ended_sessions: list[str] = []
        self.feed = Feed(self.view, clock=lambda: self.at)
        self.answers = Answers(
            self.view,
            self.feed,
            LogReader(directory),
            lambda: "cancelled",
            self.ended_sessions.append,
            lambda: ("rank 0",),
        )
        self.order: list[tuple[int, int]] = []
        self._seq = 0
        self._sizes = [0] * ranks
        self._lines = [0] * ranks
        self._streams: list[list[str]] = [[] for _ in range(ranks)]
        self._last_stream = ["stdout"] * ranks
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(ranks)]

    def apply(self, *bodies: ev.EventBody, at: float | None = None) -> LiveRun:
        self.at = self.at if at is None else at
        for body in bodies:
            self._seq += 1
            event = ev.Event(run_id=self.view.run_id, seq=self._seq, at=self.at, body=body)
            self.view.apply(event)
        return self

    def start(self, device_type: str = "a10", labels: tuple[str, ...] = (), at: float | None = None) -> LiveRun:
        ranks = self.view.ranks
        lease = Lease(lease_id="l", device_type=device_type, ranks=ranks)
        return self.apply(
            ev.Placed(lease=lease, host="gpu-node-2", labels=labels),
            ev.StateChanged(state=RunState.STARTING),
            ev.RanksStarted(pids=tuple(range(ranks)), warm="standby"),
            ev.StateChanged(state=RunState.RUNNING),
            at=at,
        )

    def write(self, rank: int, data: bytes, skip: int = 0, stream: str = "stdout") -> LiveRun:
        """Write to a rank's log, and report the bytes after the first `skip` to the pool.

        As in an agent, all bytes are left out only if they end with a newline.
        """
        skip = min(skip, len(data) if data.endswith(b"\n") else len(data) - 1)
        with open(self.directory / f"rank-{rank}.log", "ab") as log:
            log.write(data)
        for _ in range(data.count(b"\n")):
            self.order.append((rank, self._lines[rank]))
            self._streams[rank].append(stream)
            self._lines[rank] += 1
        self._last_stream[rank] = stream
        if skip:
            self._decoders[rank].reset()
        start = self._sizes[rank]
        self._sizes[rank] += len(data)
        return self.apply(
            rank_events.OutputWritten(
                rank=rank,
                stream=stream,
                text=self._decoders[rank].decode(data[skip:]),
                start=start,
                end=self._sizes[rank],
                skipped_bytes=skip,
                skipped_lines=data[:skip].count(b"\n"),
            )
        )

    def end(self, state: RunState = RunState.SUCCEEDED, **fields: object) -> LiveRun:
        for rank, size in enumerate(self._sizes):
            if size and not self.log(rank).endswith(b"\n"):
                self.order.append((rank, self._lines[rank]))
                self._streams[rank].append(self._last_stream[rank])
        return self.apply(ev.RunEnded(state=state, total_s=12.4, **fields))

    def log(self, rank: int) -> bytes:
        path = self.directory / f"rank-{rank}.log"
        return path.read_bytes() if path.exists() else b""

    def log_lines(self, rank: int) -> list[str]:
        """Return the log's lines as a reader sees them, computed in the simplest way."""
        lines = self.log(rank).split(b"\n")
        return [line_text(line.decode("utf-8", "replace")) for line in lines[: None if lines[-1] else -1]]

    def all_lines(self) -> list[LineRow]:
        every = {rank: self.log_lines(rank) for rank in range(self.view.ranks)}
        return [
            (
                rank,
                number,
                text := every[rank][number],
                self._streams[rank][number] == "stderr" and is_stderr_text(text),
            )
            for rank, number in self.order
        ]


def lines_of(reader: LogReader, rank: int, first: int, count: int) -> list[str]:
    """Return `count` lines from number `first` on, fewer at the end of the log."""
    with closing(reader.lines_from(rank, first)) as found:
        return list(islice(found, count))


class FrontEnd:
    """A front end that keeps the lines it receives and requests missing ones."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.rows: dict[int, LineRow] = {}
        self.ranks: tuple[int, ...] = ()
        self.seq = 0
        self.told_rows = 0

    def take(self, message: NewLines) -> None:
        assert message.seq == self.seq + 1
        assert message.first >= sum(self.ranks)
        self.seq, self.ranks = message.seq, message.ranks
        at = message.first
        for row in message.rows:
            if len(row) == 4:
                self.rows[at] = row
                self.told_rows += 1
                at += 1
            else:
                at += row[2]
        assert at == sum(self.ranks)

    def fetch_missing(self, among: range) -> None:
        for number in among:
            if number not in self.rows:
                answer = self.run.answers.answer(AskLines(n=1, first=number, count=500))
                assert isinstance(answer, LinesAnswer), answer
                assert answer.rows
                for index, row in enumerate(answer.rows):
                    assert self.rows.setdefault(number + index, row) == row

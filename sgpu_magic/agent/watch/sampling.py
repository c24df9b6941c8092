"""Samples every run of the agent once a second, with one scan of /proc and one query to NVML for all of them.

This costs 1 ms per second for 64 ranks, and nothing while no run is active or in a run's first 0.2 s. Samples are
reported every second in the first 10 minutes and every 5 s afterwards. A GPU rank's sample takes 50 to 60 bytes of the
event log: about 9 MB per day for 8 ranks.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sgpu_magic.agent import faults
from sgpu_magic.agent.ranks.group import RankProcess, RunRanks
from sgpu_magic.agent.ranks.rank_process import NotebookFrames, parse
from sgpu_magic.agent.ranks.run_processes import BUSY_SHARE, ProcessTable, TreeUse
from sgpu_magic.agent.watch.gpus import Gpus
from sgpu_magic.agent.watch.nvml import GpuReading
from sgpu_magic.agent.watch.shared_pages import SharedPages
from sgpu_magic.system.processes import core_count, memory_limit
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import Noted
from sgpu_magic.wire.rank_events import RankSample, Sampled, StackFrame

_FINE_S = 600.0
_COARSE_S = 5.0
# timers fire a little early or late
_SLACK_S = 0.5
_INTERVAL_S = 1.0
_MAX_LINE_CHARS = 80
# let a run's first line of output reach the notebook before sampling starts
_SETTLED_S = 0.2
# a shorter wait for other ranks is ordinary
_WAITS_AFTER_S = 5.0


class _Wait(NamedTuple):
    """A collective that a rank is in.

    Args:
        name: Its function.
        line: The cell's line that called it; 0 when unknown.
        output_bytes: What the rank had printed by then.
        since: When it was first seen there, seconds of a monotonic clock.
    """

    name: str
    line: int
    output_bytes: int
    since: float


@dataclass(eq=False, repr=False)
class RunSampler:
    """Makes the samples of one run.

    Args:
        run_ranks: Its ranks.
        lease: Their devices.
        say: Reports an event.
        used: Receives each rank's GPU utilization every second.
        notebook: Recognizes the notebook's frames; None to report no lines of code.
    """

    run_ranks: RunRanks
    lease: Lease
    say: Callable[[Sampled | Noted], None]
    used: Callable[[Mapping[int, float | None]], None]
    notebook: NotebookFrames | None = None

    def __post_init__(self) -> None:
        self._memory_bytes: int | None = None
        self.gpus: tuple[str, ...] = () if self.lease.simulated else _gpus_here(self.lease, self.run_ranks)
        self._began_at = 0.0
        self._last_at = 0.0
        self._cpu_s: dict[int, float] = {}
        self._introduced: set[int] = set()
        self._lost: set[int] = set()
        self._waits: dict[int, _Wait] = {}
        self._waiting: dict[int, str] = {}
        self._pending: list[tuple[float, list[RankSample]]] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the live ranks."""
        return [process.pid for process in self.run_ranks.ranks if process.pid is not None and process.alive]

    def begin(self, now: float, trees: Mapping[int, TreeUse], memory_bytes: int) -> None:
        """Set the start of the first sample.

        Args:
            now: Time in seconds of a monotonic clock.
            trees: The ranks' usage so far, by pid.
            memory_bytes: Memory available to CPU ranks; 0 when unknown.
        """
        self._memory_bytes = memory_bytes or None
        self._began_at = self._last_at = now
        self._cpu_s = {pid: tree.cpu_s for pid, tree in trees.items()}

    def sample(self, now: float, trees: Mapping[int, TreeUse], readings: Mapping[str, GpuReading]) -> None:
        """Make one sample of each live rank.

        Args:
            now: The time when `trees` was taken.
            trees: The ranks' usage so far, by pid.
            readings: The GPUs' readings by UUID; a missing one has not answered.
        """
        seconds = now - self._last_at
        if seconds < _SLACK_S:
            return
        self._last_at = now
        alive = [process for process in self.run_ranks.ranks if process.alive]
        samples = [self._sample_of(each, now, seconds, trees.get(each.pid or 0), readings) for each in alive]
        self._cpu_s = {pid: tree.cpu_s for pid, tree in trees.items()}
        self._report_lost(samples, readings)
        if self.gpus:
            self.used({sample.rank: sample.utilization_pct for sample in samples})
        self._pending.append((seconds, samples))
        waiting = {sample.rank: sample.waits_in for sample in samples if sample.waits_in}
        has_changed, self._waiting = waiting != self._waiting, waiting
        is_due = sum(span for span, _ in self._pending) >= _COARSE_S - _SLACK_S
        if is_due or has_changed or now - self._began_at <= _FINE_S:
            self.publish()

    def publish(self) -> None:
        """Report the pending samples."""
        pending, self._pending = self._pending, []
        by_rank: dict[int, list[RankSample]] = {}
        for _, samples in pending:
            for sample in samples:
                by_rank.setdefault(sample.rank, []).append(sample)
        if by_rank:
            samples = tuple(self._introduce(merged(samples)) for samples in by_rank.values())
            self.say(Sampled(seconds=round(sum(span for span, _ in pending), 3), samples=samples))

    # ------------------------------------------------------------ internals

    def _sample_of(
        self,
        process: RankProcess,
        now: float,
        seconds: float,
        tree: TreeUse | None,
        readings: Mapping[str, GpuReading],
    ) -> RankSample:
        rank = process.rank
        uuid = self.lease.uuids[rank] if rank < len(self.lease.uuids) else ""
        before_s = self._cpu_s.get(process.pid or 0)
        cores = rss_bytes = None
        if tree is not None:
            rss_bytes = tree.rss_bytes
            # a descendant may have been reparented out of the tree
            cores = None if before_s is None else max(tree.cpu_s - before_s, 0.0) / seconds
        # equal to the number of threads that torch gets
        share = max(1, core_count() // max(len(self.run_ranks.ranks), 1))
        sample = RankSample(
            rank=rank,
            kind="cpu",
            uuid=uuid,
            total_bytes=self._memory_bytes,
            cpu_cores=cores,
            rss_bytes=rss_bytes,
            cores=share,
        )
        if self.notebook is not None:
            frames = parse(process.stack_file.sampled())
            line = "" if process.output.total_bytes else self._line_of(frames, self.notebook)
            waits_in = self._waits_in(process, frames, self.notebook, now, cores)
            sample = msgspec.structs.replace(sample, line=line, waits_in=waits_in)
        if not self.gpus:
            return sample
        reading = readings.get(uuid, GpuReading())
        own = tree.pids if tree is not None else frozenset[int]()
        # if NVML lists none of the rank's pids, its pids may be the host's
        known = own & reading.process_bytes.keys()
        return msgspec.structs.replace(
            sample,
            kind="mig" if uuid.startswith("MIG-") else "gpu",
            utilization_pct=reading.utilization_pct,
            own_utilization_pct=_own_pct(own, reading) if known else None,
            used_bytes=reading.used_bytes,
            own_bytes=sum(reading.process_bytes[pid] for pid in known) if known else None,
            total_bytes=reading.total_bytes,
            power_w=reading.power_w,
            temperature_c=reading.temperature_c,
            problem=reading.problem,
        )

    @staticmethod
    def _line_of(frames: Sequence[StackFrame], notebook: NotebookFrames) -> str:
        """Return where a rank is in its cell."""
        frame = notebook.innermost(frames)
        if frame is None:
            return ""
        return f"line {frame.line}: {notebook.source(frame)}"[:_MAX_LINE_CHARS].removesuffix(": ")

    def _waits_in(
        self,
        process: RankProcess,
        frames: Sequence[StackFrame],
        notebook: NotebookFrames,
        now: float,
        cores: float | None,
    ) -> str:
        """Return the collective that a rank has waited in for a while, silently and without using the processor."""
        name = notebook.collective(frames)
        if not name or cores is None or cores > BUSY_SHARE:
            self._waits.pop(process.rank, None)
            return ""
        frame = notebook.innermost(frames)
        wait = _Wait(name, 0 if frame is None else frame.line, process.output.total_bytes, now)
        before = self._waits.get(process.rank)
        if before is None or before[:-1] != wait[:-1]:
            self._waits[process.rank] = before = wait
        return name if now - before.since >= _WAITS_AFTER_S - _SLACK_S else ""

    def _introduce(self, sample: RankSample) -> RankSample:
        """Leave out values that do not change and were reported before."""
        if sample.rank in self._introduced:
            return msgspec.structs.replace(sample, uuid="", total_bytes=None, cores=None)
        if sample.total_bytes is not None:
            self._introduced.add(sample.rank)
        return sample

    def _report_lost(self, samples: Iterable[RankSample], readings: Mapping[str, GpuReading]) -> None:
        for sample in samples:
            reading = readings.get(sample.uuid)
            if reading is not None and reading.lost and reading.problem and sample.rank not in self._lost:
                self._lost.add(sample.rank)
                why = reading.problem.removeprefix("it can't be read: it ")
                self.say(Noted(text=f"rank {sample.rank}'s GPU ({sample.uuid}) {why}"))


def _gpus_here(lease: Lease, run_ranks: RunRanks) -> tuple[str, ...]:
    """Return the GPUs of a lease that are on this node."""
    if len(lease.shares) < 2:
        return lease.uuids
    return tuple(lease.uuids[rank] for rank in run_ranks.numbers if rank < len(lease.uuids))


def merged(samples: Sequence[RankSample]) -> RankSample:
    """Merge consecutive samples of a rank: means, and the maximum of memory."""
    last = samples[-1]
    return msgspec.structs.replace(
        last,
        utilization_pct=_mean(sample.utilization_pct for sample in samples),
        own_utilization_pct=_mean(sample.own_utilization_pct for sample in samples),
        used_bytes=_most(sample.used_bytes for sample in samples),
        own_bytes=_most(sample.own_bytes for sample in samples),
        power_w=_mean((sample.power_w for sample in samples), digits=0),
        temperature_c=_mean((sample.temperature_c for sample in samples), digits=0),
        cpu_cores=_mean((sample.cpu_cores for sample in samples), digits=2),
        rss_bytes=_most(sample.rss_bytes for sample in samples),
    )


def _mean(values: Iterable[float | None], digits: int = 1) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = round(sum(known) / len(known), digits)
    # a small integer takes one to three bytes on the wire, a float nine
    return int(mean) if mean == int(mean) else mean


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _own_pct(own: frozenset[int], reading: GpuReading) -> float | None:
    if reading.process_pct is None:
        return None
    return min(sum(pct for pid, pct in reading.process_pct.items() if pid in own), 100.0)


class Sampling:
    """The agent's sampler.

    Attributes:
        processes: Measures the usage of the ranks' processes.
        gpus: Reads the GPUs of the sampled runs.
    """

    def __init__(self) -> None:
        self.processes = ProcessTable()
        self.gpus = Gpus()
        self._shared_pages = SharedPages()
        self._loop = asyncio.get_running_loop()
        self._settling: dict[RunSampler, asyncio.TimerHandle] = {}
        # each with the handler for faults of its sampler
        self._runs: dict[RunSampler, faults.OnFault | None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, run: RunSampler) -> None:
        """Start to sample a run after a moment: its ranks have started."""
        self._settling[run] = self._loop.call_later(_SETTLED_S, self._settled, run)

    def end(self, run: RunSampler) -> None:
        """Stop sampling a run. Idempotent."""
        if (timer := self._settling.pop(run, None)) is not None:
            timer.cancel()
        elif run in self._runs:
            del self._runs[run]
            self.gpus.release(run.gpus)
            run.publish()
        if not self._runs and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Stop sampling all runs and close NVML."""
        for run in [*self._settling, *self._runs]:
            self.end(run)
        self.gpus.close()

    # ------------------------------------------------------------ internals

    @functools.cached_property
    def _memory_bytes(self) -> int:
        return memory_limit()

    def _settled(self, run: RunSampler) -> None:
        del self._settling[run]
        now = self._loop.time()
        run.begin(now, self.processes.trees(run.pids), self._memory_bytes)
        self._runs[run] = faults.charged()
        self.gpus.hold(run.gpus)
        if run.gpus:
            # opens NVML early, which may take long; the reading is dropped
            self.gpus.read(lambda _: None)
        if self._timer is None:
            with faults.charging(None):
                self._timer = self._loop.call_later(_INTERVAL_S - _SETTLED_S, self._due)

    def _due(self) -> None:
        # rescheduled first, from now: a pause gives one long sample instead of many, and a fault costs one sample
        self._timer = self._loop.call_later(_INTERVAL_S, self._due)
        self._tick()

    def _tick(self) -> None:
        now = self._loop.time()
        used = self.processes.trees([pid for run in self._runs for pid in run.pids])
        trees = self._shared_pages.counted_once(used)
        self._sample([run for run in self._runs if not run.gpus], now, trees, {})
        with_gpus = [run for run in self._runs if run.gpus]
        if with_gpus:
            self.gpus.read(lambda readings: self._sample(with_gpus, now, trees, readings))

    def _sample(
        self, runs: list[RunSampler], now: float, trees: Mapping[int, TreeUse], readings: Mapping[str, GpuReading]
    ) -> None:
        for run in runs:
            if run in self._runs:
                with faults.guarded(self._runs[run]):
                    run.sample(now, trees, readings)

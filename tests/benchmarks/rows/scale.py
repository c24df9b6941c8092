"""Ten thousand GPUs, a thousand runs, a hundred clients: the scheduler alone, and a whole pool service."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.run import ClientRun
from sgpu_magic.client.this_machine import this_owner
from sgpu_magic.config import load_settings
from sgpu_magic.payload.pack import new_key, pack_namespace
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.scheduling.stimuli import LaunchRun
from sgpu_magic.wire.base import new_id
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import RanksStarted
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.run import RunSpec
from tests.benchmarks.environment import ROOT, Bench
from tests.benchmarks.measure import Check, MeasurementFailed, Row, Series, at_most
from tests.benchmarks.simulation import Traffic, cluster, specs

GPUS, WAITING, USERS = 10_000, 500, 100
RUNS, RANKS, RATE = 1000, 20, 1000
_TYPES = ("h100", "a100", "l4", "a10")
_PATIENCE_S = 120.0


def placement(bench: Bench) -> Row:
    """What the scheduler takes for one thing that happens, with its thread's own clock."""
    scheduler = Scheduler(cluster(GPUS), pass_over_s=600)
    traffic = Traffic(scheduler)
    coming = specs(100_000, USERS)
    waiting = 0
    while waiting < WAITING:
        traffic.submit(next(coming))
        waiting = sum(run.lease is None for run in scheduler.runs)
    for run_id in list(traffic.running):
        traffic.begin(run_id)
    running, dice = len(traffic.running), random.Random(1)
    ended: list[float] = []
    submitted: list[float] = []
    placed = 0
    for _ in range(bench.count(400, 60)):
        run_id = dice.choice(traffic.running)
        began = time.thread_time()
        out = traffic.end(run_id)
        ended.append((time.thread_time() - began) * 1e3)
        given = [one.run_id for one in out if isinstance(one, LaunchRun)]
        placed += len(given)
        while waiting - len(given) < WAITING:
            spec = next(coming)
            began = time.thread_time()
            out = traffic.submit(spec)
            submitted.append((time.thread_time() - began) * 1e3)
            begun = [one.run_id for one in out if isinstance(one, LaunchRun)]
            given += begun
            waiting += 1
        waiting -= len(given)
        for one in given:
            traffic.begin(one)
    ends = Series("a run ends, others get its devices", tuple(ended), unit="ms")
    return Row(
        f"Scheduler: {GPUS:,} GPUs on {GPUS // 8:,} nodes, {running} runs, {WAITING} waiting, {USERS} users",
        ours=[ends, Series("a run is submitted", tuple(submitted), unit="ms")],
        checks=[at_most(ends, 10.0)],
        notes=[f"Processor time of the scheduler alone; {placed} runs were placed in {len(ended)} ends."],
    )


def events(bench: Bench) -> Row:
    """What a pool service takes while its runs print a thousand lines a second."""
    folder = bench.new_folder()
    variables = bench.environment(
        folder,
        SGPU_STATE_DIR=str(folder / "state"),
        SGPU_RUNTIME_DIR=str(folder / "run"),
        SGPU_LOCK_DIR=str(folder / "lock"),
        SGPU_CONFIG=str(folder / "no-config.toml"),
        PYTHONPATH=str(ROOT),
    )
    seconds = bench.count(20, 5)
    running = sum(count // RANKS for count in Counter(device.type for device in cluster(GPUS).devices).values())
    service = _Service(variables, folder)
    clients: list[_Client] = []
    try:
        bare_mb = service.memory_mb()
        before = service.cpu_s()
        clients = [_Client(variables, number) for number in range(USERS)]
        for number in range(RUNS):
            clients[number % USERS].submit(number)
        _until(lambda: sum(client.begun for client in clients) >= running, "the runs have begun")
        taken_ms = (service.cpu_s() - before) / RUNS * 1e3
        full_mb = service.memory_mb()
        service.order(f"emit {RATE}")
        before, began = service.cpu_s(), time.monotonic()
        time.sleep(seconds)
        cpu_s, wall_s = service.cpu_s() - before, time.monotonic() - began
        sent = service.halt()
        _until(lambda: sum(client.lines for client in clients) >= sent, "all lines have come")
        received = sum(client.lines for client in clients)
        whole_ms, status_ms = _status_ms(service, clients)
        most_mb = service.memory_mb()
    finally:
        for client in clients:
            client.close()
        service.close()
    later = Series("processor for each later one", (status_ms,), unit="ms")
    share = Series("processor, of one core", (cpu_s / wall_s * 100,), unit="%")
    return Row(
        f"Pool service: {GPUS:,} GPUs, {running} runs, {RUNS - running} waiting, {USERS} clients, {RATE:,} lines/s",
        ours=[
            share,
            Series("processor for a run that is submitted", (taken_ms,), unit="ms"),
            Series("processor for a client's first status", (whole_ms,), unit="ms"),
            later,
            Series("memory", (most_mb,), unit="MB"),
        ],
        checks=[
            at_most(share, 100.0),
            at_most(later, 2.0),
            Check("no line lost", f"{received:,} of {sent:,}", received == sent),
            Check(f"{RATE:,} lines/s", f"{sent / wall_s:,.0f}", sent >= 0.95 * RATE * seconds),
        ],
        notes=[
            "A real service with real clients over its socket; its nodes are simulated inside it, and what simulates "
            f"them is counted too. While the lines come, 5 runs a second end and others begin. Memory: {bare_mb:.0f} "
            f"MB with all nodes and no run, {full_mb:.0f} MB with all runs, {most_mb:.0f} MB after {sent:,} lines."
        ],
    )


class _Service:
    """The simulated pool's process."""

    def __init__(self, variables: Mapping[str, str], folder: Path) -> None:
        with open(folder / "pool.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.simulated_pool", str(GPUS)],
                env=dict(variables),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._log = folder / "pool.log"
        self._measured = psutil.Process(self._process.pid)
        self._expect("ready")

    def cpu_s(self) -> float:
        times = self._measured.cpu_times()
        return times.user + times.system

    def memory_mb(self) -> float:
        return self._measured.memory_info().rss / 1e6

    def order(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def halt(self) -> int:
        self.order("halt")
        return int(self._expect("sent "))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _expect(self, word: str) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line.startswith(word):
            raise MeasurementFailed(f"the pool said {line!r}: {self._log.read_text()[-400:]}")
        return line.removeprefix(word)


class _Client:
    """One user's client: it submits runs, and counts what they print.

    Attributes:
        begun: Runs whose ranks have started.
        lines: Lines that have come.
    """

    def __init__(self, variables: Mapping[str, str], number: int) -> None:
        self.pool = Pool(load_settings(variables))
        self.begun = self.lines = 0
        self._variables = {"PATH": os.environ["PATH"]}
        self._owner = msgspec.structs.replace(this_owner(), user=f"user{number:03d}")
        self._runs: list[ClientRun] = []
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def submit(self, number: int) -> None:
        key = new_key()
        spec = RunSpec(
            run_id=new_id(),
            name=f"cell {number}",
            cell=next(specs(1, 1)).cell,
            placement=Placement(ranks=RANKS, device_type=_TYPES[number % len(_TYPES)]),
            outputs=(),
            owner=self._owner,
            timeout_s=86400.0,
        )
        self._runs.append(self.pool.submit(spec, pack_namespace({}, {}, key), key, self._variables))

    def close(self) -> None:
        self._closed.set()
        self._reader.join()
        self.pool.close()

    def _read(self) -> None:
        while not self._closed.is_set():
            idle = True
            for run in list(self._runs):
                while (item := run.next_event(0.0)) is not None:
                    idle = False
                    self.lines += isinstance(item[0].body, OutputWritten)
                    self.begun += isinstance(item[0].body, RanksStarted)
            if idle:
                self._closed.wait(0.2)


def _status_ms(service: _Service, clients: Sequence[_Client]) -> tuple[float, float]:
    """Milliseconds of the service's processor for the first status of a client, and for those that follow."""
    # not measured: what the service reads only for its first client
    clients[0].pool.status(20)
    before = service.cpu_s()
    for client in clients[1:]:
        client.pool.status(20)
    whole = service.cpu_s()
    for client in clients:
        client.pool.status(20)
    return (whole - before) / (len(clients) - 1) * 1e3, (service.cpu_s() - whole) / len(clients) * 1e3


def _until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"not within {_PATIENCE_S:.0f} s: {what}")
        time.sleep(0.1)

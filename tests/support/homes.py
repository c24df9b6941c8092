"""A pool's own directories, separate from every other pool's, and every process that belongs to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from process_table import (
    Process,
    below,
    descriptors,
    is_alive,
    level,
    listening,
    memory_files,
    no_more,
    process_table,
    stop_process,
)
from waiting import eventually

_NOT_INHERITED = (
    "SGPU_",
    "JPY_",
    "JUPYTER_",
    "IPYTHON",
    "PYTEST_",
    "MPLBACKEND",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MLFLOW_",
)
# the files that a pool leaves in its runtime directory after an orderly end
_STAYS = {"pool.lock"}
# at the far ends of logins, and ssh itself
_OF_LOGINS = ("sgpu_magic.client.ssh.relay", "sgpu_magic.nodes.ssh.node_end", "exec /bin/sh -s")
# this many successive readings, 20 ms apart, must agree
_SAME_LOOKS = 20
# a just-forked process may still look like its parent
_IS_ITSELF_S = 5
# descriptors that libraries open once in a notebook: memory of a ctypes callback, a pipe for child processes
_LIBRARIES_KEEP = 5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Row(NamedTuple):
    """A run's row in the ledger."""

    state: str
    failure: str
    name: str


class Home:
    """One pool's own directories, and the processes that belong to it.

    Args:
        variables: Further environment variables of its processes.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        # short: a socket's path ends at 108 bytes
        self.path = Path(tempfile.mkdtemp(prefix="sgt"))
        for name in ("state", "run", "lock", "work", "tmp", "ipython", "jupyter"):
            (self.path / name).mkdir(mode=0o700)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        self.environ = environ | {
            "SGPU_STATE_DIR": str(self.state),
            "SGPU_RUNTIME_DIR": str(self.runtime),
            "SGPU_LOCK_DIR": str(self.path / "lock"),
            "SGPU_CONFIG": str(self.path / "no-config.toml"),
            # an unused status subscription would keep a thread for a minute
            "SGPU_STATUS_IDLE_S": "1",
            # tests of tracking turn it on; others must not start an additional process
            "SGPU_TRACK": "off",
            # tests of lock files turn it on; the others must not query the package index
            "SGPU_LOCK_ENVIRONMENTS": "off",
            # tests of preloading turn it on; beside the others it would take processor time
            "SGPU_PRELOAD": "off",
            "TMPDIR": str(self.path / "tmp"),
            "IPYTHONDIR": str(self.path / "ipython"),
            "JUPYTER_CONFIG_DIR": str(self.path / "jupyter"),
            "JUPYTER_DATA_DIR": str(self.path / "jupyter"),
            "JUPYTER_RUNTIME_DIR": str(self.path / "jupyter"),
            **(variables or {}),
        }
        self.kernel_pids: set[int] = set()
        # a served pool listens for other machines
        self.pool_listens = False
        self._levels: dict[int, dict[str, int]] = {}
        # runs of earlier test modules
        self._old_runs: set[str] = set()
        # start times of all processes seen in this home: an orphan may have no other identification
        self._seen: dict[int, int] = {}
        # pids and start times of processes that don't belong to this home
        self._strangers: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def runtime(self) -> Path:
        return self.path / "run"

    @property
    def work(self) -> Path:
        """Working directory of the kernels."""
        return self.path / "work"

    @property
    def runs(self) -> list[str]:
        """Return the ids of this module's runs that have a directory, oldest first."""
        folder = self.state / "runs"
        began: dict[str, int] = {}
        for entry in folder.iterdir() if folder.is_dir() else ():
            # a pool may be removing it, under a hidden name
            with contextlib.suppress(FileNotFoundError):
                if not entry.name.startswith(".") and entry.name not in self._old_runs:
                    began[entry.name] = _oldest_file(entry)
        return sorted(began, key=lambda name: began[name])

    def run_dir(self, run_id: str) -> Path:
        return self.state / "runs" / run_id

    def ledger(self) -> dict[str, Row]:
        """Return the ledger's rows of this module's runs, oldest first."""
        path = self.state / "ledger.sqlite3"
        if not path.exists():
            return {}
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE name = 'runs'").fetchall()
            rows = database.execute("SELECT run_id, state, failure, name FROM runs ORDER BY seq") if tables else ()
            rows = list(rows)
        return {run_id: Row(*rest) for run_id, *rest in rows if run_id not in self._old_runs}

    def run_named(self, name: str) -> str:
        """Return the id of the run that was started with this `--name`, "" while there is none."""
        return next((run_id for run_id, row in self.ledger().items() if row.name == name), "")

    def log(self, run_id: str, rank: int) -> str:
        """Return what a rank has printed so far."""
        try:
            return (self.run_dir(run_id) / f"rank-{rank}.log").read_text()
        except FileNotFoundError:
            return ""

    def begin_module(self) -> None:
        """Forget the runs and files of earlier test modules, since names repeat."""
        self._old_runs |= {*self.ledger(), *self.runs}
        for entry in self.work.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    # ------------------------------------------------------------ processes

    def pool_pid(self) -> int | None:
        """Return the pid of the running pool."""
        try:
            pid = int(json.loads((self.state / "pool.json").read_bytes())["pid"])
        except (OSError, ValueError, KeyError):
            return None
        return pid if is_alive(pid) else None

    def processes(self) -> dict[int, Process]:
        """Return every process of this home.

        These are the processes with its paths in their environment, command or output, their descendants, and those
        that were found earlier, whose parents may be dead.
        """
        table = process_table(self._strangers)
        found = {pid for pid, process in table.items() if self._is_marked(process)}
        found |= below(found, table)
        old = time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S - _IS_ITSELF_S * _TICKS_PER_S
        self._strangers = {pid: process.start for pid, process in table.items() if process.start < old}
        for pid in found:
            self._strangers.pop(pid, None)
        with self._lock:
            found |= {pid for pid, start in self._seen.items() if pid in table and table[pid].start == start}
            # zombies reparented to init are reaped by init
            found -= {pid for pid in found if table[pid].state == "Z" and table[pid].parent == 1}
            found.discard(os.getpid())
            processes = {pid: table[pid] for pid in found}
            self._seen.update({pid: process.start for pid, process in processes.items()})
        return processes

    def _is_marked(self, process: Process) -> bool:
        mark = str(self.path)
        inside = f"{mark}/"
        return (
            mark.encode() in process.environ
            or inside in process.command
            or process.cwd.startswith(inside)
            or process.stdout.startswith(inside)
        )

    def agent_pids(self) -> list[int]:
        """Return the pids of agents. An adopted agent's parent is not in this home."""
        return _those(_is_agent, self.processes())

    def zygote_pids(self) -> list[int]:
        return _those(_is_zygote, self.processes())

    def rank_pids(self) -> list[int]:
        """Return the pids of runs' ranks and of their orphans.

        Standby ranks are left out (they have no working directory yet).
        """
        zygotes = self.zygote_pids()
        return [pid for pid, p in self.processes().items() if p.parent in zygotes and p.cwd != "/"]

    def standby_pids(self) -> list[int]:
        zygotes = self.zygote_pids()
        return [pid for pid, p in self.processes().items() if p.parent in zygotes and p.cwd == "/"]

    def unexpected(self) -> dict[int, str]:
        """Return pid and description of processes that are not needed while no run is active."""
        return self._unexpected_of(self.processes())

    def _unexpected_of(self, processes: Mapping[int, Process]) -> dict[int, str]:
        pool = self.pool_pid()
        expected = {pid for pid in self.kernel_pids if pid in processes}
        if pool is not None:
            zygotes = {pid for pid, process in processes.items() if _is_zygote(process)}
            expected |= {pool} | zygotes | {pid for pid, process in processes.items() if _is_agent(process)}
            expected |= {pid for pid, p in processes.items() if p.parent in zygotes and p.cwd == "/"}
            expected |= {pid for pid, p in processes.items() if p.parent == pool and _is_servant(p)}
            expected |= {pid for pid, p in processes.items() if any(name in p.command for name in _OF_LOGINS)}
        return {pid: str(processes[pid]) for pid in processes.keys() - expected}

    # ------------------------------------------------------------ leaks

    def has_settled(self, pid: int) -> None:
        """Wait until no more threads start, and record the process's level, which must hold after every test."""
        seen = [level(pid)]

        def same() -> bool:
            seen.append(level(pid))
            return len(seen) > _SAME_LOOKS and all(found == seen[-1] for found in seen[-_SAME_LOOKS:])

        eventually(same, 10, lambda: f"{pid} does not settle: {seen[-_SAME_LOOKS:]}")
        self._levels[pid] = seen[-1]

    def check_leaks(self) -> None:
        """Wait until nothing is left of the test's runs; fail if something stays."""
        processes: dict[int, Process] = {}

        def nothing_goes_on() -> bool:
            nonlocal processes
            processes = self.processes()
            return not self._unexpected_of(processes)

        eventually(nothing_goes_on, 10, lambda: f"processes are left behind: {self._unexpected_of(processes)}")
        pool = self.pool_pid()
        agents = _those(_is_agent, processes)
        watched = [pid for pid in (pool, *agents, *self.kernel_pids) if pid is not None and is_alive(pid)]
        for pid in watched:
            kind = "pool" if pid == pool else "agent" if pid in agents else "kernel"
            if pid not in self._levels:
                if kind == "agent":
                    # an agent that has just lost a rank keeps some of its descriptors for a moment
                    self.has_settled(pid)
                    continue
                eventually(lambda pid=pid: level(pid) == level(pid), 5, f"the {kind} does not settle")
                self._levels[pid] = level(pid)
                continue
            before = self._levels[pid]
            # read once: reading a process's memory map takes most of this check's time
            now = level(pid)
            if now["libraries"] != before["libraries"]:
                # the notebook has imported something that may have threads of its own
                now = level(pid)
                before = self._levels[pid] = now | {
                    name: max(now[name], before[name]) for name in ("fds", "most fds", "threads")
                }
            slack = _LIBRARIES_KEEP if kind == "kernel" else 2
            if no_more(now, before, slack):
                continue
            try:
                eventually(
                    lambda pid=pid, before=before, slack=slack: no_more(level(pid), before, slack),
                    10,
                    lambda pid=pid, before=before, kind=kind: (
                        f"the {kind} ({pid}) grew: {before} -> {level(pid)}; {sorted(descriptors(pid).values())}"
                    ),
                )
            except AssertionError:
                # only this test fails, not all later ones
                del self._levels[pid]
                raise
        for pid in agents:
            eventually(
                lambda pid=pid: memory_files(pid) == 0,
                10,
                lambda pid=pid: f"the agent holds memory files: {descriptors(pid)}",
            )
        found: dict[int, str] = {}

        def nobody_listens() -> bool:
            nonlocal processes, found
            first = None if self.pool_listens else pool
            servants = [first, *_those(_is_agent, processes), *_those(_is_zygote, processes)]
            found = listening([pid for pid in servants if pid is not None])
            # a just-forked rank may have looked like its zygote
            processes = self.processes() if found else processes
            return not found

        eventually(nobody_listens, 5, lambda: f"the pool, the agent or a zygote listens: {found}")

    def close(self) -> None:
        """Stop the pool, check that all of this home's processes are gone, and remove its directories."""
        pool = self.pool_pid()
        if pool is None:
            # a test may have removed the pool's disk, and its address with it
            pool = next(
                iter(_those(lambda process: process.command.endswith("-m sgpu_magic.pool"), self.processes())), None
            )
        problem = ""
        try:
            if pool is not None:
                stop_process(pool, signal.SIGTERM, 10)
            eventually(lambda: not self.processes(), 10, lambda: f"left after the pool's end: {self.processes()}")
            # none when the pool was removed with all that it had
            files = (path for path in self.runtime.rglob("*") if not path.is_dir())
            left = {path.name for path in files} - _STAYS
            problem = f"left in the runtime directory: {sorted(left)}" if pool is not None and left else self._fault()
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.path, ignore_errors=True)
        assert not problem, problem

    def _fault(self) -> str:
        """Return an internal error of the pool or its agent, even one that a retry has hidden."""
        log = self.state / "pool.log"
        text = log.read_text(errors="replace") if log.is_file() else ""
        return f"faults in the pool's log:\n{text[-4000:]}" if "Traceback (most recent call last)" in text else ""


def _oldest_file(folder: Path) -> int:
    """Return the time in nanoseconds of the folder's first own file; a linked file may be older than the folder."""
    times = [folder.stat().st_mtime_ns]
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = entry.stat()
            if entry.is_file() and found.st_nlink == 1:
                times.append(found.st_mtime_ns)
    return min(times)


def _those(kind: Callable[[Process], bool], processes: Mapping[int, Process]) -> list[int]:
    return [pid for pid, process in processes.items() if kind(process)]


def _is_agent(process: Process) -> bool:
    return "-m sgpu_magic.agent " in process.command


def _is_servant(process: Process) -> bool:
    """Whether this is one of the pool's helper processes for MLflow or Ray."""
    return "-m sgpu_magic.tracking " in process.command or "-m sgpu_magic.nodes.ray " in process.command


def _is_zygote(process: Process) -> bool:
    # a rank has the same command, but its output is a pipe
    return "-m sgpu_magic.worker.process.zygote " in process.command and process.stdout.endswith(".log")

"""Sends signals to real processes of a home, and checks what is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

from homes import Home
from process_table import is_alive
from waiting import eventually

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.wire.events import EventBody, RanksStarted


def pid_of(home: Home, role: str) -> int:
    """Return the pid of the living pool, agent or zygote."""
    found = {
        "pool": lambda: [home.pool_pid()],
        "agent": home.agent_pids,
        "zygote": home.zygote_pids,
    }[role]()
    pids = [pid for pid in found if pid is not None]
    assert len(pids) == 1, f"{role}: {pids}"
    return pids[0]


def send(number: int, *pids: int) -> None:
    """Send a signal; processes that are already gone are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(*pids: int) -> None:
    send(signal.SIGKILL, *pids)


def all_gone(pids: Iterable[int], deadline_s: float) -> None:
    """Wait until none of these processes runs any more."""
    eventually(
        lambda: not any(map(is_alive, pids)),
        deadline_s,
        lambda: f"still there: {[pid for pid in pids if is_alive(pid)]}",
    )


def events_of(home: Home, run_id: str) -> list[EventBody]:
    """Return all events of a run."""
    try:
        return [event.body for event, _ in EventFile(home.run_dir(run_id)).new_events()]
    except FileNotFoundError:
        return []


def ranks_of(home: Home, run_id: str) -> list[int]:
    """Return the pids of a run's ranks in its newest attempt, in rank order; empty before they have started."""
    started = [body.pids for body in events_of(home, run_id) if isinstance(body, RanksStarted)]
    return list(started[-1]) if started else []


def command(home: Home, *words: str) -> str:
    """Run `sgpu` as a user does and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "sgpu_magic.cli", *words],
        env=home.environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, f"sgpu {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout

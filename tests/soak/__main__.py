"""`make soak`: SOAK_RUNS runs (500), drawn from SOAK_SEED, from SOAK_KERNELS notebooks (3) at once."""

from __future__ import annotations

import os
import queue
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from homes import Home
from kernels import Kernel
from process_table import descriptors, level, listening, memory_files, no_more
from waiting import eventually

from soak.notebook import Notebook, Results
from soak.plans import KINDS, MAX_RANKS, Plan, draw
from soak.pool import Pool

_SLOTS = 6
_EVERY = 25
# tolerance for the machine's shared memory, which other processes use, too
_SHARED_BYTES = 64_000_000
_LONGEST_S = 3600.0
_VARIABLES = {"SGPU_CPU_SLOTS": str(_SLOTS), "SGPU_GRACE_S": "1", "SGPU_ADOPT_TIMEOUT_S": "5"}
_FINAL = {"succeeded", "failed", "cancelled", "timed out"}


def main() -> int:
    """Soak, print what was found, return the exit status."""
    count = int(os.environ.get("SOAK_RUNS") or 500)
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1_000_000))
    kernels = int(os.environ.get("SOAK_KERNELS") or 3)
    print(f"soak: {count} runs from {kernels} notebooks, SOAK_SEED={seed}", flush=True)
    shared_before, names_before = _shared_bytes(), set(os.listdir("/dev/shm"))
    home = Home(_VARIABLES)
    results = Results()
    began = time.monotonic()
    try:
        _soak(home, draw(seed, count), kernels, random.Random(seed), results)
    finally:
        _note(results, home.close)
    _note(results, lambda: _check_shared(shared_before, names_before))
    _print_table(results)
    for problem in results.problems:
        print(f"--- {problem}")
    verdict = f"{len(results.problems)} problems" if results.problems else "nothing lost, nothing left"
    print(f"soak: {results.done} runs in {time.monotonic() - began:.0f} s, SOAK_SEED={seed}: {verdict}", flush=True)
    return 1 if results.problems else 0


def _soak(home: Home, plans: list[Plan], kernels: int, source: random.Random, results: Results) -> None:
    pool = Pool(home, source)
    waiting: queue.SimpleQueue[Plan] = queue.SimpleQueue()
    for plan in plans:
        waiting.put(plan)
    began = time.monotonic()

    def progress() -> None:
        with results.lock:
            if results.done % _EVERY == 0:
                outcomes = Counter[str]()
                for (_, state), times in results.outcomes.items():
                    outcomes[state] += times
                reported = ", ".join(f"{times} {state}" for state, times in sorted(outcomes.items()))
                struck = ", ".join(f"{roles} {times}x" for roles, times in sorted(pool.counts.items())) or "nothing"
                print(
                    f"soak: {results.done}/{len(plans)} runs, {time.monotonic() - began:.0f} s: {reported}; "
                    f"struck {struck}; {len(results.problems)} problems",
                    flush=True,
                )

    with_first = Kernel(home)
    levels: dict[str, dict[str, int]] = {}
    notebooks = [Notebook(home, pool, waiting, results, progress) for _ in range(kernels)]
    try:
        with_first.check(f"%%distributed -n {_SLOTS} --ui none\npass")
        results.extra_runs += 1
        eventually(lambda: not home.unexpected(), 10, "the first run's end")
        levels = {"pool": level(home.pool_pid() or 0), "agent": level(home.agent_pids()[0])}
        for notebook in notebooks:
            notebook.start()
        for notebook in notebooks:
            notebook.is_done.wait(_LONGEST_S)
        _note(results, lambda: _check_all_slots(with_first, results))
        _check_what_is_left(home, levels, results)
        _note(results, lambda: _check_ledger(home, plans, results))
    finally:
        for notebook in notebooks:
            notebook.may_close.set()
        for notebook in notebooks:
            if notebook.ident is not None:
                notebook.join(30)
        with_first.close()


def _note(results: Results, check: Callable[[], None]) -> None:
    try:
        check()
    except AssertionError as error:
        results.problems.append(str(error))


# ---------------------------------------------------------------- checks at the end


def _check_all_slots(kernel: Kernel, results: Results) -> None:
    """One run gets all the slots there are, at once: no lease is held."""
    results.extra_runs += 1
    reply = kernel.run(f"%%distributed -n {_SLOTS} --wait 0 --ui none\npass")
    assert reply.status == "ok", f"slots are still held: {reply.story}"


def _check_what_is_left(home: Home, levels: dict[str, dict[str, int]], results: Results) -> None:
    def processes() -> None:
        eventually(lambda: not home.unexpected(), 10, lambda: f"processes are left behind: {home.unexpected()}")

    def grown(role: str, pid: int) -> None:
        before = {name: value for name, value in levels[role].items() if name != "libraries"}
        # asyncio starts the threads of its executor one by one, up to this many
        before["threads"] += min(32, (os.cpu_count() or 1) + 4)
        eventually(
            lambda: no_more(level(pid), before),
            15,
            lambda: f"the {role} has grown: {before} -> {level(pid)}: {sorted(descriptors(pid).values())}",
        )

    def memory() -> None:
        for pid in (home.pool_pid() or 0, *home.agent_pids()):
            eventually(lambda pid=pid: memory_files(pid) == 0, 15, lambda pid=pid: f"{pid} holds memory files")

    def ports() -> None:
        held = listening([home.pool_pid() or 0, *home.agent_pids(), *home.zygote_pids()])
        assert not held, f"the pool, the agent or a zygote listens: {held}"

    _note(results, processes)
    _note(results, lambda: grown("pool", home.pool_pid() or 0))
    for pid in home.agent_pids():
        _note(results, lambda pid=pid: grown("agent", pid))
    _note(results, memory)
    _note(results, ports)


def _check_ledger(home: Home, plans: list[Plan], results: Results) -> None:
    """The ledger has every run that was started, once, and each has ended."""
    rows = home.ledger()
    names = Counter(row.name for row in rows.values() if row.name.startswith("soak-"))
    missing = sorted({plan.name for plan in plans} - set(names))
    twice = sorted(name for name, times in names.items() if times > 1)
    unfinished = {run_id: row for run_id, row in rows.items() if row.state not in _FINAL}
    assert not missing, f"runs that the ledger lacks: {missing}"
    assert not twice, f"runs that the ledger has more than once: {twice}"
    assert not unfinished, f"runs that the ledger shows as going on: {unfinished}"
    others = len(rows) - len(names)
    assert others == results.extra_runs, f"{others} other runs in the ledger, {results.extra_runs} were started"


def _check_shared(before: int, names: set[str]) -> None:
    """Memory files have no name; what they take is only seen in the machine's sum."""
    eventually(
        lambda: _shared_bytes() - before < _SHARED_BYTES,
        20,
        lambda: f"shared memory: {before / 1e6:.0f} MB before, {_shared_bytes() / 1e6:.0f} MB after",
    )
    left = {name for name in set(os.listdir("/dev/shm")) - names if not name.startswith("sem.")}
    assert not left, f"left in /dev/shm: {sorted(left)}"


def _shared_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def _print_table(results: Results) -> None:
    states = sorted({state for _, state in results.outcomes})
    width = max(map(len, KINDS))
    print(f"{'what was done':{width}}  " + "  ".join(f"{state:>9}" for state in states))
    for kind in KINDS:
        counts = [results.outcomes[kind, state] for state in states]
        if any(counts):
            print(f"{kind:{width}}  " + "  ".join(f"{count or '':>9}" for count in counts))


if __name__ == "__main__":
    assert MAX_RANKS <= _SLOTS
    sys.exit(main())

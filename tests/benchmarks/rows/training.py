"""Training: the step loop costs what it costs under torchrun."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.benchmarks.environment import SCRIPTS, Bench, distributed
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.measure import Check, MeasurementFailed, Row, Series, pairs_needed, ratio_with_upper_bound
from tests.benchmarks.processes import run

STEPS = 100
BLOCKS = 20
_LIMIT = 1.02
_START_S = 90.0
_BLOCK_S = 60.0


def step_loop(bench: Bench) -> Row:
    pairs = bench.count(40, 4)
    row = Row("training step loop of the quickstart, pairs of programs in turn")
    row.notes.append(
        "DistributedDataParallel on 2 ranks, data shaped like scikit-learn's digits. The same text trains in a cell "
        f"and under torchrun, both at the same time and in turn: one trains {STEPS} steps while the other waits, "
        f"{BLOCKS} times, in alternating order. That makes one pair; each of the {pairs} pairs has new processes, "
        "because two runs of one program differ by some percent for as long as they live. Our pool, agent and kernel "
        "are there during torchrun's turns too, so what they use beside a run (0.1 % of a core) is on both sides. "
        "`SGPU_STANDBY=0`, so that no group of ours waits beside. The bound is one-sided, Student's t on the ratios' "
        "logarithms."
    )
    ours: list[float] = []
    theirs: list[float] = []
    with row.attempt(), bench.our_kernel(SGPU_STANDBY="0") as kernel:
        for _ in range(pairs):
            with _both(bench, kernel) as (mine, other):
                spent = {mine: 0.0, other: 0.0}
                for block in range(BLOCKS):
                    for loop in (mine, other) if block % 2 == 0 else (other, mine):
                        spent[loop] += _block(loop)
            ours.append(spent[mine])
            theirs.append(spent[other])
    row.ours = [Series("loop", tuple(ours))] if ours else []
    row.peers = [Series("torchrun", tuple(theirs))]
    mean, bound = ratio_with_upper_bound(ours, theirs)
    met = None if math.isnan(bound) else bound <= _LIMIT
    row.checks = [Check(f"ratio's 95 % upper bound at most {_LIMIT}", f"{bound:.3f}" if ours else "not measured", met)]
    if len(ours) > 1:
        row.notes.append(
            f"Ratio over {len(ours)} pairs: mean {mean:.4f}, upper bound {bound:.4f}. With this noise a true ratio of "
            f"1 needs {pairs_needed(ours, theirs, _LIMIT)} pairs for a bound of {_LIMIT}."
        )
    return row


@contextlib.contextmanager
def _both(bench: Bench, kernel: BenchKernel) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both programs, ready to train; they end with the context."""
    folder = bench.new_folder()
    text = (SCRIPTS / "training_loop.py").read_text().split('if __name__ == "__main__":')[0]
    body = f"{text}\ntrain_on_request(rank, world_size, {STEPS}, {str(folder / 'ours')!r})\n"
    command = bench.torchrun(2, "training_loop.py", str(STEPS), str(folder / "torchrun"))
    environment = bench.environment(folder)
    # the sockets are closed before the threads are joined
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as ends:
        listeners = [ends.enter_context(_listener(folder / name)) for name in ("ours", "torchrun")]
        threads.submit(distributed, kernel, "--gpus 2", body, timeout_s=300)
        threads.submit(run, command, timeout_s=300, environment=environment)
        mine, other = (ends.enter_context(_connection(listener)) for listener in listeners)
        yield mine, other


@contextlib.contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(_START_S)
        listener.bind(str(path))
        listener.listen(1)
        yield listener


def _connection(listener: socket.socket) -> socket.socket:
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        name = Path(listener.getsockname()).name
        raise MeasurementFailed(f"{name}: the program did not begin within {_START_S:g} s") from None
    connection.settimeout(_BLOCK_S)
    return connection


def _block(loop: socket.socket) -> float:
    """Have one program train, and return its seconds."""
    answer = b""
    try:
        loop.sendall(b"x")
        while not answer.endswith(b"\n"):
            part = loop.recv(64)
            if not part:
                raise MeasurementFailed("a program ended before its last block")
            answer += part
    except OSError as error:
        raise MeasurementFailed(f"a program does not answer: {error}") from None
    return float(answer)

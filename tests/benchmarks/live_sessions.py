"""Live sessions of four processes in a kernel: ours and the peers', behind one form."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.benchmarks.environment import Bench
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.measure import MeasurementFailed, Series, collect
from tests.benchmarks.peers import IPYPARALLEL
from tests.benchmarks.processes import end_descendants

RANKS = 4
NOTHING = "pass"
PRINT = "print(f'one line of rank {rank}')"
_LINE = re.compile(r"one line of rank (\d)")

_TIMED = """
import time as bench_time

def bench_magic(magic, body):
    started = bench_time.perf_counter()
    get_ipython().run_cell_magic(magic, "", body)
    return bench_time.perf_counter() - started
"""
_REST_S = 0.05  # users pause for longer; processes that have slept are slower, ours and the peers' alike
_LONG_REST_S = 0.5
_NOT_COUNTED = 5
_READY_ROUNDS = 20


@dataclass(frozen=True)
class LiveSession:
    """A kernel whose `%%magic` runs a cell on four processes that stay.

    Args:
        label: What the report calls it.
        kernel: The kernel.
        magic: The magic's name.
    """

    label: str
    kernel: BenchKernel
    magic: str

    def get_ready(self) -> None:
        """Run cells that are not counted, until one of them prints a line on each rank.

        Raises:
            MeasurementFailed: None did.
        """
        self.kernel.check(_TIMED)
        for _ in range(_READY_ROUNDS):
            reply = self.kernel.execute(f"%%{self.magic}\n{PRINT}", timeout_s=60)
            if reply.status == "ok" and len(set(_LINE.findall(reply.text))) == RANKS:
                break
        else:
            raise MeasurementFailed(f"no cell printed on all ranks: {reply.error or reply.text[-200:]!r}")
        for _ in range(_NOT_COUNTED):
            self.kernel.check(f"bench_magic({self.magic!r}, {NOTHING!r})")

    def series(self, body: str, count: int) -> list[Series]:
        """Time a cell as its client sees it, with and without rest, and as the kernel sees its magic.

        Args:
            body: `NOTHING` or `PRINT`; a sample of the latter whose lines are not all in the output fails.
            count: Samples of each series.
        """
        in_kernel = f"bench_s = bench_magic({self.magic!r}, {body!r})"

        def seen_by_kernel() -> float:
            reply = self.kernel.check(in_kernel, expression="bench_s")
            _hold_lines(body, reply.text)
            return reply.value

        def seen_by_client() -> float:
            reply = self.kernel.check(f"%%{self.magic}\n{body}")
            _hold_lines(body, reply.text)
            return reply.round_trip_s

        def taken(label: str, sample: Callable[[], float], pause_s: float) -> Series:
            samples = count if pause_s < _LONG_REST_S else count // 5
            return collect(label, sample, samples, pause_s=pause_s, most_failures=count)

        return [
            taken(f"{self.label}, at the front end", seen_by_client, _REST_S),
            taken(f"{self.label}, at the front end, without rest", seen_by_client, 0.0),
            taken(f"{self.label}, at the front end, 0.5 s of rest", seen_by_client, _LONG_REST_S),
            taken(f"{self.label}, in the kernel", seen_by_kernel, _REST_S),
        ]


def _hold_lines(body: str, text: str) -> None:
    if body == PRINT and sorted(_LINE.findall(text)) != [str(rank) for rank in range(RANKS)]:
        raise MeasurementFailed(f"not one line of each rank: {text[-200:]!r}")


@contextlib.contextmanager
def our_session(bench: Bench) -> Iterator[LiveSession]:
    """A connected session in a kernel with a pool of its own."""
    with bench.our_kernel() as kernel:
        kernel.check(f"%sgpu_connect --gpus {RANKS}")
        session = LiveSession("ours", kernel, "distributed")
        session.get_ready()
        yield session


@contextlib.contextmanager
def ipyparallel_session(bench: Bench) -> Iterator[LiveSession]:
    """A cluster of four engines, each with its number as `rank`."""
    with bench.peer_kernel() as kernel:
        kernel.check(IPYPARALLEL, timeout_s=90)
        session = LiveSession("ipyparallel %%px", kernel, "px")
        session.get_ready()
        yield session


@contextlib.contextmanager
def nbdistributed_session(bench: Bench) -> Iterator[LiveSession]:
    """Its four workers, with the mode off in which it sends plain cells to them."""
    folder = bench.new_folder()
    # nbdistributed starts `python` by name, and on failure kills by name, including processes of others
    programs = folder / "bin"
    programs.mkdir()
    (programs / "pkill").symlink_to("/bin/true")
    variables = bench.environment(folder)
    variables["PATH"] = f"{programs}:{bench.need_peers().parent}:{variables['PATH']}"
    try:
        with BenchKernel(bench.need_peers(), folder, variables) as kernel:
            kernel.check("%load_ext nbdistributed")
            started = kernel.check(f"%dist_init -n {RANKS}", timeout_s=60)
            if "Successfully" not in started.text:
                raise MeasurementFailed(started.text.strip()[-200:])
            kernel.check("%dist_mode --disable")
            session = LiveSession("nbdistributed %%distributed", kernel, "distributed")
            session.get_ready()
            yield session
    finally:
        end_descendants()

"""Where the benchmarks run: kernels of ours with their own state, and the peers' kernels and packages."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.measure import MeasurementFailed, Series
from tests.benchmarks.processes import end_descendants, run_script

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"

IN_KERNEL = '''
import time as bench_time

def bench_cell(line, body, then=lambda: None):
    """Seconds that `%%distributed` took, as the kernel sees it, and its result object."""
    started = bench_time.perf_counter()
    result = get_ipython().run_cell_magic("distributed", line, body)
    then()
    return bench_time.perf_counter() - started, result
'''


@dataclass(frozen=True)
class CellTime:
    """One cell: seconds inside the kernel, seconds of the client's round trip, and the value asked for."""

    kernel_s: float
    round_trip_s: float
    value: object


@dataclass
class Bench:
    """What rows need.

    Args:
        peers_python: Interpreter of the environment that has the peers.
        scratch: Empty directory with a short path, for state, sockets and files of the benchmarks.
        quick: Take few samples.
        python: Interpreter that has this package.
    """

    peers_python: Path | None
    scratch: Path
    quick: bool = False
    python: Path = Path(sys.executable)
    _kernel_count: int = 0
    _measured: dict[str, Series] = field(default_factory=dict)

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def environment(self, folder: Path, **settings: str) -> dict[str, str]:
        """Variables for a process: the machine's own, less what could reach a user's profile or pool."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("SGPU_")}
        for name in ("PYTHONPATH", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
            variables.pop(name, None)
        variables |= {"IPYTHONDIR": str(folder / "ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        variables["TMPDIR"] = str(self.scratch)  # torchrun leaves directories behind
        return variables | settings

    def new_folder(self) -> Path:
        self._kernel_count += 1
        folder = self.scratch / f"k{self._kernel_count}"
        folder.mkdir()
        return folder

    @contextlib.contextmanager
    def our_kernel(self, *, load: bool = True, **settings: str) -> Iterator[BenchKernel]:
        """A fresh kernel with a pool of its own that does not run yet; both end with the context.

        Args:
            load: Load the extension.
            settings: `SGPU_*` variables.
        """
        folder = self.new_folder()
        places = {
            "SGPU_STATE_DIR": str(folder / "state"),
            "SGPU_RUNTIME_DIR": str(folder / "run"),
            "SGPU_LOCK_DIR": str(folder / "lock"),
            "SGPU_CONFIG": str(folder / "no-config.toml"),
            "PYTHONPATH": str(ROOT),
        }
        try:
            with BenchKernel(self.python, folder, self.environment(folder, **places, **settings)) as kernel:
                kernel.check(IN_KERNEL)
                if load:
                    kernel.check("%load_ext sgpu_magic")
                yield kernel
        finally:
            end_descendants()

    @contextlib.contextmanager
    def peer_kernel(self) -> Iterator[BenchKernel]:
        """A fresh kernel in the peers' environment; it and all that it started end with the context."""
        folder = self.new_folder()
        try:
            with BenchKernel(self.need_peers(), folder, self.environment(folder)) as kernel:
                yield kernel
        finally:
            end_descendants()

    def need_peers(self) -> Path:
        if self.peers_python is None:
            raise MeasurementFailed("the peers' environment could not be made")
        return self.peers_python

    def script(self, python: Path, name: str, *arguments: str, timeout_s: float) -> dict[str, object]:
        """Run `scripts/NAME` and return its record; see `run_script`."""
        try:
            command = [python, SCRIPTS / name, *arguments]
            return run_script(command, timeout_s=timeout_s, environment=self.environment(self.new_folder()))
        finally:
            end_descendants()

    def torchrun(self, ranks: int, script: str, *arguments: str) -> list[str | Path]:
        """The command that starts `scripts/SCRIPT` on `ranks` ranks with the peers' torchrun."""
        options = ["--standalone", "--nproc-per-node", str(ranks)]
        return [self.need_peers(), "-m", "torch.distributed.run", *options, SCRIPTS / script, *arguments]

    def once(self, label: str, measure: Callable[[], Series]) -> Series:
        """Measure a peer, or give what another row measured. A failure is a series without samples."""
        if label not in self._measured:
            try:
                self._measured[label] = measure()
            except MeasurementFailed as reason:
                self._measured[label] = Series(label, (), failures=(str(reason),))
        return self._measured[label]


def distributed(
    kernel: BenchKernel,
    line: str,
    body: str,
    *,
    expression: str = "None",
    then: str = "None",
    timeout_s: float = 60.0,
) -> CellTime:
    """Run one `%%distributed` cell.

    Args:
        kernel: A kernel of ours.
        line: The magic's options.
        body: The cell.
        expression: Evaluated in the notebook afterwards; the result object is `bench_result`.
        then: Expression that belongs to the timed part, after the magic.
        timeout_s: Seconds to wait.

    Raises:
        MeasurementFailed: The cell failed or took longer.
    """
    code = f"bench_s, bench_result = bench_cell({line!r}, {body!r}, lambda: {then})"
    reply = kernel.check(code, timeout_s=timeout_s, expression=f"[bench_s, {expression}]")
    return CellTime(reply.value[0], reply.round_trip_s, reply.value[1])


def make_peers() -> Path:
    """Make the environment of `peers.txt` beside this file, or take the one made before.

    Returns:
        Its interpreter.

    Raises:
        MeasurementFailed: pip failed; its last line says why.
    """
    wanted = (HERE / "peers.txt").read_bytes() + (ROOT / "constraints.txt").read_bytes() + sys.version.encode()
    folder = HERE / f".venv-peers-{hashlib.sha256(wanted).hexdigest()[:12]}"
    python, done = folder / "bin" / "python", folder / "complete"
    if done.exists():
        return python
    print(f"installing the peers into {folder} (about 1.5 GB, once) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "-r",
        HERE / "peers.txt",
        "-c",
        ROOT / "constraints.txt",
    ]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        raise MeasurementFailed(f"pip install of the peers: {(finished.stderr.strip().splitlines() or ['?'])[-1]}")
    done.touch()
    return python

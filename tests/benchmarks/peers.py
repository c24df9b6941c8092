"""What peers take for the same work, each measured at most once per run of the benchmarks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.benchmarks.environment import Bench
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.measure import MeasurementFailed, Series, collect
from tests.benchmarks.processes import end_descendants, run

LINE_PATTERN = re.compile(r"line (\d{6}) of rank (\d)")
LINES_PER_RANK = 100_000

ACCELERATE = """
import os, socket, time, uuid
from accelerate import notebook_launcher

def bench_join():
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist

def bench_all_reduce():
    import torch
    value = torch.ones(1)
    dist = bench_join()
    dist.all_reduce(value)
    if value.item() != 4:
        raise ValueError("wrong sum")

def bench_raise():
    dist = bench_join()
    if dist.get_rank() == 2:
        raise ValueError("the culprit")
    dist.barrier()

def bench_launch(function):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = time.perf_counter()
    notebook_launcher(function, (), num_processes=4, use_port=port)
    return time.perf_counter() - started
"""

IPYPARALLEL = """
import ipyparallel as ipp
bench_cluster = ipp.Cluster(n=4, log_level=40)
bench_client = bench_cluster.start_and_connect_sync(activate=True)
bench_view = bench_client[:]
bench_view.block = True
bench_view.scatter("rank", range(4), flatten=True)
"""

IPYPARALLEL_GROUP = """
bench_view.push({{"store": {store!r}}})
bench_view.execute("import torch, torch.distributed as dist; "
    "dist.init_process_group('gloo', init_method='file://' + store, rank=rank, world_size=4)")
"""


def seconds_of(bench: Bench, python: str, script: str, *arguments: str, label: str, timeout_s: float = 300.0) -> Series:
    """Run a script that prints its own samples, under "ours" or "peers" Python."""
    interpreter = bench.python if python == "ours" else bench.need_peers()
    found = bench.script(interpreter, script, *arguments, timeout_s=timeout_s)
    return Series(label, tuple(float(value) for value in found["seconds"]))  # type: ignore[union-attr]


def torchrun_all_reduce(bench: Bench, ranks: int = 4, count: int | None = None) -> Series:
    """Whole process: start, one all_reduce, end."""
    folder = bench.new_folder()

    def sample() -> float:
        started = time.perf_counter()
        command = bench.torchrun(ranks, "all_reduce.py")
        try:
            status, _, errors = run(command, timeout_s=400, environment=bench.environment(folder), cwd=folder)
        finally:
            end_descendants()
        if status != 0:
            raise MeasurementFailed((errors.strip().splitlines() or ["no message"])[-1][:200])
        return time.perf_counter() - started

    label = "torchrun" if ranks == 4 else f"torchrun, {ranks} ranks"
    return bench.once(label, lambda: collect(label, sample, count or bench.count(7, 2)))


def accelerate_all_reduce(bench: Bench) -> Series:
    """Launches in a warm kernel, as that kernel sees them; enough of them for the tail."""

    def measure() -> Series:
        with bench.peer_kernel() as kernel:
            kernel.check(ACCELERATE)
            kernel.check("bench_launch(bench_all_reduce)", timeout_s=20)
            return collect(label, lambda: accelerate_launch(kernel), bench.count(100, 10))

    label = "accelerate notebook_launcher"
    return bench.once(label, measure)


def accelerate_launch(kernel: BenchKernel) -> float:
    reply = kernel.execute("bench_s = bench_launch(bench_all_reduce)", timeout_s=20, expression="bench_s")
    if reply.status == "timeout":
        raise MeasurementFailed("hung for 20 s (a resource that another thread held at the fork)")
    if reply.status != "ok":
        raise MeasurementFailed(reply.error[:200])
    return reply.value


def accelerate_first_cell(bench: Bench) -> Series:
    """First launch in a fresh kernel, 2 s after the import, as that kernel sees it."""

    def sample() -> float:
        with bench.peer_kernel() as kernel:
            kernel.check(ACCELERATE)
            time.sleep(2)
            return accelerate_launch(kernel)

    label = "accelerate, first launch, import before"
    return bench.once(label, lambda: collect(label, sample, bench.count(5, 1)))


def accelerate_first_cell_with_import(bench: Bench) -> Series:
    """First launch in a fresh kernel, its import included, as the client sees it."""

    def sample() -> float:
        with bench.peer_kernel() as kernel:
            return kernel.check(ACCELERATE + "bench_launch(bench_all_reduce)", timeout_s=60).round_trip_s

    label = "accelerate, import and first launch"
    return bench.once(label, lambda: collect(label, sample, bench.count(5, 1)))


def accelerate_raise(bench: Bench) -> tuple[Series, str]:
    """Seconds until the error of a raising rank is in the notebook, and what it says."""
    sent: list[str] = []

    def sample() -> float:
        with bench.peer_kernel() as kernel:
            kernel.check(ACCELERATE)
            reply = kernel.execute("bench_launch(bench_raise)", timeout_s=60)
            if reply.error_s is None:
                raise MeasurementFailed("no error within 60 s")
            following = kernel.execute("bench_launch(bench_all_reduce)", timeout_s=20)
            shown = "shown" if "the culprit" in reply.error else "not in the notebook's error"
            sent.append(f"culprit's message {shown}; next cell: {following.status}")
            return reply.error_s

    label = "accelerate notebook_launcher"
    series = collect(label, sample, bench.count(3, 1))
    return series, sent[-1] if sent else ""


def ipyparallel_return(bench: Bench) -> Series:
    """256 MiB made on each engine and pulled."""

    def measure() -> Series:
        with bench.peer_kernel() as kernel:
            kernel.check(IPYPARALLEL, timeout_s=90)
            kernel.check("import time; bench_view.execute('import torch')", timeout_s=60)
            code = (
                "started = time.perf_counter()\n"
                "bench_view.execute('x = torch.full((2**26,), float(rank + 1))')\n"
                "x = bench_view.pull('x')\n"
                "total = sum(float(one[::1024].sum()) for one in x)\n"
                "bench_s = time.perf_counter() - started\n"
            )
            return collect(
                label,
                lambda: kernel.check(code, timeout_s=120, expression="bench_s").value,
                bench.count(5, 1),
            )

    label = "ipyparallel"
    return bench.once("ipyparallel return", measure)


def ipyparallel_lines(bench: Bench) -> tuple[Series, str]:
    """Numbered lines of a `%%px` cell: seconds of the client's round trip, and how many lines came whole."""
    arrived: list[int] = []

    def measure() -> Series:
        with bench.peer_kernel() as kernel:
            kernel.check(IPYPARALLEL, timeout_s=90)

            def sample() -> float:
                body = f"for number in range({LINES_PER_RANK}): print(f'line {{number:06d}} of rank {{rank}}')"
                reply = kernel.execute(f"%%px\n{body}", timeout_s=120)
                if reply.status != "ok":
                    raise MeasurementFailed(reply.error[:200] or reply.status)
                arrived.append(len(set(LINE_PATTERN.findall(reply.text))))
                return reply.round_trip_s

            return collect(label, sample, bench.count(3, 1))

    label = "ipyparallel %%px"
    series = bench.once(label, measure)
    whole = f"{min(arrived):,} to {max(arrived):,}" if arrived else "none"
    return (
        series,
        f"{label}: {whole} of {4 * LINES_PER_RANK:,} lines reach the client, whole.",
    )


def torchrun_lines(bench: Bench) -> tuple[Series, str]:
    """Numbered lines of torchrun into one file: seconds of the process, and how many lines are whole."""
    folder = bench.new_folder()
    whole: list[int] = []

    def sample() -> float:
        started = time.perf_counter()
        command = bench.torchrun(4, "numbered_lines.py", str(LINES_PER_RANK))
        log = folder / "lines.txt"
        status, _, _ = run(command, timeout_s=120, environment=bench.environment(folder), stdout=log, cwd=folder)
        seconds = time.perf_counter() - started
        if status != 0:
            raise MeasurementFailed(f"exit status {status}")
        whole.append(sum(1 for line in log.read_text().splitlines() if LINE_PATTERN.fullmatch(line)))
        os.unlink(log)
        return seconds

    label = "torchrun to a file"
    series = bench.once(label, lambda: collect(label, sample, bench.count(3, 1)))
    lines = f"{min(whole):,} to {max(whole):,}" if whole else "none"
    return (
        series,
        f"{label}: {lines} of {4 * LINES_PER_RANK:,} lines are whole in the file; its start is included.",
    )


def ipyparallel_raise(bench: Bench) -> tuple[Series, str]:
    """Seconds until the error of a raising engine is in the notebook, and what the next cell does."""
    sent: list[str] = []

    def sample() -> float:
        with bench.peer_kernel() as kernel:
            kernel.check(IPYPARALLEL, timeout_s=90)
            kernel.check(IPYPARALLEL_GROUP.format(store=str(kernel.folder / "store")), timeout_s=60)
            body = "if rank == 2:\n    raise ValueError('the ' + 'culprit')\ndist.barrier()"
            reply = kernel.execute(f"%%px\n{body}", timeout_s=20, watch_for="the culprit")
            if reply.watched_s is None:
                raise MeasurementFailed("no error within 20 s")
            if reply.status == "timeout":
                sent.append("the error is shown, but the cell did not end within 20 s")
            else:
                sent.append(f"next cell: {kernel.execute('%%px' + chr(10) + '1 + 1', timeout_s=15).status}")
            return reply.watched_s

    label = "ipyparallel %%px"
    series = collect(label, sample, bench.count(3, 1))
    return series, sent[-1] if sent else ""


SSHD = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
Subsystem sftp internal-sftp
"""


def scp_gigabyte(bench: Bench) -> Series:
    """A file of 1 GiB copied to another file over loopback, with a server of its own."""
    label = "scp of a file over loopback"

    def measure() -> Series:
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        if sshd is None:
            raise MeasurementFailed("sshd is not installed")
        folder = bench.new_folder()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for name in ("host", "user"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], timeout_s=10)
        (folder / "config").write_text(SSHD.format(port=port, folder=folder))
        with (folder / "big").open("wb") as big:
            for _ in range(16):
                big.write(os.urandom(2**26))
        with contextlib.suppress(OSError):
            # sshd's directory for privilege separation; normally the service makes it, but it is not used here
            Path("/run/sshd").mkdir()
        options = ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]
        command = ["scp", "-q", "-P", str(port), "-i", folder / "user"]
        command += [word for option in options for word in ("-o", option)]

        def sample() -> float:
            started = time.perf_counter()
            status, _, errors = run([*command, folder / "big", f"127.0.0.1:{folder}/copy"], timeout_s=60)
            if status != 0:
                raise MeasurementFailed((errors.strip().splitlines() or ["no message"])[-1][:200])
            return time.perf_counter() - started

        server = subprocess.Popen([sshd, "-D", "-f", folder / "config"], stderr=subprocess.DEVNULL)
        try:
            _wait_for_port(port)
            return collect(label, sample, bench.count(3, 1))
        finally:
            server.terminate()
            server.wait()

    return bench.once(label, measure)


def _wait_for_port(port: int) -> None:
    until = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise MeasurementFailed(f"nothing listens on port {port}") from None
            time.sleep(0.05)


def ray_client_gigabyte(bench: Bench) -> Series:
    """A tensor of 1 GiB over the port of Ray's client, to four actors."""
    label = "Ray's client, to four actors"
    count = str(bench.count(3, 1))
    return bench.once(label, lambda: seconds_of(bench, "peers", "ray_client_payload.py", count, label=label))

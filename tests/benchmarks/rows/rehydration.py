"""Making a run's packages on a node: new, again, and there already, beside uv with the same lock."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from sgpu_magic.packages.node.base_layer import layer_tag
from sgpu_magic.packages.node.store import (
    BuildOrder,
    BuildReady,
    BuildRefused,
    BuiltEnvironments,
    decode_update,
    encode,
)
from sgpu_magic.packages.uv_command import UvFailed, index_variables, run_uv, uv_path
from sgpu_magic.system import child_process
from sgpu_magic.wire.attachments import Environment
from tests.benchmarks.environment import Bench
from tests.benchmarks.measure import MeasurementFailed, Row, Series, at_most, at_most_times, collect

# requires about eighty packages, most of them small, some of them large
_LOCKED = "jupyterlab"
_TIMES_UV = 2.0
_AGAIN_S = 0.01


class _Node:
    """A node's environments and uv's cache, in the benchmarks' directory."""

    def __init__(self, bench: Bench) -> None:
        self.root = bench.scratch / "node"
        self.cache = bench.scratch / "uv-cache"
        self.venv = bench.scratch / "venv"
        self.variables = index_variables("") | {"UV_CACHE_DIR": str(self.cache)}
        python = ["--python", sys.executable]
        command = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", *python, "-"]
        lock = run_uv(command, stdin=_LOCKED, variables=self.variables)
        self.lines = tuple(line for line in lock.splitlines() if "==" in line)
        self.lock = bench.scratch / "lock.txt"
        self.lock.write_text("\n".join(self.lines))
        digest = hashlib.sha256(lock.encode()).hexdigest()[:32]
        self.environment = Environment(digest=digest, requirements=self.lines, packages=len(self.lines))
        self.name = f"{self.environment.digest}-{layer_tag()}"
        self.store = BuiltEnvironments(self.root)

    def cold(self, sample: Callable[[], float]) -> float:
        """Take a sample on a machine that has seen nothing of it."""
        shutil.rmtree(self.cache, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)
        return sample()

    def build(self) -> float:
        """Seconds until it can be used, from the start of the builder's process."""
        shutil.rmtree(self.root / self.name, ignore_errors=True)
        order = BuildOrder(
            environment=self.environment,
            root=str(self.root),
            name=self.name,
            limit_bytes=15_000_000_000,
            budget_bytes=50_000_000_000,
        )
        before = time.perf_counter()
        command = [sys.executable, "-m", "sgpu_magic.packages.node"]
        environ = {**os.environ, **self.variables}
        link, builder = child_process.start(command, [str(os.getpid())], environ=environ)
        with builder, link, link.makefile("rb") as lines:
            link.sendall(encode(order))
            link.shutdown(socket.SHUT_WR)
            for line in lines:
                output = decode_update(line)
                if isinstance(output, BuildReady):
                    seconds = time.perf_counter() - before
                    # the builder's remaining work would disturb the next measurement
                    builder.terminate()
                    return seconds
                if isinstance(output, BuildRefused):
                    raise MeasurementFailed(output.message)
        raise MeasurementFailed("the builder ended without a word")

    def again(self) -> float:
        """Seconds to find what is there, as an agent does."""
        before = time.perf_counter()
        found = self.store.open(f"{self.environment.digest}-{layer_tag()}")
        seconds = time.perf_counter() - before
        if found is None:
            raise MeasurementFailed("it is not there")
        found[1].close()
        return seconds

    def sync(self) -> float:
        """Seconds of `uv pip sync` with the same lock into an empty virtual environment."""
        self._run("venv", "--quiet", "--clear", "--python", sys.executable, str(self.venv))
        before = time.perf_counter()
        self._run("pip", "sync", "--quiet", "--python", str(self.venv / "bin" / "python"), str(self.lock))
        return time.perf_counter() - before

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            [uv_path(), *arguments], env={**os.environ, **self.variables}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise MeasurementFailed(done.stderr.strip()[-300:])


def of_a_lock(bench: Bench) -> Row:
    row = Row("a run's packages made on its node, from a lock")
    try:
        node = _Node(bench)
    except UvFailed as failed:
        row.notes.append(f"There is no lock: {failed.words}")
        return row
    ours: list[float] = []
    theirs: list[float] = []
    with row.attempt():
        count = bench.count(5, 1)
        new = collect("new to the machine", lambda: node.cold(node.build), count)
        new_uv = collect("uv pip sync, nothing cached", lambda: node.cold(node.sync), count)
        node.sync()
        node.build()
        # in turns, because the machine's load changes
        for _ in range(bench.count(15, 3)):
            ours.append(node.build())
            theirs.append(node.sync())
        there = collect("there already", node.again, bench.count(50, 10))
        warm, warm_uv = Series("again, from uv's cache", tuple(ours)), Series("uv pip sync, cached", tuple(theirs))
        row.ours, row.peers = [warm, new, there], [warm_uv, new_uv]
        row.checks = [at_most_times(warm, warm_uv, _TIMES_UV), at_most(there, _AGAIN_S)]
    row.notes.append(
        f"{len(node.lines)} packages, what {_LOCKED} needs. Ours is timed from the start of the builder's process "
        "until ranks can use the environment: with its virtual environment, the sizes by package, the base layer "
        "(torch, sgpu-magic and what they need, by links) and the rename; byte code is made behind it. uv installs "
        "into an empty virtual environment that is there. In turns. An agent that has it already finds and locks it."
    )
    return row

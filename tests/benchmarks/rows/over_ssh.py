"""A machine behind ssh, over a server on loopback: its first cell, later ones, latency, and 1 GiB there and back."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks import peers
from tests.benchmarks.environment import ROOT, Bench
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.measure import (
    Check,
    MeasurementFailed,
    Row,
    Series,
    at_most,
    at_most_beyond,
    at_most_times,
    collect,
)
from tests.benchmarks.processes import end_descendants
from tests.benchmarks.rows import remote

sys.path.append(str(ROOT / "tests" / "support"))

from homes import Home
from pool_client import PoolClient, set_environ
from ssh_servers import PATH, STRICT, SshServer
from tcp_proxy import Proxy

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools_file import PoolEntry
from sgpu_magic.config import load_settings

RANKS = 4
# on both sides, so that neither does what the other leaves out
SETTINGS = {"SGPU_TRACK": "off", "SGPU_PRELOAD": "off", "SGPU_LOCK_ENVIRONMENTS": "off"}
_PAUSE_S = 0.6
_LATENCY_S = 0.05


@dataclass(frozen=True)
class Machine:
    """A machine behind ssh, and the files of its user.

    Args:
        server: The machine.
        folder: The user's.
        ssh: The user's ssh command.
    """

    server: SshServer
    folder: Path
    ssh: str

    @property
    def settings(self) -> dict[str, str]:
        """The variables of the user's kernels."""
        return {"SGPU_POOLS_FILE": str(self.folder / "pools.toml"), "SGPU_SSH_COMMAND": self.ssh, **SETTINGS}

    def add(self) -> float:
        """List it for the user. Returns the seconds until the first words about it."""
        command = [sys.executable, "-m", "sgpu_magic.cli", "pool", "add", "box", "ssh://box"]
        began = time.perf_counter()
        with subprocess.Popen(
            command, env=os.environ | self.settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as adding:
            assert adding.stdout is not None
            words = adding.stdout.readline()
            seconds = time.perf_counter() - began
            words += adding.stdout.read()
        if adding.returncode:
            raise MeasurementFailed(words.strip()[-300:])
        return seconds

    @contextlib.contextmanager
    def kernel(self, bench: Bench) -> Iterator[BenchKernel]:
        """A fresh kernel of its user, with a local pool of its own."""
        folder = bench.new_folder()
        places = {
            "SGPU_STATE_DIR": str(folder / "state"),
            "SGPU_RUNTIME_DIR": str(folder / "run"),
            "SGPU_CONFIG": str(folder / "no-config.toml"),
            "PYTHONPATH": str(ROOT),
        }
        with BenchKernel(bench.python, folder, bench.environment(folder, **places, **self.settings)) as kernel:
            kernel.check("%load_ext sgpu_magic")
            yield kernel

    def ssh_itself(self, count: int) -> Series:
        """Time `ssh box true`."""

        def sample() -> float:
            began = time.perf_counter()
            subprocess.run([*shlex.split(self.ssh), "box", "true"], check=True, stdout=subprocess.DEVNULL)
            return time.perf_counter() - began

        return collect("`ssh box true`", sample, count, pause_s=0.1)


@contextlib.contextmanager
def _machine(bench: Bench) -> Iterator[Machine]:
    """A machine on which nothing of this package is, listed nowhere yet."""
    folder, home = bench.new_folder(), Home()
    server = SshServer(folder / "server", home, path=PATH, more=STRICT)
    try:
        yield Machine(server, folder, server.configure("box"))
    finally:
        server.stop()
        end_descendants()
        home.close()


def _cell(kernel: BenchKernel, options: str = "", timeout_s: float = 120.0) -> float:
    """Seconds of a cell that does nothing, from the front end's request to idle."""
    return kernel.check(f"%%distributed -n {RANKS} --type cpu {options}\npass", timeout_s=timeout_s).round_trip_s


def first_cell(bench: Bench) -> Row:
    row = Row("`sgpu pool add` of a machine with Python and torch, and its first cell")
    row.notes.append(
        "A server of OpenSSH on loopback, which forbids forwarding and further sessions; the machine has this "
        "environment's Python, and nothing of sgpu-magic. The whole: the command, which logs in, prepares the machine "
        "and starts its pool, and the first cell of a notebook, which installs the notebook's packages into an "
        "environment; uv has them in its cache. The first step: until the command prints its first words. Later: the "
        "first cell of a new kernel, when the pool runs."
    )
    steps: list[float] = []

    def first() -> float:
        with _machine(bench) as machine, machine.kernel(bench) as kernel:
            began = time.perf_counter()
            steps.append(machine.add())
            _cell(kernel, "--pool box", 300)
            return time.perf_counter() - began

    with row.attempt():
        row.ours = [collect("until the first cell has returned", first, bench.count(5, 1))]
        row.ours.append(Series("until the first words", tuple(steps)))
    with row.attempt(), _machine(bench) as machine:
        with machine.kernel(bench) as kernel:
            machine.add()
            _cell(kernel, "--pool box", 300)

        def later() -> float:
            with machine.kernel(bench) as kernel:
                return _cell(kernel, "--pool box")

        row.ours.append(collect("later: first cell of a new kernel", later, bench.count(10, 2)))
        row.peers = [machine.ssh_itself(bench.count(10, 3))]
    row.checks = [
        at_most(row.series(0), 20, what="first cell"),
        at_most(row.series(1), 3, what="first step"),
        at_most(row.series(2), 1.5, what="later"),
    ]
    return row


def cells(bench: Bench) -> Row:
    row = Row("cell that does nothing on a machine over ssh, beside the local pool")
    row.notes.append(
        f"{RANKS} ranks, at the front end, from the request to idle. Fresh: in turns with the local pool of the same "
        f"kernel, {_PAUSE_S} s of rest before each. Session: 0.05 s of rest. Latency: the server is behind a line "
        f"whose round trip takes {_LATENCY_S * 1e3:g} ms."
    )
    count = bench.count(40, 6)
    with row.attempt(), _machine(bench) as machine:
        machine.add()
        with machine.kernel(bench) as kernel:
            here, there = _in_turns(kernel, "--pool local", "--pool box", count)
        row.ours = [Series("fresh, over ssh", there), Series("fresh, local", here)]
        for pool, label in (("box", "session, over ssh"), ("local", "session, local")):
            with machine.kernel(bench) as kernel:
                row.ours.append(_session(kernel, pool, label, bench.count(200, 20)))
    with row.attempt(), contextlib.ExitStack() as stack:
        row.ours += _with_latency(bench, stack)
    row.checks = [
        at_most_beyond(row.series(0), row.series(1), 0.015),
        at_most_beyond(row.series(2), row.series(3), 0.005),
        *_latency_checks(row.ours[4:], row.series(1), row.series(3)),
    ]
    return row


def _in_turns(kernel: BenchKernel, one: str, other: str, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    times: dict[str, list[float]] = {one: [], other: []}
    for options in (one, other) * 3:
        _cell(kernel, options, 300)
    for number in range(count):
        for options in (one, other) if number % 2 else (other, one):
            time.sleep(_PAUSE_S)
            times[options].append(_cell(kernel, options))
    return tuple(times[one]), tuple(times[other])


def _session(kernel: BenchKernel, pool: str, label: str, count: int) -> Series:
    kernel.check(f"%sgpu_connect -n {RANKS} --type cpu --pool {pool}", timeout_s=300)
    for _ in range(10):
        kernel.check("%%distributed\npass")
    series = collect(label, lambda: kernel.check("%%distributed\npass").round_trip_s, count, pause_s=0.05)
    kernel.check("%sgpu_disconnect")
    return series


def _with_latency(bench: Bench, stack: contextlib.ExitStack) -> list[Series]:
    folder, home = bench.new_folder(), Home()
    stack.callback(home.close)
    server = SshServer(folder / "server", home, path=PATH, more=STRICT)
    stack.callback(server.stop)
    line = Proxy(server.port, keeps=False)
    stack.callback(line.close)
    machine = Machine(
        server, folder, server.configure("box", f"HostKeyAlias [127.0.0.1]:{server.port}", port=line.port)
    )
    kernel = stack.enter_context(machine.kernel(bench))
    machine.add()
    _cell(kernel, "--pool box", 300)
    line.delay(_LATENCY_S / 2)
    for _ in range(3):
        _cell(kernel, "--pool box")
    fresh = collect("fresh, with latency", lambda: _cell(kernel, "--pool box"), bench.count(20, 4), pause_s=_PAUSE_S)
    return [fresh, _session(kernel, "box", "session, with latency", bench.count(40, 5))]


def _latency_checks(found: list[Series], fresh: Series, session: Series) -> list[Check]:
    # two round trips, and 30 ms
    limit_s = 2 * _LATENCY_S + 0.03
    return [at_most_beyond(one, base, limit_s) for one, base in zip(found, (fresh, session), strict=False)]


def there_and_back(bench: Bench) -> Row:
    row = Row("1 GiB torch tensor to 4 ranks of a machine over ssh; 256 MiB back from one")
    row.notes.append(
        "As in the row before, over one stream of ssh, whose encryption is on the same cores on both sides. scp "
        "copies a file of random bytes to another file."
    )
    with _machine(bench) as machine:
        user = _User(machine)
        try:
            user.client.begin("1", ranks=RANKS).ended(300)
            big = torch.randint(0, 1000, (remote.FLOATS,), dtype=torch.int16).float()
            firsts: list[float] = []
            for number in range(bench.count(3, 1)):
                big += number
                firsts.append(remote.ship(user.client, big))
            count = bench.count(5, 2)
            row.ours = [
                Series("first", tuple(firsts)),
                collect("again", lambda: remote.ship(user.client, big), count, pause_s=0.6),
                collect("1 MiB changed", lambda: remote.ship_changed(user.client, big), count, pause_s=0.6),
                collect("256 MiB back", lambda: remote.fetch(user.client), count, pause_s=0.6),
            ]
        finally:
            user.close()
    row.peers = [peers.scp_gigabyte(bench)]
    row.checks = [
        at_most_times(row.series(0), row.peers[0], 1.2),
        at_most(row.series(1), 0.3, what="again"),
        at_most(row.series(2), 0.6, what="changed"),
        at_most(row.series(3), 1.5, what="back"),
    ]
    return row


class _User:
    """This process as a user of the machine."""

    def __init__(self, machine: Machine) -> None:
        self._home = Home(machine.settings)
        before = dict(os.environ)
        set_environ(self._home.environ)
        pool = Pool(load_settings(), print, PoolEntry("box", "ssh://box", "", same_files=True))
        set_environ(before)
        self.client = PoolClient(self._home, pool)

    def close(self) -> None:
        # its ranks have this user's variables
        self.client.pool.stop(force=True)
        self.client.close()
        end_descendants()
        self._home.close()

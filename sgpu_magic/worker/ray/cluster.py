"""A run with its own Ray cluster: each rank's part in it.

rank 0              starts the head on its node, waits for the other nodes, runs the cell as driver, releases the others
first of a node     starts Ray on its node when the head is up, waits for the end of the driver
any other           holds its devices, waits for the end of the driver

The token is broadcast in the process group at the start. All further coordination uses keys of the group's store, which
the ranks poll: no rank blocks in a collective, so an interrupt reaches a rank that waits for the driver.

    head                address and version of the head, set when it is up
    joined/NODE         empty when Ray is up on that node, else the reason why it is not
    lines/ASKED         the driver requests the number of lines that its tasks and actors have written on each node
    lines/ASKED/NODE    that node's number of lines
    done                the driver has ended, in whatever way, and the cluster stops
    gone/NODE           Ray has stopped on that node
"""

# torch.distributed re-exports its stores without saying so
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from sgpu_magic.errors import EnvironmentFailed, SgpuError
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.rank import Execute, Remarked
from sgpu_magic.wire.run import PrivateRay
from sgpu_magic.worker.cell.cell_run import CellRun
from sgpu_magic.worker.cell.results import Reply
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.process import user_code
from sgpu_magic.worker.process.helper import Order
from sgpu_magic.worker.process.rank_context import RankState
from sgpu_magic.worker.ray import driver, ray_processes
from sgpu_magic.worker.ray.driver import Driver, Lines
from sgpu_magic.worker.ray.node import NodeProcess, NodeStarted, NodeTroubled
from sgpu_magic.worker.ray.ray_processes import RayMetrics, written_in

_JOIN_S = 300.0
_COUNT_S = 5.0
_STOP_S = 15.0
_POLL_S = 0.1
# where sgpu_magic is imported from
_PACKAGE = str(Path(__file__).parents[3])


class Member:
    """One rank's part in the cluster: what all ranks have in common.

    Args:
        order: The node's part of the cluster.
        message: The order that the rank executes.
        shell: The rank's shell.
        rank: Global rank.
        say: Sends a message to the agent.
    """

    def __init__(
        self, order: PrivateRay, message: Execute, shell: RankShell, rank: int, say: Callable[[Record], None]
    ) -> None:
        torchruns, context = message.rank_variables, message.context
        self._order = order
        self._shell = shell
        self._rank = rank
        self._leads = torchruns["LOCAL_RANK"] == "0"
        self._node = int(torchruns["GROUP_RANK"])
        self._nodes = int(torchruns["GROUP_WORLD_SIZE"])
        # entries of the rank's `sys.path` outside its Python installation
        installed = frozenset(context.installed)
        self._paths = tuple(entry for entry in context.sys_path if entry and entry not in installed)
        self._maps_cuda = context.maps_cuda and message.device == "cpu"
        self._say = say
        # Ray's metrics go to the MLflow run
        self._tracked = message.tracking is not None
        # kept here because user code may destroy the group
        self._store = dist.PrefixStore("ray", c10d._get_default_store())
        self._process: NodeProcess | None = None
        # stops what this rank has started, the last first
        self._ends = contextlib.ExitStack()
        self._ray: dict[str, str] = {}
        self._logs: Path | None = None

    def end(self) -> None:
        """Stop Ray on this node. Called once, after success or failure."""
        self._ends.close()

    # ------------------------------------------------------------ within

    def _start(self, token: str, head: str) -> NodeProcess:
        order = self._order
        self._ray = ray_processes.of_ray(ray_processes.write_token(order.directory, token), order)
        environ = ray_processes.of_processes(os.environ, self._ray, self._paths, _PACKAGE, maps_cuda=self._maps_cuda)
        self._process = process = NodeProcess(order, head, environ)
        self._ends.callback(process.stop)
        return process

    def _wait(self, process: NodeProcess) -> NodeStarted:
        started = process.started()
        self._logs = Path(started.session_directory) / "logs"
        if self._tracked and started.metrics_port:
            metrics = RayMetrics(self._order.address, started.metrics_port, self._node, self._say)
            self._ends.callback(metrics.end)
        return started


class Head(Member):
    """Rank 0."""

    _asked = 0

    def begin(self) -> None:
        """Start the head, and send its token to the other ranks. Returns before Ray is up."""
        token = secrets.token_hex(32)
        self._lines = Lines(self._count_remote_lines)
        self._driver = Driver(self._lines)
        # the notebook or the node may be in another cluster
        ray_processes.forget_others()
        self._head = self._start(token, "")
        # before Ray is imported, which reads some of them
        os.environ.update(self._ray)
        _from_first(token)
        self._driver.begin()

    def wait_until_joined(self) -> None:
        """Wait until all nodes have joined the cluster, and connect the driver.

        Raises:
            EnvironmentFailed: Ray can't be started on a node.
            RuntimeError: A rank is gone.
        """
        started = self._wait(self._head)
        self._store.set("head", f"{started.address} {started.ray_version}")
        for problem in self._answers("joined", _JOIN_S):
            if problem:
                raise EnvironmentFailed(problem)
        os.environ["RAY_ADDRESS"] = started.address
        if started.dashboard:
            os.environ["RAY_API_SERVER_ADDRESS"] = f"http://{started.dashboard}"
        self._lines.logs = self._logs
        self._head.watch(self._troubled)
        self._say(Remarked(text=self._introduction(started)))
        self._driver.connect()

    def end(self) -> None:
        self._driver.end()
        # the store was revoked, or its host is gone
        with contextlib.suppress(RuntimeError):
            self._store.set("done", "")
            self._answers("gone", _STOP_S)
        super().end()

    def _answers(self, what: str, within_s: float) -> list[str]:
        """Return the values that the other nodes have set under this name.

        Raises:
            RuntimeError: A node has not set it in time, or a rank is gone.
        """
        until = time.monotonic() + within_s
        found: list[str] = []
        for node in range(1, self._nodes):
            key = f"{what}/{node}"
            while not self._store.check([key]):
                if self._shell.released.is_set():
                    raise RuntimeError(f"released while it waited for the first rank of node {node}")
                if time.monotonic() > until:
                    raise RuntimeError(f"the first rank of node {node} did not answer within {within_s:.0f} s")
                time.sleep(_POLL_S)
            found.append(self._store.get(key).decode())
        return found

    def _introduction(self, started: NodeStarted) -> str:
        on = "on this node" if self._nodes == 1 else f"on {self._nodes} nodes"
        text = f"Ray {started.ray_version} runs {on} for this run alone"
        if self._order.simulated:
            text += "; its GPUs are simulated: Ray counts them, and code computes on the CPU"
        if self._order.objects_on_disk:
            text += "; /dev/shm is too small for its objects, which are stored on disk"
        if not self._order.dashboard:
            return f"{text}."
        if not started.dashboard:
            return f'{text}. It has no dashboard and reports no metrics: they need "ray[default]".'
        port = started.dashboard.rpartition(":")[2]
        run_id = os.environ.get("SGPU_RUN_ID", "")[:4]
        return (
            f"{text}. Its dashboard is on http://{started.dashboard} of rank 0's node (`sgpu port-forward {run_id} "
            f"{port}` brings it here); the token that it asks for is in {self._ray['RAY_AUTH_TOKEN_PATH']}."
        )

    def _troubled(self, word: NodeTroubled) -> None:
        log = f" Its log ends with: {word.log}" if word.log else ""
        self._say(Remarked(text=f"{word.text} on rank 0's node: the run's Ray cluster is broken.{log}"))

    def _count_remote_lines(self) -> int:
        self._asked += 1
        try:
            self._store.set(f"lines/{self._asked}", "")
            return sum(map(int, self._answers(f"lines/{self._asked}", _COUNT_S)))
        except RuntimeError:
            return 0


class Guest(Member):
    """Any other rank."""

    def hold(self) -> None:
        """Start Ray if this rank is its node's first, and return when the driver has ended.

        Raises:
            EnvironmentFailed: Ray can't be started here, or one of its processes has died.
            RuntimeError: Rank 0 is gone.
        """
        token = _from_first(None)
        if self._leads:
            self._join(token)
        asked = 1
        while not self._store.check(["done"]):
            if self._process is None:
                time.sleep(_POLL_S)
                continue
            if self._store.check([f"lines/{asked}"]):
                written = written_in(self._logs) if self._logs is not None else 0
                self._store.set(f"lines/{asked}/{self._node}", str(written))
                asked += 1
            if select.select([self._process], [], [], _POLL_S)[0]:
                word = self._process.first_report()
                if isinstance(word, NodeTroubled):
                    log = f"\n{word.log}" if word.log else ""
                    raise EnvironmentFailed(f"{word.text} on the node of rank {self._rank}.{log}")

    def end(self) -> None:
        super().end()
        if self._leads:
            # rank 0 may have exited without waiting for it
            with contextlib.suppress(RuntimeError):
                self._store.set(f"gone/{self._node}", "")

    def _join(self, token: str) -> None:
        while not self._store.check(["head"]):
            if self._store.check(["done"]):
                return
            time.sleep(_POLL_S)
        address, version = self._store.get("head").decode().split()
        try:
            started = self._wait(self._start(token, address))
            if started.ray_version != version:
                raise EnvironmentFailed(
                    f"it has Ray {started.ray_version}, but the head has {version}. All nodes need the same: run it "
                    "in an environment of its own, made from a requirements file, which every node installs alike."
                )
        except EnvironmentFailed as error:
            problem = f"the node of rank {self._rank} can't join the run's Ray cluster: {error.message}"
            self._store.set(f"joined/{self._node}", problem)
            raise
        self._store.set(f"joined/{self._node}", "")


def _from_first(token: str | None) -> str:
    """Broadcast the token from rank 0 in the process group, and return it.

    Args:
        token: The token on rank 0, None on the others.
    """
    words: list[str | None] = [token]
    dist.broadcast_object_list(words, src=0, device=torch.device("cpu"))
    return words[0] or ""


# ---------------------------------------------------------------- the cell


class RayRun(CellRun):
    """Executes one `Execute` that has `ray`. The other arguments are those of `CellRun`.

    Args:
        ray: The order's `ray`.
    """

    def __init__(
        self, state: RankState, message: Execute, order: Order, say: Callable[[Record], None], ray: PrivateRay
    ) -> None:
        super().__init__(state, message, order, say)
        self._ray = ray
        self._member: Member | None = None

    def run(self) -> Reply:
        """Execute the order. Every error becomes a reply; Ray has stopped on this node when this returns."""
        try:
            return super().run() if self._rank == 0 else self._hold()
        finally:
            # an interrupt must not skip the cleanup
            user_code.refuse_interrupts()
            if self._member is not None:
                self._member.end()

    def _prepare(self) -> None:
        self._enter_context()
        self._member = head = Head(self._ray, self._message, self._shell, self._rank, self._say)
        head.begin()
        # unpickles the cell's variables while Ray starts
        self._take_names()
        head.wait_until_joined()

    def _run_cell(self) -> tuple[BaseException | None, float]:
        error, seconds = super()._run_cell()
        return driver.users_own(error, self._shell), seconds

    def _hold(self) -> Reply:
        """Hold the devices until the driver has finished."""
        begin = time.perf_counter()
        try:
            self._enter_context()
            self._member = guest = Guest(self._ray, self._message, self._shell, self._rank, self._say)
            guest.hold()
        except (SgpuError, OSError, RuntimeError, ValueError) as error:
            self._shell.showtraceback((type(error), error, error.__traceback__))
            return self.failed(error)
        self.close_payload()
        return self._finished(None, "", "", time.perf_counter() - begin)

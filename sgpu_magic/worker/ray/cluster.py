"""One rank's part in the run's Ray cluster: begin, be joined, end.

rank 0              starts the head here, waits for the other nodes, drives, and lets all go
first of a node     starts Ray there when the head is up, waits for the driver's end
any other           waits for the driver's end
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.wire.rank import Execute, PrivateRay, Remarked
from sgpu_magic.wire.record import Record
from sgpu_magic.worker.ray import driver
from sgpu_magic.worker.ray.driver import Driver, Lines, written_in
from sgpu_magic.worker.ray.meeting import (
    AtMeeting,
    Connection,
    DriverDone,
    HeadKnown,
    Host,
    LinesAsked,
    LinesCounted,
    NodeJoined,
    PeerGone,
    come_to,
)
from sgpu_magic.worker.ray.node_process import NodeProcess, NodeStarted, NodeTroubled, RayMetrics, StartNode

_JOIN_S = 300.0
_COUNT_S = 5.0
_STOP_S = 15.0
# where sgpu_magic is imported from
_PACKAGE = str(Path(__file__).parents[3])


class Member:
    """A rank of the run, whichever.

    Args:
        order: The node's part.
        message: What the rank is to execute.
        rank: Global rank.
        say: Tells the agent.
    """

    def __init__(self, order: PrivateRay, message: Execute, rank: int, say: Callable[[Record], None]) -> None:
        torchruns, context = message.rank_variables, message.context
        self._order = order
        self._rank = rank
        self._leads = torchruns["LOCAL_RANK"] == "0"
        self._ranks = int(torchruns["WORLD_SIZE"])
        self._node = int(torchruns["GROUP_RANK"])
        # of the rank's path what is not of its Python installation
        installed = frozenset(context.installed)
        self._paths = tuple(entry for entry in context.sys_path if entry and entry not in installed)
        self._say = say
        # Ray's numbers are wanted
        self._tracked = message.tracking is not None
        self._process: NodeProcess | None = None
        self._started: NodeStarted | None = None
        self._metrics: RayMetrics | None = None
        self._ray: dict[str, str] = {}

    def end(self) -> None:
        """Stop Ray on this node. Called once, whatever has happened."""
        if self._metrics is not None:
            self._metrics.end()
        if self._process is not None:
            self._process.stop()

    # ------------------------------------------------------------ within

    def _start(self, token: str, head: str) -> None:
        order = self._order
        token_file = driver.write_token(order.directory, token)
        self._ray = driver.of_ray(token_file, order)
        start = StartNode(
            head=head,
            directory=order.directory,
            address=order.address,
            cpus=order.cpus,
            gpus=order.gpus,
            simulated=order.simulated,
            object_store_bytes=order.object_store_bytes,
            objects_directory=order.disk_directory if order.objects_on_disk else "",
            spill_directory=order.disk_directory,
            dashboard=order.dashboard,
        )
        environ = driver.of_processes(os.environ, self._ray, self._paths, _PACKAGE)
        self._process = NodeProcess(start, environ)

    def _wait(self) -> NodeStarted:
        if self._process is None:
            raise EnvironmentFailed("Ray was never started on the rank's node: this is a fault of sgpu-magic.")
        self._started = started = self._process.started()
        if self._tracked and started.metrics_port:
            self._metrics = RayMetrics(self._order.address, started.metrics_port, self._node, self._say)
            self._metrics.begin()
        return started

    @property
    def _logs(self) -> Path | None:
        return Path(self._started.session_directory) / "logs" if self._started is not None else None


class Head(Member):
    """Rank 0."""

    _host: Host | None = None

    def begin(self) -> None:
        """Start the head, and tell the other ranks where to come. Ray need not be up when this returns."""
        token = driver.new_token()
        self._lines = Lines(self._lines_elsewhere)
        self._driver = Driver(self._lines)
        driver.forget_others()
        self._start(token, "")
        # before anything imports Ray, which reads some of them then
        os.environ.update(self._ray)
        if self._ranks > 1:
            self._host = Host(self._order.address, self._ranks)
            _tell_all([*self._host.place, self._host.secret, token])
        self._driver.begin()

    def joined(self) -> None:
        """Return when the cluster is whole.

        Raises:
            EnvironmentFailed: Ray can't be started on a node.
            PeerGone: A rank is gone.
        """
        # it takes half a second, while Ray starts; where it is missing the node's process says so
        with contextlib.suppress(ImportError):
            importlib.import_module("ray")
        started = self._wait()
        if self._host is not None:
            self._host.gather()
            self._host.tell_leaders(HeadKnown(address=started.address, ray_version=started.ray_version))
            for rank, joined in self._host.answers(NodeJoined, _JOIN_S):
                if joined.problem:
                    raise EnvironmentFailed(
                        f"the node of rank {rank} can't join the run's Ray cluster: {joined.problem}"
                    )
        driver.take_over(self._ray, started.address, started.dashboard)
        self._lines.logs = self._logs
        if self._process is not None:
            self._process.watch(self._troubled)
        self._say(Remarked(text=self._introduction(started)))
        self._driver.connect()

    def end(self) -> None:
        self._driver.end()
        if self._host is not None:
            self._host.close(_STOP_S)
        super().end()

    def _introduction(self, started: NodeStarted) -> str:
        nodes = 1 + (len(self._host.leaders) if self._host is not None else 0)
        on = "on this node" if nodes == 1 else f"on {nodes} nodes"
        text = f"Ray {started.ray_version} runs {on} for this run alone"
        if self._order.simulated:
            text += "; its GPUs are simulated: Ray counts them, and code computes on the CPU"
        if self._order.objects_on_disk:
            text += "; /dev/shm is too small for its objects, which lie on disk"
        if not self._order.dashboard:
            return f"{text}."
        if not started.dashboard:
            return f'{text}. It has no dashboard and tells no metrics: they need "ray[default]".'
        port = started.dashboard.rpartition(":")[2]
        run_id = os.environ.get("SGPU_RUN_ID", "")[:4]
        return (
            f"{text}. Its dashboard is on http://{started.dashboard} of rank 0's node (`sgpu port-forward {run_id} "
            f"{port}` "
            f"brings it here); the token that it asks for is in {self._ray['RAY_AUTH_TOKEN_PATH']}."
        )

    def _troubled(self, word: NodeTroubled) -> None:
        log = f" Its log ends with: {word.log}" if word.log else ""
        self._say(Remarked(text=f"{word.text} on rank 0's node: the run's Ray cluster is broken.{log}"))

    def _lines_elsewhere(self) -> int:
        if self._host is None or not self._host.leaders:
            return 0
        try:
            self._host.tell_leaders(LinesAsked())
            return sum(counted.lines for _, counted in self._host.answers(LinesCounted, _COUNT_S))
        except PeerGone:
            return 0


class Guest(Member):
    """Any other rank."""

    _connection: Connection | None = None

    def begin(self) -> None:
        """Come to rank 0."""
        host, port, secret, self._token = _hear_from_first(4)
        self._connection = come_to((str(host), int(str(port))), str(secret), self._rank, leads=self._leads)

    def hold(self) -> None:
        """Join Ray where this rank leads its node, and return when the driver is done.

        Raises:
            EnvironmentFailed: Ray can't be started here, or one of its processes has died.
            PeerGone: Rank 0 is gone.
        """
        connection = self._connection
        if connection is None:
            raise PeerGone("rank 0")
        if self._leads:
            self._join(connection, connection.hear(HeadKnown))
        while True:
            word = self._next(connection)
            match word:
                case DriverDone():
                    return
                case LinesAsked():
                    connection.say(LinesCounted(lines=written_in(self._logs) if self._logs is not None else 0))
                case _:
                    continue

    def end(self) -> None:
        super().end()
        if self._connection is not None:
            self._connection.close()

    def _join(self, connection: Connection, head: HeadKnown) -> None:
        try:
            self._start(str(self._token), head.address)
            started = self._wait()
            if started.ray_version != head.ray_version:
                raise EnvironmentFailed(
                    f"it has Ray {started.ray_version}, and the head has {head.ray_version}. All nodes need the same: "
                    "name an environment for the run with --env-version."
                )
        except EnvironmentFailed as error:
            connection.say(NodeJoined(problem=error.message))
            raise
        connection.say(NodeJoined())

    def _next(self, connection: Connection) -> AtMeeting:
        """The next word of rank 0.

        Raises:
            EnvironmentFailed: One of Ray's processes here has died.
        """
        watched = [connection, *([self._process] if self._process is not None else [])]
        while not connection.has_word:
            ready = select.select(watched, [], [])[0]
            if connection in ready:
                connection.take()
            elif self._process is not None:
                word = self._process.heard()
                if isinstance(word, NodeTroubled):
                    log = f"\n{word.log}" if word.log else ""
                    raise EnvironmentFailed(f"{word.text} on the node of rank {self._rank}.{log}")
        return connection.next_word()


def _tell_all(words: list[object]) -> None:
    """Through the process group: every rank is in it."""
    dist.broadcast_object_list(words, src=0, device=torch.device("cpu"))


def _hear_from_first(count: int) -> list[object]:
    words: list[object] = [None] * count
    dist.broadcast_object_list(words, src=0, device=torch.device("cpu"))
    return words

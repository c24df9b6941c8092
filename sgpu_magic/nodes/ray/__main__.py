"""`python -m sgpu_magic.nodes.ray <fd> <address> <namespace> <prefix>`: a pool's driver process, connected to Ray.

Ray's client blocks while the cluster is unreachable, and eventually exits its process; so it has a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from sgpu_magic.nodes.ray import cluster
from sgpu_magic.nodes.ray.cluster import RayError
from sgpu_magic.nodes.ray.driver import (
    AgentFailed,
    AskLease,
    ClusterFound,
    ClusterLost,
    DropLease,
    EndAgents,
    EndAll,
    FromCluster,
    LeaseFailed,
    LeaseReady,
    LeaseWaits,
    NodeFacts,
    NodesSeen,
    StartAgent,
    ToCluster,
    WatchNodes,
    to_cluster,
)
from sgpu_magic.system.message_stream import MessageStream

T = TypeVar("T")
_THREADS = 24
# some of Ray's calls wait without a limit for a server that does not answer
_LIMIT_S = 45.0
# a group that fits is created within milliseconds; after this time the group is reported to the engine as pending
_SOON_S = 3.0
# polled, because Ray's wait raises an error without a specific type if the group is removed meanwhile
_FIRST_POLL_S = 0.004
_POLL_S = 0.25
# Ray raises these besides its own errors, for names and ids that the cluster may have forgotten
_RAYS = (RayError, ValueError, RuntimeError, ConnectionError, TimeoutError)


class ClusterProcess:
    """Executes the engine's requests, each Ray call in a worker thread.

    Args:
        sock: The socket to the engine.
        address: Ray's address.
        namespace: The pool's Ray namespace.
        prefix: The prefix of the names of the pool's placement groups.
    """

    def __init__(self, sock: socket.socket, address: str, namespace: str, prefix: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._stream = MessageStream[ToCluster](sock, to_cluster, self._execute, lambda: self._begin(self._forsake()))
        self._address, self._namespace, self._prefix = address, namespace, prefix
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sgpu-ray")
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[str, AskLease] = {}
        # serializes the calls for each run; a lock exists while it is held or waited for
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        self._facts: dict[str, NodeFacts] = {}
        self._looking: set[str] = set()
        self._every_s = 2.0
        self._seen_by: asyncio.Event = asyncio.Event()
        self._begin(self._connect())

    def close(self) -> None:
        self._stream.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := self._loop.create_task(work))
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # a bug, or an unknown error of Ray: exit; the engine repeats all requests to the next process
            self._loop.call_exception_handler(
                {"message": "an internal error in the process that talks to Ray", "exception": error}
            )
            self._finish()

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._threads, lambda: function(*args))

    def _say(self, message: FromCluster) -> None:
        self._stream.send(message)

    def _on_error(self, error: Exception) -> None:
        silent = isinstance(error, TimeoutError)
        why = "it does not answer" if silent else str(error).strip() or type(error).__name__
        self._say(ClusterLost(why=why, silent=silent))
        self._finish()

    # ------------------------------------------------------------ from the engine

    def _execute(self, message: ToCluster, frames: Sequence[bytes]) -> None:
        match message:
            case WatchNodes(every_s=every_s):
                self._every_s = every_s
                self._seen_by.set()
            case AskLease():
                self._asked[message.run_id] = message
                self._begin(self._lease(message))
            case DropLease(run_id=run_id):
                self._asked.pop(run_id, None)
                self._begin(self._drop(run_id))
            case StartAgent():
                self._begin(self._of_agents([message.order.node], cluster.start_agent, message))
            case EndAgents(nodes=nodes):
                self._begin(self._of_agents(nodes, cluster.end_agents, nodes))
            case EndAll():
                self._begin(self._end_all())

    async def _forsake(self) -> None:
        """Drop pending requests: the pool service died. Placement groups whose runs the agents hold are kept."""
        asked = list(self._asked)
        self._asked.clear()
        for run_id in asked:
            await self._drop(run_id)
        self._finish()

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    # ------------------------------------------------------------ the cluster

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(_LIMIT_S):
                address = await self._call(cluster.connect, self._address, self._namespace)
                agents = await self._call(cluster.agent_nodes, self._namespace)
                leases = tuple(await self._call(cluster.groups_named, self._prefix))
        except _RAYS as error:
            self._on_error(error)
            return
        self._say(ClusterFound(address=address, types=cluster.type_names(), agents=agents, leases=leases))
        self._begin(self._watch())

    async def _watch(self) -> None:
        while True:
            self._seen_by.clear()
            try:
                async with asyncio.timeout(_LIMIT_S):
                    await self._see()
            except _RAYS as error:
                self._on_error(error)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._seen_by.wait()

    async def _see(self) -> None:
        seen = await self._call(cluster.nodes, self._prefix, self._facts)
        bringing = await self._call(cluster.coming) if self._asked else None
        before, self._facts = self._facts, {facts.node: facts for facts in seen}
        # Ray's resource view lags behind its groups: only what two consecutive views show counts as used by others
        steady = tuple(_steady(before.get(facts.node), facts) for facts in seen)
        self._say(NodesSeen(nodes=steady, coming=bringing))
        for facts in seen:
            if not facts.probed and not facts.problem and facts.node not in self._looking:
                self._looking.add(facts.node)
                self._begin(self._inspect(facts))

    async def _inspect(self, facts: NodeFacts) -> None:
        found = await self._call(cluster.inspect_node, facts)
        self._looking.discard(facts.node)
        if facts.node in self._facts:
            self._facts[facts.node] = found
            self._seen_by.set()

    # ------------------------------------------------------------ leases

    async def _lease(self, order: AskLease) -> None:
        try:
            async with self._turn(order.run_id):
                group = await self._call(cluster.find_or_make, order, self._name(order.run_id))
            began, wait_s, reported = self._loop.time(), _FIRST_POLL_S, ""
            while self._asked.get(order.run_id) is order:
                state = await self._call(cluster.state_of, group)
                soon = self._loop.time() - began < _SOON_S
                if state == cluster.THERE:
                    await self._granted(order, group)
                    return
                if state == cluster.GONE:
                    if not soon:
                        raise RuntimeError("its placement group was removed")
                    # the group that was found is that of an earlier attempt
                    async with self._turn(order.run_id):
                        group = await self._call(cluster.find_or_make, order, self._name(order.run_id))
                elif not soon and state != reported and self._asked.get(order.run_id) is order:
                    reported = state
                    self._say(LeaseWaits(run_id=order.run_id))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _POLL_S)
        except _RAYS as error:
            if self._asked.get(order.run_id) is order:
                del self._asked[order.run_id]
                self._say(LeaseFailed(run_id=order.run_id, why=str(error).strip().split("\n")[0]))
                await self._drop(order.run_id)
        else:
            # the request was withdrawn before its group was created
            if order.run_id not in self._asked:
                await self._drop(order.run_id)

    async def _granted(self, order: AskLease, group: cluster.Group) -> None:
        parts = await self._call(cluster.parts_of, group, order)
        if self._asked.get(order.run_id) is order:
            # the group belongs to the engine from now on: it outlives this process
            del self._asked[order.run_id]
            self._say(LeaseReady(run_id=order.run_id, parts=parts))

    async def _drop(self, run_id: str) -> None:
        # a newer request for the run is not affected: it waits for its turn
        try:
            async with self._turn(run_id):
                await self._call(cluster.remove, self._name(run_id))
        except _RAYS as error:
            self._on_error(error)

    def _turn(self, run_id: str) -> asyncio.Lock:
        return self._turns.setdefault(run_id, asyncio.Lock())

    def _name(self, run_id: str) -> str:
        return f"{self._prefix}{run_id}"

    # ------------------------------------------------------------ agents

    async def _of_agents(self, nodes: Sequence[str], function: Callable[[Any], None], argument: object) -> None:
        try:
            await self._call(function, argument)
        except _RAYS as error:
            for node in nodes:
                self._say(AgentFailed(node=node, why=str(error).strip().split("\n")[-1]))

    async def _end_all(self) -> None:
        self._asked.clear()
        try:
            await self._call(cluster.end_agents, await self._call(cluster.agent_nodes, self._namespace))
            for run_id in await self._call(cluster.groups_named, self._prefix):
                await self._call(cluster.remove, self._name(run_id))
        finally:
            self._finish()


def _steady(before: NodeFacts | None, now: NodeFacts) -> NodeFacts:
    if before is None:
        return now
    return msgspec.structs.replace(
        now,
        gpus_outside=min(before.gpus_outside, now.gpus_outside),
        cpus_outside=min(before.cpus_outside, now.cpus_outside),
    )


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, *arguments = sys.argv[1:]

    async def run() -> None:
        process = ClusterProcess(socket.socket(fileno=int(descriptor)), *arguments)
        await process.finished
        process.close()

    asyncio.run(run())
    # threads may hang in Ray: exit without waiting for them
    os._exit(0)


if __name__ == "__main__":
    main()

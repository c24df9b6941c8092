"""Which orders an engine keeps for nodes that have not joined yet, and when a lease becomes free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from launches import RUN, launch
from msgspec.structs import replace

from sgpu_magic.config import Settings
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.nodes.engine_reports import EngineListener
from sgpu_magic.wire.base import FailureKind, RunKind, RunState
from sgpu_magic.wire.devices import Inventory, Lease, NodeShare
from sgpu_magic.wire.events import EventBody, RanksStarted, RunEnded
from sgpu_magic.wire.node import (
    AgentReady,
    DevicesFree,
    EndRun,
    Launch,
    PartEnded,
    PartsEnded,
    PeerFailed,
    RanksGone,
    RunEvent,
    ToAgent,
)
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION
from sgpu_magic.wire.rank_events import Failure, RankFailed


class Link:
    """A `NodeChannel` that records orders."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.orders: list[ToAgent] = []

    def send(self, message: ToAgent, frames: Sequence[bytes] = ()) -> None:
        self.orders.append(message)

    def close(self) -> None: ...

    def kinds(self) -> list[type[Any]]:
        return [type(order) for order in self.orders]


class Service:
    """An `EngineListener` that records its calls."""

    def __init__(self) -> None:
        self.reported: list[EventBody] = []
        self.received: list[str] = []

    def on_run_event(self, event: RunEvent, frames: Sequence[bytes]) -> None:
        self.reported.append(event.body)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def hear(*_: object) -> None:
            self.received.append(name)

        return hear


class Nodes(Engine):
    """Records which leases have become free."""

    def __init__(self, settings: Settings, name: str) -> None:
        super().__init__(settings, name)
        self.of_runs: list[str] = []

    @property
    def freed(self) -> int:
        return len(self.of_runs)

    def lease_free(self, run_id: str, lease: Lease) -> None:
        self.of_runs.append(run_id)


def ready(node: str) -> AgentReady:
    return AgentReady(pid=1, protocol_version=PROTOCOL_VERSION, inventory=Inventory(host=node, cpu_slots=2), runs=())


async def engine_with(tmp_path: Path, *there: str) -> tuple[Nodes, Service, dict[str, Link]]:
    engine, service = Nodes(replace(Settings(), state_dir=str(tmp_path)), "cluster"), Service()
    links = {node: Link(node) for node in ("a", "b")}
    for node in there:
        engine.on_node_connected(links[node], ready(node))
    engine.start(cast("EngineListener", service))
    await asyncio.sleep(0)
    return engine, service, links


class Late(Nodes):
    """Has no inventory until the test sets it, as when a cluster answers late."""

    come_back_s = 0.05
    known: Inventory | None = None

    def inventory(self) -> Inventory | None:
        return self.known


async def late(tmp_path: Path) -> tuple[Late, Service]:
    """An engine whose time limit for nodes has passed before any was known; node `a` has joined by itself."""
    engine, service = Late(replace(Settings(), state_dir=str(tmp_path)), "cluster"), Service()
    engine.start(cast("EngineListener", service))
    engine.on_node_connected(Link("a"), ready("a"))
    await asyncio.sleep(2 * engine.come_back_s)
    assert "node_found" not in service.received
    return engine, service


def test_a_node_that_came_before_the_cluster_named_it_is_not_waited_for(tmp_path: Path):
    async def scenario() -> None:
        engine, service = await late(tmp_path)
        engine.await_nodes(["a"])
        engine.known = Inventory(host="cluster", cpu_slots=4)
        engine.inventory_changed()
        assert "node_found" in service.received

    asyncio.run(scenario())


def test_a_node_that_the_cluster_names_late_is_waited_for_and_not_for_ever(tmp_path: Path):
    async def scenario() -> None:
        engine, service = await late(tmp_path)
        engine.await_nodes(["a", "b"])
        engine.known = Inventory(host="cluster", cpu_slots=4)
        engine.inventory_changed()
        assert "node_found" not in service.received
        async with asyncio.timeout(10):
            while "node_found" not in service.received:
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_each_part_is_launched_when_its_node_comes(tmp_path: Path):
    async def scenario() -> None:
        engine, service, links = await engine_with(tmp_path, "a")
        engine.launch(launch(), (b"inline",))
        assert "lease_granted" in service.received
        assert links["a"].kinds() == [Launch]
        engine.on_node_connected(links["b"], ready("b"))
        (order,) = links["b"].orders
        assert isinstance(order, Launch)
        assert order.part is not None
        assert (order.part.index, order.part.first_rank, order.part.ranks) == (1, 2, 2)

    asyncio.run(scenario())


def test_what_is_cancelled_is_not_launched_on_a_node_that_comes_later(tmp_path: Path):
    async def scenario() -> None:
        engine, service, links = await engine_with(tmp_path, "a")
        engine.launch(launch(), ())
        engine.end_run(RUN, RunState.CANCELLED, "enough")
        assert links["a"].kinds() == [Launch, EndRun]
        ended = RunEnded(state=RunState.CANCELLED, reason="enough")
        engine.on_node_message("a", RunEvent(run_id=RUN, number=1, at=100.0, body=ended))
        assert service.reported == [ended]
        engine.on_node_message("a", RanksGone(run_id=RUN))
        assert "ranks_exited" in service.received
        assert engine.freed == 1
        engine.on_node_connected(links["b"], ready("b"))
        assert Launch not in links["b"].kinds()

    asyncio.run(scenario())


def test_ranks_leave_when_all_parts_have_ended_and_devices_are_free_before_results_are_there(tmp_path: Path):
    async def scenario() -> None:
        engine, service, links = await engine_with(tmp_path, "a", "b")
        engine.launch(launch(), ())
        engine.on_node_message("a", PartEnded(run_id=RUN))
        assert PartsEnded not in links["a"].kinds()
        engine.on_node_message("b", PartEnded(run_id=RUN))
        assert [links[node].kinds()[-1] for node in ("a", "b")] == [PartsEnded, PartsEnded]
        engine.on_node_message("a", DevicesFree(run_id=RUN))
        assert "devices_free" not in service.received
        engine.on_node_message("b", DevicesFree(run_id=RUN))
        assert service.received[-1] == "devices_free"
        assert engine.freed == 0, "whether the run needs them again is for the pool to say"
        engine.give_back(RUN)
        assert engine.freed == 1
        for node in ("a", "b"):
            engine.on_node_message(
                node, RunEvent(run_id=RUN, number=1, at=1.0, body=RunEnded(state=RunState.SUCCEEDED))
            )
            assert "ranks_exited" not in service.received
            engine.on_node_message(node, RanksGone(run_id=RUN))
        assert [body.state for body in service.reported if isinstance(body, RunEnded)] == [RunState.SUCCEEDED]
        assert service.received[-1] == "ranks_exited"
        assert engine.freed == 1

    asyncio.run(scenario())


def test_what_is_cancelled_before_any_node_came_is_over_at_once(tmp_path: Path):
    async def scenario() -> None:
        engine, service, links = await engine_with(tmp_path)
        engine.launch(launch(), ())
        engine.end_run(RUN, RunState.CANCELLED, "enough")
        await asyncio.sleep(0)
        assert service.reported == [RunEnded(state=RunState.CANCELLED, reason="enough")]
        assert service.received[-1] == "ranks_exited"
        assert engine.freed == 1
        for node, link in links.items():
            engine.on_node_connected(link, ready(node))
            assert Launch not in link.kinds()

    asyncio.run(scenario())


def test_a_launch_is_ordered_again_of_a_node_that_never_heard_it_and_never_twice(tmp_path: Path):
    async def scenario() -> None:
        engine, service, _ = await engine_with(tmp_path, "a", "b")
        engine.launch(launch(), (b"inline",))
        again = Link("b")
        engine.on_node_connected(again, ready("b"))
        assert again.kinds() == [Launch]
        for node in ("a", "b"):
            engine.on_node_message(
                node, RunEvent(run_id=RUN, number=1, at=100.0, body=RanksStarted(pids=(1, 2), warm="zygote"))
            )
        # from now on, a node without the ranks counts as having lost them
        last = Link("b")
        engine.on_node_connected(last, ready("b"))
        assert Launch not in last.kinds()
        assert "runs_lost" in service.received

    asyncio.run(scenario())


def failed(rank: int, *, victim: bool) -> RunEvent:
    failure = Failure(kind=FailureKind.USER_CODE, message="x", rank=rank, at=100.0, is_consequence=victim)
    return RunEvent(run_id=RUN, number=1, at=100.0, body=RankFailed(failure=failure))


def test_who_only_lost_a_peer_lets_nobody_be_freed_before_the_cause_had_its_time(tmp_path: Path):
    async def scenario() -> None:
        engine, _, links = await engine_with(tmp_path, "a", "b")
        engine.launch(launch(), ())
        engine.on_node_message("a", failed(0, victim=True))
        assert PeerFailed not in links["b"].kinds()
        async with asyncio.timeout(5):
            while PeerFailed not in links["b"].kinds():
                await asyncio.sleep(0.01)
        assert PeerFailed not in links["a"].kinds()

    asyncio.run(scenario())


def test_an_error_frees_those_on_other_nodes_at_once(tmp_path: Path):
    async def scenario() -> None:
        engine, _, links = await engine_with(tmp_path, "a", "b")
        engine.launch(launch(), ())
        engine.on_node_message("b", failed(3, victim=False))
        assert links["a"].kinds() == [Launch, PeerFailed]
        assert links["b"].kinds() == [Launch]

    asyncio.run(scenario())


# ---------------------------------------------------------------- a session's lease, with the last process on it

SESSION, A, B = "5e550000", "aaaa0000", "bbbb0000"


def on_one_node(run_id: str, *, session: str = "", fresh: bool = False) -> Launch:
    whole = launch()
    kind = RunKind.CELL if session else RunKind.SESSION
    spec = msgspec.structs.replace(whole.spec, run_id=run_id, kind=kind, session=session, fresh=fresh)
    lease = msgspec.structs.replace(whole.lease, shares=(NodeShare(node="a", host="ml-1", ranks=4),))
    return msgspec.structs.replace(whole, spec=spec, lease=lease)


async def session_with(tmp_path: Path, *cells: Launch) -> Nodes:
    engine, _, _ = await engine_with(tmp_path, "a")
    for one in (on_one_node(SESSION), *cells):
        engine.launch(one, ())
    return engine


def freed_after(engine: Nodes, *gone: str) -> list[str]:
    for run_id in gone:
        engine.on_node_message("a", RanksGone(run_id=run_id))
    return engine.of_runs


def test_a_cell_in_a_session_frees_nothing(tmp_path: Path):
    async def scenario() -> None:
        engine = await session_with(tmp_path, on_one_node(A, session=SESSION))
        assert freed_after(engine, A) == []
        assert freed_after(engine, SESSION, SESSION) == [SESSION]

    asyncio.run(scenario())


def test_a_session_whose_ranks_are_gone_keeps_its_devices_for_fresh_processes(tmp_path: Path):
    async def scenario() -> None:
        cells = [on_one_node(run_id, session=SESSION, fresh=True) for run_id in (A, B)]
        engine = await session_with(tmp_path, *cells)
        assert freed_after(engine, A, SESSION) == []
        assert freed_after(engine, B) == [SESSION]

    asyncio.run(scenario())


def test_fresh_processes_that_end_first_leave_the_devices_to_the_session(tmp_path: Path):
    async def scenario() -> None:
        engine = await session_with(tmp_path, on_one_node(A, session=SESSION, fresh=True))
        assert freed_after(engine, A) == []
        assert freed_after(engine, SESSION) == [SESSION]

    asyncio.run(scenario())

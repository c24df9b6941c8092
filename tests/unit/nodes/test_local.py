"""The single-node engine: its devices are locked while a run has them, and its agent is replaced when it dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest
from launches import launch
from msgspec.structs import replace

from sgpu_magic.config import Settings
from sgpu_magic.nodes import local
from sgpu_magic.nodes.device_locks import DeviceLocks
from sgpu_magic.nodes.engine_reports import EngineListener
from sgpu_magic.nodes.local import LocalAgent, LocalEngine
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.node import AgentReady, FromAgent, HeldRun, Launch, RanksGone, ToAgent
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION

A, B, GPU = "aaaa0000", "bbbb0000", "GPU-0"


class Agent:
    """Stands in for a `LocalAgent` and records its messages."""

    node = ""
    is_adopted = False

    def __init__(self, *_: object, **__: object) -> None:
        self.orders: list[tuple[ToAgent, int]] = []
        self.descriptors: list[int] = []

    def listen(self, text: Callable[[FromAgent, Sequence[bytes]], None], lost: Callable[[], None]) -> None:
        self.sent, self.lost = text, lost

    def send(self, message: ToAgent, frames: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        self.orders.append((message, len(descriptors)))

    def take_descriptors(self, count: int) -> list[int]:
        return self.descriptors[:count]

    def ready(self, *runs: HeldRun) -> None:
        self.sent(AgentReady(pid=1, protocol_version=PROTOCOL_VERSION, inventory=Inventory(host="here"), runs=runs), ())

    @property
    def launched(self) -> list[tuple[str, int]]:
        """Launched runs, and the number of locks sent with each."""
        return [(order.spec.run_id, count) for order, count in self.orders if isinstance(order, Launch)]

    def clean_up_after(self, done: Callable[[], None]) -> None:
        done()

    def close(self, grace_s: float = 0.0) -> None: ...


class Service:
    """An `EngineListener` that records its calls and may act on them."""

    def __init__(self) -> None:
        self.received: list[tuple[str, object]] = []
        self.then: dict[str, Callable[[], object]] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        def hear(*reported: object) -> None:
            self.received.append((name, reported[0]))
            if name in self.then:
                self.then[name]()

        return hear


def on_gpu(run_id: str) -> Launch:
    whole = launch()
    lease = Lease(lease_id=run_id, device_type="a10", ranks=1, uuids=(GPU,))
    return msgspec.structs.replace(whole, spec=msgspec.structs.replace(whole.spec, run_id=run_id), lease=lease)


class Pool:
    """An engine with its agent, its service, and the locks as another pool sees them."""

    def __init__(self, settings: Settings, *held: HeldRun, descriptors: Sequence[int] = ()) -> None:
        self.agent, self.service = Agent(), Service()
        self.agent.descriptors = list(descriptors)
        self.engine = LocalEngine(settings, cast("LocalAgent", self.agent))
        self.engine.start(cast("EngineListener", self.service))
        self.service.then["node_found"] = lambda: [self.engine.adopt(one.launch.spec.run_id, {}) for one in held]
        self.agent.ready(*held)
        self.other = DeviceLocks(settings.lock_path)

    @property
    def is_locked(self) -> bool:
        return bool(self.other.obstacles([GPU]))

    def close(self) -> None:
        self.engine.close()
        self.other.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(Settings(), state_dir=str(tmp_path / "state"), lock_dir=str(tmp_path / "locks"))


def run(scenario: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(scenario())


def test_a_device_stays_locked_when_the_next_run_gets_it_before_the_first_is_over_for_all(settings: Settings):
    async def scenario() -> None:
        pool = Pool(settings)
        pool.engine.launch(on_gpu(A), ())
        assert pool.agent.launched == [(A, 1)]
        assert pool.is_locked
        pool.service.then["ranks_exited"] = lambda: pool.engine.launch(on_gpu(B), ())
        pool.agent.sent(RanksGone(run_id=A), ())
        assert pool.agent.launched == [(A, 1), (B, 1)]
        assert pool.is_locked
        pool.service.then.clear()
        pool.agent.sent(RanksGone(run_id=B), ())
        assert not pool.is_locked
        pool.close()

    run(scenario)


def test_a_device_of_another_pool_is_refused(settings: Settings):
    async def scenario() -> None:
        pool = Pool(settings)
        pool.other.acquire([GPU])
        pool.engine.launch(on_gpu(A), ())
        assert pool.service.received[-1] == ("lease_refused", A)
        assert pool.agent.launched == []
        pool.close()

    run(scenario)


@pytest.mark.parametrize("again", [True, False])
def test_a_run_that_is_started_again_after_its_agents_death_keeps_its_device(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, again: bool
):
    async def scenario() -> None:
        pool, new = Pool(settings), Agent()
        monkeypatch.setattr(local, "LocalAgent", lambda *_, **__: new)
        pool.engine.launch(on_gpu(A), ())
        if again:
            pool.service.then["nodes_lost"] = lambda: pool.engine.launch(on_gpu(A), ())
        pool.agent.lost()
        assert ("nodes_lost", "the agent on this machine ended unexpectedly") in pool.service.received
        assert pool.is_locked == again
        new.ready()
        assert new.launched == ([(A, 1)] if again else [])
        pool.close()

    run(scenario)


@pytest.mark.parametrize("gone", [True, False])
def test_the_locks_of_runs_that_an_agent_holds_are_taken_over(settings: Settings, gone: bool):
    async def scenario() -> None:
        earlier = DeviceLocks(settings.lock_path)
        earlier.acquire([GPU])
        descriptors = [] if gone else [os.dup(*earlier.descriptors([GPU]))]
        held = HeldRun(
            launch=on_gpu(A), state=RunState.RUNNING, started_s=1.0, have_ranks_exited=gone, locks=len(descriptors)
        )
        pool = Pool(settings, held, descriptors=descriptors)
        if not gone:
            earlier.close()
        assert pool.is_locked
        pool.agent.sent(RanksGone(run_id=A), ())
        assert pool.is_locked == gone, "of one that is gone the lock is another's by now"
        pool.close()
        earlier.close()

    run(scenario)

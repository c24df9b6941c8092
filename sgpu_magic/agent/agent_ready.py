"""What the agent tells a pool service that it comes to: what this node has, and which runs it holds."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Protocol

from sgpu_magic.agent.background_call import call_in_background
from sgpu_magic.agent.ranks.standby_groups import Groups
from sgpu_magic.agent.run_registry import HeldRuns
from sgpu_magic.agent.runs import ray_place
from sgpu_magic.agent.runs.send_files_to_pool import FarRuns
from sgpu_magic.agent.watch.inventory import take_inventory
from sgpu_magic.config import Settings
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.messages import PROTOCOL_VERSION
from sgpu_magic.wire.node_messages import AgentReady, HeldRun, InventoryTaken
from sgpu_magic.wire.record import Record


class _Send(Protocol):
    def __call__(self, message: Record, frames: Sequence[bytes] = (), descriptors: Sequence[int] = (), /) -> None: ...


class Introduction:
    """Of one agent.

    Args:
        settings: The pool's settings.
        runs: What it holds.
        far: Knows how the runs were ordered.
        groups: Has further processes that are the agent's own.
        send: Sends to the service of now.
    """

    def __init__(self, settings: Settings, runs: HeldRuns, far: FarRuns, groups: Groups, send: _Send) -> None:
        self._settings = settings
        self._runs = runs
        self._far = far
        self._groups = groups
        self._send = send

    async def ready(self) -> None:
        """Say the agent's first word to a service, as soon as the driver has told."""
        ray_place.sweep(self._settings, [run.run_id for run in self._runs.all()])
        inventory = await self._take()
        held: list[HeldRun] = []
        locks: list[int] = []
        for run in self._runs.all():
            own = self._runs.locks(run.run_id)
            locks += own
            held.append(
                HeldRun(
                    launch=self._far.as_ordered(run.launch),
                    state=run.state,
                    started_s=run.age_s,
                    gone=run.gone,
                    locks=len(own),
                )
            )
        ready = AgentReady(pid=os.getpid(), protocol_version=PROTOCOL_VERSION, inventory=inventory, runs=tuple(held))
        self._send(ready, (), locks)

    async def inventory_again(self) -> None:
        """Say what the node has now."""
        self._send(InventoryTaken(inventory=await self._take()))

    async def _take(self) -> Inventory:
        """In a thread of its own: a real driver may take seconds to answer."""
        own = [pid for run in self._runs.all() for pid in run.pids]
        take = functools.partial(
            take_inventory,
            simulate=self._settings.simulate,
            cpu_slots=self._settings.cpu_slot_count,
            own_pids=[*own, *self._groups.zygote_pids()],
        )
        return await call_in_background(take, "sgpu-inventory")

"""How the agent outlives a pool service: it introduces itself to each, and waits for, starts and accepts the next one.

Ranks keep running when a service ends unexpectedly. A run whose notebook is dead too is cancelled, as the service would
have done. Notebooks that follow a run start the next service; for detached runs the agent starts it. When no run is
wanted any more, or no service connects in time, the agent ends everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgpu_magic import extensions
from sgpu_magic.agent import faults
from sgpu_magic.agent.reports import Send
from sgpu_magic.agent.run_registry import RunRegistry
from sgpu_magic.agent.watch.inventory import NvmlSession, take_inventory
from sgpu_magic.config import Settings
from sgpu_magic.system import child_process, processes
from sgpu_magic.system.processes import may_be_alive
from sgpu_magic.wire.base import CancelReason, RunState
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.node import AgentReady, HeldRun, InventoryTaken
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION

_POLL_S = 0.25
# finished runs wait this long: a notebook that follows one starts the next service within a second or two
_OVER_S = 5.0
# the agent starts the next service itself only after this, so that a notebook can do it first
_SUCCESSOR_S = 1.0


class Introduction(msgspec.Struct, frozen=True):
    """Introduces the agent to a pool service: reports the node's devices and the runs that the agent holds.

    Args:
        settings: The pool's settings.
        runs: The runs that the agent holds; the processes of its zygotes count as the agent's own.
        send: Sends to the current service.
        nvml: Keeps the driver's library open for a while.
    """

    settings: Settings
    runs: RunRegistry
    send: Send
    nvml: NvmlSession = msgspec.field(default_factory=NvmlSession)

    async def ready(self) -> None:
        """Send the agent's first message to a service, as soon as the driver has listed the devices."""
        extensions.ray_directories().sweep(self.settings, [run.run_id for run in self.runs.all()])
        inventory = await self._receive_inventory()
        runs = self.runs.all()
        held = [
            HeldRun(
                launch=self.runs.far.as_ordered(run.launch),
                state=run.state,
                started_s=run.age_s,
                have_ranks_exited=run.has_exited,
                locks=len(self.runs.locks(run.run_id)),
            )
            for run in runs
        ]
        locks = [lock for run in runs for lock in self.runs.locks(run.run_id)]
        ready = AgentReady(pid=os.getpid(), protocol_version=PROTOCOL_VERSION, inventory=inventory, runs=tuple(held))
        self.send(ready, (), locks)

    async def inventory_again(self) -> None:
        """Report the node's current devices."""
        self.send(InventoryTaken(inventory=await self._receive_inventory()))

    async def _receive_inventory(self) -> Inventory:
        simulate, slots = self.settings.simulate, self.settings.cpu_slot_count
        own = [pid for run in self.runs.all() for pid in run.pids] + self.runs.groups.zygotes.pids()
        take = functools.partial(take_inventory, simulate=simulate, cpu_slots=slots, own_pids=own)
        return take() if simulate.strip() else await self.nvml.during(take)


@dataclass(eq=False, repr=False)
class Orphaned:
    """Manages the runs between a pool service's unexpected end and the next service's connection.

    Args:
        runs: The runs that the agent holds.
        successor: Starts the next service; None where the agent can't.
        timeout_s: Seconds to wait for the next service.
        end: Ends the agent and everything it runs.
    """

    runs: RunRegistry
    successor: Successor | None
    timeout_s: float
    end: Callable[[], None]

    def __post_init__(self) -> None:
        self._since = 0.0
        self._loop = asyncio.get_running_loop()
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start waiting: the service is gone."""
        self._since = self._loop.time()
        self._until = self._since + self.timeout_s
        self._check_service()

    def stop(self) -> None:
        """Stop waiting: another service has connected, or the agent ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_service(self) -> None:
        # scheduled first: the agent ends in time even if the code below raises
        self._timer = self._loop.call_later(_POLL_S, self._check_service)
        wanted = False
        for run in self.runs.all():
            spec = run.launch.spec
            if spec.detach or may_be_alive(spec.owner.pid, spec.owner.host, spec.owner.namespace):
                wanted |= not run.has_exited or run.files.memory.in_use or self.runs.reports.has_unkept(run.run_id)
            elif not run.ended:
                with faults.guarded(run.faulted):
                    run.end_as(RunState.CANCELLED, CancelReason.OWNER_GONE)
        still_there = any(not run.has_exited for run in self.runs.all())
        if not still_there and not any(run.launch.spec.detach for run in self.runs.all()):
            self._until = min(self._until, self._loop.time() + _OVER_S)
        if self._loop.time() > self._until or not (wanted or still_there):
            self.stop()
            self.end()
            return
        is_due = self._loop.time() > self._since + _SUCCESSOR_S
        is_needed = any(run.launch.spec.detach and not run.has_exited for run in self.runs.all())
        if self.successor is not None and is_due and is_needed:
            self._since = self._loop.time()
            # if the system can't start a process, the timeout ends the runs
            with contextlib.suppress(OSError):
                self.successor.start()


class Successor:
    """Starts this user's next pool service, as a client does. Harmless when another process is first.

    Args:
        log: The file for the service's standard error.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the service unless it is being started. It detaches from this process, so it outlives the agent.

        Raises:
            OSError: The process can't be started.
        """
        if self._process is not None:
            return
        # the service detaches by a second fork and must not be reparented to this process
        processes.become_subreaper(False)
        with open(self._log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            self._process = child_process.popen(
                [sys.executable, "-m", "sgpu_magic.pool"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )

    def reaped(self, pid: int) -> None:
        """Handle the end of a child: the starter exits as soon as the service has detached."""
        if self._process is not None and self._process.pid == pid:
            self._process.returncode = 0
            self._process = None
            processes.become_subreaper()

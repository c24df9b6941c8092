"""The ssh engine: machines that the user can log in to are the nodes, this one the first of them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.nodes.engine_reports import EngineListener, merged_inventory
from sgpu_magic.nodes.ssh.link import DevicesLocked, LockDevices, UnlockDevices, lockable
from sgpu_magic.nodes.ssh.node_login import NodeLogin, NodePlace
from sgpu_magic.ssh.address import SshAddress
from sgpu_magic.ssh.machines import AGENTS_FILE, Machine, Machines
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.node import AgentReady, FromAgent, Launch

# a pool whose nodes are not all there reports those that are after so long
_PATIENCE_S = 60.0
# a node to which the link broke is lost if it can't be reached again for so long: its runs go on meanwhile
_GIVE_UP_S = 60.0
# how long ranks on a node wait for the pool service, unless the user has set it; as on served pools
_ADOPT_S = 600.0
# the first login runs the same program as the others, without ssh
_HERE = ("/bin/sh", "-s")


class _Locking(NamedTuple):
    """A run whose devices are being locked.

    Args:
        launch: Its launch.
        frames: Its raw frames.
        waits: The nodes that have not answered yet.
    """

    launch: Launch
    frames: Sequence[bytes]
    waits: set[str]


class SshEngine(Engine):
    """An engine on several machines. Create and use it in the loop's thread only.

    Args:
        settings: The pool's settings.
        machines: The machines.
    """

    come_back_s = _GIVE_UP_S

    def __init__(self, settings: Settings, machines: Machines) -> None:
        if settings.adopt_timeout_s == Settings().adopt_timeout_s:
            settings = msgspec.structs.replace(settings, adopt_timeout_s=_ADOPT_S)
        super().__init__(settings, "hosts")
        self._machines = machines
        self._logins: dict[str, NodeLogin] = {}
        self._threads = ThreadPoolExecutor(len(machines.addresses), thread_name_prefix="sgpu-ssh")
        # why nodes can't be reached, in sentences
        self._problems: dict[str, str] = {}
        # nodes that have neither come nor failed yet
        self._coming = {address.name for address in machines.addresses}
        self._giving_up: dict[str, asyncio.TimerHandle] = {}
        self._locking: dict[str, _Locking] = {}
        self._late: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ for the pool service (Engine)

    def start(self, listener: EngineListener) -> None:
        super().start(listener)
        with contextlib.suppress(OSError):
            (self._settings.state_path / AGENTS_FILE).touch()
        # those that a client has brought to this machine (`ssh.prepare`)
        wheels = Path(sys.prefix).with_name("wheels")
        for number, address in enumerate(self._machines.addresses):
            machine = Machine(
                address.name,
                address if number else SshAddress("localhost"),
                self._settings.ssh_command,
                self._machines.python,
                self._machines.prologue,
                str(wheels) if number and wheels.is_dir() else "",
                is_node=True,
            )
            place = NodePlace(self._machines.name, machine, None if number else _HERE)
            self._logins[address.name] = NodeLogin(place, self._settings, self._threads, self)
        self._late = self._loop.call_later(_PATIENCE_S, self._all_came)

    def inventory(self) -> Inventory | None:
        """The inventory of the nodes that are connected; None before all have been tried."""
        if self._coming:
            return None
        away = self._stale.nodes | self._giving_up.keys()
        usable = {node: one for node, one in self._inventories.items() if node not in away}
        found = merged_inventory(self._name, usable, self._addresses)
        problems = [found.problem, *self._problems.values()]
        return msgspec.structs.replace(found, problem=" ".join(filter(None, problems)) or None)

    def close(self) -> None:
        if self._late is not None:
            self._late.cancel()
        for timer in self._giving_up.values():
            timer.cancel()
        graces = [run.launch.spec.grace_s for run in self._runs.values() if not run.has_ended]
        own_s = self._settings.grace_s
        super().close()
        grace_s = max((own_s if grace_s is None else grace_s for grace_s in graces), default=0.0)
        for login in self._logins.values():
            login.stop()
        wait([self._threads.submit(login.wait, grace_s) for login in self._logins.values()])
        self._threads.shutdown()
        (self._settings.state_path / AGENTS_FILE).unlink(missing_ok=True)

    def _all_came(self) -> None:
        self._coming.clear()
        self.inventory_changed()

    # ------------------------------------------------------------ leases

    def start_run(self, launch: Launch, frames: Sequence[bytes]) -> None:
        lease, run_id = launch.lease, launch.spec.run_id
        wanted = {share.node: uuids for share in lease.shares if (uuids := lockable(lease, share.node))}
        if gone := [share for share in lease.shares if self._logins[share.node].link is None]:
            self._refuse_lease_of(launch, f"the link to {gone[0].host} has broken")
        elif not wanted:
            self.start_parts(launch, frames)
        else:
            self._locking[run_id] = _Locking(launch, frames, set(wanted))
            for node, uuids in wanted.items():
                self._logins[node].send(LockDevices(run_id=run_id, uuids=uuids))

    def withdraw(self, run_id: str) -> None:
        if (locking := self._locking.pop(run_id, None)) is not None:
            self._unlock(locking.launch.lease)

    def lease_free(self, run_id: str, lease: Lease) -> None:
        self._unlock(lease)

    def on_devices_locked(self, node: NodeLogin, answer: DevicesLocked) -> None:
        locking = self._locking.get(answer.run_id)
        if locking is None:
            # it was withdrawn meanwhile, and its devices are unlocked
            return
        if answer.obstructed:
            del self._locking[answer.run_id]
            self._unlock(locking.launch.lease)
            self.refuse_lease(answer.run_id, answer.obstructed, answer.why)
            return
        locking.waits.discard(node.node)
        if not locking.waits:
            del self._locking[answer.run_id]
            self.start_parts(locking.launch, locking.frames)

    def _refuse_lease_of(self, launch: Launch, why: str) -> None:
        self.refuse_lease(launch.spec.run_id, launch.lease.uuids, f"{why}.")

    def _unlock(self, lease: Lease) -> None:
        """Unlock the devices of a lease, except those that another run has or is about to have."""
        others = [*self._leases.values(), *(locking.launch.lease for locking in self._locking.values())]
        used = {uuid for other in others for uuid in other.uuids}
        for share in lease.shares:
            if free := tuple(uuid for uuid in lockable(lease, share.node) if uuid not in used):
                self._logins[share.node].send(UnlockDevices(uuids=free))

    # ------------------------------------------------------------ logins (NodeListener)

    def on_agent_message(self, node: NodeLogin, message: FromAgent, frames: Sequence[bytes]) -> None:
        if not isinstance(message, AgentReady):
            self.on_node_message(node.node, message, frames)
            return
        if (timer := self._giving_up.pop(node.node, None)) is not None:
            timer.cancel()
        self._coming.discard(node.node)
        self._problems.pop(node.node, None)
        first = self._machines.addresses[0].name
        if node.first_address and node.node != first:
            # how the others reach the first machine, on which nobody logs in from another one
            self._addresses[first] = node.first_address
        if node.link is not None:
            self.on_node_connected(node.link, message, node.address or self._addresses.get(node.node, ""))

    def login_failed(self, node: NodeLogin, why: str) -> None:
        self._coming.discard(node.node)
        self._problems[node.node] = why
        self.inventory_changed()

    def link_lost(self, node: NodeLogin, why: str) -> None:
        for run_id, locking in list(self._locking.items()):
            if node.node in locking.waits:
                self.withdraw(run_id)
                self._refuse_lease_of(locking.launch, f"the link to {node.node} has broken")
        if why:
            self.node_lost(node.node, why)
        elif node.node in self._channels and node.node not in self._giving_up:
            self._giving_up[node.node] = self._loop.call_later(_GIVE_UP_S, self._give_up, node)
            self.inventory_changed()

    def _give_up(self, node: NodeLogin) -> None:
        del self._giving_up[node.node]
        why = f"the login to it broke, and none could be made for {_GIVE_UP_S:.0f} s"
        if problem := self._problems.get(node.node, ""):
            why += f": {problem.rstrip('.')}"
        self.node_lost(node.node, why)

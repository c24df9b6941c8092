"""`python -m sgpu_magic.nodes.ssh.node_end MARK`: the far end of a pool service's login to a node.

Starts the node's agent, or finds the one that an earlier login has started, and passes messages between it and the pool
service. Locks the devices of runs, since only a process on their machine can. When the login breaks it exits, and the
agent goes on: its ranks run, it holds their devices' locks, and waits for the next login.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence

import msgspec

from sgpu_magic.config import Settings, host_name, load_settings, private_dir, with_directories_of
from sgpu_magic.errors import SgpuError
from sgpu_magic.nodes.device_locks import DeviceLocks
from sgpu_magic.nodes.device_locks import DevicesLocked as DevicesAreLocked
from sgpu_magic.nodes.local import LocalAgent, marked_inventory
from sgpu_magic.nodes.ssh.link import (
    AgentEnded,
    Carried,
    DevicesLocked,
    LockDevices,
    NodeLink,
    NodeOrder,
    ToNode,
    UnlockDevices,
    lockable,
    to_node,
)
from sgpu_magic.ssh.far_end import FarEnd
from sgpu_magic.system import processes
from sgpu_magic.system.part_stream import PipeStream
from sgpu_magic.system.secure_sockets import MAX_FRAME_BYTES
from sgpu_magic.wire import codec
from sgpu_magic.wire.codec import UnreadableLaunch
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.node import AgentReady, EndAgent, FromAgent, InventoryTaken, Launch
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION

_SEND_S = 2.0


def main() -> None:
    """Run as the far end of a login until the link or the agent ends."""
    far = FarEnd(sys.argv[1])
    try:
        own = load_settings()
    except SgpuError as error:
        far.failed(error)
        return
    # of the client and its port, and of this machine and its port, as the server sees them
    connection = os.environ.get("SSH_CONNECTION", "").split()
    far.say("ready", " ".join(connection[0:3:2]))
    processes.become_subreaper()
    asyncio.run(_serve(far, own))


async def _serve(far: FarEnd, own: Settings) -> None:
    await NodeEnd(0, far.writing, own).over


class NodeEnd:
    """The node's side of a link.

    Args:
        reading: The descriptor to read.
        writing: The descriptor to write.
        own: This node's own settings.

    Attributes:
        over: Done when the process is to exit.
    """

    # set by the first message
    _node: str
    _agent: LocalAgent
    _settings: Settings
    _locks: DeviceLocks

    def __init__(self, reading: int, writing: int, own: Settings) -> None:
        self._own = own
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grace_s = 0.0
        stream = PipeStream(reading, writing, MAX_FRAME_BYTES, codec.MAX_PARTS)
        self._link = NodeLink[ToNode](reading, writing, stream, to_node, self._on_message, self._leave)

    def _leave(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    # ------------------------------------------------------------ from the pool service

    def _on_message(self, message: ToNode, parts: Sequence[bytes]) -> None:
        match message:
            case NodeOrder():
                self._node = message.node
                try:
                    self._begin(message)
                except (OSError, SgpuError) as error:
                    self._link.send(AgentEnded(why=f"its agent can't be started: {error}"))
                    self._link.send_all(_SEND_S)
                    self._leave()
            case LockDevices(run_id=run_id, uuids=uuids):
                self._link.send(self._locked(run_id, uuids))
            case UnlockDevices(uuids=uuids):
                self._locks.release(uuids)
            case Carried():
                self._on_agent_order(parts[0], parts[1:])

    def _begin(self, order: NodeOrder) -> None:
        self._settings = settings = node_settings(order, self._own)
        for directory in (settings.state_path, settings.runtime_path, settings.runs_path):
            private_dir(directory)
        # the agent inherits it: a login ends when nobody holds its streams
        log = os.open(settings.state_path / "node.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        os.close(log)
        self._locks = DeviceLocks(settings.lock_path)
        self._grace_s = settings.grace_s
        self._start(find_earlier=True)

    def _start(self, *, find_earlier: bool) -> None:
        self._agent = LocalAgent(self._settings, find_earlier=find_earlier)
        self._agent.listen(self._on_agent_message, self._agent_lost)

    def _locked(self, run_id: str, uuids: Sequence[str]) -> DevicesLocked:
        # devices locked already belong to an earlier run that is being wound up; this run inherits the locks
        wanted = [uuid for uuid in uuids if uuid not in self._locks.held]
        try:
            self._locks.acquire(wanted)
        except DevicesAreLocked as error:
            return DevicesLocked(run_id=run_id, obstructed=tuple(error.obstacles), why=error.message)
        except ValueError as error:
            return DevicesLocked(run_id=run_id, obstructed=tuple(wanted), why=f"{error}.")
        return DevicesLocked(run_id=run_id)

    def _on_agent_order(self, data: bytes, frames: Sequence[bytes]) -> None:
        order = codec.to_agent.decode(data)
        match order:
            case EndAgent():
                self._agent.close(self._grace_s)
                self._clean_up()
            case Launch() if not order.spec.session:
                self._grace_s = max(self._grace_s, order.spec.grace_s or 0.0)
                locks = self._locks.descriptors(lockable(order.lease, self._node))
                self._agent.send(msgspec.structs.replace(order, locks=len(locks)), frames, locks)
            case UnreadableLaunch():
                raise msgspec.DecodeError(order.problem or "a launch can't be read")
            case _:
                self._agent.send(order, frames)

    # ------------------------------------------------------------ from the agent

    def _on_agent_message(self, message: FromAgent, frames: Sequence[bytes]) -> None:
        match message:
            case AgentReady(protocol_version=version) if version != PROTOCOL_VERSION:
                # it was left by another version: its runs can't be adopted
                self._agent.close()
                self._start(find_earlier=False)
                return
            case AgentReady(runs=runs):
                for held in runs:
                    locks = self._agent.take_descriptors(held.locks)
                    if locks and not held.have_ranks_exited:
                        self._locks.take_over(lockable(held.launch.lease, self._node), locks)
                message = msgspec.structs.replace(message, inventory=marked_inventory(message.inventory, self._locks))
            case InventoryTaken(inventory=inventory):
                message = msgspec.structs.replace(message, inventory=marked_inventory(inventory, self._locks))
            case _:
                pass
        self._link.send(Carried(), [codec.encode(message), *frames])

    def _agent_lost(self) -> None:
        self._agent.clean_up_after(self._clean_up)

    def _clean_up(self) -> None:
        """Remove what the agent has left, and end."""
        shutil.rmtree(self._settings.runtime_path, ignore_errors=True)
        shutil.rmtree(self._settings.state_path, ignore_errors=True)
        self._link.send(AgentEnded())
        self._link.send_all(_SEND_S)
        self._leave()


def node_settings(order: NodeOrder, own: Settings) -> Settings:
    """Return the pool's settings with directories of this node that no other node or pool uses.

    Args:
        order: The pool's settings and name.
        own: This node's own settings.
    """
    pool = decode_json(order.settings, type=Settings)
    # a home directory may be shared by many machines
    digest = hashlib.sha256(os.fsencode(f"{order.node}\0{host_name()}")).hexdigest()[:6]
    placed = with_directories_of(own, "nodes", f"{order.pool}-{digest}")
    return msgspec.structs.replace(
        pool,
        state_dir=placed.state_dir,
        runtime_dir=placed.runtime_dir,
        lock_dir=own.lock_dir,
        environment_dir=str(own.environments_path),
        cache_dir=own.cache_dir,
        simulate=own.simulate,
        cpu_slots=own.cpu_slots,
        # where a pool listens for others, or seems to, its agent starts no service in place of a dead one
        listen="" if order.is_first else "tcp://127.0.0.1:0",
    )


if __name__ == "__main__":
    main()

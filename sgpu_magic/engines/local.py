"""The local engine: this machine, one agent process, device locks shared with other users' pools."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from sgpu_magic.agent.stream import MessageStream
from sgpu_magic.config import Settings
from sgpu_magic.engines.base import EngineListener, LeaseUnavailable
from sgpu_magic.engines.device_locks import DeviceLocks, DevicesLocked
from sgpu_magic.protocol import codec
from sgpu_magic.protocol.messages import ReclaimPayload, ResultsReceived, Warm
from sgpu_magic.protocol.node_messages import (
    AgentReady,
    EndRun,
    FromAgent,
    InventoryTaken,
    Launch,
    RanksGone,
    RunEvent,
    TakeInventory,
    WarmZygote,
)
from sgpu_magic.protocol.records import Inventory
from sgpu_magic.protocol.states import RunState


class LocalEngine:
    """Starts the agent at once, so that its zygote imports torch while the pool service is still starting.

    Args:
        settings: The pool's settings.
        warm: The interpreter to warm first, None for none.
    """

    def __init__(self, settings: Settings, warm: Warm | None = None) -> None:
        self._locks = DeviceLocks(settings.lock_path)
        self._leased: dict[str, tuple[str, ...]] = {}
        self._inventory: Inventory | None = None
        self._listener: EngineListener | None = None
        self._stream: MessageStream[FromAgent] | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "sgpu_magic.agent",
                    str(theirs.fileno()),
                    msgspec.json.encode(settings).decode(),
                ],
                stdin=subprocess.DEVNULL,
                # the pool's standard output is a pipe that its starter reads to the end
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                start_new_session=True,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        if warm is not None:
            self._socket.sendall(codec.frame(WarmZygote(interpreter=warm.interpreter, ranks=warm.ranks)))

    def start(self, listener: EngineListener) -> None:
        self._listener = listener
        self._stream = MessageStream[FromAgent](self._socket, codec.from_agent, self._said, self._agent_lost)

    def warm(self, order: Warm) -> None:
        self._send(WarmZygote(interpreter=order.interpreter, ranks=order.ranks))

    def take_inventory(self) -> None:
        self._send(TakeInventory())

    def launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        uuids = launch.lease.uuids
        if uuids and not launch.lease.simulated:
            try:
                self._locks.acquire(uuids)
            except DevicesLocked as error:
                raise LeaseUnavailable(tuple(error.uuids), error.message) from None
            self._leased[launch.spec.run_id] = uuids
        self._send(launch, frames)

    def end_run(self, run_id: str, state: RunState, reason: str) -> None:
        self._send(EndRun(run_id=run_id, state=state, reason=reason))

    def reclaim_payload(self, run_id: str) -> None:
        self._send(ReclaimPayload(run_id=run_id))

    def results_received(self, run_id: str) -> None:
        self._send(ResultsReceived(run_id=run_id))

    def close(self) -> None:
        """End of file tells the agent to end its ranks and itself; wait for it."""
        if self._stream is not None:
            self._stream.close()
        self._socket.close()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._locks.close()

    def _send(self, message: msgspec.Struct, frames: Sequence[bytes] = ()) -> None:
        if self._stream is not None:
            self._stream.send(message, frames)  # pyright: ignore[reportArgumentType]

    def _said(self, message: FromAgent, frames: Sequence[bytes]) -> None:
        listener = self._listener
        if listener is None:
            return
        match message:
            case AgentReady() | InventoryTaken():
                listener.inventory_taken(self._with_locks(message.inventory))
            case RunEvent():
                listener.run_happened(message.run_id, message.at, message.body, frames)
            case RanksGone():
                self._locks.release(self._leased.pop(message.run_id, ()))
                listener.ranks_gone(message.run_id)

    def _with_locks(self, inventory: Inventory) -> Inventory:
        """Mark the devices that another pool holds the lock of."""
        real = [device.uuid for device in inventory.devices if not device.simulated]
        elsewhere = self._locks.locked_elsewhere(real) if real else {}
        if not elsewhere:
            return inventory
        devices = tuple(
            msgspec.structs.replace(device, outside_use=f"leased by {elsewhere[device.uuid]}")
            if device.uuid in elsewhere
            else device
            for device in inventory.devices
        )
        return msgspec.structs.replace(inventory, devices=devices)

    def _agent_lost(self) -> None:
        self._locks.release([uuid for uuids in self._leased.values() for uuid in uuids])
        self._leased.clear()
        if self._listener is not None:
            self._listener.nodes_lost("the agent on this machine ended unexpectedly")

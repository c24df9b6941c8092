"""Widgets on a rank: their messages are sent in batches, and the front end's are delivered in the main thread.

ipywidgets and anywidget create their comms with the package `comm`, whose two functions are replaced here. State that
changes faster than it is sent is merged: the newest value of each trait is sent, at most 10 times a second.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import msgspec

from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import load_json
from sgpu_magic.wire.rank import CommsFromRank, Remarked
from sgpu_magic.wire.rank_events import CommMessage, can_merge
from sgpu_magic.worker.cell import displays

_INTERVAL_S = 0.1
# used after a rank has sent `_MUCH_BYTES`
_SLOW_INTERVAL_S = 1.0
_MUCH_BYTES = 16 << 20
_MOST_BYTES = 128 << 20
_MOST_BYTES_OF_ONE = 8 << 20
_BATCH_BYTES = 1 << 20
_BATCH_BUFFERS = 500
_MAX_RECEIVED = 1000
_UPDATE = '"update"'
# raised only by `_thread.interrupt_main`, to make the main thread handle the inbox; interrupts no system call
_SIGNAL = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGIO
# modules that run the cell, or the function
_BASES = ("IPython.core.", "sgpu_magic.payload.call")
# their code holds locks that a widget's callback may need too
_UNSAFE = ("sgpu_magic", "threading", "logging", "queue", "importlib", "comm", "ipywidgets", "traitlets", "concurrent")


class SendToAgent(Protocol):
    """Sends a message to the agent, from any thread."""

    def __call__(self, message: Record, blobs: Sequence[bytes] = (), /) -> None: ...


class _PendingMessage(msgspec.Struct):
    """A comm message that waits to be sent.

    Args:
        comm_id: The comm's id.
        kind: The message type without `comm_`: `open`, `msg` or `close`.
        target: The target name, "" if the message has none.
        rest: JSON of each entry of the data other than `state` and `buffer_paths`.
        metadata: JSON.
        state: JSON of each trait in a message that opens or updates a widget; None for other messages.
        buffers: The path and bytes of each buffer.
    """

    comm_id: str
    kind: str
    target: str
    rest: dict[str, str]
    metadata: str
    state: dict[str, str] | None = None
    buffers: list[tuple[list[Any], bytes]] = msgspec.field(default_factory=list[tuple[list[Any], bytes]])

    @property
    def size(self) -> int:
        texts = (*self.rest.values(), *(self.state or {}).values())
        return sum(map(len, texts)) + sum(len(buffer) for _, buffer in self.buffers)

    def merges(self, newer: _PendingMessage) -> bool:
        """Whether a newer message of the same comm may be merged into this one."""
        if self.state is None or newer.state is None or newer.rest.get("method") != _UPDATE:
            return False
        return self.rest.get("method") == _UPDATE and can_merge(self.state, newer.state, "null")

    def merge(self, newer: _PendingMessage) -> None:
        state = newer.state or {}
        self.buffers = [(path, buffer) for path, buffer in self.buffers if path[0] not in state] + newer.buffers
        self.state = {**(self.state or {}), **state}

    def message(self) -> tuple[CommMessage, list[bytes]]:
        parts = dict(self.rest)
        if self.state is not None:
            parts["state"] = _object(self.state)
            parts["buffer_paths"] = json.dumps([path for path, _ in self.buffers])
        message = CommMessage(
            comm_id=self.comm_id,
            kind=self.kind,
            target=self.target,
            data=_object(parts).encode(),
            metadata=self.metadata.encode(),
            buffers=len(self.buffers),
        )
        return message, [buffer for _, buffer in self.buffers]


class _Comms:
    """The comms of this process.

    Attributes:
        manager: The package `comm`'s manager; None if the package is not installed.
        hears: Whether a widget's callback runs now.
    """

    def __init__(self) -> None:
        self.manager: Any = None
        self._pid = 0
        self._send: SendToAgent | None = None
        self._is_helped: Callable[[], bool] = lambda: False
        self._lock = threading.RLock()
        self._outgoing_comms: list[_PendingMessage] = []
        self._newest: dict[str, _PendingMessage] = {}
        self._sent_at = 0.0
        self._sent_bytes = 0
        self._inbox: deque[tuple[CommMessage, list[bytes]]] = deque(maxlen=_MAX_RECEIVED)
        self.hears = False

    # ------------------------------------------------------------ to the front end

    def begin(self, send: SendToAgent, is_helped: Callable[[], bool]) -> None:
        """Send widgets' messages from now on. To be called in the main thread.

        Args:
            send: Sends to the agent.
            is_helped: Tells whether the helper thread calls `tick` now.
        """
        self._pid, self._send, self._is_helped = os.getpid(), send, is_helped
        if signal.getsignal(_SIGNAL) != self.interrupted:
            signal.signal(_SIGNAL, self.interrupted)

    def say(self, outgoing: _PendingMessage) -> None:
        if self._send is None or os.getpid() != self._pid:
            # before the first cell, or in a child that user code has forked
            return
        if outgoing.kind == "open" and (outputs := sys.modules.get("ipywidgets.widgets.widget_output")) is not None:
            displays.teach(outputs.Output)
        if outgoing.size > _MOST_BYTES_OF_ONE:
            most = _MOST_BYTES_OF_ONE >> 20
            self._remark(f"a widget's message of {outgoing.size >> 20} MB was dropped: at most {most} MB are sent")
            return
        with self._lock:
            before = self._newest.get(outgoing.comm_id)
            if before is not None and before.merges(outgoing):
                before.merge(outgoing)
            else:
                self._outgoing_comms.append(outgoing)
                self._newest[outgoing.comm_id] = outgoing
            wait_s = self._sent_at + self._interval_s - time.monotonic()
        if wait_s <= 0:
            self.flush()
        elif not self._is_helped():
            # between cells nothing else sends it; the wait throttles a user's thread that produces messages constantly
            time.sleep(wait_s)
            self.flush()

    def tick(self) -> None:
        """Send messages that are due. Called 20 times a second while the main thread works."""
        if self._outgoing_comms and time.monotonic() - self._sent_at >= self._interval_s:
            self.flush()
        self._call_main_thread()

    def flush(self) -> None:
        """Send the waiting messages in order."""
        with self._lock:
            outgoing, self._outgoing_comms, self._newest = self._outgoing_comms, [], {}
            self._sent_at = time.monotonic()
            messages: list[CommMessage] = []
            frames: list[bytes] = []
            size = 0
            for each in outgoing:
                message, buffers = each.message()
                messages.append(message)
                frames += buffers
                size += each.size
                if size > _BATCH_BYTES or len(frames) > _BATCH_BUFFERS:
                    self._send_batch(messages, frames, size)
                    messages, frames, size = [], [], 0
            self._send_batch(messages, frames, size)

    @property
    def _interval_s(self) -> float:
        return _INTERVAL_S if self._sent_bytes < _MUCH_BYTES else _SLOW_INTERVAL_S

    def _send_batch(self, messages: Sequence[CommMessage], frames: Sequence[bytes], size: int) -> None:
        if not messages:
            return
        had = self._sent_bytes
        self._sent_bytes += size
        if self._sent_bytes <= _MOST_BYTES:
            self._post(CommsFromRank(messages=tuple(messages)), frames)
        elif had <= _MOST_BYTES:
            self._remark(f"widgets of a rank have sent {_MOST_BYTES >> 20} MB and are no longer updated")

    def _remark(self, text: str) -> None:
        self._post(Remarked(text=text))

    def _post(self, record: Record, blobs: Sequence[bytes] = ()) -> None:
        if self._send is not None:
            # the receiving loop notices that the agent is gone
            with contextlib.suppress(OSError):
                self._send(record, blobs)

    # ------------------------------------------------------------ from the front end

    def on_messages(self, messages: Sequence[CommMessage], frames: Sequence[bytes]) -> None:
        """Queue messages for the main thread and signal it. Runs in the helper thread."""
        rest = list(frames)
        for message in messages:
            buffers, rest = rest[: message.buffers], rest[message.buffers :]
            self._inbox.append((message, buffers))
        self._call_main_thread()

    def _call_main_thread(self) -> None:
        if self._inbox and not self.hears:
            _thread.interrupt_main(_SIGNAL)  # pyright: ignore[reportArgumentType]

    def interrupted(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal in the main thread, in the middle of the cell; if that is not safe, `tick` repeats it."""
        if not self.hears and _is_safe(frame):
            self.deliver()

    def deliver(self) -> None:
        """Deliver the queued messages to their widgets."""
        self.hears = True
        try:
            while self._inbox:
                message, buffers = self._inbox.popleft()
                known = self.manager.comms.get(message.comm_id) if self.manager is not None else None
                if known is None:
                    continue
                content = {"comm_id": message.comm_id, "data": load_json(message.data)}
                content_of_message = {"content": content, "metadata": load_json(message.metadata), "buffers": buffers}
                if message.kind == "close":
                    known.handle_close(content_of_message)
                elif known._msg_callback is not None:
                    known._msg_callback(content_of_message)
        finally:
            self.hears = False


comms = _Comms()


def install() -> None:
    """Route the messages of widgets created from now on through this module. Called in the zygote."""
    try:
        import comm
        from comm.base_comm import BaseComm, CommManager
    except ImportError:
        # widgets need it
        return

    class RankComm(BaseComm):
        """A comm that reaches the front end through agent, pool and kernel."""

        def publish_msg(
            self,
            msg_type: str,
            data: dict[str, Any] | None = None,
            metadata: dict[str, Any] | None = None,
            buffers: list[bytes] | None = None,
            **keys: Any,
        ) -> None:
            target = str(keys.get("target_name") or "")
            comms.say(_outgoing(self.comm_id, msg_type.removeprefix("comm_"), target, data or {}, metadata, buffers))

    manager = comms.manager = CommManager()
    comm.create_comm = RankComm
    comm.get_comm_manager = lambda: manager


def _is_safe(frame: FrameType | None) -> bool:
    """Whether the signal interrupted the cell's own code, or library code that holds no lock used here."""
    for at, _ in traceback.walk_stack(frame):
        name = str(at.f_globals.get("__name__", ""))
        if name == "__main__":
            return True
        if name.startswith(_BASES):
            return at is not frame
        if name.partition(".")[0] in _UNSAFE:
            return False
    return False


def _outgoing(
    comm_id: str,
    kind: str,
    target: str,
    data: Mapping[str, Any],
    metadata: Mapping[str, Any] | None,
    buffers: Sequence[bytes] | None,
) -> _PendingMessage:
    """Serialize a comm message at once: its parts may change before it is sent."""
    raw = [bytes(buffer) for buffer in buffers or ()]
    rest, state = dict(data), None
    if isinstance(rest.get("state"), dict) and isinstance(rest.get("buffer_paths"), list):
        state = {str(key): _json(value) for key, value in rest.pop("state").items()}
        placed = list(zip(rest.pop("buffer_paths"), raw, strict=True))
    else:
        placed = [([at], buffer) for at, buffer in enumerate(raw)]
    parts = {key: _json(value) for key, value in rest.items()}
    return _PendingMessage(comm_id, kind, target, parts, _json(dict(metadata or {})), state, placed)


def _object(parts: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{json.dumps(key)}:{text}" for key, text in parts.items()) + "}"


def _json(value: object) -> str:
    return json.dumps(value, default=displays.encode_binary)

"""Widgets of ranks at the front end: the kernel opens a comm for each and relays its messages.

Ids get a prefix, so that those of different ranks never clash.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from sgpu_magic.views.live.comm import Channels
from sgpu_magic.views.output_buffer import DisplayItem
from sgpu_magic.views.publisher import MAX_MESSAGES_PER_TICK, MESSAGE_INTERVAL_S, Publisher
from sgpu_magic.views.rank_models import REFERENCE, WIDGET_MIME, ModelKey, Moved, RankModels, inside, refers, widget_of
from sgpu_magic.wire.base import short
from sgpu_magic.wire.client import SendComms
from sgpu_magic.wire.rank_events import CommMessage, can_merge

# maximum number of unsent messages of one widget; older ones are dropped
_MOST_UNSENT = 200
# maximum number of cells whose displays become static when their session ends
_MOST_LEFT = 100

SendToRank = Callable[[SendComms, Sequence[bytes]], None]


class RankWidgets:
    """The comms of a run's or a session's widgets. Thread-safe.

    Args:
        channels: Deliver the front end's messages while a cell blocks; None without a front end.
        send_to_rank: Sends messages to the pool.
        run_id: The run or the session.
        stays: The ranks and their widgets outlive a cell.
    """

    def __init__(self, channels: Channels | None, send_to_rank: SendToRank, run_id: str, *, stays: bool) -> None:
        self.models = RankModels()
        self.models.moved = self._on_change
        self.stays = stays
        self._channels = channels
        self._send_to_rank = send_to_rank
        self._run_id = run_id
        self._token = f"{short(run_id)}-{secrets.token_hex(3)}"
        self._lock = self.models.lock
        # None while a comm is being opened, as widgets may refer to each other
        self._comms: dict[ModelKey, Any] = {}
        # the next two: in the order in which they will be sent
        self._unopened: dict[ModelKey, None] = {}
        self._unsent: dict[ModelKey, deque[Moved]] = {}
        self._sent_at = 0.0
        self._left: deque[Callable[[], object]] = deque(maxlen=_MOST_LEFT)
        # the cell that is ending has a display with a live widget
        self._left_live = False
        self._closed = channels is None

    # ------------------------------------------------------------ displays

    def bundle(self, item: DisplayItem, *, final: bool) -> dict[str, object]:
        """Return the MIME bundle to publish for a display: with the live widget, or its static form.

        Args:
            item: The display.
            final: Its run has ended.
        """
        key = widget_of(item.rank, item.bundle)
        with self._lock:
            if self._closed or key is None or (final and not self.stays) or not self._open(key):
                return self.models.static(item.rank, item.bundle)
            self._left_live |= final
        view = cast("dict[str, object]", item.bundle[WIDGET_MIME])
        return {**item.bundle, WIDGET_MIME: {**view, "model_id": self._id(key)}}

    def redraw_when_closed(self, redraw: Callable[[], object]) -> None:
        """Call `redraw` for an ended cell when its live widgets are closed, to replace them by static forms."""
        if self._left_live and not self._closed:
            self._left.append(redraw)
        self._left_live = False

    # ------------------------------------------------------------ to the front end

    def tick(self, now: float) -> None:
        """Send at most 10 messages every 0.1 s, new widgets first."""
        if now - self._sent_at < MESSAGE_INTERVAL_S or not (self._unopened or self._unsent):
            return
        self._sent_at = now
        with self._lock:
            for _ in range(MAX_MESSAGES_PER_TICK):
                if self._unopened:
                    key = next(iter(self._unopened))
                    del self._unopened[key]
                    self._open(key)
                elif self._unsent:
                    key = next(iter(self._unsent))
                    # taken out and added at the end, so that widgets take turns
                    unsent = self._unsent.pop(key)
                    self._send(key, unsent.popleft())
                    if unsent:
                        self._unsent[key] = unsent

    def close(self) -> None:
        """Close every comm, after replacing live displays by static forms."""
        self._closed = True
        while self._left:
            self._left.popleft()()
        with self._lock:
            self._unopened.clear()
            self._unsent.clear()
            if self._channels is not None and self._channels.is_restarting():
                # the front end has dropped its comms
                return
            comms, self._comms = self._comms, {}
            for comm in comms.values():
                if comm is not None:
                    comm.close()

    def _on_change(self, moved: Moved) -> None:
        """Queue a change of a model; called with the lock held."""
        key = moved.key
        if self._closed:
            return
        if moved.kind in ("open", "close"):
            self._unsent.pop(key, None)
            self._unopened.pop(key, None)
            comm = self._comms.pop(key, None)
            if comm is not None:
                # opened again, as the rank was restarted
                comm.close()
            if moved.kind == "open":
                self._unopened[key] = None
            return
        unsent = self._unsent.setdefault(key, deque(maxlen=_MOST_UNSENT))
        last = unsent[-1] if unsent else None
        if last and last.kind == moved.kind == "update" and can_merge(last.content, moved.content, None):
            parts = {path: part for path, part in last.parts.items() if path[0] not in moved.content}
            moved = Moved(key, "update", {**last.content, **moved.content}, {**parts, **moved.parts})
            unsent.pop()
        unsent.append(moved)

    def _open(self, key: ModelKey) -> bool:
        """Open a widget's comm after those of the widgets that it refers to; False if there is no such widget."""
        model = self.models.get(key)
        if model is None or self._channels is None:
            return False
        if key in self._comms:
            return True
        self._comms[key] = None
        for other in references(model.state):
            self._open((key[0], other))
        from comm import create_comm

        self._unopened.pop(key, None)
        data: dict[str, object] = with_prefix(model.rest, self._prefix(key))
        if model.state:
            paths = list(map(list, model.buffers))
            data |= {"state": with_prefix(model.state, self._prefix(key)), "buffer_paths": paths}
        identity = {"target_name": model.target, "comm_id": self._id(key)}
        made: Any = create_comm(**identity, data=data, metadata=model.metadata, buffers=[*model.buffers.values()])
        self._comms[key] = made
        made.on_msg(partial(self._on_message, key))
        self._channels.handle_in_subshell(made)
        return True

    def _send(self, key: ModelKey, moved: Moved) -> None:
        comm = self._comms.get(key)
        if comm is None:
            return
        data: dict[str, object] = with_prefix(dict(moved.content), self._prefix(key))
        if moved.kind == "update":
            for other in references(moved.content):
                self._open((key[0], other))
            data = {"method": "update", "state": data, "buffer_paths": list(map(list, moved.parts))}
        comm.send(data=data, buffers=[*moved.buffers, *moved.parts.values()])

    def _prefix(self, key: ModelKey) -> str:
        return f"{self._token}-{key[0]}-"

    def _id(self, key: ModelKey) -> str:
        return self._prefix(key) + key[1]

    # ------------------------------------------------------------ from the front end

    def _on_message(self, key: ModelKey, message: Mapping[str, Any]) -> None:
        """Handle a message, in a subshell's thread, or in the main thread when nothing blocks it."""
        data: dict[str, Any] = without_prefix(message["content"].get("data") or {}, self._prefix(key))
        buffers = [bytes(buffer) for buffer in message.get("buffers") or ()]
        model = self.models.get(key)
        if model is not None and data.get("method") == "update":
            paths = [tuple(path) for path in data.get("buffer_paths") or ()]
            with self._lock:
                model.update(data.get("state") or {}, dict(zip(paths, buffers, strict=False)))
        update = CommMessage(comm_id=key[1], kind="msg", data=json.dumps(data).encode(), buffers=len(buffers))
        self._send_to_rank(SendComms(run_id=self._run_id, rank=key[0], messages=(update,)), buffers)


class SessionWidgets(msgspec.Struct, frozen=True):
    """Shows a session and keeps its widgets up to date between cells, until it ends.

    Args:
        publisher: Shows the session.
        widgets: The widgets of its ranks.
        ended: Called when the session is not followed any more.
    """

    publisher: Publisher
    widgets: RankWidgets
    ended: Callable[[], object]

    @property
    def draws_displays(self) -> bool:
        return self.publisher.draws_displays

    def tick(self, now: float, final: bool = False) -> None:
        self.publisher.tick(now, final)
        if final:
            self.widgets.close()
            self.ended()
        else:
            self.widgets.tick(now)


def references(value: object) -> Iterator[str]:
    """Yield the ids of the widgets that a state refers to."""
    if refers(value):
        yield cast("str", value).removeprefix(REFERENCE)
    for each in inside(value):
        yield from references(each)


def with_prefix(value: Any, prefix: str) -> Any:
    """Return a state with a prefix added to the ids of the widgets that it refers to."""
    return _replaced(value, REFERENCE, REFERENCE + prefix)


def without_prefix(value: Any, prefix: str) -> Any:
    """Undo `with_prefix`."""
    return _replaced(value, REFERENCE + prefix, REFERENCE)


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return new + value[len(old) :] if value.startswith(old) else value
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in cast("list[object]", value)]
    return value

"""The widgets of a run's ranks, folded from what they said: their state, and what stands for them when they are gone.

No I/O. A widget refers to another by the text `IPY_MODEL_` and that one's id.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from sgpu_magic.views.widget_forms import REFERENCE, Model, ModelKey, Path, State, refers, static_form
from sgpu_magic.wire.rank_events import CommMessage, CommsMoved

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
# state of all widgets of a run, or of a session
_MOST_BYTES = 64 << 20
_MOST_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a model.

    Args:
        key: Which.
        kind: `open`, `update`, `custom` or `close`.
        content: The new values of an update, the data of another message.
        parts: What is binary of an update, by where it belongs.
        buffers: Those of another message.
    """

    key: ModelKey
    kind: str
    content: Mapping[str, object] = field(default_factory=dict[str, object])
    parts: Mapping[Path, bytes] = field(default_factory=dict[Path, bytes])
    buffers: Sequence[bytes] = ()


class RankModels:
    """The widgets of the ranks of a run, or of a session. Methods may be called by any thread.

    Attributes:
        moved: Called with each change, by the thread that has folded it in.
    """

    def __init__(self) -> None:
        self.moved: Callable[[Moved], None] | None = None
        self.lock = threading.RLock()
        self._models: dict[ModelKey, Model] = {}
        self._closed: set[ModelKey] = set()
        self._bytes = 0

    def get(self, key: ModelKey) -> Model | None:
        return self._models.get(key)

    def apply(self, body: CommsMoved, frames: Sequence[bytes]) -> None:
        """Fold in what a rank's widgets said. What is no comm message of a widget is left out."""
        rest = list(frames)
        with self.lock:
            for message in body.messages:
                buffers, rest = rest[: message.buffers], rest[message.buffers :]
                moved = self._take((body.rank, message.comm_id), message, buffers)
                if moved is not None and self.moved is not None:
                    self.moved(moved)

    def _take(self, key: ModelKey, message: CommMessage, buffers: Sequence[bytes]) -> Moved | None:
        if message.kind == "close":
            self._closed.add(key)
            self._forget(key)
            return Moved(key, "close")
        try:
            data, metadata = _object(message.data), _object(message.metadata)
            # what is no widget has neither
            state = _dict(data.pop("state", {}))
            parts = _by_path(data.pop("buffer_paths", [[at] for at in range(len(buffers))]), buffers)
        except (ValueError, TypeError, RecursionError):
            return None
        size = len(message.data) + sum(map(len, buffers))
        if message.kind == "open":
            self._forget(key)
            self._models[key] = Model(message.target, state, parts, data, metadata)
            self._grew(key, size)
            return Moved(key, "open")
        model = self._models.get(key)
        if model is None:
            return None
        if data.get("method") in ("update", "echo_update"):
            model.update(state, parts)
            self._grew(key, size)
            # an echo says what the front end has said itself
            return Moved(key, "update", state, parts) if data["method"] == "update" else None
        return Moved(key, "custom", data, buffers=buffers)

    def _grew(self, key: ModelKey, size: int) -> None:
        model = self._models[key]
        self._bytes += max(size - model.size, 0)
        model.size = max(size, model.size)
        while self._bytes > _MOST_BYTES and len(self._models) > 1:
            self._forget(next(iter(self._models)))

    def _forget(self, key: ModelKey) -> None:
        model = self._models.pop(key, None)
        if model is not None:
            self._bytes -= model.size

    def static(self, rank: int, bundle: Mapping[str, object]) -> dict[str, object]:
        """Return what a rank has displayed without a live widget in it: the widget's values now as text and HTML."""
        view = bundle.get(WIDGET_MIME)
        rest = {mime: data for mime, data in bundle.items() if mime != WIDGET_MIME}
        if not isinstance(view, dict):
            return rest
        key = (rank, str(cast("State", view).get("model_id")))
        with self.lock:
            if key in self._closed:
                # a closed widget disappears
                return {"text/plain": ""}
            try:
                return {**rest, **static_form(self._models, key)}
            except (TypeError, ValueError, AttributeError, LookupError):
                # traits that no such widget has: a rank may send anything
                return rest


def references(value: object) -> Iterator[str]:
    """Yield the ids of the widgets that a state refers to."""
    if refers(value):
        yield cast("str", value).removeprefix(REFERENCE)
    elif isinstance(value, dict):
        for each in cast("State", value).values():
            yield from references(each)
    elif isinstance(value, list):
        for each in cast("list[object]", value):
            yield from references(each)


def with_prefix(value: Any, prefix: str) -> Any:
    """Return a state in which widgets are referred to by their ids with a prefix."""
    return _replaced(value, REFERENCE, REFERENCE + prefix)


def without_prefix(value: Any, prefix: str) -> Any:
    """Undo `with_prefix`."""
    return _replaced(value, REFERENCE + prefix, REFERENCE)


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return new + value[len(old) :] if value.startswith(old) else value
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in cast("State", value).items()}
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in cast("list[object]", value)]
    return value


def _object(text: bytes) -> dict[str, Any]:
    """Return a JSON object that is nested no deeper than a widget's state.

    Raises:
        ValueError: It is deeper, or no JSON.
        TypeError: It is no object.
    """
    value = json.loads(text)
    level: list[Any] = [value]
    for _ in range(_MOST_DEPTH):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return _dict(value)
    raise ValueError("nested too deeply")


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("State", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("no JSON object")
    return cast("dict[str, Any]", value)


def _by_path(paths: object, buffers: Sequence[bytes]) -> dict[Path, bytes]:
    if not isinstance(paths, list):
        raise TypeError("no list of paths")
    return {
        tuple(path): part for path, part in zip(cast("list[list[str | int]]", paths), buffers, strict=False) if path
    }

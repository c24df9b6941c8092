"""The widgets of a run's ranks, folded from their comm messages: their state, and the text and progress that stay."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from sgpu_magic.views import ansi
from sgpu_magic.views.html_style import SANS
from sgpu_magic.wire.decoding import load_json
from sgpu_magic.wire.rank_events import CommMessage, CommsMoved

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
# limit for the state of all widgets of a run or a session
_MOST_BYTES = 64 << 20
_MOST_DEPTH = 100
REFERENCE = "IPY_MODEL_"
"""Prefix of a reference to another widget, followed by its id."""

_BAR_CHARS = 10
_MOST_BOXES = 20
_TAG = re.compile(r"<[^>]*>")

Path = tuple[str | int, ...]
State = dict[str, Any]
ModelKey = tuple[int, str]
"""The rank, and the comm's id in it."""


class Model(msgspec.Struct):
    """One widget of a rank, or another comm.

    Args:
        target: The comm's target name.
        state: The widget's traits.
        buffers: Their binary values by path.
        rest: The other data of the opening message.
        metadata: The metadata of the opening message.
        size: Size in bytes, an upper bound.
    """

    target: str
    state: State
    buffers: dict[Path, bytes]
    rest: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    metadata: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    size: int = 0

    def update(self, state: Mapping[str, Any], buffers: Mapping[Path, bytes]) -> None:
        """Set new values of some traits."""
        self.buffers = {path: part for path, part in self.buffers.items() if path[0] not in state} | dict(buffers)
        self.state.update(state)


class Moved(msgspec.Struct, frozen=True):
    """A change of a model.

    Args:
        key: The model.
        kind: `open`, `update`, `custom` or `close`.
        content: The new values of an update, or the data of a custom message.
        parts: The binary values of an update by path.
        buffers: The buffers of a custom message.
    """

    key: ModelKey
    kind: str
    content: Mapping[str, object] = msgspec.field(default_factory=dict[str, object])
    parts: Mapping[Path, bytes] = msgspec.field(default_factory=dict[Path, bytes])
    buffers: Sequence[bytes] = ()


class RankModels:
    """The widgets of the ranks of a run or a session. Thread-safe.

    Attributes:
        moved: Called with each change, in the thread that applied it.
    """

    def __init__(self) -> None:
        self.moved: Callable[[Moved], None] | None = None
        self.lock = threading.RLock()
        self._models: dict[ModelKey, Model] = {}
        self._closed: set[ModelKey] = set()
        self._bytes = 0

    @property
    def has_widgets(self) -> bool:
        """Whether any widget is open."""
        return bool(self._models)

    def get(self, key: ModelKey) -> Model | None:
        return self._models.get(key)

    def apply(self, body: CommsMoved, frames: Sequence[bytes]) -> None:
        """Fold in the comm messages of a rank's widgets. Invalid messages are skipped."""
        rest = list(frames)
        with self.lock:
            for message in body.messages:
                buffers, rest = rest[: message.buffers], rest[message.buffers :]
                moved = self._apply((body.rank, message.comm_id), message, buffers)
                if moved is not None and self.moved is not None:
                    self.moved(moved)

    def _apply(self, key: ModelKey, message: CommMessage, buffers: Sequence[bytes]) -> Moved | None:
        if message.kind == "close":
            self._closed.add(key)
            self._forget(key)
            return Moved(key, "close")
        try:
            data, metadata = _object(message.data), _object(message.metadata)
            # other comms have neither
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
            # an echo repeats what the front end has sent
            return Moved(key, "update", state, parts) if data["method"] == "update" else None
        return Moved(key, "custom", data, buffers=buffers)

    def _grew(self, key: ModelKey, size: int) -> None:
        model = self._models[key]
        self._bytes += max(size - model.size, 0)
        model.size = max(size, model.size)
        while self._bytes > _MOST_BYTES and len(self._models) > 1:
            self._forget(next(iter(self._models)))

    def _forget(self, key: ModelKey) -> None:
        if key in self._models:
            self._bytes -= self._models.pop(key).size

    def is_closed(self, rank: int, bundle: Mapping[str, object]) -> bool:
        """Whether a rank's display shows a widget that the rank has closed, and so nothing any more."""
        key = widget_of(rank, bundle)
        with self.lock:
            return key in self._closed

    def static(self, rank: int, bundle: Mapping[str, object]) -> dict[str, object]:
        """Return a rank's display without its live widget: with the text or progress that it shows, as text and HTML.

        For other widgets, the display's own text is kept.
        """
        key = widget_of(rank, bundle)
        rest = {mime: data for mime, data in bundle.items() if mime != WIDGET_MIME}
        if key is None:
            return rest
        with self.lock:
            if key in self._closed:
                # a closed widget disappears
                return {"text/plain": ""}
            try:
                return {**rest, **static_form(self._models, key)}
            except (TypeError, ValueError, AttributeError, LookupError):
                # unexpected traits: a rank can send anything
                return rest


def widget_of(rank: int, bundle: Mapping[str, object]) -> ModelKey | None:
    """Return the widget that a rank's display shows, None for another display."""
    view = bundle.get(WIDGET_MIME)
    return (rank, str(cast("State", view).get("model_id"))) if isinstance(view, dict) else None


def _object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object of limited nesting depth.

    Raises:
        ValueError: It is nested too deeply, or not valid JSON.
        TypeError: It is not an object.
    """
    value = load_json(text)
    level: list[Any] = [value]
    for _ in range(_MOST_DEPTH):
        level = [inner for each in level for inner in inside(each)]
        if not level:
            return _dict(value)
    raise ValueError("nested too deeply")


def inside(value: object) -> Iterable[object]:
    """Return the values in an object or an array of JSON, none for another value."""
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
    pairs = zip(cast("list[list[str | int]]", paths), buffers, strict=False)
    return {tuple(path): part for path, part in pairs if path}


def static_form(models: Mapping[ModelKey, Model], key: ModelKey) -> dict[str, object]:
    """Return a widget that shows text or progress as text and HTML; empty for another one."""
    forms = _render(models, key, _MOST_BOXES)
    if forms is None:
        return {}
    text, markup = forms
    return {"text/plain": text, "text/html": f'<div style="{SANS};font-size:13px;padding:2px 12px">{markup}</div>'}


def _render(models: Mapping[ModelKey, Model], key: ModelKey, depth: int) -> tuple[str, str] | None:
    """Return a widget as text and as HTML, None if it shows neither text nor progress."""
    model = models.get(key)
    if model is None or depth == 0:
        return None
    state, name = model.state, str(model.state.get("_model_name"))
    label, value = _plain(state.get("description")), state.get("value")
    match name:
        case "HTMLModel" | "HTMLMathModel":
            return _labelled(label, _plain(value), str(value or ""))
        case "LabelModel":
            return _labelled(label, str(value or ""), _safe(value))
        case "FloatProgressModel" | "IntProgressModel":
            return _progress(label, state)
        case "OutputModel":
            return _output(cast("Sequence[State]", state.get("outputs") or ()))
        case _ if isinstance(state.get("children"), list):
            return _box(models, key[0], state, "  " if name == "HBoxModel" else "\n", depth)
        case _:
            return None


def _box(models: Mapping[ModelKey, Model], rank: int, state: State, between: str, depth: int) -> tuple[str, str] | None:
    keys = [(rank, each.removeprefix(REFERENCE)) for each in cast("list[Any]", state["children"]) if refers(each)]
    drawn = [(key, form) for key in keys if (form := _render(models, key, depth - 1)) is not None]
    if not drawn:
        return None
    states, forms = [models[key].state for key, _ in drawn], [form for _, form in drawn]
    inline = between != "\n"
    text = between.join(text for text, _ in forms if text)
    if inline and [str(each.get("_model_name")).endswith("ProgressModel") for each in states] == [False, True, False]:
        # the layout of tqdm, whose labels state the progress
        text = f"{forms[0][0]}{_bar(states[1])}{forms[2][0]}"
    style = "display:flex;gap:8px;align-items:center" if inline else ""
    return text, f'<div style="{style}">' + "".join(f"<div>{markup}</div>" for _, markup in forms if markup) + "</div>"


def _plain(value: object) -> str:
    """Return the text of a trait that may contain HTML."""
    # tqdm writes figure spaces
    return html.unescape(_TAG.sub("", str(value or ""))).replace("\u2007", " ").strip("\xa0")


def _safe(value: object) -> str:
    return html.escape(str(value))


def _labelled(label: str, text: str, markup: str) -> tuple[str, str]:
    name = label.removesuffix(":")
    return (f"{name}: {text}", f"{_safe(name)}: {markup}") if label else (text, markup)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _bar(state: State) -> str:
    low, value, high = (_number(state.get(name)) for name in ("min", "value", "max"))
    share = (value - low) / (high - low) if high > low else 0.0
    full = round(min(max(share, 0.0), 1.0) * _BAR_CHARS)
    return f"|{'█' * full}{' ' * (_BAR_CHARS - full)}|"


def _progress(label: str, state: State) -> tuple[str, str]:
    low, value, high = (_number(state.get(name)) for name in ("min", "value", "max"))
    text = f"{_bar(state)} {value:g} of {high:g}"
    markup = f'<progress value="{value - low:g}" max="{high - low:g}" title="{value:g} of {high:g}"></progress>'
    return _labelled(label, text, markup)


def _output(outputs: Sequence[State]) -> tuple[str, str]:
    """Return the text that an `Output` widget has captured."""
    texts: list[str] = []
    for output in outputs:
        data = cast("State", output.get("data") or {})
        text = output.get("text") or data.get("text/plain") or "\n".join(output.get("traceback") or ())
        texts.append(ansi.plain(str(text)).rstrip("\n"))
    text = "\n".join(texts)
    return text, f"<pre>{_safe(text)}</pre>"


def refers(value: object) -> bool:
    """Whether the value is a reference to another widget."""
    return isinstance(value, str) and value.startswith(REFERENCE)

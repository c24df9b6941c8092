"""What stands for a widget of a rank when that is gone, or where no widgets are drawn: its values as text and HTML."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from sgpu_magic.views import ansi
from sgpu_magic.views.html_style import SANS

REFERENCE = "IPY_MODEL_"
"""A widget refers to another by this and that one's id."""

_BAR_CHARS = 10
_MOST_DEPTH = 20
_TAG = re.compile(r"<[^>]*>")

Path = tuple[str | int, ...]
State = dict[str, Any]
ModelKey = tuple[int, str]
"""The rank, and the comm's id there."""


@dataclass(slots=True)
class Model:
    """One widget of a rank, or another comm.

    Args:
        target: Its target's name.
        state: Its traits.
        buffers: What is binary of them, by where it belongs.
        rest: The data that it was opened with beside them.
        metadata: The same of its metadata.
        size: Bytes, at most.
    """

    target: str
    state: State
    buffers: dict[Path, bytes]
    rest: dict[str, object] = field(default_factory=dict[str, object])
    metadata: dict[str, object] = field(default_factory=dict[str, object])
    size: int = 0

    def update(self, state: Mapping[str, Any], buffers: Mapping[Path, bytes]) -> None:
        """Take new values of some traits."""
        self.buffers = {path: part for path, part in self.buffers.items() if path[0] not in state} | dict(buffers)
        self.state.update(state)


def static_form(models: Mapping[ModelKey, Model], key: ModelKey) -> dict[str, object]:
    """Return the MIME types that stand for a widget; none where nothing is known of its kind.

    Args:
        models: All that there are.
        key: The widget's.
    """
    model = models.get(key)
    if model is None:
        return {}
    if (figure := _figure(model)) is not None:
        return figure
    drawn = _drawn(models, key, _MOST_DEPTH)
    if drawn is None:
        return {}
    text, markup = drawn
    return {"text/plain": text, "text/html": f'<div style="{SANS};font-size:13px;padding:2px 12px">{markup}</div>'}


def _drawn(models: Mapping[ModelKey, Model], key: ModelKey, depth: int) -> tuple[str, str] | None:
    """Return a widget as text and as HTML, None when nothing is known of its kind."""
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
            return _outputs(cast("Sequence[State]", state.get("outputs") or ()))
        case "ImageModel":
            return _image(state, model.buffers.get(("value",), b""))
        case "ButtonModel" | "ToggleButtonModel":
            return f"[{label}]", f"<button disabled>{_safe(label)}</button>"
        case _ if isinstance(state.get("children"), list):
            return _box(models, key[0], state, "  " if name == "HBoxModel" else "\n", depth)
        case _ if isinstance(labels := state.get("_options_labels"), list):
            return _labelled(label, chosen := _chosen(cast("list[object]", labels), state), _safe(chosen))
        case _ if "value" in state:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            return _labelled(label, shown, _safe(shown))
        case _:
            return None


def _box(models: Mapping[ModelKey, Model], rank: int, state: State, between: str, depth: int) -> tuple[str, str]:
    keys = [(rank, each.removeprefix(REFERENCE)) for each in cast("list[Any]", state["children"]) if refers(each)]
    names = [str(model.state.get("_model_name")) if (model := models.get(key)) else "" for key in keys]
    drawn = [_drawn(models, key, depth - 1) or ("", "") for key in keys]
    inline = between != "\n"
    if inline and [name.endswith("ProgressModel") for name in names] == [False, True, False]:
        # as tqdm makes it: its own words say how far it is
        bar = models[keys[1]].state
        text = f"{drawn[0][0]}{_bar(bar)}{drawn[2][0]}"
    else:
        text = between.join(text for text, _ in drawn if text)
    style = "display:flex;gap:8px;align-items:center" if inline else ""
    return text, f'<div style="{style}">' + "".join(f"<div>{markup}</div>" for _, markup in drawn if markup) + "</div>"


def _plain(value: object) -> str:
    """The text of a trait that may have HTML in it."""
    # tqdm writes figure spaces
    return html.unescape(_TAG.sub("", str(value or ""))).replace("\u2007", " ").strip("\xa0")


def _safe(value: object) -> str:
    return html.escape(str(value))


def _labelled(label: str, text: str, markup: str) -> tuple[str, str]:
    return (
        (f"{label.removesuffix(':')}: {text}", f"{_safe(label.removesuffix(':'))}: {markup}")
        if label
        else (text, markup)
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _bar(state: State) -> str:
    low, high = _number(state.get("min")), _number(state.get("max"))
    share = (_number(state.get("value")) - low) / (high - low) if high > low else 0.0
    full = round(min(max(share, 0.0), 1.0) * _BAR_CHARS)
    return f"|{'█' * full}{' ' * (_BAR_CHARS - full)}|"


def _progress(label: str, state: State) -> tuple[str, str]:
    low, value, high = (_number(state.get(name)) for name in ("min", "value", "max"))
    text = f"{_bar(state)} {value:g} of {high:g}"
    markup = f'<progress value="{value - low:g}" max="{high - low:g}" title="{value:g} of {high:g}"></progress>'
    return _labelled(label, text, markup)


def _chosen(labels: list[object], state: State) -> str:
    index = state.get("index")
    chosen = cast("list[object]", index) if isinstance(index, list) else [index]
    return ", ".join(str(labels[at]) for at in chosen if isinstance(at, int) and 0 <= at < len(labels))


def _image(state: State, data: bytes) -> tuple[str, str]:
    kind = re.sub(r"[^\w.+-]", "", str(state.get("format") or "png"))
    return "<image>", f'<img src="data:image/{kind};base64,{base64.b64encode(data).decode()}">'


def _outputs(outputs: Sequence[State]) -> tuple[str, str]:
    """What an `Output` widget has captured."""
    texts: list[str] = []
    markups: list[str] = []
    for output in outputs:
        data = cast("State", output.get("data") or {})
        text = output.get("text") or data.get("text/plain") or "\n".join(output.get("traceback") or ())
        texts.append(ansi.plain(str(text)).rstrip("\n"))
        if isinstance(data.get("image/png"), str):
            markups.append(f'<img src="data:image/png;base64,{_safe(data["image/png"])}">')
        else:
            markups.append(str(data.get("text/html") or f"<pre>{_safe(texts[-1])}</pre>"))
    return "\n".join(texts), "".join(markups)


def _figure(model: Model) -> dict[str, object] | None:
    """Return a plotly figure by its own MIME type; None for what is none."""
    data, layout = (model.state.get(name) for name in ("_widget_data", "_widget_layout"))
    if not isinstance(data, list) or not isinstance(layout, dict):
        return None
    filled = _filled({"_widget_data": data, "_widget_layout": layout}, model.buffers, ())
    figure = {"data": filled["_widget_data"], "layout": filled["_widget_layout"]}
    return {"application/vnd.plotly.v1+json": figure}


_TYPES = {"int8": "i1", "int16": "i2", "int32": "i4", "uint8": "u1", "uint16": "u2", "uint32": "u4"} | {
    "float32": "f4",
    "float64": "f8",
}


def _filled(value: Any, buffers: Mapping[Path, bytes], path: Path) -> Any:
    """Return plotly's JSON with arrays written out as plotly.js reads them: type, shape and base64."""
    if isinstance(value, list):
        return [_filled(each, buffers, (*path, at)) for at, each in enumerate(cast("list[Any]", value))]
    if not isinstance(value, dict):
        return value
    parts = cast("State", value)
    # plotly 6 and 5
    raw = buffers.get((*path, "buffer"), buffers.get((*path, "value")))
    if raw is None or "dtype" not in parts:
        return {key: _filled(each, buffers, (*path, key)) for key, each in parts.items()}
    array: State = {"dtype": _TYPES.get(str(parts["dtype"]), parts["dtype"]), "bdata": base64.b64encode(raw).decode()}
    shape = cast("list[int]", parts.get("shape") or [])
    return array | {"shape": ", ".join(map(str, shape))} if len(shape) > 1 else array


def refers(value: object) -> bool:
    """Whether it is another widget."""
    return isinstance(value, str) and value.startswith(REFERENCE)

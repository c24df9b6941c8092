"""The ipywidgets of the front end: a run's live view, also as a value, and the environment panel.

Importing this module takes about 50 ms, so it is done in the background.
"""

# ipywidgets declares few types
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import uuid
from importlib import resources
from typing import TYPE_CHECKING, Any

import anywidget
import msgspec
import traitlets

from sgpu_magic.views.live.comm import question_of
from sgpu_magic.views.live.feed import Feed
from sgpu_magic.views.rank_models import WIDGET_MIME

if TYPE_CHECKING:
    from sgpu_magic.views.fold import RunView
    from sgpu_magic.views.live.live_views import Buttons


class KeyedWidget(anywidget.AnyWidget):
    """An anywidget whose model id is known before its comm is open.

    Args:
        comms: `subshell` if the kernel answers a widget's messages that the front end sends to a subshell while a
            cell blocks; else `blocking`: use the control channel.

    Attributes:
        model_key: The model's id, which requests over the control channel include.
    """

    comms = traitlets.Unicode("blocking").tag(sync=True)
    model_key = traitlets.Unicode("").tag(sync=True)

    def __init__(self, **state: Any) -> None:
        key = uuid.uuid4().hex
        try:
            super().__init__(model_id=key, model_key=key, **state)
        except BaseException:
            # such as an interrupt: close what is open, as no one else has a reference
            self.close()
            raise

    @property
    def view_bundle(self) -> dict[str, object]:
        """The part of a MIME bundle that shows it."""
        return {WIDGET_MIME: {"version_major": 2, "version_minor": 0, "model_id": self.model_key}}

    def close(self) -> None:
        """Close its comm and its layout's comm, which ipywidgets leaves open."""
        layout = self.layout
        super().close()
        layout.close()


def _built(name: str) -> traitlets.Unicode[str, str | bytes]:
    """Return the trait with a built front end, as text: anywidget would watch a file given as a Path."""
    text = resources.files("sgpu_magic").joinpath(f"static/{name}.js").read_text(encoding="utf-8")
    return traitlets.Unicode(text).tag(sync=True)


class RunViewWidget(KeyedWidget):
    """The state of a live view in the browser: the last snapshot. Lines are sent as separate messages.

    Args:
        snapshot: `schema.Snapshot` as JSON.
    """

    _esm = _built("run_view")
    snapshot = traitlets.Dict().tag(sync=True)

    def send_updates(self, feed: Feed, now: float) -> None:
        """Send the updates that are due now, a monotonic time."""
        for update in feed.updates(now):
            self.send(msgspec.to_builtins(update))
        snapshot = feed.snapshot(now)
        if snapshot is not None:
            self.snapshot = msgspec.to_builtins(snapshot)


class PanelWidget(KeyedWidget):
    """The state of the environment panel that the browser needs before its first message.

    Args:
        pool: The pool that is shown first, "" for the one in the settings.
        notebook: The notebook's file name, "" when unknown.
        kernel: The Jupyter server's id of this kernel, "" without one.
    """

    _esm = _built("panel")
    pool = traitlets.Unicode("").tag(sync=True)
    notebook = traitlets.Unicode("").tag(sync=True)
    kernel = traitlets.Unicode("").tag(sync=True)


class WidgetAsValue:
    """A live view as a value that a front end without a Jupyter kernel draws, such as marimo.

    It is kept up to date, also after the run's end: the value of a cell stays what it is.

    Args:
        view: The run, before any event was applied.
        buttons: The actions of its buttons.

    Attributes:
        widget: The ipywidget. Its requests are answered in the thread in which the front end delivers them.
    """

    draws_displays = False

    def __init__(self, view: RunView, buttons: Buttons) -> None:
        self._feed = Feed(view)
        self._answers = buttons.answers(view, self._feed)
        snapshot = msgspec.to_builtins(self._feed.hello(0).snapshot)
        self.widget = RunViewWidget(snapshot=snapshot, comms="blocking")
        self.widget.on_msg(self._on_message)

    def tick(self, now: float, final: bool = False) -> None:
        """Send what is new; as `Publisher.tick`."""
        # at the end, send all lines and the last snapshot regardless of the rate limits
        self.widget.send_updates(self._feed, float("inf") if final else now)

    def _on_message(self, widget: Any, content: object, buffers: object) -> None:
        question = question_of(content, widget.send)
        if question is not None:
            widget.send(msgspec.to_builtins(self._answers.answer(question)))

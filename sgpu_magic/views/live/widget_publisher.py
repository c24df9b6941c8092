"""A run shown by a widget while it goes on, and by its final form afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sgpu_magic.views.bundle import interrupted_bundle
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live import messages
from sgpu_magic.views.live.answers import Answers
from sgpu_magic.views.live.channels import Channels
from sgpu_magic.views.live.feed import Feed
from sgpu_magic.views.live.messages import Answer, Question
from sgpu_magic.views.live.rank_widgets import RankWidgets
from sgpu_magic.views.publisher import MAX_MESSAGES_PER_TICK, NotebookPublisher, OutputSlots, Pace
from sgpu_magic.wire.events import Event

HELLO_S = 5.0
# the background's import of the widget takes 50 ms, on a slow disk longer
_IMPORT_S = 2.0
_NO_HELLO = (
    "The live view did not open in this front end. JupyterLab and Notebook show it when anywidget 0.11 is installed "
    "where they run: pip install 'anywidget==0.11.*', then reload the page."
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a live view needs of its kernel.

    Args:
        channels: Bring its questions.
        widget_class: The ipywidget once it is imported; None until then, and for ever where there is none.
        is_importing: It may still come.
        widgets: Those of its ranks.
        expects_hello: A front end that can draw the view says so within 5 s, also while the cell blocks.
    """

    channels: Channels
    widget_class: Callable[[], Any]
    is_importing: Callable[[], bool]
    widgets: RankWidgets
    expects_hello: bool


class _Form(Enum):
    """What is shown now."""

    NOTHING = auto()
    WIDGET = auto()
    HTML = auto()
    FINAL = auto()


class WidgetPublisher:
    """Shows a run by its live view; without the widget it is shown as `NotebookPublisher` does.

    Nothing appears in the first 100 ms unless the run has ended. Then one output shows the view, which is told what
    is new by at most 10 messages a second; what ranks display stands below it. At the end every output takes its
    final form, in which no widget is left.

    Args:
        view: The run.
        feed: What the front end is told of it.
        answers: What it is answered.
        surroundings: The kernel's.
    """

    def __init__(self, view: RunView, feed: Feed, answers: Answers, surroundings: Surroundings) -> None:
        self._view = view
        self._feed = feed
        self._answers = answers
        self._surroundings = surroundings
        self._slots = OutputSlots(view, lambda item, final: surroundings.widgets.bundle(item, final=final))
        self._pace = Pace()
        self._static = NotebookPublisher(view, self._slots, self._pace)
        self._form = _Form.NOTHING
        self._widget: Any = None
        self._began: float | None = None
        self._opened_at = 0.0
        self._greeted = False
        self._displays_version = -1

    def applied(self, event: Event) -> None:
        self._feed.apply(event)

    def tick(self, now: float, final: bool = False) -> None:
        self._began = now if self._began is None else self._began
        due = self._pace.is_due(now)
        if final:
            self._finish(now)
        elif self._form is _Form.NOTHING and due:
            self._open(now)
        elif self._form is _Form.WIDGET:
            self._tell(now, due)
        elif self._form is _Form.HTML:
            self._static.tick(now)
        self._surroundings.widgets.tick(now)

    def _open(self, now: float) -> None:
        widget_class = self._surroundings.widget_class()
        if widget_class is None:
            if not self._surroundings.is_importing() or now - (self._began or now) > _IMPORT_S:
                self._form = _Form.HTML
            return
        channels = self._surroundings.channels
        # what the feed has made before is of the run's beginning
        drawn = messages.to_builtins(self._feed.snapshot(now) or self._feed.hello(0).snapshot)
        self._widget = widget_class(snapshot=drawn, comms="subshell" if channels.serve_comms else "blocking")
        self._form, self._opened_at = _Form.WIDGET, now
        channels.opened(self._widget, self._answer)
        self._slots.open({**interrupted_bundle(self._view), **self._widget.view_bundle})
        self._pace.sent(now, 1)

    def _tell(self, now: float, due: bool) -> None:
        if due and not self._greeted and self._surroundings.expects_hello and now - self._opened_at > HELLO_S:
            self._static.remark = _NO_HELLO
            self._form = _Form.HTML
            self._static.tick(now)
            self._close()
            return
        for told in self._feed.told(now):
            self._widget.send(messages.to_builtins(told))
        snapshot = self._feed.snapshot(now)
        if snapshot is not None:
            self._widget.snapshot = messages.to_builtins(snapshot)
        if due and self._view.version != self._displays_version:
            self._displays_version = self._view.version
            sent, complete = self._slots.draw_displays(MAX_MESSAGES_PER_TICK)
            self._pace.sent(now, sent)
            if not complete:
                self._displays_version = -1

    def _answer(self, question: Question) -> Answer:
        """Runs in any thread."""
        self._greeted = True
        return self._answers.answer(question)

    def _finish(self, now: float) -> None:
        if self._form is _Form.FINAL:
            return
        self._form = _Form.FINAL
        try:
            # before the widget is closed: at no time there is a view without its model
            self._static.remark = ""
            self._static.tick(now, final=True)
        finally:
            self._close()
            widgets = self._surroundings.widgets
            if widgets.stays:
                widgets.leave(self._slots.draw)
            else:
                widgets.close()

    def _close(self) -> None:
        widget, self._widget = self._widget, None
        if widget is not None:
            self._surroundings.channels.closed(widget)
            widget.close()

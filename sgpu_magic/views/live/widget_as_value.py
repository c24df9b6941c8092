"""The live view as a value that a front end without a Jupyter kernel draws, such as marimo."""

# ipywidgets declares few types
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live import messages
from sgpu_magic.views.live.comm import question_of
from sgpu_magic.views.live.feed import Answers, Feed
from sgpu_magic.views.live.live_views import Buttons
from sgpu_magic.views.live.log_reader import LogReader
from sgpu_magic.views.live.widgets import RunViewWidget


class WidgetAsValue:
    """Keeps a live view up to date, also after the run's end: the value of a cell stays what it is.

    Args:
        view: The run, before any event was applied.
        buttons: The actions of its buttons.

    Attributes:
        widget: The ipywidget. Its requests are answered in the thread in which the front end delivers them.
    """

    def __init__(self, view: RunView, buttons: Buttons) -> None:
        self._feed = Feed(view)
        self._answers = Answers(
            view, self._feed, LogReader(buttons.directory, buttons.bring), buttons.cancel, buttons.stacks
        )
        drawn = messages.to_builtins(self._feed.hello(0).snapshot)
        self.widget = RunViewWidget(snapshot=drawn, comms="blocking")
        self.widget.on_msg(self._asked)

    def tick(self, now: float, final: bool = False) -> None:
        """Send what is new; as `Publisher.tick`."""
        # at the end all lines and the last snapshot go, whenever the last ones went
        for told in self._feed.told(float("inf") if final else now):
            self.widget.send(messages.to_builtins(told))
        snapshot = self._feed.snapshot(float("inf") if final else now)
        if snapshot is not None:
            self.widget.snapshot = messages.to_builtins(snapshot)

    def _asked(self, widget: Any, content: object, buffers: object) -> None:
        question = question_of(content, widget.send)
        if question is not None:
            widget.send(messages.to_builtins(self._answers.answer(question)))

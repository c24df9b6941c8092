"""The live views of one kernel: whether a run gets one, and the widget that shows an active run."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from sgpu_magic.views.bundle import interrupted_bundle
from sgpu_magic.views.cell_outputs import OutputSlots
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.format_summary import is_quiet
from sgpu_magic.views.live.answers import Answers
from sgpu_magic.views.live.comm import Channels, Taker
from sgpu_magic.views.live.feed import Feed
from sgpu_magic.views.live.log_reader import LogReader
from sgpu_magic.views.live.messages import Answer, Question
from sgpu_magic.views.live.rank_widgets import RankWidgets, SendToRank, SessionWidgets
from sgpu_magic.views.publisher import MAX_MESSAGES_PER_TICK, NotebookPublisher, Pace, Publisher, publisher_for
from sgpu_magic.wire.base import RunKind

HELLO_S = 5.0
# the background import of the widget takes 50 ms, longer on a slow disk
_IMPORT_S = 2.0
_NO_HELLO = (
    "The live view did not open in this front end. JupyterLab and Notebook show it when anywidget 0.11 is installed "
    "where they run: pip install 'anywidget==0.11.*', then reload the page."
)
# the form of `jupyter_client.session.Session.msg_id`
_CLIENTS_ID = re.compile(r"[0-9a-f-]+_\d+_\d+")
# the key used by JupyterLab, Notebook and VS Code, and that of server-side execution
_CELL_IDS = frozenset(("cellId", "cell_id"))


class WidgetPublisher:
    """Shows a run in a live view, or as `NotebookPublisher` does if the widget is not available.

    Nothing appears in the first 100 ms unless the run has ended. Then one output shows the view, which gets at most
    10 updates a second; displays of the ranks appear below it. At the end every output gets its final form, without
    the live view's widget.

    Args:
        view: The run.
        feed: Its updates.
        answers: Answers requests of the front end.
        widgets: The widgets of its ranks.
        channels: Deliver the requests.
        kernel: Provides the ipywidget's class.
    """

    draws_displays = True

    def __init__(
        self, view: RunView, feed: Feed, answers: Answers, widgets: RankWidgets, channels: Channels, kernel: LiveViews
    ) -> None:
        self._view = view
        self._feed = feed
        self._answers = answers
        self._widgets = widgets
        self._channels = channels
        self._kernel = kernel
        self._slots = OutputSlots(view, lambda item, final: widgets.bundle(item, final=final))
        self._pace = Pace()
        self._static = NotebookPublisher(view, self._slots, self._pace)
        self._is_static = False
        self._widget: Any = None
        self._began: float | None = None
        self._opened_at = 0.0
        self._greeted = False
        self._displays_version = -1

    def tick(self, now: float, final: bool = False) -> None:
        self._began = now if self._began is None else self._began
        due = self._pace.is_due(now)
        if final:
            self._finish(now)
        elif self._is_static:
            self._static.tick(now)
        elif self._widget is not None:
            self._update(now, due)
        elif due:
            self._open(now)
        self._widgets.tick(now)

    def _open(self, now: float) -> None:
        widget_class = self._kernel.widget_class
        if widget_class is None:
            self._is_static = not self._kernel.importing.is_alive() or now - (self._began or now) > _IMPORT_S
            return
        channels = self._channels
        # prefer a new snapshot, as the feed's last one may be from the run's start
        snapshot = msgspec.to_builtins(self._feed.snapshot(now) or self._feed.hello(0).snapshot)
        self._widget = widget_class(snapshot=snapshot, comms="subshell" if channels.serve_comms else "blocking")
        self._opened_at = now
        channels.add_widget(self._widget, self._answer)
        self._slots.open({**interrupted_bundle(self._view), **self._widget.view_bundle})
        self._pace.record_sent(now, 1)

    def _update(self, now: float, due: bool) -> None:
        if due and not self._greeted and self._kernel.expects_hello and now - self._opened_at > HELLO_S:
            self._static.remark, self._is_static = _NO_HELLO, True
            self._static.tick(now)
            self._close()
            return
        self._widget.send_updates(self._feed, now)
        if due and self._view.version != self._displays_version:
            sent, complete = self._slots.draw_displays(MAX_MESSAGES_PER_TICK)
            self._pace.record_sent(now, sent)
            self._displays_version = self._view.version if complete else -1

    def _answer(self, question: Question) -> Answer:
        """Answer a request; may be called by any thread."""
        self._greeted = True
        return self._answers.answer(question)

    def _finish(self, now: float) -> None:
        self._is_static = True
        try:
            # before the widget is closed, so that there is never a view without its model
            self._static.tick(now, final=True)
        finally:
            self._close()
            if self._widgets.stays:
                self._widgets.redraw_when_closed(self._slots.draw)
            else:
                self._widgets.close()

    def _close(self) -> None:
        widget, self._widget = self._widget, None
        if widget is not None:
            self._channels.closed(widget)
            if not self._channels.is_restarting():
                widget.close()


class Buttons(msgspec.Struct, frozen=True):
    """The actions of a view's buttons, and where its log is.

    Args:
        directory: The run's directory, with a log for each rank.
        cancel: Cancels the run and returns a sentence about it. Called in any thread.
        end_session: Ends a session, given its run id. Called in any thread.
        stacks: Returns the stacks of all ranks as lines. Called in any thread; may take a second.
        bring: Fetches new data of a file from another machine; None if the directory is the run's own.
        send: Sends comm messages to widgets of its ranks. Called in any thread.
        owned: The run was submitted here, so its events arrive from the beginning, once.
    """

    directory: Path
    cancel: Callable[[], str]
    end_session: Callable[[str], None]
    stacks: Callable[[], Sequence[str]]
    bring: Callable[[str], None] | None = None
    send: SendToRank = lambda message, frames: None
    owned: bool = True

    def answers(self, view: RunView, feed: Feed) -> Answers:
        """Return what answers a front end's requests about the run."""
        return Answers(view, feed, LogReader(self.directory, self.bring), self.cancel, self.end_session, self.stacks)


class LiveViews:
    """Chooses how a run is shown, and holds what its kernel's live views share.

    Args:
        kernel: The ipykernel, None without one.

    Attributes:
        channels: The channels to this kernel's views; None without a Jupyter kernel.
        widget_class: The ipywidget's class once it is imported; None before, and if it can't be imported.
        importing: The thread that imports it.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # only a Jupyter kernel with a control channel has live views
        self.channels = Channels(kernel) if hasattr(kernel, "control_handlers") else None
        self.widget_class: Any = None
        self._of_sessions: dict[str, RankWidgets] = {}
        # takes 50 ms, so in the background
        self.importing = threading.Thread(target=self._import, name="sgpu-widget", daemon=True)
        if self.channels is not None:
            self.importing.start()

    def publisher_for(self, ui: str, view: RunView, stream: TextIO, buttons: Buttons) -> Publisher:
        """Return the publisher for `--ui`: `none`, `text`, `streams`, `widget`, or by the front end (`auto`).

        Args:
            ui: The option's value.
            view: The run, before any event was applied.
            stream: Where text goes.
            buttons: The actions of the view's buttons.
        """
        widgets = self._widgets_for(view, buttons)
        view.models = widgets.models
        draws = self._kernel is not None and not self.is_console
        is_live = draws and not is_quiet(view) and (ui == "widget" or (ui == "auto" and self.is_watched))
        if self.channels is not None and is_live:
            feed = Feed(view)
            publisher = WidgetPublisher(view, feed, buttons.answers(view, feed), widgets, self.channels, self)
        else:
            publisher = publisher_for(ui, view, stream, notebook=draws)
        if view.spec.kind is RunKind.SESSION and widgets.stays:
            return SessionWidgets(publisher, widgets, lambda: self._of_sessions.pop(view.run_id, None))
        return publisher

    def _widgets_for(self, view: RunView, buttons: Buttons) -> RankWidgets:
        """Return the comms of the widgets of a run's ranks; the cells of a session share one object."""
        channels = self.channels if self.is_watched else None
        spec = view.spec
        session = spec.session if spec.in_session else ""
        if session in self._of_sessions and buttons.owned:
            return self._of_sessions[session]
        stays = spec.kind is RunKind.SESSION and buttons.owned
        widgets = RankWidgets(channels, buttons.send, session or spec.run_id, stays=stays)
        if stays:
            self._of_sessions[spec.run_id] = widgets
        return widgets

    @property
    def expects_hello(self) -> bool:
        """Whether a front end that can show the view sends `AskHello` within 5 s, also while the cell blocks."""
        if self.channels is not None and self.channels.serve_every_comm:
            return True
        # the widgets of these front ends can't reach a busy kernel on any channel
        return "__vsc_ipynb_file__" not in self._kernel.shell.user_ns and "google.colab" not in sys.modules

    def serve(self, model_id: str, take: Taker | None) -> None:
        """Pass requests to a model that is not a run's view to `take`; None ends that."""
        if self.channels is not None:
            self.channels.serve(model_id, take)

    def close(self) -> None:
        """Remove all handlers from the kernel."""
        if self.channels is not None:
            self.channels.remove()

    @property
    def is_watched(self) -> bool:
        """Whether a notebook may be open: headless clients (nbclient, papermill) do not accept input requests."""
        return self._takes_input and not self.is_console

    @property
    def is_console(self) -> bool:
        """Whether the cell comes from a console, which prints displays as they arrive and ignores their updates.

        Jupyter Console, qtconsole and Spyder use `jupyter_client`, whose message ids end in the process id and a
        count. Front ends of notebooks use other ids, and name the cell in the request's metadata.
        """
        if not self._takes_input:
            return False
        parent: dict[str, Any] = self._kernel.get_parent("shell")
        names_cell = not _CELL_IDS.isdisjoint(parent.get("metadata", {}))
        return not names_cell and _CLIENTS_ID.fullmatch(parent.get("header", {}).get("msg_id", "")) is not None

    @property
    def _takes_input(self) -> bool:
        """Whether the front end of the running cell can prompt the user."""
        parent: dict[str, Any] = self._kernel.get_parent("shell") if self.channels is not None else {}
        return bool(parent.get("content", {}).get("allow_stdin"))

    def _import(self) -> None:
        try:
            from sgpu_magic.views.live.widgets import RunViewWidget
        except (ImportError, OSError):
            # anywidget or ipywidgets is missing or has an unsupported version
            return
        self.widget_class = RunViewWidget

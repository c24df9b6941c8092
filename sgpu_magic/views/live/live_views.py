"""The live views of one kernel: whether a run gets one, and what it needs for it."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.answers import Answers
from sgpu_magic.views.live.channels import Channels, Taker
from sgpu_magic.views.live.feed import Feed
from sgpu_magic.views.live.log_reader import LogReader
from sgpu_magic.views.live.rank_widgets import RankWidgets, SessionWidgets, Tell
from sgpu_magic.views.live.widget_publisher import Surroundings, WidgetPublisher
from sgpu_magic.views.publisher import Publisher, publisher_for
from sgpu_magic.views.session_words import is_quiet
from sgpu_magic.wire.states import RunKind

# as `jupyter_client.session.Session.msg_id` makes them
_CLIENTS_ID = re.compile(r"[0-9a-f-]+_\d+_\d+")
# JupyterLab's, Notebook's and VS Code's word, and that of server-side execution
_CELL_IDS = frozenset(("cellId", "cell_id"))


@dataclass(frozen=True, slots=True)
class Buttons:
    """What a view's buttons do and where its log is.

    Args:
        directory: The run's, with a log for each rank.
        cancel: Stops the run and returns what to say. Called in any thread.
        stacks: Returns where every rank is, a line each. Called in any thread; may take a second.
        bring: Brings what has come to a file of that name to the directory of a run on another machine; None where
            the directory has it.
        tell: Tells widgets of its ranks something. Called in any thread.
        owned: The run was submitted here: its events come from the beginning, once.
    """

    directory: Path
    cancel: Callable[[], str]
    stacks: Callable[[], Sequence[str]]
    bring: Callable[[str], None] | None = None
    tell: Tell = lambda message, frames: None
    owned: bool = True


class LiveViews:
    """Chooses how a run is shown and keeps what its kernel's live views share.

    Args:
        kernel: The ipykernel, None without one.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # what is not a Jupyter kernel with channels of its own has no live views
        self._channels = Channels(kernel) if hasattr(kernel, "control_handlers") else None
        self._widget_class: Any = None
        self._of_sessions: dict[str, RankWidgets] = {}
        # 50 ms that no cell is to wait for
        self._importing = threading.Thread(target=self._import, name="sgpu-widget", daemon=True)
        if self._channels is not None:
            self._importing.start()

    def publisher_for(self, ui: str, view: RunView, stream: TextIO, buttons: Buttons) -> Publisher:
        """Return the publisher of `--ui`: `none`, `text`, `streams`, `widget`, or what suits the place (`auto`).

        Args:
            ui: The option's value.
            view: The run, to which no event was applied yet.
            stream: Where text goes.
            buttons: What the view's buttons do.
        """
        widgets = self._widgets_for(view, buttons)
        view.models = widgets.models
        publisher = self._publisher_for(ui, view, stream, buttons, widgets)
        if view.spec.kind is RunKind.SESSION and widgets.stays:
            return SessionWidgets(publisher, widgets, lambda: self._session_over(view.run_id))
        return publisher

    def _session_over(self, run_id: str) -> None:
        self._of_sessions.pop(run_id, None)

    def _widgets_for(self, view: RunView, buttons: Buttons) -> RankWidgets:
        """Return what speaks for the widgets of a run's ranks: in a session what speaks for those of all its cells."""
        channels = self._channels if self.is_watched else None
        spec = view.spec
        if spec.kind is RunKind.SESSION and buttons.owned:
            found = self._of_sessions[spec.run_id] = RankWidgets(channels, buttons.tell, spec.run_id, stays=True)
            return found
        session = spec.session if spec.in_session else ""
        if session in self._of_sessions and buttons.owned:
            return self._of_sessions[session]
        return RankWidgets(channels, buttons.tell, session or spec.run_id, stays=False)

    def _publisher_for(
        self, ui: str, view: RunView, stream: TextIO, buttons: Buttons, widgets: RankWidgets
    ) -> Publisher:
        channels = self._channels if not is_quiet(view) else None
        draws = self._kernel is not None and not self.is_console
        if (
            channels is None
            or ui in ("none", "text", "streams")
            or not draws
            or not (ui == "widget" or self.is_watched)
        ):
            return publisher_for(ui, view, stream, notebook=draws)
        feed = Feed(view)
        answers = Answers(view, feed, LogReader(buttons.directory, buttons.bring), buttons.cancel, buttons.stacks)
        expects_hello = channels.serve_every_comm or not self._has_no_subshells
        here = Surroundings(channels, lambda: self._widget_class, self._importing.is_alive, widgets, expects_hello)
        return WidgetPublisher(view, feed, answers, here)

    @property
    def channels(self) -> Channels | None:
        """The ways to this kernel's views; None where it has none."""
        return self._channels

    def serve(self, model_id: str, take: Taker | None) -> None:
        """Have questions to a model that is no run's view taken by `take`; by nobody when it is None."""
        if self._channels is not None:
            self._channels.serve(model_id, take)

    def close(self) -> None:
        """Give the kernel its channels back."""
        if self._channels is not None:
            self._channels.remove()

    @property
    def is_watched(self) -> bool:
        """Whether a notebook may be open: headless kernels (nbclient, papermill) are asked for no input."""
        return self._takes_input and not self.is_console

    @property
    def is_console(self) -> bool:
        """Whether the cell comes from a console, which prints displays as they come and ignores their updates.

        Jupyter Console, qtconsole and Spyder are clients by `jupyter_client`, whose message ids end in their process
        id and a count. A notebook's front end has ids of its own, and names the cell in the request's metadata.
        """
        if not self._takes_input:
            return False
        parent: dict[str, Any] = self._kernel.get_parent("shell")
        names_cell = not _CELL_IDS.isdisjoint(parent.get("metadata", {}))
        return not names_cell and _CLIENTS_ID.fullmatch(parent.get("header", {}).get("msg_id", "")) is not None

    @property
    def _takes_input(self) -> bool:
        """Whether the front end of the cell that runs can ask a person."""
        if self._channels is None:
            return False
        return bool(self._kernel.get_parent("shell").get("content", {}).get("allow_stdin"))

    @property
    def _has_no_subshells(self) -> bool:
        """Whether the front end is one whose widgets can't reach a kernel that is busy, by any way of theirs."""
        return "__vsc_ipynb_file__" in self._kernel.shell.user_ns or "google.colab" in sys.modules

    def _import(self) -> None:
        try:
            from sgpu_magic.views.live.view_widget import RunViewWidget
        except (ImportError, OSError):
            # another version of anywidget or ipywidgets than we ask for, or none
            return
        self._widget_class = RunViewWidget

"""Where a panel's questions reach the kernel. Each is answered in another thread than the one that has brought it.

What answers is loaded with the first question, so a kernel that nobody looks at by a panel pays nothing.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from sgpu_magic.runs.notebook import kernel_id, notebook_name
from sgpu_magic.runs.workplace import Workplace

if TYPE_CHECKING:
    from sgpu_magic.panel.kernel_actions import KernelActions
    from sgpu_magic.panel.panel_view import PanelView
    from sgpu_magic.panel.watch import Watchers

Send = Callable[[dict[str, Any]], None]

PANEL = "panel"
"""As `messages.PANEL`, which is not loaded before the first question."""

_DEEDS = 3
_JOIN_S = 2.0


class KernelEndpoint:
    """The kernel's half of every panel that looks at it.

    Args:
        place: This process's runs.
    """

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._actions: KernelActions | None = None
        self._watchers: Watchers | None = None
        self._views: list[PanelView] = []
        # nobody who looks waits for what somebody does
        self._looks, self._plans = Lane("sgpu-panel-looks"), Lane("sgpu-panel-plans")
        # one that takes long is not in the way of the refusal of another, nor of a disconnection
        self._deeds = tuple(Lane("sgpu-panel-deeds") for _ in range(_DEEDS))
        place.live_views.serve(PANEL, self.take)

    def take(self, content: object, send: Send, *, knows_metadata: bool = True) -> None:
        """Have a question answered; returns at once.

        Args:
            content: The question as JSON.
            send: Takes the answer, in another thread.
            knows_metadata: Who asks knows the notebook's metadata; else a choice that is not told leaves it as it is.
        """
        free = next((lane for lane in self._deeds if lane.is_idle), self._deeds[-1])
        lane = {"kernel": self._looks, "plan": self._plans}.get(_kind_of(content), free)

        def work() -> None:
            try:
                send(self.actions.answered(content, knows_metadata=knows_metadata))
            except Exception:  # noqa: BLE001  a thread's top: who asked gets no answer, and the kernel's log says why
                traceback.print_exc(file=sys.__stderr__)

        lane.put(work)

    @property
    def actions(self) -> KernelActions:
        """What answers."""
        with self._lock:
            if self._actions is None:
                from sgpu_magic.panel.kernel_actions import KernelActions

                self._actions = KernelActions(self._place)
            return self._actions

    def show(self) -> dict[str, object] | None:
        """Open a panel; return the part of a MIME bundle that shows it, None where none can be shown."""
        live_views = self._place.live_views
        if live_views.channels is None or not live_views.is_watched:
            return None
        try:
            from sgpu_magic.panel.panel_view import PanelView, PanelWidget
        except (ImportError, OSError):
            # another version of anywidget than we ask for, or none
            return None
        from sgpu_magic.panel.watch import Watchers

        self._views = [view for view in self._views if not view.is_closed]
        if self._watchers is None:
            self._watchers = Watchers()
        shell, channels = self._place.shell, live_views.channels
        comms = "subshell" if channels.serve_comms else "blocking"
        widget = PanelWidget(notebook=notebook_name(shell), kernel=kernel_id(shell), comms=comms)
        lanes = Lane("sgpu-panel-orders"), Lane("sgpu-panel-told")
        self._views.append(PanelView(widget, channels, self, self._watchers, *lanes))
        return widget.view_bundle

    def close(self) -> None:
        """Answer nothing more, and close the panels that are open."""
        self._place.live_views.serve(PANEL, None)
        views, self._views = self._views, []
        for view in views:
            view.close()
        if self._watchers is not None:
            self._watchers.close()
        for lane in (self._looks, self._plans, *self._deeds):
            lane.close()
        if self._actions is not None:
            self._actions.close()


class Lane:
    """Does work one after the other, in a thread of its own that is there only while there is some.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """Nothing is done, and nothing waits."""
        with self._lock:
            return self._thread is None

    def put(self, work: Callable[[], None]) -> None:
        """Have it done; it must not raise."""
        with self._lock:
            if self._closed:
                return
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Do nothing more; what is being done is waited for a moment."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    # in one step: who has work from now on starts the next thread
                    self._thread = None
                    return
                work = self._waiting.popleft()
            work()


def _kind_of(content: object) -> str:
    return str(cast("dict[str, object]", content).get("kind")) if isinstance(content, dict) else ""

"""Where a panel's requests reach the kernel. Each is answered in another thread than the one that received it.

`KernelActions` is imported with the first request, so a kernel without a panel never imports it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from sgpu_magic import __version__
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.notebook import kernel_id, notebook_name
from sgpu_magic.system.serial_threads import SerialExecutor

if TYPE_CHECKING:
    from sgpu_magic.panel.kernel_actions import KernelActions
    from sgpu_magic.panel.orders import PanelUpdate
    from sgpu_magic.panel.poller import Watchers
    from sgpu_magic.views.live.comm import Channels

Send = Callable[[dict[str, Any]], None]

PANEL = "panel"
"""Same as `kernel_state.PANEL`; `kernel_state` is not imported before the first request."""

PATIENCE_S = 90.0
"""A page that sends nothing for so long is considered closed."""

_BANNER = f"sgpu-magic {__version__} is loaded.\n"
_DISPLAY = "sgpu-magic"
_ACTIONS_AT_ONCE = 3


class KernelEndpoint:
    """The kernel's side of all panels that show it.

    Args:
        context: The kernel's context.
    """

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._actions: KernelActions | None = None
        self._watchers: Watchers | None = None
        self._views: list[PanelView] = []
        # separate threads, so that state requests do not wait for actions
        self._polls, self._plans = SerialExecutor("sgpu-panel-polls"), SerialExecutor("sgpu-panel-plans")
        self._variables = SerialExecutor("sgpu-panel-variables")
        # several threads, so that a long action delays neither the refusal of another nor a disconnection
        self._action_executors = tuple(SerialExecutor("sgpu-panel-actions") for _ in range(_ACTIONS_AT_ONCE))
        context.live_views.serve(PANEL, self.on_request)
        self._announce(loaded=True)

    def on_request(self, content: object, send: Send, *, knows_metadata: bool = True) -> None:
        """Have a request answered in another thread, and return at once.

        Args:
            content: The request as JSON.
            send: Called with the reply, in another thread.
            knows_metadata: The sender knows the notebook's metadata. If False, a request without a choice does not
                change the current one.
        """
        free = next((executor for executor in self._action_executors if executor.is_idle), self._action_executors[-1])
        by_kind = {"kernel": self._polls, "plan": self._plans, "variables": self._variables}
        executor = by_kind.get(_kind_of(content), free)

        def work() -> None:
            try:
                send(self.actions.answered(content, knows_metadata=knows_metadata))
            except Exception:  # noqa: BLE001  a thread's top: who asked gets no answer, and the kernel's log says why
                traceback.print_exc(file=sys.__stderr__)

        executor.put(work)

    @property
    def actions(self) -> KernelActions:
        """The object that answers requests, created on first use."""
        with self._lock:
            if self._actions is None:
                from sgpu_magic.panel.kernel_actions import KernelActions

                self._actions = KernelActions(self._context)
            return self._actions

    def show(self) -> dict[str, object] | None:
        """Open a panel below the cell; return its part of a MIME bundle, None when no panel can be shown."""
        live_views = self._context.live_views
        if live_views.channels is None or not live_views.is_watched:
            return None
        try:
            from sgpu_magic.views.live.widgets import PanelWidget
        except (ImportError, OSError):
            # anywidget is missing or has an unsupported version
            return None
        from sgpu_magic.panel.poller import Watchers

        self._views = [view for view in self._views if not view.is_closed]
        if self._watchers is None:
            self._watchers = Watchers()
        shell, channels = self._context.shell, live_views.channels
        comms = "subshell" if channels.serve_comms else "blocking"
        widget = PanelWidget(notebook=notebook_name(shell), kernel=kernel_id(shell), comms=comms)
        self._views.append(PanelView(widget, channels, self, self._watchers))
        return widget.view_bundle

    def close(self) -> None:
        """Stop answering, and close open panels."""
        self._announce(loaded=False)
        self._context.live_views.serve(PANEL, None)
        views, self._views = self._views, []
        for view in views:
            view.close()
        if self._watchers is not None:
            self._watchers.close()
        for executor in (self._polls, self._plans, self._variables, *self._action_executors):
            executor.close()
        if self._actions is not None:
            self._actions.close()

    def _announce(self, *, loaded: bool) -> None:
        """Report to open pages and later ones that the extension is loaded, or no longer: they ask no other kernels.

        Later pages see it in the banner of the kernel's `kernel_info_reply`; open ones get an update of a display that
        no front end shows.
        """
        shell, live_views = self._context.shell, self._context.live_views
        if shell is None or live_views.channels is None:
            return
        banner = str(shell.banner2).replace(_BANNER, "")
        shell.banner2 = f"{banner}{_BANNER}" if loaded else banner
        if live_views.is_watched:
            metadata = {"sgpu_magic": {"loaded": loaded}}
            shell.display_pub.publish({}, metadata, transient={"display_id": _DISPLAY}, update=True)


class PanelView:
    """One panel below a cell. The pool is watched while the page keeps sending messages.

    Args:
        widget: The `PanelWidget`.
        channels: Deliver its messages.
        endpoint: Answers its requests.
        watchers: The kernel's watchers.
    """

    def __init__(self, widget: Any, channels: Channels, endpoint: KernelEndpoint, watchers: Watchers) -> None:
        from sgpu_magic.panel.orders import Page

        self._widget = widget
        self._channels = channels
        self._endpoint = endpoint
        self._page = Page(watchers, self._send_update)
        # the first carries out its commands, the second sends its updates
        self._orders, self._updates = SerialExecutor("sgpu-panel-orders"), SerialExecutor("sgpu-panel-updates")
        self._lock = threading.Lock()
        self._received_at = time.monotonic()
        self._timer: threading.Timer | None = None
        self._closed = False
        channels.opened_for(widget, self._on_message)

    @property
    def is_closed(self) -> bool:
        """The panel was closed, here or by the front end."""
        return self._closed or self._widget.comm is None

    def close(self) -> None:
        """Close the widget and stop its updates."""
        with self._lock:
            self._closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._channels.closed(self._widget)
        self._page.close()
        self._orders.close()
        self._updates.close()
        self._widget.close()

    # ------------------------------------------------------------ messages

    def _on_message(self, content: object, send: Send) -> None:
        """Handle a message, in the thread that received it."""
        self._received_at = time.monotonic()
        if not isinstance(content, dict):
            return
        message = cast("dict[str, object]", content)
        if "n" in message:
            self._endpoint.on_request(message, send, knows_metadata=False)
        elif message.get("kind") != "here":
            self._orders.put(partial(self._execute, message))

    def _execute(self, message: dict[str, object]) -> None:
        result = self._page.execute_decoded(message)
        if self._page.is_watching:
            self._check_later()
        if result is not None:
            self._send_update(result)

    def _send_update(self, update: PanelUpdate) -> None:
        self._updates.put(partial(self._send, update))

    def _send(self, update: PanelUpdate) -> None:
        if not self.is_closed:
            self._widget.send(msgspec.to_builtins(update))

    # ------------------------------------------------------------ a closed page

    def _check_later(self) -> None:
        with self._lock:
            if self._closed or self._timer is not None:
                return
            self._timer = threading.Timer(PATIENCE_S, self._check)
            self._timer.name = "sgpu-panel-patience"
            self._timer.daemon = True
            self._timer.start()

    def _check(self) -> None:
        with self._lock:
            self._timer = None
        if self.is_closed or time.monotonic() - self._received_at >= PATIENCE_S:
            self._page.rest()
        else:
            self._check_later()


def _kind_of(content: object) -> str:
    return str(cast("dict[str, object]", content).get("kind")) if isinstance(content, dict) else ""

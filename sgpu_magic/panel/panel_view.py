"""The panel as a widget below a cell: carries out its commands and forwards its requests to the kernel's endpoint."""

# ipywidgets declares few types
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import sys
import threading
import time
import traceback
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, cast

import msgspec
import traitlets

from sgpu_magic.panel.messages import PanelOrder, Rest, Said, Told, Watch
from sgpu_magic.panel.orders import Page
from sgpu_magic.panel.watch import Watchers
from sgpu_magic.views.live.widgets import KeyedWidget

if TYPE_CHECKING:
    from sgpu_magic.panel.kernel_endpoint import KernelEndpoint, Lane, Send
    from sgpu_magic.views.live.comm import Channels

PATIENCE_S = 90.0
"""A page that sends nothing for so long is considered closed."""


class PanelView:
    """One panel below a cell. The pool is watched while the page keeps sending messages.

    Args:
        widget: The `PanelWidget`.
        channels: Deliver its messages.
        endpoint: Answers its requests.
        watchers: The kernel's watchers.
        orders: The lane that carries out its commands.
        told: The lane that sends its updates.
    """

    def __init__(
        self, widget: Any, channels: Channels, endpoint: KernelEndpoint, watchers: Watchers, orders: Lane, told: Lane
    ) -> None:
        self._widget = widget
        self._channels = channels
        self._endpoint = endpoint
        self._page = Page(watchers, self._tell)
        self._orders, self._told = orders, told
        self._lock = threading.Lock()
        self._heard_at = time.monotonic()
        self._timer: threading.Timer | None = None
        self._closed = False
        channels.opened_for(widget, self._take)

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
        self._told.close()
        self._widget.close()

    # ------------------------------------------------------------ messages

    def _take(self, content: object, send: Send) -> None:
        """Handle a message, in the thread that received it."""
        self._heard_at = time.monotonic()
        if not isinstance(content, dict):
            return
        message = cast("dict[str, object]", content)
        if "n" in message:
            self._endpoint.take(message, send, knows_metadata=False)
        elif message.get("kind") != "here":
            self._orders.put(partial(self._obey, message))

    def _obey(self, message: dict[str, object]) -> None:
        try:
            order = msgspec.convert(message, PanelOrder)
            said = self._page.obey(order)
            if isinstance(order, Watch):
                self._check_later()
        except msgspec.ValidationError as error:
            said = Said(text=f"This request is not valid: {error}.", ok=False)
        except Exception as error:  # noqa: BLE001  a thread's top, and a page that waits
            traceback.print_exc(file=sys.__stderr__)
            said = Said(text=f"The request failed: {type(error).__name__}: {error}", ok=False)
        if said is not None:
            self._tell(said)

    def _tell(self, told: Told) -> None:
        self._told.put(partial(self._send, told))

    def _send(self, told: Told) -> None:
        if not self.is_closed:
            self._widget.send(msgspec.to_builtins(told))

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
        if self.is_closed or time.monotonic() - self._heard_at >= PATIENCE_S:
            self._page.obey(Rest())
        else:
            self._check_later()


_ESM = resources.files("sgpu_magic").joinpath("static/panel.js").read_text(encoding="utf-8")


class PanelWidget(KeyedWidget):
    """The state that the browser needs before its first message.

    Args:
        pool: The pool that is shown first, "" for the one in the settings.
        notebook: The notebook's file name, "" when unknown.
        kernel: The Jupyter server's id of this kernel, "" without one.
    """

    # text instead of a Path: anywidget would watch the file
    _esm = traitlets.Unicode(_ESM).tag(sync=True)
    pool = traitlets.Unicode("").tag(sync=True)
    notebook = traitlets.Unicode("").tag(sync=True)
    kernel = traitlets.Unicode("").tag(sync=True)

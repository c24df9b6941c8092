"""The environment panel's handlers: a websocket for updates, and REST where a proxy blocks websockets.

`sgpu/panel`            websocket: `PanelOrder` in, `PanelUpdate` out; GET: the whole state once
`sgpu/panel/orders`     POST: one `PanelOrder`, answered by `CommandResult`
"""

# jupyter_server and tornado are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUntypedFunctionDecorator=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import atexit
from collections import deque
from typing import Any

import msgspec
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from sgpu_magic.panel.orders import CommandResult, Page, PanelOrder, PanelUpdate, Rest, Watch, execute_once, orders
from sgpu_magic.panel.poller import Watchers, whole
from sgpu_magic.panel.schema import PoolsUpdate, PoolUpdate, RunRow, RunsUpdate
from sgpu_magic.server.run_handlers import RESOURCE, THREADS, answer, in_thread

_MAX_RESULTS = 100
_MAX_ORDER_BYTES = 10_000
_FORBIDDEN = "You have read-only access to this server's pools."


class Outbox:
    """Messages to be sent to one page. Owned by one thread."""

    def __init__(self) -> None:
        self._results: deque[CommandResult] = deque(maxlen=_MAX_RESULTS)
        # the newest state message of each type
        self._pending: dict[type[PanelUpdate], PanelUpdate] = {}

    def put(self, update: PanelUpdate) -> None:
        """Add a message; a state message replaces an unsent one of its type."""
        if isinstance(update, CommandResult):
            self._results.append(update)
            return
        before = self._pending.get(type(update))
        if isinstance(update, RunsUpdate) and isinstance(before, RunsUpdate):
            update = merged(before, update)
        self._pending[type(update)] = update

    def pop(self) -> PanelUpdate | None:
        """Return the next message, None when the outbox is empty."""
        if self._results:
            return self._results.popleft()
        kind = next((kind for kind in (PoolsUpdate, PoolUpdate, RunsUpdate) if kind in self._pending), None)
        return self._pending.pop(kind) if kind is not None else None

    def clear(self) -> None:
        """Discard all messages."""
        self._results.clear()
        self._pending.clear()


def merged(earlier: RunsUpdate, later: RunsUpdate) -> RunsUpdate:
    """Return one message equivalent to both in order."""
    if later.whole or later.pool != earlier.pool:
        return later
    gone = set(later.gone)
    rows: dict[str, RunRow] = {row.run_id: row for row in (*later.changed, *earlier.changed) if row.run_id not in gone}
    rows |= {row.run_id: row for row in later.changed}
    changed = tuple(sorted(rows.values(), key=lambda row: row.submitted_at, reverse=True))
    still_gone = () if earlier.whole else tuple((set(earlier.gone) | gone) - rows.keys())
    return RunsUpdate(pool=later.pool, whole=earlier.whole, changed=changed, gone=still_gone)


def add_panel_handlers(server_app: Any) -> None:
    """Add the panel's handlers below `sgpu/` to a server. Invalid settings are reported in their answers."""
    watchers = Watchers()
    # stop polling before the interpreter shuts down
    atexit.register(watchers.close)
    panel = url_path_join(server_app.web_app.settings["base_url"], "sgpu", "panel")
    handlers = {panel: PanelHandler, f"{panel}/orders": OrdersHandler}
    shared = {"watchers": watchers}
    server_app.web_app.add_handlers(".*$", [(path, handler, shared) for path, handler in handlers.items()])


class PanelHandler(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """`sgpu/panel`: a websocket, or the state once for a page that polls: `{"pools": .., "pool": .., "runs": ..}`."""

    auth_resource = RESOURCE

    def initialize(self, watchers: Watchers) -> None:
        self.watchers = watchers
        self._page: Page | None = None
        self._outbox = Outbox()
        self._sending: asyncio.Task[None] | None = None
        self._executing: set[asyncio.Task[None]] = set()
        self._wanted: Watch | Rest | None = None
        self._watching: asyncio.Task[None] | None = None

    def set_default_headers(self) -> None:
        """Set none: `answer` sets them for REST, and a websocket has none."""

    def get_compression_options(self) -> dict[str, Any] | None:
        return self.settings.get("websocket_compression_options", None)

    @ws_authenticated
    async def get(self, *args: str, **kwargs: str) -> None:
        if not await self._may("read"):
            raise web.HTTPError(403)
        if self.request.headers.get("Upgrade", "").lower() == "websocket":
            await super().get(*args, **kwargs)
        else:
            await self._answer_once()

    # ------------------------------------------------------------ the websocket

    def open(self, *args: str, **kwargs: str) -> None:
        super().open(*args, **kwargs)
        self._loop = asyncio.get_running_loop()
        self._page = Page(self.watchers, self._on_update)

    async def on_message(self, message: str | bytes) -> None:
        try:
            order = _order(message if isinstance(message, bytes) else message.encode())
        except ValueError as error:
            self._put(CommandResult(text=str(error), ok=False))
            return
        if self._page is None:
            return
        if isinstance(order, Watch | Rest):
            self._wanted = order
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._follow(self._page))
            return
        # run it in a task, so that the next message does not wait for it
        task = asyncio.create_task(self._execute_order(self._page, order))
        self._executing.add(task)
        task.add_done_callback(self._executing.discard)

    def on_close(self) -> None:
        if self.ping_callback is not None:
            self.ping_callback.stop()
        if self._page is not None:
            # close it in a thread, as that waits for the page's command in progress
            self._loop.run_in_executor(THREADS, self._page.close)
        self._outbox.clear()
        super().on_close()

    async def _follow(self, page: Page) -> None:
        """Carry out the page's latest `Watch` or `Rest` in a thread, as it reads files and takes locks."""
        while (order := self._wanted) is not None:
            self._wanted = None
            await in_thread(page.execute, order)

    async def _execute_order(self, page: Page, order: PanelOrder) -> None:
        if not await self._may("write"):
            self._put(CommandResult(text=_FORBIDDEN, ok=False))
            return
        if (result := await in_thread(page.execute, order)) is not None:
            self._put(result)

    def _on_update(self, update: PanelUpdate) -> None:
        """Queue a message; may be called by any thread."""
        try:
            self._loop.call_soon_threadsafe(self._put, update)
        except RuntimeError:
            # the server is shutting down
            return

    def _put(self, update: PanelUpdate) -> None:
        self._outbox.put(update)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Send the outbox's messages one at a time; a slow page gets fewer, merged messages."""
        while (update := self._outbox.pop()) is not None:
            try:
                await self.write_message(msgspec.json.encode(update).decode())
            except WebSocketClosedError:
                self._outbox.clear()

    # ------------------------------------------------------------ REST

    async def _answer_once(self) -> None:
        # as in the server's own REST API: pages of another origin can't read the answer
        if not self.check_origin():
            raise web.HTTPError(404)
        pool = self.get_query_argument("pool", "")
        pools = await in_thread(self.watchers.poll_list)
        seen = await in_thread(self.watchers.poll, pool)
        if seen is None:
            raise web.HTTPError(503, "the pool's state can't be read now. Try again.")
        snapshot, runs = whole(seen)
        answer(self, {"pools": pools, "pool": snapshot, "runs": runs})

    async def _may(self, action: str) -> bool:
        return bool(await ensure_async(self.authorizer.is_authorized(self, self.current_user, action, RESOURCE)))


class OrdersHandler(APIHandler):
    """`POST sgpu/panel/orders`: one command of a page without a websocket."""

    auth_resource = RESOURCE

    def initialize(self, watchers: Watchers) -> None:
        self.watchers = watchers

    @web.authenticated
    @authorized
    async def post(self) -> None:
        try:
            order = _order(self.request.body)
        except ValueError as error:
            raise web.HTTPError(400, str(error)) from None
        answer(self, await in_thread(execute_once, self.watchers, order))


def _order(raw: bytes) -> PanelOrder:
    if len(raw) > _MAX_ORDER_BYTES:
        raise ValueError("The request is too long.")
    try:
        return orders.decode(raw)
    except msgspec.DecodeError as error:
        raise ValueError(f"This request is not valid: {error}.") from None

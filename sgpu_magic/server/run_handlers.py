"""HTTP handlers for runs, authenticated and authorized like the Jupyter server's own."""

# jupyter_server and tornado are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import msgspec
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.ioloop import PeriodicCallback

from sgpu_magic.config import load_settings
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.server.kernel_runs import OwnedRuns
from sgpu_magic.server.outputs import Output
from sgpu_magic.server.run_places import Elsewhere
from sgpu_magic.server.runs import IDLE_S, Follower, Followers, Known, RunNotHere
from sgpu_magic.views.live.messages import questions

MAX_WAIT_S = 20.0
_LOOK_EVERY_S = 0.25
_DROP_EVERY_MS = 15_000
_MAX_QUESTION_BYTES = 10_000

RESOURCE = "kernels"
"""Users who may read kernels may read their runs and pools; users who may write to kernels may cancel runs."""

THREADS = ThreadPoolExecutor(max_workers=24, thread_name_prefix="sgpu-requests")
"""Separate from the event loop's executor, so that waiting for an unreachable pool does not block the server."""

P = ParamSpec("P")
T = TypeVar("T")


def add_handlers(server_app: Any) -> None:
    """Add the handlers below `sgpu/` to a server."""
    try:
        settings = load_settings()
    except UsageError as error:
        server_app.log.warning("sgpu_magic: %s Runs can't be shown after a reload of the page.", error.message)
        return
    application = server_app.web_app
    elsewhere = Elsewhere(settings, IDLE_S)
    # stop the connections' threads before the interpreter shuts down
    atexit.register(elsewhere.close)
    followers = Followers(settings, elsewhere)
    shared = {"runs": OwnedRuns(settings, elsewhere), "followers": followers}
    base = application.settings["base_url"]
    application.add_handlers(
        ".*$",
        [
            (url_path_join(base, "sgpu", "runs"), RunsHandler, shared),
            *(
                (url_path_join(base, "sgpu", "runs", "([^/]+)", name), handler, shared)
                for name, handler in _OF_A_RUN.items()
            ),
        ],
    )
    PeriodicCallback(followers.drop_idle, _DROP_EVERY_MS).start()


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that may block, in `THREADS`."""
    return await asyncio.get_running_loop().run_in_executor(THREADS, functools.partial(call, *args, **kwargs))


def answer(handler: web.RequestHandler, record: object) -> None:
    """Finish a request with a record serialized as JSON."""
    handler.set_header("Content-Type", "application/json")
    handler.set_header("Cache-Control", "no-store")
    handler.set_header("X-Content-Type-Options", "nosniff")
    handler.finish(msgspec.json.encode(record))


class _Handler(APIHandler):
    """Base class: the followers, threads for blocking calls, and errors as readable messages."""

    auth_resource = RESOURCE

    def initialize(self, runs: OwnedRuns, followers: Followers) -> None:
        self.runs = runs
        self.followers = followers

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may block, and convert its errors to HTTP errors.

        Raises:
            HTTPError: The run is unknown here (404), or its files or its pool can't be read (500).
        """
        try:
            return await in_thread(call, *args, **kwargs)
        except RunNotHere as error:
            raise web.HTTPError(404, str(error)) from None
        except (PoolError, OSError, ValueError, msgspec.DecodeError) as error:
            raise web.HTTPError(500, str(error)) from error

    async def follower(self, run_id: str) -> Follower:
        """Return a run's follower, which all requests share."""
        return await self.in_thread(self.followers.get, run_id)

    def send_outputs(self, follower: Follower, outputs: list[Output]) -> None:
        answer(self, {"outputs": outputs, "execution_count": follower.spec.cell.execution_count})


class RunsHandler(_Handler):
    """`GET sgpu/runs?kernel=ID`: the kernel's runs that are active or ended recently, newest last."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        kernel = self.get_query_argument("kernel")
        if not kernel:
            raise web.HTTPError(400, "the query parameter kernel is missing: add kernel=ID.")
        answer(self, await self.in_thread(self.runs.of_kernel, kernel))


class NewsHandler(_Handler):
    """`GET sgpu/runs/RUN/news?after=SEQ&lines=N`: long poll, answers as soon as something is new."""

    @web.authenticated
    @authorized
    async def get(self, run_id: str) -> None:
        follower = await self.follower(run_id)
        known = Known(**{name: self._number(name) for name in Known.__struct_fields__})
        now = asyncio.get_running_loop().time
        deadline = now() + min(self._number("wait", MAX_WAIT_S), MAX_WAIT_S)
        self._gone = asyncio.Event()
        while True:
            # one thread per run: the pages that show it wait for its pool together
            async with follower.turn:
                news = await self.in_thread(follower.news, known)
            self.followers.asked(run_id)
            if news.is_new(known) or now() >= deadline or self._gone.is_set():
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), _LOOK_EVERY_S)
        if not self._gone.is_set():
            answer(self, news)

    def on_connection_close(self) -> None:
        super().on_connection_close()
        if hasattr(self, "_gone"):
            self._gone.set()

    def _number(self, name: str, default: float = 0) -> int:
        text = self.get_query_argument(name, str(int(default)))
        if not text.isdecimal() or len(text) > 15:
            raise web.HTTPError(400, f"{name} is {text[:40]!r}, not a number.")
        return int(text)


class AskHandler(_Handler):
    """`POST sgpu/runs/RUN/ask`: answers a request of a view."""

    @web.authenticated
    @authorized
    async def post(self, run_id: str) -> None:
        follower = await self.follower(run_id)
        if len(self.request.body) > _MAX_QUESTION_BYTES:
            raise web.HTTPError(413, "the request is too long.")
        try:
            question = questions.decode(self.request.body)
        except msgspec.DecodeError as error:
            raise web.HTTPError(400, f"the request is not valid: {error}") from None
        answer(self, await self.in_thread(follower.answer, question))


class OutputsHandler(_Handler):
    """`GET sgpu/runs/RUN/outputs`: the final outputs of its cell; 409 while the run is active."""

    @web.authenticated
    @authorized
    async def get(self, run_id: str) -> None:
        follower = await self.follower(run_id)
        outputs = await self.in_thread(follower.outputs)
        if outputs is None:
            raise web.HTTPError(409, "the run has not ended yet.")
        self.send_outputs(follower, outputs)


class DisplaysHandler(_Handler):
    """`GET sgpu/runs/RUN/displays`: what the run's ranks have displayed so far."""

    @web.authenticated
    @authorized
    async def get(self, run_id: str) -> None:
        follower = await self.follower(run_id)
        self.send_outputs(follower, await self.in_thread(follower.displays))


_OF_A_RUN = {"news": NewsHandler, "ask": AskHandler, "outputs": OutputsHandler, "displays": DisplaysHandler}

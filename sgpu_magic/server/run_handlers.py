"""HTTP handlers for a kernel's runs, authenticated and authorized like the Jupyter server's own."""

# jupyter_server and tornado are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

import msgspec
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.ioloop import PeriodicCallback
from tornado.iostream import StreamClosedError

from sgpu_magic.client import ledger
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.files.run_directory import read_spec
from sgpu_magic.server.mlflow_ui import MlflowUiFailed, MlflowUis
from sgpu_magic.server.run_files import FileNotHere, list_files, opened_file
from sgpu_magic.server.run_places import RemotePools
from sgpu_magic.server.runs import IDLE_S, Follower, Followers, Known, RunNotHere
from sgpu_magic.views.live.messages import questions
from sgpu_magic.wire.base import RunKind, RunState, check_id
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.run import RunSpec

MAX_WAIT_S = 20.0
_POLL_S = 0.25
_DROP_EVERY_MS = 15_000
_MAX_QUESTION_BYTES = 10_000
_READ_BYTES = 1 << 20
_DOWNLOADED = "application/octet-stream"

RESOURCE = "kernels"
"""Users who may read kernels may read their runs and pools; users who may write to kernels may cancel runs."""

THREADS = ThreadPoolExecutor(max_workers=24, thread_name_prefix="sgpu-requests")
"""Separate from the event loop's executor, so that waiting for an unreachable pool does not block the server."""

P = ParamSpec("P")
T = TypeVar("T")
RECENT_S = 3600.0
"""A page that was just loaded shows no runs that ended longer ago."""
_LOOKED_AT = 500


def add_handlers(server_app: Any) -> None:
    """Add the handlers below `sgpu/` to a server."""
    try:
        settings = load_settings()
    except UsageError as error:
        server_app.log.warning("sgpu_magic: %s Runs can't be shown after a reload of the page.", error.message)
        return
    application = server_app.web_app
    remote_pools = RemotePools(settings, IDLE_S)
    # stop the connections' threads before the interpreter shuts down
    atexit.register(remote_pools.close)
    followers = Followers(settings, remote_pools)
    mlflow_uis = MlflowUis()
    atexit.register(mlflow_uis.close)
    shared = {"runs": OwnedRuns(settings, remote_pools), "followers": followers, "mlflow_uis": mlflow_uis}
    runs = url_path_join(application.settings["base_url"], "sgpu", "runs")
    application.add_handlers(".*$", [(runs + path, handler, shared) for path, handler in _HANDLERS.items()])
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

    def initialize(self, runs: OwnedRuns, followers: Followers, mlflow_uis: MlflowUis) -> None:
        self.runs = runs
        self.followers = followers
        self.mlflow_uis = mlflow_uis

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may block, and convert its errors to HTTP errors.

        Raises:
            HTTPError: The run or its file is unknown here (404), or its files or its pool can't be read (500).
        """
        try:
            return await in_thread(call, *args, **kwargs)
        except (RunNotHere, FileNotHere) as error:
            raise web.HTTPError(404, str(error)) from None
        except (PoolError, OSError, ValueError, msgspec.DecodeError) as error:
            raise web.HTTPError(500, str(error)) from error

    async def follower(self, run_id: str) -> Follower:
        """Return a run's follower, which all requests share."""
        return await self.in_thread(self.followers.get, run_id)


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
        self._closed = asyncio.Event()
        while True:
            # one thread per run: the pages that show it wait for its pool together
            async with follower.turn:
                update = await self.in_thread(follower.update, known)
            self.followers.record_view(run_id)
            if update.is_new(known) or now() >= deadline or self._closed.is_set():
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), _POLL_S)
        if not self._closed.is_set():
            answer(self, update)

    def on_connection_close(self) -> None:
        super().on_connection_close()
        if hasattr(self, "_closed"):
            self._closed.set()

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
    """`GET sgpu/runs/RUN/outputs`: the final outputs of its cell; 409 while the run is active.

    `GET sgpu/runs/RUN/displays`: what the run's ranks have displayed so far.
    """

    @web.authenticated
    @authorized
    async def get(self, run_id: str, which: str) -> None:
        follower = await self.follower(run_id)
        outputs = await self.in_thread(follower.displays if which == "displays" else follower.outputs)
        if outputs is None:
            raise web.HTTPError(409, "the run has not ended yet.")
        answer(self, {"outputs": outputs, "execution_count": follower.spec.cell.execution_count})


class PageHandler(_Handler):
    """`GET sgpu/runs/RUN/page`: what the run's page shows beside its live view."""

    @web.authenticated
    @authorized
    async def get(self, run_id: str) -> None:
        follower = await self.follower(run_id)
        answer(self, await self.in_thread(self.followers.page, follower))


class MlflowHandler(_Handler):
    """`POST sgpu/runs/RUN/mlflow`: starts `mlflow ui` for the run's store unless it is running; answers its address."""

    @web.authenticated
    @authorized
    async def post(self, run_id: str) -> None:
        follower = await self.follower(run_id)
        tracked = await self.in_thread(follower.tracked)
        if tracked is None or follower.location.bring is not None:
            raise web.HTTPError(404, "the run has no MLflow run in a store on the Jupyter server's machine.")
        try:
            answer(self, await self.in_thread(self.mlflow_uis.address, tracked, follower.location))
        except MlflowUiFailed as error:
            raise web.HTTPError(409, str(error)) from None


class FilesHandler(_Handler):
    """`GET sgpu/runs/RUN/files`: the files in its work and checkpoint folders."""

    @web.authenticated
    @authorized
    async def get(self, run_id: str) -> None:
        follower = await self.follower(run_id)
        answer(self, await self.in_thread(list_files, follower.location))


class DownloadHandler(_Handler):
    """`GET sgpu/runs/RUN/files/PATH`: one of these files, to be saved by the browser."""

    @web.authenticated
    @authorized
    async def get(self, run_id: str, name: str) -> None:
        follower = await self.follower(run_id)
        with contextlib.ExitStack() as opened:
            file = await self.in_thread(opened.enter_context, opened_file(follower.location, name))
            size = os.fstat(file).st_size
            file_name = quote(os.path.basename(name), safe="")
            # never rendered by the browser: a file of a run may contain any HTML
            self.set_header("Content-Type", _DOWNLOADED)
            self.set_header("Content-Disposition", f"attachment; filename*=UTF-8''{file_name}")
            self.set_header("Content-Length", str(size))
            self.set_header("Cache-Control", "no-store")
            self.set_header("X-Content-Type-Options", "nosniff")
            # the browser may end the download
            with contextlib.suppress(StreamClosedError):
                await self._send(file, size)
                self.finish(set_content_type=_DOWNLOADED)

    async def _send(self, file: int, size: int) -> None:
        """Send the first `size` bytes of a file; it may grow meanwhile."""
        sent = 0
        while sent < size and (data := await in_thread(os.pread, file, min(_READ_BYTES, size - sent), sent)):
            sent += len(data)
            self.write(data)
            await self.flush()


_HANDLERS = {
    "": RunsHandler,
    "/([^/]+)/news": NewsHandler,
    "/([^/]+)/ask": AskHandler,
    "/([^/]+)/(outputs|displays)": OutputsHandler,
    "/([^/]+)/page": PageHandler,
    "/([^/]+)/mlflow": MlflowHandler,
    "/([^/]+)/files": FilesHandler,
    "/([^/]+)/files/(.+)": DownloadHandler,
}


# ---------------------------------------------------------------- the runs of a kernel


class OwnedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a kernel.

    Args:
        run_id: The run.
        cell: Its cell's id in the notebook, "" when the front end did not send one.
        state: The value of its `RunState`.
        final: It has ended.
        began: When it was submitted, seconds since the epoch.
        ended: When it ended; None while it runs, or when its end was not recorded.
        execution_count: Its cell's execution count.
        blocks: Its cell runs as long as the run does; False for a session, whose connecting cell has ended.
    """

    run_id: str
    cell: str
    state: str
    final: bool
    began: float
    ended: float | None
    execution_count: int | None
    blocks: bool


class OwnedRuns:
    """Finds a kernel's runs and caches their specs, which never change. Thread-safe.

    Args:
        settings: Settings, for the runs of this machine's pool.
        remote_pools: The runs in remote pools.
    """

    def __init__(self, settings: Settings, remote_pools: RemotePools) -> None:
        self._settings = settings
        self._remote_pools = remote_pools
        # replaced as a whole, never changed
        self._specs: dict[str, RunSpec] = {}

    def of_kernel(self, kernel: str) -> list[OwnedRun]:
        """Return a kernel's runs that are active or ended within the last hour, newest last.

        Raises:
            PoolError: The pool's ledger can't be read.
        """
        now = time.time()
        recent = [run for run in ledger.recent_runs(self._settings, _LOOKED_AT) if _matters(run, now)]
        found = [(run, self._spec(run.run_id)) for run in reversed(recent)]
        self._specs = {run.run_id: spec for run, spec in found if spec is not None}
        mine = [(spec, run.state, run.ended_at) for run, spec in found if spec and spec.owner.kernel == kernel]
        for sent in self._remote_pools.of_kernel(kernel):
            if sent.ended_at is None or now - sent.ended_at < RECENT_S:
                # a run without a reported state is assumed to be running
                mine.append((sent.spec, sent.state or RunState.RUNNING, sent.ended_at))
        return sorted((_owned(*each) for each in mine), key=lambda run: run.began)

    def _spec(self, run_id: str) -> RunSpec | None:
        return self._specs.get(run_id) or read_spec(self._settings.runs_path / check_id(run_id))


def _matters(run: RunSummary, now: float) -> bool:
    # the end of a run whose pool was killed is not recorded
    return not run.state.is_final or now - (run.ended_at or run.submitted_at) < RECENT_S


def _owned(spec: RunSpec, state: RunState, ended: float | None) -> OwnedRun:
    return OwnedRun(
        run_id=spec.run_id,
        cell=spec.owner.cell,
        state=str(state),
        final=state.is_final,
        began=spec.submitted_at,
        ended=ended,
        execution_count=spec.cell.execution_count,
        blocks=spec.kind is not RunKind.SESSION,
    )

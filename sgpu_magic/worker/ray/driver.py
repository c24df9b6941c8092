"""Ray in the driver, rank 0: connects to the cluster, waits for the last lines of tasks and actors, and disconnects.

Also refuses Ray Serve, since the run's cluster ends with its driver and can't be reached from outside. An exception
that user code raised in a Ray task or actor is extracted from Ray's error with its type, message and lines.
"""

# Ray's inner parts are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from sgpu_magic.errors import EnvironmentFailed, UsageError
from sgpu_magic.worker.cell.diagnosis import position_in_cell
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.process.patches import around_import
from sgpu_magic.worker.process.user_code import is_a
from sgpu_magic.worker.ray.ray_processes import written_in

# functions that start a Serve instance (ray/serve/api.py)
_STARTERS = ("run", "run_many", "start")
_REFUSAL = (
    "Ray Serve can't be started in a @ray_launch run (rank 0): the run's cluster ends with its driver, so it "
    "can't keep serving. Call the model in Ray tasks or actors of the run, and serve it from a permanent Ray cluster "
    "of your own."
)
_POLL_S = 0.03
# the wait ends after this time without a new line; Ray's log monitor looks every 0.1 s
_QUIET_S = 1.5
_SHUTDOWN_S = 10.0
_OURS = "sgpu_count"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+?)\s*$', re.MULTILINE)
# such as `ray::f() (pid=12, ip=10.0.0.1)`, with or without colours
_TASK = re.compile(r"ray::(?P<task>[\w.<>]+(?:\(\))?)\S*\s*\(pid=(?P<pid>\d+), ip=(?P<ip>[\d.:a-f]+)")
_NOT_A_NAME = re.compile(r"\W")


def refuse_serve() -> None:
    """Make the functions that start Ray Serve fail in this process. Its other names stay: libraries import them."""
    around_import(("ray.serve", "ray.serve.api"), _execute_guarded)


def _execute_guarded(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        execute(module)
    except ImportError as error:
        # Serve's own dependencies are missing, and installing them would not help; optional imports catch this too
        raise ImportError(_REFUSAL, name=error.name) from error
    for name in _STARTERS:
        if hasattr(module, name):
            setattr(module, name, _refuse)


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise UsageError(_REFUSAL)


class Lines:
    """Counts the lines that Ray's log monitors have sent to the driver.

    Args:
        count_remote_lines: Returns the number of lines written on the other nodes.

    Attributes:
        logs: This node's log directory, None until Ray is up.
    """

    def __init__(self, count_remote_lines: Callable[[], int]) -> None:
        self._count_remote_lines = count_remote_lines
        self._come = 0
        self._came_at = 0.0
        self.logs: Path | None = None

    def on_lines(self, batch: Any) -> None:
        """Count a batch of lines. Called in Ray's own thread."""
        if isinstance(batch, dict) and str(batch.get("pid", "")).isdigit():
            self._come += len(batch.get("lines", ()))
            self._came_at = time.monotonic()

    def wait(self) -> None:
        """Wait until all lines that workers have written have arrived, or none has arrived for 1.5 s."""
        if self.logs is None:
            return
        written = written_in(self.logs) + self._count_remote_lines()
        begin = time.monotonic()
        while self._come < written and time.monotonic() - max(begin, self._came_at) < _QUIET_S:
            time.sleep(_POLL_S)


class Driver:
    """Ray in the driver's process, from its import to the end of the cell.

    Args:
        lines: Counts the lines that have arrived.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._connected: Any = None

    def begin(self) -> None:
        """Import Ray, which takes half a second. If Ray is missing, the node's process reports it."""
        refuse_serve()
        with contextlib.suppress(ImportError):
            self._prepare(importlib.import_module("ray"))

    def connect(self) -> None:
        """Connect to the cluster that `RAY_ADDRESS` names, so that calling `ray.init()` is optional.

        Raises:
            EnvironmentFailed: The cluster can't be reached.
        """
        ray: Any = importlib.import_module("ray")
        if ray.is_initialized():
            # unpickling a value has connected already
            return
        # Ray logs the address, which the run's own remark already has
        log = logging.getLogger("ray._private.worker")
        log.disabled = True
        try:
            self._connected = ray.init()
        except (OSError, RuntimeError) as error:
            raise EnvironmentFailed(f"rank 0 can't connect to the run's Ray cluster: {error}") from error
        finally:
            log.disabled = False

    def end(self) -> None:
        """Wait for the last lines and disconnect, if the cell has not done so."""
        ray: Any = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        # a broken cluster may never answer
        leaving = threading.Thread(target=ray.shutdown, name="sgpu-ray-leave", daemon=True)
        leaving.start()
        leaving.join(_SHUTDOWN_S)

    def _prepare(self, ray: ModuleType) -> None:
        try:
            from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
        except ImportError:
            # another version keeps it elsewhere: then the last lines may be missing, as in plain Ray
            return
        dispatcher.add_handler(_OURS, self._lines.on_lines)
        shutdown: Callable[..., Any] = ray.shutdown
        init: Callable[..., Any] = ray.init

        @functools.wraps(shutdown)
        def wait_and_shut_down(*args: Any, **kwargs: Any) -> Any:
            if ray.is_initialized():
                self._lines.wait()
            return shutdown(*args, **kwargs)

        @functools.wraps(init)
        def init_once_more(*args: Any, **kwargs: Any) -> Any:
            """Let the user's first `ray.init()` succeed, as if the driver were not connected yet."""
            connected, self._connected = self._connected, None
            if connected is not None and ray.is_initialized():
                if not args and not kwargs.keys() - {"ignore_reinit_error"}:
                    return connected
                shutdown()
            return init(*args, **kwargs)

        # `setattr`: a type checker does not know these attributes of a module
        setattr(ray, "shutdown", wait_and_shut_down)  # noqa: B010
        setattr(ray, "init", init_once_more)  # noqa: B010


# ---------------------------------------------------------------- the user's error


def users_own(error: BaseException | None, shell: RankShell) -> BaseException | None:
    """Return the exception that user code raised if the driver's error is Ray's report of one, else the same error.

    The shown traceback is the task's, with the lines of the cells that it went through. A note says where the driver
    waited for the task.

    Args:
        error: The driver's exception, None if it raised nothing.
        shell: The rank's shell, which draws the new traceback.
    """
    exceptions: Any = sys.modules.get("ray.exceptions")
    if error is None or exceptions is None or not is_a(error, exceptions.RayTaskError):
        return error
    innermost: Any = error
    while isinstance(innermost.cause, exceptions.RayTaskError):
        innermost = innermost.cause
    own: object = innermost.cause
    if not isinstance(own, BaseException) or isinstance(own, exceptions.RayError):
        # it could not be pickled in the task, or is Ray's own
        return error
    # Ray's error is an instance of the user's exception type too, with the task's traceback as its text
    text = str(vars(innermost).get("traceback_str") or innermost)
    own.__cause__, own.__suppress_context__ = None, True
    own.__traceback__ = None
    failure = with_frames(own, _frames(text))
    failure.add_note(_note(text, error, shell))
    shell.failure = None
    shell.showtraceback((type(failure), failure, failure.__traceback__), running_compiled_code=True)
    return failure


def _frames(text: str) -> list[tuple[str, int, str]]:
    """Return the frames in a traceback's text without Ray's own, outermost first."""
    ray: Any = sys.modules["ray"]
    own = os.path.dirname(str(ray.__file__)) + os.sep
    found = [(entry["file"], int(entry["line"]), entry["name"]) for entry in _FRAME.finditer(text)]
    return [entry for entry in found if not entry[0].startswith((own, "python/ray/_raylet"))]


def with_frames(own: BaseException, frames: list[tuple[str, int, str]]) -> BaseException:
    """Give the error a traceback of these frames, by functions that raise it in those lines.

    Args:
        own: The user's exception, which is also returned.
        frames: File, line and function name of each frame, outermost first.
    """
    for file, line, name in reversed(frames):
        function = _NOT_A_NAME.sub("_", name.rpartition(".")[2]) or "task"
        first = _begin_of(file, line, function)
        source = "\n" * (first - 1) + f"def {function}():" + "\n" * (line - first) + " raise __sgpu_error__"
        namespace: dict[str, Any] = {"__name__": "__ray_task__", "__sgpu_error__": own}
        exec(compile(source, file, "exec"), namespace)
        made: Any = namespace[function]
        made.__code__ = made.__code__.replace(co_name=name.rpartition(".")[2], co_qualname=name)
        rest = own.__traceback__
        own.__traceback__ = None
        try:
            made()
        except BaseException as raised:  # noqa: BLE001  it is the error itself
            # without the first frame, which is this function's
            frame = raised.__traceback__.tb_next if raised.__traceback__ is not None else None
            if frame is not None:
                frame.tb_next = rest
            own.__traceback__ = frame
    return own


def _begin_of(file: str, line: int, function: str) -> int:
    """Return the line in which the function begins, where its displayed source starts, else the same line."""
    lines = linecache.getlines(file)
    begin = re.compile(rf"\s*(async\s+)?def\s+{re.escape(function)}\b")
    return next((number for number in range(min(line, len(lines)), 0, -1) if begin.match(lines[number - 1])), line)


def _note(text: str, error: BaseException, shell: RankShell) -> str:
    task = _TASK.search(text)
    where = f"in the Ray task {task['task']} (pid {task['pid']} on {task['ip']})" if task else "in a Ray task"
    line, _ = position_in_cell(error.__traceback__, shell)
    waited = f"; the driver waited for it in line {line} of the cell" if line else ""
    return f"raised {where}{waited}."

"""The cell of a run with its own Ray cluster: rank 0 is the driver, the other ranks hold their devices.

An exception that user code raised in a Ray task or actor is extracted from Ray's error with its type, message and
lines.
"""

# Ray's errors are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from sgpu_magic.errors import SgpuError
from sgpu_magic.wire.rank import Execute
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.run import PrivateRay
from sgpu_magic.worker.cell.asking import is_a
from sgpu_magic.worker.cell.cell_run import CellRun
from sgpu_magic.worker.cell.results import Reply
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.process import interrupts
from sgpu_magic.worker.process.helper import Order
from sgpu_magic.worker.process.rank_context import Standing
from sgpu_magic.worker.ray.cluster import Guest, Head, Member

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+?)\s*$', re.MULTILINE)
# such as `ray::f() (pid=12, ip=10.0.0.1)`, with or without colours
_TASK = re.compile(r"ray::(?P<task>[\w.<>]+(?:\(\))?)\S*\s*\(pid=(?P<pid>\d+), ip=(?P<ip>[\d.:a-f]+)")
_NOT_A_NAME = re.compile(r"\W")


class RayRun(CellRun):
    """Executes one `Execute` that has `ray`. The other arguments are those of `CellRun`.

    Args:
        ray: The order's `ray`.
    """

    def __init__(
        self, standing: Standing, message: Execute, order: Order, say: Callable[[Record], None], ray: PrivateRay
    ) -> None:
        super().__init__(standing, message, order, say)
        self._ray = ray
        self._member: Member | None = None

    def run(self) -> Reply:
        """Execute the order. Every error becomes a reply; Ray has stopped on this node when this returns."""
        try:
            return super().run() if self._rank == 0 else self._hold()
        finally:
            # an interrupt must leave nothing behind
            interrupts.refuse()
            if self._member is not None:
                self._member.end()

    def _prepare(self) -> None:
        self._take_place()
        self._member = head = Head(self._ray, self._message, self._shell, self._rank, self._say)
        head.begin()
        # unpickles the cell's variables while Ray starts
        self._take_names()
        head.joined()

    def _run_cell(self) -> tuple[BaseException | None, float]:
        error, seconds = super()._run_cell()
        return users_own(error, self._shell), seconds

    def _hold(self) -> Reply:
        """Hold the devices until the driver has finished."""
        begin = time.perf_counter()
        try:
            self._take_place()
            self._member = guest = Guest(self._ray, self._message, self._shell, self._rank, self._say)
            guest.hold()
        except (SgpuError, OSError, RuntimeError, ValueError) as error:
            self._shell.showtraceback((type(error), error, error.__traceback__))
            return self.failed(error)
        self.leave_payload()
        return self._finished(None, "", "", time.perf_counter() - begin)


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
    shown = with_frames(own, _frames(text))
    shown.add_note(_note(text, error, shell))
    shell.shown = None
    shell.showtraceback((type(shown), shown, shown.__traceback__), running_compiled_code=True)
    return shown


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
    cells = shell.compile._filename_map  # pyright: ignore[reportPrivateUsage]
    line = 0
    for frame, at in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename in cells:
            line = at
    waited = f"; the driver waited for it in line {line} of the cell" if line else ""
    return f"raised {where}{waited}."

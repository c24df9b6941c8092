"""The cell of a run with its own Ray cluster, in each rank: rank 0 drives, the others hold their devices.

What user code raised in a Ray task or actor is taken out of Ray's own error: its type, its message and its lines.
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
from sgpu_magic.wire.rank import Execute, PrivateRay
from sgpu_magic.wire.record import Record
from sgpu_magic.worker.cell.asking import is_a
from sgpu_magic.worker.cell.cell_run import CellRun
from sgpu_magic.worker.cell.results import Reply
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.process import interrupts
from sgpu_magic.worker.process.helper import Order
from sgpu_magic.worker.process.rank_context import Standing
from sgpu_magic.worker.ray.cluster import Guest, Head, Member

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+?)\s*$', re.MULTILINE)
# as `ray::f() (pid=12, ip=10.0.0.1)`, in colours or not
_TASK = re.compile(r"ray::(?P<task>[\w.<>]+(?:\(\))?)\S*\s*\(pid=(?P<pid>\d+), ip=(?P<ip>[\d.:a-f]+)")
_NOT_A_NAME = re.compile(r"\W")


class RayRun(CellRun):
    """Executes one `Execute` that has `ray`. Arguments as of `CellRun`.

    Args:
        ray: Of the order.
    """

    def __init__(
        self, standing: Standing, message: Execute, order: Order, say: Callable[[Record], None], ray: PrivateRay
    ) -> None:
        super().__init__(standing, message, order, say)
        self._ray = ray
        self._member: Member | None = None

    def run(self) -> Reply:
        """Do it all; every error becomes the reply. Ray is gone from this node when it is there."""
        try:
            return super().run() if self._rank == 0 else self._hold()
        finally:
            # an interrupt is not to leave anything behind
            interrupts.refuse()
            if self._member is not None:
                self._member.end()

    def _prepare(self) -> None:
        self._take_place()
        self._member = head = Head(self._ray, self._message, self._shell, self._rank, self._say)
        head.begin()
        # what the cell reads is unpickled while Ray starts
        self._take_names()
        head.joined()

    def _run_cell(self) -> tuple[BaseException | None, float]:
        error, seconds = super()._run_cell()
        return users_own(error, self._shell), seconds

    def _hold(self) -> Reply:
        """Hold the devices until the driver is done."""
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
    """Return what user code raised where the driver's error only tells of that, else the same error.

    The traceback that is shown is the task's, with the lines of the cells that it went through; a note says where the
    driver waited for it.

    Args:
        error: What the driver raised; None for nothing.
        shell: The rank's; its traceback is drawn anew.
    """
    exceptions: Any = sys.modules.get("ray.exceptions")
    if error is None or exceptions is None or not is_a(error, exceptions.RayTaskError):
        return error
    innermost: Any = error
    while isinstance(innermost.cause, exceptions.RayTaskError):
        innermost = innermost.cause
    own: object = innermost.cause
    if not isinstance(own, BaseException) or isinstance(own, exceptions.RayError):
        # it could not be pickled there, or is Ray's own
        return error
    # Ray makes the driver's error an instance of the own error's type too, whose text is the task's traceback
    text = str(vars(innermost).get("traceback_str") or innermost)
    own.__cause__, own.__suppress_context__ = None, True
    own.__traceback__ = None
    shown = with_frames(own, _frames(text))
    shown.add_note(_note(text, error, shell))
    shell.shown = None
    shell.showtraceback((type(shown), shown, shown.__traceback__), running_compiled_code=True)
    return shown


def _frames(text: str) -> list[tuple[str, int, str]]:
    """The frames that a traceback's text has, outermost first, but for Ray's own."""
    ray: Any = sys.modules["ray"]
    own = os.path.dirname(str(ray.__file__)) + os.sep
    found = [(entry["file"], int(entry["line"]), entry["name"]) for entry in _FRAME.finditer(text)]
    return [entry for entry in found if not entry[0].startswith((own, "python/ray/_raylet"))]


def with_frames(own: BaseException, frames: list[tuple[str, int, str]]) -> BaseException:
    """Give the error a traceback of these frames, outermost first: each is of a function that raises in its line."""
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
            # the first frame is this function's
            frame = raised.__traceback__.tb_next if raised.__traceback__ is not None else None
            if frame is not None:
                frame.tb_next = rest
            own.__traceback__ = frame
    return own


def _begin_of(file: str, line: int, function: str) -> int:
    """The line in which the function begins: from there its source is shown. The same line where it is not found."""
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

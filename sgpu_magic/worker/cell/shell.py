"""IPython in a rank: displays, the last expression and tracebacks go to the notebook instead of a terminal."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import inspect
import linecache
import re
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from sgpu_magic.worker.cell import asking, failures, widgets
from sgpu_magic.worker.cell.displays import RankDisplayPublisher, Report
from sgpu_magic.worker.cell.failures import Shown, WholeTexts
from sgpu_magic.worker.process import interrupts

_PLAIN = "text/plain"
# in `IPython.core`: what of it ends a cell when it shows a traceback; the rest shows one and means no end
_ENDING = ("IPython.core.interactiveshell", "IPython.core.magics.", "sgpu_magic.")
_NOT_ENDING = ("excepthook", "tb")
_EXIT = "An exception has occurred, use %tb to see the full traceback.\n"
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_LAST = ("last_exc", "last_type", "last_value", "last_traceback")


class CellEnded(BaseException):
    """Ends a cell in whose middle IPython has shown a traceback and would go on, as `%run` does.

    No `Exception`: the user's code around the magic does not see one in a notebook either.
    """


def _do_nothing() -> None:
    """Before the fork nobody waits for a cell."""


class RankDisplayHook(DisplayHook):
    """The last expression: its value travels in the result, its rich forms are displayed."""

    last_value: object = None
    last_text: str = ""
    source: str = ""

    @property
    def prompt_count(self) -> int:
        """The notebook's number of the cell: `Out[7]`. IPython takes one off where it keeps a history."""
        return self.shell.execution_count  # pyright: ignore[reportOptionalMemberAccess]

    def quiet(self) -> bool:
        """Whether the cell ends with a semicolon. IPython asks the history, which a rank has not."""
        return bool(self.semicolon_at_end_of_expression(self.source))

    def write_output_prompt(self) -> None:
        """The value's text stands in the run's result, not after a prompt of each rank."""

    def write_format_data(self, format_dict: Mapping[str, object], md_dict: Mapping[str, object] | None = None) -> None:
        self.last_text = str(format_dict.get(_PLAIN, ""))
        if set(format_dict) - {_PLAIN}:
            self.shell.display_pub.publish(format_dict, md_dict)  # pyright: ignore[reportOptionalMemberAccess]

    def fill_exec_result(self, result: Any) -> None:
        super().fill_exec_result(result)
        self.last_value = result

    def log_output(self, format_dict: Mapping[str, object]) -> None:
        """Without history there is nothing to log to."""

    def finish_displayhook(self) -> None:
        """No prompt, so no line to end after it."""


class RankShell(InteractiveShell):
    """The shell that a rank's cell runs in."""

    display_pub_class = Type(RankDisplayPublisher)
    displayhook_class = Type(RankDisplayHook)

    # the cell's failure, and where the cell was when it ended in the middle of a magic
    shown: Shown | None = None
    unwound: types.TracebackType | None = None
    whole = WholeTexts()
    # results of the cells that run, the outer ones first
    _running: list[Any] = []

    # called when the cell has raised, before its traceback is drawn
    report_raised: Callable[[], None] = staticmethod(_do_nothing)
    failed_at: float = 0.0
    released: bool = False
    is_first: bool = True

    def begin_cell(self, is_first: bool, whole: Path | None = None) -> None:
        """Forget what the last cell has left.

        Args:
            is_first: Of the ranks that take part this is the one that speaks for all.
            whole: The file for texts of a failure that are too long to show.
        """
        self.failed_at, self.shown, self.unwound = 0.0, None, None
        self.is_first = is_first
        self.whole = WholeTexts(whole)
        self._running.clear()

    def forget_failure(self) -> None:
        """Let go of the last cell's value, and of its error with all frames."""
        hook_of(self).last_value = None
        # it holds the value, or the error
        self.last_execution_result = None
        shown, self.shown, self.unwound = self.shown, None, None
        if shown is None:
            return
        failures.drop_tracebacks(shown.stand_in)
        failures.drop_tracebacks(shown.error)
        for name in _LAST:
            with contextlib.suppress(AttributeError):
                delattr(sys, name)
        self.InteractiveTB.tb = None
        self.SyntaxTB.last_syntax_error = None

    def _inspect(self, *args: Any, **kwargs: Any) -> Any:
        """`obj?` and its like: what one rank shows is enough."""
        if self.is_first:
            return super()._inspect(*args, **kwargs)  # pyright: ignore[reportUnknownVariableType]
        return None

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        self._running.append(result)
        try:
            with interrupts.raised():
                return await super().run_code(code_obj, result, async_=async_)
        finally:
            # a coroutine that was abandoned may end within a later cell
            if self._running and self._running[-1] is result:
                self._running.pop()

    def run_cell(self, *args: Any, **kwargs: Any) -> Any:
        """A cell within a cell, as of `%run` and `%%capture`, ends both when it fails."""
        # the callbacks around a cell print an interrupt, and the cell would go on
        with interrupts.held():
            result = super().run_cell(*args, **kwargs)
        if self._running and self.shown is not None:
            raise CellEnded
        return result

    def showtraceback(
        self,
        exc_tuple: tuple[type[BaseException], BaseException, Any] | None = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        """Show an exception: as the cell's failure where IPython ends something with it, else as output."""
        if widgets.is_hearing() and threading.current_thread() is threading.main_thread():
            # of a widget's callback: as in a notebook, the cell that runs goes on
            traceback.print_exc()
            return
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if error is None:
            error = getattr(sys, "last_value", None)
        if error is None:
            sys.stderr.write("No traceback available to show.\n")
            return
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        module = asking.text_of(caller.f_globals.get("__name__")) if caller is not None else ""
        self._show(
            error,
            ends=(module or "").startswith(_ENDING) and caller is not None and caller.f_code.co_name not in _NOT_ENDING,
            tb_offset=tb_offset,
            exception_only=exception_only,
            has_frames=running_compiled_code or not asking.is_a(error, SyntaxError),
        )

    def showsyntaxerror(self, filename: str | None = None, running_compiled_code: bool = False) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self._show(error, ends=True, has_frames=running_compiled_code)

    def _show(
        self,
        error: BaseException,
        *,
        ends: bool,
        tb_offset: int | None = None,
        exception_only: bool = False,
        has_frames: bool = True,
    ) -> None:
        """Note the time first: drawing a traceback takes up to 0.1 s, and the earliest failure is the one shown."""
        now = time.time()
        in_middle = any(result is None or result.error_in_exec is not error for result in self._running)
        if asking.is_a(error, CellEnded):
            self.unwound = asking.traceback_of(error)
        elif not (ends and asking.is_exit(error)):
            in_main_thread = threading.current_thread() is threading.main_thread()
            is_failure = ends and in_main_thread
            with asking.interruptible():
                failures.leave_own_frames_out(error)
                # to ask for its text may take long; only a RuntimeError's tells whether a peer was lost
                may_be_victim = self.released or asking.is_a(error, RuntimeError)
                if is_failure and not may_be_victim:
                    self.report_raised()
                shown = failures.look_at(error, self.whole)
                is_victim = self.released or failures.is_peer_lost(error, shown.message)
                if is_failure and may_be_victim and not is_victim:
                    self.report_raised()
                shown.lines = self._draw(shown, tb_offset, exception_only, has_frames, plainly=is_victim)
            if not is_failure:
                sys.stderr.write("\n".join(shown.lines) + "\n")
                return
            # the first failure is the cell's; code that goes on past the end of its cell only follows it
            if self.shown is None:
                self.failed_at, self.shown = now, shown
        if in_middle and self.shown is not None:
            raise CellEnded from None

    def _draw(
        self, shown: Shown, tb_offset: int | None, exception_only: bool, has_frames: bool, *, plainly: bool
    ) -> list[str]:
        """A rank that a peer's failure took down is told of in one line: to draw its traceback would only keep the
        culprit's waiting.
        """
        error, kind = shown.stand_in, type(shown.stand_in)
        entry = error.__traceback__
        if asking.is_a(shown.error, IPythonUsageError):
            sys.stderr.write(f"UsageError: {shown.message}\n")
            return []
        try:
            if plainly:
                return traceback.format_exception(error)
            if shown.has_group:
                return self._draw_group(error)
            if issubclass(kind, SyntaxError):
                elist: Any = traceback.extract_tb(entry) if has_frames else []
                drawn: Any = self.SyntaxTB.structured_traceback(kind, error, elist)
            elif exception_only:
                drawn = [_EXIT, *self.InteractiveTB.get_exception_only(kind, error)]
            else:
                drawn = shown.drawing
                if drawn is None:
                    drawn = self.InteractiveTB.structured_traceback(kind, error, entry, tb_offset=tb_offset)
            return [drawn] if isinstance(drawn, str) else [str(line) for line in drawn]
        except BaseException:  # noqa: BLE001  the sources on the way are the user's too, as a module's loader is
            return [f"{shown.type_name}: {shown.message}"]

    def _draw_group(self, error: BaseException) -> list[str]:
        """IPython can't: as Python itself does, without IPython's own frame and with the cells' names."""
        entry = error.__traceback__
        if entry is not None and entry.tb_next is not None:
            error = error.with_traceback(entry.tb_next)
        text = "".join(traceback.format_exception(error))
        return _FRAME.sub(self._named_by_cell, text).rstrip("\n").split("\n")

    def _named_by_cell(self, frame: re.Match[str]) -> str:
        name = self.compile.format_code_name(frame[1])
        return frame[0] if name is None else f"{name[0]} {name[1]}, line {frame[2]}"

    def enable_gui(self, gui: str | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A rank has no event loop for windows; inline figures need none."""

    def show_sources(self, entries: tuple[tuple[str, str, int | None], ...]) -> None:
        """Let tracebacks and `inspect.getsource` see the notebook cells whose functions came along."""
        for name, source, execution_count in entries:
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            if execution_count is not None:
                self.compile._filename_map[name] = execution_count  # pyright: ignore[reportPrivateUsage]


def hook_of(shell: RankShell) -> RankDisplayHook:
    """The shell's display hook, narrowed to ours."""
    hook = shell.displayhook
    if not isinstance(hook, RankDisplayHook):
        raise TypeError(f"the rank's display hook was replaced by {type(hook).__name__}")
    return hook


def create() -> RankShell:
    """Make the process's one shell: no history, no profile, no start-up files, no threads."""
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.autocall = 0
    config.InteractiveShell.banner1 = ""
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D")
    shell = RankShell.instance(config=config)
    # who has prompts has a person, and Lightning refuses to be one rank of many there
    del sys.ps1, sys.ps2, sys.ps3  # pyright: ignore[reportAttributeAccessIssue]
    shell.set_hook("show_in_pager", _show_page, 99)
    shell.colors = "neutral" if "neutral" in str(type(shell).colors.info()).lower() else "Neutral"
    return shell


def _show_page(shell: RankShell, data: object, start: int = 0, screen_lines: int = 0) -> None:
    """What IPython would show in a pager is displayed."""
    bundle = data if isinstance(data, dict) else {_PLAIN: str(data)}
    shell.display_pub.publish(bundle)


def report_to(shell: RankShell, report: Report, report_raised: Callable[[], None]) -> None:
    """After the fork: where displays go, and the word that a traceback is being drawn."""
    shell.report_raised = report_raised
    publisher = shell.display_pub
    if isinstance(publisher, RankDisplayPublisher):
        publisher.report = report

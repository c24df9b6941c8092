"""A rank's IPython shell, which runs cells and scripts: what it shows goes to the notebook instead of a terminal."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Generator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.compilerop import CachingCompiler
from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from traitlets import Type
from traitlets.config import Config

from sgpu_magic.wire.run import CellSource
from sgpu_magic.worker.cell import failures, widgets
from sgpu_magic.worker.cell.collective_errors import find_collective_error
from sgpu_magic.worker.cell.displays import RankDisplayHook, RankDisplayPublisher, hook_of
from sgpu_magic.worker.cell.event_loop import cell_loop
from sgpu_magic.worker.cell.failures import DescribedError, WholeTexts
from sgpu_magic.worker.cell.shell_commands import run_command
from sgpu_magic.worker.process import user_code

_PLAIN = "text/plain"
# modules of `IPython.core` in which a shown traceback ends the cell; other code shows one and goes on
_ENDING = ("IPython.core.interactiveshell", "IPython.core.magics.", "sgpu_magic.")
_NOT_ENDING = ("excepthook", "tb")
_EXIT = "An exception has occurred, use %tb to see the full traceback.\n"
# drawing takes up to 0.15 s on a busy machine
_RELEASE_PATIENCE_S = 0.15
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_LAST = ("last_exc", "last_type", "last_value", "last_traceback")


class CellEnded(BaseException):
    """Ends a cell in which IPython has shown a traceback and would continue, as `%run` does.

    Not an `Exception`: in a notebook, the code around the magic does not see an exception either.
    """


class Script(NamedTuple):
    """A running script.

    Args:
        file: Its path.
        source: Its text, as executed.
    """

    file: str
    source: str


class RankCompiler(CachingCompiler):
    """Names the code of a script by its file, and that of cells as in a notebook."""

    script: Script | None = None

    def is_script(self, source: str) -> bool:
        """Whether this is the script's text, which runs as it is: without IPython's syntax."""
        return self.script is not None and source == self.script.source

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        if self.script is not None and self.is_script(raw_code):
            return self.script.file
        return super().get_code_name(raw_code, transformed_code, number)

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        if self.script is not None and name == self.script.file:
            # named like any other file
            return None
        return super().format_code_name(name)


class RankShell(InteractiveShell):
    """The shell that a rank's cell runs in."""

    compiler_class = Type(RankCompiler)
    display_pub_class = Type(RankDisplayPublisher)
    displayhook_class = Type(RankDisplayHook)

    compile: RankCompiler
    # the cell's failure, and the traceback of the cell where it ended in the middle of a magic
    failure: DescribedError | None = None
    unwound: types.TracebackType | None = None
    whole = WholeTexts()
    # results of the running cells, outermost first
    _running: list[Any] = []

    # called when the cell has raised, before its traceback is drawn; does nothing before the fork
    report_raised: Callable[[], None] = staticmethod(lambda: None)
    failed_at: float = 0.0
    # set while the running cell's collectives are released by the agent, because a peer failed or the run ends
    released = threading.Event()
    is_first: bool = True
    # whether the running code has an event loop: notebook cells do, scripts and functions don't
    has_loop: bool = False

    def begin_cell(self, is_first: bool, whole: Path | None = None) -> None:
        """Reset the state of the last cell.

        Args:
            is_first: Whether this is the first of the ranks that run the cell; only it reports what is alike on all.
            whole: The file for texts of a failure that are too long to show.
        """
        self.failed_at, self.failure, self.unwound = 0.0, None, None
        self.is_first = is_first
        self.whole = WholeTexts(whole)
        self._running.clear()

    def transform_cell(self, raw_cell: str) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return raw_cell if self.compile.is_script(raw_cell) else super().transform_cell(raw_cell)

    def forget_failure(self) -> None:
        """Free the last cell's value, and its error with all frames."""
        hook_of(self).last_value = None
        # holds the value or the error
        self.last_execution_result = None
        failure, self.failure, self.unwound = self.failure, None, None
        if failure is None:
            return
        failures.drop_tracebacks(failure.stand_in)
        failures.drop_tracebacks(failure.error)
        for name in _LAST:
            with contextlib.suppress(AttributeError):
                delattr(sys, name)
        self.InteractiveTB.tb = None
        self.SyntaxTB.last_syntax_error = None

    def _inspect(self, *args: Any, **kwargs: Any) -> Any:
        """Show `obj?` and the like on one rank only."""
        return super()._inspect(*args, **kwargs) if self.is_first else None

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        self._running.append(result)
        try:
            loop = cell_loop.running() if self.has_loop and not async_ else contextlib.nullcontext()
            with user_code.interrupts_raised(), loop:
                return await super().run_code(code_obj, result, async_=async_)
        finally:
            # an abandoned coroutine may end within a later cell
            if self._running and self._running[-1] is result:
                self._running.pop()

    def run_cell(self, *args: Any, **kwargs: Any) -> Any:
        """Run a cell. A nested cell, as of `%run` and `%%capture`, ends the outer cell too when it fails."""
        # the callbacks around a cell print an interrupt and let the cell go on
        with user_code.interrupts_held():
            result = super().run_cell(*args, **kwargs)
        if self._running and self.failure is not None:
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
        """Show an exception: as the cell's failure if the caller in IPython ends the cell with it, else as output."""
        if widgets.comms.hears and threading.current_thread() is threading.main_thread():
            # raised in a widget's callback: as in a notebook, the running cell goes on
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
        module = user_code.text_of(caller.f_globals.get("__name__")) if caller is not None else ""
        self._show(
            error,
            ends=(module or "").startswith(_ENDING) and caller is not None and caller.f_code.co_name not in _NOT_ENDING,
            tb_offset=tb_offset,
            exception_only=exception_only,
            has_frames=running_compiled_code or not user_code.is_a(error, SyntaxError),
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
        """Record the time, then draw: drawing takes up to 0.1 s, and the run shows the earliest failure."""
        now = time.time()
        in_middle = any(result is None or result.error_in_exec is not error for result in self._running)
        if user_code.is_a(error, CellEnded):
            self.unwound = user_code.traceback_of(error)
        elif not (ends and user_code.is_exit(error)):
            is_failure = ends and threading.current_thread() is threading.main_thread()
            with user_code.interruptible():
                failures.drop_own_frames(error)
                # what counts once the rank is released counts here
                if is_failure and find_collective_error(error, is_released=True) is not None:
                    # a peer that failed first draws its traceback now, and this rank is released once that is reported
                    self.released.wait(_RELEASE_PATIENCE_S)
                is_victim = self.released.is_set()
                if is_failure:
                    self.report_raised()
                # getting the exception's text may take long
                described = failures.inspect_error(error, self.whole)
                described.lines = self._draw(described, tb_offset, exception_only, has_frames, plainly=is_victim)
            if not is_failure:
                sys.stderr.write("\n".join(described.lines) + "\n")
                return
            # the first failure is the cell's; later ones come from code that goes on after it
            if self.failure is None:
                self.failed_at, self.failure = now, described
        if in_middle and self.failure is not None:
            raise CellEnded from None

    def _draw(
        self, described: DescribedError, tb_offset: int | None, exception_only: bool, has_frames: bool, *, plainly: bool
    ) -> list[str]:
        """Draw the traceback, without IPython's formatting (`plainly`) for a rank that failed because a peer did.

        Formatting it would only delay the traceback of the rank that failed first.
        """
        error, kind = described.stand_in, type(described.stand_in)
        entry = error.__traceback__
        if user_code.is_a(described.error, IPythonUsageError):
            sys.stderr.write(f"UsageError: {described.message}\n")
            return []
        try:
            if plainly:
                return traceback.format_exception(error)
            if described.has_group:
                return self._draw_group(error)
            if issubclass(kind, SyntaxError):
                elist: Any = traceback.extract_tb(failures.without_runner(entry)) if has_frames else []
                lines: Any = self.SyntaxTB.structured_traceback(kind, error, elist)
            elif exception_only:
                about = [_EXIT] if self.compile.script is None else []
                lines = [*about, *self.InteractiveTB.get_exception_only(kind, error)]
            else:
                lines = described.drawing
                if lines is None:
                    with _in_known_files(entry):
                        lines = self.InteractiveTB.structured_traceback(kind, error, entry, tb_offset=tb_offset)
            return [lines] if isinstance(lines, str) else [str(line) for line in lines]
        except BaseException:  # noqa: BLE001  drawing runs the user's code too, such as a module's loader
            return [f"{described.type_name}: {described.message}"]

    def _draw_group(self, error: BaseException) -> list[str]:
        """Draw a group as Python does, without IPython's frame and with the cells' names. IPython can't draw one."""
        entry = error.__traceback__
        if entry is not None and entry.tb_next is not None:
            error = error.with_traceback(entry.tb_next)
        text = "".join(traceback.format_exception(error))
        return _FRAME.sub(self._named_by_cell, text).rstrip("\n").split("\n")

    def _named_by_cell(self, frame: re.Match[str]) -> str:
        name = self.compile.format_code_name(frame[1])
        return frame[0] if name is None else f"{name[0]} {name[1]}, line {frame[2]}"

    def system_piped(self, cmd: str) -> None:
        """Run a `!command` whose stdin is empty. Otherwise as IPython's."""
        if cmd.rstrip().endswith("&"):
            raise OSError("Background processes not supported.")
        # stored, and not returned: a returned value would be displayed
        status = self.user_ns["_exit_code"] = run_command(self.var_expand(cmd, depth=1))
        if status and getattr(self, "system_raise_on_error", False):
            raise subprocess.CalledProcessError(status, cmd)

    system = system_piped

    def enable_gui(self, gui: str | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: a rank has no event loop for windows, and inline figures need none."""

    def show_sources(self, entries: tuple[tuple[str, str, int | None], ...]) -> None:
        """Make the notebook cells of shipped functions visible to tracebacks and `inspect.getsource`.

        Args:
            entries: File name, source and execution count (None if unknown) of each cell.
        """
        for name, source, execution_count in entries:
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            if execution_count is not None:
                self.compile._filename_map[name] = execution_count  # pyright: ignore[reportPrivateUsage]


def create() -> RankShell:
    """Create the process's shell, without history, profile, start-up files and threads."""
    config = Config(HistoryManager=Config(enabled=False, hist_file=":memory:"))
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D")
    with _folders() as folders:
        shell = RankShell.instance(config=config, **folders)
    # prompts mark an interactive session, in which Lightning refuses to run as one rank of many
    del sys.ps1, sys.ps2, sys.ps3  # pyright: ignore[reportAttributeAccessIssue]
    shell.set_hook("show_in_pager", _show_page, 99)
    shell.colors = "neutral" if "neutral" in str(type(shell).colors.info()).lower() else "Neutral"
    return shell


@contextlib.contextmanager
def _folders() -> Generator[dict[str, Any]]:
    """Yield IPython's folders as arguments of a shell: the user's, or temporary ones, since none is made for a rank."""
    own = Path(os.environ.get("IPYTHONDIR") or os.path.expanduser("~/.ipython"))
    if (own / "profile_default").is_dir():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="sgpu-ipython-") as folder:
        yield {"ipython_dir": folder, "profile_dir": ProfileDir(location=folder)}


def enter_script(cell: CellSource, namespace: MutableMapping[str, Any]) -> None:
    """Set `sys.argv` and `__file__` for a script.

    Args:
        cell: The script.
        namespace: The namespace of `__main__`.
    """
    sys.argv[:] = cell.arguments
    namespace["__file__"] = cell.file
    namespace["__cached__"] = None
    if cell.module:
        # relative imports are resolved from there
        namespace["__package__"] = cell.module.rpartition(".")[0]


@contextlib.contextmanager
def _in_known_files(entry: types.TracebackType | None) -> Generator[None]:
    """Let `inspect` find the module of cells' frames at once while a traceback is formatted.

    It looks for their files, which do not exist, in all modules. In a forked rank that copies the page of each module
    object, which takes 45 ms after an import of torch.
    """
    names = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(entry)}
    known: dict[str, str] = inspect.modulesbyfile  # pyright: ignore[reportAttributeAccessIssue]
    added = {name for name in names if name in linecache.cache and not os.path.exists(name)} - known.keys()
    # a relative name has no absolute form once the working directory was removed
    with contextlib.suppress(OSError):
        added |= {os.path.normcase(os.path.abspath(name)) for name in added} - known.keys()
    known.update(dict.fromkeys(added, "__main__"))
    try:
        yield
    finally:
        for name in added:
            known.pop(name, None)


def _show_page(shell: RankShell, data: object, start: int = 0, screen_lines: int = 0) -> None:
    """Display what IPython would show in a pager."""
    bundle = data if isinstance(data, dict) else {_PLAIN: str(data)}
    shell.display_pub.publish(bundle)


def warm_up(shell: RankShell) -> None:
    """Run a cell and format a traceback once in the zygote: the first ones take 10 and 140 ms."""
    for source in ("1 + 1", "def _f():\n    raise ValueError('warm')\n_f()"):
        shell.run_cell(source, store_history=False)
    shell.reset(new_session=True)
    # `reset` removes these too, and multiprocessing reads them
    shell.user_ns.update(dict.fromkeys(("__spec__", "__loader__", "__package__", "__doc__")))
    shell.begin_cell(is_first=True)
    # multiprocessing reads it before it starts a child that is not forked
    shell.user_module.__spec__ = None

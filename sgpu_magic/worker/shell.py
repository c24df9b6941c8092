"""IPython in a rank: displays, the last expression and tracebacks go to the notebook instead of a terminal."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import errno
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from sgpu_magic.protocol.rank_messages import Cleared, Displayed
from sgpu_magic.protocol.record import Record
from sgpu_magic.protocol.records import CellSource
from sgpu_magic.worker import output

Report = Callable[[Record], None]
_PLAIN = "text/plain"
# torch 2.6 to 2.13
_PEER_LOST = re.compile(
    r"connectFullMesh failed|"
    r"Connection (closed|reset) by peer|Broken pipe|gloo/transport|remote process exited|NCCL communicator was aborted"
    r"|process group .*(aborted|shut down)",
    re.IGNORECASE,
)


def _discard(message: Record) -> None:
    """Before the fork there is nobody to report to."""


def _do_nothing() -> None:
    """Before the fork nobody waits for a cell."""


class RankDisplayPublisher(DisplayPublisher):
    """`display()` and `clear_output()` of a rank."""

    report: Report = staticmethod(_discard)

    def publish(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        data: Mapping[str, object],
        metadata: Mapping[str, object] | None = None,
        *,
        transient: Mapping[str, str] | None = None,
        update: bool = False,
        **kwargs: object,
    ) -> None:
        output.flush()
        display_id = (transient or {}).get("display_id", "")
        self.report(
            Displayed(bundle=_to_json(data), metadata=_to_json(metadata or {}), display_id=display_id, update=update)
        )

    def clear_output(self, wait: bool = False) -> None:
        output.flush()
        self.report(Cleared(wait=wait))


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
    traceback_lines: list[str] = []

    # called when the cell has raised, before its traceback is drawn
    report_raised: Callable[[], None] = staticmethod(_do_nothing)
    failed_at: float = 0.0
    released: bool = False
    is_first: bool = True

    def begin_cell(self, is_first: bool) -> None:
        """Forget what the last cell has left.

        Args:
            is_first: Of the ranks that take part this is the one that speaks for all.
        """
        self.failed_at, self.traceback_lines = 0.0, []
        self.is_first = is_first

    def _inspect(self, *args: Any, **kwargs: Any) -> Any:
        """`obj?` and its like: what one rank shows is enough."""
        if self.is_first:
            return super()._inspect(*args, **kwargs)  # pyright: ignore[reportUnknownVariableType]
        return None

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        """Note the time first: drawing a traceback takes up to 0.1 s, and the earliest failure is the one shown.

        A rank that a peer's failure took down is told of in one line: its traceback is not drawn at all, which
        would only keep the culprit's waiting.
        """
        self.failed_at = time.time()
        error = sys.exc_info()[1]
        _leave_own_frames_out(error)
        in_main_thread = threading.current_thread() is threading.main_thread()
        # a rank that was released from a collective is interrupted next; its error must be told all the same
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
        try:
            # IPython prints groups itself, past every hook
            plain = self.released or isinstance(error, BaseExceptionGroup)
            if error is not None and (plain or is_peer_lost(error)):
                self.traceback_lines = traceback.format_exception(error)
            else:
                if in_main_thread:
                    self.report_raised()
                super().showtraceback(*args, **kwargs)
        finally:
            if in_main_thread:
                signal.signal(signal.SIGINT, previous)

    def _showtraceback(self, etype: object, evalue: object, stb: list[str] | str) -> None:
        self.traceback_lines = [stb] if isinstance(stb, str) else list(stb)

    def enable_gui(self, gui: str | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A rank has no event loop for windows; inline figures need none."""

    def show_sources(self, entries: tuple[tuple[str, str, int | None], ...]) -> None:
        """Let tracebacks and `inspect.getsource` see the notebook cells whose functions came along."""
        for name, source, execution_count in entries:
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            if execution_count is not None:
                self.compile._filename_map[name] = execution_count  # pyright: ignore[reportPrivateUsage]


def _leave_own_frames_out(error: BaseException | None) -> None:
    """End the traceback where the cell called into this package, as `input()` in a rank does.

    A function's call begins with the function's own frame: those before it are no code of the user's.
    """
    last, before, entry = None, None, error.__traceback__ if error is not None else None
    while entry is not None:
        module = entry.tb_frame.f_globals.get("__name__", "")
        if module == "sgpu_magic.payload.call" and before is not None and entry.tb_next is not None:
            before.tb_next = entry.tb_next
        before = last
        if module.startswith("sgpu_magic.worker.interaction"):
            if last is not None:
                last.tb_next = None
            return
        last, entry = entry, entry.tb_next


def is_peer_lost(error: BaseException) -> bool:
    """Whether this is how the loss of a peer shows in gloo and NCCL: always a consequence, never the cause."""
    return isinstance(error, RuntimeError) and (_PEER_LOST.search(str(error)) is not None or _is_revoked(error))


def _is_revoked(error: BaseException) -> bool:
    """`rendezvous.revoke_store` has freed the rank."""
    return type(error).__name__ == "DistStoreError" and str(error) == os.strerror(errno.ENXIO)


def message_of(error: BaseException) -> str:
    """The error's own text, where that says something."""
    if _is_revoked(error):
        return "released while it waited for a peer that did not come"
    return str(error)


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


def source_of(cell: CellSource) -> str:
    """The cell with its magic's line as a comment, so that line numbers are the editor's.

    A body that begins with a cell magic of its own must stay in front to be recognised.
    """
    if not cell.magic_line or cell.body.lstrip().startswith("%%"):
        return cell.body
    return f"# {cell.magic_line}\n{cell.body}"


def _to_json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, default=_encode_binary).encode()


def _encode_binary(value: object) -> str:
    import base64

    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    return str(value)

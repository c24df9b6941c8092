"""A rank's displays and last expressions, which go to the notebook or to the enclosing `Output` widget.

In a `with output:` block on a rank, prints and displays go to the widget, as `interact` needs it. In a notebook the
front end does this by the parent message of each print; a rank's output has no such message.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import base64
import io
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Literal

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.wire.base import Record
from sgpu_magic.wire.rank import Cleared, Displayed
from sgpu_magic.worker.process import terminal

Report = Callable[[Record], None]
_PLAIN = "text/plain"
_MOST_CHARS = 100_000
_MOST_OUTPUTS = 200


def _discard(message: Record) -> None:
    """Discard displays before the fork."""


class RankDisplayPublisher(DisplayPublisher):
    """`display()` and `clear_output()` on a rank."""

    report: Report = staticmethod(_discard)
    # entered `with output:` blocks, innermost last
    captures: ClassVar[list[Any]] = []

    def publish(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        data: Mapping[str, object],
        metadata: Mapping[str, object] | None = None,
        *,
        transient: Mapping[str, str] | None = None,
        update: bool = False,
        **kwargs: object,
    ) -> None:
        if self.captures:
            self.captures[-1].display(data, metadata or {})
            return
        terminal.flush()
        display_id = (transient or {}).get("display_id", "")
        self.report(
            Displayed(bundle=_to_json(data), metadata=_to_json(metadata or {}), display_id=display_id, update=update)
        )

    def clear_output(self, wait: bool = False) -> None:
        if self.captures:
            self.captures[-1].clear(wait)
            return
        terminal.flush()
        self.report(Cleared(wait=wait))


def _to_json(value: Mapping[str, object]) -> bytes:
    # surrogates become "?": JSON is UTF-8
    return json.dumps(value, default=encode_binary, ensure_ascii=False).encode("utf-8", "replace")


def encode_binary(value: object) -> str:
    """Encode a value that JSON can't represent as text: bytes in base64, anything else by `str`."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    return str(value)


class RankDisplayHook(DisplayHook):
    """Keeps the last expression's value for the result, and displays its rich representations."""

    last_value: object = None
    last_text: str = ""
    is_displayed: bool = False
    source: str = ""

    @property
    def prompt_count(self) -> int:
        """The cell's number in the notebook, as in `Out[7]`. IPython subtracts one where it keeps a history."""
        return self.shell.execution_count  # pyright: ignore[reportOptionalMemberAccess]

    def quiet(self) -> bool:
        """Whether the cell ends with a semicolon. IPython looks in the history, which a rank doesn't have."""
        return bool(self.semicolon_at_end_of_expression(self.source))

    def write_output_prompt(self) -> None:
        """Print no prompt: the value's text is shown in the run's result."""

    def write_format_data(self, format_dict: Mapping[str, object], md_dict: Mapping[str, object] | None = None) -> None:
        self.last_text = str(format_dict.get(_PLAIN, ""))
        self.is_displayed = bool(set(format_dict) - {_PLAIN})
        if self.is_displayed:
            self.shell.display_pub.publish(format_dict, md_dict)  # pyright: ignore[reportOptionalMemberAccess]

    def fill_exec_result(self, result: Any) -> None:
        super().fill_exec_result(result)
        self.last_value = result

    def log_output(self, format_dict: Mapping[str, object]) -> None:
        """Do nothing: there is no history to log to."""

    def finish_displayhook(self) -> None:
        """Do nothing: without a prompt there is no line to end."""


def hook_of(shell: InteractiveShell) -> RankDisplayHook:
    """Return the shell's display hook as a `RankDisplayHook`.

    Raises:
        TypeError: User code has replaced the hook.
    """
    hook = shell.displayhook
    if not isinstance(hook, RankDisplayHook):
        raise TypeError(f"the rank's display hook was replaced by {type(hook).__name__}")
    return hook


# ---------------------------------------------------------------- `with output:`


class _Captured:
    """The output of one block.

    Args:
        widget: The `Output` widget.
    """

    def __init__(self, widget: Any) -> None:
        self._widget = widget
        self._clears = False
        self.streams = (sys.stdout, sys.stderr)

    def write(self, name: str, text: str) -> None:
        outputs = self._outputs()
        if outputs and outputs[-1].get("name") == name:
            text = outputs.pop()["text"] + text
        self._show([*outputs, {"output_type": "stream", "name": name, "text": text[-_MOST_CHARS:]}])

    def display(self, data: Mapping[str, object], metadata: Mapping[str, object]) -> None:
        output = {"output_type": "display_data", "data": dict(data), "metadata": dict(metadata)}
        self._show([*self._outputs(), output])

    def fail(self, error: BaseException) -> None:
        lines = traceback.format_exception(error)
        output = {"output_type": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": lines}
        self._show([*self._outputs(), output])

    def clear(self, wait: bool) -> None:
        self._clears = wait
        if not wait:
            self._show([])

    def _outputs(self) -> list[dict[str, Any]]:
        if self._clears:
            self._clears = False
            return []
        return list(self._widget.outputs)

    def _show(self, outputs: list[dict[str, Any]]) -> None:
        self._widget.outputs = tuple(outputs[-_MOST_OUTPUTS:])


class _Stream(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` within a block."""

    def __init__(self, captured: _Captured, name: str) -> None:
        self._captured = captured
        self._name = name

    def writable(self) -> bool:
        return True

    def write(self, s: str, /) -> int:
        self._captured.write(self._name, s)
        return len(s)


def _enter(self: Any) -> Any:
    captured = _Captured(self)
    RankDisplayPublisher.captures.append(captured)
    sys.stdout, sys.stderr = _Stream(captured, "stdout"), _Stream(captured, "stderr")
    return self


def _exit(
    self: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> Literal[True] | None:
    captured = RankDisplayPublisher.captures.pop()
    sys.stdout, sys.stderr = captured.streams
    if not isinstance(error, Exception):
        return None
    # as in a notebook: the shell shows the error, and execution continues after the block
    captured.fail(error)
    return True


def teach(output_class: Any) -> None:
    """Make `ipywidgets.Output` capture output in this process.

    Args:
        output_class: `ipywidgets.Output`.
    """
    if output_class.__enter__ is not _enter:
        output_class.__enter__, output_class.__exit__ = _enter, _exit

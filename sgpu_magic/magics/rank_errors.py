"""Errors of ranks that IPython itself renders."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

# IPython prints groups with `traceback.print_exc`, and syntax errors with the kernel's frames above them; other errors
# render themselves
_DRAWN_BY_IPYTHON = (BaseExceptionGroup, SyntaxError)


def draw_rank_errors(shell: Any) -> None:
    """Display groups and syntax errors of ranks with the ranks' tracebacks, unless the user has set a handler."""
    if not shell.custom_exceptions:
        shell.set_custom_exc(_DRAWN_BY_IPYTHON, _draw_rank_error)


def draw_no_rank_errors(shell: Any) -> None:
    """Undo `draw_rank_errors`."""
    if shell.custom_exceptions == _DRAWN_BY_IPYTHON:
        shell.set_custom_exc((), None)


def _draw_rank_error(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> list[str]:
    draw: Callable[[], list[str]] | None = getattr(error, "_render_traceback_", None)
    if draw is None:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)
    else:
        shell._showtraceback(kind, error, draw())
    return []

"""After a cell: nothing of its failure holds memory any more.

A traceback holds its frames, those hold their variables, and those the tensors that the next cell needs the room of.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import inspect
import sys
import types

from sgpu_magic.worker.shell import RankShell, hook_of

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LAST = ("last_exc", "last_type", "last_value", "last_traceback")


def forget(shell: RankShell, error: BaseException | None) -> None:
    """Let go of the last cell's value, and of its error with all frames."""
    hook_of(shell).last_value = None
    # it holds the value, or the error
    shell.last_execution_result = None
    shell.traceback_lines = []
    if error is None:
        return
    _drop_tracebacks(error)
    for name in _LAST:
        with contextlib.suppress(AttributeError):
            delattr(sys, name)
    shell.InteractiveTB.tb = None
    shell.SyntaxTB.last_syntax_error = None


def _drop_tracebacks(error: BaseException) -> None:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        _clear_frames(one.__traceback__)
        one.__traceback__ = None
        waiting += [further for further in (one.__cause__, one.__context__) if further is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _clear_frames(entry: types.TracebackType | None) -> None:
    """Empty the frames: what drew the traceback still holds them, in cycles that Python collects at some time.

    To clear a generator's frame would end the generator, which the user's code may still hold.
    """
    while entry is not None:
        if not entry.tb_frame.f_code.co_flags & _GENERATORS:
            # it still runs: one of those that lead to the cell
            with contextlib.suppress(RuntimeError):
                entry.tb_frame.clear()
                if sys.version_info < (3, 13):
                    # asked for again, the copy of the variables that was made for the drawing is emptied too
                    _ = entry.tb_frame.f_locals
        entry = entry.tb_next

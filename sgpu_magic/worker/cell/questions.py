"""Answers about a rank's namespace between cells: completion, inspection, names."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Generator
from types import FrameType, TracebackType

from IPython.core.completer import provisionalcompleter
from IPython.utils.tokenutil import token_at_cursor

from sgpu_magic.wire.run import Match, RankAnswer, RankQuestion
from sgpu_magic.worker.cell.results import names_set
from sgpu_magic.worker.cell.shell import RankShell

_LIMIT_S = 0.1
_MOST_MATCHES = 500


class _TooLong(BaseException):
    """The time limit is exceeded. Not an `Exception`, so that no `except Exception` catches it."""


def warm_up(shell: RankShell) -> None:
    """Answer one question of each kind in the zygote, so that ranks are fast from the start."""
    for what, code in (("complete", "pri"), ("inspect", "print")):
        answer(shell, RankQuestion(rank=0, what=what, code=code, cursor=len(code)))


def answer(shell: RankShell, question: RankQuestion) -> RankAnswer:
    """Answer a question. If the user's objects raise or take too long, the answer's `problem` says so."""
    with _quiet():
        try:
            with _limited(_LIMIT_S):
                return _answer(shell, question)
        except _TooLong:
            return RankAnswer(problem=f"the lookup took longer than {_LIMIT_S:g} s")
        except Exception as error:  # noqa: BLE001  the user's `__dir__` and `__repr__` run here
            return RankAnswer(problem=f"{type(error).__name__}: {error}")


def _answer(shell: RankShell, question: RankQuestion) -> RankAnswer:
    match question.what:
        case "complete":
            return _complete(shell, question)
        case "inspect":
            return _inspect(shell, question)
        case "names":
            return RankAnswer(names=tuple(names_set(shell)))
        case other:
            return RankAnswer(problem=f"a rank can't answer `{other}`")


def _complete(shell: RankShell, question: RankQuestion) -> RankAnswer:
    completer = shell.Completer
    # jedi would read the sources of all imported modules, with no time limit
    completer.use_jedi = False
    matches: list[Match] = []
    start = end = question.cursor
    with provisionalcompleter():
        for found in completer.completions(question.code, question.cursor):
            if not matches:
                start, end = found.start, found.end
            if (found.start, found.end) == (start, end):
                kind = "" if found.type in (None, "<unknown>") else found.type
                matches.append(Match(found.text, kind))
            if len(matches) == _MOST_MATCHES:
                break
    return RankAnswer(matches=tuple(matches), start=start, end=end)


def _inspect(shell: RankShell, question: RankQuestion) -> RankAnswer:
    name = token_at_cursor(question.code, question.cursor)
    if not name:
        return RankAnswer()
    try:
        bundle = shell.object_inspect_mime(name, detail_level=question.detail)
    except KeyError:
        return RankAnswer()
    return RankAnswer(bundle=json.dumps(bundle, default=str).encode())


@contextlib.contextmanager
def _limited(seconds: float) -> Generator[None]:
    """Raise `_TooLong` in the block after `seconds`. A pending alarm of the user's is delayed by the block's time."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise _TooLong

    previous = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Hide the errors of matchers, which IPython's completer would print although no cell runs."""

    def unseen(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        pass

    previous, sys.excepthook = sys.excepthook, unseen
    try:
        yield
    finally:
        sys.excepthook = previous

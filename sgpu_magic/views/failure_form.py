"""The first failure of a run as lines that say what they are, the cell's own first; the static HTML and the live view
draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from sgpu_magic.views import ansi
from sgpu_magic.views.failure import cell_excerpt, death_sentence, last_part, traceback_body
from sgpu_magic.views.text import culprits_last_words, ending_stacks, failure_sentence
from sgpu_magic.views.view import RunView
from sgpu_magic.wire.records import Failure
from sgpu_magic.wire.states import FailureKind

LineKind = Literal["title", "code", "culprit", "error", "text"]


class FormLine(NamedTuple):
    """One line, without colours; `kind` as in `live.picture.FailureLine`."""

    text: str
    kind: LineKind


class FailureForm(NamedTuple):
    """What is always shown, and the whole traceback when it is longer than that, else nothing."""

    lines: list[FormLine]
    whole: list[FormLine]


def failure_form(view: RunView, failure: Failure, most_chars: int, most_whole_chars: int) -> FailureForm:
    """Return how a failure is told.

    Args:
        view: The run.
        failure: Its root cause, or while it is still stopping what a rank has told.
        most_chars: Of the lines that are always shown, in each of their parts.
        most_whole_chars: Of the whole traceback.
    """
    # what the cell raises shows the traceback once more: then one line says it
    told_again = view.error_follows and view.is_final
    whole: list[str] = []
    if failure.kind is FailureKind.USER_CODE:
        name = last_part(failure.type_name) or "error"
        where = [f"on rank {failure.rank}" if failure.rank is not None else "", failure.host]
        lines = [_line(f"{name} {' · '.join(filter(None, where))}".rstrip(), "title")]
        excerpt, left_out = ([], False) if told_again else cell_excerpt(failure)
        lines += _traceback(excerpt, most_chars)
        if not excerpt and failure.message:
            lines += [_line(line, "error") for line in cut_lines(failure.message.split("\n"), most_chars)]
        whole = traceback_body(failure) if left_out else []
    else:
        sentence = failure_sentence(view) if view.is_final else death_sentence(failure, view.ranks)
        title, *rest = cut_lines([*sentence.split("\n"), *culprits_last_words(view)], most_chars)
        lines = [_line(title, "title"), *(_line(line, "text") for line in rest)]
        if not told_again:
            lines += _traceback(traceback_body(failure), most_chars)
    lines += [_line(line, "text") for line in cut_lines(ending_stacks(view), most_chars)]
    return FailureForm(lines, _traceback(whole, most_whole_chars))


def cut_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the beginning and the end of `lines`, together at most about `most` characters."""
    if sum(map(len, lines)) + len(lines) <= most:
        return list(lines)
    joined = "\n".join(lines)
    return [*joined[: most // 2].split("\n"), "...", *joined[-most // 2 :].split("\n")]


def _traceback(body: list[str], most: int) -> list[FormLine]:
    return [_line(line, _kind(ansi.plain(line))) for line in cut_lines(body, most)]


def _kind(line: str) -> LineKind:
    if line.startswith("--"):
        return "culprit"
    name, colon, _ = line.partition(":")
    if colon and name and name[0].isalpha() and name.replace(".", "").replace("_", "").isalnum():
        return "error"
    return "code"


def _line(text: str, kind: LineKind) -> FormLine:
    return FormLine(ansi.plain(text), kind)

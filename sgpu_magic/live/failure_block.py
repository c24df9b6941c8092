"""The first failure of a run, the cell's own lines first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sgpu_magic.live.messages import FailureBlock, FailureLine
from sgpu_magic.protocol.records import Failure
from sgpu_magic.protocol.states import FailureKind, RunState
from sgpu_magic.render import ansi
from sgpu_magic.render.failure import cell_excerpt, death_sentence, last_part, traceback_body
from sgpu_magic.render.text import culprits_last_words, ending_stacks, failure_sentence
from sgpu_magic.render.view import RunView

_MAX_EXCERPT_CHARS = 8_000
_MAX_WHOLE_CHARS = 16_000
_MAX_LINE_CHARS = 1_000

Kind = Literal["title", "code", "culprit", "error", "text"]


def first_failure(view: RunView) -> Failure | None:
    """Return the root cause; while the run is still stopping, the first failure that a rank has told."""
    if view.is_final:
        return view.failure if view.state is not RunState.SUCCEEDED else None
    told = list(view.rank_failures.values())
    return next((failure for failure in told if not failure.is_consequence), told[0] if told else None)


def failure_block(view: RunView, failure: Failure | None) -> FailureBlock | None:
    """Return how a failure is drawn, None without one.

    Args:
        view: The run.
        failure: Its `first_failure`.
    """
    if failure is None:
        return None
    whole: list[str] = []
    lines: list[FailureLine]
    if failure.kind is FailureKind.USER_CODE:
        name = last_part(failure.type_name) or "error"
        where = [f"on rank {failure.rank}" if failure.rank is not None else "", failure.host]
        lines = [_line(f"{name} {' · '.join(filter(None, where))}".rstrip(), "title")]
        # what the cell raises shows the traceback once more: then one line says it
        excerpt, left_out = ([], False) if view.error_follows and view.is_final else cell_excerpt(failure)
        lines += _traceback(excerpt, _MAX_EXCERPT_CHARS)
        if not excerpt and failure.message:
            lines += [_line(line, "error") for line in cut_lines(failure.message.split("\n"), _MAX_EXCERPT_CHARS)]
        whole = traceback_body(failure) if left_out else []
    else:
        sentence = failure_sentence(view) if view.is_final else death_sentence(failure, view.ranks)
        title, *rest = cut_lines([*sentence.split("\n"), *culprits_last_words(view)], _MAX_EXCERPT_CHARS)
        lines = [_line(title, "title"), *(_line(line, "text") for line in rest)]
        if not (view.error_follows and view.is_final):
            lines += _traceback(traceback_body(failure), _MAX_EXCERPT_CHARS)
    lines += [_line(line, "text") for line in cut_lines(ending_stacks(view), _MAX_EXCERPT_CHARS)]
    return FailureBlock(rank=failure.rank, lines=tuple(lines), whole=tuple(_traceback(whole, _MAX_WHOLE_CHARS)))


def cut_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the beginning and the end of `lines`, together at most about `most` characters."""
    if sum(map(len, lines)) + len(lines) <= most:
        return list(lines)
    joined = "\n".join(lines)
    return [*joined[: most // 2].split("\n"), "...", *joined[-most // 2 :].split("\n")]


def _traceback(body: list[str], most: int) -> list[FailureLine]:
    return [_line(line, _kind(ansi.plain(line))) for line in cut_lines(body, most)]


def _kind(line: str) -> Kind:
    if line.startswith("--"):
        return "culprit"
    name, colon, _ = line.partition(":")
    if colon and name and name[0].isalpha() and name.replace(".", "").replace("_", "").isalnum():
        return "error"
    return "code"


def _line(text: str, kind: Kind) -> FailureLine:
    return FailureLine(text=ansi.plain(text)[:_MAX_LINE_CHARS], kind=kind)

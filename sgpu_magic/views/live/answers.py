"""Replies to requests of the view."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from heapq import merge
from typing import TypeVar

import msgspec

from sgpu_magic.errors import SgpuError
from sgpu_magic.formatting import clipped, format_ranks
from sgpu_magic.views import ansi
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.feed import Feed
from sgpu_magic.views.live.log_index import Piece
from sgpu_magic.views.live.log_reader import LogReader
from sgpu_magic.views.live.log_streams import is_stderr_text
from sgpu_magic.views.live.messages import (
    MAX_LINES,
    MAX_LOG_BYTES,
    MAX_MATCHES,
    Answer,
    AskCancel,
    AskEndSession,
    AskFind,
    AskHello,
    AskLines,
    AskLog,
    AskStacks,
    FindAnswer,
    LineRow,
    LinesAnswer,
    LogAnswer,
    Question,
    Refusal,
    TextAnswer,
    json_bytes,
)

_MAX_JSON_BYTES = 60_000
_MAX_SOUGHT_CHARS = 1000
_MAX_TEXT_CHARS = 4000
_MAX_LOG_LINES = 5000
T = TypeVar("T")


class Answers(msgspec.Struct, frozen=True):
    """Answers requests about one run. Thread-safe, also while another thread applies events.

    State that events change is read through the feed, under its lock; the reader has a separate lock for its index.
    Only constant attributes of the view are used.

    Args:
        view: The run.
        feed: Its feed.
        reader: Its logs.
        cancel: Cancels the run and returns a sentence about it.
        end_session: Ends a session, given its run id.
        stacks: Returns the stacks of the ranks as lines.
    """

    view: RunView
    feed: Feed
    reader: LogReader
    cancel: Callable[[], str]
    end_session: Callable[[str], None]
    stacks: Callable[[], Sequence[str]]

    def answer(self, question: Question) -> Answer:
        """Return the reply, or a `Refusal` with the reason; it is smaller than 64 kB."""
        try:
            return self._answer(question)
        except SgpuError as error:
            text = f"{error}"
        except OSError as error:
            text = f"the log can't be read: {error.strerror or error}. {self._where()}"
        return Refusal(n=question.n, text=_cut(text))

    def _answer(self, question: Question) -> Answer:
        rank = question.rank if isinstance(question, AskLines | AskFind | AskLog) else None
        ranks, world_size = self.view.rank_numbers, self.view.ranks
        if rank is not None and rank not in ranks:
            has = f"ranks 0 to {world_size - 1}" if len(ranks) == world_size else format_ranks(ranks)
            has = f"only {format_ranks(ranks)}" if len(ranks) == 1 else has
            return Refusal(n=question.n, text=f"run {self.view.short_id} has {has}, not {rank}.")
        match question:
            case AskHello(n=n):
                return self.feed.hello(n)
            case AskLines():
                return self._lines(question)
            case AskFind():
                return self._find(question)
            case AskLog():
                return self._log(question)
            case AskCancel(n=n):
                return TextAnswer(n=n, lines=(_cut(self.cancel()),))
            case AskEndSession(n=n, session=run_id):
                session = next((each for each in self.feed.own_sessions if each.run_id == run_id), None)
                if session is None:
                    return Refusal(n=n, text=f"run {self.view.short_id} does not wait for that session any more.")
                self.end_session(run_id)
                return TextAnswer(n=n, lines=(f"{session.name} is being ended",))
            case AskStacks(n=n):
                return TextAnswer(n=n, lines=_bounded(self.stacks()))

    def _lines(self, ask: AskLines) -> Answer:
        totals = self.feed.totals
        total = sum(totals) if ask.rank is None else totals[ask.rank]
        count = min(ask.count, MAX_LINES, total - ask.first)
        if not 0 <= ask.first <= total:
            has = f"rank {ask.rank} has" if ask.rank is not None else "there are"
            text = f"line {ask.first:,} is not in the log: {has} {total:,} so far. {self._where()}"
            return Refusal(n=ask.n, text=text)
        with closing(self._rows(ask.first, count, ask.rank)) as found:
            rows = _fitting(found, _MAX_JSON_BYTES)
        if count > 0 and not rows:
            return Refusal(n=ask.n, text=self._missing(ask.first, ask.rank))
        return LinesAnswer(n=ask.n, first=ask.first, rows=tuple(rows), total=total)

    def _find(self, ask: AskFind) -> Answer:
        if not ask.text or len(ask.text) > _MAX_SOUGHT_CHARS:
            return Refusal(n=ask.n, text=f"the text to search for must have 1 to {_MAX_SOUGHT_CHARS:,} characters.")
        totals = self.feed.totals
        ranks = range(len(totals)) if ask.rank is None else (ask.rank,)
        found = {rank: self.reader.find(rank, ask.text, totals[rank], MAX_MATCHES) for rank in ranks}
        every = [numbers for numbers, _ in found.values()]
        if ask.rank is None:
            every = [self.feed.numbers_of(rank, numbers) for rank, (numbers, _) in found.items()]
        total = sum(count for _, count in found.values())
        return FindAnswer(n=ask.n, matches=tuple(merge(*every))[-MAX_MATCHES:], total=total)

    def _log(self, ask: AskLog) -> Answer:
        if ask.offset < 0:
            return Refusal(n=ask.n, text=f"a log starts at offset 0, not at {ask.offset:,}.")
        if ask.rank is None:
            return self._log_of_all(ask)
        if ask.offset == 0 and self.feed.totals[ask.rank] and not self.reader.exists(ask.rank):
            return Refusal(n=ask.n, text=self._missing(0, ask.rank))
        size = MAX_LOG_BYTES
        text, following = self.reader.piece(ask.rank, ask.offset, size)
        # in JSON every control character of a log takes six bytes
        while json_bytes(text) > _MAX_JSON_BYTES:
            size = size * 2 // 3
            text, following = self.reader.piece(ask.rank, ask.offset, size)
        return LogAnswer(n=ask.n, text=text, next_offset=following)

    def _log_of_all(self, ask: AskLog) -> Answer:
        """Return lines of all ranks in order of arrival; the offset is the number of a line."""
        total = sum(self.feed.totals)
        with closing(self._rows(ask.offset, min(_MAX_LOG_LINES, total - ask.offset), None)) as found:
            pieces = _fitting((f"[{rank}] {text}\n" for rank, _, text, _ in found), MAX_LOG_BYTES)
        if ask.offset < total and not pieces:
            return Refusal(n=ask.n, text=self._missing(ask.offset, None))
        following = ask.offset + len(pieces)
        return LogAnswer(n=ask.n, text="".join(pieces), next_offset=following if following < total else None)

    def _rows(self, first: int, count: int, rank: int | None) -> Generator[LineRow]:
        """Yield lines with their rank and number, up to the first that is missing in its log."""
        if count <= 0:
            return
        pieces = self.feed.locate(first, count) if rank is None else [Piece(rank, first, count)]
        # a rank's lines are consecutive in its log, so one reader per rank is enough
        with ExitStack() as opened:
            readers: dict[int, Iterator[str]] = {}
            for piece in pieces:
                if piece.rank not in readers:
                    lines = self.reader.lines_from(piece.rank, piece.first)
                    readers[piece.rank] = opened.enter_context(closing(lines))
                for number in range(piece.first, piece.first + piece.lines):
                    text = next(readers[piece.rank], None)
                    if text is None:
                        return
                    is_marked = self.feed.is_stderr(piece.rank, number) and is_stderr_text(text)
                    yield piece.rank, number, text, is_marked

    def _missing(self, first: int, rank: int | None) -> str:
        if rank is None:
            rank, first, _ = self.feed.locate(first, 1)[0]
        path = self.reader.path(rank)
        if not self.reader.exists(rank):
            return f"the log of rank {rank} is gone: {path}. {self._where()}"
        return f"line {first:,} of rank {rank} is not in its log {path}, which ends before it. {self._where()}"

    def _where(self) -> str:
        return f"`sgpu logs {self.view.short_id}` shows what there is."


def _fitting(items: Iterable[T], most: int) -> list[T]:
    """Return the first items whose JSON takes at most `most` bytes in total."""
    kept: list[T] = []
    for item in items:
        most -= json_bytes(item) + 1
        if most < 0:
            break
        kept.append(item)
    return kept


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    kept = _fitting(map(_cut, lines), _MAX_JSON_BYTES)
    left_out = len(lines) - len(kept)
    return (*kept, f"... {left_out:,} more lines") if left_out else tuple(kept)


def _cut(text: str) -> str:
    return clipped(ansi.plain(text), _MAX_TEXT_CHARS)

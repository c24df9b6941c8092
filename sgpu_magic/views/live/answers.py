"""A front end's question -> its answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from heapq import merge

from sgpu_magic.errors import SgpuError
from sgpu_magic.views import ansi
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.feed import Feed
from sgpu_magic.views.live.log_index import Piece
from sgpu_magic.views.live.log_reader import LogReader
from sgpu_magic.views.live.messages import (
    MAX_LINES,
    MAX_LOG_BYTES,
    MAX_MATCHES,
    Answer,
    AskCancel,
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
from sgpu_magic.views.units import format_ranks

_MAX_JSON_BYTES = 60_000
_MAX_SOUGHT_CHARS = 1000
_MAX_LOG_LINES = 5000


class Answers:
    """Answers questions about one run, in any thread: beside the one that applies events, several at once.

    What events change is read through the feed, whose lock it is; the reader has its own for its index. Of the view
    only what never changes is used.

    Args:
        view: The run.
        feed: Its feed.
        reader: Its logs.
        cancel: Stops the run and returns what to say.
        stacks: Asks the ranks where they are and returns what to say, a line each.
    """

    def __init__(
        self,
        view: RunView,
        feed: Feed,
        reader: LogReader,
        cancel: Callable[[], str],
        stacks: Callable[[], Sequence[str]],
    ) -> None:
        self._short_id = view.short_id
        self._ranks = view.rank_numbers
        self._world_size = view.ranks
        self._feed = feed
        self._reader = reader
        self._cancel = cancel
        self._stacks = stacks

    def answer(self, question: Question) -> Answer:
        """Return the answer, a `Refusal` with its reason where there is none; it is smaller than 64 kB."""
        try:
            return self._answer(question)
        except SgpuError as error:
            return Refusal(n=question.n, text=_cut(f"{error}"))
        except OSError as error:
            return Refusal(
                n=question.n, text=_cut(f"the log can't be read: {error.strerror or error}. {self._where()}")
            )

    def _answer(self, question: Question) -> Answer:
        rank = question.rank if isinstance(question, AskLines | AskFind | AskLog) else None
        if rank is not None and rank not in self._ranks:
            has = format_ranks(self._ranks)
            if len(self._ranks) == self._world_size > 1:
                has = f"ranks 0 to {self._world_size - 1}"
            elif len(self._ranks) == 1:
                has = f"only {has}"
            return Refusal(n=question.n, text=f"run {self._short_id} has {has}, not {rank}.")
        match question:
            case AskHello(n=n):
                return self._feed.hello(n)
            case AskLines():
                return self._lines(question)
            case AskFind():
                return self._find(question)
            case AskLog():
                return self._log(question)
            case AskCancel(n=n):
                return TextAnswer(n=n, lines=(_cut(self._cancel()),))
            case AskStacks(n=n):
                return TextAnswer(n=n, lines=_bounded(self._stacks()))

    def _lines(self, ask: AskLines) -> Answer:
        totals = self._feed.totals
        total = sum(totals) if ask.rank is None else totals[ask.rank]
        count = min(ask.count, MAX_LINES, total - ask.first)
        if ask.first < 0 or ask.first > total:
            has = f"rank {ask.rank} has" if ask.rank is not None else "there are"
            text = f"line {ask.first:,} is not in the log: {has} {total:,} so far. {self._where()}"
            return Refusal(n=ask.n, text=text)
        rows: list[LineRow] = []
        size = 0
        with closing(self._rows(ask.first, count, ask.rank)) as found:
            for row in found:
                size += json_bytes(row) + 1
                if size > _MAX_JSON_BYTES:
                    break
                rows.append(row)
        if count > 0 and not rows:
            return Refusal(n=ask.n, text=self._gone(ask.first, ask.rank))
        return LinesAnswer(n=ask.n, first=ask.first, rows=tuple(rows), total=total)

    def _find(self, ask: AskFind) -> Answer:
        if not ask.text or len(ask.text) > _MAX_SOUGHT_CHARS:
            return Refusal(n=ask.n, text=f"what to look for is a text of 1 to {_MAX_SOUGHT_CHARS:,} characters.")
        totals = self._feed.totals
        every: list[list[int]] = []
        total = 0
        for rank in range(len(totals)) if ask.rank is None else (ask.rank,):
            found = self._reader.find(rank, ask.text, totals[rank], MAX_MATCHES)
            every.append(self._feed.numbers_of(rank, found.numbers) if ask.rank is None else found.numbers)
            total += found.total
        return FindAnswer(n=ask.n, matches=tuple(merge(*every))[-MAX_MATCHES:], total=total)

    def _log(self, ask: AskLog) -> Answer:
        if ask.offset < 0:
            return Refusal(n=ask.n, text=f"a log begins at 0, not at {ask.offset:,}.")
        if ask.rank is None:
            return self._log_of_all(ask)
        if ask.offset == 0 and self._feed.totals[ask.rank] and not self._reader.exists(ask.rank):
            return Refusal(n=ask.n, text=self._gone(0, ask.rank))
        size = MAX_LOG_BYTES
        while True:
            text, following = self._reader.piece(ask.rank, ask.offset, size)
            # every control character of a log takes six bytes
            if json_bytes(text) <= _MAX_JSON_BYTES:
                return LogAnswer(n=ask.n, text=text, next_offset=following)
            size = size * 2 // 3

    def _log_of_all(self, ask: AskLog) -> Answer:
        """Return lines of all ranks in order of arrival; the offset is the number of a line."""
        total = sum(self._feed.totals)
        pieces: list[str] = []
        size = 0
        with closing(self._rows(ask.offset, min(_MAX_LOG_LINES, total - ask.offset), None)) as found:
            for rank, _, text in found:
                line = f"[{rank}] {text}\n"
                size += json_bytes(line)
                if size > MAX_LOG_BYTES:
                    break
                pieces.append(line)
        following = ask.offset + len(pieces)
        if ask.offset < total and not pieces:
            return Refusal(n=ask.n, text=self._gone(ask.offset, None))
        return LogAnswer(n=ask.n, text="".join(pieces), next_offset=following if following < total else None)

    def _rows(self, first: int, count: int, rank: int | None) -> Generator[LineRow]:
        """Yield lines with their rank and number, until one is not in its log."""
        if count <= 0:
            return
        pieces = self._feed.locate(first, count) if rank is None else [Piece(rank, first, count)]
        # the lines of a rank follow each other in its log, whoever wrote between them
        with ExitStack() as opened:
            readers: dict[int, Iterator[str]] = {}
            for piece in pieces:
                if piece.rank not in readers:
                    lines = self._reader.lines_from(piece.rank, piece.first)
                    readers[piece.rank] = opened.enter_context(closing(lines))
                for number in range(piece.first, piece.first + piece.lines):
                    text = next(readers[piece.rank], None)
                    if text is None:
                        return
                    yield piece.rank, number, text

    def _gone(self, first: int, rank: int | None) -> str:
        if rank is None:
            piece = next(iter(self._feed.locate(first, 1)))
            rank, first = piece.rank, piece.first
        path = self._reader.path(rank)
        if not self._reader.exists(rank):
            return f"the log of rank {rank} is gone: {path}. {self._where()}"
        return f"line {first:,} of rank {rank} is not in its log {path}, which ends before it. {self._where()}"

    def _where(self) -> str:
        return f"`sgpu logs {self._short_id}` shows what there is."


def _bounded(lines: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    size = 0
    for line in lines:
        size += json_bytes(cut := _cut(line)) + 1
        if size > _MAX_JSON_BYTES:
            return (*kept, f"... {len(lines) - len(kept):,} more lines")
        kept.append(cut)
    return tuple(kept)


def _cut(text: str) -> str:
    text = ansi.plain(text)
    return text if len(text) <= 4000 else f"{text[:4000]} ..."

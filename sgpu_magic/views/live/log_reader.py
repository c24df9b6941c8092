"""Reads any lines of a run's logs as views show them, using an index of the line number at every 64 kB."""

from __future__ import annotations

import codecs
import os
import re
import threading
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from sgpu_magic.views import ansi
from sgpu_magic.views.live.messages import json_bytes
from sgpu_magic.views.output import MAX_LINE_CHARS, collapse

MAX_RAW_CHARS = 1 << 18
"""A raw line longer than this, without what `\\r` has overwritten, is available from its log only."""

MAX_JSON_BYTES = 40_000
"""Maximum size of one line as JSON."""
# shorter lines can't exceed that, as a character takes at most four bytes
_SURELY_SMALL_CHARS = MAX_JSON_BYTES // 4
_STEP_BYTES = 1 << 16
_FIND_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20
_MOST_CHAR_BYTES = 4
_CONTINUATIONS = bytes(range(0x80, 0xC0))

# as in `collapse` and `ansi.plain`, but never across lines
_REWRITTEN = re.compile(rb"^[^\n]*\r+(?=[^\r\n])", re.MULTILINE)
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?)")
_CONTROLS = bytes([*range(9), *range(11, 32), 127])


def line_text(raw: str) -> str:
    """Return a raw line of a log as a terminal shows it: colours stay, other escape sequences are removed."""
    text = collapse(raw).rstrip("\b")
    return ansi.colours_only(text) if len(text) <= _SURELY_SMALL_CHARS else cut_line(text, len(text))


def cut_line(text: str, length: int) -> str:
    """Return the beginning of a long line and how much is left out.

    Args:
        text: The line, at least its first `MAX_LINE_CHARS` characters.
        length: Number of its characters.
    """
    keep = min(MAX_LINE_CHARS, len(text))
    while True:
        line = ansi.colours_only(text[:keep])
        if keep < length:
            line += f" ... {length - keep:,} more characters of this line in the log"
        if json_bytes(line) <= MAX_JSON_BYTES:
            return line
        keep = keep * 3 // 4


def last_rewrite(raw: str) -> str:
    """Return the part of an unfinished line that may still be visible, however the line continues."""
    return raw[raw.rstrip("\r").rfind("\r") + 1 :] if "\r" in raw else raw


class LogReader:
    """Reads the logs in a run's directory, which may not exist yet and may grow.

    Thread-safe: the index has a lock. Files are open only while they are read.

    Args:
        directory: The run's directory.
        bring: Fetches new data of a remote log; None if the directory is the run's own.
    """

    def __init__(self, directory: Path, bring: Callable[[str], None] | None = None) -> None:
        self.directory = directory
        self._bring = bring
        self._lock = threading.Lock()
        self._indexes: dict[int, _Index] = {}

    def path(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.log"

    def exists(self, rank: int) -> bool:
        with self._open_log(rank) as file:
            return file is not None

    def lines_from(self, rank: int, first: int) -> Generator[str]:
        """Yield the lines from number `first` on, as views show them, including a last one without a newline.

        Close the generator if you do not exhaust it.
        """
        with self._open_log(rank) as file:
            if file is None:
                return
            with self._lock:
                begin = self._index(rank, file).line_start(file, first)
            if begin is not None:
                yield from _lines_at(file, begin)

    def find(self, rank: int, text: str, lines: int, most: int) -> tuple[list[int], int]:
        """Find a text, ignoring case, in the visible part of the lines.

        Args:
            rank: The rank whose log to search.
            text: The text to find.
            lines: Number of lines to search, from the first.
            most: Maximum number of line numbers to return.

        Returns:
            The numbers of the last lines that contain it, ascending, and the number of all.
        """
        found: deque[int] = deque(maxlen=most)
        total = at = 0
        with self._open_log(rank) as file:
            for chunk in _whole_lines(file) if file is not None else ():
                if at >= lines:
                    break
                numbers = [at + index for index in _matches(chunk, text.lower()) if at + index < lines]
                found.extend(numbers)
                total += len(numbers)
                at += chunk.count(b"\n") + (not chunk.endswith(b"\n"))
        return list(found), total

    def piece(self, rank: int, offset: int, size: int) -> tuple[str, int | None]:
        """Return at most `size` bytes of the raw log, and the offset of the next piece, None at the log's end."""
        with self._open_log(rank) as file:
            if file is None:
                return "", None
            data = os.pread(file, size + _MOST_CHAR_BYTES, offset)
        if len(data) <= size:
            return data.decode("utf-8", "replace"), None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data[:size])
        # a character that is cut by the end of the piece belongs to the next piece
        return text, offset + size - len(decoder.getstate()[0])

    @contextmanager
    def _open_log(self, rank: int) -> Generator[int | None]:
        if self._bring is not None:
            self._bring(self.path(rank).name)
        try:
            file = os.open(self.path(rank), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        try:
            yield file
        finally:
            os.close(file)

    def _index(self, rank: int, file: int) -> _Index:
        status, index = os.fstat(file), self._indexes.get(rank)
        identity = (status.st_dev, status.st_ino)
        if index is None or index.identity != identity or status.st_size < index.size:
            # the file was replaced or truncated, so the index is invalid
            index = self._indexes[rank] = _Index(identity)
        return index


class _Index:
    """The number of lines that end before every 64 kB of a log."""

    def __init__(self, identity: tuple[int, int]) -> None:
        # the file's device and inode
        self.identity = identity
        self.size = 0
        self._lines = 0
        # newlines before each step
        self._before = array("Q")

    def line_start(self, file: int, line: int) -> int | None:
        """Return the offset of a line, None when the log has no such line; a last line without newline counts."""
        self._extend(file, line)
        if line == 0:
            return 0
        step = bisect_left(self._before, line) - 1
        data = os.pread(file, _STEP_BYTES, step * _STEP_BYTES)
        missing = line - self._before[step]
        parts = data.split(b"\n", missing)
        if len(parts) <= missing:
            return None
        start = step * _STEP_BYTES + len(data) - len(parts[-1])
        return start if os.pread(file, 1, start) else None

    def _extend(self, file: int, line: int) -> None:
        while self._lines < line:
            # the last step may have been incomplete when it was read
            step = self.size // _STEP_BYTES
            if step == len(self._before):
                self._before.append(self._lines)
            data = os.pread(file, _STEP_BYTES, step * _STEP_BYTES)
            self._lines = self._before[step] + data.count(b"\n")
            before, self.size = self.size, step * _STEP_BYTES + len(data)
            if self.size == before or len(data) < _STEP_BYTES:
                return


def _lines_at(file: int, at: int) -> Iterator[str]:
    """Yield the lines from an offset on; for a line that is too long for memory only the visible part."""
    rest = b""
    while data := os.pread(file, _STEP_BYTES, at):
        at += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line_text(line.decode("utf-8", "replace"))
        if len(rest) > _MAX_LINE_BYTES:
            text, at = _long_line(file, at - len(rest))
            yield text
            rest = b""
    if rest:
        yield line_text(rest.decode("utf-8", "replace"))


def _long_line(file: int, begin: int) -> tuple[str, int]:
    """Return the line at `begin` as views show it, and the offset of the next one."""
    seen = end = begin
    returned = False
    while data := os.pread(file, _STEP_BYTES, end):
        part, newline, _ = data.partition(b"\n")
        if returned and not part.startswith(b"\r") and part:
            seen = end
        seen = max(seen, end + part.rstrip(b"\r").rfind(b"\r") + 1) if b"\r" in part.rstrip(b"\r") else seen
        returned = part.endswith(b"\r") or (returned and not part)
        end += len(part)
        if newline:
            break
    else:
        newline = b""
    if end - seen <= _MAX_LINE_BYTES:
        text = line_text(os.pread(file, end - seen, seen).decode("utf-8", "replace"))
    else:
        head = os.pread(file, MAX_LINE_CHARS * _MOST_CHAR_BYTES, seen).decode("utf-8", "replace")
        text = cut_line(head, _characters(file, seen, end))
    return text, end + len(newline)


def _characters(file: int, begin: int, end: int) -> int:
    count = 0
    while data := os.pread(file, min(_FIND_BYTES, end - begin), begin):
        count += len(data.translate(None, _CONTINUATIONS))
        begin += len(data)
    return count


def _whole_lines(file: int) -> Iterator[bytes]:
    """Yield a log in pieces that end with a newline, except possibly the last."""
    rest = b""
    at = 0
    while data := os.pread(file, _FIND_BYTES, at):
        at += len(data)
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
            rest = data[end:]
        else:
            # only the beginning of a line without an end is shown
            rest = _REWRITTEN.sub(b"", rest + data)[:_MAX_LINE_BYTES]
    if rest:
        yield rest


def _matches(piece: bytes, wanted: str) -> list[int]:
    """Return which lines of a piece contain `wanted`, a text in lower case."""
    if b"\r" in piece:
        piece = _REWRITTEN.sub(b"", piece)
    if b"\x1b" in piece:
        piece = _SEQUENCE.sub(b"", piece)
    lowered = piece.translate(None, _CONTROLS).decode("utf-8", "replace").lower()
    # most pieces have no match
    if wanted not in lowered:
        return []
    return [index for index, line in enumerate(lowered.split("\n")) if wanted in line]

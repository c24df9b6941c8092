"""`sgpu logs`: the output of a run, read from its directory and followed while it grows."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from sgpu_magic.cli.json_records import LogLine, encode_line
from sgpu_magic.cli.main import CommandParser, add_json, note, rank
from sgpu_magic.client.run_files import FilesOfRun, RemoteRunFiles, files_of
from sgpu_magic.config import load_settings
from sgpu_magic.errors import RunFileUnknown, UsageError
from sgpu_magic.views import ansi
from sgpu_magic.wire.base import short
from sgpu_magic.wire.pool_status import RunSummary

_LOG_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,4})\.log")
_READ_BYTES = 1 << 18
# longer lines are written in pieces of this length, which bounds memory
_LONGEST_LINE_CHARS = 1 << 20
_POLL_S = 0.1

LineForm = Callable[[str], str]
LineForms = Callable[[int], LineForm]
"""Returns the form of a rank's lines."""


def show(options: argparse.Namespace) -> int:
    """Write the logs of one or all ranks of a run. With several ranks each line is prefixed with its rank.

    Raises:
        UsageError: There is no such run, or it has no such rank.
    """
    with files_of(load_settings(), options.run) as files:
        _show(files, options.rank, options.follow, sys.stdout, as_json=options.json)
    return 0


def _show(files: FilesOfRun, rank: int | None, follow: bool, out: TextIO, *, as_json: bool) -> None:
    run_id, row = files.run_id, files.row()
    if isinstance(files, RemoteRunFiles):
        # raises for another user's run; a run without a directory has not started yet
        with contextlib.suppress(RunFileUnknown):
            files.list()
    ranks = row.ranks if row is not None else _ranks_with_logs(files)
    if rank is not None and not 0 <= rank < ranks:
        has = f"ranks 0 to {ranks - 1}" if ranks > 1 else "only rank 0"
        if not ranks:
            has = "no rank that has started"
        raise UsageError(f"run {short(run_id)} has {has}, not {rank}.")
    wanted = range(ranks) if rank is None else [rank]
    line_form = _json_lines(run_id) if as_json else _text_lines(out, several=len(wanted) > 1)
    logs = [RankLog(files.directory / f"rank-{at}.log", line_form(at), files.follow) for at in wanted]
    try:
        row = _follow(files, logs, out) if follow else row
        for log in logs:
            # `_follow` has already copied all but an unfinished last line
            while not follow and log.copy_to(out):
                pass
            log.finish(out)
        out.flush()
    finally:
        for log in logs:
            log.close()
    if not any(log.exists for log in logs):
        note(_why_none(run_id, row))
    elif follow and row is not None:
        note(f"run {short(run_id)} {row.state.value}" + (f": {row.failure}" if row.failure else ""))


def _text_lines(out: TextIO, *, several: bool) -> LineForms:
    """Return the form of lines for people: several ranks in front of their lines, colours if `out` shows them."""
    has_colours = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    clean = ansi.colours_only if has_colours else ansi.plain

    def form_of(rank: int) -> LineForm:
        prefix = f"[{rank}] " if several else ""
        return lambda line: f"{prefix}{clean(line)}"

    return form_of


def _json_lines(run_id: str) -> LineForms:
    """Return the form of lines for programs: one document each."""
    return lambda rank: lambda line: encode_line(LogLine(run=run_id, rank=rank, text=ansi.plain(line)))


def _ranks_with_logs(files: FilesOfRun) -> int:
    matches = [_LOG_NAME.fullmatch(file.name) for file in files.list().files]
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


class RankLog:
    """One rank's log, read incrementally. The file may not exist yet.

    Args:
        path: Path of the log.
        form: Returns a line in the form in which it is written.
        bring: Fetches new data of the log with this name if it is written on another machine.
        read_bytes: Size of one read.
        longest_line_chars: Longer lines are split.
    """

    def __init__(
        self,
        path: Path,
        form: LineForm,
        bring: Callable[[str], None],
        *,
        read_bytes: int = _READ_BYTES,
        longest_line_chars: int = _LONGEST_LINE_CHARS,
    ) -> None:
        self._read_bytes = read_bytes
        self._longest_line_chars = longest_line_chars
        self._bring = bring
        self._path = path
        self._form = form
        self._file: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    @property
    def exists(self) -> bool:
        return self._file is not None

    def copy_to(self, out: TextIO) -> bool:
        """Write the complete lines of the next piece of the log. Returns False at its current end."""
        data = self._read()
        if not data:
            self._bring(self._path.name)
            data = self._read()
        self._write(self._lines(self._decoder.decode(data)), out)
        return bool(data)

    def _read(self) -> bytes:
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        return os.read(self._file, self._read_bytes)

    def finish(self, out: TextIO) -> None:
        """Write the last line if it has no newline."""
        rest = self._pending + self._decoder.decode(b"", final=True)
        self._pending = ""
        if rest:
            self._write([rest], out)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _lines(self, text: str) -> Iterator[str]:
        lines = (self._pending + text).split("\n")
        self._pending = lines.pop()
        yield from lines
        if len(self._pending) > self._read_bytes:
            # only the last state of a progress bar is shown
            self._pending = self._pending[self._pending.rstrip("\r").rfind("\r") + 1 :]
        while len(self._pending) > self._longest_line_chars:
            yield self._pending[: self._longest_line_chars]
            self._pending = self._pending[self._longest_line_chars :]

    def _write(self, lines: Iterable[str], out: TextIO) -> None:
        # a terminal shows what follows a line's last carriage return
        visible = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
        out.write("".join(f"{self._form(line)}\n" for line in visible))


def _follow(files: FilesOfRun, logs: Sequence[RankLog], out: TextIO) -> RunSummary | None:
    while True:
        # check the state before reading the logs: nothing written before the end is missed
        row = files.row()
        has_ended = files.has_ended(row)
        more = [log.copy_to(out) for log in logs]
        out.flush()
        if not any(more):
            if has_ended:
                return row
            time.sleep(_POLL_S)


def _why_none(run_id: str, row: RunSummary | None) -> str:
    name = f"run {short(run_id)}"
    if row is None:
        return f"{name} has no logs"
    if not row.state.is_final:
        return f"{name} is {row.state.value}: no rank has printed yet. --follow waits for output"
    if row.started_at is not None:
        return f"{name} has printed nothing"
    why = f" ({row.failure})" if row.failure else ""
    return f"{name} {row.state.value} before its ranks started{why}, so there are no logs"


def _logs_options(parser: CommandParser) -> None:
    parser.add_argument("run", metavar="RUN", help="ID of the run, or its first digits")
    parser.add_argument("--rank", type=rank, metavar="N", help="only this rank")
    parser.add_argument("-f", "--follow", action="store_true", help="follow until the run has ended")
    add_json(parser, "print each line as a JSON document")
    parser.does(show)


COMMANDS = {"logs": _logs_options}

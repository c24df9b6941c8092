"""`RunResult`: what `%%distributed` returns, with the ranks' values and the run's times."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, overload

import msgspec

from sgpu_magic.client.mirror import Mirror
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.files.atomic_file import read_json
from sgpu_magic.formatting import count_of, format_ranks
from sgpu_magic.wire.base import short
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.files import TRACKING
from sgpu_magic.wire.run import RunSpec, Shipped

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

_TEXT_LIMIT = 60
_REPR_LIMIT = 200
_TEXT_STYLE = "margin:0;white-space:pre-wrap;font-family:var(--jp-code-font-family,monospace)"
# maximum number of characters in all tables together
_TABLES_LIMIT = 50_000
_TRACKED_S = 10.0
_POLL_S = 0.1


class RunResult:
    """The value of a distributed cell.

    Attributes:
        run_id: The run's id, for example for `sgpu logs`.
        name: The run's name.
        ranks: The ranks that ran the cell, in ascending order: all of them, those of `--ranks`, or with `%%ray_launch`
            only the driver's, 0. The lists below are in this order.
        values: The last expression's value on each rank; None if there was none or it could not be sent back
            (see `problems`).
        problems: Why a value could not be sent back, by rank.
        lines: Number of lines that each rank printed.
        seconds: The cell's running time on each rank, in seconds.
        queued_s, starting_s, running_s, total_s: Time in the queue, starting, running and in total, in seconds.
        shipped: What was sent to the ranks.
        directory: The run's directory: logs, `cell.py`, `_air.py`, `run.json`.
    """

    def __init__(
        self,
        spec: RunSpec,
        ended: RunEnded,
        values: Sequence[object],
        directory: Path,
        mirror: Mirror | None = None,
        ask_tracked: Callable[[], None] | None = None,
        *,
        view_draws: bool = False,
    ) -> None:
        # only the driver of a Ray cluster runs the cell; the other ranks hold their devices
        results = ended.results[:1] if spec.ray else ended.results
        self.run_id = spec.run_id
        self.name = spec.name
        self.ranks = [result.rank for result in results]
        self.values = list(values)[: len(results)]
        self.problems = {result.rank: result.value_problem for result in results if result.value_problem}
        self.lines = [result.lines for result in results]
        self.seconds = [result.seconds for result in results]
        self.queued_s = ended.queued_s
        self.starting_s = ended.starting_s
        self.running_s = ended.running_s
        self.total_s = ended.total_s
        self.shipped: Shipped = spec.shipped
        self.directory = directory
        self._texts = [result.value_repr for result in results]
        self._in_view = [view_draws and result.value_displayed for result in results]
        self._cell = spec.cell.execution_count
        self._only = spec.only
        self._mlflow_run_id = ""
        self._mirror = mirror
        self._ask_tracked = ask_tracked

    @property
    def mlflow_run_id(self) -> str:
        """The run's id in MLflow; `""` if the run is not tracked or its store does not answer within 10 s.

        Reading it creates the MLflow run, which `track = "auto"` does not do for every run: that takes some seconds.
        """
        if not self._find_mlflow_run() and self._ask_tracked is not None:
            self._ask_tracked()
            until = time.monotonic() + _TRACKED_S
            while not self._find_mlflow_run() and time.monotonic() < until:
                time.sleep(_POLL_S)
        return self._mlflow_run_id

    def _find_mlflow_run(self) -> str:
        if not self._mlflow_run_id and self._mirror is not None:
            with contextlib.suppress(UsageError, PoolError, OSError):
                self._mirror.bring(TRACKING)
        self._mlflow_run_id = self._mlflow_run_id or mlflow_run_id(self.directory)
        return self._mlflow_run_id

    @property
    def adds_nothing(self) -> bool:
        """Whether the run's view shows all of it: no rank has a value, or their values are among its displays."""
        return all(in_view or not text for in_view, text in zip(self._in_view, self._texts, strict=True))

    def came_from(self, cell: int | None) -> bool:
        """Whether the cell of this number in the notebook ran it."""
        return cell is not None and cell == self._cell

    def __getstate__(self) -> dict[str, object]:
        # a copy on a rank or in another kernel has no link to the pool
        return {**self.__dict__, "_mirror": None, "_ask_tracked": None}

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[object]:
        return iter(self.values)

    @overload
    def __getitem__(self, rank: int) -> object: ...
    @overload
    def __getitem__(self, rank: slice) -> list[object]: ...
    def __getitem__(self, rank: int | slice) -> object:
        """Return the value of one rank, by its number; negative numbers count from the last rank that ran the cell.

        Raises:
            IndexError: That rank did not run the cell.
        """
        return self.values[rank if isinstance(rank, slice) or rank < 0 else self._index(rank)]

    def frame(
        self, *, ignore_index: bool = False, sort: bool = False, level: str = "rank"
    ) -> pd.DataFrame | pl.DataFrame:
        """Return the ranks' DataFrames one below the other, in ascending order of the ranks.

        The index has the rank's number as its outermost level: `result.frame().loc[1]` are the rows of rank 1. Frames
        of `n` rows with the same columns give `len(result) * n` rows with these columns; a column that a rank lacks is
        filled with missing values, as by `pandas.concat`. A Series counts as a DataFrame of one column.

        Frames of polars, which have no index, give one of polars whose first column is the rank's number, as by
        `polars.concat(how="diagonal_relaxed")`.

        Args:
            ignore_index: Number the rows from 0 instead, without the rank and without the ranks' own indexes. With
                polars: leave out the column with the rank.
            sort: Sort the columns if the ranks have different ones.
            level: The name of the index level, or of polars' column, with the rank's number.

        Raises:
            UsageError: A rank has no value, or one that is neither a DataFrame nor a Series; the message names the
                first such rank. Or frames of polars already have a column `level`, or pandas is not installed.
        """
        # where it is not imported, no value is of polars
        if "polars" in sys.modules:
            import polars as pl

            if any(isinstance(value, pl.DataFrame | pl.Series) for value in self.values):
                return self._polars_frame(ignore_index=ignore_index, sort=sort, level=level)
        try:
            import pandas as pd
        except ImportError:
            raise UsageError("frame() needs pandas, which is not installed here: `%pip install pandas`.") from None
        frames: list[pd.DataFrame] = []
        for rank, value in zip(self.ranks, self.values, strict=True):
            if isinstance(value, pd.Series):
                value = value.to_frame()
            if not isinstance(value, pd.DataFrame):
                raise UsageError(self._no_frame(rank, value, "pandas"))
            frames.append(value)
        if ignore_index:
            return pd.concat(frames, ignore_index=True, sort=sort)
        return pd.concat(frames, keys=self.ranks, names=[level], sort=sort)

    def _polars_frame(self, *, ignore_index: bool, sort: bool, level: str) -> pl.DataFrame:
        import polars as pl

        frames: list[pl.DataFrame] = []
        for rank, value in zip(self.ranks, self.values, strict=True):
            frame = value.to_frame() if isinstance(value, pl.Series) else value
            if not isinstance(frame, pl.DataFrame):
                raise UsageError(self._no_frame(rank, value, "polars"))
            if not ignore_index and level in frame.columns:
                raise UsageError(
                    f"the DataFrame of rank {rank} of run {short(self.run_id)} already has a column {level!r}. Name "
                    "the column of frame() with level=, or leave it out with ignore_index=True."
                )
            frames.append(frame)
        columns = list(dict.fromkeys(name for frame in frames for name in frame.columns))
        if sort and any(frame.columns != frames[0].columns for frame in frames):
            columns.sort()
        if not ignore_index:
            numbered = zip(self.ranks, frames, strict=True)
            frames = [frame.with_columns(pl.lit(rank, dtype=pl.Int64).alias(level)) for rank, frame in numbered]
            columns.insert(0, level)
        return pl.concat(frames, how="diagonal_relaxed").select(columns)

    def _no_frame(self, rank: int, value: object, library: str) -> str:
        """Return why a rank's value can't be part of a frame, and what to do."""
        whose = f"rank {rank} of run {short(self.run_id)}"
        if rank in self.problems:
            return f"the value of {whose} could not be sent, so frame() has no DataFrame of it: {self.problems[rank]}."
        if value is None:
            returned = "returned no value"
        else:
            kind = type(value)
            package = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}."
            returned = f"returned {package}{kind.__qualname__}"
        return (
            f"{whose} {returned}, and frame() needs a {library} DataFrame or Series of every rank. Let it be the "
            "cell's last expression on each rank; result.values has the values as they are."
        )

    def logs(self, rank: int) -> Path:
        """Return the path of the file with everything that `rank` printed.

        Raises:
            IndexError: That rank did not run the cell.
        """
        self._index(rank)
        if self._mirror is not None:
            self._mirror.follow(f"rank-{rank}.log")
        path = self.directory / f"rank-{rank}.log"
        # a rank that printed nothing has no file yet
        with contextlib.suppress(OSError):
            path.touch(mode=0o600)
        return path

    def _index(self, rank: int) -> int:
        if rank in self.ranks:
            return self.ranks.index(rank)
        if self._only:
            raise IndexError(f"run {short(self.run_id)} ran on {self._which()}, not on rank {rank}")
        raise IndexError(f"run {short(self.run_id)} has ranks 0 to {len(self.values) - 1}, not {rank}")

    def _which(self) -> str:
        return format_ranks(self.ranks)

    def __repr__(self) -> str:
        head = f"run {short(self.run_id)}{f' on {self._which()}' if self._only else ''}: "
        if not any(self._texts):
            return head + ("no value" if self._only else f"{count_of(len(self.values), 'rank')}, no value")
        texts = [_one_line(text) if text else "None" for text in self._texts]
        if len(set(texts)) == 1 and len(texts) > 1:
            values = f"{texts[0]} on each of {len(texts)} ranks"
        else:
            values = "[" + ", ".join(texts) + "]"
        if self.problems:
            rank, why = next(iter(self.problems.items()))
            values += f" (shown only: rank {rank}'s value could not be sent, {why})"
        return head + (values if len(values) <= _REPR_LIMIT or self.problems else values[:_REPR_LIMIT] + " ...")

    def _repr_html_(self) -> str | None:
        """Return the ranks' values side by side if there are tables among them, such as DataFrames."""
        room = _TABLES_LIMIT
        tables: list[str] = []
        for value in self.values:
            table = _table(value)
            # a table that does not fit is shown as text, as are other values
            tables.append(table if len(table) <= room else "")
            room -= len(tables[-1])
        if not any(tables):
            return None
        border = "border:1px solid rgba(128,128,128,.28);border-radius:6px"
        boxes = ""
        for rank, table, text in zip(self.ranks, tables, self._texts, strict=True):
            content = table or f'<pre style="{_TEXT_STYLE}">{escape(text or "None")}</pre>'
            boxes += (
                f'<div style="{border};max-width:100%;overflow:hidden">'
                f'<div style="padding:2px 10px;font-size:12px;opacity:.68">rank {rank}</div>'
                f'<div tabindex="0" style="max-height:372px;overflow:auto;padding:0 10px 8px">{content}</div></div>'
            )
        on = f" on {self._which()}" if self._only else ""
        return (
            "<style>@media print{.sgpu-values>div>div{max-height:none!important;overflow:visible!important}}</style>"
            f'<div style="font-size:13px;padding:2px 0">run {short(self.run_id)}{on}</div>'
            f'<div class="sgpu-values" style="display:flex;flex-wrap:wrap;align-items:flex-start;gap:8px">{boxes}</div>'
        )


def _table(value: object) -> str:
    """Return a value's own HTML if it is a table, else ""."""
    draw: Callable[[object], object] | None = getattr(type(value), "_repr_html_", None)
    html = draw(value) if draw is not None else None
    return html if isinstance(html, str) and "<table" in html else ""


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_LIMIT else text[: _TEXT_LIMIT - 4] + " ..."


class _Written(msgspec.Struct):
    mlflow_run_id: str = ""


def mlflow_run_id(directory: Path) -> str:
    """Return the id of the run in MLflow, or `""` while it has none.

    A run of milliseconds ends before the tracking process reads it, so none of its events contains the id.

    Args:
        directory: The run's directory.
    """
    written = read_json(directory / TRACKING, _Written)
    return written.mlflow_run_id if written is not None else ""

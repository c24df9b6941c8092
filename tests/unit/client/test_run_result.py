"""How a notebook shows a cell's result."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import polars as pl
import pytest

from sgpu_magic.client.result import RunResult
from sgpu_magic.errors import UsageError
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.run import CellSource, Owner, RankResult, RunSpec


class Frame:
    """A value that draws itself as a table, as a DataFrame does."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def _repr_html_(self) -> str:
        return f"<table>{'<tr><td>1</td></tr>' * self.rows}</table>"


class Picture:
    def _repr_html_(self) -> str:
        return "<img>"


def result(values: list[object], only: tuple[int, ...] = (), problems: dict[int, str] | None = None) -> RunResult:
    ranks = only or tuple(range(len(values)))
    spec = RunSpec(
        run_id="7f3a90c1",
        name="cell 7",
        cell=CellSource(body=""),
        placement=Placement(ranks=max(ranks, default=0) + 1),
        outputs=(),
        timeout_s=60.0,
        owner=Owner(pid=1, host="h", user="u"),
        only=only,
    )
    results = tuple(
        RankResult(
            rank=rank,
            value_repr="" if value is None else f"<{type(value).__name__}>",
            value_problem=(problems or {}).get(rank),
        )
        for rank, value in zip(ranks, values, strict=True)
    )
    return RunResult(spec, RunEnded(state=RunState.SUCCEEDED, results=results), values, Path("/none"))


@pytest.mark.parametrize("values", [[], [1, 2], [None], [Picture(), Picture()], [Frame]])
def test_values_without_a_table_are_shown_as_text_alone(values: list[object]) -> None:
    assert result(values)._repr_html_() is None


def test_tables_of_ranks_are_drawn_side_by_side_and_other_values_as_text() -> None:
    html = result([Frame(1), 0.93, Frame(2), None])._repr_html_()
    assert html is not None
    places = [html.index(part) for part in ("rank 0", "<table><tr><td>1</td></tr></table>", "rank 1", "&lt;float&gt;")]
    assert places == sorted(places)
    assert html.count("<table>") == 2
    assert ">None<" in html
    assert "run 7f3a" in html


def test_ranks_keep_their_numbers() -> None:
    html = result([Frame(1), Frame(1)], only=(1, 3))._repr_html_()
    assert html is not None
    assert "run 7f3a on ranks 1, 3" in html
    assert [part in html for part in (">rank 0<", ">rank 1<", ">rank 2<", ">rank 3<")] == [False, True, False, True]


def test_tables_are_bounded_together() -> None:
    html = result([Frame(1_500), Frame(1_500), Frame(10)])._repr_html_()
    assert html is not None
    assert len(html) < 52_000
    assert html.count("<table>") == 2, "the second has no room, the third has"
    assert html.count("&lt;Frame&gt;") == 1


# ---------------------------------------------------------------- frame()


def of_rank(rank: int, rows: int = 2) -> pd.DataFrame:
    return pd.DataFrame({"step": range(rows), "loss": [rank + 0.5] * rows})


def test_frames_of_the_ranks_stand_below_each_other_with_the_rank_as_index() -> None:
    frame = result([of_rank(0), of_rank(1, rows=1)]).frame()
    assert frame.index.names == ["rank", None]
    assert [*frame.index] == [(0, 0), (0, 1), (1, 0)]
    assert frame.columns.tolist() == ["step", "loss"]
    pd.testing.assert_frame_equal(frame.loc[1], of_rank(1, rows=1))


def test_a_frame_has_the_numbers_of_the_ranks_that_ran_and_keeps_their_indexes() -> None:
    indexed = [of_rank(rank).set_index("step") for rank in (1, 3)]
    frame = result([*indexed], only=(1, 3)).frame(level="worker")
    assert frame.index.names == ["worker", "step"]
    assert [*frame.index] == [(1, 0), (1, 1), (3, 0), (3, 1)]


def test_rows_are_numbered_without_the_ranks() -> None:
    frame = result([of_rank(0), of_rank(1)]).frame(ignore_index=True)
    assert [*frame.index] == [0, 1, 2, 3]
    assert frame["loss"].tolist() == [0.5, 0.5, 1.5, 1.5]


def test_columns_that_differ_are_filled_and_sorted_when_asked() -> None:
    values: list[object] = [pd.DataFrame({"b": [1], "a": [2]}), pd.DataFrame({"c": [3]})]
    assert result(values).frame().columns.tolist() == ["b", "a", "c"]
    frame = result(values).frame(sort=True)
    assert frame.columns.tolist() == ["a", "b", "c"]
    assert frame["c"].isna().tolist() == [True, False]


def test_a_series_is_a_frame_of_one_column() -> None:
    values: list[object] = [pd.Series([1, 2], name="loss"), of_rank(1)]
    frame = result(values).frame()
    assert isinstance(frame, pd.DataFrame)
    assert frame["loss"].tolist() == [1, 2, 1.5, 1.5]


def test_empty_frames_are_no_harm() -> None:
    frame = result([of_rank(0), of_rank(1, rows=0)]).frame()
    assert [*frame.index] == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "rank 3 of run 7f3a returned no value, and frame() needs a pandas DataFrame or Series"),
        ({"loss": 1}, "rank 3 of run 7f3a returned dict, and"),
        (Frame(1), f"rank 3 of run 7f3a returned {__name__}.Frame, and"),
    ],
)
def test_the_first_rank_without_a_frame_is_named(value: object, text: str) -> None:
    with pytest.raises(UsageError, match=r"result\.values has the values as they are") as raised:
        result([of_rank(1), value, 5], only=(1, 3, 4)).frame()
    assert raised.value.message.startswith(text)


def test_why_a_rank_has_no_value_is_told() -> None:
    why = "its size is 200 MB: name it in --out to get it"
    with pytest.raises(UsageError) as raised:
        result([of_rank(0), None], problems={1: why}).frame()
    assert raised.value.message == (
        f"the value of rank 1 of run 7f3a could not be sent, so frame() has no DataFrame of it: {why}."
    )


def polars_of_rank(rank: int, rows: int = 2) -> pl.DataFrame:
    return pl.from_pandas(of_rank(rank, rows))


def test_frames_of_polars_have_the_rank_as_first_column() -> None:
    values: list[object] = [polars_of_rank(1), polars_of_rank(3, rows=0), pl.Series("loss", [7])]
    frame = result([*values, polars_of_rank(5, rows=1)], only=(1, 3, 4, 5)).frame()
    assert isinstance(frame, pl.DataFrame)
    assert frame.columns == ["rank", "step", "loss"]
    assert frame.rows() == [(1, 0, 1.5), (1, 1, 1.5), (4, None, 7.0), (5, 0, 5.5)]
    assert values[0].columns == ["step", "loss"], "the values stay as they are"  # type: ignore[attr-defined]


def test_columns_of_polars_are_numbered_sorted_and_named_as_asked() -> None:
    values: list[object] = [pl.DataFrame({"b": [1], "a": [2]}), pl.DataFrame({"c": [3]})]
    frame = result(values).frame(sort=True, level="worker")
    assert frame.columns == ["worker", "a", "b", "c"]
    assert result(values).frame(ignore_index=True).columns == ["b", "a", "c"]
    ranked = result([pl.DataFrame({"rank": [9]})])
    with pytest.raises(UsageError, match=r"already has a column 'rank'\. Name the column of frame"):
        ranked.frame()
    assert ranked.frame(ignore_index=True).rows() == [(9,)]  # type: ignore[operator]


@pytest.mark.parametrize("value", [None, of_rank(0), 5])
def test_the_first_rank_without_a_frame_of_polars_is_named(value: object) -> None:
    with pytest.raises(UsageError, match=r"^rank 1 of run 7f3a returned .*needs a polars DataFrame or Series of every"):
        result([polars_of_rank(0), value, 5]).frame()


def test_without_pandas_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="%pip install pandas"):
        result([1]).frame()

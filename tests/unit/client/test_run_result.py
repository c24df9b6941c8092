"""How a notebook shows a cell's result."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgpu_magic.client.result import RunResult
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


def result(values: list[object], only: tuple[int, ...] = ()) -> RunResult:
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
        RankResult(rank=rank, value_repr="" if value is None else f"<{type(value).__name__}>")
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

"""A page may have the style sheets of several views, and saved outputs too: none may style what is another's."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SHEETS = ("run_view/run_view.css", "panel/panel.css", "run_page/run_page.css")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
SELECTORS = re.compile(r"([^{}]+)\{")
CLASS = re.compile(r"\.(sgpu-[\w-]+)")
WORD = re.compile(r"\bsgpu-[\w-]+")
# a failed line looks and acts alike in a live view and below a cell
SHARED = {"sgpu-failure-culprit"}


def classes_of(sheet: str) -> set[str]:
    text = COMMENT.sub("", (ROOT / "labextension" / "src" / sheet).read_text())
    return {name for selectors in SELECTORS.findall(text) for name in CLASS.findall(selectors)}


def test_no_class_is_styled_by_the_sheets_of_two_views():
    styled = {sheet: classes_of(sheet) for sheet in SHEETS}
    assert all(len(names) > 10 for names in styled.values())
    shared = {pair: styled[pair[0]] & styled[pair[1]] for pair in itertools.combinations(SHEETS, 2)}
    assert {pair: names for pair, names in shared.items() if names} == {}


def test_no_view_styles_what_is_saved_below_a_cell():
    texts = [path.read_text() for path in (ROOT / "sgpu_magic" / "views").rglob("*.py")]
    saved = {name for text in texts for name in WORD.findall(text)}
    assert "sgpu-box" in saved
    assert {sheet: names for sheet in SHEETS if (names := saved & classes_of(sheet) - SHARED)} == {}

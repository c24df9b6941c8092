"""Each folder's docstring lists its modules and subfolders: all of them and no others."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = sorted(
    path.parent for path in [*(ROOT / "sgpu_magic").rglob("__init__.py"), ROOT / "tests/support/__init__.py"]
)
# a name followed by two or more spaces
_ENTRY = re.compile(r"(\w+)/?\s{2,}\S")


def entries(docstring: str) -> list[str]:
    """The names that have their own line below the first sentence."""
    found = (_ENTRY.match(line) for line in docstring.splitlines()[1:])
    return [match[1] for match in found if match is not None]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_folder_lists_what_is_in_it(folder: Path):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    there = modules | {path.parent.name for path in folder.glob("*/__init__.py")}
    text = Counter(entries(docstring))
    assert {
        "not listed": sorted(there - {*text}),
        "not there": sorted({*text} - there),
        "listed more than once": [name for name, count in text.items() if count > 1],
    } == {"not listed": [], "not there": [], "listed more than once": []}


def test_an_entry_is_told_from_prose():
    docstring = "What it is.\n\none    first\ntwo/   second\n`pack` is prose\nDrawn:\nfour a: x\n"
    assert entries(docstring) == ["one", "two"]

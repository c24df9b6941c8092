"""The docs' drawings are what `scripts/drawings.py` draws, so that the layers are those of the import contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]
DRAWINGS = sorted((ROOT / "docs" / "understand").glob("*.svg"))
# beside the navigation of a page in a window of 1024 pixels
_ROOM = 736


def test_the_stored_drawings_are_the_drawn_ones(tmp_path: Path):
    (tmp_path / "understand").mkdir()
    script = ROOT / "scripts" / "drawings.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    drawn = {path.name: path.read_text() for path in (tmp_path / "understand").iterdir()}
    stored = {path.name: path.read_text() for path in DRAWINGS}
    assert stored == drawn, "python scripts/drawings.py docs"


def test_a_drawing_fits_in_its_page_and_says_what_it_shows():
    assert DRAWINGS
    for path in DRAWINGS:
        drawing = ElementTree.parse(path).getroot()
        assert float(drawing.attrib["width"]) <= _ROOM
        assert drawing.findtext("{*}title")


def test_every_picture_of_the_docs_has_a_text():
    for page in (ROOT / "docs").rglob("*.md"):
        assert "![](" not in page.read_text(), page

"""The notebook that streams a data set larger than the node cache's budget through it."""

from __future__ import annotations

import re

import pytest
from executed_notebooks import NOTEBOOKS, execute, saved
from kernels import Home

pytestmark = pytest.mark.slow

NOTEBOOK = NOTEBOOKS / "streaming_data.ipynb"


def test_forty_megabytes_stream_through_eight(home: Home):
    executed = execute(NOTEBOOK, home)
    assert [cell.errors for cell in executed.cells] == [()] * len(executed.cells)
    for cells in (executed.cells, saved(NOTEBOOK)):
        text = "\n".join(cell.text for cell in cells)
        assert "40 shards, 40 MB" in text
        reported = re.search(r"copied (\d+) times for 160 reads; (\d+) shards are kept, ([\d.]+) MB", text)
        assert reported, text
        copied, kept, megabytes = reported.groups()
        # each epoch needs all of them, and both ranks read the same copy
        assert 80 <= int(copied) <= 100
        assert int(kept) <= 8
        assert float(megabytes) <= 8
        assert "copied by the first run: 6, by the second: 0" in text

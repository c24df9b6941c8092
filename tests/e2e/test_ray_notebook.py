"""The notebook about Ray: it runs from top to bottom, and has its outputs."""

from __future__ import annotations

import pytest
from executed_notebooks import NOTEBOOKS, execute, saved
from kernels import Home
from lazy_modules import nbformat

pytestmark = pytest.mark.slow

NOTEBOOK = NOTEBOOKS / "ray.ipynb"
HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_STAND_IN": "cpu", "SGPU_RAY_DASHBOARD": "false"}


def test_its_saved_outputs_tell_what_it_does():
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    reported = ["".join(str(output) for output in cell.outputs) for cell in cells]
    assert "squaring 3 on GPU" in reported[1]
    assert "[0, 1, 4, 9]" in reported[2]
    assert "0.1" in reported[3]
    assert "a rate of -1 learns nothing" in reported[4]
    assert "RayTaskError" not in reported[4]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_from_top_to_bottom(home: Home):
    execute(NOTEBOOK, home)
    assert saved(NOTEBOOK)

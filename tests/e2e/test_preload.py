"""Imports that took long are executed ahead: later runs import the same modules at once, and see no difference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from homes import Home
from kernels import Kernel, Reply
from preloads import wait_for_preload

HEAVY = """
import os, time
mode = os.environ.get("HEAVY_MODE", "")
executed_by = os.getpid()
time.sleep(0.3)
import heavy_part
"""
CELL = """%%distributed -n 2
import os, sys
was_there = [name for name in ("heavy", "heavy_part") if name in sys.modules]
import heavy
print(was_there, heavy.executed_by == os.getpid(), repr(heavy.mode), list(sys.modules)[-2:])"""


@pytest.fixture
def place(new_home: Callable[..., Home], request: pytest.FixtureRequest) -> Iterator[tuple[Home, Kernel]]:
    home = new_home(getattr(request, "param", {"SGPU_PRELOAD": "auto"}))
    packages = home.path / "site-packages"
    packages.mkdir()
    (packages / "heavy.py").write_text(HEAVY)
    (packages / "heavy_part.py").write_text("")
    kernel = Kernel(home, variables={"PYTHONPATH": str(packages)})
    yield home, kernel
    kernel.close()


def said(reply: Reply) -> set[str]:
    return set(reply.lines(0)) | set(reply.lines(1))


EXECUTED = {"[] True '' ['heavy_part', 'heavy']"}
SHOWN = {"[] False '' ['heavy_part', 'heavy']"}


def test_an_import_that_took_long_is_executed_ahead(place: tuple[Home, Kernel]) -> None:
    home, kernel = place
    assert said(kernel.check(CELL)) == EXECUTED
    wait_for_preload(home, "heavy")
    assert said(kernel.check(CELL)) == SHOWN
    # what the module reads at its import is different now
    other = CELL.replace("import os, sys", "import os, sys\nos.environ['HEAVY_MODE'] = 'fast'")
    assert said(kernel.check(other)) == {"[] True 'fast' ['heavy_part', 'heavy']"}
    # a file of the notebook's own takes the place of a module
    (Path(home.work) / "heavy_part.py").write_text("")
    assert said(kernel.check(CELL)) == EXECUTED
    (Path(home.work) / "heavy_part.py").unlink()
    assert said(kernel.check(CELL)) == SHOWN
    command = [sys.executable, "-m", "sgpu_magic.cli", "doctor"]
    doctor = subprocess.run(command, env=home.environ, capture_output=True, text=True, timeout=60)
    assert "heavy: 2 modules" in doctor.stdout


@pytest.mark.slow
def test_a_session_imports_what_was_executed_ahead(place: tuple[Home, Kernel]) -> None:
    home, kernel = place
    kernel.check("%sgpu_connect --gpus 2 --type cpu")
    assert said(kernel.check(CELL.replace(" -n 2", ""))) == EXECUTED
    wait_for_preload(home, "heavy")
    kernel.check("%sgpu_disconnect")
    kernel.check("%sgpu_connect --gpus 2 --type cpu")
    assert said(kernel.check(CELL.replace(" -n 2", ""))) == SHOWN
    kernel.check("%sgpu_disconnect")


@pytest.mark.slow
def test_a_variable_that_is_read_belongs_to_what_is_executed_ahead(place: tuple[Home, Kernel]) -> None:
    home, kernel = place
    kernel.check(CELL)
    before = wait_for_preload(home, "heavy")
    kernel.check("%env HEAVY_MODE=other")
    assert said(kernel.check(CELL)) == {"[] True 'other' ['heavy_part', 'heavy']"}
    wait_for_preload(home, "heavy", before=before)
    assert said(kernel.check(CELL)) == {"[] False 'other' ['heavy_part', 'heavy']"}


@pytest.mark.slow
@pytest.mark.parametrize("place", [{"SGPU_PRELOAD": "heavy"}], indirect=True)
def test_what_the_setting_names_is_executed_ahead_of_its_first_import(place: tuple[Home, Kernel]) -> None:
    home, kernel = place
    kernel.check("%%distributed -n 2\nrank")
    wait_for_preload(home, "heavy")
    assert said(kernel.check(CELL)) == SHOWN


@pytest.mark.slow
@pytest.mark.parametrize("place", [{"SGPU_PRELOAD": "off"}], indirect=True)
def test_nothing_is_executed_ahead_where_the_setting_is_off(place: tuple[Home, Kernel]) -> None:
    home, kernel = place
    kernel.check(CELL)
    # longer than the agent takes to begin
    kernel.check("%%distributed -n 2\nimport time; time.sleep(6)")
    assert not (home.state / "preload.json").exists()
    assert said(kernel.check(CELL)) == EXECUTED

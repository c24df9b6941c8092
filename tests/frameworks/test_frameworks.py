"""Trainings end with the parameters that torchrun gives for the same seed: in a cell, in a function, in a session.

Equal to the last bit: two ranks' gradients are added in one way only, and each rank computes with one thread.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trainings
from executed_notebooks import NOTEBOOKS, execute, headings, saved
from kernels import Home, Kernel
from preloads import wait_for_preload

pytestmark = pytest.mark.slow

HOME_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    # these trainings download nothing
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

HEAVY = [
    pytest.param(
        name,
        id=name,
        marks=[
            pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed"),
        ],
    )
    for name, package in trainings.HEAVY.items()
]

_TIMEOUT_S = 100


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder with what each rank of a training had at its end under torchrun; each is run once."""
    done: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            script = Path(__file__).with_name("under_torchrun.py")
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            ended = subprocess.run(
                [*torchrun, str(script), name, str(folder)],
                env=os.environ | HOME_VARIABLES | {"SGPU_CHECKPOINT_DIR": str(folder / "checkpoints")},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
            assert ended.returncode == 0, ended.stderr
            done[name] = folder
        return done[name]

    return run


def source_of(name: str) -> str:
    return "from typing import Any\n" + inspect.getsource(getattr(trainings, name))


def check_like(kernel: Kernel, folder: Path) -> None:
    """Compare the notebook's `got`, one dictionary per rank, with what torchrun has left in `folder`."""
    kernel.check(
        "import torch\n"
        f"wanted = [torch.load({str(folder)!r} + f'/rank-{{rank}}.pt') for rank in range(2)]\n"
        "assert len(got) == 2 and all(got), got\n"
        "assert [sorted(values) for values in got] == [sorted(values) for values in wanted]\n"
        "unlike = [(rank, name) for rank in range(2) for name in wanted[rank]\n"
        "          if not torch.equal(wanted[rank][name], got[rank][name])]\n"
    )
    assert kernel.value("unlike") == []


@pytest.mark.parametrize("name", [*trainings.LIGHT, *HEAVY])
def test_in_a_cell(kernel: Kernel, expected: Callable[[str], Path], name: str):
    kernel.check(f"%%distributed -n 2 --out got:all\n{source_of(name)}\ngot = {name}()", _TIMEOUT_S)
    check_like(kernel, expected(name))


@pytest.mark.parametrize("name", [*trainings.LIGHT, *HEAVY])
def test_in_a_function(kernel: Kernel, expected: Callable[[str], Path], name: str):
    kernel.check(f"from sgpu_magic import distributed\n{source_of(name)}")
    kernel.check(f"got = distributed(gpus=2, gpu_type='cpu')({name}).distributed()", _TIMEOUT_S)
    check_like(kernel, expected(name))


@pytest.fixture
def session(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel, connected to two ranks."""
    kernel.check("%sgpu_connect --gpus 2 --type cpu")
    yield kernel
    kernel.check("%sgpu_disconnect")


def check_in_session(session: Kernel, folder: Path, name: str) -> None:
    session.check("got = None")
    session.check(f"%%distributed --out got:all\n{source_of(name)}\ngot = {name}()", _TIMEOUT_S)
    check_like(session, folder)


@pytest.mark.parametrize("name", HEAVY)
def test_twice_in_a_session(session: Kernel, expected: Callable[[str], Path], name: str):
    for _ in range(2):
        check_in_session(session, expected(name), name)


@pytest.mark.timeout(240)
def test_twice_one_after_the_other_in_a_session(session: Kernel, expected: Callable[[str], Path]):
    """The first of them destroys the ranks' group; the others, and itself, find one again."""
    for name in [name for name in trainings.LIGHT for _ in range(2)]:
        check_in_session(session, expected(name), name)


@pytest.mark.timeout(600)
def test_in_cells_whose_imports_were_executed_ahead(new_home: Callable[..., Home], expected: Callable[[str], Path]):
    home = new_home(HOME_VARIABLES | {"SGPU_PRELOAD": "auto"})
    names = [name for name, package in trainings.HEAVY.items() if importlib.util.find_spec(package)]
    kernel = Kernel(home)
    try:
        cells = {name: f"%%distributed -n 2 --out got:all\n{source_of(name)}\ngot = {name}()" for name in names}
        for name in names:
            kernel.check(cells[name], _TIMEOUT_S)
        wait_for_preload(home, *(trainings.HEAVY[name] for name in names), timeout_s=300)
        for name in [*names, *trainings.LIGHT]:
            kernel.check(cells.get(name) or f"%%distributed -n 2 --out got:all\n{source_of(name)}\ngot = {name}()", 60)
            check_like(kernel, expected(name))
    finally:
        kernel.close()


# ---------------------------------------------------------------- what frameworks inspect


def test_the_variables_of_deepspeeds_launcher_are_set(kernel: Kernel):
    kernel.check(
        "%%distributed -n 2 --out set_here:all\n"
        "import os\n"
        "set_here = {name: os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_SIZE',\n"
        "            'CROSS_RANK', 'CROSS_SIZE', 'MASTER_ADDR')} | {'port': os.environ['MASTER_PORT'].isdigit()}"
    )
    node = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    assert kernel.value("set_here") == [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "port": True, **node} for rank in (0, 1)
    ]


@pytest.mark.skipif(
    not all(importlib.util.find_spec(package) for package in trainings.HEAVY.values()), reason="not all are installed"
)
def test_the_notebook_shows_each_of_them(home: Home):
    notebook = NOTEBOOKS / "frameworks.ipynb"
    cells = [cell for cell in execute(notebook, home).cells if "%%distributed" in cell.source]
    assert [cell.section for cell in cells] == headings(notebook)[:-1]
    for cell, kept in zip(cells, [cell for cell in saved(notebook) if "%%distributed" in cell.source], strict=True):
        assert not cell.errors
        for text in (cell.text, kept.text):
            shown = re.findall(r"^\[[01]\] (?:loss|step 20)", text, re.MULTILINE)
            assert len(shown) == 2, f"{cell.section}: {text}"

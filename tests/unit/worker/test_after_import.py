"""Patches to other packages' modules at import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from sgpu_magic.worker.process.patches import after_import, refuse_launchers


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with accelerate's name."""
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("from .launchers import notebook_launcher\n")
    (package / "launchers.py").write_text("def notebook_launcher(function, args=()):\n    return function(*args)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")


def train() -> None:
    raise AssertionError("it ran")


@pytest.mark.usefixtures("launchers")
def test_a_launcher_on_a_rank_says_that_the_ranks_are_there() -> None:
    refuse_launchers()
    accelerate = importlib.import_module("accelerate")
    try:
        with pytest.raises(
            RuntimeError, match=r"on rank 1: the run's 4 ranks are there already.*itself: train\(\.\.\.\)"
        ):
            accelerate.notebook_launcher(train, num_processes=4)
    finally:
        for name in ("accelerate", "accelerate.launchers"):
            del sys.modules[name]


def test_what_is_imported_already_is_changed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[object] = []
    after_import(("importlib",), seen.append)
    assert seen == [importlib]

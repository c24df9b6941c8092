"""Packages whose import was interrupted have all their submodules once they are imported again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgpu_magic.worker.cell.interrupted_imports import complete_interrupted_imports


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `halfway`, whose first import is interrupted after its submodule `part` was loaded."""
    folder = tmp_path / "halfway"
    (folder / "inner").mkdir(parents=True)
    (folder / "part.py").write_text("value = 1\n")
    (folder / "inner" / "__init__.py").write_text("from halfway.inner.leaf import value\n")
    (folder / "inner" / "leaf.py").write_text("value = 2\n")
    (folder / "__init__.py").write_text(
        "import os\n"
        "from halfway.inner import leaf\n"
        "from halfway.part import value\n"
        "if not os.path.exists(__file__ + '.again'):\n"
        "    raise KeyboardInterrupt\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("halfway")
    (folder / "__init__.py.again").touch()
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "halfway"]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_a_package_has_the_submodules_of_its_interrupted_import() -> None:
    loaded = sys.modules["halfway.part"]
    complete_interrupted_imports()
    again = importlib.import_module("halfway")
    assert again.part is loaded
    assert again.inner.leaf is sys.modules["halfway.inner.leaf"]


@pytest.mark.usefixtures("package")
def test_a_completed_package_has_its_usual_loader() -> None:
    complete_interrupted_imports()
    again = importlib.import_module("halfway")
    assert again.__spec__ is not None
    assert type(again.__loader__) is type(again.__spec__.loader) is type(importlib.import_module("json").__loader__)

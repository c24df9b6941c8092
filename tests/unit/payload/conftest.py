"""A notebook's namespace, and the receiving process for its values."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
from far_sides import FarSide, Notebook


@pytest.fixture(scope="module")
def far_side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarSide]:
    side = FarSide(tmp_path_factory.mktemp("far"))
    yield side
    side.close()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return Notebook(main.__dict__)

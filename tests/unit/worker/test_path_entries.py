"""Path entries that did not exist when the import system first checked them."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgpu_magic.worker.process import rank_context


@pytest.fixture(autouse=True)
def as_in_a_zygote(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(rank_context, "_newest_of_zygote", "")
    rank_context.remember_path_entries()
    yield
    importlib.invalidate_caches()


def missed(folder: Path) -> str:
    """Look for a module in a missing folder, which the import system caches."""
    sys.path.append(str(folder))
    with pytest.raises(ImportError):
        importlib.import_module(f"{folder.name}_has_it")
    assert sys.path_importer_cache[str(folder)] is None
    return str(folder)


def test_a_folder_that_appears_later_is_looked_at_again(tmp_path: Path) -> None:
    first, second = missed(tmp_path / "first"), missed(tmp_path / "second")
    rank_context.forget_missing_directories()
    assert not {first, second} & sys.path_importer_cache.keys()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "second_has_it.py").touch()
    assert importlib.import_module("second_has_it").__file__ == f"{second}/second_has_it.py"
    del sys.modules["second_has_it"]


def test_the_zygotes_entries_are_not_read_again(tmp_path: Path) -> None:
    """Reading the entries copies their pages. The zygote itself has dropped the missing ones."""
    of_zygote = missed(tmp_path / "zygotes")
    rank_context.remember_path_entries()
    assert of_zygote not in sys.path_importer_cache
    sys.path_importer_cache[of_zygote] = None
    newest = str(tmp_path)
    sys.path_importer_cache[newest] = importlib.machinery.FileFinder(newest)
    rank_context._newest_of_zygote = newest  # pyright: ignore[reportPrivateUsage]
    rank_context.forget_missing_directories()
    assert sys.path_importer_cache.pop(of_zygote, "read") is None
    del sys.path_importer_cache[newest]


def test_all_are_read_after_somebody_has_emptied_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path_importer_cache", {})
    missing = missed(tmp_path / "missing")
    importlib.import_module("json.tool")
    rank_context.forget_missing_directories()
    assert missing not in sys.path_importer_cache

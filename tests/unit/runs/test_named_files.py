"""The small files that a cell's text names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpu_magic.runs.submit import named_files
from sgpu_magic.runs.submit.named_files import files_named_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    (made / "data").mkdir(parents=True)
    for name in ("data/x.csv", "data/y.csv", "config.yaml", "ümläut file.txt"):
        (made / name).write_text("1,2,3")
    (tmp_path / "secret").write_text("not below the folder")
    (made / "link").symlink_to(tmp_path / "secret")
    (made / "inner").symlink_to(made / "config.yaml")
    return made


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("open('data/x.csv')", ["data/x.csv"]),
        ("%%distributed --gpus 2\nimport pandas\npandas.read_csv('./data/x.csv')", ["data/x.csv"]),
        ("!ls\nread('config.yaml', other=['data/y.csv', 'config.yaml'])", ["config.yaml", "data/y.csv"]),
        ("open('ümläut file.txt')", ["ümläut file.txt"]),
        ("open('inner')", ["inner"]),
        # a folder, no file, outside of the folder, and no literal
        ("open('data'), open('no.csv'), open('link'), open('../secret')", []),
        ("open('/etc/hostname'), open(name), open(b'data/x.csv'), open(f'data/{x}.csv')", []),
        ("open(f'{root}config.yaml')", []),
        ("# data/x.csv", []),
        ("open('data/x.csv'", []),
        ("", []),
    ],
)
def test_strings_of_the_cell_name_files_below_the_folder(source: str, names: list[str], folder: Path) -> None:
    found = files_named_in(source, folder)
    assert sorted(found.small) == names
    assert not found.large


def test_what_is_uploaded_anyway_is_left_out(folder: Path) -> None:
    cell = "open('data/x.csv'), open('config.yaml')"
    assert list(files_named_in(cell, folder, ["data"]).small) == ["config.yaml"]
    assert list(files_named_in(cell, folder, [str(folder)]).small) == []


def test_a_large_file_stays_and_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_files, "MOST_BYTES", 4)
    found = files_named_in("open('data/x.csv')", folder)
    assert (found.small, found.large) == ({}, {"data/x.csv": 5})
    (note,) = found.notes()
    assert "--upload data/x.csv" in note


def test_what_travels_is_told_in_one_note(folder: Path) -> None:
    for number in range(30):
        (folder / f"{number}.txt").write_text("1234567890")
    cell = "\n".join(f"open('{number}.txt')" for number in range(30))
    (note,) = files_named_in(cell, folder).notes()
    assert "30 files, 300 B" in note
    assert "and 22 more" in note


@given(st.text())
def test_any_string_may_stand_in_a_cell(text: str) -> None:
    found = files_named_in(f"x = {text!r}", Path(__file__).parent)
    assert set(found.small) <= {each.name for each in Path(__file__).parent.iterdir()}

"""The browser views: their records match Python's, and the built files match the sources."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from npm_packages import ROOT, SOURCES, npm

STATIC = ROOT / "sgpu_magic" / "static"
# every widget sends its view to the page: with the out-of-memory table 68 kB, a third of that compressed
MOST_BYTES = {"run_view.js": 84_000, "panel.js": 102_500}


# ------------------------------------------------------------------ records


def test_the_front_ends_records_are_those_that_python_writes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "front_end_records.py"), "--check"]
    reported = subprocess.run(command, capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stdout + reported.stderr


# ------------------------------------------------------------------ the built file


@pytest.mark.timeout(500)
def test_a_fresh_build_gives_the_committed_bytes(view_builder: Path, tmp_path: Path) -> None:
    reported = npm(view_builder, "run", "build:view", "--", f"--outdir={tmp_path}")
    assert reported.returncode == 0, reported.stderr
    for name in MOST_BYTES:
        assert (tmp_path / name).read_bytes() == (STATIC / name).read_bytes(), f"{name} is older: npm run build:view"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(MOST_BYTES)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("test", marks=pytest.mark.slow),
        pytest.param("check", marks=pytest.mark.slow),
        pytest.param("lint", marks=pytest.mark.slow),
    ],
)
def test_the_sources_pass_their_checks(front_end: Path, script: str) -> None:
    reported = npm(front_end, "run", script)
    assert reported.returncode == 0, reported.stdout + reported.stderr


@pytest.mark.parametrize("name", MOST_BYTES)
def test_a_built_view_is_one_small_file_without_a_map(name: str) -> None:
    text = (STATIC / name).read_text()
    assert len(text.encode()) < MOST_BYTES[name]
    assert "sourceMappingURL" not in text
    assert "import(" not in text
    assert str(ROOT) not in text


def test_the_lock_file_names_no_host() -> None:
    packages = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    assert not [name for name, entry in packages.items() if "resolved" in entry]

"""Completion in a shell: candidates, from files and without a pool, and what is imported for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept_runs import KeptRuns

from sgpu_magic.cli.jobs import JobRecord, write
from sgpu_magic.client.pools_file import PoolEntry, add_pool
from sgpu_magic.config import load_settings
from sgpu_magic.system.secure_sockets import new_key_pair
from sgpu_magic.wire.base import RunState


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptRuns]:
    names = {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "own/config.toml", "POOLS_FILE": "pools.toml"}
    for name, value in names.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    made = KeptRuns(load_settings())
    made.announce()
    made.add("7f3a0001", RunState.FAILED)
    made.add("5d050001", RunState.RUNNING)
    yield made
    made.close()


def complete(tmp_path: Path, line: str, *python: str, shell: str = "bash") -> tuple[list[str], str]:
    """What the shell gets for a command line with the cursor at its end, and what Python wrote to standard error."""
    out = tmp_path / "candidates"
    variables = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SHELL": shell, "COMP_LINE": line,
        "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *python, "-m", "sgpu_magic.cli"],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return [candidate.strip() for candidate in out.read_text().split("\n")], done.stderr


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("sgpu lo", ["logs"]),
        ("sgpu pool st", ["status", "stop"]),
        ("sgpu runs --no", ["--notebook"]),
        ("sgpu runs --state fa", ["failed"]),
        ("sgpu logs ", ["5d05", "7f3a"]),
        # only active runs can be cancelled
        ("sgpu cancel ", ["5d05"]),
        ("sgpu jobs log ", ["beef"]),
        ("sgpu run --pool ", ["local", "team"]),
        ("sgpu pool remove ", ["team"]),
        ("sgpu run --type h1", ["h100"]),
        ("sgpu help us", ["usage"]),
    ],
)
def test_candidates(kept: KeptRuns, tmp_path: Path, line: str, candidates: list[str]):
    add_pool(PoolEntry("team", "tcp://127.0.0.1:1", new_key_pair().public))
    write(load_settings(), JobRecord(job_id="beef0001", source="n.ipynb", copy="", started_at=1.0))
    found, _ = complete(tmp_path, line)
    assert sorted(found) == candidates


def test_a_shell_that_shows_descriptions_gets_them(kept: KeptRuns, tmp_path: Path):
    found, _ = complete(tmp_path, "sgpu logs ", shell="zsh")
    assert sorted(found) == ["5d05:cell, running", "7f3a:cell, failed"]


def test_nothing_heavy_is_imported_and_nothing_is_started(kept: KeptRuns, tmp_path: Path):
    before = {path.name for path in load_settings().state_path.iterdir()}
    _, written = complete(tmp_path, "sgpu logs ", "-X", "importtime")
    imported = set(re.findall(r"\| +([\w.]+)$", written, re.MULTILINE))
    assert "argcomplete" in imported
    assert not imported & {"torch", "IPython", "mlflow", "ray"}
    assert {path.name for path in load_settings().state_path.iterdir()} == before
    # without a shell that asks, argcomplete is not imported either
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sgpu_magic.cli", "--version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "argcomplete" not in done.stderr


def test_bash_completes_with_the_registered_function(kept: KeptRuns, tmp_path: Path):
    folder = Path(sys.executable).parent
    script = (
        'eval "$(register-python-argcomplete sgpu)"\n'
        'COMP_LINE="sgpu cancel 5"; COMP_POINT=13; COMP_WORDS=(sgpu cancel 5); COMP_CWORD=2; COMP_TYPE=9\n'
        '_python_argcomplete sgpu 5 cancel; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "5d05"

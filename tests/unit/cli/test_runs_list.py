"""`sgpu runs`: columns, the width of a terminal, and filters."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from kept_runs import KeptRuns
from status_rows import run_summary

from sgpu_magic.cli import main as cli
from sgpu_magic.cli.runs import RunFilter, runs_table
from sgpu_magic.config import load_settings
from sgpu_magic.views.units import TIMES
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.pool_status import RunSummary

NOW = time.mktime((2026, 11, 29, 20, 55, 0, 0, 0, -1))
FAILURE = "rank 1: ValueError: the loss is NaN in step 41 of epoch 3, and this goes on for longer than a line has room"


def run(number: int, **fields: object) -> RunSummary:
    """A run on four A10 that took 2 min 14 s."""
    given: dict[str, object] = {
        "run_id": f"{number:04x}0001",
        "ranks": 4,
        "state": RunState.SUCCEEDED,
        "submitted_at": NOW - 600,
        "started_at": NOW - 500,
        "ended_at": NOW - 366,
        "notebook": "/work/digits.ipynb",
    }
    return run_summary(**given | fields)


RUNS = (
    run(0xA001),
    run(0xA002, state=RunState.FAILED, failure=f"{FAILURE}\nsecond line", name="evaluate_on_the_whole_validation_set"),
    run(0xA003, state=RunState.QUEUED, started_at=None, ended_at=None, waiting_for="needs 2 more A10"),
    run(0xA004, state=RunState.CANCELLED, kind=RunKind.SESSION, name="work", submitted_at=NOW - 86400 * 3),
    run(0xA005, state=RunState.RUNNING, ended_at=None, started_at=NOW - 3905, device_type="cpu"),
    run(0xA006, state=RunState.TIMED_OUT, submitted_at=NOW - 86400 * 400, hourly=3.0, cost=12.5, currency="USD"),
)


def test_each_run_has_its_state_time_duration_and_devices():
    head, *lines = runs_table(RUNS, NOW).splitlines()
    assert head.split() == ["run", "name", "state", "submitted", "duration", "devices", "cost", "notebook"]
    rows = {line.split()[0]: line for line in lines if not line.startswith(" ")}
    assert list(rows) == ["a001", "a002", "a003", "a004", "a005", "a006"]
    assert rows["a001"].split() == [
        "a001", "train", "succeeded", "20:45", "2", "min", "14", "s", "4", TIMES, "A10", "digits.ipynb",
    ]  # fmt: skip
    assert re.search(rf" queued +20:45 +- +4 {TIMES} A10 ", rows["a003"])
    assert " session work " in rows["a004"]
    assert " cancelled   Nov 26 20:55 " in rows["a004"]
    assert f" 1 h 05 min   4 {TIMES} cpu " in rows["a005"]
    assert " timed out   2025-10-25 " in rows["a006"]
    assert "$12.50" in rows["a006"]


def test_why_a_run_failed_or_waits_is_below_it():
    lines = runs_table(RUNS, NOW).splitlines()
    below = {lines[at - 1].split()[0]: line for at, line in enumerate(lines) if line.startswith(" ")}
    assert below.keys() == {"a002", "a003"}
    assert below["a002"].startswith("       rank 1: ValueError: the loss is NaN in step 41")
    assert "second line" not in below["a002"]
    assert below["a003"] == "       needs 2 more A10"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_every_line_fits_in_the_terminal(width: int):
    pools = {each.run_id: "local" for each in RUNS}
    simulated = tuple(msgspec.structs.replace(each, simulated=each is not RUNS[0]) for each in RUNS)
    for runs in (RUNS, simulated):
        for of_pools in (None, pools):
            lines = runs_table(runs, NOW, of_pools, width).splitlines()
            assert max(map(len, lines)) <= width
            # these are never left out
            assert {"run", "name", "state", "submitted", "duration", "devices"} <= set(lines[0].split())
            assert any("rank 1: ValueError: the loss is NaN in step 41" in line for line in lines)


def test_a_notebook_is_left_out_before_a_cost_and_a_name_is_cut():
    assert "notebook" in runs_table(RUNS, NOW, width=140).splitlines()[0]
    narrow = runs_table(RUNS, NOW, width=80).splitlines()
    assert "notebook" not in narrow[0]
    assert "cost" in narrow[0]
    assert re.match(r"a002   evaluate_on_\w*…   failed ", narrow[2])


def test_simulated_gpus_are_marked_once_if_all_are():
    simulated = [msgspec.structs.replace(each, simulated=each.device_type != "cpu") for each in RUNS]
    table = runs_table(simulated, NOW)
    assert table.splitlines()[-1] == "All GPUs in this list are simulated on CPU."
    assert "(simulated)" not in table
    mixed = runs_table([RUNS[0], *simulated[1:]], NOW)
    assert mixed.count(f"4 {TIMES} A10 (simulated)") == 4
    assert "All GPUs" not in mixed


@pytest.mark.parametrize(
    ("wanted", "accepted"),
    [
        (RunFilter(), 6),
        (RunFilter(states=frozenset({RunState.FAILED, RunState.TIMED_OUT})), 2),
        (RunFilter(since=NOW - 3600), 4),
        (RunFilter(notebook="digits.ipynb"), 6),
        (RunFilter(notebook="work/digits.ipynb"), 6),
        (RunFilter(notebook="*.ipynb"), 6),
        (RunFilter(notebook="other/digits.ipynb"), 0),
        (RunFilter(notebook="digits"), 0),
        (RunFilter(notebook="digits.ipynb", states=frozenset({RunState.QUEUED}), since=NOW - 3600), 1),
    ],
)
def test_a_filter(wanted: RunFilter, accepted: int):
    assert sum(map(wanted.accepts, RUNS)) == accepted
    assert wanted.is_set == (wanted != RunFilter())


# ------------------------------------------------------------ the command


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptRuns]:
    for name, value in {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "own/config.toml"}.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    made = KeptRuns(load_settings())
    yield made
    made.close()


def test_filters_count_before_the_limit(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    kept.add("7f3a0001", RunState.FAILED, failure="no room")
    for number in range(3):
        kept.add(f"7f3b000{number}")
    assert cli.main(["runs", "-n", "1", "--state", "failed", "--state", "timed-out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "7f3a", "no"]
    assert cli.main(["runs", "--state", "queued"]) == 0
    assert capsys.readouterr() == ("no run matches\n", "")
    # these runs were submitted in 1970
    assert cli.main(["runs", "--since", "7d"]) == 0
    assert capsys.readouterr() == ("no run matches\n", "")
    assert cli.main(["runs", "--since", "soon"]) == 2
    assert "'soon' is not a length of time" in capsys.readouterr().err


def test_the_width_is_that_of_the_terminal(kept: KeptRuns):
    kept.add("7f3a0001", RunState.FAILED, failure="x" * 300)
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 64, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "sgpu_magic.cli", "runs"]
    subprocess.run(command, stdin=inner, stdout=inner, env=environ, timeout=60, check=True)
    os.close(inner)
    shown = os.read(outer, 1 << 16).decode()
    os.close(outer)
    assert max(map(len, shown.splitlines())) == 64
    assert shown.splitlines()[-1].endswith("x…")

"""`sgpu logs` of runs without output, and lines that are too long for memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept_runs import KeptRuns

from sgpu_magic.cli import main as cli
from sgpu_magic.cli.logs import RankLog
from sgpu_magic.config import load_settings
from sgpu_magic.wire.base import RunState

RUN = "7f3a0001"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptRuns]:
    for name, value in {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "own/config.toml"}.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    made = KeptRuns(load_settings())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("state", "started", "failure", "says"),
    [
        (RunState.SUCCEEDED, True, "", "has printed nothing"),
        (RunState.QUEUED, False, "", "is queued: no rank has printed yet. --follow waits for output"),
        (RunState.RUNNING, True, "", "is running: no rank has printed yet. --follow waits for output"),
        (RunState.CANCELLED, False, "", "cancelled before its ranks started, so there are no logs"),
        (RunState.FAILED, False, "no wheel", "failed before its ranks started (no wheel), so there are no logs"),
    ],
)  # fmt: skip
def test_why_a_run_has_no_output(
    kept: KeptRuns, capsys: pytest.CaptureFixture[str], state: RunState, started: bool, failure: str, says: str
):
    kept.announce()
    kept.add(RUN, state, started=started, failure=failure)
    assert cli.main(["logs", "7f3a"]) == 0
    assert capsys.readouterr() == ("", f"sgpu: run 7f3a {says}\n")


def test_a_directory_that_no_ledger_knows(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    directory = kept.add("7f3a0002").with_name(RUN)
    directory.mkdir()
    assert cli.main(["logs", RUN]) == 0
    assert capsys.readouterr() == ("", "sgpu: run 7f3a has no logs\n")
    assert cli.main(["logs", RUN, "--rank", "0"]) == 2
    assert "run 7f3a has no rank that has started, not 0." in capsys.readouterr().err
    (directory / "rank-0.log").write_bytes(b"one\n")
    assert cli.main(["logs", RUN, "--rank", "1"]) == 2
    assert "run 7f3a has only rank 0, not 1." in capsys.readouterr().err


def test_following_an_ended_run_ends_with_its_state(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    kept.add(RUN, RunState.FAILED, failure="rank 1: ValueError: NaN", files={"rank-0.log": b"a\n", "rank-1.log": b"b"})
    assert cli.main(["logs", RUN, "--follow"]) == 0
    assert capsys.readouterr() == ("[0] a\n[1] b\n", "sgpu: run 7f3a failed: rank 1: ValueError: NaN\n")


def test_lines_that_do_not_end_are_written_in_pieces(tmp_path: Path):
    path = tmp_path / "rank-0.log"
    # a bar that is redrawn repeatedly, and a line without an end
    path.write_bytes(b"1%........\r2%........\r3%........\r\n" + b"x" * 30)
    log = RankLog(path, "[0] {}".format, lambda _: None, read_bytes=8, longest_line_chars=12)
    out = io.StringIO()
    while log.copy_to(out):
        assert len(log._pending) <= 20
    log.finish(out)
    log.close()
    bar, *pieces = out.getvalue().splitlines()
    assert bar == "[0] 3%........"
    assert "".join(piece.removeprefix("[0] ") for piece in pieces) == "x" * 30
    assert all(piece.startswith("[0] ") and len(piece) <= 16 for piece in pieces)

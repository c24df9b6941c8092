"""`sgpu jobs`: the list of jobs, their logs, stopping one, and detached jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

from sgpu_magic.cli import main as cli
from sgpu_magic.cli.jobs import LOG, JobRecord, all_jobs, find, folder_of, prune, with_this_process, write
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.system.processes import process_start

NOW = 1_700_000_000.0


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a state directory without jobs, which the command shares."""
    monkeypatch.setenv("SGPU_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SGPU_CONFIG", str(tmp_path / "config.toml"))
    return load_settings()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def job(number: int, **fields: object) -> JobRecord:
    """The record of a job whose id begins with `number`, started `number` seconds after `NOW`."""
    values = {"source": f"/data/n{number}.ipynb", "copy": f"/data/n{number}.done.ipynb", "started_at": NOW + number}
    return JobRecord(job_id=f"{number:02x}ab{number:04x}", **values | fields)  # type: ignore[arg-type]


def test_without_a_job_the_list_says_how_to_start_one(settings: Settings, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["jobs"]) == 0
    assert capsys.readouterr().out == "no jobs yet: `sgpu run notebook.ipynb` starts one\n"


def test_jobs_are_listed_with_their_states_newest_first(settings: Settings, capsys: pytest.CaptureFixture[str]):
    codes = {1: 0, 2: 1, 3: 2, 4: 3, 5: 124, 6: 130, 7: 143, 8: 57}
    for number, code in codes.items():
        write(settings, job(number, code=code, ended_at=NOW + number + 65, done=2, cells=3))
    write(settings, with_this_process(job(9, started_at=time.time() - 5, done=1, cells=4, copy="")))
    # the process is gone and its pid was reused
    write(settings, job(10, pid=os.getpid(), process_start=process_start(os.getpid()) + 1, started_at=NOW))
    # the process had ended before its pid was recorded
    write(settings, job(12, pid=2**22 + 1, started_at=NOW - 1))
    (folder_of(settings, job(11).job_id)).mkdir()
    (settings.state_path / "jobs" / "notes").mkdir()
    assert cli.main(["jobs"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["job", "notebook", "state", "cells", "started", "duration", "executed", "copy"]
    rows = {cells[1]: cells for line in lines if (cells := re.split(r" {2,}", line.strip()))}
    assert list(rows) == [f"n{number}.ipynb" for number in (9, 8, 7, 6, 5, 4, 3, 2, 1, 10, 12)]
    states = {name: cells[2] for name, cells in rows.items()}
    assert states == {
        "n1.ipynb": "succeeded", "n2.ipynb": "failed (1)", "n3.ipynb": "not possible (2)",
        "n4.ipynb": "pool failed (3)", "n5.ipynb": "timed out (124)", "n6.ipynb": "interrupted (130)",
        "n7.ipynb": "terminated (143)", "n8.ipynb": "failed (57)", "n9.ipynb": "running", "n10.ipynb": "killed",
        "n12.ipynb": "killed",
    }  # fmt: skip
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW + 2))
    assert rows["n2.ipynb"] == ["02ab", "n2.ipynb", "failed (1)", "2/3", started, "65 s", "/data/n2.done.ipynb"]
    assert (rows["n9.ipynb"][3], rows["n9.ipynb"][6]) == ("1/4", "-")
    assert re.fullmatch(r"\d+ s", rows["n9.ipynb"][5])
    assert rows["n10.ipynb"][5] == "-"
    assert cli.main(["jobs", "-n", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_job_is_found_by_the_beginning_of_its_id(settings: Settings):
    for number in (1, 2, 0x10):
        write(settings, job(number))
    assert find(settings, " 10AB ").source == "/data/n16.ipynb"
    with pytest.raises(UsageError, match=r"'0' matches 2 jobs: 02ab, 01ab\. Give more digits"):
        find(settings, "0")
    for text in ("f", "", "no id"):
        with pytest.raises(UsageError, match=f"no job has an id that begins with '{text}'. `sgpu jobs` lists them"):
            find(settings, text)


def test_the_log_of_a_job(settings: Settings, capsys: pytest.CaptureFixture[str]):
    detached = job(1, detached=True)
    write(settings, detached)
    (folder_of(settings, detached.job_id) / LOG).write_bytes("[1/2] print('ü')\n\xff\n".encode("latin-1"))
    write(settings, job(2))
    assert cli.main(["jobs", "log", "01"]) == 0
    assert capsys.readouterr().out == "[1/2] print('\ufffd')\n\ufffd\n"
    assert cli.main(["jobs", "log", "02"]) == 2
    err = capsys.readouterr().err
    assert "job 02ab was not started with --detach, so its output went to its terminal." in err
    assert "Its executed copy is /data/n2.done.ipynb." in err
    assert cli.main(["jobs", "log", "03"]) == 2


def test_stopping_a_job_terminates_its_process(
    settings: Settings, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
):
    write(settings, job(1, pid=sleeper.pid, process_start=process_start(sleeper.pid)))
    write(settings, job(2, ended_at=time.time(), code=1))
    assert cli.main(["jobs", "stop", "01"]) == 0
    assert "job 01ab is ending: its cell is interrupted and its runs are cancelled." in capsys.readouterr().out
    assert sleeper.wait(20) == -signal.SIGTERM
    assert cli.main(["jobs", "stop", "01"]) == 2
    assert "job 01ab has ended: killed." in capsys.readouterr().err
    assert cli.main(["jobs", "stop", "02"]) == 2
    assert "job 02ab has ended: failed." in capsys.readouterr().err


def test_of_ended_jobs_the_newest_are_kept(settings: Settings):
    write(settings, with_this_process(job(1)))
    for number in (2, 3, 4, 5):
        write(settings, job(number, ended_at=time.time(), code=0))
    (folder_of(settings, job(2).job_id) / LOG).touch()
    prune(settings, kept=2)
    # the oldest job is still running
    assert [record.source for record in all_jobs(settings)] == [f"/data/n{number}.ipynb" for number in (5, 4, 1)]
    assert not folder_of(settings, job(2).job_id).exists()


def test_a_record_that_can_not_be_written_does_not_end_its_job(settings: Settings):
    settings.state_path.parent.mkdir(exist_ok=True)
    settings.state_path.write_text("a file in the way")
    write(settings, job(1))
    assert all_jobs(settings) == []


def test_a_detached_job_goes_on_without_its_terminal(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its kernel does not start: the kernel's message is in the job's log, and the exit code in the list."""
    spec = tmp_path / "jupyter" / "kernels" / "broken"
    spec.mkdir(parents=True)
    # the kernel blocks on this until the test lets it end
    os.mkfifo(tmp_path / "go")
    argv = ["sh", "-c", f"read line < {tmp_path / 'go'}; exit 1"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "broken", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    notebook = tmp_path / "nightly.ipynb"
    notebook.write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    copy = tmp_path / "copy.ipynb"
    assert cli.main(["run", str(notebook), "--detach", "--kernel", "broken", "-o", str(copy)]) == 0
    out = capsys.readouterr().out
    (record,) = all_jobs(settings)
    log = folder_of(settings, record.job_id) / LOG
    try:
        match = re.fullmatch(
            rf"job (?P<job>[0-9a-f]{{4}}) continues without this terminal: process (?P<pid>\d+)\n"
            rf"executed copy: {copy}\nlog: {log}\n`sgpu jobs` lists it, `sgpu jobs log (?P=job)` shows its output, "
            r"`sgpu jobs stop (?P=job)` ends it\.\n",
            out,
        )
        assert match is not None, out
        assert (record.pid, record.detached) == (int(match["pid"]), True)
        assert record.job_id.startswith(match["job"])
        # the job has its own session, so neither a terminal's Ctrl-C nor the hang-up ends it
        assert os.getsid(record.pid) == record.pid
        os.kill(record.pid, signal.SIGHUP)
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert cli.main(["jobs"]) == 0
        assert re.search(rf"^{match['job']} +nightly\.ipynb +running +0/0 ", capsys.readouterr().out, re.MULTILINE)
        go_on(tmp_path / "go")
        eventually(lambda: all_jobs(settings)[0].code is not None, 60, log.read_text)
    finally:
        os.kill(record.pid, signal.SIGKILL)
        os.waitpid(record.pid, 0)
    assert cli.main(["jobs", "log", match["job"]]) == 0
    assert "the kernel broken does not start: " in capsys.readouterr().out
    assert cli.main(["jobs"]) == 0
    assert "pool failed (3)" in capsys.readouterr().out
    assert json.loads(copy.read_text())["metadata"]["papermill"]["exception"] is True


def go_on(fifo: Path) -> None:
    """Let the kernel end once it reads."""

    def opened() -> bool:
        try:
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    eventually(opened, 60, "the kernel was not started")

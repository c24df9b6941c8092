"""What a run's directory needs for a replay, and which Python the replay gets."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from launches import placed_launch

from sgpu_magic.errors import UsageError
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.payload.pack import Packed, pack_namespace
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.runs.replay import recorded
from sgpu_magic.runs.replay.circumstances import Chosen, choose, of_replay, of_run, path_of
from sgpu_magic.runs.replay.recorded import Recorded, read_recorded
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.files import EVENTS, KEY, PAYLOAD, REQUIREMENTS
from sgpu_magic.wire.run import RUN_RECORD, UNDER_WAY, RunRecord

SECRET = b"k" * 32


class Directory:
    """A run's directory as a pool and its agent write it."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        launch = placed_launch(folder, is_remote=False)
        self.path = folder / "r1"
        self.spec = msgspec.structs.replace(launch.spec, **spec)
        self.packed: Packed = pack_namespace({"x": list(range(100))}, {}, SECRET)
        self.record = RunRecord(
            spec=self.spec,
            executable=sys.executable,
            cwd="/nb",
            lease=launch.lease,
            payload_layout=self.packed.layout,
            payload_kept=True,
            payload_note="",
            state=RunState.SUCCEEDED,
            sys_path=("/nb", *launch.context.installed, "/shelf"),
            installed=launch.context.installed,
        )

    def apply(self, *bodies: ev.EventBody) -> None:
        log = RunLog(self.path, self.spec.run_id)
        for body in (ev.Submitted(spec=self.spec), *bodies):
            log.append(body, time.time())
        log.close()

    def keep(self, **record: Any) -> None:
        (self.path / KEY).write_bytes(SECRET)
        (self.path / PAYLOAD).write_bytes(self.packed.to_bytes())
        kept = msgspec.structs.replace(self.record, **record)
        (self.path / RUN_RECORD).write_bytes(msgspec.json.encode(kept))

    @property
    def problem(self) -> str:
        """Why it can't be replayed."""
        with pytest.raises(UsageError) as raised:
            read_recorded(self.path)
        return raised.value.message


STARTED = ev.RanksStarted(pids=(1,), warm="")
ENDED = ev.RunEnded(state=RunState.SUCCEEDED)


def test_a_run_is_read_with_its_variables_and_its_tags(tmp_path: Path):
    directory = Directory(tmp_path)
    directory.keep()
    directory.apply(STARTED, ev.Described(tags=(("mlflow.source.git.commit", "c0ffee"),)), ENDED)
    found = read_recorded(directory.path)
    assert (found.key, found.packed.names, found.requirements) == (SECRET, (), None)
    assert found.packed.to_bytes() == directory.packed.to_bytes()
    assert found.tags == {"mlflow.source.git.commit": "c0ffee"}
    # events before the damage are still read
    whole = (directory.path / EVENTS).read_bytes()
    (directory.path / EVENTS).write_bytes(whole + b"\xff" * 100)
    assert read_recorded(directory.path).tags == found.tags
    (directory.path / EVENTS).unlink()
    assert read_recorded(directory.path).tags == {}


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded, "_PATIENCE_S", 0.0)
    directory = Directory(tmp_path)
    path = directory.path
    directory.apply()
    assert directory.problem == (
        f"run r1 can't be replayed: its ranks never started, so its directory {path} has no run.json. "
        "Run its cell again."
    )
    (path / EVENTS).unlink()
    directory.apply(STARTED)
    assert directory.problem == (
        f"run r1 can't be replayed yet: its directory {path} has no run.json, which a cell of a session gets "
        "when it has ended."
    )
    (path / RUN_RECORD).write_text("{")
    assert directory.problem.startswith(f"run r1 can't be replayed: {path}/run.json can't be read (")
    directory.keep(payload_kept=False, payload_note="its 3 GB are more than keep_payload")
    assert directory.problem == (
        f"run r1 can't be replayed: its variables are not in {path}: its 3 GB are more than keep_payload. Run its cell "
        "again; the setting keep_payload says how large a payload is kept."
    )
    directory.keep(spec=msgspec.structs.replace(directory.spec, kind=RunKind.SESSION))
    assert directory.problem == "run r1 is a session: only cells and calls of functions can be replayed."
    directory.keep()
    (path / PAYLOAD).write_bytes(b"cut")
    assert directory.problem.startswith(f"run r1 can't be replayed: its variables in {path} can't be read (3 bytes of ")
    (path / KEY).unlink()
    assert "No such file or directory" in directory.problem


def test_files_that_are_being_written_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The pool writes them after the result: an immediate request still gets them."""
    directory = Directory(tmp_path)
    directory.keep(payload_kept=False, payload_note=UNDER_WAY)
    directory.apply(STARTED, ENDED)
    monkeypatch.setattr(recorded.time, "sleep", lambda _: directory.keep())
    assert read_recorded(directory.path).record.payload_kept


# ---------------------------------------------------------------- choice of Python


def of(directory: Directory) -> Recorded:
    return Recorded(directory.path, directory.record, directory.packed, SECRET, {"mlflow.source.git.dirty": "True"})


def python(folder: Path, text: str) -> str:
    """A program in place of another Python."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_the_replays_python_has_the_runs_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGPU_STATE_DIR", str(tmp_path / "state"))
    own = Chosen(digest=take_snapshot().digest)
    directory = Directory(tmp_path)
    assert choose(of(directory), own.digest, here=False) == own
    assert choose(of(directory), "", here=False) == own
    # the run's own Python, which is asked directly: here, this one under another name
    directory.record = msgspec.structs.replace(
        directory.record, executable=python(tmp_path, f'exec {sys.executable} "$@"')
    )
    found = choose(of(directory), own.digest + "00", here=False)
    assert found == own
    found = choose(of(directory), "", here=False)
    assert found.interpreter is not None
    assert (found.interpreter.executable, found.digest) == (sys.executable, own.digest)
    assert path_of(of(directory), found) == directory.record.sys_path
    assert choose(of(directory), "", here=True) == own
    # a Python with other packages, or one that no longer works, is not used
    directory.record = msgspec.structs.replace(directory.record, executable=python(tmp_path, "exit 1"))
    assert choose(of(directory), "", here=False) == own
    # the pins from the run's directory
    pins = "# Python 3.9.1 on linux_x86_64, digest 0123abcd\nSix==1.16.0 --hash=sha256:00  # why\nodd>=2\n-r other\n"
    (directory.path / REQUIREMENTS).write_text(pins)
    found = choose(of(directory), "0123abcd", here=False)
    assert found == Chosen(env_version=str(directory.path / REQUIREMENTS), digest="0123abcd")
    folders = path_of(of(directory), found)
    assert folders[:2] == ("/nb", "/shelf")
    assert not set(folders) & set(directory.record.installed)
    then = of_run(of(directory))
    assert (then.python, then.digest, then.packages, then.dirty) == ("3.9.1", "0123abcd", {"six": "1.16.0"}, True)
    now = of_replay(found, str(tmp_path), then.packages)
    assert (now.python, now.digest, now.packages) == ("", "0123abcd", then.packages)
    assert of_replay(own, str(tmp_path), {}).packages["msgspec"] == msgspec.__version__


def test_a_python_that_pools_build_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGPU_STATE_DIR", str(tmp_path / "state"))
    built, started = tmp_path / "state" / "environments" / "00", tmp_path / "started"
    os.makedirs(built)
    directory = Directory(tmp_path)
    directory.record = msgspec.structs.replace(directory.record, executable=python(built, f"touch {started}"))
    own = Chosen(digest=take_snapshot().digest)
    assert choose(of(directory), "", here=False) == own
    assert not started.exists()

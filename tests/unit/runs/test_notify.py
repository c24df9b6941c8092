"""When the command of the setting `notify` is run, by the process that follows a run or by a detached run's pool."""

from __future__ import annotations

import shlex
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from scripted_pools import RUN, ScriptedPool, spec_of
from waiting import eventually

from sgpu_magic.client.run import ClientRun
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.pool.detached_run_notifier import DetachedRunNotifier
from sgpu_magic.runs.follow.run_loop import Subscription
from sgpu_magic.runs.follow.run_notifier import RunNotifier
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.publisher import SilentPublisher
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.base import FailureKind, RunKind, RunState
from sgpu_magic.wire.events import Event
from sgpu_magic.wire.rank_events import Failure

APPEND = (
    "import os, sys\n"
    "print(*(os.environ['SGPU_ENDED_' + name] for name in sys.argv[2:]), sep='|', file=open(sys.argv[1], 'a'))"
)
FAILURE = Failure(kind=FailureKind.USER_CODE, message="bad batch", type_name="ValueError", rank=3, at=1.0)


class Calls:
    """A command that records its calls in a file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "calls"
        self.command = shlex.join(
            [sys.executable, "-c", APPEND, str(self._file), "NAME", "STATE", "SECONDS", "REASON", "POOL"]
        )

    @property
    def lines(self) -> list[str]:
        return self._file.read_text().splitlines() if self._file.is_file() else []


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path)


def follow(commands: RunNotifier, *bodies: ev.EventBody, **of_spec: Any) -> None:
    """Process a run's events as the process that submitted it does, and wait for the commands."""
    pool = ScriptedPool()
    try:
        spec = msgspec.structs.replace(spec_of(), name="train_digits", **of_spec)
        run = ClientRun(spec, b"k" * 32, pool.link, pool.link.follow(RUN), Path("/runs/0000abcd"))
        listener: Any = SimpleNamespace(on_run_ended=lambda *_: None)
        followed = Subscription(run, RunView(spec), SilentPublisher(), listener, on_end=commands.run_ended)
        for seq, body in enumerate(bodies, 1):
            followed.apply(Event(run_id=RUN, seq=seq, at=1.0, body=body), ())
    finally:
        pool.link.close()
    commands.close()


def commands_of(**settings: Any) -> RunNotifier:
    return RunNotifier(lambda: Settings(**settings))


def test_a_long_run_is_told_once(calls: Calls):
    ended = ev.RunEnded(state=RunState.FAILED, failure=FAILURE, total_s=720.0)
    follow(commands_of(notify=calls.command), ended)
    assert calls.lines == ["train_digits|failed|720.0|rank 3: ValueError: bad batch|local"]
    follow(commands_of(notify=calls.command), ev.RunEnded(state=RunState.CANCELLED, reason="interrupted", total_s=60.0))
    assert calls.lines[1:] == ["train_digits|cancelled|60.0|interrupted|local"]


@pytest.mark.parametrize(
    ("settings", "bodies", "of_spec"),
    [
        ({}, [ev.RunEnded(state=RunState.SUCCEEDED, total_s=59.9)], {}),
        ({"notify_after_s": 800.0}, [ev.RunEnded(state=RunState.SUCCEEDED, total_s=720.0)], {}),
        ({}, [ev.RunEnded(state=RunState.SUCCEEDED, total_s=720.0)], {"kind": RunKind.SESSION}),
        ({}, [ev.Detached(reason="it was detached"), ev.RunEnded(state=RunState.SUCCEEDED, total_s=720.0)], {}),
        ({}, [ev.RunEnded(state=RunState.SUCCEEDED, total_s=720.0)], {"detach": True}),
    ],
    ids=["short", "setting", "session", "detached", "submitted detached"],
)
def test_other_runs_are_not(
    calls: Calls, settings: dict[str, Any], bodies: list[ev.EventBody], of_spec: dict[str, Any]
):
    follow(commands_of(notify=calls.command, **settings), *bodies, **of_spec)
    assert calls.lines == []


def test_a_failure_is_a_note(capsys: pytest.CaptureFixture[str]):
    follow(commands_of(notify="/nowhere/tell"), ev.RunEnded(state=RunState.SUCCEEDED, total_s=720.0))
    assert capsys.readouterr().err == (
        "sgpu: the command of the setting notify failed for train_digits: it can't be started: No such file or "
        "directory: /nowhere/tell\n"
    )


def test_the_pool_tells_of_detached_runs_only(calls: Calls):
    commands = DetachedRunNotifier(lambda: Settings(notify=calls.command))
    ended = ev.RunEnded(state=RunState.FAILED, failure=FAILURE, total_s=720.0)

    def end(**of_spec: Any) -> None:
        spec = msgspec.structs.replace(spec_of(), name="train_digits", **of_spec)
        commands.run_ended(spec, ended)

    end()
    end(detach=True)

    def is_over() -> bool:
        return all(thread.name != "sgpu-notify" for thread in threading.enumerate())

    eventually(is_over, 30, "the commands go on")
    assert calls.lines == ["train_digits|failed|720.0|rank 3: ValueError: bad batch|local"]


def test_a_command_that_can_not_be_read_is_refused():
    with pytest.raises(UsageError, match="the setting notify can't be read: No closing quotation"):
        load_settings({"SGPU_NOTIFY": "mail 'ann"})

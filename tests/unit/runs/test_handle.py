"""The handle of a run: its events when a pool service dies, its MLflow run, and watching it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_pools import RUN, ScriptedPool, spec_of
from waiting import eventually

from sgpu_magic.client.run import ClientRun
from sgpu_magic.errors import RunUnknown
from sgpu_magic.files.tracking_progress import Progress, save_progress
from sgpu_magic.runs import handle
from sgpu_magic.runs.follow import run_loop
from sgpu_magic.runs.follow.run_loop import EventPump, Subscription
from sgpu_magic.runs.handle import Run
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.publisher import SilentPublisher
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.tracking import TrackedRun

BEGUN, ENDED = ev.StateChanged(state=RunState.RUNNING), ev.RunEnded(state=RunState.SUCCEEDED)


class Place:
    """The parts of a `KernelContext` that a handle uses. Its pool has these services in turn; the last one has no runs.

    Attributes:
        services: The services that are still to come.
        state: The run's state when this process attaches to it.
        runs: The runs that were attached to.
    """

    is_notebook = False

    def __init__(self, folder: Path, *services: ScriptedPool) -> None:
        self.services = list(services)
        self.state = RunState.RUNNING
        self.runs: list[ClientRun] = []
        self.follower = EventPump()
        self._folder = folder

    def pool_of(self, run: ClientRun) -> Any:
        return SimpleNamespace(
            attach=self._attach,
            find_again=self._find_again,
            give_payload_up=lambda _: None,
            on_run_ended=lambda *_: None,
        )

    def unseen(self, run: ClientRun) -> Subscription:
        return Subscription(run, RunView(run.spec, 10_000), SilentPublisher(), self.pool_of(run))

    def followed(self, run: ClientRun, ui: str, *, error_follows: bool) -> Subscription:
        return self.unseen(run)

    def new_run(self, service: ScriptedPool) -> ClientRun:
        return ClientRun(spec_of(), b"k" * 32, service.link, service.link.follow(RUN), self._folder)

    def _attach(self, run_id: str) -> tuple[ClientRun, RunState]:
        run = self.new_run(self.services[0])
        self.runs.append(run)
        return run, self.state

    def _find_again(self, run: ClientRun) -> None:
        self.services.pop(0)
        if not self.services:
            raise RunUnknown("there is no run 0000.")
        run.move_to(self.services[0].link, self.services[0].link.follow(RUN, run.last_seq))


@pytest.fixture
def services() -> Iterator[list[ScriptedPool]]:
    made = [ScriptedPool(), ScriptedPool()]
    yield made
    for pool in made:
        pool.link.close()


@pytest.fixture
def context(services: list[ScriptedPool], tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, *services)
    yield made
    made.follower.close()


def handle_of(context: Place, state: RunState = RunState.RUNNING) -> Any:
    own = ScriptedPool()
    try:
        return Run(context, context.new_run(own), state)  # type: ignore[arg-type]
    finally:
        context.follower.close()
        own.link.close()


def test_events_go_on_at_the_next_service(context: Place, services: list[ScriptedPool]):
    first, second = services
    seen: list[ev.EventBody] = []
    events = handle_of(context).events()

    def iterate() -> None:
        for event in events:
            seen.append(event.body)

    thread = threading.Thread(target=iterate)
    thread.start()
    eventually(lambda: context.runs, what="the run is attached to")
    first.apply(BEGUN)
    eventually(lambda: seen == [BEGUN], what="its first event")
    first.die()
    eventually(lambda: not context.runs[0].link.lost.is_set(), what="it is found again")
    second._seq = 1
    second.apply(ENDED)
    thread.join(30)
    assert seen == [BEGUN, ENDED]
    # the queue of its events is closed
    assert not second.link.is_used


def test_an_end_that_comes_with_the_death_is_the_last_event(
    context: Place, services: list[ScriptedPool], monkeypatch: pytest.MonkeyPatch
):
    events = handle_of(context).events()
    real, calls = ClientRun.next_event, list[float]()

    def late(run: ClientRun, timeout_s: float) -> Any:
        calls.append(timeout_s)
        if len(calls) == 1:
            # the time-out expires just before the end and the service's death
            services[0].apply(ENDED)
            services[0].die()
            return None
        return real(run, timeout_s)

    monkeypatch.setattr(ClientRun, "next_event", late)
    assert [event.body for event in events] == [ENDED]
    assert len(context.services) == 2


def test_events_of_a_run_that_no_service_has_end(context: Place, services: list[ScriptedPool]):
    events = handle_of(context).events()
    context.services = services[:1]
    services[0].die()
    assert list(events) == []
    assert context.services == []


def test_events_that_were_not_kept_are_not_waited_for(context: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_loop, "HISTORY_PATIENCE_S", 0.0)
    context.state = RunState.SUCCEEDED
    assert list(handle_of(context).events()) == []


def test_the_mlflow_run_is_asked_for_until_it_is_known(context: Place, tmp_path: Path):
    run = handle_of(context)
    asked: list[int] = []
    # the run is not tracked
    assert run.mlflow_run_id == ""
    run._followed.run.ask_tracked = lambda: asked.append(1)
    assert (run.mlflow_run_id, run.mlflow_run_id, len(asked)) == ("", "", 2)
    save_progress(tmp_path, Progress(mlflow_run_id="a" * 32))
    assert (run.mlflow_run_id, len(asked)) == ("a" * 32, 2)
    tracked = TrackedRun(uri="", mlflow_run_id="b" * 32, experiment_id="1", experiment="nb", artifact_uri="")
    run._followed.apply(ev.Event(run_id=RUN, seq=1, at=1.0, body=ev.Tracked(tracked=tracked)), ())
    assert run.mlflow_run_id == "b" * 32


def test_interrupting_the_view_ends_the_watching_only(context: Place, monkeypatch: pytest.MonkeyPatch):
    shown: list[RunState] = []

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(handle.outcome, "show", interrupted)
    monkeypatch.setattr(handle.outcome, "replay", lambda followed, state: shown.append(state))
    run = handle_of(context)
    run.show()
    assert shown == [RunState.RUNNING]
    assert not context.services[0].link.is_used
    assert not [message for message in context.services[0].kinds() if message == "Cancel"]

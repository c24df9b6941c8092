"""Which runs a pool has written to MLflow and when, what their ranks and notebooks receive, and what stays on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from launches import placed_launch

from sgpu_magic.config import Settings
from sgpu_magic.files.tracking_progress import Progress, load_progress, save_progress
from sgpu_magic.pool import tracker as module
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.tracker import NOT_TRACKED, Tracker
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.client import Submit
from sgpu_magic.wire.events import EventBody, Noted, Tracked
from sgpu_magic.wire.node import TrackingKnown
from sgpu_magic.wire.tracking import (
    Track,
    TrackedRun,
    Tracking,
    TrackingDone,
    TrackingReport,
    TrackingStarted,
    TrackingTroubled,
)

ALL, AUTO = Tracking(experiment="nb"), Tracking(experiment="nb", if_it_matters=True)
SERVER = Tracking(uri="http://ann:secret@store", experiment="nb", variables={"MLFLOW_RUN_NAME": "x", "TOKEN": "t"})
MLFLOW = TrackedRun(uri="", mlflow_run_id="a" * 32, experiment_id="1", experiment="nb", artifact_uri="file:///a")


class Writer:
    """The messages to and from a store's writer process."""

    def __init__(self, received: Callable[[TrackingReport], None]) -> None:
        self.say = received
        self.reported: list[str] = []

    def track(self, order: Track) -> None:
        self.reported.append(f"track {order.run_id}{' now' if order.urgent else ''}")

    def hurry(self, run_id: str) -> None:
        self.reported.append(f"hurry {run_id}")

    def finish_run(self, run_id: str) -> None:
        self.reported.append(f"over {run_id}")

    def close(self, patience_s: float) -> None:
        assert 0 <= patience_s <= 1.5
        self.reported.append("close")


class Service:
    """The parts of a pool service that a tracker uses.

    Attributes:
        events: What the runs' followers are told.
        ranks: What waiting ranks are told of their MLflow run.
        writers: The processes that were started.
    """

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(state_dir=str(folder / "state"), runtime_dir=str(folder / "run"))
        self.settings.runs_path.mkdir(parents=True)
        self.runs: dict[str, PoolRun] = {}
        self.events: list[tuple[str, EventBody]] = []
        self.ranks: list[tuple[str, TrackedRun | None, str]] = []
        self.writers: list[Writer] = []
        self._folder = folder

    # methods of the active runs

    def get(self, run_id: str) -> PoolRun | None:
        return self.runs.get(run_id)

    def directory(self, run_id: str) -> Path:
        return self.settings.runs_path / run_id

    def publish(self, run: PoolRun, body: EventBody, at: float) -> None:
        self.events.append((run.run_id, body))

    # methods of the engine

    def order(self, order: TrackingKnown) -> None:
        self.ranks.append((order.run_id, order.tracked, order.problem))

    # helpers for tests

    def run(self, run_id: str, tracking: Tracking | None = ALL, **spec: Any) -> PoolRun:
        launch = placed_launch(self._folder, is_remote=False)
        made = msgspec.structs.replace(launch.spec, run_id=run_id, tracked=tracking is not None, **spec)
        submit = Submit(
            request=0,
            spec=made,
            interpreter=launch.interpreter,
            context=launch.context,
            payload=launch.payload,
            tracking=tracking,
        )
        self.directory(run_id).mkdir()
        run = self.runs[run_id] = PoolRun(submit, (), None)
        return run

    def writer(self, settings: Settings, received: Callable[[TrackingReport], None]) -> Writer:
        self.writers.append(Writer(received))
        return self.writers[-1]

    @property
    def reported(self) -> list[str]:
        """The writers' messages since the last call."""
        output = [text for writer in self.writers for text in writer.reported]
        for writer in self.writers:
            writer.reported.clear()
        return output


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service(tmp_path)
    monkeypatch.setattr(module, "TrackerProcess", made.writer)
    monkeypatch.setattr(module, "_LATER_S", 0.0)
    monkeypatch.setattr(module, "_LEFTOVERS_S", 0.0)
    return made


def played(service: Service, story: Callable[[Tracker], Awaitable[None]]) -> None:
    """Run a scenario with a tracker, which is closed at its end."""

    async def play() -> None:
        tracker = Tracker(service.settings, service, service, service.runs.__contains__)  # type: ignore[arg-type]
        await story(tracker)
        tracker.close()

    asyncio.run(play())


async def later() -> None:
    """Let pending callbacks run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_run_is_written_a_moment_after_it_was_accepted(service: Service):
    async def story(tracker: Tracker) -> None:
        tracker.follow(service.run("000000a1"))
        tracker.follow(service.runs["000000a1"])
        tracker.follow(service.run("000000a2", None))
        assert service.reported == []
        await later()
        assert service.reported == ["track 000000a1"]
        (writer,) = service.writers
        writer.say(TrackingStarted(run_id="000000a1", tracked=MLFLOW))
        writer.say(TrackingStarted(run_id="000000a1", tracked=MLFLOW))
        writer.say(TrackingStarted(run_id="other", tracked=MLFLOW))
        assert service.events == [("000000a1", Tracked(tracked=MLFLOW))]
        assert service.ranks == [("000000a1", MLFLOW, None)]
        tracker.run_ended("000000a1")
        tracker.run_ended("000000a2")
        assert service.reported == ["over 000000a1"]
        del service.runs["000000a1"]
        writer.say(TrackingDone(run_id="000000a1", complete=True))
        tracker.run_ended("000000a1")
        assert service.reported == []

    played(service, story)
    assert service.reported == ["close"]


def test_a_rank_that_asks_is_answered_now_or_once_it_is_known(service: Service):
    async def story(tracker: Tracker) -> None:
        tracker.report_run("000000ff")
        assert service.ranks.pop() == ("000000ff", None, NOT_TRACKED)
        tracker.follow(service.run("000000a1"))
        tracker.report_run("000000a1")
        tracker.report_run("000000a1")
        assert service.reported == ["track 000000a1 now"]
        tracker.follow(service.run("000000a2"))
        await later()
        assert service.reported == ["track 000000a2"]
        tracker.report_run("000000a2")
        assert service.reported == ["hurry 000000a2"]
        assert service.ranks == []
        (writer,) = service.writers
        writer.say(TrackingStarted(run_id="000000a1", tracked=MLFLOW))
        writer.say(TrackingTroubled(run_id="000000a2", text="it is down"))
        writer.say(TrackingTroubled(run_id="000000a2", text="it is still down"))
        assert service.ranks == [("000000a1", MLFLOW, None), ("000000a2", None, "it is down")]
        assert service.events[-1] == ("000000a2", Noted(text="it is down"))
        service.ranks.clear()
        tracker.report_run("000000a1")
        tracker.report_run("000000a2")
        assert service.ranks == [("000000a1", MLFLOW, None), ("000000a2", None, "it is down")]
        # a run that is done stays known while it is active
        writer.say(TrackingDone(run_id="000000a1", complete=True))
        tracker.run_ended("000000a1")
        assert service.reported == []

    played(service, story)


def test_a_session_is_written_before_its_cells(service: Service):
    async def story(tracker: Tracker) -> None:
        tracker.follow(service.run("000000a1", AUTO))
        tracker.follow(service.run("000000a2", AUTO, session="000000a1"))
        tracker.report_run("000000a2")
        assert service.reported == ["track 000000a1 now", "track 000000a2 now"]
        tracker.follow(service.run("000000a3", AUTO, session="000000a1"))
        tracker.track("000000a3", AUTO)
        tracker.track("000000a3", AUTO)
        assert service.reported == ["track 000000a3"]
        tracker.report_run("000000a3")
        assert service.reported == ["hurry 000000a1", "hurry 000000a3"]

    played(service, story)


def test_short_runs_that_succeed_are_not_written_unless_asked_for(service: Service, monkeypatch: pytest.MonkeyPatch):
    async def story(tracker: Tracker) -> None:
        names = ("short", "fails", "lost", "asked", "cancelled", "profiled", "unplaced")
        runs = {name: service.run(f"0000000{at}", AUTO, profile=name == "profiled") for at, name in enumerate(names)}
        for run in runs.values():
            tracker.follow(run)
            run.scheduled.state = RunState.RUNNING
        await later()
        assert service.reported == ["track 00000005"]
        runs["fails"].scheduled.state = RunState.FAILED
        await later()
        assert service.reported == ["track 00000001"]
        runs["short"].scheduled.state, runs["cancelled"].scheduled.state = RunState.SUCCEEDED, RunState.CANCELLED
        runs["lost"].placed_at = runs["cancelled"].placed_at = 1.0
        # the run got no devices
        runs["unplaced"].scheduled.state = RunState.QUEUED
        for name in ("short", "lost", "cancelled", "unplaced"):
            tracker.run_ended(runs[name].run_id)
        await later()
        # its ranks disappeared without reporting an end
        assert service.reported == ["track 00000002"]
        monkeypatch.setattr(module, "_MATTERS_S", 0.0)
        await later()
        # it has run for long enough now
        assert service.reported == ["track 00000003"]
        # the notebook requests a run that has ended
        del service.runs["00000000"]
        tracker.track("00000000", AUTO)
        tracker.track("0000abcd", AUTO)
        tracker.track("../00000000", AUTO)
        assert service.reported == ["track 00000000", "over 00000000"]

    played(service, story)


def test_what_is_not_sent_by_the_end_is_on_disk(service: Service):
    async def story(tracker: Tracker) -> None:
        tracker.follow(service.run("000000a1", SERVER))
        tracker.follow(service.run("000000a2", AUTO))

    played(service, story)
    assert load_progress(service.directory("000000a1")) == Progress(uri="http://store", experiment="nb")
    assert load_progress(service.directory("000000a2")) is None


def test_a_trouble_of_a_run_that_has_ended_is_told_to_the_next(service: Service):
    async def story(tracker: Tracker) -> None:
        run = service.run("000000a1", SERVER)
        tracker.follow(run)
        await later()
        run.ended_as = RunState.SUCCEEDED
        service.writers[0].say(TrackingTroubled(run_id="000000a1", text="it is down"))
        assert service.events == []
        # another user's store, and the first store for another run
        tracker.follow(service.run("000000a2", ALL))
        renamed = msgspec.structs.replace(SERVER, variables={"TOKEN": "t", "MLFLOW_RUN_NAME": "y"})
        tracker.follow(service.run("000000a3", renamed))
        assert service.events == [("000000a3", Noted(text="earlier run 0000: it is down"))]
        await later()
        # one process for each store
        assert len(service.writers) == 2

    played(service, story)


def test_what_an_earlier_service_left_is_written_with_the_credentials_of_the_next_run(service: Service):
    for run_id, progress in {
        "000000a1": Progress(experiment="nb", mlflow_run_id="b" * 32),
        "000000a2": Progress(uri="http://store", experiment="theirs", parent_run="000000a0"),
        "000000a3": Progress(uri="http://store", complete=True),
        "000000a4": Progress(),
    }.items():
        service.directory(run_id).mkdir()
        save_progress(service.directory(run_id), progress)

    async def story(tracker: Tracker) -> None:
        # the run is active
        service.runs["000000a4"] = service.run("000000b0", None)
        tracker.find_leftovers()
        tracker.find_leftovers()
        deadline = asyncio.get_running_loop().time() + 10
        while not service.writers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)
        assert service.reported == ["track 000000a1", "over 000000a1"]
        tracker.follow(service.run("000000b1", SERVER))
        await later()
        assert service.reported == ["track 000000b1", "track 000000a2", "over 000000a2"]
        del service.runs["000000b1"]
        service.writers[1].say(TrackingDone(run_id="000000a2", complete=True))

    played(service, story)

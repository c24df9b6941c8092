"""The writer of one run and the queue of a store, in this process: how they handle failures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow_servers import Gateway
from mlflow_stores import lay_store
from tracking_writers import Runs, ToldRun, quiet_mlflow

from sgpu_magic.config import Settings
from sgpu_magic.files.locks import locked
from sgpu_magic.files.tracking_progress import Progress, save_progress
from sgpu_magic.tracking.runs import Batch
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.files import TRACKING
from sgpu_magic.wire.tracking import (
    FromTracker,
    MetricPoint,
    Track,
    Tracking,
    TrackingDone,
    TrackingStarted,
    TrackingTroubled,
)

NB = Tracking(experiment="nb")
NOWHERE = Tracking(uri="http://127.0.0.1:9", experiment="nb")


@pytest.fixture(autouse=True, scope="module")
def no_retries() -> Iterator[None]:
    """As in the writer's process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with quiet_mlflow():
            yield


@pytest.fixture(scope="module")
def settings(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    made = Settings(state_dir=str(tmp_path_factory.mktemp("state")))
    made.runs_path.mkdir(parents=True)
    lay_store(empty_store, made.state_path)
    return made


@pytest.fixture(scope="module")
def store(settings: Settings) -> Any:
    from sgpu_magic.tracking.client import TrackingStore

    return TrackingStore(settings, NB)


@pytest.fixture
def runs(settings: Settings) -> Runs:
    return Runs(settings.default_store_uri)


def writer_of(settings: Settings, store: Any, run: ToldRun, tracking: Tracking = NB, parent_run: str = "") -> Any:
    from sgpu_magic.tracking.writer import RunWriter

    return RunWriter(settings, store, run.directory, tracking, parent_run)


def written(writer: Any) -> Progress:
    """Take steps until there is nothing to write."""
    deadline = time.monotonic() + 30
    while writer.step() or not (writer.progress.complete or writer.progress.closed):
        assert time.monotonic() < deadline, writer.progress
    return writer.progress


# ---------------------------------------------------------------- one run


def test_a_run_that_the_store_has_already_is_not_there_twice(settings: Settings, store: Any, runs: Runs):
    """The reply to the request that created it was lost, and the request was repeated."""
    run = ToldRun(settings)
    experiment_id = store.find_experiment("nb")
    lost = [
        store.create_run(experiment_id, "nb", "train", began, {"sgpu.run_id": run.run_id}).info.run_id
        for began in (1000, 2000)
    ]
    save_progress(run.directory, Progress(experiment="nb", creating=True))
    writer = writer_of(settings, store, run)
    run.start()
    run.metric(0, "loss", 1.0, 0.5)
    writer.step()
    kept = writer.progress.mlflow_run_id
    assert kept in lost
    run.end()
    assert written(writer).complete
    assert runs.one(run.run_id).info.run_id == kept
    assert [value for _, value in runs.history(kept, "loss")] == [1.0, 0.5]
    # a further step writes nothing
    before = writer.progress
    assert not writer.step()
    assert writer.progress == before


def test_two_processes_write_a_run_in_turn(settings: Settings, store: Any, runs: Runs):
    from sgpu_magic.tracking.writer import Busy

    run = ToldRun(settings)
    first, second = writer_of(settings, store, run), writer_of(settings, store, run)
    run.start()
    run.metric(0, "loss", 3.0)
    with locked(run.directory), pytest.raises(Busy):
        first.step()
    first.step()
    run.metric(0, "loss", 2.0, step=1)
    # the second writer finds what the first one wrote
    second.step()
    first.trouble("this is no longer its business")
    assert run.progress == second.progress
    run.metric(0, "loss", 1.0, step=2)
    run.end()
    assert written(first).complete
    assert written(second).complete
    found = runs.one(run.run_id)
    assert runs.history(found.info.run_id, "loss") == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert found.info.status == "FINISHED"


def test_a_damaged_log_is_written_up_to_its_damage(settings: Settings, store: Any, runs: Runs):
    run = ToldRun(settings)
    run.start()
    run.metric(0, "loss", 1.0)
    run.log.close()
    with open(run.directory / "events.msgpack", "ab") as log:
        log.write(b"\xff" * 64)
    assert written(writer_of(settings, store, run)).complete
    found = runs.one(run.run_id)
    assert (found.info.status, found.data.metrics["loss"]) == ("FAILED", 1.0)


def test_a_directory_without_events_is_no_run(settings: Settings, store: Any, runs: Runs):
    run = ToldRun(settings)
    run.log.close()
    (run.directory / "events.msgpack").unlink()
    writer = writer_of(settings, store, run)
    assert not writer.step()
    assert not writer.progress.complete
    writer.log_complete = True
    assert not writer.step()
    assert (writer.progress.complete, writer.progress.problem) == (True, "its directory has no events")
    assert runs.of(run.run_id) == []


def test_files_that_are_too_large_are_named(settings: Settings, store: Any, runs: Runs, monkeypatch: Any):
    from sgpu_magic.tracking import writer as module

    monkeypatch.setattr(module, "MAX_BYTES", 200_000)
    run = ToldRun(settings)
    run.start()
    (run.directory / "cell.py").write_text("#" * 300_000)
    (run.directory / "profile" / "rank-0").mkdir(parents=True)
    (run.directory / "profile" / "rank-0" / "trace.json").write_text("{}")
    (run.directory / "profile" / ".part").write_text("")
    run.end()
    assert written(writer_of(settings, store, run)).complete
    found = runs.one(run.run_id)
    assert found.data.tags["sgpu.left_out"].startswith("cell.py: larger than 0 MB, in ")
    folders = runs.artifacts(found.info.run_id)
    assert "cell.py" not in folders
    assert {"logs", "profile", "run.html", "run.json"} <= folders
    assert runs.artifacts(found.info.run_id, "profile/rank-0") == {"profile/rank-0/trace.json"}
    assert runs.artifacts(found.info.run_id, "profile") == {"profile/rank-0"}


def test_a_cells_parent_is_its_session_in_the_same_store(settings: Settings, store: Any, runs: Runs):
    from sgpu_magic.tracking.client import StoreTroubled

    session = ToldRun(settings)
    tags: list[str | None] = []
    for kept in (
        Progress(experiment="nb"),
        Progress(uri="http://elsewhere", mlflow_run_id="a" * 32),
        Progress(experiment="nb", mlflow_run_id="b" * 32),
        Progress(experiment="nb", complete=True, problem="the store rejects it"),
    ):
        save_progress(session.directory, kept)
        cell = ToldRun(settings)
        writer = writer_of(settings, store, cell, parent_run=session.run_id)
        if not (kept.mlflow_run_id or kept.complete):
            with pytest.raises(StoreTroubled, match=r"its session .* is not in the store yet"):
                writer.step()
            continue
        writer.step()
        tags.append(runs.one(cell.run_id).data.tags.get("mlflow.parentRunId"))
        cell.end()
    assert tags == [None, "b" * 32, None]


def test_a_run_of_a_deleted_experiment_is_let_go(settings: Settings, store: Any):
    experiment_id = store.find_experiment("gone")
    store.client.delete_experiment(experiment_id)
    run, tracking = ToldRun(settings), Tracking(experiment="gone")
    # the store still returns the experiment's id
    assert not writer_of(settings, store, run, tracking).step()
    assert run.progress is not None
    assert run.progress.complete
    assert "active" in run.progress.problem
    other = ToldRun(settings)
    writer_of(settings, store, other, tracking).step()
    assert other.progress is not None
    assert other.progress.problem == "the experiment 'gone' was deleted there; restore it, or name another one"


def test_an_experiment_that_another_pool_makes_at_once_is_the_same(store: Any, monkeypatch: pytest.MonkeyPatch):
    client = store.client
    real, asked = client.get_experiment_by_name, []

    def get(name: str) -> Any:
        asked.append(name)
        if len(asked) == 1:
            client.create_experiment(name)
            return None
        return real(name)

    monkeypatch.setattr(client, "get_experiment_by_name", get)
    assert store.find_experiment("both") == real("both").experiment_id
    assert len(asked) == 2


def test_a_parameter_that_an_old_store_finds_too_long_is_cut():
    from sgpu_magic.tracking.client import in_requests, smaller

    def smaller_of(batch: Batch) -> list[dict[str, object]]:
        (items,) = in_requests(batch)
        return [{item.key: item.value for item in part} for part in smaller(items)]

    assert smaller_of(Batch(params={"p": "x" * 300})) == [{"p": "x" * 250}]
    assert smaller_of(Batch(params={"p": "x" * 250})) == []
    all_kinds = Batch([MetricPoint("m", 1.0, 0, 0)], {"p": "1"}, {"t": "1"})
    assert smaller_of(all_kinds) == [{"m": 1.0}, {"p": "1", "t": "1"}]


# ---------------------------------------------------------------- all runs of a store


class Queue:
    """A store's queue, and its messages to the pool."""

    def __init__(self, settings: Settings, tracking: Tracking) -> None:
        from sgpu_magic.tracking.writer_queue import WriterQueue

        self.sent: list[FromTracker] = []
        self.tracking = tracking
        self.real = WriterQueue(settings, tracking, self.sent.append)

    def track(self, *runs: ToldRun) -> None:
        for run in runs:
            self.real.track(Track(run_id=run.run_id, run_dir=str(run.directory), tracking=self.tracking))

    def troubles(self) -> dict[str, str]:
        return {message.run_id: message.text for message in self.sent if isinstance(message, TrackingTroubled)}

    def writer(self, run: ToldRun) -> Any:
        return self.real._runs[run.run_id]  # pyright: ignore[reportPrivateUsage]


def test_a_store_that_does_not_answer_is_asked_once_for_all_its_runs(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    one, two = ToldRun(settings), ToldRun(settings)
    queue = Queue(settings, NOWHERE)
    store = queue.real._store  # pyright: ignore[reportPrivateUsage]
    real, asked = store.find_experiment, list[str]()
    monkeypatch.setattr(store, "find_experiment", lambda name: (asked.append(name), real(name))[1])
    queue.track(one, two)
    assert queue.real.wait_s() == 0.0
    queue.real.step()
    began = time.monotonic()
    queue.real.step()
    # all due runs were processed; the next attempt is later, and closing does not wait for the store either
    assert queue.real.wait_s() > 0.5
    queue.real.close()
    assert time.monotonic() - began < 5
    assert asked == ["nb"]
    troubles = queue.troubles()
    assert troubles.keys() == {one.run_id, two.run_id}
    text = troubles[two.run_id]
    assert text.startswith("tracking at http://127.0.0.1:9 does not work: ")
    assert text.endswith(f"or by `sgpu sync {two.run_id[:4]}`")
    assert two.progress is not None
    assert two.progress.problem in text
    assert not two.progress.complete


def test_a_store_that_refuses_the_users_credentials_says_which(settings: Settings):
    gateway = Gateway(9)
    gateway.status = 401
    try:
        run = ToldRun(settings)
        queue = Queue(settings, Tracking(uri=gateway.uri, experiment="nb"))
        queue.track(run)
        queue.real.step()
        assert "it refuses the credentials of the notebook (MLFLOW_TRACKING_USERNAME," in queue.troubles()[run.run_id]
        assert {path.partition("?")[0] for path, _ in gateway.seen} == {"GET /api/2.0/mlflow/experiments/get-by-name"}
    finally:
        gateway.close()


def test_a_run_that_is_written_elsewhere_or_removed_is_left_to_others(settings: Settings, store: Any, runs: Runs):
    busy, removed, whole = ToldRun(settings), ToldRun(settings), ToldRun(settings)
    queue = Queue(settings, NB)
    queue.track(busy)
    with locked(busy.directory):
        queue.real.step()
        assert queue.sent == []
        assert 0.0 < queue.real.wait_s() <= 1.0
        # tracked again meanwhile, it is still one run
        queue.track(busy)
        queue.real.hurry(busy.run_id)
        assert queue.real.wait_s() == 0.0
    queue.real.step()
    (started,) = queue.sent
    assert isinstance(started, TrackingStarted)
    assert started.tracked.mlflow_run_id == runs.one(busy.run_id).info.run_id
    queue.sent.clear()
    removed.log.close()
    for path in removed.directory.iterdir():
        path.unlink()
    removed.directory.rmdir()
    queue.track(removed)
    queue.real.step()
    assert queue.sent == [TrackingDone(run_id=removed.run_id, complete=False)]
    queue.sent.clear()
    whole.end(RunState.CANCELLED)
    queue.track(whole)
    busy.end()
    queue.real.close()
    assert {message.run_id for message in queue.sent if isinstance(message, TrackingDone)} == {
        busy.run_id,
        whole.run_id,
    }


def test_a_run_whose_progress_can_not_be_kept_is_tried_again(settings: Settings):
    run = ToldRun(settings)
    run.apply(ev.StateChanged(state=RunState.RUNNING))
    (run.directory / TRACKING).mkdir()
    queue = Queue(settings, NB)
    queue.track(run)
    queue.real.step()
    text = queue.troubles()[run.run_id]
    assert text.startswith("tracking at the default store does not work: ")
    assert "(Is a directory)" in text
    assert queue.writer(run).failures == 1
    assert queue.real.wait_s() > 0.5
    with contextlib.suppress(OSError):
        queue.real.close()
    # the pool gets the same trouble only once
    assert len(queue.sent) == 1

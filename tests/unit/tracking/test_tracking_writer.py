"""The process that writes runs to MLflow, driven as a pool does; run directories and stores are real."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import launch_order
from mlflow_stores import lay_store
from small_disks import small_disk
from tracking_writers import Runs, ToldRun, WriterProcess, quiet_mlflow
from waiting import eventually

import sgpu_magic
from sgpu_magic.cli.sync import sync
from sgpu_magic.config import Settings
from sgpu_magic.files.locks import locked
from sgpu_magic.files.tracking_progress import Progress, is_unsent, opening, save_progress
from sgpu_magic.pool.retention import RunOnDisk, Why, choose_removals
from sgpu_magic.tracking.keys import mlflow_key
from sgpu_magic.tracking.runs import Batch, RunFold
from sgpu_magic.tracking.system_metrics import SystemMetrics
from sgpu_magic.wire import events as ev
from sgpu_magic.wire import rank_events
from sgpu_magic.wire.base import FailureKind, RunKind, RunState, short
from sgpu_magic.wire.rank_events import Failure, RankSample
from sgpu_magic.wire.tracking import (
    FromTracker,
    MetricPoint,
    Track,
    TrackerRests,
    Tracking,
    TrackingDone,
    without_user,
)

# ---------------------------------------------------------------- pure parts


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("loss", "loss"),
        ("train/loss: a-b.c_d", "train/loss: a-b.c_d"),
        ("größe (%)", "gr__e ___"),
        ("/a//../b/", "a/b"),
        ("", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_are_what_mlflow_takes(given: str, kept: str):
    assert mlflow_key(given) == kept


def test_a_batch_goes_in_parts_that_one_request_takes():
    with quiet_mlflow():
        from sgpu_magic.tracking.client import in_requests

    batch = Batch(
        [MetricPoint("m", float(step), 0, step) for step in range(1700)],
        {f"p{number}": "1" for number in range(120)},
        {"t": "1"},
    )
    parts = [Counter(type(item).__name__ for item in items) for items in in_requests(batch)]
    assert parts == [
        {"Metric": 800, "Param": 50, "RunTag": 1},
        {"Metric": 800, "Param": 50},
        {"Metric": 100, "Param": 20},
    ]


def test_what_a_database_says_is_told_without_its_statement():
    from sqlalchemy import create_engine, text

    from sgpu_magic.tracking.client import StoreTroubled, TrackingStore

    store = TrackingStore(Settings(), Tracking(uri="sqlite://"))
    with (
        pytest.raises(StoreTroubled) as raised,
        store._translated(),  # pyright: ignore[reportPrivateUsage]
        create_engine("sqlite://").connect() as connection,
    ):
        connection.execute(text("SELECT name FROM nowhere"))
    assert str(raised.value) == "OperationalError: (sqlite3.OperationalError) no such table: nowhere"


def gpu(rank: int, **fields: float | str | None) -> RankSample:
    return RankSample(rank=rank, kind="gpu", **fields)  # pyright: ignore[reportArgumentType]


def test_devices_are_numbered_by_the_runs_own_order_and_keys_are_mlflows():
    system = SystemMetrics(cores=8)
    system.set_devices(("GPU-b", "GPU-a"))
    first = rank_events.Sampled(
        seconds=1.0,
        samples=(
            gpu(
                0,
                uuid="GPU-b",
                utilization_pct=80.0,
                used_bytes=6_000_000_000,
                total_bytes=24_000_000_000,
                power_w=150.0,
            ),
            gpu(1, uuid="GPU-a", utilization_pct=20.0, used_bytes=3_000_000_000, total_bytes=24_000_000_000),
        ),
    )
    assert {point.key: point.value for point in system.add(first, 100.0)} == {
        "system/node0/gpu_0_utilization_percentage": 80.0,
        "system/node0/gpu_0_memory_usage_megabytes": 6000.0,
        "system/node0/gpu_0_memory_usage_percentage": 25.0,
        "system/node0/gpu_0_power_usage_watts": 150.0,
        "system/node0/gpu_1_utilization_percentage": 20.0,
        "system/node0/gpu_1_memory_usage_megabytes": 3000.0,
        "system/node0/gpu_1_memory_usage_percentage": 12.5,
    }


def test_after_a_minute_ten_seconds_are_one_point():
    system = SystemMetrics(cores=4)
    points = [
        point
        for second in range(120)
        for point in system.add(
            rank_events.Sampled(seconds=1.0, samples=(RankSample(rank=0, kind="cpu", cpu_cores=float(second)),)),
            100.0 + second,
        )
        if point.key == "system/node0/rank_0_cpu_utilization_percentage"
    ]
    assert [point.step for point in points] == list(range(66))
    assert points[-1].value == 100 * sum(range(110, 120)) / 10


@pytest.mark.parametrize(("kind", "points"), [(RunKind.CELL, 20), (RunKind.SESSION, 2)])
def test_a_sessions_own_samples_are_points_of_ten_seconds(kind: RunKind, points: int):
    fold = RunFold("local", 4)
    launch, _ = launch_order(Path("/nowhere"), ranks=1, kind=kind)
    fold.apply(ev.Event(run_id="a", seq=1, at=0, body=ev.Submitted(spec=launch.spec)))
    for second in range(20):
        sampled = rank_events.Sampled(seconds=1.0, samples=(RankSample(rank=0, kind="cpu", cpu_cores=1.0),))
        fold.apply(ev.Event(run_id="a", seq=second + 2, at=second, body=sampled))
    keys = [point.key for point in fold.pop_batch().metrics]
    assert keys.count("system/node0/rank_0_cpu_utilization_percentage") == points


def test_what_is_written_already_is_not_written_again_and_the_rest_stays_the_same():
    def reported(fold: RunFold) -> Batch:
        for second in range(5):
            sample = RankSample(rank=0, kind="cpu", cpu_cores=float(second))
            fold.apply(
                ev.Event(
                    run_id="a", seq=second + 1, at=second, body=rank_events.Sampled(seconds=1.0, samples=(sample,))
                )
            )
        return fold.pop_batch()

    whole, rest = reported(RunFold("local", 4)), reported(RunFold("local", 4, written=3))
    assert rest.metrics == whole.metrics[-2 * len(whole.metrics) // 5 :]
    assert rest.seq == whole.seq == 5


def test_the_first_value_of_a_parameter_counts_and_others_are_tags():
    fold = RunFold("local", 4)
    for rank, value in ((0, "0.1"), (1, "0.1"), (2, "0.2")):
        fold.apply(
            ev.Event(run_id="a", seq=rank + 1, at=0, body=rank_events.MetricsLogged(rank=rank, params=(("lr", value),)))
        )
    batch = fold.pop_batch()
    assert batch.params == {"lr": "0.1"}
    assert batch.tags == {"sgpu.logged": "true", "sgpu.param.lr": "0.2"}


def test_no_credentials_stand_in_a_run_directory():
    assert without_user("https://ann:pw@host:8/x") == "https://host:8/x"
    assert without_user("postgresql://u:p@w@host/db") == "postgresql://host/db"
    assert without_user("sqlite:////a/b@c.db") == "sqlite:////a/b@c.db"


def test_a_run_directory_has_one_writer_at_a_time(tmp_path: Path):
    with locked(tmp_path, wait=False) as first, locked(tmp_path, wait=False) as second:
        assert (first, second) == (True, False)
    with locked(tmp_path, wait=False) as again, locked(tmp_path / "gone", wait=False) as gone:
        assert (again, gone) == (True, False)


def test_unsent_runs_stay_as_long_as_any_run_may():
    now, day = 1_800_000_000.0, 86400.0
    settings = Settings(keep_runs=1, keep_days=30, keep_bytes=10)
    runs = [
        RunOnDisk("00000000", now - 1 * day, 5),
        RunOnDisk("00000001", now - 2 * day, 5, unsent=True),
        RunOnDisk("00000002", now - 3 * day, 5),
        RunOnDisk("00000003", now - 31 * day, 5, unsent=True),
    ]
    assert choose_removals(runs, settings, now) == [("00000003", Why.COUNT), ("00000002", Why.COUNT)]


# ---------------------------------------------------------------- the default store


def test_the_default_stores_address_is_public_and_what_lies_there_is_private(
    empty_store: Path, monkeypatch: pytest.MonkeyPatch
):
    # `empty_store` has already asked for it when there was none
    folder = empty_store.parent
    monkeypatch.setenv("SGPU_STATE_DIR", str(folder.parent))
    uri = sgpu_magic.tracking_uri()
    assert uri == f"sqlite:///{empty_store}"
    with quiet_mlflow() as mlflow:
        client = mlflow.MlflowClient(uri)
        assert [found.name for found in client.search_experiments()] == ["Default"]
        assert client.get_experiment("0").artifact_location.startswith((folder / "artifacts").as_uri())
    assert_is_whole_and_private(folder)


def assert_is_whole_and_private(folder: Path) -> None:
    assert stat.S_IMODE(folder.parent.stat().st_mode) == stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "mlflow.db").stat().st_mode) == 0o600
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert not list(folder.glob(".*.part*"))


# ---------------------------------------------------------------- the process


def new_settings() -> Settings:
    folder = Path(tempfile.mkdtemp(prefix="sgt"))
    settings = Settings(state_dir=str(folder / "state"), runtime_dir=str(folder / "run"))
    settings.runs_path.mkdir(parents=True)
    return settings


@pytest.fixture(scope="module")
def settings(empty_store: Path) -> Iterator[Settings]:
    made = new_settings()
    lay_store(empty_store, made.state_path)
    yield made
    remove(made)


def remove(settings: Settings) -> None:
    import shutil

    shutil.rmtree(settings.state_path.parent)


@pytest.fixture(scope="module")
def module_writer(settings: Settings) -> Iterator[WriterProcess]:
    made = WriterProcess(settings)
    # imports MLflow and loads the store's tables
    first = ToldRun(settings)
    first.end()
    made.track(first)
    made.until_done(first)
    yield made
    assert made.end() == ""


@pytest.fixture
def writer(module_writer: WriterProcess) -> WriterProcess:
    """A writer of the default store, shared by the module's tests."""
    module_writer.start_if_ended()
    return module_writer


@pytest.fixture(scope="module")
def store(settings: Settings) -> Runs:
    with quiet_mlflow():
        return Runs(settings.default_store_uri)


@pytest.mark.slow
def test_a_run_is_all_there(settings: Settings, writer: WriterProcess, store: Runs):
    run = ToldRun(settings, parameters=(("lr", "0.1"),), environment="d1gest")
    (run.directory / "requirements.txt").write_text("numpy==2.0\n")
    (run.directory / "key").write_text("secret")
    (run.directory / "payload.bin").write_text("secret")
    (run.directory / "run.json").write_text('{"executable": "python", "payload_layout": {"mac": "secret"}}')
    (run.directory / "profile").mkdir()
    (run.directory / "profile" / "rank-0.pt.trace.json.gz").write_bytes(b"trace")
    (run.directory / "artifacts" / "plots").mkdir(parents=True)
    (run.directory / "artifacts" / "plots" / "loss.txt").write_text("kept for later")
    writer.track(run)
    run.start("a10", ("GPU-a", "GPU-b"))
    writer.until(lambda: writer.started(run), "its place")
    run.apply(ev.Described(tags=(("mlflow.source.git.commit", "abc"), ("git.dirty", "true"))))
    run.metric(1, "loss", 0.5, 0.25)
    run.apply(rank_events.Sampled(seconds=1.0, samples=(gpu(0, uuid="GPU-a", utilization_pct=50.0, power_w=99.0),)))
    run.end(gpu_s=12.5, cost=0.25, currency="USD", running_s=6.0)
    writer.until_done(run)

    found = store.one(run.run_id)
    assert writer.started(run)[0].tracked.mlflow_run_id == found.info.run_id
    assert (found.info.status, found.info.run_name) == ("FINISHED", "train")
    assert found.info.start_time == int(run.spec.submitted_at * 1000)
    assert found.data.params == {"lr": "0.1", "gpus": "2", "gpu_type": "a10"}
    expected = {
        "sgpu.state": "succeeded",
        "sgpu.notebook": "nb.ipynb",
        "sgpu.cell": "c1",
        "sgpu.environment": "d1gest",
        "sgpu.pool": "local",
        "sgpu.host": "node7",
        "sgpu.currency": "USD",
        "git.dirty": "true",
        "mlflow.user": "ann",
        "mlflow.source.type": "NOTEBOOK",
        "mlflow.source.git.commit": "abc",
    }
    assert expected.items() <= found.data.tags.items()
    assert found.data.metrics["sgpu/gpu_seconds"] == 12.5
    assert found.data.metrics["sgpu/cost"] == 0.25
    assert found.data.metrics["system/node0/gpu_0_utilization_percentage"] == 50.0
    assert store.history(found.info.run_id, "loss") == [(0, 0.5), (1, 0.25)]
    assert store.artifacts(found.info.run_id) == {
        *("cell.py", "requirements.txt", "run.json", "run.html", "logs", "profile", "plots")
    }
    assert store.artifacts(found.info.run_id, "logs") == {"logs/rank-0.log", "logs/rank-1.log"}
    assert store.text(found.info.run_id, "plots/loss.txt") == "kept for later"
    assert "secret" not in store.text(found.info.run_id, "run.json")
    assert "train" in store.text(found.info.run_id, "run.html")
    folder = Path(settings.default_store_uri.removeprefix("sqlite:///")).parent
    assert found.info.artifact_uri.startswith((folder / "artifacts").as_uri())


@pytest.mark.parametrize(
    ("state", "failure", "status"),
    [
        (RunState.FAILED, Failure(kind=FailureKind.USER_CODE, message="NaN", rank=1, type_name="ValueError"), "FAILED"),
        (RunState.TIMED_OUT, Failure(kind=FailureKind.TIMEOUT, message="its time was over"), "FAILED"),
        (RunState.CANCELLED, None, "KILLED"),
    ],
)
def test_how_it_ended_is_said(
    settings: Settings, writer: WriterProcess, store: Runs, state: RunState, failure: Failure | None, status: str
):
    run = ToldRun(settings)
    run.end(state, failure=failure, reason="" if failure else "interrupted")
    writer.track(run)
    writer.until_done(run)
    found = store.one(run.run_id)
    assert (found.info.status, found.data.tags["sgpu.state"]) == (status, str(state))
    assert found.data.params["gpu_type"] == "any"
    if failure is None:
        assert found.data.tags["sgpu.reason"] == "interrupted"
    else:
        assert found.data.tags["sgpu.failure_kind"] == str(failure.kind)
        assert failure.message in found.data.tags["sgpu.failure"]


@pytest.mark.slow
def test_of_eight_ranks_no_metric_is_lost(settings: Settings, writer: WriterProcess, store: Runs):
    run = ToldRun(settings, ranks=8)
    writer.track(run)
    run.start()
    for step in range(0, 500, 50):
        for rank in range(8):
            run.metric(rank, f"loss/rank{rank}", *(rank + (step + number) / 1000 for number in range(50)), step=step)
            run.metric(rank, "loss", *(rank + (step + number) / 1000 for number in range(50)), step=step)
    run.end()
    writer.until_done(run)
    mlflow_run_id = store.one(run.run_id).info.run_id
    for rank in range(8):
        expected = [(step, rank + step / 1000) for step in range(500)]
        assert store.history(mlflow_run_id, f"loss/rank{rank}") == expected
    assert len(store.history(mlflow_run_id, "loss")) == 4000


def test_what_mlflow_refuses_costs_nothing_else(settings: Settings, writer: WriterProcess, store: Runs):
    run = ToldRun(settings)
    run.start()
    bad = MetricPoint("broken", 1.0, -5, 0)
    good = tuple(MetricPoint("loss", float(step), 1000 + step, step) for step in range(20))
    run.apply(rank_events.MetricsLogged(rank=0, metrics=(*good, bad), params=(("x" * 400, "y" * 9000),)))
    run.apply(rank_events.MetricsLogged(rank=0, tags=(("mlflow.runName", "renamed"), ("note", "z" * 9000))))
    run.end()
    writer.track(run)
    writer.until_done(run)
    found = store.one(run.run_id)
    assert found.info.run_name == "renamed"
    assert len(store.history(found.info.run_id, "loss")) == 20
    assert found.data.params["x" * 250].startswith("y" * 250)
    assert found.data.tags["note"] == "z" * 8000
    assert found.data.tags.get("sgpu.refused") == "broken"


def test_a_sessions_cells_are_its_children(settings: Settings, writer: WriterProcess, store: Runs):
    session = ToldRun(settings, kind=RunKind.SESSION, name="work")
    session.start()
    cell = ToldRun(settings, session=session.run_id, session_name="work", name="cell 3")
    cell.end()
    writer.track(session)
    writer.track(cell, parent_run=session.run_id)
    writer.until_done(cell)
    session.end(RunState.CANCELLED, reason="%sgpu_disconnect")
    writer.until_done(session)
    made = store.one(session.run_id)
    assert (made.info.run_name, made.info.status) == ("session work", "FINISHED")
    assert store.one(cell.run_id).data.tags["mlflow.parentRunId"] == made.info.run_id


def test_a_record_that_is_written_after_the_end_is_there_too(settings: Settings, writer: WriterProcess, store: Runs):
    run = ToldRun(settings)
    record = run.directory / "run.json"
    record.unlink()
    run.end()
    writer.track(run)
    writer.until(lambda: run.progress is not None and run.progress.closed)
    record.write_text('{"executable": "python"}')
    writer.until_done(run)
    assert "run.json" in store.artifacts(store.one(run.run_id).info.run_id)


@pytest.mark.slow
def test_traces_that_are_written_after_the_end_are_there_too(settings: Settings, writer: WriterProcess, store: Runs):
    run = ToldRun(settings, profile=True)
    profile = run.directory / "profile"
    profile.mkdir()
    (profile / ".rank-0.pt.trace.json.gz.tmp").write_text("half of it")
    run.end(RunState.CANCELLED)
    writer.track(run)
    writer.until(lambda: run.progress is not None and run.progress.artifacts)
    traces = [f"rank-{rank}.pt.trace.json.gz" for rank in range(2)]
    for name in traces:
        (profile / name).write_text("{}")
    writer.until_done(run)
    found = store.artifacts(store.one(run.run_id).info.run_id, "profile")
    assert found == {f"profile/{name}" for name in traces}


@pytest.mark.slow
def test_a_log_without_a_last_word_ends_as_failed(settings: Settings, writer: WriterProcess, store: Runs):
    run = ToldRun(settings)
    run.start()
    writer.track(run)
    writer.until(lambda: writer.started(run))
    writer.over(run)
    writer.until_done(run)
    found = store.one(run.run_id)
    assert (found.info.status, found.data.tags["sgpu.failure_kind"]) == ("FAILED", "node lost")


def test_a_deleted_run_is_let_go_with_a_sentence(settings: Settings, writer: WriterProcess, store: Runs):
    from tracking_writers import quiet_mlflow

    run = ToldRun(settings)
    run.start()
    writer.track(run)
    writer.until(lambda: writer.started(run))
    with quiet_mlflow() as mlflow:
        mlflow.MlflowClient(store.uri).delete_run(writer.started(run)[0].tracked.mlflow_run_id)
    run.metric(0, "loss", 1.0)
    writer.until_done(run)
    assert "is no longer tracked" in writer.troubles(run)[0].text
    assert store.of(run.run_id) == []


@pytest.mark.slow
def test_a_killed_writer_is_gone_on_after_and_end_of_file_ends_it(settings: Settings, store: Runs):
    writer = WriterProcess(settings)
    runs = [ToldRun(settings) for _ in range(3)]
    try:
        for run in runs:
            run.start()
            writer.track(run)
        writer.until(lambda: all(writer.started(run) for run in runs))
        for run in runs:
            run.metric(0, "loss", *(float(step) for step in range(200)))
        # some of the written data is not recorded as written yet
        writer.until(lambda: any(run.progress.seq > 4 for run in runs if run.progress))
        writer.kill()
        for run in runs:
            run.metric(0, "loss", *(float(step) for step in range(200, 400)), step=200)
        writer.start()
        for run in runs:
            writer.track(run)
        for run in runs[:2]:
            run.end()
        writer.received.clear()
        writer.until_done(*runs[:2])
        runs[2].metric(0, "last", 1.0)
        assert writer.end() == ""
        for run in runs:
            history = store.history(store.one(run.run_id).info.run_id, "loss")
            assert history == [(step, float(step)) for step in range(400)]
        assert store.history(store.one(runs[2].run_id).info.run_id, "last") == [(0, 1.0)]
        assert is_unsent(runs[2].directory)
    finally:
        writer.close()


@pytest.mark.slow
def test_two_pools_make_the_store_at_once_and_it_is_private(tmp_path: Path):
    settings = new_settings()
    writers = [WriterProcess(settings) for _ in range(2)]
    try:
        runs = [ToldRun(settings) for _ in range(6)]
        for number, run in enumerate(runs):
            run.end()
            writers[number % 2].track(run)
        for number, writer in enumerate(writers):
            writer.until_done(*runs[number::2])
        store = Runs(settings.default_store_uri)
        assert len({store.one(run.run_id).info.experiment_id for run in runs}) == 1
        assert [writer.end() for writer in writers] == ["", ""]
        assert_is_whole_and_private(settings.state_path / "mlflow")
    finally:
        for writer in writers:
            writer.close()
        remove(settings)


@pytest.mark.slow
def test_a_store_that_met_a_full_disk_is_made_once_there_is_room(tmp_path: Path):
    """MLflow caches its connection to a store, and so to a deleted file."""
    with small_disk(tmp_path, "tmpfs", megabytes=4) as disk:
        settings = Settings(state_dir=str(disk.path / "state"))
        filler = disk.path / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk.path).free - 200_000))
        command = [sys.executable, "-c", _MAKE_TWICE, settings.state_dir, str(filler)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.split("\n") == ["refused", "made", ""], done.stderr
        with contextlib.closing(sqlite3.connect(settings.state_path / "mlflow" / "mlflow.db")) as database:
            assert database.execute("SELECT name FROM experiments").fetchall() == [("Default",)]


_MAKE_TWICE = """
import os, sys
from sgpu_magic.config import Settings
from sgpu_magic.tracking import store
store.quiet()
settings = Settings(state_dir=sys.argv[1])
try:
    store.make(settings)
except Exception:
    print("refused")
os.remove(sys.argv[2])
store.make(settings)
print("made")
"""


# ---------------------------------------------------------------- a notebook's own store


@pytest.fixture
def own(tmp_path: Path) -> Tracking:
    """The store of a notebook that has imported MLflow and has used nothing of it yet."""
    return Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db", directory=str(tmp_path), experiment="nb")


@pytest.fixture
def own_settings() -> Iterator[Settings]:
    made = new_settings()
    yield made
    remove(made)


@pytest.mark.slow
def test_a_writer_that_is_killed_while_it_creates_a_store_leaves_none(
    own: Tracking, own_settings: Settings, tmp_path: Path
):
    run = ToldRun(own_settings)
    run.metric(0, "loss", 0.5)
    run.end()
    writer = WriterProcess(own_settings)
    try:
        writer.track(run, own)
        writer.until(lambda: any(file.stat().st_size for file in own_settings.state_path.glob("mlflow/.own-*/*.db")))
        writer.kill()
        assert not list(tmp_path.iterdir())
        writer.start()
        writer.track(run, own)
        writer.until_done(run)
        assert writer.end() == ""
    finally:
        writer.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mlflow.db", "mlruns"]
    assert [entry.name for entry in (own_settings.state_path / "mlflow").iterdir()] == [".making"]
    found = Runs(own.uri).one(run.run_id)
    assert found.info.artifact_uri.startswith(f"{tmp_path}/mlruns/{found.info.experiment_id}/")
    assert "run.html" in Runs(own.uri).artifacts(found.info.run_id)


_USE = "import mlflow\nprint(len(mlflow.MlflowClient(sys.argv[1]).search_experiments()))"


@pytest.mark.slow
def test_a_store_that_mlflow_is_creating_is_awaited(own: Tracking, own_settings: Settings, tmp_path: Path):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    command = [sys.executable, "-c", f"import sys\n{_USE}", own.uri]
    run = ToldRun(own_settings)
    run.end()
    writer = WriterProcess(own_settings)
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as other:
        try:
            writer.track(run, own)
            writer.until_done(run)
            output, _ = other.communicate(timeout=100)
            assert (other.returncode, output) in ((0, "1\n"), (0, "2\n"))
            assert writer.end() == ""
            assert writer.troubles(run) == []
        finally:
            other.kill()
            writer.close()
    assert Runs(own.uri).one(run.run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_sync_sends_what_no_writer_has(settings: Settings, store: Runs):
    run = ToldRun(settings)
    # the state in which the pool leaves it
    save_progress(run.directory, opening(Tracking(experiment="nb")))
    run.start()
    run.metric(0, "loss", 0.5)
    run.end()
    listed, all_sent = sync(settings, run.run_id, only_list=True)
    assert (short(run.run_id) in listed, all_sent) == (True, False)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SGPU_", "MLFLOW_"))}
    places = {"SGPU_STATE_DIR": settings.state_dir, "SGPU_RUNTIME_DIR": settings.runtime_dir}
    places["SGPU_CONFIG"] = f"{settings.state_dir}/no.toml"
    done = subprocess.run(
        [sys.executable, "-m", "sgpu_magic.cli", "sync", run.run_id],
        env=environ | places, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"sent: {short(run.run_id)}\n"), done.stderr
    assert sync(settings, run.run_id) == ("everything is in MLflow", True)
    found = store.one(run.run_id)
    assert store.history(found.info.run_id, "loss") == [(0, 0.5)]
    assert found.info.status == "FINISHED"


@pytest.fixture
def another_mlflows(empty_store: Path) -> Iterator[tuple[WriterProcess, ToldRun]]:
    """A writer whose store was created by another version of MLflow, and a run for which it has reported troubles."""
    settings = new_settings()
    with contextlib.closing(sqlite3.connect(lay_store(empty_store, settings.state_path))) as store:
        store.execute("UPDATE alembic_version SET version_num = 'feedbeef0000'")
        store.commit()
    writer = WriterProcess(settings)
    try:
        run = ToldRun(settings)
        run.end()
        writer.track(run)
        writer.until(lambda: writer.troubles(run))
        yield writer, run
    finally:
        writer.close()
        remove(settings)


@pytest.mark.slow
def test_a_store_of_another_mlflow_is_a_sentence(another_mlflows: tuple[WriterProcess, ToldRun]):
    writer, run = another_mlflows
    text = writer.troubles(run)[0].text
    assert "another version of MLflow (feedbeef0000)" in text
    assert "mlflow db upgrade" in text
    assert "sgpu sync" in text
    assert not run.complete
    assert run.progress is not None
    assert run.progress.problem
    assert writer.end() == ""


def many_runs(settings: Settings, count: int) -> list[ToldRun]:
    made: list[ToldRun] = []
    for number in range(count):
        run = ToldRun(settings, name=f"run {number}")
        run.metric(0, "number", float(number))
        run.end()
        made.append(run)
    return made


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_many_runs_are_one_each(settings: Settings, writer: WriterProcess, store: Runs, count: int):
    first, *others = runs = many_runs(settings, count)
    writer.track(first, Tracking(experiment=f"many {count}"))
    # its store stays open from now on
    writer.until_done(first)
    before = len(os.listdir(f"/proc/{writer.pid}/fd"))
    for run in others:
        writer.track(run, Tracking(experiment=f"many {count}"))
    eventually(
        lambda: (writer.take(), all(run.complete for run in runs))[1],
        300,
        lambda: f"{sum(run.complete for run in runs)} of {count}",
    )
    found = store.all(f"many {count}")
    numbers = sorted(run.data.metrics["number"] for run in found)
    assert numbers == [float(number) for number in range(count)]
    assert len(os.listdir(f"/proc/{writer.pid}/fd")) <= before + 3


def test_the_record_of_a_run_has_the_store_and_no_credentials(settings: Settings, writer: WriterProcess):
    run = ToldRun(settings)
    run.end()
    writer.track(run)
    writer.until_done(run)
    found = run.progress
    assert found is not None
    assert found.complete
    assert found.uri == ""
    assert found.tracked is not None
    assert Progress(uri="x").tracked is None


def test_a_writer_without_work_ends_and_takes_what_is_removed_out_of_the_store_unless_the_user_has_logged_something(
    settings: Settings, writer: WriterProcess, store: Runs, monkeypatch: pytest.MonkeyPatch
):
    kept, removed, logged = runs = [ToldRun(settings) for _ in range(3)]
    logged.metric(0, "loss", 0.5)
    for run in runs:
        run.end()
        writer.track(run)
    writer.until_done(*runs)
    found = {run.run_id: store.one(run.run_id).info for run in runs}
    for run in (removed, logged):
        shutil.rmtree(settings.runs_path / run.run_id)
    with quiet_mlflow():
        from sgpu_magic.tracking import __main__ as process
        from sgpu_magic.tracking import writer_queue
        from sgpu_magic.tracking.client import TrackingStore

        monkeypatch.setattr(writer_queue, "IDLE_S", 0.2)
        # the pool sends nothing, and a real `Inbox` would end this process when the socket closes
        messages: queue.SimpleQueue[None] = queue.SimpleQueue()
        idle = writer_queue.WriterQueue(settings, Tracking(), lambda _: None)
        work = threading.Thread(target=process._work, args=(idle, messages), daemon=True)
        work.start()
        work.join(30)
        assert not work.is_alive(), "it does not end"
        assert TrackingStore(settings, Tracking()).prune() == 0, "it has pruned the store"
    assert store.of(removed.run_id) == []
    assert all(len(store.of(run.run_id)) == 1 for run in (kept, logged))
    folders = {run_id: Path(info.artifact_uri.removeprefix("file://")) for run_id, info in found.items()}
    assert [folders[run.run_id].parent.exists() for run in runs] == [True, False, True]


def test_a_writer_leaves_when_only_idle_sessions_are_left(
    settings: Settings, store: Runs, monkeypatch: pytest.MonkeyPatch
):
    session, cell = ToldRun(settings, kind=RunKind.SESSION), ToldRun(settings)
    reported: list[FromTracker] = []
    with quiet_mlflow():
        from sgpu_magic.tracking import __main__ as process
        from sgpu_magic.tracking import writer_queue

        monkeypatch.setattr(writer_queue, "QUIET_S", 0.0)
        monkeypatch.setattr(writer_queue, "INTERVAL_S", 0.0)
        writers = writer_queue.WriterQueue(settings, Tracking(), reported.append)
        messages: queue.SimpleQueue[None] = queue.SimpleQueue()
        for run in (session, cell):
            run.start()
            writers.track(Track(run_id=run.run_id, run_dir=str(run.directory), tracking=Tracking(experiment="nb")))
        assert not writers.idle, "the pool does not know the session's MLflow run"
        work = threading.Thread(target=process._work, args=(writers, messages), daemon=True)
        work.start()
        eventually(lambda: len(reported) == 2, 30, "both are announced")
        assert work.is_alive(), "a run that is no session is left"
        cell.end()
        writers.finish_run(cell.run_id)
        work.join(30)
        assert not work.is_alive(), "it does not leave"
    assert reported[2:] == [
        TrackingDone(run_id=cell.run_id, complete=True),
        TrackerRests(run_ids=(session.run_id,)),
    ]
    assert store.one(session.run_id).info.status == "RUNNING"

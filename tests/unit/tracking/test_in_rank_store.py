"""MLflow in a tracked cell, with a real store and no rank: reads, logged data, forbidden calls, agent messages."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow_stores import copy_store
from msgspec.structs import replace
from tracking_writers import quiet_mlflow

from sgpu_magic.tracking import in_rank_cell
from sgpu_magic.tracking.in_rank_cell import CellHere, LogCollector, hold
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.rank import AskTracking, MetricsReported, Remarked, TrackingAnswered
from sgpu_magic.wire.tracking import MetricPoint, TrackedRun, Tracking


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """The messages from the rank to its agent; remarks are forgotten first."""
    monkeypatch.setattr(in_rank_cell, "_remarked", set())
    return []


def cell_of(sent: list[Record], folder: Path, uri: str = "sqlite:///here.db", *, leads: bool = True) -> CellHere:
    return CellHere(
        "run-1", Tracking(uri=uri), leads=leads, run_dir=str(folder), say=sent.append, reports=LogCollector(sent.append)
    )


def answer(tracked: TrackedRun | None, run_id: str = "run-1", problem: str | None = None) -> TrackingAnswered:
    return TrackingAnswered(run_id=run_id, tracked=tracked, problem=problem)


def remarks(sent: list[Record]) -> list[str]:
    return [message.text for message in sent if isinstance(message, Remarked)]


# ---------------------------------------------------------------- the cell


TRACKED = TrackedRun(
    uri="sqlite:///here.db", mlflow_run_id="a" * 32, experiment_id="1", experiment="nb", artifact_uri="file:///a"
)


def test_the_run_is_asked_for_once_and_only_its_own_answer_counts(sent: list[Record], tmp_path: Path):
    cell = cell_of(sent, tmp_path)
    assert (cell.is_this(cell.alias), cell.is_this(TRACKED.mlflow_run_id), cell.is_this("")) == (True, False, False)
    cell.ask()
    cell.ask()
    assert sent == [AskTracking()]
    cell.on_answer(answer(TRACKED, "run-0"))
    assert cell.known_run is None
    cell.on_answer(answer(TRACKED))
    assert cell.wait() == TRACKED
    assert cell.true_id == TRACKED.mlflow_run_id
    assert cell.is_this(TRACKED.mlflow_run_id)
    cell.has_ended = True
    assert not cell.is_this(cell.alias)


def test_an_answer_that_does_not_come_is_a_remark(sent: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(in_rank_cell, "_PATIENCE_S", 0.0)
    cell = cell_of(sent, tmp_path)
    assert cell.wait() is cell.wait() is None
    assert cell.true_id == cell.alias
    (remark,) = remarks(sent)
    assert remark.startswith("MLflow: the pool did not report the run's MLflow id within 0 s. The run continues; ")
    assert f"artifacts in {tmp_path}/artifacts" in remark


def test_the_users_own_choice_is_remarked_once(sent: list[Record], tmp_path: Path):
    cell = cell_of(sent, tmp_path)
    for what in ("MLflow's tracking URI", "MLflow's experiment"):
        cell.begin_own(what)
    assert cell.own
    (remark,) = remarks(sent)
    assert remark.startswith("the cell has set MLflow's tracking URI: from then on MLflow follows the cell")


def test_a_full_batch_is_sent_at_once_and_none_after_the_cells_end(sent: list[Record]):
    reports = LogCollector(sent.append)
    reports.end()
    points = [MetricPoint("loss", float(step), 0, step) for step in range(2500)]
    reports.add(points)
    assert sent == []
    reports.begin()
    reports.flush()
    assert [len(message.metrics) for message in sent if isinstance(message, MetricsReported)] == [1000, 1000, 500]
    sent.clear()
    reports.add(points[:1000])
    assert [message for message in sent if isinstance(message, MetricsReported)] == [
        MetricsReported(metrics=tuple(points[:1000]))
    ]


def test_a_forked_child_tells_its_parent_and_asks_for_nothing(sent: list[Record], tmp_path: Path):
    cell = cell_of(sent, tmp_path)
    reports = cell.reports
    pid = os.fork()
    if pid == 0:
        try:
            reports.add([MetricPoint("loss", 1.0, 0, 0)], [("lr", "0.1")], [("a", "b")] * 7)
            reports.flush()
            cell.begin_own("MLflow's experiment")
            os._exit(0 if cell.wait() is None and sent == [] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sent == []
    reports.flush()
    found = [message for message in sent if isinstance(message, MetricsReported)]
    assert [point.key for message in found for point in message.metrics] == ["loss"]
    assert [pair for message in found for pair in message.params] == [("lr", "0.1")]
    assert [pair for message in found for pair in message.tags] == [("a", "b")] * 7


# ---------------------------------------------------------------- the store


class Here:
    """A tracked cell's store, the real one behind it, and the messages to the agent."""

    def __init__(self, folder: Path, uri: str, sent: list[Record], *, leads: bool = True) -> None:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        from sgpu_magic.tracking.in_rank_store import RunStore

        self.real: Any = SqlAlchemyStore(uri, f"{folder}/artifacts")
        self.opened = 0
        self.sent = sent
        self.cell = cell_of(sent, folder, uri, leads=leads)
        self.store: Any = RunStore(uri, self._open)
        experiment = self.real.create_experiment("nb", f"{folder}/artifacts", [])
        made = self.real.create_run(experiment, "ann", int(time.time() * 1000), [], "cell")
        self.tracked = TrackedRun(
            uri=uri,
            mlflow_run_id=made.info.run_id,
            experiment_id=experiment,
            experiment="nb",
            artifact_uri=made.info.artifact_uri,
        )
        hold(self.cell)

    def _open(self) -> Any:
        self.opened += 1
        return self.real

    def reported(self) -> list[MetricsReported]:
        self.cell.reports.flush()
        return [message for message in self.sent if isinstance(message, MetricsReported)]


@pytest.fixture
def here(tmp_path: Path, empty_store: Path, sent: list[Record]) -> Iterator[Here]:
    copy_store(empty_store, tmp_path / "mlflow.db", f"{tmp_path}/artifacts")
    with quiet_mlflow():
        made = Here(tmp_path, f"sqlite:///{tmp_path}/mlflow.db", sent)
        yield made
        hold(None)
        made.real.engine.dispose()


def test_logging_to_the_run_opens_no_store_and_to_another_one_does(here: Here):
    from mlflow.entities import Metric, Param, RunStatus, RunTag

    here.store.flush_async_logging()
    alias = here.cell.alias
    here.store.log_metric_async(alias, Metric("loss", 0.5, 0, 3)).wait()
    here.store.log_param_async(alias, Param("lr", "0.1")).wait()
    here.store.set_tag_async(alias, RunTag("a", "b")).wait()
    here.store.update_run_info(alias, RunStatus.FINISHED, 5, "night")
    reported = here.reported()
    assert [(point.key, point.value, point.step) for message in reported for point in message.metrics] == [
        ("loss", 0.5, 3)
    ]
    assert [pair for message in reported for pair in message.params] == [("lr", "0.1")]
    assert [pair for message in reported for pair in message.tags] == [("a", "b"), ("mlflow.runName", "night")]
    assert here.opened == 0
    here.cell.on_answer(answer(here.tracked))
    other = here.store.create_run("0", "ann", 0, [], "other").info.run_id
    assert here.opened == 1
    here.store.log_batch_async(other, [], [Param("p", "1")], []).wait()
    here.store.update_run_info(other, RunStatus.FINISHED, 5, "named")
    found = here.store.get_run(other)
    assert (found.data.params, found.info.run_name, found.info.status) == ({"p": "1"}, "named", "FINISHED")
    here.store.delete_run(other)
    assert here.real.get_run(other).info.lifecycle_stage == "deleted"
    here.store.shut_down_async_logging()


def test_the_run_itself_is_read_but_not_deleted(here: Here):
    from mlflow.exceptions import MlflowException

    here.cell.on_answer(answer(here.tracked))
    for run_id in (here.cell.alias, here.tracked.mlflow_run_id):
        assert here.store.get_run(run_id).info.run_id == here.tracked.mlflow_run_id
        with pytest.raises(MlflowException, match="the MLflow run of the cell itself, which can't be deleted"):
            here.store.delete_run(run_id)
    # the real store always gets the id instead of the placeholder
    assert here.store.get_metric_history(here.cell.alias, "loss") == []
    assert here.store.artifact_root_uri == here.real.artifact_root_uri
    # the default experiment name of Lightning's logger stands for the run's own experiment
    assert here.store.get_experiment_by_name("lightning_logs").name == "nb"
    assert here.store.get_experiment_by_name("nothing") is None


def test_a_run_that_is_gone_from_its_store_is_described_with_what_is_known(here: Here, tmp_path: Path):
    here.cell.on_answer(answer(replace(here.tracked, mlflow_run_id="f" * 32)))
    found = here.store.get_run(here.cell.alias)
    assert (found.info.run_id, found.info.artifact_uri) == ("f" * 32, f"file://{tmp_path}/artifacts")
    (remark,) = remarks(here.sent)
    assert remark.startswith("the MLflow run can't be read (")
    assert "Metrics are still logged" in remark


def test_metrics_of_a_model_are_the_runs_all_the_same(here: Here):
    """Where the real store does not know the model, they are logged without it."""
    from mlflow.entities import Metric

    here.cell.on_answer(answer(here.tracked))
    here.store.log_metric(here.cell.alias, Metric("loss", 0.5, 0, 1, model_id="m-unknown", run_id="f" * 32))
    assert [point.key for message in here.reported() for point in message.metrics] == ["loss"]
    (remark,) = remarks(here.sent)
    assert remark.startswith("metrics were logged for the run only, not for their model: ")


def test_without_a_store_nothing_else_is_available(here: Here):
    from mlflow.exceptions import MlflowException

    here.cell.on_answer(answer(None, problem="the pool has no MLflow"))
    with pytest.raises(MlflowException, match=r"the tracking store sqlite:///\S+ of this run is not available"):
        here.store.search_runs([], "", 1)
    assert here.opened == 0
    assert here.store.create_run("0", "ann", 0, [], "mine").info.run_id == here.cell.alias
    assert len(remarks(here.sent)) == 1


def test_children_name_the_run_as_their_parent(here: Here):
    from mlflow.entities import RunTag

    here.cell.on_answer(answer(here.tracked))
    experiment = here.tracked.experiment_id

    def made(*tags: RunTag) -> Any:
        return here.store.create_run(experiment, "ann", 0, list(tags), "child")

    assert made().info.run_id == here.tracked.mlflow_run_id
    for tags in ((), (RunTag("mlflow.parentRunId", here.cell.alias), RunTag("a", "b"))):
        child = made(*tags)
        assert child.info.run_id != here.tracked.mlflow_run_id
        assert child.data.tags["mlflow.parentRunId"] == here.tracked.mlflow_run_id
    other = made(RunTag("mlflow.parentRunId", child.info.run_id))
    assert other.data.tags["mlflow.parentRunId"] == child.info.run_id

"""A tracked cell's own MLflow calls, in real ranks with a real store; the test acts as their agent."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mlflow_stores import copy_store
from ranks import Session, Zygote
from tracking_writers import quiet_mlflow

from sgpu_magic.wire.rank import (
    AskTracking,
    CellFailed,
    Finished,
    Finishing,
    FromRank,
    HeavyImported,
    Joined,
    MetricsReported,
    Remarked,
    TrackingAnswered,
)
from sgpu_magic.wire.tracking import MetricPoint, TrackedRun, Tracking, absolute_uri

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files")


class Place(NamedTuple):
    """A store with one run in it."""

    folder: Path
    uri: str
    tracked: TrackedRun

    def ask(self, value: str, body: str = "") -> Any:
        """The value of an expression over `client`, evaluated outside the ranks."""
        with quiet_mlflow() as mlflow:
            names = {"client": mlflow.MlflowClient(self.uri), "mlflow": mlflow}
            exec(body, names)
            return eval(value, names)


def python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Place:
    folder = tmp_path_factory.mktemp("mlflow")
    copy_store(empty_store, folder / "mlflow.db", f"{folder}/artifacts")
    uri = f"sqlite:///{folder}/mlflow.db"
    with quiet_mlflow() as mlflow:
        client = mlflow.MlflowClient(uri)
        experiment = client.create_experiment("notebook", artifact_location=f"{folder}/artifacts")
        run = client.create_run(experiment, run_name="cell")
    tracked = TrackedRun(
        uri=uri,
        mlflow_run_id=run.info.run_id,
        experiment_id=experiment,
        experiment="notebook",
        artifact_uri=run.info.artifact_uri,
    )
    return Place(folder, uri, tracked)


class Tracked:
    """Ranks of a session whose cells are tracked.

    Args:
        session: The ranks.
        context: Where.
    """

    def __init__(self, session: Session, context: Place) -> None:
        self.session = session
        self.context = context
        self.tracking = Tracking(uri=context.uri, experiment="notebook", variables={"MLFLOW_RUN_ID": "of-the-parent"})
        self.known: TrackedRun | None = context.tracked
        self.problem: str | None = None

    def run(self, body: str, *, answers: bool = True, **options: Any) -> list[Any]:
        """Run a cell and return each rank's value; the ranks' reports have arrived when it returns."""
        self.begin(body, answers=answers, **options)
        return [self.session.result(rank)["value"] for rank in options.get("only") or range(self.session.size)]

    def begin(self, body: str, *, answers: bool = True, **options: Any) -> None:
        run_id = f"run-{self.session.cells + 1}"
        for rank in self.session.ranks:
            rank.others.clear()
            answer = TrackingAnswered(run_id=run_id, tracked=self.known, problem=self.problem)
            rank.answer = answer if answers else None
        self.session.execute(body, **{"tracking": self.tracking} | options)

    def sent(self, rank: int) -> list[FromRank]:
        return [message for message, _ in self.session.ranks[rank].others]

    def metrics(self, rank: int) -> list[tuple[str, float, int]]:
        """(key, value, step) in the order in which the rank reported them."""
        return [(p.key, p.value, p.step) for m in self._reported(rank) for p in m.metrics]

    def points(self, rank: int) -> list[MetricPoint]:
        return [point for message in self._reported(rank) for point in message.metrics]

    def params(self, rank: int) -> dict[str, str]:
        return dict(pair for message in self._reported(rank) for pair in message.params)

    def tags(self, rank: int) -> dict[str, str]:
        return dict(pair for message in self._reported(rank) for pair in message.tags)

    def remarks(self, rank: int) -> list[str]:
        return [message.text for message in self.sent(rank) if isinstance(message, Remarked)]

    def _reported(self, rank: int) -> list[MetricsReported]:
        return [message for message in self.sent(rank) if isinstance(message, MetricsReported)]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(zygote: Zygote, context: Place) -> Iterator[Tracked]:
    """Two ranks that have imported MLflow, which takes a second per rank."""
    session = Session(zygote, 2, cwd=str(context.folder)).connect()
    made = Tracked(session, context)
    made.run("import mlflow\nfrom mlflow.entities import Metric")
    yield made
    session.leave()


@pytest.fixture
def ranks(shared: Tracked) -> Tracked:
    shared.known, shared.problem = shared.context.tracked, None
    return shared


@pytest.fixture
def new_ranks(zygote: Zygote, context: Place) -> Iterator[Tracked]:
    session = Session(zygote, 2, cwd=str(context.folder)).connect()
    yield Tracked(session, context)
    session.leave()


# ---------------------------------------------------------------- nothing before user code uses it


def test_no_cell_imports_or_asks_for_mlflow_by_itself(new_ranks: Tracked):
    body = "import os, sys\n('mlflow' in sys.modules, os.environ['MLFLOW_TRACKING_URI'], 'MLFLOW_RUN_ID' in os.environ)"
    assert new_ranks.run(body) == [(False, new_ranks.context.uri, False)] * 2
    # on a busy machine any import may take long enough to be told
    sent = [*new_ranks.sent(0), *new_ranks.sent(1)]
    assert [message for message in sent if not isinstance(message, HeavyImported)] == []


@pytest.mark.slow
def test_a_cell_that_is_not_tracked_has_plain_mlflow(new_ranks: Tracked):
    body = "import mlflow\n(mlflow.active_run(), mlflow.start_run.__module__, hasattr(mlflow.start_run, '__wrapped__'))"
    assert new_ranks.run(body, tracking=None) == [(None, "mlflow.tracking.fluent", False)] * 2
    # MLflow has been imported by then: the next cell is tracked nevertheless
    assert new_ranks.run("mlflow.active_run().info.run_id") == [new_ranks.context.tracked.mlflow_run_id] * 2


# ---------------------------------------------------------------- the run's own run


def test_metrics_of_every_rank_reach_the_run_without_a_start(ranks: Tracked):
    ranks.run("mlflow.log_metric('loss', 0.5 + rank, step=3)\nmlflow.log_params({'lr': 0.1})\nmlflow.set_tag('a', 'b')")
    for rank in (0, 1):
        assert ranks.metrics(rank) == [("loss", 0.5 + rank, 3)]
        assert ranks.params(rank) == {"lr": "0.1"}
        assert ranks.tags(rank) == {"a": "b"}


def test_logging_waits_for_no_answer(ranks: Tracked):
    body = "with mlflow.start_run():\n    mlflow.log_metrics({'a': 1.0, 'b': float('nan')}, step=7)\n'done'"
    assert ranks.run(body, answers=False) == ["done", "done"]
    assert [key for key, _, _ in ranks.metrics(0)] == ["a", "b"]


def test_a_start_joins_and_an_end_does_not_end(ranks: Tracked):
    body = """
with mlflow.start_run(run_name="night", description="why", tags={"team": "x"}) as first:
    with mlflow.start_run() as second:
        mlflow.log_metric("a", 1)
    mlflow.log_metric("a", 2)
none = mlflow.active_run()
mlflow.log_metric("a", 3)
mlflow.end_run()
(first.info.run_id, second.info.run_id, none, mlflow.last_active_run().info.run_id)
"""
    run_id = ranks.context.tracked.mlflow_run_id
    assert ranks.run(body) == [(run_id, run_id, None, run_id)] * 2
    assert [value for _, value, _ in ranks.metrics(1)] == [1.0, 2.0, 3.0]
    assert ranks.tags(0) == {"team": "x", "mlflow.note.content": "why", "mlflow.runName": "night"}
    # the first rank names the run; other tags are treated like those of `set_tag`
    assert ranks.tags(1) == {"team": "x"}
    assert ranks.context.ask(f"client.get_run({run_id!r}).info.status") == "RUNNING"


def test_ending_all_active_runs_comes_to_an_end(ranks: Tracked):
    assert ranks.run("while mlflow.active_run():\n    mlflow.end_run()\n'done'") == ["done", "done"]


def test_the_active_run_is_the_runs_own_in_threads_too(ranks: Tracked):
    body = """
import threading
found = []
def log():
    mlflow.log_metric("t", rank)
    found.append(mlflow.active_run().info.run_id)
threads = [threading.Thread(target=log) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
set(found)
"""
    assert ranks.run(body) == [{ranks.context.tracked.mlflow_run_id}] * 2
    assert ranks.metrics(1) == [("t", 1.0, 0)] * 4


def test_a_nested_run_is_a_child_on_the_first_rank_and_joins_on_others(ranks: Tracked):
    body = """
with mlflow.start_run(run_name="fold", nested=True) as child:
    mlflow.log_metric("c", 1)
child.info.run_id
"""
    child, joined = ranks.run(body)
    run_id = ranks.context.tracked.mlflow_run_id
    assert joined == run_id
    assert any("creates a run on the first rank only" in text for text in ranks.remarks(1))
    assert ranks.metrics(0) == []
    assert ranks.metrics(1) == [("c", 1.0, 0)]
    value = "[run.info.status, run.info.experiment_id, run.data.tags['mlflow.parentRunId'], run.data.metrics]"
    found = ranks.context.ask(value, f"run = client.get_run({child!r})")
    assert found == ["FINISHED", ranks.context.tracked.experiment_id, run_id, {"c": 1.0}]


def test_loggers_that_make_a_run_themselves_get_the_runs_own(ranks: Tracked):
    """As Lightning's MLFlowLogger does it."""
    body = """
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name("lightning_logs").experiment_id
assert experiment == client.get_experiment_by_name("notebook").experiment_id
made = client.create_run(experiment, run_name="fit").info.run_id
client.log_batch(made, [Metric("m", 1.0, 1, 1)])
client.log_metric(made, "n", 2)
client.set_terminated(made)
again = client.create_run(experiment).info.run_id
(made, again)
"""
    (made, again), joined = ranks.run(body)
    run_id = ranks.context.tracked.mlflow_run_id
    assert made == run_id
    assert joined == (run_id, run_id)
    assert ranks.metrics(0) == [("m", 1.0, 1), ("n", 2.0, 0)]
    assert ranks.context.ask(f"client.get_run({again!r}).data.tags['mlflow.parentRunId']") == run_id
    assert ranks.context.ask(f"client.get_run({run_id!r}).info.status") == "RUNNING"


def test_artifacts_of_every_rank_lie_in_the_run(ranks: Tracked):
    ranks.run("mlflow.log_text('hi', f'notes/{rank}.txt')\nmlflow.log_dict({'a': 1}, f'{rank}.json')")
    value = f"[a.path for a in client.list_artifacts({ranks.context.tracked.mlflow_run_id!r}, 'notes')]"
    assert ranks.context.ask(value) == ["notes/0.txt", "notes/1.txt"]


@pytest.mark.slow
def test_models_are_logged_and_registered_by_the_first_rank(ranks: Tracked):
    body = """
import numpy as np
from sklearn.linear_model import LinearRegression
x = np.arange(20.0).reshape(-1, 1)
model = LinearRegression().fit(x, 2 * x)
info = mlflow.sklearn.log_model(model, name="line", registered_model_name="line", serialization_format="cloudpickle",
                                pip_requirements=["scikit-learn"])
assert rank == 0 or mlflow.register_model("runs:/x/m", "m") is None
loaded = mlflow.sklearn.load_model("models:/line/1") if info else None
loaded and float(loaded.predict([[3.0]])[0, 0])
"""
    predicted, nothing = ranks.run(body)
    assert predicted == pytest.approx(6.0)
    assert nothing is None
    assert "first rank" in ranks.remarks(1)[0]
    source = "client.get_logged_model(client.get_model_version('line', '1').source.split('/')[1]).source_run_id"
    assert ranks.context.ask(source) == ranks.context.tracked.mlflow_run_id


@pytest.mark.slow
def test_autolog_works_on_the_first_rank_and_is_silent_on_others(ranks: Tracked):
    body = """
import numpy as np
from sklearn.linear_model import LinearRegression
mlflow.sklearn.autolog(log_models=False)
x = np.arange(20.0).reshape(-1, 1)
model = LinearRegression().fit(x, 2 * x)
mlflow.sklearn.autolog(disable=True)
mlflow.active_run().info.run_id
"""
    run_id = ranks.context.tracked.mlflow_run_id
    assert ranks.run(body) == [run_id] * 2
    assert ranks.params(0)["fit_intercept"] == "True"
    # they also belong to a dataset, which only the store can return
    assert "training_r2_score" in ranks.context.ask(f"client.get_run({run_id!r}).data.metrics")
    assert ranks.params(1) == {}
    assert ranks.metrics(1) == []


# ---------------------------------------------------------------- the path of logged data


@pytest.mark.slow
def test_none_of_many_metrics_is_lost_and_their_order_stays(ranks: Tracked):
    ranks.run("for step in range(2500):\n    mlflow.log_metric('x', step, step=step)")
    for rank in (0, 1):
        assert [step for _, _, step in ranks.metrics(rank)] == list(range(2500))
        assert max(len(m.metrics) for m in ranks.sent(rank) if isinstance(m, MetricsReported)) <= 1000


def test_what_was_logged_before_an_error_comes_before_it(ranks: Tracked):
    ranks.begin("mlflow.log_metric('last', 1)\n1 / 0")
    for rank in (0, 1):
        ranks.session.ranks[rank].expect(CellFailed)
        assert ranks.metrics(rank) == [("last", 1.0, 0)]


@pytest.mark.parametrize("body", ["raise SystemExit(3)", "pass"])
def test_what_was_logged_comes_before_the_cells_end_where_work_is_left_to_finish(
    zygote: Zygote, context: Place, body: str
):
    session = Session(zygote, 1, cwd=str(context.folder))
    session.prepare(stays=False)
    session.ranks[0].expect(Joined)
    alone = Tracked(session, context)
    logs_at_exit = "import atexit, mlflow\natexit.register(mlflow.log_metric, 'late', 2)\n"
    alone.begin(f"{logs_at_exit}mlflow.log_metric('last', 1)\n{body}", in_session=False)
    session.ranks[0].expect(CellFailed, Finished)
    # the agent may report a failed run's end now
    assert alone.metrics(0) == [("last", 1.0, 0)]
    while session.ranks[0].expect(Finishing).work is not None:
        pass
    assert alone.metrics(0) == [("last", 1.0, 0), ("late", 2.0, 0)]
    session.leave()


@pytest.mark.slow
def test_forked_children_log_to_the_run(ranks: Tracked):
    body = """
import os
pids = []
for child in range(3):
    pid = os.fork()
    if not pid:
        for step in range(300):
            mlflow.log_metric(f"child{child}", step, step=step)
        mlflow.log_params({f"p{child}_{i}": "v" * 6000 for i in range(20)})
        os._exit(0)
    pids.append(pid)
[os.waitpid(pid, 0)[1] for pid in pids]
"""
    assert ranks.run(body) == [[0, 0, 0]] * 2
    for rank in (0, 1):
        for child in range(3):
            steps = [step for key, _, step in ranks.metrics(rank) if key == f"child{child}"]
            assert steps == list(range(300))
        assert len(ranks.params(rank)) == 60


def test_values_that_mlflow_refuses_are_refused(ranks: Tracked):
    body = (
        "try:\n    mlflow.log_metric('a' * 300, 1)\n    said = ''\nexcept mlflow.exceptions.MlflowException as error:\n"
    )
    assert all(ranks.run(body + "    said = str(error)\nbool(said)"))


# ---------------------------------------------------------------- from cell to cell


def test_each_cell_of_a_session_has_a_run_of_its_own(ranks: Tracked):
    other = ranks.context.ask("client.create_run('1').info.run_id")
    ranks.run("kept = mlflow.start_run()\nmlflow.log_metric('a', 1)")
    ranks.known = TrackedRun(
        uri=ranks.context.uri, mlflow_run_id=other, experiment_id="1", artifact_uri=ranks.context.tracked.artifact_uri
    )
    # a run that was left active does not block the next cell's
    assert ranks.run("with mlflow.start_run() as r:\n    mlflow.log_metric('a', 2)\nr.info.run_id") == [other] * 2
    assert ranks.metrics(1) == [("a", 2.0, 0)]
    assert [m for m in ranks.sent(0) if isinstance(m, AskTracking)] != []
    assert ranks.run("mlflow.active_run().info.run_id", only=[1]) == [other]


def test_the_first_of_the_ranks_that_take_part_leads(ranks: Tracked):
    body = "with mlflow.start_run(nested=True) as child: pass\nchild.info.run_id"
    [child] = ranks.run(body, only=[1])
    assert child != ranks.context.tracked.mlflow_run_id


@pytest.mark.slow
def test_what_the_user_sets_counts(new_ranks: Tracked, tmp_path: Path):
    ranks = new_ranks
    run_id = ranks.context.tracked.mlflow_run_id
    # values that match the run's own place change nothing
    same = "import mlflow\nmlflow.set_tracking_uri('sqlite:///mlflow.db')\nmlflow.set_experiment('notebook')\n"
    assert ranks.run(same + "mlflow.active_run().info.run_id") == [run_id] * 2
    assert ranks.remarks(0) == []
    shutil.copy(ranks.context.folder / "mlflow.db", tmp_path / "other.db")
    other = f"sqlite:///{tmp_path}/other.db"
    body = f"""
mlflow.log_metric("before", 1)
if rank == 0:
    mlflow.set_tracking_uri({other!r})
    mlflow.set_experiment("mine")
    with mlflow.start_run() as own:
        mlflow.log_metric("own", 2)
    found = own.info.run_id
else:
    found = mlflow.active_run().info.run_id
found
"""
    own, joined = ranks.run(body)
    assert own != run_id
    assert joined == run_id
    assert ranks.metrics(0) == [("before", 1.0, 0)]
    assert len(ranks.remarks(0)) == 1
    assert "MLflow's tracking URI" in ranks.remarks(0)[0]
    mine = ranks.context._replace(uri=other)
    assert mine.ask(f"client.get_run({own!r}).data.metrics") == {"own": 2.0}
    # this persists, without a second remark
    assert ranks.run("mlflow.active_run()")[0] is None
    assert ranks.remarks(0) == []


def test_another_run_or_experiment_of_the_users_counts_for_its_cell(ranks: Tracked):
    run_id = ranks.context.tracked.mlflow_run_id
    other = ranks.context.ask("client.create_run(client.get_experiment_by_name('notebook').experiment_id).info.run_id")
    body = f"""
mlflow.set_tracking_uri({ranks.context.uri!r})
mlflow.set_experiment("notebook")
joined = mlflow.active_run().info
found = None
if rank == 0:
    with mlflow.start_run(run_id={other!r}):
        mlflow.log_metric("theirs", 1)
    mlflow.log_metric("ours", 1)
    mlflow.set_experiment("mine")
    mlflow.set_experiment("mine")
    found = mlflow.active_run()
(joined.run_id, joined.artifact_uri, found)
"""
    artifacts = ranks.context.tracked.artifact_uri
    # values that match the run's own place change nothing
    assert ranks.run(body) == [(run_id, artifacts, None), (run_id, artifacts, None)]
    assert [key for key, _, _ in ranks.metrics(0)] == ["ours"]
    assert ranks.context.ask(f"client.get_run({other!r}).data.metrics") == {"theirs": 1.0}
    (remark,) = [text for text in ranks.remarks(0) if "the cell has set" in text]
    assert remark.startswith("the cell has set MLflow's experiment: from then on MLflow follows the cell")
    # the choice applies to later cells until it is reverted
    body = "found = mlflow.active_run()\nmlflow.set_experiment('notebook')\nfound is None"
    assert ranks.run(body) == [True, False]
    assert ranks.run("mlflow.active_run().info.run_id") == [run_id] * 2


# ---------------------------------------------------------------- every parameter of a replaced function


def told_anew(ranks: Tracked, body: str) -> list[Any]:
    """Run a cell that knows its run; its remarks are shown even if an earlier cell had them."""
    known = "from sgpu_magic.tracking import in_rank_cell\nmlflow.active_run().info.run_id\n"
    anew = "in_rank_cell._remarked.clear()\n"
    return ranks.run(f"{known}{anew}{body}\n{anew}found")


def remarked(ranks: Tracked, rank: int, words: str) -> bool:
    return any(words in text for text in ranks.remarks(rank))


def a_start_with_an_id_continues_that_run(ranks: Tracked) -> None:
    other = ranks.context.ask("client.create_run('1').info.run_id")
    ids = [ranks.context.tracked.mlflow_run_id, other]
    body = f"found = []\nfor each in {ids!r}:\n    with mlflow.start_run(run_id=each) as r: found.append(r.info.run_id)"
    assert told_anew(ranks, body) == [ids, ids]
    assert ranks.remarks(1) == []


def a_start_elsewhere_or_below_is_a_run_of_the_first_rank(ranks: Tracked) -> None:
    elsewhere = ranks.context.ask(
        "client.create_experiment('e' + __import__('uuid').uuid4().hex, artifact_location='/dev/null/none')"
    )
    run_id = ranks.context.tracked.mlflow_run_id
    for options, experiment in (
        (f"experiment_id={elsewhere!r}", elsewhere),
        ("nested=True", ranks.context.tracked.experiment_id),
        (f"parent_run_id={run_id!r}", ranks.context.tracked.experiment_id),
    ):
        start = f"mlflow.start_run({options}, tags={{'of': 'a child'}})"
        made, joined = told_anew(ranks, f"with {start} as r: found = r.info.run_id")
        assert ranks.tags(0) == ranks.tags(1) == {}
        assert made != run_id
        assert joined == run_id
        assert ranks.context.ask(f"client.get_run({made!r}).info.experiment_id") == experiment
        assert not ranks.remarks(0)
        assert remarked(ranks, 1, "creates a run on the first rank only")


def a_start_describes_the_run(ranks: Tracked) -> None:
    told_anew(
        ranks, "mlflow.start_run(run_name='n', description='d', tags={f'of{rank}': 'x'})\nfound = mlflow.end_run()"
    )
    # otherwise several ranks would overwrite each other's names
    assert ranks.tags(0) == {"of0": "x", "mlflow.runName": "n", "mlflow.note.content": "d"}
    assert ranks.tags(1) == {"of1": "x"}


def system_metrics_are_the_pools(ranks: Tracked) -> None:
    told_anew(ranks, "mlflow.start_run(log_system_metrics=True)\nfound = mlflow.end_run()")
    assert remarked(ranks, 0, "log_system_metrics has no effect here")


def another_status_is_remarked(ranks: Tracked) -> None:
    run_id = ranks.context.tracked.mlflow_run_id
    for call in ("mlflow.end_run()", "mlflow.end_run('FINISHED')", f"mlflow.MlflowClient().set_terminated({run_id!r})"):
        told_anew(ranks, f"mlflow.start_run()\nfound = {call}")
        assert ranks.remarks(0) == []
    for call in (
        "mlflow.end_run('FAILED')",
        f"mlflow.MlflowClient().set_terminated({run_id!r}, 'FAILED')",
        f"mlflow.MlflowClient().update_run({run_id!r}, status='FAILED')",
    ):
        told_anew(ranks, f"mlflow.start_run()\n{call}\nfound = 0")
        assert remarked(ranks, 1, "the status FAILED is not set")
    assert ranks.context.ask(f"client.get_run({run_id!r}).info.status") == "RUNNING"


def an_experiment_is_chosen(ranks: Tracked) -> None:
    other = ranks.context.ask("client.create_experiment('chosen')")
    for options in ("'chosen'", f"experiment_id={other!r}"):
        body = f"found = mlflow.set_experiment({options}).name\nmlflow.set_experiment('notebook')"
        assert told_anew(ranks, body) == ["chosen"] * 2
        assert remarked(ranks, 1, "the cell has set MLflow's experiment")
    # only Databricks supports trace locations; MLflow accesses the argument
    body = "found = ''\ntry: mlflow.set_experiment('notebook', trace_location=5)\n"
    assert told_anew(ranks, body + "except AttributeError as error: found = error.name") == ["table_prefix"] * 2


def a_store_is_chosen(ranks: Tracked) -> None:
    body = f"mlflow.set_tracking_uri('sqlite:///other.db')\nfound = 0\nmlflow.set_tracking_uri({ranks.context.uri!r})"
    told_anew(ranks, body)
    assert remarked(ranks, 0, "the cell has set MLflow's tracking URI")


def all_reaches_mlflow_on_the_first_rank(ranks: Tracked) -> None:
    for replacement in ("_register_model", "_log_model"):
        body = (
            "from sgpu_magic.tracking import in_rank_fluent\n"
            f"call = in_rank_fluent._instead_of(lambda *args, **named: (args, named), in_rank_fluent.{replacement})\n"
            "found = call('a', 2, c=3)"
        )
        assert told_anew(ranks, body) == [(("a", 2), {"c": 3}), None]
        assert remarked(ranks, 1, "models are logged and registered for the run by the first rank")


def a_logger_gets_the_run_and_describes_it(ranks: Tracked) -> None:
    body = """
client = mlflow.MlflowClient()
made = [client.create_run({here!r}, tags={{f"of{{rank}}": "x"}}, run_name="logger", start_time={start})]
made.append(client.create_run({here!r}))
made.append(client.create_run({there!r}))
found = [run.info.run_id for run in made]
"""
    there = ranks.context.ask("client.create_experiment('there')")
    here, run_id = ranks.context.tracked.experiment_id, ranks.context.tracked.mlflow_run_id
    first, second = told_anew(ranks, body.format(here=here, there=there, start=None))
    assert first[0] == second[0] == second[1] == run_id
    assert first[1] != run_id
    assert ranks.context.ask(f"client.get_run({first[1]!r}).data.tags['mlflow.parentRunId']") == run_id
    assert ranks.context.ask(f"client.get_run({second[2]!r}).info.experiment_id") == there
    assert ranks.tags(0) == {"of0": "x", "mlflow.runName": "logger"}
    assert ranks.tags(1) == {"of1": "x"}
    assert ranks.remarks(0) == []
    assert remarked(ranks, 1, "create_run creates further runs on the first rank only")
    told_anew(ranks, body.format(here=here, there=there, start=1))
    assert remarked(ranks, 0, "start and end times are not set")


def every_rank_renames_the_run(ranks: Tracked) -> None:
    run_id = ranks.context.tracked.mlflow_run_id
    told_anew(ranks, f"found = mlflow.MlflowClient().update_run({run_id!r}, name=f'by{{rank}}') and 0")
    assert [ranks.tags(rank) for rank in (0, 1)] == [{"mlflow.runName": "by0"}, {"mlflow.runName": "by1"}]


def another_end_is_remarked(ranks: Tracked) -> None:
    run_id = ranks.context.tracked.mlflow_run_id
    told_anew(ranks, f"found = mlflow.MlflowClient().set_terminated({run_id!r}, end_time=1)")
    assert remarked(ranks, 0, "start and end times are not set")


def what_is_logged_goes_to_its_run(ranks: Tracked) -> None:
    other = ranks.context.ask("client.create_run('1').info.run_id")
    run_id = ranks.context.tracked.mlflow_run_id
    body = f"""
from mlflow.entities import Param, RunTag
client = mlflow.MlflowClient()
# two processes that log a parameter to one run at the same time hinder each other in SQLite
for each in {[run_id, other]!r}[: 2 - rank]:
    for wait in (True, False):
        params, tags = [Param(f"p{{wait}}", "v")], [RunTag("t", "u")]
        client.log_batch(each, [Metric("m", 1.5, 7, 3)], params, tags, synchronous=wait)
        client.log_metric(each, "m", 2.5, 8, 4, synchronous=wait)
        client.log_param(each, f"q{{wait}}", "v", synchronous=wait)
        client.set_tag(each, "w", "u", synchronous=wait)
mlflow.flush_async_logging()
found = client.get_run({other!r}).data.metrics
"""
    assert told_anew(ranks, body)[0] == {"m": 2.5}
    for rank in (0, 1):
        assert ranks.metrics(rank) == [("m", 1.5, 3), ("m", 2.5, 4)] * 2
        assert {point.at_ms for point in ranks.points(rank)} == {7, 8}
        assert ranks.params(rank) == dict.fromkeys(("pTrue", "qTrue", "pFalse", "qFalse"), "v")
        assert ranks.tags(rank) == {"t": "u", "w": "u"}


def runs_are_looked_up_by_their_id(ranks: Tracked) -> None:
    other = ranks.context.ask("client.create_run('1').info.run_id")
    ids = [ranks.context.tracked.mlflow_run_id, other]
    assert told_anew(ranks, f"found = [mlflow.get_run(each).info.run_id for each in {ids!r}]") == [ids, ids]


def the_runs_own_is_not_deleted(ranks: Tracked) -> None:
    other = ranks.context.ask("client.create_run('1').info.run_id")
    body = (
        f"client = mlflow.MlflowClient()\nif rank == 0: client.delete_run({other!r})\n"
        f"try: client.delete_run({ranks.context.tracked.mlflow_run_id!r})\n"
        "except mlflow.exceptions.MlflowException as error: found = error.message"
    )
    assert "can't be deleted while it runs" in told_anew(ranks, body)[1]
    assert ranks.context.ask(f"client.get_run({other!r}).info.lifecycle_stage") == "deleted"


def experiments_are_looked_up_by_their_name(ranks: Tracked) -> None:
    body = "found = [mlflow.get_experiment_by_name(n).name for n in ('lightning_logs', 'Default')]"
    assert told_anew(ranks, body) == [["notebook", "Default"]] * 2


def same(names: str, check: Callable[[Tracked], None]) -> dict[str, Callable[[Tracked], None]]:
    return dict.fromkeys(names.split(), check)


LOGGED = what_is_logged_goes_to_its_run
# parameters by function, each with a test of its documented behaviour
PARAMETERS: dict[str, dict[str, Callable[[Tracked], None]]] = {
    "start_run": {
        "run_id": a_start_with_an_id_continues_that_run,
        "experiment_id": a_start_elsewhere_or_below_is_a_run_of_the_first_rank,
        "run_name": a_start_describes_the_run,
        "nested": a_start_elsewhere_or_below_is_a_run_of_the_first_rank,
        "parent_run_id": a_start_elsewhere_or_below_is_a_run_of_the_first_rank,
        **same("tags description", a_start_describes_the_run),
        "log_system_metrics": system_metrics_are_the_pools,
    },
    "end_run": {"status": another_status_is_remarked},
    "active_run": {},
    "_get_or_start_run": {},
    "_get_experiment_id": {},
    "set_experiment": same("experiment_name experiment_id trace_location", an_experiment_is_chosen),
    "set_tracking_uri": {"uri": a_store_is_chosen},
    "register_model": same("model_uri name await_registration_for tags env_pack", all_reaches_mlflow_on_the_first_rank),
    "Model.log": same(
        "artifact_path flavor registered_model_name await_registration_for metadata run_id resources auth_policy "
        "prompts name model_type params tags step model_id kwargs",
        all_reaches_mlflow_on_the_first_rank,
    ),
    "store.log_batch": same("run_id metrics params tags", LOGGED),
    "store.log_batch_async": same("run_id metrics params tags", LOGGED),
    **{f"store.log_metric{kind}": same("run_id metric", LOGGED) for kind in ("", "_async")},
    **{f"store.log_param{kind}": same("run_id param", LOGGED) for kind in ("", "_async")},
    **{f"store.set_tag{kind}": same("run_id tag", LOGGED) for kind in ("", "_async")},
    # the user is the one that MLflow finds on the rank; the writer has set the notebook's user
    "store.create_run": same("experiment_id user_id start_time tags run_name", a_logger_gets_the_run_and_describes_it),
    "store.get_experiment_by_name": {"experiment_name": experiments_are_looked_up_by_their_name},
    "store.update_run_info": {
        "run_id": another_status_is_remarked,
        "run_status": another_status_is_remarked,
        "end_time": another_end_is_remarked,
        "run_name": every_rank_renames_the_run,
    },
    "store.get_run": {"run_id": runs_are_looked_up_by_their_id},
    "store.delete_run": {"run_id": the_runs_own_is_not_deleted},
}
REPLACED = """
import inspect, sys
from mlflow.models.model import Model
from mlflow.store.tracking.abstract_store import AbstractStore
from sgpu_magic.tracking import in_rank_fluent, in_rank_store
here = in_rank_fluent.__file__
replaced = {"Model.log": Model.log}
for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "mlflow"]:
    for name, function in vars(module).items():
        if inspect.isfunction(function) and function.__code__.co_filename == here:
            replaced[name] = function
for name in vars(in_rank_store.RunStore):
    if not name.startswith("_"):
        replaced["store." + name] = getattr(AbstractStore, name)
{name: [each for each in inspect.signature(f).parameters if each != "self"] for name, f in replaced.items()}
"""


def test_every_parameter_of_what_is_replaced_in_mlflow_is_known(ranks: Tracked) -> None:
    """A replaced function, or a parameter that MLflow adds, needs a row in the table, and a decision."""
    assert ranks.run(REPLACED)[0] == {name: list(parameters) for name, parameters in PARAMETERS.items()}


@pytest.mark.parametrize(
    "check",
    dict.fromkeys(check for parameters in PARAMETERS.values() for check in parameters.values()),
    ids=lambda check: check.__name__,
)
def test_a_parameter_takes_effect_or_is_remarked(ranks: Tracked, check: Callable[[Tracked], None]) -> None:
    check(ranks)


# ---------------------------------------------------------------- no store, no reply


@pytest.mark.slow
def test_without_a_store_the_cell_goes_on_and_artifacts_are_kept(new_ranks: Tracked):
    ranks = new_ranks
    ranks.known, ranks.problem = None, "the server http://127.0.0.1:9 does not answer"
    body = """
import mlflow
with mlflow.start_run(run_name="x") as run:
    mlflow.log_metric("a", 1)
    mlflow.log_text("kept", f"notes/{rank}.txt")
    mlflow.set_experiment("whatever")
    with mlflow.start_run(nested=True):
        mlflow.log_metric("b", 2)
    model = mlflow.pyfunc.log_model(name="m", python_model=lambda model_input: model_input)
(len(run.info.run_id), model)
"""
    assert ranks.run(body) == [(32, None)] * 2
    for rank in (0, 1):
        assert [key for key, _, _ in ranks.metrics(rank)] == ["a", "b"]
        kept = Path(ranks.session.scratch.name) / "artifacts" / "notes" / f"{rank}.txt"
        assert kept.read_text() == "kept"
        [remark] = [text for text in ranks.remarks(rank) if "does not answer" in text]
        assert "sgpu sync" in remark


@pytest.mark.slow
def test_an_answer_that_does_not_come_is_given_up(new_ranks: Tracked):
    # the time limit is 20 s: the test shortens it
    shorter = "from sgpu_magic.tracking import in_rank_cell\nin_rank_cell._PATIENCE_S = 0.5\n"
    first, second = new_ranks.run(f"{shorter}import mlflow\nmlflow.active_run().info.run_id", answers=False)
    assert first != second
    assert "did not report" in new_ranks.remarks(0)[0]


def test_an_answer_to_another_cell_is_not_taken(ranks: Tracked):
    stray = TrackingAnswered(run_id="run-of-before", tracked=ranks.context.tracked)
    for rank in ranks.session.ranks:
        rank.send(stray)
    ranks.known = None
    assert all(len(found) == 32 for found in ranks.run("mlflow.active_run().info.run_id"))


# ---------------------------------------------------------------- pure


@pytest.mark.parametrize(
    ("uri", "absolute"),
    [
        ("http://host:5000", "http://host:5000"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
        ("mlruns", "file:///work/mlruns"),
        ("./mlruns", "file:///work/mlruns"),
        ("/data/mlruns", "file:///data/mlruns"),
        ("file:./mlruns", "file:///work/mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("sqlite:///mlflow.db", "sqlite:////work/mlflow.db"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("sqlite://", "sqlite://"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
    ],
)
def test_a_stores_address_is_made_absolute(uri: str, absolute: str):
    assert absolute_uri(uri, "/work") == absolute
    assert absolute_uri(absolute, "/elsewhere") == absolute


def test_the_ranks_half_is_light():
    code = "import sys, sgpu_magic.tracking.in_rank\nprint('mlflow' in sys.modules)"
    assert python(code).strip() == "False"

"""MLflow in the code of cells: one MLflow run for each run, whatever its ranks do, in the place the notebook names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from kernels import Home, Kernel, Reply, eventually
from mlflow_stores import lay_store
from shared_homes import SharedKernel
from tracking_writers import Runs

from sgpu_magic.files.tracking_progress import load_progress

TRACKS = {"SGPU_TRACK": "all"}


@pytest.fixture(scope="module")
def store(home: Home, coming_store: Future[Path], module_kernel: SharedKernel) -> Runs:
    """The home's default store. Making one takes longer than a rank waits, where everybody wants the processor."""
    module_kernel.get()
    database = home.state / "mlflow" / "mlflow.db"
    made = Runs(f"sqlite:///{database if database.exists() else lay_store(coming_store.result(), home.state)}")
    # importing MLflow here takes seconds
    made.all("notebook")
    return made


@pytest.fixture
def kernel(kernel: Kernel, home: Home, store: Runs) -> Kernel:
    """The home's kernel, whose runs are tracked for this test."""
    kernel.check(f"import os\nos.environ.update({TRACKS!r})")
    if not any("-m sgpu_magic.tracking " in process.command for process in home.processes().values()):
        # a pool that has a writer keeps its socket and its output
        kernel.check("%%distributed -n 2 --ui none\npass")
        eventually(lambda: is_written(home, home.runs[-1]), 60, "the writer's first run")
        home.has_settled(home.pool_pid() or 0)
    return kernel


def is_written(home: Home, run_id: str) -> bool:
    found = load_progress(home.run_dir(run_id))
    return found is not None and found.complete


def run_id_of(kernel: Kernel, name: str = "r") -> str:
    """The MLflow run's id of a result, once it has one."""
    found = ""

    def there() -> bool:
        nonlocal found
        found = kernel.value(f"{name}.mlflow_run_id")
        return bool(found)

    eventually(there, 60, "the run's MLflow id")
    return found


def settled(store: Runs, run_id: str) -> Any:
    """What MLflow has of the run when it is over there."""
    found: Any = None

    def over() -> bool:
        nonlocal found
        found = store.get(run_id)
        return found is not None and found.info.status != "RUNNING" and "run.json" in store.artifacts(run_id)

    eventually(over, 60, lambda: f"the end of MLflow run {run_id}: {found}")
    return found


def run(kernel: Kernel, body: str, line: str = "%%distributed -n 2", timeout_s: float = 90) -> Reply:
    reply = kernel.check(f"{line}\n{body}", timeout_s)
    kernel.check("r = _ if type(_).__name__ == 'RunResult' else None")
    return reply


# ---------------------------------------------------------------- a cell


def test_what_ranks_log_is_in_the_one_run_of_the_cell(kernel: Kernel, store: Runs):
    body = """
import mlflow
for step in range(200):
    mlflow.log_metric(f"loss/{rank}", step, step=step)
with mlflow.start_run(run_name="night", tags={"team": "x"}) as active:
    mlflow.log_param("lr", 0.1)
    mlflow.log_text(f"from {rank}", f"notes/{rank}.txt")
print(active.info.run_id, mlflow.get_tracking_uri())
"""
    before = {made.info.run_id for made in store.all("notebook")}
    reply = run(kernel, body)
    run_id = run_id_of(kernel)
    assert [lines[0].split()[0] for lines in (reply.lines(0), reply.lines(1))] == [run_id, run_id]
    found = settled(store, run_id)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "night")
    assert found.data.metrics["loss/0"] == found.data.metrics["loss/1"] == 199.0
    assert found.data.params["lr"] == "0.1"
    assert found.data.tags["team"] == "x"
    assert "notes" in store.artifacts(run_id)
    assert len(store.history(run_id, "loss/1")) == 200
    # both ranks called start_run, and there is one run
    made = [made.info.run_id for made in store.all("notebook")]
    assert [found for found in made if found not in before] == [run_id]


def test_what_ranks_log_is_drawn_live_and_in_what_is_saved_and_when_it_is_shown_again(kernel: Kernel, home: Home):
    body = """%%distributed -n 2
import mlflow, os, time
for step in range(500):
    mlflow.log_metric("train/loss", 1 / (step + 1) + rank, step=step)
mlflow.log_metrics({"grad norm": float("nan"), "system/mine": 1.0})
print("logged", flush=True)
while not os.path.exists("go"): time.sleep(0.02)
"""
    go = home.work / "go"
    cell = kernel.start(body)
    try:
        cell.until_shown("[1] logged", 120)

        def charts() -> dict[str, Any]:
            return {chart["name"]: chart for chart in kernel.front_end.view.snapshot["metrics"]}

        def has_all() -> bool:
            found = charts()
            ends = [curve["steps"][-1] for name in found for curve in found[name]["curves"]]
            return ends == [499, 499, 0, 0]

        cell.until(has_all, 30, "the metrics in the live view")
        loss, norm = charts()["train/loss"], charts()["grad norm"]
        text = kernel.front_end.view.snapshot["metrics_text"]
    finally:
        go.touch()
    reply = cell.wait()
    go.unlink()
    assert reply.status == "ok", reply.story
    assert [curve["rank"] for curve in loss["curves"]] == [0, 1]
    assert [curve["last"] for curve in loss["curves"]] == ["0.002", "1.002"]
    assert [curve["values"][0] for curve in loss["curves"]] == [1.0, 2.0]
    assert all(100 <= len(curve["steps"]) <= 200 for curve in loss["curves"])
    assert (loss["range"], loss["begins"], loss["ends"]) == ("0.002 to 2", "step 0", "step 499")
    assert (norm["last"], norm["curves"][0]["values"]) == ("NaN", [None])
    assert text == "train/loss 0.002 · grad norm NaN"
    check_drawn(reply)
    # a kernel that shows the run again gets the same from its events
    check_drawn(kernel.check(f"%sgpu_attach {home.runs[-1][:4]}"))


def check_drawn(reply: Reply) -> None:
    """Check that the output that is saved has the two metrics of the cell above as charts, folded."""
    assert reply.html.count("<svg") >= 2
    folded = reply.html[reply.html.index('<b style="font-weight:600">Metrics</b>') :]
    assert "<details open" not in reply.html
    assert "train/loss</b> 0.002" in folded
    assert "step 499" in folded
    assert "rank 1 1.002" in folded
    assert "grad norm</b> NaN" in folded
    assert "system/mine" not in reply.html
    assert "metrics: train/loss 0.002 · grad norm NaN" in reply.text


@pytest.mark.slow
def test_a_cell_that_fails_keeps_what_it_has_logged(kernel: Kernel, store: Runs):
    reply = kernel.run("%%distributed -n 2\nimport mlflow\nmlflow.log_metric('last', rank)\n1 / 0")
    assert reply.ename == "ZeroDivisionError"
    assert kernel.value("'mlflow' in __import__('sys').modules") is False
    directory = kernel.home.run_dir(kernel.home.runs[-1])

    def made() -> str:
        found = load_progress(directory)
        return "" if found is None else found.mlflow_run_id

    found = settled(store, eventually(made, 60, "the failed run's MLflow id"))
    assert found.info.status == "FAILED"
    assert "last" in found.data.metrics


@pytest.mark.slow
def test_workers_of_a_data_loader_log_to_the_run(kernel: Kernel, store: Runs):
    body = """
import mlflow, torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        mlflow.log_metric(f"read/{rank}", index, step=index)
        return index
mlflow.log_metric("begun", 1)
sum(int(batch.sum()) for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2))
"""
    run(kernel, body)
    assert kernel.value("r.values") == [28, 28]
    found = settled(store, run_id_of(kernel))
    assert {"read/0", "read/1", "begun"} <= set(found.data.metrics)


@pytest.mark.slow
def test_no_track_leaves_mlflow_alone(kernel: Kernel):
    run(
        kernel,
        "import mlflow, os\n(mlflow.active_run(), os.environ.get('MLFLOW_TRACKING_URI'))",
        "%%distributed --no-track",
    )
    assert kernel.value("r.values") == [[None, None]] * 2
    assert kernel.value("r.mlflow_run_id") == ""
    assert not (kernel.home.run_dir(kernel.value("r.run_id")) / "tracking.json").exists()


def test_the_state_of_the_repository_is_told(kernel: Kernel, store: Runs):
    work = kernel.home.work / "repository"
    work.mkdir()
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-b", "main"], ["commit", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], cwd=work, check=True, capture_output=True, timeout=20)
    origin = "https://somebody:token-of-mine@example.org/repository.git"
    subprocess.run([*git, "remote", "add", "origin", origin], cwd=work, check=True, timeout=20)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=work, check=True, capture_output=True, text=True, timeout=20
    )
    (work / "new.txt").write_text("changed")
    kernel.check(f"%cd -q {work}")
    try:
        # long enough for git to answer before it is over
        run(kernel, "import time\ntime.sleep(1)")
    finally:
        kernel.check(f"%cd -q {kernel.home.work}")
    tags = settled(store, run_id_of(kernel)).data.tags
    assert tags["mlflow.source.git.commit"] == commit.stdout.strip()
    assert tags["mlflow.source.git.branch"] == "main"
    assert tags["mlflow.source.git.dirty"] == "true"
    assert tags["mlflow.source.git.repoURL"].endswith("@example.org/repository.git")
    assert "token-of-mine" not in tags["mlflow.source.git.repoURL"]


# ---------------------------------------------------------------- a session


@pytest.fixture
def session(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel with a session whose two ranks have imported MLflow."""
    kernel.check("%sgpu_connect -n 2 --name trial", 90)
    kernel.check("%%distributed --ui none\nimport mlflow", 90)
    yield kernel
    # already disconnected, unless the test failed
    kernel.run("%sgpu_disconnect trial")


@pytest.mark.slow
def test_each_cell_of_a_session_is_a_run_below_the_sessions(session: Kernel, store: Runs):
    cells: list[str] = []
    for number in (1, 2):
        run(session, f"mlflow.log_metric('n', {number})\nmlflow.active_run().info.run_id", "%%distributed")
        cells.append(run_id_of(session))
        assert session.value("r.values") == [cells[-1]] * 2
    assert cells[0] != cells[1]
    found = [settled(store, run_id) for run_id in cells]
    assert [one.data.metrics["n"] for one in found] == [1.0, 2.0]
    parents = {one.data.tags["mlflow.parentRunId"] for one in found}
    assert len(parents) == 1
    # a run as a value would import MLflow in the notebook, which would then report where it tracks
    run(session, "mlflow.log_metric('n', 3)\nmlflow.active_run() is None", "%%distributed --no-track")
    assert session.value("r.mlflow_run_id") == ""
    session.check("%sgpu_disconnect")
    assert settled(store, parents.pop()).info.run_name == "session trial"


# ---------------------------------------------------------------- the notebook's own place


@pytest.mark.slow
def test_the_notebooks_own_mlflow_says_where(home: Home, new_kernel: Any):
    kernel = new_kernel(variables=TRACKS)
    kernel.check("import mlflow\nmlflow.set_tracking_uri('sqlite:///mine.db')\nmlflow.set_experiment('mine')", 120)
    mine = Runs(f"sqlite:///{home.work}/mine.db")
    with_parent = "with mlflow.start_run(run_name='sweep') as sweep:\n    result = train.distributed(2)\n"
    kernel.check(
        "from sgpu_magic import distributed\n"
        "@distributed(gpus=2)\n"
        "def train(lr):\n"
        "    import mlflow\n"
        "    mlflow.log_metric('lr', lr)\n"
        "    mlflow.set_tracking_uri('sqlite:///mine.db')\n"
        "    mlflow.set_experiment('mine')\n"
        "    return mlflow.active_run().info.run_id\n"
    )
    kernel.check(with_parent, 120)
    first, second = kernel.value("list(result)")
    assert first == second
    found = settled(mine, first)
    assert found.data.tags["mlflow.parentRunId"] == kernel.value("sweep.info.run_id")
    assert found.data.metrics["lr"] == 2.0
    # settings that change nothing have no effect and are not reported
    assert {made.info.run_id for made in mine.all("mine")} == {first, kernel.value("sweep.info.run_id")}


@pytest.mark.slow
def test_variables_say_where(home: Home, new_kernel: Any):
    uri = f"sqlite:///{home.work}/mine.db"
    kernel = new_kernel(variables=TRACKS | {"MLFLOW_TRACKING_URI": uri, "MLFLOW_EXPERIMENT_NAME": "by-variable"})
    run(kernel, "import mlflow\nmlflow.active_run().info.run_id")
    run_id = run_id_of(kernel)
    assert kernel.value("r.values") == [run_id] * 2
    assert settled(Runs(uri), run_id).info.run_id in {made.info.run_id for made in Runs(uri).all("by-variable")}


# ---------------------------------------------------------------- trouble


@pytest.fixture
def without_server(new_home: Any) -> Any:
    """A kernel whose MLflow server is dead; the writer that waits for it is no other test's."""
    made = Kernel(new_home(TRACKS | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}))
    yield made
    made.close()


@pytest.mark.slow
def test_a_dead_server_is_told_once_and_stops_nothing(without_server: Kernel):
    kernel = without_server
    body = """
import mlflow
with mlflow.start_run() as active:
    for step in range(50):
        mlflow.log_metric("loss", step, step=step)
    mlflow.log_text("kept", "note.txt")
print("done", len(active.info.run_id))
"""
    reply = run(kernel, body, "%%distributed -n 2")
    assert reply.lines(0)[-1] == reply.lines(1)[-1] == "done 32"
    assert reply.seconds < 60
    assert reply.text.count("sgpu sync") >= 1
    directory = kernel.home.run_dir(kernel.value("r.run_id"))
    assert (directory / "artifacts" / "note.txt").read_text() == "kept"

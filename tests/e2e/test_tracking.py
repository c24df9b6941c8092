"""Tracked runs of a real pool: one MLflow run each, whatever is killed, and never on anybody's way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from homes import Home
from kernels import Kernel
from mlflow_servers import Gateway, RestServer
from mlflow_stores import lay_store
from pool_client import FollowedRun, PoolClient
from process_table import is_alive, stop_process
from tracking_writers import Runs
from waiting import eventually

from sgpu_magic.client.run import Attachments
from sgpu_magic.files.tracking_progress import Progress, is_unsent, load_progress
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.client import TrackRun
from sgpu_magic.wire.events import Noted, RanksStarted, Tracked
from sgpu_magic.wire.files import TRACKING
from sgpu_magic.wire.tracking import Tracking

NB = Tracking(experiment="nb")


class TrackedPool:
    """A pool whose runs are tracked, and its default store."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.client = PoolClient(home)

    @property
    def store(self) -> Runs:
        return Runs(f"sqlite:///{self.home.state}/mlflow/mlflow.db")

    def begin(self, body: str = "", tracking: Tracking | None = NB, **fields: Any) -> FollowedRun:
        return self.client.begin(body, along=Attachments(tracking=tracking), tracked=tracking is not None, **fields)

    def writers(self) -> list[int]:
        return [pid for pid, found in self.home.processes().items() if "-m sgpu_magic.tracking" in found.command]

    def complete(self, run: FollowedRun) -> Any:
        """The run's MLflow run, once all of it is there."""
        directory = self.home.run_dir(run.run_id)

        def is_complete() -> bool:
            found = load_progress(directory)
            return found is not None and found.complete

        eventually(is_complete, 60, lambda: f"{load_progress(directory)}; {self.log()}")
        return self.store.one(run.run_id)

    def log(self) -> str:
        return (self.home.state / "pool.log").read_text()[-2000:]


@pytest.fixture
def new_pool(new_home: Callable[..., Home], empty_store: Path) -> Iterator[Callable[[str], TrackedPool]]:
    """Makes a pool of this test alone: `new_pool("auto")`."""
    made: list[TrackedPool] = []

    def make(track: str) -> TrackedPool:
        home = new_home({"SGPU_TRACK": track})
        lay_store(empty_store, home.state)
        made.append(TrackedPool(home))
        return made[-1]

    yield make
    for pool in made:
        pool.client.close()


@pytest.fixture
def pool(new_pool: Callable[[str], TrackedPool]) -> TrackedPool:
    return new_pool("all")


WAIT = "import time, os\nwhile not os.path.exists('{go}'): time.sleep(0.02)"


@pytest.mark.slow
def test_runs_sessions_and_what_was_never_started(pool: TrackedPool):
    go = pool.home.work / "go"
    session = pool.begin(kind=RunKind.SESSION, name="work")
    session.wait_for(RanksStarted)
    run = pool.begin(WAIT.format(go=go), parameters=(("lr", "0.1"),), name="train")
    plain = pool.begin("print(1)", tracking=None)
    plain.ended()
    # sixteen slots: two for the session, two for the run
    waits = pool.begin("print(1)", ranks=14, name="waits")
    cell = pool.begin("print('in', rank)", session=session.run_id, name="cell 2")
    assert cell.ended().state is RunState.SUCCEEDED
    tracked = run.wait_for(Tracked).tracked
    assert len(pool.writers()) == 1
    waits.run.cancel("not needed")
    assert waits.ended().state is RunState.CANCELLED
    go.touch()
    assert run.ended().state is RunState.SUCCEEDED
    failed = pool.begin("1 / 0", retries=1, retry_on_any=True)
    assert failed.ended().state is RunState.FAILED
    session.run.cancel("%sgpu_disconnect")
    session.ended()

    found = pool.complete(run)
    assert (found.info.run_id, found.info.status) == (tracked.mlflow_run_id, "FINISHED")
    assert found.data.params == {"lr": "0.1", "gpus": "2", "gpu_type": "cpu"}
    assert pool.complete(waits).info.status == "KILLED"
    assert pool.complete(cell).data.tags["mlflow.parentRunId"] == pool.complete(session).info.run_id
    assert pool.store.text(pool.complete(cell).info.run_id, "logs/rank-1.log") == "in 1\n"
    again = pool.complete(failed)
    assert (again.info.status, again.data.tags["sgpu.attempts"]) == ("FAILED", "2 of 2")
    assert "ZeroDivisionError" in again.data.tags["sgpu.failure"]
    assert pool.store.of(plain.run_id) == []
    assert not (pool.home.run_dir(plain.run_id) / TRACKING).exists()
    assert len(pool.store.all()) == 5


@pytest.mark.slow
def test_a_killed_pool_and_a_killed_writer_leave_one_run(pool: TrackedPool):
    go = pool.home.work / "go"
    run = pool.begin(WAIT.format(go=go), detach=True)
    tracked = run.wait_for(Tracked).tracked
    writer = pool.writers()[0]
    stop_process(writer, signal.SIGKILL, 10)
    eventually(lambda: pool.writers() not in ([], [writer]), 30, "another writer")
    again = pool.writers()[0]
    killed = pool.home.pool_pid()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: not is_alive(again), 10, "the writer ends with its pool")
    pool.client.find_again(run.run)
    go.touch()
    assert run.ended().state is RunState.SUCCEEDED
    assert pool.complete(run).info.run_id == tracked.mlflow_run_id
    assert len(pool.store.all()) == 1


@pytest.mark.slow
def test_what_a_stopped_pool_has_not_written_the_next_one_writes(pool: TrackedPool):
    run = pool.begin(WAIT.format(go="never"))
    run.wait_for(RanksStarted)
    # stop it before anything is in MLflow
    stop_process(pool.home.pool_pid(), signal.SIGTERM, 25)
    left = load_progress(pool.home.run_dir(run.run_id))
    assert left is not None
    assert not left.complete
    pool.client.close()
    pool.client = PoolClient(pool.home)
    pool.begin("pass", tracking=None).ended()
    found = pool.complete(run)
    assert (found.info.status, found.data.tags["sgpu.state"]) == ("KILLED", "cancelled")


@pytest.mark.slow
def test_a_dead_server_costs_a_run_nothing_but_a_sentence(pool: TrackedPool):
    pool.begin("pass", tracking=None).ended()
    dead = Tracking(uri="http://127.0.0.1:9", experiment="nb")
    began = time.monotonic()
    run = pool.begin("pass", tracking=dead)
    assert run.ended().state is RunState.SUCCEEDED
    assert time.monotonic() - began < 5
    directory = pool.home.run_dir(run.run_id)
    eventually(lambda: (load_progress(directory) or Progress()).problem, 60, pool.log)
    # the run had ended by then: the next run for the same store reports it
    following = pool.begin("pass", tracking=dead)
    assert following.ended().state is RunState.SUCCEEDED
    (reported,) = [event.text for event in following.events if isinstance(event, Noted)]
    assert reported.startswith(f"earlier run {run.run_id[:4]}: ")
    assert "127.0.0.1:9 does not work" in reported
    go = pool.home.work / "go"
    longer = pool.begin(WAIT.format(go=go), tracking=dead)
    output = longer.wait_for(Noted).text
    assert "127.0.0.1:9 does not work" in output
    assert f"sgpu sync {longer.run_id[:4]}" in output
    go.touch()
    assert longer.ended().state is RunState.SUCCEEDED
    assert sum(isinstance(event, Noted) for event in longer.events) == 1


@pytest.mark.slow
def test_credentials_of_one_notebook_reach_no_other_server(pool: TrackedPool, empty_store: Path, tmp_path: Path):
    server = RestServer(tmp_path, empty_store)
    gateways = [Gateway(server.port), Gateway(server.port)]
    tokens = ["t0ken-of-ann-12345", ""]
    runs = []
    try:
        for gateway, token in zip(gateways, tokens, strict=True):
            variables = {"MLFLOW_TRACKING_TOKEN": token} if token else {}
            tracking = Tracking(uri=gateway.uri, experiment="nb", variables=variables)
            runs.append(pool.begin("pass", tracking=tracking))
        for run in runs:
            run.ended()

        def sent(run: FollowedRun) -> bool:
            return not is_unsent(pool.home.run_dir(run.run_id))

        eventually(
            lambda: all(map(sent, runs)) and all(gateway.seen for gateway in gateways),
            60,
            lambda: (
                f"{[load_progress(pool.home.run_dir(run.run_id)) for run in runs]} {[len(g.seen) for g in gateways]}"
            ),
        )
        for gateway, token in zip(gateways, tokens, strict=True):
            assert {given for _, given in gateway.seen} == {f"Bearer {token}" if token else ""}
        assert len(pool.writers()) == 2
        secrets = [token.encode() for token in tokens if token]
        for path in pool.home.state.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                assert not any(secret in data for secret in secrets), path
        for pid in pool.writers():
            environ = (os.path.join("/proc", str(pid), name) for name in ("environ", "cmdline"))
            for path in environ:
                with open(path, "rb") as file:
                    data = file.read()
                assert not any(secret in data for secret in secrets)
        # settings are private: all users can read the arguments of all processes
        assert not [found.command for found in pool.home.processes().values() if str(pool.home.state) in found.command]
    finally:
        for gateway in gateways:
            gateway.close()
        server.close()


OWN_METRICS = """
import mlflow
for step in range(200):
    mlflow.log_metric(f"loss/rank{rank}", rank + step / 1000, step=step)
    mlflow.log_metric("loss", rank + step / 1000, step=step)
"""


@pytest.mark.slow
def test_of_what_eight_ranks_log_themselves_nothing_is_lost(pool: TrackedPool):
    run = pool.begin(f"from sgpu_magic import runtime\nrank = runtime.get_global_rank()\n{OWN_METRICS}", ranks=8)
    assert run.ended().state is RunState.SUCCEEDED
    found = pool.complete(run)
    for rank in range(8):
        expected = [(step, rank + step / 1000) for step in range(200)]
        assert pool.store.history(found.info.run_id, f"loss/rank{rank}") == expected
    assert len(pool.store.history(found.info.run_id, "loss")) == 1600
    assert len(pool.store.all()) == 1


USES_MLFLOW = "import mlflow\nmlflow.log_param('lr', 0.1)"


@pytest.mark.slow
def test_only_what_matters_is_tracked_by_itself(new_pool: Callable[[str], TrackedPool]):
    pool = new_pool("auto")
    auto = Tracking(experiment="nb", if_it_matters=True)
    short = pool.begin("print(1)", tracking=auto)
    assert short.ended().state is RunState.SUCCEEDED
    failed, uses = pool.begin("1 / 0", tracking=auto), pool.begin(USES_MLFLOW, tracking=auto)
    long = pool.begin(WAIT.format(go=pool.home.work / "go"), tracking=auto)
    assert pool.complete(failed).info.status == "FAILED"
    assert pool.complete(uses).data.params["lr"] == "0.1"
    long.wait_for(Tracked)
    (pool.home.work / "go").touch()
    assert pool.complete(long).info.status == "FINISHED"
    assert not (pool.home.run_dir(short.run_id) / TRACKING).exists()
    pool.client.pool.notify(TrackRun(run_id=short.run_id, tracking=auto))
    assert pool.complete(short).info.status == "FINISHED"
    assert len(pool.store.all()) == 4


@pytest.mark.slow
def test_asking_for_its_mlflow_run_makes_a_short_run_one(new_home: Callable[..., Home], empty_store: Path):
    home = new_home({"SGPU_TRACK": "auto"})
    lay_store(empty_store, home.state)
    kernel = Kernel(home)
    try:
        kernel.check("%load_ext sgpu_magic")
        kernel.check("%%distributed -n 2\nrank")
        kernel.check("result = _")
        eventually(lambda: kernel.value("result.mlflow_run_id"), 60, "its id in MLflow")
        asked = kernel.value("result.mlflow_run_id")
        kernel.check("%%distributed -n 2\nrank")
        found = Runs(f"sqlite:///{home.state}/mlflow/mlflow.db").all("notebook")
        assert [run.info.run_id for run in found] == [asked]
    finally:
        kernel.close()

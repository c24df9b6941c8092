"""The writer and MLflow servers: dead, killed and back, slow, refusing; a gateway between them where need be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow_servers import Gateway, RestServer, full_server_python
from tracking_writers import Runs, ToldRun, WriterProcess
from waiting import eventually

from sgpu_magic.config import Settings
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.rank_events import MetricsLogged
from sgpu_magic.wire.tracking import Tracking


@pytest.fixture(scope="module")
def server(empty_store: Path) -> Iterator[RestServer]:
    folder = Path(tempfile.mkdtemp(prefix="sgt"))
    made = RestServer(folder, empty_store)
    yield made
    made.close()
    shutil.rmtree(folder)


@pytest.fixture
def gateway(server: RestServer) -> Iterator[Gateway]:
    made = Gateway(server.port)
    yield made
    made.close()


@pytest.fixture
def settings() -> Iterator[Settings]:
    folder = Path(tempfile.mkdtemp(prefix="sgt"))
    made = Settings(state_dir=str(folder / "state"), runtime_dir=str(folder / "run"))
    made.runs_path.mkdir(parents=True)
    yield made
    shutil.rmtree(folder)


@pytest.fixture
def new_writer(settings: Settings) -> Iterator[Callable[[], WriterProcess]]:
    made: list[WriterProcess] = []

    def make() -> WriterProcess:
        made.append(WriterProcess(settings))
        return made[-1]

    yield make
    for writer in made:
        if writer._process.poll() is None:
            assert writer.end() == ""


def context(uri: str, **variables: str) -> Tracking:
    return Tracking(uri=uri, experiment="nb", variables=variables)


def check_server_killed_and_back(server: RestServer, settings: Settings, writer: WriterProcess) -> None:
    run, late = ToldRun(settings), ToldRun(settings)
    run.start()
    writer.track(run, context(server.uri))
    writer.until(lambda: writer.started(run), "its place")
    assert writer.started(run)[0].tracked.url.startswith(f"{server.uri}/#/experiments/")
    run.metric(0, "loss", *(float(step) for step in range(100)))
    server.kill()
    run.metric(1, "loss", *(float(step) for step in range(100, 300)), step=100)
    run.apply(MetricsLogged(rank=0, tags=(("mlflow.runName", "renamed"),)))
    late.end()
    writer.track(late, context(server.uri))
    writer.until(lambda: writer.troubles(run) and writer.troubles(late), "a warning for each run")
    run.metric(2, "loss", 300.0, step=300)
    run.end(RunState.SUCCEEDED)
    assert "sgpu sync" in writer.troubles(run)[0].text
    server.start()
    writer.until_done(run, late)
    store = Runs(server.uri)
    found = store.one(run.run_id)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "renamed")
    assert store.history(found.info.run_id, "loss") == [(step, float(step)) for step in range(301)]
    assert {"cell.py", "run.html", "logs"} <= store.artifacts(found.info.run_id)
    assert store.one(late.run_id).info.status == "FINISHED"
    # one sentence for each run, however often it was tried
    assert (len(writer.troubles(run)), len(writer.troubles(late))) == (1, 1)


@pytest.mark.slow
def test_a_server_is_killed_in_the_middle_and_comes_back(
    server: RestServer, settings: Settings, new_writer: Callable[[], WriterProcess]
):
    check_server_killed_and_back(server, settings, new_writer())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_same_with_the_whole_server(
    settings: Settings, new_writer: Callable[[], WriterProcess], empty_store: Path, tmp_path: Path
):
    folder = tmp_path / "served"
    folder.mkdir()
    server = RestServer(folder, empty_store, full_server_python(tmp_path / "venv"))
    try:
        check_server_killed_and_back(server, settings, new_writer())
    finally:
        server.close()
    shutil.rmtree(tmp_path / "venv")


@pytest.mark.slow
def test_an_answer_that_comes_too_late_makes_no_second_run(
    gateway: Gateway, settings: Settings, new_writer: Callable[[], WriterProcess]
):
    writer = new_writer()
    before = ToldRun(settings)
    before.end()
    writer.track(before, context(gateway.uri))
    writer.until_done(before)
    run = ToldRun(settings)
    run.start()
    gateway.answers_after = 7.0
    writer.track(run, context(gateway.uri))
    writer.until(lambda: writer.troubles(run), "it gives up waiting")
    assert "timed out" in writer.troubles(run)[0].text
    gateway.answers_after = 0.0
    run.metric(0, "loss", 1.0)
    run.end()
    writer.until_done(run)
    store = Runs(gateway.uri)
    assert store.history(store.one(run.run_id).info.run_id, "loss") == [(0, 1.0)]


@pytest.mark.slow
def test_refused_credentials_are_a_sentence_and_errors_pass(
    gateway: Gateway, settings: Settings, new_writer: Callable[[], WriterProcess]
):
    writer = new_writer()
    run = ToldRun(settings)
    run.end()
    gateway.authorization = "Bearer right"
    writer.track(run, context(gateway.uri, MLFLOW_TRACKING_TOKEN="wr0ng-t0ken-value"))
    writer.until(lambda: writer.troubles(run), "a warning")
    output = writer.troubles(run)[0].text
    assert "refuses the credentials" in output
    assert "MLFLOW_TRACKING" in output
    gateway.authorization, gateway.status = "", 500
    seen = len(gateway.seen)
    eventually(lambda: len(gateway.seen) > seen, 30, "it is tried again")
    gateway.status = 0
    writer.until_done(run)
    assert Runs(gateway.uri).one(run.run_id)
    for file in run.directory.rglob("*"):
        assert b"wr0ng" not in file.read_bytes()
    assert b"wr0ng" not in Path(f"/proc/{writer.pid}/environ").read_bytes()
    assert b"wr0ng" not in Path(f"/proc/{writer.pid}/cmdline").read_bytes()
    assert not any("wr0ng" in output.text for output in writer.troubles(run))


# ---------------------------------------------------------------- sgpu sync


def sgpu(settings: Settings, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SGPU_", "MLFLOW_"))} | variables
    environ |= {"SGPU_STATE_DIR": settings.state_dir, "SGPU_RUNTIME_DIR": settings.runtime_dir}
    environ |= {"SGPU_CONFIG": f"{settings.state_dir}/no.toml"}
    command = [sys.executable, "-m", "sgpu_magic.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100)


@pytest.mark.slow
def test_sync_sends_what_was_left(
    server: RestServer, gateway: Gateway, settings: Settings, new_writer: Callable[[], WriterProcess]
):
    assert sgpu(settings, "sync").stdout == "everything is in MLflow\n"
    guarded = Gateway(server.port)
    guarded.authorization = "Bearer right"
    writer = new_writer()
    first, second = ToldRun(settings), ToldRun(settings)
    for run in (first, second):
        run.start()
        run.metric(0, "loss", 0.5)
    gateway.status = 503
    writer.track(first, context(gateway.uri))
    writer.track(second, context(guarded.uri, MLFLOW_TRACKING_TOKEN="wr0ng-t0ken-value"))
    first.end()
    second.end()
    writer.until(lambda: writer.troubles(first) and writer.troubles(second))
    assert writer.end() == ""
    gateway.status = 0
    listed = sgpu(settings, "sync", "--list")
    assert listed.returncode == 1
    assert gateway.uri in listed.stdout
    assert guarded.uri in listed.stdout
    assert "wr0ng" not in listed.stdout
    seen = len(gateway.seen), len(guarded.seen)

    one = sgpu(settings, "sync", MLFLOW_TRACKING_URI=guarded.uri, MLFLOW_TRACKING_TOKEN="right")
    assert one.returncode == 0, one.stdout + one.stderr
    assert first.run_id[:4] in one.stdout
    # the token is for the server that the shell names, and no other server receives it
    assert {given for _, given in guarded.seen[seen[1] :]} == {"Bearer right"}
    assert {given for _, given in gateway.seen[seen[0] :]} == {""}
    assert sgpu(settings, "sync").stdout == "everything is in MLflow\n"
    store = Runs(server.uri)
    for run in (first, second):
        assert store.history(store.one(run.run_id).info.run_id, "loss") == [(0, 0.5)]
        assert store.one(run.run_id).info.status == "FINISHED"
    guarded.close()


@pytest.mark.slow
def test_sync_says_what_it_can_not_send(gateway: Gateway, settings: Settings, new_writer: Callable[[], WriterProcess]):
    writer = new_writer()
    before = ToldRun(settings)
    before.end()
    # on a busy machine the writer is slow to get a core: exclude its imports from the measurement
    writer.track(before, context(gateway.uri))
    writer.until_done(before)
    gateway.close()
    run = ToldRun(settings)
    run.end()
    began = time.monotonic()
    writer.track(run, context(gateway.uri))
    writer.until(lambda: writer.troubles(run))
    assert time.monotonic() - began < 30
    assert writer.end() == ""
    done = sgpu(settings, "sync", run.run_id[:6])
    assert done.returncode == 1
    assert done.stdout.startswith(f"not sent: {run.run_id[:4]}")
    assert "Connection refused" in done.stdout
    assert sgpu(settings, "sync", "ffffff").returncode == 2

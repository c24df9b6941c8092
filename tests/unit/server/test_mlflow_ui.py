"""`mlflow ui` of the Jupyter server, for runs in stores of files.

An interpreter with a small package `mlflow` stands for one that has MLflow's pages; the last test has the real one.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from mlflow_interpreters import MlflowInterpreter
from mlflow_stores import lay_store
from process_table import is_alive
from server_kernels import spec_of
from waiting import eventually

from sgpu_magic.config import Settings
from sgpu_magic.files.tracking_progress import Progress
from sgpu_magic.server.mlflow_ui import MlflowUiFailed, MlflowUis, has_pages, page_mlflow
from sgpu_magic.server.page_schema import MlflowAddress
from sgpu_magic.server.run_places import LocalRun
from sgpu_magic.wire.tracking import TrackedRun

HAS_PAGES = has_pages(sys.executable)
RUN = "0123456789abcdef0123456789abcdef"
TRACKED = TrackedRun(uri="", mlflow_run_id="0a1b2c", experiment_id="7", experiment="digits")


class StoredRun:
    """A run in a store of files on this machine.

    Args:
        folder: The folder of its state directory and of the interpreter of its ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(state_dir=str(folder / "state"))
        self.interpreter = MlflowInterpreter(folder)
        self.location = LocalRun(self.settings, spec_of(RUN))
        self.location.directory.mkdir(parents=True)
        self.write_record(self.interpreter.path)
        self.store = Path(self.settings.default_store_uri.removeprefix("sqlite:///"))
        self.store.parent.mkdir(parents=True)
        self.store.touch()

    def write_record(self, executable: Path | str) -> None:
        """Write the record of the interpreter of its ranks."""
        (self.location.directory / "run.json").write_text(json.dumps({"executable": str(executable)}))


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return StoredRun(tmp_path)


@pytest.fixture
def uis() -> Iterator[MlflowUis]:
    made = MlflowUis()
    yield made
    made.close()


def address_of(uis: MlflowUis, tracked: TrackedRun, location: LocalRun, limit_s: float = 60) -> MlflowAddress:
    """Return the address once `mlflow ui` answers, as the page asks for it."""
    found: list[MlflowAddress] = []

    def answers() -> bool:
        found.append(uis.address(tracked, location))
        return found[-1].url != ""

    eventually(answers, limit_s, "mlflow ui does not come up")
    return found[-1]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=20) as answer:
        return answer.read().decode()


def test_one_command_serves_all_runs_of_a_store_and_nothing_is_left_of_it(run: StoredRun, uis: MlflowUis):
    run.interpreter.install()
    address = address_of(uis, TRACKED, run.location)
    assert address.url == f"http://127.0.0.1:{address.port}/#/experiments/7/runs/0a1b2c"
    assert get(f"http://127.0.0.1:{address.port}/health") == "OK"
    (pid,) = run.interpreter.started()
    assert run.interpreter.started()[pid] == run.settings.default_store_uri
    other = TrackedRun(uri="", mlflow_run_id="9f9f", experiment_id="7")
    again = uis.address(other, run.location)
    assert again.url == f"http://127.0.0.1:{address.port}/#/experiments/7/runs/9f9f"
    assert list(run.interpreter.started()) == [pid]
    uis.close()
    assert not is_alive(pid)


def test_one_that_was_killed_is_started_again(run: StoredRun, uis: MlflowUis):
    run.interpreter.install()
    address_of(uis, TRACKED, run.location)
    (first,) = run.interpreter.started()
    supervisor = parent_of(first)
    os.kill(first, 9)
    eventually(lambda: not is_alive(supervisor), 20, "its supervisor does not end")
    assert get(f"http://127.0.0.1:{address_of(uis, TRACKED, run.location).port}/health") == "OK"
    assert len(run.interpreter.started()) == 2


def test_why_it_does_not_start_is_told(run: StoredRun, uis: MlflowUis):
    with pytest.raises(MlflowUiFailed, match="mlflow, whose pages mlflow-skinny does not have, is not installed"):
        uis.address(TRACKED, run.location)
    run.interpreter.install()
    broken = run.store.with_name("broken.db")
    tracked = TrackedRun(uri=f"sqlite:///{broken}", mlflow_run_id="0a1b2c", experiment_id="7")
    with pytest.raises(MlflowUiFailed, match="does not exist on the Jupyter server's machine"):
        uis.address(tracked, run.location)
    # `mlflow ui` would have made a new one
    assert not broken.exists()
    broken.touch()
    with pytest.raises(MlflowUiFailed, match="has ended: the store has another schema"):
        address_of(uis, tracked, run.location)
    database = TrackedRun(uri="postgresql://db/mlflow", mlflow_run_id="0a1b2c", experiment_id="7")
    with pytest.raises(MlflowUiFailed, match="no files that mlflow ui could show"):
        uis.address(database, run.location)


def test_a_page_has_the_button_or_the_commands(run: StoredRun):
    page = page_mlflow(TRACKED, None, run.location)
    assert page is not None
    assert page.command == f"mlflow ui --backend-store-uri {run.settings.default_store_uri}"
    assert (page.can_start, page.url, page.pool) == (False, "", "")
    assert page.install.startswith(f"{run.interpreter.path} -m pip install mlflow==")
    run.interpreter.install()
    page = page_mlflow(TRACKED, None, run.location)
    assert page is not None
    assert (page.can_start, page.install) == (True, "")
    assert page_mlflow(None, None, run.location) is None


def test_an_mlflow_run_may_be_made_after_the_runs_last_event(run: StoredRun):
    progress = Progress(experiment="digits")
    page = page_mlflow(None, progress, run.location)
    assert page is not None
    assert (page.run_id, page.experiment, page.command) == ("", "digits", "")
    page = page_mlflow(None, msgspec.structs.replace(progress, mlflow_run_id="0a1b2c", experiment_id="7"), run.location)
    assert page is not None
    assert page.run_id == "0a1b2c"
    assert page.command


@pytest.mark.parametrize(
    ("uri", "url", "command"),
    [
        ("http://mlflow:5000", "http://mlflow:5000/#/experiments/7/runs/0a1b2c", ""),
        ("http://mlflow:5000", "javascript:alert(1)", ""),
        ("postgresql://db/mlflow", "", ""),
        (
            "file:///home/ada/my runs",
            "",
            "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri 'file:///home/ada/my runs'",
        ),
    ],
)
def test_a_store_without_files_has_no_command(run: StoredRun, uri: str, url: str, command: str):
    tracked = TrackedRun(uri=uri, mlflow_run_id="0a1b2c", experiment_id="7", url=url)
    page = page_mlflow(tracked, None, run.location)
    assert page is not None
    assert page.url == (url if url.startswith("http") else "")
    assert page.command == command


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PAGES, reason="needs the package mlflow: mlflow-skinny has no pages")
def test_the_real_one_shows_the_experiments_of_a_store(run: StoredRun, uis: MlflowUis, empty_store: Path):
    run.write_record(sys.executable)
    lay_store(empty_store, run.settings.state_path)
    address = address_of(uis, TRACKED, run.location, 120)
    assert "<title>MLflow</title>" in get(f"http://127.0.0.1:{address.port}/")

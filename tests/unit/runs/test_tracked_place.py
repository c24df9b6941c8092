"""Where a run is tracked, according to variables and settings; and the state of a git repository."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from launches import placed_launch
from waiting import eventually

from sgpu_magic.client.result import mlflow_run_id
from sgpu_magic.config import Settings
from sgpu_magic.files.tracking_progress import Progress, save_progress
from sgpu_magic.options.option_records import EnvironmentOptions
from sgpu_magic.payload import pack
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.tracker import Tracker
from sgpu_magic.runs.git_state import Tags, git_tags, report_git_state
from sgpu_magic.runs.submit.spec import Submission
from sgpu_magic.runs.submit.tracking_target import tracking_of
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.client import Submit
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import Noted, Submitted
from sgpu_magic.wire.run import CellSource, Owner, RunSpec
from sgpu_magic.wire.tracking import Tracking


@pytest.fixture(autouse=True)
def without_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLflow that another test has imported does not count as imported in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)


def location(
    environ: Mapping[str, str] | None = None,
    *,
    settings: Settings | None = None,
    track: bool | None = None,
    kind: RunKind = RunKind.CELL,
    notebook: str = "train.ipynb",
    execution_count: int | None = None,
) -> Tracking | None:
    spec = RunSpec(
        run_id="00000000",
        name="cell",
        cell=CellSource(body="", execution_count=execution_count),
        placement=Placement(ranks=2),
        outputs=(),
        owner=Owner(pid=1, host="h", user="u", notebook=notebook),
        timeout_s=1.0,
        kind=kind,
    )
    packed = pack.pack_namespace({}, {}, b"k" * 32)
    submission = Submission(spec, packed, b"k" * 32, dict(environ or {}), EnvironmentOptions(track=track))
    found, tracking = tracking_of(settings or Settings(), spec, submission)
    assert found.tracked is (tracking is not None)
    return tracking


def test_by_default_it_is_the_default_store_and_the_notebooks_name():
    assert location() == Tracking(experiment="train", if_it_matters=True)
    assert location(notebook="deep/er.v2.ipynb") == Tracking(experiment="er.v2", if_it_matters=True)


def test_an_experiment_of_a_script_has_its_name_and_of_a_cell_not_that_of_what_run_i_has_run(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/work/sweep.py", raising=False)
    of_script, of_cell = location(notebook=""), location(notebook="", execution_count=7)
    assert of_script is not None
    assert of_script.experiment == "sweep"
    assert of_cell is not None
    assert of_cell.experiment == "notebook"


def test_the_setting_and_the_wish_turn_it_off_and_on():
    off, every = (msgspec.structs.replace(Settings(), track=track) for track in ("off", "all"))
    assert location(settings=off) is None
    assert location(settings=off, track=True) == location(settings=every) == Tracking(experiment="train")
    assert location(track=False) is None
    assert location(kind=RunKind.PUSH) is None
    assert location(kind=RunKind.PULL) is None
    assert location(kind=RunKind.SESSION) is not None


def test_variables_go_over_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = msgspec.structs.replace(Settings(), tracking_uri="http://set:5000")
    found = location(settings=settings)
    assert found is not None
    assert found.uri == "http://set:5000"
    environ = {
        "MLFLOW_TRACKING_URI": "sqlite:///here.db",
        "MLFLOW_REGISTRY_URI": "http://registry",
        "MLFLOW_EXPERIMENT_NAME": "named",
        "MLFLOW_EXPERIMENT_ID": "7",
        "MLFLOW_RUN_ID": "a" * 32,
        "AWS_SECRET_ACCESS_KEY": "s",
        "OTHER": "o",
    }
    monkeypatch.chdir(tmp_path)
    found = location(environ, settings=settings)
    assert found is not None
    assert found.uri == f"sqlite:///{tmp_path}/here.db"
    assert (found.registry_uri, found.experiment, found.experiment_id) == ("http://registry", "named", "")
    assert found.parent == "a" * 32
    assert found.variables == {name: value for name, value in environ.items() if name != "OTHER"}
    del environ["MLFLOW_EXPERIMENT_NAME"]
    found = location(environ)
    assert found is not None
    assert (found.experiment, found.experiment_id) == ("", "7")


# ---------------------------------------------------------------- git


def test_no_repository_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert git_tags(str(tmp_path)) == ()
    assert git_tags(str(tmp_path / "gone")) == ()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_tags(str(tmp_path)) == ()


def test_a_repository_says_commit_branch_and_whether_it_has_changed(tmp_path: Path):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-b", "trunk"], cwd=tmp_path, check=True, capture_output=True, timeout=20)
    assert git_tags(str(tmp_path)) == ()
    subprocess.run(
        [*git, "commit", "--allow-empty", "-m", "1"], cwd=tmp_path, check=True, capture_output=True, timeout=20
    )
    clean = dict(git_tags(str(tmp_path)))
    assert clean["mlflow.source.git.branch"] == "trunk"
    assert len(clean["mlflow.source.git.commit"]) == 40
    assert clean["mlflow.source.git.dirty"] == "false"
    assert "mlflow.source.git.repoURL" not in clean
    (tmp_path / "new").touch()
    assert dict(git_tags(str(tmp_path))) == {**clean, "mlflow.source.git.dirty": "true"}

    reported: list[tuple[Tags, int]] = []
    report_git_state(str(tmp_path), lambda tags: reported.append((tags, threading.get_ident())))
    eventually(lambda: reported, 10, "the repository's state")
    # cached now: the callback runs immediately, in the caller's own thread
    report_git_state(str(tmp_path), lambda tags: reported.append((tags, threading.get_ident())))
    assert reported[1] == (reported[0][0], threading.get_ident())
    assert reported[0][1] != threading.get_ident()


# ---------------------------------------------------------------- the id


def test_the_id_is_read_from_the_runs_directory(tmp_path: Path):
    assert mlflow_run_id(tmp_path) == ""
    (tmp_path / "tracking.json").write_text('{"uri": "x", "seq": 3}')
    assert mlflow_run_id(tmp_path) == ""
    (tmp_path / "tracking.json").write_text('{"mlflow_run_id": "abc", "seq": 3}')
    assert mlflow_run_id(tmp_path) == "abc"
    (tmp_path / "tracking.json").write_text("{")
    assert mlflow_run_id(tmp_path) == ""


def test_the_next_service_tells_the_same_user_what_is_not_in_the_store(tmp_path: Path):
    settings = Settings(state_dir=str(tmp_path / "s"), runtime_dir=str(tmp_path / "r"))
    store = Tracking(uri="http://127.0.0.1:9")
    reported: list[str] = []

    def submitted(run_id: str, user: str) -> PoolRun:
        launch = placed_launch(tmp_path, is_remote=False)
        owner = Owner(pid=1, host="h", user=user)
        spec = msgspec.structs.replace(launch.spec, run_id=run_id, owner=owner, tracked=True)
        return PoolRun(
            Submit(
                request=0, spec=spec, interpreter=launch.interpreter, context=launch.context, payload=launch.payload,
                tracking=store,
            ),
            (),
            None,
        )  # fmt: skip

    class Book:
        """Run directories, and the events that their followers receive."""

        def directory(self, run_id: str) -> Path:
            return settings.runs_path / run_id

        def publish(self, run: PoolRun, body: Noted, at: float) -> None:
            reported.append(f"{run.run_id}: {body.text}")

    async def follow() -> None:
        loop = asyncio.get_running_loop()
        left = Book().directory("000000a1")
        left.mkdir(parents=True)
        log = RunLog(left, "000000a1")
        log.append(Submitted(spec=submitted("000000a1", "ann").spec), 1.0)
        log.close()
        save_progress(left, Progress(uri=store.uri, problem="it does not answer."))
        tracker = Tracker(settings, Book(), None, lambda _: False)  # pyright: ignore[reportArgumentType]
        tracker._check()
        deadline = loop.time() + 10
        while not tracker._leftovers and loop.time() < deadline:
            await asyncio.sleep(0)
        for run_id, user in (("000000b1", "bob"), ("000000a2", "ann")):
            tracker.follow(submitted(run_id, user))
        tracker._timer.cancel()

    asyncio.run(follow())
    assert reported == [
        "000000a2: the earlier run 0000 is not in MLflow: it does not answer. `sgpu sync 0000` sends it"
    ]

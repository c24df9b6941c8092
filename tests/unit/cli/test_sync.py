"""The list of pending runs in `sgpu sync`, and which store receives the shell's credentials."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from sgpu_magic.cli.sync import sync
from sgpu_magic.config import Settings
from sgpu_magic.files.tracking_progress import opening, save_progress
from sgpu_magic.tracking.store import Sent, Unsent
from sgpu_magic.wire.base import new_id, short
from sgpu_magic.wire.tracking import Tracking

ONE, OTHER = "http://one:5000", "http://other:5000"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = Settings(state_dir=str(tmp_path / "state"), runtime_dir=str(tmp_path / "run"))
    made.runs_path.mkdir(parents=True)
    return made


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The token that each store has received."""
    found: dict[str, str] = {}

    def run(
        command: Sequence[str], *, input: bytes, env: dict[str, str], **_: object
    ) -> subprocess.CompletedProcess[bytes]:
        """Stand in for the process that sends to a store."""
        order = msgspec.json.decode(input, type=Unsent)
        found[order.uri] = env.get("MLFLOW_TRACKING_TOKEN", "")
        sent = [msgspec.json.encode(Sent(Path(directory).name)) for directory in order.directories]
        return subprocess.CompletedProcess(command, 0, b"\n".join(sent), b"")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return found


def leave(settings: Settings, uri: str) -> str:
    """A run for which the pool has recorded only the destination."""
    directory = settings.runs_path / new_id()
    directory.mkdir()
    save_progress(directory, opening(Tracking(uri=uri, experiment="nb")))
    return directory.name


def test_nothing_is_left(settings: Settings, shown: dict[str, str]):
    assert sync(settings) == ("everything is in MLflow", True)
    assert shown == {}


def test_what_is_left_is_listed_without_the_users_of_its_stores(settings: Settings, shown: dict[str, str]):
    first, second = leave(settings, ONE), leave(settings, "http://ann:pa55@other:5000")
    text, all_sent = sync(settings, only_list=True)
    assert not all_sent
    for word in (short(first), short(second), ONE, OTHER):
        assert word in text
    assert "pa55" not in text
    assert shown == {}


def test_the_store_that_the_shell_names_sees_the_token_and_no_other(
    settings: Settings, shown: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    runs = [leave(settings, uri) for uri in (ONE, OTHER)]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", OTHER)
    text, all_sent = sync(settings)
    assert all_sent
    assert all(short(run) in text for run in runs)
    assert shown == {ONE: "", OTHER: "t0ken"}


@pytest.mark.parametrize(
    ("stores", "expected"),
    [
        # there is only one server
        ([ONE], {ONE: "t0ken"}),
        ([ONE, "sqlite:////data/runs.db", ""], {ONE: "t0ken", "sqlite:////data/runs.db": "", "": ""}),
        # ambiguous: the token may belong to either
        ([ONE, OTHER], {ONE: "", OTHER: ""}),
    ],
)
def test_where_the_shell_names_none(
    settings: Settings, shown: dict[str, str], stores: list[str], expected: dict[str, str]
):
    for uri in stores:
        leave(settings, uri)
    assert sync(settings)[1]
    assert shown == expected

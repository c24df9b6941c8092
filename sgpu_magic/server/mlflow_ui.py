"""A run's MLflow run: its page on a tracking server, or `mlflow ui` on the files of a local store.

`mlflow ui` listens on the loopback interface, once for each store, and ends with the Jupyter server.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import msgspec

from sgpu_magic.files.atomic_file import read_json
from sgpu_magic.files.tracking_progress import Progress
from sgpu_magic.server.page_schema import MlflowAddress, PageMlflow
from sgpu_magic.server.run_places import RunLocation
from sgpu_magic.system.background_command import BackgroundCommand
from sgpu_magic.views.format_run import page_url
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import JsonDecoder
from sgpu_magic.wire.run import RUN_RECORD
from sgpu_magic.wire.tracking import TrackedRun

_LOOPBACK = "127.0.0.1"
_START_WAIT_S = 10.0
_POLL_S = 0.1
_ANSWER_TIMEOUT_S = 2.0
_PROBE_TIMEOUT_S = 20.0
# prints the URI of a pool's default store on the pool's machine
_DEFAULT_STORE = "python -c 'import sgpu_magic; print(sgpu_magic.tracking_uri())'"
# a request to the loopback interface never goes through a proxy
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_PROBE = """\
import importlib.metadata, importlib.util, json, os
spec = importlib.util.find_spec("mlflow")
folders = list(spec.submodule_search_locations or ()) if spec else []
pages = any(os.path.isfile(os.path.join(folder, "server/js/build/index.html")) for folder in folders)
version = ""
for name in ("mlflow", "mlflow-skinny"):
    try:
        version = version or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([pages, version]))
"""
# whether MLflow's pages are there, and its version
_PROBED = JsonDecoder(tuple[bool, str])


class MlflowUiFailed(Exception):
    """`mlflow ui` can't be started; the message is shown to the user."""


def mlflow_run(reported: TrackedRun | None, progress: Progress | None) -> TrackedRun | None:
    """Return a run's MLflow run; None if it does not exist, or not yet.

    Args:
        reported: What the run's events say. A short run may be tracked after its last event.
        progress: What its directory says.
    """
    if reported is not None or progress is None:
        return reported
    return progress.tracked


def page_mlflow(reported: TrackedRun | None, progress: Progress | None, location: RunLocation) -> PageMlflow | None:
    """Return what a run's page shows of its MLflow run; None if the run is not tracked.

    Args:
        reported: As in `mlflow_run`.
        progress: As in `mlflow_run`.
        location: The run's directory.
    """
    tracked = mlflow_run(reported, progress)
    if tracked is None:
        return None if progress is None else _pending(progress)
    is_local = location.bring is None
    url = page_url(tracked.url)
    command = "" if url else _shown_command(tracked.uri or location.default_store)
    pythons = _pythons(location) if command and is_local else []
    can_start = any(map(has_pages, pythons))
    needs_install = pythons and not can_start
    return PageMlflow(
        run_id=tracked.mlflow_run_id,
        experiment=tracked.experiment,
        url=url,
        command=command,
        install=_install_command(pythons[0]) if needs_install else "",
        can_start=can_start,
        pool="" if is_local else location.pool,
    )


def has_pages(python: str) -> bool:
    """Whether an interpreter has the package mlflow; mlflow-skinny has the command `mlflow ui`, but not its pages."""
    return _probe(python)[0]


def _pending(progress: Progress) -> PageMlflow:
    return PageMlflow(
        run_id="", experiment=progress.experiment, url="", command="", install="", can_start=False, pool=""
    )


class MlflowUis:
    """The running `mlflow ui` commands, one for each store. Thread-safe.

    Args:
        wait_s: Seconds that a request waits for one to come up.
    """

    def __init__(self, wait_s: float = _START_WAIT_S) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._running: dict[str, _MlflowUi] = {}

    def address(self, tracked: TrackedRun, location: RunLocation) -> MlflowAddress:
        """Start `mlflow ui` for the run's store unless it is running, and return the address of the run's page.

        Raises:
            MlflowUiFailed: The store has no files on this machine, MLflow's pages are not installed, or the command
                has ended.
        """
        store = tracked.uri or location.default_store
        ui = self._of_store(store, location)
        deadline = time.monotonic() + self._wait_s
        while not ui.answers():
            if not ui.command.is_running:
                raise MlflowUiFailed(self._forget_ended(store, ui))
            if time.monotonic() > deadline:
                return MlflowAddress(url="", port=ui.port, host=socket.gethostname())
            time.sleep(_POLL_S)
        path = f"experiments/{quote(tracked.experiment_id, safe='')}/runs/{quote(tracked.mlflow_run_id, safe='')}"
        return MlflowAddress(url=f"{ui.url}/#/{path}", port=ui.port, host=socket.gethostname())

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            running, self._running = list(self._running.values()), {}
        for ui in running:
            ui.command.end()

    def _of_store(self, store: str, location: RunLocation) -> _MlflowUi:
        if not _is_local_store(store):
            raise MlflowUiFailed("the run's tracking store has no files that mlflow ui could show.")
        if not _store_path(store).exists():
            raise MlflowUiFailed(
                f"the tracking store {_store_path(store)} does not exist on the Jupyter server's machine."
            )
        with self._lock:
            ui = self._running.get(store)
            if ui is not None and not ui.command.is_running:
                ui.command.end()
                ui = None
            if ui is None:
                ui = self._running[store] = _MlflowUi(_python_with_pages(location), store)
            return ui

    def _forget_ended(self, store: str, ui: _MlflowUi) -> str:
        """Forget a command that has ended, and return why it ended."""
        output = ui.command.last_output().splitlines()
        ui.command.end()
        with self._lock:
            if self._running.get(store) is ui:
                del self._running[store]
        reason = output[-1] if output else "it printed nothing"
        return f"mlflow ui on the Jupyter server's machine has ended: {reason}"


class _MlflowUi:
    """One `mlflow ui`.

    Args:
        python: The interpreter that has MLflow's pages.
        store: The URI of the store.
    """

    def __init__(self, python: str, store: str) -> None:
        self.port = _free_port()
        self.url = f"http://{_LOOPBACK}:{self.port}"
        options = ["--backend-store-uri", store, "--host", _LOOPBACK, "--port", str(self.port), "--workers", "1"]
        try:
            self.command = BackgroundCommand([python, "-m", "mlflow", "ui", *options], _environ(os.environ))
        except OSError as error:
            raise MlflowUiFailed(f"mlflow ui can't be started on the Jupyter server's machine: {error}") from None

    def answers(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=_ANSWER_TIMEOUT_S) as answer:
                return answer.status == 200
        except OSError:
            return False


class _Executable(Record, frozen=True):
    """What is read of `run.json`."""

    executable: str


def _pythons(location: RunLocation) -> list[str]:
    """Return the interpreters that may have MLflow's pages: that of the run's ranks if it is known, and this one."""
    record = read_json(location.directory / RUN_RECORD, _Executable)
    return list(dict.fromkeys([*([record.executable] if record is not None else []), sys.executable]))


def _python_with_pages(location: RunLocation) -> str:
    for python in _pythons(location):
        if has_pages(python):
            return python
    raise MlflowUiFailed(
        "mlflow, whose pages mlflow-skinny does not have, is not installed on the Jupyter server's machine."
    )


def _probe(python: str) -> tuple[bool, str]:
    """Return whether an interpreter has MLflow's pages, and its version of MLflow, "" without one."""
    environ = os.environ | {"PYTHONSAFEPATH": "1"}
    try:
        ended = subprocess.run(
            [python, "-c", _PROBE], env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT_S
        )
        return _PROBED.decode(ended.stdout)
    except (OSError, msgspec.DecodeError, subprocess.TimeoutExpired):
        return False, ""


def _install_command(python: str) -> str:
    _, version = _probe(python)
    # another version may need another schema of the store
    return shlex.join([python, "-m", "pip", "install", f"mlflow=={version}" if version else "mlflow"])


def _shown_command(store: str) -> str:
    """Return the command line that shows a store of files, "" for a store that has none; `store` is "" if unknown."""
    if not store:
        return f'mlflow ui --backend-store-uri "$({_DEFAULT_STORE})"'
    if not _is_local_store(store):
        return ""
    command = shlex.join(["mlflow", "ui", "--backend-store-uri", store])
    return command if store.startswith("sqlite:") else f"MLFLOW_ALLOW_FILE_STORE=true {command}"


def _environ(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of `mlflow ui`, without settings for another store."""
    kept = {name: value for name, value in own.items() if not name.startswith("MLFLOW_")}
    return kept | {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        # its workers are not needed to look at runs
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _is_local_store(store: str) -> bool:
    return store.startswith(("sqlite:////", "file:/"))


def _store_path(store: str) -> Path:
    if store.startswith("sqlite:"):
        return Path(store.removeprefix("sqlite:///").partition("?")[0])
    return Path(unquote(urlsplit(store).path))


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind((_LOOPBACK, 0))
        return bound.getsockname()[1]

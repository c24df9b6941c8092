"""Where a run is tracked: the notebook's own MLflow configuration, else its variables, else the settings.

The state of the git repository that the run is submitted from is determined in the background.

MLflow is never imported here: a notebook that uses it has imported it.
"""

# MLflow is only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.runs.notebook import working_directory
from sgpu_magic.runs.submit.spec import Submission
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunKind
from sgpu_magic.wire.tracking import STORE_VARIABLES, Tracking, absolute_uri

MOVE_NAMES = (RunKind.PUSH, RunKind.PULL)
"""Kinds of runs that only move names between the notebook and a session's ranks; they are not tracked."""

_URI = "MLFLOW_TRACKING_URI"
_FALLBACK_NAME = "notebook"

Tags = tuple[tuple[str, str], ...]
# a large repository on a network file system takes longer; its state is then not recorded
_TIMEOUT_S = 2.0
_FRESH_S = 5.0
_COMMAND = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")


def place_of(settings: Settings, spec: RunSpec, submission: Submission) -> tuple[RunSpec, Tracking | None]:
    """Return the run's spec, marked as tracked if it is, and its tracking target; None if it is not tracked."""
    asked = submission.wishes.track
    track = settings.track if asked is None else "all" if asked else "off"
    if spec.kind in MOVE_NAMES or track == "off":
        return spec, None
    environ = submission.environ
    own = _own_place(environ, given=_URI in submission.given)
    uri = own.uri or environ.get(_URI, "") or settings.tracking_uri or own.default_uri
    name, experiment_id = environ.get("MLFLOW_EXPERIMENT_NAME", ""), environ.get("MLFLOW_EXPERIMENT_ID", "")
    if own.experiment_id:
        name, experiment_id = "", own.experiment_id
    elif name:
        experiment_id = ""
    elif not experiment_id:
        name = _experiment_name(spec)
    tracking = Tracking(
        uri=absolute_uri(uri, working_directory()) if uri else "",
        registry_uri=own.registry_uri or environ.get("MLFLOW_REGISTRY_URI", ""),
        experiment=name,
        experiment_id=experiment_id,
        parent=own.parent or environ.get("MLFLOW_RUN_ID", ""),
        variables={name: environ[name] for name in environ if name.startswith(STORE_VARIABLES)},
        # within an active MLflow run of the notebook, the run is always tracked
        if_it_matters=track == "auto" and not own.parent,
    )
    return msgspec.structs.replace(spec, tracked=True), tracking


class _OwnPlace(msgspec.Struct, frozen=True):
    """The configuration of the notebook's own MLflow; "" where a value is not set.

    Args:
        uri: The tracking store that was set, or the store of the active run.
        default_uri: The store that MLflow would use by default; "" if MLflow is not in use.
        registry_uri: The registry that was set.
        experiment_id: The experiment that was set, or the experiment of the active run.
        parent: The active run.
    """

    uri: str = ""
    default_uri: str = ""
    registry_uri: str = ""
    experiment_id: str = ""
    parent: str = ""


_NOT_IN_USE = _OwnPlace()


def _own_place(environ: Mapping[str, str], *, given: bool) -> _OwnPlace:
    """Read the configuration from MLflow's modules, if the notebook has imported them.

    Args:
        environ: The ranks' variables.
        given: Whether `--env` sets a store for the run, which takes precedence over the notebook's.
    """
    utils: Any = sys.modules.get("mlflow.tracking._tracking_service.utils")
    fluent: Any = sys.modules.get("mlflow.tracking.fluent")
    if given or utils is None or fluent is None:
        return _NOT_IN_USE
    registry: Any = sys.modules.get("mlflow.tracking._model_registry.utils")
    try:
        active = fluent._active_run_stack.get()
        info = active[-1].info if active else None
        uri = utils._tracking_uri or ""
        points_to = uri or ("" if environ.get(_URI) and info is None else utils.get_tracking_uri())
        return _OwnPlace(
            uri=uri or (points_to if info is not None else ""),
            default_uri=points_to,
            registry_uri=getattr(registry, "_registry_uri", None) or "",
            experiment_id=info.experiment_id if info is not None else fluent._active_experiment_id or "",
            parent=info.run_id if info is not None else "",
        )
    except (AttributeError, TypeError, ImportError):
        # another thread is importing MLflow, or its version does not have these names
        return _NOT_IN_USE


def _experiment_name(spec: RunSpec) -> str:
    """Name the experiment after the notebook's or script's file."""
    file = spec.owner.notebook
    # not in a notebook without a name, where `__file__` is a remnant of `%run -i`
    if not file and spec.cell.execution_count is None:
        main: Any = sys.modules.get("__main__")
        file = getattr(main, "__file__", None) or ""
    return os.path.splitext(os.path.basename(file))[0] or _FALLBACK_NAME


# ---------------------------------------------------------------- the git repository


_asking = threading.Lock()
# by directory: when git was asked, by the monotonic clock, and the tags
_seen: dict[str, tuple[float, Tags]] = {}


def tell_git_state(directory: str, told: Callable[[Tags], None]) -> None:
    """Call `told` with the state of a repository: at once if it is known, else later from a thread.

    Args:
        directory: A folder in the repository; without a repository or git, `told` is not called.
        told: Takes MLflow's tags.
    """

    def find() -> None:
        # if many runs are submitted at once, only the first asks git
        with _asking:
            tags = _known(directory)
            if tags is None:
                tags = git_tags(directory)
                _seen[directory] = (time.monotonic(), tags)
        if tags:
            told(tags)

    known = _known(directory)
    if known is None:
        threading.Thread(target=find, name="sgpu-git", daemon=True).start()
    elif known:
        told(known)


def _known(directory: str) -> Tags | None:
    """Return the tags found within the last 5 s, None if there are none."""
    at, tags = _seen.get(directory, (-math.inf, ()))
    return tags if time.monotonic() - at < _FRESH_S else None


def git_tags(directory: str) -> Tags:
    """Return the repository's commit, branch, uncommitted changes and remote URL as MLflow tags.

    Returns:
        The tags; empty without git, a repository, or an answer in time.
    """
    lines = _git(directory, "status", "--porcelain=v2", "--branch", "--untracked-files=normal")
    if lines is None:
        return ()
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and " " in line[2:])
    commit, branch = heads.get("branch.oid", ""), heads.get("branch.head", "")
    if commit in ("", "(initial)"):
        return ()
    tags = [("mlflow.source.git.commit", commit)]
    if branch and branch != "(detached)":
        tags.append(("mlflow.source.git.branch", branch))
    tags.append(("mlflow.source.git.dirty", "true" if any(not line.startswith("#") for line in lines) else "false"))
    if url := _git(directory, "config", "--get", "remote.origin.url"):
        tags.append(("mlflow.source.git.repoURL", without_url_credentials(url[0])))
    return tuple(tags)


def _git(directory: str, *arguments: str) -> list[str] | None:
    """Return git's output lines; None if there is no git, or it fails or takes too long."""
    try:
        done = subprocess.run(
            [*_COMMAND, *arguments],
            cwd=directory,
            env={**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()

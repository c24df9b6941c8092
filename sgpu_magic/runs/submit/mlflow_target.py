"""Where a run is tracked: what the notebook's own MLflow says, else its variables, else the settings.

With it goes the state of the git repository that the run is submitted from, found behind the submission's back.

MLflow is never imported here: who has it in use has imported it.
"""

# of MLflow nothing but what has been imported by others is used, as it lies in `sys.modules`
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
"""They move names between the notebook and a session's ranks, and are nobody's runs."""

_URI = "MLFLOW_TRACKING_URI"
_FALLBACK_NAME = "notebook"

Tags = tuple[tuple[str, str], ...]
# a large repository on a network's disk takes longer, and then nothing is said
_TIMEOUT_S = 2.0
_FRESH_S = 5.0
_COMMAND = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")


def place_of(settings: Settings, spec: RunSpec, submission: Submission) -> tuple[RunSpec, Tracking | None]:
    """Return the run's spec with what tracking adds to it, and where it is tracked; None where it is not."""
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
        # a notebook in whose own MLflow run this is uses MLflow
        if_it_matters=track == "auto" and not own.parent,
    )
    return msgspec.structs.replace(spec, tracked=True), tracking


class _OwnPlace(msgspec.Struct, frozen=True):
    """What the notebook's own MLflow has been told.

    Args:
        uri: The tracking store that was set, or that the active run is in; "" for none.
        default_uri: Where it would go by itself; "" where it is not in use.
        registry_uri: The registry that was set.
        experiment_id: The experiment that was set, or that the active run is in.
        parent: The active run.
    """

    uri: str = ""
    default_uri: str = ""
    registry_uri: str = ""
    experiment_id: str = ""
    parent: str = ""


_NOT_IN_USE = _OwnPlace()


def _own_place(environ: Mapping[str, str], *, given: bool) -> _OwnPlace:
    """Look into MLflow's modules, if the notebook has imported them.

    Args:
        environ: The ranks' variables.
        given: The run was given a store with `--env`, which counts more than the notebook's.
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
        # it is being imported by another thread now, or is another MLflow than those that have these names
        return _NOT_IN_USE


def _experiment_name(spec: RunSpec) -> str:
    """After the notebook's file, or the script's."""
    file = spec.owner.notebook
    # in a notebook without a name it is what `%run -i` has left there
    if not file and spec.cell.execution_count is None:
        main: Any = sys.modules.get("__main__")
        file = getattr(main, "__file__", None) or ""
    return os.path.splitext(os.path.basename(file))[0] or _FALLBACK_NAME


# ---------------------------------------------------------------- the git repository


_asking = threading.Lock()
# by directory: when git was asked, by the monotonic clock, and what it has said
_seen: dict[str, tuple[float, Tags]] = {}


def tell_git_state(directory: str, told: Callable[[Tags], None]) -> None:
    """Call `told` with the state of a repository: at once when it is known, else soon, from a thread.

    Args:
        directory: A folder in it; where there is no repository, or no git, nothing is told.
        told: Is given MLflow's tags.
    """

    def find() -> None:
        # of many runs that are submitted at once the first asks git
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
    """Return what was found a moment ago."""
    at, tags = _seen.get(directory, (-math.inf, ()))
    return tags if time.monotonic() - at < _FRESH_S else None


def git_tags(directory: str) -> Tags:
    """Ask git for commit, branch, whether anything has changed, and where the repository comes from.

    Returns:
        Nothing where there is no git, no repository, or no answer in time.
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
    """The lines that git writes; None where there is no git, and when it has failed or takes too long."""
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

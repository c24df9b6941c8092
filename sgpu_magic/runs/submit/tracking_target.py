"""Where a run is tracked: MLflow's store and experiment.

MLflow is never imported here: a notebook that uses it has imported it.
"""

# MLflow is only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.runs.notebook import working_directory
from sgpu_magic.runs.submit.spec import Submission
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.tracking import STORE_VARIABLES, Tracking, absolute_uri, is_database

MOVE_NAMES = (RunKind.PUSH, RunKind.PULL)
"""Kinds of runs that only move names between the notebook and a session's ranks; they are not tracked."""
_URI = "MLFLOW_TRACKING_URI"
_FALLBACK_NAME = "notebook"


def tracking_of(settings: Settings, spec: RunSpec, submission: Submission) -> tuple[RunSpec, Tracking | None]:
    """Return the run's spec, marked as tracked if it is, and its tracking target; None if it is not tracked."""
    asked = submission.environment.track
    track = settings.track
    if asked is not None:
        track = "all" if asked else "off"
    if spec.kind in MOVE_NAMES or track == "off":
        return spec, None
    environ = submission.environ
    own = _own_target(environ, given=_URI in submission.given)
    uri = own.uri or environ.get(_URI, "") or settings.tracking_uri or own.default_uri
    name, experiment_id = environ.get("MLFLOW_EXPERIMENT_NAME", ""), environ.get("MLFLOW_EXPERIMENT_ID", "")
    if own.experiment_id:
        name, experiment_id = "", own.experiment_id
    elif name:
        experiment_id = ""
    elif not experiment_id:
        name = _experiment_name(spec)
    directory = working_directory()
    tracking = Tracking(
        uri=absolute_uri(uri, directory) if uri else "",
        registry_uri=own.registry_uri or environ.get("MLFLOW_REGISTRY_URI", ""),
        experiment=name,
        experiment_id=experiment_id,
        parent=own.parent or environ.get("MLFLOW_RUN_ID", ""),
        variables={name: environ[name] for name in environ if name.startswith(STORE_VARIABLES)},
        directory=directory if is_database(uri) else "",
        # within an active MLflow run of the notebook, the run is always tracked
        if_it_matters=track == "auto" and not own.parent,
    )
    return msgspec.structs.replace(spec, tracked=True), tracking


class _OwnTarget(msgspec.Struct, frozen=True):
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


_NOT_IN_USE = _OwnTarget()


def _own_target(environ: Mapping[str, str], *, given: bool) -> _OwnTarget:
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
        return _OwnTarget(
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

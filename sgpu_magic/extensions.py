"""What the core calls of the parts that it does without: Databricks' names, MLflow and Ray.

No module of the core imports such a part, which contracts in pyproject.toml ensure. It calls a function below, which
imports the part when it is first needed. Commands that belong to one part, such as `sgpu sync`, import it themselves.

The parts are named here and not by entry points of the distribution: to find those, Python reads the metadata of all
installed distributions, which takes a tenth of a second in a large environment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from sgpu_magic.agent.runs import ray_directories as _directories
    from sgpu_magic.config import Settings
    from sgpu_magic.functions import compat
    from sgpu_magic.nodes.engine import Engine
    from sgpu_magic.nodes.ray.engine import RayEngine
    from sgpu_magic.tracking import in_rank
    from sgpu_magic.wire.base import Record
    from sgpu_magic.wire.node import Launch
    from sgpu_magic.wire.rank import Execute, TrackingAnswered
    from sgpu_magic.wire.run import PrivateRay
    from sgpu_magic.wire.tracking import Tracking
    from sgpu_magic.worker.cell.cell_run import CellRun
    from sgpu_magic.worker.process.helper import Order
    from sgpu_magic.worker.process.rank_context import RankState
    from sgpu_magic.worker.ray.cluster import RayRun


# ---------------------------------------------------------------- Databricks' names


class DatabricksNames(Protocol):
    """`sgpu_magic.functions.compat`."""

    def install(self) -> None:
        """Make `serverless_gpu` and `databricks.air` importable in this process. Further calls have no effect."""


def databricks_names() -> DatabricksNames:
    return cast("DatabricksNames", import_module("sgpu_magic.functions.compat"))


# ---------------------------------------------------------------- MLflow


class TrackingInRank(Protocol):
    """`sgpu_magic.tracking.in_rank`."""

    def begin(self, order: Execute, tracking: Tracking, rank: int, say: Callable[[Record], None]) -> None:
        """Start a tracked cell in this rank. `say` sends a message to the agent."""

    def flush(self) -> None:
        """Send what the cell has logged so far, if one is tracked. It goes on logging."""

    def end(self) -> None:
        """End the cell, if one is tracked, after everything that it has logged is sent."""

    def answered(self, message: TrackingAnswered) -> None:
        """Take the agent's answer to `AskTracking`."""

    def around_import(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Import MLflow by `execute(module)`, and patch it if a cell is tracked."""


@functools.cache
def tracking_in_rank() -> TrackingInRank:
    return cast("TrackingInRank", import_module("sgpu_magic.tracking.in_rank"))


# ---------------------------------------------------------------- Ray


class RayDirectories(Protocol):
    """`sgpu_magic.agent.runs.ray_directories`."""

    def make(self, launch: Launch, settings: Settings) -> PrivateRay:
        """Make the directories of a run's Ray cluster on this node and return them with the cluster's limits.

        Raises:
            OSError: A directory can't be made.
        """
        ...

    def remove(self, run_id: str, settings: Settings) -> None:
        """Remove the directories of a run's Ray cluster, if it had one. Its processes must be dead."""

    def sweep(self, settings: Settings, held: Collection[str]) -> None:
        """Remove Ray directories that killed agents left, except those of the runs with the ids in `held`."""


def ray_directories() -> RayDirectories:
    return cast("RayDirectories", import_module("sgpu_magic.agent.runs.ray_directories"))


def ray_engine(settings: Settings) -> Engine:
    """Return the engine of a pool on a Ray cluster. Call it in the event loop that the pool service will use.

    Raises:
        UsageError: A setting is invalid.
    """
    return import_module("sgpu_magic.nodes.ray.engine").RayEngine(settings)


def ray_run(
    state: RankState, message: Execute, order: Order, say: Callable[[Record], None], ray: PrivateRay
) -> CellRun:
    """Return the execution of a cell on a rank of a run that has its own Ray cluster, `ray`."""
    return import_module("sgpu_magic.worker.ray.cluster").RayRun(state, message, order, say, ray)


if TYPE_CHECKING:
    # pyright compares each part with its protocol
    _databricks_names: DatabricksNames = compat
    _tracking_in_rank: TrackingInRank = in_rank
    _ray_directories: RayDirectories = _directories
    _ray_engine: Callable[[Settings], Engine] = RayEngine
    _ray_run: Callable[[RankState, Execute, Order, Callable[[Record], None], PrivateRay], CellRun] = RayRun

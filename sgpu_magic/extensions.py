"""What the core calls of the parts that it does without: Databricks' names and MLflow.

No module of the core imports such a part, which contracts in pyproject.toml ensure. It calls a function below, which
imports the part when it is first needed.

The parts are named here and not by entry points of the distribution: to find those, Python reads the metadata of all
installed distributions, which takes a tenth of a second in a large environment.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from sgpu_magic.functions import compat
    from sgpu_magic.tracking import in_rank
    from sgpu_magic.wire.base import Record
    from sgpu_magic.wire.rank import Execute, TrackingAnswered
    from sgpu_magic.wire.tracking import Tracking


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

    def end(self) -> None:
        """End the cell, if one is tracked, after everything that it has logged is sent."""

    def answered(self, message: TrackingAnswered) -> None:
        """Take the agent's answer to `AskTracking`."""

    def around_import(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Import MLflow by `execute(module)`, and patch it if a cell is tracked."""


def tracking_in_rank() -> TrackingInRank:
    return cast("TrackingInRank", import_module("sgpu_magic.tracking.in_rank"))


if TYPE_CHECKING:
    # pyright compares each part with its protocol
    _databricks_names: DatabricksNames = compat
    _tracking_in_rank: TrackingInRank = in_rank

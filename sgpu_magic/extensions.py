"""What the core calls of the parts that it does without: Databricks' names.

No module of the core imports such a part, which contracts in pyproject.toml ensure. It calls a function below, which
imports the part when it is first needed.

The parts are named here and not by entry points of the distribution: to find those, Python reads the metadata of all
installed distributions, which takes a tenth of a second in a large environment.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from sgpu_magic.functions import compat


# ---------------------------------------------------------------- Databricks' names


class DatabricksNames(Protocol):
    """`sgpu_magic.functions.compat`."""

    def install(self) -> None:
        """Make `serverless_gpu` and `databricks.air` importable in this process. Further calls have no effect."""


def databricks_names() -> DatabricksNames:
    return cast("DatabricksNames", import_module("sgpu_magic.functions.compat"))


if TYPE_CHECKING:
    # pyright compares each part with its protocol
    _databricks_names: DatabricksNames = compat

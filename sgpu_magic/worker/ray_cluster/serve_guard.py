"""Ray Serve is refused: a run ends with its driver, and nobody outside could reach what it serves."""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

from sgpu_magic.errors import UsageError
from sgpu_magic.worker.ray_cluster.imports import after_import

# those that start a Serve instance (ray/serve/api.py)
_STARTERS = ("run", "run_many", "start")
_REFUSAL = (
    "Ray Serve can't be started in a @ray_launch run (rank 0): the run's cluster ends with its driver, so nothing "
    "could be served from it. Call the model in Ray tasks or actors of the run, and serve it from a Ray cluster of "
    "your own that stays."
)


def install() -> None:
    """Refuse Ray Serve in this process, now or when it is imported. Its other names stay: libraries import them."""
    after_import("ray.serve.api", _guard)
    # without its own packages its import fails, and to install them would not help
    after_import("ray.serve", _guard, _REFUSAL)


def _guard(module: ModuleType) -> None:
    for name in _STARTERS:
        if hasattr(module, name):
            setattr(module, name, _refuse)


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise UsageError(_REFUSAL)

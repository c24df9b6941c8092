"""Serverless GPUs in any Jupyter notebook: `%load_ext sgpu_magic`, then `%%distributed --gpus 4`.

The same from Python:

distributed   `@distributed(gpus=4)` on a function: `train.distributed()` runs it on every rank
ray_launch    `@ray_launch(gpus=4)`: the function is the driver of a Ray cluster on the ranks' nodes
map           one run per item, for sweeps
connect       a session: ranks that stay
tracking_uri  the store where runs are tracked, for `mlflow.set_tracking_uri`
Run           a run that goes on while the program does something else
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from sgpu_magic.functions.decorator import distributed, ray_launch
    from sgpu_magic.functions.handle import Run
    from sgpu_magic.functions.sweep import map
    from sgpu_magic.runs.sessions import connect
    from sgpu_magic.tracking.store import tracking_uri

__all__ = [
    "Run",
    "__version__",
    "connect",
    "distributed",
    "load_ipython_extension",
    "map",
    "ray_launch",
    "tracking_uri",
    "unload_ipython_extension",
]

# imported when they are first used: a rank, a command or the pool service needs none of them
_OWNERS = {
    "Run": "sgpu_magic.functions.handle",
    "connect": "sgpu_magic.runs.sessions",
    "distributed": "sgpu_magic.functions.decorator",
    "map": "sgpu_magic.functions.sweep",
    "ray_launch": "sgpu_magic.functions.decorator",
    "tracking_uri": "sgpu_magic.tracking.store",
}


def __getattr__(name: str) -> object:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found: object = getattr(importlib.import_module(_OWNERS[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register the magics and warm the local pool in the background (`%load_ext sgpu_magic`)."""
    from sgpu_magic import magics
    from sgpu_magic.functions import compat

    compat.install()
    magics.load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Take the magics away again and close the links to pools (`%unload_ext sgpu_magic`)."""
    from sgpu_magic import magics

    magics.unload(ipython)

"""Serverless GPUs in any Jupyter notebook: `%load_ext sgpu_magic`, then `%%distributed --gpus 4`.

The same from Python:

- `@distributed(gpus=4)` on a function: `train.distributed()` runs it on every rank
- `@ray_launch(gpus=4)`: the function is the driver of a Ray cluster on the ranks' nodes
- `map`: one run per item, for sweeps
- `connect`: a session: ranks that stay
- `tracking_uri`: the store where runs are tracked, for `mlflow.set_tracking_uri`
- `Run`: a run that goes on while the program does something else

What is in here, each built on what stands below it (pyproject.toml has who may import whom):

magics/     the magics: parse, submit, show
cli/        the `sgpu` command
server/     the Jupyter server's half
panel/      the environment panel
functions/  the Python names above, and those of serverless_gpu
options/    every option once, and what each form of it says
runs/       a run as the process that has submitted it sees it: submitted, followed, delivered
views/      what a person sees of a run
client/     the links to pools, and files to and from them
pool/       the pool service: devices, queue, leases, ledger
nodes/      where agents run: this machine, or a Ray cluster
agent/      one for each node: starts ranks, takes their output, finds what failed, ends them
worker/     the zygote and the ranks
runtime     what code on a rank asks about itself
tracking/   runs in MLflow
payload/    objects to bytes and back
packages/   Python packages that travel
files/      bytes on disk, and how they cross a link
config      the settings
system/     what is needed of the operating system
errors      everything that users of this package may catch
wire/       every message between its processes
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
    import gc

    # what modules make stays: to look through it several times took a sixth of the time of loading
    collects = gc.isenabled()
    gc.disable()
    try:
        from sgpu_magic import magics
        from sgpu_magic.functions import compat

        compat.install()
        magics.load(ipython)
    finally:
        if collects:
            gc.enable()


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Take the magics away again and close the links to pools (`%unload_ext sgpu_magic`)."""
    from sgpu_magic import magics

    magics.unload(ipython)

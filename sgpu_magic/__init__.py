"""Serverless GPUs in any Jupyter notebook: `%load_ext sgpu_magic`, then `%%distributed --gpus 4`.

The same from Python:

- `@distributed(gpus=4)` on a function: `train.distributed()` runs it on every rank
- `@ray_launch(gpus=4)`: the function drives a Ray cluster on the run's nodes
- `map`: one run per item, for sweeps
- `connect`: a session, whose ranks stay alive between cells
- `tracking_uri`: the store where runs are tracked, for `mlflow.set_tracking_uri`
- `Run`: a handle to a run in the background

The modules and folders, each built on those below it (the contracts in pyproject.toml hold the allowed imports):

magics/      the magics: parse, submit, show
cli/         the `sgpu` command
server/      the Jupyter server extension
panel/       the environment panel
functions/   the Python API above, and the names of serverless_gpu
compat       the extension for notebooks written in Databricks
options/     every option, declared once, and its form in magics, commands, Python and job files
runs/        a run in the process that submits it: submit, follow, deliver the results
views/       how a run is displayed
client/      connections to pools, and file transfer to and from them
pool/        the pool service: devices, queue, leases, ledger
nodes/       the engines, which start agents on this machine or on a Ray cluster
agent/       one per node: starts and stops ranks, reads their output, finds the root cause of failures
worker/      the zygote and the ranks
runtime      rank, world size, device and checkpoint directory for code on a rank
tracking/    runs in MLflow
payload/     serialization of Python objects
packages/    the notebook's Python packages on the ranks
files/       files on disk, and their transfer over a connection
ssh/         logging in to other machines
config/      the settings
system/      the operating system: processes, streams, sockets, keys
extensions   where the core calls Databricks' names, MLflow and Ray
errors       the exceptions that users can catch
wire/        the messages between the processes
formatting   numbers, amounts and lists as people read them
suggestions  similar names, for errors about a name that does not exist
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from sgpu_magic.functions.decorator import distributed, ray_launch
    from sgpu_magic.functions.sweep import map
    from sgpu_magic.runs.handle import Run
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

# imported on first use: ranks, commands and the pool service need none of them
_OWNERS = {
    "Run": "sgpu_magic.runs.handle",
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
    from sgpu_magic import extensions, magics

    extensions.databricks_names().install()
    magics.load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Remove the magics and close the connections to pools (`%unload_ext sgpu_magic`)."""
    from sgpu_magic import magics

    magics.unload(ipython)

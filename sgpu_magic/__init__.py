"""Serverless GPUs in any Jupyter notebook: `%load_ext sgpu_magic`, then `%%distributed --gpus 4`."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register the magics and warm the local pool in the background (`%load_ext sgpu_magic`)."""
    from sgpu_magic import magics

    magics.load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Take the magics away again and close the links to pools (`%unload_ext sgpu_magic`)."""
    from sgpu_magic import magics

    magics.unload(ipython)

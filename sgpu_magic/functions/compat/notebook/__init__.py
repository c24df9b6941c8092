"""The names that a Databricks notebook has without defining them, for the extension `sgpu_magic.compat`.

names        puts `dbutils`, `spark` and the other names and magics into a shell, and removes them
spark        `spark` and `%sql`: PySpark if it is installed, else what works without a cluster
dbutils      base class of `dbutils` and its parts; `dbutils.widgets` and `dbutils.secrets`
file_system  `dbutils.fs` and `%fs`; where `/Volumes/...` and `dbfs:/...` are on this machine
execution    running, ending and restarting notebooks: `dbutils.notebook`, `%run`, `dbutils.library`

The shell is the one that the extension receives; nothing here imports IPython. Ranks import this package alone, for
`displayHTML`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable


def displayHTML(html: object) -> None:
    """Show HTML below the cell, on ranks too."""
    display: Callable[..., object] | None = vars(builtins).get("display")
    if display is None:
        # no IPython shell runs this code
        print(html)  # noqa: T201
    else:
        display({"text/html": str(html), "text/plain": "<HTML>"}, raw=True)

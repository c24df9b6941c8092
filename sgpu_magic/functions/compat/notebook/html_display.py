"""`displayHTML`, in a module of its own: ranks import it, and need nothing else of this folder."""

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

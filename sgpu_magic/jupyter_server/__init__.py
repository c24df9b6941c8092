"""The Jupyter server's half: what goes on in a run, over REST, while the run's kernel is busy.

owned      which runs a kernel has submitted
followers  runs folded from their directories, shared by all pages that look at them
outputs    what a run's cell shows at the end
handlers   the requests

Reads run directories of the user that the server runs as, and nothing else.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:  # pyright: ignore[reportUnusedFunction]
    return [{"module": "sgpu_magic.jupyter_server"}]


def _load_jupyter_server_extension(server_app: Any) -> None:  # pyright: ignore[reportUnusedFunction]
    from sgpu_magic.jupyter_server.handlers import add_handlers

    add_handlers(server_app)

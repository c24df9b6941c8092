"""The Jupyter server's half: runs and their pool, while the notebook's kernel is busy or dead.

runs            runs folded from their events, shared by all pages that look at them
run_places      where a run is: in this machine's own pool or in another's, and the links to those
kernel_runs     which runs a kernel has submitted
outputs         what a run's cell shows at the end
run_handlers    the requests about runs
panel_handlers  the environment panel's websocket and requests

Reads run directories and asks the pools of the user that the server runs as, and nothing else.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:  # pyright: ignore[reportUnusedFunction]
    return [{"module": "sgpu_magic.server"}]


def _load_jupyter_server_extension(server_app: Any) -> None:  # pyright: ignore[reportUnusedFunction]
    from sgpu_magic.server.panel_handlers import add_panel_handlers
    from sgpu_magic.server.run_handlers import add_handlers

    add_panel_handlers(server_app)
    add_handlers(server_app)
    _count_no_questions(server_app)


def _count_no_questions(server_app: Any) -> None:
    """Let a front end's questions to a kernel count as nobody's work: a cell that runs meanwhile is not over then."""
    types = ["sgpu_request", "sgpu_reply"]
    untracked = getattr(server_app.kernel_manager, "untracked_message_types", None)
    if untracked is None:
        return
    server_app.kernel_manager.untracked_message_types = [*untracked, *types]
    # JupyterLab has read it when it was loaded before
    page = server_app.web_app.settings.get("page_config_data", {})
    if "untracked_message_types" in page:
        page["untracked_message_types"] = [*page["untracked_message_types"], *types]

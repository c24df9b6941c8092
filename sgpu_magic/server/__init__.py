"""The Jupyter server extension: serves runs and pools to pages while the notebook's kernel is busy or dead.

runs            runs folded from their events, shared by all pages that show them, and the outputs of their cells
run_places      where a run is: in this machine's pool or in a remote one, and the connections to remote pools
run_page        a run's page: its code, options, phases, environment
page_schema     the records of a run's page
mlflow_ui       a run's MLflow run, and `mlflow ui` for stores without a server
run_files       the files that a run's ranks have written
run_handlers    HTTP handlers for a kernel's runs
panel_handlers  the environment panel's websocket and HTTP handlers

The extension reads only run directories and pools of the user that the server runs as.
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
    """Exclude a front end's requests from the kernel's busy state, so that a running cell is not reported as idle."""
    types = ["sgpu_request", "sgpu_reply"]
    untracked = getattr(server_app.kernel_manager, "untracked_message_types", None)
    if untracked is None:
        return
    server_app.kernel_manager.untracked_message_types = [*untracked, *types]
    # JupyterLab may have been loaded first and have copied the list already
    page = server_app.web_app.settings.get("page_config_data", {})
    if "untracked_message_types" in page:
        page["untracked_message_types"] = [*page["untracked_message_types"], *types]

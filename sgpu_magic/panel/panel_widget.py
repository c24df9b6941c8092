"""The ipywidget of the environment panel, for front ends without the sidebar."""

# ipywidgets declares few types
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from importlib import resources

import traitlets

from sgpu_magic.views.live.widgets import KeyedWidget

_ESM = resources.files("sgpu_magic").joinpath("static/panel.js").read_text(encoding="utf-8")


class PanelWidget(KeyedWidget):
    """What the browser has to know before it asks; all else are messages.

    Args:
        pool: The pool that is shown first, "" for the settings'.
        notebook: The notebook's file name, "" when nobody has told it.
        kernel: The Jupyter server's id of this kernel, "" without one.
    """

    # text and not a Path: anywidget would watch the file
    _esm = traitlets.Unicode(_ESM).tag(sync=True)
    pool = traitlets.Unicode("").tag(sync=True)
    notebook = traitlets.Unicode("").tag(sync=True)
    kernel = traitlets.Unicode("").tag(sync=True)

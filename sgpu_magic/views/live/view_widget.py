"""The ipywidget of a run's live view. To import it takes some 50 ms, which no cell is to wait for."""

# ipywidgets declares few types
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from importlib import resources

import traitlets

from sgpu_magic.views.live.keyed_widget import KeyedWidget

_ESM = resources.files("sgpu_magic").joinpath("static/run_view.js").read_text(encoding="utf-8")


class RunViewWidget(KeyedWidget):
    """What the browser knows of a run: the last snapshot and how to ask. Lines go as messages of their own.

    Args:
        snapshot: `live.picture.Snapshot` as JSON.
    """

    # text and not a Path: anywidget would watch the file
    _esm = traitlets.Unicode(_ESM).tag(sync=True)
    snapshot = traitlets.Dict().tag(sync=True)

"""The ipywidget of a run's live view, and what the panel's shares with it.

To import it takes some 50 ms, which no cell is to wait for.
"""

# ipywidgets declares few types
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import uuid
from importlib import resources
from typing import Any

import anywidget
import traitlets

_VIEW_MIME = "application/vnd.jupyter.widget-view+json"


class KeyedWidget(anywidget.AnyWidget):
    """An anywidget whose model id is known before its comm is open.

    Args:
        comms: `subshell` when the kernel answers a widget's messages while a cell blocks, if the front end sends
            them to a subshell; else `blocking`: ask over the control channel.

    Attributes:
        model_key: The model's id, which questions over the control channel name.
    """

    comms = traitlets.Unicode("blocking").tag(sync=True)
    model_key = traitlets.Unicode("").tag(sync=True)

    def __init__(self, **state: Any) -> None:
        key = uuid.uuid4().hex
        try:
            super().__init__(model_id=key, model_key=key, **state)
        except BaseException:
            # an interrupt: nobody else could close what is open by now
            self.close()
            raise

    @property
    def view_bundle(self) -> dict[str, object]:
        """The part of a MIME bundle that shows it."""
        return {_VIEW_MIME: {"version_major": 2, "version_minor": 0, "model_id": self.model_key}}

    def close(self) -> None:
        """Close its comm and that of its layout, which ipywidgets leaves open."""
        layout = self.layout
        super().close()
        layout.close()


_ESM = resources.files("sgpu_magic").joinpath("static/run_view.js").read_text(encoding="utf-8")


class RunViewWidget(KeyedWidget):
    """What the browser knows of a run: the last snapshot and how to ask. Lines go as messages of their own.

    Args:
        snapshot: `schema.Snapshot` as JSON.
    """

    # text and not a Path: anywidget would watch the file
    _esm = traitlets.Unicode(_ESM).tag(sync=True)
    snapshot = traitlets.Dict().tag(sync=True)

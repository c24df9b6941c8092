"""The ipywidget of a run's live view, and the base class that it shares with the panel's.

Importing this module takes about 50 ms, so it is done in the background.
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
        comms: `subshell` if the kernel answers a widget's messages that the front end sends to a subshell while a
            cell blocks; else `blocking`: use the control channel.

    Attributes:
        model_key: The model's id, which requests over the control channel include.
    """

    comms = traitlets.Unicode("blocking").tag(sync=True)
    model_key = traitlets.Unicode("").tag(sync=True)

    def __init__(self, **state: Any) -> None:
        key = uuid.uuid4().hex
        try:
            super().__init__(model_id=key, model_key=key, **state)
        except BaseException:
            # such as an interrupt: close what is open, as no one else has a reference
            self.close()
            raise

    @property
    def view_bundle(self) -> dict[str, object]:
        """The part of a MIME bundle that shows it."""
        return {_VIEW_MIME: {"version_major": 2, "version_minor": 0, "model_id": self.model_key}}

    def close(self) -> None:
        """Close its comm and its layout's comm, which ipywidgets leaves open."""
        layout = self.layout
        super().close()
        layout.close()


_ESM = resources.files("sgpu_magic").joinpath("static/run_view.js").read_text(encoding="utf-8")


class RunViewWidget(KeyedWidget):
    """The state of a live view in the browser: the last snapshot. Lines are sent as separate messages.

    Args:
        snapshot: `schema.Snapshot` as JSON.
    """

    # text instead of a Path: anywidget would watch the file
    _esm = traitlets.Unicode(_ESM).tag(sync=True)
    snapshot = traitlets.Dict().tag(sync=True)

"""Tracks which names plain cells rebind while sessions are connected."""

from __future__ import annotations

import contextlib
from typing import Any

from sgpu_magic.magics.auto_mode import AutoMode
from sgpu_magic.payload.names import names_bound
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.namespace_sync import Assigned
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit.cell_source import transform_of


class RebindTracker:
    """Tracks which names plain cells rebind while sessions are connected.

    Args:
        shell: The notebook's shell.
        auto: Decides which cells go to the ranks.
    """

    def __init__(self, shell: Any, auto: AutoMode) -> None:
        self._shell = shell
        self._auto = auto
        self._undo: list[tuple[Session, Assigned]] = []

    def before_cell(self, info: Any) -> None:
        """Record the names before the cell runs, because the cell itself may use a session after it has bound them."""
        self._undo = []
        sessions, source = registry.all_sessions(), info.raw_cell
        if not sessions or not isinstance(source, str):
            return
        if not source.lstrip().startswith("%%") and not self._auto.takes(source):
            with contextlib.suppress(SyntaxError):
                names = names_bound(source, transform=transform_of(self._shell))
                self._undo = [(session, session.shipping.assigned(names)) for session in sessions]

    def after_cell(self, result: Any) -> None:
        """Undo the record of names that a failed cell would have assigned."""
        undo, self._undo = self._undo, []
        if not result.success:
            for session, before in undo:
                session.shipping.not_assigned(before)

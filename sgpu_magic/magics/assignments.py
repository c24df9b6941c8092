"""Which names the notebook's own cells bind anew: their values are newer than what a session's ranks have."""

from __future__ import annotations

from typing import Any

from sgpu_magic.magics.auto import AutoMode
from sgpu_magic.payload.names import names_bound
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.namespace_sync import Assigned
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit.cell_source import transform_of


class Assignments:
    """Reads every plain cell while sessions are connected.

    Args:
        shell: The notebook's.
        auto: Knows the cells that go to the ranks.
    """

    def __init__(self, shell: Any, auto: AutoMode) -> None:
        self._shell = shell
        self._auto = auto
        self._undo: list[tuple[Session, Assigned]] = []
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)

    def remove(self) -> None:
        """Read no more cells."""
        self._shell.events.unregister("pre_run_cell", self._before_cell)
        self._shell.events.unregister("post_run_cell", self._after_cell)

    def _before_cell(self, info: Any) -> None:
        """Before, for the cell itself may run something in a session once it has bound its names."""
        self._undo = []
        sessions = registry.all_sessions()
        source = info.raw_cell
        if not sessions or not isinstance(source, str):
            return
        if source.lstrip().startswith("%%") or self._auto.takes(source):
            return
        try:
            names = names_bound(source, transform=transform_of(self._shell))
        except SyntaxError:
            return
        self._undo = [(session, session.shipping.assigned(names)) for session in sessions]

    def _after_cell(self, result: Any) -> None:
        undo, self._undo = self._undo, []
        if not result.success:
            for session, before in undo:
                session.shipping.not_assigned(before)

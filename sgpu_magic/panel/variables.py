"""The variables on the ranks of a kernel's current session, as a panel shows them."""

from __future__ import annotations

from itertools import islice

from sgpu_magic.errors import SessionBusy
from sgpu_magic.panel.schema import PanelVariable, PanelVariables, VariableForm
from sgpu_magic.runs.sessions.rank_variables import list_variables
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.views.units import Row
from sgpu_magic.views.variable_table import variable_rows

MOST_VARIABLES = 100
"""Variables that a panel lists."""


def panel_variables(session: Session | None) -> PanelVariables:
    """Return the variables that the ranks have. Runs no code of the user's, and waits for no cell.

    Raises:
        SessionError: The session has ended, or none of its ranks answers.
    """
    if session is None:
        return PanelVariables(session="")
    try:
        listing = list_variables(session)
    except SessionBusy:
        return PanelVariables(session=session.name, busy=True)
    rows = variable_rows(listing)
    return PanelVariables(
        session=session.name,
        variables=tuple(
            PanelVariable(name=name, forms=tuple(map(_form, rows[name]))) for name in islice(rows, MOST_VARIABLES)
        ),
        more=max(0, len(rows) - MOST_VARIABLES) + listing.left_out,
        notes=listing.notes,
    )


def _form(row: Row) -> VariableForm:
    kind, shape, dtype, device, size, ranks = row
    return VariableForm(type=kind, shape=shape, dtype=dtype, device=device, size=size, ranks=ranks)

"""Sessions: ranks that stay alive between cells, holding their lease.

lifetime        a session from its submission to its end: its state, waiting for it, ending it
session         the handle: cells, calls, names, and ranks that are replaced
registry        this process's sessions: begun, by name, the current one, ended
fit             whether a session is what is asked for
run_in          what is submitted to one, and how it runs there
namespace_sync  which of the notebook's names go along
"""

from __future__ import annotations

from sgpu_magic.runs.sessions.registry import connect
from sgpu_magic.runs.sessions.session import Session

__all__ = ["Session", "connect"]

"""Sessions: ranks that stay alive between cells, holding their lease.

lifetime        a session from its submission to its end: its state, waiting for it, ending it
session         the handle: cells, calls, names, and ranks that are replaced
connecting      how one begins
registry        this process's sessions by name, and the current one
cells           what is submitted to one
run_in          a prepared cell, call or transfer runs in one
namespace_sync  which of the notebook's names go along
"""

from __future__ import annotations

from sgpu_magic.runs.sessions.connecting import connect
from sgpu_magic.runs.sessions.session import Session

__all__ = ["Session", "connect"]

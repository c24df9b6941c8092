"""Sessions: ranks that stay alive between cells, holding their lease.

session          a session from its connection to its end: cells, calls, names, waiting, closing
registry         this process's sessions: connecting, lookup by name, the current one, closing
rank_collection  some of the ranks, and values that are spread over them
rank_restart     restarts ranks and sends the notebook's values to them again
cell_runner      runs cells, calls, pushes and pulls in a session
namespace_sync   which of the notebook's names are sent with a cell
rank_variables   asks the ranks for their variables
comparison       reports comparisons of the notebook's values that take long
"""

from __future__ import annotations

from sgpu_magic.runs.sessions.registry import connect
from sgpu_magic.runs.sessions.session import Session

__all__ = ["Session", "connect"]

"""Process groups connected anew over a new store: after a cell that broke them, and with ranks that are new.

Every living rank is told to renew its groups in place, so that models and groups of the user go on. A new rank joins
over the same store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from sgpu_magic.agent.ranks.group import Group, GroupStore
from sgpu_magic.agent.ranks.orders import prepare
from sgpu_magic.wire.node_messages import Launch
from sgpu_magic.wire.rank_messages import Renew, Renewed

# gloo's own limit on the ranks is shorter
_PATIENCE_S = 60.0


class Regrouping:
    """One renewal under way.

    Args:
        group: The ranks. All must be alive, but for those that are replaced.
        launch: The session's: what new ranks stand on.
        scratch: Directory for files where memory files do not exist.
        done: Called once, with why it failed ("" when it did not) and what could not be kept.
    """

    def __init__(self, group: Group, launch: Launch, scratch: Path, done: Callable[[str, str], None]) -> None:
        self._group = group
        self._launch = launch
        self._scratch = scratch
        self._done: Callable[[str, str], None] | None = done
        self._waiting: set[int] = set()
        self._problem = ""
        self._lost = ""
        self._timer = asyncio.get_running_loop().call_later(
            _PATIENCE_S, self.fail, f"it took longer than {_PATIENCE_S:.0f} s"
        )

    def begin(self, replaced: Sequence[int] = ()) -> None:
        """Order it.

        Args:
            replaced: Ranks to fork anew; they are dead.

        Raises:
            OSError: No port or descriptor is left.
        """
        store = GroupStore(self._scratch)
        staying = [process.rank for process in self._group.ranks if process.rank not in replaced]
        self._waiting = {*staying, *replaced}
        for rank in staying:
            order = Renew(replaced=tuple(replaced), store_path=store.path)
            self._group.order(rank, order, descriptors=store.descriptors)
        if replaced:
            self._group.replace(replaced, store)
            prepare(self._launch, self._group, replaced, stays=True, renewal=bool(staying))
        else:
            store.close()

    def joined(self, rank: int) -> None:
        """A new rank is in the group."""
        self._answered(rank)

    def renewed(self, rank: int, message: Renewed) -> None:
        """A rank has renewed its groups, or could not."""
        self._problem = self._problem or message.problem
        self._lost = self._lost or message.lost
        self._answered(rank)

    def fail(self, problem: str) -> None:
        """It can't be done."""
        self._end(problem)

    def _answered(self, rank: int) -> None:
        self._waiting.discard(rank)
        if not self._waiting:
            self._end(self._problem)

    def _end(self, problem: str) -> None:
        self._timer.cancel()
        done, self._done = self._done, None
        if done is not None:
            done(problem, self._lost)

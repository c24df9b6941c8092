"""Whether a run of several nodes stands still: only where every node says so of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Container

from sgpu_magic.wire.events import Resumed, Stalled


class JointStalls:
    """Of one run.

    Args:
        parts: On how many nodes it is.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._still: dict[int, Stalled] = {}
        self._told = False

    def told(self, part: int, body: Stalled | Resumed, done: Container[int]) -> Stalled | Resumed | None:
        """A node has said something of its own ranks. Returns what that means for the run, None where nothing.

        Args:
            done: Parts whose ranks have finished: the others may wait for them.
        """
        if isinstance(body, Resumed):
            self._still.pop(part, None)
            told, self._told = self._told, False
            return body if told else None
        self._still[part] = body
        if not all(index in self._still or index in done for index in range(self._parts)):
            return None
        stacks = [stack for still in self._still.values() for stack in still.stacks]
        self._told = True
        return Stalled(
            seconds=min(still.seconds for still in self._still.values()),
            stacks=tuple(sorted(stacks, key=lambda stack: stack.rank)),
        )

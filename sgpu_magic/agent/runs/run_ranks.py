"""The ranks that take part in one run: all of a group, or some of a session's."""

from __future__ import annotations

from collections.abc import Sequence

from sgpu_magic.agent.ranks.group import Group, RankProcess


class Crew:
    """A run's ranks. Looked up in the group each time: a session's may be replaced by new processes.

    Args:
        group: Where they belong.
        numbers: Which, ascending.
    """

    def __init__(self, group: Group, numbers: Sequence[int]) -> None:
        self._group = group
        self.numbers = tuple(numbers)

    @property
    def ranks(self) -> list[RankProcess]:
        """Their processes, ascending."""
        return [self._group.rank(number) for number in self.numbers]

    def rank(self, number: int) -> RankProcess:
        """The process of one of them."""
        return self._group.rank(number)

    @property
    def world_size(self) -> int:
        """Ranks of the whole group, on all nodes together."""
        return self._group.world_size

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.ranks if process.pid is not None]

    def release(self, connections: dict[int, tuple[int, ...]]) -> None:
        """Ask every rank of the group to shut its connections to its peers down: one end alone frees nobody."""
        self._group.release(connections)

    @property
    def group_pids(self) -> list[int]:
        """All ranks of the group, whether they take part or not: connections go between any two of them."""
        return self._group.pids

    def leave(self) -> None:
        """Let every rank exit."""
        self._group.leave()

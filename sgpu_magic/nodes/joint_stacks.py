"""Stacks of a run's ranks, asked of every node that has some and told once all have answered. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sgpu_magic.wire.measures import RankStack


@dataclass(slots=True)
class _Asked:
    run_id: str
    silent: set[int]
    stacks: list[RankStack] = field(default_factory=list[RankStack])


class JointStacks:
    """The requests that are under way, by number."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}

    def ask(self, request: int, run_id: str, parts: Iterable[int]) -> None:
        """These parts of the run are asked."""
        self._asked[request] = _Asked(run_id, set(parts))

    def taken(self, request: int, part: int, stacks: tuple[RankStack, ...]) -> tuple[RankStack, ...] | None:
        """A part has answered. Returns the stacks of all ranks, None while others are awaited."""
        asked = self._asked.get(request)
        if asked is None:
            return None
        asked.silent.discard(part)
        asked.stacks += stacks
        return self._finish(request, asked)

    def part_silent(self, run_id: str, part: int) -> list[tuple[int, tuple[RankStack, ...]]]:
        """A part answers nothing any more. Returns the requests that this completes."""
        done: list[tuple[int, tuple[RankStack, ...]]] = []
        for request, asked in list(self._asked.items()):
            if asked.run_id == run_id and part in asked.silent:
                asked.silent.discard(part)
                stacks = self._finish(request, asked)
                if stacks is not None:
                    done.append((request, stacks))
        return done

    def _finish(self, request: int, asked: _Asked) -> tuple[RankStack, ...] | None:
        if asked.silent:
            return None
        del self._asked[request]
        return tuple(sorted(asked.stacks, key=lambda stack: stack.rank))

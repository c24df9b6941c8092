"""Requests that wait for an answer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Pending(Generic[K, V]):
    """What is known of each request that waits, by its key, in the order of asking. Used from one thread only."""

    def __init__(self) -> None:
        self._waiting: dict[K, V] = {}

    def __iter__(self) -> Iterator[V]:
        return iter([*self._waiting.values()])

    def add(self, key: K, request: V) -> None:
        """The request waits from now on."""
        self._waiting[key] = request

    def get(self, key: K) -> V | None:
        """Return the request, which goes on waiting; None when it does not."""
        return self._waiting.get(key)

    def take(self, key: K) -> V | None:
        """It is answered, or given up: return the request, None when it does not wait any more."""
        return self._waiting.pop(key, None)

    def take_all(self, which: Callable[[V], bool]) -> list[V]:
        """Return those that nobody will answer any more."""
        keys = [key for key, request in self._waiting.items() if which(request)]
        return [self._waiting.pop(key) for key in keys]

"""A value over time, bounded. Pure."""

from __future__ import annotations

MAX_POINTS = 120
"""Points of one curve."""


class Series:
    """A value over time at even steps. When it is full, neighbours are averaged and the step doubles.

    Args:
        began_s: When it begins: seconds since the ranks started.
        step_s: Seconds between two points at first.
        digits: Digits after the point of what it shows; more would only make messages longer.
    """

    def __init__(self, began_s: float = 0.0, step_s: float = 1.0, digits: int = 1) -> None:
        self.began_s = round(max(began_s, 0.0), 3)
        self.step_s = step_s
        self._digits = digits
        # of each step: the integral over what was told, and for how many seconds something was
        self._sums: list[float] = []
        self._told_s: list[float] = []

    def add(self, begin_s: float, end_s: float, value: float | None) -> None:
        """Take what was measured from `begin_s` to `end_s` (seconds since the ranks started); None is not told."""
        begin_s, end_s = begin_s - self.began_s, end_s - self.began_s
        if end_s <= max(begin_s, 0.0):
            return
        while end_s > MAX_POINTS * self.step_s:
            self._halve()
        first, last = int(max(begin_s, 0.0) / self.step_s), min(int(end_s / self.step_s), MAX_POINTS - 1)
        # a sliver of a step would be a point that flickers
        if last > first and end_s - last * self.step_s < self.step_s / 2:
            last -= 1
        missing = last + 1 - len(self._sums)
        self._sums += [0.0] * missing
        self._told_s += [0.0] * missing
        if value is None:
            return
        for index in range(first, last + 1):
            since = begin_s if index == first else index * self.step_s
            until = end_s if index == last else (index + 1) * self.step_s
            self._sums[index] += value * (until - since)
            self._told_s[index] += until - since

    @property
    def values(self) -> tuple[float | None, ...]:
        """Oldest first; None where nothing was told."""
        return tuple(
            round(total / told, self._digits) if told else None
            for total, told in zip(self._sums, self._told_s, strict=True)
        )

    @property
    def mean(self) -> float | None:
        """Over all that was told; None when nothing was."""
        told_s = sum(self._told_s)
        return sum(self._sums) / told_s if told_s else None

    def _halve(self) -> None:
        for column in (self._sums, self._told_s):
            column[:] = [sum(column[at : at + 2]) for at in range(0, len(column), 2)]
        self.step_s *= 2

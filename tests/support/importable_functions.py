"""Functions in a module that ranks can import; decorated objects have the names of their functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sgpu_magic import distributed

FACTOR = 3


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function, as a user's own decorator does."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        print("called", function.__name__)
        return function(*args, **kwargs)

    return wrapper


def times(x: int) -> int:
    return x * FACTOR


@distributed(gpus=2, ui="none")
def decorated(x: int, rank: int) -> tuple[int, int]:
    return helper(x), rank


@distributed(gpus=4)
def helper(x: int) -> int:
    """Also decorated; on a rank it is the plain function."""
    return times(x)


@distributed(gpus=2, ui="none")
@logged
def twice_decorated(x: int, rank: int) -> int:
    return x + rank


class Model:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def apply(self, x: int) -> int:
        return self.scale * x

    @distributed(gpus=2, ui="none")
    def fit(self, x: int, rank: int) -> int:
        return self.apply(x) + rank

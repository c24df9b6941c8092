"""`@ray_launch`: it can be put on a function, and says when the function is launched that this can't be done yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, Unpack, cast

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.options import Options, checked

P = ParamSpec("P")
R = TypeVar("R")


class RayFunction(Generic[P, R]):
    """A function that `@ray_launch` has been put on. Calling it calls the function here, once.

    Args:
        function: What would be Ray's driver on rank 0.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(cast("Any", self), function)
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here, once."""
        return self._function(*args, **kwargs)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> NoReturn:
        """Refuse: no Ray cluster can be started.

        Raises:
            UsageError: Always.
        """
        name = getattr(self._function, "__qualname__", "the function")
        raise UsageError(
            f"{name} can't be launched: sgpu-magic does not start Ray clusters yet, and nothing was started. Use "
            "@distributed for a torch program; a Ray program that needs no more than this machine runs with ray.init() "
            f"in it when you call {name}(...) itself."
        )


def ray_launch(**options: Unpack[Options]) -> Callable[[Callable[P, R]], RayFunction[P, R]]:
    """Mark a function as the driver of a Ray program, with the options of `@distributed`.

    Raises:
        UsageError: An option means nothing or contradicts another.
        TypeError: There is no option of that name.
    """
    checked(**options)
    return RayFunction

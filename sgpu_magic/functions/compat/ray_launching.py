"""`serverless_gpu.ray.ray_launch`: `@ray_launch` of this package, and a word on pools that the variables choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack

from sgpu_magic.functions import ray_launching
from sgpu_magic.functions.compat.decorator import with_chosen_pool
from sgpu_magic.functions.options import Options
from sgpu_magic.functions.ray_launching import RayLauncher

P = ParamSpec("P")
R = TypeVar("R")


class RayFunction(ray_launching.RayFunction[P, R]):
    """A Ray driver whose pool the documented variables choose."""

    @property
    def distributed(self) -> RayLauncher[P, R]:
        """Runs the function with a Ray cluster. The variables count as they are now, not when it was defined."""
        return RayLauncher(self.__sgpu_function__, with_chosen_pool(self._options))


def ray_launch(function: Callable[..., Any] | None = None, /, **options: Unpack[Options]) -> Any:
    """Let a function be a Ray cluster's driver: `sgpu_magic.ray_launch` under its documented name.

    Raises:
        UsageError: An option means nothing or contradicts another.
        TypeError: There is no option of that name.
    """
    if function is not None:
        return RayFunction[..., Any](function, options)
    # what is wrong with the options is told where they stand
    ray_launching.ray_launch(**options)

    def decorate(function: Callable[..., Any]) -> RayFunction[..., Any]:
        return RayFunction(function, options)

    return decorate

"""A function call as it is sent to ranks; payloads refer to this module, so every rank can unpickle it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from sgpu_magic.payload.tensors import own_device

RANK_NAMES = ("rank", "local_rank", "world_size", "device")
"""Parameters that each rank fills in with its own value."""


def name_of(function: object) -> str:
    """The function's display name: its own, that of the function inside a partial, or the object's class."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[object]", function).func
    name = getattr(function, "__name__", "") or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)


def argument_name(function: Callable[..., object], index: int) -> str:
    """Return the parameter's name of positional argument `index`: `x`, `rest[1]`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return f"argument {index}"
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if index < len(names):
        return names[index]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return f"{rest}[{index - len(names)}]"


@dataclass(eq=False, slots=True)
class RankValue:
    """A placeholder for an argument that differs between ranks.

    Args:
        name: One of `RANK_NAMES`.
    """

    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return RankValue, (self.name,)

    def here(self) -> object:
        """The value on this rank, from torchrun's environment variables: notebook variables can't shadow it."""
        return own_device() if self.name == "device" else int(os.environ[self.name.upper()])


@dataclass(eq=False, slots=True)
class FunctionCall:
    """A function with its arguments; calling this object on a rank calls the function there.

    Args:
        function: Any callable.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionCall, (self.function, self.args, self.kwargs)

    @property
    def __name__(self) -> str:
        """The function's name."""
        return name_of(self.function)

    def __call__(self) -> object:
        args = [_here(value) for value in self.args]
        kwargs = {name: _here(value) for name, value in self.kwargs.items()}
        # a decorator may have replaced the function in its module; call the original function here
        function = getattr(self.function, "__sgpu_function__", self.function)
        value = function(*args, **kwargs)
        if inspect.iscoroutine(value):
            import asyncio

            # an `async def` is awaited, like a cell's top-level await
            return asyncio.run(value)
        return value


def _here(value: object) -> object:
    return value.here() if isinstance(value, RankValue) else value

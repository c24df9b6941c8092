"""`serverless_gpu.distributed`: `@distributed` of this package, and a word on pools that the variables choose."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, Unpack

from sgpu_magic.functions.compat import pool_choice
from sgpu_magic.functions.decorator import DistributedFunction, Launcher
from sgpu_magic.functions.options import CallOptions, Options, checked

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_said: set[str] = set()


class ChoosingFunction(DistributedFunction[P, R, T]):
    """A distributed function whose pool the documented variables choose."""

    @property
    def distributed(self) -> Launcher[P, R, T]:
        """Runs the function on every rank. The variables count as they are now, not when it was defined."""
        return Launcher(self.__sgpu_function__, with_chosen_pool(self._options), run_async=self._run_async)


def with_chosen_pool(options: CallOptions) -> CallOptions:
    """Return the options with the pool that the documented variables choose, where they name none themselves.

    Raises:
        UsageError: The settings or the list of pools can't be read.
    """
    if options.pool:
        return options
    choice = pool_choice.choice(os.environ)
    if choice.note and choice.note not in _said:
        _said.add(choice.note)
        sys.stderr.write(f"sgpu: {choice.note}\n")
    return replace(options, pool=choice.pool)


def distributed(
    function: Callable[..., Any] | None = None, /, *, run_async: bool = False, **options: Unpack[Options]
) -> Any:
    """Let a function run on every rank: `sgpu_magic.distributed` under its documented name, with its options.

    Raises:
        UsageError: An option means nothing or contradicts another.
        TypeError: There is no option of that name.
    """
    if function is not None:
        return ChoosingFunction[..., Any, Any](function, options, run_async=run_async)
    # what is wrong with the options is told where they stand
    checked(**options)

    def decorate(function: Callable[..., Any]) -> ChoosingFunction[..., Any, Any]:
        return ChoosingFunction(function, options, run_async=run_async)

    return decorate

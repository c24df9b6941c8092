"""`@distributed`, and what stands in a function's place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, Unpack, cast, overload

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.options import CallOptions, Options, checked
from sgpu_magic.functions.tracebacks import frames_left_out

if TYPE_CHECKING:
    from sgpu_magic.functions.handle import Run

P = ParamSpec("P")
R = TypeVar("R")
# what `.distributed()` returns: every rank's result, or the run's handle
T = TypeVar("T")


class DistributedFunction(Generic[P, R, T]):
    """A function that `@distributed` has been put on.

    Calling it calls the function here, once. Its `distributed` runs it on every rank. One that is sent to ranks, or
    that ranks find in a module, is the plain function there.

    Args:
        function: The function.
        options: As they were given.
        run_async: `.distributed()` returns a `Run` at once.
    """

    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], options: Options, *, run_async: bool = False) -> None:
        function = cast("Callable[P, R]", getattr(function, "__sgpu_function__", function))
        if not callable(function):
            raise UsageError(
                f"@distributed stands before a function, and {function!r} can't be called. Its options have names: "
                "@distributed(gpus=4)."
            )
        functools.update_wrapper(cast("Any", self), function)
        self.__sgpu_function__ = function
        self._given = options
        self._options = checked(**options)
        self._run_async = run_async

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here, once."""
        return self.__sgpu_function__(*args, **kwargs)

    @property
    def distributed(self) -> Launcher[P, R, T]:
        """Runs the function on every rank: `train.distributed(...)`, or `train.distributed.submit(...)`."""
        return Launcher(self.__sgpu_function__, self._options, run_async=self._run_async)

    def options(self, **changes: Unpack[Options]) -> DistributedFunction[P, R, T]:
        """Return the same function with other options, which are those of `@distributed`.

        Those that are not named stay. `train.options(gpus=2).distributed()` leaves `train` itself as it is.

        Raises:
            UsageError: An option means nothing, or contradicts another.
        """
        given = dict(self._given)
        if changes.get("session") is not None:
            # its ranks are what they are
            given = {name: value for name, value in given.items() if name not in ("gpus", "num_gpus", "gpu_type")}
        if {"gpus", "num_gpus"} & changes.keys():
            given = {name: value for name, value in given.items() if name not in ("gpus", "num_gpus")}
        merged = cast("Options", given | dict(changes))
        return DistributedFunction(self.__sgpu_function__, merged, run_async=self._run_async)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A method of a class: called here it has its `self`, and `.distributed` takes it along."""
        if instance is None:
            return self
        bound = cast("Any", self.__sgpu_function__).__get__(instance, owner)
        return DistributedFunction[..., R, T](bound, self._given, run_async=self._run_async)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By its name where a module has it under that; else with its function."""
        name, module = getattr(self, "__qualname__", ""), sys.modules.get(getattr(self, "__module__", None) or "")
        found: object = module if module is not None and module.__name__ != "__main__" else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        # a session is this process's, and values of `env` are often secrets
        given = {key: value for key, value in self._given.items() if key not in ("session", "env")}
        return _again, (self.__sgpu_function__, given, self._run_async)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._given.items() if name != "env")
        return f"<distributed {getattr(self, '__qualname__', self.__sgpu_function__)}({given})>"


class Launcher(Generic[P, R, T]):
    """Runs one function on every rank of a pool; `train.distributed` is one.

    Args:
        function: The function.
        options: Where and how.
        run_async: Calling it returns a `Run` at once.
    """

    def __init__(self, function: Callable[P, R], options: CallOptions, *, run_async: bool) -> None:
        self._function = function
        self._options = options
        self._run_async = run_async

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function on every rank and return the list of what they returned, by rank.

        Parameters named `rank`, `local_rank`, `world_size` and `device` that are left out and have no default are
        filled in by each rank. In a notebook the run is shown below the cell while it goes on; in a program its ranks'
        lines are printed as they come. An interrupt cancels it. With `run_async=True` it is `submit`.

        Raises:
            TypeError: The arguments do not fit the function. Nothing has started.
            SerializationError: The function or an argument can't be pickled. Nothing has started.
            CapacityError: The pool can't place the run.
            RunCancelled: It was cancelled. In a thread other than the main one `CancelledError` is raised instead.
            Exception: What the culprit rank raised, by its own type where that exists here; it has `rank`, `run_id`
                and `remote_traceback`.
        """
        from sgpu_magic.functions import launch

        if self._run_async:
            return cast("T", self.submit(*args, **kwargs))
        with frames_left_out:
            return cast("T", launch.run_here(self._function, args, kwargs, self._options))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Start the function on every rank and return the run's handle at once; arguments as for a call.

        Nothing is shown until the handle's `show()`. The run is cancelled when this process ends.

        Raises:
            TypeError: The arguments do not fit the function.
            SerializationError: The function or an argument can't be pickled.
            CapacityError: The pool can't place the run.
        """
        from sgpu_magic.functions import launch

        with frames_left_out:
            return launch.start(self._function, args, kwargs, self._options)

    def __repr__(self) -> str:
        return f"<{getattr(self._function, '__qualname__', self._function)}.distributed>"


class _Decorator:
    """`@distributed(...)` with its options, before it has seen the function."""

    def __init__(self, options: Options, *, run_async: bool) -> None:
        self._options = options
        self._run_async = run_async

    def __call__(self, function: Callable[P, R]) -> DistributedFunction[P, R, list[R]]:
        return DistributedFunction(function, self._options, run_async=self._run_async)


class _AsyncDecorator(_Decorator):
    """The same with `run_async=True`: `.distributed()` returns a `Run`."""

    if TYPE_CHECKING:

        def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, function: Callable[P, R]
        ) -> DistributedFunction[P, R, Run[R]]: ...


@overload
def distributed(function: Callable[P, R], /) -> DistributedFunction[P, R, list[R]]: ...
@overload
def distributed(*, run_async: Literal[True], **options: Unpack[Options]) -> _AsyncDecorator: ...
@overload
def distributed(*, run_async: Literal[False] = False, **options: Unpack[Options]) -> _Decorator: ...
def distributed(
    function: Callable[..., Any] | None = None, /, *, run_async: bool = False, **options: Unpack[Options]
) -> Any:
    """Let a function run on every rank of a pool: `train.distributed(...)`.

        @distributed(gpus=4, gpu_type="a10")
        def train(rank, world_size, lr=0.1):
            ...
            return loss

        losses = train.distributed(lr=0.2)        # by rank
        run = train.distributed.submit(lr=0.2)    # at once; run.result() waits
        train.options(gpus=2).distributed()
        train(0, 1)                               # here, once

    Each rank stands where this process stands, in its process group, as a cell of `%%distributed` does.

    It runs on a lease of its own; while a session is connected here whose lease has enough ranks of that type, in new
    processes on that lease; with `session=` in that session's own ranks.

    Args:
        function: The function when it stands without parentheses: `@distributed`.
        run_async: `.distributed()` returns a `Run` at once.
        options: See `Options`: gpus (or num_gpus), gpu_type, remote, timeout, wait, grace, retries, retry_on, env,
            name, exclude, allow_busy, pool, ui, session.

    Raises:
        UsageError: An option means nothing or contradicts another; `remote=True` lacks `gpu_type`.
        TypeError: There is no option of that name.
    """
    if function is not None:
        return DistributedFunction[..., Any, Any](function, options, run_async=run_async)
    # what is wrong with the options is told where they stand
    checked(**options)
    return (_AsyncDecorator if run_async else _Decorator)(options, run_async=run_async)


def _again(function: Callable[..., Any], options: Options, run_async: bool) -> DistributedFunction[..., Any, Any]:
    """The same object where its pickle stream is read."""
    return DistributedFunction(function, options, run_async=run_async)

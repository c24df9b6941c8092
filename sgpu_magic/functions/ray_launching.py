"""`@ray_launch`: a function that is the driver of a Ray cluster, which is made for it on the leased devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, cast

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.options import CallOptions, Options, checked
from sgpu_magic.functions.tracebacks import frames_left_out

if TYPE_CHECKING:
    from sgpu_magic.functions.handle import Run

P = ParamSpec("P")
R = TypeVar("R")


class RayFunction(Generic[P, R]):
    """A function that `@ray_launch` has been put on.

    Calling it calls the function here, once. Its `distributed` runs it as the driver of a Ray cluster of its own.

    Args:
        function: The driver.
        options: As they were given.
    """

    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        if not callable(function):
            raise UsageError(
                f"@ray_launch stands before a function, and {function!r} can't be called. Its options have names: "
                "@ray_launch(gpus=4)."
            )
        functools.update_wrapper(cast("Any", self), function)
        self.__sgpu_function__ = function
        self._given = options
        self._options = _checked(options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here, once."""
        return self.__sgpu_function__(*args, **kwargs)

    @property
    def distributed(self) -> RayLauncher[P, R]:
        """Runs the function with a Ray cluster: `tune.distributed(...)`, or `tune.distributed.submit(...)`."""
        return RayLauncher(self.__sgpu_function__, self._options)

    def options(self, **changes: Unpack[Options]) -> RayFunction[P, R]:
        """Return the same function with other options; those that are not named stay.

        Raises:
            UsageError: An option means nothing, or contradicts another.
        """
        given = dict(self._given)
        if {"gpus", "num_gpus"} & changes.keys():
            given = {name: value for name, value in given.items() if name not in ("gpus", "num_gpus")}
        return RayFunction(self.__sgpu_function__, cast("Options", given | dict(changes)))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """On a rank it is the function; values of `env` are often secrets and stay here."""
        return _again, (self.__sgpu_function__, {name: value for name, value in self._given.items() if name != "env"})

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._given.items() if name != "env")
        return f"<ray_launch {getattr(self, '__qualname__', self.__sgpu_function__)}({given})>"


class RayLauncher(Generic[P, R]):
    """Runs one function as a Ray cluster's driver; `tune.distributed` is one.

    Args:
        function: The function.
        options: Where and how.
    """

    def __init__(self, function: Callable[P, R], options: CallOptions) -> None:
        self._function = function
        self._options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Start a Ray cluster on the leased devices, call the function in its driver and return what it returns.

        In it `ray.init()` finds the cluster. The cluster has the lease's GPUs, ends with the function, and nobody else
        can use it. An interrupt cancels the run.

        Raises:
            TypeError: The arguments do not fit the function. Nothing has started.
            SerializationError: The function, an argument or what it returned can't be pickled.
            EnvironmentFailed: The ranks' Python has no Ray, or Ray does not start in it.
            CapacityError: The pool can't place the run.
            RunCancelled: It was cancelled.
            Exception: What the function raised. Of an error in a Ray task or actor it is the error itself, with the
                task's own lines.
        """
        from sgpu_magic.functions import launch

        with frames_left_out:
            (value,) = launch.run_here(self._function, args, cast("Mapping[str, object]", kwargs), self._options)
            return cast("R", value)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Start it and return the run's handle at once; its result is a list of one, what the driver returned.

        Raises:
            TypeError: The arguments do not fit the function.
            SerializationError: The function or an argument can't be pickled.
            CapacityError: The pool can't place the run.
        """
        from sgpu_magic.functions import launch

        with frames_left_out:
            return launch.start(self._function, args, cast("Mapping[str, object]", kwargs), self._options)

    def __repr__(self) -> str:
        return f"<{getattr(self._function, '__qualname__', self._function)}.distributed>"


def ray_launch(**options: Unpack[Options]) -> Callable[[Callable[P, R]], RayFunction[P, R]]:
    """Let a function be the driver of a Ray cluster on the pool's devices.

        @ray_launch(gpus=4, gpu_type="a10")
        def tune():
            import ray
            ray.init()
            return ray.get([trial.remote(lr) for lr in rates])

        best = tune.distributed()      # on the cluster, which ends with it
        tune()                         # here, once

    The cluster is the run's own: on each node of the lease with that node's GPUs, with the Ray of the ranks' packages.
    The function runs in rank 0; the other ranks hold their devices. Parameters named `rank`, `local_rank`,
    `world_size` and `device` are filled in as for `@distributed`.

    Args:
        options: Those of `@distributed`, but for session and profile.

    Raises:
        UsageError: An option means nothing or contradicts another.
        TypeError: There is no option of that name.
    """
    # what is wrong with the options is told where they stand
    _checked(options)

    def decorate(function: Callable[P, R]) -> RayFunction[P, R]:
        return RayFunction(function, options)

    return decorate


def _checked(options: Options) -> CallOptions:
    found = checked(**options)
    if found.session is not None:
        raise UsageError(
            "a Ray cluster is started on new ranks, and session= names some that stay. Leave session out: the run gets "
            "devices of its own."
        )
    if found.profile:
        raise UsageError(
            "profile keeps a trace of every rank, and with @ray_launch the work is done in Ray's own workers. Leave it "
            "out; ray.timeline() in the function, or the cluster's dashboard, shows them."
        )
    return replace(found, ray=True)


def _again(function: Callable[..., Any], options: Options) -> RayFunction[..., Any]:
    """The same object where its pickle stream is read."""
    return RayFunction(function, options)

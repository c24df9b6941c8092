"""`@distributed` and `@ray_launch`, and what stands in a function's place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, cast, overload

from msgspec.structs import replace

from sgpu_magic.errors import UsageError
from sgpu_magic.options.asked import CallOptions
from sgpu_magic.options.python_form import Options, checked

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
    _decorator = "distributed"

    def __init__(self, function: Callable[P, R], options: Options, run_async: bool = False) -> None:
        function = cast("Callable[P, R]", getattr(function, "__sgpu_function__", function))
        if not callable(function):
            raise UsageError(
                f"@{self._decorator} stands before a function, and {function!r} can't be called. Its options have "
                f"names: @{self._decorator}(gpus=4)."
            )
        functools.update_wrapper(cast("Any", self), function)
        self.__sgpu_function__ = function
        self._given = options
        self._options = self._checked(options)
        self._run_async = run_async

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here, once."""
        return self.__sgpu_function__(*args, **kwargs)

    @property
    def distributed(self) -> Launcher[P, R, T]:
        """Runs the function on every rank: `train.distributed(...)`, or `train.distributed.submit(...)`."""
        return Launcher(self.__sgpu_function__, self._options_now(), run_async=self._run_async)

    def options(self, **changes: Unpack[Options]) -> Self:
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
        return type(self)(self.__sgpu_function__, merged, self._run_async)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A method of a class: called here it has its `self`, and `.distributed` takes it along."""
        if instance is None:
            return self
        bound = cast("Any", self.__sgpu_function__).__get__(instance, owner)
        return type(self)(bound, self._given, self._run_async)

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
        return type(self), (self.__sgpu_function__, given, self._run_async)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._given.items() if name != "env")
        return f"<{self._decorator} {getattr(self, '__qualname__', self.__sgpu_function__)}({given})>"

    def _options_now(self) -> CallOptions:
        """The options as they count for a run that is started now."""
        return self._options

    @staticmethod
    def _checked(options: Options) -> CallOptions:
        return checked(**options)


class Launcher(Generic[P, R, T]):
    """Runs one function on every rank of a pool; `train.distributed` is one.

    Args:
        function: The function.
        options: Where and how.
        run_async: Calling it returns a `Run` at once.
    """

    def __init__(self, function: Callable[P, R], options: CallOptions, *, run_async: bool = False) -> None:
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
        from sgpu_magic.functions import handle, launch

        if self._run_async:
            return cast("T", self.submit(*args, **kwargs))
        with handle.frames_left_out:
            return cast("T", launch.run_here(self._function, args, kwargs, self._options))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Start the function on every rank and return the run's handle at once; arguments as for a call.

        Nothing is shown until the handle's `show()`. The run is cancelled when this process ends.

        Raises:
            TypeError: The arguments do not fit the function.
            SerializationError: The function or an argument can't be pickled.
            CapacityError: The pool can't place the run.
        """
        from sgpu_magic.functions import handle, launch

        with handle.frames_left_out:
            return launch.start(self._function, args, kwargs, self._options)

    def __repr__(self) -> str:
        return f"<{getattr(self._function, '__qualname__', self._function)}.distributed>"


@overload
def distributed(function: Callable[P, R], /) -> DistributedFunction[P, R, list[R]]: ...
@overload
def distributed(
    *, run_async: Literal[True], **options: Unpack[Options]
) -> Callable[[Callable[P, R]], DistributedFunction[P, R, Run[R]]]: ...
@overload
def distributed(
    *, run_async: Literal[False] = False, **options: Unpack[Options]
) -> Callable[[Callable[P, R]], DistributedFunction[P, R, list[R]]]: ...
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
    # what is wrong with the options is told where they stand
    checked(**options)
    decorate = functools.partial(DistributedFunction[..., Any, Any], options=options, run_async=run_async)
    return decorate if function is None else decorate(function)


class RayFunction(DistributedFunction[P, R, R]):
    """A function that `@ray_launch` has been put on.

    Calling it calls the function here, once. Its `distributed` runs it as the driver of a Ray cluster of its own.
    """

    _decorator = "ray_launch"

    @property
    def distributed(self) -> RayLauncher[P, R]:
        """Runs the function with a Ray cluster: `tune.distributed(...)`, or `tune.distributed.submit(...)`."""
        return RayLauncher(self.__sgpu_function__, self._options_now())

    @staticmethod
    def _checked(options: Options) -> CallOptions:
        return check_ray_options(options)


class RayLauncher(Launcher[P, R, R]):
    """Runs one function as a Ray cluster's driver; `tune.distributed` is one.

    The result of a run that `submit` starts is a list of one, what the driver returned.
    """

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
        from sgpu_magic.functions import handle

        with handle.frames_left_out:
            (value,) = cast("list[R]", super().__call__(*args, **kwargs))
            return value


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
    check_ray_options(options)

    def decorate(function: Callable[P, R]) -> RayFunction[P, R]:
        return RayFunction(function, options)

    return decorate


def check_ray_options(options: Options) -> CallOptions:
    """Check the options of `@ray_launch`.

    Raises:
        UsageError: One means nothing, or is not possible with Ray.
    """
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

"""`@distributed` and `@ray_launch`, and the objects that they return."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, cast, overload

from msgspec.structs import replace

from sgpu_magic.errors import UsageError
from sgpu_magic.options.option_records import CallOptions
from sgpu_magic.options.python_form import Options, checked

if TYPE_CHECKING:
    from sgpu_magic.runs.handle import Run

P = ParamSpec("P")
R = TypeVar("R")
# what `.distributed()` returns: every rank's result, or the run's handle
T = TypeVar("T")


class DistributedFunction(Generic[P, R, T]):
    """A function decorated with `@distributed`.

    Call it to run the function locally, once. Call its `distributed` attribute to run it on every rank. On a rank,
    whether sent there or imported from a module, it is the plain function.

    Args:
        function: The function.
        options: The options as passed to the decorator.
        run_async: If true, `.distributed()` returns a `Run` immediately.
    """

    __name__: str
    __wrapped__: Callable[P, R]
    _decorator = "distributed"

    def __init__(self, function: Callable[P, R], options: Options, run_async: bool = False) -> None:
        function = cast("Callable[P, R]", getattr(function, "__sgpu_function__", function))
        if not callable(function):
            raise UsageError(
                f"@{self._decorator} decorates a function, and {function!r} is not callable. Give its options by "
                f"name: @{self._decorator}(gpus=4)."
            )
        functools.update_wrapper(cast("Any", self), function)
        self.__sgpu_function__ = function
        self._given = options
        self._options = self._checked(options)
        self._run_async = run_async

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function locally, once."""
        return self.__sgpu_function__(*args, **kwargs)

    @property
    def distributed(self) -> Launcher[P, R, T]:
        """Runs the function on every rank: `train.distributed(...)` or `train.distributed.submit(...)`."""
        return Launcher(self.__sgpu_function__, self._options_now(), run_async=self._run_async)

    def options(self, **changes: Unpack[Options]) -> Self:
        """Return a copy of the function with other options, which are those of `@distributed`.

        Options that you omit are kept, except that `session` drops `gpus`, `num_gpus` and `gpu_type`.
        `train.options(gpus=2).distributed()` does not change `train`.

        Raises:
            UsageError: An option is invalid or contradicts another.
        """
        # a session's ranks and devices are fixed
        dropped = {"gpus", "num_gpus", "gpu_type"} if changes.get("session") is not None else set[str]()
        if {"gpus", "num_gpus"} & changes.keys():
            dropped |= {"gpus", "num_gpus"}
        given = {name: value for name, value in self._given.items() if name not in dropped}
        return type(self)(self.__sgpu_function__, cast("Options", given | dict(changes)), self._run_async)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind a method: a local call gets `self`, and `.distributed` sends `self` to the ranks."""
        if instance is None:
            return self
        bound = cast("Any", self.__sgpu_function__).__get__(instance, owner)
        return type(self)(bound, self._given, self._run_async)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by name if the module has this object under its name, otherwise with the function."""
        name, module = getattr(self, "__qualname__", ""), sys.modules.get(getattr(self, "__module__", None) or "")
        found: object = module if module is not None and module.__name__ != "__main__" else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        # a session belongs to this process, and values of `env` are often secrets
        given = {key: value for key, value in self._given.items() if key not in ("session", "env")}
        return type(self), (self.__sgpu_function__, given, self._run_async)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._given.items() if name != "env")
        return f"<{self._decorator} {getattr(self, '__qualname__', self.__sgpu_function__)}({given})>"

    def _options_now(self) -> CallOptions:
        """Return the options for a run that starts now."""
        return self._options

    @staticmethod
    def _checked(options: Options) -> CallOptions:
        return checked(**options)


class Launcher(Generic[P, R, T]):
    """Runs one function on every rank, such as `train.distributed`.

    Args:
        function: The function.
        options: Where and how to run it.
        run_async: If true, calling it returns a `Run` immediately.
    """

    def __init__(self, function: Callable[P, R], options: CallOptions, *, run_async: bool = False) -> None:
        self._function = function
        self._options = options
        self._run_async = run_async

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function on every rank and return the list of results, by rank.

        Each rank fills in the parameters `rank`, `local_rank`, `world_size` and `device` if you omit them and they
        have no default. In a notebook, the run is shown below the cell while it runs; in a program, the ranks' output
        is printed as it arrives. An interrupt cancels the run. With `run_async=True`, this is the same as `submit`.

        Raises:
            TypeError: The arguments do not match the function's signature. Nothing is started.
            SerializationError: The function or an argument can't be pickled. Nothing is started.
            CapacityError: The pool can't place the run.
            RunCancelled: The run was cancelled. Outside the main thread, `concurrent.futures.CancelledError` is raised
                instead, and in an asyncio task `asyncio.CancelledError`.
            Exception: The exception of the rank that failed first, as its own type if that exists in this process,
                with the attributes `rank`, `run_id`, `remote_traceback` and `failures`.
        """
        from sgpu_magic.functions import launch
        from sgpu_magic.payload.call import FunctionCall
        from sgpu_magic.runs import handle

        if self._run_async:
            return cast("T", self.submit(*args, **kwargs))
        with handle.frames_left_out:
            return cast("T", launch.run_here(FunctionCall(self._function, args, kwargs), self._options))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Start the function on every rank and return the run's handle immediately; arguments as for a call.

        The run is not shown until you call the handle's `show()`. It is cancelled when this process ends.

        Raises:
            TypeError: The arguments do not match the function's signature.
            SerializationError: The function or an argument can't be pickled.
            CapacityError: The pool can't place the run.
        """
        from sgpu_magic.functions import launch
        from sgpu_magic.payload.call import FunctionCall
        from sgpu_magic.runs import handle

        with handle.frames_left_out:
            return launch.start(FunctionCall(self._function, args, kwargs), self._options)

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
    """Make a function runnable on every rank of a pool with `train.distributed(...)`.

        @distributed(gpus=4, gpu_type="a10")
        def train(rank, world_size, lr=0.1):
            ...
            return loss

        losses = train.distributed(lr=0.2)        # by rank
        run = train.distributed.submit(lr=0.2)    # at once; run.result() waits
        train.options(gpus=2).distributed()
        train(0, 1)                               # here, once

    Each rank runs like a `%%distributed` cell: in this process's working directory, with an initialized process group.

    Each run leases its own devices. If a connected session in this process has enough ranks of that type, the run
    starts new processes on the session's devices instead. With `session=`, it runs in that session's own ranks.

    Args:
        function: The function, if you use the decorator without parentheses: `@distributed`.
        run_async: If true, `.distributed()` returns a `Run` immediately.
        options: The options that `Options` and `SharedOptions` list, such as `gpus`, `gpu_type`, `timeout`, `retries`,
            `env`, `pool` and `session`.

    Raises:
        UsageError: An option is invalid or contradicts another, or `remote=True` is given without `gpu_type`.
        TypeError: An option is unknown.
    """
    # invalid options are reported where they are given
    checked(**options)
    decorate = functools.partial(DistributedFunction[..., Any, Any], options=options, run_async=run_async)
    return decorate if function is None else decorate(function)


class RayFunction(DistributedFunction[P, R, R]):
    """A function decorated with `@ray_launch`.

    Call it to run the function locally, once. Call its `distributed` attribute to run it as the driver of a new Ray
    cluster.
    """

    _decorator = "ray_launch"

    @property
    def distributed(self) -> RayLauncher[P, R]:
        """Runs the function with a Ray cluster: `tune.distributed(...)` or `tune.distributed.submit(...)`."""
        return RayLauncher(self.__sgpu_function__, self._options_now())

    @staticmethod
    def _checked(options: Options) -> CallOptions:
        return check_ray_options(options)


class RayLauncher(Launcher[P, R, R]):
    """Runs one function as the driver of a Ray cluster, such as `tune.distributed`.

    `submit` returns a `Run` whose result is a list with one element, the driver's return value.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Start a Ray cluster on the leased devices, call the function in its driver and return its result.

        In the function, `ray.init()` connects to the cluster. The cluster has the lease's GPUs, stops when the
        function ends, and is not accessible to others. An interrupt cancels the run.

        Raises:
            TypeError: The arguments do not match the function's signature. Nothing is started.
            SerializationError: The function, an argument or the result can't be pickled.
            EnvironmentFailed: Ray is not installed in the ranks' Python, or does not start in it.
            CapacityError: The pool can't place the run.
            RunCancelled: The run was cancelled.
            Exception: The exception that the function raised. An error in a Ray task or actor is raised as the
                original exception, with the lines of the task.
        """
        from sgpu_magic.runs import handle

        with handle.frames_left_out:
            (value,) = cast("list[R]", super().__call__(*args, **kwargs))
            return value


def ray_launch(**options: Unpack[Options]) -> Callable[[Callable[P, R]], RayFunction[P, R]]:
    """Make a function the driver of a Ray cluster on the pool's devices.

        @ray_launch(gpus=4, gpu_type="a10")
        def tune():
            import ray
            ray.init()
            return ray.get([trial.remote(lr) for lr in rates])

        best = tune.distributed()      # on the cluster, which ends with it
        tune()                         # here, once

    Each run has its own cluster, which spans the nodes of the lease and their leased GPUs. It uses the Ray version of
    the ranks' packages. The function runs in rank 0; the other ranks only hold their devices. The parameters `rank`,
    `local_rank`, `world_size` and `device` are filled in as for `@distributed`.

    Args:
        options: The options of `@distributed`, except `session` and `profile`.

    Raises:
        UsageError: An option is invalid or contradicts another.
        TypeError: An option is unknown.
    """
    # invalid options are reported where they are given
    check_ray_options(options)
    return lambda function: RayFunction(function, options)


def check_ray_options(options: Options) -> CallOptions:
    """Check the options of `@ray_launch`.

    Raises:
        UsageError: An option is invalid, or not supported with Ray.
    """
    found = checked(**options)
    if found.session is not None:
        raise UsageError(
            "a Ray cluster starts on new ranks, and session= names existing ones. Leave session out: the run gets its "
            "own devices."
        )
    if found.profile:
        raise UsageError(
            "profile records a trace of every rank, and with @ray_launch Ray's own workers do the work. Leave it out; "
            "ray.timeline() in the function, or the cluster's dashboard, shows them."
        )
    return replace(found, ray=True)

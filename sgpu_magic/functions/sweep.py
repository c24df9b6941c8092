"""`map`: one run per item, for parameter sweeps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar, Unpack, cast, overload

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.sweeping import Sweeping, Task
from sgpu_magic.options.python_form import SharedOptions, checked
from sgpu_magic.options.values import rank_count
from sgpu_magic.runs.handle import Run, frames_left_out
from sgpu_magic.runs.kernel_context import kernel_context

T = TypeVar("T")
R = TypeVar("R")


class Failed(msgspec.Struct, Generic[T], frozen=True):
    """An item of a sweep that failed.

    Args:
        index: The item's position, from 0.
        item: The item.
        error: The exception, as its own type if that exists in this process.
        run: The item's run, with its logs; None if the item could not be submitted.
    """

    index: int
    item: T
    error: BaseException
    run: Run[Any] | None


class Sweep(Sequence[R], Generic[T, R]):
    """The results and failures of a sweep, in the order of its items.

    As with `concurrent.futures.Executor.map`, a failed item raises its exception when you access it (`sweep[3]`,
    `for value in sweep`), unless the sweep has `return_exceptions=True`. `results` and `failures` never raise.

    Attributes:
        items: The items.
        runs: Each item's run; None if the item could not be submitted.
    """

    def __init__(self, tasks: Iterable[Task[T, R]], *, return_exceptions: bool) -> None:
        self._tasks = sorted(tasks, key=lambda task: task.index)
        self._return_exceptions = return_exceptions
        self.items: list[T] = [task.item for task in self._tasks]
        self.runs: list[Run[R] | None] = [task.run for task in self._tasks]

    @property
    def results(self) -> list[R]:
        """The results of the items that succeeded, in the order of the items."""
        return [cast("R", task.value) for task in self._tasks if task.error is None]

    @property
    def pairs(self) -> list[tuple[T, R]]:
        """Each item that succeeded, with its result."""
        return [(task.item, cast("R", task.value)) for task in self._tasks if task.error is None]

    @property
    def failures(self) -> list[Failed[T]]:
        """The items that failed, with their exceptions."""
        return [Failed(task.index, task.item, task.error, task.run) for task in self._tasks if task.error is not None]

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        """Return one item's result, or a list for a slice.

        Raises:
            Exception: The item's exception, if the item failed.
        """
        with frames_left_out:
            if isinstance(index, slice):
                return [task.outcome(self._return_exceptions) for task in self._tasks[index]]
            return self._tasks[index].outcome(self._return_exceptions)

    def __repr__(self) -> str:
        failed = len(self.failures)
        failures = f", {failed} failed" if failed else ""
        return f"<Sweep of {len(self)}: {len(self) - failed} done{failures}>"


@overload
def map(
    fn: Callable[[T], R],
    items: Iterable[T],
    *,
    gpus_per_task: int = 1,
    gpu_type: Any = None,
    in_order: Literal[True] = True,
    return_exceptions: bool = False,
    at_once: int | None = None,
    **options: Unpack[SharedOptions],
) -> Sweep[T, R]: ...
@overload
def map(
    fn: Callable[[T], R],
    items: Iterable[T],
    *,
    gpus_per_task: int = 1,
    gpu_type: Any = None,
    in_order: Literal[False],
    return_exceptions: bool = False,
    at_once: int | None = None,
    **options: Unpack[SharedOptions],
) -> SweepResults[R]: ...
def map(
    fn: Callable[[T], R],
    items: Iterable[T],
    *,
    gpus_per_task: int = 1,
    gpu_type: Any = None,
    in_order: bool = True,
    return_exceptions: bool = False,
    at_once: int | None = None,
    **options: Unpack[SharedOptions],
) -> Sweep[T, R] | SweepResults[R]:
    """Call `fn(item)` for every item, each in a separate run on the pool's devices.

        def trial(lr):
            ...
            return accuracy

        sweep = sgpu_magic.map(trial, [0.1, 0.01, 0.001])
        best, lr = max((accuracy, lr) for lr, accuracy in sweep.pairs)

    Runs are submitted only as devices become free, so `items` can be long or a generator. A progress bar is shown
    meanwhile. While the pool does not answer, further items wait. An interrupt cancels the remaining runs and raises.
    If `map` raises before the sweep ends, the exception has the results so far as `.results` and a `Sweep` of the
    finished items as `.sweep`.

    Args:
        fn: Function to call with one item; `rank`, `world_size` ... are filled in as for `@distributed`. A function
            decorated with `@distributed` works too.
        items: The items, in the order in which they are submitted.
        gpus_per_task: Number of ranks per run. With more than one, an item's result is that of rank 0; its run has
            the results of all ranks.
        gpu_type: As for `@distributed`.
        in_order: If true, wait for all items and return a `Sweep` in the order of the items. If false, return an
            iterator immediately, which yields results as they arrive and shows the progress while you iterate over
            it; closing it cancels the rest.
        return_exceptions: If true, return an item's exception in place of its result instead of raising it.
        at_once: Maximum number of runs submitted at the same time. Default: as many as the pool has devices for, and
            two more that wait in its queue; on CPU, one rank per core.
        options: The options that `SharedOptions` lists; `timeout` and `max_cost` apply to each run.

    Raises:
        UsageError: An option is invalid or contradicts another.
        TypeError: `fn` can't be called with one item.
        SerializationError: `fn` or the first item can't be pickled.
        CapacityError: The pool can't place such a run.
        RunCancelled: The sweep was interrupted.
    """
    function = cast("Callable[..., object]", getattr(fn, "__sgpu_function__", fn))
    rank_count("gpus_per_task", gpus_per_task)
    if at_once is not None and (isinstance(at_once, bool) or at_once < 1):
        raise UsageError(f"at_once={at_once!r} is not possible: it must be at least 1.")
    call_options = checked(gpus=gpus_per_task, gpu_type=gpu_type, **options)
    total = len(items) if isinstance(items, Sequence) else None
    sweeping = Sweeping[T, R](kernel_context(), function, call_options, total)
    completed = sweeping.tasks(items, at_once)
    if not in_order:
        return SweepResults(completed, return_exceptions)
    tasks: list[Task[T, R]] = []
    try:
        with frames_left_out:
            tasks.extend(completed)
    except BaseException as error:
        sweep_result = Sweep([*tasks, *sweeping.late], return_exceptions=return_exceptions)
        vars(error).update(sweep=sweep_result, results=sweep_result.results)
        raise
    return Sweep(tasks, return_exceptions=return_exceptions)


class SweepResults(Iterator[R], Generic[R]):
    """Iterator over a sweep's results as they arrive. If `next` raises for an item, call it again for the others.

    The remaining runs are cancelled at the end of a `with` block, by `close()`, and when the iterator is
    garbage-collected.
    """

    def __init__(self, tasks: Generator[Task[Any, R]], return_exceptions: bool) -> None:
        self._tasks = tasks
        self._return_exceptions = return_exceptions

    def __next__(self) -> R:
        """Return the next result.

        Raises:
            Exception: The item's exception, if the item failed, unless the sweep has `return_exceptions=True`.
            RunCancelled: The sweep was interrupted.
        """
        with frames_left_out:
            return next(self._tasks).outcome(self._return_exceptions)

    def close(self) -> None:
        """Cancel the remaining runs."""
        self._tasks.close()

    def __enter__(self) -> SweepResults[R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

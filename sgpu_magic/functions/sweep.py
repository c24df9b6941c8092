"""`map`: one run per item, for sweeps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar, Unpack, cast, overload

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.handle import Run, frames_left_out
from sgpu_magic.functions.sweeping import Sweeping, Task
from sgpu_magic.options.python_form import SharedOptions, checked
from sgpu_magic.options.values import rank_count
from sgpu_magic.runs.workplace import workplace

T = TypeVar("T")
R = TypeVar("R")


class Failed(msgspec.Struct, Generic[T], frozen=True):
    """An item of a sweep that has no result.

    Args:
        index: Its place among the items, from 0.
        item: The item.
        error: What it failed with, by its own type where that exists here.
        run: Its run, with its logs; None when the item could not even be sent.
    """

    index: int
    item: T
    error: BaseException
    run: Run[Any] | None


class Sweep(Sequence[R], Generic[T, R]):
    """What came of a sweep, in the order of its items: results, and failures beside them.

    As from `concurrent.futures.Executor.map`, an item that failed raises what it failed with when its turn comes
    (`sweep[3]`, `for value in sweep`), unless the sweep returns exceptions. `results` and `failures` never raise.

    Attributes:
        items: The items.
        runs: Each item's run; None where it could not even be sent.
    """

    def __init__(self, items: Sequence[T], outcomes: Sequence[Task[T, R]], *, return_exceptions: bool) -> None:
        self.items: list[T] = list(items)
        self.runs: list[Run[R] | None] = [task.run for task in outcomes]
        self._tasks = list(outcomes)
        self._return_exceptions = return_exceptions

    @property
    def results(self) -> list[R]:
        """The results of the items that did not fail, in the order of the items."""
        return [cast("R", task.value) for task in self._tasks if task.error is None]

    @property
    def pairs(self) -> list[tuple[T, R]]:
        """Each item that did not fail, with its result."""
        return [(task.item, cast("R", task.value)) for task in self._tasks if task.error is None]

    @property
    def failures(self) -> list[Failed[T]]:
        """The items that failed, with what they failed with."""
        return [Failed(task.index, task.item, task.error, task.run) for task in self._tasks if task.error is not None]

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        """One item's result, or a list of several.

        Raises:
            Exception: What the item failed with.
        """
        with frames_left_out:
            if isinstance(index, slice):
                return [task.outcome(self._return_exceptions) for task in self._tasks[index]]
            return self._tasks[index].outcome(self._return_exceptions)

    def __repr__(self) -> str:
        failed = len(self.failures)
        told = f", {failed} failed" if failed else ""
        return f"<Sweep of {len(self)}: {len(self) - failed} done{told}>"


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
    """Call `fn(item)` for every item, each in a run of its own over the pool's devices.

        def trial(lr):
            ...
            return accuracy

        sweep = sgpu_magic.map(trial, [0.1, 0.01, 0.001])
        best, lr = max((accuracy, lr) for lr, accuracy in sweep.pairs)

    Only as many runs are with the pool as its devices can take, and two more, so that `items` may be long, or a
    generator. A progress bar is shown meanwhile. While the pool does not answer, further items wait. An interrupt
    cancels what runs and raises; whatever `map` raises before its end has the results so far as `.results`, and as
    a `Sweep` of the items that were over as `.sweep`.

    Args:
        fn: Called with one item; `rank`, `world_size` ... are filled in as for `@distributed`, whose function may be
            given too.
        items: What it is called with, one after the other.
        gpus_per_task: Ranks of each run. With more than one, an item's result is what rank 0 returned; its run has
            all of them.
        gpu_type: As for `@distributed`.
        in_order: True waits for all and returns a `Sweep` in the order of the items. False returns an iterator at
            once, which gives results as they come and shows the progress while it is iterated over; leaving it
            cancels the rest.
        return_exceptions: What an item failed with is given in the place of its result, and not raised.
        at_once: Most runs at the same time. Default: as many as the pool has devices for; on CPU one for each core.
        options: remote, timeout (of one run), wait, grace, retries, retry_on, env, name, exclude, env_version, torch,
            allow_build, track, profile, max_cost (of one run), allow_busy, pool, ui: as for `@distributed`.

    Raises:
        TypeError: `fn` can't be called with one item.
        SerializationError: `fn` or the first item can't be pickled.
        CapacityError: The pool can't place such a run.
        RunCancelled: The sweep was interrupted.
    """
    function = cast("Callable[..., object]", getattr(fn, "__sgpu_function__", fn))
    rank_count("gpus_per_task", gpus_per_task)
    if at_once is not None and (isinstance(at_once, bool) or at_once < 1):
        raise UsageError(f"at_once={at_once!r} is not possible: at least one run has to be allowed.")
    call_options = checked(gpus=gpus_per_task, gpu_type=gpu_type, **options)
    total = len(items) if isinstance(items, Sequence) else None
    sweeping = Sweeping[T, R](workplace(), function, call_options, total)
    completed = sweeping.tasks(items, at_once)
    if not in_order:
        return SweepResults(completed, return_exceptions)
    tasks: list[Task[T, R]] = []
    try:
        with frames_left_out:
            tasks.extend(completed)
    except BaseException as error:
        over = _sweep_of([*tasks, *sweeping.late], return_exceptions)
        vars(error).update(sweep=over, results=over.results)
        raise
    return _sweep_of(tasks, return_exceptions)


def _sweep_of(tasks: Iterable[Task[T, R]], return_exceptions: bool) -> Sweep[T, R]:
    ordered = sorted(tasks, key=lambda task: task.index)
    return Sweep([task.item for task in ordered], ordered, return_exceptions=return_exceptions)


class SweepResults(Iterator[R], Generic[R]):
    """A sweep's results as they come. One that raises does not end it: `next` goes on with the others.

    Leaving it cancels what has not ended: at the end of `with`, at `close()`, and when nothing refers to it any more.
    """

    def __init__(self, tasks: Generator[Task[Any, R]], return_exceptions: bool) -> None:
        self._tasks = tasks
        self._return_exceptions = return_exceptions

    def __next__(self) -> R:
        """The next result.

        Raises:
            Exception: What the item failed with, unless the sweep returns exceptions.
            RunCancelled: The sweep was interrupted.
        """
        with frames_left_out:
            return next(self._tasks).outcome(self._return_exceptions)

    def close(self) -> None:
        """Cancel what has not ended."""
        self._tasks.close()

    def __enter__(self) -> SweepResults[R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

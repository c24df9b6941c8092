"""Submits a function call as a run: chooses where it runs, and waits for it or returns its handle."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import CancelledError
from typing import Any

from msgspec.structs import replace

from sgpu_magic.errors import CapacityError, RunCancelled, UsageError
from sgpu_magic.options.asked import CallOptions, RunOptions, check_call
from sgpu_magic.options.table import in_pythons_words
from sgpu_magic.runs.handle import Run
from sgpu_magic.runs.sessions import registry, run_in
from sgpu_magic.runs.submit.pack_call import pack_call
from sgpu_magic.runs.submit.placing import PYTHON_WAYS, placed
from sgpu_magic.runs.submit.spec import Submission, describe
from sgpu_magic.runs.submit.submit import submit
from sgpu_magic.runs.workplace import Workplace, workplace
from sgpu_magic.wire.record import short
from sgpu_magic.wire.states import RunState

_IPYTHON = "IPython.core.interactiveshell"


def run_here(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], options: CallOptions
) -> list[Any]:
    """Run a function on every rank, show the run until it ends, and return the results by rank.

    Raises:
        Exception: As for `Launcher.__call__`.
    """
    place = workplace()
    session = options.session
    with _pinned_to_its_cell(place.shell):
        try:
            if session is not None:
                check_call(session, options)
                prepared = functools.partial(run_in.prepare_call, session, function, args, kwargs, options)
                return run_in.run_in(session.checked(), prepared, options.ui).values
            return _bring_back(place, prepare(place, function, args, kwargs, options), options.ui)
        except RunCancelled as error:
            # a KeyboardInterrupt would end the event loop that waits for this thread, or that runs this task
            if threading.current_thread() is not threading.main_thread():
                raise CancelledError(error.message) from None
            if _is_in_a_task():
                raise asyncio.CancelledError(error.message) from None
            raise


def start(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], options: CallOptions
) -> Run[Any]:
    """Start a function on every rank and return the run's handle.

    Raises:
        Exception: As for `Launcher.submit`.
    """
    place = workplace()
    session = options.session
    if session is None:
        return submitted(place, prepare(place, function, args, kwargs, options))
    check_call(session, options)
    prepare_call = functools.partial(run_in.prepare_call, session, function, args, kwargs, options)
    return run_in.begin_in(session.checked(), prepare_call)


def submitted(place: Workplace, submission: Submission) -> Run[Any]:
    """Submit a call to the pool and return its handle."""
    return Run(place, submit(place.pool_of(submission), submission), RunState.QUEUED)


def prepare(
    place: Workplace,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    options: RunOptions,
    *,
    beside_sessions: bool = True,
) -> Submission:
    """Check, pack and describe a call. Nothing is started if this raises.

    Args:
        place: This process's workplace.
        function: The function that every rank calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: Where and how to run it.
        beside_sessions: Use the devices of a connected session if it has enough of that type.

    Raises:
        TypeError: The arguments do not match the function's signature.
        SgpuError: The function is not callable, something can't be pickled, or the pool does not exist.
    """
    with _in_pythons_words():
        place.wanted_pool(options.pool)
    code = pack_call(place, function, args, kwargs, options)
    session = registry.lending(options) if beside_sessions and not options.ray else None
    if session is not None:
        return describe(place, code, replace(options, fresh=True), session.lends(options.ranks), session)
    with _in_pythons_words():
        options, found = placed(place, options, PYTHON_WAYS)
    return describe(place, code, options, found)


def _bring_back(place: Workplace, submission: Submission, ui: str) -> list[Any]:
    run = submit(place.pool_of(submission), submission)
    result = place.bring_back(run, ui)
    if result is None:
        run_id = short(run.run_id)
        raise RunCancelled(
            f"run {run_id} was detached and continues without this program; Run.from_id({run_id!r}) gets its results.",
            run_id=run.run_id,
        )
    return result.values


@contextlib.contextmanager
def _in_pythons_words() -> Generator[None]:
    """Rewrite errors about the magic's options in terms of the decorator's."""
    try:
        yield
    except UsageError as error:
        raise UsageError(in_pythons_words(error.message)) from None
    except CapacityError as error:
        raise CapacityError(in_pythons_words(error.message)) from None


def _is_in_a_task() -> bool:
    """Return whether an event loop called this, except for a notebook cell: the kernel runs in a loop too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name == "run_code" and frame.f_globals.get("__name__") == _IPYTHON:
            return False
        frame = frame.f_back
    return True


@contextlib.contextmanager
def _pinned_to_its_cell(shell: Any) -> Generator[None]:
    """Keep a thread's output with the cell that runs now; otherwise later cells would get it.

    ipykernel finds a thread's cell in a context variable, which threads that a program starts do not have.
    """
    pin: Any = getattr(shell, "set_thread_parent", None)
    if pin is None or threading.current_thread() is threading.main_thread():
        yield
        return
    tokens = pin(shell.parent_header)
    try:
        yield
    finally:
        shell.reset_thread_parent(tokens)

"""Submits function calls as runs: single calls, and those of a sweep."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import CancelledError
from typing import Any

from msgspec.structs import replace

from sgpu_magic.errors import RunCancelled
from sgpu_magic.options.option_records import CallOptions, RunOptions, check_call
from sgpu_magic.options.table import as_argument, options_spelled
from sgpu_magic.payload.call import FunctionCall
from sgpu_magic.runs.handle import Run
from sgpu_magic.runs.kernel_context import KernelContext, kernel_context
from sgpu_magic.runs.sessions import cell_runner, registry
from sgpu_magic.runs.submit.pack_call import pack_call
from sgpu_magic.runs.submit.spec import Submission, describe
from sgpu_magic.runs.submit.submit import submit
from sgpu_magic.runs.submit.target import with_target
from sgpu_magic.wire.base import RunState, short

_IPYTHON = "IPython.core.interactiveshell"


def run_here(call: FunctionCall, options: CallOptions) -> list[Any]:
    """Call a function on every rank, show the run until it ends, and return the results by rank.

    Raises:
        Exception: As for `Launcher.__call__`.
    """
    context = kernel_context()
    session = options.session
    with context.pinned_to_its_cell(), options_spelled(as_argument):
        try:
            if session is not None:
                check_call(session, options)
                return cell_runner.run_in(
                    session, lambda: cell_runner.prepare_call(session, call, options), options.ui
                ).values
            return _collect(context, prepare(context, call, options), options.ui)
        except RunCancelled as error:
            # a KeyboardInterrupt would end the event loop that waits for this thread, or that runs this task
            if threading.current_thread() is not threading.main_thread():
                raise CancelledError(error.message) from None
            if _is_in_a_task():
                raise asyncio.CancelledError(error.message) from None
            raise


def start(call: FunctionCall, options: CallOptions) -> Run[Any]:
    """Start a function on every rank and return the run's handle.

    Raises:
        Exception: As for `Launcher.submit`.
    """
    context = kernel_context()
    session = options.session
    if session is None:
        return submitted(context, prepare(context, call, options))
    check_call(session, options)
    with options_spelled(as_argument):
        return cell_runner.begin_in(session, lambda: cell_runner.prepare_call(session, call, options))


def submitted(context: KernelContext, submission: Submission) -> Run[Any]:
    """Submit a call to the pool and return its handle."""
    with options_spelled(as_argument):
        return Run(context, submit(context.pool_of(submission), submission), RunState.QUEUED)


def prepare(
    context: KernelContext, call: FunctionCall, options: RunOptions, *, beside_sessions: bool = True
) -> Submission:
    """Check, pack and describe a call. Nothing is started if this raises.

    Args:
        context: The kernel's context.
        call: The function that every rank calls, with its arguments.
        options: Where and how to run it.
        beside_sessions: Use the devices of a connected session if it has enough of that type.

    Raises:
        TypeError: The arguments do not match the function's signature.
        SgpuError: The function is not callable, something can't be pickled, or the pool does not exist.
    """
    with options_spelled(as_argument):
        context.wanted_pool(options.pool)
        code = pack_call(context, call, options)
        session = registry.lending(options) if beside_sessions and not options.ray else None
        if session is not None:
            return describe(context, code, replace(options, fresh=True), session.fresh_target(options.ranks), session)
        options, found = with_target(context, options)
        return describe(context, code, options, found)


def _collect(context: KernelContext, submission: Submission, ui: str) -> list[Any]:
    run = submit(context.pool_of(submission), submission, waits=True)
    result = context.collect(run, ui)
    if result is None:
        run_id = short(run.run_id)
        raise RunCancelled(
            f"run {run_id} was detached and continues without this program; Run.from_id({run_id!r}) gets its results.",
            run_id=run.run_id,
        )
    return result.values


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

"""A function's call becomes a run: where it runs, and the two ways of waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import CancelledError
from typing import Any

from msgspec.structs import replace

from sgpu_magic.errors import CapacityError, RunCancelled, UsageError
from sgpu_magic.functions.handle import Run
from sgpu_magic.options.asked import CallOptions, refuse_in_session
from sgpu_magic.options.table import in_pythons_words
from sgpu_magic.runs.choice.default_choice import PYTHON_WAYS, with_choice
from sgpu_magic.runs.notebook import owner
from sgpu_magic.runs.sessions import Session, registry, run_in
from sgpu_magic.runs.sessions.cells import Prepared, prepare_call
from sgpu_magic.runs.submit import pack_call
from sgpu_magic.runs.submit.submit import Submission, submit
from sgpu_magic.runs.workplace import Workplace, workplace
from sgpu_magic.wire.ids import new_id, short
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunKind, RunState

_IPYTHON = "IPython.core.interactiveshell"


def run_here(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], options: CallOptions
) -> list[Any]:
    """Run a function on every rank, show it while it goes on, and return its results by rank.

    Raises:
        Exception: As `Launcher.__call__`.
    """
    place = workplace()
    session = options.session
    with _pinned_to_its_cell(place.shell):
        try:
            if session is not None:
                prepared = _preparer(session, function, args, kwargs, options)
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
        Exception: As `Launcher.submit`.
    """
    place = workplace()
    session = options.session
    if session is None:
        return submitted(place, prepare(place, function, args, kwargs, options))
    run, prepared = run_in.start_in(session.checked(), _preparer(session, function, args, kwargs, options))
    return Run(place, run, RunState.QUEUED, lambda view: run_in.settle(session, prepared, view))


def submitted(place: Workplace, submission: Submission) -> Run[Any]:
    """Hand a call over to the pool and return its handle."""
    return Run(place, submit(place.pool_of(submission), submission), RunState.QUEUED)


def prepare(
    place: Workplace,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    options: CallOptions,
    *,
    name: str = "",
    beside_sessions: bool = True,
) -> Submission:
    """Check, pack and describe a call. Nothing has started when this raises.

    Args:
        place: This process's.
        function: What every rank calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: Where and how.
        name: The run's; "" is that of the options, else the function's.
        beside_sessions: A session that is connected lends its devices when it has enough of that type.

    Raises:
        TypeError: The arguments do not fit.
        SgpuError: The function can't be called, or something can't be pickled, or there is no such pool.
    """
    with _in_pythons_words():
        place.wanted_pool(options.pool)
    packed = pack_call.pack_call(place, function, args, kwargs, exclude=options.exclude)
    session = _lent_by(options) if beside_sessions and not options.ray else None
    if session is None:
        options = with_choice(place, options, PYTHON_WAYS)
    variables = {**(session.variables if session is not None else {}), **(options.variables or {})}
    if session is not None:
        found = session.lends(options.ranks)
    else:
        with _in_pythons_words():
            found = place.find(place.wanted_pool(options.pool), options.devices)
    spec = RunSpec(
        run_id=new_id(),
        name=name or options.name or packed.name,
        cell=packed.cell,
        placement=found.placement,
        outputs=pack_call.OUTPUTS_OF_DRIVER if options.ray else pack_call.OUTPUTS,
        owner=owner(place.shell),
        timeout_s=options.timeout_s,
        wait_s=options.wait_s,
        grace_s=options.grace_s,
        retries=options.retries,
        retry_any=options.retry_any,
        env_names=tuple(variables),
        shipped=replace(packed.shipped, notes=(*found.notes, *packed.shipped.notes)),
        kind=RunKind.CALL,
        session=session.run_id if session is not None else "",
        session_name=session.name if session is not None else "",
        fresh=session is not None,
        parameters=packed.parameters,
        profile=options.profile,
        max_cost=options.max_cost,
        ray=options.ray,
    )
    wishes = session.wishes_with(options.wishes) if session is not None else options.wishes
    return Submission(
        spec,
        packed.packed,
        packed.key,
        pack_call.environ_with(variables),
        wishes,
        frozenset(variables),
        pool=found.pool.name,
    )


def _lent_by(options: CallOptions) -> Session | None:
    """The connected session on whose lease the run has room, the current one first."""
    wishes = options.wishes
    devices = options.devices
    of_its_own = devices.min_memory_bytes or devices.nodes or devices.strategy
    if wishes.env_version or wishes.torch_mine or wishes.allow_build or options.max_cost is not None or of_its_own:
        # those are a lease's own
        return None
    for session in reversed(registry.all_sessions()):
        enough = (options.ranks or 1) <= session.ranks
        fits = options.device_type in (None, "any", session.device_type) and options.pool in ("", session.pool.name)
        if session.is_connected and enough and fits:
            return session
    return None


def _preparer(
    session: Session,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    options: CallOptions,
) -> Callable[[], Prepared]:
    """What makes a call ready for a session's ranks, when it is its turn.

    Raises:
        UsageError: The options ask for what a session's ranks can't be.
    """
    if options.ranks not in (None, session.ranks) or options.device_type not in (None, "any", session.device_type):
        raise UsageError(
            f"session {session.name} has {session.ranks} ranks on {session.device_type}, and the options ask for "
            f"{options.ranks or session.ranks} on {options.device_type or session.device_type}. Leave gpus and "
            "gpu_type out, or leave session out: then new ranks are started."
        )
    refuse_in_session(session.name, options.wishes, options.max_cost, "leave session out")
    if options.retries:
        raise UsageError("what runs in a session is not started again by itself. Leave retries or session out.")

    def prepared() -> Prepared:
        return prepare_call(
            session,
            function,
            args,
            kwargs,
            name=options.name,
            exclude=options.exclude,
            variables=options.variables,
            timeout_s=options.timeout_s,
            wait_s=options.wait_s,
            grace_s=options.grace_s,
            wishes=options.wishes,
            profile=options.profile,
        )

    return prepared


def _bring_back(place: Workplace, submission: Submission, ui: str) -> list[Any]:
    run = submit(place.pool_of(submission), submission)
    result = place.bring_back(run, ui)
    if result is None:
        run_id = short(run.run_id)
        raise RunCancelled(
            f"run {run_id} was detached and goes on without this program; Run.from_id({run_id!r}) brings its results.",
            run_id=run.run_id,
        )
    return result.values


@contextlib.contextmanager
def _in_pythons_words() -> Generator[None]:
    """What is said of the magic's options is said of the decorator's."""
    try:
        yield
    except UsageError as error:
        raise UsageError(in_pythons_words(error.message)) from None
    except CapacityError as error:
        raise CapacityError(in_pythons_words(error.message)) from None


def _is_in_a_task() -> bool:
    """Whether an event loop has called this, other than for a notebook's cell: the kernel runs in a loop too."""
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
    """Keep a thread's outputs with the cell that runs now: later cells would get them.

    ipykernel knows a thread's cell by a context variable, which a thread that a program has started does not have.
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

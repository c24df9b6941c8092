"""What the notebook gets from a rank's namespace: a cell's results, and answers to questions between cells.

Results are the requested names and the last expression's value, or the exception. Questions are completion, inspection
and the variables that are set.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Generator, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType

import msgspec
import torch.distributed as dist
from IPython.core.completer import provisionalcompleter
from IPython.utils.tokenutil import token_at_cursor

from sgpu_magic.errors import NoSuchName, SerializationError, UsageError
from sgpu_magic.payload import buffers
from sgpu_magic.payload.explain import explain_part, find_way
from sgpu_magic.payload.pack import Packed, pack_object
from sgpu_magic.system.processes import fits_memory
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, Payload, SharedPayload
from sgpu_magic.wire.base import Record, RunKind
from sgpu_magic.wire.events import as_warning
from sgpu_magic.wire.rank import CellFailed, Execute, Finished, RankAnswer, RankQuestion
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import Match, RankResult
from sgpu_magic.worker.cell import variables
from sgpu_magic.worker.cell.displays import hook_of
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.process import user_code

CALLABLE = "__sgpu_call__"
"""Name of the function in a run of kind CALL, which the run's cell calls."""

_VALUE_LIMIT_BYTES = 100_000_000
_NAMES_SHOWN = 5

GIVEN = ("rank", "local_rank", "world_size", "device")
"""Names that are set on every rank before its first cell."""

# names in which IPython keeps inputs and outputs, and this package's own
_INTERNAL = re.compile(r"_+\d*|_i\d*|_ii|_iii|_oh|_ih|_dh|In|Out|__.*__|__sgpu_.*")
# the user is typing meanwhile
_LIMIT_S = 0.1
# describing variables runs no code of the user's
_VARIABLES_LIMIT_S = 2.0
_MOST_MATCHES = 500


class Reply(msgspec.Struct, frozen=True):
    """The rank's reply to an order.

    Args:
        message: `Joined`, `Finished` or `CellFailed`.
        blobs: Its raw frames.
        buffer: The memory file whose descriptor is sent along; ours until the message is sent.
    """

    message: Record
    blobs: Sequence[bytes] = ()
    buffer: buffers.SharedBuffer | None = None


def failed(failure: Failure, error: BaseException, shell: RankShell, key: bytes) -> Reply:
    """Return the reply for a failure, with the exception itself if it can be pickled, is small and is not odd.

    Args:
        failure: The description of the failure.
        error: The user's exception.
        shell: The rank's shell.
        key: The run's key, which signs the payload.
    """
    grouped = dist.is_initialized()
    packed = None
    if shell.failure is not None and not shell.failure.is_odd:
        # the type, message and traceback are in `failure` anyway
        packed = user_code.ask(_pack, error, key, buffers.INLINE_LIMIT, default=None)
    if packed is None or packed.total_bytes > buffers.INLINE_LIMIT:
        return Reply(CellFailed(failure=failure, grouped=grouped))
    failure = msgspec.structs.replace(failure, exception=packed.layout)
    return Reply(CellFailed(failure=failure, grouped=grouped), [packed.to_bytes()])


def finished(
    packed: Packed | None,
    rank: int,
    run_dir: str,
    *,
    text: str,
    is_displayed: bool,
    problem: str | None,
    seconds: float,
) -> Reply:
    """Return the reply for a cell that succeeded, with its results.

    Args:
        packed: The results, None for nothing.
        rank: The rank.
        run_dir: The run's directory, for a result that does not fit in memory.
        text: The last expression as text.
        is_displayed: Whether its rich forms were displayed.
        problem: Why its value is not returned, None if it is.
        seconds: The cell's time.

    Raises:
        UsageError: Neither memory nor disk has room.
    """
    payload: Payload | None = None
    blobs: list[bytes] = []
    shared: buffers.SharedBuffer | None = None
    if packed is not None:
        if packed.total_bytes <= buffers.INLINE_LIMIT:
            source = InlinePayload()
            blobs.append(packed.to_bytes())
        elif not fits_memory(packed.total_bytes):
            path = Path(run_dir) / f"result-{rank}.bin"
            buffers.write_file(packed, path)
            source = FilePayload(path=str(path), size=packed.total_bytes)
        else:
            shared = buffers.SharedBuffer(f"{Path(run_dir).name}-{rank}")
            shared.write(packed)
            source = SharedPayload(pid=os.getpid(), fd=shared.fd, size=shared.size)
        payload = Payload(source=source, layout=packed.layout)
    result = RankResult(
        rank=rank,
        payload=payload,
        value_repr=text,
        value_displayed=is_displayed,
        value_problem=problem,
        seconds=seconds,
    )
    return Reply(Finished(result=result, grouped=dist.is_initialized()), blobs, shared)


def pack_result(shell: RankShell, order: Execute, rank: int) -> tuple[Packed | None, str | None]:
    """Pack the names that this rank returns and the last expression's value.

    Returns:
        The packed result, None if there is nothing to return, and why the value is not returned (None if it is).

    Raises:
        UsageError: A name does not exist on this rank.
        SerializationError: A name can't be pickled.
    """
    key = order.context.key
    if order.kind is RunKind.CALL:
        return _pack_call(shell, order, rank), None
    names: dict[str, object] = {}
    for name in _names_of(shell, order):
        if name not in shell.user_ns:
            missing = UsageError if order.kind is not RunKind.PULL else NoSuchName
            raise missing(_missing(name, shell, order, rank))
        names[name] = shell.user_ns[name]
    option = "%sgpu_pull" if order.kind is RunKind.PULL else "--out"
    value = None if order.kind is RunKind.PULL else hook_of(shell).last_value
    if not names and value is None:
        return None, None
    if value is None:
        return pack_names(names, None, rank, key, option), None
    try:
        packed = pack_names(names, value, rank, key, option)
    except SerializationError as error:
        return (pack_names(names, None, rank, key, option) if names else None), error.message
    if not names and packed.total_bytes > _VALUE_LIMIT_BYTES:
        return None, f"its size is {packed.total_bytes / 1e6:,.0f} MB: name it in --out to get it"
    return packed, None


def parts_remark(packed: Packed | None, shell: RankShell, order: Execute) -> str:
    """Return a warning about a name that only this rank returns and that is its part of something larger, or ""."""
    if packed is None or order.kind is RunKind.CALL:
        return ""
    parts = [part for found in packed.parts.values() for part in found]
    for output in order.outputs if parts else ():
        value = shell.user_ns.get(output.name)
        part = next((part for part in parts if find_way(value, part.value)[0] is not None), None)
        if part is not None and not output.all_ranks:
            return as_warning(explain_part(output.name, value, part))
    return ""


def _names_of(shell: RankShell, order: Execute) -> list[str]:
    """Return the names that this rank returns."""
    return [output.name for output in order.outputs if output.all_ranks or shell.is_first]


def names_set(shell: RankShell) -> list[str]:
    """Return the names that cells have set or that were shipped with them, oldest first."""
    hidden: dict[str, object] = shell.user_ns_hidden
    return [
        name
        for name, value in shell.user_ns.items()
        if name not in GIVEN and not _INTERNAL.fullmatch(name) and not (name in hidden and hidden[name] is value)
    ]


def _missing(name: str, shell: RankShell, order: Execute, rank: int) -> str:
    if order.kind is not RunKind.PULL:
        return (
            f"the cell ended on rank {rank} without setting `{name}`, which --out names. Set it in the "
            "cell on this rank too, or remove it from --out."
        )
    names = names_set(shell)
    known = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    has = f"it has {known}" if names else "it has no names yet"
    return (
        f"rank {rank} has no `{name}` for %sgpu_pull: {has}. Set it in a cell that runs on this rank, or name another."
    )


def _pack_call(shell: RankShell, order: Execute, rank: int) -> Packed | None:
    """Pack a function's return value, even None, and remove it from the namespace."""
    function: object = shell.user_ns.pop(CALLABLE, None)
    names = {name: shell.user_ns.pop(name, None) for name in _names_of(shell, order)}
    if not names:
        return None
    try:
        return _pack({"names": names, "value": None}, order.context.key)
    except SerializationError:
        what = f"what {getattr(function, '__name__', 'the function')}() returned on rank {rank}"
        for value in names.values():
            # pack it again under a name that the user recognises
            _pack({"names": {what: value}, "value": None}, order.context.key)
        raise


def forget_call(shell: RankShell, order: Execute) -> None:
    """Remove a called function, with its arguments, and its return values from the namespace."""
    for name in (CALLABLE, *(output.name for output in order.outputs)):
        shell.user_ns.pop(name, None)


def pack_names(names: dict[str, object], value: object, rank: int, key: bytes, option: str = "--out") -> Packed:
    """Pack names and a value.

    Raises:
        SerializationError: Something can't be pickled; the message has the name and `option`.
    """
    try:
        return _pack({"names": names, "value": value}, key)
    except SerializationError:
        for name, single in names.items():
            try:
                _pack(single, key)
            except SerializationError as error:
                raise SerializationError(
                    f"`{name}` of {option} can't be returned from rank {rank}: {error.message}"
                ) from None
        raise


def _pack(value: object, key: bytes, most_bytes: int | None = None) -> Packed:
    return pack_object(value, sys.modules["__main__"].__dict__, key, most_bytes=most_bytes)


# ---------------------------------------------------------------- questions between cells


class _TooLong(BaseException):
    """The time limit is exceeded. Not an `Exception`, so that no `except Exception` catches it."""


def warm_up_questions(shell: RankShell) -> None:
    """Answer one question of each kind in the zygote, so that ranks are fast from the start."""
    for what, code in (("complete", "pri"), ("inspect", "print")):
        answer(shell, RankQuestion(rank=0, what=what, code=code, cursor=len(code)))


def answer(shell: RankShell, question: RankQuestion) -> RankAnswer:
    """Answer a question. If the user's objects raise or take too long, the answer's `problem` gives the reason."""
    hook = sys.excepthook
    limit_s = _VARIABLES_LIMIT_S if question.what == "variables" else _LIMIT_S
    # hides the errors of matchers, which IPython's completer would print although no cell runs
    sys.excepthook = lambda kind, error, trace: None
    try:
        with _limited(limit_s):
            return _answer(shell, question)
    except _TooLong:
        return RankAnswer(problem=f"the lookup took longer than {limit_s:g} s")
    except Exception as error:  # noqa: BLE001  the user's `__dir__` and `__repr__` run here
        return RankAnswer(problem=f"{type(error).__name__}: {error}")
    finally:
        sys.excepthook = hook


def _answer(shell: RankShell, question: RankQuestion) -> RankAnswer:
    match question.what:
        case "complete":
            return _complete(shell, question)
        case "inspect":
            return _inspect(shell, question)
        case "names":
            return RankAnswer(names=tuple(names_set(shell)))
        case "variables":
            return variables.describe(dict(shell.user_ns), names_set(shell), question.patterns)
        case other:
            return RankAnswer(problem=f"a rank can't answer `{other}`")


def _complete(shell: RankShell, question: RankQuestion) -> RankAnswer:
    completer = shell.Completer
    # jedi would read the sources of all imported modules, with no time limit
    completer.use_jedi = False
    with provisionalcompleter():
        found = list(islice(completer.completions(question.code, question.cursor), _MOST_MATCHES))
    start, end = (found[0].start, found[0].end) if found else (question.cursor, question.cursor)
    here = [each for each in found if (each.start, each.end) == (start, end)]
    matches = tuple(Match(each.text, "" if each.type in (None, "<unknown>") else each.type) for each in here)
    return RankAnswer(matches=matches, start=start, end=end)


def _inspect(shell: RankShell, question: RankQuestion) -> RankAnswer:
    name = token_at_cursor(question.code, question.cursor)
    with contextlib.suppress(KeyError):
        if name:
            bundle = shell.object_inspect_mime(name, detail_level=question.detail)
            return RankAnswer(bundle=json.dumps(bundle, default=str).encode())
    return RankAnswer()


@contextlib.contextmanager
def _limited(seconds: float) -> Generator[None]:
    """Raise `_TooLong` in the block after `seconds`. A pending alarm of the user's is delayed by the block's time."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise _TooLong

    previous = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, interval)

"""Whether an exception comes from a collective, known by where it was raised and never by its text.

A collective that loses a peer raises in torch's C++ code: a `RuntimeError` from gloo, a `DistError` from NCCL and from
stores. Its innermost Python frame is one of `torch.distributed`, or one that waited for a `Work`, or autograd's, which
waits for DDP's collectives. User code may raise anything with the same text, and raises it from a frame of its own.

A rank can't tell whether a collective failed because of a peer or by itself. The agent can, since it knows how the
other ranks ended (`agent.failures`).
"""

# torch.distributed is only partly typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

import torch.distributed as dist

from sgpu_magic.worker.process import position
from sgpu_magic.worker.process.user_code import (
    cause_of,
    context_of,
    grouped_by,
    is_a,
    text_of,
    traceback_of,
)

# maximum number of chained or grouped exceptions that are examined
_MOST_CHAINED = 100
_DISTRIBUTED = "torch.distributed"
# frames of these modules only dispatch to C++ code
_DISPATCHERS = frozenset({"torch._ops"})


def find_collective_error(error: BaseException, *, is_released: bool) -> BaseException | None:
    """Return the exception that a collective raised: this one, or one that it was raised for or while handling.

    An exception group counts if all its exceptions come from collectives.

    Args:
        error: The exception.
        is_released: Whether the rank was released from its collectives. Then an error of autograd counts if the rank
            has called a collective: torch may have recorded that of a model in DDP as over by now.
    """
    return next((one for one in _chain(error) if _comes_from_collective(one, is_released)), None)


def is_raised_by_c(error: BaseException) -> bool:
    """Whether C code raised the exception, and not a `raise` of Python code."""
    entry = _raised_at(error)
    return entry is not None and _is_call(entry)


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MOST_CHAINED:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [before for before in (context_of(one), cause_of(one)) if before is not None]


def _comes_from_collective(error: BaseException, is_released: bool) -> bool:
    if not is_a(error, BaseExceptionGroup):
        return _is_of_collective(error, is_released)
    leaves = list(_leaves(error))
    return bool(leaves) and all(_is_of_collective(leaf, is_released) for leaf in leaves)


def _leaves(group: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group and of the groups in it, at most `_MOST_CHAINED`."""
    waiting, count = [group], 0
    while waiting and count < _MOST_CHAINED:
        one = waiting.pop()
        if is_a(one, BaseExceptionGroup):
            waiting += grouped_by(one)
        else:
            count += 1
            yield one


def _is_of_collective(error: BaseException, is_released: bool) -> bool:
    """Whether a collective, a wait for one, or torch's store raised it."""
    is_dist_error = is_a(error, dist.DistError)
    # subclasses have other origins, such as a failed allocation or a kernel that failed on the device
    if type(error) is not RuntimeError and not is_dist_error:
        return False
    entry = _raised_at(error)
    if entry is None:
        return False
    module = text_of(entry.tb_frame.f_globals.get("__name__")) or ""
    is_of_distributed = module == _DISTRIBUTED or module.startswith(f"{_DISTRIBUTED}.")
    if not _is_call(entry):
        return is_dist_error and is_of_distributed
    if is_of_distributed or is_dist_error:
        return True
    if module.startswith("torch."):
        # autograd waits for DDP's collectives
        newest, _ = position.current_collective()
        return newest is not None and (newest.pending or is_released)
    return _has_failed_work(entry.tb_frame)


def _raised_at(error: BaseException) -> types.TracebackType | None:
    """Return the innermost entry of the traceback, apart from frames that only dispatch."""
    found, entry = None, traceback_of(error)
    while entry is not None:
        if found is None or entry.tb_frame.f_globals.get("__name__") not in _DISPATCHERS:
            found = entry
        entry = entry.tb_next
    return found


def _is_call(entry: types.TracebackType) -> bool:
    """Whether the frame was calling a function: the exception then comes from C code, else from a `raise`."""
    code, at = entry.tb_frame.f_code.co_code, entry.tb_lasti
    return 0 <= at < len(code) and dis.opname[code[at]].startswith(("CALL", "PRECALL"))


def _has_failed_work(frame: types.FrameType) -> bool:
    """Whether a collective that the frame has a variable for has failed."""
    works = [value for value in frame.f_locals.values() if issubclass(type(value), dist.Work)]
    return any(work.is_completed() and not work.is_success() for work in works)

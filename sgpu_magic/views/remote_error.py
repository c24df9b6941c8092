"""The exception that a failed run raises in the notebook, with hints, and how IPython shows it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Container, Iterable, Sequence

import msgspec

from sgpu_magic import errors
from sgpu_magic.formatting import clipped, format_ranks, format_seconds
from sgpu_magic.views.failure import output_tail
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.run_notes import (
    death_sentence,
    error_line,
    last_part,
    other_lines,
    restart_command,
    timeout_sentence,
)
from sgpu_magic.views.stacks import group_sentences, hang_heading, stack_lines, stacks_text, verdict
from sgpu_magic.views.tracebacks import cut_lines, line_of_cell, source_of, traceback_body
from sgpu_magic.wire.base import FailureKind, RunKind
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import CellSource, RunSpec

# raised in the notebook, these would end the kernel or cancel the cell or call
_END_KERNELS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseExceptionGroup)
_CELL_LINE = re.compile(r"Cell In\[\d+\], line \d+")
_MAX_BRIEF_CHARS = 90
_RED, _DEFAULT = "\x1b[31m", "\x1b[39m"
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")

OUT_OF_MEMORY = "memory"
"""Help page for failed allocations, whatever the exception's type."""

BY_KIND: dict[FailureKind, type[errors.SgpuError]] = {
    FailureKind.USER_CODE: errors.RemoteError,
    FailureKind.SERIALIZATION: errors.SerializationError,
    FailureKind.ENVIRONMENT: errors.EnvironmentFailed,
    FailureKind.WORKER_DIED: errors.WorkerDied,
    FailureKind.NODE_LOST: errors.NodeLost,
    FailureKind.TIMEOUT: errors.RunTimeout,
    FailureKind.CAPACITY: errors.CapacityError,
    FailureKind.SESSION: errors.SessionError,
    FailureKind.INTERNAL: errors.InternalError,
}
"""The class by which the notebook raises a run's failure."""

# The errors of cudaError_t after which "the process must be terminated and relaunched" (CUDA runtime's reference),
# as worded by cudaGetErrorString. torch, Triton, CuPy and NCCL include that text in a line that contains CUDA.
_WORDS = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
)
# caused by the GPU or its link more often than by the code
_HARDWARE_WORDS = (
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
)
_DESTROYS_CONTEXT = re.compile(rf"cuda[^\n]*({'|'.join(map(re.escape, (*_WORDS, *_HARDWARE_WORDS)))})", re.IGNORECASE)
_FROM_HARDWARE = re.compile("|".join(map(re.escape, _HARDWARE_WORDS)), re.IGNORECASE)
# messages of torch without CUDA, and of torch with CUDA on a machine without a GPU
_NO_CUDA = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver on your system",
    "No CUDA GPUs are available",
    "Cannot access accelerator device when none is available",
    "module 'torch._C' has no attribute '_cuda_",
    "Cannot get CUDA generator without ATen_cuda library",
    "Tried to instantiate dummy base class",
    "torch.cuda.Stream requires CUDA support",
    "NVTX functions not installed",
    "DistributedDataParallel device_ids and output_device arguments only work with",
    "Attempting to deserialize object on a CUDA device",
    "Distributed package doesn't have NCCL built in",
)
# the text is in the first line; messages can have any length
_MOST_CHARS = 4_000


def topic_of(kind: FailureKind, *, out_of_memory: bool = False) -> str:
    """Return the topic of the help page for runs that failed this way."""
    return OUT_OF_MEMORY if out_of_memory else BY_KIND[kind].topic


class _Drawing(msgspec.Struct, frozen=True):
    """The `_render_traceback_` of one exception object. Picklable, so that the exception stays picklable."""

    lines: tuple[str, ...]

    def __call__(self) -> list[str]:
        return list(self.lines)


def run_exception(
    view: RunView,
    ended: RunEnded,
    failure: Failure,
    exception: BaseException | None = None,
    notebook_names: Container[str] = (),
    folder: str = "",
) -> BaseException:
    """Return the exception to raise for a failed run.

    Args:
        view: The run. About `output_limit` characters of its traceback are shown at most, and none below a view that
            has them (`error_follows`).
        ended: Its final event.
        failure: The root cause in it.
        exception: The user's own exception object, unpickled; None when it could not be pickled.
        notebook_names: Names that exist in the notebook, for the hint on a NameError.
        folder: The notebook's working directory, for the hint on a FileNotFoundError; "" if it can't be read from here.

    Returns:
        `exception` itself with `.rank`, `.run_id`, `.remote_traceback` and `.failures` (of every rank that failed, the
        root cause first), or an exception of `errors` with the same attributes. An exception that would end a kernel,
        such as SystemExit, is replaced by `RemoteError`.
    """
    run, cell, stacks = f"run {view.short_id}", view.spec.cell, ended.stacks
    plain = "\n".join(cut_lines(failure.traceback_text.strip("\n").split("\n"), view.output_limit))
    remote_traceback = failure.traceback_text or "\n".join(stack_lines(failure.stack, cell))
    more = " · ".join(other_lines(ended.others, failure.rank))
    attributes: dict[str, object] = {
        "rank": failure.rank,
        "run_id": view.run_id,
        "failures": (failure, *ended.others),
        "remote_traceback": remote_traceback or (stacks_text(view.run_id, stacks, cell) if stacks else ""),
    }
    if failure.kind is FailureKind.USER_CODE:
        hint = _name_hint(failure, notebook_names) or _module_hint(failure, view.spec) or no_cuda_hint(failure)
        hint = hint or _file_hint(failure, view.spec, folder) or context_hint(failure, ended.others, view.spec)
        own = errors.RemoteError(error_line(failure), type_name=failure.type_name or "Exception")
        raised = own if exception is None or _ends_kernel(exception) else exception
        where = f"rank {failure.rank} of {view.ranks}" if failure.rank is not None else f"{view.ranks} ranks"
        heading = f"{where} on {failure.host} · {run}" if failure.host else f"{where} · {run}"
        # a coloured traceback is shown whole or not at all
        coloured = failure.traceback_ansi.strip("\n") if len(failure.traceback_ansi) <= view.output_limit else ""
        trace = coloured or plain or error_line(failure)
        # where a front end draws the view above the error, the view has the traceback and the other ranks
        lines = (heading, trace, hint, more)
        if view.error_follows:
            lines = (_with_line(heading, failure, source_of(view.spec)), _brief(failure), hint)
        # outside IPython, these notes are all that a plain traceback shows of the rank
        note = "\n".join(filter(None, (heading, plain, hint, more)))
        known = getattr(raised, "__notes__", None)
        attributes["__notes__"] = [*known, note] if isinstance(known, list) else [note]
    else:
        words = output_tail(view, failure) if failure.kind is FailureKind.WORKER_DIED else []
        words += [*group_sentences(stacks, cell), *verdict(stacks, cell)]
        hang = hang_heading(failure, stacks, cell)
        message = _message(failure, ended.starting_s + ended.running_s, view.ranks, words, more, run, hang)
        raised = BY_KIND[failure.kind](message)
        trace = plain if failure.kind is FailureKind.INTERNAL else ""
        lines = (trace, f"{type(raised).__name__}: {message}")
    lines = (*lines, errors.see(topic_of(failure.kind, out_of_memory=failure.out_of_memory)))
    attributes["_render_traceback_"] = _Drawing(tuple(line for line in lines if line))
    return _with_attributes(raised, attributes)


def _ends_kernel(exception: BaseException) -> bool:
    return not isinstance(exception, Exception) and isinstance(exception, _END_KERNELS)


def _with_line(heading: str, failure: Failure, cell: CellSource) -> str:
    """Return `rank 1 of 4 on gpu-node-2 · run 7f3a · Cell In[7], line 14`."""
    lines = [found[0] for line in traceback_body(failure) if (found := _CELL_LINE.match(line))]
    lines = lines or line_of_cell(failure, cell)[:1]
    return f"{heading} · {lines[-1]}" if lines else heading


def _brief(failure: Failure) -> str:
    """Return `ValueError: NaN in batch 118`, the beginning of the message in one row."""
    line, name = clipped(error_line(failure), _MAX_BRIEF_CHARS), last_part(failure.type_name)
    return f"{_RED}{name}{_DEFAULT}{line[len(name) :]}" if name and line.startswith(name) else line


def _with_attributes(exception: BaseException, attributes: dict[str, object]) -> BaseException:
    """Set the attributes on the object; if its type forbids that, on a subclass of the same name."""
    refused: dict[str, object] = {}
    for name, value in attributes.items():
        try:
            # bypass the user's __setattr__, such as that of a frozen dataclass
            BaseException.__setattr__(exception, name, value)
        except (AttributeError, TypeError):
            refused[name] = value
    if refused:
        cls = type(exception)
        body: dict[str, object] = {"__module__": cls.__module__, "__slots__": (), **refused}
        exception.__class__ = type(cls.__name__, (cls,), body)
    return exception


def _message(failure: Failure, seconds: float, ranks: int, words: Sequence[str], more: str, run: str, hang: str) -> str:
    """Return one paragraph: what happened and where, the other ranks, and the run."""
    after = format_seconds(seconds)
    match failure.kind:
        case FailureKind.TIMEOUT:
            parts = [f"stopped after {after}: {failure.message.strip() or timeout_sentence(seconds)}", *words, more]
        case FailureKind.WORKER_DIED:
            parts = [f"failed after {after} · {hang}{death_sentence(failure, ranks)}", *words, more]
        case FailureKind.NODE_LOST | FailureKind.INTERNAL:
            parts = [f"failed after {after} · {death_sentence(failure, ranks)}", more]
        case _:
            # these messages are complete: what can't be shipped, placed or started, and the remedy
            return failure.message.strip() or f"the run failed: {failure.kind} · {run}"
    return " · ".join(part for part in (*parts, run) if part)


def _name_hint(failure: Failure, notebook_names: Container[str]) -> str:
    if last_part(failure.type_name) != "NameError":
        return ""
    found = _UNDEFINED.search(failure.message) or _UNDEFINED.search(failure.traceback_text)
    if found is None or found[1] not in notebook_names:
        return ""
    name = found[1]
    return f"`{name}` exists in the notebook but the cell's code does not show that it is used: add --in {name}"


def _module_hint(failure: Failure, spec: RunSpec) -> str:
    """Return a hint about a module that this process has and the ranks' own packages lack."""
    name = failure.missing_module.partition(".")[0]
    if not name or not spec.environment:
        return ""
    try:
        is_here = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        # a module without a spec, such as one defined in a notebook
        is_here = name in sys.modules
    if not is_here:
        return ""
    which = f" ({spec.environment_label})" if spec.environment_label else ""
    return (
        f"The notebook has `{name}`, but the packages of the ranks{which} lack it: add it to them, or choose others "
        "with the option env-version."
    )


def _file_hint(failure: Failure, spec: RunSpec, folder: str) -> str:
    """Return a hint about a file that the notebook's machine has and the ranks' machine lacks."""
    path = failure.missing_file
    if not path or not folder or not spec.elsewhere or not os.path.exists(os.path.join(folder, path)):
        return ""
    option = f"--upload {shlex.quote(path)}"
    if spec.kind is RunKind.CALL:
        option = f"upload={path!r}"
    elif spec.auto:
        option = f"`%%distributed {option}`"
    hint = f"`{path}` is only on the notebook's machine: add {option}"
    if os.path.isabs(path) or os.path.normpath(path).split(os.sep, 1)[0] == os.pardir:
        hint += f", and open `sgpu_magic.runtime.upload_path({path!r})`"
    return hint


def destroys_context(failure: Failure) -> bool:
    """Whether the failure is a CUDA error after which the process can't use its GPU any more."""
    return _DESTROYS_CONTEXT.search(failure.message[:_MOST_CHARS]) is not None


def no_cuda_hint(failure: Failure) -> str:
    """Return a hint for code that requires CUDA on ranks without a GPU, "" for any other failure."""
    if failure.rank is None or not any(words in failure.message[:_MOST_CHARS] for words in _NO_CUDA):
        return ""
    return (
        "This rank has no GPU, so it is on CPU. In a cell, use `device`, the rank's own device, in place of "
        '"cuda": `.to(device)` runs on either. `%env SGPU_STAND_IN=cpu,cuda` maps cuda to the CPU, to try code out.'
    )


def context_hint(failure: Failure, others: Iterable[Failure], spec: RunSpec) -> str:
    """Return a hint about a destroyed CUDA context, "" for any other failure.

    Args:
        failure: The root cause, raised by user code.
        others: Failures of other ranks, which may be of the same kind.
        spec: The run.
    """
    if failure.rank is None or not destroys_context(failure):
        return ""
    alike = {other.rank for other in others if other.rank is not None and destroys_context(other)}
    ranks = sorted(alike | {failure.rank})
    who, one = format_ranks(ranks), len(ranks) == 1
    fails = f"every further CUDA call in {'its process' if one else 'their processes'} fails"
    remedy = "Fix the code and run it again: the next run gets new processes."
    if spec.in_session:
        new = "a new process in its place" if one else "new processes in their place"
        remedy = f"`{restart_command(ranks)}` starts {new}; what {who} had in GPU memory is lost."
    # the variable is read when the context is created, which ranks of a session and its standby ranks have done already
    connect = "in a session connected with `%sgpu_connect " if spec.session else "with `"
    blocking = f"{connect}--env CUDA_LAUNCH_BLOCKING=1`"
    cause = f"CUDA reports errors late, so an earlier line may be the cause; {blocking} the line is exact."
    if _FROM_HARDWARE.search(failure.message[:_MOST_CHARS]):
        cause = "The GPU or its link may be at fault: see `nvidia-smi -q` and the Xid lines in `dmesg`."
    return f"This error destroyed the CUDA context of {who}: {fails}. {remedy} {cause}"

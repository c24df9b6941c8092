"""CUDA errors that destroy a process's context: how they are recognised, and what helps."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sgpu_magic.views.units import format_ranks
from sgpu_magic.wire.records import Failure, RunSpec

# cudaError_t in the CUDA runtime's reference: the errors after which "the process must be terminated and relaunched",
# by what cudaGetErrorString says. torch, Triton, CuPy and NCCL pass that text on, in a line that has CUDA in it.
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
# torch built without CUDA, and with it on a machine without a GPU
_NO_CUDA = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver on your system",
    "No CUDA GPUs are available",
    "Cannot access accelerator device when none is available",
)
# the text is in the first line, and a message may have any length
_MOST_CHARS = 4_000


def destroys_context(failure: Failure) -> bool:
    """Whether the failure is a CUDA error after which its process can't use its GPU any more."""
    return _DESTROYS_CONTEXT.search(failure.message[:_MOST_CHARS]) is not None


def no_cuda_hint(failure: Failure) -> str:
    """Return what helps code that asks for CUDA on ranks without a GPU, "" for any other failure."""
    if failure.rank is None or not any(words in failure.message[:_MOST_CHARS] for words in _NO_CUDA):
        return ""
    return (
        "This rank has no GPU, so it is on CPU. In a cell, use `device`, the rank's own device, in place of "
        '"cuda": `.to(device)` runs on either.'
    )


def context_hint(failure: Failure, others: Iterable[Failure], spec: RunSpec | None) -> str:
    """Return what a destroyed CUDA context means and what to do, "" for any other failure.

    Args:
        failure: The root cause, raised by user code.
        others: Further ranks' failures; they may be of the same kind.
        spec: The run; None where it is not known.
    """
    if failure.rank is None or not destroys_context(failure):
        return ""
    alike = {other.rank for other in others if other.rank is not None and destroys_context(other)}
    ranks = sorted(alike | {failure.rank})
    who, one = format_ranks(ranks), len(ranks) == 1
    fails = f"every further CUDA call in {'its process' if one else 'their processes'} fails"
    parts = [f"This error destroyed the CUDA context of {who}: {fails}."]
    if spec is not None and spec.in_session:
        new = "a new process in its place" if one else "new processes in their place"
        numbers = ",".join(map(str, ranks))
        parts.append(f"`%sgpu_restart --rank {numbers}` starts {new}; what {who} had in GPU memory is lost.")
    else:
        parts.append("Fix the code and run it again: the next run gets new processes.")
    # it is read when the context is made, which the ranks of a session, and those kept for it, have behind them
    blocking = "with `--env CUDA_LAUNCH_BLOCKING=1`"
    if spec is not None and spec.session:
        blocking = "in a session connected with `%sgpu_connect --env CUDA_LAUNCH_BLOCKING=1`"
    if _FROM_HARDWARE.search(failure.message[:_MOST_CHARS]):
        parts.append("The GPU or its link may be at fault: see `nvidia-smi -q` and the Xid lines in `dmesg`.")
    else:
        parts.append(f"CUDA reports errors late, so an earlier line may be the cause; {blocking} the line is exact.")
    return " ".join(parts)

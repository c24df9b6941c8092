"""Messages between an agent and a zygote, and the formats of descriptors sent along: a rank's errors and its stacks."""

from __future__ import annotations

import signal
import struct

from sgpu_magic.wire.record import Record


class Fork(Record, frozen=True, tag="fork", kw_only=True):
    """Fork one rank of a group.

    Its descriptors are sent along: control socket, output pipe, error pipe, stack file, store file.

    Args:
        store_path: Path of the store's file on systems without memory files; "" if its descriptor is sent along.
        join_early: Join the process group before `Execute` arrives.
        rehearse: Also run a small warm-up cell before it arrives. All ranks of a group do, or none.
    """

    group_id: str
    rank: int
    ranks: int
    join_early: bool
    rehearse: bool = False
    store_path: str = ""


class Forked(Record, frozen=True, tag="forked", kw_only=True):
    """The rank was forked with this pid."""

    group_id: str
    rank: int
    pid: int


class ForkRefused(Record, frozen=True, tag="fork-refused", kw_only=True):
    """The rank was not forked: the zygote has more than one thread, or the machine has no process left."""

    group_id: str
    rank: int
    message: str


class ZygoteReady(Record, frozen=True, tag="zygote-ready", kw_only=True):
    """The zygote is ready. Stable across versions: its interpreter may have another sgpu-magic than the pool."""

    pid: int
    torch_version: str
    protocol_version: int


class ZygoteFailed(Record, frozen=True, tag="zygote-failed", kw_only=True):
    """The interpreter cannot be preloaded. The zygote exits after this message."""

    message: str


class Exited(Record, frozen=True, tag="exited", kw_only=True):
    """A child of the zygote ended.

    Args:
        status: Exit code, negative for a signal.
        peak_bytes: Peak memory of the process; 0 if unknown.
    """

    pid: int
    status: int
    peak_bytes: int = 0


ToZygote = Fork
FromZygote = Forked | ForkRefused | ZygoteReady | ZygoteFailed | Exited


# ---------------------------------------------------------------- what the descriptors carry

# These mark what Python's stderr writes into a rank's common output pipe. They are OSC escape sequences that no
# terminal knows, so a mark that is not removed stays invisible.
STDERR_BEGIN = b"\x1b]sgpu;2\x07"
STDERR_END = b"\x1b]sgpu;1\x07"

# user code and libraries use SIGUSR1 themselves, so it is only the fallback without real-time signals
STACK_SIGNAL = signal.SIGRTMAX - 4 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1

# A rank's stack file, which the agent creates and both sides read. No message could carry its content: the first
# `AREA_BYTES` are a fixed area that the rank writes while it runs, so that it survives a SIGKILL:
#
#     ident of the main thread (8) | valid half: 0 none, 1, 2 (8) | half 1 | half 2
#
# Each half holds the length of its text (8) and the text. The rank writes the half that is not valid, then the number
# of the valid one. Output of faulthandler follows after the area. Both have faulthandler's format:
# `  File "cell.py", line 3 in train`.
AREA_BYTES = 16_384
HEADER = struct.Struct("=QQ")
LENGTH = struct.Struct("=Q")
HALF_BYTES = (AREA_BYTES - HEADER.size) // 2
TEXT_BYTES = HALF_BYTES - LENGTH.size


def half_offset(half: int) -> int:
    """Return the offset of half 1 or 2."""
    return HEADER.size + (half - 1) * HALF_BYTES


def read_area(area: bytes) -> tuple[int, str]:
    """Return the ident of the rank's main thread (0 if it has not started) and the sampled lines ("" for none)."""
    if len(area) < AREA_BYTES:
        return 0, ""
    ident, half = HEADER.unpack_from(area)
    if half not in (1, 2):
        return ident, ""
    begin = half_offset(half)
    (size,) = LENGTH.unpack_from(area, begin)
    begin += LENGTH.size
    return ident, area[begin : begin + min(size, TEXT_BYTES)].decode("utf-8", "replace")

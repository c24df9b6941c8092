"""The layout of a rank's stack file, which the agent makes and both sides read: no message could tell what it holds.

The first `AREA_BYTES` are a fixed area that the rank writes while it runs, so that something is there after a SIGKILL:

    ident of the main thread (8) | valid half: 0 none, 1, 2 (8) | half 1 | half 2

Each half holds the length of its text (8) and the text. The rank writes the half that is not valid, then the number
of the valid one. What faulthandler writes follows after the area. Both are lines of faulthandler's:
`  File "cell.py", line 3 in train`.
"""

from __future__ import annotations

import signal
import struct

# user code and libraries use SIGUSR1 themselves; where there are no real-time signals it must do
STACK_SIGNAL = signal.SIGRTMAX - 4 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1

AREA_BYTES = 16_384
HEADER = struct.Struct("=QQ")
LENGTH = struct.Struct("=Q")
HALF_BYTES = (AREA_BYTES - HEADER.size) // 2
TEXT_BYTES = HALF_BYTES - LENGTH.size


def half_offset(half: int) -> int:
    """Where half 1 or 2 begins."""
    return HEADER.size + (half - 1) * HALF_BYTES


def read_area(area: bytes) -> tuple[int, str]:
    """Return the ident of the rank's main thread (0 when it has not begun) and the sampled lines ("" for none)."""
    if len(area) < AREA_BYTES:
        return 0, ""
    ident, half = HEADER.unpack_from(area)
    if half not in (1, 2):
        return ident, ""
    begin = half_offset(half)
    (size,) = LENGTH.unpack_from(area, begin)
    begin += LENGTH.size
    return ident, area[begin : begin + min(size, TEXT_BYTES)].decode("utf-8", "replace")

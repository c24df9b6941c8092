"""What torch's C++ code writes before it aborts a rank because of a collective.

NCCL's watchdog ends its process from a thread of its own, with `std::terminate`: there is no Python exception, and what
it writes to stderr is the only trace. This is the only module that parses such messages, and only those of ranks that
were killed by SIGABRT. `KNOWN` gives the torch versions whose sources contain each message.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

import msgspec

from sgpu_magic.wire.rank_events import Collective, CollectiveTimeout

# the watchdog reports errors of the rank's own kernels with the same message
_OWN_ERROR = re.compile(
    r"watchdog thread terminated with exception: (?:\[Rank \d+\] )?(?:CUDA|HIP) error", re.IGNORECASE
)
_WORK = re.compile(
    r"(?:\[PG (?:ID )?(?P<number>\d+)(?: PG GUID \S*?)? ?\((?P<group>[^)]*)\) Rank \d+\] )?"
    r"Watchdog caught collective operation timeout: "
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)"
)
_TIMEOUT = re.compile(r"Timeout\(ms\)=(\d+)")
# names as in the flight recorder; those of other collectives differ only in case
_NAMES = {
    "ALLREDUCE": "all_reduce", "ALLREDUCE_COALESCED": "all_reduce_coalesced", "ALLGATHER": "all_gather",
    "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all", "ALLGATHER_COALESCED": "all_gather_coalesced",
}  # fmt: skip
_LINE_CHARS = 300


class Cause(enum.Enum):
    """Why the rank was aborted."""

    TIMED_OUT = enum.auto()
    """A collective did not complete in time: other ranks have not reached it."""
    PEER_LOST = enum.auto()
    """The connection to another rank was lost."""


class NativeAbort(msgspec.Struct, frozen=True):
    """A recognized abort.

    Args:
        cause: Why torch aborted the rank.
        line: The line of output that shows the cause.
        timeout: The collective that timed out, if `cause` is `TIMED_OUT`.
    """

    cause: Cause
    line: str
    timeout: CollectiveTimeout | None = None


class _Known(NamedTuple):
    cause: Cause
    text: str
    torch: str


# in search order: the watchdog repeats the cause when it terminates
KNOWN = (
    _Known(Cause.TIMED_OUT, "Watchdog caught collective operation timeout:", "1.10 to 2.13"),
    _Known(Cause.TIMED_OUT, "Received a dump signal due to a collective timeout from", "2.3 to 2.13"),
    _Known(Cause.TIMED_OUT, "Some NCCL operations have failed or timed out.", "1.10 to 2.13"),
    _Known(Cause.TIMED_OUT, "watchdog got stuck for", "2.2 to 2.13"),
    _Known(Cause.TIMED_OUT, "Terminating the process after attempting to dump debug info, due to", "2.2 to 2.13"),
    _Known(Cause.PEER_LOST, "remote process exited or there was a network error", "2.0 to 2.13"),
    _Known(Cause.PEER_LOST, "ncclRemoteError:", "2.0 to 2.13"),
    _Known(Cause.PEER_LOST, "socketProgress: Connection closed by remote peer", "2.0 to 2.13"),
    _Known(Cause.PEER_LOST, "NCCL communicator was aborted on rank", "1.8 to 2.13"),
    _Known(Cause.PEER_LOST, "NCCL watchdog thread terminated with exception", "1.13 to 2.6"),
    _Known(Cause.PEER_LOST, "Process group watchdog thread terminated with exception", "2.2 to 2.13"),
    _Known(Cause.PEER_LOST, "got error: Connection reset by peer", "2.0 to 2.13"),
)


def find_native_abort(output: str) -> NativeAbort | None:
    """Return why torch aborted a rank; None if its output does not say, or reports an error of the rank's own device.

    Args:
        output: The end of the output of a rank that was killed by SIGABRT.
    """
    if _OWN_ERROR.search(output):
        return None
    lines = output.splitlines()
    for known in KNOWN:
        line = next((line for line in lines if known.text in line), None)
        if line is not None:
            timeout = _timeout_in(output) if known.cause is Cause.TIMED_OUT else None
            return NativeAbort(known.cause, line.strip()[:_LINE_CHARS], timeout)
    return None


def _timeout_in(output: str) -> CollectiveTimeout:
    found = _WORK.search(output)
    if found is None:
        return CollectiveTimeout()
    group = found["group"] or ""
    if group == "default_pg" or (found["number"] or "0") == "0":
        group = ""
    elif group in ("", "undefined"):
        group = found["number"]
    # NCCL's collectives are queued on the device
    collective = Collective(
        name=_NAMES.get(found["op"], found["op"].lower()),
        seq=int(found["seq"] or 0),
        pending=True,
        group=group,
        queued=True,
    )
    limit = _TIMEOUT.search(output, found.start())
    return CollectiveTimeout(collective=collective, seconds=int(limit[1]) / 1000 if limit is not None else None)

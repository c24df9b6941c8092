"""Reads from torch's flight recorder which collective this rank is in.

Newer versions of torch (seen with 2.13) record gloo and NCCL; earlier ones record NCCL only, under another name. A
torch without a recorder gives no answer. torch reads the buffer's size when it makes the first process group.

With 2,000 entries, an all_reduce of one number over gloo takes as long as without a recorder: the smallest of 80 means
of 300 calls was 117 us with and 122 us without.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import torch._C._distributed_c10d as _c10d

from sgpu_magic.wire.rank_events import Collective

_distributed_c10d: Any = _c10d
_BUFFER_ENTRIES = "2000"
_EVERY_BACKEND = "_dump_fr_trace_json"
# the function, newest first, and the variable that it reads
_SIZES = {_EVERY_BACKEND: "TORCH_FR_BUFFER_SIZE", "_dump_nccl_trace_json": "TORCH_NCCL_TRACE_BUFFER_SIZE"}
# beginning of the names of collectives that the calling thread waits for; NCCL's are queued on a stream
_ON_CPU = ("gloo:", "mpi:")
_DUMP = next((name for name in _SIZES if hasattr(_distributed_c10d, name)), "")


class _Entry(msgspec.Struct):
    """The fields of an entry that are read here. Some versions lack some of them, so all have defaults."""

    profiling_name: str = ""
    state: str = ""
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    retired: bool = False
    pg_id: int = 0
    process_group: tuple[str, ...] = ()
    time_created_ns: int = 0


class _Trace(msgspec.Struct):
    entries: list[_Entry] = msgspec.field(default_factory=list[_Entry])


class _Forgotten:
    before_ns = 0


_decoder = msgspec.json.Decoder(_Trace)
_forgotten = _Forgotten()


def switch_on() -> None:
    """Switch the recorder on, unless the user has set its size. To be called before the first process group is made.

    torch 2.13 records 2,000 entries by default; earlier versions may not. A version that knows the newer variable warns
    about the older one.
    """
    if _DUMP and not any(name in os.environ for name in _SIZES.values()):
        os.environ[_SIZES[_DUMP]] = _BUFFER_ENTRIES


def records_every_backend() -> bool:
    """Whether torch records the collectives of all backends; earlier versions record NCCL's only."""
    return _DUMP == _EVERY_BACKEND


def current(rehearsed: int = 0) -> tuple[Collective | None, float]:
    """Return the collective that this rank is in, else its last one, and when it was called.

    The time is in seconds since the epoch. Returns None and 0.0 if no collective is recorded.

    Takes 30 ms with a full recorder and waits for no collective. May be called by any thread.

    Args:
        rehearsed: Number of collectives at the beginning of the default group that were not the user's.
    """
    # collectives from before a renewal are over, even those that the recorder has as pending
    if _forgotten.before_ns:
        rehearsed = 0
    try:
        return newest(getattr(_distributed_c10d, _DUMP)(), rehearsed, _forgotten.before_ns)
    except (AttributeError, RuntimeError, msgspec.DecodeError):
        # no recorder, one that is switched off, or an unknown format
        return None, 0.0


def forget() -> None:
    """Ignore the entries recorded so far. Called after a renewal, after which the numbers begin again."""
    _forgotten.before_ns = time.time_ns()


def newest(trace: bytes | str, rehearsed: int = 0, since_ns: int = 0) -> tuple[Collective | None, float]:
    """Return the first unfinished collective of the trace, else the last one, and when it was called.

    NCCL's collectives are queued: the rank waits in the first unfinished one.
    """
    entries = [entry for entry in _decoder.decode(trace).entries if entry.time_created_ns >= since_ns]
    theirs = [entry for entry in entries if not _is_rehearsed(entry, rehearsed)]
    if not theirs:
        return None, 0.0
    entry = next((entry for entry in theirs if _is_pending(entry)), theirs[-1])
    number = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
    if entry.pg_id == 0 and not entry.is_p2p:
        number -= rehearsed
    found = Collective(
        name=entry.profiling_name.rpartition(":")[2].split(" ")[0],
        seq=number,
        pending=_is_pending(entry),
        group=_group_name(entry),
        queued=not entry.profiling_name.startswith(_ON_CPU),
    )
    return found, entry.time_created_ns / 1e9


def _is_pending(entry: _Entry) -> bool:
    return not entry.retired and entry.state != "completed"


def _is_rehearsed(entry: _Entry, rehearsed: int) -> bool:
    return entry.pg_id == 0 and not entry.is_p2p and entry.collective_seq_id <= rehearsed


def _group_name(entry: _Entry) -> str:
    """Return the group's description if the user gave one, else its number; "" for the default group."""
    name, description = (*entry.process_group, "", "")[:2]
    if description == "default_pg" or name in ("", "0"):
        return ""
    return description if description not in ("", "undefined") else name

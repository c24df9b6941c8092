"""Orders to a zygote and its replies. Descriptors travel beside them on the socketpair."""

from __future__ import annotations

from sgpu_magic.wire.record import Record


class Fork(Record, frozen=True, tag="fork", kw_only=True):
    """Fork one rank of a group. Its descriptors come along: control socket, output pipe, error pipe, stack file,
    store file.

    Args:
        store_path: The store's file where memory files do not exist; "" when its descriptor comes along.
        join_early: Join the process group before `Execute` arrives.
        rehearse: Also run a small cell before it does: there is time. All ranks of a group do, or none.
    """

    group_id: str
    rank: int
    ranks: int
    join_early: bool
    rehearse: bool = False
    store_path: str = ""


class Forked(Record, frozen=True, tag="forked", kw_only=True):
    group_id: str
    rank: int
    pid: int


class ForkRefused(Record, frozen=True, tag="fork-refused", kw_only=True):
    """The zygote has more than one thread, or the machine has no process left."""

    group_id: str
    rank: int
    message: str


class ZygoteReady(Record, frozen=True, tag="zygote-ready", kw_only=True):
    """Its interpreter may have another sgpu-magic than the pool; stable across versions."""

    pid: int
    torch_version: str
    protocol_version: int


class ZygoteFailed(Record, frozen=True, tag="zygote-failed", kw_only=True):
    """The interpreter can't be preloaded; the zygote exits after this."""

    message: str


class Exited(Record, frozen=True, tag="exited", kw_only=True):
    """A child of the zygote ended.

    Args:
        status: The exit code, negative for a signal.
        peak_bytes: The most memory that it ever held; 0 when unknown.
    """

    pid: int
    status: int
    peak_bytes: int = 0


ToZygote = Fork
FromZygote = Forked | ForkRefused | ZygoteReady | ZygoteFailed | Exited

"""Records of Jupyter's comm messages between a rank's widgets and the front end; nothing on their way reads them."""

from __future__ import annotations

from collections.abc import Mapping

from sgpu_magic.wire.record import Record


def can_merge(older: Mapping[str, object], newer: Mapping[str, object], nothing: object) -> bool:
    """Whether an update of traits may take an older one's place, the rest of which stays.

    A trait that is emptied again after it was set is a message of its own, as plotly's figures send them.

    Args:
        older: The traits' values.
        newer: The same, later.
        nothing: How `None` is written there.
    """
    return all((older[name] == nothing) == (value == nothing) for name, value in newer.items() if name in older)


class CommMessage(Record, frozen=True, kw_only=True):
    """One comm message. Its buffers are raw frames beside the record that carries it.

    Args:
        comm_id: The comm, as the rank knows it.
        kind: `open`, `msg` or `close`.
        target: The target's name where `kind` is `open`.
        data: JSON.
        metadata: JSON.
        buffers: How many of the raw frames belong to it.
    """

    comm_id: str
    kind: str
    target: str = ""
    data: bytes = b"{}"
    metadata: bytes = b"{}"
    buffers: int = 0


class TellComms(Record, frozen=True, tag="tell-comms", kw_only=True):
    """Pass on what the front end says to widgets of a rank; lost when the rank is gone.

    Args:
        run_id: The run, or the session whose rank it is.
    """

    run_id: str
    rank: int
    messages: tuple[CommMessage, ...]

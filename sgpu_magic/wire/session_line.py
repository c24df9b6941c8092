"""Messages of a session's line: the direct connection between its notebook and the agent of its ranks.

A cell that comes over the line starts without the pool service. The agent reports it to the service shortly after
(`node.CellTaken`), and sends its events to both.
"""

from __future__ import annotations

from sgpu_magic.wire.base import OfRun, Record
from sgpu_magic.wire.client import Cancel, ResultsReceived, SendComms, Submit
from sgpu_magic.wire.node import RunEvent


class EnterLine(Record, frozen=True, tag="enter-line", kw_only=True):
    """The first message of a notebook, with the token that it has from the pool service."""

    token: bytes


class CellRefused(OfRun, frozen=True, tag="cell-refused", kw_only=True):
    """The session can't start this cell now: submit it to the pool service, where it waits or learns why not."""


ToLine = EnterLine | Submit | Cancel | SendComms | ResultsReceived
FromLine = CellRefused | RunEvent

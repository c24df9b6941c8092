"""The link between a pool service and a node of another machine: messages of `node`, carried over the network.

A link begins with the node's `LinkHello` and lasts until one side hears nothing or misses something; then the next one
begins, and on it the node's agent says again what it has. So nothing on it need be sent twice: what matters is numbered
above it, by run.
"""

from __future__ import annotations

from sgpu_magic.wire.record import Record

BEAT_S = 1.0
"""Each side says so often that it is there, in seconds."""

SILENT_S = 3.5
"""Seconds without a word after which a side takes the other for lost."""


class LinkHello(Record, frozen=True, tag="link-hello", kw_only=True):
    """A node wants a new link; said again until `LinkOpened` comes.

    Args:
        node: Its id, the one that its key was made for.
        link: A name that no other link has.
    """

    node: str
    link: str


class LinkOpened(Record, frozen=True, tag="link-opened", kw_only=True):
    """The pool has taken the link: the agent's first word may come."""

    link: str


class LinkBeat(Record, frozen=True, tag="link-beat", kw_only=True):
    """Still here.

    Args:
        sent: So many messages this side has carried on the link.
    """

    link: str
    sent: int


class Carried(Record, frozen=True, tag="carried", kw_only=True):
    """A message for or from the agent: it is the next frame, and its raw frames follow.

    Args:
        number: 1, 2, 3 ... on the link in this direction.
    """

    link: str
    number: int


class LinkBroken(Record, frozen=True, tag="link-broken", kw_only=True):
    """Something is missing, or the link is not known: begin a new one."""

    link: str


class NodeLeaves(Record, frozen=True, tag="node-leaves", kw_only=True):
    """The node's agent process is over, and so is everything that it had.

    Args:
        why: A sentence's end: `was killed by SIGKILL`; "" when it was told to end.
    """

    link: str
    why: str = ""


FromNode = LinkHello | LinkBeat | Carried | LinkBroken | NodeLeaves
ToNode = LinkOpened | LinkBeat | Carried | LinkBroken

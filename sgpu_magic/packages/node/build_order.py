"""Whether a node has to build an environment, and what its agent and the building process tell each other.

That is JSON, one message on a line.
"""

from __future__ import annotations

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.record import Record


def needs_build(settings: Settings, environment: Environment) -> bool:
    """True unless the kernel's own Python serves: it is at hand on this node, and its own packages are wanted."""
    return not environment.own or settings.environments != "auto"


class BuildOrder(Record, frozen=True, kw_only=True):
    """Build this. Held in memory only: an index's URL and a requirement may have credentials in them.

    Args:
        environment: What.
        root: Where the node keeps its environments.
        name: The folder's, there.
        limit_bytes: The largest environment that is built.
        budget_bytes: What all environments may have together.
        index_url: The setting; "" is uv's and pip's own choice.
    """

    environment: Environment
    root: str
    name: str
    limit_bytes: int
    budget_bytes: int
    index_url: str = ""


class BuildMoved(Record, frozen=True, tag="moved", kw_only=True):
    """What is done now.

    Args:
        step: `waiting`, `resolving`, `downloading`, `installing`.
        done: Packages that are installed.
        packages: Packages in all.
    """

    step: str
    done: int = 0
    packages: int = 0


class BuildReady(Record, frozen=True, tag="ready", kw_only=True):
    """The environment can be used; it is compiled and measured behind this.

    Args:
        built: It was built here; else another process was first.
    """

    built: bool


class BuildRefused(Record, frozen=True, tag="refused", kw_only=True):
    """It can't be had; nothing of it is left. `message` is a paragraph with cause and remedy."""

    message: str


BuildNews = BuildMoved | BuildReady | BuildRefused

encode = msgspec.json.Encoder().encode
decode_order = msgspec.json.Decoder(BuildOrder).decode
decode_news = msgspec.json.Decoder[BuildNews](BuildNews).decode

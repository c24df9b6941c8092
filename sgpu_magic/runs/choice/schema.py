"""A notebook's choice, as it lies in its metadata and goes to a panel: JSON."""

from __future__ import annotations

from sgpu_magic.views.live.schema import Message

VERSION = 1
"""Of all records of the panel. A front end draws only its own version."""

CHOICE_KEY = "sgpu"
"""Where a notebook's metadata has its choice."""


class Choice(Message, frozen=True):
    """What a notebook asks for: bare `%%distributed` and the panel's Connect use it; options on the magic win.

    Args:
        gpus: Number of ranks, 0 for the pool's choice.
        type: Canonical device type, "" for the pool's choice.
        pool: The pool's name, "" for the settings'.
        env_version: Base environment as in `--env-version`, "" for this notebook's packages.
        dependencies: Requirements on top of the base: `peft==0.17.1`.
        removed: Names of the base's packages that are left out.
    """

    gpus: int = 0
    type: str = ""
    pool: str = ""
    env_version: str = ""
    dependencies: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class KeptChoice(Message, frozen=True):
    """A choice as it lies in the notebook's metadata under `CHOICE_KEY`.

    Args:
        choice: The choice.
        signed: By whose key it was made (HMAC-SHA-256 over the choice, hexadecimal), "" by nobody's.
        version: `VERSION`.
    """

    choice: Choice
    signed: str = ""
    version: int = 1

"""This user's own key, by which pools of other machines know them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sgpu_magic.config import config_path
from sgpu_magic.errors import PoolError
from sgpu_magic.system.secure_sockets import KeyPair, read_key_pair

_FILE = "client.key"


def own_key_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the key lies: beside the settings' file."""
    return config_path(environ).parent / _FILE


def own_keys(path: Path, pool: str) -> KeyPair:
    """Return this user's keys.

    Args:
        path: Where they lie.
        pool: The pool that they are for, for the error.

    Raises:
        PoolError: There are none.
        UsageError: Their file can't be trusted.
    """
    try:
        return read_key_pair(path)
    except FileNotFoundError:
        raise PoolError(
            f"the pool {pool} admits listed keys only, and you have no key on this machine ({path}). Make one with "
            "`sgpu pool keygen` and send the public half, which it prints, to who runs the pool."
        ) from None

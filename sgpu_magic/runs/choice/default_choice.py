"""Applies a notebook's choice to options that were not given.

The choice takes precedence over the settings. It does not apply to cells in an existing session.
"""

from __future__ import annotations

import os
from typing import TypeVar

from msgspec.structs import replace

from sgpu_magic.client.pools_file import LOCAL, default_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.options.asked import OWN_PACKAGES, RunOptions
from sgpu_magic.options.notebook_job import with_job
from sgpu_magic.runs.choice.keeper import Held
from sgpu_magic.runs.choice.schema import Choice, words_of
from sgpu_magic.runs.submit.placing import Found
from sgpu_magic.runs.workplace import Workplace

R = TypeVar("R", bound=RunOptions)


MAGIC_WAYS = "--gpus N --type TYPE"
PYTHON_WAYS = 'gpus=N, gpu_type="TYPE"'


# the last choice with changed packages, and the file of its environment
_found: tuple[tuple[Choice, str, int], str] | None = None


def with_choice(place: Workplace, asked: R, ways: str) -> R:
    """Fill in options that were not given: from the defaults of `sgpu run`, then from the notebook's choice.

    Args:
        place: This process's workplace.
        asked: The options of a cell, a call or a session.
        ways: How to give the options instead, for error messages: `MAGIC_WAYS` or `PYTHON_WAYS`.

    Raises:
        UsageError: The choice was made by another user or in another notebook and is not confirmed, or it names a pool
            or environment that does not exist.
        EnvironmentFailed: Its packages are for another Python.
    """
    asked = with_job(asked)
    held = place.choice.now()
    choice = held.choice
    if choice is None:
        return asked
    devices = asked.devices
    ranks = choice.gpus if devices.ranks is None else 0
    # a requested memory leaves the type open
    device_type = choice.type if devices.device_type is None and not devices.min_memory_bytes else ""
    pool = choice.pool if not asked.pool else ""
    packages = not asked.wishes.env_version
    changes = packages and bool(choice.env_version or choice.dependencies or choice.removed)
    if not held.confirmed:
        if ranks or device_type or changes or (pool and pool != pool_name(place)):
            raise UsageError(_foreign(place, held, choice, ways, packages=changes))
        return asked
    if pool and pool not in (known := place.pools.names()):
        raise UsageError(
            f"this notebook's choice names the pool {pool!r}, but you have: {', '.join(known)}. Choose another in the "
            "panel, or name one with --pool."
        )
    wishes = asked.wishes
    if packages:
        wishes = replace(wishes, env_version=_env_version(place.pool.settings, choice))
    devices = replace(
        devices, ranks=devices.ranks or ranks or None, device_type=devices.device_type or device_type or None
    )
    return replace(asked, devices=devices, wishes=wishes, pool=asked.pool or pool)


def placed(place: Workplace, asked: R, ways: str) -> tuple[R, Found]:
    """Return the options completed by `with_choice`, and the pool and placement for them.

    Args:
        place: This process's workplace.
        asked: The options of a cell, a call or a session.
        ways: As in `with_choice`.

    Raises:
        SgpuError: As `with_choice` and `placing.find_place`.
    """
    asked = with_choice(place, asked, ways)
    return asked, place.find(place.wanted_pool(asked.pool), asked.devices)


def pool_name(place: Workplace) -> str:
    """Return the name of the default pool, to show with a choice that names none."""
    try:
        return default_pool(place.current_settings().pool, place.pools.entries())
    except UsageError:
        # an error in the list of pools is reported when one of them is used
        return LOCAL


def _env_version(settings: Settings, choice: Choice) -> str:
    if not choice.env_version:
        # the choice takes precedence over the setting
        return "" if settings.env_version in OWN_PACKAGES else "none"
    if not (choice.dependencies or choice.removed):
        return choice.env_version
    global _found
    key = (choice, str(settings.state_path), _changed_ns(choice.env_version))
    found = _found
    if found is not None and found[0] == key and os.path.exists(found[1]):
        return found[1]
    # imported here: only needed for changed packages
    from sgpu_magic.runs.choice.packages import env_version_of

    file = env_version_of(settings, choice)
    _found = (key, file)
    return file


def _changed_ns(name: str) -> int:
    try:
        return os.stat(os.path.expanduser(name)).st_mtime_ns
    except OSError:
        return 0


def _foreign(place: Workplace, held: Held, choice: Choice, ways: str, *, packages: bool) -> str:
    python = ways is PYTHON_WAYS
    env = ('env_version="none"' if python else "--env-version none") if packages else ""
    said = f"{ways}{', ' if python and env else ' ' if env else ''}{env}"
    return (
        f"this notebook asks for {words_of(choice, pool_name(place))}, and {_who(held)}, so nothing was started. "
        "If it is what you want, confirm it in the panel or with `%sgpu_env --accept`. Otherwise say "
        f"what you want instead: `{said}`."
    )


def _who(held: Held) -> str:
    return f"you chose that in {held.elsewhere}, not here" if held.elsewhere else "somebody else has chosen that"


def held_words(held: Held, pool: str) -> str:
    """Return the line of `%sgpu_env` about the choice; "" if there is none."""
    if held.choice is None:
        return held.problem
    whose = "" if held.confirmed else f"; {_who(held)}: %sgpu_env --accept confirms it"
    problem = f" {held.problem}" if held.problem else ""
    return f"this notebook asks for {words_of(held.choice, pool)}{whose}.{problem}"

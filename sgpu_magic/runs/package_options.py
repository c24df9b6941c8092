"""What users ask for about packages, tracking and cost, read from the options of magics and of Python alike."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

from sgpu_magic.errors import UsageError

TORCH_CHOICES = ("node", "mine")

Upload = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A folder or file, or several."""

EnvVersion = str | int | os.PathLike[str]
"""A base environment's name (`4`, `"ai-4"`), `"none"`, a saved one's name, or a requirements or pylock file."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for about packages, tracking and what goes along.

    Args:
        env_version: `--env-version`: a base environment's, a saved one's or a file's name; `none` is the notebook's own
            packages; "" is the default, the same as `none`.
        torch_mine: `--torch mine`.
        allow_build: `--allow-build`.
        track: False is `--no-track`; None is what the settings say.
        uploads: `--upload`: folders and files that go along.
    """

    env_version: str = ""
    torch_mine: bool = False
    allow_build: bool = False
    track: bool | None = None
    uploads: tuple[str, ...] = ()


def wishes_from(
    env_version: EnvVersion | None = None,
    torch: str | None = None,
    allow_build: bool = False,
    track: bool | None = None,
    upload: Upload = (),
    *,
    option: str = "torch=",
) -> Wishes:
    """Read the options about packages and tracking.

    Args:
        env_version: `--env-version`; None when left out.
        torch: `--torch`; None when left out.
        allow_build: `--allow-build`.
        track: False for `--no-track`; None when left out.
        upload: `--upload`; empty when left out.
        option: What `torch` was given by.

    Raises:
        UsageError: `torch` is no choice.
    """
    if torch is not None and torch not in TORCH_CHOICES:
        raise UsageError(
            f"{option}{torch!r} is not possible: `node` uses the torch of the machine that the ranks run on, `mine` "
            "installs the notebook's own there."
        )
    return Wishes(
        env_version="" if env_version is None else str(env_version).strip(),
        torch_mine=torch == "mine",
        allow_build=bool(allow_build),
        track=track,
        uploads=tuple(os.fspath(path) for path in _several(upload)),
    )


def _several(upload: Upload) -> Iterable[str | os.PathLike[str]]:
    if isinstance(upload, str | os.PathLike):
        # a folder that is named by a path object is one, whatever it can be iterated for
        return (upload,)
    return upload


def max_cost_from(option: str, value: str | float | None) -> float | None:
    """Read the most that a run may cost, in the currency of the settings; None when it is left out.

    Raises:
        UsageError: It is no amount.
    """
    if value is None:
        return None
    try:
        cost = float(value)
    except ValueError:
        cost = math.nan
    if isinstance(value, bool) or not 0 < cost < math.inf:
        raise UsageError(f"{option} is {value!r}; give an amount above 0 in the currency of the prices, such as 5.")
    return cost


def refuse_in_session(session: str, wishes: Wishes, max_cost: float | None, ways: str) -> None:
    """Refuse what only a session as a whole can have.

    Args:
        session: Its name.
        wishes: What is asked for one cell or call.
        max_cost: The same.
        ways: How to get a lease of its own, the rest of a sentence.

    Raises:
        UsageError: It asks for packages or a limit of cost of its own.
    """
    if wishes.env_version or wishes.torch_mine or wishes.allow_build:
        raise UsageError(
            f"the packages are those of session {session}, whose devices this uses, so no others can be chosen here. "
            f"Choose them when the session is connected, or {ways}."
        )
    if max_cost is not None:
        raise UsageError(
            f"what runs on the devices of session {session} costs nothing of its own: the session is what is paid "
            f"for. Give the limit when the session is connected, or {ways}."
        )

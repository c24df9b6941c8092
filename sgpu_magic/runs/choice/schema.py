"""The JSON records of a notebook's choice, in its metadata and in messages to the panel."""

from __future__ import annotations

import msgspec

from sgpu_magic.formatting import count_of
from sgpu_magic.options.values import MOST_RANKS
from sgpu_magic.views.live.schema import Message
from sgpu_magic.wire.decoding import convert
from sgpu_magic.wire.devices import ANY, canonical_type, type_label

CHOICE_VERSION = 1
"""Version of `KeptChoice`. A kernel or front end ignores a choice of a later version."""

CHOICE_KEY = "sgpu"
"""Key of the choice in a notebook's metadata."""


_MOST_PACKAGES = 500
_LONGEST_TEXT = 1000


class Choice(Message, frozen=True):
    """A notebook's choice: used by bare `%%distributed` and the panel's Connect; options on the magic override it.

    Args:
        gpus: Number of ranks; 0 leaves it to the pool.
        type: Canonical device type; "" leaves it to the pool.
        pool: The pool's name; "" for the pool of the settings.
        env_version: Base environment, as in `--env-version`; "" for this notebook's packages.
        dependencies: Requirements to add to the base, such as `peft==0.17.1`.
        removed: Names of packages to remove from the base.
    """

    gpus: int = 0
    type: str = ""
    pool: str = ""
    env_version: str = ""
    dependencies: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class KeptChoice(Message, frozen=True):
    """A choice as stored in the notebook's metadata under `CHOICE_KEY`.

    Args:
        choice: The choice.
        version: `CHOICE_VERSION`.
    """

    choice: Choice
    version: int = 1


# ---------------------------------------------------------------- reading


class Read(msgspec.Struct, frozen=True):
    """The choice read from a notebook's metadata.

    Args:
        kept: The choice; None if there is none that can be read.
        problem: A sentence about what can't be read; "" if there is no problem.
    """

    kept: KeptChoice | None = None
    problem: str = ""


def read_kept(found: object) -> Read:
    """Parse the value under `CHOICE_KEY`. Never raises."""
    if found is None:
        return Read()
    try:
        kept = convert(found, KeptChoice)
    except msgspec.DecodeError as error:
        return Read(None, _unreadable(str(error).rstrip(".")))
    if problem := problem_of(kept.choice):
        return Read(None, _unreadable(problem.rstrip(".")))
    if kept.version > CHOICE_VERSION:
        return Read(
            kept, "This notebook's choice was saved by a newer sgpu-magic; what this version does not know is ignored."
        )
    return Read(kept)


def _unreadable(why: str) -> str:
    return (
        f"This notebook's choice, in its metadata under `{CHOICE_KEY}`, can't be read and is ignored: {why}. "
        "Choose again in the panel."
    )


def problem_of(choice: Choice) -> str:
    """Return why a choice is invalid, a sentence; "" if it is valid. Does not check what a pool has."""
    if not 0 <= choice.gpus <= MOST_RANKS:
        return f"{choice.gpus} is not a number of ranks; 1 to {MOST_RANKS} is possible."
    texts = (choice.type, choice.pool, choice.env_version, *choice.dependencies, *choice.removed)
    long = next((text for text in texts if len(text) > _LONGEST_TEXT or not text.isprintable()), None)
    if long is not None:
        return f"{long[:40]!r} is too long, or contains characters that can't be shown."
    if len(choice.dependencies) + len(choice.removed) > _MOST_PACKAGES:
        return f"more than {_MOST_PACKAGES} packages are added or removed; a requirements file can list more."
    try:
        canonical_type(choice.type or ANY)
    except ValueError as error:
        return str(error)
    if choice.dependencies or choice.removed:
        # imported here: only needed to parse requirements
        from sgpu_magic.runs.choice.packages import problem_of_packages

        return problem_of_packages(choice)
    return ""


def normal(choice: Choice) -> Choice:
    """Return a valid choice with the canonical name of its type; "any" becomes ""."""
    if not choice.type:
        return choice
    name = canonical_type(choice.type)
    return msgspec.structs.replace(choice, type="" if name == ANY else name)


# ---------------------------------------------------------------- as text


def describe_choice(choice: Choice, pool: str) -> str:
    """Return a description such as `2 on A10, local, this notebook's packages`.

    Args:
        choice: The choice.
        pool: The pool of the settings, for a choice that names none.
    """
    kind = type_label(choice.type)
    if choice.gpus:
        devices = f"{choice.gpus} on {kind}" if kind else count_of(choice.gpus, "rank")
    else:
        devices = kind or "the pool's devices"
    return ", ".join((devices, choice.pool or pool, describe_packages(choice)))


def describe_packages(choice: Choice) -> str:
    """Return a description such as `this notebook's packages` or `the packages of 4, peft added`."""
    words = [f"the packages of {choice.env_version}" if choice.env_version else "this notebook's packages"]
    if choice.dependencies:
        words.append(f"{_some(choice.dependencies)} added")
    if choice.removed:
        words.append(f"{_some(choice.removed)} removed")
    return ", ".join(words)


def _some(names: tuple[str, ...]) -> str:
    listed = ", ".join(names[:3])
    return listed + (f" and {len(names) - 3} more" if len(names) > 3 else "")

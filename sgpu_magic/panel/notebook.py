"""Records of a notebook's kernel as a panel draws it: its packages, its session, what applying a choice would do."""

from __future__ import annotations

from typing import Literal

from sgpu_magic.runs.choice.schema import Choice
from sgpu_magic.views.live.schema import Message


class BaseChoice(Message, frozen=True):
    """A base environment that may be chosen.

    Args:
        name: As in `--env-version`; "" is this notebook's packages.
        label: `this notebook's packages`, `4`, `ai-4`, a saved one's name.
        about: `Python 3.12 · 168 packages`.
    """

    name: str
    label: str
    about: str


class PackageLine(Message, frozen=True):
    """A difference of the notebook's environment to its base, or a pending change.

    Args:
        sign: `+` added, `-` removed, `~` another version.
        name: The distribution.
        words: `peft 0.17.1`, `transformers 4.56.1 → 4.57.0`.
        removable: A button takes it back.
    """

    sign: Literal["+", "-", "~"]
    name: str
    words: str
    removable: bool


class SessionPicture(Message, frozen=True):
    """A session of this kernel.

    Args:
        run_id: Its run, found among the pool's runs.
        name: `main`.
        current: Bare `%%distributed` cells run in it.
        state: `RunState`'s value.
        words: for example `2 on A10`.
    """

    run_id: str
    name: str
    current: bool
    state: str
    words: str


class KernelPicture(Message, frozen=True):
    """A kernel that has loaded sgpu-magic.

    Args:
        version: `picture.VERSION`.
        package_version: Of sgpu-magic.
        pool: The settings' pool.
        choice: In effect; None without one.
        choice_words: `2 on A10, local, this notebook's packages`, "" without a choice.
        confirmed: The choice is this user's.
        bases: Environments that may be chosen.
        python: `Python 3.12.3 · torch 2.7.1`, of the chosen base or of the notebook.
        packages: Their number.
        differences: To the chosen base; of the notebook's own packages: what has changed since the kernel began.
        more_differences: So many others are not listed.
        sessions: Those of this kernel that have not ended.
        notes: Sentences: packages that are known to break, modules that are older than what is installed.
    """

    version: int
    package_version: str
    pool: str
    choice: Choice | None
    choice_words: str
    confirmed: bool
    bases: tuple[BaseChoice, ...]
    python: str
    packages: int
    differences: tuple[PackageLine, ...]
    more_differences: int
    sessions: tuple[SessionPicture, ...]
    notes: tuple[str, ...]


class PlanPicture(Message, frozen=True):
    """What applying a choice would do.

    Args:
        sentences: `2 packages will be installed, about 20 s.`, `Session main restarts.`, `Nothing is running.`
        loses: Something would be lost: the button says Confirm.
        problem: Why it can't be applied, "" when it can.
        button: `Apply`, `Apply and connect`, `Connect`.
    """

    sentences: tuple[str, ...]
    loses: bool
    problem: str
    button: str

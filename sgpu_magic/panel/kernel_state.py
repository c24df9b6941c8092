"""A panel's requests to a kernel and the replies, also as text when no panel can be shown: choice, packages, sessions.

Requests arrive on the control channel (`sgpu_request` with the model id `PANEL`) or as a widget's messages. Their
TypeScript twins are generated: `labextension/src/panel/records.ts`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

from sgpu_magic import __version__
from sgpu_magic.client.pools import PATIENCE_S
from sgpu_magic.config import Settings
from sgpu_magic.errors import SgpuError
from sgpu_magic.formatting import count_of
from sgpu_magic.packages import environment_request, named_environments, snapshot
from sgpu_magic.packages.distributions import InstalledPackages, normalised
from sgpu_magic.packages.environment_digest import own_python
from sgpu_magic.packages.mismatches import find_mismatches
from sgpu_magic.packages.named_environments import BASE_NAMES, base_list
from sgpu_magic.packages.nvidia_driver import driver_version
from sgpu_magic.packages.package_metadata import packages_of
from sgpu_magic.packages.requirement_files import key_of, version_of
from sgpu_magic.packages.snapshot import Change, changes, versions
from sgpu_magic.panel.pool_state import as_sentence
from sgpu_magic.panel.schema import (
    VERSION,
    BaseChoice,
    PackageLine,
    PanelKernel,
    PanelPlan,
    PanelSession,
    PanelVariables,
)
from sgpu_magic.runs.choice.keeper import CurrentChoice
from sgpu_magic.runs.choice.packages import Base, base_of, base_versions, problem_of_base
from sgpu_magic.runs.choice.schema import Choice, KeptChoice, describe_choice
from sgpu_magic.runs.environments import describe_stale, report, since_connected
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit import target
from sgpu_magic.views.live.schema import Message
from sgpu_magic.views.pool_tables import environment_text, status_text
from sgpu_magic.wire.devices import type_label

PANEL = "panel"
"""The model id of requests that belong to no run's view."""

_OWN_PACKAGES = "this notebook's packages"
_PUBLISHED = {"4": "Databricks serverless GPU", "ai-4": "Databricks serverless GPU with AI libraries"}
_MOST_DIFFERENCES = 60
_MOST_NOTES = 6
_NO_CHOICE = "this notebook has no choice of its own: runs get what the pool and the settings choose."
_NO_POOL = "no pool is running; the first run starts it."


class AskKernel(Message, frozen=True, tag_field="kind", tag="kernel"):
    """Ask for the notebook's state.

    Args:
        kept: The choice in the notebook's metadata, in effect from now on; None when there is none.
    """

    n: int
    kept: KeptChoice | None = None


class AskPlan(Message, frozen=True, tag_field="kind", tag="plan"):
    """Ask what applying this choice would do.

    Args:
        connect: Include connecting a session afterwards.
    """

    n: int
    choice: Choice
    connect: bool = False


class AskApply(Message, frozen=True, tag_field="kind", tag="apply"):
    """Apply the user's choice, or confirm the notebook's: install packages, and connect if asked.

    Args:
        connect: Connect a session afterwards, or restart the current one.
        confirmed: The user has accepted that something will be lost.
    """

    n: int
    choice: Choice
    connect: bool = False
    confirmed: bool = False


class AskDisconnect(Message, frozen=True, tag_field="kind", tag="disconnect"):
    """End a session; "" for the current one."""

    n: int
    name: str = ""


class AskVariables(Message, frozen=True, tag_field="kind", tag="variables"):
    """Ask for the variables on the ranks of the current session."""

    n: int


KernelQuestion = AskKernel | AskPlan | AskApply | AskDisconnect | AskVariables


class KernelAnswer(Message, frozen=True, tag_field="kind", tag="kernel-answer"):
    """The notebook's state after the request.

    Args:
        kept: The choice to write to the notebook's metadata; None leaves it as it is.
        notice: A sentence about what happened; "" for nothing.
        installing: Packages are being installed; ask again.
    """

    n: int
    snapshot: PanelKernel
    kept: KeptChoice | None = None
    notice: str = ""
    installing: bool = False


class PlanAnswer(Message, frozen=True, tag_field="kind", tag="plan-answer"):
    """What applying the choice would do."""

    n: int
    plan: PanelPlan


class VariablesAnswer(Message, frozen=True, tag_field="kind", tag="variables-answer"):
    """The variables on the ranks."""

    n: int
    variables: PanelVariables


class PanelRefusal(Message, frozen=True, tag_field="kind", tag="panel-refusal"):
    """The request was refused; `text` is a paragraph that says why and what to do."""

    n: int
    text: str


KernelReply = KernelAnswer | PlanAnswer | VariablesAnswer | PanelRefusal


# ---------------------------------------------------------------- the state


def kernel_snapshot(context: KernelContext, held: CurrentChoice) -> PanelKernel:
    """Return the kernel's current state.

    Args:
        context: The kernel's context.
        held: The current choice.
    """
    settings = context.pool.settings
    now = snapshot.take_snapshot()
    choice = held.choice or Choice(env_version=_default(settings))
    notes = [held.problem] if held.problem else []
    if held.other_notebook:
        notes.append(f"You chose this in {held.other_notebook}. Confirm it here if this notebook is yours as well.")
    python, packages, lines = _own(now)
    if choice.env_version:
        try:
            problem = problem_of_base(settings, choice.env_version)
            notes += [problem] if problem else []
            python, packages, lines = _of_base(choice, base_of(settings, choice.env_version))
        except SgpuError as error:
            # a missing base was reported above
            if not notes:
                notes.append(as_sentence(error.message))
    else:
        notes += [*describe_stale(now), *_broken(now)]
    notes += since_connected(now, [session for session in registry.all_sessions() if not session.has_ended])
    pool = target.pool_name(context)
    return PanelKernel(
        version=VERSION,
        package_version=__version__,
        pool=pool,
        choice=held.choice,
        choice_words=describe_choice(held.choice, pool) if held.choice is not None else "",
        confirmed=held.confirmed,
        bases=_bases(settings, now, choice),
        python=python,
        packages=packages,
        differences=tuple(lines[:_MOST_DIFFERENCES]),
        more_differences=max(0, len(lines) - _MOST_DIFFERENCES),
        sessions=tuple(_sessions()),
        notes=tuple(notes[:_MOST_NOTES]),
    )


@functools.lru_cache(1)
def _broken(now: InstalledPackages) -> tuple[str, ...]:
    """Return the known incompatibilities; takes 50 ms after packages have changed."""
    return tuple(mismatch.sentence for mismatch in find_mismatches(packages_of(now), driver=driver_version()))


def _default(settings: Settings) -> str:
    return "" if settings.env_version == environment_request.NONE else settings.env_version


# ---------------------------------------------------------------- packages


def _own(now: InstalledPackages) -> tuple[str, int, list[PackageLine]]:
    here = versions(now)
    first = snapshot.first_snapshot() or now
    lines = [_line(change) for change in changes(versions(first), here)]
    return _python(".".join(map(str, sys.version_info[:3])), here), len(here), lines


def _of_base(choice: Choice, base: Base) -> tuple[str, int, list[PackageLine]]:
    """Return a base's description, package count and differences after applying the choice."""
    there = base_versions(base)
    after = dict(there)
    for name in choice.removed:
        after.pop(normalised(name), None)
    words: dict[str, str] = {}
    for line in choice.dependencies:
        name = key_of(line)
        after[name], words[name] = version_of(line) or "", line
    lines = [
        PackageLine(sign="-", name=normalised(name), words=f"{normalised(name)} {there[normalised(name)]}".strip(),
                    removable=True)
        for name in choice.removed if normalised(name) in there
    ]  # fmt: skip
    for name, line in words.items():
        if name in there:
            now = version_of(line) or str(Requirement(line).specifier) or "latest"
            lines.append(PackageLine(sign="~", name=name, words=f"{name} {there[name]} → {now}", removable=True))
        else:
            change = f"{name} {after[name]}" if after[name] else line
            lines.append(PackageLine(sign="+", name=name, words=change, removable=True))
    python = base_list(choice.env_version).python if choice.env_version in BASE_NAMES else base.python
    return _python(python or own_python(), after), len(after), lines


def _python(version: str, packages: Mapping[str, str]) -> str:
    torch = packages.get("torch")
    return f"Python {version}" + (f" · torch {torch}" if torch else "")


def _line(change: Change) -> PackageLine:
    sign = "~" if change.now else "-"
    if not change.before:
        sign = "+"
    words = f"{change.name} {' → '.join(filter(None, (change.before, change.now)))}"
    return PackageLine(sign=sign, name=change.name, words=words, removable=sign == "+")


def _bases(settings: Settings, now: InstalledPackages, choice: Choice) -> tuple[BaseChoice, ...]:
    """Return this notebook's packages, the published bases, the saved environments, and the chosen one."""
    own = _about(own_python(), len(now.distributions))
    found = [BaseChoice(name="", label=_label(_OWN_PACKAGES, "", own_python()), about=own)]
    for name in BASE_NAMES:
        base = base_list(name)
        label = _label(name, _PUBLISHED[name], base.python_minor)
        found.append(BaseChoice(name=name, label=label, about=_about(base.python_minor, len(base.public))))
    for name in named_environments.saved_names(settings):
        try:
            kept = named_environments.load(settings, name)
        except SgpuError:
            # not offered; naming it explicitly reports the error
            continue
        if kept is not None:
            label = _label(name, "a saved environment", kept.python)
            found.append(BaseChoice(name=name, label=label, about=_about(kept.python, kept.packages)))
    for name in (_default(settings), choice.env_version):
        if name and name not in {base.name for base in found}:
            there = Path(name).expanduser()
            is_file = there.is_file()
            about = f"the file {name}" if is_file else "no such environment here"
            label = _label(os.path.basename(name), "a file" if is_file else "", "")
            found.append(BaseChoice(name=name, label=label, about=about))
    return tuple(found)


def _label(name: str, what: str, python: str) -> str:
    """Return `4: Databricks serverless GPU, Python 3.12`."""
    about = ", ".join(part for part in (what, f"Python {python}" if python else "") if part)
    return f"{name}{': ' if what else ', '}{about}" if about else name


def _about(python: str, packages: int) -> str:
    about = f"Python {python} · {count_of(packages, 'package')}"
    return about if python in ("", own_python()) else f"{about} · needs a kernel of Python {python}"


# ---------------------------------------------------------------- sessions


def _sessions() -> list[PanelSession]:
    sessions = registry.all_sessions()
    return [
        PanelSession(
            run_id=session.run_id,
            name=session.name,
            current=session is sessions[-1],
            state=session.run_state.value,
            words=_describe_devices(session),
        )
        for session in sessions
        if not session.has_ended
    ]


def _describe_devices(session: Session) -> str:
    kind = type_label(session.device_type)
    return f"{session.ranks} on {kind}" if kind else count_of(session.ranks, "rank")


def panel_text(context: KernelContext) -> str:
    """Return the pool, the notebook's choice and its packages as text. Starts no pool."""
    name = target.pool_name(context)
    try:
        looked_at = context.pools.get(name)
        status = looked_at.status(recent=5, start=False, timeout_s=PATIENCE_S)
        pool = _NO_POOL if status is None else status_text(status, notice=looked_at.notice)
    except SgpuError as error:
        pool = error.message
    choice = target.describe_held(context.choice.now(), name) or _NO_CHOICE
    packages = environment_text(report(context.current_settings(), registry.all_sessions()))
    return "\n\n".join((pool.rstrip(), choice, packages.rstrip()))

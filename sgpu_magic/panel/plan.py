"""Computes what applying a choice would do, without doing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from sgpu_magic.client.pool_choosing import KINDS, DeviceRequest, PriceBook, counts, money_of, one_of_several
from sgpu_magic.client.pools import PATIENCE_S, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, SgpuError, UsageError
from sgpu_magic.formatting import count_of, names_text
from sgpu_magic.options.option_records import DEFAULT_NAME, OWN_PACKAGES, Devices, has_devices
from sgpu_magic.packages import environment_request, snapshot
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.packages.snapshot import versions
from sgpu_magic.panel.pool_state import as_sentence
from sgpu_magic.panel.schema import PlanPicture
from sgpu_magic.runs.choice.keeper import CurrentChoice
from sgpu_magic.runs.choice.packages import (
    base_of,
    base_versions,
    env_version_of,
    missing,
    problem_of_base,
    would_install,
)
from sgpu_magic.runs.choice.schema import Choice, label_of, normal, problem_of
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import CPU
from sgpu_magic.wire.pool_status import PoolStatus

_MOST_NAMED = 5


class Plan(msgspec.Struct, frozen=True):
    """The steps of applying a choice.

    Args:
        picture: The plan in sentences.
        added: Requirements to install into this notebook's environment.
        removed: Packages to remove from it.
        restarts: The session to end and replace; None for none.
        connects: A session is started.
    """

    picture: PlanPicture
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    restarts: Session | None = None
    connects: bool = False


def plan(context: KernelContext, held: CurrentChoice, choice: Choice, *, connect: bool, resolve: bool = True) -> Plan:
    """Return what applying a choice would do. Takes at most 2 s besides a pool's answer, and changes nothing.

    Args:
        context: The kernel's context.
        held: The current choice.
        choice: The new choice.
        connect: Include connecting a session.
        resolve: Ask the package index which dependencies would be installed as well.
    """
    known = False
    words: list[str] = []
    try:
        if problem := problem_of(choice):
            raise UsageError(problem)
        choice = normal(choice)
        known = held.confirmed and held.choice == choice
        asked = _asked(context, choice, words, connect=connect)
        status = None if asked is None else asked.status
        if status is not None:
            _check_devices(choice, status, uses_stand_ins=bool(context.settings.stand_in))
        added, removed = _packages(context.pool.settings, choice, words, resolve=resolve)
    except SgpuError as error:
        problem, button = as_sentence(error.message), _button(connect, known)
        return Plan(PlanPicture(sentences=tuple(words), problem=problem, button=button))
    current = living(DEFAULT_NAME)
    changed = bool(added or removed)
    restarts: Session | None = None
    loses = bool(removed)
    if connect:
        if current is not None and fits(current, choice) and not (changed and _has_own_packages(current)):
            words.append(f"Session {current.name} is already connected with this choice.")
        else:
            restarts = current
            if restarts is not None:
                loses |= _restart(restarts, status, words)
            _waiting(choice, asked, restarts, words, money_of(context.pool.settings))
    else:
        _left_alone(current, choice, changed, words)
    button = _button(connect, known and not changed)
    picture = PlanPicture(sentences=tuple(words), loses=loses, button=button)
    connects = connect and (current is None or restarts is not None)
    return Plan(picture, added, removed, restarts, connects)


def living(name: str) -> Session | None:
    """Return the session of that name that has not ended; the current one for "".

    Unlike `registry.find` this drops no ended session, so that the next cell can report its end.
    """
    found = [session for session in registry.all_sessions() if not session.has_ended and name in ("", session.name)]
    return found[-1] if found else None


def fits(session: Session, choice: Choice) -> bool:
    """Whether a session satisfies a choice."""
    if session.run_state is RunState.CANCELLING:
        return False
    if not has_devices(session, Devices(choice.gpus or None, choice.type or None), choice.pool):
        return False
    if not choice.env_version:
        return _has_own_packages(session)
    return session.environment.env_version == env_version_of(session.context.pool.settings, choice, write=False)


def _button(connect: bool, known: bool) -> str:
    if not connect:
        return "Apply"
    return "Connect" if known else "Apply and connect"


def _asked(context: KernelContext, choice: Choice, words: list[str], *, connect: bool) -> PoolStatusReply | None:
    """Return the pool with its status; None when no pool is running, as a plan starts none, or when none is needed."""
    if not (connect or choice.gpus or choice.type or choice.pool):
        return None
    name = choice.pool or context.current_settings().pool
    entries = context.pools.entries()
    if name in (*KINDS, "") and entries:
        found = context.resolve_target(name, Devices(choice.gpus or 1, choice.type or None))
        words += [as_sentence(note) for note in found.notes]
        pool = found.pool
    else:
        if name and name not in (known := context.pools.names()):
            raise UsageError(f"There is no pool named {name!r}. You have: {', '.join(known)}.")
        pool = context.pools.named(name or LOCAL)
    if pool is not context.pools.local:
        if connect and not choice.gpus:
            raise UsageError(f"The pool {pool.name} is shared with others: choose how many devices.")
        return PoolStatusReply(pool.name, pool.entry, pool.status(1, timeout_s=PATIENCE_S))
    try:
        status = pool.status(recent=1, start=False)
        return None if status is None else PoolStatusReply(pool.name, None, status)
    except PoolError:
        # connecting will report the same problem
        return None


# ---------------------------------------------------------------- devices


def _check_devices(choice: Choice, status: PoolStatus, *, uses_stand_ins: bool) -> None:
    """Refuse a choice that the pool can never satisfy."""
    inventory = status.inventory
    types = _totals(status)
    if choice.type == CPU or (not choice.type and not types):
        if choice.gpus > inventory.cpu_slots:
            raise UsageError(f"The pool has {inventory.cpu_slots} CPU slots, but {choice.gpus} are requested.")
        return
    if choice.type and choice.type not in types:
        if uses_stand_ins:
            return
        has = ", ".join(f"{count} {label_of(name)}" for name, count in types.items()) or "no GPUs"
        has += f", and {inventory.cpu_slots} CPU slots"
        raise UsageError(f"The pool has no {label_of(choice.type)}. It has: {has}.")
    most = types[choice.type] if choice.type else max(types.values())
    if choice.gpus > most and not uses_stand_ins:
        of = f" {label_of(choice.type)}" if choice.type else " of one type"
        raise UsageError(f"The pool has {most}{of}, but {choice.gpus} are requested.")


def _totals(status: PoolStatus) -> dict[str, int]:
    return Counter(device.type for device in status.inventory.devices)


def _waiting(
    choice: Choice, asked: PoolStatusReply | None, restarts: Session | None, words: list[str], money: PriceBook
) -> None:
    """Add which of several types is taken, and whether the session will wait for devices or for the pool's start."""
    if asked is None or asked.status is None:
        words.append("The pool is started first.")
        return
    status = asked.status
    types = _totals(status)
    if choice.type == CPU or not types or (choice.type and choice.type not in types):
        # CPU stands in for a type that the pool lacks
        ours = restarts.ranks if restarts is not None and restarts.device_type == CPU else 0
        free, kind, wanted = status.cpu_slots_free + ours, "CPU slots", choice.gpus or 2
    else:
        # the restarted session's devices are free by then
        ours = restarts.run_id if restarts is not None else ""
        others = tuple(run for run in status.runs if run.run_id != ours)
        asked = replace(asked, status=replace(status, runs=others))
        chosen = choice.type
        if not chosen:
            several, note = one_of_several(asked, DeviceRequest(choice.gpus or None), money)
            chosen = several or max(types, key=lambda name: types[name])
            sentence = as_sentence(note)
            words += [sentence] if sentence and sentence not in words else []
        free, wanted = counts(replace(status, runs=others))[chosen].free, choice.gpus or types[chosen]
        kind = label_of(chosen)
    if free < wanted:
        there = f"{free} of the {wanted} {kind} that this needs {'is' if free == 1 else 'are'}"
        if free <= 0:
            there = f"No {kind.removesuffix('s')} is"
        words.append(f"{there} free now: the session waits in the queue.")


# ---------------------------------------------------------------- sessions


def _restart(session: Session, status: PoolStatus | None, words: list[str]) -> bool:
    """Add a sentence about restarting a session; return whether something is lost."""
    # ask the pool, as the session learns of its cells a moment later
    runs = status.runs if status is not None else ()
    running = [run.name for run in runs if run.session == session.run_id and not run.state.is_final]
    lost = sorted(session.shipping.own_names(session.ranks_of(())))
    # the session's event about a cell that has just ended may be on its way
    loses = bool(session.cells or lost)
    text = f"Session {session.name} restarts"
    if loses:
        text += ": its ranks' variables are lost" + (f" ({_listed(lost)})" if lost else "")
    if running:
        text += f", and what runs in it is stopped ({_listed(running)})"
    words.append(f"{text}.")
    return loses or bool(running)


def _left_alone(current: Session | None, choice: Choice, changed: bool, words: list[str]) -> None:
    """Add a sentence about the sessions when none is connected or ended."""
    if current is None:
        words.append("Nothing is running." if not registry.names() else "Sessions stay as they are.")
    elif not fits(current, choice):
        words.append(f"Session {current.name} stays as it is; the choice applies to the next one.")
    elif changed and _has_own_packages(current):
        words.append(f"Session {current.name} continues; its ranks see the installed packages after %sgpu_restart.")


def _has_own_packages(session: Session) -> bool:
    return not session.spec.environment_label


# ---------------------------------------------------------------- packages


def _packages(
    settings: Settings, choice: Choice, words: list[str], *, resolve: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add sentences about packages; return what is added to and removed from the notebook's environment."""
    if choice.env_version:
        _for_ranks(settings, choice, words)
        return (), ()
    installed = versions(snapshot.take_snapshot())
    added = missing(choice.dependencies, installed)
    removed = tuple(name for name in choice.removed if normalised(name) in installed)
    if added:
        words.append(_coming(settings, added, resolve=resolve))
    if removed:
        words.append(f"{_listed(removed)} will be removed from this notebook's environment.")
    if settings.env_version not in OWN_PACKAGES:
        words.append(f"The setting env_version ({settings.env_version}) does not apply to this notebook.")
    return added, removed


def _coming(settings: Settings, added: tuple[str, ...], *, resolve: bool) -> str:
    what = f"{_many(len(added))} and {'its' if len(added) == 1 else 'their'} dependencies will be installed"
    if resolve:
        try:
            coming = would_install(settings, added, PATIENCE_S)
        except TimeoutError:
            # the index is slow; the installation asks it again
            coming = ()
        if coming:
            named = f": {_listed([name for name in coming if name])}" if coming[0] else ""
            what = f"{_many(len(coming))} will be installed{named}"
    return f"{what}, in this notebook's environment."


def _for_ranks(settings: Settings, choice: Choice, words: list[str]) -> None:
    """Add sentences about packages that are installed where the ranks run."""
    problem = problem_of_base(settings, choice.env_version)
    if problem:
        raise UsageError(problem)
    found = environment_request.chosen(settings, choice.env_version)
    if not (choice.dependencies or choice.removed) and found is not None:
        # other machines are not checked
        if not any(settings.environments_path.glob(f"{found.environment.digest}*")):
            count = found.environment.packages
            words.append(f"{_many(count)} will be installed where the ranks run, when they start.")
        return
    there = base_versions(base_of(settings, choice.env_version))
    unknown = [name for name in choice.removed if normalised(name) not in there]
    if unknown:
        raise UsageError(f"{choice.env_version} has no {_listed(unknown)} to leave out.")
    count = len(there) - len(choice.removed) + len(missing(choice.dependencies, {}))
    words.append(
        f"About {_many(count)} will be installed where the ranks run, when they start, unless they are there already."
    )


def _listed(names: Iterable[str]) -> str:
    return names_text(names, _MOST_NAMED)


def _many(packages: int) -> str:
    return count_of(packages, "package")

"""Determines what applying a choice would do, without doing it. `format_plan` formats the result."""

from __future__ import annotations

import contextlib
import enum
from collections import Counter

import msgspec
from msgspec.structs import replace

from sgpu_magic.client.pool_choosing import KINDS, DeviceRequest, PriceBook, counts, money_of, one_of_several
from sgpu_magic.client.pools import PATIENCE_S, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL, unknown_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, SgpuError, UsageError
from sgpu_magic.formatting import names_text
from sgpu_magic.options.option_records import DEFAULT_NAME, OWN_PACKAGES, Devices, has_devices
from sgpu_magic.packages import environment_request, snapshot
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.packages.snapshot import versions
from sgpu_magic.runs.choice.keeper import CurrentChoice
from sgpu_magic.runs.choice.packages import (
    base_of,
    base_versions,
    env_version_of,
    missing,
    problem_of_base,
    would_install,
)
from sgpu_magic.runs.choice.schema import Choice, normal, problem_of
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import CPU, type_label
from sgpu_magic.wire.pool_status import PoolStatus

MOST_NAMED = 5
"""Names in a sentence, at most."""


class SessionStep(enum.Enum):
    """What applying the choice does to the sessions."""

    NONE_RUNS = enum.auto()
    OTHERS_STAY = enum.auto()
    """Sessions other than the default one are connected."""
    CONTINUES = enum.auto()
    STAYS_WITHOUT_CHOICE = enum.auto()
    """The session does not satisfy the choice, which applies to the next one."""
    SEES_NEW_PACKAGES_LATER = enum.auto()
    """The session's ranks see the changed packages after a restart."""
    IS_CONNECTED = enum.auto()
    """The session satisfies the choice, so no other is connected."""
    CONNECTS = enum.auto()
    """A session is started, in place of the one that restarts if there is one."""


class RankPackages(msgspec.Struct, frozen=True):
    """Packages that are installed where the ranks run, when they start.

    Args:
        count: The number of packages.
        is_estimate: Whether the number is estimated, and some may be installed there already.
    """

    count: int
    is_estimate: bool


class PackageChanges(msgspec.Struct, frozen=True):
    """What happens to packages.

    Args:
        added: Requirements to install into this notebook's environment.
        removed: Packages to remove from it.
        coming: All packages that the index would install for `added`, "" for one whose name it does not give; empty if
            the index was not asked or did not answer in time.
        for_ranks: Packages that the ranks' nodes install; None for none.
        ignored_setting: The setting `env_version`, which does not apply to this notebook; None if it does or is unset.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    coming: tuple[str, ...] = ()
    for_ranks: RankPackages | None = None
    ignored_setting: str | None = None


class Restart(msgspec.Struct, frozen=True):
    """The end of a session that another one replaces.

    Args:
        session: The session.
        has_state: Whether its ranks may have variables that are lost.
        lost: Names of variables that are lost, as far as they are known.
        running: Names of the cells that are stopped.
    """

    session: Session
    has_state: bool
    lost: tuple[str, ...]
    running: tuple[str, ...]


class DeviceShortage(msgspec.Struct, frozen=True):
    """Devices that a session has to wait for.

    Args:
        device_type: Their type; `cpu` for slots.
        wanted: How many the session needs.
        free: How many of them are free.
    """

    device_type: str
    wanted: int
    free: int


class DevicesNow(msgspec.Struct, frozen=True):
    """What a session would find in the pool now.

    Args:
        type_note: Which of several types is taken and why; None if there is no choice.
        shortage: The devices that it waits for; None if enough are free.
    """

    type_note: str | None = None
    shortage: DeviceShortage | None = None


class Plan(msgspec.Struct, frozen=True):
    """The steps of applying a choice.

    Args:
        connect: Whether a session was asked for.
        is_known: Whether the choice is the notebook's confirmed one already.
        problem: Why the choice can't be applied; None if it can. Nothing below it is known then.
        pool_notes: Why the pool is chosen.
        packages: What happens to packages.
        step: What happens to the sessions; None with a problem.
        session: The default session; None if none is connected.
        restart: The end of the session that is replaced; None if none is.
        devices: What the new session would find; None if none is started, or the pool is started first.
    """

    connect: bool
    is_known: bool = False
    problem: SgpuError | None = None
    pool_notes: tuple[str, ...] = ()
    packages: PackageChanges = PackageChanges()
    step: SessionStep | None = None
    session: Session | None = None
    restart: Restart | None = None
    devices: DevicesNow | None = None

    @property
    def changes_packages(self) -> bool:
        """Whether this notebook's environment changes."""
        return bool(self.packages.added or self.packages.removed)

    @property
    def connects(self) -> bool:
        """Whether a session is started."""
        return self.step is SessionStep.CONNECTS

    @property
    def loses(self) -> bool:
        """Whether something is lost: packages, variables of ranks, or a running cell."""
        restart = self.restart
        return bool(self.packages.removed) or (restart is not None and bool(restart.has_state or restart.running))


def plan(context: KernelContext, held: CurrentChoice, choice: Choice, *, connect: bool, resolve: bool = True) -> Plan:
    """Return what applying a choice would do. Takes at most 2 s besides a pool's answer, and changes nothing.

    Args:
        context: The kernel's context.
        held: The current choice.
        choice: The new choice.
        connect: Include connecting a session.
        resolve: Ask the package index which dependencies would be installed as well.
    """
    found = Plan(connect)
    try:
        if problem := problem_of(choice):
            raise UsageError(problem)
        choice = normal(choice)
        found = replace(found, is_known=held.confirmed and held.choice == choice)
        asked, notes = _ask_pool(context, choice, connect=connect)
        found = replace(found, pool_notes=notes)
        status = None if asked is None else asked.status
        if status is not None:
            _check_devices(choice, status, uses_stand_ins=bool(context.settings.stand_in))
        found = replace(found, packages=_packages(context.pool.settings, choice, resolve=resolve))
    except SgpuError as error:
        return replace(found, problem=error)
    current = living(DEFAULT_NAME)
    found = replace(found, session=current)
    if not connect:
        return replace(found, step=_left_alone(current, choice, changed=found.changes_packages))
    if current is not None and fits(current, choice) and not (found.changes_packages and _has_own_packages(current)):
        return replace(found, step=SessionStep.IS_CONNECTED)
    devices = None
    if asked is not None and asked.status is not None:
        devices = _devices(choice, asked, asked.status, current, money_of(context.pool.settings))
    restart = None if current is None else _restart(current, status)
    return replace(found, step=SessionStep.CONNECTS, restart=restart, devices=devices)


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


def _ask_pool(
    context: KernelContext, choice: Choice, *, connect: bool
) -> tuple[PoolStatusReply | None, tuple[str, ...]]:
    """Return the pool with its status, and why it is chosen.

    The pool is None when none is running, as a plan starts none, or when none is needed.
    """
    notes: tuple[str, ...] = ()
    if not (connect or choice.gpus or choice.type or choice.pool):
        return None, notes
    name = choice.pool or context.current_settings().pool
    entries = context.pools.entries()
    if name in (*KINDS, "") and entries:
        found = context.resolve_target(name, Devices(choice.gpus or 1, choice.type or None))
        notes, pool = found.notes, found.pool
    else:
        if name and name not in (known := context.pools.names()):
            raise unknown_pool(name, known)
        pool = context.pools.get(name or LOCAL)
    if pool is not context.pools.local:
        if connect and not choice.gpus:
            raise UsageError(f"The pool {pool.name} is shared with others: choose how many devices.")
        return PoolStatusReply(pool.name, pool.entry, pool.status(1, timeout_s=PATIENCE_S)), notes
    try:
        status = pool.status(recent=1, start=False)
    except PoolError:
        # connecting will report the same problem
        return None, notes
    return None if status is None else PoolStatusReply(pool.name, None, status), notes


# ---------------------------------------------------------------- devices


def _check_devices(choice: Choice, status: PoolStatus, *, uses_stand_ins: bool) -> None:
    """Refuse a choice that the pool can never satisfy."""
    inventory = status.inventory
    types = _totals(status)
    if choice.type == CPU or (not choice.type and not types):
        if choice.gpus > (most := inventory.most_cpu_ranks):
            raise UsageError(
                f"The pool starts at most {most} ranks of one run on CPU, but {choice.gpus} are requested."
            )
        return
    if choice.type and choice.type not in types:
        if uses_stand_ins:
            return
        has = ", ".join(f"{count} {type_label(name)}" for name, count in types.items()) or "no GPUs"
        has += f", and {inventory.cpu_slots} CPU ranks"
        raise UsageError(f"The pool has no {type_label(choice.type)}. It has: {has}.")
    most = types[choice.type] if choice.type else max(types.values())
    if choice.gpus > most and not uses_stand_ins:
        of = f" {type_label(choice.type)}" if choice.type else " of one type"
        raise UsageError(f"The pool has {most}{of}, but {choice.gpus} are requested.")


def _totals(status: PoolStatus) -> dict[str, int]:
    return Counter(device.type for device in status.inventory.devices)


def _devices(
    choice: Choice, asked: PoolStatusReply, status: PoolStatus, restarts: Session | None, money: PriceBook
) -> DevicesNow:
    """Return which of several types is taken, and the devices that the session will wait for."""
    types = _totals(status)
    note = None
    if choice.type == CPU or not types or (choice.type and choice.type not in types):
        # CPU stands in for a type that the pool lacks
        ours = restarts.ranks if restarts is not None and restarts.device_type == CPU else 0
        chosen, free, wanted = CPU, status.cpu_slots_free + ours, choice.gpus or 2
    else:
        # the restarted session's devices are free by then
        ours = restarts.run_id if restarts is not None else ""
        status = replace(status, runs=tuple(run for run in status.runs if run.run_id != ours))
        chosen = choice.type
        if not chosen:
            several, note = one_of_several(replace(asked, status=status), DeviceRequest(choice.gpus or None), money)
            chosen = several or max(types, key=lambda name: types[name])
        free, wanted = counts(status)[chosen].free, choice.gpus or types[chosen]
    return DevicesNow(note, DeviceShortage(chosen, wanted, free) if free < wanted else None)


# ---------------------------------------------------------------- sessions


def _restart(session: Session, status: PoolStatus | None) -> Restart:
    # ask the pool, as the session learns of its cells a moment later
    runs = status.runs if status is not None else ()
    running = tuple(run.name for run in runs if run.session == session.run_id and not run.state.is_final)
    lost = tuple(sorted(session.shipping.own_names(session.ranks_of(()))))
    # the session's event about a cell that has just ended may be on its way
    return Restart(session, bool(session.cells or lost), lost, running)


def _left_alone(current: Session | None, choice: Choice, *, changed: bool) -> SessionStep:
    """Return what happens to the sessions when none is connected or ended."""
    if current is None:
        return SessionStep.OTHERS_STAY if registry.names() else SessionStep.NONE_RUNS
    if not fits(current, choice):
        return SessionStep.STAYS_WITHOUT_CHOICE
    if changed and _has_own_packages(current):
        return SessionStep.SEES_NEW_PACKAGES_LATER
    return SessionStep.CONTINUES


def _has_own_packages(session: Session) -> bool:
    return not session.spec.environment_label


# ---------------------------------------------------------------- packages


def _packages(settings: Settings, choice: Choice, *, resolve: bool) -> PackageChanges:
    if choice.env_version:
        return PackageChanges(for_ranks=_for_ranks(settings, choice))
    installed = versions(snapshot.take_snapshot())
    added = missing(choice.dependencies, installed)
    coming: tuple[str, ...] = ()
    if added and resolve:
        # if the index is slow, the installation asks it again
        with contextlib.suppress(TimeoutError):
            coming = tuple(would_install(settings, added, PATIENCE_S))
    return PackageChanges(
        added=added,
        removed=tuple(name for name in choice.removed if normalised(name) in installed),
        coming=coming,
        ignored_setting=None if settings.env_version in OWN_PACKAGES else settings.env_version,
    )


def _for_ranks(settings: Settings, choice: Choice) -> RankPackages | None:
    """Return the packages that are installed where the ranks run; None if they are there.

    Raises:
        UsageError: The choice's environment does not exist or can't be used.
    """
    problem = problem_of_base(settings, choice.env_version)
    if problem:
        raise UsageError(problem)
    found = environment_request.find_named(settings, choice.env_version)
    if not (choice.dependencies or choice.removed) and found is not None:
        # other machines are not checked
        if any(settings.environments_path.glob(f"{found.environment.digest}*")):
            return None
        return RankPackages(found.environment.packages, is_estimate=False)
    there = base_versions(base_of(settings, choice.env_version))
    unknown = [name for name in choice.removed if normalised(name) not in there]
    if unknown:
        raise UsageError(f"{choice.env_version} has no {names_text(unknown, MOST_NAMED)} to leave out.")
    return RankPackages(len(there) - len(choice.removed) + len(missing(choice.dependencies, {})), is_estimate=True)

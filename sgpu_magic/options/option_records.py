"""What cells, calls and sessions request, in the protocol's terms, and whether a connected session has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.errors import UsageError
from sgpu_magic.formatting import count_of
from sgpu_magic.options.rank_lists import RankList
from sgpu_magic.wire.devices import type_label
from sgpu_magic.wire.run import OutputName

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions import Session

DEFAULT_NAME = "main"
"""Default name of a session."""

OWN_PACKAGES = ("", "none")
"""Values of `--env-version` and of the setting `env_version` for the notebook's own packages."""


class Devices(msgspec.Struct, frozen=True):
    """The devices that a run requests.

    Args:
        ranks: Number of ranks; None if not given.
        device_type: Canonical device type; None if not given.
        min_memory_bytes: Least memory of each device in bytes; 0 for any.
        nodes: Number of nodes to spread the ranks over evenly; 0 leaves it to the pool.
        strategy: `pack`, `strict_pack` or `spread`; "" if not given, which means `pack`.
        allow_busy: Also take devices that other programs use.
    """

    ranks: int | None = None
    device_type: str | None = None
    min_memory_bytes: int = 0
    nodes: int = 0
    strategy: str = ""
    allow_busy: bool = False


class EnvironmentOptions(msgspec.Struct, frozen=True):
    """Options for packages, tracking and uploads.

    Args:
        env_version: `--env-version`: a base environment, a saved one or a file; `none` means the notebook's own
            packages; "" if not given.
        torch_mine: `--torch mine`.
        allow_build: `--allow-build`.
        track: False is `--no-track`; None follows the settings.
        uploads: `--upload`: folders and files to upload.
        files: `--files`: `auto` or `off`; "" follows the settings.
    """

    env_version: str = ""
    torch_mine: bool = False
    allow_build: bool = False
    track: bool | None = None
    uploads: tuple[str, ...] = ()
    files: str = ""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell, a call or a session requests.

    Args:
        devices: The devices; the pool decides what is not given.
        name: Name of the run; "" derives it from the code.
        outputs: Names to bring back.
        extra: Additional names to ship, such as those that only `eval` reads.
        exclude: Names not to ship.
        variables: Environment variables to set on the ranks.
        timeout_s: Longest running time, in seconds.
        wait_s: Longest time in the queue, in seconds; None means no limit.
        grace_s: Seconds between SIGTERM and SIGKILL; None means the pool's default.
        retries: How often to start the ranks again after a failure.
        retry_on_any: Also retry after an error of the user's code.
        detach: Return at once and let the run continue without its notebook.
        nowait: Return at once with the run's handle; the run ends with its notebook.
        here: Run the cell in the notebook first.
        group: Show the lines rank by rank at the end.
        only: Ranks of a session to run on, ascending; empty means all.
        fresh: Run in new processes on a session's devices.
        reload: Reload edited local modules on a session's ranks first.
        auto: Whether `%sgpu_auto` sent the cell.
        environment: Options for packages, tracking and uploads.
        profile: Save a trace of torch's profiler from each rank.
        max_cost: Cost limit in the currency of the settings; None means no limit.
        ray: Run as the driver of a Ray cluster started for the run, in rank 0 only.
        idle_s: Seconds without a cell after which a session ends, 0 for never; None means the setting `session_idle_s`.
        pool: The pool or kind of pool; "" leaves it to the notebook's choice and the settings.
        ui: How the run is shown.
    """

    devices: Devices = msgspec.field(default_factory=Devices)
    name: str = ""
    outputs: tuple[OutputName, ...] = ()
    extra: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    variables: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    timeout_s: float = SEVEN_DAYS_S
    wait_s: float | None = None
    grace_s: float | None = None
    retries: int = 0
    retry_on_any: bool = False
    detach: bool = False
    nowait: bool = False
    here: bool = False
    group: bool = False
    only: tuple[int, ...] = ()
    fresh: bool = False
    reload: bool = False
    auto: bool = False
    environment: EnvironmentOptions = msgspec.field(default_factory=EnvironmentOptions)
    profile: bool = False
    max_cost: float | None = None
    ray: bool = False
    idle_s: float | None = None
    pool: str = ""
    ui: str = "auto"

    @property
    def ranks(self) -> int | None:
        return self.devices.ranks

    @property
    def device_type(self) -> str | None:
        return self.devices.device_type


class SessionOptions(RunOptions, frozen=True, kw_only=True):
    """Options of a session."""

    name: str = DEFAULT_NAME


class CellOptions(RunOptions, frozen=True, kw_only=True):
    """Options of a cell.

    Args:
        session: `--session`; "" if not given.
        selected: The ranks that the line names; empty if it names none. `only` has them once the session is known.
    """

    session: str = ""
    selected: RankList = ()


class CallOptions(RunOptions, frozen=True, kw_only=True):
    """Options of a function call.

    Args:
        session: The session whose ranks are used; None requests a new lease.
    """

    session: Session | None = None


class ReplayOptions(RunOptions, frozen=True, kw_only=True):
    """Options of a replay; what is not given is taken from the recorded run.

    Args:
        timeout_s: Longest running time, in seconds; 0 means the recorded run's.
        here: `--here`: use this Python and its packages instead of the recorded ones.
    """

    timeout_s: float = 0.0
    here: bool = False


# ---------------------------------------------------------------- checks against a session


def check_cell(session: Session | None, options: CellOptions, magic: str) -> None:
    """Reject options of a cell that contradict its session.

    Args:
        session: The session that it runs in; None for a new lease.
        options: The cell's options.
        magic: The cell's magic: `%%distributed`, `%%rank` or `%%ray_launch`.

    Raises:
        UsageError: An option contradicts the session.
    """
    if session is None:
        if options.selected:
            highest = max((rank for rank in options.selected if isinstance(rank, int) and rank > 0), default=1)
            option = "--ranks" if magic == "%%distributed" else "%%rank"
            raise UsageError(
                f"{option} names ranks of a session, and this cell runs in none. Connect first: %sgpu_connect "
                f"--gpus {highest + 1}, or leave {option} out."
            )
        return
    has = f"session {session.name} has {count_of(session.ranks, 'rank')} on {type_label(session.device_type)}"
    ways = "--session none gives the cell its own devices"
    if not options.fresh:
        ways = f"--ranks runs it on some of them, --fresh in new processes on the session's devices, and {ways}"
    asks = {
        "ranks": f", and --gpus {options.ranks} asks for others. Leave --gpus out; {ways}.",
        "type": f", and --type {options.device_type} asks for others. Leave --type out; {ways}.",
        "busy": ", and --allow-busy chooses others. Leave it out: %sgpu_connect takes it.",
        "devices": ", and --min-memory, --nodes and --placement choose others. Leave them out: %sgpu_connect "
        "takes them.",
        "pool": f" in the pool {session.pool.name}, and --pool {options.pool} names another. Leave --pool out; {ways}.",
    }
    differs = next(iter(misfits(session, options, fewer=options.fresh)), "")
    if differs in asks:
        raise UsageError(f"{has}{asks[differs]}")
    _refuse_in_session(session, options, "give the cell its own devices with --session none")
    if options.detach:
        raise UsageError(
            f"--detach is not possible in session {session.name}: its ranks end with this notebook, and all that runs "
            "on their devices. Leave it out, or give the cell its own devices with --session none."
        )
    if (options.retries or options.retry_on_any) and not options.fresh:
        raise UsageError(
            f"--retries is not possible in session {session.name}: its ranks stay, and the cell is not started again. "
            "Use --fresh for new processes on its devices, or --session none for devices of its own."
        )


def check_call(session: Session, options: RunOptions) -> None:
    """Reject options of a function call that contradict its session.

    Raises:
        UsageError: An option contradicts the session.
    """
    if {"ranks", "type"}.intersection(misfits(session, options)):
        raise UsageError(
            f"session {session.name} has {session.ranks} ranks on {type_label(session.device_type)}, and the options "
            f"ask for {options.ranks or session.ranks} on {type_label(options.device_type or session.device_type)}. "
            "Leave gpus and gpu_type out, or leave session out: then new ranks are started."
        )
    _refuse_in_session(session, options, "leave session out")
    if options.retries:
        raise UsageError("a run in a session is not retried automatically. Leave retries or session out.")


def _refuse_in_session(session: Session, options: RunOptions, ways: str) -> None:
    """Reject options that only a whole session can have; `ways` ends the sentence on how to get a new lease instead."""
    differs = misfits(session, options)
    if "packages" in differs:
        raise UsageError(
            f"this runs on the devices of session {session.name} and uses its packages, so no others can be chosen "
            f"here. Choose them when you connect the session, or {ways}."
        )
    if "cost" in differs:
        raise UsageError(
            f"a run on the devices of session {session.name} has no cost of its own: it is part of the session's cost. "
            f"Give the limit when you connect the session, or {ways}."
        )


def has_devices(session: Session, devices: Devices, pool: str) -> bool:
    """Whether a session has the requested devices, in the named pool; "" means any pool."""
    placement = session.spec.placement
    return (
        devices.ranks in (None, session.ranks)
        and devices.device_type in (None, placement.device_type, session.device_type)
        and devices.min_memory_bytes in (0, placement.min_memory_bytes)
        and devices.nodes in (0, placement.nodes)
        and pool in ("", session.pool.name)
    )


def is_same(session: Session, ask: RunOptions) -> bool:
    """Whether a session matches the options of a connect."""
    spec = session.spec
    return (
        has_devices(session, ask.devices, ask.pool)
        and ask.idle_s in (None, spec.idle_s or 0)
        and all(session.variables.get(name) == value for name, value in ask.variables.items())
        and ask.environment in (EnvironmentOptions(), session.environment)
        and ask.max_cost in (None, spec.max_cost)
    )


def misfits(session: Session, options: RunOptions, *, fewer: bool = False) -> list[str]:
    """Return which options the session does not match, in the order of reporting.

    Args:
        session: The session.
        options: The requested options.
        fewer: Accept fewer ranks than the session has.
    """
    devices, environment, ranks = options.devices, options.environment, options.ranks or session.ranks
    found = {
        "ranks": ranks > session.ranks if fewer else ranks != session.ranks,
        "type": options.device_type not in (None, "any", session.device_type, session.placement.device_type),
        "busy": devices.allow_busy,
        "devices": bool(devices.min_memory_bytes or devices.nodes or devices.strategy),
        "pool": options.pool not in ("", session.pool.name),
        "packages": bool(environment.env_version or environment.torch_mine or environment.allow_build),
        "cost": options.max_cost is not None,
    }
    return [name for name, differs in found.items() if differs]

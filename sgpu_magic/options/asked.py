"""What cells, calls and sessions request: parsed and checked options in the protocol's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.errors import UsageError
from sgpu_magic.wire.run import OutputName

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions import Session

DEFAULT_NAME = "main"
"""Default name of a session."""


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


OWN_PACKAGES = ("", "none")
"""Values of `--env-version` and of the setting `env_version` for the notebook's own packages."""


class Wishes(msgspec.Struct, frozen=True):
    """Options for packages, tracking and uploads.

    Args:
        env_version: `--env-version`: a base environment, a saved one or a file; `none` means the notebook's own
            packages; "" if not given.
        torch_mine: `--torch mine`.
        allow_build: `--allow-build`.
        track: False is `--no-track`; None follows the settings.
        uploads: `--upload`: folders and files to upload.
    """

    env_version: str = ""
    torch_mine: bool = False
    allow_build: bool = False
    track: bool | None = None
    uploads: tuple[str, ...] = ()


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
        retry_any: Also retry after an error of the user's code.
        detach: Return at once and let the run continue without its notebook.
        nowait: Return at once with the run's handle; the run ends with its notebook.
        here: Run the cell in the notebook first.
        group: Show the lines rank by rank at the end.
        only: Ranks of a session to run on, ascending; empty means all.
        fresh: Run in new processes on a session's devices.
        reload: Reload edited local modules on a session's ranks first.
        auto: Whether `%sgpu_auto` sent the cell.
        wishes: Options for packages, tracking and uploads.
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
    retry_any: bool = False
    detach: bool = False
    nowait: bool = False
    here: bool = False
    group: bool = False
    only: tuple[int, ...] = ()
    fresh: bool = False
    reload: bool = False
    auto: bool = False
    wishes: Wishes = msgspec.field(default_factory=Wishes)
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
    """

    session: str = ""


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


def refuse_in_session(session: str, wishes: Wishes, max_cost: float | None, ways: str) -> None:
    """Reject options that only a whole session can have.

    Args:
        session: The session's name.
        wishes: Options of the cell or call.
        max_cost: Cost limit of the cell or call.
        ways: How to get a new lease instead, as the end of a sentence.

    Raises:
        UsageError: Packages or a cost limit were requested.
    """
    if wishes.env_version or wishes.torch_mine or wishes.allow_build:
        raise UsageError(
            f"this runs on the devices of session {session} and uses its packages, so no others can be chosen here. "
            f"Choose them when you connect the session, or {ways}."
        )
    if max_cost is not None:
        raise UsageError(
            f"a run on the devices of session {session} has no cost of its own: it is part of the session's cost. "
            f"Give the limit when you connect the session, or {ways}."
        )

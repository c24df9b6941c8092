"""What cells, calls and sessions ask for, checked and in the protocol's words."""

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
"""The session's that is given none."""


class Devices(msgspec.Struct, frozen=True):
    """What a run asks for of devices.

    Args:
        ranks: None when left out.
        device_type: Canonical; None when left out.
        min_memory_bytes: Of each device; 0 when it does not matter.
        nodes: Nodes that the ranks are spread over evenly; 0 leaves it to the pool.
        strategy: `pack`, `strict_pack` or `spread`; "" when left out, which is `pack`.
        allow_busy: Also devices that others use.
    """

    ranks: int | None = None
    device_type: str | None = None
    min_memory_bytes: int = 0
    nodes: int = 0
    strategy: str = ""
    allow_busy: bool = False


class Wishes(msgspec.Struct, frozen=True):
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


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell, a call or a session asks for; what was left out has its default.

    Args:
        devices: How many of which; what is left out is the pool's choice.
        name: What to call it; "" is found in the code.
        outputs: Names to bring back.
        extra: Names to ship that only `eval` reads.
        exclude: Names that stay in the notebook.
        variables: Set on the ranks.
        timeout_s: Longest running time in seconds.
        wait_s: Longest time in the queue in seconds; None is as long as it takes.
        grace_s: Seconds between TERM and KILL; None is the pool's default.
        retries: How often its group is started again.
        retry_any: Also after an error of the user's code.
        detach: It goes on without its notebook.
        only: The ranks of a session that take part, ascending; empty means all.
        fresh: In new processes on a session's devices.
        reload: Load edited local modules anew on a session's ranks first.
        auto: Sent by `%sgpu_auto`.
        wishes: About packages and tracking.
        profile: Each rank keeps a trace of torch's profiler.
        max_cost: What it may cost in the currency of the settings; None is no limit.
        ray: It is the driver of a Ray cluster of the run's own, and runs in rank 0 alone.
        idle_s: A session ends after so many seconds without a cell, 0 never; None is the setting `session_idle_s`.
        pool: The pool, or a kind of pools; "" leaves that to the notebook's choice and the settings.
        ui: How it is shown.
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
    """A session's."""

    name: str = DEFAULT_NAME


class CellOptions(RunOptions, frozen=True, kw_only=True):
    """A cell's.

    Args:
        session: `--session`; "" when left out.
    """

    session: str = ""


class CallOptions(RunOptions, frozen=True, kw_only=True):
    """A function's.

    Args:
        session: Its ranks are used; None is a lease of its own.
    """

    session: Session | None = None


class ReplayOptions(RunOptions, frozen=True, kw_only=True):
    """What may differ from the recorded run on purpose; what is left out is the run's.

    Args:
        timeout_s: 0 is the run's.
        here: `--here`: this Python and its packages, whatever the run had.
    """

    timeout_s: float = 0.0
    here: bool = False


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

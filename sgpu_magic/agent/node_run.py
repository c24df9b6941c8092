"""What the agent asks of everything that it runs: fresh runs, sessions, and the cells in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sgpu_magic.agent.belongings import Belongings
from sgpu_magic.protocol.events import EventBody
from sgpu_magic.protocol.measures import RankStack
from sgpu_magic.protocol.node_messages import Launch, TrackingKnown
from sgpu_magic.protocol.states import RunState


class NodeRun(Protocol):
    """A run on this node."""

    launch: Launch
    run_id: str
    belongings: Belongings

    @property
    def pids(self) -> list[int]:
        """Of its ranks; none while it is being made ready."""
        ...

    @property
    def state(self) -> RunState: ...
    @property
    def ended(self) -> bool:
        """Its last word was said."""
        ...

    @property
    def gone(self) -> bool:
        """Its ranks are dead and reaped, or idle again in their session."""
        ...

    @property
    def age_s(self) -> float: ...
    def end_as(self, state: RunState, reason: str) -> None: ...
    def kill(self) -> None: ...
    def detach(self) -> None: ...
    def tracking_known(self, message: TrackingKnown) -> None: ...
    def adopted(self) -> None: ...
    def give_payload_up(self) -> None: ...
    def results_received(self) -> None: ...
    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None: ...


class NodeRunListener(Protocol):
    """The agent."""

    def tracking_asked(self, run_id: str) -> None:
        """A rank wants to know the run's place in MLflow."""
        ...

    def happened(self, run_id: str, body: EventBody, frames: Sequence[bytes]) -> None: ...
    def run_gone(self, run: NodeRun) -> None: ...

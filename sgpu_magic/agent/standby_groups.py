"""Groups of ranks that have started before a run needs them."""

from __future__ import annotations

import asyncio
import contextlib

from sgpu_magic.agent.preloaded_zygotes import PreloadedZygotes
from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.orders import device_of, prepare, rank_variables_of
from sgpu_magic.agent.ranks.zygotes import Zygote, Zygotes
from sgpu_magic.config import Settings
from sgpu_magic.wire.node import Launch, NodePart
from sgpu_magic.wire.run import Interpreter

# above this size, ranks of a standby group join late, since gloo's loops cost CPU while they wait
_JOIN_EARLY_MAX = 8
# a standby group that is not needed for this long is paused
_PAUSE_S = 2.0


class StandbyGroups:
    """The node's zygotes and its standby groups: one for runs, and one for each session that has had a fresh run.

    Args:
        settings: The pool's settings.

    Attributes:
        zygotes: The node's zygotes.
        preloaded: Those that have executed what runs import.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.zygotes = Zygotes(settings.state_path / "logs", settings.zygote_idle_s)
        self.preloaded = PreloadedZygotes(self.zygotes, settings, rank_variables_of, self._renew_standby)
        # by session; "" is for runs with their own lease
        self._standbys: dict[str, Group] = {}
        self._last_on_gpus = False
        self._departing: list[Group] = []

    def acquire(self, launch: Launch) -> tuple[Group, str]:
        """Return a group for the run, forked or being forked, and how it was started: `standby`, `zygote` or `cold`.

        Raises:
            OSError: The interpreter can't be executed.
        """
        ranks, on_gpus = launch.spec.placement.ranks, device_of(launch) == "cuda"
        zygote = self._zygote_for(launch)
        session, part = launch.spec.session, launch.part
        if part is None:
            for key in (session, "") if session else ("",):
                standby = self._standbys.get(key)
                fits = standby is not None and _fits(standby, zygote, ranks, on_gpus)
                if standby is not None and fits and not standby.has_dead_rank():
                    del self._standbys[key]
                    standby.resume()
                    return standby, "standby"
            self.drop(session)
        warm = "zygote" if zygote.ready else "cold"
        # ranks that have joined each other can't be part of a larger group
        return self._make(zygote, ranks, part is None and not on_gpus, part=part), warm

    def dismiss(self, group: Group) -> None:
        """End a group without a run."""
        group.dismiss()
        self._departing.append(group)

    def warm(self, interpreter: Interpreter, ranks: int) -> None:
        """Start this interpreter's zygote, and a standby group of `ranks` (0 for none)."""
        # an error is reported when a run needs it
        with contextlib.suppress(OSError):
            zygote = self.preloaded.last_used(interpreter) or self.zygotes.get(interpreter)
            if ranks:
                self._replenish("", zygote, ranks, self._last_on_gpus)

    def replenish_after(self, launch: Launch) -> None:
        """Keep a standby group like this run's for the next run."""
        if launch.part is not None:
            return
        self._last_on_gpus = device_of(launch) == "cuda"
        with contextlib.suppress(OSError):
            self._replenish("", self._zygote_for(launch), launch.spec.placement.ranks, self._last_on_gpus)

    def keep_for_session(self, session: Launch) -> None:
        """Keep a standby group for the session's next fresh run; on GPUs it creates its CUDA contexts.

        Args:
            session: The session's own launch.
        """
        key, on_gpus = session.spec.run_id, device_of(session) == "cuda"
        with contextlib.suppress(OSError):
            self._replenish(key, self._zygote_for(session), session.spec.placement.ranks, on_gpus)
        group = self._standbys.get(key)
        if group is not None and on_gpus and not group.master_port:
            try:
                prepare(session, group, range(len(group.ranks)), stays=False)
            except OSError:
                self.drop(key)

    def drop(self, session: str) -> None:
        """Drop the standby group of a session, such as one that ends; "" is for runs with their own lease."""
        standby = self._standbys.pop(session, None)
        if standby is not None:
            self.dismiss(standby)

    def tend(self) -> None:
        """Drop broken and idle standby groups, pause others; free groups whose ranks have exited; retire zygotes."""
        for key, standby in list(self._standbys.items()):
            is_idle = not key and self._loop.time() - standby.wanted_at > self._settings.standby_idle_s
            if standby.broken or is_idle:
                self.drop(key)
            elif self._loop.time() - standby.wanted_at > _PAUSE_S:
                standby.pause()
        for group in [group for group in self._departing if group.is_dead()]:
            group.close()
            self._departing.remove(group)
        self.zygotes.retire()

    def _zygote_for(self, launch: Launch) -> Zygote:
        return self.preloaded.zygote_for(launch) or self.zygotes.get(launch.interpreter)

    def _renew_standby(self, interpreter: Interpreter) -> None:
        """Fork the standby group for runs anew, from the zygote that has just preloaded what they import."""
        standby, zygote = self._standbys.get(""), self.preloaded.last_used(interpreter)
        if standby is not None and zygote is not None and standby.zygote.interpreter.key == interpreter.key:
            self._replenish("", zygote, len(standby.ranks), not standby.join_early)

    def _make(
        self,
        zygote: Zygote,
        ranks: int,
        join_early: bool,
        warm_up: bool = False,
        part: NodePart | None = None,
    ) -> Group:
        return Group(
            zygote,
            ranks if part is None else part.ranks,
            join_early,
            self._settings.output_limit,
            self._settings.runtime_path,
            warm_up=warm_up,
            first_rank=0 if part is None else part.first_rank,
            world_size=ranks,
        )

    def _replenish(self, key: str, zygote: Zygote, ranks: int, on_gpus: bool) -> None:
        if not self._settings.standby:
            return
        standby = self._standbys.get(key)
        if standby is not None:
            if _fits(standby, zygote, ranks, on_gpus):
                standby.wanted_at = self._loop.time()
                return
            self.drop(key)
        with contextlib.suppress(OSError):
            join_early = ranks <= _JOIN_EARLY_MAX and not on_gpus
            self._standbys[key] = self._make(zygote, ranks, join_early, warm_up=join_early)


def _fits(group: Group, zygote: Zygote, ranks: int, on_gpus: bool) -> bool:
    if group.broken or group.zygote is not zygote or len(group.ranks) != ranks:
        return False
    # a group that has joined uses gloo; NCCL would initialize CUDA before the ranks know their devices
    return not (on_gpus and group.join_early)

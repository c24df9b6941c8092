"""Groups of ranks at hand: forked when a run needs one, and one of the last size kept ready."""

from __future__ import annotations

import asyncio

from sgpu_magic.agent.group import Group
from sgpu_magic.agent.zygotes import Zygotes
from sgpu_magic.config import Settings
from sgpu_magic.protocol.node_messages import Launch
from sgpu_magic.protocol.records import Interpreter

# above this the ranks of a standby group join late: gloo's loops cost CPU while they wait
_JOIN_EARLY_MAX = 8


class Groups:
    """The node's zygotes and its standby group.

    Args:
        settings: The pool's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._zygotes = Zygotes(settings.state_path / "logs", settings.zygote_idle_s)
        self._standby: Group | None = None
        self._last_on_gpus = False
        self._departing: list[Group] = []

    def take(self, launch: Launch) -> tuple[Group, str]:
        """Return a group for the run, forked or being forked, and how it came: `standby`, `zygote` or `cold`.

        Raises:
            OSError: The interpreter can't be executed.
        """
        interpreter, ranks, on_gpus = launch.interpreter, launch.spec.placement.ranks, _on_gpus(launch)
        standby = self._standby
        if standby is not None and _fits(standby, interpreter, ranks, on_gpus) and not standby.has_dead_rank():
            self._standby = None
            return standby, "standby"
        self._drop_standby()
        zygote = self._zygotes.get(interpreter)
        warm = "zygote" if zygote.ready else "cold"
        return self._make(interpreter, ranks, join_early=not on_gpus), warm

    def dismiss(self, group: Group) -> None:
        """End a group that belongs to no run."""
        group.dismiss()
        self._departing.append(group)

    def warm(self, interpreter: Interpreter, ranks: int) -> None:
        """Start this interpreter's zygote, and a standby group of `ranks` (0 for none)."""
        try:
            self._zygotes.get(interpreter)
        except OSError:
            # told when a run needs it
            return
        if ranks:
            self._replenish(interpreter, ranks)

    def replenish_after(self, launch: Launch) -> None:
        """Keep a group like this run's at hand for the next one."""
        self._last_on_gpus = _on_gpus(launch)
        self._replenish(launch.interpreter, launch.spec.placement.ranks)

    def tend(self) -> None:
        """Drop what was unused for too long, and free what has left."""
        standby = self._standby
        if standby is not None and (
            standby.broken or self._loop.time() - standby.wanted_at > self._settings.standby_idle_s
        ):
            self._drop_standby()
        for group in [group for group in self._departing if group.gone]:
            group.close()
            self._departing.remove(group)
        self._zygotes.retire()

    def zygote_pids(self) -> list[int]:
        return self._zygotes.pids()

    def close(self) -> None:
        """End every zygote, and with it all its ranks."""
        self._zygotes.close()

    def _make(self, interpreter: Interpreter, ranks: int, join_early: bool, *, rehearse: bool = False) -> Group:
        settings = self._settings
        zygote = self._zygotes.get(interpreter)
        return Group(zygote, ranks, join_early, settings.output_limit, settings.runtime_path, rehearse=rehearse)

    def _replenish(self, interpreter: Interpreter, ranks: int) -> None:
        if not self._settings.standby:
            return
        if self._standby is not None:
            if _fits(self._standby, interpreter, ranks, self._last_on_gpus):
                self._standby.wanted_at = self._loop.time()
                return
            self._drop_standby()
        try:
            join_early = ranks <= _JOIN_EARLY_MAX and not self._last_on_gpus
            self._standby = self._make(interpreter, ranks, join_early, rehearse=join_early)
        except OSError:
            return

    def _drop_standby(self) -> None:
        if self._standby is not None:
            self.dismiss(self._standby)
            self._standby = None


def _on_gpus(launch: Launch) -> bool:
    return bool(launch.lease.uuids) and not launch.lease.simulated


def _fits(group: Group, interpreter: Interpreter, ranks: int, on_gpus: bool) -> bool:
    if group.broken or group.zygote.interpreter.key != interpreter.key or len(group.ranks) != ranks:
        return False
    # one that has joined is a group of gloo: NCCL asks the driver, which then no longer hears which devices are its
    return not (on_gpus and group.join_early)

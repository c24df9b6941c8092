"""Machine-wide device locks: two users' pools never share a GPU.

Locks are either names in the kernel, which all users of the machine share (`lock_sockets`), or files in a directory
(`lock_files`). A lock that can't be used affects only its own device.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from sgpu_magic.errors import CapacityError
from sgpu_magic.nodes.lock_files import LockFiles
from sgpu_magic.nodes.lock_obstacle import Obstacle
from sgpu_magic.nodes.lock_sockets import LockSockets

_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z-]{1,80}")
_SIMULATED = re.compile(r"SIM-[0-9A-Za-z-]{1,80}")


class DevicesLocked(CapacityError):
    """Requested devices can't be locked: another pool on this machine holds them, or their locks can't be used.

    Attributes:
        obstacles: Why, by device.
    """

    def __init__(self, obstacles: Mapping[str, Obstacle]) -> None:
        self.obstacles = dict(obstacles)
        # one paragraph for each different reason
        held = [uuid for uuid, obstacle in self.obstacles.items() if obstacle.holder]
        words = list(dict.fromkeys(obstacle.problem for obstacle in self.obstacles.values() if obstacle.problem))
        if held:
            verb = "is" if len(held) == 1 else "are"
            words.append(
                f"{', '.join(held)} {verb} held by {self.obstacles[held[0]].holder}, which belongs to another pool. "
                "Wait until its runs have ended, or ask for fewer devices."
            )
        super().__init__(" ".join(words))


class DeviceLocks:
    """The locks that this process holds. Use it from one thread.

    Simulated devices (`SIM-...`) belong to one pool: they are accepted everywhere and never locked.

    The descriptors are closed on exec. A plain fork copies them, and the locks last until the last copy is
    closed, so the process that holds them must start others by exec only.

    Args:
        directory: A directory on local disk that all pools share; None for the names that the machine has.
    """

    def __init__(self, directory: Path | None) -> None:
        self._locks = LockSockets() if directory is None else LockFiles(directory)
        self._held: dict[str, int] = {}

    @property
    def held(self) -> frozenset[str]:
        """The devices that this object has locked."""
        return frozenset(self._held)

    def acquire(self, uuids: Collection[str]) -> None:
        """Lock all of `uuids`, or none.

        Raises:
            DevicesLocked: Another process, or another `DeviceLocks`, holds some of them, or some can't be locked.
            ValueError: One is not a device UUID, is listed twice, or is held here already.
        """
        wanted = [uuid for uuid in uuids if _is_real(uuid)]
        twice = {uuid for uuid in wanted if uuid in self._held or wanted.count(uuid) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))}: already locked here")
        taken: dict[str, int] = {}
        obstacles: dict[str, Obstacle] = {}
        with contextlib.ExitStack() as undo:
            for uuid in wanted:
                found = self._locks.take(uuid)
                if isinstance(found, Obstacle):
                    obstacles[uuid] = found
                else:
                    taken[uuid] = found
                    undo.callback(self._locks.release, found)
            if obstacles:
                raise DevicesLocked(obstacles)
            for descriptor in taken.values():
                self._locks.holding(descriptor)
            undo.pop_all()
        self._held.update(taken)

    def descriptors(self, uuids: Collection[str]) -> list[int]:
        """The descriptors that hold the locks of `uuids`; a copy in another process holds the lock too."""
        return [self._held[uuid] for uuid in uuids if uuid in self._held]

    def take_over(self, uuids: Collection[str], descriptors: Collection[int]) -> None:
        """Take over locks that another process of this pool holds.

        Args:
            uuids: The devices.
            descriptors: Copies of that process's descriptors, in the order of `uuids`.

        Raises:
            ValueError: The numbers of devices and descriptors differ, or a device is held here already.
        """
        taken = dict(zip((uuid for uuid in uuids if uuid not in self._held), descriptors, strict=True))
        for descriptor in taken.values():
            self._locks.adopt(descriptor)
        self._held.update(taken)

    def release(self, uuids: Collection[str]) -> None:
        """Unlock those of `uuids` that are held here; ignore the others."""
        for uuid in self._held.keys() & uuids:
            self._locks.release(self._held.pop(uuid))

    def obstacles(self, uuids: Collection[str]) -> dict[str, Obstacle]:
        """Return why those of `uuids` that others hold, or whose locks can't be used, can't be locked. Locks none.

        Raises:
            ValueError: One is not a device UUID.
        """
        others = [uuid for uuid in uuids if _is_real(uuid) and uuid not in self._held]
        return {uuid: found for uuid in others if (found := self._locks.obstacle(uuid)) is not None}

    def close(self) -> None:
        """Release all locks. May be called repeatedly."""
        self.release(self.held)
        self._locks.close()


def _is_real(uuid: str) -> bool:
    if _UUID.fullmatch(uuid):
        return True
    if _SIMULATED.fullmatch(uuid):
        return False
    raise ValueError(f"{uuid[:100]!r} is not a device UUID")

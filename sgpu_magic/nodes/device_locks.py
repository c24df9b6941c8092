"""Machine-wide device locks: two users' pools never share a GPU.

A lock is flock(2) on `<uuid>.lock` in a directory that all users share. The kernel drops it with the process
that holds it, so nothing has to be cleaned up after a kill; the files stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from sgpu_magic.errors import CapacityError
from sgpu_magic.nodes.lock_files import UUID, LockFiles, let_go, write_holder

_SIMULATED = re.compile(r"SIM-[0-9A-Za-z-]{1,80}")


class DevicesLocked(CapacityError):
    """Another pool on this machine holds devices that were asked for.

    Attributes:
        uuids: All of the asked devices that are held elsewhere.
        holder: Who holds the first of them, `process 4242 of user alice on host node7`.
    """

    def __init__(self, uuids: Collection[str], holder: str) -> None:
        self.uuids = tuple(uuids)
        self.holder = holder
        verb = "is" if len(self.uuids) == 1 else "are"
        super().__init__(
            f"{', '.join(self.uuids)} {verb} held by {holder}, a pool outside this one. "
            "Wait until its runs are over, or ask for fewer devices."
        )


class DeviceLocks:
    """The locks that this process holds. Use it from one thread.

    Simulated devices (`SIM-...`) are each pool's own: they are accepted everywhere and never locked.

    The descriptors are closed on exec. A plain fork copies them, and the locks last until the last copy is
    closed, so the process that holds them starts others by exec only.

    Args:
        directory: Shared by all users of the machine, on local disk; made with mode 1777 when missing.

    Raises:
        PoolError: It can't be made or is not a directory in which all users may make files.
    """

    def __init__(self, directory: Path) -> None:
        self._files = LockFiles(directory)
        self._held: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def held(self) -> frozenset[str]:
        """The devices that are locked here now."""
        return frozenset(self._held)

    def acquire(self, uuids: Collection[str]) -> None:
        """Lock all of `uuids`, or none.

        Raises:
            DevicesLocked: Another process, or another `DeviceLocks`, holds some of them.
            ValueError: One is no device's UUID, stands twice, or is held here already.
            PoolError: A lock file is not what it should be; the message names it.
        """
        wanted = [uuid for uuid in uuids if _is_real(uuid)]
        twice = {uuid for uuid in wanted if uuid in self._held or wanted.count(uuid) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))}: locked here already")
        taken: dict[str, int] = {}
        refused: dict[str, str] = {}
        try:
            for uuid in wanted:
                fd, holder = self._files.take(uuid)
                if fd is None:
                    refused[uuid] = holder
                else:
                    taken[uuid] = fd
            if refused:
                raise DevicesLocked(refused, next(iter(refused.values())))
            for fd in taken.values():
                write_holder(fd)
        except BaseException:
            for fd in taken.values():
                let_go(fd)
            raise
        self._held.update(taken)

    def descriptors(self, uuids: Collection[str]) -> list[int]:
        """The descriptors that hold the locks of `uuids`; a copy of one in another process holds its lock too."""
        return [self._held[uuid] for uuid in uuids if uuid in self._held]

    def take_over(self, uuids: Collection[str], descriptors: Collection[int]) -> None:
        """Own locks that another process of this pool holds, by copies of its descriptors, in the order of `uuids`.

        Raises:
            ValueError: Their numbers differ, or one is held here already.
        """
        self._held.update(zip((uuid for uuid in uuids if uuid not in self._held), descriptors, strict=True))

    def release(self, uuids: Collection[str]) -> None:
        """Unlock those of `uuids` that are held here; others are passed over."""
        for uuid in uuids:
            fd = self._held.pop(uuid, None)
            if fd is not None:
                let_go(fd)

    def locked_elsewhere(self, uuids: Collection[str]) -> dict[str, str]:
        """Return which of `uuids` somebody else holds, and who, without locking any.

        Raises:
            ValueError: One is no device's UUID.
            PoolError: A lock file is not what it should be; the message names it.
        """
        found: dict[str, str] = {}
        for uuid in uuids:
            if _is_real(uuid) and uuid not in self._held and (holder := self._files.held_by(uuid)):
                found[uuid] = holder
        return found

    def close(self) -> None:
        """Unlock everything. May be called again."""
        self.release(tuple(self._held))
        self._files.close()


def _is_real(uuid: str) -> bool:
    if UUID.fullmatch(uuid):
        return True
    if _SIMULATED.fullmatch(uuid):
        return False
    raise ValueError(f"{uuid[:100]!r} is no device's UUID")

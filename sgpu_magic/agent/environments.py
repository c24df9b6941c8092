"""The environments that this node has built or builds, and which runs wait for them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.agent import faults
from sgpu_magic.agent.building import Building
from sgpu_magic.config import Settings, host_name
from sgpu_magic.packages.node.base_layer import layer_tag
from sgpu_magic.packages.node.build_order import (
    BuildMoved,
    BuildNews,
    BuildOrder,
    BuildReady,
    BuildRefused,
    needs_build,
)
from sgpu_magic.packages.node.store import Built, HeldLock, Store
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.events import EnvironmentMoved
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.run import Interpreter

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.preparing import PreparingRun

_TELL_S = 0.5
# between the builder's last word and its lock, another pool may have removed what it built
_ATTEMPTS = 3
# a zygote needs them to start; the others are those that the kernel's zygote would have
_ALWAYS = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ", "VIRTUAL_ENV")


_NOT_BEGUN = BuildMoved(step="")


@dataclass(eq=False, slots=True)
class _Wanted:
    """One environment.

    Args:
        environment: What.
        since: When its build was ordered.
        building: The process that builds it.
        held: It, and the lock that keeps it.
        waiters: By run; None for a run that is still in the pool's queue.
        keepers: Runs that have it, and have no ranks yet.
        moved: How far its build has got.
        was_built: By our own process.
        refused: Why it can't be had.
        attempts: How often it was built.
        told_at: When the waiters last heard of it.
        telling: They hear of it soon.
    """

    environment: Environment
    since: float
    building: Building | None = None
    held: tuple[Built, HeldLock] | None = None
    waiters: dict[str, PreparingRun | None] = field(default_factory=dict[str, "PreparingRun | None"])
    keepers: set[str] = field(default_factory=set[str])
    moved: BuildMoved = _NOT_BEGUN
    was_built: bool = False
    refused: str = ""
    attempts: int = 0
    told_at: float = 0.0
    telling: asyncio.TimerHandle | None = None


class Environments:
    """Builds what runs want, once, and holds what zygotes use.

    Args:
        settings: The pool's settings.
        used_keys: Keys of the interpreters that have zygotes.
    """

    def __init__(self, settings: Settings, used_keys: Callable[[], Iterable[str]]) -> None:
        self._settings = settings
        self._used_keys = used_keys
        self._loop = asyncio.get_running_loop()
        self._store = Store(settings.environments_path)
        self._host = host_name()
        self._wanted: dict[str, _Wanted] = {}
        # nobody waits for them: they compile, or clean up
        self._ending: set[Building] = set()

    def needed(self, launch: Launch) -> bool:
        """Whether the run's ranks get a built environment."""
        return launch.environment is not None and needs_build(self._settings, launch.environment)

    def prepare(self, run_id: str, environment: Environment) -> None:
        """A run in the queue will want this."""
        if needs_build(self._settings, environment) and self.at_hand(environment) is None:
            self._want(run_id, environment, None)

    def at_hand(self, environment: Environment) -> Built | None:
        """What is there already, held from now on; the caller starts a zygote of it, or waits for it."""
        try:
            name = self._name(environment)
            wanted = self._wanted.get(name)
            if wanted is not None and wanted.held is not None:
                self._store.touch(name)
                return wanted.held[0]
            if wanted is not None:
                return None
            found = self._store.open(name)
        except (OSError, ValueError):
            # told by the build
            return None
        if found is None:
            return None
        self._wanted[name] = _Wanted(environment, time.monotonic(), held=found)
        return found[0]

    def wait(self, run_id: str, environment: Environment, waiter: PreparingRun) -> None:
        """Have it built if it is not there, and tell the waiter. It stays until `leave`."""
        there = self.at_hand(environment)
        if there is None:
            self._want(run_id, environment, waiter)
            return
        wanted = self._wanted[self._name(environment)]
        wanted.waiters.pop(run_id, None)
        wanted.keepers.add(run_id)
        waiter.environment_ready(there, self.found(there))

    def found(self, built: Built) -> EnvironmentMoved:
        """What to say of an environment that was there."""
        return EnvironmentMoved(host=self._host, done=built.packages, packages=built.packages, ready=True)

    def leave(self, run_id: str) -> None:
        """The run does not want it any more, or has it. What nobody waits for is not built on."""
        for name, wanted in list(self._wanted.items()):
            wanted.keepers.discard(run_id)
            if run_id in wanted.waiters:
                del wanted.waiters[run_id]
                if not wanted.waiters and wanted.held is None:
                    self._give_up(name, wanted)

    def leave_queue(self) -> None:
        """The pool service is gone, and with it its queue."""
        for wanted in list(self._wanted.values()):
            for run_id in [run_id for run_id, waiter in wanted.waiters.items() if waiter is None]:
                self.leave(run_id)

    def tend(self) -> None:
        """Let go of what no zygote uses and nobody waits for."""
        keys = tuple(self._used_keys())
        for name, wanted in list(self._wanted.items()):
            is_wanted = wanted.waiters or wanted.keepers or any(_is_of(key, name) for key in keys)
            if wanted.held is not None and not is_wanted:
                wanted.held[1].close()
                del self._wanted[name]

    def close(self) -> None:
        """The agent ends."""
        for building in [*self._ending, *(one.building for one in self._wanted.values() if one.building is not None)]:
            building.close()
        for wanted in self._wanted.values():
            if wanted.held is not None:
                wanted.held[1].close()
        self._wanted.clear()
        self._ending.clear()

    def interpreter(self, environment: Environment, built: Built, placed: Launch) -> Interpreter:
        """The built Python, for a zygote of its own.

        Args:
            environment: What it was built for.
            built: It.
            placed: The launch, whose ranks have their variables of this node already.
        """
        environ = placed.context.environ
        names = [*placed.interpreter.variables, *_ALWAYS]
        variables = {name: environ[name] for name in names if name in environ}
        digest = hashlib.blake2b(digest_size=4)
        for item in sorted(variables.items()):
            digest.update(repr(item).encode())
        key = f"{self._name(environment)}-{digest.hexdigest()}"
        return Interpreter(executable=built.executable, key=key, variables=variables)

    # ------------------------------------------------------------ within

    def _name(self, environment: Environment) -> str:
        return f"{environment.digest}-{layer_tag()}"

    def _want(self, run_id: str, environment: Environment, waiter: PreparingRun | None) -> None:
        name = self._name(environment)
        wanted = self._wanted.get(name)
        if wanted is None:
            self._wanted[name] = wanted = _Wanted(environment, time.monotonic())
        wanted.waiters[run_id] = waiter
        if wanted.building is None and wanted.held is None:
            self._build(name, wanted)
        elif waiter is not None and wanted.moved.step:
            waiter.environment_moved(self._news(wanted))

    def _build(self, name: str, wanted: _Wanted) -> None:
        settings = self._settings
        wanted.attempts += 1
        order = BuildOrder(
            environment=wanted.environment,
            root=str(self._store.root),
            name=name,
            limit_bytes=settings.environment_limit,
            budget_bytes=settings.environments_bytes,
            index_url=settings.index_url,
        )
        log = Path(settings.state_path, "logs", "environment-builds.log")
        try:
            self._store.folder(name)
            # others than who asked first may wait for it by then
            with faults.charging(lambda error: self._fail(name, wanted, f"the agent met a fault: {error!r}.")):
                wanted.building = Building(
                    order, log, lambda news: self._heard(name, wanted, news), lambda: self._ended(name, wanted)
                )
        except ValueError as error:
            self._loop.call_soon(self._fail, name, wanted, f"{error}; the notebook's client has to be repaired.")
        except OSError as error:
            text = f"the node {self._host} can't start a process that makes the run's packages: {error}."
            self._loop.call_soon(self._fail, name, wanted, text)

    def _heard(self, name: str, wanted: _Wanted, news: BuildNews) -> None:
        match news:
            case BuildMoved():
                wanted.moved = news
                self._tell_soon(wanted)
            case BuildRefused(message=message):
                wanted.refused = message
            case BuildReady(built=built):
                wanted.was_built = built
                self._take(name, wanted)

    def _take(self, name: str, wanted: _Wanted) -> None:
        """It is there; the builder goes on to compile it."""
        try:
            wanted.held = self._store.open(name)
        except OSError as error:
            wanted.refused = f"the node {self._host} can't read what it has built: {error}."
        if wanted.held is None:
            # removed at once by another pool, or unreadable: its end says
            return
        if wanted.building is not None:
            self._ending.add(wanted.building)
            wanted.building = None
        built, ready = wanted.held[0], self._news(wanted, ready=True)
        self._stop_telling(wanted)
        for run_id, waiter in list(wanted.waiters.items()):
            if waiter is not None:
                del wanted.waiters[run_id]
                wanted.keepers.add(run_id)
                waiter.environment_ready(built, ready)

    def _ended(self, name: str, wanted: _Wanted) -> None:
        """The builder's output has ended."""
        self._ending = {building for building in self._ending if building.alive}
        if wanted.building is None or wanted.building.alive:
            # it was done, or given up
            return
        wanted.building = None
        if not wanted.refused and wanted.attempts < _ATTEMPTS:
            self._build(name, wanted)
            return
        log = Path(self._settings.state_path, "logs", "environment-builds.log")
        text = (
            f"the process that makes the run's packages on {self._host} was killed {_ATTEMPTS} times before it was "
            f"done; if nobody did it, the system was short of memory. What it wrote is in {log}. Run the cell again."
        )
        self._fail(name, wanted, wanted.refused or text)

    def _fail(self, name: str, wanted: _Wanted, message: str) -> None:
        self._stop_telling(wanted)
        if self._wanted.get(name) is wanted:
            del self._wanted[name]
        waiters, wanted.waiters = wanted.waiters, {}
        for waiter in waiters.values():
            if waiter is not None:
                waiter.environment_failed(message)

    def _give_up(self, name: str, wanted: _Wanted) -> None:
        self._stop_telling(wanted)
        del self._wanted[name]
        if wanted.building is not None:
            wanted.building.end()
            self._ending.add(wanted.building)
            wanted.building = None

    def _tell_soon(self, wanted: _Wanted) -> None:
        """Tell the waiters, at most twice a second."""
        if wanted.telling is None:
            delay = max(0.0, wanted.told_at + _TELL_S - time.monotonic())
            wanted.telling = self._loop.call_later(delay, self._tell, wanted)

    def _tell(self, wanted: _Wanted) -> None:
        wanted.telling = None
        wanted.told_at = time.monotonic()
        for waiter in wanted.waiters.values():
            if waiter is not None:
                waiter.environment_moved(self._news(wanted))

    def _stop_telling(self, wanted: _Wanted) -> None:
        if wanted.telling is not None:
            wanted.telling.cancel()
            wanted.telling = None

    def _news(self, wanted: _Wanted, *, ready: bool = False) -> EnvironmentMoved:
        packages = wanted.moved.packages or wanted.environment.packages
        if ready and wanted.held is not None:
            packages = wanted.held[0].packages
        return EnvironmentMoved(
            host=self._host,
            step="" if ready else wanted.moved.step,
            done=packages if ready else wanted.moved.done,
            packages=packages,
            seconds=time.monotonic() - wanted.since,
            ready=ready,
            built=ready and wanted.was_built,
        )


def _is_of(key: str, name: str) -> bool:
    return key.startswith(f"{name}-")

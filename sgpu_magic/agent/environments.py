"""Environments that this node has built or is building, the runs that need them, and the processes that build them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.agent import faults
from sgpu_magic.config import Settings, host_name
from sgpu_magic.packages.node.base_layer import layer_tag
from sgpu_magic.packages.node.store import (
    BuildMoved,
    BuildNews,
    BuildOrder,
    BuildReady,
    BuildRefused,
    Built,
    BuiltEnvironments,
    HeldLock,
    decode_update,
    encode,
    needs_build,
)
from sgpu_magic.system import child_process
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.events import EnvironmentMoved
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.option_text import Text

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.preparing import PreparingRun

_TELL_S = 0.5
# a builder may be killed, or another pool may remove the environment before this agent locks it
_ATTEMPTS = 3
# time between SIGTERM and SIGKILL in which a builder can remove its partial build
_END_S = 5.0
_MOST_BYTES = 1 << 20
_NOT_BEGUN = BuildMoved(step="")


class _Builder:
    """The child process that builds one environment.

    Args:
        order: What to build.
        log: The file for the process's output.

    Raises:
        OSError: The process can't be started.
    """

    def __init__(self, order: BuildOrder, log: Path) -> None:
        self._order = order
        self._alive = True
        command = [sys.executable, "-m", "sgpu_magic.packages.node"]
        self._socket, self._process = child_process.start(command, [str(os.getpid())], log=log)

    async def talk(self, on_update: Callable[[BuildNews], None]) -> None:
        """Send the build order and pass each reply to `on_update` until the process ends."""
        reader, writer = await asyncio.open_connection(sock=self._socket, limit=_MOST_BYTES)
        try:
            # a dead builder shows as end of file below
            with contextlib.suppress(ConnectionError):
                writer.write(encode(self._order))
                writer.write_eof()
                async for line in reader:
                    # a killed process may leave half a line
                    with contextlib.suppress(msgspec.DecodeError):
                        on_update(decode_update(line))
        finally:
            writer.close()
            self._alive = False
            # the agent reaps it with all other children
            if self._process.poll() is None:
                self._process.returncode = 0

    def end(self) -> None:
        """Stop the build. The process has `_END_S` seconds to remove its partial build before it is killed."""
        self.signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(_END_S, self.signal, signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process and everything it has started, such as uv."""
        if self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class _Wanted(msgspec.Struct, eq=False):
    """An environment that runs need.

    Args:
        environment: The environment's specification.
        since: When its build was ordered.
        builder: The process that builds it.
        held: The built environment and the lock that protects it from removal.
        users: By run: the run that waits for it, or has it but no ranks yet; None for a run in the pool's queue.
        moved: The build's progress.
        was_built: Whether this agent built it.
        refused: Why it can't be built.
        reported_at: When the waiters last got a progress report.
        telling: The timer for their next report.
    """

    environment: Environment
    since: float
    builder: _Builder | None = None
    held: tuple[Built, HeldLock] | None = None
    users: dict[str, PreparingRun | None] = msgspec.field(default_factory=dict[str, "PreparingRun | None"])
    moved: BuildMoved = _NOT_BEGUN
    was_built: bool = False
    refused: Text = ""
    reported_at: float = 0.0
    telling: asyncio.TimerHandle | None = None

    @property
    def waiters(self) -> list[PreparingRun]:
        """The runs to which progress is reported."""
        return [run for run in self.users.values() if run is not None]


class Environments:
    """Builds each environment that runs need once, and keeps a lock on those that zygotes use.

    Args:
        settings: The pool's settings.
        used_keys: Returns the keys of the interpreters that have zygotes.
    """

    def __init__(self, settings: Settings, used_keys: Callable[[], Iterable[str]]) -> None:
        self._settings = settings
        self._used_keys = used_keys
        self._store = BuiltEnvironments(settings.environments_path)
        self._host = host_name()
        self._wanted: dict[str, _Wanted] = {}
        # includes builders that no run waits for: they compile or clean up
        self._builders: set[_Builder] = set()

    def needed(self, launch: Launch) -> bool:
        """Whether the run's ranks need a built environment."""
        return launch.environment is not None and needs_build(self._settings, launch.environment)

    def prepare(self, run_id: str, environment: Environment) -> None:
        """Start to build the environment of a run in the queue."""
        if needs_build(self._settings, environment) and self.at_hand(environment) is None:
            self._want(run_id, environment, None)

    def at_hand(self, environment: Environment) -> Built | None:
        """Return the environment if it is built, and hold its lock; the caller starts a zygote or calls `wait`."""
        name = self.name(environment)
        wanted = self._wanted.get(name)
        # the build reports an unreadable environment
        with contextlib.suppress(OSError, ValueError):
            if wanted is None and (found := self._store.open(name)) is not None:
                wanted = self._wanted[name] = _Wanted(environment, time.monotonic(), held=found)
            elif wanted is not None and wanted.held is not None:
                self._store.touch(name)
        return None if wanted is None or wanted.held is None else wanted.held[0]

    def wait(self, run_id: str, environment: Environment, waiter: PreparingRun) -> None:
        """Build the environment if necessary and notify the waiter. It stays until `leave`."""
        there = self.at_hand(environment)
        if there is None:
            self._want(run_id, environment, waiter)
        else:
            self._wanted[self.name(environment)].users[run_id] = waiter
            waiter.environment_ready(there, self.ready_event(there))

    def ready_event(self, built: Built) -> EnvironmentMoved:
        """Return the event for an environment that was already built."""
        return EnvironmentMoved(host=self._host, done=built.packages, packages=built.packages, ready=True)

    def release(self, run_id: str) -> None:
        """Remove the run from the users of all environments; a build without users is stopped."""
        for name, wanted in list(self._wanted.items()):
            if run_id in wanted.users:
                del wanted.users[run_id]
                if not wanted.users and wanted.held is None:
                    del self._wanted[name]
                    if wanted.builder is not None:
                        wanted.builder.end()

    def release_queued(self) -> None:
        """Drop the runs in the pool's queue: the pool service is gone, and its queue with it."""
        for wanted in list(self._wanted.values()):
            for run_id in [run_id for run_id, waiter in wanted.users.items() if waiter is None]:
                self.release(run_id)

    def tend(self) -> None:
        """Release environments that no zygote uses and no run waits for."""
        keys = tuple(self._used_keys())
        for name, wanted in list(self._wanted.items()):
            is_used = wanted.users or any(key.startswith(f"{name}-") for key in keys)
            if wanted.held is not None and not is_used:
                wanted.held[1].close()
                del self._wanted[name]

    def close(self) -> None:
        """Kill all builders and release all environments."""
        for builder in self._builders:
            builder.signal(signal.SIGKILL)
        for wanted in self._wanted.values():
            if wanted.held is not None:
                wanted.held[1].close()
        self._wanted.clear()

    def name(self, environment: Environment) -> str:
        """Return the environment's name on this node."""
        return f"{environment.digest}-{layer_tag()}"

    # ------------------------------------------------------------ internals

    def _want(self, run_id: str, environment: Environment, waiter: PreparingRun | None) -> None:
        name = self.name(environment)
        wanted = self._wanted.get(name)
        if wanted is None:
            wanted = self._wanted[name] = _Wanted(environment, time.monotonic())
            # a fault fails all waiting runs, not only the first one
            with faults.charging(lambda error: self._fail(name, wanted, f"an internal error in the agent: {error!r}.")):
                faults.in_background(self._build(name, wanted))
        wanted.users[run_id] = waiter
        if waiter is not None and wanted.moved.step:
            waiter.environment_moved(self._progress(wanted))

    async def _build(self, name: str, wanted: _Wanted) -> None:
        """Build the environment in a process, and start another one when that is killed."""
        log = Path(self._settings.state_path, "logs", "environment-builds.log")
        order = BuildOrder(
            environment=wanted.environment,
            root=str(self._store.root),
            name=name,
            limit_bytes=self._settings.environment_limit,
            budget_bytes=self._settings.environments_bytes,
            index_url=self._settings.index_url,
        )
        for _ in range(_ATTEMPTS):
            if self._is_done(name, wanted):
                return
            try:
                self._store.folder(name)
                wanted.builder = builder = _Builder(order, log)
            except (OSError, ValueError) as error:
                text = f"{error}; this is an error in the notebook's sgpu-magic."
                if isinstance(error, OSError):
                    text = f"the node {self._host} can't start the process that installs the run's packages: {error}."
                self._fail(name, wanted, text)
                return
            self._builders.add(builder)
            await builder.talk(lambda update: self._on_update(name, wanted, update))
            self._builders.discard(builder)
            if wanted.refused:
                break
        if self._is_done(name, wanted):
            return
        text = (
            f"the process that installs the run's packages on {self._host} was killed {_ATTEMPTS} times before it had "
            f"finished, probably because the system ran out of memory. Its output is in {log}. Run the cell again."
        )
        self._fail(name, wanted, wanted.refused or text)

    def _is_done(self, name: str, wanted: _Wanted) -> bool:
        """Whether the environment is ready or no longer needed."""
        return wanted.held is not None or self._wanted.get(name) is not wanted

    def _on_update(self, name: str, wanted: _Wanted, update: BuildNews) -> None:
        if self._is_done(name, wanted):
            return
        match update:
            case BuildMoved():
                wanted.moved = update
                self._report_later(name, wanted)
            case BuildRefused(message=message):
                wanted.refused = message
            case BuildReady(built=built):
                wanted.was_built = built
                self._deliver(name, wanted)

    def _deliver(self, name: str, wanted: _Wanted) -> None:
        """Hold the built environment and notify the waiters; the builder continues by compiling it."""
        try:
            wanted.held = self._store.open(name)
        except OSError as error:
            wanted.refused = f"the node {self._host} can't read the environment that it built: {error}."
        if wanted.held is None:
            # removed by another pool, or unreadable; handled when the builder ends
            return
        built, ready = wanted.held[0], self._progress(wanted, ready=True)
        for waiter in wanted.waiters:
            waiter.environment_ready(built, ready)

    def _fail(self, name: str, wanted: _Wanted, message: Text) -> None:
        if self._wanted.get(name) is wanted:
            del self._wanted[name]
        waiters = wanted.waiters
        wanted.users.clear()
        for waiter in waiters:
            waiter.environment_failed(message)

    def _report_later(self, name: str, wanted: _Wanted) -> None:
        """Report progress to the waiters, at most twice a second."""
        if wanted.telling is None:
            delay = max(0.0, wanted.reported_at + _TELL_S - time.monotonic())
            wanted.telling = asyncio.get_running_loop().call_later(delay, self._report, name, wanted)

    def _report(self, name: str, wanted: _Wanted) -> None:
        wanted.telling = None
        wanted.reported_at = time.monotonic()
        if not self._is_done(name, wanted):
            for waiter in wanted.waiters:
                waiter.environment_moved(self._progress(wanted))

    def _progress(self, wanted: _Wanted, *, ready: bool = False) -> EnvironmentMoved:
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

"""Makes a process's link to a pool: on first use, and again when the pool has died."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sgpu_magic import __version__
from sgpu_magic.client.link import OnNotice, PoolLink, PoolLost
from sgpu_magic.client.local_transport import LocalTransport
from sgpu_magic.client.pools_file import PoolEntry
from sgpu_magic.client.remote_transport import RemoteTransport
from sgpu_magic.client.send_queue import A
from sgpu_magic.client.ssh.transport import SshTransport
from sgpu_magic.client.this_machine import (
    agent_path,
    agent_pid,
    find_pool,
    listener_at,
    own_key_path,
    start_pool,
    stated_settings,
    this_hello,
    this_interpreter,
    wait_for_exit,
)
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, PoolVersionError
from sgpu_magic.ssh.address import SshAddress
from sgpu_magic.ssh.machines import Machine
from sgpu_magic.system.processes import kill_tree
from sgpu_magic.system.secure_sockets import Endpoint, read_key_pair
from sgpu_magic.wire.base import Record, short
from sgpu_magic.wire.client import Accepted, AskStacks, Attach, Goodbye, StopPool, Warm
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION, AskStatus, PoolAddress, PoolStatus, socket_file

T = TypeVar("T")

REPLY_TIMEOUT_S = 15.0
_MOST_NAMED = 3
# limits how long a restarting kernel waits for a pool that does not answer
_CLOSE_PATIENCE_S = 0.5
# time that a pool may take to exit, in addition to the grace of its ranks
_STOP_S = 12.0
_ONLY_ASKS = (Attach, AskStatus, AskStacks)


class Connector(ABC):
    """Makes and keeps the link to one pool. Thread-safe.

    Args:
        settings: The process's settings.
        on_lost: Called before a dead link is replaced.
        on_notice: Called in a link's thread with each notice of the pool.
    """

    def __init__(self, settings: Settings, on_lost: Callable[[], None], on_notice: OnNotice) -> None:
        self._settings = settings
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._link: PoolLink | None = None
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def _is_inherited(self) -> bool:
        """Whether this process was forked from the one that made the link."""
        return os.getpid() != self._pid

    @property
    def alive(self) -> PoolLink | None:
        """The link; None if there is none or its pool has died."""
        if self._is_inherited:
            return None
        # without the lock, which a connecting thread may hold for long: messages without a reply must not wait for it
        link = self._link
        return link if link is not None and not link.lost.is_set() else None

    @property
    def last(self) -> PoolLink | None:
        """The last link, whether its pool lives or not; None if there was none."""
        return None if self._is_inherited else self._link

    def get_link(self, *, start: bool) -> PoolLink:
        """Return the link; connect if needed.

        Args:
            start: Start a local pool if there is none. Remote pools are never started.

        Raises:
            PoolError: The pool can't be reached or started, or this process is a fork of the one that is connected.
        """
        if self._is_inherited:
            # the fork has none of the threads that serve the link, and a lock may be held forever
            raise PoolError(
                f"this process ({os.getpid()}) was forked from process {self._pid}, as multiprocessing does, and "
                "can't use its connection to the pool. Start runs in the process that was forked, or start this one "
                'with `multiprocessing.get_context("spawn")`.'
            )
        with self._lock:
            if (link := self.alive) is None:
                if self._link is not None:
                    self._link.close()
                    self._link = None
                    self._on_lost()
                link = self._link = self._made_anew(start)
            return link

    def warm_up(self) -> None:
        """Prepare the pool for a first run: connect, and with a local pool start this interpreter's zygote.

        Raises:
            PoolError: The pool can't be reached or started.
        """
        self.get_link(start=False)

    def stop(self, *, force: bool) -> bool:
        """Stop the pool; as `Pool.stop`."""
        ask(self.get_link(start=False), StopPool(request=0, force=force), Accepted)
        return True

    def apply_settings(self) -> str:
        """As `Pool.apply_settings`. A no-op for a remote pool."""
        return ""

    def new_simulation(self) -> str:
        """As `Pool.new_simulation`. A remote pool is its operator's."""
        return ""

    def close(self) -> None:
        """Say goodbye to the pool and close the link; a no-op in a fork, and while another thread is connecting."""
        if self._is_inherited:
            return
        if not self._lock.acquire(timeout=_CLOSE_PATIENCE_S):
            return
        try:
            if self._link is not None:
                if not self._link.lost.is_set():
                    self._link.send(Goodbye())
                self._link.close()
                self._link = None
        finally:
            self._lock.release()

    @abstractmethod
    def _made_anew(self, start: bool) -> PoolLink: ...


class LocalConnector(Connector):
    """Links to the local pool, which it starts if needed.

    Args:
        settings: The process's settings.
        on_lost: As in `Connector`.
        on_notice: As in `Connector`.
        warms: Start a zygote of this process's Python with the pool, as runs from here would use it.
    """

    def __init__(
        self, settings: Settings, on_lost: Callable[[], None], on_notice: OnNotice, *, warms: bool = True
    ) -> None:
        super().__init__(settings, on_lost, on_notice)
        self._warms = warms
        # the pool service whose simulated devices the user knows about
        self._known_service = ""

    def warm_up(self) -> None:
        with self._lock:
            fresh = self.alive is None and find_pool(self._settings) is None
            link = self.get_link(start=True)
        if not fresh:
            link.send(Warm(interpreter=this_interpreter()))

    def apply_settings(self) -> str:
        if not (stated := stated_settings()):
            return ""
        link = self.get_link(start=True)
        has = dict(link.welcome.settings)
        if not link.welcome.sees_client:
            # the state directory is another machine's
            has.pop("state_dir", None)
        other = [name for name, value in stated.items() if has.get(name, value) != value]
        if not other:
            return ""
        if going := _stopped_unless_used(link):
            changed = " and ".join(f"SGPU_{name.upper()}={has[name]!r} instead of {stated[name]!r}" for name in other)
            return (
                f"The local pool still has {changed}, because it is in use: {', '.join(going[:_MOST_NAMED])}. The "
                "first run after these restarts it with the new settings; `sgpu pool stop --force` ends the pool and "
                "its runs now."
            )
        link.lost.wait(REPLY_TIMEOUT_S)
        wait_for_exit(self._settings, link.welcome.pid if link.welcome.same_host else 0)
        self.get_link(start=True)
        return ""

    def new_simulation(self) -> str:
        welcome = self.get_link(start=True).welcome
        simulated = dict(welcome.settings).get("simulate", "")
        if not simulated or welcome.service == self._known_service:
            return ""
        self._known_service = welcome.service
        if "simulate" in stated_settings():
            return ""
        by = f"{welcome.started_by} started it" if welcome.started_by else "it was started"
        return (
            f"the local pool simulates {simulated}, because {by} with SGPU_SIMULATE, and all your notebooks share it. "
            "`sgpu pool stop` ends the simulation"
        )

    def stop(self, *, force: bool) -> bool:
        if (address := find_pool(self._settings)) is None:
            # the agent of a killed pool may be waiting for the next pool, or hang
            agent = agent_pid(agent_path(self._settings)) if force else 0
            if agent:
                kill_tree(agent)
            return bool(agent)
        if (peer := listener_at(self._settings, address)) is None and find_pool(self._settings) != address:
            return True
        pid = address.pid if peer is None else peer.pid
        try:
            super().stop(force=force)
        except PoolLost:
            pass
        except PoolError as error:
            # the pool has another version, or does not answer
            if not force and (not isinstance(error, PoolVersionError) or error.is_used):
                raise
            _signal(pid, signal.SIGTERM)
        # includes the grace of the ranks, and a few seconds for the agent
        timeout_s = _STOP_S + self._settings.grace_s
        try:
            wait_for_exit(self._settings, pid, timeout_s)
        except PoolError:
            if not force or not pid:
                raise
            # kill the agent too: it may be the process that hangs, and the next pool would adopt it
            agent = agent_pid(agent_path(self._settings))
            _signal(pid, signal.SIGKILL)
            if agent:
                kill_tree(agent)
            wait_for_exit(self._settings, pid)
        return True

    def _made_anew(self, start: bool) -> PoolLink:
        if (address := find_pool(self._settings)) is None:
            if not start:
                raise PoolError("no local pool is running.")
            address, _ = self._start_pool()
        peer = listener_at(self._settings, address)
        if peer is None and find_pool(self._settings) != address:
            # the pool has just ended
            return self._made_anew(start)
        try:
            link = self._new_link(address)
        except PoolError:
            if find_pool(self._settings) == address:
                raise
            # the pool ended before it had answered
            return self._made_anew(start)
        try:
            return with_known_version(link)
        except PoolVersionError:
            if not start or link.welcome.busy:
                raise
            # an idle pool of another version is replaced
            pid = link.welcome.pid if peer is None else peer.pid
            _signal(pid, signal.SIGTERM)
            wait_for_exit(self._settings, pid)
        address, is_own = self._start_pool()
        link = self._new_link(address)
        try:
            return with_known_version(link)
        except PoolVersionError as error:
            if not is_own:
                raise
            # this Python has just started the pool from the package that is installed now
            raise PoolVersionError(
                f"the package sgpu-magic of this Python ({sys.executable}) has changed since this process loaded it: "
                f"it loaded {__version__}, and {link.welcome.package_version} is installed now. Restart the kernel, "
                "or the program."
            ) from error

    def _start_pool(self) -> tuple[PoolAddress, bool]:
        return start_pool(self._settings, Warm(interpreter=this_interpreter()) if self._warms else None)

    def _new_link(self, address: PoolAddress) -> PoolLink:
        runtime = Path(address.runtime) if address.runtime else self._settings.runtime_path
        return PoolLink(LocalTransport(socket_file(runtime), address.pid), self._on_notice)


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a pool's process, if it can be seen from here."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class RemoteConnector(Connector):
    """Links to a pool on another machine, which is never started from here.

    Args:
        settings: The process's settings.
        on_lost: As in `Connector`.
        on_notice: As in `Connector`.
        entry: The pool's entry in `pools.toml`.
    """

    def __init__(self, settings: Settings, on_lost: Callable[[], None], on_notice: OnNotice, entry: PoolEntry) -> None:
        super().__init__(settings, on_lost, on_notice)
        self._entry = entry
        self._key_path = own_key_path()

    def _made_anew(self, start: bool) -> PoolLink:
        name, endpoint = self._entry.name, Endpoint(self._entry.address, self._entry.key)
        try:
            keys = read_key_pair(self._key_path)
        except FileNotFoundError:
            raise PoolError(
                f"the pool {name} admits listed keys only, and you have no key on this machine ({self._key_path}). "
                "Create one with `sgpu pool keygen` and send the public half, which it prints, to the pool's operator."
            ) from None
        hello = this_hello(instance=secrets.token_hex(16))
        transport = RemoteTransport(name, endpoint, keys, hello, self._settings.link_timeout_s)
        return with_known_version(PoolLink(transport, self._on_notice))


class SshConnector(Connector):
    """Links to the pool of a machine that the user logs in to, which is started there if needed.

    Args:
        settings: The process's settings.
        on_lost: As in `Connector`.
        on_notice: As in `Connector`; also gets the steps of a login.
        entry: The pool's entry in `pools.toml`.
        address: The parts of its address.
    """

    def __init__(
        self,
        settings: Settings,
        on_lost: Callable[[], None],
        on_notice: OnNotice,
        entry: PoolEntry,
        address: SshAddress,
    ) -> None:
        super().__init__(settings, on_lost, on_notice)
        self._machine = machine_of(settings, entry, address)
        self._others = entry.machines[1:]
        self._same_files = entry.same_files

    def _made_anew(self, start: bool) -> PoolLink:
        hello = this_hello(instance=secrets.token_hex(16), same_files=self._same_files)
        timeout_s = self._settings.link_timeout_s
        transport = SshTransport(self._machine, self._others, hello, timeout_s, self._on_notice, starts=start)
        return with_known_version(PoolLink(transport, self._on_notice))


def machine_of(settings: Settings, entry: PoolEntry, address: SshAddress) -> Machine:
    """Return the machine of a pool over ssh; arguments as for `SshConnector`."""
    return Machine(entry.name, address, settings.ssh_command, entry.python, entry.prologue, entry.wheels)


def with_known_version(link: PoolLink) -> PoolLink:
    """Return the link if its pool speaks this process's protocol version, else close it.

    Raises:
        PoolVersionError: It speaks another one.
    """
    welcome = link.welcome
    if welcome.protocol_version == PROTOCOL_VERSION:
        return link
    link.close()
    speaks = (
        f"{link.title} runs sgpu-magic {welcome.package_version} and speaks protocol {welcome.protocol_version}; this "
        f"notebook speaks {PROTOCOL_VERSION}. "
    )
    if not welcome.same_host:
        raise PoolVersionError(speaks + "Install the pool's version of sgpu-magic, or ask its operator.")
    error = PoolVersionError(
        speaks + "Wait for its runs to end and restart it with `sgpu pool stop`, or end them too with `sgpu pool stop "
        "--force`; the next run starts a pool of this version."
    )
    error.is_used = welcome.busy
    raise error


def ask(
    link: PoolLink, question: Record, kind: type[A], timeout_s: float = REPLY_TIMEOUT_S, frames: Sequence[bytes] = ()
) -> A:
    """Send a request to the pool and return its reply.

    Args:
        link: The link to the pool.
        question: The request.
        kind: Type of the reply.
        timeout_s: Time to wait for the reply, in seconds.
        frames: Raw frames of the request.

    Raises:
        SgpuError: The pool refused the request, died, or did not answer.
    """
    answer = link.ask(question, frames)
    try:
        return answer.wait(kind, timeout_s)
    except BaseException as error:
        if isinstance(question, _ONLY_ASKS):
            # abandon only queries: a command is still executed once a broken link is restored
            answer.give_up()
        if isinstance(error, TimeoutError):
            raise _no_answer(link, timeout_s) from None
        raise


def ask_this_or_next(connector: Connector, asking: Callable[[PoolLink], T], *, start: bool) -> T:
    """Ask the pool's service; if it had ended before the link noticed, ask the next one, unless none may be started."""
    try:
        return asking(connector.get_link(start=start))
    except PoolLost:
        if not start:
            raise
        return asking(connector.get_link(start=start))


def _no_answer(link: PoolLink, timeout_s: float) -> PoolError:
    if not link.welcome.same_host:
        silent = f": it has been silent for {link.transport.silent_s:.0f} s" if link.transport.silent_s else ""
        return PoolError(
            f"{link.title} did not answer within {timeout_s:g} s{silent}. Check your network; active runs there "
            "are not affected."
        )
    return PoolError(
        f"the local pool did not answer within {timeout_s:g} s. `sgpu doctor` looks for the reason; "
        "`sgpu pool stop --force` ends the pool."
    )


def _stopped_unless_used(link: PoolLink) -> list[str]:
    """Stop the pool if it is idle, else return what is active."""
    try:
        ask(link, StopPool(request=0), Accepted)
    except PoolLost:
        return []
    except PoolError:
        runs = ask(link, AskStatus(request=0, recent=1), PoolStatus).runs
        going = [f"run {short(run.run_id)} ({run.name})" for run in runs if not run.state.is_final]
        return going or ["ranks of runs that have ended"]
    return []

"""One connection per pool of a kernel or command: made on first use, and remade when the pool dies."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from sgpu_magic.client.link import PoolLink, PoolLost
from sgpu_magic.client.pools_file import PoolEntry
from sgpu_magic.client.remote_wire import RemoteWire
from sgpu_magic.client.this_machine import (
    find_pool,
    own_key_path,
    start_pool,
    stated_settings,
    this_hello,
    this_interpreter,
    wait_for_exit,
)
from sgpu_magic.client.wires import A, LocalWire, Tell
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, PoolVersionError
from sgpu_magic.system.secure_sockets import Endpoint, read_key_pair
from sgpu_magic.wire.base import Record, short
from sgpu_magic.wire.client import Accepted, AskStacks, Attach, Goodbye, StopPool, Warm
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION, AskStatus, PoolAddress, PoolStatus, socket_file

T = TypeVar("T")

REPLY_TIMEOUT_S = 15.0
_MOST_NAMED = 3
# a kernel that restarts does not wait longer for a pool that does not answer
_CLOSE_PATIENCE_S = 0.5
_ONLY_ASKS = (Attach, AskStatus, AskStacks)


class Connection(ABC):
    """The connection to one pool. Thread-safe.

    Args:
        settings: The process's settings.
        on_lost: Called before a dead link is replaced.
        on_notice: Called in a link's thread with each notice of the pool.
    """

    def __init__(self, settings: Settings, on_lost: Callable[[], None], on_notice: Tell) -> None:
        self._settings = settings
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._link: PoolLink | None = None
        self._lock = threading.RLock()

    @property
    def alive(self) -> PoolLink | None:
        """The link; None if there is none or its pool has died."""
        # without the lock, which a connecting thread may hold for long: messages without a reply must not wait for it
        link = self._link
        return link if link is not None and not link.lost.is_set() else None

    def made(self, *, start: bool) -> PoolLink:
        """Return the link; connect if needed.

        Args:
            start: Start a local pool if there is none. Remote pools are never started.

        Raises:
            PoolError: The pool can't be reached or started.
        """
        with self._lock:
            if (link := self.alive) is None:
                if self._link is not None:
                    self._link.close()
                    self._link = None
                    self._on_lost()
                link = self._link = self._made_anew(start)
            return link

    def warmed(self) -> None:
        """Prepare the pool for a first run: connect, and with a local pool start this interpreter's zygote.

        Raises:
            PoolError: The pool can't be reached or started.
        """
        self.made(start=False)

    def stop(self, *, force: bool) -> bool:
        """Stop the pool; as `Pool.stop`."""
        ask(self.made(start=False), StopPool(request=0, force=force), Accepted)
        return True

    def settings_applied(self) -> str:
        """As `Pool.apply_settings`. A no-op for a remote pool."""
        return ""

    def close(self) -> None:
        """Say goodbye to the pool and close the link; a no-op while another thread is connecting."""
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


class LocalConnection(Connection):
    """The connection to the local pool, which it starts if needed."""

    def warmed(self) -> None:
        with self._lock:
            fresh = self.alive is None and find_pool(self._settings) is None
            link = self.made(start=True)
        if not fresh:
            link.send(Warm(interpreter=this_interpreter()))

    def settings_applied(self) -> str:
        if not (stated := stated_settings()):
            return ""
        link = self.made(start=True)
        has = dict(link.welcome.settings)
        if not link.welcome.sees_client:
            # another machine's directory
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
        wait_for_exit(link.welcome.pid)
        link.lost.wait(REPLY_TIMEOUT_S)
        self.made(start=True)
        return ""

    def stop(self, *, force: bool) -> bool:
        if (address := find_pool(self._settings)) is None:
            return False
        try:
            super().stop(force=force)
        except PoolLost:
            pass
        except PoolError as error:
            # the pool has another version, or does not answer
            if not force and (not isinstance(error, PoolVersionError) or error.is_used):
                raise
            with contextlib.suppress(ProcessLookupError):
                os.kill(address.pid, signal.SIGTERM)
        try:
            wait_for_exit(address.pid)
        except PoolError:
            if not force:
                raise
            os.kill(address.pid, signal.SIGKILL)
            wait_for_exit(address.pid)
        return True

    def _made_anew(self, start: bool) -> PoolLink:
        if (address := find_pool(self._settings)) is None:
            if not start:
                raise PoolError("no local pool is running.")
            address = start_pool(self._settings, Warm(interpreter=this_interpreter()))
        link = self._new_link(address)
        try:
            return with_known_version(link)
        except PoolVersionError:
            if not start or link.welcome.busy:
                raise
            # an idle pool of another version is replaced
            os.kill(link.welcome.pid, signal.SIGTERM)
            wait_for_exit(link.welcome.pid)
            return with_known_version(self._new_link(start_pool(self._settings, Warm(interpreter=this_interpreter()))))

    def _new_link(self, address: PoolAddress) -> PoolLink:
        return PoolLink(LocalWire(socket_file(self._settings.runtime_path), address.pid), self._on_notice)


class FarConnection(Connection):
    """The connection to a pool on another machine, which is never started from here.

    Args:
        settings: The process's settings.
        on_lost: As in `Connection`.
        on_notice: As in `Connection`.
        entry: The pool's entry in `pools.toml`.
    """

    def __init__(self, settings: Settings, on_lost: Callable[[], None], on_notice: Tell, entry: PoolEntry) -> None:
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
        wire = RemoteWire(name, endpoint, keys, hello, self._settings.link_timeout_s)
        return with_known_version(PoolLink(wire, self._on_notice))


def with_known_version(link: PoolLink) -> PoolLink:
    """Return the link if its pool's protocol version is compatible, else close it.

    Raises:
        PoolVersionError: The pool's protocol version is not compatible.
    """
    welcome = link.welcome
    if welcome.oldest_protocol_version <= PROTOCOL_VERSION <= welcome.protocol_version:
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
        return answer.of(kind, timeout_s)
    except BaseException as error:
        if isinstance(question, _ONLY_ASKS):
            # only questions are abandoned: an order is still carried out once a broken link is restored
            answer.give_up()
        if isinstance(error, TimeoutError):
            raise _no_answer(link, timeout_s) from None
        raise


def ask_this_or_next(connection: Connection, asking: Callable[[PoolLink], T], *, start: bool) -> T:
    """Ask the pool's service; if it had ended before the link noticed, ask the next one, unless none may be started."""
    try:
        return asking(connection.made(start=start))
    except PoolLost:
        if not start:
            raise
        return asking(connection.made(start=start))


def _no_answer(link: PoolLink, timeout_s: float) -> PoolError:
    if not link.welcome.same_host:
        silent = f": it has been silent for {link.wire.silent_s:.0f} s" if link.wire.silent_s else ""
        return PoolError(
            f"{link.title} did not answer within {timeout_s:.0f} s{silent}. Check your network; active runs there "
            "are not affected."
        )
    return PoolError(
        f"the local pool did not answer within {timeout_s:.0f} s. `sgpu doctor` looks for the reason; "
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

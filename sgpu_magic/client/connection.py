"""The one connection of a kernel or a command to a pool: made when first needed, made again when the pool died."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from sgpu_magic.client.interpreter import this_interpreter
from sgpu_magic.client.link import PoolLink, Reply
from sgpu_magic.client.local_pool import find_pool, start_pool
from sgpu_magic.config import Settings, is_linux
from sgpu_magic.errors import PoolError, PoolVersionError
from sgpu_magic.protocol.address import PoolAddress, process_start, socket_file
from sgpu_magic.protocol.messages import PROTOCOL_VERSION, Goodbye, Warm

REPLY_TIMEOUT_S = 15.0
_OLD_POOL_EXIT_S = 10.0


class Connection:
    """Finds, starts and reaches the pool. Methods may be called by any thread.

    Args:
        settings: Where the pool lives.
        on_lost: Called before a link that died is replaced.
        on_notice: Called in a link's thread with what the pool wants to be known.
    """

    def __init__(self, settings: Settings, on_lost: Callable[[], None], on_notice: Callable[[str], None]) -> None:
        self._settings = settings
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._link: PoolLink | None = None
        self._lock = threading.RLock()

    @property
    def alive(self) -> PoolLink | None:
        """The link, None when there is none or its pool has died."""
        with self._lock:
            link = self._link
            return link if link is not None and not link.lost.is_set() else None

    def made(self, *, start: bool) -> PoolLink:
        """Return the link, made now if need be.

        Args:
            start: Start a pool when there is none.

        Raises:
            PoolError: It can't be reached or started.
        """
        with self._lock:
            link = self.alive
            if link is not None:
                return link
            if self._link is not None:
                self._link.close()
                self._link = None
                self._on_lost()
            address = find_pool(self._settings)
            if address is None:
                if not start:
                    raise PoolError("no local pool is running.")
                start_pool(self._settings, Warm(interpreter=this_interpreter()))
                address = _found(self._settings)
            link = self._new_link(address)
            self._link = self._with_version_checked(link) if start else _checked(link)
            return self._link

    def warmed(self) -> None:
        """Start the pool and this interpreter's zygote, unless they are there.

        Raises:
            PoolError: It can't be reached or started.
        """
        with self._lock:
            fresh = self.alive is None and find_pool(self._settings) is None
            link = self.made(start=True)
        if not fresh:
            link.send(Warm(interpreter=this_interpreter()))

    def close(self) -> None:
        """Say goodbye."""
        with self._lock:
            if self._link is not None:
                if not self._link.lost.is_set():
                    self._link.send(Goodbye())
                self._link.close()
                self._link = None

    def _new_link(self, address: PoolAddress) -> PoolLink:
        return PoolLink(socket_file(self._settings.runtime_path), address.pid, self._on_notice)

    def _with_version_checked(self, link: PoolLink) -> PoolLink:
        """Use a pool that understands us; replace one of another version when it is idle."""
        try:
            return _checked(link)
        except PoolVersionError:
            if link.welcome.busy:
                raise
            os.kill(link.pid, signal.SIGTERM)
            wait_for_exit(link.pid)
            start_pool(self._settings, Warm(interpreter=this_interpreter()))
            return _checked(self._new_link(_found(self._settings)))


def _checked(link: PoolLink) -> PoolLink:
    welcome = link.welcome
    if welcome.oldest_protocol_version <= PROTOCOL_VERSION <= welcome.protocol_version:
        return link
    link.close()
    raise PoolVersionError(
        f"the local pool (process {welcome.pid}) is sgpu-magic {welcome.package_version} and speaks protocol "
        f"{welcome.protocol_version}; this notebook speaks {PROTOCOL_VERSION}. "
        "Wait for its runs and restart it with `sgpu pool stop`, or end them too with `sgpu pool stop --force`; "
        "the next run starts a pool of this version."
    )


def _found(settings: Settings) -> PoolAddress:
    deadline = time.monotonic() + _OLD_POOL_EXIT_S
    while time.monotonic() < deadline:
        address = find_pool(settings)
        if address is not None:
            return address
        # another client's pool is about to announce itself
        time.sleep(0.01)
    raise PoolError("the local pool ended as soon as it was started; `sgpu doctor` looks for the reason.")


def wait_for(reply: Future[Reply], timeout_s: float = REPLY_TIMEOUT_S) -> Reply:
    """Return the answer to a request.

    Raises:
        SgpuError: The pool refused it, died, or did not answer.
    """
    try:
        return reply.result(timeout_s)
    except TimeoutError:
        raise PoolError(
            f"the local pool did not answer within {timeout_s:.0f} s. `sgpu doctor` looks for the reason; "
            "`sgpu pool stop --force` ends the pool."
        ) from None


def wait_for_exit(pid: int) -> None:
    """Wait until the process has ended.

    Raises:
        PoolError: It has not within 10 s.
    """
    deadline = time.monotonic() + _OLD_POOL_EXIT_S
    started = process_start(pid)
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except OSError:
            return
        if process_start(pid) != started or (is_linux() and not started):
            # a zombie, or another process that got its number
            return
        time.sleep(0.01)
    raise PoolError(
        f"the local pool (process {pid}) did not end within {_OLD_POOL_EXIT_S:.0f} s; end it with `kill -9 {pid}`."
    )

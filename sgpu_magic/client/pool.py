"""What one can ask of a pool. One `Pool` per kernel; it connects when first needed."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from concurrent.futures import Future

from sgpu_magic.client.interpreter import this_context, this_interpreter
from sgpu_magic.client.link import PoolLink, PoolLost
from sgpu_magic.client.local_pool import find_pool, start_pool
from sgpu_magic.client.run import Run
from sgpu_magic.client.uploads import Uploads, remove_upload
from sgpu_magic.config import Settings, is_linux
from sgpu_magic.errors import PoolError, PoolVersionError
from sgpu_magic.payload.pack import Packed
from sgpu_magic.protocol.address import PoolAddress, process_start, socket_file
from sgpu_magic.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    AskStatus,
    Cancel,
    Goodbye,
    PoolStatus,
    StopPool,
    Submit,
    Warm,
)
from sgpu_magic.protocol.records import Interpreter, RunSpec

_REPLY_TIMEOUT_S = 15.0
_OLD_POOL_EXIT_S = 10.0


class Pool:
    """The local pool as a kernel or a command sees it. Methods may be called by any thread.

    Args:
        settings: Where the pool lives.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = "local"
        self._link: PoolLink | None = None
        self._lock = threading.RLock()
        self._uploads = Uploads()

    def warm_in_background(self) -> threading.Thread:
        """Start the pool and this interpreter's zygote, unless they are there, without anybody waiting."""
        thread = threading.Thread(target=self._warm, name="sgpu-warm", daemon=True)
        thread.start()
        return thread

    def warm(self, interpreter: Interpreter, ranks: int) -> None:
        """Ask for this interpreter's zygote and a standby group of `ranks`, if the pool is there; nobody waits."""
        link = self._alive()
        if link is not None:
            link.send(Warm(interpreter=interpreter, ranks=ranks))

    def submit(self, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str]) -> Run:
        """Ship the payload and queue the run; returns when the pool has taken it.

        Raises:
            PoolError: The pool can't be reached or started.
            UsageError: The pool refuses the run, or there is no room for its payload.
            CapacityError: There is no room now and the run was not to wait.
        """
        try:
            return self._submit_once(self._connect(start=True), spec, packed, key, environ)
        except PoolLost:
            # it was about to end when it was asked, and had not taken the run
            return self._submit_once(self._connect(start=True), spec, packed, key, environ)

    def _submit_once(self, link: PoolLink, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str]) -> Run:
        payload, frames = self._uploads.place(packed, spec.run_id, link, self.settings)
        request, reply = link.new_request()
        events = link.follow(spec.run_id)
        accepted = False
        try:
            self._uploads.submitted(spec.run_id, link)
            message = Submit(
                request=request,
                spec=spec,
                interpreter=this_interpreter(environ),
                context=this_context(environ, key),
                payload=payload,
            )
            link.send(message, frames)
            _wait(reply)
            accepted = True
        except BaseException:
            # also an interrupt while waiting: a run that was taken after all must not go on unseen
            link.send(Cancel(request=0, run=spec.run_id, reason="it was interrupted while it was submitted"))
            link.unfollow(spec.run_id)
            remove_upload(payload)
            raise
        finally:
            if not accepted:
                self._uploads.run_over(spec.run_id, accepted=False)
        return Run(spec, key, link, events)

    def run_over(self, run_id: str) -> None:
        """The run ended: its memory may be used for the next one."""
        self._uploads.run_over(run_id, accepted=True)

    def status(self, recent: int = 20, *, start: bool = True) -> PoolStatus | None:
        """Ask for devices, queue and runs; None when no pool runs and none shall be started."""
        if not start and self._alive() is None and find_pool(self.settings) is None:
            return None
        link = self._connect(start=start)
        request, reply = link.new_request()
        link.send(AskStatus(request=request, recent=recent))
        answer = _wait(reply)
        return answer if isinstance(answer, PoolStatus) else None

    def cancel(self, run: str, reason: str) -> str:
        """Cancel a run by a unique prefix of its id and return a sentence.

        Raises:
            UsageError: No run, or more than one, has an id like that.
        """
        link = self._connect(start=False)
        request, reply = link.new_request()
        link.send(Cancel(request=request, run=run, reason=reason))
        answer = _wait(reply)
        return answer.text if isinstance(answer, Accepted) else ""

    def stop(self, *, force: bool) -> bool:
        """Stop the pool and wait until it is gone. False when there was none.

        Raises:
            PoolError: Runs are going on and `force` is not set, or it does not end.
        """
        address = find_pool(self.settings)
        if address is None:
            return False
        try:
            link = self._connect(start=False)
            request, reply = link.new_request()
            link.send(StopPool(request=request, force=force))
            _wait(reply)
        except PoolLost:
            pass
        except PoolError:
            # of another version, or it does not answer
            if not force:
                raise
            with contextlib.suppress(ProcessLookupError):
                os.kill(address.pid, signal.SIGTERM)
        try:
            _wait_for_exit(address.pid)
        except PoolError:
            if not force:
                raise
            os.kill(address.pid, signal.SIGKILL)
            _wait_for_exit(address.pid)
        self.close()
        return True

    def close(self) -> None:
        """Say goodbye; runs that this kernel follows are cancelled."""
        with self._lock:
            if self._link is not None:
                if not self._link.lost.is_set():
                    self._link.send(Goodbye())
                self._link.close()
                self._link = None
            self._uploads.close()

    # ------------------------------------------------------------ within

    def _alive(self) -> PoolLink | None:
        with self._lock:
            link = self._link
            return link if link is not None and not link.lost.is_set() else None

    def _connect(self, *, start: bool) -> PoolLink:
        with self._lock:
            link = self._alive()
            if link is not None:
                return link
            if self._link is not None:
                self._link.close()
                self._link = None
            address = find_pool(self.settings)
            if address is None:
                if not start:
                    raise PoolError("no local pool is running.")
                start_pool(self.settings, Warm(interpreter=this_interpreter()))
                address = _found(self.settings)
            link = PoolLink(socket_file(self.settings.runtime_path), address.pid)
            self._link = self._with_version_checked(link) if start else _checked(link)
            return self._link

    def _with_version_checked(self, link: PoolLink) -> PoolLink:
        """Use a pool that understands us; replace one of another version when it is idle."""
        try:
            return _checked(link)
        except PoolVersionError:
            if link.welcome.busy:
                raise
            os.kill(link.pid, signal.SIGTERM)
            _wait_for_exit(link.pid)
            start_pool(self.settings, Warm(interpreter=this_interpreter()))
            return _checked(PoolLink(socket_file(self.settings.runtime_path), _found(self.settings).pid))

    def _warm(self) -> None:
        try:
            with self._lock:
                fresh = self._alive() is None and find_pool(self.settings) is None
                link = self._connect(start=True)
            if not fresh:
                link.send(Warm(interpreter=this_interpreter()))
        except PoolError:
            # the first run meets the same problem and tells it where it can be seen
            return


def new_key() -> bytes:
    """A run's HMAC key."""
    return secrets.token_bytes(32)


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


def _wait(reply: Future[Accepted | PoolStatus]) -> Accepted | PoolStatus:
    try:
        return reply.result(_REPLY_TIMEOUT_S)
    except TimeoutError:
        raise PoolError(
            f"the local pool did not answer within {_REPLY_TIMEOUT_S:.0f} s. `sgpu doctor` looks for the reason; "
            "`sgpu pool stop --force` ends the pool."
        ) from None


def _wait_for_exit(pid: int) -> None:
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

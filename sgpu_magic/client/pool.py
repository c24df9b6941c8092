"""What one can ask of a pool. One `Pool` per kernel; it connects when first needed."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable

import msgspec

from sgpu_magic.client.connection import REPLY_TIMEOUT_S, Connection, wait_for, wait_for_exit
from sgpu_magic.client.interpreter import this_context, this_interpreter
from sgpu_magic.client.link import PoolLink, PoolLost
from sgpu_magic.client.local_pool import find_pool
from sgpu_magic.client.run import Run
from sgpu_magic.client.uploads import Uploads, remove_upload
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, SgpuError
from sgpu_magic.payload.pack import Packed
from sgpu_magic.protocol.messages import (
    Accepted,
    AskStacks,
    AskStatus,
    Attach,
    Attached,
    Cancel,
    Detach,
    PoolStatus,
    Stacks,
    StopPool,
    Submit,
    Warm,
)
from sgpu_magic.protocol.records import Interpreter, RunSpec
from sgpu_magic.protocol.states import RunState

# a run's next pool service is looked for, or started, for so long when the run is to be cancelled
_CANCEL_PATIENCE_S = 60.0
_CANCEL_PAUSE_S = 0.2


class Pool:
    """The local pool as a kernel or a command sees it. Methods may be called by any thread.

    Args:
        settings: Where the pool lives.
        on_notice: Called in a thread of the link with what the pool wants to be known, "" when it takes that back.

    Attributes:
        notice: The pool's last notice.
    """

    def __init__(self, settings: Settings, on_notice: Callable[[str], None] | None = None) -> None:
        self.settings = settings
        self.notice = ""
        self._on_notice = on_notice
        self.name = "local"
        self._uploads = Uploads()
        self._connection = Connection(settings, self._link_lost, self._noticed)

    def warm_in_background(self) -> threading.Thread:
        """Start the pool and this interpreter's zygote, unless they are there, without anybody waiting."""
        thread = threading.Thread(target=self._warm, name="sgpu-warm", daemon=True)
        thread.start()
        return thread

    def warm(self, interpreter: Interpreter, ranks: int) -> None:
        """Ask for this interpreter's zygote and a standby group of `ranks`, if the pool is there; nobody waits."""
        link = self._connection.alive
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
            return self._submit_once(self._connection.made(start=True), spec, packed, key, environ)
        except PoolLost:
            # it was about to end when it was asked, and had not taken the run; or it was killed when it had
            link = self._connection.made(start=True)
            with contextlib.suppress(RunUnknown):
                return self._taken_before(link, spec, key)
            return self._submit_once(link, spec, packed, key, environ)

    def _taken_before(self, link: PoolLink, spec: RunSpec, key: bytes) -> Run:
        request, reply = link.new_request()
        link.send(Attach(request=request, run=spec.run_id, owns=True))
        wait_for(reply)
        self._uploads.forget(spec.run_id)
        run = Run(spec, key, link, link.attached(request, spec.run_id), self.settings.runs_path / spec.run_id)
        run.owned = True
        return run

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
            wait_for(reply)
            accepted = True
        except BaseException:
            # also an interrupt while waiting: a run that was taken after all must not go on unseen
            link.send(Cancel(request=0, run=spec.run_id, reason="it was interrupted while it was submitted"))
            link.unfollow(spec.run_id, events)
            remove_upload(payload)
            raise
        finally:
            if not accepted:
                self._uploads.run_over(spec.run_id, accepted=False)
        return Run(spec, key, link, events, self.settings.runs_path / spec.run_id, (message, frames))

    def run_over(self, run_id: str) -> None:
        """The run ended: its memory may be used for the next one."""
        self._uploads.run_over(run_id, accepted=True)

    def run_left(self, run_id: str) -> None:
        """The run goes on without this process, or is lost: its memory is never written again."""
        self._uploads.forget(run_id)

    def attach(self, run: str) -> tuple[Run, RunState]:
        """Follow a run from its first event on.

        Args:
            run: A unique prefix of its id; "" is the newest run that goes on without a notebook, else the newest.

        Returns:
            Its handle, and its state now.

        Raises:
            RunUnknown: There is no such run.
        """
        link = self._connection.made(start=True)
        request, reply = link.new_request()
        link.send(Attach(request=request, run=run))
        answer = wait_for(reply)
        if not isinstance(answer, Attached):
            raise PoolError("the local pool gave an answer that fits no question. Restart it: `sgpu pool stop`.")
        spec = answer.spec
        events = link.attached(request, spec.run_id)
        return Run(spec, answer.key, link, events, self.settings.runs_path / spec.run_id), answer.state

    def find_again(self, run: Run) -> None:
        """Follow a run on after the pool service has died: with the next one, which may have to be started.

        A run that was still queued is submitted again: nobody else has it.

        Raises:
            RunUnknown: It had started, and the new service does not have it.
            PoolLost: The new service died too.
            PoolError: It can't be started or reached.
        """
        link = self._connection.made(start=True)
        request, reply = link.new_request()
        link.send(Attach(request=request, run=run.run_id, after=run.last_seq, owns=run.owned))
        try:
            wait_for(reply)
        except RunUnknown:
            if run.submission is None:
                raise
            message, frames = run.submission
            request, reply = link.new_request()
            events = link.follow(run.run_id)
            self._uploads.submitted(run.run_id, link)
            link.send(msgspec.structs.replace(message, request=request), frames)
            wait_for(reply)
            run.moved(link, events, from_start=True)
            return
        self._uploads.submitted(run.run_id, link)
        run.moved(link, link.attached(request, run.run_id))

    def cancel_in_background(self, run: Run, reason: str) -> None:
        """Cancel a run whose pool service has died, when the next one is there; nobody waits."""

        # a run that was still queued has ended with its pool
        run.submission = None

        def work() -> None:
            deadline = time.monotonic() + _CANCEL_PATIENCE_S
            while time.monotonic() < deadline:
                try:
                    self.find_again(run)
                except PoolError:
                    # one that is about to start, or has died as well
                    time.sleep(_CANCEL_PAUSE_S)
                except SgpuError:
                    # no pool has it any more
                    return
                else:
                    run.cancel(reason)
                    return

        threading.Thread(target=work, name="sgpu-cancel", daemon=True).start()

    def detach(self, run: str, timeout_s: float = REPLY_TIMEOUT_S, *, start: bool = False) -> str:
        """Let a run go on without its notebook and return a sentence.

        Args:
            run: A unique prefix of its id; "" is every run of this process.
            timeout_s: How long to wait for the answer in seconds.
            start: Start a pool when there is none: it may have runs to take over.

        Raises:
            UsageError: No run, or more than one, has an id like that.
        """
        link = self._connection.made(start=start)
        request, reply = link.new_request()
        link.send(Detach(request=request, run=run))
        answer = wait_for(reply, timeout_s)
        return answer.text if isinstance(answer, Accepted) else ""

    def stacks(self, run: str, *, start: bool = False) -> Stacks:
        """Ask where every rank of a run is now; `run` as in `attach`, of runs that go on; `start` as in `detach`.

        Raises:
            RunUnknown: No such run goes on.
        """
        link = self._connection.made(start=start)
        request, reply = link.new_request()
        link.send(AskStacks(request=request, run=run))
        answer = wait_for(reply)
        if not isinstance(answer, Stacks):
            raise PoolError("the local pool gave an answer that fits no question. Restart it: `sgpu pool stop`.")
        return answer

    def status(self, recent: int = 20, *, start: bool = True) -> PoolStatus | None:
        """Ask for devices, queue and runs; None when no pool runs and none shall be started."""
        if not start and self._connection.alive is None and find_pool(self.settings) is None:
            return None
        link = self._connection.made(start=start)
        request, reply = link.new_request()
        link.send(AskStatus(request=request, recent=recent))
        answer = wait_for(reply)
        return answer if isinstance(answer, PoolStatus) else None

    def cancel(self, run: str, reason: str) -> str:
        """Cancel a run by a unique prefix of its id and return a sentence.

        Raises:
            UsageError: No run, or more than one, has an id like that.
        """
        link = self._connection.made(start=False)
        request, reply = link.new_request()
        link.send(Cancel(request=request, run=run, reason=reason))
        answer = wait_for(reply)
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
            link = self._connection.made(start=False)
            request, reply = link.new_request()
            link.send(StopPool(request=request, force=force))
            wait_for(reply)
        except PoolLost:
            pass
        except PoolError:
            # of another version, or it does not answer
            if not force:
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
        self.close()
        return True

    def close(self) -> None:
        """Say goodbye; runs that this kernel follows are cancelled."""
        self._connection.close()
        self._uploads.close()

    # ------------------------------------------------------------ within

    def _link_lost(self) -> None:
        self._uploads.pool_lost()
        self._noticed("")

    def _noticed(self, text: str) -> None:
        if text != self.notice:
            self.notice = text
            if self._on_notice is not None:
                self._on_notice(text)

    def _warm(self) -> None:
        try:
            self._connection.warmed()
        except PoolError:
            # the first run meets the same problem and tells it where it can be seen
            return


def new_key() -> bytes:
    """A run's HMAC key."""
    return secrets.token_bytes(32)

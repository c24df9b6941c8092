"""Where a run is: in this machine's pool or in a remote one, and the connections to remote pools."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.client import ledger
from sgpu_magic.client.mirror import SentRun, note_end, sent_run, sent_run_ids
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings
from sgpu_magic.errors import KeyRefused, PoolError, RunFileUnknown, RunUnknown, UsageError
from sgpu_magic.files.run_directory import read_spec
from sgpu_magic.views.run_notes import stop_texts
from sgpu_magic.wire.base import CancelReason, is_valid_id
from sgpu_magic.wire.files import EVENTS
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.run import RunSpec

if TYPE_CHECKING:
    from sgpu_magic.client.mirror import Mirror
    from sgpu_magic.client.pool import Pool
    from sgpu_magic.client.pools import Pools
    from sgpu_magic.client.run_files import LocalRunFiles

# minimum interval between queries to the ledger whether a run is lost
_LEDGER_EVERY_S = 2.0
# minimum intervals between fetches from a remote pool: when it answers, and after an error
_BRING_EVERY_S = 0.4
_BRING_AGAIN_S = 3.0
# a run is lost after this many replies in a row that it is unknown: its first event may not be written yet
_UNKNOWN_TIMES = 3
# number of ended runs requested from each pool
_NEWEST = 100


class RunLocation(ABC):
    """One run's directory, or a mirror of a remote one. Used by one thread at a time.

    Args:
        spec: What was submitted.
        pool: The pool's name on this machine.
        directory: Where the run's files are, or are mirrored to, on this machine.

    Attributes:
        silence: Why the pool can't be reached now, "" when it can.
        bring: Fetches new data of a file; None where the directory is the run's own.
        default_store: URI of the MLflow store of runs that name none; "" in a remote pool, whose store is not known.
    """

    def __init__(self, spec: RunSpec, pool: str, directory: Path) -> None:
        self.spec = spec
        self.pool = pool
        self.directory = directory
        self.silence = ""
        self.bring: Callable[[str], None] | None = None
        self.default_store = ""

    def bring_events(self, sure_bytes: int) -> None:
        """Fetch new events; the first `sure_bytes` bytes of the local file are known to be the same as the pool's."""
        del sure_bytes

    @abstractmethod
    def loss_reason(self) -> str:
        """Return why no process can be working on the run any more, "" while one may be."""

    @abstractmethod
    def linked(self, wish: str = "") -> AbstractContextManager[Pool]:
        """Return the run's pool; a `wish` requires that the run is active, and completes the error message.

        Raises:
            PoolError: The pool can't be reached.
        """

    @abstractmethod
    def files(self) -> LocalRunFiles | Mirror:
        """Return the run's files."""

    def cancel(self) -> str:
        """Cancel the run and return a sentence about it.

        Raises:
            UsageError: The pool no longer has the run.
            PoolError: The pool can't be reached.
        """
        pressed, text = stop_texts(self.spec)
        with self.linked() as pool:
            pool.cancel(self.spec.run_id, pressed)
        return text

    def end_session(self, run_id: str) -> None:
        """End a session that the run waits for. Raises as `cancel` does."""
        with self.linked() as pool:
            pool.cancel(run_id, CancelReason.END_BUTTON)

    def stacks(self) -> Sequence[str]:
        """Return the stacks of all ranks, as lines. Raises as `cancel` does."""
        from sgpu_magic.views.stacks import stacks_text

        with self.linked("whose stacks could be shown") as pool:
            answer = pool.stacks(self.spec.run_id)
        return stacks_text(answer.run_id, answer.stacks, answer.cell).splitlines()


class LocalRun(RunLocation):
    """A run in this machine's pool.

    Args:
        settings: Settings, for the pool and the ledger.
        spec: What was submitted.
    """

    def __init__(self, settings: Settings, spec: RunSpec) -> None:
        super().__init__(spec, LOCAL, settings.runs_path / spec.run_id)
        self.default_store = settings.default_store_uri
        self._settings = settings
        self._looked_at = time.monotonic()
        self._final_reads = 0

    def loss_reason(self) -> str:
        """Return what the ledger says; a run whose pool and agent were killed writes no more events."""
        if time.monotonic() <= self._looked_at + _LEDGER_EVERY_S:
            return ""
        self._looked_at = time.monotonic()
        try:
            row = ledger.find_run(self._settings, self.spec.run_id)
        except PoolError:
            return ""
        # the ledger may have the end a moment before the run's directory does
        self._final_reads = self._final_reads + 1 if row is not None and row.state.is_final else 0
        return ledger.LOST if self._final_reads > 1 else ""

    def files(self) -> LocalRunFiles:
        # imported late: it needs the client
        from sgpu_magic.client.run_files import LocalRunFiles

        return LocalRunFiles(self._settings, self.spec.run_id)

    def linked(self, wish: str = "") -> AbstractContextManager[Pool]:
        # imported late: the client is heavy, and most servers never need it
        from sgpu_magic.client.find_run import pool_of
        from sgpu_magic.client.pool import Pool

        if wish:
            return pool_of(self._settings, self.spec.run_id, wish, only_active=True)
        return closing(Pool(self._settings))


class RemoteRun(RunLocation):
    """A run in a remote pool; its events and logs are fetched into a local mirror.

    Args:
        spec: What was submitted.
        mirror: Fetches its files.
        pool: Returns its pool.
        name: The pool's name on this machine.
    """

    def __init__(self, spec: RunSpec, mirror: Mirror, pool: Callable[[], Pool], name: str) -> None:
        super().__init__(spec, name, mirror.directory)
        self.bring = mirror.follow
        self._mirror = mirror
        self._ask = pool
        self._due = float("-inf")
        self._unknown = 0

    def bring_events(self, sure_bytes: int) -> None:
        """Fetch new events, as in `RunLocation`. Bytes that a killed service had half written may differ later."""
        if time.monotonic() < self._due:
            return
        self.silence = ""
        try:
            self._mirror.bring_more(EVENTS, sure_bytes)
            self._unknown = 0
        except (RunUnknown, RunFileUnknown):
            self._unknown += 1
        except (KeyRefused, UsageError) as error:
            self.silence = error.message
        except (PoolError, OSError):
            why = f"the pool {self.pool} can't be reached now"
            self.silence = f"{why}; the run continues there, and the view will catch up"
        self._due = time.monotonic() + (_BRING_AGAIN_S if self.silence else _BRING_EVERY_S)

    def loss_reason(self) -> str:
        sentence = f"the pool {self.pool} no longer has this run, so its outcome is unknown."
        return sentence if self._unknown >= _UNKNOWN_TIMES else ""

    def files(self) -> Mirror:
        return self._mirror

    def linked(self, wish: str = "") -> AbstractContextManager[Pool]:
        return nullcontext(self._ask())


def run_here(settings: Settings, run_id: str) -> LocalRun | None:
    """Return the run of that id in this machine's pool, None when it has no directory."""
    # ids become parts of paths: accept nothing else
    if not is_valid_id(run_id) or (settings.runs_path / run_id).is_symlink():
        return None
    spec = read_spec(settings.runs_path / run_id)
    return None if spec is None else LocalRun(settings, spec)


class RemotePools:
    """Finds runs in remote pools. Thread-safe.

    Args:
        settings: Settings, for the record of runs sent to remote pools.
        rest_s: Connections unused for this many seconds are closed.
        clock: Monotonic time in seconds.
    """

    def __init__(self, settings: Settings, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._rest_s = rest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._pools: Pools | None = None
        self._used_at = clock()
        # ended runs; replaced as a whole, never changed
        self._ended: dict[str, SentRun] = {}

    @property
    def is_connected(self) -> bool:
        """Whether there may be open connections."""
        return self._pools is not None

    def run(self, run_id: str) -> RemoteRun | None:
        """Return the run of that id, None when no such run was sent from here."""
        sent = sent_run(self._settings, run_id)
        if sent is None:
            return None
        from sgpu_magic.client.mirror import Mirror, mirror_path

        def pool() -> Pool:
            return self._ask().used_pool(sent.pool)

        mirror = Mirror(mirror_path(self._settings, sent.pool, run_id), run_id, lambda: pool().link())
        return RemoteRun(sent.spec, mirror, pool, sent.pool)

    def of_kernel(self, kernel: str) -> list[SentRun]:
        """Return a kernel's runs with the state that their pools report, or the last known one of an unreachable pool.

        Runs that a pool no longer has are left out. Takes 2 s at most, and contacts no pool if all runs have ended.
        """
        known = self._ended
        read = [known.get(run_id) or sent_run(self._settings, run_id) for run_id in sent_run_ids(self._settings)]
        sent = [each for each in read if each is not None]
        self._ended = {each.spec.run_id: each for each in sent if each.ended_at is not None}
        mine = [each for each in sent if each.spec.owner.kernel == kernel]
        ended = [each for each in mine if each.ended_at is not None]
        open_ones = [each for each in mine if each.ended_at is None]
        return [*ended, *self._as_pools_say(open_ones)] if open_ones else ended

    def rest(self) -> None:
        """Close the connections in the background if they have been unused for `rest_s`."""
        if self.is_connected and self._clock() - self._used_at > self._rest_s:
            threading.Thread(target=self.close, name="sgpu-rest", daemon=True).start()

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        with self._lock:
            pools, self._pools = self._pools, None
        if pools is not None:
            pools.close()

    # ------------------------------------------------------------ internals

    def _ask(self) -> Pools:
        from sgpu_magic.client.pools import Pools

        with self._lock:
            self._used_at = self._clock()
            if self._pools is None:
                self._pools = Pools(self._settings)
            return self._pools

    def _as_pools_say(self, sent: Sequence[SentRun]) -> list[SentRun]:
        pools, names = self._ask(), {each.pool for each in sent}
        try:
            entries = [entry for entry in pools.entries() if entry.name in names]
        except UsageError:
            # a request for a single run reports what is wrong with the list
            entries = []
        answers = pools.ask_status(entries, local=False, recent=_NEWEST)
        rows = {row.run_id: row for answer in answers if answer.status is not None for row in answer.status.runs}
        silent = names - {answer.name for answer in answers if answer.status is not None}
        kept = [each for each in sent if each.spec.run_id in rows or each.pool in silent]
        return [self._as_row_says(each, rows.get(each.spec.run_id)) for each in kept]

    def _as_row_says(self, sent: SentRun, row: RunSummary | None) -> SentRun:
        if row is None or not row.state.is_final:
            return sent if row is None else msgspec.structs.replace(sent, state=row.state)
        # the end of a run whose pool was killed is not recorded
        ended_at = row.ended_at or row.submitted_at
        note_end(self._settings, sent.spec.run_id, row.state, ended_at)
        return msgspec.structs.replace(sent, state=row.state, ended_at=ended_at)

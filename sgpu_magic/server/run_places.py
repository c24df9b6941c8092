"""Where a run is that the server looks at: in this machine's own pool, or in that of another, with a link to each."""

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
from sgpu_magic.views.run_notes import stop_words
from sgpu_magic.wire.files import EVENTS
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.record import is_valid_id
from sgpu_magic.wire.run import RunSpec

if TYPE_CHECKING:
    from sgpu_magic.client.mirror import Mirror
    from sgpu_magic.client.pool import Pool
    from sgpu_magic.client.pools import Pools

# whether anybody can still be at it is asked of the ledger so often at most
_LEDGER_EVERY_S = 2.0
# another machine's pool is asked for what is new so often at most, and one that can't be asked
_BRING_EVERY_S = 0.4
_BRING_AGAIN_S = 3.0
# so often in a row a pool has to say that it has no such run: it may be about to write its first event
_UNKNOWN_TIMES = 3


class RunPlace(ABC):
    """One run's directory, or what of it is brought here. Used by one thread at a time.

    Args:
        spec: What was submitted.
        pool: The pool's name here.
        directory: Where the run's files are, or come to, on this machine.

    Attributes:
        silence: Why the pool can't be asked now, "" when it can.
        bring: Brings what has come to a file of that name; None where the directory has it.
    """

    def __init__(self, spec: RunSpec, pool: str, directory: Path) -> None:
        self.spec = spec
        self.pool = pool
        self.directory = directory
        self.silence = ""
        self.bring: Callable[[str], None] | None = None

    def bring_events(self, sure_bytes: int) -> None:
        """Bring what the run has told since; of what is here, so many bytes are the same at the pool for sure."""
        del sure_bytes

    @abstractmethod
    def lost(self) -> str:
        """Return why nobody can be at the run any more, whatever its last event was; "" while somebody may be."""

    @abstractmethod
    def linked(self, wish: str = "") -> AbstractContextManager[Pool]:
        """Return the run's pool; `wish` is what the run is wanted for where it must not have ended.

        Raises:
            PoolError: It can't be asked.
        """

    def cancel(self) -> str:
        """Cancel the run and return a sentence.

        Raises:
            UsageError: Its pool has no such run any more.
            PoolError: Its pool can't be asked.
        """
        pressed, said = stop_words(self.spec)
        with self.linked() as pool:
            pool.cancel(self.spec.run_id, pressed)
        return said

    def stacks(self) -> Sequence[str]:
        """Return where every rank is, as lines; for the rest see `cancel`."""
        from sgpu_magic.views.stacks import stacks_text

        with self.linked("whose ranks could be looked at") as pool:
            answer = pool.stacks(self.spec.run_id)
        return stacks_text(answer.run_id, answer.stacks, answer.cell).splitlines()


class RunHere(RunPlace):
    """A run of this machine's own pool.

    Args:
        settings: Where the pool and the ledger are.
        spec: What was submitted.
    """

    def __init__(self, settings: Settings, spec: RunSpec) -> None:
        super().__init__(spec, LOCAL, settings.runs_path / spec.run_id)
        self._settings = settings
        self._looked_at = time.monotonic()
        self._over = 0

    def lost(self) -> str:
        """A run whose pool and agent were killed says nothing any more; the ledger knows whether that is so."""
        if time.monotonic() <= self._looked_at + _LEDGER_EVERY_S:
            return ""
        self._looked_at = time.monotonic()
        try:
            row = ledger.find_run(self._settings, self.spec.run_id)
        except PoolError:
            return ""
        # it may know of an end a moment before the run's directory has it
        self._over = self._over + 1 if row is not None and row.state.is_final else 0
        return ledger.LOST if self._over > 1 else ""

    def linked(self, wish: str = "") -> AbstractContextManager[Pool]:
        # the client's half is heavy, and few servers are ever asked
        from sgpu_magic.client.find_run import pool_of
        from sgpu_magic.client.pool import Pool

        if wish:
            return pool_of(self._settings, self.spec.run_id, wish, going_on=True)
        return closing(Pool(self._settings))


class RunElsewhere(RunPlace):
    """A run in another machine's pool: its events and logs are brought to its mirror here.

    Args:
        spec: What was submitted.
        mirror: Brings its files.
        pool: Returns its pool, of the name that follows.
        name: The pool's name here.
    """

    def __init__(self, spec: RunSpec, mirror: Mirror, pool: Callable[[], Pool], name: str) -> None:
        super().__init__(spec, name, mirror.directory)
        self.bring = mirror.follow
        self._mirror = mirror
        self._ask = pool
        self._due = float("-inf")
        self._unknown = 0

    def bring_events(self, sure_bytes: int) -> None:
        """See `RunPlace`. What a killed service had half written may be other bytes the next time."""
        if time.monotonic() < self._due:
            return
        silence, pause_s = "", _BRING_EVERY_S
        try:
            self._mirror.bring_more(EVENTS, sure_bytes)
        except (RunUnknown, RunFileUnknown):
            self._unknown += 1
        except (KeyRefused, UsageError) as error:
            silence, pause_s = error.message, _BRING_AGAIN_S
        except (PoolError, OSError):
            silence = f"the pool {self.pool} can't be asked now; the run goes on there, and the view catches up"
            pause_s = _BRING_AGAIN_S
        else:
            self._unknown = 0
        self.silence = silence
        self._due = time.monotonic() + pause_s

    def lost(self) -> str:
        if self._unknown < _UNKNOWN_TIMES:
            return ""
        return f"the pool {self.pool} does not have this run any more, so nothing is known of its end."

    def linked(self, wish: str = "") -> AbstractContextManager[Pool]:
        return nullcontext(self._ask())


def run_here(settings: Settings, run_id: str) -> RunHere | None:
    """The run of that id in this machine's own pool, None when there is no directory of it."""
    # ids become parts of paths: nothing else may pass
    if not is_valid_id(run_id) or (settings.runs_path / run_id).is_symlink():
        return None
    spec = read_spec(settings.runs_path / run_id)
    return None if spec is None else RunHere(settings, spec)


# of the runs that have ended, so many of each pool are asked for
_NEWEST = 100


class Elsewhere:
    """Finds runs in other machines' pools. Methods may be called by any thread.

    Args:
        settings: Where is noted which runs those are.
        rest_s: Links that nobody needed for so many seconds are closed.
        clock: Monotonic time in seconds.
    """

    def __init__(self, settings: Settings, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._rest_s = rest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._pools: Pools | None = None
        self._used_at = clock()
        # those that have ended; replaced as a whole, never changed
        self._over: dict[str, SentRun] = {}

    @property
    def is_connected(self) -> bool:
        """Whether there may be links."""
        return self._pools is not None

    def run(self, run_id: str) -> RunElsewhere | None:
        """The run of that id, None when none was sent from here."""
        sent = sent_run(self._settings, run_id)
        if sent is None:
            return None
        from sgpu_magic.client.mirror import Mirror, mirror_path

        def pool() -> Pool:
            return self._ask().of(sent.pool)

        mirror = Mirror(mirror_path(self._settings, sent.pool, run_id), run_id, lambda: pool().link())
        return RunElsewhere(sent.spec, mirror, pool, sent.pool)

    def of_kernel(self, kernel: str) -> list[SentRun]:
        """A kernel's runs, as their pools say they are now; where a pool can't be asked, as was heard before.

        Runs that a pool has forgotten are left out. Takes 2 s at most, and asks nobody whose runs all have ended.
        """
        known = self._over
        read = [known.get(run_id) or sent_run(self._settings, run_id) for run_id in sent_run_ids(self._settings)]
        sent = [each for each in read if each is not None]
        self._over = {each.spec.run_id: each for each in sent if each.ended_at is not None}
        mine = [each for each in sent if each.spec.owner.kernel == kernel]
        open_ones = [each for each in mine if each.ended_at is None]
        return [
            *(each for each in mine if each.ended_at is not None),
            *(self._as_pools_say(open_ones) if open_ones else ()),
        ]

    def rest(self) -> None:
        """Close the links, if nobody needed one for long enough; nobody waits for that."""
        if self.is_connected and self._clock() - self._used_at > self._rest_s:
            threading.Thread(target=self.close, name="sgpu-rest", daemon=True).start()

    def close(self) -> None:
        """Close the links; the next question makes new ones."""
        with self._lock:
            pools, self._pools = self._pools, None
        if pools is not None:
            pools.close()

    # ------------------------------------------------------------ within

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
            # a run that is asked for says what is wrong with the list
            entries = []
        answers = pools.asked(entries, local=False, recent=_NEWEST)
        rows = {row.run_id: row for answer in answers if answer.status is not None for row in answer.status.runs}
        silent = names - {answer.name for answer in answers if answer.status is not None}
        told = [each for each in sent if each.spec.run_id in rows or each.pool in silent]
        return [self._as_row_says(each, rows.get(each.spec.run_id)) for each in told]

    def _as_row_says(self, sent: SentRun, row: RunSummary | None) -> SentRun:
        if row is None or not row.state.is_final:
            return sent if row is None else msgspec.structs.replace(sent, state=row.state)
        # nobody saw the end of a run whose pool was killed
        ended_at = row.ended_at or row.submitted_at
        note_end(self._settings, sent.spec.run_id, row.state, ended_at)
        return msgspec.structs.replace(sent, state=row.state, ended_at=ended_at)

"""This machine's runs in the pools of others, as the server sees them: one link to each pool while somebody looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.client.sent_runs import SentRun, note_end, sent_run, sent_run_ids
from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.server.run_places import RunElsewhere
from sgpu_magic.wire.pool_status import RunSummary

if TYPE_CHECKING:
    from sgpu_magic.client.pool import Pool
    from sgpu_magic.client.pools import Pools

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

"""What the directories of runs on this machine tell a panel: that they are there, and the runs' pages in MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from sgpu_magic.panel.drawing import RunPlace
from sgpu_magic.wire.ids import is_valid_id
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.run_files import TRACKING

# a page in MLflow may come so long after the run's end
_LATE_S = 60.0
_LOOK_EVERY_S = 5.0
_NOWHERE = RunPlace()


class _Written(msgspec.Struct):
    url: str = ""


class RunPlaces:
    """Looks at runs' directories, at most every few seconds each. Owned by one thread.

    Args:
        runs_path: Where they lie.
        clock: Monotonic time in seconds.
    """

    def __init__(self, runs_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs_path = runs_path
        self._clock = clock
        self._listed_at = 0
        self._here: frozenset[str] = frozenset()
        self._places: dict[str, RunPlace] = {}
        # runs whose page may still come, and when it was looked for last
        self._looked_at: dict[str, float] = {}

    def look(self) -> None:
        """See which directories there are now."""
        try:
            changed_at = os.stat(self._runs_path).st_mtime_ns
            if changed_at != self._listed_at:
                self._here = frozenset(filter(is_valid_id, os.listdir(self._runs_path)))
                self._listed_at = changed_at
        except OSError:
            self._here, self._listed_at = frozenset(), 0

    def of(self, run: RunSummary, now: float) -> RunPlace:
        """Return what is known of a run; `now` in seconds since the epoch."""
        run_id = run.run_id
        if run_id not in self._here:
            return _NOWHERE
        place = self._places.get(run_id)
        if place is not None and place.tracked_url:
            return place
        looked_at = self._looked_at.get(run_id)
        over = run.state.is_final and now - (run.ended_at or run.submitted_at) > _LATE_S
        if place is not None and (looked_at is None or self._clock() - looked_at < _LOOK_EVERY_S):
            return place
        place = self._places[run_id] = RunPlace(here=True, tracked_url=self._url(run_id))
        if over or place.tracked_url:
            self._looked_at.pop(run_id, None)
        else:
            self._looked_at[run_id] = self._clock()
        return place

    def keep_only(self, run_ids: Iterable[str]) -> None:
        """Forget all others."""
        kept = set(run_ids)
        for known in (self._places, self._looked_at):
            for run_id in known.keys() - kept:
                del known[run_id]

    def _url(self, run_id: str) -> str:
        try:
            raw = (self._runs_path / run_id / TRACKING).read_bytes()
            url = msgspec.json.decode(raw, type=_Written).url
        except (OSError, msgspec.DecodeError):
            return ""
        # nothing else becomes a link in somebody's page
        return url if url.startswith(("http://", "https://")) else ""

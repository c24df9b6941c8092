"""Mismatches of the notebook's own packages: looked for in the background, told once with the next run."""

from __future__ import annotations

import threading

from sgpu_magic.packages.distributions import Snapshot

_lock = threading.Lock()
_looked_at = ""
_told: set[str] = set()
_news: tuple[str, ...] = ()


def look(snapshot: Snapshot) -> None:
    """Look through a snapshot, once for each. Some 50 ms for 100 packages, so never where somebody waits."""
    global _looked_at, _news
    if snapshot.digest == _looked_at:
        return
    # who only asks for the news needs nothing of this
    from sgpu_magic.packages.cuda import driver_version
    from sgpu_magic.packages.mismatches import find_mismatches, packages_of

    # a package that is there twice is told by %sgpu_env: many a Python has dozens
    found = find_mismatches(packages_of(snapshot), driver=driver_version())
    with _lock:
        _looked_at = snapshot.digest
        _news = tuple(mismatch.sentence for mismatch in found if mismatch.sentence not in _told)


def news() -> tuple[str, ...]:
    """What was found and not told yet. Never waits."""
    global _news
    if not _news:
        return ()
    with _lock:
        new, _news = _news, ()
        _told.update(new)
    return new

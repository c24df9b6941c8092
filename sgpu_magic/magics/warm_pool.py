"""Keeps ranks warm while the notebook is in use."""

from __future__ import annotations

import time

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.this_machine import this_interpreter
from sgpu_magic.runs import packages
from sgpu_magic.runs.sessions import registry
from sgpu_magic.wire.client import Warm

_RENEW_S = 20.0
_POLL_S = 0.2


class WarmPool:
    """Keeps this kernel's zygote and standby group warm.

    Args:
        pool: The pool that holds them.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ranks = 0
        self._key = this_interpreter().key
        self._renewed_at = self._looked_at = time.monotonic()

    def ran(self, ranks: int) -> None:
        """Record the size of the last run, for which the pool replenishes its standby group by itself."""
        self._ranks = ranks
        self._renewed_at = time.monotonic()

    def after_cell(self, result: object = None) -> None:
        """Handle IPython's `post_run_cell`. Takes a few `stat` calls, and occasionally a message."""
        if registry.names():
            # a connected session keeps its own standby group, on its own devices
            self._ranks = 0
        now = time.monotonic()
        if now - self._looked_at < _POLL_S:
            # check at most once per interval: installing packages takes longer
            return
        interpreter, self._looked_at = this_interpreter(), now
        if interpreter.key != self._key or (self._ranks and now - self._renewed_at > _RENEW_S):
            self._key, self._renewed_at = interpreter.key, now
            self._pool.notify(Warm(interpreter=interpreter, ranks=self._ranks))
        packages.packages_of(self._pool).begin()

"""Keeps ranks at hand while the notebook is in use.

After every cell: a `%pip install` has made this another environment, whose zygote should import torch now and not
when it is needed; and a standby group, which the pool drops when idle, is wanted for as long as cells run.
"""

from __future__ import annotations

import time

from sgpu_magic.client.interpreter import this_interpreter
from sgpu_magic.client.pool import Pool
from sgpu_magic.runs import packages
from sgpu_magic.runs.sessions import registry

_RENEW_S = 20.0
_LOOK_S = 0.2


class Warmth:
    """What this kernel wants warm.

    Args:
        pool: Where.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ranks = 0
        self._key = this_interpreter().key
        self._renewed_at = self._looked_at = time.monotonic()

    def ran(self, ranks: int) -> None:
        """A run of that many ranks was the last one; the pool replenishes after it by itself."""
        self._ranks = ranks
        self._renewed_at = time.monotonic()

    def after_cell(self, result: object = None) -> None:
        """IPython's `post_run_cell`. Costs a few `stat` calls, and a message now and then."""
        if registry.names():
            # a connected session keeps a group at hand itself, on its own devices
            self._ranks = 0
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            # no installation is that quick
            return
        interpreter, self._looked_at = this_interpreter(), now
        if interpreter.key != self._key or (self._ranks and now - self._renewed_at > _RENEW_S):
            self._key, self._renewed_at = interpreter.key, now
            self._pool.warm(interpreter, self._ranks)
        packages.of(self._pool).begin()

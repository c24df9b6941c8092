"""How long something may take that waits for nothing.

A slow machine must not fail a test, so a limit says what was not waited for: it lies below what the code under test
would take if it did wait, and many times above what it takes. How fast something is, the benchmarks measure.
"""

from __future__ import annotations

from sgpu_magic.config import Settings

GRACE_S = Settings().grace_s
"""Seconds that the ranks of a run get by default to stop: what ends before has not waited for a rank that does not."""

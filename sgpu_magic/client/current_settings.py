"""Settings that follow `%env` in a running kernel."""

from __future__ import annotations

import os
from dataclasses import replace

from sgpu_magic.config import Settings, load_settings


class CurrentSettings:
    """Settings of which those that are read for each run follow the environment; where the pool lives stays.

    `%env SGPU_TRACK=off` in a running kernel counts from the next run on. May be asked by any thread.

    Args:
        settings: As they were read from the environment a moment ago.
    """

    _OF_RUNS = ("env_version", "variables", "track", "tracking_uri", "code_warn_bytes", "code_limit_bytes")
    _VARIABLES = tuple(f"SGPU_{name.upper()}" for name in _OF_RUNS)

    def __init__(self, settings: Settings) -> None:
        self._read = (self._variables(), settings)

    def now(self) -> Settings:
        """Return them; some microseconds as long as those variables are as they were.

        Raises:
            UsageError: As `load_settings`.
        """
        read, settings = self._read
        variables = self._variables()
        if variables != read:
            anew = load_settings()
            settings = replace(settings, **{name: getattr(anew, name) for name in self._OF_RUNS})
            self._read = (variables, settings)
        return settings

    def _variables(self) -> list[str | None]:
        return [os.environ.get(name) for name in self._VARIABLES]

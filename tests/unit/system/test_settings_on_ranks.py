"""Settings of the notebook's process on a rank: existing values are not set again."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from sgpu_magic.system.process_settings.notebook_settings import read_settings
from sgpu_magic.system.process_settings.rank_settings import RankSettings


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("a.logger.of.this.test")
    found.setLevel(7)
    yield found
    found.setLevel(logging.NOTSET)


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records calls that clear the caches of all loggers, which copies their pages in a forked process."""
    calls: list[str] = []
    clear = logging.Manager._clear_cache

    def clearing(self: logging.Manager) -> None:
        calls.append("cleared")
        clear(self)

    monkeypatch.setattr(logging.Manager, "_clear_cache", clearing)
    return calls


def test_what_is_set_already_is_left_alone(logger: logging.Logger, cleared: list[str]):
    wanted = read_settings()
    settings = RankSettings(lambda *_: None)
    assert settings.follow(wanted) == []
    assert cleared == []
    changed = read_settings() | {f"logging/{logger.name}": wanted[f"logging/{logger.name}"].replace("7", "8")}
    assert settings.follow(changed) == []
    assert (logger.level, len(cleared)) == (8, 1)
    # the notebook's setting is at its default again
    assert settings.follow({}) == []
    assert logger.level == 7

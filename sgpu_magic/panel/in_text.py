"""The panel where no widget can be shown: what `%sgpu_status` and `%sgpu_env` tell."""

from __future__ import annotations

from sgpu_magic.client.pools import PATIENCE_S
from sgpu_magic.errors import SgpuError
from sgpu_magic.runs.choice import default_choice
from sgpu_magic.runs.environment_report import report
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.workplace import Workplace
from sgpu_magic.views.pool_tables import status_text
from sgpu_magic.views.tables import environment_text

_NO_CHOICE = "this notebook asks for nothing of its own: runs get what the pool and the settings choose."
_NO_POOL = "no pool is running; the first run starts it."


def panel_text(place: Workplace) -> str:
    """Return the pool, the notebook's choice and its packages. Starts no pool."""
    name = default_choice.pool_name(place)
    try:
        looked_at = place.pools.named(name)
        status = looked_at.status(recent=5, start=False, timeout_s=PATIENCE_S)
        pool = _NO_POOL if status is None else status_text(status, notice=looked_at.notice)
    except SgpuError as error:
        pool = error.message
    choice = default_choice.held_words(default_choice.keeper(place).now(), name) or _NO_CHOICE
    packages = environment_text(report(place.current_settings(), registry.all_sessions()))
    return "\n\n".join((pool.rstrip(), choice, packages.rstrip()))

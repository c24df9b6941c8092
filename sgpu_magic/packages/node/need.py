"""Whether a node has to build a run's environment."""

from __future__ import annotations

from sgpu_magic.config import Settings
from sgpu_magic.wire.environment import Environment


def needs_build(settings: Settings, environment: Environment) -> bool:
    """True unless the kernel's own Python serves: it is at hand on this node, and its own packages are wanted."""
    return not environment.own or settings.environments != "auto"

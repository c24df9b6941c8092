"""Engines by name, each imported only when it is wanted."""

from __future__ import annotations

import dataclasses
import importlib.util

from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.nodes.base import Engine
from sgpu_magic.wire.messages import Warm

ENGINES = ("local", "ray")
"""What `sgpu pool serve --engine` takes."""


def engine_settings(name: str, settings: Settings) -> Settings:
    """Return the settings as an engine needs them; the pool service must have the same.

    Ranks on a Ray cluster get their packages built, unless its nodes see what the notebooks see (`ray_same_files`).
    """
    if name == "ray" and not settings.ray_same_files:
        return dataclasses.replace(settings, environments="built")
    return settings


def make_engine(name: str, settings: Settings, warm: Warm | None = None) -> Engine:
    """Return the engine. Call it in the running loop that the pool service will have.

    Args:
        name: One of `ENGINES`.
        settings: As `engine_settings` gives them.
        warm: The interpreter to warm first, None for none; `ray` has no node to warm it on yet.

    Raises:
        UsageError: There is no such engine, what it needs is not installed, or a setting can't be understood.
    """
    if name == "local":
        from sgpu_magic.nodes.local import LocalEngine

        return LocalEngine(settings, warm)
    if name != "ray":
        raise UsageError(f"there is no engine {name!r}. There are: {', '.join(ENGINES)}.")
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "the engine ray needs Ray in the pool's own Python, and it is not installed there: "
            'pip install "sgpu-magic[ray]", with the version of Ray that the cluster has.'
        )
    from sgpu_magic.nodes.ray.engine import RayEngine

    return RayEngine(settings)

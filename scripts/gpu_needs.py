"""Reads from pyproject.toml what the tests on GPUs require, except torch, for `test_gpu.py` and `gpu_wheels.py`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# these tests build no environments and run without tracking; these packages and their requirements are half of the size
_NOT_NEEDED = ("torch", "uv", "mlflow-skinny", "alembic", "sqlalchemy")
# from the extra `test`, whose other packages are for notebooks, browsers, Ray and MLflow's server
_FOR_TESTS = ("jupyter_client", "pytest", "pytest-timeout")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements() -> list[str]:
    """Return the requirements of the project and of its tests on GPUs, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [line for line in project["dependencies"] if name_of(line) not in _NOT_NEEDED]
    return own + [line for line in project["optional-dependencies"]["test"] if name_of(line) in _FOR_TESTS]


def name_of(requirement: str) -> str:
    """Return the name in a requirement: `anywidget` for `anywidget==0.11.*`."""
    found = _NAME.match(requirement)
    return found[0] if found else requirement

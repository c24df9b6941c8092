"""What the tests on GPUs need besides torch, by pyproject.toml: for `test_gpu.py` and `gpu_wheels.py`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# these tests build no environments and have tracking switched off; half of all bytes are these and what they require
_NOT_NEEDED = ("torch", "uv", "mlflow-skinny", "alembic", "sqlalchemy")
# of the extra `test`: the rest of it is for notebooks, browsers, Ray and MLflow's server
_FOR_TESTS = ("jupyter_client", "pytest", "pytest-timeout")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements() -> list[str]:
    """What the project and its tests on GPUs require, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [line for line in project["dependencies"] if name_of(line) not in _NOT_NEEDED]
    return own + [line for line in project["optional-dependencies"]["test"] if name_of(line) in _FOR_TESTS]


def name_of(requirement: str) -> str:
    """`anywidget` of `anywidget==0.11.*`."""
    found = _NAME.match(requirement)
    return found[0] if found else requirement

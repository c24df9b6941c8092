"""Packaging metadata that exists in two places agrees."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from sgpu_magic import __version__

ROOT = Path(__file__).parents[3]
CONDA_NAMES = {"torch": "pytorch"}


def test_the_conda_recipe_requires_what_the_project_requires():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted: dict[str, str] = {"python": project["requires-python"]}
    for line in project["dependencies"]:
        name, range_ = re.fullmatch(r"([\w.-]+)(.*)", line).groups()  # type: ignore[union-attr]
        wanted[CONDA_NAMES.get(name, name)] = range_.removeprefix("==")
    run = (ROOT / "conda" / "meta.yaml").read_text().partition("  run:\n")[2].partition("\n\n")[0]
    found = dict(line.strip("- ").split(" ", 1) for line in run.splitlines())
    assert found == wanted


def test_the_front_end_has_the_packages_version():
    for path in ("labextension/package.json", "sgpu_magic/labextension/package.json"):
        assert json.loads((ROOT / path).read_text())["version"] == __version__

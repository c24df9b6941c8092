"""A copy of the front end's sources with the packages of its lock file, kept for later test runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "labextension"
_COPIED = ("package.json", "package-lock.json", ".npmrc", "*.mjs", "*.ts", "tsconfig*.json", "src", "test")
_NO_REGISTRY = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENOTCACHED")


def copy_front_end(kept: Path, only: tuple[str, ...] = ()) -> Path:
    """Copy the sources and install their packages, unless an earlier run has; skip the test if that is not possible.

    Args:
        kept: The folder of all copies, one for each lock file.
        only: Install only these packages, in the versions of the lock file, which takes a twentieth of the time.

    Returns:
        The copy of `labextension`.
    """
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not on this machine: what is built is taken as committed")
    reported = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if tuple(map(int, reported.lstrip("v").split(".")[:2])) < (20, 19):
        pytest.skip(f"node {reported} is older than 20.19, which the front end's tools need")
    lock = hashlib.sha256((SOURCES / "package-lock.json").read_bytes()).hexdigest()[:16]
    context = kept / "-".join([lock, *only])
    copy = context / "labextension"
    packages = copy / "node_modules"
    copy.mkdir(parents=True, exist_ok=True)
    for old in copy.iterdir():
        if old != packages:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for pattern in _COPIED:
        for path in SOURCES.glob(pattern):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, copy / path.name)
    installed = context / "installed"
    if not installed.exists():
        reported = npm(copy, "install", *_alone(copy, only)) if only else npm(copy, "ci", "--prefer-offline")
        if reported.returncode and any(code in reported.stderr for code in _NO_REGISTRY):
            pytest.skip("the front end's packages are not in npm's cache, and there is no registry")
        assert reported.returncode == 0, reported.stderr
        installed.touch()
    return copy


def _alone(copy: Path, only: tuple[str, ...]) -> list[str]:
    """Remove all other packages from the ones to install; return npm's arguments."""
    locked = json.loads((copy / "package-lock.json").read_text())["packages"]
    manifest = json.loads((copy / "package.json").read_text())
    kept = {"name": manifest["name"], "type": manifest["type"], "scripts": manifest["scripts"]}
    versions = {name: locked[f"node_modules/{name}"]["version"] for name in only}
    (copy / "package.json").write_text(json.dumps({**kept, "dependencies": versions}))
    (copy / "package-lock.json").unlink()
    return ["--prefer-offline", "--no-audit", "--no-fund", "--no-package-lock"]


def npm(context: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["npm", *arguments], cwd=context, capture_output=True, text=True, timeout=400, env={**os.environ, "CI": "1"}
    )

"""Other versions of ipykernel, put in front of this environment's for one kernel at a time."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CACHE = Path(tempfile.gettempdir()) / f"sgpu-test-ipykernels-{os.getuid()}"


def variables_for(version: str) -> dict[str, str]:
    """Return environment variables with which a kernel uses this version; skip the test if it can't be installed.

    Args:
        version: A version such as `6.31.0`.
    """
    if importlib.metadata.version("ipykernel") == version:
        return {}
    folder = CACHE / version
    if not folder.is_dir():
        CACHE.mkdir(mode=0o700, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=CACHE))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        command += ["--target", str(made), f"ipykernel=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        if done.returncode:
            shutil.rmtree(made)
            pytest.skip(f"pip can't fetch ipykernel {version}: {done.stderr.strip().splitlines()[-1:]}")
        try:
            os.replace(made, folder)
        except OSError:
            # another process of the tests was faster
            shutil.rmtree(made)
    return {"PYTHONPATH": str(folder)}

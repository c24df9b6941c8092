"""A Python environment that has an older version of sgpu-magic: another protocol, and modules of other names."""

from __future__ import annotations

import re
import shutil
import site
import sys
import venv
from pathlib import Path

import sgpu_magic
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION

OLDER_VERSION = "0.0.1"
OLDER_PROTOCOL = PROTOCOL_VERSION - 1
_ZYGOTE = "worker/process/zygote.py"
_ITS_NAME = "sgpu_magic.worker.process.zygote"


def older_environment(folder: Path) -> Path:
    """Make an environment with a copy of the package that looks like an older version. Returns its Python.

    Other packages are those of this process's environment.
    """
    venv.create(folder, symlinks=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    # a plain path: the `.pth` files there, such as that of an editable install, are not read
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    copy = packages / "sgpu_magic"
    shutil.copytree(Path(sgpu_magic.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / _ZYGOTE).rename(copy / "worker" / "zygote.py")
    for path in (copy / "wire" / "rank.py", *copy.joinpath("agent").rglob("*.py")):
        path.write_text(path.read_text().replace(_ITS_NAME, "sgpu_magic.worker.zygote"))
    _set(copy / "__init__.py", "__version__", f'"{OLDER_VERSION}"')
    _set(copy / "wire" / "pool_status.py", "PROTOCOL_VERSION", str(OLDER_PROTOCOL))
    return folder / "bin" / Path(sys.executable).name


def upgrade(python: Path) -> None:
    """Install this version in the environment, as pip does while processes that have loaded the older one run."""
    copy = next(python.parents[1].glob("lib/python*/site-packages/sgpu_magic"))
    shutil.rmtree(copy)
    shutil.copytree(Path(sgpu_magic.__file__).parent, copy)


def _set(path: Path, name: str, value: str) -> None:
    text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", path.read_text())
    assert count == 1, f"{name} in {path}"
    path.write_text(text)

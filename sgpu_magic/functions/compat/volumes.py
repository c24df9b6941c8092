"""Where `/Volumes/...` and `dbfs:/...` are on this machine: in the folder of the setting `volumes_dir`."""

from __future__ import annotations

import os
from pathlib import Path

from sgpu_magic.config import load_settings
from sgpu_magic.errors import UsageError

_VOLUMES = "/Volumes"
_DBFS = "/dbfs"
_FILE = "file:"


def located(path: str | os.PathLike[str]) -> str:
    """Return the path on this machine of a path as Databricks writes it; other paths and URLs unchanged.

    `/Volumes/main/default/data` is the folder `Volumes/main/default/data` in `volumes_dir`, `dbfs:/tmp/x` and
    `/dbfs/tmp/x` are `dbfs/tmp/x` there, and `dbfs:/Volumes/...` is the volume. A folder `/Volumes` or `/dbfs` that
    exists on this machine takes precedence.

    Args:
        path: The path or URL.

    Raises:
        UsageError: It is such a path, and `volumes_dir` is not set.
    """
    text = os.fspath(path)
    if text.startswith(_FILE):
        return "/" + text.removeprefix(_FILE).lstrip("/")
    if text.startswith("dbfs:"):
        text = "/" + text.removeprefix("dbfs:").lstrip("/")
        text = text if _is_below(text, _VOLUMES) else f"{_DBFS}{text}"
    for root in (_VOLUMES, _DBFS):
        if _is_below(text, root) and not os.path.isdir(root):
            directory = load_settings().volumes_dir
            if not directory:
                raise UsageError(
                    f"{os.fspath(path)} is in Databricks' storage, which this machine does not have. Put the files "
                    f"into a folder of your own and name it in the setting volumes_dir (SGPU_VOLUMES_DIR): {text} is "
                    f"then VOLUMES_DIR{text}."
                )
            return str(Path(directory).expanduser()) + text
    return text


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")

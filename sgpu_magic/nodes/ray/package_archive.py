"""Our own package as a zip archive, for Ray nodes that have none or another one: pure Python, about a megabyte."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

_NOT_SHIPPED = ("labextension", "__pycache__")
# of every file: the same package is the same archive, byte for byte
_THEN = (1980, 1, 1, 0, 0, 0)


def package_archive() -> bytes:
    """Return the archive; it has `sgpu_magic/` at its top."""
    here = Path(__file__).parents[2]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(here.rglob("*")):
            if path.is_file() and not any(part in _NOT_SHIPPED for part in path.relative_to(here).parts):
                info = zipfile.ZipInfo(str(path.relative_to(here.parent)), _THEN)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = 0o644 << 16
                archive.writestr(info, path.read_bytes())
    return data.getvalue()

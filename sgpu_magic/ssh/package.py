"""This package as an archive, for machines where it is not installed."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

import sgpu_magic
from sgpu_magic import __version__

# for front ends, which are here
_LEFT_OUT = frozenset({"__pycache__", "static", "labextension"})
# the earliest time that an archive can store: equal files make equal archives
_TIME = (1980, 1, 1, 0, 0, 0)
_INFO = f"sgpu_magic-{__version__}.dist-info"


class Package(msgspec.Struct, frozen=True):
    """An archive of this package.

    Args:
        digest: The SHA-256 of `data`, hexadecimal.
        data: A zip archive with the package's folder and its metadata, as `site-packages` has them.
        requires: The requirements of the package, torch excepted, which the other machine brings.
    """

    digest: str
    data: bytes
    requires: tuple[str, ...]


@functools.cache
def this_package() -> Package:
    """Return the archive of the package that this process has loaded."""
    files = dict(_files())
    files[f"{_INFO}/METADATA"] = _metadata().encode("utf-8", "surrogateescape")
    files[f"{_INFO}/INSTALLER"] = b"sgpu\n"
    record = f"{_INFO}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in (*files, record)).encode("utf-8", "surrogateescape")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as file:
        for name, data in files.items():
            file.writestr(zipfile.ZipInfo(name, _TIME), data, zipfile.ZIP_DEFLATED)
    data = archive.getvalue()
    return Package(hashlib.sha256(data).hexdigest(), data, _requirements())


def _files() -> Iterator[tuple[str, bytes]]:
    root = Path(sgpu_magic.__path__[0])
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(files):
            path = Path(folder, name)
            yield f"sgpu_magic/{path.relative_to(root).as_posix()}", path.read_bytes()


def _metadata() -> str:
    try:
        text = metadata.distribution("sgpu-magic").read_text("METADATA")
    except metadata.PackageNotFoundError:
        text = None
    return text or f"Metadata-Version: 2.1\nName: sgpu-magic\nVersion: {__version__}\n"


def _requirements() -> tuple[str, ...]:
    try:
        listed = metadata.requires("sgpu-magic") or []
    except metadata.PackageNotFoundError:
        listed = []
    return tuple(each for each in listed if "extra ==" not in each and not each.startswith("torch"))

"""Installed distributions and their origin, read from their metadata.

Reads the head of `METADATA`, `RECORD`, `INSTALLER` and `direct_url.json` (PEP 610). Imports nothing.
"""

from __future__ import annotations

import contextlib
import csv
import enum
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sgpu_magic.packages.environment_digest import environment_digest

if TYPE_CHECKING:
    from sgpu_magic.wire.attachments import Wheel

_HEAD_BYTES = 4096
_NAME_OR_VERSION = re.compile(rb"^(name|version):(.*)$", re.IGNORECASE | re.MULTILINE)
_SEPARATORS = re.compile(r"[-_.]+")
_CREDENTIALS = re.compile(r"(?<=://)(?!git@)[^/@\s]*@")
# written by the installer itself: these differ between installers and locations for the same wheel
INSTALLERS_OWN = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD", "uv_cache.json", "uv_build.json")
_PROGRAMS = (b"../../../bin/", b"../../Scripts/")
_SYSTEM_INSTALLERS = ("apt", "debian", "dpkg", "rpm", "portage", "pacman")
_SYSTEM_FOLDER = re.compile(r"/usr/lib/python3(\.\d+)?/dist-packages(/|$)")
SGPU_MAGIC = "sgpu-magic"
_TORCH_FAMILY = re.compile(
    r"(torch|torchvision|torchaudio|triton|pytorch-triton.*|triton-rocm|nvidia-(?!ml-py).*|cuda-(toolkit|bindings|pathfinder))"
)


class Kind(enum.StrEnum):
    """Where a distribution came from."""

    REGISTRY = "registry"
    VCS = "vcs"
    ARCHIVE = "archive"
    EDITABLE = "editable"
    # a local directory, not editable
    PROJECT = "project"
    # a local file
    WHEEL = "wheel"
    CONDA = "conda"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Distribution:
    """One installed distribution.

    Args:
        name: Name as in its metadata.
        version: Version as in its metadata.
        kind: Where it came from.
        url: URL of the repository (without `git+`), archive, or local directory or file, without credentials.
        commit: The repository's commit.
        vcs: `git`, `hg` and so on; "" if it is not from a repository.
        subdirectory: Path of the project within the repository or archive.
        sha256: Hexadecimal SHA-256 of the archive or local file, if its installer recorded it.
        record: Hash of the files that `RECORD` lists, without those the installer adds: identifies the content. ""
            without a `RECORD`.
        location: Path of its `.dist-info` or `.egg-info`.
    """

    name: str
    version: str
    kind: Kind
    url: str = ""
    commit: str = ""
    vcs: str = ""
    subdirectory: str = ""
    sha256: str = ""
    record: str = ""
    location: str = ""

    @property
    def key(self) -> str:
        """The normalised name (PEP 503)."""
        return normalised(self.name)

    @property
    def pin(self) -> str:
        return f"{self.key}=={self.version}"

    @property
    def path(self) -> Path | None:
        """The local path that `url` names; None if `url` is not a `file:` URL."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    @property
    def module_names(self) -> list[str]:
        """Its top-level modules, from `top_level.txt` or else guessed from its name."""
        listed = contents_of(f"{self.location}/top_level.txt").decode(errors="replace").split()
        return listed or [self.key.replace("-", "_")]

    @property
    def direct_reference(self) -> str:
        """The direct reference (PEP 508) of a distribution from a repository or an archive, "" for all others."""
        parts = [f"subdirectory={self.subdirectory}"] if self.subdirectory else []
        if self.kind is Kind.VCS:
            head = f"{self.key} @ {self.vcs}+{self.url}@{self.commit}"
        elif self.kind is Kind.ARCHIVE:
            head = f"{self.key} @ {self.url}"
            if self.sha256:
                parts.insert(0, f"sha256={self.sha256}")
        else:
            return ""
        return f"{head}#{'&'.join(parts)}" if parts else head


@dataclass(frozen=True)
class InstalledPackages:
    """The distributions installed for an interpreter.

    Args:
        distributions: Distributions sorted by name. If a name is installed twice, the first on `sys.path`, which is
            the one that Python imports.
        python: Python version, `3.11`.
        tag: Interpreter tag, `cp311`.
        platform: Platform, `linux_x86_64`.
        executable: Path of the interpreter.
    """

    distributions: tuple[Distribution, ...]
    python: str = ""
    tag: str = ""
    platform: str = ""
    executable: str = ""

    def get(self, name: str) -> Distribution | None:
        """Return the distribution of that name, in any spelling, or None."""
        return self._by_key.get(normalised(name))

    @cached_property
    def _by_key(self) -> dict[str, Distribution]:
        return {distribution.key: distribution for distribution in self.distributions}

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The strings that the digest is computed from."""
        return tuple(
            " ".join((d.pin, d.kind, d.vcs, d.url, d.commit, d.subdirectory, d.sha256, d.record))
            for d in self.distributions
        )

    @cached_property
    def digest(self) -> str:
        return environment_digest(self.parts, self.tag, self.platform)


def normalised(name: str) -> str:
    """Return the normalised form of a distribution's name (PEP 503)."""
    return _SEPARATORS.sub("-", name).lower()


def distribution_name(wheel: Wheel) -> str:
    """Return the normalised name of the distribution in a wheel."""
    return normalised(wheel.file.partition("-")[0])


def without_credentials(url: str) -> str:
    """Return the URL without user and password. Keeps `git@host`, which is not a secret."""
    return _CREDENTIALS.sub("", url)


def read_distribution(info: str, entry: str, conda_names: Mapping[str, str]) -> Distribution | None:
    """Read one installed distribution.

    Args:
        info: Path of a `.dist-info` or `.egg-info`.
        entry: The entry of `sys.path` that contains it.
        conda_names: Versions of the packages installed by conda, by name.

    Returns:
        The distribution; None for remains of a removed one, without a name or a version.
    """
    is_egg = info.endswith(".egg-info")
    metadata = info if is_egg and os.path.isfile(info) else f"{info}/{'PKG-INFO' if is_egg else 'METADATA'}"
    name, version = _name_and_version(metadata)
    if not name or not version:
        return None
    # an `.egg-info` has none of these three
    installer = contents_of(f"{info}/INSTALLER").decode(errors="replace").strip()
    record = record_hash(contents_of(f"{info}/RECORD"), os.path.basename(info))
    plain = Distribution(name, version, Kind.REGISTRY, record=record, location=info)
    if installer == "conda" or (not installer and conda_names.get(normalised(name)) == version):
        return replace(plain, kind=Kind.CONDA)
    if direct := contents_of(f"{info}/direct_url.json"):
        return _from_direct_url(plain, direct)
    if installer in _SYSTEM_INSTALLERS or _SYSTEM_FOLDER.match(info):
        return replace(plain, kind=Kind.SYSTEM)
    if is_egg and os.path.basename(entry) not in ("site-packages", "dist-packages"):
        # `setup.py develop`, or metadata next to the source of an editable project on the path
        return replace(plain, kind=Kind.EDITABLE, url=Path(project_folder(entry)).as_uri())
    return plain


def project_folder(entry: str) -> str:
    """Return the project directory of a `sys.path` entry: the entry itself or, for a `src` layout, its parent."""
    entry = os.path.abspath(entry)
    return entry if has_project_file(entry) or not has_project_file(os.path.dirname(entry)) else os.path.dirname(entry)


def has_project_file(folder: str | Path) -> bool:
    """Whether the folder has a `pyproject.toml` or `setup.py`, so a wheel can be built from it."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("pyproject.toml", "setup.py"))


def record_hash(record: bytes, info_name: str) -> str:
    """Hash the files that a `RECORD` lists. The hash does not depend on the installer or the location.

    Args:
        record: The file's bytes.
        info_name: Name of the `.dist-info` directory that contains it.
    """
    own = tuple(os.fsencode(f"{info_name}/{name},") for name in INSTALLERS_OWN)
    # byte code has no hash; scripts contain the interpreter's path
    lines = [line for line in record.splitlines() if not line.endswith(b",,") and not line.startswith(_PROGRAMS + own)]
    if not lines:
        return ""
    lines.sort()
    return hashlib.sha256(b"\n".join(lines)).hexdigest()[:32]


def _from_direct_url(plain: Distribution, text: bytes) -> Distribution:
    """Add what `direct_url.json` records. Returns `plain` if the file is invalid."""
    try:
        # this module also runs with only the standard library, without the decoders of `wire`
        found: dict[str, Any] = json.loads(text)
        url = without_credentials(str(found["url"]))
        what = replace(plain, url=url, subdirectory=str(found.get("subdirectory") or ""))
        if "vcs_info" in found:
            info: dict[str, Any] = found["vcs_info"]
            return replace(what, kind=Kind.VCS, vcs=str(info.get("vcs", "git")), commit=str(info.get("commit_id", "")))
        if "dir_info" in found:
            return replace(what, kind=Kind.EDITABLE if found["dir_info"].get("editable") else Kind.PROJECT)
        archive: dict[str, Any] = found.get("archive_info") or {}
        hashes: dict[str, str] = archive.get("hashes") or {}
        sha256 = str(hashes.get("sha256") or archive.get("hash") or "").removeprefix("sha256=")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return plain
    kind = Kind.WHEEL if url.startswith("file:") else Kind.ARCHIVE
    return replace(what, kind=kind, sha256="" if "=" in sha256 else sha256)


def _name_and_version(path: str) -> tuple[str, str]:
    """Return name and version from a metadata file, "" where missing."""
    found: dict[bytes, str] = {}
    # read the whole file only if a long field precedes them
    for most_bytes in (_HEAD_BYTES, -1):
        head = contents_of(path, most_bytes)
        fields = _NAME_OR_VERSION.findall(re.split(rb"\n\s*\n", head, maxsplit=1)[0])
        found = {field.lower(): value.decode(errors="replace").strip() for field, value in fields}
        if len(found) == 2 or len(head) < _HEAD_BYTES:
            break
    return found.get(b"name", ""), found.get(b"version", "")


def record_of(info: str | Path) -> list[list[str]]:
    """Return the rows of a distribution's `RECORD` (path, hash and size of each file). Without one: OSError."""
    with open(os.path.join(info, "RECORD"), newline="", encoding="utf-8") as record:
        return [row for row in csv.reader(record) if row]


def contents_of(path: str | Path, most_bytes: int = -1) -> bytes:
    """Return the first bytes of a file, b"" if it can't be read."""
    # unbuffered is faster for hundreds of small files
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        return file.read(most_bytes) or b""
    return b""


# ---------------------------------------------------------------- packages that a node provides


def is_from_node(name: str, *, torch_mine: bool = False) -> bool:
    """Whether a package comes from the node's base layer and is never shipped.

    A laptop's torch is built for the CPU, or for a CUDA version that the node's driver may not support. sgpu-magic must
    be the version that the node's agent runs.

    Args:
        name: The package's name in any spelling.
        torch_mine: Whether `--torch mine` is set: torch and its libraries are shipped as the notebook has them.
    """
    key = normalised(name)
    return key == SGPU_MAGIC or (not torch_mine and _TORCH_FAMILY.fullmatch(key) is not None)

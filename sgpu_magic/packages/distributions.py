"""What one installed distribution is, where it came from, as its own metadata says; what a set is known by.

Read are the head of `METADATA`, `RECORD`, `INSTALLER` and `direct_url.json` (PEP 610); nothing is imported.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from sgpu_magic.wire.attachments import Wheel

_HEAD_BYTES = 4096
_SEPARATORS = re.compile(r"[-_.]+")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")
# what an installer writes for itself: another one, or another place, would have other lines for the same wheel
INSTALLERS_OWN = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD", "uv_cache.json", "uv_build.json")
_PROGRAMS = (b"../../../bin/", b"../../Scripts/")
_SYSTEM_INSTALLERS = ("apt", "debian", "dpkg", "rpm", "portage", "pacman")
_SYSTEM_FOLDER = re.compile(r"/usr/lib/python3(\.\d+)?/dist-packages(/|$)")


class Kind(enum.StrEnum):
    """Where a distribution came from."""

    REGISTRY = "registry"
    VCS = "vcs"
    ARCHIVE = "archive"
    EDITABLE = "editable"
    # a directory of this machine, installed as a copy
    PROJECT = "project"
    # a file of this machine
    WHEEL = "wheel"
    CONDA = "conda"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Distribution:
    """One installed distribution.

    Args:
        name: As its metadata has it.
        version: Likewise.
        kind: Where it came from.
        url: Of a repository (without `git+`), an archive or a local directory or file; no credentials are in it.
        commit: Of a repository.
        vcs: `git`, `hg` ...; "" when it is from no repository.
        subdirectory: Where in the repository or archive the project lies.
        sha256: Of an archive's or a local file's bytes, hexadecimal, where its installer has written that down.
        record: Hash of what `RECORD` lists, without what an installer adds of its own: the content's identity. ""
            where there is none.
        location: Its `.dist-info` or `.egg-info`.
        installer: As `INSTALLER` has it.
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
    installer: str = ""

    @property
    def key(self) -> str:
        """The normalised name (PEP 503)."""
        return normalised(self.name)

    @property
    def pin(self) -> str:
        return f"{self.key}=={self.version}"

    @property
    def path(self) -> Path | None:
        """The directory or file of this machine that `url` names, None when it names none."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    @property
    def module_names(self) -> list[str]:
        """Its top-level modules: what its metadata list, else its name's usual spelling."""
        listed = _read(f"{self.location}/top_level.txt").decode(errors="replace").split()
        return listed or [self.key.replace("-", "_")]

    @property
    def direct_reference(self) -> str:
        """The requirement of one from a repository or an archive (PEP 508), "" for all others."""
        parts = [f"subdirectory={self.subdirectory}"] if self.subdirectory else []
        if self.kind is Kind.VCS:
            head = f"{self.key} @ {self.vcs}+{self.url}@{self.commit}"
        elif self.kind is Kind.ARCHIVE:
            head = f"{self.key} @ {self.url}"
            parts = [f"sha256={self.sha256}"] * bool(self.sha256) + parts
        else:
            return ""
        return f"{head}#{'&'.join(parts)}" if parts else head


@dataclass(frozen=True)
class Snapshot:
    """The distributions that an interpreter has.

    Args:
        distributions: Each name once, sorted: the first on `sys.path`, which is the one that is imported.
        shadowed: Those of the same names further back.
        python: `3.11`.
        tag: Of the interpreter: `cp311`.
        platform: `linux_x86_64`.
        executable: The interpreter.
    """

    distributions: tuple[Distribution, ...]
    shadowed: tuple[Distribution, ...] = ()
    python: str = ""
    tag: str = ""
    platform: str = ""
    executable: str = ""
    _by_key: dict[str, Distribution] = field(init=False, repr=False, compare=False, default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self._by_key.update({distribution.key: distribution for distribution in self.distributions})

    def get(self, name: str) -> Distribution | None:
        """The distribution of that name in any spelling."""
        return self._by_key.get(normalised(name))

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """What the digest is made of."""
        return tuple(
            " ".join((d.pin, d.kind, d.vcs, d.url, d.commit, d.subdirectory, d.sha256, d.record))
            for d in self.distributions
        )

    @cached_property
    def digest(self) -> str:
        return environment_digest(self.parts, self.tag, self.platform)


def normalised(name: str) -> str:
    """A distribution's name in the spelling that all others mean too (PEP 503)."""
    return _SEPARATORS.sub("-", name).lower()


def distribution_name(wheel: Wheel) -> str:
    """The normalised name of what a wheel holds."""
    return normalised(wheel.file.partition("-")[0])


def without_credentials(url: str) -> str:
    """The URL without user and password; `git@host`, which is no secret, stays."""
    return _CREDENTIALS.sub(lambda match: "git@" if match[0] == "git@" else "", url)


def read_distribution(info: str, entry: str, conda_names: Mapping[str, str]) -> Distribution | None:
    """Read what is installed.

    Args:
        info: Path of a `.dist-info` or `.egg-info`.
        entry: The entry of `sys.path` that it lies in.
        conda_names: Versions of conda's packages by their names.

    Returns:
        The distribution; None for what is left of one that was removed: it has no name or no version.
    """
    is_egg = info.endswith(".egg-info")
    metadata = info if is_egg and os.path.isfile(info) else f"{info}/{'PKG-INFO' if is_egg else 'METADATA'}"
    name, version = _name_and_version(metadata)
    if not name or not version:
        return None
    installer = "" if is_egg else _read(f"{info}/INSTALLER").decode(errors="replace").strip()
    record = "" if is_egg else record_hash(_read(f"{info}/RECORD"), os.path.basename(info))
    plain = Distribution(name, version, Kind.REGISTRY, record=record, location=info, installer=installer)
    if installer == "conda" or (not installer and conda_names.get(normalised(name)) == version):
        return replace(plain, kind=Kind.CONDA)
    direct = b"" if is_egg else _read(f"{info}/direct_url.json")
    if direct:
        return _from_direct_url(plain, direct)
    if installer in _SYSTEM_INSTALLERS or _SYSTEM_FOLDER.match(info):
        return replace(plain, kind=Kind.SYSTEM)
    if is_egg and os.path.basename(entry) not in ("site-packages", "dist-packages"):
        # `setup.py develop`, or the metadata beside an editable project's source, which is on the path
        return replace(plain, kind=Kind.EDITABLE, url=Path(project_folder(entry)).as_uri())
    return plain


def project_folder(entry: str) -> str:
    """The directory with the project file that a path entry belongs to: itself or, for `src`, the one above."""
    entry = os.path.abspath(entry)
    return entry if has_project_file(entry) or not has_project_file(os.path.dirname(entry)) else os.path.dirname(entry)


def has_project_file(folder: str | Path) -> bool:
    """Whether a wheel can be built of what lies there."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("pyproject.toml", "setup.py"))


def record_hash(record: bytes, info_name: str) -> str:
    """Hash what a `RECORD` lists: alike for whoever has installed the wheel, and wherever to.

    Args:
        record: The file's bytes.
        info_name: The name of the `.dist-info` that it lies in.
    """
    own = tuple(f"{info_name}/{name},".encode() for name in INSTALLERS_OWN)
    # byte code has no hash; programs have the path of the interpreter in them
    lines = [line for line in record.splitlines() if not line.endswith(b",,") and not line.startswith(_PROGRAMS + own)]
    if not lines:
        return ""
    lines.sort()
    return hashlib.sha256(b"\n".join(lines)).hexdigest()[:32]


def _from_direct_url(plain: Distribution, text: bytes) -> Distribution:
    """What `direct_url.json` says of it; as from a registry when that is damaged."""
    try:
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
    except (ValueError, KeyError, TypeError, AttributeError):
        return plain
    kind = Kind.WHEEL if url.startswith("file:") else Kind.ARCHIVE
    return replace(what, kind=kind, sha256="" if "=" in sha256 else sha256)


def _name_and_version(path: str) -> tuple[str, str]:
    """What a file of metadata calls its distribution, "" where it does not say."""
    head = _read(path, _HEAD_BYTES)
    found = _in_head(head)
    # a long field may stand before them
    return found if all(found) or len(head) < _HEAD_BYTES else _in_head(_read(path))


def _in_head(head: bytes) -> tuple[str, str]:
    found: dict[bytes, str] = {}
    for line in head.split(b"\n"):
        if not line.strip() or len(found) == 2:
            break
        field, _, value = line.partition(b":")
        if field.lower() in (b"name", b"version"):
            found[field.lower()] = value.decode(errors="replace").strip()
    return found.get(b"name", ""), found.get(b"version", "")


def _read(path: str, most_bytes: int = -1) -> bytes:
    """The file's first bytes; b"" when there is none or it can't be read."""
    try:
        # without a buffer: there are hundreds
        with open(path, "rb", buffering=0) as file:
            return file.read(most_bytes) or b""
    except OSError:
        return b""


# ---------------------------------------------------------------- what a set of them is known by

_VALID = re.compile(r"[0-9a-f]{16,64}")
_VERSION = "environment 1"


def own_python() -> str:
    """This Python's minor version, `3.11`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def own_platform() -> str:
    """`linux_x86_64`."""
    return re.sub(r"[-.]", "_", sysconfig.get_platform())


def environment_digest(
    parts: Iterable[str], python: str, platform: str, *, torch_mine: bool = False, allow_build: bool = False
) -> str:
    """Digest packages and how they are to be had.

    Args:
        parts: Pins and hashes; their order does not matter.
        python: The interpreter's tag, `cp311`.
        platform: `linux_x86_64`.
        torch_mine: `--torch mine`.
        allow_build: `--allow-build`.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for part in (_VERSION, python, platform, f"{torch_mine=}", f"{allow_build=}", *sorted(parts)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def is_valid_digest(text: str) -> bool:
    """Whether it can be one, and so a file's name."""
    return _VALID.fullmatch(text) is not None


# ---------------------------------------------------------------- which of them a node brings itself

SGPU_MAGIC = "sgpu-magic"
_TORCH_FAMILY = re.compile(
    r"(torch|torchvision|torchaudio|triton|pytorch-triton.*|triton-rocm|nvidia-(?!ml-py).*|cuda-(toolkit|bindings|pathfinder))"
)


def is_from_node(name: str, *, torch_mine: bool = False) -> bool:
    """Whether a node's base layer has it, or what takes its place there, and nobody ships it.

    A laptop's torch is built for its CPU, or for another CUDA than the node's driver knows. sgpu-magic has to be the
    one that the node's agent runs.

    Args:
        name: In any spelling.
        torch_mine: `--torch mine`: torch, and what it is made of, is shipped as the notebook has it.
    """
    key = normalised(name)
    return key == SGPU_MAGIC or (not torch_mine and _TORCH_FAMILY.fullmatch(key) is not None)

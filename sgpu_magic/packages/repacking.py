"""A wheel made of what is installed: for distributions that no registry has.

What an installer spread over the environment is put back where a wheel has it: programs into `.data/scripts`, other
files outside the site directory into `.data/data`. The same installation always makes the same bytes.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import csv
import hashlib
import io
import os
import stat
import sys
import zipfile
from pathlib import Path

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.distributions import Distribution
from sgpu_magic.packages.kept_wheels import kept_wheel
from sgpu_magic.wire.environment import Wheel

_EPOCH = (1980, 1, 1, 0, 0, 0)
_INSTALLERS_OWN = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json"}
_COMPRESSION = 5


def repack(distribution: Distribution, root: Path) -> Wheel:
    """Return the wheel of an installed distribution, made now if it is not there.

    Args:
        distribution: It has a `RECORD`.
        root: Where wheels are kept.

    Raises:
        EnvironmentFailed: It can't be made.
    """
    if not distribution.record:
        raise EnvironmentFailed(
            f"the installed package {distribution.name} {distribution.version} is in no package index, and its "
            f"installer has not written down which files it has ({distribution.location} has no RECORD), so no wheel "
            "can be made of it. Install it with pip or uv from its source or a wheel."
        )
    try:
        key = f"repacked-{distribution.key}-{distribution.record}"
        return kept_wheel(root, key, lambda folder: _write_wheel(Path(distribution.location), folder))
    except OSError as error:
        raise EnvironmentFailed(
            f"no wheel can be made of the installed package {distribution.name} {distribution.version}: "
            f"{error.strerror or error} ({error.filename or root}). Install it anew, or free some disk space."
        ) from error


def installed_bytes(distribution: Distribution) -> int:
    """What its `RECORD` says that its files have together."""
    total = 0
    with (
        contextlib.suppress(OSError),
        open(Path(distribution.location) / "RECORD", newline="", encoding="utf-8") as record,
    ):
        for row in csv.reader(record):
            if len(row) > 2 and row[2].isdigit():
                total += int(row[2])
    return total


def _write_wheel(info: Path, folder: Path) -> Path:
    """Write the wheel of the `.dist-info` directory into `folder`."""
    stem = info.name.removesuffix(".dist-info")
    members = _members(info, stem)
    file = folder / f"{stem}-{_tags(info)}.whl"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as wheel:
        # the metadata stand last, as in every wheel: they are found without reading the rest
        for name, path in sorted(members.items(), key=lambda member: (member[0].startswith(info.name), member[0])):
            data = path.read_bytes()
            if name.startswith(f"{stem}.data/scripts/"):
                data = _with_plain_shebang(data)
            executable = path.stat().st_mode & stat.S_IXUSR
            wheel.writestr(_entry(name, 0o755 if executable else 0o644), data)
            rows.writerow((name, f"sha256={_record_hash(data)}", len(data)))
        rows.writerow((f"{info.name}/RECORD", "", ""))
        wheel.writestr(_entry(f"{info.name}/RECORD", 0o644), record.getvalue())
    return file


def _members(info: Path, stem: str) -> dict[str, Path]:
    """What the wheel has: names in it, and where the files are."""
    site = info.parent
    generated = _generated_programs(info)
    members: dict[str, Path] = {}
    with open(info / "RECORD", newline="", encoding="utf-8") as record:
        for row in csv.reader(record):
            if not row or row[0].endswith(".pyc"):
                continue
            path = Path(os.path.normpath(site / row[0]))
            if path.parent == info and path.name in _INSTALLERS_OWN:
                continue
            if path.is_relative_to(site):
                members[path.relative_to(site).as_posix()] = path
            elif path.parent.name in ("bin", "Scripts"):
                if path.name not in generated:
                    members[f"{stem}.data/scripts/{path.name}"] = path
            elif path.is_relative_to(sys.prefix):
                members[f"{stem}.data/data/{path.relative_to(sys.prefix).as_posix()}"] = path
    return members


def _generated_programs(info: Path) -> set[str]:
    """Programs that every installer makes of the entry points."""
    parser = configparser.RawConfigParser(delimiters=("=",))
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read(info / "entry_points.txt", encoding="utf-8")
    return {
        name
        for section in ("console_scripts", "gui_scripts")
        if parser.has_section(section)
        for name in parser.options(section)
    }


def _tags(info: Path) -> str:
    """`py3-none-any` from the `Tag` lines of `WHEEL`."""
    tags: tuple[list[str], list[str], list[str]] = ([], [], [])
    for line in (info / "WHEEL").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "tag":
            for found, part in zip(tags, value.strip().split("-"), strict=False):
                if part not in found:
                    found.append(part)
    return "-".join(".".join(found) for found in tags) if all(tags) else "py3-none-any"


def _with_plain_shebang(data: bytes) -> bytes:
    """A program names this machine's interpreter; the next installer puts its own there."""
    first, newline, rest = data.partition(b"\n")
    return b"#!python" + newline + rest if first.startswith(b"#!") and b"python" in first else data


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = (stat.S_IFREG | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3
    return entry

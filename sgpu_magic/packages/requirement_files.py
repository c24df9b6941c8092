"""Reads users' requirements files and `pylock.toml` files, and writes the `requirements.txt` of a run.

A run's `requirements.txt` is written without network access, so it exists even if no package index can be reached.
"""

from __future__ import annotations

import contextlib
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec
from packaging.pylock import (
    Package,
    PackageArchive,
    PackageDirectory,
    PackageVcs,
    Pylock,
    PylockSelectError,
    PylockValidationError,
    is_valid_pylock_path,
)
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from sgpu_magic.errors import EnvironmentFailed, UsageError
from sgpu_magic.packages.distributions import (
    Distribution,
    InstalledPackages,
    Kind,
    contents_of,
    distribution_name,
    normalised,
)
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.decoding import decode_toml
from sgpu_magic.wire.option_text import OptionName, text_of

if TYPE_CHECKING:
    from sgpu_magic.packages.lock import Lock

_HEADER = re.compile(r"# Python (\d+\.\d+)[\w.+]* on [\w ]*, digest [0-9a-f]+")
_COMPLETE = "Complete: "
_HEAD_LINES = 3
_LOCAL = "@ file:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(r"\s+--hash[= ](\S+)")
_INCLUDE = re.compile(r"(?:-r|--requirement)[= ]?\s*(.+)")
_INDEX = re.compile(r"(-i|--index-url|--extra-index-url|-f|--find-links|--no-index|--trusted-host)\b")
_DEEPEST = 8
_COMPLETE_LINE = "# Complete: `uv pip install --no-deps -r requirements.txt` resolves no dependencies."


class Requirements(msgspec.Struct, frozen=True):
    """The requirements in a file.

    Args:
        lines: Requirements, followed by their hashes if the file has some.
        resolve: Whether dependencies must be resolved: the file is not a complete set of exact pins.
        python: The Python that the file was made for, `3.12`; "" if it does not say.
        local: Pairs of a name and the path of a local wheel or project.
    """

    lines: tuple[str, ...]
    resolve: bool
    python: str = ""
    local: tuple[tuple[str, Path], ...] = ()


def read_file(path: Path) -> Requirements:
    """Read a requirements file or a `pylock.toml`.

    Raises:
        UsageError: The file can't be read, or names something that other machines do not have.
        EnvironmentFailed: The file is not for this Python.
    """
    try:
        if is_valid_pylock_path(path):
            return _read_pylock(path)
        if path.suffix == ".toml":
            raise UsageError(
                f"{path} is not named like a lock file, `pylock.toml` or `pylock.NAME.toml`. Convert a project's own "
                f"file with `uv pip compile {path.name} -o pylock.toml`."
            )
        text = path.read_text("utf-8")
        lines = tuple(_lines_of(path, text, _DEEPEST))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read as a requirements file: {error}.") from error
    header = _HEADER.match(text)
    found = [line for line in lines if _LOCAL not in line]
    exact = all(_HASH.search(line) and "==" in line for line in found)
    # a file written by sgpu-magic is marked as complete and has no hashes
    is_complete = header is not None and _COMPLETE in "".join(text.splitlines(keepends=True)[:_HEAD_LINES])
    return Requirements(
        tuple(found),
        resolve=not exact and not is_complete,
        python=header[1] if header else "",
        local=tuple(_local(path, line) for line in lines if _LOCAL in line),
    )


def _local(path: Path, line: str) -> tuple[str, Path]:
    name, _, url = line.partition("@")
    there = Path(unquote(urlsplit(url.strip()).path))
    if not there.exists():
        raise UsageError(f"{path} takes {name.strip()} from {there}, which no longer exists.")
    return name.strip(), there


def name_of(line: str) -> str:
    """Return the name in a requirement such as `torch==2.13.0` or `six @ https://...`; "" if there is none."""
    found = _NAME.match(line.strip())
    return found[0] if found is not None else ""


def key_of(line: str) -> str:
    """Return the normalised name in a requirement."""
    return normalised(name_of(line))


def specifier_of(line: str) -> SpecifierSet:
    """Return the versions that a requirement allows; all if it names none or can't be read."""
    try:
        return Requirement(_COMMENT.sub("", _HASH.sub("", line))).specifier
    except InvalidRequirement:
        return SpecifierSet()


def version_of(line: str) -> str:
    """Return the version that a requirement pins, "" if it pins none."""
    specifier = specifier_of(line)
    pins = [clause.version for clause in specifier if clause.operator == "=="]
    return pins[0] if len(pins) == 1 and "*" not in pins[0] else ""


def needed_by(info: Path) -> Iterator[Requirement]:
    """Yield the requirements of an installed distribution that apply here. Empty if its metadata can't be read.

    Args:
        info: Its `.dist-info` directory.
    """
    text = contents_of(info / "METADATA").decode(errors="replace")
    # the head ends at the first empty line; the description after it may be long
    for line in re.split(r"\r?\n\r?\n", text, maxsplit=1)[0].splitlines():
        if line.startswith("Requires-Dist:") and "extra ==" not in line and "extra==" not in line:
            with contextlib.suppress(InvalidRequirement):
                requirement = Requirement(line.removeprefix("Requires-Dist:").strip())
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    yield requirement


# ---------------------------------------------------------------- requirements files


def _lines_of(path: Path, text: str, deepest: int) -> Iterator[str]:
    for raw in text.replace("\\\n", " ").splitlines():
        line = _COMMENT.sub("", raw).strip()
        if not line:
            continue
        include = _INCLUDE.fullmatch(line)
        if include is not None:
            if not deepest:
                raise UsageError(f"{path}: included files can't be nested deeper than {_DEEPEST} levels.")
            other = path.parent / include[1].strip()
            yield from _lines_of(other, other.read_text("utf-8"), deepest - 1)
        else:
            yield _checked(path, line)


def _checked(path: Path, line: str) -> str:
    """Return the line, or raise if it would mean something else on another machine."""
    redacted = without_url_credentials(line)
    if _INDEX.match(line):
        raise UsageError(
            f"{path} names a package index ({redacted.split()[0]}), which is not sent with a run: it often contains a "
            "password. Set `index_url` in the settings of the pool's machine, and remove the line."
        )
    if line.startswith(("-c", "--constraint")):
        raise UsageError(f"{path} has constraints ({redacted}). Write the versions into the file itself.")
    if line.startswith(("-e", "--editable", ".", "/", "file:")):
        raise UsageError(
            text_of(
                f"{path} refers to a path of this machine ({redacted}), which other machines do not have. Write it "
                "with its name, `NAME @ file:///...`: then a wheel is built from it. Or install it in the notebook's "
                "Python and leave ",
                OptionName("env-version"),
                " out: then it travels with the notebook's own packages.",
            )
        )
    if line.startswith("-"):
        raise UsageError(f"{path} has the option {redacted.split()[0]}, which has no meaning for a run. Remove it.")
    if redacted != line or "${" in line:
        raise UsageError(
            f"{path} has a password or a variable in a line ({redacted}). It would be stored with the run: use git's "
            "or the index's own login on the pool's machine."
        )
    try:
        Requirement(_HASH.sub("", line))
    except InvalidRequirement as error:
        raise UsageError(f"{path} has a line that is not a requirement: {redacted!r} ({error}).") from None
    return line


# ---------------------------------------------------------------- pylock.toml


def _read_pylock(path: Path) -> Requirements:
    try:
        lock = Pylock.from_dict(decode_toml(path.read_text("utf-8")))
    except (msgspec.DecodeError, PylockValidationError) as error:
        raise UsageError(f"{path} is not a valid pylock.toml: {error}.") from error
    here = ".".join(map(str, sys.version_info[:3]))
    allowed = lock.requires_python
    if allowed is not None and not allowed.contains(here, prereleases=True):
        raise EnvironmentFailed(
            f"{path} is for Python {allowed}, and the notebook runs {here}. What the notebook sends loads only in "
            "the same minor version: lock it again for this Python, or start the notebook with the other."
        )
    try:
        chosen = [(package, source) for package, source in lock.select()]
    except PylockSelectError as error:
        raise EnvironmentFailed(
            f"{path} has nothing for this Python ({sys.version_info.major}.{sys.version_info.minor}, "
            f"{sys.platform}): {error}. Lock it again for this Python."
        ) from error
    return Requirements(tuple(_locked_line(path, package, source) for package, source in chosen), resolve=False)


def _locked_line(path: Path, package: Package, source: object) -> str:
    match source:
        case PackageVcs():
            reference = f"{package.name} @ {source.type}+{source.url}@{source.commit_id}"
            return reference + (f"#subdirectory={source.subdirectory}" if source.subdirectory else "")
        case PackageArchive() if source.url:
            return f"{package.name} @ {source.url}#sha256={source.hashes.get('sha256', '')}".removesuffix("#sha256=")
        case PackageDirectory() | PackageArchive():
            raise UsageError(
                text_of(
                    f"{path} takes {package.name} from a directory or file of this machine, which other machines do "
                    "not have. Install it in the notebook's Python and leave ",
                    OptionName("env-version"),
                    " out.",
                )
            )
        case _:
            files = [*(package.wheels or ()), *([package.sdist] if package.sdist else [])]
            hashes = dict.fromkeys(f"--hash={kind}:{value}" for file in files for kind, value in file.hashes.items())
            return " ".join([f"{package.name}=={package.version}", *hashes])


# ---------------------------------------------------------------- a run's `requirements.txt`


def snapshot_requirements(snapshot: InstalledPackages, lock: Lock | None) -> str:
    """Return the text of a `requirements.txt` for the packages of an interpreter.

    Args:
        snapshot: The packages.
        lock: Their lock, None if the package index has not been queried.
    """
    lines = [
        f"# Python {platform.python_version()} on {snapshot.platform}, digest {snapshot.digest}",
        f"# The packages of {snapshot.executable}. {_COMPLETE_LINE.removeprefix('# ')}",
        _about_lock(lock),
    ]
    lines += [_line(distribution, lock) for distribution in snapshot.distributions]
    return "\n".join(lines) + "\n"


def environment_requirements(environment: Environment, lock: Lock | None) -> str:
    """Return the text of a `requirements.txt` for an environment that a node builds.

    Args:
        environment: The environment.
        lock: Its lock, None if there is none.
    """
    what, own = environment.label or "the notebook's own packages", platform.python_version()
    # include the patch number if it is this process's Python
    python = own if own.startswith(f"{environment.python}.") else environment.python
    lines = [
        f"# Python {python} on {environment.platform or 'any machine'}, digest {environment.digest}",
        f"# {what}, as a node was asked to build them.",
        *([] if environment.resolve else [_COMPLETE_LINE]),
        _about_lock(lock),
        *environment.requirements,
    ]
    for wheel in environment.wheels:
        lines.append(f"{distribution_name(wheel)} @ {Path(wheel.path).as_uri()}  # sha256 {wheel.sha256}")
    lines += [f"# {pin}  (the node's own is used instead)" for pin in environment.needed]
    return "\n".join(lines) + "\n"


def _about_lock(lock: Lock | None) -> str:
    if lock is None:
        return "# There is no pylock.toml (yet): the package index was not queried for hashes."
    if not lock.pylock:
        return f"# There is no pylock.toml: {' '.join(lock.problem.split())}"
    return "# With hashes: pylock.toml beside this file."


def _line(distribution: Distribution, lock: Lock | None) -> str:
    key, pin = distribution.key, distribution.pin
    wheel = lock.wheels.get(key) if lock is not None else None
    is_unpublished = lock is not None and key in lock.unpublished
    match distribution.kind:
        case Kind.VCS | Kind.ARCHIVE:
            return f"{distribution.direct_reference}  # {distribution.version}"
        case Kind.EDITABLE:
            return f"{key} @ {distribution.url}  # {distribution.version}, editable"
        case Kind.WHEEL | Kind.PROJECT if wheel is None:
            return f"{key} @ {distribution.url}  # {distribution.version}, in no package index"
        case Kind.CONDA:
            return f"{pin}  # installed by conda"
        case Kind.SYSTEM:
            system = "the operating system's"
            return f"# {pin}  {system}, in no package index" if is_unpublished else f"{pin}  # {system}"
        case _:
            pass
    if wheel is not None:
        return f"{key} @ {Path(wheel.path).as_uri()}  # {distribution.version}, repacked: in no package index"
    if lock is not None and key in lock.other_builds:
        return f"{pin}  # the package index has {lock.other_builds[key]}"
    return f"{pin}  # in no package index" if is_unpublished else pin

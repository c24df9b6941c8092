"""`pylock.toml` (PEP 751): sources and hashes of the installed packages, cached by the environment's digest.

Installed metadata has neither, so uv queries the package index, without dependencies and without downloading wheels.
Packages that the index does not have are repacked from the installed files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

import msgspec

from sgpu_magic.config import private_dir
from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.files.atomic_file import read_json, write_whole
from sgpu_magic.packages.distributions import (
    Distribution,
    InstalledPackages,
    Kind,
    distribution_name,
    is_from_node,
    normalised,
)
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.packages.uv_command import Done, call_uv
from sgpu_magic.packages.wheels import installed_bytes, repack
from sgpu_magic.wire.attachments import Environment, Wheel
from sgpu_magic.wire.decoding import decode_toml

_TIMEOUT_S = 300.0
# limit for the lock file only; a node is still sent larger wheels
_LARGEST_REPACKED_BYTES = 200_000_000
_LAST_WORDS = 400
# uv names the packages it did not find; each failed call names at least one
_NOT_THERE = re.compile(
    r"no versions? of ([\w.-]+?)(?:==|,| |$)|([\w.-]+?) was not found"
    r"|([\w.-]+?)==\S+ has no (?:usable )?(?:wheels|source)"
)
_NOT_BUILT = re.compile(r"Failed to (?:build|download|fetch|prepare)[^`]*`([\w.-]+?)(?:==|\s*@|`)")


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """A lock file, or the reason why there is none.

    Args:
        pylock: Content of `pylock.toml` (PEP 751), "" if there is none.
        unpublished: Names of distributions whose version is not in the index.
        other_builds: Pins of the builds that the index has instead, by name: `torch==2.13.0` for `2.13.0+cpu`.
        wheels: Repacked wheels by name.
        left_out: Why a distribution is not in the lock file, by name.
        problem: Why there is no lock file.
    """

    pylock: str = ""
    unpublished: frozenset[str] = frozenset()
    other_builds: dict[str, str] = {}
    wheels: dict[str, Wheel] = {}
    left_out: dict[str, str] = {}
    problem: str = ""


def cached_lock(root: Path, digest: str) -> Lock | None:
    """Return the cached lock; None if there is none or one of its wheels is gone."""
    lock = read_json(root / f"{digest}.json", Lock)
    return lock if lock is not None and all(os.path.exists(wheel.path) for wheel in lock.wheels.values()) else None


def cache_lock(root: Path, digest: str, lock: Lock) -> None:
    """Cache a lock. A write error is ignored: the lock is made again next time."""
    with contextlib.suppress(OSError):
        write_whole(private_dir(root) / f"{digest}.json", msgspec.json.encode(lock))


# ---------------------------------------------------------------- making a lock


def make_lock(
    snapshot: InstalledPackages,
    wheels: Path,
    variables: Mapping[str, str],
    *,
    gently: bool = False,
    timeout_s: float = _TIMEOUT_S,
) -> Lock:
    """Make the lock file of the installed packages by querying the package index with uv. Takes minutes at most.

    Args:
        snapshot: The installed packages.
        wheels: Directory of repacked wheels.
        variables: Environment variables that configure uv's package index.
        gently: Run uv at the lowest priority.
        timeout_s: Time limit of one run of uv.
    """
    asked = {d.key: d.direct_reference or d.pin for d in snapshot.distributions if _is_asked(d)}
    unpublished: set[str] = set()
    unlocked: dict[str, str] = {}
    other_builds: dict[str, str] = {}
    while True:
        try:
            done = _compile(snapshot.executable, asked.values(), variables, timeout_s, gently=gently)
        except EnvironmentFailed as error:
            return Lock(problem=error.message)
        if not done.status:
            break
        missing = _named_in(done.words, _NOT_THERE) & asked.keys()
        broken = (_named_in(done.words, _NOT_BUILT) & asked.keys()) - missing
        if not missing and not broken:
            return Lock(problem=f"uv could not query the package index: {done.words[-_LAST_WORDS:]}")
        for key in missing:
            public = asked[key].partition("+")[0]
            if is_from_node(key) and public != asked[key]:
                # a CPU build or one for a certain CUDA version, from PyTorch's own index
                asked[key] = other_builds[key] = public
            else:
                del asked[key]
                unpublished.add(key)
                other_builds.pop(key, None)
        for key in broken:
            del asked[key]
            unlocked[key] = "uv can't read its source distribution"
    repacked, left_out = _repacked(snapshot, unpublished | unlocked.keys(), wheels)
    entries = "".join(_own_entries(snapshot, repacked, asked))
    head = _head(f"the packages of {snapshot.executable}", snapshot.digest, dict(sorted(left_out.items())))
    lock = Lock(
        pylock=head + _add_entries(done.output, entries),
        unpublished=frozenset(unpublished),
        other_builds=other_builds,
        wheels={key: wheel for key, wheel in repacked.items() if key not in unlocked},
        left_out=left_out,
    )
    return _valid(lock)


def lock_order(
    environment: Environment,
    python: str,
    variables: Mapping[str, str],
    *,
    gently: bool = False,
    timeout_s: float = _TIMEOUT_S,
) -> Lock:
    """Make the lock file of an environment that a node builds.

    Args:
        environment: The environment.
        python: The interpreter to lock for.
        variables: Environment variables that configure uv's package index.
        gently: Run uv at the lowest priority.
        timeout_s: Time limit of one run of uv.
    """
    if environment.resolve:
        return Lock(problem="the node resolved the dependencies itself")
    try:
        done = _compile(python, environment.requirements, variables, timeout_s, gently=gently)
    except EnvironmentFailed as error:
        return Lock(problem=error.message)
    if done.status:
        return Lock(problem=f"uv could not create it: {done.words[-_LAST_WORDS:]}")
    left_out = dict.fromkeys(environment.needed, "the node's own is used instead")
    head = _head("what a node was asked to build", environment.digest, left_out)
    wheels = "".join(_entry(distribution_name(wheel), "", "archive", _archive(wheel)) for wheel in environment.wheels)
    return _valid(Lock(pylock=head + _add_entries(done.output, wheels)))


def _is_asked(distribution: Distribution) -> bool:
    from_index = distribution.kind in (Kind.REGISTRY, Kind.SYSTEM, Kind.CONDA)
    return from_index or (distribution.kind is Kind.ARCHIVE and not distribution.sha256)


def _compile(
    python: str, lines: Iterable[str], variables: Mapping[str, str], timeout_s: float, *, gently: bool
) -> Done:
    """Run `uv pip compile`. The result's output is the lock file without the header comment.

    Uses pipes, not files, so that a killed kernel leaves nothing behind.
    """
    command = ["pip", "compile", "-", "--format", "pylock.toml", "--no-deps", "--generate-hashes", "--no-header"]
    command += ["--no-sources", "--python", python, "--quiet"]
    done = call_uv(command, variables, timeout_s, stdin="\n".join(lines) + "\n", gently=gently)
    return msgspec.structs.replace(done, output=without_url_credentials(done.output))


def _named_in(words: str, pattern: re.Pattern[str]) -> set[str]:
    # uv wraps its lines
    found = pattern.finditer(" ".join(words.split()))
    return {normalised(name.strip(".")) for match in found for name in match.groups() if name}


def _repacked(snapshot: InstalledPackages, keys: set[str], root: Path) -> tuple[dict[str, Wheel], dict[str, str]]:
    """Return wheels of what the index does not have, and why some can't be repacked."""
    wheels: dict[str, Wheel] = {}
    left_out: dict[str, str] = {}
    for distribution in snapshot.distributions:
        if distribution.key not in keys and distribution.kind not in (Kind.WHEEL, Kind.PROJECT):
            continue
        if distribution.kind is Kind.SYSTEM or not distribution.record:
            left_out[distribution.key] = "in no package index, and without a list of its files"
        elif installed_bytes(distribution) > _LARGEST_REPACKED_BYTES:
            left_out[distribution.key] = "in no package index, and too large to be repacked for the record"
        else:
            try:
                wheels[distribution.key] = repack(distribution, root)
            except EnvironmentFailed as error:
                left_out[distribution.key] = error.message
    return wheels, left_out


def _head(origin: str, digest: str, left_out: Mapping[str, str]) -> str:
    lines = [f"# Made with uv from {origin}, digest {digest}."]
    lines += [f"# Not in this file: {name}: {' '.join(why.split())}" for name, why in left_out.items()]
    return "\n".join(lines) + "\n"


def _own_entries(snapshot: InstalledPackages, wheels: Mapping[str, Wheel], asked: Mapping[str, str]) -> Iterator[str]:
    """Yield lock entries for packages that are in no package index."""
    for distribution in snapshot.distributions:
        key, version = distribution.key, distribution.version
        subdirectory = {"subdirectory": distribution.subdirectory} if distribution.subdirectory else {}
        if key in asked:
            continue
        if key in wheels:
            yield _entry(key, version, "archive", _archive(wheels[key]))
        elif distribution.kind is Kind.VCS:
            source = {"type": distribution.vcs, "url": distribution.url, "commit-id": distribution.commit}
            yield _entry(key, version, "vcs", source | subdirectory)
        elif distribution.kind is Kind.ARCHIVE:
            source = {"url": distribution.url, "hashes": {"sha256": distribution.sha256}}
            yield _entry(key, version, "archive", source | subdirectory)
        elif distribution.kind is Kind.EDITABLE:
            # no version: the source tree's version may have changed since it was installed
            yield _entry(key, "", "directory", {"path": str(distribution.path), "editable": True})


def _archive(wheel: Wheel) -> dict[str, object]:
    return {"path": wheel.path, "size": wheel.size, "hashes": {"sha256": wheel.sha256}}


def _add_entries(text: str, entries: str) -> str:
    """Add entries to uv's lock file. Without packages, uv writes an empty list, which nothing can be added to."""
    return (text.replace("packages = []\n", "") if entries else text) + entries


def _entry(key: str, version: str, kind: str, source: Mapping[str, object]) -> str:
    lines = [f"name = {_toml(key)}", *([f"version = {_toml(version)}"] if version else []), f"{kind} = {_toml(source)}"]
    return "\n".join(["", "[[packages]]", *lines, ""])


def _toml(value: object) -> str:
    """Write a value as TOML, whose strings, numbers and booleans look like JSON's."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value).items()
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in pairs) + " }"
    return json.dumps(value)


def _valid(lock: Lock) -> Lock:
    """Return the lock, with `problem` in place of its file if that is not a valid `pylock.toml`."""
    # imported here: takes a few ms and is only needed for this check
    from packaging.pylock import Pylock, PylockValidationError

    try:
        Pylock.from_dict(decode_toml(lock.pylock)).validate()
    except (PylockValidationError, msgspec.DecodeError) as error:
        problem = f"the result is not a valid pylock.toml: {error}"
        return msgspec.structs.replace(lock, pylock="", problem=problem)
    return lock

"""`pylock.toml` (PEP 751): sources and hashes of what is installed, kept by the environment's digest.

Installed metadata have neither, so uv asks the package index, without dependencies and without fetching a wheel. What
it does not have is repacked from what is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

import msgspec

from sgpu_magic.config import private_dir
from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.packages.distributions import Distribution, Kind, Snapshot, distribution_name, is_from_node, normalised
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.packages.uv_command import call_uv
from sgpu_magic.packages.wheels import installed_bytes, repack
from sgpu_magic.wire.attachments import Environment, Wheel


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """A lock file, and what stands in the way of one.

    Args:
        pylock: `pylock.toml` (PEP 751), "" when there is none.
        unpublished: Names of distributions that the index does not have in their version.
        other_builds: Pins of the builds that it has instead, by name: `torch==2.13.0` for `2.13.0+cpu`.
        wheels: What was repacked, by name.
        left_out: Why a distribution is not in the lock file, by name.
        problem: Why there is no lock file.
    """

    pylock: str = ""
    unpublished: frozenset[str] = frozenset()
    other_builds: dict[str, str] = {}
    wheels: dict[str, Wheel] = {}
    left_out: dict[str, str] = {}
    problem: str = ""


def kept_lock(root: Path, digest: str) -> Lock | None:
    """The lock that was made before; None if there is none, or its wheels are gone."""
    try:
        lock = msgspec.json.decode((root / f"{digest}.json").read_bytes(), type=Lock)
    except (OSError, msgspec.DecodeError):
        return None
    return lock if all(os.path.exists(wheel.path) for wheel in lock.wheels.values()) else None


def keep_lock(root: Path, digest: str, lock: Lock) -> None:
    """Keep a lock; without a word when there is no room: it is made again."""
    with contextlib.suppress(OSError):
        write_whole(private_dir(root) / f"{digest}.json", msgspec.json.encode(lock))


# ---------------------------------------------------------------- how one is made

_TIMEOUT_S = 300.0
# for the record only; a node that needs more gets it
_LARGEST_REPACKED_BYTES = 200_000_000
_LAST_WORDS = 400
# uv names what it could not have; each call finds at least one
_NOT_THERE = re.compile(
    r"no versions? of ([\w.-]+?)(?:==|,| |$)|([\w.-]+?) was not found"
    r"|([\w.-]+?)==\S+ has no (?:usable )?(?:wheels|source)"
)
_NOT_BUILT = re.compile(r"Failed to (?:build|download|fetch|prepare)[^`]*`([\w.-]+?)(?:==|\s*@|`)")


def make_lock(snapshot: Snapshot, wheels: Path, variables: Mapping[str, str], *, gently: bool = False) -> Lock:
    """Ask the package index and make the lock file. Takes as long as uv takes, minutes at most.

    Args:
        snapshot: What is installed.
        wheels: Where repacked wheels are kept.
        variables: Tell uv where packages are.
        gently: Nobody waits for it.
    """
    asked = {d.key: d.direct_reference or d.pin for d in snapshot.distributions if _is_asked(d)}
    unpublished: set[str] = set()
    unlocked: dict[str, str] = {}
    other_builds: dict[str, str] = {}
    while True:
        try:
            status, text, words = _compile(snapshot.executable, asked.values(), variables, gently=gently)
        except EnvironmentFailed as error:
            return Lock(problem=error.message)
        if not status:
            break
        missing = _named_in(words, _NOT_THERE) & asked.keys()
        broken = (_named_in(words, _NOT_BUILT) & asked.keys()) - missing
        if not missing and not broken:
            return Lock(problem=f"uv could not ask the package index: {words[-_LAST_WORDS:]}")
        for key in missing:
            public = asked[key].partition("+")[0]
            if is_from_node(key) and public != asked[key]:
                # a build for one CUDA version, or none, from an index of its own
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
    lock = Lock(
        pylock=_head(snapshot, left_out) + text + entries,
        unpublished=frozenset(unpublished),
        other_builds=other_builds,
        wheels={key: wheel for key, wheel in repacked.items() if key not in unlocked},
        left_out=left_out,
    )
    return _valid(lock)


def lock_order(environment: Environment, python: str, variables: Mapping[str, str], *, gently: bool = False) -> Lock:
    """Make the lock file of what a node is told to build.

    Args:
        environment: That is.
        python: The interpreter whose packages it is about.
        variables: Tell uv where packages are.
        gently: Nobody waits for it.
    """
    if environment.resolve:
        return Lock(problem="the node looked the dependencies up itself")
    try:
        status, text, words = _compile(python, environment.requirements, variables, gently=gently)
    except EnvironmentFailed as error:
        return Lock(problem=error.message)
    if status:
        return Lock(problem=f"uv could not make it: {words[-_LAST_WORDS:]}")
    head = f"# Made with uv of what a node was told to build, digest {environment.digest}.\n"
    head += "".join(f"# Not in this file: {pin}: the node's own takes its place\n" for pin in environment.needed)
    wheels = "".join(_entry(distribution_name(wheel), "", "archive", _archive(wheel)) for wheel in environment.wheels)
    return _valid(Lock(pylock=head + text + wheels))


def _is_asked(distribution: Distribution) -> bool:
    from_index = distribution.kind in (Kind.REGISTRY, Kind.SYSTEM, Kind.CONDA)
    return from_index or (distribution.kind is Kind.ARCHIVE and not distribution.sha256)


def _compile(python: str, lines: Iterable[str], variables: Mapping[str, str], *, gently: bool) -> tuple[int, str, str]:
    """Run `uv pip compile`: its status, the lock file without its comments, and what it said.

    No file is made: a kernel that is killed would leave it.
    """
    command = ["pip", "compile", "-", "--format", "pylock.toml", "--no-deps", "--generate-hashes", "--no-header"]
    command += ["--no-sources", "--python", python, "--quiet"]
    done = call_uv(command, variables, _TIMEOUT_S, stdin="\n".join(lines) + "\n", gently=gently)
    return done.status, without_url_credentials(done.output), done.words


def _named_in(words: str, pattern: re.Pattern[str]) -> set[str]:
    # uv breaks its lines
    found = pattern.finditer(" ".join(words.split()))
    return {normalised(name.strip(".")) for match in found for name in match.groups() if name}


def _repacked(snapshot: Snapshot, keys: set[str], root: Path) -> tuple[dict[str, Wheel], dict[str, str]]:
    """Wheels of what the index does not have, and why some have none."""
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


def _head(snapshot: Snapshot, left_out: Mapping[str, str]) -> str:
    lines = [f"# Made with uv of what {snapshot.executable} has, digest {snapshot.digest}."]
    lines += [f"# Not in this file: {key}: {' '.join(why.split())}" for key, why in sorted(left_out.items())]
    return "\n".join(lines) + "\n"


def _own_entries(snapshot: Snapshot, wheels: Mapping[str, Wheel], asked: Mapping[str, str]) -> Iterator[str]:
    """Entries for what no package index has."""
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
            # its version is its source's, whatever was installed once
            yield _entry(key, "", "directory", {"path": str(distribution.path), "editable": True})


def _archive(wheel: Wheel) -> dict[str, object]:
    return {"path": wheel.path, "size": wheel.size, "hashes": {"sha256": wheel.sha256}}


def _entry(key: str, version: str, kind: str, source: Mapping[str, object]) -> str:
    lines = [f"name = {_toml(key)}", *([f"version = {_toml(version)}"] if version else []), f"{kind} = {_toml(source)}"]
    return "\n".join(["", "[[packages]]", *lines, ""])


def _toml(value: object) -> str:
    """TOML's strings, numbers and truth are written as JSON's."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value).items()
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in pairs) + " }"
    return json.dumps(value)


def _valid(lock: Lock) -> Lock:
    """The lock, without its file where that is none."""
    # some ms, and needed here only
    from packaging.pylock import Pylock, PylockValidationError

    try:
        Pylock.from_dict(tomllib.loads(lock.pylock)).validate()
    except (PylockValidationError, tomllib.TOMLDecodeError) as error:
        problem = f"what was found out makes no valid pylock.toml: {error}"
        return msgspec.structs.replace(lock, pylock="", problem=problem)
    return lock

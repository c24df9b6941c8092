"""Why a node can't build an environment, each reason with cause and remedy, and the size of its download."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sgpu_magic.files.atomic_file import read_json, write_whole
from sgpu_magic.formatting import format_bytes, names_text
from sgpu_magic.packages.distributions import normalised
from sgpu_magic.packages.environment_digest import own_platform, own_python
from sgpu_magic.packages.requirement_files import key_of, version_of
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.packages.uv_command import UvFailed
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.decoding import decode_toml
from sgpu_magic.wire.option_text import OptionName, Text, text_of

_NO_WHEEL = re.compile(r"Wheels are required for `([^`]+)`|Because ([\w.-]+==\S+) has no (?:usable )?wheels")
_NO_SPACE = ("No space left on device", "os error 28", "Disk quota exceeded")
_UNREACHABLE = ("Failed to fetch", "error sending request", "dns error", "network was disabled")
_LARGEST = 5
_MOST_CACHED = 20_000


_ENV_VERSION = OptionName("env-version")


class BuildFailed(Exception):
    """The environment can't be built on this node.

    Args:
        parts: The pieces of the text that is shown to the user.
    """

    def __init__(self, *parts: Text | OptionName) -> None:
        super().__init__(*parts)
        self.text = text_of(*parts)

    def __str__(self) -> str:
        return str(self.text)


def refuse_unfit(environment: Environment) -> None:
    """Refuse an environment that can't work on this node, before building it.

    Raises:
        BuildFailed: It is for another Python or platform, has packages from conda, or needs builds from source that
            are not allowed.
    """
    host, python, platform = socket.gethostname(), own_python(), own_platform()
    if environment.python and environment.python != python:
        raise BuildFailed(
            f"the run's packages are for Python {environment.python}, and the node {host} has torch and sgpu-magic for "
            f"Python {python}. Start the notebook with Python {python}, or install sgpu-magic on {host} with Python "
            f"{environment.python} and start the pool there with it."
        )
    if environment.platform and environment.platform != platform:
        raise BuildFailed(
            f"the run's packages are for {environment.platform}, and the node {host} is {platform}: files "
            "compiled for one do not load on the other. Give the packages by name, in a requirements file for ",
            _ENV_VERSION,
            ", or choose a pool whose nodes are like the notebook's machine.",
        )
    if environment.conda:
        raise BuildFailed(
            f"conda has installed some of the notebook's packages ({names_text(environment.conda)}), and the node "
            f"{host} can't get these from a registry of wheels. Install them with pip in the notebook's environment, "
            "choose other packages with ",
            _ENV_VERSION,
            ", or a pool on the notebook's own machine.",
        )
    sources = [line for line in environment.requirements if _is_source(line)]
    if sources and not environment.allow_build:
        raise _not_built(host, [line.partition("@")[0].strip() or line for line in sources])


def refuse_large(sizes: Mapping[str, int], limit_bytes: int) -> None:
    """Refuse packages that exceed the node's size limit.

    Args:
        sizes: Bytes to download by package.
        limit_bytes: Maximum total.

    Raises:
        BuildFailed: The total exceeds the limit.
    """
    if sum(sizes.values()) > limit_bytes:
        by_size = sorted(sizes.items(), key=lambda item: -item[1])
        largest = ", ".join(f"{name} ({format_bytes(size)})" for name, size in by_size[:_LARGEST])
        raise BuildFailed(
            f"the run's packages have {format_bytes(sum(sizes.values()))} to download, more than the "
            f"{format_bytes(limit_bytes)} that the node {socket.gethostname()} builds. The largest are {largest}. "
            "Uninstall what the run does not need, choose other packages with ",
            _ENV_VERSION,
            ", or raise the setting environment_limit of the pool.",
        )


def of_uv(failed: UvFailed, root: Path) -> BuildFailed:
    """Return the error for a failure of uv."""
    host = socket.gethostname()
    if any(mark in failed.text for mark in _NO_SPACE):
        return of_disk(root)
    unbuilt = [first or second for first, second in _NO_WHEEL.findall(failed.text)]
    if unbuilt or "--no-build" in failed.text or "source distributions is disabled" in failed.text:
        return _not_built(host, list(dict.fromkeys(name.partition("==")[0] for name in unbuilt)))
    if any(mark in failed.text for mark in _UNREACHABLE):
        remedy: Text = (
            f"Make sure that {host} can reach the package index, or name another one with the setting index_url."
        )
    else:
        remedy = text_of(
            "Install versions in the notebook that the package index has, choose other packages with ",
            _ENV_VERSION,
            f", or name the index for {host} with the setting index_url.",
        )
    words = failed.words.rstrip(".")
    if not failed.text:
        return BuildFailed(
            f"the node {host} could not install the run's packages: uv printed nothing, and {words}. If nobody "
            "stopped it, the system ran out of memory. Run the cell again."
        )
    return BuildFailed(f"the node {host} can't install the run's packages. uv says: {words}. ", remedy)


def of_system(error: OSError, root: Path) -> BuildFailed:
    """Return the error for a failed system call."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return of_disk(root)
    host = socket.gethostname()
    if isinstance(error, FileNotFoundError) and "uv" in str(error):
        return BuildFailed(
            f"the node {host} can't install the run's packages: uv is missing there. It comes with sgpu-magic: "
            f"`{sys.executable} -m pip install uv` restores it."
        )
    return BuildFailed(
        f"the node {host} can't install the run's packages: {error}. Make sure that {root} is writable, or choose "
        "another folder with the setting environment_dir."
    )


def of_disk(root: Path) -> BuildFailed:
    """Return the error for a full disk."""
    free = "no space free"
    with contextlib.suppress(OSError):
        free = f"{format_bytes(shutil.disk_usage(root).free)} free"
    return BuildFailed(
        f"the disk of the node {socket.gethostname()} has no room for the run's packages: {root} has {free} (No space "
        "left on device). Nothing of them was kept there. Free some space, run `uv cache prune`, or choose a folder on "
        "another disk with the setting environment_dir."
    )


def _not_built(host: str, names: list[str]) -> BuildFailed:
    which = f" ({names_text(list(map(without_url_credentials, names)))})" if names else ""
    return BuildFailed(
        f"some of the run's packages{which} have no wheel for Python {own_python()} on {own_platform()}, and the node "
        f"{host} builds nothing from source by default. ",
        OptionName("allow-build"),
        " permits it, if the node has the compilers; otherwise choose versions that have a wheel.",
    )


def _is_source(line: str) -> bool:
    """Whether a requirement is a repository, or an archive that is not a wheel."""
    name, at, url = line.partition("@")
    location = (url if at else name).strip().partition("#")[0].partition(" ")[0]
    return "://" in location and not location.endswith(".whl")


# ---------------------------------------------------------------- download size


def pin_of(line: str) -> str:
    """Return a requirement as `name==version`, "" if it is not an exact pin."""
    version = version_of(line)
    return f"{key_of(line)}=={version}" if version else ""


def estimate(environment: Environment, cache: Path, ask: Callable[[list[str]], str]) -> dict[str, int]:
    """Return the bytes to download by `name==version`, without packages of unknown size such as repositories.

    Args:
        environment: The environment.
        cache: File with the sizes from earlier estimates.
        ask: Locks these lines of a requirements file with uv and returns the `pylock.toml`.

    Raises:
        UvFailed: Raised by `ask`.
    """
    tag = sys.implementation.cache_tag
    cached = read_json(cache, dict[str, int]) or {}
    if environment.resolve:
        sizes = sizes_in(ask(list(environment.requirements)))
    else:
        pins = {line: pin for line in environment.requirements if (pin := pin_of(line))}
        sizes = {pin: cached[f"{tag} {pin}"] for pin in pins.values() if f"{tag} {pin}" in cached}
        unknown = [line for line, pin in pins.items() if pin not in sizes]
        if unknown:
            # an index may not report a size: record 0, so that it is not queried again
            sizes |= {pins[line]: 0 for line in unknown} | sizes_in(ask(unknown))
    new = {f"{tag} {pin}": size for pin, size in sizes.items()}
    if not new.items() <= cached.items():
        newest = dict(list((cached | new).items())[-_MOST_CACHED:])
        with contextlib.suppress(OSError):
            write_whole(cache, json.dumps(newest).encode())
    return sizes | {wheel.file: wheel.size for wheel in environment.wheels}


def sizes_in(pylock: str) -> dict[str, int]:
    """Return the package sizes in a `pylock.toml`: the largest wheel of each, or else its source archive."""
    sizes: dict[str, int] = {}
    packages: list[dict[str, Any]] = decode_toml(pylock).get("packages", [])
    for package in packages:
        wheels: list[dict[str, Any]] = package.get("wheels", [])
        source: dict[str, Any] = package.get("archive") or package.get("sdist") or {}
        found = [int(file["size"]) for file in (wheels or [source]) if "size" in file]
        if found:
            sizes[f"{normalised(str(package['name']))}=={package.get('version', '')}"] = max(found)
    return sizes

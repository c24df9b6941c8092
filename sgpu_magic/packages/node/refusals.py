"""Why a node does not build an environment: each one a paragraph with cause and remedy."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

from sgpu_magic.packages.node.sizes import Estimate
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.packages.uv_command import UvFailed
from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.wire.attachments import Environment

_NAMED = 8
_NO_WHEEL = re.compile(r"Wheels are required for `([^`]+)`|Because ([\w.-]+==\S+) has no (?:usable )?wheels")
_NO_SPACE = ("No space left on device", "os error 28", "Disk quota exceeded")
_UNREACHABLE = ("Failed to fetch", "error sending request", "dns error", "network was disabled")


class BuildFailed(Exception):
    """The environment can't be had on this node; the message is for people."""


def refuse_unfit(environment: Environment) -> None:
    """Refuse what can't work here, before anything is done.

    Raises:
        BuildFailed: It is for another Python or platform, or needs what only conda has.
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
            f"the run's packages are for {environment.platform}, and the node {host} is {platform}: files that were "
            "compiled for one do not load on the other. Give the packages by name, in a requirements file for "
            "--env-version, or choose a pool whose nodes are like the notebook's machine."
        )
    if environment.conda:
        raise BuildFailed(
            f"conda has installed some of the notebook's packages ({_some(environment.conda)}), and the node {host} "
            "can't get these from a registry of wheels. Install them with pip in the notebook's environment, choose "
            "other packages with --env-version, or a pool on the notebook's own machine."
        )
    sources = [line for line in environment.requirements if _is_source(line)]
    if sources and not environment.allow_build:
        raise _not_built(host, [line.partition("@")[0].strip() or line for line in sources])


def refuse_large(estimate: Estimate, limit_bytes: int) -> None:
    """Raises: BuildFailed: The packages are larger than a node builds."""
    if estimate.total > limit_bytes:
        raise BuildFailed(
            f"the run's packages have {format_bytes(estimate.total)} to download, more than the "
            f"{format_bytes(limit_bytes)} that the node {socket.gethostname()} builds. The largest are "
            f"{estimate.largest()}. Uninstall what the run does not need, choose other packages with --env-version, or "
            "raise the setting environment_limit of the pool."
        )


def of_uv(failed: UvFailed, root: Path) -> BuildFailed:
    """Why uv could not do it."""
    host = socket.gethostname()
    if any(mark in failed.text for mark in _NO_SPACE):
        return of_disk(root)
    unbuilt = [first or second for first, second in _NO_WHEEL.findall(failed.text)]
    if unbuilt or "--no-build" in failed.text or "source distributions is disabled" in failed.text:
        return _not_built(host, list(dict.fromkeys(name.partition("==")[0] for name in unbuilt)))
    if any(mark in failed.text for mark in _UNREACHABLE):
        remedy = f"See that {host} reaches the package index, or name another one with the setting index_url."
    else:
        remedy = (
            "Install versions in the notebook that the package index has, choose other packages with --env-version, "
            f"or name the index that {host} is to use with the setting index_url."
        )
    words = failed.words.rstrip(".")
    if not failed.text:
        return BuildFailed(
            f"the node {host} could not install the run's packages: uv said nothing, and {words}. If nobody did it, "
            "the system was short of memory. Run the cell again."
        )
    return BuildFailed(f"the node {host} can't install the run's packages. uv says: {words}. {remedy}")


def of_system(error: OSError, root: Path) -> BuildFailed:
    """Why the system did not let us."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return of_disk(root)
    host = socket.gethostname()
    if isinstance(error, FileNotFoundError) and "uv" in str(error):
        return BuildFailed(
            f"the node {host} can't install the run's packages: uv is missing there. It comes with sgpu-magic: "
            f"`{sys.executable} -m pip install uv` brings it back."
        )
    return BuildFailed(
        f"the node {host} can't make the run's packages: {error}. See that {root} can be written, or choose another "
        "folder with the setting environment_dir."
    )


def of_disk(root: Path) -> BuildFailed:
    """The disk is full."""
    try:
        free = f"{format_bytes(shutil.disk_usage(root).free)} are free"
    except OSError:
        free = "it is full"
    return BuildFailed(
        f"the disk of the node {socket.gethostname()} has no room for the run's packages: of {root} {free} (No space "
        "left on device). Nothing of them is left there. Free some space, run `uv cache prune`, or choose a folder on "
        "another disk with the setting environment_dir."
    )


def own_python() -> str:
    """`3.11`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def own_platform() -> str:
    """`linux_x86_64`."""
    return re.sub(r"[-.]", "_", sysconfig.get_platform())


def _not_built(host: str, names: list[str]) -> BuildFailed:
    which = f" ({_some(names)})" if names else ""
    return BuildFailed(
        f"some of the run's packages{which} have no wheel for Python {own_python()} on {own_platform()}, and the node "
        f"{host} builds nothing from source unless it is told to. --allow-build lets it, if it has the compilers; "
        "else choose versions that have a wheel."
    )


def _is_source(line: str) -> bool:
    """A repository, or an archive that is no wheel."""
    if "git+" in line or "hg+" in line or "svn+" in line or "bzr+" in line:
        return True
    name, at, url = line.partition("@")
    location = (url if at else name).strip().partition("#")[0].partition(" ")[0]
    return "://" in location and not location.endswith(".whl")


def _some(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(without_url_credentials(name) for name in names[:_NAMED])
    more = len(names) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def temporary_files_gone(folder: Path) -> None:
    """Remove what was begun; a file that can't be removed is left to the next build."""
    if os.path.lexists(folder):
        shutil.rmtree(folder, ignore_errors=True)

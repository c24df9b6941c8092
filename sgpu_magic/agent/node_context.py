"""Where a run's ranks stand on this node: the kernel's place, in terms of what is here.

Nothing changes where the node sees the kernel's files and runs its Python. Else the kernel's own packages give way to
those of the Python that was built, its code to the bundles that travelled along, its directory to one of the run's own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.run import RankContext

if TYPE_CHECKING:
    from sgpu_magic.packages.node.store import Built

# of the kernel's Python: the ranks have another one
_KERNELS_PYTHON = ("PYTHON", "CONDA_", "_CE_", "MAMBA_", "PYENV_", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "UV_PROJECT")
# harmless there, and a user's own choice
_CHOICES = frozenset({
    "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE",
    "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONTRACEMALLOC", "PYTHONASYNCIODEBUG", "PYTHONBREAKPOINT",
})  # fmt: skip
# `site-packages`, and Debian's `dist-packages`
_PACKAGES = "-packages"
# of this agent: no affair of the ranks
_AGENTS_OWN = ("SGPU_", "JPY_", "PYTHONSAFEPATH", "KERNEL_")


def place_here(launch: Launch, built: Built | None, code: Mapping[str, str]) -> Launch:
    """Return the launch with its ranks' place as it is on this node. Placing it again changes nothing.

    Args:
        launch: As the client sent it.
        built: The Python that was built for it; None where the kernel's is used.
        code: Folders of the local code that travelled along, by the kernel's path entry.

    Raises:
        OSError: The run's directory can't be written.
    """
    context = launch.context
    if built is None and not code and not context.elsewhere:
        return launch
    home = _home(launch)
    path = _path(context, built, code, home)
    cwd = context.cwd
    if context.elsewhere:
        cwd = os.path.join(home, "work")
        os.makedirs(cwd, mode=0o700, exist_ok=True)
    environ = _environ(launch, built)
    placed = msgspec.structs.replace(context, cwd=cwd, sys_path=path, environ=environ, installed=())
    return msgspec.structs.replace(launch, context=placed)


def _home(launch: Launch) -> str:
    """The directory of whom the ranks belong to: a session's cells find what its first cell found."""
    if launch.spec.in_session:
        return os.path.join(os.path.dirname(launch.run_dir), launch.spec.session)
    return launch.run_dir


def _path(context: RankContext, built: Built | None, code: Mapping[str, str], home: str) -> tuple[str, ...]:
    links = os.path.join(home, "code")
    path: list[str] = []
    for entry in context.sys_path:
        if built is not None and entry in built.sys_path:
            path.append(entry)
        elif built is not None and entry in context.installed:
            # the notebook's folder stands between the two, and hides packages but no module of the standard library's
            of_packages = _PACKAGES in entry
            path += (own for own in built.sys_path if _is_of_packages(own, built) == of_packages)
        elif entry in code:
            path.append(_linked(links, entry, code[entry]))
        elif not context.elsewhere or entry in context.installed or entry.startswith(links + os.sep):
            path.append(entry)
        elif os.path.islink(link := _link(links, entry)):
            # a session's, from an earlier cell
            path.append(link)
    if built is not None:
        path += built.sys_path
    return tuple(dict.fromkeys(path))


def _is_of_packages(entry: str, built: Built) -> bool:
    return entry.startswith(os.path.dirname(built.prefix) + os.sep)


def _link(links: str, entry: str) -> str:
    return os.path.join(links, hashlib.sha256(os.fsencode(entry)).hexdigest()[:8])


def _linked(links: str, entry: str, folder: str) -> str:
    """A link under one name for good: an edited module is then a changed file, which a session's ranks see."""
    link = _link(links, entry)
    try:
        if os.readlink(link) == folder:
            return link
    except OSError:
        os.makedirs(links, mode=0o700, exist_ok=True)
    temporary = f"{link}.part"
    Path(temporary).unlink(missing_ok=True)
    os.symlink(folder, temporary)
    os.replace(temporary, link)
    return link


def _environ(launch: Launch, built: Built | None) -> dict[str, str]:
    context, given = launch.context, frozenset(launch.spec.env_names)
    environ = dict(context.environ)
    if built is not None:
        environ = {name: value for name, value in environ.items() if name in given or not _is_kernels(name)}
    if context.elsewhere:
        here = {n: v for n, v in os.environ.items() if not n.startswith(_AGENTS_OWN) and not _is_kernels(n)}
        environ = here | environ
    if built is not None:
        programs = os.path.join(built.prefix, "bin")
        environ["VIRTUAL_ENV"] = built.prefix
        if "PATH" not in given:
            environ["PATH"] = os.pathsep.join(_without_kernels(environ.get("PATH", os.defpath), context, programs))
    return environ


def _is_kernels(name: str) -> bool:
    return name.startswith(_KERNELS_PYTHON) and name not in _CHOICES


def _without_kernels(path: str, context: RankContext, programs: str) -> Iterable[str]:
    """The built environment's programs first, those of the kernel's own environment not at all."""
    own = context.environ.get("VIRTUAL_ENV") or context.environ.get("CONDA_PREFIX")
    left_out = {programs, os.path.join(own, "bin")} if own and own != os.path.dirname(programs) else {programs}
    yield programs
    for entry in path.split(os.pathsep):
        if entry and entry not in left_out:
            yield entry

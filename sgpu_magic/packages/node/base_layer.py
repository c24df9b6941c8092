"""The base layer: what a built environment takes from the node's own Python instead of installing it.

These are torch, with what it needs (`nvidia-*`, triton), and sgpu-magic with what its ranks need. The files of exactly
these distributions are linked into one folder, which stands behind the environment's own packages on the path: what
the environment has itself comes first, and nothing else of the node's Python can be imported.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sgpu_magic.packages.distributions import SGPU_MAGIC, name_and_version, normalised
from sgpu_magic.packages.requirement_files import needed_by

# of what sgpu-magic needs, this only where notebooks and pools are
_NOT_FOR_RANKS = {"anywidget", "ipywidgets", "pathspec", "uv"}
# mlflow with its local store: code on a rank may use them without having asked for them
_ROOTS = ("torch", SGPU_MAGIC, "threadpoolctl", "mlflow-skinny", "sqlalchemy", "alembic")
_FOLDERS_AS_ONE = (".dist-info", ".libs", ".data")


@dataclass(frozen=True, slots=True)
class BaseDistribution:
    """One distribution of the node's own Python.

    Args:
        name: Normalised.
        version: Its version.
        info: Its `.dist-info` folder.
        requires: Normalised names of what it needs here.
    """

    name: str
    version: str
    info: Path
    requires: tuple[str, ...]


def base_layer(
    without: Collection[str] = (), further: Iterable[str] = (), *, path: Iterable[str] | None = None
) -> dict[str, BaseDistribution]:
    """Find what the base layer brings into an environment, by name.

    Args:
        without: Normalised names of what the environment has itself: neither these nor what only they need.
        further: Names beside torch and sgpu-magic, taken where the node has them, such as torchvision.
        path: Where to look, by default this process's `sys.path`.
    """
    infos = _find_infos(sys.path if path is None else path)
    found: dict[str, BaseDistribution] = {}
    wanted = [*_ROOTS, *(normalised(name) for name in further)]
    while wanted:
        name = wanted.pop()
        if name in found or name in without or name not in infos:
            continue
        found[name] = one = _read(name, infos[name])
        wanted += one.requires
    return found


def layer_tag(path: Iterable[str] | None = None) -> str:
    """Eight digits that change with what the base layer would bring. Cheap while no site directory has changed."""
    entries = tuple(sys.path if path is None else path)
    times = tuple(_changed_at(entry) for entry in entries)
    if _tags.get(entries, (None, ""))[0] != times:
        digest = hashlib.blake2b(f"{sys.prefix} {sys.version}".encode(), digest_size=4)
        for name, one in sorted(base_layer(path=entries).items()):
            digest.update(f"{name} {one.version} {one.info} {_changed_at(str(one.info))}\n".encode())
        _tags[entries] = (times, digest.hexdigest())
    return _tags[entries][1]


_tags: dict[tuple[str, ...], tuple[tuple[int, ...], str]] = {}


def link_layer(layer: Mapping[str, BaseDistribution], folder: Path) -> None:
    """Link the files of these distributions into a folder, as they lie in a site directory.

    Raises:
        OSError: A link can't be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in layer.values():
        site = one.info.parent
        _link(one.info, folder / one.info.name)
        if _is_editable(one.info):
            for source in _editable_sources(one):
                _link(source, folder / source.name)
        else:
            _link_tree(_files_of(one.info), site, folder)


# ---------------------------------------------------------------- what is installed


def _find_infos(path: Iterable[str]) -> dict[str, Path]:
    infos: dict[str, Path] = {}
    for entry in path:
        try:
            names = os.listdir(entry)
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info"):
                infos.setdefault(normalised(name.partition("-")[0]), Path(entry, name))
    return infos


def _read(name: str, info: Path) -> BaseDistribution:
    _, version = name_and_version(f"{info}/METADATA")
    needed = [normalised(requirement.name) for requirement in needed_by(info)]
    requires = [each for each in needed if not (name == SGPU_MAGIC and each in _NOT_FOR_RANKS)]
    return BaseDistribution(name, version, info, tuple(requires))


def _changed_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


# ---------------------------------------------------------------- links


def _files_of(info: Path) -> list[str]:
    """The distribution's files below its site directory, as RECORD names them."""
    with open(info / "RECORD", newline="") as file:
        names = [row[0] for row in csv.reader(file) if row]
    inner = f"{info.name}/"
    return [name for name in names if not name.startswith(("..", "/", inner)) and not name.endswith((".pth", ".pyc"))]


def _link_tree(files: Iterable[str], site: Path, folder: Path) -> None:
    """Link a package as a whole; a folder that several distributions share is made, and its parts are linked."""
    below: dict[str, list[str]] = {}
    for file in files:
        top, _, rest = file.partition("/")
        below.setdefault(top, []).append(rest)
    for top, rest in below.items():
        source, target = site / top, folder / top
        if rest == [""] or "__init__.py" in rest or top.endswith(_FOLDERS_AS_ONE):
            _link(source, target)
        elif top != "__pycache__" and not target.is_symlink():
            target.mkdir(exist_ok=True)
            _link_tree(rest, source, target)


def _link(source: Path, target: Path) -> None:
    if not os.path.lexists(target):
        target.symlink_to(source)


def _is_editable(info: Path) -> bool:
    try:
        origin = json.loads((info / "direct_url.json").read_bytes())
        return bool(origin.get("dir_info", {}).get("editable"))
    except (OSError, ValueError, AttributeError):
        return False


def _editable_sources(one: BaseDistribution) -> list[Path]:
    """Where an editable distribution's packages and modules lie, as this process imports them."""
    listed = one.info / "top_level.txt"
    names = listed.read_text().split() if listed.is_file() else [one.name.replace("-", "_")]
    sources: list[Path] = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            sources += [Path(entry) for entry in spec.submodule_search_locations if Path(entry).name == name]
        elif spec is not None and spec.origin:
            sources.append(Path(spec.origin))
    return sources

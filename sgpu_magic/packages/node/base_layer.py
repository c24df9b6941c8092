"""The base layer: what a built environment takes from the node's own Python instead of installing it.

These are torch, with what it needs (`nvidia-*`, triton), and sgpu-magic with what its ranks need. The files of exactly
these distributions are linked into one folder, which stands behind the environment's own packages on the path: what
the environment has itself comes first, and nothing else of the node's Python can be imported.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from sgpu_magic.packages.distributions import SGPU_MAGIC, Distribution, Kind, Snapshot, normalised
from sgpu_magic.packages.requirement_files import needed_by
from sgpu_magic.packages.snapshot import take_snapshot

# of what sgpu-magic needs, this only where notebooks and pools are
_NOT_FOR_RANKS = {"anywidget", "ipywidgets", "pathspec", "uv"}
# mlflow with its local store: code on a rank may use them without having asked for them
_ROOTS = ("torch", SGPU_MAGIC, "threadpoolctl", "mlflow-skinny", "sqlalchemy", "alembic")
_FOLDERS_AS_ONE = (".dist-info", ".libs", ".data")


def base_layer(
    without: Collection[str] = (), further: Iterable[str] = (), *, snapshot: Snapshot | None = None
) -> dict[str, Distribution]:
    """Find what the base layer brings into an environment, by name.

    Args:
        without: Normalised names of what the environment has itself: neither these nor what only they need.
        further: Names beside torch and sgpu-magic, taken where the node has them, such as torchvision.
        snapshot: What the node's Python has, by default this process's.
    """
    snapshot = snapshot or take_snapshot()
    found: dict[str, Distribution] = {}
    wanted = [*_ROOTS, *further]
    while wanted:
        one = snapshot.get(wanted.pop())
        if one is None or one.key in found or one.key in without or not one.location.endswith(".dist-info"):
            continue
        found[one.key] = one
        needed = {normalised(requirement.name) for requirement in needed_by(Path(one.location))}
        wanted += needed - _NOT_FOR_RANKS if one.key == SGPU_MAGIC else needed
    return found


_tag: tuple[Snapshot, str] | None = None


def layer_tag(snapshot: Snapshot | None = None) -> str:
    """Eight digits that change with what the base layer would bring. Cheap while no site directory has changed."""
    global _tag
    snapshot = snapshot or take_snapshot()
    if _tag is None or _tag[0] is not snapshot:
        digest = hashlib.blake2b(f"{sys.prefix} {sys.version}".encode(), digest_size=4)
        for name, one in sorted(base_layer(snapshot=snapshot).items()):
            changed_ns = os.stat(one.location).st_mtime_ns
            digest.update(f"{name} {one.version} {one.location} {changed_ns}\n".encode())
        _tag = (snapshot, digest.hexdigest())
    return _tag[1]


def link_layer(layer: Mapping[str, Distribution], folder: Path) -> None:
    """Link the files of these distributions into a folder, as they lie in a site directory.

    Raises:
        OSError: A link can't be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in layer.values():
        info = Path(one.location)
        _link(info, folder / info.name)
        if one.kind is Kind.EDITABLE:
            for source in _editable_sources(one):
                _link(source, folder / source.name)
        else:
            _link_tree(_files_of(info), info.parent, folder)


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


def _editable_sources(one: Distribution) -> list[Path]:
    """Where an editable distribution's packages and modules lie, as this process imports them."""
    sources: list[Path] = []
    for name in one.module_names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            sources += [Path(entry) for entry in spec.submodule_search_locations if Path(entry).name == name]
        elif spec is not None and spec.origin:
            sources.append(Path(spec.origin))
    return sources

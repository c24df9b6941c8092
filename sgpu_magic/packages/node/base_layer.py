"""The base layer: packages that a built environment uses from the node's own Python instead of installing them.

These are torch and its requirements (`nvidia-*`, triton), and sgpu-magic and its requirements on ranks. Exactly their
files are linked into one folder, which follows the environment's own packages on `sys.path`: the environment's packages
take precedence, and nothing else of the node's Python can be imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from sgpu_magic.packages.distributions import SGPU_MAGIC, Distribution, InstalledPackages, Kind, normalised, record_of
from sgpu_magic.packages.snapshot import take_snapshot

# sgpu-magic's requirements that only notebooks and pools need
_NOT_FOR_RANKS = {"anywidget", "blake3", "cryptography", "ipywidgets", "pathspec", "uv"}
# includes mlflow and its local store, which code on a rank may use without requiring them
_ROOTS = ("torch", SGPU_MAGIC, "threadpoolctl", "mlflow-skinny", "sqlalchemy", "alembic")
_FOLDERS_AS_ONE = (".dist-info", ".libs", ".data")


def base_layer(
    without: Collection[str] = (), further: Iterable[str] = (), *, snapshot: InstalledPackages | None = None
) -> dict[str, Distribution]:
    """Return the distributions that the base layer adds to an environment, by name.

    Args:
        without: Normalised names of the environment's own packages: these are left out, and what only they require.
        further: Names to add besides torch and sgpu-magic if the node has them, such as torchvision.
        snapshot: The packages of the node's Python. Default: those of this process.
    """
    # `packaging` takes 20 ms to import, and an agent starts its first zygote only after its imports
    from sgpu_magic.packages.requirement_files import needed_by

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


_tag: tuple[InstalledPackages, str] | None = None


def layer_tag(snapshot: InstalledPackages | None = None) -> str:
    """Return eight hexadecimal digits that change with the base layer. Cached until a site directory changes."""
    global _tag
    snapshot = snapshot or take_snapshot()
    if _tag is None or _tag[0] is not snapshot:
        digest = hashlib.blake2b(os.fsencode(f"{sys.prefix} {sys.version}"), digest_size=4)
        for name, one in sorted(base_layer(snapshot=snapshot).items()):
            changed_ns = os.stat(one.location).st_mtime_ns
            digest.update(os.fsencode(f"{name} {one.version} {one.location} {changed_ns}\n"))
        _tag = (snapshot, digest.hexdigest())
    return _tag[1]


def link_layer(layer: Mapping[str, Distribution], folder: Path) -> None:
    """Link the files of these distributions into a folder, laid out like a site directory.

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
            # the files below its site directory
            outside = ("..", "/", f"{info.name}/")
            names = (name for name in _files_of(one) if not name.endswith((".pth", ".pyc")))
            _link_tree((name for name in names if not name.startswith(outside)), info.parent, folder)


def _files_of(one: Distribution) -> Iterable[str]:
    """Return the paths of a distribution's files below its site directory."""
    try:
        return [name for name, *_ in record_of(one.location)]
    except FileNotFoundError:
        # Linux distributions ship their Python packages without a list of their files
        site = Path(one.location).parent
        return [f"{name}/__init__.py" if (site / name).is_dir() else f"{name}.py" for name in one.module_names]


# ---------------------------------------------------------------- links


def _link_tree(files: Iterable[str], site: Path, folder: Path) -> None:
    """Link each package as a whole. Folders shared by several distributions are created, and their parts linked."""
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
    """Return the paths of an editable distribution's packages and modules, as this process imports them."""
    sources: list[Path] = []
    for name in one.module_names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            sources += [Path(entry) for entry in spec.submodule_search_locations if Path(entry).name == name]
        elif spec is not None and spec.origin:
            sources.append(Path(spec.origin))
    return sources

"""What to ship: the objects behind the names, and the source of the cells that defined them."""

from __future__ import annotations

import difflib
import linecache
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType

from sgpu_magic.errors import UsageError
from sgpu_magic.payload.code_names import is_ipythons


def collect(
    names: Iterable[str],
    user_ns: Mapping[str, object],
    *,
    extra: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> dict[str, object]:
    """Return the objects to ship, by name, in the order in which the notebook defined them.

    Args:
        names: Names that the cell reads; those that the notebook lacks, IPython's own and builtins stay out.
        user_ns: The notebook's namespace.
        extra: Names given by `--in`; shipped whatever they are.
        exclude: Names given by `--exclude`.

    Raises:
        UsageError: A name of `extra` does not exist, or is excluded as well.
    """
    asked, excluded = frozenset(extra), frozenset(exclude)
    for name in sorted(asked):
        if name not in user_ns:
            raise UsageError(f"the notebook has no `{name}`, which --in names. {_near(name, user_ns)}")
        if name in excluded:
            raise UsageError(f"`{name}` stands both in --in and in --exclude. Take it out of one of them.")
    wanted = {name for name in names if name not in excluded and name in user_ns} | asked
    found: dict[str, object] = {}
    for name, value in user_ns.items() if wanted else ():
        if name in wanted:
            wanted.discard(name)
            if name in asked or not is_ipythons(name, value):
                found[name] = value
            if not wanted:
                # a long notebook has thousands of names further on, most of them IPython's
                break
    return found


def _near(name: str, user_ns: Mapping[str, object]) -> str:
    own = [known for known, value in user_ns.items() if not is_ipythons(known, value)]
    near = difflib.get_close_matches(name, own, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(f'`{known}`' for known in near)}?"
    return "Define it in an earlier cell or take it out of --in."


def submodules_read(code_names: Iterable[str], values: Iterable[object]) -> tuple[str, ...]:
    """Return the loaded submodules that code reaches through a shipped package, such as `xml.etree`.

    A package travels by reference; its submodule is only there on the rank if it is imported too.

    Args:
        code_names: Every identifier in the cell.
        values: The objects that are shipped.
    """
    words = frozenset(code_names)
    packages = [v.__name__ for v in values if isinstance(v, ModuleType) and hasattr(v, "__path__")]
    return tuple(
        module
        for package in packages
        for module in list(sys.modules)
        if module.startswith(package + ".") and words.issuperset(module[len(package) + 1 :].split("."))
    )


def cell_sources(
    files: Iterable[str], execution_counts: Mapping[str, int] | None = None
) -> tuple[tuple[str, str, int | None], ...]:
    """Return (file name, source, execution count) of the cells that defined what is shipped.

    Args:
        files: File names of code objects (`Packed.files`); real files are left out.
        execution_counts: Cell number by file name, `shell.compile._filename_map` in IPython.
    """
    counts = execution_counts or {}
    found: list[tuple[str, str, int | None]] = []
    for file in dict.fromkeys(files):
        entry = linecache.cache.get(file)
        # an entry with a time of change is a real file, which the rank can read by itself
        if entry is not None and len(entry) == 4 and entry[1] is None:
            found.append((file, "".join(entry[2]), counts.get(file)))
    return tuple(found)

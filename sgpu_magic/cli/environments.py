"""`sgpu env`: base environments, saved environments, and those built on this node."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sgpu_magic.cli.main import Parser
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.files.whole_file import format_bytes
from sgpu_magic.packages import named_environments
from sgpu_magic.packages.named_environments import BASE_NAMES, BaseList, base_list
from sgpu_magic.packages.node.store import Built, Store, read_built
from sgpu_magic.views.units import aligned, count_of, format_clock

_DAY_S = 24 * 3600.0
_SHORTEST_PREFIX = 4


class Kept(msgspec.Struct, frozen=True):
    """An environment built on this node.

    Args:
        name: Name of its folder, which begins with the environment's digest.
        built: Its description; None if it can't be read.
        size_bytes: Size of its files; None if not measured yet.
        last_used: Wall-clock time of its last use.
    """

    name: str
    built: Built | None
    size_bytes: int | None
    last_used: float


def listing(settings: Settings, now: float | None = None) -> str:
    """Return the base, saved and built environments as text."""
    now = time.time() if now is None else now
    bases = [
        (
            name,
            base_list(name).title,
            f"Python {base_list(name).python_minor}",
            count_of(len(base_list(name).public), "package"),
        )
        for name in BASE_NAMES
    ]
    lines = ["base environments", *_indented(aligned(bases, right=(3,)))]
    kept = [_saved_row(settings, name) for name in named_environments.saved_names(settings)]
    lines += ["", "saved" if kept else "nothing saved (%sgpu_env save NAME saves a notebook's packages)"]
    lines += _indented(aligned(kept, right=(2,))) if kept else []
    built = sorted(built_here(settings), key=lambda each: -each.last_used)
    if not built:
        return "\n".join([*lines, "", f"none built on this machine in {settings.environments_path}"])
    total = sum(each.size_bytes or 0 for each in built)
    rows = [
        (
            each.name[:12],
            count_of(each.built.packages, "package") if each.built is not None else "unreadable",
            format_bytes(each.size_bytes) if each.size_bytes is not None else "-",
            f"used {format_clock(max(0.0, now - each.last_used))} ago",
        )
        for each in built
    ]
    budget = format_bytes(settings.environments_bytes)
    lines += ["", f"built on this machine: {format_bytes(total)} of {budget} in {settings.environments_path}"]
    return "\n".join([*lines, *_indented(aligned(rows, right=(1, 2)))])


def export(name: str, directory: str) -> str:
    """Write a base environment's requirements file and return a message.

    Args:
        name: Name of the base environment.
        directory: Target directory, created if necessary.

    Raises:
        UsageError: There is no such base environment, or the file can't be written.
    """
    if name not in BASE_NAMES:
        raise UsageError(f"there is no base environment {name!r}. There are: {', '.join(BASE_NAMES)}.")
    base = base_list(name)
    target = Path(directory) / base.requirements_file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(requirements_file(base), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} can't be written: {error.strerror}. Name another directory.") from error
    return f"{target}: {len(base.public)} packages, {len(base.left_out)} left out"


def requirements_file(base: BaseList) -> str:
    """Return a base environment as a requirements file: its public libraries in the page's exact versions."""
    without_wheel = sorted(base.wheels, key=str.lower)
    return "\n".join(
        [
            f"# {base.title}: the libraries that a package index has.",
            f'# From the page "{base.page}", {base.page_date.isoformat()}. Python {base.python}, CUDA {base.cuda}.',
            f"# Left out, the operating system's: {_with_versions(base.system)}",
            f"# Left out, in no index: {_with_versions(base.private)}",
            f"# Without a wheel for this Python, so built from source: {', '.join(without_wheel) or 'none'}",
            *base.pins(allow_build=True),
            "",
        ]
    )


def remove(settings: Settings, name: str) -> str:
    """Remove a saved or built environment and return a message.

    Args:
        settings: Gives the directories.
        name: Name of a saved environment, or a prefix of a built one's.

    Raises:
        UsageError: No environment or several match, or it is in use.
    """
    if named_environments.remove(settings, name):
        return f"the saved environment {name} was removed."
    found = [each for each in built_here(settings) if len(name) >= _SHORTEST_PREFIX and each.name.startswith(name)]
    if not found:
        raise UsageError(
            f"no environment {name!r} was saved or built here. `sgpu env list` shows them; for a built one give "
            f"its first {_SHORTEST_PREFIX} digits or more."
        )
    if len(found) > 1:
        raise UsageError(f"{name!r} is the beginning of {len(found)} environments. Give more digits.")
    if not Store(settings.environments_path).remove(found[0].name):
        raise UsageError(
            f"environment {found[0].name[:12]} is in use: a run uses it, or it is being built. Try again later."
        )
    return f"environment {found[0].name[:12]} is removed: {_freed(found)}."


def prune(settings: Settings, days: float, now: float | None = None) -> str:
    """Remove built environments that are not in use and return a message.

    Args:
        settings: Gives the directories.
        days: Only remove environments unused for this many days.
        now: Wall-clock time. Default: the current time.
    """
    now = time.time() if now is None else now
    store = Store(settings.environments_path)
    gone: list[Kept] = []
    used: list[Kept] = []
    for each in built_here(settings):
        if now - each.last_used >= days * _DAY_S:
            (gone if store.remove(each.name) else used).append(each)
    left = f"; {len(used)} in use" if used else ""
    return f"{count_of(len(gone), 'environment')} removed, {_freed(gone)}{left}."


def built_here(settings: Settings) -> Iterator[Kept]:
    """Yield the environments built on this node."""
    root = settings.environments_path
    for name in Store(root).names():
        folder = root / name
        try:
            last_used = os.stat(folder / "last-used").st_mtime
        except OSError:
            last_used = 0.0
        try:
            size: int | None = int((folder / "size").read_text())
        except (OSError, ValueError):
            # measured some time after the build
            size = None
        yield Kept(name, read_built(folder), size, last_used)


def _saved_row(settings: Settings, name: str) -> tuple[str, ...]:
    try:
        kept = named_environments.load(settings, name)
    except UsageError:
        # from another version, or damaged: it can still be removed
        kept = None
    if kept is None:
        return (name, "unreadable", "")
    return (name, f"Python {kept.python}", count_of(kept.packages, "package"))


def _freed(gone: list[Kept]) -> str:
    return f"{format_bytes(sum(each.size_bytes or 0 for each in gone))} freed"


def _with_versions(libraries: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in libraries.items())


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _options(parser: Parser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    made = actions.add_parser("list", help="list environments with size and last use")
    made.does(lambda _: listing(load_settings()))
    made = actions.add_parser("export", help="write the requirements file of a base environment")
    made.add_argument("name", metavar="4|ai-4", help="base environment")
    made.add_argument(
        "directory", metavar="DIR", nargs="?", default=".", help="directory to write to (default: the current one)"
    )
    made.does(lambda options: export(options.name, options.directory))
    made = actions.add_parser("remove", help="remove a saved or built environment")
    made.add_argument("name", metavar="NAME", help="name, or the first digits of a built environment's ID")
    made.does(lambda options: remove(load_settings(), options.name))
    made = actions.add_parser("prune", help="remove built environments that no run uses")
    made.add_argument(
        "--days", type=_days, default=0.0, metavar="N", help="only those not used for N days (default: 0)"
    )
    made.does(lambda options: prune(load_settings(), options.days))


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return days


COMMANDS = {"env": _options}

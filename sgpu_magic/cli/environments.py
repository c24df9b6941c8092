"""`sgpu env`: base environments, saved environments, and those built on this node."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from sgpu_magic.cli.json_form import time_of
from sgpu_magic.cli.json_records import (
    BaseEnvironmentRow,
    BuiltEnvironmentRow,
    EnvironmentList,
    SavedEnvironmentRow,
    encode,
)
from sgpu_magic.cli.main import CommandParser, add_command, add_json
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.formatting import count_of, format_bytes, format_rough_span
from sgpu_magic.packages import named_environments
from sgpu_magic.packages.named_environments import BASE_NAMES, BaseList, base_list
from sgpu_magic.packages.node.store import BuiltEnvironments, read_built
from sgpu_magic.views.units import aligned

_DAY_S = 24 * 3600.0
_SHORTEST_PREFIX = 4


def listing(settings: Settings, now: float | None = None) -> str:
    """Return the base, saved and built environments as text."""
    now = time.time() if now is None else now
    bases = [
        (name, base.title, f"Python {base.python_minor}", count_of(len(base.public), "package"))
        for name, base in zip(BASE_NAMES, map(base_list, BASE_NAMES), strict=True)
    ]
    lines = ["base environments", *_indented(aligned(bases, right=(3,)))]
    kept = [_saved_row(settings, name) for name in named_environments.saved_names(settings)]
    lines += ["", "saved" if kept else "nothing saved (%sgpu_env save NAME saves a notebook's packages)"]
    lines += _indented(aligned(kept, right=(2,))) if kept else []
    store = BuiltEnvironments(settings.environments_path)
    names = sorted(store.names(), key=store.last_used, reverse=True)
    if not names:
        return "\n".join([*lines, "", f"none built on this machine in {settings.environments_path}"])
    total = sum(store.size(name) or 0 for name in names)
    rows = [_built_row(store, name, now) for name in names]
    budget = format_bytes(settings.environments_bytes)
    lines += ["", f"built on this machine: {format_bytes(total)} of {budget} in {settings.environments_path}"]
    return "\n".join([*lines, *_indented(aligned(rows, right=(1, 2)))])


def document(settings: Settings) -> EnvironmentList:
    """Return the base, saved and built environments in the form of `--json`."""
    store = BuiltEnvironments(settings.environments_path)
    names = sorted(store.names(), key=store.last_used, reverse=True)
    return EnvironmentList(
        base=tuple(
            BaseEnvironmentRow(name=name, title=base.title, python=base.python_minor, packages=len(base.public))
            for name, base in zip(BASE_NAMES, map(base_list, BASE_NAMES), strict=True)
        ),
        saved=tuple(_saved_record(settings, name) for name in named_environments.saved_names(settings)),
        built=tuple(_built_record(store, name) for name in names),
        directory=str(settings.environments_path),
        budget_bytes=settings.environments_bytes,
    )


def _built_record(store: BuiltEnvironments, name: str) -> BuiltEnvironmentRow:
    built = read_built(store.folder(name))
    packages = None if built is None else built.packages
    last_used_at = time_of(store.last_used(name))
    return BuiltEnvironmentRow(id=name, packages=packages, size_bytes=store.size(name), last_used_at=last_used_at)


def _saved_record(settings: Settings, name: str) -> SavedEnvironmentRow:
    with contextlib.suppress(UsageError):
        if (kept := named_environments.load(settings, name)) is not None:
            return SavedEnvironmentRow(name=name, python=kept.python, packages=kept.packages)
    return SavedEnvironmentRow(name=name, python=None, packages=None)


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
    store = BuiltEnvironments(settings.environments_path)
    found = [each for each in store.names() if len(name) >= _SHORTEST_PREFIX and each.startswith(name)]
    if not found:
        raise UsageError(
            f"no environment {name!r} was saved or built here. `sgpu env list` shows them; for a built one give "
            f"its first {_SHORTEST_PREFIX} digits or more."
        )
    if len(found) > 1:
        raise UsageError(f"{name!r} is the beginning of {len(found)} environments. Give more digits.")
    shown, size = found[0][:12], store.size(found[0]) or 0
    if not store.remove(found[0]):
        raise UsageError(f"environment {shown} is in use: a run uses it, or it is being built. Try again later.")
    return f"environment {shown} is removed: {format_bytes(size)} freed."


def prune(settings: Settings, days: float, now: float | None = None) -> str:
    """Remove built environments that are not in use and return a message.

    Args:
        settings: Gives the directories.
        days: Only remove environments unused for this many days.
        now: Wall-clock time. Default: the current time.
    """
    now = time.time() if now is None else now
    store = BuiltEnvironments(settings.environments_path)
    sizes = {name: store.size(name) or 0 for name in store.names() if now - store.last_used(name) >= days * _DAY_S}
    removed = [size for name, size in sizes.items() if store.remove(name)]
    left = f"; {len(sizes) - len(removed)} in use" if len(removed) < len(sizes) else ""
    return f"{count_of(len(removed), 'environment')} removed, {format_bytes(sum(removed))} freed{left}."


def _built_row(store: BuiltEnvironments, name: str, now: float) -> tuple[str, ...]:
    built, size = read_built(store.folder(name)), store.size(name)
    packages = count_of(built.packages, "package") if built is not None else "unreadable"
    used = f"used {format_rough_span(now - store.last_used(name))} ago"
    return (name[:12], packages, "-" if size is None else format_bytes(size), used)


def _saved_row(settings: Settings, name: str) -> tuple[str, ...]:
    with contextlib.suppress(UsageError):
        if (kept := named_environments.load(settings, name)) is not None:
            return (name, f"Python {kept.python}", count_of(kept.packages, "package"))
    # from another version, or damaged: it can still be removed
    return (name, "unreadable", "")


def _with_versions(libraries: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in libraries.items())


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _list(options: argparse.Namespace) -> str:
    settings = load_settings()
    return encode(document(settings)) if options.json else listing(settings)


def _options(parser: CommandParser) -> None:
    # without an action, as `sgpu env list`
    add_json(parser)
    parser.does(_list)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    made = add_command(actions, "list", "list environments with size and last use", "sgpu env list")
    add_json(made)
    made.does(_list)
    made = add_command(
        actions, "export", "write the requirements file of a base environment", "sgpu env export 4 requirements"
    )
    made.add_argument("name", metavar="4|ai-4", help="base environment")
    made.add_argument(
        "directory", metavar="DIR", nargs="?", default=".", help="directory to write to (default: the current one)"
    )
    made.does(lambda options: export(options.name, options.directory))
    made = add_command(actions, "remove", "remove a saved or built environment", "sgpu env remove work")
    made.add_argument("name", metavar="NAME", help="name, or the first digits of a built environment's ID")
    made.does(lambda options: remove(load_settings(), options.name))
    made = add_command(actions, "prune", "remove built environments that no run uses", "sgpu env prune --days 30")
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

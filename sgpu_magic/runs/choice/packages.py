"""The packages that a choice asks for: a base, some added, some removed, as a file that `--env-version` takes.

Those of the notebook itself are installed into the kernel's own environment, and removed from it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from packaging.requirements import InvalidRequirement, Requirement

from sgpu_magic.config import Settings, private_dir
from sgpu_magic.errors import EnvironmentFailed, UsageError
from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.packages import named_environments, order
from sgpu_magic.packages.distributions import distribution_name, environment_digest, normalised, own_python
from sgpu_magic.packages.named_environments import BASE_NAMES, base_list
from sgpu_magic.packages.requirement_files import name_of, read_file, version_of
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.packages.uv_command import Done, call_pip, call_uv, index_variables, last_words

if TYPE_CHECKING:
    from sgpu_magic.runs.choice.schema import Choice

FOLDER = "chosen-environments"

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_COMPLETE = "# Complete: these lines are all that is installed."
_MOST_NAMED = 2
_INSTALL_S = 1800.0
_WOULD = re.compile(r"^Would install (\d+) package", re.MULTILINE)
_COMES = re.compile(r"^ \+ (\S+)==(\S+)", re.MULTILINE)


class Base(msgspec.Struct, frozen=True):
    """A base environment's lines.

    Args:
        lines: Of a requirements file.
        complete: They are all that is installed: no dependency is looked up.
        python: The minor version that it is for, "" when it does not say.
    """

    lines: tuple[str, ...]
    complete: bool
    python: str


def problem_of_packages(choice: Choice) -> str:
    """Return what of the packages can't be meant, a sentence; "" when all can."""
    for line in choice.dependencies:
        problem = problem_of_requirement(line)
        if problem:
            return problem
    for name in choice.removed:
        if _NAME.fullmatch(name) is None:
            return f"{name[:60]!r} is no package's name."
    added = [normalised(name_of(line)) for line in choice.dependencies]
    twice = next((name for name in added if added.count(name) > 1), "")
    if twice:
        return f"{twice} is added twice."
    return ""


def problem_of_requirement(line: str) -> str:
    """Return why a line can't be added; "" when it can."""
    shown = without_url_credentials(line)[:80]
    if shown != line[:80] or "${" in line:
        return f"{shown!r} has a password or a variable in it, which would be kept in the notebook: leave it out."
    try:
        Requirement(line)
    except InvalidRequirement:
        return f"{shown!r} is no requirement: write a name and, if you like, a version, such as peft==0.17.1."
    return ""


def env_version_of(settings: Settings, choice: Choice, *, write: bool = True) -> str:
    """Return what `--env-version` is to be for a choice, "" for this notebook's packages.

    Args:
        settings: Where files are kept.
        choice: The choice.
        write: Have the file there; else only say what it is called.

    Raises:
        UsageError: There is no such base, or its file can't be used.
        EnvironmentFailed: It is for another Python.
        OSError: The file can't be written.
    """
    if not choice.env_version or not (choice.dependencies or choice.removed):
        return choice.env_version
    # says what is wrong with the base itself in the base's own name
    order.chosen(settings, choice.env_version)
    return str(_kept(settings, choice, _text_of(choice, base_of(settings, choice.env_version)), write=write))


def base_of(settings: Settings, name: str) -> Base:
    """Return the lines of a base environment.

    Raises:
        UsageError: There is none of that name, or its file can't be used.
    """
    if name in BASE_NAMES:
        base = base_list(name)
        return Base(base.pins(allow_build=False), True, base.python_minor)
    path = Path(name).expanduser()
    if path.is_file():
        found = read_file(path)
        local = tuple(f"{of} @ {there.resolve().as_uri()}" for of, there in found.local)
        return Base((*found.lines, *local), not found.resolve, found.python)
    kept = named_environments.load(settings, name)
    if kept is None:
        order.chosen(settings, name)
        raise UsageError(f"there is no environment named {name!r}.")
    wheels = tuple(f"{distribution_name(wheel)} @ {Path(wheel.path).as_uri()}" for wheel in kept.wheels)
    return Base((*kept.requirements, *kept.needed, *wheels), True, kept.python)


def problem_of_base(settings: Settings, name: str) -> str:
    """Return why a base can't be had by this notebook, a sentence; "" when it can, as far as it is known here.

    Raises:
        UsageError: Its file can't be used.
        EnvironmentFailed: It has lost something.
    """
    is_file = Path(name).expanduser().is_file()
    if name not in BASE_NAMES and not is_file and name not in named_environments.saved_names(settings):
        known = ", ".join((*BASE_NAMES, *named_environments.saved_names(settings)))
        return f"There is no environment {name!r} here. There are: {known}; a requirements file's path is possible."
    here, python = own_python(), base_of(settings, name).python
    if python and python != here:
        return (
            f"The packages of {name} are for Python {python}, and this notebook runs Python {here}: what it sends is "
            f"understood by the same version only. Start it with a kernel of Python {python}, or choose other packages."
        )
    order.chosen(settings, name)
    return ""


def base_versions(base: Base) -> dict[str, str]:
    """Versions by normalised name, "" where the base leaves it open."""
    return {normalised(name_of(line)): version_of(line) for line in base.lines}


def _text_of(choice: Choice, base: Base) -> str:
    added = {normalised(name_of(line)) for line in choice.dependencies}
    left_out = added | {normalised(name) for name in choice.removed}
    lines = [line for line in base.lines if normalised(name_of(line)) not in left_out]
    head: list[str] = []
    if base.complete and not choice.dependencies:
        python = own_python()
        tag = environment_digest(lines, f"cp{python.replace('.', '')}", "", torch_mine=False, allow_build=False)
        head = [f"# Python {python} on any machine, digest {tag}", _COMPLETE]
    return "\n".join((*head, *lines, *choice.dependencies)) + "\n"


def _kept(settings: Settings, choice: Choice, text: str, *, write: bool) -> Path:
    """Have a text as a file, in a folder by its content."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    root = settings.state_path / FOLDER
    folder = root / digest
    file = folder / _file_name(choice)
    if write and not file.is_file():
        private_dir(settings.state_path)
        private_dir(root)
        folder.mkdir(mode=0o700, exist_ok=True)
        write_whole(file, text.encode())
    return file


def _file_name(choice: Choice) -> str:
    """The views show it: `4+peft.txt`, `4-torch.txt`, `mine+5.txt`."""
    base = Path(choice.env_version).stem if choice.env_version.endswith((".txt", ".toml")) else choice.env_version
    parts = [re.sub(r"[^\w.-]", "_", base)[:40]]
    for sign, names in (("+", [name_of(line) for line in choice.dependencies]), ("-", list(choice.removed))):
        if len(names) > _MOST_NAMED:
            parts.append(f"{sign}{len(names)}")
        else:
            parts += [f"{sign}{normalised(name)[:40]}" for name in names]
    return f"{''.join(parts)}.txt"


def missing(lines: Iterable[str], installed: dict[str, str]) -> tuple[str, ...]:
    """Return those of `lines` that what is installed does not satisfy.

    Args:
        lines: Requirements.
        installed: Versions by normalised name.
    """
    found: list[str] = []
    for line in lines:
        wanted = Requirement(line)
        version = installed.get(normalised(wanted.name))
        is_there = version is not None and wanted.url is None and not wanted.extras
        if not is_there or not wanted.specifier.contains(str(version), prereleases=True):
            found.append(line)
    return tuple(found)


# ---------------------------------------------------------------- the kernel's own environment


def install(settings: Settings, added: Sequence[str], removed: Sequence[str]) -> None:
    """Install and uninstall; the kernel finds what is new at its next import.

    Args:
        settings: With the package index.
        added: Requirements.
        removed: Names.

    Raises:
        EnvironmentFailed: It can't be done; the message has the installer's reason.
    """
    if added:
        _check(_installer(settings, ["install", *_after_options(added)]), f"{', '.join(added)} can't be installed")
    if removed:
        flags = [] if _takes_uv() else ["-y"]
        done = _installer(settings, ["uninstall", *flags, *_after_options(removed)])
        _check(done, f"{', '.join(removed)} can't be removed")
    importlib.invalidate_caches()


def would_install(settings: Settings, added: Sequence[str], timeout_s: float) -> tuple[str, ...]:
    """Return what comes when these are installed, `peft 0.17.1`; nothing is changed.

    Raises:
        TimeoutError: It takes longer.
        EnvironmentFailed: They can't be installed.
    """
    options = [*_uv_place(), "--dry-run"]
    try:
        done = call_uv(
            ["pip", "install", *options, *_after_options(added)], index_variables(settings.index_url), timeout_s
        )
    except EnvironmentFailed as error:
        raise TimeoutError(error.message) from error
    _check(done, f"{', '.join(added)} can't be installed")
    coming = tuple(f"{name} {version}" for name, version in _COMES.findall(done.words))
    told = _WOULD.search(done.words)
    return coming or ("",) * (int(told[1]) if told is not None else 0)


def _installer(settings: Settings, arguments: Sequence[str]) -> Done:
    if _takes_uv():
        command, *rest = arguments
        return call_uv(["pip", command, *_uv_place(), *rest], index_variables(settings.index_url), _INSTALL_S)
    variables = {"PIP_INDEX_URL": settings.index_url} if settings.index_url else {}
    return call_pip(arguments, variables, _INSTALL_S)


def _takes_uv() -> bool:
    """Whether this Python runs in a virtual environment that can be written; elsewhere pip knows what to do."""
    return sys.prefix != sys.base_prefix and os.access(sysconfig.get_path("purelib"), os.W_OK)


def _uv_place() -> list[str]:
    return ["--python", sys.executable]


def _after_options(words: Sequence[str]) -> list[str]:
    """What was checked to be no option is not to be read as one all the same."""
    return ["--", *words]


def _check(done: Done, what: str) -> None:
    if done.status:
        words = last_words(done.words) or last_words(done.output) or f"the installer ended as {done.status}"
        raise EnvironmentFailed(f"{what}: {words.rstrip('.')}.")

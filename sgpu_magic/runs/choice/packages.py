"""The packages of a choice: a base environment with additions and removals, as a file for `--env-version`.

Changes to the notebook's own packages are installed into, or removed from, the kernel's environment.
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
from sgpu_magic.files.atomic_file import write_whole
from sgpu_magic.packages import environment_request, named_environments
from sgpu_magic.packages.distributions import distribution_name, normalised
from sgpu_magic.packages.environment_digest import environment_digest, own_python
from sgpu_magic.packages.named_environments import BASE_NAMES, base_list
from sgpu_magic.packages.requirement_files import key_of, name_of, read_file, version_of
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.packages.uv_command import Done, call_pip, call_uv, index_variables, last_error

if TYPE_CHECKING:
    from sgpu_magic.runs.choice.schema import Choice

FOLDER = "chosen-environments"

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_COMPLETE = "# Complete: these lines are all that is installed."
_MOST_NAMED = 2
_INSTALL_S = 1800.0
_UV_PYTHON = ("--python", sys.executable)
_WOULD = re.compile(r"^Would install (\d+) package", re.MULTILINE)
_COMES = re.compile(r"^ \+ (\S+)==(\S+)", re.MULTILINE)


class Base(msgspec.Struct, frozen=True):
    """The requirements of a base environment.

    Args:
        lines: Lines of a requirements file.
        complete: Whether the lines include all dependencies, so that nothing is resolved.
        python: The minor version of Python that it is for; "" if not stated.
    """

    lines: tuple[str, ...]
    complete: bool
    python: str


def problem_of_packages(choice: Choice) -> str:
    """Return why the packages of a choice are invalid, a sentence; "" if they are valid."""
    for line in choice.dependencies:
        if problem := problem_of_requirement(line):
            return problem
    for name in choice.removed:
        if _NAME.fullmatch(name) is None:
            return f"{name[:60]!r} is not a package name."
    added = [key_of(line) for line in choice.dependencies]
    twice = next((name for name in added if added.count(name) > 1), "")
    return f"{twice} is added twice." if twice else ""


def problem_of_requirement(line: str) -> str:
    """Return why a requirement can't be added, a sentence; "" if it can."""
    redacted = without_url_credentials(line)[:80]
    if redacted != line[:80] or "${" in line:
        return f"{redacted!r} contains a password or a variable, which would be saved in the notebook: leave it out."
    try:
        Requirement(line)
    except InvalidRequirement:
        return f"{redacted!r} is not a requirement: write a name, optionally with a version, such as peft==0.17.1."
    return ""


def env_version_of(settings: Settings, choice: Choice, *, write: bool = True) -> str:
    """Return the value of `--env-version` for a choice; "" for this notebook's packages.

    Args:
        settings: Settings, with the directory for files.
        choice: The choice.
        write: Write the file; otherwise only return its path.

    Raises:
        UsageError: There is no such base, or its file can't be used.
        EnvironmentFailed: The base is for another Python.
        OSError: The file can't be written.
    """
    if not choice.env_version or not (choice.dependencies or choice.removed):
        return choice.env_version
    # raise errors of the base itself under the base's name
    environment_request.find_named(settings, choice.env_version)
    return str(_keep(settings, choice, _text_of(choice, base_of(settings, choice.env_version)), write=write))


def base_of(settings: Settings, name: str) -> Base:
    """Return the requirements of a base environment.

    Raises:
        UsageError: There is no environment of that name, or its file can't be used.
    """
    if name in BASE_NAMES:
        base = base_list(name)
        return Base(base.pins(allow_build=False), True, base.python_minor)
    path = Path(name).expanduser()
    if path.is_file():
        found = read_file(path)
        local = tuple(f"{of} @ {there.resolve().as_uri()}" for of, there in found.local)
        return Base((*found.lines, *local), not found.resolve, found.python)
    if (kept := named_environments.load(settings, name)) is None:
        environment_request.find_named(settings, name)
        raise UsageError(f"there is no environment named {name!r}.")
    wheels = tuple(f"{distribution_name(wheel)} @ {Path(wheel.path).as_uri()}" for wheel in kept.wheels)
    return Base((*kept.requirements, *kept.needed, *wheels), True, kept.python)


def problem_of_base(settings: Settings, name: str) -> str:
    """Return why this notebook can't use a base, a sentence; "" if no problem is known.

    Raises:
        UsageError: Its file can't be used.
        EnvironmentFailed: A saved environment is incomplete.
    """
    is_file = Path(name).expanduser().is_file()
    if name not in BASE_NAMES and not is_file and name not in named_environments.saved_names(settings):
        known = ", ".join((*BASE_NAMES, *named_environments.saved_names(settings)))
        return f"There is no environment {name!r} here. There are: {known}; a requirements file's path works too."
    here, python = own_python(), base_of(settings, name).python
    if python and python != here:
        return (
            f"The packages of {name} are for Python {python}, and this notebook runs Python {here}: only the same "
            f"version can read what it sends. Start it with a kernel of Python {python}, or choose other packages."
        )
    environment_request.find_named(settings, name)
    return ""


def base_versions(base: Base) -> dict[str, str]:
    """Return versions by normalised name; "" where the base does not fix one."""
    return {key_of(line): version_of(line) for line in base.lines}


def _text_of(choice: Choice, base: Base) -> str:
    added = {key_of(line) for line in choice.dependencies}
    left_out = added | {normalised(name) for name in choice.removed}
    lines = [line for line in base.lines if key_of(line) not in left_out]
    head: list[str] = []
    if base.complete and not choice.dependencies:
        python = own_python()
        tag = environment_digest(lines, f"cp{python.replace('.', '')}", "", torch_mine=False, allow_build=False)
        head = [f"# Python {python} on any machine, digest {tag}", _COMPLETE]
    return "\n".join((*head, *lines, *choice.dependencies)) + "\n"


def _keep(settings: Settings, choice: Choice, text: str, *, write: bool) -> Path:
    """Return the path of a file with the text, in a folder named by its content's digest."""
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
    """Return the file name, which views show: `4+peft.txt`, `4-torch.txt`, `mine+5.txt`."""
    base = Path(choice.env_version).stem if choice.env_version.endswith((".txt", ".toml")) else choice.env_version
    parts = [re.sub(r"[^\w.-]", "_", base)[:40]]
    for sign, names in (("+", [name_of(line) for line in choice.dependencies]), ("-", list(choice.removed))):
        if len(names) > _MOST_NAMED:
            parts.append(f"{sign}{len(names)}")
        else:
            parts += [f"{sign}{normalised(name)[:40]}" for name in names]
    return f"{''.join(parts)}.txt"


def missing(lines: Iterable[str], installed: dict[str, str]) -> tuple[str, ...]:
    """Return the requirements that the installed packages do not satisfy.

    Args:
        lines: Requirements.
        installed: Installed versions by normalised name.
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

# `--` precedes requirements and names, so that the installer does not read them as options


def install(settings: Settings, added: Sequence[str], removed: Sequence[str]) -> None:
    """Install and uninstall packages; the kernel finds new ones at the next import.

    Args:
        settings: Settings, with the package index.
        added: Requirements to install.
        removed: Names of packages to uninstall.

    Raises:
        EnvironmentFailed: The installer failed; the message has its reason.
    """
    if added:
        _check(_installer(settings, ["install", "--", *added]), f"{', '.join(added)} can't be installed")
    if removed:
        flags = [] if _takes_uv() else ["-y"]
        done = _installer(settings, ["uninstall", *flags, "--", *removed])
        _check(done, f"{', '.join(removed)} can't be removed")
    importlib.invalidate_caches()


def would_install(settings: Settings, added: Sequence[str], timeout_s: float) -> tuple[str, ...]:
    """Return what an installation would add, such as `peft 0.17.1`, without changing anything.

    Raises:
        TimeoutError: The answer takes longer than `timeout_s`.
        EnvironmentFailed: The packages can't be installed.
    """
    command = ["pip", "install", *_UV_PYTHON, "--dry-run", "--", *added]
    try:
        done = call_uv(command, index_variables(settings.index_url), timeout_s)
    except EnvironmentFailed as error:
        raise TimeoutError(error.message) from error
    _check(done, f"{', '.join(added)} can't be installed")
    coming = tuple(f"{name} {version}" for name, version in _COMES.findall(done.words))
    found = _WOULD.search(done.words)
    return coming or ("",) * (int(found[1]) if found is not None else 0)


def _installer(settings: Settings, arguments: Sequence[str]) -> Done:
    if _takes_uv():
        command, *rest = arguments
        return call_uv(["pip", command, *_UV_PYTHON, *rest], index_variables(settings.index_url), _INSTALL_S)
    variables = {"PIP_INDEX_URL": settings.index_url} if settings.index_url else {}
    return call_pip(arguments, variables, _INSTALL_S)


def _takes_uv() -> bool:
    """Whether to use uv: this Python runs in a writable virtual environment. Otherwise pip is used."""
    return sys.prefix != sys.base_prefix and os.access(sysconfig.get_path("purelib"), os.W_OK)


def _check(done: Done, what: str) -> None:
    if done.status:
        words = last_error(done.words) or last_error(done.output) or f"the installer exited with status {done.status}"
        raise EnvironmentFailed(f"{what}: {words.rstrip('.')}.")

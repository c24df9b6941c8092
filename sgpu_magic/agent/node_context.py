"""The kernel's context on this node: its working directory, `sys.path` and variables, and its local code, unpacked.

The context is unchanged where the node sees the kernel's files and runs its Python. Otherwise the built Python's
packages replace the kernel's, code bundles replace its local code, and a directory of the run replaces its working
directory. Local code is unpacked once, and stays while a run uses it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from sgpu_magic.config import Settings
from sgpu_magic.files.folder_cache import FolderCache
from sgpu_magic.packages.node.store import Built
from sgpu_magic.wire.attachments import CodeBundle
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.run import Interpreter, RankContext

# variables of the kernel's Python, which do not apply to a built one
_KERNELS_PYTHON = ("PYTHON", "CONDA_", "_CE_", "MAMBA_", "PYENV_", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "UV_PROJECT")
# harmless exceptions that users set on purpose
_CHOICES = frozenset({
    "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE",
    "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONTRACEMALLOC", "PYTHONASYNCIODEBUG", "PYTHONBREAKPOINT",
})  # fmt: skip
# a zygote needs these to start, besides the variables that the kernel's zygote would have
_ALWAYS = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ", "VIRTUAL_ENV")
# `site-packages`, and Debian's `dist-packages`
_PACKAGES = "-packages"
# the agent's own variables, which ranks do not inherit
_AGENTS_OWN = ("SGPU_", "JPY_", "PYTHONSAFEPATH", "KERNEL_")
# unpacked code may use a tenth of the environments' limit
_SHARE = 10
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
# modification time of assembled files; another time shows that a rank has changed the file
FIXED_TIME = 946_684_800
# modification times of unpacked files are in the ten years after `FIXED_TIME`
_TIMES = 315_360_000


def localize(launch: Launch, built: Built | None, code: Mapping[str, str]) -> Launch:
    """Return the launch with its context mapped to this node. Idempotent.

    Args:
        launch: The launch as the client sent it.
        built: The Python built for the launch; None to use the kernel's.
        code: Folders of local code on this node, by the kernel's `sys.path` entry.

    Raises:
        OSError: The run's directory can't be written.
    """
    context = launch.context
    if built is None and not code and not context.is_remote:
        return launch
    home = _home(launch)
    path = _path(context, built, code, home)
    cwd = context.cwd
    if context.is_remote:
        cwd = os.path.join(home, "work")
        os.makedirs(cwd, mode=0o700, exist_ok=True)
    placed = replace(context, cwd=cwd, sys_path=path, environ=_environ(launch, built), installed=())
    return replace(launch, context=placed)


def _home(launch: Launch) -> str:
    """Return the directory of the ranks' owner; cells of a session share the session's."""
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
            # the notebook's folder comes between the two: it shadows packages, but not the standard library
            of_packages = _PACKAGES in entry
            path += (own for own in built.sys_path if _is_of_packages(own, built) == of_packages)
        elif entry in code:
            path.append(_linked(links, entry, code[entry]))
        elif not context.is_remote or entry in context.installed or entry.startswith(links + os.sep):
            path.append(entry)
        elif os.path.islink(link := _link(links, entry)):
            # made by an earlier cell of the session
            path.append(link)
    if built is not None:
        path += built.sys_path
    return tuple(dict.fromkeys(path))


def _is_of_packages(entry: str, built: Built) -> bool:
    return entry.startswith(os.path.dirname(built.prefix) + os.sep)


def _link(links: str, entry: str) -> str:
    return os.path.join(links, hashlib.sha256(os.fsencode(entry)).hexdigest()[:8])


def _linked(links: str, entry: str, folder: str) -> str:
    """Point a link with a stable name to the folder: a session's ranks then see an edited module as a changed file."""
    link = _link(links, entry)
    try:
        if os.readlink(link) == folder:
            return link
    except OSError:
        os.makedirs(links, mode=0o700, exist_ok=True)
    point_link(link, folder)
    return link


def point_link(link: str, target: str) -> None:
    """Create a link to `target` atomically, or replace an existing one."""
    temporary = f"{link}.{os.getpid()}.part"
    Path(temporary).unlink(missing_ok=True)
    os.symlink(target, temporary)
    os.replace(temporary, link)


def _environ(launch: Launch, built: Built | None) -> dict[str, str]:
    context, given = launch.context, frozenset(launch.spec.env_names)
    environ = dict(context.environ)
    if built is not None:
        environ = {name: value for name, value in environ.items() if name in given or not _is_kernels(name)}
    if context.is_remote:
        here = {n: v for n, v in os.environ.items() if not n.startswith(_AGENTS_OWN) and not _is_kernels(n)}
        environ = here | environ
    if built is not None:
        programs = os.path.join(built.prefix, "bin")
        environ["VIRTUAL_ENV"] = built.prefix
        if "PATH" not in given:
            environ["PATH"] = os.pathsep.join(_without_kernels(environ.get("PATH", os.defpath), context, programs))
    return environ


def built_interpreter(name: str, built: Built, placed: Launch) -> Interpreter:
    """Return the built Python as an interpreter with its own zygote.

    Args:
        name: The environment's name on this node.
        built: The built Python.
        placed: The launch with its context mapped to this node.
    """
    environ = placed.context.environ
    names = [*placed.interpreter.variables, *_ALWAYS]
    variables = {name: environ[name] for name in names if name in environ}
    digest = hashlib.blake2b(digest_size=4)
    for item in sorted(variables.items()):
        digest.update(os.fsencode(repr(item)))
    return Interpreter(executable=built.executable, key=f"{name}-{digest.hexdigest()}", variables=variables)


def _is_kernels(name: str) -> bool:
    return name.startswith(_KERNELS_PYTHON) and name not in _CHOICES


def _without_kernels(path: str, context: RankContext, programs: str) -> Iterable[str]:
    """Put the built environment's programs first in `PATH` and drop those of the kernel's environment."""
    own = context.environ.get("VIRTUAL_ENV") or context.environ.get("CONDA_PREFIX")
    left_out = {programs, os.path.join(own, "bin")} if own and own != os.path.dirname(programs) else {programs}
    yield programs
    for entry in path.split(os.pathsep):
        if entry and entry not in left_out:
            yield entry


# ---------------------------------------------------------------- local code: archives, unpacked


class CodeUnusable(Exception):
    """An archive of local code can't be used; the message, one paragraph, says why."""


class CodeBundles(FolderCache):
    """The node's unpacked archives, in `code/<sha256>` in the environments' directory. Thread-safe.

    An unpacked archive has a shared lock while a run of this agent uses it, so no agent removes it.

    Args:
        settings: The pool's settings.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.environments_path / "code", settings.environments_bytes // _SHARE)
        self._limit = settings.code_limit_bytes

    def unpack(self, run_id: str, bundles: Iterable[CodeBundle]) -> Mapping[str, str]:
        """Return each bundle's folder by the kernel's path entry, and unpack the bundle if necessary.

        Args:
            run_id: The run or session that uses the bundles until `release`.
            bundles: The launch's code bundles.

        Raises:
            CodeUnusable: An archive is missing, damaged or too large, or has paths outside its folder.
            OSError: There is not enough space.
        """
        found: dict[str, str] = {}
        for bundle in bundles:
            digest = bundle.sha256
            if _DIGEST.fullmatch(digest) is None:
                raise CodeUnusable(f"the notebook's code has no valid digest ({digest[:80]!r}).")
            path = self.keep_for(digest, run_id) or self.put(digest, functools.partial(self._fill, bundle))
            found[bundle.entry] = str(path)
        return found

    def _fill(self, bundle: CodeBundle, folder: Path) -> None:
        with _open_bundle(bundle) as archive:
            _unpack(archive, folder, max(self._limit, bundle.size))


@contextlib.contextmanager
def _open_bundle(bundle: CodeBundle) -> Generator[zipfile.ZipFile]:
    """Open the archive and check its digest."""
    try:
        with open(bundle.path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != bundle.sha256:
                raise CodeUnusable(
                    f"the notebook's code from {bundle.entry} arrived damaged: {bundle.path} does not match its "
                    "digest. Run the cell again; if you remove that file first, the archive is built again."
                )
            with zipfile.ZipFile(file) as archive:
                yield archive
    except FileNotFoundError:
        raise CodeUnusable(
            f"the notebook's code from {bundle.entry} did not arrive: {bundle.path} does not exist. Run the cell again."
        ) from None
    except zipfile.BadZipFile as error:
        raise CodeUnusable(f"the notebook's code from {bundle.entry} can't be unpacked: {error}.") from None


def _unpack(archive: zipfile.ZipFile, folder: Path, limit: int) -> None:
    """Write plain files below `folder`, and nothing elsewhere.

    Raises:
        CodeUnusable: A name leads out of the folder or occurs twice, a member is not a plain file, or the archive is
            too large.
    """
    seen: set[str] = set()
    total = 0
    for info in archive.infolist():
        name = PurePosixPath(info.filename)
        mode = info.external_attr >> 16
        is_safe = (
            info.filename == str(name)
            and not name.is_absolute()
            and name.parts
            and not {"..", "."}.intersection(name.parts)
            and "\\" not in info.filename
            and "\0" not in info.filename
            and (stat.S_IFMT(mode) in (0, stat.S_IFREG))
            and info.compress_type == zipfile.ZIP_STORED
            and info.filename not in seen
        )
        if not is_safe:
            raise CodeUnusable(
                f"the notebook's code has a file {info.filename!r}, which is not allowed in its folder. The code was "
                "not unpacked."
            )
        seen.add(info.filename)
        total += info.file_size
        if total > limit:
            raise CodeUnusable(f"the notebook's code is larger than the {limit} bytes that this node accepts.")
        _write(archive, info, folder.joinpath(*name.parts), executable=bool(mode & stat.S_IXUSR))


def _write(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, *, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o755 if executable else 0o644)
    checksum = 0
    with open(descriptor, "wb") as target, archive.open(info) as source:
        while chunk := source.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            target.write(chunk)
    # Python and a session's ranks detect edited files by time and size, so different contents get different times
    changed_at = FIXED_TIME + checksum % _TIMES
    os.utime(path, (changed_at, changed_at))

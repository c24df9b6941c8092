"""`dbutils.fs` and `%fs`, and where `/Volumes/...` and `dbfs:/...` are on this machine.

A path without a scheme is one of DBFS or of a volume, as in Databricks: both are in the setting `volumes_dir`.
`file:/...` is a path of this machine.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sgpu_magic.config import load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.functions.compat.notebook.dbutils import Utility

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_LOCAL = ("dbfs", "file")
_VOLUMES = "/Volumes"
_DBFS = "/dbfs"
_FILE = "file:"


class FileInfo(NamedTuple):
    """An entry of a folder, as `dbutils.fs.ls` returns it.

    Args:
        path: Its path, for other functions of `dbutils.fs`; ends with a slash for a folder.
        name: Its name; ends with a slash for a folder.
        size: Size in bytes; 0 for a folder.
        modificationTime: Milliseconds since the epoch.
    """

    path: str
    name: str
    size: int
    modificationTime: int

    def isDir(self) -> bool:
        """Whether it is a folder."""
        return self.name.endswith("/")

    def isFile(self) -> bool:
        """Whether it is a file."""
        return not self.isDir()


class FileSystem(Utility):
    """Files in `volumes_dir`, where /Volumes and DBFS are on this machine, and file:/ paths."""

    path = "dbutils.fs"

    def ls(self, dir: str) -> list[FileInfo]:
        """List a folder, or the one file of that path."""
        full, local = _resolved(dir)
        if local.is_dir():
            return [_info(full, entry) for entry in sorted(local.iterdir())]
        _existing(dir, local)
        return [_info(posixpath.dirname(full), local)]

    def cp(self, from_: str, to: str, recurse: bool = False) -> bool:
        """Copy a file, or with `recurse` a folder."""
        source, target = self._pair(from_, to, recurse)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
        return True

    def mv(self, from_: str, to: str, recurse: bool = False) -> bool:
        """Move a file, or with `recurse` a folder."""
        source, target = self._pair(from_, to, recurse)
        shutil.move(source, target)
        return True

    def rm(self, dir: str, recurse: bool = False) -> bool:
        """Remove a file, or with `recurse` a folder; False if there is none."""
        full, local = _resolved(dir)
        if not os.path.lexists(local):
            return False
        if local.is_dir() and not local.is_symlink():
            if posixpath.normpath(full.partition(":")[2]) == "/":
                raise UsageError(f"dbutils.fs.rm does not remove the root {dir!r}. Name a folder in it.")
            if any(local.iterdir()):
                _check_recurse("rm", dir, recurse)
            shutil.rmtree(local)
        else:
            local.unlink()
        return True

    def mkdirs(self, dir: str) -> bool:
        """Create a folder and those above it."""
        _resolved(dir)[1].mkdir(parents=True, exist_ok=True)
        return True

    def put(self, file: str, contents: str, overwrite: bool = False) -> bool:
        """Write text to a file."""
        local = _resolved(file)[1]
        if local.exists() and not overwrite:
            raise UsageError(f"{file} exists. dbutils.fs.put replaces it with overwrite=True.")
        local.parent.mkdir(parents=True, exist_ok=True)
        data = contents.encode()
        local.write_bytes(data)
        print(f"Wrote {len(data)} bytes.")  # noqa: T201
        return True

    def head(self, file: str, maxBytes: int = 65536) -> str:
        """Return the beginning of a file as text."""
        local = _resolved(file)[1]
        _existing(file, local)
        with local.open("rb") as opened:
            return opened.read(maxBytes).decode(errors="replace")

    def _pair(self, from_: str, to: str, recurse: bool) -> tuple[Path, Path]:
        source, target = _resolved(from_)[1], _resolved(to)[1]
        _existing(from_, source)
        if source.is_dir():
            _check_recurse("cp or mv", from_, recurse)
        elif target.is_dir() or to.endswith("/"):
            target = target / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        return source, target


def run_line(fs: FileSystem, text: str) -> None:
    """Run a command of `%fs`, such as `ls /Volumes/main`, and print what it returns.

    Raises:
        UsageError: There is no such command.
    """

    def listing(dir: str) -> str:
        return "\n".join(f"{each.size:>12,}  {each.path}" for each in fs.ls(dir))

    words = text.split()
    names = ("cp", "mv", "rm", "mkdirs", "put", "head")
    commands: dict[str, Callable[..., object]] = {**{name: getattr(fs, name) for name in names}, "ls": listing}
    if not words or words[0] not in commands:
        raise UsageError(f"%fs takes one of {', '.join(commands)} and its paths, as in `%fs ls /Volumes/main`.")
    recurse = [word for word in words[1:] if word in ("-r", "--recurse", "recurse=true")]
    arguments: list[object] = [word for word in words[1:] if word not in recurse]
    if recurse and words[0] in ("cp", "mv", "rm"):
        arguments.append(True)
    try:
        result = commands[words[0]](*arguments)
    except TypeError as error:
        raise UsageError(f"%fs {words[0]}: {error}.") from None
    if words[0] != "put":
        print(result)  # noqa: T201


def _resolved(path: str) -> tuple[str, Path]:
    """Return a path as Databricks writes it in full, and where it is on this machine."""
    scheme = _SCHEME.match(path)
    if scheme is not None and scheme[1] not in _LOCAL:
        raise UsageError(
            f"dbutils.fs reads files of this machine, and {path} is elsewhere. Read it with the library of its "
            "storage, or with fsspec."
        )
    kind = scheme[1] if scheme is not None else "dbfs"
    plain = posixpath.normpath("/" + (path[scheme.end() :] if scheme is not None else path).lstrip("/"))
    if kind == "dbfs" and (plain == "/dbfs" or plain.startswith("/dbfs/")):
        plain = plain.removeprefix("/dbfs") or "/"
    full = f"{kind}:{plain}"
    try:
        return full, Path(located(full))
    except UsageError as error:
        raise UsageError(f"{error.message} Write file:{plain} for that path of this machine.") from None


def _existing(path: str, local: Path) -> None:
    if not local.exists():
        raise FileNotFoundError(f"there is no {path}: on this machine it would be {local}.")


def _check_recurse(command: str, path: str, recurse: bool) -> None:
    if not recurse:
        raise UsageError(f"{path} is a folder: dbutils.fs.{command} takes recurse=True for it.")


def _info(folder: str, entry: Path) -> FileInfo:
    status = entry.stat() if entry.exists() else entry.lstat()
    slash = "/" if entry.is_dir() else ""
    size = 0 if slash else status.st_size
    return FileInfo(
        f"{folder.rstrip('/')}/{entry.name}{slash}", f"{entry.name}{slash}", size, int(status.st_mtime * 1000)
    )


# ---------------------------------------------------------------- Databricks' paths on this machine


def located(path: str | os.PathLike[str]) -> str:
    """Return the path on this machine of a path as Databricks writes it; other paths and URLs unchanged.

    `/Volumes/main/default/data` is the folder `Volumes/main/default/data` in `volumes_dir`, `dbfs:/tmp/x` and
    `/dbfs/tmp/x` are `dbfs/tmp/x` there, and `dbfs:/Volumes/...` is the volume. A folder `/Volumes` or `/dbfs` that
    exists on this machine takes precedence.

    Args:
        path: The path or URL.

    Raises:
        UsageError: It is such a path, and `volumes_dir` is not set.
    """
    text = os.fspath(path)
    if text.startswith(_FILE):
        return "/" + text.removeprefix(_FILE).lstrip("/")
    if text.startswith("dbfs:"):
        text = "/" + text.removeprefix("dbfs:").lstrip("/")
        text = text if _is_below(text, _VOLUMES) else f"{_DBFS}{text}"
    for root in (_VOLUMES, _DBFS):
        if _is_below(text, root) and not os.path.isdir(root):
            directory = load_settings().volumes_dir
            if not directory:
                raise UsageError(
                    f"{os.fspath(path)} is in Databricks' storage, which this machine does not have. Put the files "
                    f"into a folder of your own and name it in the setting volumes_dir (SGPU_VOLUMES_DIR): {text} is "
                    f"then VOLUMES_DIR{text}."
                )
            return str(Path(directory).expanduser()) + text
    return text


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")

"""Virtual environments with every kind of installation, and servers to install from."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sgpu_magic.packages.uv_command import index_variables, uv_path

REPOSITORY = Path(__file__).parents[2]
UV = uv_path()

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "{version}"
"""

_TELL = """
import dataclasses, json, sys
sys.path.append({repository!r})
from sgpu_magic.packages import snapshot
taken = snapshot.take_snapshot()
as_dict = dataclasses.asdict
print(json.dumps({{
    "digest": taken.digest, "python": taken.python, "tag": taken.tag, "platform": taken.platform,
    "distributions": [as_dict(d) | {{"key": d.key}} for d in taken.distributions],
}}))
"""


def call(*command: str | Path, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """Run a command that must succeed and return its output."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTUAL_ENV", "PYTHONPATH"))}
    environ |= index_variables("") | dict(variables or {})
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def uv(*arguments: str | Path, cwd: Path | None = None) -> str:
    return call(UV, *arguments, cwd=cwd)


def make_venv(folder: Path, *, python: str = sys.executable) -> Path:
    """Make an empty environment and return its interpreter."""
    uv("venv", "--quiet", "--python", python, folder)
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    """Install into an environment with uv."""
    uv("pip", "install", "--quiet", "--python", python, *what)


def site_packages(python: Path) -> Path:
    return next((python.parent.parent / "lib").glob("python3*")) / "site-packages"


def snapshot_of(python: Path | str, *, cwd: Path | None = None, path: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the snapshot that another interpreter takes.

    Args:
        python: The interpreter.
        cwd: Its working directory.
        path: Entries at the beginning of its `sys.path`.
    """
    code = f"import sys\nsys.path[:0] = {[str(entry) for entry in path]}\n" + _TELL.format(repository=str(REPOSITORY))
    return json.loads(call(python, "-P", "-c", code, cwd=cwd))


def by_name(reported: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {found["key"]: found for found in reported["distributions"]}


def make_project(folder: Path, name: str, version: str = "0.1", source: str = "WHO = 'project'\n") -> Path:
    """Write a project with hatchling as its build backend."""
    package = folder / name.replace("-", "_").replace(".", "_").lower()
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name, version=version))
    (package / "__init__.py").write_text(source)
    return folder


def make_wheel(folder: Path, name: str, version: str = "1.0", files: Mapping[str, str] | None = None) -> Path:
    """Write a wheel with a module of its name and further `files`."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    members = {f"{module}/__init__.py": f"VERSION = {version!r}\n", **(files or {})}
    members[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    members[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{member},sha256={_hash(text)},{len(text)}" for member, text in members.items()]
    members[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in members.items():
            wheel.writestr(member, text)
    return path


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def make_repository(folder: Path, project: Path) -> str:
    """Commit a project to a bare repository that any web server can serve. Returns the commit."""
    git = functools.partial(call, "git", "-c", "user.name=test", "-c", "user.email=test@example.org")
    git("init", "--quiet", cwd=project)
    git("add", "-A", cwd=project)
    git("commit", "--quiet", "-m", "first", cwd=project)
    git("clone", "--quiet", "--bare", str(project), str(folder))
    git("update-server-info", cwd=folder)
    shutil.rmtree(project / ".git")
    return git("rev-parse", "HEAD", cwd=folder).strip()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP. Yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, name="served-folder")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

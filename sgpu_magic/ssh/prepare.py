"""Runs on the other machine, in a Python found there: unpacks this package, installs what it lacks, becomes the relay.

Only the standard library is there. The result is a virtual environment over that Python's packages, in a folder that
names the package's version and the Python, so that several versions lie side by side. It appears whole: several logins
may prepare it at once.

Arguments: the mark that begins lines for the other side, the file that is to name the Python of the environment, the
module that it then runs, and that module's arguments after the mark.
"""

import contextlib
import glob
import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
import venv
import zipfile

MARK, READY, MODULE, *ORDER = sys.argv[1:]
# a package larger than this is none of ours
MOST_BYTES = 64 << 20
SPACE_BYTES = 100 << 20
# an environment of another version that no login has used for so long is removed, unless a process runs in it
UNUSED_S = 30 * 86400


def say(*words: str) -> None:
    os.write(1, ("\n" + " ".join([MARK, *words]) + "\n").encode("utf-8", "replace"))


class Failed(Exception):
    """Why the machine can't be prepared; the first argument is a word that the other side knows."""


class Package:
    """What the other side sends: a line with the digest, size and version of the package, and whether there are wheels
    for this machine; a line for each requirement; an empty line; the package."""

    def __init__(self) -> None:
        self.digest, size, self.version, has_wheels = read_line().split(" ")
        self.has_wheels = has_wheels == "1"
        self.requires = list(iter(read_line, ""))
        data = bytearray()
        while len(data) < min(int(size), MOST_BYTES):
            part = os.read(0, min(1 << 20, int(size) - len(data)))
            if not part:
                sys.exit(1)
            data += part
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise Failed("damaged", "the package did not arrive whole")
        self.data = bytes(data)


def read_line() -> str:
    """Read a line, byte by byte: what follows it belongs to others."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)
        line += byte
    return line.decode("utf-8").rstrip("\n")


def receive_wheels(folder: str) -> None:
    """Ask for the wheels, and write them to a folder."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    say("need", "wheels")
    for _ in range(int(read_line())):
        name, size = read_line().rsplit(" ", 1)
        left = int(size)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            while left > 0:
                part = os.read(0, min(1 << 20, left))
                if not part:
                    sys.exit(1)
                file.write(part)
                left -= len(part)
        os.replace(file.name, os.path.join(folder, os.path.basename(name)))


def prepare(package: Package) -> str:
    """Make the environment, and return its Python."""
    root = os.path.dirname(READY)
    wheels = os.path.join(root, "wheels")
    if package.has_wheels:
        receive_wheels(wheels)
    else:
        shutil.rmtree(wheels, ignore_errors=True)
    name = (
        f"{package.digest[:16]}-{sys.version_info[0]}.{sys.version_info[1]}-"
        + hashlib.sha256(os.fsencode(sys.executable)).hexdigest()[:8]
    )
    final = os.path.join(root, name)
    if not os.path.exists(os.path.join(final, "complete")):
        made = make(root, package)
        try:
            os.rename(made, final)
        except OSError:
            # another login was faster, or one was interrupted
            if not os.path.exists(os.path.join(final, "complete")):
                shutil.rmtree(final, ignore_errors=True)
                os.rename(made, final)
            else:
                shutil.rmtree(made, ignore_errors=True)
        with contextlib.suppress(OSError):
            # another login may be doing the same
            remove_unused(root, final)
    return os.path.join(final, "bin", "python")


def remove_unused(root: str, own: str) -> None:
    """Remove environments that are not in use, with the files that name them."""
    commands = [read_bytes(path) for path in glob.glob("/proc/[0-9]*/cmdline")]
    for folder in glob.glob(os.path.join(glob.escape(root), "*-3.*-*")):
        is_running = any(command.startswith(os.fsencode(folder) + b"/") for command in commands)
        # each login sets the time
        if folder != own and not is_running and os.stat(folder).st_mtime < time.time() - UNUSED_S:
            shutil.rmtree(folder, ignore_errors=True)
    for path in glob.glob(os.path.join(glob.escape(root), "*.python")):
        if not os.path.exists(os.fsdecode(read_bytes(path).rstrip(b"\n"))):
            os.unlink(path)


def read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def make(root: str, package: Package) -> str:
    """Make the environment in a temporary folder, and return that."""
    os.makedirs(root, mode=0o700, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < SPACE_BYTES:
        raise Failed("space", f"{root} has {free >> 20} MB free, and {SPACE_BYTES >> 20} MB are needed")
    for old in glob.glob(os.path.join(glob.escape(root), ".making-*")):
        # of a login that was cut off
        if os.stat(old).st_mtime < time.time() - 3600:
            shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=".making-", dir=root)
    try:
        say("step", "unpacking sgpu-magic", package.version)
        venv.EnvBuilder(system_site_packages=True, symlinks=True).create(folder)
        packages = glob.glob(os.path.join(glob.escape(folder), "lib", "python3*", "site-packages"))[0]
        # of this Python itself: an environment over another one would show only that one's base
        paths = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if os.path.isdir(path)]
        with open(os.path.join(packages, "sgpu_base.pth"), "w") as file:
            file.writelines(f"import site; site.addsitedir({path!r})\n" for path in paths)
        with zipfile.ZipFile(io.BytesIO(package.data)) as archive:
            archive.extractall(packages)
        missing = [each for each in package.requires if is_missing(each)]
        if missing:
            install(os.path.join(folder, "bin", "python"), missing, os.path.join(root, "wheels"))
        open(os.path.join(folder, "complete"), "w").close()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def is_missing(requirement: str) -> bool:
    """Whether this Python lacks a requirement, or has another version than it asks for."""
    try:
        from packaging.requirements import Requirement

        wanted = Requirement(requirement)
        if wanted.marker is not None and not wanted.marker.evaluate():
            return False
        return not wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True)
    except ImportError:
        # it is not there, or `packaging` is not, without which an installer compares the versions
        return True


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return requirement if match is None else match.group()


def install(python: str, missing: list[str], wheels: str) -> None:
    """Install requirements into the environment: from the wheels, if there are any, else as the installer is set up."""
    options = ["--no-index", "--find-links", wheels] if os.path.isdir(wheels) else []
    names = [name_of(each) for each in missing]
    say("step", "installing", ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else ""))
    tried: list[str] = []
    for command in (
        ["uv", "pip", "install", "--quiet", "--python", python],
        [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python],
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"],
    ):
        try:
            done = subprocess.run(
                [*command, *options, *missing], stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
        except OSError:
            continue
        if done.returncode == 0:
            return
        lines = (done.stderr or done.stdout).strip().splitlines()
        if not any("No module named" in line for line in lines[-1:]):
            tried.append(lines[-1] if lines else f"{command[0]} ended with status {done.returncode}")
    raise Failed("install", tried[0] if tried else f"neither uv nor pip is there for {sys.executable}")


def main() -> None:
    try:
        say("need", "package")
        python = prepare(Package())
        with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(READY), delete=False) as file:
            file.write(python + "\n")
        os.replace(file.name, READY)
    except Failed as error:
        say("failed", *error.args)
        return
    except OSError as error:
        say("failed", "disk", f"{error.filename or os.path.dirname(READY)}: {error.strerror}")
        return
    os.execv(python, [python, "-P", "-m", MODULE, MARK, *ORDER])


if __name__ == "__main__":
    main()

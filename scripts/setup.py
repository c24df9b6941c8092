# ruff: noqa: T201
"""Install this project, editable, into the environment of the Python that runs this script.

    python scripts/setup.py EXTRA...

Keeps any build of torch 2.6 or newer that the environment already has. Otherwise installs the version in
`constraints.txt`, after printing the size of the download. pip installs torch from its configured index; uv installs
the rest from the same index in a tenth of pip's time.

In a terminal the installers show their own progress. A log gets a line every ten seconds, and errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Python's option -I leaves it out
sys.path.insert(0, str(Path(__file__).parent))

from progress import progress

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_TORCH = (2, 6)
PIP = (sys.executable, "-m", "pip")
_ASK_TIMEOUT_S = 15


def main(extras: list[str]) -> int:
    """Install the project with `extras`; return the installer's exit status."""
    # packages there are not the environment's own
    os.environ.pop("PYTHONPATH", None)
    constraints = CONSTRAINTS.read_text()
    kept = torch_to_keep()
    if kept:
        print(f"torch {kept} is here already and stays", flush=True)
        constraints = f"torch=={kept}\n"
    else:
        print(announcement(constraints.split()), flush=True)
        with progress("installing torch"):
            wanted = subprocess.run([*PIP, "install", *quietly("-qq"), "--no-input", *constraints.split()])
        if wanted.returncode != 0:
            return wanted.returncode
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "constraints.txt"
        file.write_text(constraints)
        target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
        arguments = ("--editable", target, "--constraint", str(file))
        print("installing sgpu-magic and what else it requires", flush=True)
        with progress("installing sgpu-magic"):
            if torch_is_borrowed():
                # uv does not see packages on a path from a .pth file
                command = [*PIP, "install", *quietly("-qq"), "--no-input", *arguments]
            else:
                subprocess.run([*PIP, "install", "-qq", "--no-input", "uv"], stdin=subprocess.DEVNULL, check=True)
                uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
                command = [*uv, *quietly("--quiet"), *pips_index(), *arguments]
            return subprocess.run(command, stdin=subprocess.DEVNULL).returncode


def quietly(option: str) -> tuple[str, ...]:
    """Return `option` unless stdout is a terminal: a terminal shows the progress, a log gets errors only."""
    return () if sys.stdout.isatty() else (option,)


def torch_is_borrowed() -> bool:
    """Whether torch belongs to the Python that made this environment."""
    try:
        found = distribution("torch").locate_file("")
    except PackageNotFoundError:
        return False
    return not Path(str(found)).is_relative_to(sysconfig.get_path("purelib"))


def pips_index() -> tuple[str, ...]:
    """Return uv's options for pip's configured indexes, none if pip uses PyPI."""
    options: list[str] = []
    for setting, option in (("index-url", "--default-index"), ("extra-index-url", "--index")):
        for section in ("global", "install", ":env:"):
            command = [*PIP, "config", "get", f"{section}.{setting}"]
            told = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            for url in told.stdout.split() if told.returncode == 0 else ():
                options += [option, url]
    return tuple(options)


def torch_to_keep() -> str:
    """Return the version of the installed torch, "" if there is none or it is too old."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return ""
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers >= OLDEST_TORCH:
        return found
    print(f"torch {found} is too old: {'.'.join(map(str, OLDEST_TORCH))} or newer is needed", flush=True)
    return ""


def announcement(torch: list[str]) -> str:
    """Return a sentence about the download of torch: the files come from a dry run of pip, the sizes from the index."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*PIP, "install", "--quiet", "--no-input", "--dry-run", "--report", str(report), *torch]
        print(f"{' '.join(torch)} is not here yet; asking how much that is ...", flush=True)
        with progress("asking"):
            asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
        if asked.returncode != 0:
            return "its size could not be found out: with CUDA it is about 3 GB, without about 0.2 GB"
        items = json.loads(report.read_text())["install"]
    sizes = {item["metadata"]["name"]: size_bytes(item["download_info"]["url"]) for item in items}
    known = sum(size for size in sizes.values() if size)
    heaviest = sorted(sizes.items(), key=lambda item: -(item[1] or 0))[:3]
    listed = ", ".join(f"{name} {megabytes(size)}" for name, size in heaviest if size)
    unknown = sum(1 for size in sizes.values() if not size)
    rest = f"; the size of {unknown} of its {len(sizes)} packages is not known" if unknown else ""
    if not known:
        return "the index does not tell its size: with CUDA it is about 3 GB, without about 0.2 GB"
    return f"installing torch: {megabytes(known)} in {len(sizes)} packages ({listed}){rest}"


def size_bytes(url: str) -> int | None:
    """Return the size of a file that pip would download, None if it is unknown."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(unquote(parts.path)).stat().st_size
        question = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(question, timeout=_ASK_TIMEOUT_S) as answer:
            return int(answer.headers.get("Content-Length") or 0) or None
    except (OSError, ValueError):
        return None


def megabytes(size: int | None) -> str:
    return f"{(size or 0) / 1e6:,.0f} MB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

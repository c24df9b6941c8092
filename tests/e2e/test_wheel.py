"""What a user without Node gets: the wheel of a clean checkout, in an environment of its own, opened in a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from browsers import OpenNotebook, chromium, has_browser
from homes import Home
from installed_venvs import REPOSITORY, install, make_venv, site_packages
from jupyter_servers import JupyterServer, jupyter_server, new_notebook
from playwright.sync_api import expect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    pytest.mark.timeout(240),
]

_NODE = {"node", "nodejs", "npm", "npx", "corepack", "yarn", "pnpm", "jlpm"}
_COMMANDS = ("jupyter", "jupyter-lab", "jupyter-labextension", "jupyter-server")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that a commit of now would have."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "-z", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True
    )
    if listed.returncode or not listed.stdout:
        pytest.skip("not a git checkout: what belongs to it is not known")
    made = tmp_path / "checkout"
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, made / name)
    return made


@pytest.fixture
def path_without_node(tmp_path: Path) -> str:
    """Every command of this machine but Node's, and but those of this environment."""
    commands = tmp_path / "commands"
    commands.mkdir()
    own = Path(sys.prefix, "bin").resolve()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        if folder.is_dir() and folder.resolve() != own:
            for command in folder.iterdir():
                if command.name not in _NODE and not os.path.lexists(commands / command.name):
                    (commands / command.name).symlink_to(command)
    return str(commands)


def new_environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with the wheel and the other packages of this one; return its folder of commands."""
    python = make_venv(folder)
    install(python, "--no-deps", wheel)
    site = site_packages(python)
    # a path line adds a folder without reading its .pth files, so an editable sgpu_magic is not found there
    others = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site / "others.pth").write_text("\n".join(others))
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    for name in _COMMANDS:
        script = scripts[name]
        command = python.parent / name
        command.write_text(
            f"#!{python}\nimport sys\nfrom {script.module} import {script.attr}\nsys.exit({script.attr}())\n"
        )
        command.chmod(0o755)
    # the folder of the application itself; its extensions are searched beside it
    shared = folder / "share" / "jupyter"
    (shared / "lab").symlink_to(Path(sys.prefix, "share", "jupyter", "lab"))
    return python.parent


def listed(home: Home, *command: str | Path) -> str:
    """What a command lists, without colours."""
    done = subprocess.run(command, cwd=home.work, env=home.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return _COLOURS.sub("", done.stdout + done.stderr)


def test_the_wheel_of_a_clean_checkout_has_the_panel_without_node(
    checkout: Path, path_without_node: str, tmp_path: Path
) -> None:
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTUAL_ENV", "PYTHONPATH"))}
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=checkout,
        env=bare | {"PATH": path_without_node},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if "No module named hatchling" in built.stderr:
        pytest.skip("hatchling is not installed here")
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    commands = new_environment(tmp_path / "venv", wheel)
    path = f"{commands}{os.pathsep}{path_without_node}"
    assert shutil.which("node", path=path) is None
    variables = {"SGPU_SIMULATE": "a10:4,h100:8", "PATH": path, "VIRTUAL_ENV": str(commands.parent)}
    with jupyter_server("jupyterlab", variables, command=[commands / "jupyter", "lab"]) as server:
        home = server.home
        found = listed(home, commands / "jupyter", "labextension", "list")
        assert re.search(r"@sgpu-magic/labextension v\S+ enabled OK", found), found
        assert str(commands.parent) in found
        found = listed(home, commands / "jupyter", "server", "extension", "list")
        assert re.search(r"sgpu_magic\.server enabled", found), found
        where = "import sgpu_magic; print(sgpu_magic.__file__)"
        assert str(commands.parent) in listed(home, commands / "python", "-c", where)
        look_at_the_panel(server)


def look_at_the_panel(server: JupyterServer) -> None:
    new_notebook(server.home.work / "wheel.ipynb", "%load_ext sgpu_magic")
    with chromium() as browser:
        notebook = OpenNotebook(server, browser, "wheel.ipynb")
        notebook.kernel_ready()
        notebook.run(0)
        notebook.page.get_by_role("tab", name="GPU environment").click()
        shown = notebook.page.locator("#sgpu-panel")
        for label, free in (("A10", "4 of 4 free"), ("H100", "8 of 8 free")):
            expect(shown.get_by_role("radio", name=label)).to_contain_text(free, timeout=60_000)
        notebook.picture("wheel")
        errors = notebook.errors
        notebook.close()
        assert not errors

"""Real Jupyter servers in a home, with the extensions of this source tree in place of installed ones."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from free_ports import free_port
from homes import Home
from lazy_modules import nbformat
from waiting import eventually

PACKAGE = Path(__file__).parents[2] / "sgpu_magic"
_OTHERS = (
    *("jupyter_lsp", "jupyter_server_terminals", "jupyterlab", "jupyterlab_jupytext"),
    *("notebook", "notebook_shim"),
)


class Answer(NamedTuple):
    """A server's response to a request."""

    status: int
    body: Any


class JupyterServer:
    """A Jupyter server whose root directory is the home's working directory.

    Args:
        home: Its home; the server's kernels use the home's pool.
        application: The module that is started: `jupyter_server`, `jupyterlab` or `notebook`.
        token: The server's token; a new one if left out, "" for no authentication.
        base_url: The prefix of all its paths.
        command: Starts an application with its installed extensions; if left out, `application` starts with this
            tree's.
        options: Further options of the application.
    """

    def __init__(
        self,
        home: Home,
        application: str = "jupyter_server",
        token: str | None = None,
        base_url: str = "/",
        command: Sequence[str | Path] = (),
        options: Sequence[str] = (),
    ) -> None:
        self.home = home
        self.token = secrets.token_hex(8) if token is None else token
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}{base_url.rstrip('/')}"
        places = {} if command else _laid_out(home.path / "extensions", application)
        self._log = open(home.path / f"{application}.log", "ab")  # noqa: SIM115  closed with the server
        self._process = subprocess.Popen(
            [
                *map(str, command or (sys.executable, "-m", application)),
                "--no-browser",
                f"--ServerApp.port={self.port}",
                "--ServerApp.port_retries=0",
                f"--ServerApp.base_url={base_url}",
                f"--ServerApp.root_dir={home.work}",
                f"--IdentityProvider.token={self.token}",
                *(["--allow-root"] if os.getuid() == 0 else []),
                *options,
            ],
            env=home.environ
            | places
            | {
                # not the user's own settings and workspaces
                "JUPYTERLAB_SETTINGS_DIR": str(home.path / "jupyter" / "settings"),
                "JUPYTERLAB_WORKSPACES_DIR": str(home.path / "jupyter" / "workspaces"),
            },
            cwd=home.work,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        home.kernel_pids.add(self._process.pid)
        eventually(self._is_up, 60, lambda: f"the server does not come up:\n{self.log()[-3000:]}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """Return the server's log."""
        return Path(self._log.name).read_text(errors="replace")

    def get(self, path: str, *, token: str | None = None) -> Answer:
        """GET a path below the server's URL."""
        return self._request("GET", path, None, token)

    def post(self, path: str, body: object, *, token: str | None = None) -> Answer:
        """POST `body` as JSON to a path below the server's URL."""
        return self._request("POST", path, json.dumps(body).encode(), token)

    def delete(self, path: str) -> Answer:
        return self._request("DELETE", path, None, None)

    def close(self) -> None:
        """Stop the server and its kernels."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self.home.kernel_pids.discard(self._process.pid)

    def _request(self, method: str, path: str, body: bytes | None, token: str | None) -> Answer:
        request = urllib.request.Request(f"{self.url}/{path}", data=body, method=method)
        shown = self.token if token is None else token
        if shown:
            request.add_header("Authorization", f"token {shown}")
        try:
            with urllib.request.urlopen(request, timeout=40) as answer:
                return Answer(answer.status, _content(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _content(error.read()))

    def _is_up(self) -> bool:
        assert self._process.poll() is None, f"the server has ended:\n{self.log()[-3000:]}"
        try:
            return self.get("api").status == 200
        except OSError:
            return False


@contextlib.contextmanager
def jupyter_server(
    application: str = "jupyter_server", variables: Mapping[str, str] | None = None, **options: Any
) -> Iterator[JupyterServer]:
    """Yield a Jupyter server in a home of its own, and close both at the end.

    Args:
        application: As for `JupyterServer`.
        variables: As for `Home`.
        **options: Further arguments of `JupyterServer`.
    """
    home = Home(variables)
    try:
        server = JupyterServer(home, application, **options)
        try:
            yield server
        finally:
            server.close()
    finally:
        home.close()


def new_notebook(path: Path, *cells: str) -> None:
    """Write a notebook with these code cells, whose ids are `cell-0`, `cell-1` ..."""
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    notebook.cells = [nbformat.v4.new_code_cell(source, id=f"cell-{at}") for at, source in enumerate(cells)]
    nbformat.write(notebook, path)


def _laid_out(folder: Path, application: str) -> dict[str, str]:
    """Lay out this tree's extensions below a folder as `pip install` does, and return the variables that name it.

    A server without pages gets no other extension: the installed ones take two seconds of CPU time.
    """
    places = folder / application
    labextensions = places / "share" / "jupyter" / "labextensions" / "@sgpu-magic"
    configuration = places / "etc" / "jupyter" / "jupyter_server_config.d"
    if not labextensions.exists():
        labextensions.mkdir(parents=True)
        configuration.mkdir(parents=True)
        (labextensions / "labextension").symlink_to(PACKAGE / "labextension")
        (configuration / "sgpu_magic.json").symlink_to(PACKAGE / "server" / "server_config.json")
        if application == "jupyter_server":
            off = {"ServerApp": {"jpserver_extensions": dict.fromkeys(_OTHERS, False)}}
            (configuration / "others.json").write_text(json.dumps(off))
    return {
        "JUPYTER_PATH": str(places / "share" / "jupyter"),
        "JUPYTER_CONFIG_PATH": str(places / "etc" / "jupyter"),
    }


def _content(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")

"""Real Jupyter servers and a real browser in a home of their own.

JupyterServer   JupyterLab or Notebook 7, as its command starts it
OpenNotebook    one notebook in a page: its cells, their outputs, pictures of them
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from homes import Home
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from process_table import stop_process
from waiting import eventually

ARTEFACTS = Path(__file__).parent / "artefacts"
CHROMIUM = "/usr/bin/chromium"
_START_S = 60.0
# a page of JupyterLab on two cores that are busy
LOAD_MS = 60_000


class JupyterServer:
    """A Jupyter server in a home.

    Args:
        home: Its home; notebooks lie in its working directory.
        app: `lab` or `notebook`.
        variables: Further environment variables of the server and its kernels.
    """

    def __init__(self, home: Home, app: str = "lab", variables: dict[str, str] | None = None) -> None:
        self.home = home
        self.app = app
        (home.path / "jupyter" / "lab").mkdir(parents=True, exist_ok=True)
        environ = home.environ | {"JUPYTERLAB_SETTINGS_DIR": str(home.path / "jupyter" / "lab")} | (variables or {})
        self._log = open(home.path / "server.log", "ab")  # noqa: SIM115  closed with the server
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                {"lab": "jupyterlab", "notebook": "notebook"}[app],
                "--no-browser",
                "--allow-root",
                "--ServerApp.port=0",
                f"--ServerApp.root_dir={home.work}",
                "--LabApp.news_url=None",
                "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            ],
            env=environ,
            cwd=home.work,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        found: dict[str, Any] = {}

        def listens() -> bool:
            assert self._process.poll() is None, (home.path / "server.log").read_text()[-3000:]
            with contextlib.suppress(OSError, ValueError):
                found.update(json.loads((home.path / "jupyter" / f"jpserver-{self._process.pid}.json").read_text()))
            return bool(found)

        eventually(listens, _START_S, lambda: (home.path / "server.log").read_text()[-3000:])
        self.url, self.token = f"http://127.0.0.1:{found['port']}", str(found["token"])
        eventually(lambda: self.get("api/status") is not None, _START_S, "the server does not answer")

    @property
    def pid(self) -> int:
        return self._process.pid

    def get(self, path: str) -> Any:
        """What the server's REST interface answers, None when it can't be reached."""
        request = urllib.request.Request(f"{self.url}/{path}", headers={"Authorization": f"token {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)
        except OSError:
            return None

    def post(self, path: str, method: str = "POST") -> None:
        """Ask for something to be done."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/{path}", data=b"", headers=headers, method=method)
        urllib.request.urlopen(request, timeout=30).close()

    def kernels(self) -> list[dict[str, Any]]:
        return self.get("api/kernels") or []

    def shut_kernels(self) -> None:
        """End every session's kernel."""
        for session in self.get("api/sessions") or []:
            self.post(f"api/sessions/{session['id']}", "DELETE")

    def write(self, name: str, cells: Sequence[str]) -> Path:
        """Put a notebook of code cells into the server's folder."""
        notebook = nbformat.v4.new_notebook(
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        )
        notebook.cells = [nbformat.v4.new_code_cell(text) for text in cells]
        path = self.home.work / name
        nbformat.write(notebook, path)
        return path

    def page_url(self, name: str) -> str:
        tree = "lab/tree" if self.app == "lab" else "notebooks"
        return f"{self.url}/{tree}/{name}?token={self.token}"

    def close(self) -> None:
        """Stop it as Control-C twice does; its kernels end with it."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(20)
                except subprocess.TimeoutExpired:
                    stop_process(self._process.pid, signal.SIGKILL, 5)
                    self._process.wait(5)
        finally:
            self._log.close()


@contextlib.contextmanager
def chromium(**options: Any) -> Iterator[Browser]:
    """Debian's Chromium, headless."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--js-flags=--expose-gc", *options.pop("args", [])]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, **options)
        try:
            yield browser
        finally:
            browser.close()


class OpenNotebook:
    """A notebook in a page of its own.

    Args:
        server: Where it is.
        browser: Opens the page.
        name: The notebook's file name.
        size: Of the window in pixels.
        dark: With the dark theme.
    """

    def __init__(
        self,
        server: JupyterServer,
        browser: Browser,
        name: str,
        size: tuple[int, int] = (1366, 768),
        dark: bool = False,
    ) -> None:
        self.server = server
        self.name = name
        self._context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            accept_downloads=True,
        )
        self.page: Page = self._context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        if dark:
            settings = server.home.path / "jupyter" / "lab" / "@jupyterlab" / "apputils-extension"
            settings.mkdir(parents=True, exist_ok=True)
            (settings / "themes.jupyterlab-settings").write_text('{"theme": "JupyterLab Dark"}')
        self.load()

    def load(self) -> None:
        """Load the page (again) and wait until the notebook stands there."""
        self.page.goto(self.server.page_url(self.name))
        self.ready()

    def reload(self) -> None:
        """What the browser's reload button does."""
        self.page.reload()
        self.ready()

    def ready(self) -> None:
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=LOAD_MS)
        self.page.add_style_tag(content="#jp-MainLogo, .Toastify { display: none !important }")

    def dismiss(self) -> None:
        """Close a dialog that is in the way."""
        buttons = self.page.locator(".jp-Dialog button.jp-mod-accept")
        if buttons.count():
            buttons.last.click()

    def kernel_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the page is connected to its kernel, which does nothing."""
        self.page.wait_for_selector(
            ".jp-Notebook-ExecutionIndicator[data-status=idle]", state="attached", timeout=timeout_s * 1000
        )

    def cell(self, number: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def output(self, number: int) -> Locator:
        return self.cell(number).locator(".jp-OutputArea").first

    def start(self, number: int) -> None:
        """Run a cell without waiting for its end."""
        editor = self.cell(number).locator(".cm-content").first
        editor.click()
        expect(editor).to_be_focused()
        self.page.keyboard.press("Control+Enter")

    def run(self, number: int, timeout_s: float = 60.0) -> str:
        """Run a cell, wait for its end and return the text below it."""
        self.start(number)
        self.wait_done(number, timeout_s)
        return self.output(number).inner_text()

    def wait_done(self, number: int, timeout_s: float = 60.0) -> None:
        prompt = self.cell(number).locator(".jp-InputPrompt").first
        eventually(
            lambda: re.fullmatch(r"\[\d+\]:", prompt.inner_text().strip()) is not None,
            timeout_s,
            lambda: f"cell {number} goes on: {self.picture('goes-on')} {self.output(number).inner_text()[-2000:]}",
        )

    def picture(self, name: str, locator: Locator | None = None) -> Path:
        """Keep a screenshot for whoever wants to look at it."""
        ARTEFACTS.mkdir(exist_ok=True)
        path = ARTEFACTS / f"{self.server.app}-{name}.png"
        if locator is not None:
            locator.screenshot(path=path)
        else:
            self.page.screenshot(path=path)
        return path

    def heap_bytes(self) -> int:
        """What the page's JavaScript holds after a garbage collection."""
        session = self._context.new_cdp_session(self.page)
        session.send("HeapProfiler.enable")
        session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")["usedSize"]
        session.detach()
        return int(used)

    def save(self) -> dict[str, Any]:
        """Save the notebook and return what lies on the disk."""
        path = self.server.home.work / self.name
        before = path.stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        eventually(lambda: path.stat().st_mtime_ns != before, 20, "the notebook is not saved")
        return json.loads(path.read_text())

    def close(self) -> None:
        self._context.close()


def within(seconds: float, began: float) -> bool:
    """Whether less than `seconds` have passed since `began` (monotonic)."""
    return time.monotonic() - began < seconds


def has_browser() -> bool:
    return os.access(CHROMIUM, os.X_OK)

"""Notebooks in Debian's Chromium, with screenshots."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_servers import JupyterServer
from playwright.sync_api import Browser, Error, Locator, Page, expect, sync_playwright
from waiting import eventually

ARTEFACTS = Path(__file__).parents[1] / "artefacts"
CHROMIUM = "/usr/bin/chromium"
# for a page of JupyterLab on two busy cores
LOAD_MS = 60_000


@contextlib.contextmanager
def chromium(**options: Any) -> Iterator[Browser]:
    """Yield Debian's Chromium, headless."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--js-flags=--expose-gc", *options.pop("args", [])]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, **options)
        try:
            yield browser
        finally:
            browser.close()


def console_errors(page: Page) -> list[str]:
    """Return a list to which the errors that the page writes to the browser's console are added."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return errors


def choose_kernel(page: Page) -> None:
    """Answer JupyterLab, which asks for a notebook's kernel when it does not know all kernels in time."""
    for dialog in page.locator(".jp-Dialog").all():
        asked = dialog.inner_text()
        assert asked.startswith("Select Kernel"), f"a dialog is in the way: {asked}"
        dialog.get_by_role("button", name="Select Kernel").or_(dialog.locator("button.jp-mod-accept")).first.click()


class OpenNotebook:
    """A notebook in its own page.

    Args:
        server: The notebook's server.
        browser: The browser that opens the page.
        name: The notebook's file name.
        size: Width and height of the window in pixels.
        dark: Use the dark theme.
        is_lab: The server is JupyterLab's, else Notebook 7's.

    Attributes:
        errors: Errors in the page, with their places.
        console: Errors that the page has written to the browser's console.
    """

    def __init__(
        self,
        server: JupyterServer,
        browser: Browser,
        name: str,
        size: tuple[int, int] = (1366, 768),
        dark: bool = False,
        is_lab: bool = True,
    ) -> None:
        self.server = server
        self.name = name
        self._is_lab = is_lab
        self._stem = Path(name).stem
        self._context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            accept_downloads=True,
        )
        self.page: Page = self._context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", self._note_error)
        self.console = console_errors(self.page)
        settings = server.home.path / "jupyter" / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True, exist_ok=True)
        theme = "JupyterLab Dark" if dark else "JupyterLab Light"
        (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
        quiet = {"fetchNews": "false", "checkForUpdates": False}
        (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
        self.load()

    def _note_error(self, error: Error) -> None:
        # anywidget 0.11 reports this, without consequence, for a widget that is closed before its view is loaded; one
        # that is not drawn is missing in the page, which tests check
        known = "[anywidget] Failed to initialize model" in str(error)
        # from JupyterLab's debugger, whose request was pending when the test restarted the kernel
        known |= "Canceled future for debug_request" in str(error)
        if not known:
            self.errors.append(f"{error}\n{error.stack}")

    def load(self) -> None:
        """Load the page (again) and wait until the notebook is shown."""
        # a workspace of its own: JupyterLab reopens what was open before
        context = f"lab/workspaces/{self._stem}/tree" if self._is_lab else "notebooks"
        self.page.goto(f"{self.server.url}/{context}/{self.name}?token={self.server.token}")
        self.ready()

    def reload(self) -> None:
        """Reload the page, as the browser's reload button does."""
        self.page.reload()
        self.ready()

    def ready(self) -> None:
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=LOAD_MS)

    def kernel_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the page is connected to its kernel and the kernel is idle."""
        self.page.wait_for_selector(
            ".jp-Notebook-ExecutionIndicator[data-status=idle]", state="attached", timeout=timeout_s * 1000
        )

    def cell(self, number: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def output(self, number: int) -> Locator:
        return self.cell(number).locator(".jp-OutputArea").first

    def start(self, number: int) -> None:
        """Start a cell without waiting for its end; a page that has just loaded may not accept keys yet."""
        editor = self.cell(number).locator(".cm-content").first
        prompt = self.cell(number).locator(".jp-InputPrompt").first
        before = prompt.inner_text()

        def press() -> bool:
            choose_kernel(self.page)
            editor.click()
            self.page.keyboard.press("Control+Enter")
            try:
                expect(prompt).not_to_have_text(before, timeout=5_000)
            except AssertionError:
                return False
            return True

        eventually(press, 60, f"cell {number} does not run")

    def run(self, number: int, timeout_s: float = 60.0) -> str:
        """Run a cell, wait for its end and return the text below it."""
        prompt = self.cell(number).locator(".jp-InputPrompt").first

        def runs() -> bool:
            # a page that has just connected to its kernel may drop a command
            self.start(number)
            eventually(lambda: prompt.inner_text().strip() != "[*]:", timeout_s, f"cell {number} goes on")
            return prompt.inner_text().strip() != "[ ]:"

        eventually(runs, timeout_s, f"cell {number} does not run")
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
        """Save a screenshot for inspection."""
        ARTEFACTS.mkdir(exist_ok=True)
        path = ARTEFACTS / f"{'lab' if self._is_lab else 'notebook'}-{name}.png"
        if locator is not None:
            locator.screenshot(path=path)
        else:
            self.page.screenshot(path=path)
        return path

    def heap_bytes(self) -> int:
        """Return the size of the page's JavaScript heap after a garbage collection, in bytes."""
        session = self._context.new_cdp_session(self.page)
        session.send("HeapProfiler.enable")
        session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")["usedSize"]
        session.detach()
        return int(used)

    def save(self, has: str = "") -> dict[str, Any]:
        """Save the notebook and return the file's content.

        Args:
            has: Text that the file must contain: the page may still be saving an earlier state.
        """
        path = self.server.home.work / self.name
        before = path.stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")

        def saved() -> dict[str, Any]:
            try:
                # the server truncates the file before it writes
                found = json.loads(path.read_text())
            except ValueError:
                return {}
            return found if path.stat().st_mtime_ns != before and has in json.dumps(found) else {}

        return eventually(saved, 20, lambda: f"the notebook is not saved: {path.read_text()}")

    def close(self) -> None:
        self._context.close()


def has_browser() -> bool:
    return os.access(CHROMIUM, os.X_OK)

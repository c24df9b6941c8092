"""A kernel's widget in Chromium without a server and JupyterLab, on a page that provides anywidget's interface.

A JupyterLab page takes ten seconds of CPU time, this one a tenth of that. tests/e2e/test_browser_*.py cover the views
in JupyterLab and Notebook.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from browsers import ARTEFACTS
from front_end import LiveView
from kernels import Cell, Kernel
from playwright.sync_api import Browser, Page, Route

_URL = "http://localhost/"
_PAGE = """<!doctype html><title>one widget</title>HEAD<script type="module">
import widget from "/widget.js";

globalThis.draw = (state) => {
  const heard = new Map();
  const tell = (name, ...values) => {
    for (const callback of [...(heard.get(name) ?? [])]) callback(...values);
  };
  globalThis.fromKernel = (data) => {
    if (data.method === "custom") {
      tell("msg:custom", data.content, []);
      return;
    }
    Object.assign(state, data.state);
    for (const name of Object.keys(data.state)) tell(`change:${name}`);
  };
  const model = {
    widget_manager: MANAGER,
    get: (name) => state[name],
    send: (content) => void toKernel(content),
    on: (name, callback) => void heard.set(name, (heard.get(name) ?? new Set()).add(callback)),
    off: (name, callback) => void heard.get(name)?.delete(callback),
  };
  widget.render({ model, el: document.body });
};
</script>"""


# JupyterLab's widget manager sends widget messages to a subshell of its own
_LAB = {"HEAD": "<body>", "MANAGER": "{ kernel: { supportsSubshells: true } }"}
# VS Code draws outputs in a webview with the theme's colours as variables. Its widget manager is its own, without a
# kernel connection, and widget messages go to the kernel's shell.
_VSCODE_DARK = {
    "--vscode-editor-background": "#1f1f1f",
    "--vscode-foreground": "#cccccc",
    "--vscode-descriptionForeground": "#9d9d9d",
    "--vscode-textLink-foreground": "#4daafc",
    "--vscode-testing-iconPassed": "#73c991",
    "--vscode-errorForeground": "#f85149",
    "--vscode-editorWarning-foreground": "#cca700",
    "--vscode-font-family": "sans-serif",
    "--vscode-editor-font-family": "monospace",
}
_VSCODE = {
    "HEAD": f"<html style='{';'.join(f'{name}:{value}' for name, value in _VSCODE_DARK.items())}'>"
    "<body class='vscode-dark' style='background:var(--vscode-editor-background)'>",
    "MANAGER": "{}",
}


class BarePage:
    """A page that draws one widget.

    Args:
        browser: The browser that opens the page.
        kernel: The widget's kernel; its messages reach the page while they are taken, as `Cell.until` does.
        view: The widget.
        vscode: The page is as VS Code's webview, not as JupyterLab's.

    Attributes:
        errors: Errors in the page.
    """

    def __init__(self, browser: Browser, kernel: Kernel, view: LiveView, *, vscode: bool = False) -> None:
        self._kernel = kernel
        self._view = view
        self._over = "shell" if vscode else "subshell"
        self._body = _PAGE
        for name, value in (_VSCODE if vscode else _LAB).items():
            self._body = self._body.replace(name, value)
        # create the subshell now: a request from the page can't wait for it
        assert vscode or kernel.front_end.subshell
        self.page: Page = browser.new_page(viewport={"width": 1000, "height": 900})
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.expose_function("toKernel", self._say)
        self.page.route(f"{_URL}**", self._serve)
        self.page.goto(_URL)
        self.page.wait_for_function("() => typeof draw === 'function'")
        view.hears = self._pass_on
        state = {name: value for name, value in view.state.items() if name != "_esm"}
        self.page.evaluate("state => draw(state)", state)

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements that exist now, without waiting for any."""
        found = "selector => [...document.querySelectorAll(selector)].map((each) => each.innerText)"
        return self.page.evaluate(found, selector)

    def text(self, selector: str) -> str:
        return "\n".join(self.texts(selector))

    def press(self, cell: Cell, role: Any, name: str) -> None:
        """Click the first element of this role and name once it is enabled, taking the cell's messages meanwhile."""
        found = self.page.get_by_role(role, name=re.compile(rf"^{re.escape(name)}\b"))
        try:
            cell.until(lambda: found.count() and found.first.is_enabled(), 60, f"{role} {name}")
        except AssertionError as error:
            raise AssertionError(f"{error}\nin the page:\n{self.text('body')}\n{self.errors}") from None
        found.first.click()

    def picture(self, name: str) -> None:
        """Save a screenshot for inspection."""
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=Path(ARTEFACTS, f"bare-{name}.png"))

    def close(self) -> None:
        self._view.hears = None
        self.page.close()
        self._kernel.front_end.drop_subshell()

    def _say(self, content: dict[str, Any]) -> None:
        self._kernel.front_end.say(self._view, content, self._over)

    def _pass_on(self, data: Mapping[str, Any]) -> None:
        self.page.evaluate("data => fromKernel(data)", dict(data))

    def _serve(self, route: Route) -> None:
        if route.request.url == _URL:
            route.fulfill(content_type="text/html", body=self._body)
        elif route.request.url == f"{_URL}widget.js":
            route.fulfill(content_type="text/javascript", body=self._view.state["_esm"])
        else:
            route.fulfill(status=404)

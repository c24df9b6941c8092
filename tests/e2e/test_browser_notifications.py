"""Notifications of the end of a long run, in a real JupyterLab in Debian's Chromium.

Pictures of what was seen lie in tests/artefacts afterwards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest
from browsers import OpenNotebook, has_browser
from homes import Home
from jupyter_servers import JupyterServer, new_notebook
from playwright.sync_api import Browser, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores, and the run takes a minute
    pytest.mark.timeout(300),
]

LOAD = "%load_ext sgpu_magic"
UNTIL_GO = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)"
FAILS = f"%%distributed -n 2 --name train_digits\nprint('begun', flush=True)\n{UNTIL_GO}\nraise ValueError('bad batch')"
# the window's focus, and a desktop that records its notifications
PAGE = """
window.isFocused = true
document.hasFocus = () => window.isFocused
window.desktop = []
window.Notification = class {
    static permission = 'default'
    static async requestPermission() { return (this.permission = 'granted') }
    constructor(title, options) { window.desktop.push([title, options.body]) }
    close() {}
}
"""


@pytest.fixture(scope="module")
def lab_home() -> Iterator[Home]:
    made = Home({})
    yield made
    made.close()


def test_the_end_of_a_long_run_is_told_on_return(lab: JupyterServer, browser: Browser) -> None:
    for name in ("first", "second"):
        new_notebook(lab.home.work / f"{name}.ipynb", LOAD, FAILS)
    notebook = OpenNotebook(lab, browser, "first.ipynb")
    try:
        page = notebook.page
        page.add_init_script(PAGE)
        notebook.reload()
        notebook.kernel_ready()
        notebook.run(0)
        # the settings editor: the switch is what asks for the permission
        page.keyboard.press("Control+,")
        tab = page.locator(".lm-DockPanel-tabBar").get_by_text("Settings")
        switch = page.locator("input[type=checkbox][id$=notifyRunEnd]")

        def is_switched_on() -> bool:
            # a page that has just loaded may put the notebook in front once more
            try:
                tab.click(timeout=5_000)
                page.locator(".jp-PluginList-entry").filter(has_text="GPU environment").click(timeout=5_000)
                switch.check(timeout=5_000)
            except PlaywrightTimeout:
                return False
            return True

        eventually(is_switched_on, 60, "the settings are not shown")
        notebook.picture("notify-setting")
        page.locator("button.jp-toast-button").filter(has_text="Allow").click(timeout=20_000)
        eventually(lambda: page.evaluate("Notification.permission") == "granted", 10, "the permission is not asked for")
        saved = lab.home.path / "jupyter" / "settings" / "@sgpu-magic" / "labextension" / "panel.jupyterlab-settings"
        eventually(lambda: '"notifyRunEnd": true' in saved.read_text(), 10, "the setting is not saved")
        page.locator(".lm-DockPanel-tabBar").get_by_text("first.ipynb").click()
        notebook.start(1)
        expect(notebook.output(1)).to_contain_text("begun", timeout=60_000)
        began = time.monotonic()
        # another notebook is in front, and the window loses its focus
        page.get_by_text("second.ipynb").first.dblclick()
        expect(page.locator(".lm-DockPanel-tabBar .lm-mod-current")).to_contain_text("second.ipynb", timeout=60_000)
        page.evaluate("window.isFocused = false")
        eventually(lambda: time.monotonic() - began > 62, 90, "time stands still")
        (lab.home.work / "go").touch()
        expect(page).to_have_title(re.compile("^● "), timeout=60_000)
        text = "train_digits failed: rank "
        toast = page.locator(".jp-Notification-Toast, .Toastify__toast").filter(has_text=text)
        expect(toast).to_have_count(1, timeout=10_000)
        expect(toast).to_contain_text("ValueError: bad batch")
        notebook.picture("notified")
        (shown,) = page.evaluate("window.desktop")
        assert shown[0].startswith(text), json.dumps(shown)
        assert shown[1] == "first.ipynb"
        page.evaluate("window.isFocused = true; window.dispatchEvent(new Event('focus'))")
        expect(page).not_to_have_title(re.compile("^● "), timeout=10_000)
        toast.get_by_role("button", name="Open the run").click()
        expect(page.locator(".sgpu-run-tab .sgpu-state")).to_have_text("failed", timeout=20_000)
        assert notebook.errors == []
    finally:
        notebook.close()

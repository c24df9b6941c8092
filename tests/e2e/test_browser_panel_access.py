"""The environment panel in a real JupyterLab as axe-core reads it: contrast, names, roles, in each of its states.

Pictures of what was read lie in tests/artefacts afterwards.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe_pages import axe_problems
from browsers import OpenNotebook, has_browser
from homes import Home
from jupyter_servers import JupyterServer, new_notebook
from playwright.sync_api import Browser, expect
from waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # the packages of the front end are installed first where they are not
    pytest.mark.timeout(500),
]

LOAD = "%load_ext sgpu_magic"
OF_OURS = ["#sgpu-panel", ".sgpu-chip"]
# a session's ranks import torch, on two cores
CONNECTED_MS = 90_000


@pytest.fixture(scope="module")
def lab_home() -> Iterator[Home]:
    made = Home({"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_PRICES": "a10=2.5,h100=7", "SGPU_CPU_SLOTS": "16"})
    yield made
    made.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_any_state(
    lab: JupyterServer, lab_home: Home, browser: Browser, front_end: Path, theme: str
) -> None:
    # the second cell fails: its run is shown as such
    cells = ["%%distributed -n 1 --type cpu\n1 / 0", "%%distributed\nx = [0] * (rank + 1)"]
    new_notebook(lab.home.work / f"{theme}.ipynb", LOAD, *cells)
    # as high as the panel: axe can't check the colours of content that is scrolled out of sight
    notebook = OpenNotebook(lab, browser, f"{theme}.ipynb", size=(1366, 2400), dark=theme == "dark")
    found: dict[str, list[str]] = {}

    def read(state: str) -> None:
        notebook.picture(f"access-{theme}-{state}")
        found[state] = axe_problems(notebook, front_end, OF_OURS)

    try:
        notebook.kernel_ready()
        go_through_states(notebook, lab_home, read)
        assert not notebook.errors
    finally:
        notebook.close()
        for session in lab.get("api/sessions").body:
            lab.delete(f"api/sessions/{session['id']}")
    eventually(lambda: not lab.get("api/kernels").body, 20, "the kernels do not end")
    assert not any(found.values()), "\n\n".join(f"{state}: {text}" for state, texts in found.items() for text in texts)


def go_through_states(notebook: OpenNotebook, home: Home, read: Callable[[str], None]) -> None:
    """Bring the panel into each of its states and have each of them read."""
    page = notebook.page
    page.get_by_role("tab", name="GPU environment").click()
    shown = page.locator("#sgpu-panel")
    expect(shown).to_contain_text("This kernel has not loaded sgpu-magic.", timeout=30_000)
    read("not-loaded")

    notebook.run(0)
    notebook.run(1)
    expect(shown).to_contain_text("4 of 4 free", timeout=30_000)
    row = shown.locator(".sgpu-run-row").first
    expect(row).to_contain_text("ZeroDivisionError", timeout=20_000)
    row.get_by_role("button", name="Actions").click()
    shown.get_by_role("radio", name="A10").click()
    shown.get_by_role("radio", name="2", exact=True).click()
    button = shown.get_by_role("button", name="Apply and connect")
    expect(button).to_be_enabled(timeout=20_000)
    field = shown.get_by_role("textbox", name="Add a package")
    field.fill("no package")
    field.press("Enter")
    expect(shown.locator(".sgpu-problem")).not_to_be_empty()
    read("choosing")
    field.fill("")

    button.click()
    session = shown.get_by_role("region", name="Session")
    expect(session).to_contain_text("Connected", timeout=CONNECTED_MS)
    expect(page.locator(".sgpu-chip button")).to_contain_text("connected", timeout=20_000)
    change = shown.get_by_role("button", name="change")
    expect(change).to_be_visible(timeout=20_000)
    read("connected")
    change.click()
    shown.get_by_role("radio", name="H100").click()
    # the answer to the previous choice may still be shown
    read("asking")
    expect(button).to_be_enabled(timeout=20_000)
    read("changing")
    # devices of a type are expanded if this notebook holds some, otherwise by a click
    shown.locator(".sgpu-device-type").filter(has_text="H100").click()
    expect(shown.locator(".sgpu-device")).to_have_count(12)
    read("devices")
    notebook.run(2)
    shown.locator("h2").get_by_role("button").filter(has_text="Variables").click()
    expect(shown.get_by_title("differs between ranks")).to_be_visible(timeout=20_000)
    read("variables")
    session.get_by_role("button", name="End session").click()
    expect(session).to_contain_text("Session ended", timeout=30_000)
    read("ended")

    pid = home.pool_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    start = shown.get_by_role("button", name="Start it again")
    expect(start).to_be_visible(timeout=20_000)
    read("lost")
    # restore the pool for the next test
    start.click()
    expect(shown).to_contain_text("4 of 4 free", timeout=30_000)

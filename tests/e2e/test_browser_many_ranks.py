"""A run on 16 simulated GPUs in JupyterLab with Debian's Chromium: live view, panel and what stays below the cell.

Pictures of what was seen lie in tests/artefacts afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from browsers import OpenNotebook, has_browser
from homes import Home
from playwright.sync_api import Locator, expect
from waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores, 16 ranks as well
    pytest.mark.timeout(300),
]

RANKS = 16
LOAD = "%load_ext sgpu_magic"
WAITS = f"""\
%%distributed -n {RANKS} --type a10
import pathlib, time
held = bytes(range(256)) * 400_000
print("up", flush=True)
while not pathlib.Path("go").exists(): time.sleep(0.2)
"""
# of a card: the parts of its values that are drawn inside it, and below the first line
VISIBLE = """cards => cards.map(card => {
    const box = card.querySelector(".sgpu-use").getBoundingClientRect();
    return [...card.querySelectorAll(".sgpu-use span")]
        .filter(part => {
            const own = part.getBoundingClientRect();
            return own.top < box.bottom - 2 && own.right <= box.right + 1 && own.width > 0;
        })
        .map(part => part.textContent).join("");
})"""


@pytest.fixture(scope="module")
def lab_home() -> Iterator[Home]:
    made = Home({"SGPU_SIMULATE": f"a10:{RANKS}"})
    yield made
    made.close()


def with_memory(cards: Locator) -> bool:
    return all("GB" in text for text in cards.evaluate_all(VISIBLE))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_each_of_sixteen_devices_shows_its_memory(opened: Callable[..., OpenNotebook], dark: bool) -> None:
    theme = "dark" if dark else "light"
    notebook = opened(f"sixteen-{theme}", [WAITS], dark=dark)
    page = notebook.page
    notebook.start(1)
    cards = notebook.output(1).locator(".sgpu-card")
    expect(cards).to_have_count(RANKS, timeout=90_000)
    page.get_by_role("tab", name="GPU environment").click()
    page.locator("#sgpu-panel .sgpu-device-type").filter(has_text="A10").click()
    devices = page.locator("#sgpu-panel .sgpu-device")
    expect(devices).to_have_count(RANKS, timeout=30_000)
    expect(devices.filter(has_text="GB")).to_have_count(RANKS, timeout=30_000)
    for width, height in [(1440, 900), (1024, 768)]:
        page.set_viewport_size({"width": width, "height": height})
        cards.first.scroll_into_view_if_needed()
        notebook.picture(f"sixteen-{theme}-{width}")
        eventually(lambda: with_memory(cards), 30, lambda: str(cards.evaluate_all(VISIBLE)))
    page.get_by_role("tab", name="GPU environment").click()
    (notebook.server.home.work / "go").touch()
    expect(notebook.output(1)).to_contain_text("succeeded", timeout=60_000)
    for width, height in [(1440, 900), (1024, 768)]:
        page.set_viewport_size({"width": width, "height": height})
        notebook.picture(f"sixteen-{theme}-ended-{width}")
        eventually(lambda: with_memory(cards), 30, lambda: str(cards.evaluate_all(VISIBLE)))
    saved = str(notebook.save()["cells"][1]["outputs"])
    # the final form has a row for each rank, behind a summary
    assert len(re.findall(r"0\.\d GB", saved)) >= RANKS

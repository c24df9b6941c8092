"""The environment panel with pools of other machines, in Debian's Chromium: a real JupyterLab, real served pools.

Pictures of what was seen lie in tests/artefacts afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsers import OpenNotebook, has_browser
from homes import Home
from jupyter_servers import JupyterServer, new_notebook
from listed_pools import list_nowhere, list_pools
from playwright.sync_api import Browser, expect
from served_pools import ServedPool
from test_browser_panel import CONNECTED_MS, choose, disconnect, end_sessions, open_panel, session

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores
    pytest.mark.timeout(240),
]

LOAD = "%load_ext sgpu_magic"


@pytest.fixture(scope="module")
def lab_home() -> Iterator[Home]:
    team = ServedPool({"SGPU_SIMULATE": "a10:2"})
    cloud = ServedPool({"SGPU_SIMULATE": "h100:4"})
    home = Home()
    try:
        list_pools(home, [("team", team, {"reserved": True}), ("cloud", cloud, {"prices": {"h100": 3.9}})])
        list_nowhere(home, "gone")
        yield home
    finally:
        home.close()
        team.close()
        cloud.close()


def test_a_pool_is_chosen_connected_to_and_one_that_is_away_says_so(lab: JupyterServer, browser: Browser):
    new_notebook(lab.home.work / "pools.ipynb", LOAD, "%%distributed\nprint('ranks', world_size)")
    notebook = OpenNotebook(lab, browser, "pools.ipynb")
    try:
        notebook.kernel_ready()
        notebook.run(0)
        shown = open_panel(notebook.page)
        pools = shown.get_by_role("region", name="Pool").get_by_role("combobox")
        expect(pools.locator("option")).to_have_text(
            [
                "team · reserved · 2 of 2 A10 free",
                "cloud · on demand · 4 of 4 H100 free · $3.90",
                "gone · on demand · can't be reached",
                "local · this machine",
            ],
            timeout=30_000,
        )
        expect(pools).to_have_value("team")
        expect(shown).to_contain_text("2 of 2 free", timeout=20_000)
        notebook.picture("panel-pools")
        pools.select_option("gone")
        expect(shown).to_contain_text("The pool gone can't be reached: nothing answers at", timeout=20_000)
        expect(shown.get_by_role("button", name="Check again")).to_be_enabled()
        shown.get_by_role("button", name="Check again").click()
        notebook.picture("panel-pool-away")
        pools.select_option("cloud")
        expect(shown).to_contain_text("4 of 4 free", timeout=20_000)
        expect(shown).to_contain_text("$3.90 / GPU h")
        choose(shown, "H100", 2)
        shown.get_by_role("region", name="Apply").get_by_role("button", name="connect").click()
        expect(session(shown)).to_contain_text("Connected", timeout=CONNECTED_MS)
        notebook.run(1)
        expect(notebook.cell(1)).to_contain_text("ranks 2", timeout=30_000)
        notebook.picture("panel-pool-connected")
        choice = notebook.save()["metadata"]["sgpu"]["choice"]
        assert (choice["gpus"], choice["type"], choice["pool"]) == (2, "h100", "cloud")
        disconnect(shown)
        pools.select_option("local")
        runs = shown.get_by_role("list", name="Runs")
        # all pools are polled every 10 s
        expect(runs.get_by_role("listitem").filter(has_text="cloud \u00b7 2 ranks").first).to_be_visible(timeout=30_000)
        expect(shown).to_contain_text("gone can't be reached now: the list has none of its newer runs.")
        for width, height in [(1440, 900), (1024, 768)]:
            notebook.page.set_viewport_size({"width": width, "height": height})
            runs.scroll_into_view_if_needed()
            notebook.picture(f"panel-runs-of-pools-{width}")
        errors = notebook.errors
    finally:
        notebook.close()
        end_sessions(lab)
    assert not errors

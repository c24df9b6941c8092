"""Jupyter servers, a served pool, and JupyterLab in a browser.

The modules of tests that open a notebook in the browser define `LOAD`, its first cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from browsers import OpenNotebook, chromium
from homes import Home
from jupyter_servers import JupyterServer, new_notebook
from playwright.sync_api import Browser
from served_pools import RemoteUser, ServedPool


@pytest.fixture(scope="module")
def server_home() -> Iterator[Home]:
    """The home of `server`; closing it checks that the server and its kernels leave nothing behind."""
    made = Home()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(server_home: Home) -> Iterator[JupyterServer]:
    made = JupyterServer(server_home)
    yield made
    made.close()


@pytest.fixture(scope="module")
def served() -> Iterator[ServedPool]:
    made = ServedPool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def ann(served: ServedPool) -> RemoteUser:
    """A user of `served`, on another machine."""
    return served.user("ann")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def lab_home() -> Iterator[Home]:
    made = Home()
    yield made
    made.close()


@pytest.fixture(scope="module")
def lab(lab_home: Home) -> Iterator[JupyterServer]:
    made = JupyterServer(lab_home, "jupyterlab")
    yield made
    made.close()


@pytest.fixture
def opened(
    request: pytest.FixtureRequest, lab: JupyterServer, browser: Browser
) -> Iterator[Callable[..., OpenNotebook]]:
    """Opens a notebook with these cells after one that loads the extension: `opened("name", [cells], dark=True)`."""
    pages: list[OpenNotebook] = []

    def make(name: str, cells: list[str], **options: object) -> OpenNotebook:
        (lab.home.work / "go").unlink(missing_ok=True)
        new_notebook(lab.home.work / f"{name}.ipynb", request.module.LOAD, *cells)
        page = OpenNotebook(lab, browser, f"{name}.ipynb", **options)
        pages.append(page)
        page.kernel_ready()
        page.run(0)
        return page

    yield make
    for page in pages:
        errors = page.errors
        page.close()
        assert not errors
    for session in lab.get("api/sessions").body:
        lab.delete(f"api/sessions/{session['id']}")

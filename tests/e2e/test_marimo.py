"""A run's live view in marimo, as the value of a cell, in Debian's Chromium."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsers import ARTEFACTS, has_browser
from free_ports import free_port
from homes import Home
from playwright.sync_api import Browser, Page, expect
from waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    pytest.mark.skipif(importlib.util.find_spec("marimo") is None, reason="needs marimo"),
    pytest.mark.timeout(180),
]

NOTEBOOK = """import marimo

app = marimo.App()


@app.cell
def _():
    import time
    from pathlib import Path

    import sgpu_magic

    return Path, sgpu_magic, time


@app.cell
def _(Path, sgpu_magic, time):
    @sgpu_magic.distributed(gpus=2, gpu_type="cpu")
    def train(name, rank):
        step = 0
        while not Path(name).exists():
            if step < 5:
                print("step", step, "of", rank, flush=True)
            step += 1
            time.sleep(0.05)
        return rank

    return (train,)


@app.cell
def _(train):
    train.distributed.submit({name!r})
    return


if __name__ == "__main__":
    app.run()
"""


@pytest.fixture
def page(home: Home, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A marimo application's page; its cells run when it opens."""
    name = request.node.name
    notebook = home.work / f"{name}.py"
    notebook.write_text(NOTEBOOK.replace("{name!r}", repr(str(home.work / name))))
    port = free_port()
    command = [sys.executable, "-m", "marimo", "run", notebook.name, "--headless", "--no-token", f"--port={port}"]
    log = home.path / f"{name}.log"
    with open(log, "wb") as out:
        server = subprocess.Popen(command, cwd=home.work, env=home.environ, stdout=out, stderr=out)
    made = browser.new_page(viewport={"width": 1024, "height": 900})
    try:

        def is_up() -> bool:
            # the address is printed before the server listens
            assert server.poll() is None, log.read_text()
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                return False
            return True

        eventually(is_up, 60, lambda: log.read_text())
        made.goto(f"http://127.0.0.1:{port}")
        yield made
    finally:
        made.close()
        server.terminate()
        server.wait(20)


def picture(page: Page, name: str) -> None:
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=Path(ARTEFACTS, f"marimo-{name}.png"))


def test_a_run_is_seen_and_its_end(page: Page, home: Home, request: pytest.FixtureRequest):
    shown = page.locator(".sgpu-run")
    expect(shown.locator(".sgpu-state")).to_have_text("running", timeout=60_000)
    expect(shown.locator(".sgpu-card")).to_have_count(2)
    expect(shown.locator(".sgpu-log")).to_contain_text("step 4 of 1", timeout=20_000)
    picture(page, "running")
    (home.work / request.node.name).touch()
    expect(shown.locator(".sgpu-state")).to_have_text("succeeded", timeout=20_000)
    picture(page, "succeeded")


def test_cancel_and_stacks(page: Page, home: Home):
    shown = page.locator(".sgpu-run")
    expect(shown.locator(".sgpu-state")).to_have_text("running", timeout=60_000)
    shown.get_by_role("button", name="Stacks").click()
    expect(shown.locator(".sgpu-stacks")).to_contain_text("are in train", timeout=20_000)
    shown.get_by_role("button", name="Cancel").click()
    expect(shown.locator(".sgpu-state")).to_have_text("cancelled", timeout=20_000)

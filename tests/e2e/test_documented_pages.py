"""The examples of the site's pages, in the order of their page and as they stand there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kernels import Home, Kernel
from page_snippets import Snippet, missing_lines, site_pages, snippets

pytestmark = pytest.mark.slow
# pages keep a key, name devices that this machine lacks, and end what they start
OWN_HOME = True
HOME_VARIABLES = {"SGPU_STAND_IN": "cpu"}
LOADS = "%load_ext sgpu_magic\n"


def runnable(page: Path) -> list[Snippet]:
    return [each for each in snippets(page) if each.language in ("python", "shell") and not each.not_run]


PAGES = [page for page in site_pages("learn", "do", "coming-from") if runnable(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_does_what_it_says(page: Path, home: Home, new_kernel: Callable[..., Kernel]):
    shutil.rmtree(home.work)
    home.work.mkdir()
    examples = runnable(page)
    # pages show the text of front ends without a live view
    kernel = new_kernel(load=not any(each.text.startswith(LOADS) for each in examples), greets=False)
    for each in examples:
        if each.file_name:
            (home.work / each.file_name).write_text(each.text)
        elif each.language == "shell":
            assert missing_lines(each, in_shell(each, home)) == [], each
        else:
            reply = kernel.run(each.text)
            assert reply.ename == each.fails, f"{each}: {reply.story}"
            # a terminal words errors differently from a front end
            missing = [] if each.fails else missing_lines(each, reply.shown)
            assert missing == [], f"{each}: {reply.story}"


def in_shell(snippet: Snippet, home: Home) -> str:
    """Return what a shell example prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", snippet.text],
        cwd=home.work, env=home.environ | {"PATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{snippet}: {done.stderr}"
    return done.stderr + done.stdout

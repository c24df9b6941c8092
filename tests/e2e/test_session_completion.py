"""Completion and `obj?` in cells of a session: an idle rank is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kernels import Kernel, eventually


@pytest.fixture
def session(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with a session of two ranks, of which each has names of its own."""
    kernel.check("s = %sgpu_connect -n 2 --name work\ns.wait(30)")
    kernel.check(
        "%%distributed\n"
        "def train_digits(epochs: int) -> None:\n"
        "    'Train for some epochs.'\n"
        "def train_only_here(): pass\n"
        "if rank == 1: train_on_rank_1 = 'one'"
    )
    kernel.check("train_in_the_notebook = 1")
    eventually(lambda: kernel.value("s.is_idle"), 5, "the session is idle")
    yield kernel
    kernel.run("%sgpu_disconnect work")
    kernel.check("del train_in_the_notebook, s")


def inspected(kernel: Kernel, code: str) -> dict[str, Any]:
    """What Shift-Tab at the end of `code` brings."""
    return kernel.client.inspect(code, len(code), reply=True, timeout=30)["content"]


def test_names_of_rank_0_come_first_and_the_notebooks_after(session: Kernel):
    found = session.complete("%%distributed\nx = 1\nprint(train_")
    assert found[:2] == ["train_digits", "train_only_here"]
    assert "train_in_the_notebook" in found[2:]
    assert "train_on_rank_1" not in found


def test_attributes_are_those_of_the_ranks_object(session: Kernel):
    assert session.complete("%%distributed\ntrain_digits.__annot")[0].endswith("__annotations__")


def test_the_lowest_of_the_ranks_that_take_part_is_asked(session: Kernel):
    assert "train_on_rank_1" in session.complete("%%rank 1\ntrain_on")
    assert "train_on_rank_1" in session.complete("%%distributed --ranks 1\ntrain_on")
    assert "train_on_rank_1" not in session.complete("%%rank 0,1\ntrain_on")


def test_plain_cells_ask_a_rank_only_in_auto_mode(session: Kernel):
    assert "train_digits" not in session.complete("train_")
    session.check("%sgpu_auto on")
    assert "train_digits" in session.complete("x = 1\ntrain_")
    assert inspected(session, "train_digits")["found"] is True
    session.check("%sgpu_auto off")
    assert "train_digits" not in session.complete("train_")


@pytest.mark.parametrize("line", ["--fresh", "--session none", "--session other", "--no-such"])
def test_cells_that_run_elsewhere_ask_no_rank(session: Kernel, line: str):
    assert "train_digits" not in session.complete(f"%%distributed {line}\ntrain_")


def test_inspection_shows_the_ranks_object(session: Kernel):
    found = inspected(session, "%%distributed\ntrain_digits")
    assert found["found"] is True
    assert "Train for some epochs." in found["data"]["text/plain"]
    assert inspected(session, "train_digits")["found"] is False
    # the notebook completes what the rank lacks
    assert inspected(session, "%%distributed\ntrain_in_the_notebook")["found"] is True


def test_a_busy_rank_keeps_nobody_waiting(session: Kernel):
    session.check(
        "import threading\n"
        "code = 'import time, os\\nwhile not os.path.exists(\"go\"): time.sleep(0.01)'\n"
        "held = threading.Thread(target=lambda: s.run(code, ui='none'))\nheld.start()"
    )
    try:
        eventually(lambda: not session.value("s.is_idle"), 5, "the session is busy")
        # a request to the rank would take longer than the kernel's reply is awaited
        session.check(
            "from sgpu_magic.magics import completion\nusual, completion.TIMEOUT_S = completion.TIMEOUT_S, 3600"
        )
        assert "train_in_the_notebook" in session.complete("%%distributed\ntrain_")
        assert not session.value("s.is_idle")
    finally:
        session.check(
            "open('go', 'w').close()\nheld.join()\nimport os; os.remove('go')\n"
            "completion.TIMEOUT_S = usual\ndel held, threading, completion, usual"
        )


@pytest.mark.slow
def test_the_kernel_has_its_own_completion_again_without_the_extension(kernel: Kernel, new_kernel):
    other = new_kernel()
    assert other.value("[name for name in ('do_complete', 'do_inspect') if name in get_ipython().kernel.__dict__]") == [
        "do_complete",
        "do_inspect",
    ]
    other.check("%unload_ext sgpu_magic")
    assert other.value("'do_complete' in get_ipython().kernel.__dict__") is False
    assert "print" in other.complete("pri")


def test_options_and_names_on_the_magics_lines(session: Kernel):
    assert "--ranks" in session.complete("%%distributed --ra")
    assert "--reload" in session.complete("%%rank 0 --re")
    assert session.complete("%%distributed --session ") == ["work", "none"]
    assert session.complete("%sgpu_disconnect w") == ["work"]
    assert session.complete("%sgpu_pull train_d") == ["train_digits"]
    assert session.complete("%sgpu_push train_") == ["train_in_the_notebook"]
    assert "--idle" in session.complete("s = %sgpu_connect --id")
    assert session.complete("%sgpu_auto o") == ["on", "off"]
    assert "work" in session.complete("%sgpu_status wo")

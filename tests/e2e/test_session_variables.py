"""`%sgpu_who`: the variables of a session's ranks, listed between cells."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from kernels import Kernel, Reply, eventually

RANKS = 4
# every special method of it leaves a file
HOSTILE = """
import pathlib
def told(name):
    def method(self, *arguments, **options):
        pathlib.Path("user-code-ran").write_text(name)
        raise RuntimeError(name)
    return method
names = ["__repr__", "__str__", "__len__", "__getattr__", "__getattribute__", "__eq__", "__bool__", "__dir__"]
Odd = type("Odd", (), {name: told(name) for name in names} | {"shape": property(told("shape"))})
odd = Odd()
"""
HELD = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"


@pytest.fixture
def session(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with a session of four ranks, connected."""
    kernel.check(f"s = %sgpu_connect -n {RANKS}\ns.wait(30)")
    yield kernel
    kernel.run("%sgpu_disconnect")
    kernel.check("globals().pop('s', None)")


def rows(reply: Reply) -> dict[str, list[list[str]]]:
    """Return the cells of each variable's rows."""
    found: dict[str, list[list[str]]] = {}
    name = ""
    for line in reply.text.splitlines():
        parts = re.split(r"\s{2,}", line.strip("≠ "))
        is_further = line.startswith(" " * 8)
        name = name if is_further else parts[0]
        found.setdefault(name, []).append(parts if is_further else parts[1:])
    return found


def test_variables_of_the_ranks_are_listed_and_differences_marked(session: Kernel):
    session.check("import torch\nscale = 3")
    session.check(
        "%%distributed\n"
        "x = torch.zeros(10 if rank < 3 else 12, 4)\n"
        "history = [1, 2, 3] * scale\n"
        "_hidden = 1\n"
        "if rank == 1: only_here = 'a'"
    )
    # at once after the cell
    reply = session.check("%sgpu_who")
    assert reply.text.splitlines()[0] == "session main · 4 ranks · 4 variables · 2 differ between ranks (≠)"
    assert rows(reply)["x"] == [
        ["Tensor", "(10, 4)", "float32", "cpu", "160 B", "0, 1, 2"],
        ["Tensor", "(12, 4)", "float32", "cpu", "192 B", "3"],
    ]
    assert rows(reply)["history"] == [["list", "len 9"]]
    assert rows(reply)["only_here"] == [["not set", "0, 2, 3"], ["str", "len 1", "1"]]
    assert rows(reply)["scale"] == [["int"]]
    assert max(map(len, reply.text.splitlines())) <= 80
    data = reply.displays[0]
    assert "<table" in data["text/html"]
    assert "(12, 4)" in data["text/html"]

    names = {*rows(session.check("%sgpu_who --rank 1,3 only* _hidden torch rank"))}
    assert {"only_here", "_hidden", "torch", "rank"} <= names
    assert "x" not in names
    reply = session.check("%sgpu_who x --rank 3")
    assert reply.text.splitlines()[0] == "session main · rank 3 of 4 · 1 variable"
    assert rows(reply)["x"] == [["Tensor", "(12, 4)", "float32", "cpu", "192 B"]]
    assert session.check("%sgpu_who nope*").text == "session main · 4 ranks · no variable matches nope*"
    assert session.complete("%sgpu_who hist") == ["history"]
    session.check("del scale, torch")


def test_no_code_of_the_users_runs(session: Kernel):
    session.check(f"%%distributed\n{HOSTILE}")
    session.check("import os\nif os.path.exists('user-code-ran'): os.remove('user-code-ran')")
    assert rows(session.check("%sgpu_who odd Odd")).keys() >= {"odd", "Odd"}
    assert session.value("os.path.exists('user-code-ran')") is False
    session.check("del os")


def test_while_a_cell_runs_it_says_so_at_once(session: Kernel):
    session.check(f"%%distributed --nowait --name long\n{HELD}")
    try:
        eventually(lambda: session.value("s.running") == ["long"], 10, "the cell runs")
        reply = session.run("%sgpu_who")
        assert reply.ename == "SessionBusy"
        assert "session main is running long, and variables can be listed between cells only." in reply.evalue
        assert session.value("s.running") == ["long"]
    finally:
        session.check("open('go', 'w').close()\nimport os")
    eventually(lambda: session.run("%sgpu_who").status == "ok", 10, "the variables are listed")
    session.check("os.remove('go')\ndel os")


def test_a_dead_rank_is_named_and_the_others_are_listed(session: Kernel):
    session.check("%%distributed\nx = 1")
    assert session.run("%%rank 1\nimport os\nos._exit(3)").ename == "WorkerDied"
    reply = session.check("%sgpu_who")
    assert "rank 1 is dead; %sgpu_restart --rank 1 replaces it" in reply.text
    assert rows(reply)["x"] == [["int"]]
    reply = session.run("%sgpu_who --rank 1")
    assert reply.ename == "SessionError"
    assert "rank 1 is dead; %sgpu_restart --rank 1 replaces it" in reply.evalue
    session.check("%sgpu_restart --rank 1")
    assert rows(session.check("%sgpu_who x"))["x"] == [["int", "0, 2, 3"], ["not set", "1"]]


def test_without_a_session_the_error_says_how_to_connect_one(kernel: Kernel):
    reply = kernel.run("%sgpu_who")
    assert reply.ename == "UsageError"
    assert "no session is connected: start one with %sgpu_connect --gpus N" in reply.evalue


def test_a_session_that_waits_has_no_variables(session: Kernel):
    session.check("other = %sgpu_connect -n 16 --type cpu --name other")
    reply = session.check("%sgpu_who --session other")
    assert reply.text.splitlines()[0] == "session other · 16 ranks · no variables yet"
    assert "the session is not connected yet: " in reply.text
    session.check("%sgpu_disconnect other\ndel other")

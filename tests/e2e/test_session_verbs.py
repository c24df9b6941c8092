"""What people know from ipyparallel, in a session: cells without waiting, values spread over the ranks, views."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Kernel
from shared_homes import SharedKernel

RANKS = 3


@pytest.fixture
def session(kernel: Kernel, module_kernel: SharedKernel) -> Iterator[Kernel]:
    """A kernel with a session `s` of three ranks, connected."""
    kernel.check(f"s = %sgpu_connect -n {RANKS}")
    kernel.check("s.wait(30)")
    yield kernel
    kernel.run("%sgpu_disconnect")
    module_kernel.forget()


def until_go(name: str) -> str:
    return f"import os, time\nwhile not os.path.exists({name!r}): time.sleep(0.01)\nos.path.exists({name!r})"


def test_a_cell_that_nobody_waits_for_and_the_next_ones(session: Kernel):
    session.check("x = 1")
    session.check(f"%%distributed --nowait --out y\n{until_go('go')}\nx = 10 + rank\ny = x\nx")
    session.check("first = _")
    assert session.value("first.done()") is False
    # sent while the first one runs; it sees the variables that the first one sets
    session.check("%%distributed --nowait\nx + 1")
    session.check("second = _\nopen('go', 'w').close()")
    assert session.value("[first.result(30), second.result(30)]") == [[10, 11, 12], [11, 12, 13]]
    assert session.value("y") == 10
    assert session.check("%%distributed\nprint(x)").lines(2) == ["12"]
    session.check("import os; os.remove('go')")


def test_a_cell_that_nobody_waits_for_is_shown_cancelled_and_fails_by_itself(session: Kernel):
    session.check("%%distributed --nowait --name waits\nimport time\ntime.sleep(600)")
    cell = session.start("run = _")
    views = session.front_end.views
    cell.until(lambda: any(view.snapshot["name"] == "waits" for view in views.values()), 10, "the run's view")
    cell.wait()
    session.check("cancelled = run.cancel()")
    assert session.value("cancelled") is True
    reply = session.run("run.result(30)")
    assert reply.ename == "CancelledError", reply.story
    session.check("%%distributed --nowait\nif rank == 1: raise ValueError('NaN')")
    reply = session.run("_.result(30)")
    assert (reply.ename, reply.evalue) == ("ValueError", "NaN"), reply.story
    assert session.check("%%distributed\nprint('on')").lines(0) == ["on"]


def test_without_a_session_too(kernel: Kernel):
    kernel.check("%%distributed -n 2 --type cpu --nowait --ui none\nrank * 2")
    assert kernel.value("_.result(30)") == [0, 2]
    reply = kernel.run("%%distributed -n 2 --nowait --detach\npass")
    assert reply.ename == "UsageError"
    assert "Leave one of them out" in reply.evalue


def test_calls_that_nobody_waits_for(session: Kernel):
    session.check("def add(a, rank): return a + rank")
    assert session.value("s.call_async(add, 5).result(30)") == [5, 6, 7]
    assert session.value("s.call_async(add, 5, ranks=[2]).result(30)") == [7]


def test_values_are_scattered_gathered_and_mapped(session: Kernel):
    session.check("import torch\ns.scatter(range(7), 'part')\ns.scatter(torch.arange(6.0), 'rows')")
    session.check("%%distributed\ndoubled = [2 * value for value in part]\nrows += rank")
    assert session.value("s.gather('doubled')") == [0, 2, 4, 6, 8, 10, 12]
    assert session.value("s.gather('rows').tolist()") == [0, 1, 3, 4, 6, 7]
    session.check("def square(x, y=0): return x * x + y")
    assert session.value("s.map(square, range(8))") == [value * value for value in range(8)]
    assert session.value("s.map(square, [1, 2], [10, 20])") == [11, 24]
    reply = session.run("s.map(lambda x: 1 // x, [1, 2, 0])")
    assert reply.ename == "ZeroDivisionError"
    # the parts differ, so a new rank does not get another rank's part
    session.check("print(s.restart(1))")
    assert session.run("s.gather('part')").ename == "NoSuchName"


def test_a_session_reads_and_sets_names_and_has_ranks(session: Kernel):
    assert session.value("len(s)") == RANKS
    session.check("s['lr'] = 0.5\ns[1]['lr'] = 0.1")
    assert session.value("s['lr']") == [0.5, 0.1, 0.5]
    assert session.value("[len(s[0:2]), s[0:2]['lr'], s[-1]['lr'], repr(s[[0, 2]])]") == [
        2,
        [0.5, 0.1],
        [0.5],
        "<ranks 0, 2 of session main>",
    ]
    assert session.value("s[1:].run('z = rank\\nz', ui='none').values") == [1, 2]
    session.check("def add(a, rank): return a + rank")
    assert session.value("[s[1:].call(add, 1), s[1:].map(add, [1, 2, 3])] if False else s[1:].call(add, 1)") == [2, 3]
    assert session.value("[s[1:].map(abs, [-1, -2, -3]), s[2].pull('lr')]") == [[1, 2, 3], 0.5]
    assert session.run("s[3]").ename == "IndexError"


def test_a_cell_runs_here_too_and_its_output_is_grouped(session: Kernel):
    reply = session.check("%%distributed --here --group\nwhere = globals().get('rank', 'here')\nprint(where, 'one')")
    assert reply.text.index("here one") < reply.text.index("[0] 0 one")
    assert session.value("[where, s['where']]") == ["here", [0, 1, 2]]
    lines = "import torch.distributed as dist\nfor step in range(3):\n    print(step)\n    dist.barrier()"
    reply = session.check(f"%%distributed --group\n{lines}")
    shown = [line for line in reply.text.splitlines() if line.startswith("[")]
    assert shown == [f"[{rank}] {step}" for rank in range(RANKS) for step in range(3)], reply.story
    reply = session.run("%%distributed --here\nprint('ranks')\n1 / 0")
    assert reply.ename == "ZeroDivisionError"
    assert "[0] ranks" not in reply.text


def test_an_error_tells_of_all_ranks(session: Kernel):
    session.run("%%distributed\nraise ValueError(f'of rank {rank}')")
    session.check(
        "try: s.run('raise ValueError(rank)', ui='none')\n"
        "except ValueError as error: told = [[f.rank, f.type_name, f.message] for f in error.failures]"
    )
    reported = session.value("told")
    assert reported
    assert all(each == [each[0], "builtins.ValueError", f"{each[0]}"] for each in reported), reported
    assert len({rank for rank, *_ in reported}) == len(reported)

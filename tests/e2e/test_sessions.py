"""Sessions: ranks that stay between cells, seen from a notebook."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator

import pytest
from kernels import Kernel, Reply, eventually
from time_limits import GRACE_S

RANKS = 4
HUNG = "import torch.distributed as dist, time\nif rank == 0: dist.barrier()\nelse: time.sleep(600)"
DEAF = """import time
print('up', flush=True)
while rank == 2:
    try: time.sleep(600)
    except KeyboardInterrupt: pass"""
SUM = """import torch, torch.distributed as dist
ones = torch.ones(1)
dist.all_reduce(ones)
print('sum', int(ones.item()))"""
TRAIN = (
    "torch.manual_seed(step)\n"
    "loss = model(torch.rand(8, 3)).square().mean()\n"
    "optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    "step += 1\n"
    "print('step', step, f'{model.module.weight.sum().item():.6f}')"
)
MAKE = (
    "import torch\n"
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "torch.manual_seed(0)\n"
    "model = DDP(torch.nn.Linear(3, 2))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "step = 0"
)


@pytest.fixture
def session(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with a session `s` of four ranks, connected."""
    kernel.check(f"s = %sgpu_connect -n {RANKS}")
    kernel.check("s.wait(30)")
    yield kernel
    kernel.run("%sgpu_disconnect")
    kernel.check("for name in ('s', 'x', 'cfg', 'model', 'step', 'got', 'loss', 'data'): globals().pop(name, None)")


def by_rank(reply: Reply, ranks: int = RANKS) -> list[list[str]]:
    assert reply.status == "ok", reply.story
    return [reply.lines(rank) for rank in range(ranks)]


# ---------------------------------------------------------------- connecting


def test_connect_returns_at_once_with_the_handle(kernel: Kernel):
    reply = kernel.check(f"s = %sgpu_connect -n {RANKS} --name work")
    assert reply.seconds < GRACE_S
    assert kernel.value("[s.name, s.ranks]") == ["work", RANKS]
    assert "connected" in kernel.check("s.wait(30)").result
    assert "work" in kernel.check("%sgpu_status").text
    kernel.check("%sgpu_disconnect work")
    assert "ended: disconnected" in kernel.check("s").result


@pytest.mark.slow
def test_the_handle_is_not_drawn_twice_below_its_cell(kernel: Kernel):
    reply = kernel.check("%sgpu_connect -n 2")
    assert reply.result == ""
    kernel.check("%sgpu_disconnect")


def test_connecting_again(session: Kernel):
    assert "nothing was changed" in session.check(f"again = %sgpu_connect -n {RANKS}").text
    assert session.value("again is s") is True
    session.check("del again")
    reply = session.run("%sgpu_connect -n 2")
    assert reply.ename == "UsageError"
    assert "%sgpu_disconnect main" in reply.evalue
    session.check("other = %sgpu_connect -n 2 --name other\nother.wait(30)")
    assert session.check("%%distributed\nprint(world_size)").lines(1) == ["2"]
    assert session.check("%%distributed --session main\nprint(world_size)").lines(3) == [str(RANKS)]
    assert "run in session main now" in session.check("%sgpu_disconnect other").text
    assert session.check("%%distributed\nprint(world_size)").lines(3) == [str(RANKS)]
    session.check("del other")


def test_disconnect_frees_the_lease(kernel: Kernel):
    for _ in range(2):
        # two of them would not fit at once
        kernel.check("s = %sgpu_connect -n 16 --type cpu --wait 0\ns.wait(60)")
        assert len(kernel.home.rank_pids()) == 16
        kernel.check("%sgpu_disconnect")
        eventually(lambda: not kernel.home.rank_pids(), 5, "the ranks are gone")
    kernel.check("%%distributed -n 16 --wait 0\npass")


def test_a_session_without_cells_ends_by_itself(kernel: Kernel):
    kernel.check("s = %sgpu_connect -n 1 --name quiet --idle 1s")
    kernel.check("s.wait(30)")
    ended = eventually(lambda: kernel.check("s").result.partition("ended: ")[2], 20, "the session's end")
    assert "nothing ran in it for 1 s (--idle)" in ended
    # an end that was not reported to the user is reported once
    reply = kernel.run("%%distributed\npass")
    assert (reply.ename, "quiet" in reply.evalue) == ("SessionError", True), reply.story
    kernel.check("%%distributed -n 1\npass")


def test_a_session_that_never_gets_its_devices_says_so(session: Kernel):
    session.check("big = %sgpu_connect -n 16 --type cpu --name big --wait 1")
    reply = session.run("big.wait(30)")
    assert reply.ename == "SessionError"
    assert "big has ended" in reply.evalue
    reply = session.run("%%distributed\n1")
    assert reply.ename == "SessionError"
    # it is reported once, and the session before it is the current one again
    assert session.check("%%distributed\nprint(world_size)").lines(0) == [str(RANKS)]
    session.check("del big")


# ---------------------------------------------------------------- state stays


def test_what_a_cell_leaves_is_there_in_the_next(session: Kernel):
    session.check("%%distributed\nimport os\nx = rank * 10\npid = os.getpid()")
    reply = session.check("%%distributed --out got:all\ngot = pid\nprint(x)")
    assert by_rank(reply) == [[str(rank * 10)] for rank in range(RANKS)]
    assert set(session.value("got")) == set(session.home.rank_pids())


def test_a_model_is_trained_over_three_cells(session: Kernel):
    session.check(f"%%distributed\n{MAKE}")
    reported = [by_rank(session.check(f"%%distributed\n{TRAIN}")) for _ in range(3)]
    for number, ranks in enumerate(reported, 1):
        assert all(lines == ranks[0] for lines in ranks)
        assert ranks[0][0].startswith(f"step {number} ")
    assert len({ranks[0][0].split()[2] for ranks in reported}) == 3


def test_subsets_of_ranks(session: Kernel):
    session.check("%%distributed\nx = rank")
    assert by_rank(session.check("%%distributed --ranks 0,2-3\nx += 100\nprint(x)")) == [["100"], [], ["102"], ["103"]]
    reply = session.check("%%rank 1\nx -= 100\nprint(x)\nx")
    assert by_rank(reply) == [[], ["-99"], [], []]
    assert "on rank 1: [-99]" in reply.result
    assert by_rank(session.check("%%distributed\nprint(x)")) == [["100"], ["-99"], ["102"], ["103"]]
    reply = session.run("%%rank 4\nx")
    assert (reply.ename, "ranks 0 to 3" in reply.evalue) == ("UsageError", True)


def test_line_numbers_are_the_editors(session: Kernel):
    number = session.run("%%rank 1\nx = 1\n\n1/0")
    assert number.ename == "ZeroDivisionError"
    assert re.search(r"Cell In\[\d+\], line 4\b", number.traceback), number.traceback
    assert "----> 4 1/0" in number.shown


def test_push_and_pull(session: Kernel):
    session.check("%%distributed\nx = rank + 1")
    assert "from rank 0" in session.check("%sgpu_pull x").text
    assert session.value("x") == 1
    session.check("%sgpu_pull x:all --ranks 1,3")
    assert session.value("x") == [2, 4]
    assert by_rank(session.check("%%distributed\nprint(x)")) == [["1"], ["2"], ["3"], ["4"]]
    session.check("x = 'pushed'\n%sgpu_push x --ranks 2")
    assert by_rank(session.check("%%rank 2\nprint(x)"))[2] == ["pushed"]
    reply = session.run("%sgpu_pull nothing_of_that_name")
    assert (reply.ename, "nothing_of_that_name" in reply.evalue) == ("NoSuchName", True)
    assert session.run("%sgpu_push nothing_of_that_name").ename == "UsageError"


def test_the_newer_value_counts(session: Kernel):
    session.check("cfg = {'lr': 1}")
    reply = session.check("%%distributed\ncfg['lr'] += rank\nprint(cfg['lr'])")
    assert "shipped cfg" in reply.text
    reply = session.check("%%distributed\nprint(cfg['lr'])")
    assert by_rank(reply) == [["1"], ["2"], ["3"], ["4"]]
    assert "shipped" not in reply.text
    session.check("cfg['lr'] = 7")
    assert by_rank(session.check("%%distributed\nprint(cfg['lr'])")) == [["7"]] * RANKS
    session.check("%%rank 1\ncfg = 'own'")
    assert by_rank(session.check("%%distributed\nprint(cfg)"))[1] == ["own"]
    session.check("cfg = {'lr': 7}")
    assert by_rank(session.check("%%distributed\nprint(cfg['lr'])")) == [["7"]] * RANKS


@pytest.mark.slow
def test_large_values_that_were_changed_in_place(session: Kernel):
    session.check(
        "import numpy as np, pandas as pd\n"
        "rows = [bytes(70_000_000)]\n"
        "big = np.zeros(20_000_000, dtype=np.float32)\n"
        "df = pd.DataFrame({'a': np.zeros(9_000_000)})"
    )
    look = "%%distributed\nprint(len(rows), rows[-1] == 'new', big.sum(), df['a'].sum())"
    assert by_rank(session.check(look)) == [["1 False 0.0 0.0"]] * RANKS
    reply = session.check(look)
    assert "shipped" not in reply.text
    session.check("rows.append('new')\nbig[1_000_003] = 7\ndf.iat[5_000_001, 0] = 3")
    assert by_rank(session.check(look)) == [["2 True 7.0 3.0"]] * RANKS
    session.check("s.keep('rows')\nrows.append('newer')\nbig[-1] = 1")
    assert by_rank(session.check(look)) == [["2 True 8.0 3.0"]] * RANKS
    session.check("s.unkeep('rows')\nrows.append('new')")
    assert by_rank(session.check(look)) == [["4 True 8.0 3.0"]] * RANKS
    session.check("del rows, big, df")


def test_a_function_defined_on_the_ranks_reads_the_notebooks_present_value(session: Kernel):
    session.check("lr = 0.1")
    session.check("%%distributed\ndef train():\n    return lr")
    session.check("lr = 0.2")
    assert by_rank(session.check("%%distributed\nprint(train())")) == [["0.2"]] * RANKS
    session.check("%%distributed\nlr = 0.3")
    assert by_rank(session.check("%%distributed\nprint(train())")) == [["0.3"]] * RANKS
    session.check("del lr")


def test_the_notebook_having_another_value_is_said_once(session: Kernel):
    session.check("step = 0")
    session.check("%%distributed\nstep += 1")
    assert "`step` keeps the ranks' value" in session.check("%%distributed\nprint(step)").text
    assert "ranks' own" not in session.check("%%distributed\nprint(step)").text


def test_the_handle_runs_code_and_functions(session: Kernel):
    session.check("def add(a, rank, *, b=0): return a + rank + b")
    assert session.value("s.call(add, 5, b=1)") == [6, 7, 8, 9]
    assert session.value("s.call(add, 5, ranks=[1, 3])") == [6, 8]
    assert session.value("s.run('x = rank * 2\\nx', ui='none').values") == [0, 2, 4, 6]
    session.check("s.push(y=5)")
    assert session.value("s.pull('x:all', 'y')") == [[0, 2, 4, 6], 5]
    assert session.value("'y' in globals()") is False
    reply = session.run("s.call(add)")
    assert (reply.ename, "add() missing" in reply.evalue) == ("TypeError", True)


def test_fresh_processes_run_beside_a_cell_of_the_session(session: Kernel):
    """Two notebooks' worth in one: a thread holds the session's ranks while a fresh cell runs on its devices."""
    session.check("%%distributed\nimport os\npid = os.getpid()")
    session.check(
        "import threading\n"
        "code = 'import time, os\\nwhile not os.path.exists(\"go\"): time.sleep(0.01)'\n"
        "held = threading.Thread(target=lambda: s.run(code, ui='none'))\nheld.start()"
    )
    try:
        reply = session.check(
            "%%distributed --fresh --out got:all\nimport os\ngot = os.getpid()\nprint('x' in globals())"
        )
        assert by_rank(reply) == [["False"]] * RANKS
        assert session.value("held.is_alive()") is True
    finally:
        session.check("open('go', 'w').close()\nheld.join()\nimport os; os.remove('go')")
    session.check("fresh = got")
    session.check("%sgpu_pull pid:all")
    assert not set(session.value("pid")) & set(session.value("fresh"))
    session.check("del pid, fresh, held, threading")


# ---------------------------------------------------------------- errors


def test_an_error_in_one_rank_keeps_everybodys_variables(session: Kernel):
    session.check(f"%%distributed\n{MAKE}")
    first = by_rank(session.check(f"%%distributed\n{TRAIN}"))
    reply = session.run(
        "%%distributed\nif rank == 1: raise ValueError('NaN')\nmodel(torch.rand(8, 3)).sum().backward()"
    )
    assert (reply.ename, reply.evalue.splitlines()[0]) == ("ValueError", "NaN")
    # the session's view always shows it; the cell's output only if reconnecting took less than half a second
    after = session.start("pass")
    (view,) = [view for view in session.front_end.views.values() if view.snapshot["name"] == "session main"][-1:]
    after.until(lambda: "reconnected: ranks were released from a collective" in view.text, 10, "the session's note")
    after.wait()
    pids = set(session.home.rank_pids())
    second = by_rank(session.check(f"%%distributed\n{TRAIN}"))
    assert all(lines == second[0] for lines in second)
    assert second[0][0].startswith("step 2 ")
    assert second != first
    assert set(session.home.rank_pids()) == pids
    assert by_rank(session.check(f"%%distributed\n{SUM}")) == [[f"sum {RANKS}"]] * RANKS


def test_a_rank_that_was_interrupted_while_it_imported_can_import_the_package(session: Kernel):
    package = session.home.work / "halfway"
    package.mkdir()
    (package / "part.py").write_text("value = 41\n")
    (package / "__init__.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from halfway.part import value\n"
        "folder = Path(__file__).parent\n"
        "(folder / 'begun').touch()\n"
        "while not (folder / 'may end').exists():\n"
        "    time.sleep(0.01)\n"
    )
    reply = session.run(
        "%%distributed\nimport time\nfrom pathlib import Path\nif rank == 1:\n    import halfway\n"
        "while not Path('halfway/begun').exists():\n    time.sleep(0.01)\nraise ValueError('meanwhile')"
    )
    assert (reply.ename, reply.evalue.splitlines()[0]) == ("ValueError", "meanwhile")
    (package / "may end").touch()
    lines = by_rank(session.check("%%distributed\nimport halfway\nprint(halfway.part.value)"))
    assert lines == [["41"]] * RANKS
    shutil.rmtree(package)


def test_out_of_memory_lets_go_of_what_it_held(session: Kernel):
    reply = session.run("%%distributed\nimport torch\nbig = torch.empty(10**15, dtype=torch.uint8)")
    assert reply.ename in ("RuntimeError", "OutOfMemoryError"), reply.story
    assert by_rank(session.check("%%distributed\nprint(torch.ones(1000).sum().item())")) == [["1000.0"]] * RANKS


def test_a_dead_rank_is_refused_and_restarted(session: Kernel):
    session.check("cfg = 5")
    session.check("%%distributed\nx = rank + cfg")
    reply = session.run("%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert "SIGKILL" in reply.evalue
    reply = session.run("%%distributed\nprint(x)")
    assert reply.ename == "SessionError"
    assert "%sgpu_restart --rank 1" in reply.evalue
    eventually(lambda: session.value("list(s.dead)") == [1], 5, "the handle knows")
    dead_ranks = "[list(run.dead_ranks) for run in s.pool.status().runs if run.run_id == s.run_id]"
    assert session.value(dead_ranks) == [[1]]
    assert by_rank(session.check("%%rank 0,2,3\nprint(x)")) == [["5"], [], ["7"], ["8"]]
    reported = session.check("%sgpu_restart --rank 1").text
    assert "Sent again: cfg" in reported
    assert session.value(dead_ranks) == [[]]
    assert re.search(r"Lost \(set by cells\): .*\bx\b", reported), reported
    assert by_rank(session.check("%%rank 1\nprint(cfg, 'x' in globals())"))[1] == ["5 False"]
    assert by_rank(session.check(f"%%distributed\n{SUM}")) == [[f"sum {RANKS}"]] * RANKS
    assert by_rank(session.check("%%rank 0\nprint(x)"))[0] == ["5"]


def test_a_restarted_rank_has_what_was_pushed_and_what_cells_set_is_named_where_it_differs(session: Kernel):
    session.check("lr = 0.1")
    session.check("%%distributed\nprint(lr)\nlr = 0.01")
    session.check("s.push(steps=7)")
    reported = session.check("%sgpu_restart --rank 1").text
    assert "Copied from another rank: steps. Lost (set by cells): lr" in reported
    reply = session.check("%%distributed\nprint(steps, lr)")
    assert by_rank(reply) == [["7 0.01"], ["7 0.1"], ["7 0.01"], ["7 0.01"]]
    assert "`lr` differs between ranks: rank 1 got the notebook's value, ranks 0, 2, 3 kept" in reply.text


def test_all_ranks_are_restarted(session: Kernel):
    session.check("%%distributed\nx = 1")
    before = set(session.home.rank_pids())
    assert "Ranks 0-3 of session main restarted." in session.check("%sgpu_restart").text
    assert by_rank(session.check("%%distributed\nprint('x' in globals())")) == [["False"]] * RANKS
    assert not before & set(session.home.rank_pids())


# ---------------------------------------------------------------- interrupts


def test_an_interrupt_keeps_the_variables(session: Kernel):
    session.check("%%distributed\nx = rank + 1")
    cell = session.start(f"%%distributed\nprint('up', flush=True)\n{HUNG}")
    for rank in range(RANKS):
        cell.until_shown(f"[{rank}] up")
    pids = set(session.home.rank_pids())
    pressed = time.monotonic()
    session.interrupt()
    reply = cell.wait(10)
    assert time.monotonic() - pressed < GRACE_S
    assert reply.ename == "RunCancelled"
    assert by_rank(session.check("%%distributed\nprint(x)")) == [["1"], ["2"], ["3"], ["4"]]
    assert by_rank(session.check(f"%%distributed\n{SUM}")) == [[f"sum {RANKS}"]] * RANKS
    assert set(session.home.rank_pids()) == pids


def test_cells_queued_behind_an_interrupted_one_do_not_run(session: Kernel):
    cell = session.start("%%distributed\nprint('up', flush=True)\nwhile True: pass")
    queued = session.start("ran = True")
    cell.until_shown("[0] up")
    session.interrupt()
    assert cell.wait(10).status == "error"
    assert queued.wait(10).status == "aborted"


def test_a_second_interrupt_kills_what_does_not_stop(session: Kernel):
    session.check("%%distributed\nx = rank")
    cell = session.start(f"%%distributed\n{DEAF}")
    cell.until_shown("[2] up")
    pressed = time.monotonic()
    session.interrupt()
    time.sleep(1.1)  # the user presses again
    session.interrupt()
    reply = cell.wait(10)
    assert time.monotonic() - pressed < GRACE_S
    assert reply.ename == "RunCancelled"
    assert "Rank 2 had not stopped and was killed" in reply.evalue
    assert by_rank(session.check("%%rank 0,1,3\nprint(x)")) == [["0"], ["1"], [], ["3"]]
    session.check("%sgpu_restart --rank 2")
    assert by_rank(session.check(f"%%distributed\n{SUM}")) == [[f"sum {RANKS}"]] * RANKS


def test_two_interrupts_in_one_press_cost_nothing(session: Kernel):
    session.check("%%distributed\nx = rank")
    cell = session.start(
        "%%distributed\nimport time\ntry:\n    print('up', flush=True)\n    while True: pass\n"
        "except KeyboardInterrupt:\n    end = time.monotonic() + 0.7\n    while time.monotonic() < end: pass\n    raise"
    )
    for rank in range(RANKS):
        cell.until_shown(f"[{rank}] up")
    session.interrupt()
    time.sleep(0.1)  # a single intended press that arrives twice
    session.interrupt()
    reply = cell.wait(10)
    assert reply.ename == "RunCancelled"
    assert "killed" not in reply.evalue
    assert "came within a second of the first and was ignored" in reply.story
    assert by_rank(session.check("%%distributed\nprint(x)")) == [["0"], ["1"], ["2"], ["3"]]


def test_a_rank_that_does_not_stop_frees_the_cell_and_is_killed_by_the_next_interrupt(session: Kernel):
    cell = session.start(f"%%distributed\n{DEAF}")
    cell.until_shown("[2] up")
    pressed = time.monotonic()
    session.interrupt()
    reply = cell.wait(10)
    assert time.monotonic() - pressed < GRACE_S
    assert "Rank 2 has not stopped and still runs this cell" in reply.evalue
    waiting = session.start("%%distributed\nprint('next')")
    waiting.until_shown("rank 2 still runs")
    session.interrupt()
    reply = waiting.wait(10)
    assert reply.ename == "RunCancelled"
    assert "Rank 2 had not stopped and was killed" in reply.evalue
    session.check("%sgpu_restart --rank 2")
    assert by_rank(session.check(f"%%distributed\n{SUM}")) == [[f"sum {RANKS}"]] * RANKS


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("-n 2", "--ranks runs it on some of them"),
        ("--type h100", "--session none gives the cell its own devices"),
        ("--detach", "--detach is not possible in session main"),
        ("--retries 1", "--retries is not possible in session main"),
        ("--allow-busy", "%sgpu_connect takes it"),
        ("--session other", "You have: main"),
        ("--fresh --ranks 1", "--fresh starts new ones"),
        (f"--fresh -n {RANKS + 1}", "--gpus 5 asks for others"),
    ],
)
def test_options_that_contradict_the_session(session: Kernel, line: str, reported: str):
    reply = session.run(f"%%distributed {line}\npass")
    assert reply.ename == "UsageError"
    assert reported in reply.evalue


@pytest.mark.parametrize("cell", ["%%distributed --ranks 0\npass", "%%rank 0\npass"])
def test_ranks_without_a_session(kernel: Kernel, cell: str):
    reply = kernel.run(cell)
    assert (reply.ename, "%sgpu_connect" in reply.evalue) == ("UsageError", True)


def test_a_lease_of_its_own_beside_a_session(session: Kernel):
    assert session.check("%%distributed --session none -n 2\nprint(world_size)").lines(1) == ["2"]


def test_a_cell_that_only_its_own_session_could_let_start_is_refused(session: Kernel):
    reply = session.run("%%distributed --session none -n 13 --type cpu\n1")
    assert (reply.ename, "4 are held by session main" in reply.evalue) == ("CapacityError", True), reply.story
    assert "--wait 2h" in reply.evalue
    session.check("def f(): return 1")
    reply = session.run("import sgpu_magic; sgpu_magic.distributed(gpus=13, gpu_type='cpu')(f).distributed()")
    assert (reply.ename, 'wait="2h"' in reply.evalue) == ("CapacityError", True), reply.story
    # one that another cell can still end the session for waits
    session.check("run = sgpu_magic.distributed(gpus=13, gpu_type='cpu')(f).distributed.submit()")
    session.check("%sgpu_disconnect")
    assert session.check("run.result(60)").result == str([1] * 13)


@pytest.mark.parametrize("magic", ["connect", "disconnect", "pull", "push", "restart", "auto", "status", "attach"])
def test_every_magic_helps(kernel: Kernel, magic: str):
    assert f"usage: %sgpu_{magic}" in kernel.check(f"%sgpu_{magic} -h").streams


def test_the_rank_magic_helps_without_a_body(kernel: Kernel):
    assert "usage: %%rank" in kernel.check("%%rank -h").streams


def test_edited_modules_are_loaded_anew(session: Kernel):
    module = session.home.work / "helping.py"
    module.write_text("def value():\n    return 1\n")
    session.check("%%distributed\nimport helping\nprint(helping.value())")
    module.write_text("def value():\n    return 22\n")
    assert "helping.py" in session.check("%%distributed\nprint(helping.value())").text
    assert by_rank(session.check("%%distributed --reload\nprint(helping.value())")) == [["22"]] * RANKS
    module.unlink()


# ---------------------------------------------------------------- a session's and a kernel's life


@pytest.mark.slow
def test_unloading_the_extension_ends_its_sessions(kernel: Kernel, new_kernel):
    other = new_kernel()
    other.check("s = %sgpu_connect -n 2 --name other\ns.wait(30)")
    other.check("%unload_ext sgpu_magic")
    eventually(lambda: not other.home.rank_pids(), 5, "its ranks are gone")
    other.check("%load_ext sgpu_magic")
    assert "no session is connected" in other.run("%sgpu_disconnect").evalue


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["0", "1"])
def test_a_restart_of_the_kernel_ends_its_sessions(kernel: Kernel, new_kernel, keeps: str):
    """Also where runs go on: what a session's ranks have is worth nothing without the notebook."""
    other = new_kernel(variables={"SGPU_DETACH_ON_RESTART": keeps})
    cell = other.start("s = %sgpu_connect -n 2 --name other\ns.wait(30)")
    cell.wait()
    run = other.value("s.run_id")
    other.restart()
    eventually(lambda: not other.home.rank_pids(), 5, "its ranks are gone")
    # shown below the cell that connected
    events = other.home.run_dir(run) / "events.msgpack"
    eventually(lambda: b"the kernel was restarted" in events.read_bytes(), 5, "its last event says why")
    assert other.value("1 + 1") == 2


def test_a_session_outlives_its_pool_service(session: Kernel):
    session.check("%%distributed\nx = rank")
    pids = set(session.home.rank_pids())
    pool = session.home.pool_pid()
    assert pool is not None
    os.kill(pool, signal.SIGKILL)
    eventually(lambda: session.home.pool_pid() not in (None, pool), 15, "another pool service is there")
    assert by_rank(session.check("%%distributed\nprint(x)")) == [["0"], ["1"], ["2"], ["3"]]
    assert set(session.home.rank_pids()) == pids


@pytest.mark.slow
def test_a_session_ends_with_its_agent_and_the_next_cell_says_so(session: Kernel):
    (agent,) = session.home.agent_pids()
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: session.value("s.state").startswith("ended"), 10, "the handle knows")
    reply = session.run("%%distributed\nprint(1)")
    assert reply.ename == "SessionError"
    assert "%sgpu_connect" in reply.evalue
    assert len(reply.traceback.splitlines()) <= 3
    # reported once: the next cell runs on ranks of its own
    assert session.check("%%distributed -n 2\nprint(world_size)").lines(0) == ["2"]

"""`%%distributed`: its options, what it returns, what a rank sees. Real kernels, real gloo groups."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from kernels import Home, Kernel, eventually
from time_limits import GRACE_S

RANKS = "%%distributed -n 2 --ui none\n"

# ---------------------------------------------------------------- where the cell runs


def test_cell_runs_on_every_rank_with_the_group_ready(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 3 --out total\n"
        "import torch, torch.distributed as dist\n"
        "total = torch.tensor([rank + 1.0])\n"
        "dist.all_reduce(total)\n"
        "print('hello from', rank)"
    )
    assert [reply.lines(rank) for rank in range(3)] == [["hello from 0"], ["hello from 1"], ["hello from 2"]]
    assert kernel.value("total.tolist()") == [6.0]


def test_rank_names_and_runtime_functions_agree(kernel: Kernel):
    kernel.check(
        "%%distributed -n 2 --out seen:all --ui none\n"
        "import os, sgpu_magic.runtime as r\n"
        "seen = [rank, local_rank, world_size, str(device), r.get_global_rank(), r.get_local_rank(),\n"
        "        r.get_world_size(), str(r.get_device()), os.environ['RANK'], os.environ['WORLD_SIZE']]"
    )
    expected = [[i, i, 2, "cpu", i, i, 2, "cpu", str(i), "2"] for i in range(2)]
    assert kernel.value("seen") == expected


def test_notebook_variable_hides_the_ranks_own_and_the_view_says_so(kernel: Kernel):
    kernel.check("rank = 'mine'")
    reply = kernel.check("%%distributed -n 2\nprint(rank, world_size)")
    assert reply.lines(0) == reply.lines(1) == ["mine 2"]
    assert "`rank` hides the rank's own" in reply.text
    assert "--exclude rank" in reply.text
    reply = kernel.check("%%distributed -n 2 --exclude rank\nprint(rank)")
    assert (reply.lines(0), reply.lines(1)) == (["0"], ["1"])
    kernel.check("del rank")


def test_rank_stands_where_the_kernel_stands(kernel: Kernel):
    kernel.check("import os, sys; os.environ['FROM_NOTEBOOK'] = 'yes'; sys.path.append('/only/here')")
    kernel.check("old = os.umask(0o027)")
    kernel.check(
        "%%distributed -n 1 --out there --ui none\n"
        "import os, sys\n"
        "mask = os.umask(0); os.umask(mask)\n"
        "there = [os.getcwd(), os.environ['FROM_NOTEBOOK'], '/only/here' in sys.path, mask, sys.executable]"
    )
    here = [str(kernel.home.work), "yes", True, 0o027, sys.executable]
    assert kernel.value("there") == here
    kernel.check("os.umask(old); del os.environ['FROM_NOTEBOOK']; sys.path.remove('/only/here')")


def test_ranks_are_fresh_and_differently_seeded(kernel: Kernel):
    kernel.check("%%distributed -n 2 --ui none\nimport builtins; builtins.left_behind = 1")
    code = (
        "%%distributed -n 2 --out drawn:all --ui none\n"
        "import builtins, random, numpy\n"
        "drawn = [hasattr(builtins, 'left_behind'), random.random(), float(numpy.random.rand())]"
    )
    kernel.check(code)
    first = kernel.value("drawn")
    kernel.check(code)
    second = kernel.value("drawn")
    assert not any(left for left, _, _ in (*first, *second))
    assert len({number for _, *numbers in (*first, *second) for number in numbers}) == 8


# ---------------------------------------------------------------- options


def test_out_brings_rank_0s_value_and_all_ranks_values(kernel: Kernel):
    kernel.check("%%distributed -n 2 --out a,b:all --out c --ui none\na = rank + 10; b = rank; c = {'x': [rank]}")
    assert kernel.value("[a, b, c]") == [10, [0, 1], {"x": [0]}]


def test_out_brings_large_arrays_tensors_and_frames_back_whole(kernel: Kernel):
    kernel.check(
        "%%distributed -n 2 --out big:all,table,weights --ui none\n"
        "import numpy as np, pandas as pd, torch\n"
        "big = np.full(3_000_000, rank, dtype='float32')\n"
        "table = pd.DataFrame({'rank': [rank] * 3})\n"
        "weights = torch.arange(2_000_000)"
    )
    kernel.check("big[0][0] = 7  # what came back is the notebook's own, not a read-only view")
    got = kernel.value("[[float(x.sum()) for x in big], table.shape, int(weights.sum()), [x.nbytes for x in big]]")
    assert got == [[7.0, 3_000_000.0], [3, 1], sum(range(2_000_000)), [12_000_000] * 2]
    kernel.check("del big, table, weights")


def test_in_ships_what_the_code_does_not_show_and_exclude_leaves_it(kernel: Kernel):
    kernel.check("seen_by_eval = 41; heavy = 'notebook'")
    kernel.check("%%distributed -n 1 --in seen_by_eval --out answer --ui none\nanswer = eval('seen_by_eval + 1')")
    assert kernel.value("answer") == 42
    reply = kernel.run("%%distributed -n 1 --exclude heavy --ui none\nprint(heavy)")
    assert (reply.ename, reply.status) == ("NameError", "error")


def test_env_sets_variables_on_the_ranks_only(kernel: Kernel):
    kernel.check(
        "%%distributed -n 1 --env A=1 --env 'B=two words' --env C= --out env --ui none\n"
        "import os\nenv = [os.environ[k] for k in 'ABC']"
    )
    assert kernel.value("env") == ["1", "two words", ""]
    assert kernel.value("'B' in __import__('os').environ") is False


def test_timeout_ends_the_run(kernel: Kernel):
    reply = kernel.run("%%distributed -n 2 --timeout 400ms\nimport time\nwhile True: time.sleep(0.01)")
    assert reply.ename == "RunTimeout"
    assert "reached its 0.4 s time limit" in reply.evalue
    assert "timed out" in reply.text
    assert reply.seconds < 0.4 + GRACE_S
    kernel.check("%sgpu_status")


def test_name_is_shown_and_defaults_to_the_function(kernel: Kernel):
    assert "my run · 2 ranks on local" in kernel.check("%%distributed -n 2 --name 'my run'\npass").text
    assert "train · 2 ranks on local" in kernel.check("%%distributed -n 2\ndef train(): pass\ntrain()").text


def test_wait_0_runs_when_there_is_room(kernel: Kernel):
    assert "succeeded" in kernel.check("%%distributed -n 2 --wait 0\npass").text


def test_ranks_default_to_two_on_cpu(kernel: Kernel):
    kernel.check("result = get_ipython().run_cell_magic('distributed', '--ui none', 'world_size')")
    assert kernel.value("result.values") == [2, 2]


@pytest.mark.parametrize("written", ["cpu", "CPU", "any"])
def test_type_cpu_and_any(kernel: Kernel, written: str):
    reply = kernel.check(f"%%distributed -n 1 --type {written}\nprint(device)")
    assert reply.lines(0) == ["cpu"]
    assert "1 rank on local (cpu, gloo)" in reply.text


def test_more_ranks_than_slots_run_with_a_note(kernel: Kernel):
    slots = max(16, os.cpu_count() or 1)
    reply = kernel.check(f"%%distributed -n {slots + 2}\npass")
    assert f"note: {slots + 2} ranks share" in reply.text


def test_ui_none_shows_nothing_and_text_prints(kernel: Kernel):
    quiet = kernel.check("%%distributed -n 2 --ui none\nprint('x')")
    assert quiet.outputs == []
    text = kernel.check("%%distributed -n 2 --ui text\nprint('x')")
    assert [output.kind for output in text.outputs] == ["stream"]
    assert text.lines(0) == text.lines(1) == ["x"]
    for ui in ("auto", "widget"):
        rich = kernel.check(f"%%distributed -n 2 --ui {ui}\nprint('x')")
        assert rich.lines(0) == ["x"]
        assert "text/html" in rich.displays[0]
        assert "application/vnd.sgpu.run.v1+json" in rich.displays[-1]


@pytest.mark.parametrize("line", ["-h", "--help", "--gpus 2 -h"])
def test_help_is_printed_and_nothing_runs(kernel: Kernel, line: str):
    runs = set(kernel.home.runs)
    for body in ("", "\n", "\nprint('never')"):
        reply = kernel.check(f"%%distributed {line}{body}")
        for option in ("--gpus", "--type", "--out", "--in", "--exclude", "--env", "--timeout", "--wait", "--name"):
            assert option in reply.streams
    assert set(kernel.home.runs) == runs


def test_completion_offers_options_types_and_names(kernel: Kernel):
    kernel.check("hidden_thing = 1")
    assert kernel.complete("%%distributed --t") == ["--type", "--timeout", "--torch"]
    assert kernel.complete("%%distributed --type h1") == ["h100"]
    assert set(kernel.complete("%%distributed --ui ")) == {"auto", "widget", "text", "none"}
    assert kernel.complete("%%distributed -n 2 --out a,hid") == ["hidden_thing"]
    assert "--gpus" in kernel.complete("%%distributed ")
    assert "hidden_thing" in kernel.complete("%%distributed -n 2\nhidden_th")
    assert "hidden_thing" in kernel.complete("hidden_th")


# ---------------------------------------------------------------- the result


def test_result_object(kernel: Kernel):
    kernel.check(
        "data = list(range(10))\n"
        "result = get_ipython().run_cell_magic('distributed', '-n 2 --name named --ui none',\n"
        '    \'print("one\\\\ntwo")\\nif rank: print("three")\\nsum(data) + rank\')'
    )
    assert kernel.value("result.values") == [45, 46]
    assert kernel.value("[result[1], len(result), result.name]") == [46, 2, "named"]
    assert kernel.value("result.lines") == [2, 3]
    assert kernel.value("[open(result.logs(r)).read() for r in (0, 1)]") == ["one\ntwo\n", "one\ntwo\nthree\n"]
    assert kernel.value("list(result.shipped.names)") == ["data"]
    assert kernel.value("0 < result.running_s <= result.total_s < 30 and len(result.seconds) == 2")
    assert kernel.value("result.run_id") == kernel.home.runs[-1]
    text = kernel.value("repr(result)")
    assert "[45, 46]" in text
    assert len(text) < 200
    assert "rank" in kernel.run("result.logs(2)").evalue


def test_result_repr_is_short(kernel: Kernel):
    assert "5 on each of 2 ranks" in kernel.check(RANKS + "5").result
    assert len(kernel.check("%%distributed -n 2 --ui none\n'x' * 10_000").result) < 300
    # as in a plain cell, also with a semicolon at the end
    for body in ("x = 1", "5;"):
        assert kernel.check(RANKS + body).result == ""
        assert "2 ranks, no value" in kernel.check("_").result


def test_a_table_is_drawn_once(kernel: Kernel):
    table = "class Table:\n    def _repr_html_(self):\n        return '<table><tr><td>cell</td></tr></table>'\nTable()"
    reply = kernel.check(f"%%distributed -n 2\n{table}")
    drawn = [output for output in reply.outputs if "<table" in output.data.get("text/html", "")]
    # one for each rank, and none of the value
    assert (len(drawn), reply.result) == (2, ""), reply.story
    again = kernel.check("_").outputs
    assert [output.data["text/html"].count("<table") for output in again] == [2]
    # nothing else shows it
    (value,) = kernel.check(f"{RANKS}{table}").outputs
    assert value.kind == "result"


def test_values_are_the_last_expressions_objects(kernel: Kernel):
    kernel.check(
        "result = get_ipython().run_cell_magic('distributed', '-n 2 --ui none',"
        " 'import torch\\ntorch.full((2,), float(rank))')"
    )
    assert kernel.value("[v.tolist() for v in result.values]") == [[0.0, 0.0], [1.0, 1.0]]


def test_value_that_can_not_travel_is_named_and_the_cell_succeeds(kernel: Kernel):
    reply = kernel.check("%%distributed -n 2\nimport threading\nthreading.Lock()")
    assert "value could not be sent" in reply.text
    assert "_thread.lock" in reply.text


def test_shipped_line_tells_names_size_and_time(kernel: Kernel):
    kernel.check("import numpy as np; table = np.zeros(1_000_000); scale = 2")
    reply = kernel.check("%%distributed -n 2\nprint((table.sum() + scale))")
    assert re.search(r"shipped .*table.* \(8\.0 MB in [\d.]+ m?s\)", reply.text), reply.text
    kernel.check("del table, scale")


def test_heavy_name_is_named(kernel: Kernel):
    kernel.check("import numpy as np; table = np.zeros(15_000_000); small = 1")
    reply = kernel.check("%%distributed -n 2\nprint(table[0], small)")
    heavy = [line for line in reply.text.splitlines() if line.startswith("note:")]
    assert len(heavy) == 1, reply.text
    assert "table" in heavy[0]
    assert "120" in heavy[0]
    assert "small" not in heavy[0]
    kernel.check("del table")


# ---------------------------------------------------------------- what a cell may hold


def test_cell_magics_shell_lines_and_await(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\n"
        "%time x = 1\n"
        "found = !echo from-shell\n"
        "print(found)\n"
        "import asyncio\n"
        "await asyncio.sleep(0)\n"
        "print('awaited')\n"
        "!echo direct"
    )
    assert "['from-shell']" in reply.lines(0)
    assert "awaited" in reply.lines(0)
    assert "direct" in reply.lines(0)


def test_second_init_process_group_is_accepted(kernel: Kernel):
    kernel.check(
        "%%distributed -n 2 --out size --ui none\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "size = dist.get_world_size()"
    )
    assert kernel.value("size") == 2


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)],
)
def test_notebook_dataset_in_dataloader_workers(kernel: Kernel, method: str):
    kernel.check(
        "import torch\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return square(i)\n"
        "def square(i): return i * i"
    )
    kernel.check(
        "%%distributed -n 1 --out sums --ui none\n"
        "loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=1,\n"
        f"                                     multiprocessing_context={method!r})\n"
        "sums = [int(batch.sum()) for batch in loader]",
        90,
    )
    assert kernel.value("sums") == [14, 126]


@pytest.mark.parametrize(
    "line",
    [
        "input('name? ')",
        "breakpoint()",
        "%debug",
        "import pdb; pdb.set_trace()",
        "import sys; sys.stdin.buffer.read(1)",
        "import sys; list(sys.stdin)",
        "from prompt_toolkit import prompt; prompt('name? ')",
    ],
)
def test_what_needs_a_keyboard_fails_at_once_naming_the_remedy(kernel: Kernel, line: str):
    reply = kernel.run(f"%%distributed -n 1\n{line}")
    assert reply.status == "error"
    assert "plain cell" in reply.evalue
    assert reply.seconds < 10


def test_a_command_that_asks_for_something_is_at_its_end_at_once(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\n!read x; echo read $?; read y < /dev/tty; echo tty $?\n"
        "!printf 'without end of line'; [ -t 1 ] && echo ' on a terminal'; exit 3\n"
        "print('status', _exit_code)\ntaken = !cat\ntaken == []"
    )
    lines = reply.lines(0)
    assert lines[0] == "read 1", reply.story
    # the shell says why
    assert lines[-3:] == ["tty 1", "without end of line on a terminal", "status 3"] or lines[-3] == "tty 2", reply.story
    assert "True" in reply.text
    assert reply.seconds < 10


@pytest.mark.slow
def test_air_runs_outside_the_notebook(kernel: Kernel, home: Home):
    (home.work / "beside_air.py").write_text("def product(one, other): return one * other\n")
    kernel.check("import beside_air; factor = 3")
    # in one write, as both ranks write to one pipe, and unbuffered where the environment says so
    kernel.check("%%distributed -n 2 --ui none\nprint(f'product {beside_air.product(factor, rank + 1)}')")
    directory = home.run_dir(home.runs[-1])
    for name in ("_air.py", "cell.py", "run.json"):
        assert (directory / name).is_file()
        assert (directory / name).stat().st_mode & 0o077 == 0
    eventually(lambda: json.loads((directory / "run.json").read_text())["payload_kept"], 5, "the payload is kept")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "_air.py"],
        cwd=directory,
        env=home.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"product \d", done.stdout)) == ["product 3", "product 6"]


@pytest.mark.slow
def test_air_runs_a_script_that_makes_and_ends_its_own_group(kernel: Kernel, home: Home):
    (home.work / "own_group.py").write_text(
        "import sys, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "total = torch.tensor(1.0)\ndist.all_reduce(total)\n"
        "_ = sys.stdout.write(f'total {total.item()}\\n')\ndist.destroy_process_group()\n"
    )
    kernel.check("%%distributed -n 2 --ui none\n%run own_group.py")
    directory = home.run_dir(home.runs[-1])
    eventually(lambda: json.loads((directory / "run.json").read_text())["payload_kept"], 5, "the payload is kept")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", directory / "_air.py"],
        cwd=home.work,
        env=home.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"total \S+", done.stdout) == ["total 2.0", "total 2.0"]


def test_status_shows_slots_and_recent_runs(kernel: Kernel):
    kernel.check("%%distributed -n 2 --name remembered --ui none\npass")
    reply = kernel.check("%sgpu_status")
    assert " CPU rank" in reply.text
    assert "remembered" in reply.text
    assert "succeeded" in reply.text
    assert "<table" in reply.html


# ---------------------------------------------------------------- loading


def test_load_twice_and_unload(new_kernel):
    kernel = new_kernel()
    kernel.check("%load_ext sgpu_magic")
    kernel.check("%%distributed -n 2 --ui none\npass")
    kernel.check("%reload_ext sgpu_magic")
    assert kernel.check("%%distributed -n 2\nprint('again')").lines(1) == ["again"]
    kernel.check("%unload_ext sgpu_magic")
    assert "not found" in kernel.run("%%distributed -n 2\npass").text + kernel.run("%sgpu_status").text


@pytest.mark.slow
def test_a_cell_can_use_and_unload_what_it_loads(new_kernel):
    kernel = new_kernel(load=False)
    reply = kernel.check(
        "import sys\n%load_ext sgpu_magic\nat_first = 'sgpu_magic.client.pool' in sys.modules\n%sgpu_status"
    )
    assert " CPU rank" in reply.text
    assert kernel.value("at_first") is False
    kernel.check("%unload_ext sgpu_magic")
    assert "not found" in kernel.run("%sgpu_status").text


@pytest.mark.slow
def test_the_rest_of_the_extension_is_loaded_without_another_cell(new_kernel):
    kernel = new_kernel(load=False)
    kernel.check("%load_ext sgpu_magic")
    eventually(lambda: kernel.complete("%%distributed --t") == ["--type", "--timeout", "--torch"], 10, "no completion")


def test_an_extension_that_is_unloaded_at_once_leaves_nothing(new_kernel):
    kernel = new_kernel(load=False)
    kernel.check("import sys\n%load_ext sgpu_magic\n%unload_ext sgpu_magic")
    assert "not found" in kernel.run("%%distributed -n 2\npass").text + kernel.run("%sgpu_status").text
    assert kernel.value("'sgpu_magic.client.pool' in sys.modules") is False


def test_import_leaves_heavy_modules_alone(new_kernel):
    kernel = new_kernel(load=False)
    kernel.check("import sgpu_magic")
    heavy = ["torch", "ray", "mlflow", "pynvml"]
    assert kernel.value(f"[name for name in {heavy} if name in __import__('sys').modules]") == []
    kernel.check("%load_ext sgpu_magic")
    kernel.check("%%distributed -n 2 --ui none\npass")
    assert kernel.value(f"[name for name in {heavy} if name in __import__('sys').modules]") == []


def test_a_future_import_of_a_plain_cell_holds_on_the_ranks(new_kernel: Callable[..., Kernel]):
    kernel = new_kernel()
    kernel.check("from __future__ import annotations")
    kernel.check("%%distributed -n 1 --out told\ndef f(x: NotThere): pass\ntold = f.__annotations__")
    assert kernel.value("told") == {"x": "NotThere"}

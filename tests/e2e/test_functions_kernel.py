"""`@distributed` and `Run` in a notebook: what a reader sees below the cell, what comes back, what is raised."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernels import Kernel, eventually
from time_limits import GRACE_S

TESTS = Path(__file__).parents[1] / "support"

SETUP = """
import asyncio, functools, os, threading, time
import concurrent.futures as cf
import torch, torch.distributed as dist
import sgpu_magic
from sgpu_magic import Run, distributed
"""


@pytest.fixture(autouse=True)
def with_names(kernel: Kernel):
    if not kernel.value("'distributed' in globals()"):
        kernel.check(SETUP)


# ---------------------------------------------------------------- calls


@pytest.mark.slow
def test_the_seeds_own_example_trains_with_ddp(kernel: Kernel):
    kernel.check(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "class MyModel(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 1)\n"
        "    def forward(self, batch):\n"
        "        return self.layer(batch).square().mean()\n"
        "dataloader = [torch.full((8, 4), float(i)) for i in range(1, 4)]\n"
        "from sgpu_magic import distributed\n"
        "@distributed(num_gpus=4)\n"
        "def train(rank, world_size):\n"
        "    model = MyModel()\n"
        "    model = DDP(model)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "    for batch in dataloader:\n"
        "        loss = model(batch * (rank + 1))\n"
        "        optimizer.zero_grad()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "    print(f'rank {rank} of {world_size} done')\n"
        "    return [float(p.detach().sum()) for p in model.parameters()]"
    )
    reply = kernel.check("weights = train.distributed()")
    for rank in range(4):
        assert reply.lines(rank) == [f"rank {rank} of 4 done"], reply.story
    assert kernel.value("len(weights)") == 4
    assert kernel.value("all(w == weights[0] for w in weights)")


def test_results_come_by_rank_and_the_view_says_the_call(kernel: Kernel):
    kernel.check(
        "scale = 10\n"
        "def helper(x):\n    return x * scale\n"
        "class Config:\n    def __init__(self, n):\n        self.n = n\n"
        "@distributed(gpus=2)\n"
        "def work(cfg, rank, local_rank, world_size, device):\n"
        "    print('at', rank)\n"
        "    return Config(helper(cfg.n) + rank), (local_rank, world_size, str(device))"
    )
    reply = kernel.check("found = work.distributed(Config(4))\n[(type(c) is Config, c.n, rest) for c, rest in found]")
    assert reply.result == "[(True, 40, (0, 2, 'cpu')), (True, 41, (1, 2, 'cpu'))]"
    assert (reply.lines(0), reply.lines(1)) == (["at 0"], ["at 1"])
    text = reply.text
    assert "work(...) · 2 ranks on local" in text
    assert re.search(r"shipped work, Config, scale, helper, its arguments \(", text), text
    assert re.search(r"succeeded in .* · returned 2 values", text), text
    # internal names are not shown
    assert "__sgpu" not in text + reply.html
    assert kernel.value("[n for n in globals() if '__sgpu' in n]") == []


def test_names_of_the_notebook_do_not_hide_the_ranks_own(kernel: Kernel):
    kernel.check(
        "rank, world_size = 'mine', 'mine too'\n@distributed(gpus=2, ui='none')\n"
        "def where(rank):\n    return rank, world_size"
    )
    assert kernel.value("where.distributed()") == [[0, "mine too"], [1, "mine too"]]
    kernel.check("del rank, world_size")


def test_calling_it_calls_it_here_once(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2)\ndef here(rank, world_size):\n    print('here', rank, world_size)\n    return os.getpid()"
    )
    reply = kernel.check("pid = here(0, 1)")
    assert reply.text == "here 0 1"
    assert kernel.value("pid") == kernel.pid


def test_the_same_function_with_other_options_and_many_times(kernel: Kernel):
    kernel.check("@distributed(gpus=4, ui='none')\ndef size(world_size):\n    return world_size")
    assert kernel.value("size.distributed()") == [4, 4, 4, 4]
    assert kernel.value("size.options(gpus=2).distributed()") == [2, 2]
    assert kernel.value("[size.options(num_gpus=1).distributed() for _ in range(3)]") == [[1], [1], [1]]
    assert kernel.value("size.options(gpus=2, remote=False).distributed()") == [2, 2]
    assert kernel.value("size.options(gpus=2, remote=True, gpu_type='cpu').distributed()") == [2, 2]


def test_the_function_is_the_run_with_its_options(kernel: Kernel):
    kernel.check(
        "word = 'sa' + 'id'\n"
        "@distributed(gpus=2, env={'WORD': word}, name='tuned', timeout='1m', ui='none')\n"
        "def f(rank):\n    return os.environ['WORD'], dist.get_world_size()"
    )
    reply = kernel.check("run = f.distributed.submit()\n(run.result(), run.name)")
    assert reply.result == "([('said', 2), ('said', 2)], 'tuned')"
    assert kernel.value("'said' in (run.directory / 'run.json').read_text()") is False


def test_a_timeout_ends_it(kernel: Kernel):
    reply = kernel.run("@distributed(gpus=2, timeout=0.5)\ndef slow():\n    time.sleep(60)\nslow.distributed()")
    assert reply.ename == "RunTimeout", reply.story


@pytest.mark.slow
def test_the_run_can_be_done_again_outside_the_notebook(kernel: Kernel):
    kernel.check("@distributed(gpus=2, ui='none')\ndef again(x, rank):\n    print(f'rank {rank} has {x}')")
    reply = kernel.check(
        "run = again.distributed.submit([1, 2]); run.result()\n"
        "import subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2',\n"
        "    str(run.directory / '_air.py')], capture_output=True, text=True)\n"
        "print(done.stdout, done.stderr[-1000:] if done.returncode else '')",
        120,
    )
    assert "rank 0 has [1, 2]" in reply.text
    assert "rank 1 has [1, 2]" in reply.text


# ---------------------------------------------------------------- everything that can be called


@pytest.mark.parametrize(
    ("made", "call", "result"),
    [
        ("distributed(gpus=2)(lambda rank: rank + 1)", "", [1, 2]),
        ("distributed(gpus=2)(functools.partial(pow, 3))", "2", [9, 9]),
        ("distributed(gpus=2)(functools.partial(lambda a, b, rank: a + b + rank, b=5))", "1", [6, 7]),
        ("distributed(gpus=2)(Adder(3))", "4", [7, 8]),
        ("distributed(gpus=2)(Adder(3).add)", "4", [7, 8]),
        ("distributed(gpus=2)(Adder.static)", "4", [4, 5]),
        ("distributed(gpus=2)(wrapped)", "2", [4, 6]),
        ("distributed(gpus=2)(outer(7))", "1", [8, 9]),
        ("distributed(gpus=2)(sum)", "[1, 2]", [3, 3]),
        ("distributed(gpus=2)(coroutine)", "3", [3, 4]),
        ("distributed(gpus=2)(cached)", "2", [4, 4]),
    ],
    ids=["lambda", "partial of C", "partial", "object", "method", "static", "wraps", "closure", "C", "async", "cache"],
)  # fmt: skip
def test_anything_that_can_be_called_can_be_run(kernel: Kernel, made: str, call: str, result: list[int]):
    kernel.check(
        "class Adder:\n"
        "    def __init__(self, n):\n        self.n = n\n"
        "    def __call__(self, x, rank):\n        return self.n + x + rank\n"
        "    def add(self, x, rank):\n        return self.n + x + rank\n"
        "    @staticmethod\n"
        "    def static(x, rank):\n        return x + rank\n"
        "def doubled(f):\n"
        "    @functools.wraps(f)\n"
        "    def inner(*args, **kwargs):\n        return 2 * f(*args, **kwargs)\n"
        "    return inner\n"
        "@doubled\n"
        "def wrapped(x, rank):\n    return x + rank\n"
        "def outer(n):\n"
        "    def inner(x, rank):\n        return n + x + rank\n"
        "    return inner\n"
        "async def coroutine(x, rank):\n"
        "    await asyncio.sleep(0)\n    return x + rank\n"
        "@functools.lru_cache\n"
        "def cached(x):\n    return x * 2"
    )
    assert kernel.value(f"{made}.options(ui='none').distributed({call})") == result


def test_functions_of_modules_go_by_name_and_decorated_ones_are_plain_on_a_rank(kernel: Kernel):
    kernel.check(f"import sys; sys.path.insert(0, {str(TESTS)!r})\nimport importable_functions as lib")
    assert kernel.value("lib.decorated.distributed(2)") == [[6, 0], [6, 1]]
    assert kernel.value("lib.decorated.options(gpus=1).distributed(2)") == [[6, 0]]
    assert kernel.value("lib.twice_decorated.distributed(2)") == [2, 3]
    assert kernel.value("lib.Model(5).fit.distributed(2)") == [10, 11]
    # the module's own globals are used on the rank; none was copied
    assert kernel.value("lib.decorated.distributed.submit(2).result() == lib.decorated.distributed(2)")
    size = kernel.value("lib.decorated.distributed.submit(2)._followed.run.spec.shipped.total_bytes")
    assert size < 500
    kernel.check("sys.path.pop(0)")


def test_a_decorated_function_that_another_calls_is_the_plain_one_on_a_rank(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=4)\ndef inner(x):\n    return x * 2\n"
        "@distributed(gpus=2, ui='none')\ndef outer_one(rank):\n    return inner(rank + 1)"
    )
    assert kernel.value("outer_one.distributed()") == [2, 4]


def test_a_decorated_method_takes_its_object_along(kernel: Kernel):
    kernel.check(
        "class Trainer:\n"
        "    def __init__(self, n):\n        self.n = n\n"
        "    @distributed(gpus=2, ui='none')\n"
        "    def fit(self, x, rank):\n        return self.n * x + rank"
    )
    assert kernel.value("Trainer(3).fit.distributed(x=2)") == [6, 7]
    assert kernel.value("Trainer(3).fit(2, 0)") == 6


# ---------------------------------------------------------------- what goes wrong


def test_the_failure_shows_the_functions_own_line_and_no_frame_of_ours(kernel: Kernel):
    number = kernel.check(
        "class BatchError(Exception):\n    pass\n@distributed(gpus=2)\ndef fails(rank):\n"
        "    x = 1\n    if rank == 1:\n        raise BatchError('bad batch')\n    dist.barrier()"
    ).execution_count
    reply = kernel.run("fails.distributed()")
    assert reply.ename == "BatchError", reply.story
    assert "rank 1 of 2" in reply.traceback
    assert f"Cell In[{number}], line 7, in fails(rank)" in reply.text
    assert "----> 7         raise BatchError('bad batch')" in reply.text
    for text in (reply.traceback, reply.text, reply.html):
        assert "sgpu_magic" not in text
        assert "__sgpu" not in text


def test_the_notebook_catches_it_by_its_own_type_and_asks_it(kernel: Kernel):
    kernel.check(
        "class Odd(ValueError):\n    def __init__(self, n):\n"
        "        super().__init__(f'odd: {n}')\n        self.n = n\n    def __reduce__(self):\n"
        "        return Odd, (self.n,)\n@distributed(gpus=2, ui='none')\ndef picky(rank):\n"
        "    if rank:\n        raise Odd(rank)"
    )
    reply = kernel.check(
        "try:\n    picky.distributed()\nexcept Odd as error:\n"
        "    print(error, error.n, error.rank, len(error.run_id), 'raise Odd(rank)' in error.remote_traceback)"
    )
    assert reply.streams.strip() == "odd: 1 1 1 8 True"


def test_a_type_that_only_ranks_have_is_a_remote_error(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2, ui='none')\ndef odd():\n    class Local(Exception):\n"
        "        __reduce__ = None\n    raise Local('far away')"
    )
    reply = kernel.run("odd.distributed()")
    assert reply.ename == "RemoteError"
    assert "far away" in reply.evalue


def test_arguments_are_checked_before_anything_starts(kernel: Kernel):
    kernel.check("@distributed(gpus=2)\ndef strict(rank, lr, *, steps=1):\n    pass")
    before = len(kernel.home.runs)
    reply = kernel.run("strict.distributed(step=2)")
    assert (reply.ename, reply.text) == ("TypeError", "")
    assert "strict() got an unexpected keyword argument 'step'" in reply.traceback
    assert "launch.py" not in reply.traceback
    assert "missing 1 required positional argument: 'lr'" in kernel.run("strict.distributed()").traceback
    assert len(kernel.home.runs) == before


@pytest.mark.parametrize(
    ("call", "output"),
    [
        ("takes.distributed(threading.Lock())", "of takes can't leave this process: x is a _thread.lock. Create it"),
        ("takes.distributed({'deep': [threading.Lock()]})", "x['deep'][0] is a _thread.lock"),
        ("with open(os.devnull) as f: takes.distributed(1, 2, f)", "rest[1] is an open file (/dev/null)."),
        ("takes.distributed(1, key=(i for i in ()))", "key is a generator. Make it a list or create it inside takes."),
        ("uses.distributed()", "uses uses `held`, which can't leave the notebook: held is a _thread.lock"),
    ],
)  # fmt: skip
def test_what_cant_travel_is_named_by_its_argument(kernel: Kernel, call: str, output: str):
    kernel.check(
        "held = threading.Lock()\n@distributed(gpus=2)\ndef takes(x, *rest, key=0):\n    pass\n"
        "@distributed(gpus=2)\ndef uses():\n    return held"
    )
    reply = kernel.run(call)
    assert reply.ename == "SerializationError"
    assert output in reply.traceback, reply.traceback
    assert "__sgpu" not in reply.traceback


def test_a_result_that_cant_come_back_is_named(kernel: Kernel):
    kernel.check("@distributed(gpus=2, ui='none')\ndef returns():\n    return {'lock': threading.Lock()}")
    reply = kernel.run("returns.distributed()")
    assert reply.ename == "SerializationError", reply.story
    assert "returns" in reply.traceback
    assert "_thread.lock" in reply.traceback
    assert "__sgpu" not in reply.traceback
    assert "--out" not in reply.traceback


def test_more_ranks_than_there_are_is_an_error_of_the_pool(kernel: Kernel):
    reply = kernel.run("@distributed(gpus=2, gpu_type='h100')\ndef f():\n    pass\nf.distributed()")
    assert reply.ename in ("CapacityError", "UsageError"), reply.story
    assert "h100" in reply.traceback


# ---------------------------------------------------------------- interrupts, threads, several at once


def test_an_interrupt_cancels_it_and_the_next_call_runs(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2)\ndef hangs(rank):\n    print('up', rank, flush=True)\n"
        "    if rank:\n        dist.barrier()\n    time.sleep(60)\n"
        "@distributed(gpus=2, ui='none')\ndef fine():\n    return 1"
    )
    cell = kernel.start("hangs.distributed()", stop_on_error=False)
    cell.until_shown("up 1")
    kernel.interrupt()
    began = time.monotonic()
    reply = cell.wait(10)
    assert time.monotonic() - began < GRACE_S
    assert reply.ename == "RunCancelled", reply.story
    assert kernel.value("fine.distributed()") == [1, 1]


def test_four_at_once_from_threads(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2)\ndef threaded(i, rank):\n    print('call', i, flush=True)\n"
        "    open(f'threaded-{i}', 'w').close()\n"
        "    while not all(os.path.exists(f'threaded-{other}') for other in range(4)): time.sleep(0.01)\n"
        "    return i, rank\n"
        "results = {}\n"
        "def call(i):\n    results[i] = threaded.distributed(i)"
    )
    reply = kernel.check(
        "threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()"
    )
    assert kernel.value("results") == {str(i): [[i, 0], [i, 1]] for i in range(4)}
    for i in range(4):
        assert reply.text.count(f"[0] call {i}") == 1, reply.story


def test_a_threads_output_stays_with_the_cell_that_called(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2)\ndef late(go):\n    while not os.path.exists(go):\n"
        "        time.sleep(0.01)\n    print('here at last')\nin_thread = None"
    )
    cell = kernel.start(
        "in_thread = threading.Thread(target=late.distributed, args=(os.path.abspath('go'),)); in_thread.start()"
    )
    cell.wait()
    other = kernel.start("x = 1\nopen('go', 'w').close()\nin_thread.join()\nos.unlink('go')")
    other.wait()
    cell.until_shown("here at last", 5)
    assert "here at last" not in other.reply.text


def test_four_at_once_are_awaited(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2)\ndef awaited(i, rank):\n"
        "    open(f'awaited-{i}', 'w').close()\n"
        "    while not all(os.path.exists(f'awaited-{other}') for other in range(4)): time.sleep(0.01)\n"
        "    return 10 * i + rank"
    )
    reply = kernel.check("await asyncio.gather(*[awaited.distributed.submit(i) for i in range(4)])")
    assert reply.result == "[[0, 1], [10, 11], [20, 21], [30, 31]]"


# ---------------------------------------------------------------- the handle


def test_a_handle_is_there_at_once_and_tells_how_it_stands(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2)\ndef steps(go, rank):\n    print('step 1 of', rank, flush=True)\n"
        "    while not os.path.exists(go):\n        time.sleep(0.01)\n"
        "    print('step 2', end='')\n    return rank"
    )
    reply = kernel.check(
        "run = steps.distributed.submit(os.path.abspath('go-on'))\nprint(run.done(), repr(run).split()[2])"
    )
    assert reply.streams.strip() == "False steps:"
    # nothing is shown without a request
    assert reply.text == reply.streams.strip()
    eventually(lambda: kernel.value("run.logs(rank=1)") == "step 1 of 1\n", 10)
    eventually(lambda: kernel.value("str(run.state)") == "running", 10)
    assert kernel.value("(run.running(), run.cancelled())") == [True, False]
    assert kernel.run("run.result(timeout=0.05)").ename == "TimeoutError"
    kernel.check("open('go-on', 'w').close()")
    assert kernel.value("(run.result(timeout=10), str(run.state), run.done())") == [[0, 1], "succeeded", True]
    assert kernel.value("run.logs()") == "[0] step 1 of 0\n[0] step 2\n[1] step 1 of 1\n[1] step 2\n"
    assert kernel.run("run.logs(rank=2)").ename == "IndexError"
    kernel.check("os.unlink('go-on')")


def test_events_are_all_there_from_the_first_to_the_last(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2)\ndef two(rank):\n    print('one of', rank)\n"
        "run = two.distributed.submit()\nbodies = [type(e.body).__name__ for e in run.events()]"
    )
    bodies = kernel.value("bodies")
    assert bodies[0] == "Submitted"
    assert bodies[-1] == "RunEnded"
    assert bodies.count("OutputWritten") == 2
    # events can be requested again, even long after the end
    assert kernel.value("[type(e.body).__name__ for e in run.events()]")[: len(bodies)] == bodies
    # an iterator that is abandoned leaves nothing behind
    kernel.check("first = next(run.events()).seq")
    assert kernel.value("first") == 1


def test_a_failed_one_raises_the_ranks_exception_each_time(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2)\ndef bad(rank):\n    if rank:\n        raise KeyError('lost')\n"
        "run = bad.distributed.submit()\nerror = run.exception(timeout=20)"
    )
    assert kernel.value("(type(error).__name__, error.rank, str(run.state))") == ["KeyError", 1, "failed"]
    for _ in range(2):
        reply = kernel.run("run.result()")
        assert reply.ename == "KeyError"
        assert "raise KeyError('lost')" in reply.traceback
    reply = kernel.run("await run")
    assert reply.ename == "KeyError"


def test_a_cancelled_one_is_a_cancelled_future(kernel: Kernel):
    kernel.check("@distributed(gpus=2)\ndef waits():\n    time.sleep(60)\nrun = waits.distributed.submit()")
    eventually(lambda: kernel.value("run.running()"), 10)
    assert kernel.value("run.cancel()") is True
    kernel.check("done, rest = cf.wait([run], timeout=20)")
    assert kernel.value("(len(done), len(rest))") == [1, 0]
    assert kernel.value("(run.cancelled(), str(run.state), run.cancel())") == [True, "cancelled", False]
    assert kernel.value("type(run.exception()).__name__") == "CancelledError"
    assert kernel.run("run.result()").ename == "CancelledError"
    reply = kernel.run("await run")
    assert reply.ename == "CancelledError"
    # the event loop survives: a KeyboardInterrupt would have ended the kernel
    assert kernel.value("1 + 1") == 2


def test_cancelling_the_task_that_awaits_it_cancels_the_run(kernel: Kernel):
    kernel.check("@distributed(gpus=2)\ndef waits():\n    time.sleep(60)")
    reply = kernel.check(
        "run = waits.distributed.submit()\n"
        "try:\n    await asyncio.wait_for(run, 0.3)\nexcept TimeoutError:\n    print('time is over')"
    )
    assert "time is over" in reply.text
    eventually(lambda: kernel.value("run.cancelled()"), 10)


def test_a_cancelled_call_in_a_thread_does_not_end_the_loop(kernel: Kernel):
    kernel.check("@distributed(gpus=2, name='threaded wait', ui='none')\ndef waits():\n    time.sleep(60)")
    cell = kernel.start(
        "try:\n    await asyncio.to_thread(waits.distributed)\n"
        "except (asyncio.CancelledError, cf.CancelledError) as e:\n"
        "    print('cancelled', type(e).__name__)"
    )
    run_id = eventually(lambda: running_named(kernel, "threaded wait"), 10)
    cancel(kernel, run_id)
    reply = cell.wait(10)
    assert "cancelled CancelledError" in reply.text, reply.story


def test_several_are_waited_for_together(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=1, ui='none')\ndef quick(i):\n    if i == 2:\n        raise ValueError(i)\n    return i"
    )
    kernel.check(
        "runs = [quick.distributed.submit(i) for i in range(4)]\norder = [r for r in cf.as_completed(runs, timeout=30)]"
    )
    assert kernel.value("sorted(runs.index(r) for r in order)") == [0, 1, 2, 3]
    assert kernel.value("[None if r.exception() else r.result()[0] for r in runs]") == [0, 1, None, 3]
    kernel.check(
        "told = []\nrun = quick.distributed.submit(7)\nrun.add_done_callback(lambda r: told.append(r.result()))"
    )
    eventually(lambda: kernel.value("told") == [[7]], 10)


def test_a_handle_shows_its_run_below_the_cell(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=2)\ndef shown(rank):\n    print('line of', rank)\n"
        "run = shown.distributed.submit()\nrun.result()"
    )
    for code in ("run", "run.show()"):
        reply = kernel.check(code)
        assert reply.lines(1) == ["line of 1"], reply.story
        assert "succeeded" in reply.text


def test_a_run_is_picked_up_again_by_its_id(kernel: Kernel, neighbour: Kernel):
    kernel.check(
        "@distributed(gpus=2, ui='none')\ndef made(rank):\n    print('kept')\n"
        "    return {'rank': rank}\nrun = made.distributed.submit()\nrun.result()"
    )
    run_id = kernel.value("run.run_id")
    for one in (kernel, neighbour):
        one.check(f"from sgpu_magic import Run\nagain = Run.from_id({run_id[:7]!r})")
        assert one.value("(again.result(timeout=10), again.name, str(again.state))") == [
            [{"rank": 0}, {"rank": 1}],
            "made",
            "succeeded",
        ]
        assert one.value("again.logs(rank=0)") == "kept\n"
    assert kernel.run("Run.from_id('zz')").ename == "UsageError"
    assert kernel.run("Run.from_id('0000000')").ename == "RunUnknown"


def test_one_that_goes_on_is_picked_up_by_another_notebook_and_ends_there(kernel: Kernel, neighbour: Kernel):
    kernel.check(
        "@distributed(gpus=2, ui='none')\ndef going(go, rank):\n"
        "    while not os.path.exists(go):\n        time.sleep(0.01)\n    return rank\n"
        "run = going.distributed.submit(os.path.abspath('go'))"
    )
    neighbour.check(f"from sgpu_magic import Run\nagain = Run.from_id({kernel.value('run.run_id')!r})")
    assert neighbour.value("again.done()") is False
    kernel.check("open('go', 'w').close()")
    assert neighbour.value("again.result(timeout=10)") == [0, 1]
    assert kernel.value("run.result(timeout=10)") == [0, 1]
    kernel.check("os.unlink('go')")


def test_dropping_a_handle_does_not_cancel(kernel: Kernel):
    kernel.check(
        "import gc\n@distributed(gpus=1, name='dropped', ui='none')\ndef dropped(path):\n"
        "    time.sleep(0.3)\n    open(path, 'w').close()\n"
        "dropped.distributed.submit(os.path.abspath('done'))\n_ = None; gc.collect()"
    )
    eventually(lambda: (kernel.home.work / "done").exists(), 10)


def test_the_runs_of_a_notebook_end_with_it_unless_they_are_detached(kernel: Kernel, new_kernel):
    other = new_kernel()
    other.check(
        "import time, os\nfrom sgpu_magic import distributed\n@distributed(gpus=1)\n"
        "def runs(go):\n    while not os.path.exists(go):\n        time.sleep(0.01)\n"
        "    return 'kept'\nends = runs.options(name='ends').distributed.submit('/nowhere')\n"
        "stays = runs.distributed.submit(os.path.abspath('go'))"
    )
    eventually(lambda: other.value("ends.running() and stays.running()"), 10)
    other.check("stays.detach()")
    stays = other.value("stays.run_id")
    other.kill()
    ends = kernel.home.run_named("ends")
    eventually(lambda: kernel.home.ledger()[ends].state == "cancelled", 15)
    (kernel.home.work / "go").touch()
    assert kernel.value(f"Run.from_id({stays!r}).result(timeout=10)") == ["kept"]


def test_unloading_lets_go_of_what_is_followed_and_loading_again_goes_on(new_kernel):
    kernel = new_kernel()
    kernel.check(
        "import threading, time\nfrom sgpu_magic import distributed\n"
        "@distributed(gpus=1, ui='none')\ndef f(s):\n    time.sleep(s)\n    return s"
    )
    kernel.check("run = f.distributed.submit(60)")
    eventually(lambda: kernel.value("run.running()"), 10)
    kernel.check("%unload_ext sgpu_magic")
    assert kernel.value("(run.done(), run.cancelled())") == [True, True]
    eventually(
        lambda: kernel.value("[t.name for t in threading.enumerate() if t.name.startswith('sgpu-runs')]") == [], 5
    )
    eventually(lambda: kernel.home.ledger()[kernel.value("run.run_id")].state == "cancelled", 10)
    kernel.check("%load_ext sgpu_magic")
    assert kernel.value("f.distributed(0)") == [0]


def test_the_thread_that_follows_runs_ends_with_them(kernel: Kernel):
    kernel.check(
        "@distributed(gpus=1, ui='none')\ndef f(i):\n    return i\nruns = [f.distributed.submit(i) for i in range(5)]"
    )
    followers = "[t.name for t in threading.enumerate() if t.name == 'sgpu-runs']"
    assert len(kernel.value(followers)) <= 1
    assert kernel.value("[run.result(30) for run in runs]") == [[0], [1], [2], [3], [4]]
    eventually(lambda: kernel.value(followers) == [], 5)


def running_named(kernel: Kernel, name: str) -> str:
    run_id = kernel.home.run_named(name)
    return run_id if run_id and kernel.home.ledger()[run_id].state == "running" else ""


def cancel(kernel: Kernel, run_id: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "sgpu_magic.cli", "cancel", run_id],
        env=kernel.home.environ,
        check=True,
        capture_output=True,
    )


def test_a_result_that_takes_long_to_unpack_does_not_hold_up_others(kernel: Kernel):
    kernel.check(
        "import os, time, sgpu_magic\n"
        "def unpacked():\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "    return 'slow'\n"
        "class Slow:\n"
        "    def __reduce__(self): return unpacked, ()\n"
        "slow = sgpu_magic.distributed(gpus=1, gpu_type='cpu', ui='none')(lambda: Slow()).distributed.submit()\n"
        "quick = sgpu_magic.distributed(gpus=1, gpu_type='cpu', ui='none')(lambda: 'quick').distributed.submit()"
    )
    assert kernel.value("quick.result(20)") == ["quick"]
    assert kernel.value("slow.done()") is False
    kernel.check("open('go', 'w').close()")
    assert kernel.value("slow.result(20)") == ["slow"]


def test_a_fork_of_the_notebook_is_refused_at_once(kernel: Kernel):
    kernel.check(
        "from sgpu_magic import distributed\nimport multiprocessing, time\n"
        "@distributed(gpus=1)\ndef add(a):\n    return a + 1\n"
        "assert add.distributed(1) == [2]\n"
        "def child(pipe):\n"
        "    begin = time.monotonic()\n"
        "    try:\n"
        "        pipe.send(add.distributed(3))\n"
        "    except Exception as error:\n"
        "        pipe.send((type(error).__name__, str(error), time.monotonic() - begin))\n"
        "context = multiprocessing.get_context('fork')\n"
        "ours, theirs = context.Pipe()\n"
        "process = context.Process(target=child, args=(theirs,))\nprocess.start()\n"
        "name, text, took = ours.recv()\nprocess.join()"
    )
    assert kernel.value("name") == "PoolError"
    assert "was forked from process" in kernel.value("text")
    assert 'get_context("spawn")' in kernel.value("text")
    assert kernel.value("took") < 5
    kernel.check("assert add.distributed(2) == [3]")

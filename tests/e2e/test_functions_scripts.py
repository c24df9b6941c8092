"""`@distributed`, `Run` and `map` outside of notebooks: scripts, `python -c`, asyncio, pytest, terminals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from kernels import Home, eventually, plain

TESTS = Path(__file__).parents[1] / "support"
HEAD = "import os, sys, time\nfrom sgpu_magic import Run, connect, distributed, map\n"


def start(home: Home, code: str, *arguments: str, name: str = "train.py", **options) -> subprocess.Popen[str]:
    script = home.work / name
    script.write_text(HEAD + textwrap.dedent(code))
    return subprocess.Popen(
        [sys.executable, *arguments, str(script)],
        env=home.environ,
        cwd=home.work,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(home: Home, code: str, *arguments: str, status: int = 0) -> str:
    """Run a script to its end and return what it has printed."""
    process = start(home, code, *arguments)
    out, err = process.communicate(timeout=90)
    assert process.returncode == status, f"{process.returncode}\n{out}\n{err}"
    return plain(out + err)


def test_a_script_prints_lines_as_they_come_and_gets_results(home: Home):
    text = run(
        home,
        """
        class Config:
            def __init__(self, n):
                self.n = n

        def helper(cfg):
            return cfg.n * 2

        @distributed(gpus=2)
        def train(cfg, rank, world_size):
            print(f"rank {rank} of {world_size}")
            return Config(helper(cfg) + rank)

        if __name__ == "__main__":
            found = train.distributed(Config(4))
            print([(type(c) is Config, c.n) for c in found])
            print(train(Config(1), 0, 1).n)
        """,
    )
    lines = text.splitlines()
    assert lines[0].startswith("train(...) · 2 ranks on local (cpu, gloo) · shipped")
    assert {"[0] rank 0 of 2", "[1] rank 1 of 2"} == set(lines[1:3])
    assert "returned 2 values" in lines[3]
    assert lines[4:] == ["[(True, 8), (True, 9)]", "rank 0 of 1", "2"]


def test_a_failing_script_shows_its_own_line_and_the_ranks(home: Home):
    text = run(
        home,
        """
        @distributed(gpus=2)
        def train(rank):
            if rank == 1:
                raise ValueError("bad batch")

        train.distributed()
        """,
        status=1,
    )
    assert "ValueError: bad batch" in text
    assert 'train.py", line 9, in <module>' in text
    assert '---> 7         raise ValueError("bad batch")' in text
    assert "rank 1 of 2" in text
    # no frames of this package
    assert "/sgpu_magic/" not in text
    assert "During handling" not in text


@pytest.mark.slow
def test_it_works_from_python_c(home: Home):
    code = HEAD + "f = distributed(gpus=2, ui='none')(lambda rank: rank)\nprint(f.distributed())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=home.environ, cwd=home.work, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[0, 1]\n", "")


def test_a_module_that_is_run_is_its_own_main(home: Home):
    package = home.work / "lib"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "helpers.py").write_text("def double(x):\n    return 2 * x\n")
    (package / "job.py").write_text(
        HEAD + "from lib.helpers import double\n@distributed(gpus=2, ui='none')\ndef f(rank):\n"
        "    return double(rank), __name__\nif __name__ == '__main__':\n    print(f.distributed())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "lib.job"], env=home.environ, cwd=home.work, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[(0, '__main__'), (2, '__main__')]\n", done.stderr


@pytest.mark.slow
def test_from_pytest(home: Home):
    (home.work / "test_user.py").write_text(
        HEAD + "@distributed(gpus=2, ui='none')\ndef f(x, rank):\n    return x + rank\n"
        "def test_it():\n    assert f.distributed(1) == [1, 2]\n"
        "def test_local():\n    def inner(rank):\n        return f(1, rank)\n"
        "    assert distributed(gpus=2, ui='none')(inner).distributed() == [1, 2]\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_user.py"],
        env=home.environ,
        cwd=home.work,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_asyncio_code_awaits_several_and_survives_cancels(home: Home):
    text = run(
        home,
        """
        import asyncio

        @distributed(gpus=2)
        def work(i, rank):
            time.sleep(0.2 if i >= 0 else 60)
            if i == 3:
                raise StopIteration("odd")
            return i + rank

        async def main():
            print(await asyncio.gather(*[work.distributed.submit(i) for i in range(3)]))
            for i in (3,):
                try:
                    await work.distributed.submit(i)
                except RuntimeError as error:
                    print("as a coroutine says it:", error)
            hangs = work.distributed.submit(-1)
            try:
                async with asyncio.timeout(0.3):
                    await hangs
            except TimeoutError:
                print("time is over")
            while not hangs.done():
                await asyncio.sleep(0.01)
            print(hangs.cancelled())
            hangs = work.distributed.submit(-1)
            hangs.cancel()
            try:
                await hangs
            except asyncio.CancelledError as error:
                print("cancelled:", "Run.cancel() was called" in str(error))
            print(await asyncio.to_thread(work.options(ui="none").distributed, 5))

        asyncio.run(main())
        print("the loop has ended in order")
        """,
    )
    assert text.splitlines() == [
        "[[0, 1], [1, 2], [2, 3]]",
        "as a coroutine says it: coroutine raised StopIteration",
        "time is over",
        "True",
        "cancelled: True",
        "[5, 6]",
        "the loop has ended in order",
    ]


@pytest.mark.slow
def test_a_cancelled_call_inside_a_task_does_not_end_the_loop(home: Home):
    text = run(
        home,
        """
        import asyncio, threading
        from sgpu_magic.runs.kernel_context import kernel_context

        @distributed(gpus=1, ui="none")
        def blocks():
            time.sleep(60)

        def cancel():
            while True:
                status = kernel_context().pool.status()
                for known in status.runs:
                    if known.name == "blocks" and known.state == "running":
                        return Run.from_id(known.run_id).cancel()

        async def call():
            threading.Thread(target=cancel).start()
            return blocks.distributed()

        async def main():
            task = asyncio.create_task(call())
            done, _ = await asyncio.wait([task])
            print(task.cancelled())

        asyncio.run(main())
        """,
    )
    assert text == "True\n"


def test_a_session_from_python_keeps_state_and_lends_its_devices(home: Home):
    text = run(
        home,
        """
        import asyncio

        @distributed(gpus=4, ui="none")
        def count(rank):
            global n
            n = globals().get("n", 0) + 1
            return n, os.getpid()

        with connect(2) as session:
            bound = count.options(session=session)
            print([n for n, _ in bound.distributed()], [n for n, _ in bound.distributed()])
            print([n for n, _ in bound.distributed.submit().result()])
            inside = {pid for _, pid in bound.distributed()}
            # new processes on its devices, beside its ranks
            beside = count.options(gpus=2).distributed.submit()
            print([n for n, _ in beside.result()], beside._followed.run.spec.session == session.run_id)
            print(inside.isdisjoint(pid for _, pid in beside.result()))
            more = count.options(gpus=3).distributed.submit()
            print(len(more.result()), repr(more._followed.run.spec.session))
            try:
                bound.options(gpus=3).distributed()
            except Exception as error:
                print(type(error).__name__, "has 2 ranks on CPU" in str(error))
        """,
    )
    assert text.splitlines() == ["[1, 1] [2, 2]", "[3, 3]", "[1, 1] True", "True", "3 ''", "UsageError True"]


# ---------------------------------------------------------------- sweeps


@pytest.mark.slow
def test_a_sweep_keeps_failures_beside_results(home: Home):
    text = run(
        home,
        """
        def trial(lr, rank, world_size):
            if lr == 3:
                raise ValueError("too large")
            return lr * 10 + rank + world_size

        sweep = map(trial, range(6))
        print(repr(sweep), len(sweep), sweep[5], sweep[:2])
        print(sweep.results, sweep.pairs[0])
        failure, = sweep.failures
        print(failure.index, failure.item, repr(failure.error), failure.error.rank, failure.run.state)
        for get in (lambda: sweep[3], lambda: list(sweep)):
            try:
                get()
            except ValueError as error:
                print("raised", error)
        print(list(map(trial, [3, 4], return_exceptions=True, ui="none")))
        print(map(trial, [], ui="none").results)
        """,
    )
    lines = text.splitlines()
    assert lines[0].startswith("trial · 5 of 6 done · 1 failed · ")
    assert lines[1].startswith("item 3 · run ")
    assert lines[1].endswith(" · ValueError: too large")
    assert lines[2:] == [
        "<Sweep of 6: 5 done, 1 failed> 6 51 [1, 11]",
        "[1, 11, 21, 41, 51] (0, 1)",
        "3 3 ValueError('too large') 0 failed",
        "raised too large",
        "raised too large",
        "[ValueError('too large'), 41]",
        "[]",
    ]


def test_a_sweep_gives_results_as_they_come_from_items_without_an_end(home: Home):
    text = run(
        home,
        """
        import itertools, os

        go = os.path.abspath("go")

        def nap(i):
            while i == 0 and not os.path.exists(go):
                time.sleep(0.01)
            return i

        taken = []
        def items():
            for i in itertools.count():
                taken.append(i)
                yield i

        with map(nap, items(), in_order=False, at_once=2, ui="none") as results:
            found = [next(results) for _ in range(5)]
            open(go, "w").close()
        # the first is not waited for, and no more was taken than was needed
        print(found, len(taken) <= 7)
        """,
    )
    assert text == "[1, 2, 3, 4, 5] True\n"


def test_a_sweep_with_more_ranks_takes_rank_0s_result(home: Home):
    text = run(
        home,
        """
        def pair(x, rank, world_size):
            import torch, torch.distributed as dist
            total = torch.tensor(x + rank)
            dist.all_reduce(total)
            return rank, total.item()

        sweep = map(pair, [10, 20], gpus_per_task=2, ui="none")
        print(sweep.results, sweep.runs[1].result())
        """,
    )
    assert text == "[(0, 21), (0, 41)] [(0, 41), (1, 41)]\n"


def test_what_can_never_be_sent_ends_a_sweep_at_once_and_one_bad_item_does_not(home: Home):
    text = run(
        home,
        """
        import threading

        def f(x):
            return 1

        for function, items, options in [
            (f, [threading.Lock(), 1], {}), (lambda: 1, [1], {}), (f, [1], {"gpu_type": "h100"})
        ]:
            try:
                map(function, items, **options)
            except Exception as error:
                print(type(error).__name__)
        sweep = map(f, [1, threading.Lock(), 2], ui="none")
        print(sweep.results, [type(failed.error).__name__ for failed in sweep.failures], sweep.runs[1])
        """,
    )
    lines = [line for line in text.splitlines() if "·" not in line]
    assert lines == ["SerializationError", "TypeError", "UsageError", "[1, 1] ['SerializationError'] None"]


@pytest.mark.slow
def test_a_sweep_goes_on_when_the_pool_is_killed(home: Home):
    process = start(
        home,
        """
        def trial(i):
            open(f"at-{i}", "w").close()
            while i == 1 and not os.path.exists("go"):
                time.sleep(0.01)
            return i

        print(map(trial, range(4), at_once=1, ui="none").results)
        """,
    )
    eventually((home.work / "at-1").exists, 30)
    pool = home.pool_pid()
    assert pool is not None
    os.kill(pool, signal.SIGKILL)
    (home.work / "go").touch()
    out, err = process.communicate(timeout=60)
    assert "[0, 1, 2, 3]" in out, err
    for file in [*home.work.glob("at-*"), home.work / "go"]:
        file.unlink()


@pytest.mark.slow
def test_an_interrupt_ends_a_sweep_and_all_its_runs(home: Home):
    process = start(
        home,
        """
        def forever(i):
            open(f"up-{i}", "w").close()
            time.sleep(60 * bool(i))
            return "done"

        try:
            map(forever, range(10), at_once=2, name="swept")
        except KeyboardInterrupt as interrupted:
            print(interrupted.results, interrupted.sweep.items)
            raise
        """,
    )
    eventually(lambda: (home.work / "up-1").exists() and (home.work / "up-2").exists(), 30)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert "RunCancelled" in err
    assert "['done'] [0]" in out
    assert "of 10 done · interrupted" in out
    eventually(lambda: not home.rank_pids(), 10)
    states = [row.state for row in home.ledger().values() if row.name.startswith("swept")]
    assert states == ["succeeded", "cancelled", "cancelled"]
    for file in home.work.glob("up-*"):
        file.unlink()


def test_a_terminal_shows_the_progress_in_one_line(home: Home):
    (home.work / "tty.py").write_text(HEAD + "print(map(lambda x: time.sleep(0.2) or x, range(4), at_once=1).results)")
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "tty.py"], env=home.environ, cwd=home.work, stdout=other, stderr=other, stdin=other
    )
    os.close(other)
    data = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:
            break
        if not piece:
            break
        data += piece
    os.close(main)
    assert process.wait(30) == 0
    text = data.decode()
    assert "\r\x1b[K[######" in text
    assert "lambda · 4 of 4 done" in text
    assert text.count("\n") == 2, text
    assert text.endswith("[0, 1, 2, 3]\r\n")


# ---------------------------------------------------------------- ends


def test_what_a_script_does_not_wait_for_ends_with_it_and_says_so(home: Home):
    text = run(
        home,
        """
        @distributed(gpus=1, name="left alone")
        def f():
            time.sleep(60)

        run = f.distributed.submit()
        while not run.running():
            time.sleep(0.01)
        """,
    )
    assert "left alone" in text
    assert "result() waits for it" in text
    eventually(lambda: home.ledger()[home.run_named("left alone")].state == "cancelled", 10)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_script_that_is_killed_leaves_nothing_behind(home: Home, how: signal.Signals):
    process = start(
        home,
        """
        @distributed(gpus=2)
        def f(rank):
            open(f"rank-{rank}-up", "w").close()
            time.sleep(60)

        f.distributed()
        """,
    )
    eventually(lambda: all((home.work / f"rank-{rank}-up").exists() for rank in (0, 1)), 30)
    process.send_signal(how)
    process.communicate(timeout=10)
    eventually(lambda: not home.rank_pids(), 10)
    for rank in (0, 1):
        (home.work / f"rank-{rank}-up").unlink()


def test_ctrl_c_cancels_a_script_and_ends_it(home: Home):
    process = start(
        home,
        """
        @distributed(gpus=2, name="pressed")
        def f(rank):
            open(f"rank-{rank}-up", "w").close()
            time.sleep(60)

        f.distributed()
        """,
    )
    eventually(lambda: all((home.work / f"rank-{rank}-up").exists() for rank in (0, 1)), 30)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert "RunCancelled" in err
    assert process.returncode in (1, -signal.SIGINT)
    assert home.ledger()[home.run_named("pressed")].state == "cancelled"
    for rank in (0, 1):
        (home.work / f"rank-{rank}-up").unlink()


@pytest.mark.slow
def test_it_goes_on_with_the_next_pool_when_the_pool_is_killed(home: Home):
    process = start(
        home,
        """
        @distributed(gpus=2)
        def f(rank):
            open(f"rank-{rank}-up", "w").close()
            while not os.path.exists("go"):
                time.sleep(0.01)
            return rank

        runs = [f.distributed.submit() for _ in range(2)]
        print([run.result(timeout=60) for run in runs])
        """,
    )
    eventually(lambda: len(home.rank_pids()) == 4 and (home.work / "rank-1-up").exists(), 30)
    pool = home.pool_pid()
    assert pool is not None
    os.kill(pool, signal.SIGKILL)
    eventually(lambda: home.pool_pid() not in (None, pool), 20)
    (home.work / "go").touch()
    out, err = process.communicate(timeout=60)
    assert out == "[[0, 1], [0, 1]]\n", out + err
    for file in (*home.work.glob("rank-*-up"), home.work / "go"):
        file.unlink()

"""A rank of a session: successive cells, interrupts, failures that hold no memory, and values that are sent or not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_ports
from hostile_exceptions import HOSTILE, LOOPS
from ranks import Session, Zygote
from waiting import eventually

from sgpu_magic.wire.base import FailureKind, RunKind
from sgpu_magic.wire.rank import CellFailed, Displayed, Exit, Finished, Joined, Remarked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def session(zygote: Zygote, tmp_path: Path) -> Iterator[Session]:
    made = Session(zygote, 2, cwd=str(tmp_path))
    yield made.connect()
    made.leave()


def values(session: Session, body: str, **options: object) -> list[object]:
    return [found["value"] for found in session.run(body, **options)]


def shown(message: Displayed) -> dict[str, str]:
    return json.loads(message.bundle)


# ---------------------------------------------------------------- the helper thread


def test_a_rank_ends_with_its_helper_thread_and_says_why(session: Session):
    session.execute(
        "import time\nfrom sgpu_magic.worker.process.position import Sampler\n"
        "Sampler.sample = lambda self: 1 / 0\ntime.sleep(100)",
        only=(1,),
    )
    rank = session.ranks[1]
    with pytest.raises(AssertionError, match="rank 1 is gone"):
        rank.expect(Finished)
    eventually(lambda: "ZeroDivisionError: division by zero" in rank.printed, 5)
    assert rank.printed.count("Traceback") == 1


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collects between two bytecode instructions")
def test_no_garbage_is_collected_while_a_stack_is_looked_at(session: Session):
    body = (
        "import gc, os, time\nfrom sgpu_magic.worker.process.position import Sampler\n"
        "seen, look = [], Sampler._sample\n"
        "def noted(self):\n    seen.append(gc.isenabled())\n    return look(self)\n"
        "Sampler._sample = noted\n"
        "end = time.monotonic() + 20\n"
        "while len(seen) < 3 and time.monotonic() < end: time.sleep(0.01)\n"
        "Sampler._sample = look\n"
        "(seen[:3], gc.isenabled())"
    )
    assert values(session, body, only=(0,)) == [([False, False, False], True)]
    # as the cell set it
    assert values(session, f"import gc\ngc.disable()\n{body}", only=(0,)) == [([False, False, False], False)]


def test_a_stack_is_as_old_as_the_code_that_kept_the_rank_from_sampling(zygote: Zygote, tmp_path: Path):
    session = Session(zygote, 1, cwd=str(tmp_path)).connect()
    rank = session.ranks[0]
    session.execute("import ctypes, time\ntime.sleep(0.5)\nctypes.PyDLL(None).sleep(5)")
    eventually(lambda: 0 < rank.stack_file.sample_age_s() < 0.2, 5, "the stack is sampled")
    eventually(lambda: rank.stack_file.sample_age_s() > 0.6, 5, "the stack gets old")
    rank.kill()
    session.leave()


# ---------------------------------------------------------------- cell after cell


def test_names_stay_from_cell_to_cell(session: Session):
    session.run("total = 10 * rank")
    assert values(session, "total += 1\n(total, rank, world_size, str(device))") == [
        (1, 0, 2, "cpu"),
        (11, 1, 2, "cpu"),
    ]


def test_what_comes_along_is_set_before_the_cell_runs(session: Session):
    assert values(session, "batch + rank", names={"batch": 32}) == [32, 33]
    assert values(session, "batch") == [32, 32]


def test_large_payloads_and_results_travel_by_descriptor_and_none_stays_open(session: Session):
    def open_files(rank: int) -> int:
        return len(os.listdir(f"/proc/{session.ranks[rank].pid}/fd"))

    session.run("pass")
    before = [open_files(rank) for rank in range(2)]
    for _ in range(3):
        found = session.run("back = data + b'!'\ndel data", names={"data": b"x" * 200_000}, outputs=["back"])
        assert [len(one["names"]["back"]) for one in found] == [200_001] * 2
    eventually(lambda: [open_files(rank) for rank in range(2)] == before, 5, "descriptors stay open")


def test_only_some_ranks_take_part(session: Session):
    assert values(session, "mine = rank\nmine", only=[1]) == [1]
    assert values(session, "'mine' in globals()") == [False, True]


def test_the_lowest_of_those_that_take_part_returns_what_one_rank_returns(session: Session):
    session.run("loss = rank + 0.5")
    assert session.run("pass", outputs=["loss"], all_ranks=False)[0]["names"] == {"loss": 0.5}
    (found,) = session.run("pass", outputs=["loss"], all_ranks=False, only=[1])
    assert found["names"] == {"loss": 1.5}


def test_output_while_nobody_runs_anything_arrives(session: Session):
    session.run(
        "import threading\n"
        "go = threading.Event()\n"
        "def talk():\n"
        "    go.wait()\n"
        "    for number in range(50):\n"
        "        print('still here', number)\n"
        "threading.Thread(target=talk, daemon=True).start()"
    )
    session.run("threading.Timer(0.2, go.set).start()")
    for rank in session.ranks:
        eventually(lambda rank=rank: "still here 49\n" in rank.printed, 5, "the thread's output does not arrive")


def test_a_fresh_run_in_prepared_ranks(zygote: Zygote, tmp_path: Path):
    """A standby group on a session's devices: prepared, then one execute that is not in the session."""
    group = Session(zygote, 2, cwd=str(tmp_path))
    group.prepare(stays=False)
    for rank in group.ranks:
        rank.expect(Joined)
    group.environ["WHERE"] = "now"
    code = "import os, torch.distributed as dist\n(os.environ['WHERE'], dist.get_world_size())"
    group.execute(code, in_session=False)
    for rank in group.ranks:
        rank.expect(Joined)
    assert [group.result(rank)["value"] for rank in range(2)] == [("now", 2)] * 2
    group.leave()


def test_a_rank_that_can_not_be_prepared_says_why(zygote: Zygote, tmp_path: Path):
    session = Session(zygote, 1, cwd=str(tmp_path / "gone"))
    session.prepare()
    failed = session.failure(0)
    assert "gone" in failed.failure.message
    assert failed.failure.type_name == "builtins.FileNotFoundError"
    session.leave()


def test_the_group_that_a_cell_destroys_is_told(session: Session):
    session.execute("import torch.distributed as dist\ndist.destroy_process_group()")
    assert [rank.expect(Finished).grouped for rank in session.ranks] == [False, False]
    session.execute("1 / 0")
    assert [rank.expect(CellFailed).grouped for rank in session.ranks] == [False, False]


def test_a_rank_sleeps_until_it_is_asked(session: Session):
    """Its main thread and its helper: the helper wakes 20 times a second only while a cell runs."""
    found = session.run("import os, threading\nsorted(map(int, os.listdir('/proc/self/task')))", only=[0])
    main, helper = session.ranks[0].pid, found[0]["value"][1]
    names = {Path(f"/proc/{main}/task/{thread}/comm").read_text().strip() for thread in (main, helper)}

    def switches() -> int:
        texts = [Path(f"/proc/{main}/task/{thread}/status").read_text() for thread in (main, helper)]
        return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)

    seen = [switches()]

    def quiet() -> bool:
        seen.append(switches())
        return len(seen) > 10 and seen[-1] == seen[-10]

    eventually(quiet, 5, lambda: f"{names} wake: {seen}", poll_s=0.05)


# ---------------------------------------------------------------- the kernel's context


def test_the_rank_follows_the_kernel_and_keeps_what_it_has_changed_itself(session: Session, tmp_path: Path):
    session.environ["MODE"] = "fast"
    look = "import os, sys\n(os.getcwd(), os.environ.get('MODE'), os.environ.get('OWN'), os.environ['RANK'])"
    assert values(session, look)[1] == (str(tmp_path), "fast", None, "1")
    inner = tmp_path / "inner"
    inner.mkdir()
    session.run("os.environ['OWN'] = 'mine'\nos.environ['MODE'] = 'slow'\nos.chdir('inner')")
    # the kernel's state is unchanged: the rank's own changes stay
    assert values(session, look)[0] == (str(inner), "slow", "mine", "0")
    session.environ["RANK"] = "7"
    del session.environ["MODE"]
    session.cwd = "/"
    assert values(session, look) == [("/", None, "mine", "0"), ("/", None, "mine", "1")]


def test_the_path_follows_and_keeps_the_ranks_own_entries(session: Session):
    session.run("import sys\nsys.path.insert(0, '/own')\nsys.path.append('/last')")
    session.sys_path = ("/new", *session.sys_path)
    (found, _) = values(session, "sys.path")
    assert found == ["/own", *session.sys_path, "/last"]
    session.sys_path = session.sys_path[1:]
    (found, _) = values(session, "sys.path")
    assert found == ["/own", *session.sys_path, "/last"]


def test_the_umask_follows(session: Session):
    look = "import os\nnow = os.umask(0); _ = os.umask(now)\nnow"
    assert values(session, look) == [0o022] * 2


# ---------------------------------------------------------------- push, pull, call


def test_push_and_pull(session: Session):
    assert session.run("", kind=RunKind.PUSH, names={"lr": 0.1})[0]["names"] == {}
    session.run("lr = lr + rank")
    found = session.run("", kind=RunKind.PULL, outputs=["lr"])
    assert [one["names"]["lr"] for one in found] == [0.1, 1.1]


def test_pulling_a_name_that_is_not_there_names_the_rank_and_what_there_is(session: Session):
    session.run("model = 1\nopt = 2")
    session.execute("", kind=RunKind.PULL, outputs=["losses"])
    for rank in range(2):
        failure = session.failure(rank).failure
        assert failure.message == (
            f"rank {rank} has no `losses` for %sgpu_pull: it has model, opt. Set it in a cell that runs on this rank, "
            "or name another."
        )


def test_pulling_what_can_not_travel_names_it(session: Session):
    session.run("import threading\nlock = threading.Lock()")
    session.execute("", kind=RunKind.PULL, outputs=["lock"])
    failure = session.failure(0).failure
    assert failure.message.startswith("`lock` of %sgpu_pull can't be returned from rank 0: ")
    assert failure.kind is FailureKind.SERIALIZATION
    session.failure(1)


CALL = "__sgpu_result__ = __sgpu_call__()"


def test_a_calls_value_travels_and_leaves_nothing_behind(session: Session):
    session.run("def train():\n    return {'rank': rank}\n__sgpu_call__ = train")
    found = session.run(CALL, kind=RunKind.CALL, outputs=["__sgpu_result__"])
    assert [one["names"]["__sgpu_result__"] for one in found] == [{"rank": 0}, {"rank": 1}]
    assert [one["text"] for one in found] == ["", ""]
    assert values(session, "[name for name in globals() if name.startswith('__sgpu')]") == [[], []]
    session.run("def nothing():\n    pass\n__sgpu_call__ = nothing")
    found = session.run(CALL, kind=RunKind.CALL, outputs=["__sgpu_result__"])
    assert [one["names"] for one in found] == [{"__sgpu_result__": None}] * 2


def test_a_call_that_fails_leaves_nothing_behind(session: Session):
    session.run("import torch, weakref\nclass Call:\n    def __call__(self): raise ValueError('no')")
    session.run("call = __sgpu_call__ = Call()\nref = weakref.ref(call)\ndel call")
    session.execute(CALL, kind=RunKind.CALL, outputs=["__sgpu_result__"])
    assert [session.failure(rank).failure.message for rank in range(2)] == ["no", "no"]
    assert values(session, "ref() is None") == [True, True]


def test_what_a_function_returned_and_can_not_travel_is_told_by_its_name(session: Session):
    session.run("import threading\ndef train():\n    return [threading.Lock()]\n__sgpu_call__ = train")
    session.execute(CALL, kind=RunKind.CALL, outputs=["__sgpu_result__"])
    for rank in range(2):
        message = session.failure(rank).failure.message
        assert message.startswith(f"what train() returned on rank {rank} can't come back to the notebook: ")
        assert "--out" not in message
        assert "__sgpu" not in message


# ---------------------------------------------------------------- obj?


def test_what_is_asked_about_an_object_is_shown_once(session: Session):
    session.run('def train(epochs=3):\n    """Trains."""')
    session.run("train?")
    first, second = session.ranks
    text = shown(first.displays[0])["text/plain"]
    assert "Trains." in text
    assert "epochs=" in text
    session.run("%pinfo2 train")
    assert "Source" in shown(first.displays[1])["text/plain"]
    assert second.displays == []
    assert second.printed == ""


def test_of_those_that_take_part_the_lowest_shows_it(session: Session):
    session.run("len?", only=[1])
    assert "number of items" in shown(session.ranks[1].displays[0])["text/plain"]


def test_an_object_that_is_not_there(session: Session):
    session.run("nowhere?")
    eventually(lambda: "`nowhere` not found" in session.ranks[0].printed, 5, "it is not said")
    assert session.ranks[1].printed == ""


# ---------------------------------------------------------------- each rank by itself

TRAINS = """
import torch
from torch.nn.parallel import DistributedDataParallel
model = torch.nn.Linear(2, 1)
model = DistributedDataParallel(model) if {together} else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("together", "only", "reported"),
    [
        (False, (), 1),
        pytest.param(True, (), 0, marks=pytest.mark.slow),
        pytest.param(False, (1,), 0, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_train_without_each_other_are_told_so(
    session: Session, together: bool, only: tuple[int, ...], reported: int
):
    session.run(TRAINS.format(together=together), only=only)
    remarks = [output.text for rank in session.ranks for output, _ in rank.others if isinstance(output, Remarked)]
    assert len(remarks) == reported
    assert all("rank 0 has trained by itself" in text for text in remarks)


@pytest.mark.slow
def test_the_sentence_about_such_ranks_can_be_turned_off(session: Session):
    session.lone_training = False
    session.run(TRAINS.format(together=False))
    assert not [output for rank in session.ranks for output, _ in rank.others if isinstance(output, Remarked)]


# ---------------------------------------------------------------- interrupts


def test_an_interrupt_ends_the_cell_and_keeps_every_name(session: Session):
    session.run("import time\ndone = 0")
    session.execute("while True:\n    done += 1\n    time.sleep(0.01)")
    for rank in session.ranks:
        # the rank may not have received the cell yet
        rank.interrupt()
    for rank in range(2):
        failure = session.failure(rank).failure
        assert failure.type_name == "builtins.KeyboardInterrupt"
        assert failure.memory is not None
        assert failure.memory.used_bytes > 0
        assert failure.memory.largest == ()
    session.execute("done += 1\nprint('begun')\nwhile True:\n    time.sleep(0.01)", only=[0])
    eventually(lambda: "begun" in session.ranks[0].printed, 5, "it does not begin")
    session.ranks[0].interrupt()
    session.failure(0)
    (done,) = values(session, "done", only=[0])
    assert isinstance(done, int)
    assert done > 0


@pytest.mark.parametrize("event", ["pre_execute", "pre_run_cell", "post_execute", "post_run_cell"])
def test_an_interrupt_within_ipythons_callbacks_ends_the_cell(session: Session, event: str):
    session.run(
        "import os, signal\n"
        "def once(*info):\n"
        f"    get_ipython().events.unregister({event!r}, once)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "def later(info):\n"
        "    get_ipython().events.unregister('post_run_cell', later)\n"
        f"    get_ipython().events.register({event!r}, once)\n"
        "get_ipython().events.register('post_run_cell', later)",
        only=[0],
    )
    session.execute("reached = True", only=[0])
    assert session.failure(0).failure.type_name == "builtins.KeyboardInterrupt"
    assert values(session, "'reached' in globals()", only=[0]) == [event.startswith("post")]


def test_interrupts_of_an_idle_rank_do_nothing(session: Session):
    for _ in range(20):
        session.ranks[0].interrupt()
    # by the time it replies, the main thread has handled the interrupts
    session.ranks[0].ask("names")
    assert values(session, "rank") == [0, 1]


@pytest.mark.slow
def test_interrupts_at_any_moment_leave_the_rank_alive(session: Session):
    """Many arrive where a cell begins and ends: each cell finishes or is interrupted, and the next one runs."""
    import threading

    stop = threading.Event()

    def bother() -> None:
        while not stop.wait(0.0005):
            session.ranks[0].interrupt()

    thread = threading.Thread(target=bother)
    thread.start()
    try:
        for _ in range(200):
            session.execute("x = [n for n in range(2000)]", only=[0])
            answer = session.ranks[0].expect(Finished, CellFailed)
            if isinstance(answer, CellFailed):
                assert answer.failure.type_name == "builtins.KeyboardInterrupt", answer
    finally:
        stop.set()
        thread.join()
    session.ranks[0].ask("names")
    assert values(session, "rank") == [0, 1]


def test_programs_that_a_rank_starts_hear_interrupts(session: Session):
    """A rank that ignored them would pass that on to its children."""
    code = (
        "import subprocess, sys\n"
        "program = 'import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)'\n"
        "subprocess.run([sys.executable, '-c', program], capture_output=True, text=True).stdout"
    )
    assert values(session, code, only=[0]) == ["True\n"]


def test_an_interrupt_during_unpacking_is_the_cells(session: Session, tmp_path: Path):
    (tmp_path / "slow_class.py").write_text(
        "import pathlib, time\n"
        "class Slow:\n"
        "    def __setstate__(self, state):\n"
        "        pathlib.Path('begun').touch()\n"
        "        while True: time.sleep(0.01)\n"
        "    def __getstate__(self): return {'a': 1}\n"
    )
    session.sys_path = (str(tmp_path), *session.sys_path)
    sys.path.insert(0, str(tmp_path))
    try:
        from slow_class import Slow  # pyright: ignore[reportMissingImports]

        session.execute("pass", names={"slow": Slow()}, only=[0])
    finally:
        sys.path.remove(str(tmp_path))
    eventually((tmp_path / "begun").exists, 10, "it is not unpacked")
    session.ranks[0].interrupt()
    assert session.failure(0).failure.type_name == "builtins.KeyboardInterrupt"
    assert values(session, "rank") == [0, 1]


# ---------------------------------------------------------------- failures hold no memory

HOLD = """
import weakref, torch
refs = []
def train(model):
    batch = torch.ones(1000, 1000)
    refs.append(weakref.ref(batch))
    inner(batch)
def inner(x):
    y = x * 2
    refs.append(weakref.ref(y))
    BODY
"""


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('no')",
        "try:\n        1 / 0\n    except ZeroDivisionError as error:\n        raise OSError(str(y)) from error",
        "try:\n        1 / 0\n    except ZeroDivisionError:\n        raise KeyError(1)",
        "raise ExceptionGroup('many', [ValueError(1), KeyError(2)])",
        "raise KeyboardInterrupt",
        "y.sum().backward()",
        "exec('def')",
    ],
)
def test_after_a_failure_nothing_holds_the_frames(session: Session, body: str):
    session.run(HOLD.replace("BODY", body))
    session.execute("train(None)", only=[0])
    failure = session.failure(0).failure
    assert failure.traceback_text
    assert values(session, "[ref() is None for ref in refs]", only=[0]) == [[True, True]]


def test_a_value_is_found_again_under_the_notebooks_number(session: Session):
    session.run("x = object()")
    session.run("x", only=[0])
    assert values(session, "Out[2] is x is _2 is _", only=[0]) == [True]


def test_a_value_that_is_not_shown_is_held_by_nothing(session: Session):
    session.run(
        "import torch, weakref\nrefs = []\n"
        "def make():\n    made = torch.ones(9)\n    refs.append(weakref.ref(made))\n    return made"
    )
    session.run("make();", only=[0])
    assert values(session, "refs[0]() is None", only=[0]) == [True]


def test_a_traceback_is_whole_without_a_working_directory(session: Session):
    """Names of generated code, which are relative, have no absolute form then."""
    body = """
import linecache, os, tempfile
code = "def made():\\n    raise ValueError('there')\\n"
linecache.cache["<generated>"] = len(code), None, code.splitlines(keepends=True), "<generated>"
exec(compile(code, "<generated>", "exec"))
os.chdir(tempfile.mkdtemp())
os.rmdir(os.getcwd())
made()
"""
    session.execute(body, only=[0])
    assert "raise ValueError('there')" in session.failure(0).failure.traceback_text


def test_the_next_failure_is_told_with_its_own_traceback(session: Session):
    session.execute("raise ValueError('first')", only=[0])
    first = session.failure(0).failure
    session.execute("import threading\nlock = threading.Lock()", only=[0], outputs=["missing"])
    second = session.failure(0).failure
    assert "first" in first.traceback_text
    assert "first" not in second.traceback_text
    assert second.at > first.at


# ---------------------------------------------------------------- memory

ALLOCATE = """
import resource, torch
model = torch.nn.Sequential(torch.nn.Linear(1000, 2000))
view = model[0].weight[:10]
def train():
    batch = torch.ones(3000, 1000)
    hidden = [model(batch)]
    now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 100_000_000, -1))
    try:
        return torch.ones(50_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
"""


def test_out_of_memory_tells_what_held_it_and_gives_it_back(session: Session):
    session.run(ALLOCATE)
    session.execute("train()", only=[0])
    failure = session.failure(0).failure
    assert failure.out_of_memory, failure
    assert failure.memory is not None
    assert failure.memory.device == "cpu"
    assert 0 < failure.memory.used_bytes < failure.memory.total_bytes
    assert failure.memory.free_bytes > 0
    found = [(use.name.partition(", line")[0], use.shape, use.size_bytes) for use in failure.memory.largest]
    assert found[:3] == [
        ("hidden[0] (in train", (3000, 2000), 24_000_000),
        ("batch (in train", (3000, 1000), 12_000_000),
        ("model.0.weight", (2000, 1000), 8_000_000),
    ]
    assert [use.name for use in failure.memory.largest].count("view") == 0
    assert failure.memory.largest[0].name == "hidden[0] (in train, line 12)"
    assert failure.memory.largest[0].dtype == "float32"
    # the memory is available again
    limit = (
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + 100_000_000, -1))\n"
        "again = torch.ones(20_000_000)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "again.numel()"
    )
    assert values(session, limit, only=[0]) == [20_000_000]


def test_pythons_own_memory_error(session: Session):
    session.execute("held = bytearray(1)\nraise MemoryError('no room')", only=[0])
    failure = session.failure(0).failure
    assert failure.out_of_memory
    assert failure.memory is not None
    assert failure.memory.largest == ()


def test_an_error_of_the_user_s_is_not_about_memory(session: Session):
    session.execute("raise RuntimeError('no')", only=[0])
    failure = session.failure(0).failure
    assert not failure.out_of_memory
    assert failure.memory is None


# ---------------------------------------------------------------- edited modules


def edit(path: Path, text: str) -> None:
    """Write a module with a different mtime, whatever the clock's resolution is."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    if before:
        os.utime(path, ns=(before + 5_000_000, before + 5_000_000))


def remarks(session: Session, rank: int = 0) -> list[str]:
    found = [message.text for message, _ in session.ranks[rank].others if isinstance(message, Remarked)]
    session.ranks[rank].others.clear()
    return found


@pytest.fixture
def with_modules(session: Session, tmp_path: Path) -> Session:
    session.sys_path = ("", *session.sys_path)
    edit(
        tmp_path / "utils.py",
        "LR = [1]\ndef scale(x):\n    return x * 2\nclass Model:\n    def size(self):\n        return 10\n",
    )
    edit(tmp_path / "training.py", "from utils import LR, scale\ndef run():\n    return scale(3), LR\n")
    session.run("import training, utils\nfrom utils import scale, LR, Model\nmodel = Model()")
    return session


NEW_UTILS = "LR = [5]\ndef scale(x):\n    return x * 7\nclass Model:\n    def size(self):\n        return 99\n"


def test_an_edited_module_is_told_of_once_for_each_edit(with_modules: Session, tmp_path: Path):
    session = with_modules
    assert remarks(session) == []
    edit(tmp_path / "utils.py", NEW_UTILS)
    assert values(session, "scale(1)") == [2, 2]
    assert remarks(session) == ["rank 0 has an older version of utils.py, edited since: --reload reloads it."]
    session.run("pass")
    assert remarks(session) == []
    edit(tmp_path / "utils.py", NEW_UTILS + "\n")
    edit(tmp_path / "training.py", "from utils import LR, scale\ndef run():\n    return 0\n")
    session.run("pass", only=[1])
    assert remarks(session, 1) == [
        "rank 1 has older versions of training.py and utils.py, edited since: --reload reloads them."
    ]


def test_what_autoreload_reloads_is_no_remark(with_modules: Session, tmp_path: Path):
    session = with_modules
    session.run("%load_ext autoreload\n%autoreload 2")
    edit(tmp_path / "utils.py", NEW_UTILS)
    assert values(session, "scale(1)") == [7, 7]
    assert remarks(session) == []


def test_reload_reaches_functions_instances_and_values_that_were_imported_by_name(
    with_modules: Session, tmp_path: Path
):
    session = with_modules
    edit(tmp_path / "utils.py", NEW_UTILS)
    assert values(session, "scale(1), model.size(), LR, training.run()", reload=True) == [(7, 99, [5], (21, [5]))] * 2
    assert remarks(session) == ["reloaded: utils.py."]
    assert remarks(session, 1) == []
    session.run("pass", reload=True)
    assert remarks(session) == []


def test_an_edit_within_a_second_that_leaves_the_size_is_reloaded(with_modules: Session, tmp_path: Path):
    session = with_modules
    edit(tmp_path / "utils.py", (tmp_path / "utils.py").read_text().replace("x * 2", "x * 9"))
    assert values(session, "scale(1)", reload=True) == [9, 9]


def test_a_syntax_error_in_an_edited_module_is_the_cells_and_the_old_one_stays(with_modules: Session, tmp_path: Path):
    session = with_modules
    edit(tmp_path / "training.py", "from utils import LR, scale\ndef run():\n    return 'new'\n")
    edit(tmp_path / "utils.py", "def scale(x)\n    return x\n")
    session.execute("ran = True", reload=True)
    for rank in range(2):
        failure = session.failure(rank).failure
        assert failure.type_name == "builtins.SyntaxError"
        assert "utils.py" in failure.traceback_text
    assert values(session, "scale(1), training.run(), 'ran' in globals()") == [(2, (6, [1]), False)] * 2


def test_a_module_that_raises_when_it_is_loaded_anew_stays_as_it_was(with_modules: Session, tmp_path: Path):
    session = with_modules
    edit(tmp_path / "utils.py", "LR = [7]\nraise ImportError('half done')\n")
    session.execute("pass", reload=True)
    for rank in range(2):
        failure = session.failure(rank).failure
        assert failure.message == "half done"
        assert "raise ImportError('half done')" in failure.traceback_text
        assert "autoreload" not in failure.traceback_text
    assert values(session, "utils.scale(1), utils.LR") == [(2, [1])] * 2


def test_installed_modules_are_not_the_users(session: Session, tmp_path: Path):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    edit(installed / "library.py", "x = 1\n")
    session.sys_path = (str(installed), *session.sys_path)
    session.run("import library")
    edit(installed / "library.py", "x = 2\n")
    session.run("pass")
    assert remarks(session) == []
    assert values(session, "library.x", reload=True) == [1, 1]


# ---------------------------------------------------------------- the event loop


def test_cells_have_a_running_loop_as_in_a_notebook(zygote: Zygote, tmp_path: Path):
    session = Session(zygote, 1, cwd=str(tmp_path)).connect()
    made = (
        "import asyncio\nasync def later(n):\n    await asyncio.sleep(0.01)\n    done.append(n)\n    return n\n"
        "done = []\ntask = asyncio.create_task(later(33))\nloop = asyncio.get_running_loop()\ntask.done()"
    )
    assert values(session, made) == [False]
    # tasks continue between cells
    eventually(lambda: values(session, "done") == [[33]], 5, "the task did not go on between cells")
    assert values(session, "await task") == [33]
    assert values(session, "loop is asyncio.get_running_loop() and await later(2)") == [2]
    # a notebook rejects these; they worked on ranks before ranks had a loop
    assert values(session, "asyncio.run(later(3))") == [3]
    assert values(session, "own = asyncio.new_event_loop()\nown.run_until_complete(later(4))") == [4]
    assert values(session, "own.close()\nasyncio.get_running_loop() is loop") == [True]
    session.run("task = asyncio.create_task(later(5))\nraising = asyncio.create_task(asyncio.sleep(0, 1 / 1))")
    assert values(session, "await task") == [5]
    session.leave()


# ---------------------------------------------------------------- its end


def test_a_rank_that_leaves_runs_the_finalizers_of_its_cells_and_no_others(zygote: Zygote, tmp_path: Path):
    session = Session(zygote, 1, cwd=str(tmp_path)).connect()
    due = "[made for made in weakref.finalize._registry if made.atexit]"
    assert values(session, f"import weakref\nlen({due})") == [0]
    session.run("class Resource: pass\nheld = Resource()\nending = weakref.finalize(held, print, 'finalized')")
    assert values(session, f"{due} == [ending]") == [True]
    session.ranks[0].send(Exit())
    assert zygote.wait(session.ranks[0].pid) == 0
    eventually(lambda: "finalized\n" in session.ranks[0].printed, 5, "the finalizer did not run")
    session.leave()


def test_a_rank_leaves_when_it_is_told_to_and_runs_exit_handlers(zygote: Zygote, tmp_path: Path):
    session = Session(zygote, 1, cwd=str(tmp_path)).connect()
    session.run("import atexit\natexit.register(print, 'bye')")
    session.ranks[0].send(Exit())
    assert zygote.wait(session.ranks[0].pid) == 0
    eventually(lambda: "bye\n" in session.ranks[0].printed, 5, "the exit handler did not run")
    session.leave()


def test_a_rank_ends_with_its_agent(zygote: Zygote):
    session = Session(zygote, 1).connect()
    session.ranks[0].link.close()
    assert zygote.wait(session.ranks[0].pid) == 1
    session.leave()


# ---------------------------------------------------------------- tracebacks that IPython shows before it goes on


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for `%run`."""
    made = tmp_path_factory.mktemp("files")
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {},
        "cells": [
            {
                "cell_type": "code",
                "id": "a",
                "metadata": {},
                "outputs": [],
                "execution_count": 1,
                "source": "x = 1\n1/0",
            }
        ],
    }
    (made / "bad.py").write_text("x = 1\n1/0\n")
    (made / "ends.py").write_text("import sys\nsys.exit(0)\n")
    (made / "gives_up.py").write_text("import sys\nsys.exit(3)\n")
    (made / "bad.ipynb").write_text(json.dumps(notebook))
    return made


@pytest.fixture(scope="module")
def single(zygote: Zygote, files: Path) -> Iterator[Session]:
    """One rank for the cells of several tests."""
    made = Session(zygote, 1, cwd=str(files))
    yield made.connect()
    made.leave()


@pytest.mark.parametrize(
    ("body", "context"),
    [
        ("%run bad.py\nprint('never')", "bad.py:2"),
        ("x = 0\n%run -i bad.py\nprint('never')", "bad.py:2"),
        ("%run bad.ipynb\nprint('never')", ":2"),
        ("%run -p bad.py", "bad.py:2"),
        ("%%time\nx = 1\n1/0", "File <timed exec>:2"),
        ("%timeit 1/0", "line 2"),
        ("%%capture\nx = 1\n1/0", "line 2"),
        ("try:\n    %run bad.py\nexcept Exception:\n    pass", "bad.py:2"),
    ],
)
def test_a_traceback_in_the_middle_of_a_cell_is_its_failure(single: Session, body: str, context: str):
    single.execute(body)
    failure = single.failure(0).failure
    assert failure.type_name == "builtins.ZeroDivisionError"
    assert context in failure.traceback_text
    assert "shell.py" not in failure.traceback_text
    assert failure.line is not None
    assert "never" not in single.ranks[0].printed


def test_an_exit_under_run_means_what_it_means_in_ipython(single: Session):
    assert values(single, "%run ends.py\n5") == [5]
    assert values(single, "%run -e gives_up.py\n6") == [6]
    single.execute("%run gives_up.py")
    failure = single.failure(0).failure
    assert (failure.type_name, failure.message) == ("builtins.SystemExit", "3")


def test_a_display_that_fails_is_shown_and_the_cell_goes_on(single: Session):
    single.run("class Odd:\n    def _repr_html_(self): return {}['no html']\ndisplay(Odd())\nprint('went on')")
    eventually(lambda: "went on" in single.ranks[0].printed, 5, "the print after the display")
    assert "no html" in single.ranks[0].printed


# ---------------------------------------------------------------- exceptions with harmful descriptions


@pytest.mark.parametrize("name", ["__str___exits", "has_5000_causes", "has_300_MB", "has_surrogates_all_over"])
def test_a_hostile_exception_ends_no_rank(single: Session, name: str):
    describes(single, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_every_hostile_exception_ends_no_rank(single: Session, name: str):
    describes(single, name)


def describes(session: Session, name: str) -> None:
    session.run("keep = 7")
    session.execute(HOSTILE[name])
    failed = session.failure(0)
    failure = failed.failure
    assert "E" in failure.type_name or failure.type_name.startswith("?.")
    assert failure.traceback_text
    assert len(failure.message) < 11_000
    assert len(failure.traceback_text) < 45_000
    assert len(failure.traceback_ansi) < 130_000
    if "300_MB" in name and "pickles" not in name:
        kept = Path(session.scratch.name, "error-0.txt")
        assert str(kept) in failure.traceback_text
        assert kept.stat().st_size > 300_000_000
        kept.unlink()
    assert values(session, "keep") == [7]


@pytest.mark.parametrize("name", LOOPS)
def test_an_interrupt_ends_a_loop_in_an_exceptions_text(single: Session, name: str):
    single.run("keep = 8")
    single.execute(LOOPS[name].replace("while True", "print('round', flush=True)\n        while True"))
    eventually(lambda: "round" in single.ranks[0].printed, 10, "the loop")
    single.ranks[0].interrupt()
    assert single.failure(0, deadline_s=5).failure.type_name == "__main__.E"
    single.ranks[0]._text = b""
    assert values(single, "keep") == [8]


# ---------------------------------------------------------------- same behaviour as in a program


def test_exit_and_quit_end_the_cell(single: Session):
    single.run("reached = 1\nexit()\nreached = 2")
    assert values(single, "reached") == [1]
    single.execute("quit(4)")
    assert single.failure(0).failure.type_name == "builtins.SystemExit"


def test_a_missing_kernel_is_told_in_a_sentence(single: Session):
    assert values(single, "hasattr(get_ipython(), 'kernel')") == [False]
    single.execute("get_ipython().kernel")
    failure = single.failure(0).failure
    assert "has no Jupyter kernel" in failure.message
    assert "terminal.py" not in failure.traceback_text


def test_an_indented_body_runs_as_in_a_plain_cell(single: Session):
    assert values(single, "\n    x = 3\n    if x:\n        x += 1\n    x") == [4]


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ("device_id=torch.device('cpu')", "ValueError: init_process_group device_id parameter must be an accelerator"),
        ("device_id=0", "ValueError: init_process_group device_id"),
        ("'nonsense'", "ValueError: Unknown c10d backend type NONSENSE"),
        ("'cpu:nonsense'", "ValueError: Unknown c10d backend type NONSENSE"),
        ("backend=5", "ValueError: Backend constructor parameter must be string-ish"),
        ("timeout=5", "TypeError: Expected timeout argument to be of type datetime.timedelta"),
        ("nothing=1", "TypeError: init_process_group() got an unexpected keyword argument 'nothing'"),
        ("world_size=3, rank=0", "ValueError: init_process_group(world_size=3): this run's process group"),
        ("store=dist.HashStore(), init_method='env://'", "AssertionError: Cannot specify both"),
    ],
)
def test_wrong_arguments_of_a_second_group_are_refused_as_by_torch(single: Session, arguments: str, reported: str):
    single.execute(f"import torch, torch.distributed as dist\ndist.init_process_group({arguments})")
    assert reported in single.failure(0).failure.traceback_text


def test_right_arguments_of_a_second_group_are_accepted(single: Session):
    for arguments in ("", "'gloo'", "'cpu:gloo,cuda:nccl'", "world_size=1, rank=0", "timeout=timedelta(seconds=9)"):
        single.run(
            f"from datetime import timedelta\nimport torch.distributed as dist\ndist.init_process_group({arguments})"
        )


def test_a_child_process_that_would_wait_for_the_runs_own_ranks_is_told_so(single: Session):
    single.run(
        "import os\n"
        "def meet():\n"
        "    try:\n"
        "        dist.init_process_group('gloo', rank=0, world_size=2)\n"
        "    except RuntimeError as error:\n"
        "        print(error, flush=True)\n"
        "import torch.distributed as dist, torch.multiprocessing as mp\n"
        "child = mp.get_context('fork').Process(target=meet)\n"
        "child.start()\n"
        "child.join(10)"
    )
    eventually(lambda: "strategy='ddp' instead of 'ddp_notebook'" in single.ranks[0].printed, 5, "the error")


@pytest.mark.slow
def test_a_spawned_process_finds_the_script_of_a_relative_path(single: Session, files: Path):
    """As in the kernel, whose directory was also the process's first one."""
    (files / "script.py").write_text("import os\nif __name__ == '__mp_main__':\n    open('found', 'w').close()\n")
    single.run(
        "import multiprocessing, os\n%run -i script.py\n"
        "child = multiprocessing.get_context('spawn').Process(target=os.getpid)\nchild.start()\nchild.join()\n"
        "del __file__"
    )
    assert (files / "found").exists()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_child_processes_of_a_rank_make_a_group_of_their_own(single: Session, files: Path, method: str):
    (files / "children.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "def main(rank, size, port):\n"
        "    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))\n"
        "    dist.init_process_group('gloo', rank=rank, world_size=size)\n"
        "    total = torch.ones(1) * (rank + 1)\n"
        "    dist.all_reduce(total)\n"
        "    print('sum', total.item(), flush=True)\n"
        "    dist.destroy_process_group()\n"
    )
    single.ranks[0]._text = b""
    single.run(
        # a spawned process runs what `%run -i` has left there
        "globals().pop('__file__', None)\n"
        "import sys, torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "sys.path.insert(0, '')\n"
        "import children\n"
        f"mp.start_processes(children.main, (2, {free_ports(1)[0]}), nprocs=2, start_method='{method}')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)"
    )
    assert values(single, "total.item()") == [1.0]
    eventually(lambda: single.ranks[0].printed.count("sum 3.0") == 2, 5, "what the children print")

"""What a cell has started is finished as Python finishes it after a script; the run says so, and what was cut off."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_ports
from kernels import Cell, Home, Kernel, eventually, plain
from time_limits import GRACE_S

HOME_VARIABLES = {"SGPU_FINISH_TIMEOUT_S": "10"}

# each way in which a script may defer work to the end of its process; slow work would be lost first
SCRIPT = """
import atexit, concurrent.futures, gzip, logging, logging.handlers, multiprocessing, os, pathlib, queue, subprocess
import sys, tempfile, threading, time, weakref, zipfile
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp

rank = int(os.environ.get("RANK", 0))
folder = pathlib.Path(os.environ["FOLDER"]) / f"rank-{rank}"
folder.mkdir(parents=True)
order = []

def effect(name, seconds=0.0):
    time.sleep(seconds)
    order.append(name)
    (folder / name).write_text("whole")
    print("effect", name, flush=True)

def in_process(path, seconds):
    time.sleep(seconds)
    pathlib.Path(path).write_text("whole")

class Writer:
    # the module's variables are gone by then
    def __del__(self, write=os.write, file=os.open(folder / "del", os.O_WRONLY | os.O_CREAT)):
        write(file, b"whole")

threading.Thread(target=effect, args=("thread", 1.0), name="upload").start()
pool = concurrent.futures.ThreadPoolExecutor(2)
pool.submit(effect, "executor", 0.6)
context = multiprocessing.get_context("fork")
context.Process(target=in_process, args=(str(folder / "process"), 1.0)).start()
sent, received = context.Queue(), folder / "queue"
def receive(queue, path):
    data = queue.get()
    pathlib.Path(path).write_text(str(len(data)))
context.Process(target=receive, args=(sent, str(received))).start()
# more than a pipe holds: its feeder thread goes on after the script
sent.put(b"x" * 1_000_000)
atexit.register(lambda: (folder / "order").write_text(" ".join(order)))
atexit.register(effect, "exit-function", 0.6)
# as trackers have one: a process that uploads what it was told, and is told its end by an exit function
writes = "import sys; data = sys.stdin.read(); open(sys.argv[1], 'w').write(data)"
service = subprocess.Popen([sys.executable, "-c", writes, str(folder / "service")], stdin=subprocess.PIPE)
service.stdin.write(b"metrics")
atexit.register(service.communicate, b"the end")
watched = Writer.__new__(Writer)
weakref.finalize(watched.__class__, effect, "finalizer")
writer = Writer()
memory = logging.handlers.MemoryHandler(1000, target=logging.FileHandler(folder / "log"))
logging.getLogger("collected").addHandler(memory)
logging.getLogger("collected").warning("collected")
queued = queue.Queue()
listener = logging.handlers.QueueListener(queued, logging.FileHandler(folder / "queued-log"))
listener.start()
# its thread is a daemon, so what is queued is written only because of this
atexit.register(listener.stop)
logging.getLogger("queued").addHandler(logging.handlers.QueueHandler(queued))
for number in range(100): logging.getLogger("queued").warning("queued %s", number)
opened = open(folder / "opened", "w")
opened.write("unwritten")
class Holder: pass
holder = Holder()
holder.file = gzip.open(folder / "nested.gz", "wt")
holder.file.write("unwritten")
archive = zipfile.ZipFile(folder / "archive.zip", "w")
archive.writestr("name", "content")
kept = tempfile.TemporaryDirectory(dir=folder)
if "RANK" in os.environ:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    saving = dcp.async_save({"w": torch.ones(1000) * 3}, checkpoint_id=os.environ["FOLDER"] + "/checkpoint")
print("the script ends", flush=True)
"""
BY_PYTHON = {
    "archive.zip", "del", "executor", "exit-function", "finalizer", "log", "nested.gz", "opened", "order", "process",
    "queue", "queued-log", "service", "thread",
}  # fmt: skip
# what `wandb` logs goes through a process of its own, which an exit function waits for
WANDB = """
import os
import wandb
rank = int(os.environ.get("RANK", 0))
folder = os.path.join(os.environ["FOLDER"], str(rank))
os.makedirs(folder)
run = wandb.init(mode="offline", project="finishing", dir=folder, settings=wandb.Settings(silent=True))
for step in range(300): run.log({"loss": 1 / (step + 1)})
"""
# the last record of wandb's files: the process has ended, with status 0 after so many seconds, of which 0 are left out
WANDB_EXIT = re.compile(rb"\x92\x01(?:\x00|\x02\x10.)\Z", re.DOTALL)
SGPU = [sys.executable, "-m", "sgpu_magic.cli"]


def effects(folder: Path, ranks: int) -> dict[str, object]:
    """Return the files that the ranks' exits have left, with what can be said of their contents."""
    found: dict[str, object] = {}
    for rank in range(ranks):
        here = folder / f"rank-{rank}"
        found[f"{rank}"] = {path.name: path.stat().st_size > 0 for path in here.iterdir()}
        found[f"{rank} order"] = (here / "order").read_text() if (here / "order").exists() else ""
    checkpoint = folder / "checkpoint"
    found["checkpoint"] = sorted(path.name for path in checkpoint.iterdir()) if checkpoint.exists() else []
    return found


def by_script(home: Home, name: str, command: list[str], ranks: int) -> tuple[dict[str, object], list[str]]:
    """Run the script by a command. Returns the effects and the printed lines."""
    folder = home.work / name
    script = home.work / "finishing.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*command, str(script)],
        env=home.environ | {"FOLDER": str(folder)},
        cwd=home.work,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # a handler's output has no order among the ranks' lines
    lines = sorted(line.split("]")[-1].strip() for line in plain(done.stdout).splitlines() if "effect " in line)
    return effects(folder, ranks), lines


def by_kernel(kernel: Kernel, name: str, code: str, ranks: int = 2) -> tuple[dict[str, object], list[str]]:
    """Run cells with the script in them. Returns the effects when the last cell is over, and the printed lines."""
    folder = kernel.home.work / name
    kernel.check(f"import os\nos.environ['FOLDER'] = {str(folder)!r}")
    reply = kernel.check(code)
    lines = [line for rank in range(ranks) for line in reply.lines(rank)]
    return effects(folder, ranks), sorted(line for line in lines if line.startswith("effect "))


@pytest.mark.slow
def test_a_cell_finishes_what_python_finishes(kernel: Kernel, home: Home):
    found, lines = by_kernel(kernel, "one-cell", f"%%distributed -n 1\n{SCRIPT}", 1)
    expected, expected_lines = by_script(home, "python", [sys.executable], 1)
    assert set(expected["0"]) == BY_PYTHON
    checkpoint = found.pop("checkpoint")
    assert set(checkpoint) == {".metadata", "__0_0.distcp"}
    assert found == {key: value for key, value in expected.items() if key != "checkpoint"}
    assert lines == expected_lines


@pytest.mark.slow
def test_what_is_logged_to_wandb_is_whole(kernel: Kernel, home: Home):
    pytest.importorskip("wandb")
    script = home.work / "tracked.py"
    script.write_text(WANDB)
    subprocess.run(
        [sys.executable, str(script)], env=home.environ | {"FOLDER": str(home.work / "script")}, timeout=120, check=True
    )
    kernel.check(f"import os\nos.environ['FOLDER'] = {str(home.work / 'ranks')!r}")
    kernel.check(f"%%distributed -n 2\n{WANDB}")

    def logged(folder: Path) -> tuple[int, bool]:
        (file,) = folder.glob("wandb/offline-run-*/*.wandb")
        data = file.read_bytes()
        return data.count(b"loss"), WANDB_EXIT.search(data) is not None

    expected = logged(home.work / "script" / "0")
    assert expected[1], "the format is as assumed"
    assert [logged(home.work / "ranks" / str(rank)) for rank in range(2)] == [expected] * 2


@pytest.mark.slow
def test_every_form_finishes_what_torchrun_finishes(kernel: Kernel, home: Home):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_ports(1)[0])]
    expected, expected_lines = by_script(home, "torchrun", [sys.executable, *torchrun], 2)
    assert expected["checkpoint"] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    function = textwrap.indent(SCRIPT.replace("class Holder: pass", "class Holder:\n    pass"), "    ")
    body = f"@distributed(gpus=2)\ndef train():\n{function}\n    globals().update(writer=writer, opened=opened)\n"
    found = {
        "cell": by_kernel(kernel, "cell", f"%%distributed -n 2\n{SCRIPT}"),
        "sgpu torchrun": by_script(home, "sgpu-torchrun", [*SGPU, "torchrun", "--nproc-per-node", "2"], 2),
        "sgpu run": by_script(home, "sgpu-run", [*SGPU, "run", "-n", "2"], 2),
    }
    for form, (there, lines) in found.items():
        assert there == expected, form
        assert lines == expected_lines, form
    # its local variables are dropped when it returns, before threads end
    kernel.check(f"from sgpu_magic import distributed\n{body}")
    there, lines = by_kernel(kernel, "function", "train.distributed()")
    assert {key: value for key, value in there.items() if "order" not in key} == {
        key: value for key, value in expected.items() if "order" not in key
    }
    assert lines == expected_lines
    # a session finishes at its end what its cells have started
    kernel.check("%sgpu_connect -n 2")
    by_session = kernel.home.work / "session"
    kernel.check(f"os.environ['FOLDER'] = {str(by_session)!r}")
    kernel.check(f"%%distributed\n{SCRIPT}")
    kernel.check("%sgpu_disconnect")
    assert effects(by_session, 2) == expected


# ---------------------------------------------------------------- the state


UPLOAD = (
    "%%distributed -n 2\nimport os, threading, time\n"
    "def work():\n"
    "    while not os.path.exists({until!r}): time.sleep(0.05)\n"
    "    print('uploaded', flush=True)\n"
    "if rank == 1: threading.Thread(target=work, name='upload').start()\n"
    "print('the cell ends', flush=True)\n"
)


@pytest.fixture
def until(home: Home) -> Iterator[Path]:
    """The file that ends the threads of `UPLOAD`."""
    path = home.work / "until"
    yield path
    path.unlink(missing_ok=True)


def finishing(kernel: Kernel, code: str) -> Cell:
    """Start a cell and wait until its view says what it waits for."""
    cell = kernel.start(code)
    cell.until(lambda: "rank 1 finishes thread upload" in cell.reply.text, 20, "the view names the thread")
    return cell


def test_the_view_says_what_the_run_waits_for(kernel: Kernel, until: Path):
    cell = finishing(kernel, UPLOAD.format(until=str(until)))
    assert "finishing" in cell.reply.text
    until.touch()
    reply = cell.wait(20)
    assert reply.status == "ok", reply.story
    assert reply.lines(1) == ["the cell ends", "uploaded"]
    assert "cut off" not in reply.text


def test_a_rank_that_finishes_has_its_process_group(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2\nimport atexit, threading, torch, torch.distributed as dist\n"
        "def add():\n"
        "    number = torch.ones(1); dist.all_reduce(number); print(int(number), flush=True)\n"
        "atexit.register(add)\n"
        # rank 0 arrives there long before
        "import time\nif rank == 1: threading.Thread(target=time.sleep, args=(0.5,)).start()"
    )
    assert [reply.lines(rank) for rank in (0, 1)] == [["2"], ["2"]]


def test_an_interrupt_frees_the_notebook_and_ends_the_ranks(kernel: Kernel, until: Path):
    cell = finishing(kernel, UPLOAD.format(until=str(until)))
    began = time.monotonic()
    kernel.interrupt()
    reply = cell.wait(10)
    assert time.monotonic() - began < GRACE_S
    assert reply.ename == "RunCancelled", reply.story
    assert "NameError" not in reply.text
    # the devices are back
    assert kernel.check("%%distributed -n 2\nrank").status == "ok"


@pytest.mark.slow
def test_what_takes_longer_is_cut_off_with_a_note(new_kernel, until: Path):
    kernel = new_kernel()
    kernel.check("run = None")
    reply = kernel.run(UPLOAD.format(until=str(until)) + "rank + 7", 40)
    assert reply.status == "ok", reply.story
    assert "succeeded, cut off" in reply.html or "cut off after" in reply.text, reply.story
    assert "cut off after 10.0 s: thread upload of rank 1" in reply.text, reply.story


@pytest.mark.slow
def test_a_failure_is_reported_before_the_rank_has_finished(kernel: Kernel, home: Home):
    done = home.work / "told"
    reply = kernel.run(
        "%%distributed -n 2\nimport atexit, pathlib, threading, time\n"
        f"def apply():\n    time.sleep(4); pathlib.Path({str(done)!r} + str(rank)).write_text('crashed')\n"
        "atexit.register(apply)\nif rank == 1: raise ValueError('bad batch')"
    )
    assert reply.ename == "ValueError", reply.story
    assert not list(home.work.glob("told*")), "their exit functions still run"
    eventually(lambda: all(Path(f"{done}{rank}").exists() for rank in (0, 1)), 20, "the exit functions did not run")


def test_a_rank_that_dies_while_it_finishes_fails_the_run(kernel: Kernel):
    reply = kernel.run(
        "%%distributed -n 2\nimport atexit, os\nif rank == 1: atexit.register(os._exit, 3)\nprint('the cell ends')"
    )
    assert reply.status == "error", reply.story
    assert "exited with code 3 after its cell had ended" in reply.shown
    # exiting at once is allowed
    assert kernel.check("%%distributed -n 2\nimport atexit, os\natexit.register(os._exit, 0)\nrank").status == "ok"


@pytest.mark.slow
def test_a_cell_that_leaves_nothing_is_over_at_once(kernel: Kernel):
    ids = [os.urandom(4).hex()]
    reply = kernel.check(
        f"%%distributed -n 2\nimport logging, threading, torch\nlogging.basicConfig()\nx = {ids!r}\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(2)).sum().backward()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "from sgpu_magic.worker.process import leaving\n"
        "import gc\n[each.has_work() for each in gc.get_objects() if isinstance(each, leaving.Leaving)]"
    )
    assert "[False]" in reply.text, reply.story


def test_tasks_that_are_not_awaited_are_cancelled_as_by_asyncio_run(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\nimport asyncio\n"
        "async def heartbeat():\n"
        "    try:\n        print('begun'); await asyncio.sleep(60)\n    finally:\n        print('cancelled')\n"
        "task = asyncio.create_task(heartbeat())\nprint('the cell ends')"
    )
    assert reply.lines(0) == ["the cell ends", "begun", "cancelled"]
    assert "tasks that were started and not awaited were cancelled" in reply.text

"""A rank: where it stands, what it shares, what it is given and what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from kernels import Home, Kernel, descriptors, eventually, thread_count

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.wire.events import Event, PayloadReleased, RanksStarted, RunEnded

MB = 1 << 20
PSS = """
def pss(pid="self"):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
"""


def on_ranks(kernel: Kernel, code: str, ranks: int = 2, options: str = "", timeout_s: float = 60.0) -> list[Any]:
    """Run a cell that sets `out` and return it by rank (what JSON can hold)."""
    kernel.check(f"%%distributed -n {ranks} --out out:all --ui none {options}\n{textwrap.dedent(code)}", timeout_s)
    return kernel.value("out")


def last_run(home: Home) -> Path:
    """Directory of the run that was submitted last; directories' own times change later too."""

    def first_event_at(run_id: str) -> float:
        with contextlib.suppress(OSError):
            for event, _ in EventFile(home.run_dir(run_id)).new_events():
                return event.at
        return 0.0

    return home.run_dir(max(home.runs, key=first_event_at))


def bodies(directory: Path, kind: type) -> list[Any]:
    return [event.body for event, _ in EventFile(directory).new_events() if isinstance(event.body, kind)]


def how_it_started(home: Home) -> str:
    return bodies(last_run(home), RanksStarted)[0].warm


def wait_for_standby(home: Home, ranks: int) -> list[int]:
    return eventually(lambda: len(pids := home.standby_pids()) == ranks and pids, 15, "no standby group")


# ---------------------------------------------------------------- the process group


TORCHRUN_SCRIPT = """
import json, os, sys
names = [n for n in os.environ if n not in json.loads(sys.argv[2])]
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump({n: os.environ[n] for n in names}, file)
"""


@pytest.mark.slow
def test_torchruns_variables_exactly(kernel: Kernel, home: Home, tmp_path: Path):
    """What torchrun itself sets is taken as the truth."""
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    environ = {k: v for k, v in home.environ.items() if k != "OMP_NUM_THREADS"}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(tmp_path),
         json.dumps(list(environ))],
        env=environ, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    ours = on_ranks(kernel, "import os; out = dict(os.environ)")
    # specific to the run, or a choice of threads and streams
    differ = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "MASTER_ADDR"}
    # the last says that torchrun's own store already listens; a process that a rank starts may have to listen itself
    torchruns_own = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE"}
    for rank in (0, 1):
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        assert theirs.keys() - ours[rank].keys() - torchruns_own == set()
        for name in theirs.keys() - differ - torchruns_own:
            assert ours[rank][name] == theirs[name], name
        assert ours[rank]["MASTER_ADDR"] == "127.0.0.1"
        assert ours[rank]["TORCHELASTIC_RUN_ID"] == last_run(home).name


def test_a_standby_ranks_loop_and_warnings_are_those_of_the_notebook(kernel: Kernel, home: Home):
    """A rank goes through a cell before it gets one; nothing of that remains."""
    kernel.check(
        "import os, warnings\nos.environ['PYTHONASYNCIODEBUG'] = '1'\n"
        "usual = list(warnings.filters)\nwarnings.simplefilter('error')"
    )
    on_ranks(kernel, "out = None")
    wait_for_standby(home, 2)
    out = on_ranks(
        kernel,
        """
        import asyncio, os, warnings
        loop = asyncio.get_running_loop()
        actions = [action for action, *_ in warnings.filters][:1]
        out = [loop.get_debug(), loop.is_closed(), actions, os.environ["PYTHONASYNCIODEBUG"]]
        """,
    )
    assert how_it_started(home) == "standby"
    assert out == [[True, False, ["error"], "1"]] * 2
    kernel.check("del os.environ['PYTHONASYNCIODEBUG']\nwarnings.filters[:] = usual\ndel usual")


def test_the_process_group_is_ready(kernel: Kernel):
    out = on_ranks(
        kernel,
        """
        import torch, torch.distributed as dist
        total = torch.ones(3) * (rank + 1)
        dist.all_reduce(total)
        gathered = [None] * world_size
        dist.all_gather_object(gathered, {"from": rank})
        out = [dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend(),
               rank, local_rank, world_size, str(device), total.tolist(), gathered]
        """,
        4,
    )
    everybody = [{"from": rank} for rank in range(4)]
    assert out == [[True, r, 4, "gloo", r, r, 4, "cpu", [10.0] * 3, everybody] for r in range(4)]


def test_runtime_tells_the_same_as_the_names(kernel: Kernel):
    out = on_ranks(
        kernel,
        """
        from sgpu_magic import runtime
        out = [runtime.get_global_rank() == rank, runtime.get_local_rank() == local_rank,
               runtime.get_world_size() == world_size]
        """,
    )
    assert out == [[True] * 3] * 2


def test_user_code_may_make_the_group_again(kernel: Kernel):
    reply = kernel.check(
        textwrap.dedent("""\
        %%distributed -n 2
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.init_process_group(backend="gloo", init_method="env://", rank=rank, world_size=world_size)
        from torch.distributed import init_process_group
        init_process_group()
        x = torch.ones(1)
        dist.all_reduce(x)
        print(x.item())""")
    )
    assert reply.lines(0) == ["2.0"]
    assert "arn" not in reply.text, "a warning is shown"


def test_the_group_can_be_destroyed_and_made_over_env(kernel: Kernel):
    """Again and again; under torchrun the second time hangs, because it finds the first one's addresses."""
    out = on_ranks(
        kernel,
        """
        import torch, torch.distributed as dist
        out = []
        for _ in range(5):
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method="env://")
            x = torch.ones(1) * (rank + 1)
            dist.all_reduce(x)
            out.append(x.item())
        """,
        3,
    )
    assert out == [[6.0] * 5] * 3


def test_subgroups(kernel: Kernel):
    out = on_ranks(
        kernel,
        """
        import torch, torch.distributed as dist
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        x = torch.ones(1) * rank
        dist.all_reduce(x, group=halves[rank // 2])
        out = x.item()
        """,
        4,
    )
    assert out == [1.0, 1.0, 5.0, 5.0]


def test_a_store_at_master_addr_and_port(kernel: Kernel):
    """What frameworks do that bring their own rendezvous: a client of the launcher's store."""
    out = on_ranks(
        kernel,
        """
        import os, datetime
        from torch.distributed.rendezvous import rendezvous
        store, its_rank, its_size = next(iter(rendezvous("env://")))
        store.set(f"hello-{rank}", str(rank))
        store.wait([f"hello-{other}" for other in range(world_size)])
        out = [its_rank, its_size, [store.get(f"hello-{other}").decode() for other in range(world_size)],
               0 < int(os.environ["MASTER_PORT"]) < 65536]
        """,
    )
    assert out == [[rank, 2, ["0", "1"], True] for rank in (0, 1)]


def test_sixteen_ranks(kernel: Kernel):
    out = on_ranks(
        kernel,
        """
        import torch, torch.distributed as dist
        x = torch.tensor([rank])
        dist.all_reduce(x)
        out = [rank, x.item()]
        """,
        16,
    )
    assert out == [[rank, 120] for rank in range(16)]


@pytest.mark.slow
def test_a_step_of_data_parallel_training(kernel: Kernel):
    out = on_ranks(
        kernel,
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel
        torch.manual_seed(rank)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.full((8, 4), float(rank + 1))).pow(2).mean()
        loss.backward()
        optimizer.step()
        out = [p.flatten().tolist() for p in model.module.parameters()]
        """,
    )
    assert out[0] == out[1]


# ---------------------------------------------------------------- the kernel's place


def test_a_rank_stands_where_the_kernel_stands(kernel: Kernel, home: Home):
    kernel.check(
        "import os, sys\n"
        "old_umask, old_dir = os.umask(0o027), os.getcwd()\n"
        "os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')\n"
        "sys.path.insert(0, os.getcwd() + '/modules')\n"
        "%env SGPU_TEST_FROM_MAGIC=a b=c\n"
        "os.environ['SGPU_TEST_FROM_OS'] = 'ü'"
    )
    out = on_ranks(
        kernel,
        """
        import os, sys
        mask = os.umask(0); os.umask(mask)
        out = [os.getcwd(), list(sys.path), mask, dict(os.environ)]
        """,
    )
    path = kernel.value("[entry or __import__('os').getcwd() for entry in __import__('sys').path]")
    environ = kernel.value("dict(__import__('os').environ)")
    kernel.check("os.umask(old_umask); os.chdir(old_dir); sys.path.pop(0); del os.environ['SGPU_TEST_FROM_OS']")
    for cwd, its_path, mask, its_environ in out:
        assert cwd == str(home.work / "elsewhere")
        assert its_path == path
        assert mask == 0o027
        own = {"OMP_NUM_THREADS"}
        assert {k: v for k, v in environ.items() if its_environ.get(k) != v and k not in own} == {}
        assert its_environ["SGPU_TEST_FROM_MAGIC"] == "a b=c"
        assert its_environ["SGPU_TEST_FROM_OS"] == "ü"


def test_variables_that_the_kernel_removed_are_not_on_the_ranks(kernel: Kernel):
    kernel.check("import os; os.environ['SGPU_TEST_SHORT'] = '1'")
    assert on_ranks(kernel, "import os; out = os.environ.get('SGPU_TEST_SHORT')") == ["1", "1"]
    kernel.check("del os.environ['SGPU_TEST_SHORT']")
    assert on_ranks(kernel, "import os; out = os.environ.get('SGPU_TEST_SHORT')") == [None, None]


def test_env_option_reaches_the_ranks_and_not_the_kernel(kernel: Kernel):
    out = on_ranks(kernel, "import os; out = os.environ['MY_KEY']", options="--env MY_KEY=1=2")
    assert out == ["1=2", "1=2"]
    assert kernel.value("'MY_KEY' in __import__('os').environ") is False


def test_an_edited_local_module_is_seen_by_the_next_run(kernel: Kernel, home: Home):
    module = home.work / "local_helper.py"
    module.write_text("VALUE = 1\n")
    code = "import local_helper; out = local_helper.VALUE"
    assert on_ranks(kernel, code) == [1, 1]
    module.write_text("VALUE = 22\n")
    assert on_ranks(kernel, code) == [22, 22]


@pytest.mark.slow
def test_the_users_site_is_seen(new_kernel: Callable[..., Kernel], home: Home, tmp_path: Path):
    """A venv has no user site; a kernel whose path has it passes it on."""
    folder = tmp_path / "user-site"
    folder.mkdir()
    (folder / "only_for_me.py").write_text("WHO = 'me'\n")
    kernel = new_kernel(variables={"PYTHONPATH": str(folder)})
    assert on_ranks(kernel, "import only_for_me; out = only_for_me.WHO") == ["me", "me"]


def test_random_numbers_differ_by_rank_and_run(kernel: Kernel):
    """As in processes of their own; so a new process seeds torch's CPU generator too."""
    code = """
        import random, numpy, torch
        out = [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()]
        """
    first, again = on_ranks(kernel, code, 3), on_ranks(kernel, code, 3)
    for index in range(4):
        assert len({values[index] for values in first + again}) == 6


@pytest.mark.slow
def test_a_seed_gives_what_it_gives_in_any_process(kernel: Kernel):
    numbers = "torch.manual_seed(7); numpy.random.seed(7); random.seed(7); " \
        "out = [torch.rand(1).item(), numpy.random.rand(), random.random()]"  # fmt: skip
    out = on_ranks(kernel, f"import random, numpy, torch; {numbers}")
    done = subprocess.run(
        [sys.executable, "-c", f"import json, random, numpy, torch; {numbers}; print(json.dumps(out))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert out == [json.loads(done.stdout)] * 2


def test_every_run_is_fresh(kernel: Kernel):
    on_ranks(
        kernel,
        """
        import builtins, os, sys, signal, torch
        builtins.left_behind = sys.left_behind = left_behind = 1
        torch.set_default_dtype(torch.float64)
        os.environ["LEFT_BEHIND"] = "1"
        sys.modules["left_behind"] = sys
        torch.manual_seed(5)
        out = 0
        """,
    )
    out = on_ranks(
        kernel,
        """
        import builtins, os, sys, torch
        out = [hasattr(builtins, "left_behind"), hasattr(sys, "left_behind"), "left_behind" in globals(),
               "LEFT_BEHIND" in os.environ, "left_behind" in sys.modules, str(torch.get_default_dtype())]
        """,
    )
    assert out == [[False] * 5 + ["torch.float32"]] * 2


@pytest.mark.slow
def test_threads_share_the_cores_and_the_users_choice_wins(kernel: Kernel):
    cores = len(os.sched_getaffinity(0))
    code = "import os, torch; out = [torch.get_num_threads(), os.environ['OMP_NUM_THREADS']]"
    without = "OMP_NUM_THREADS" not in kernel.value("dict(__import__('os').environ)")
    if without:
        assert on_ranks(kernel, code, 1) == [[cores, str(cores)]]
        assert on_ranks(kernel, code, 4) == [[max(1, cores // 4), str(max(1, cores // 4))]] * 4
    assert on_ranks(kernel, code, 2, "--env OMP_NUM_THREADS=3") == [[3, "3"]] * 2


def test_parallel_torch_and_numpy_work_after_the_fork(kernel: Kernel):
    out = on_ranks(
        kernel,
        """
        import numpy, torch
        torch.set_num_threads(2)
        x = torch.ones(600, 600)
        y = numpy.ones((600, 600))
        out = [(x @ x)[0, 0].item(), float((y @ y)[0, 0]), torch.ones(4_000_000).sum().item()]
        """,
    )
    assert out == [[600.0, 600.0, 4e6]] * 2


# ---------------------------------------------------------------- IPython in the rank


def test_top_level_await_magics_and_time(kernel: Kernel):
    reply = kernel.check(
        textwrap.dedent("""\
        %%distributed -n 2
        import asyncio
        await asyncio.sleep(0.001)
        %time total = sum(range(10))
        here = %pwd
        lines = !echo from the shell
        print(total, lines, get_ipython().__class__.__mro__[1].__name__)""")
    )
    for rank in (0, 1):
        assert any("Wall time" in line for line in reply.lines(rank))
        assert reply.lines(rank)[-1] == "45 ['from the shell'] InteractiveShell"


def test_a_cell_magic_inside_the_cell(kernel: Kernel):
    reply = kernel.check("%%distributed -n 2\n%%time\nx = 3\nprint('in', rank)")
    assert "in 0" in reply.lines(0)
    assert any("Wall time" in line for line in reply.lines(1))


def test_inspect_reads_the_cells_source(kernel: Kernel):
    kernel.check("def from_the_notebook(x):\n    return x + 41")
    reply = kernel.check(
        "%%distributed -n 1\nimport inspect\ndef inside():\n    return 7\n"
        "print(inspect.getsource(from_the_notebook), inspect.getsource(inside))"
    )
    assert "return x + 41" in reply.text
    assert "return 7" in reply.text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("input('name? ')", "keyboard"),
        ("import getpass; getpass.getpass()", "keyboard"),
        ("import sys; sys.stdin.readline()", "keyboard"),
        ("import sys; list(sys.stdin)", "keyboard"),
        ("breakpoint()", "_air.py"),
        ("import pdb; pdb.set_trace()", "_air.py"),
        ("%debug", "plain cell"),
        ("%pdb on", "plain cell"),
    ],
)
def test_what_needs_a_keyboard_fails_at_once_with_the_remedy(kernel: Kernel, code: str, says: str):
    reply = kernel.run(f"%%distributed -n 2 --ui none\n{code}")
    assert reply.status == "error", reply.story
    assert says in reply.story
    assert reply.seconds < 5


def test_exit_handlers_run(kernel: Kernel, home: Home):
    kernel.check(
        "%%distributed -n 2 --ui none\n"
        "import atexit, pathlib\n"
        "atexit.register(lambda: pathlib.Path(f'goodbye-{rank}').write_text('bye'))"
    )
    eventually(lambda: all((home.work / f"goodbye-{rank}").exists() for rank in (0, 1)), 5, "no goodbye")


DATASET = """
import torch
class Batch:
    def __init__(self, numbers): self.numbers = numbers
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return scaled(index)
def scaled(index): return index * FACTOR
def collate(numbers): return Batch(torch.tensor(numbers))
FACTOR = 10
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_notebook_dataset_in_loader_workers(kernel: Kernel, method: str):
    kernel.check(DATASET)
    out = on_ranks(
        kernel,
        f"""
        from torch.utils.data import DataLoader
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2, collate_fn=collate,
                            worker_init_fn=lambda number: None, multiprocessing_context="{method}")
        batches = list(loader)
        assert all(type(batch) is Batch for batch in batches)
        out = [batch.numbers.tolist() for batch in batches]
        """,
        1,
        timeout_s=90,
    )
    assert out == [[[0, 10, 20, 30], [40, 50, 60, 70]]]


def test_a_rank_does_not_look_like_somebodys_prompt(kernel: Kernel):
    """Frameworks show other bars, and start processes otherwise, where they take it for one."""
    reply = kernel.check("%%distributed -n 2\nimport sys\nprint(hasattr(sys, 'ps1'), sys.flags.interactive)")
    assert reply.lines(0) == reply.lines(1) == ["False 0"]


# ---------------------------------------------------------------- zygote and standby


def test_the_second_run_of_a_size_is_taken_from_standby(kernel: Kernel, home: Home):
    first = on_ranks(kernel, "import os; out = os.getpid()", 3)
    # not while the first ranks are leaving
    standby = eventually(lambda: {*wait_for_standby(home, 3)} - {*first}, 15, "the first run's ranks stay")
    out = on_ranks(kernel, "import os; out = os.getpid()", 3)
    assert set(out) == standby, (first, how_it_started(home))
    assert how_it_started(home) == "standby"
    on_ranks(kernel, "out = 0", 2)
    assert how_it_started(home) == "zygote"


@pytest.mark.slow
def test_a_standby_group_that_waits_takes_no_processor_time_and_the_next_run_gets_it(kernel: Kernel, home: Home):
    on_ranks(kernel, "out = 0", 3)
    standby = wait_for_standby(home, 3)

    def all_stopped() -> bool:
        return all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in standby)

    eventually(all_stopped, 20, "the standby group is not paused")
    out = on_ranks(kernel, "import os; out = os.getpid()", 3)
    assert how_it_started(home) == "standby"
    assert set(out) == set(standby)


def _largest(pid: int) -> list[tuple[str, int]]:
    """The mappings of a process with most memory of its own, in kB."""
    own = [
        (each.path, (each.private_clean + each.private_dirty) // 1024)
        for each in psutil.Process(pid).memory_maps(grouped=False)
    ]
    return sorted(own, key=lambda each: -each[1])[:8]


@pytest.mark.parametrize("ranks", [4, 12])
def test_idle_ranks_take_at_most_8_mb_of_their_own(kernel: Kernel, home: Home, ranks: int):
    """Groups of up to 8 have joined and are ready; larger ones join late."""
    on_ranks(kernel, "out = 0", ranks)
    standby = wait_for_standby(home, ranks)
    if ranks <= 8:
        eventually(lambda: all(thread_count(pid) > 1 for pid in standby), 5, "standby ranks join early")
    readings: list[list[int]] = []

    def settled() -> bool:
        readings.append([psutil.Process(pid).memory_full_info().uss for pid in standby])
        return len(readings) > 10 and all(reading == readings[-1] for reading in readings[-10:])

    eventually(settled, 10, "the ranks do not come to rest")
    assert max(readings[-1]) < 8 * MB, [
        f"{size / MB:.1f} MB, most in {_largest(pid)}" for pid, size in zip(standby, readings[-1], strict=True)
    ]


@pytest.mark.slow
def test_torch_is_only_where_it_is_needed(kernel: Kernel, home: Home):
    on_ranks(kernel, "out = 0", 4)
    standby = wait_for_standby(home, 4)
    (zygote,) = {home.processes()[pid].parent for pid in standby}
    assert thread_count(zygote) == 1
    assert "libtorch" in Path(f"/proc/{zygote}/maps").read_text()
    for pid in [home.pool_pid(), *home.agent_pids()]:
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "numpy" not in maps


@pytest.mark.slow
def test_standby_is_dropped_when_nobody_uses_it(new_home: Callable[..., Home]):
    home = new_home({"SGPU_STANDBY_IDLE_S": "0.5", "SGPU_ZYGOTE_IDLE_S": "1"})
    kernel = Kernel(home)
    try:
        on_ranks(kernel, "out = 0")
        wait_for_standby(home, 2)
        eventually(lambda: not home.standby_pids(), 15, "the standby group is not dropped")
        eventually(lambda: not home.zygote_pids(), 15, "the zygote is not retired")
        assert on_ranks(kernel, "out = rank") == [0, 1]
        assert how_it_started(home) == "cold"
    finally:
        kernel.close()


@pytest.mark.slow
def test_without_standby_nobody_waits(new_home: Callable[..., Home]):
    home = new_home({"SGPU_STANDBY": "0"})
    kernel = Kernel(home)
    try:
        for _ in range(2):
            assert on_ranks(kernel, "out = rank") == [0, 1]
        assert how_it_started(home) == "zygote"
        eventually(lambda: not home.rank_pids(), 5, "ranks stay")
        assert home.standby_pids() == []
    finally:
        kernel.close()


@pytest.mark.slow
def test_a_changed_site_directory_makes_a_new_zygote(new_kernel: Callable[..., Kernel], home: Home):
    """What `%pip install -U` does. The directory itself is not touched: the kernel is told another one."""
    kernel = new_kernel()
    site = home.path / "site"
    site.mkdir()
    kernel.check(f"import site; site.getusersitepackages = lambda: {str(site)!r}")
    code = "import os; out = os.getppid()"
    before = on_ranks(kernel, code)
    assert on_ranks(kernel, code) == before
    (site / "newly_installed.py").write_text("")
    after = on_ranks(kernel, code)
    assert after[0] != before[0]
    kernel.check("import os; os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'")
    assert on_ranks(kernel, code)[0] not in (before[0], after[0])


# ---------------------------------------------------------------- large variables


def shares(kernel: Kernel, make: str, touch: str) -> tuple[list[Any], int, int]:
    """What `touch` gives on 4 ranks, by how much the memory of all of them and the kernel grew, and what a rank had.

    Memory is in bytes; what a rank had is the most, with the variable unpacked and not yet touched.
    """
    kernel.check(PSS + make + "\nkernel_pid = __import__('os').getpid(); kernel_before = pss()")
    out = on_ranks(
        kernel,
        f"""
        import torch.distributed as dist
        def touch(big): return {touch}
        # what libraries load when they are first used is no copy: pyarrow's to_numpy imports pandas, 32 MB a rank
        touch(big[:1])
        before = pss()
        dist.barrier()
        touched = touch(big)
        dist.barrier()
        grown = pss() - before
        dist.barrier()
        out = [touched, grown, pss(kernel_pid) - kernel_before if rank == 0 else 0, before]
        """,
        4,
    )
    kernel.check("del big; import gc; gc.collect()")
    return [entry[0] for entry in out], sum(entry[1] + entry[2] for entry in out), max(entry[3] for entry in out)


@pytest.mark.parametrize(
    ("make", "touch"),
    [
        pytest.param("import torch; big = torch.ones(50_000_000)", "big.double().sum().item()", id="torch"),
        pytest.param(
            "import numpy; big = numpy.ones(25_000_000)", "float(big.sum())", id="numpy", marks=pytest.mark.slow
        ),
        pytest.param(
            "import numpy, pandas; big = pandas.DataFrame({'a': numpy.ones(25_000_000)}, copy=False)",
            "float(big['a'].to_numpy().sum())",
            id="pandas",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import numpy, pyarrow; big = pyarrow.table({'a': numpy.ones(25_000_000)})",
            "sum(float(c.to_numpy(zero_copy_only=True).sum()) for c in big['a'].chunks)",
            id="arrow",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_copy_for_all_ranks(kernel: Kernel, make: str, touch: str):
    if "torch" in touch + make:
        touch = "float(big.numpy().sum(dtype='float64'))"
    touched, grown, had = shares(kernel, make, touch)
    assert len(set(touched)) == 1
    assert touched[0] in (25_000_000.0, 50_000_000.0)
    # not unpacked into private memory: that would be 200 MB more
    assert had < 200 * 1_000_000, f"{had / 1e6:.0f} MB"
    # the first run also touches the memory file's own 200 MB; four copies would be 800 MB
    assert grown < 300 * 1_000_000, f"{grown / 1e6:.0f} MB"


@pytest.mark.slow
def test_a_change_in_place_stays_on_its_rank(kernel: Kernel):
    kernel.check("import numpy, torch; big, other = torch.zeros(1_000_000), numpy.zeros(1_000_000)")
    code = """
        import torch.distributed as dist
        if rank == 0:
            big += 5
            other[:] = 7
        dist.barrier()
        out = [big.max().item(), float(other.max())]
        """
    for _ in range(2):
        assert on_ranks(kernel, code) == [[5.0, 7.0], [0.0, 0.0]]
    assert kernel.value("[big.max().item(), float(other.max())]") == [0.0, 0.0]


@pytest.mark.slow
def test_large_results_of_every_rank(kernel: Kernel):
    kernel.check(
        "%%distributed -n 2 --out x:all,y --ui none\n"
        "import numpy, torch\n"
        "x = torch.full((25_000_000,), float(rank))\n"
        "y = numpy.arange(1000)"
    )
    assert kernel.value("[(len(x), t.shape[0], t[-1].item(), t.unique().tolist()) for t in x]") == [
        [2, 25_000_000, 0.0, [0.0]],
        [2, 25_000_000, 1.0, [1.0]],
    ]
    assert kernel.value("int(y.sum())") == 499_500
    kernel.check("x[0] += 1; y[0] = 5; assert x[0][0] == 1")
    # only the notebook holds the memory
    (agent,) = kernel.home.agent_pids()
    eventually(
        lambda: not any("memfd:sgpu-payload" in link for link in descriptors(agent).values()),
        10,
        lambda: f"the agent holds the results: {descriptors(agent)}",
    )
    kernel.check("del x")


def memory_files(kernel: Kernel) -> list[int]:
    """Numbers of the kernel's descriptors of payloads' memory files."""
    return [fd for fd, link in descriptors(kernel.pid).items() if link.startswith("/memfd:sgpu-payload")]


def released(directory: Path) -> PayloadReleased | None:
    with contextlib.suppress(OSError):
        for body in bodies(directory, PayloadReleased):
            return body
    return None


@pytest.mark.slow
def test_the_memory_file_is_used_again_and_the_payload_kept(new_kernel: Callable[..., Kernel], home: Home):
    kernel = new_kernel()
    kernel.check("import torch; big = torch.arange(5_000_000)")
    assert memory_files(kernel) == []
    assert on_ranks(kernel, "out = big[-1].item()") == [4_999_999] * 2
    directory = last_run(home)
    first = memory_files(kernel)
    # the file and its mapping's own descriptor (mmap duplicates it before Python 3.13)
    assert 1 <= len(first) <= 2
    output = eventually(lambda: released(directory), 10, "the payload is not released")
    assert output == PayloadReleased(kept=True)
    payload = directory / "payload.bin"
    assert payload.stat().st_size >= 40_000_000
    assert stat.S_IMODE(payload.stat().st_mode) == 0o600
    eventually(lambda: json.loads((directory / "run.json").read_text())["payload_kept"], 5, "run.json")
    kernel.check("big += 1")
    assert on_ranks(kernel, "out = big[-1].item()") == [5_000_000] * 2
    assert memory_files(kernel) == first


@pytest.mark.slow
def test_the_next_run_takes_the_memory_back(new_kernel: Callable[..., Kernel], home: Home):
    kernel = new_kernel()
    kernel.check("import torch; big = torch.arange(5_000_000)")
    on_ranks(kernel, "out = big[-1].item()")
    directory, first = last_run(home), memory_files(kernel)
    on_ranks(kernel, "out = big[-1].item()")
    assert memory_files(kernel) == first
    output = eventually(lambda: released(directory), 5, "the payload is not released")
    assert not output.kept
    assert "next run" in output.reason
    assert not (directory / "payload.bin").exists()
    note = json.loads((directory / "run.json").read_text())["payload_note"]
    assert note == output.reason
    done = subprocess.run([sys.executable, directory / "_air.py"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"{directory} has no payload: {note}.\n")


@pytest.mark.slow
def test_a_file_carries_the_payload_when_memory_is_short(new_kernel: Callable[..., Kernel], home: Home):
    kernel = new_kernel()
    kernel.check(
        "import sgpu_magic.client.payload_memory as uploads\n"
        "uploads.fits_memory = lambda size: False\n"
        "import torch; big = torch.arange(1_000_000)"
    )
    assert on_ranks(kernel, "out = [big[-1].item(), big.sum().item()]") == [[999_999, 499_999_500_000]] * 2
    assert memory_files(kernel) == []
    directory = last_run(home)
    assert eventually(lambda: released(directory), 10, "the payload is not released").kept
    assert (directory / "payload.bin").stat().st_size >= 8_000_000
    uploads = home.state / "uploads"
    eventually(lambda: not any(uploads.iterdir()), 5, lambda: f"left: {list(uploads.iterdir())}")


@pytest.mark.slow
def test_a_payload_larger_than_the_disk(new_kernel: Callable[..., Kernel], home: Home):
    kernel = new_kernel()
    kernel.check(
        "import shutil, types, torch\n"
        "import sgpu_magic.client.payload_memory as uploads\n"
        "uploads.fits_memory = lambda size: False\n"
        "shutil.disk_usage = lambda path: types.SimpleNamespace(free=1_000_000)\n"
        "big = torch.ones(1_000_000)"
    )
    before = home.runs
    reply = kernel.run("%%distributed -n 2\nprint(big.sum())")
    assert reply.status == "error"
    assert reply.ename == "UsageError"
    assert "SGPU_STATE_DIR" in reply.traceback
    assert len(reply.traceback.strip().splitlines()) == 2, "one paragraph and its section"
    assert home.runs == before
    uploads = home.state / "uploads"
    assert not uploads.exists() or not any(uploads.iterdir())
    assert on_ranks(kernel, "out = rank") == [0, 1]


# ---------------------------------------------------------------- the run's directory


def test_what_a_run_leaves(kernel: Kernel, home: Home):
    kernel.check("word = 'hello'; secret = 'in the environment'")
    kernel.check(
        "%%distributed -n 2 --out word --name demo --env SECRET_TOKEN=hush-hush\nprint(word, rank)\nword = word.upper()"
    )
    directory = last_run(home)
    names = {"run.json", "cell.py", "payload.bin", "_air.py", "key", "rank-0.log", "rank-1.log", "events.msgpack"}
    # the installed packages are recorded once the kernel has read them, and settings if the notebook has any
    assert {entry.name for entry in directory.iterdir()} - {"requirements.txt", "settings.json"} == names
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for entry in directory.iterdir():
        assert not entry.stat().st_mode & 0o077, entry.name
    for folder in (home.state, home.state / "runs", home.state / "logs", home.runtime):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert (directory / "cell.py").read_text().strip() == "print(word, rank)\nword = word.upper()"
    assert (directory / "rank-1.log").read_text() == "hello 1\n"
    eventually(lambda: json.loads((directory / "run.json").read_text())["state"] == "succeeded", 5, "run.json")
    record = json.loads((directory / "run.json").read_text())
    assert record["spec"]["name"] == "demo"
    assert record["spec"]["run_id"] == directory.name
    assert record["spec"]["env_names"] == ["SECRET_TOKEN"]
    assert record["executable"] == sys.executable
    assert record["cwd"] == str(home.work)
    assert record["payload_kept"] is True
    assert len((directory / "key").read_bytes()) == 32
    for entry in [*directory.iterdir(), *home.state.glob("*.sqlite3*"), *home.state.glob("*.log")]:
        assert b"hush-hush" not in entry.read_bytes(), f"a secret is in {entry}"


@pytest.mark.slow
def test_a_small_run_leaves_five_files_and_24_kb(kernel: Kernel, home: Home):
    # loggers and filters of these packages are process settings
    kernel.check("import mlflow, torch")
    kernel.check("%%distributed -n 2\nrank")
    directory = last_run(home)
    eventually(lambda: json.loads((directory / "run.json").read_text())["state"] == "succeeded", 5, "run.json")
    assert "warnings/filters" in json.loads((directory / "settings.json").read_text())
    found = {entry.name: entry.stat() for entry in directory.iterdir()}
    # the others are shared by all runs
    own = {name: status.st_blocks * 512 for name, status in found.items() if status.st_nlink == 1}
    assert len(own) <= 5, own
    assert sum(own.values()) + directory.stat().st_blocks * 512 <= 24 * 1024, own


def test_the_event_log_is_whole_and_strict(kernel: Kernel, home: Home):
    kernel.check(
        "%%distributed -n 2\nprint('x' * 1000)\n"
        "from IPython.display import display, HTML\ndisplay(HTML('<b>1</b>'))\n41 + rank"
    )
    directory = last_run(home)
    eventually(lambda: not home.rank_pids(), 5, "ranks stay")
    events: list[Event] = [event for event, _ in EventFile(directory).new_events()]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert {event.run_id for event in events} == {directory.name}
    (ended,) = [event.body for event in events if isinstance(event.body, RunEnded)]
    assert ended.state == "succeeded"
    assert [result.value_repr for result in ended.results] == ["41", "42"]
    assert [result.lines for result in ended.results] == [1, 1]
    assert [result.output_bytes for result in ended.results] == [1001, 1001]


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_torchrun_runs_the_same_outside_the_notebook(kernel: Kernel, home: Home, tmp_path: Path, size: int):
    kernel.check(
        f"import torch; data = torch.arange({size}); factor = 3\ndef total(): return (data * factor).sum().item()"
    )
    kernel.check(
        "%%distributed -n 2 --ui none\nimport torch.distributed as dist\n"
        "x = torch.tensor([total() + rank]); dist.all_reduce(x)\n"
        # one write, because under torchrun the ranks share one pipe
        "import sys; _ = sys.stdout.write(f'total {x.item()} {rank}\\n')"
    )
    directory = last_run(home)
    eventually(lambda: json.loads((directory / "run.json").read_text())["payload_kept"], 10, "run.json")
    moved = tmp_path / "moved"
    shutil.copytree(directory, moved)
    environ = {k: v for k, v in home.environ.items() if not k.startswith("SGPU_")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "_air.py"],
        cwd=moved, env=environ, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = 2 * 3 * (size * (size - 1) // 2) + 1
    assert sorted(line for line in done.stdout.splitlines() if "total" in line) == [
        f"total {expected} 0",
        f"total {expected} 1",
    ]

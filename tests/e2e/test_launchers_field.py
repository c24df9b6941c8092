"""What users of other notebook launchers ran into, tried with a function's call.

The cases are those that accelerate's tests of its notebook launcher care about, and the issues that led to them: a
notebook that has used torch before, one that has a process group of its own, the port that everybody takes, variables
left behind, launches after launches.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from kernels import Kernel

JOINED = textwrap.dedent(
    """
    import os
    import torch
    import torch.distributed as dist
    from sgpu_magic import distributed

    @distributed(gpus=2, gpu_type="cpu")
    def joined():
        total = torch.ones(1)
        dist.all_reduce(total)
        return [dist.get_rank(), dist.get_world_size(), total.item()]
    """
)
TWO = [[0, 2, 2.0], [1, 2, 2.0]]


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    kernel.check(JOINED)
    return kernel


def test_launch_after_launch_in_one_cell(notebook: Kernel):
    notebook.check("found = [joined.distributed() for _ in range(3)]")
    assert notebook.value("found") == [TWO] * 3


def test_notebook_that_has_computed_in_parallel(notebook: Kernel):
    # accelerate forks the notebook: torch's own threads are gone in the child, and it hangs
    notebook.check("torch.set_num_threads(2); big = torch.randn(1000, 1000); big = big @ big")
    notebook.check("found = joined.distributed()")
    assert notebook.value("found") == TWO
    assert notebook.value("torch.get_num_threads()") == 2


def test_notebook_that_has_started_threads_and_holds_their_lock(notebook: Kernel):
    notebook.check("import threading\nheld = threading.Lock()\nheld.acquire()\nstop = threading.Event()")
    notebook.check("thread = threading.Thread(target=stop.wait)\nthread.start()")
    notebook.check("found = joined.distributed()\nstop.set()\nthread.join()")
    assert notebook.value("found") == TWO


def test_notebook_that_is_in_a_process_group_itself(notebook: Kernel):
    notebook.check(
        "own = dist.init_process_group('gloo', init_method=f'file://{os.getcwd()}/own', rank=0, world_size=1)"
    )
    try:
        notebook.check("found = joined.distributed()")
        assert notebook.value("found") == TWO
        assert notebook.value("[dist.get_rank(), dist.get_world_size()]") == [0, 1]
    finally:
        notebook.check("dist.destroy_process_group()")


def test_notebook_with_a_launchers_variables(notebook: Kernel):
    # a kernel that torchrun or a batch system has started
    notebook.check(
        "os.environ.update(RANK='7', LOCAL_RANK='7', WORLD_SIZE='9', MASTER_ADDR='nowhere', MASTER_PORT='1')"
    )
    notebook.check("before = dict(os.environ)\nfound = joined.distributed()")
    assert notebook.value("found") == TWO
    assert notebook.value("before == dict(os.environ)")
    notebook.check(
        "for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'): del os.environ[name]"
    )


def test_launch_leaves_no_variable_behind(notebook: Kernel):
    notebook.check("before = dict(os.environ)\njoined.distributed()\nafter = dict(os.environ)")
    assert notebook.value("after == before")


def test_port_that_everybody_takes_is_taken(notebook: Kernel):
    notebook.check(
        "import socket\n"
        "taken = socket.socket()\n"
        "taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "try:\n"
        "    taken.bind(('127.0.0.1', 29500))\n"
        "    taken.listen()\n"
        "except OSError:\n"
        "    pass  # somebody else's, which is as good\n"
    )
    notebook.check("found = joined.distributed()\ntaken.close()")
    assert notebook.value("found") == TWO


def test_own_rendezvous_over_the_launchers_variables(notebook: Kernel):
    notebook.check(
        "def again():\n"
        "    dist.barrier()  # a rank that still connects would find its peer gone\n"
        "    dist.destroy_process_group()\n"
        "    dist.init_process_group('gloo')\n"
        "    total = torch.ones(1)\n"
        "    dist.all_reduce(total)\n"
        "    return total.item()\n"
        "found = distributed(gpus=2, gpu_type='cpu')(again).distributed()"
    )
    assert notebook.value("found") == [2.0, 2.0]


def test_function_that_fails_twice_before_it_succeeds(notebook: Kernel):
    notebook.check(
        "@distributed(gpus=2, gpu_type='cpu', retries=3, retry_on='any')\n"
        "def flaky():\n"
        "    from sgpu_magic import runtime\n"
        "    if runtime.get_restart_count() < 2:\n"
        "        raise RuntimeError('not yet')\n"
        "    return runtime.get_restart_count()\n"
        "found = flaky.distributed()"
    )
    assert notebook.value("found") == [2, 2]


def test_function_that_always_fails_ends_after_its_retries(notebook: Kernel):
    reply = notebook.run(
        "@distributed(gpus=2, gpu_type='cpu', retries=1, retry_on='any')\n"
        "def broken(rank):\n"
        "    if rank == 1:\n"
        "        raise KeyError('never there')\n"
        "    dist.barrier()\n"
        "broken.distributed()"
    )
    assert reply.ename == "KeyError", reply.story
    assert "attempt 2 of 2" in reply.text, reply.story


def test_nested_function_takes_its_closure_and_its_defaults(notebook: Kernel):
    notebook.check(
        "def make(scale):\n"
        "    offset = 3\n"
        "    def scaled(value, extra=torch.ones(2), *, rank):\n"
        "        return (value * scale + offset + rank + extra.sum()).item()\n"
        "    return distributed(gpus=2, gpu_type='cpu')(scaled)\n"
        "found = make(10).distributed(torch.ones(()))"
    )
    assert notebook.value("found") == [15.0, 16.0]


def test_arguments_are_the_ranks_own_copies(notebook: Kernel):
    notebook.check(
        "weights = torch.zeros(3)\n"
        "@distributed(gpus=2, gpu_type='cpu')\n"
        "def spoil(given, rank):\n"
        "    given += rank + 1\n"
        "    weights.sub_(1)\n"
        "    return [given.sum().item(), weights.sum().item()]\n"
        "mine = torch.zeros(3)\n"
        "found = spoil.distributed(mine)"
    )
    assert notebook.value("found") == [[3.0, -3.0], [6.0, -3.0]]
    assert notebook.value("[mine.sum().item(), weights.sum().item()]") == [0.0, 0.0]


@pytest.mark.slow
def test_model_that_is_trained_comes_back_with_what_it_learned(notebook: Kernel):
    # a launcher that forks returns nothing: the trained model is lost with its processes
    notebook.check(
        "model = torch.nn.Linear(2, 1)\n"
        "@distributed(gpus=2, gpu_type='cpu')\n"
        "def train(model, rank):\n"
        "    parallel = torch.nn.parallel.DistributedDataParallel(model)\n"
        "    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)\n"
        "    for _ in range(3):\n"
        "        parallel(torch.full((4, 2), 1.0 + rank)).sum().backward()\n"
        "        optimizer.step()\n"
        "    return model\n"
        "first, second = train.distributed(model)"
    )
    assert notebook.value("torch.equal(first.weight, second.weight)")
    assert not notebook.value("torch.equal(first.weight, model.weight)")


def test_one_rank_is_a_group_too(notebook: Kernel):
    notebook.check("found = joined.options(gpus=1).distributed()")
    assert notebook.value("found") == [[0, 1, 1.0]]


@pytest.mark.parametrize("gpus", [0, -1, 1.5, "two"])
def test_number_of_ranks_that_is_none_is_told_before_anything_starts(notebook: Kernel, gpus: object):
    before = notebook.home.runs
    reply = notebook.run(f"joined.options(gpus={gpus!r}).distributed()")
    assert reply.ename == "UsageError", reply.story
    assert repr(gpus) in reply.evalue, reply.story
    assert notebook.home.runs == before


def test_launcher_of_another_package_starts_no_processes_on_a_rank(kernel: Kernel, tmp_path: Path):
    """In the notebook it works as ever."""
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("from .launchers import notebook_launcher\n")
    (package / "launchers.py").write_text(
        "def notebook_launcher(function, args, num_processes):\n    function(*args)\n"
    )
    kernel.check(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom accelerate import notebook_launcher")
    kernel.check("def train(lr):\n    print('lr', lr)")
    launch = "notebook_launcher(train, (0.1,), num_processes=2)"
    assert kernel.check(launch).text == "lr 0.1"
    reply = kernel.run(f"%%distributed -n 2 --type cpu\nfrom accelerate import notebook_launcher\n{launch}")
    assert reply.status == "error"
    assert "on rank" in reply.traceback
    assert "the run's 2 ranks are there already" in reply.traceback
    kernel.check("sys.path.pop(0); sys.modules.pop('accelerate'); sys.modules.pop('accelerate.launchers')")


def test_script_that_a_cell_runs_finds_what_torchrun_gives_it(kernel: Kernel):
    folder = kernel.home.work / "scripts"
    folder.mkdir(exist_ok=True)
    (folder / "near.py").write_text("size = 4\n")
    (folder / "train.py").write_text(
        "import pickle, sys\nimport near\nclass Config:\n    pass\n"
        "same = type(pickle.loads(pickle.dumps(Config()))) is Config\n"
        "print(sys.argv, __name__, near.size, same)\nif len(sys.argv) == 1:\n    raise ValueError('NaN in batch 118')\n"
    )
    reply = kernel.check("%%distributed -n 2 --type cpu\n%run scripts/train.py --lr 0.1")
    assert reply.lines(1) == ["['scripts/train.py', '--lr', '0.1'] __main__ 4 True"]
    reply = kernel.run("%%distributed -n 2 --type cpu\n%run scripts/train.py")
    assert reply.ename == "ValueError"
    assert "scripts/train.py:8" in reply.text + reply.traceback

"""`sgpu run` and `sgpu jobs`: notebooks, scripts and job files from a shell, as cron and CI run them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples import first_rows
from headless_notebooks import notebook
from kernels import Home, eventually, plain
from lazy_modules import nbformat
from pool_client import PoolClient
from served_pools import served_pool

from sgpu_magic.views.units import TIMES
from sgpu_magic.wire.base import RunState

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:2", "SGPU_PRICES": "a10=1.20"}
COMMAND = [sys.executable, "-m", "sgpu_magic.cli"]


@pytest.fixture(scope="module", autouse=True)
def warm(home: Home) -> None:
    """The pool, its agent and its zygote are there, and what they take is no leak."""
    client = PoolClient(home)
    try:
        assert client.begin("pass", ranks=2, device_type="a10").ended().state is RunState.SUCCEEDED
    finally:
        client.close()


@pytest.fixture(autouse=True)
def nothing_stays(home: Home) -> Iterator[None]:
    yield
    home.check_leaks()


def saved(home: Home, name: str, *cells: str, parameters: int | None = None) -> Path:
    """A notebook in the home's working directory; one cell may be tagged `parameters`."""
    made = notebook(*cells)
    made.metadata["kernelspec"]["name"] = "python3"
    if parameters is not None:
        made.cells[parameters].metadata["tags"] = ["parameters"]
    path = home.work / name
    nbformat.write(made, path)
    return path


def start(home: Home, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=home.environ | variables,
        cwd=home.work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(home: Home, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run the command to its end: exit code, standard output, standard error."""
    process = start(home, *arguments, **variables)
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def copy_in(out: str) -> nbformat.NotebookNode:
    """The executed copy that the command has named; it is a valid notebook."""
    made = nbformat.read(out.splitlines()[-1], as_version=4)
    nbformat.validate(made)
    return made


def text_of(cell: nbformat.NotebookNode) -> str:
    parts = []
    for output in cell.outputs:
        data = output.get("data", {})
        parts.append(output.get("text", "") or data.get("text/plain", "") or "\n".join(output.get("traceback", [])))
    return plain("\n".join(parts))


# ------------------------------------------------------------ what runs where


@pytest.mark.slow
def test_cells_get_what_the_command_says_and_what_they_say_wins(home: Home):
    source = saved(
        home,
        "train.ipynb",
        "lr = 0.5\nname = 'x'\nlayers = None",
        "%%distributed\nprint('lr', lr, type(lr).__name__, name, layers, world_size)",
        "%%distributed -n 1 --type cpu\nprint('alone', world_size)",
        parameters=0,
    )
    before = source.read_bytes()
    options = ["-n", "3", "--type", "a10", "-p", "lr", "0.25", "-r", "name=7", "-y", "layers: [64, 32]"]
    code, out, err = run(home, "run", "train.ipynb", *options)
    assert code == 0, err
    assert re.search(r"train\.\d{8}-\d{6}\.ipynb$", out.strip())
    made = copy_in(out)
    tags = [cell.metadata.get("tags", []) for cell in made.cells]
    assert tags == [["injected-sgpu"], ["parameters"], ["injected-parameters"], [], []]
    assert made.cells[2].source == "# Parameters\nlayers = [64, 32]\nlr = 0.25\nname = '7'"
    text = text_of(made.cells[3])
    assert "3 ranks" in text
    assert f"3 {TIMES} A10" in text
    assert "[2] lr 0.25 float 7 [64, 32] 3" in text
    assert "alone 1" in text_of(made.cells[4])
    assert made.metadata.papermill.parameters == {"layers": [64, 32], "lr": 0.25, "name": "7"}
    assert made.metadata.papermill.exception is None
    assert err.count("[5/5] %%distributed print('alone', world_size) ... ") == 1
    assert "train.ipynb: every cell ran in" in err
    # the notebook itself stays as it is
    assert source.read_bytes() == before


@pytest.mark.slow
def test_a_notebook_without_our_cells_runs_on_the_ranks_as_a_whole(home: Home):
    saved(home, "plain.ipynb", "n = 2", "total = rank + n", "print('total', total, device.type)", parameters=0)
    code, out, err = run(
        home, "run", "plain.ipynb", "--gpus", "2", "--type", "a10", "-p", "n=40", "-o", "copies/it.ipynb"
    )
    assert code == 0, err
    assert out.strip() == str(home.work / "copies/it.ipynb")
    made = copy_in(out)
    assert made.cells[0].source == ("%load_ext sgpu_magic\n%sgpu_connect --idle 0 --gpus 2 --type a10\n%sgpu_auto on")
    assert "[1] total 41 cpu" in text_of(made.cells[-1])
    # an executed copy runs again, and its injected cells are replaced
    code, out, err = run(home, "run", "copies/it.ipynb", "--gpus", "1", "-p", "n=1", "-o", "again.ipynb")
    assert code == 0, err
    made = copy_in(out)
    assert len(made.cells) == 5
    assert "total 1 cpu" in text_of(made.cells[-1])


@pytest.mark.slow
def test_cells_here_stay_here_and_a_notebook_of_no_pool_needs_none(home: Home):
    saved(home, "here.ipynb", "import os\nprint('pid', os.getpid(), 'rank' in globals())")
    code, out, _ = run(home, "run", "here.ipynb", "-n", "2", "--cells", "here", "-v")
    assert code == 0
    assert re.search(r"^pid \d+ False$", out, re.MULTILINE)
    code, out, _ = run(home, "run", "here.ipynb", SGPU_STATE_DIR=str(home.path / "other"))
    assert code == 0
    assert [path.name for path in (home.path / "other").iterdir()] == ["jobs"]
    assert len(copy_in(out).cells) == 1


def test_a_script_runs_on_all_ranks(home: Home):
    (home.work / "train.py").write_text(
        "import sys\nif __name__ == '__main__':\n    print('rank', rank, sys.argv[1:])\n"
        "    print('from rank', rank, file=sys.stderr)\n"
    )
    before = set(home.work.iterdir())
    code, out, err = run(home, "run", "train.py", "-n", "2", "--type", "a10", "--", "--lr", "0.1")
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] rank 0 ['--lr', '0.1']", "[1] rank 1 ['--lr', '0.1']"]
    assert "[1] from rank 1" in err
    assert "train.py succeeded in" in err
    assert set(home.work.iterdir()) == before
    assert "train.py" in run(home, "runs", "-n", "1")[1]


def script(home: Home) -> str:
    """Write a script with a module beside it; return its path. `3` as second argument is rank 1's exit code."""
    folder = home.work / "code"
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").write_text("size = 4\n")
    (folder / "main.py").write_text(
        "\n\nfrom __future__ import annotations\nimport inspect, os, pickle, sys, warnings\n"
        "from dataclasses import dataclass\nimport beside\n\n@dataclass\nclass Config:\n    lr: float\n\n"
        "warnings.warn('old')\n"
        "if rank == 0:\n    print(sys.argv, __name__, __file__ == sys.argv[2], "
        "sys.path[0] == os.path.dirname(__file__))\n"
        "    print(os.getcwd(), beside.size, inspect.getsourcefile(Config) == __file__)\n"
        "    print(pickle.loads(pickle.dumps(Config(0.1))), sys.modules['__main__'].Config is Config)\n"
        "elif len(sys.argv) > 3:\n    sys.exit(int(sys.argv[3]))\nelse:\n"
        "    raise ValueError('NaN in batch 118')\nrank\n"
    )
    return str(folder / "main.py")


@pytest.mark.slow
def test_a_script_finds_what_torchrun_gives_it(home: Home):
    """Arguments, `__main__`, working directory, import path and the lines of its file."""
    file = script(home)
    code, out, err = run(home, "run", "code/main.py", "-n", "2", "--type", "a10", "--", "--lr", file)
    assert code == 1, err
    assert out.splitlines() == [
        f"[0] ['code/main.py', '--lr', '{file}'] __main__ True True",
        f"[0] {home.work} 4 True",
        "[0] Config(lr=0.1) True",
    ]
    assert f"[0] {file}:12: UserWarning: old" in err
    assert "ValueError: NaN in batch 118" in err
    assert f"File {file}:20\n" in err
    assert "Cell In" not in err


@pytest.mark.slow
def test_a_scripts_exit_code_counts(home: Home):
    file = script(home)
    code, _, err = run(home, "run", "code/main.py", "-n", "2", "--type", "a10", "--", "x", file, "3")
    assert code == 1
    assert "SystemExit: 3" in err
    assert "%tb" not in err
    code, _, err = run(home, "run", "code/main.py", "-n", "2", "--type", "a10", "--", "x", file, "0")
    assert code == 0, err


@pytest.mark.slow
def test_torchruns_options(home: Home):
    """A module, restarts after a failure, and options without effect."""
    folder = home.work / "launched"
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text("size = 3\n")
    (folder / "train.py").write_text(
        "import os, sys\nfrom . import size\nrestarts = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print(__name__, size, sys.argv == [__file__, '--lr', '1'], restarts, os.environ['LOCAL_WORLD_SIZE'])\n"
        "if restarts == '0':\n    raise ValueError('again')\n"
    )
    options = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--rdzv-backend",
        "c10d",
        "--type",
        "cpu",
    ]
    code, out, err = run(home, "torchrun", *options, "-m", "launched.train", "--lr", "1")
    assert code == 0, err
    assert sorted(out.splitlines())[-2:] == ["[1] __main__ 3 True 0 2", "[1] __main__ 3 True 1 2"]
    assert len(out.splitlines()) == 4
    assert "--rdzv-backend has no effect: the pool arranges the rendezvous." in err


@pytest.mark.slow
def test_a_scripts_syntax_error_names_its_line(home: Home):
    (home.work / "broken.py").write_text("x = 1\ny = (\n")
    code, _, err = run(home, "run", "broken.py", "-n", "2", "--type", "a10")
    assert code == 1
    assert f"File {home.work / 'broken.py'}, line 2\n    y = (" in err


@pytest.mark.slow
def test_a_script_is_shown_as_it_runs_and_copied_when_asked(home: Home):
    (home.work / "wait.py").write_text(
        '"""Words."""\nfrom __future__ import annotations\nimport os, sys, time\nprint("begun", os.path.basename('
        '__file__))\nwhile not os.path.exists("go"):\n    time.sleep(0.02)\nassert rank == 0, "bad batch"\n'
    )
    (home.work / "go").unlink(missing_ok=True)
    process = start(home, "run", "wait.py", "-n", "2", "--type", "cpu", "-o", "wait-copy.ipynb")
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] begun wait.py\n", "[1] begun wait.py\n"]
    assert process.poll() is None
    (home.work / "go").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "AssertionError: bad batch" in err
    assert err.splitlines()[-1] == str(home.work / "wait-copy.ipynb")
    made = nbformat.read(home.work / "wait-copy.ipynb", as_version=4)
    assert "[1] begun wait.py" in text_of(made.cells[-1])
    (home.work / "go").unlink()


@pytest.mark.slow
def test_a_script_with_functions_for_the_ranks_runs_once(home: Home):
    (home.work / "driver.py").write_text(
        "import sys\nfrom sgpu_magic import distributed\n\n"
        "@distributed\ndef train(lr):\n    from sgpu_magic import runtime\n    print('train', lr)\n"
        "    return runtime.get_world_size()\n\nprint('sizes', train.distributed(0.1), sys.argv[1:])\nsys.exit(0)\n"
    )
    before = set(home.runs)
    code, out, err = run(home, "run", "driver.py", "-n", "2", "--type", "a10", "--", "x")
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] train 0.1", "[1] train 0.1", "sizes [2, 2] ['x']"]
    assert len(set(home.runs) - before) == 1
    assert "SystemExit" not in err
    # below the `def`
    (home.work / "driver.py").write_text(
        "from sgpu_magic import distributed\n@distributed\ndef train():\n    1 / 0\ntrain.distributed()\n"
    )
    code, out, err = run(home, "run", "driver.py", "-n", "2", "--type", "a10")
    assert code == 1
    assert f"File {home.work / 'driver.py'}:4, in train()" in err


@pytest.mark.slow
def test_a_script_spawns_processes_as_python_does(home: Home):
    (home.work / "spawns.py").write_text(
        "import pickle\nimport torch.multiprocessing as mp\nfrom torch.distributed import init_process_group\n"
        "def helper(): return init_process_group\n"
        "def child(index, queue):\n"
        "    queue.put((index, pickle.loads(pickle.dumps(helper)) is helper, helper.__module__))\n"
        "if __name__ == '__main__':\n    queue = mp.get_context('spawn').SimpleQueue()\n"
        "    mp.spawn(child, args=(queue,), nprocs=1)\n    print(queue.get())\n"
    )
    code, out, err = run(home, "run", "spawns.py", "-n", "1", "--type", "a10")
    assert (code, out) == (0, "[0] (0, True, '__mp_main__')\n"), err


@pytest.mark.slow
def test_a_rank_submits_no_run(home: Home):
    """It would wait for devices that its own run holds, and every rank would do the same."""
    (home.work / "nested.py").write_text(
        "import importlib\nlaunch = importlib.import_module('sgpu_magic').distributed\n"
        "def f(): return 1\nprint(launch(f, gpus=2, gpu_type='a10').distributed())\n"
    )
    code, _, err = run(home, "run", "nested.py", "-n", "4", "--type", "a10")
    assert code == 2, err
    assert re.search(r"UsageError: rank \d of run [0-9a-f]{4} tried to start run f, but a run can't start another", err)
    # processes that a rank starts belong to the run, too
    (home.work / "inner.ipynb").unlink(missing_ok=True)
    saved(home, "inner.ipynb", "%%distributed -n 1 --type cpu\npass")
    (home.work / "outer.py").write_text(
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'sgpu_magic.cli', 'run', 'inner.ipynb']).returncode)\n"
    )
    code, _, err = run(home, "run", "outer.py", "-n", "1", "--type", "cpu")
    assert code == 1, err
    assert "a run can't start another" in err


@pytest.mark.slow
def test_a_notebook_as_text_runs_as_a_notebook(home: Home):
    (home.work / "other.py").write_text("# Databricks notebook source\nn = 40\n")
    (home.work / "words.py").write_text(
        "# Databricks notebook source\n# MAGIC %md\n# MAGIC # Words\n\n# COMMAND ----------\n\n"
        "# MAGIC %pip --version\n\n# COMMAND ----------\n\n# MAGIC %run ./other\n\n# COMMAND ----------\n\n"
        "# MAGIC %sh\n# MAGIC echo from a shell; false\n\n# COMMAND ----------\n\n"
        "# MAGIC %%distributed\n# MAGIC print('total', n + rank)\n"
    )
    code, out, err = run(home, "run", "words.py", "-n", "2", "--type", "a10", "-p", "lr=1")
    assert code == 0, err
    assert re.search(r"words\.\d{8}-\d{6}\.ipynb$", out.strip())
    texts = [text_of(cell) for cell in copy_in(out).cells if cell.cell_type == "code"]
    assert any(text.startswith("pip ") for text in texts)
    assert any("from a shell" in text for text in texts)
    assert "[1] total 41" in texts[-1]
    assert "every cell ran" in err


@pytest.mark.parametrize(
    "form", ["yaml", pytest.param("json", marks=pytest.mark.slow), pytest.param("toml", marks=pytest.mark.slow)]
)
def test_job_files(home: Home, form: str):
    folder = home.work / f"jobs-{form}"
    folder.mkdir()
    (folder / "data").mkdir()
    (folder / "data/words").write_text("a few words")
    text = {
        "yaml": "notebook: nb.ipynb\nhardware_accelerator: GPU_2xA10\nparameters:\n  lr: 0.1\n  tags: [a, b]\n"
        "env: {KIND: first}\nmax_cost: 5\ntimeout_s: 60\noutput: out.ipynb\nupload: data\n",
        "json": json.dumps(
            {
                "notebook": "nb.ipynb",
                "hardware_accelerator": "GPU_2xA10",
                "parameters": {"lr": 0.1, "tags": ["a", "b"]},
                "env": {"KIND": "first"},
                "max_cost": 5,
                "timeout": "1m",
                "output": "out.ipynb",
                "upload": ["data/words", "data"],
            }
        ),
        "toml": 'notebook = "nb.ipynb"\nhardware_accelerator = "GPU_2xA10"\noutput = "out.ipynb"\nmax_cost = 5\n'
        'upload = "data"\n[parameters]\nlr = 0.1\ntags = ["a", "b"]\n[env]\nKIND = "first"\n',
    }[form]
    (folder / f"job.{form}").write_text(text)
    saved(home, f"jobs-{form}/nb.ipynb", "import os\nlr = 1\ntags = []",
          "%%distributed\nfrom sgpu_magic import runtime\nprint(lr, tags, world_size, os.environ['KIND'], "
          "(runtime.upload_path('data') / 'words').read_text())", parameters=0)  # fmt: skip
    # like cron, from another directory
    code, out, err = run(home, "run", f"jobs-{form}/job.{form}", "-p", "lr=0.2")
    assert code == 0, err
    assert out.strip() == str(folder / "out.ipynb")
    made = copy_in(out)
    assert "[1] 0.2 ['a', 'b'] 2 first a few words" in text_of(made.cells[-1])
    (run_dir,) = [home.run_dir(run_id) for run_id in home.runs[-1:]]
    assert json.loads((run_dir / "run.json").read_bytes())["spec"]["max_cost"] == 5


# ------------------------------------------------------------ what goes wrong


@pytest.mark.slow
def test_a_failing_cell_is_code_1_and_the_copy_has_what_there_was(home: Home):
    saved(
        home,
        "bad.ipynb",
        "print('before')",
        "%%distributed -n 2\nfor n in range(40): print('step', n)\nprint('on it')\n"
        "if rank == 1: raise ValueError('bad batch')",
        "after = 1",
    )
    code, out, err = run(home, "run", "bad.ipynb")
    assert code == 1
    made = copy_in(out)
    assert "before" in text_of(made.cells[1])
    assert "bad batch" in text_of(made.cells[2])
    assert made.cells[3].execution_count is None
    assert made.metadata.papermill.exception is True
    assert "ValueError: bad batch" in err
    assert "[1] on it" in err
    assert "[0] step 0\n" not in err
    assert re.search(rf"^\.\.\. \d+ more lines are in {re.escape(out.strip())}$", err, re.MULTILINE)
    assert "bad.ipynb: ended with code 1 in" in err


@pytest.mark.slow
def test_a_kernel_that_dies_is_code_1(home: Home):
    saved(home, "dies.ipynb", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "after = 1")
    code, out, err = run(home, "run", "dies.ipynb")
    assert code == 1
    assert "the kernel died" in err
    assert copy_in(out).cells[1].execution_count is None


@pytest.mark.slow
def test_an_option_that_means_nothing_is_code_2(home: Home):
    saved(home, "typo.ipynb", "%%distributed --gpsu 2\npass")
    code, out, err = run(home, "run", "typo.ipynb")
    assert code == 2
    assert "--gpsu" in err
    assert copy_in(out).cells[-1].outputs


@pytest.mark.slow
def test_no_room_is_code_3_and_is_tried_again(home: Home):
    saved(home, "full.ipynb", "%%distributed -n 4 --type a10\nimport time; time.sleep(100)")
    saved(home, "waits.ipynb", "%%distributed -n 2 --type a10 --wait 0\npass")
    first = start(home, "run", "full.ipynb")
    eventually(lambda: len(home.rank_pids()) == 4, 30)
    code, _, err = run(home, "run", "waits.ipynb", "--retries", "1")
    assert code == 3, err
    assert "CapacityError" in err
    assert err.count("waits.ipynb: ended with code 3") == 2
    assert "retrying in 3.0 s (0 more after that)" in err
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=40)
    assert first.returncode == 130


@pytest.mark.slow
def test_time_over_is_code_124(home: Home):
    saved(
        home,
        "slow.ipynb",
        "%%distributed -n 2 --type cpu --name slow-one\nprint('begun', flush=True)\nimport time; time.sleep(100)",
    )
    code, out, err = run(home, "run", "slow.ipynb", "--timeout", "9s")
    assert code == 124
    assert "the time limit of 9.0 s was exceeded in cell 2" in err
    assert "[1] begun" in text_of(copy_in(out).cells[-1])
    eventually(lambda: home.ledger()[home.run_named("slow-one")].state == "cancelled")


@pytest.mark.slow
def test_time_over_before_the_kernel_is_there_says_so(home: Home):
    saved(home, "early.ipynb", "open('ran', 'w')")
    code, out, err = run(home, "run", "early.ipynb", "--timeout", "0.1s")
    assert code == 124
    assert "the time limit of 0.10 s was exceeded while the kernel was starting; nothing has run.\n" in err
    assert copy_in(out).cells[-1].outputs == []
    assert not (home.work / "ran").exists()


@pytest.mark.slow
def test_terminated_its_runs_end_first(home: Home):
    saved(
        home,
        "long.ipynb",
        "%%distributed -n 2 --type cpu --name long-one\nprint('begun', flush=True)\nimport time; time.sleep(100)",
        "after = 1",
    )
    process = start(home, "run", "long.ipynb")
    run_id = eventually(lambda: home.run_named("long-one"), 30)
    eventually(lambda: "begun" in home.log(run_id, 1), 30)
    process.terminate()
    out, err = process.communicate(timeout=40)
    assert process.returncode == 143
    assert "stopped in cell 2; the notebook's runs were ended" in err
    made = copy_in(out)
    # on a slow machine the kernel may not have received the lines yet, nor the pool's acceptance of the run
    assert "RunCancelled" in text_of(made.cells[1])
    assert made.cells[2].execution_count is None
    eventually(lambda: home.ledger()[run_id].state == "cancelled", 20)
    eventually(lambda: not home.rank_pids(), 20)


@pytest.mark.slow
def test_killed_it_leaves_nothing_behind(home: Home):
    """SIGKILL allows no cleanup: the kernel notices that its parent is gone, and the pool that the owner is."""
    saved(
        home,
        "killed.ipynb",
        "print('kept')",
        "%%distributed -n 2 --type cpu --name killed-one\nimport time; time.sleep(100)",
    )
    process = start(home, "run", "killed.ipynb", "-o", "killed-copy.ipynb")
    eventually(lambda: home.run_named("killed-one") and home.rank_pids(), 30)
    process.kill()
    process.communicate(timeout=20)
    eventually(lambda: home.ledger()[home.run_named("killed-one")].state == "cancelled", 20)
    # the output so far is in the copy
    made = nbformat.read(home.work / "killed-copy.ipynb", as_version=4)
    assert "kept" in text_of(made.cells[1])
    assert "killed" in run(home, "jobs", "-n", "1")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    first_rows([
        (["trian.ipynb"], ["trian.ipynb does not exist", "Did you mean `train.ipynb`?"]),
        (["train.ipynb", "-p", "lr"], ["-p"]),
        (["train.ipynb", "-p", "for=1"], ["'for' is not a name"]),
        (["train.ipynb", "--type", "not a type"], ["type"]),
        (["train.ipynb", "--timeout", "soon"], ["timeout", "90s"]),
        (["train.ipynb", "--kernel", "julia-9"], ["there is no kernel 'julia-9'", "python3"]),
        (["train.ipynb", "--max-cost", "-1"], ["max_cost"]),
        (["train.ipynb", "--", "--lr", "1"], ["takes no arguments"]),
        (["script.py", "-p", "lr=1"], ["is a script"]),
        (["nonsense.ipynb"], ["is not a notebook"]),
        (["typo.yaml"], ["hardware_acelerator", "Did you mean `hardware_accelerator`?"]),
        (["kind.yaml"], ["gpus", "int"]),
        (["both.yaml"], ["leave gpus and type out"]),
        (["name.yaml"], ["GPU_8xH100"]),
        (["empty.json"], ["names no notebook"]),
        (["broken.toml"], ["broken.toml can't be read"]),
    ], 4),
)  # fmt: skip
def test_what_can_not_be_meant_is_code_2_and_leaves_no_copy(home: Home, arguments: list[str], words: list[str]):
    folder = home.work / "usage"
    if not folder.is_dir():
        folder.mkdir()
        saved(home, "usage/train.ipynb", "pass")
        for name, text in {
            "script.py": "pass",
            "nonsense.ipynb": "nonsense",
            "typo.yaml": "notebook: train.ipynb\nhardware_acelerator: GPU_1xA10",
            "kind.yaml": "notebook: train.ipynb\ngpus: many",
            "both.yaml": "notebook: train.ipynb\ngpus: 1\nhardware_accelerator: GPU_1xA10",
            "name.yaml": "notebook: train.ipynb\nhardware_accelerator: H100",
            "empty.json": "{}",
            "broken.toml": "notebook = ",
        }.items():
            (folder / name).write_text(text)
    before = sorted(path.name for path in folder.iterdir())
    done = subprocess.run([*COMMAND, "run", *arguments], env=home.environ, cwd=folder, capture_output=True, timeout=30)
    err = done.stderr.decode()
    assert done.returncode == 2, err
    first, *pointer = err.splitlines()
    assert all(line.startswith("See `sgpu help ") for line in pointer)
    # one that names what to write instead needs no page of help
    assert len(pointer) == (0 if "Did you mean" in first else 1)
    for word in words:
        assert word in err
    assert sorted(path.name for path in folder.iterdir()) == before


# ------------------------------------------------------------ without the terminal


@pytest.mark.slow
def test_detached_it_goes_on_without_its_shell(home: Home):
    saved(
        home,
        "alone.ipynb",
        "%%distributed -n 2 --type cpu\nimport os, time\nprint('begun', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.02)",
    )
    before = set(home.runs)
    # a shell of its own session, which hangs up when it ends
    line = f"exec {' '.join(COMMAND)} run alone.ipynb --detach"
    shell = subprocess.run(["bash", "-c", line], env=home.environ, cwd=home.work, capture_output=True, timeout=30,
                           start_new_session=True)  # fmt: skip
    out = shell.stdout.decode()
    assert shell.returncode == 0, shell.stderr
    found = re.match(r"job ([0-9a-f]{4}) continues without this terminal: process (\d+)\n", out)
    assert found is not None, out
    job, pid = found[1], int(found[2])
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGHUP)
    eventually(lambda: any("begun" in home.log(run_id, 1) for run_id in set(home.runs) - before), 60)
    assert re.search(rf"^{job} +alone\.ipynb +running +1/2 ", run(home, "jobs")[1], re.MULTILINE)
    (home.work / "go").touch()
    eventually(lambda: re.search(rf"^{job} +alone\.ipynb +succeeded +2/2 ", run(home, "jobs")[1], re.MULTILINE), 30)
    code, out, err = run(home, "jobs", "log", job)
    assert (code, err) == (0, "")
    assert "every cell ran" in out
    assert "has ended: succeeded" in run(home, "jobs", "stop", job)[2]


@pytest.mark.slow
def test_a_detached_job_can_be_stopped(home: Home):
    saved(home, "endless.ipynb", "%%distributed -n 2 --type cpu --name endless\nimport time; time.sleep(100)")
    code, out, _ = run(home, "run", "endless.ipynb", "--detach")
    assert code == 0
    job = out.split()[1]
    eventually(lambda: home.run_named("endless") and home.rank_pids(), 30)
    assert "its runs are cancelled" in run(home, "jobs", "stop", job)[1]
    eventually(
        lambda: f"{job}   endless.ipynb" in run(home, "jobs")[1] and "terminated (143)" in run(home, "jobs")[1], 30
    )
    assert home.ledger()[home.run_named("endless")].state == "cancelled"


# ------------------------------------------------------------ on another machine's pool


@pytest.mark.slow
def test_a_pool_of_another_machine(home: Home):
    """The notebook's kernel is here, its ranks and what it uploads are there; a pool that is down is worth a retry."""
    with served_pool() as served:
        ann = served.user("ann")
        (ann.home.work / "data").mkdir()
        (ann.home.work / "data/words").write_text("a few words")
        saved(
            ann.home,
            "far.ipynb",
            "import os\nhere = os.getcwd()",
            "%%distributed\nfrom sgpu_magic import runtime\nroot = runtime.upload_path('data')\n"
            "print((root / 'words').read_text(), open('data/words').read(), os.getcwd() == here)",
        )
        options = ["--pool", "team", "-n", "2", "--type", "cpu", "--upload", "data"]
        code, out, err = run(ann.home, "run", "far.ipynb", *options)
        assert code == 0, err
        text = text_of(copy_in(out).cells[-1])
        assert "2 ranks on team" in text
        assert "[1] a few words a few words" in text
        assert "uploaded" in text
        saved(
            ann.home,
            "long.ipynb",
            "%%distributed --name far-one\nimport time\nprint('begun', flush=True)\ntime.sleep(100)",
        )
        process = start(ann.home, "run", "long.ipynb", *options)
        run_id = eventually(lambda: served.home.run_named("far-one"), 60)
        eventually(lambda: "begun" in served.home.log(run_id, 1), 30)
        process.terminate()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143, err
        eventually(lambda: served.home.ledger()[run_id].state == "cancelled", 20)
        served.stop()
        code, _, err = run(ann.home, "run", "far.ipynb", *options)
        assert code == 3, err
        assert "PoolError" in err
        served.start()

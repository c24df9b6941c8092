"""Runs launched again from their directories, in notebooks and from the shell."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from kernels import Home, Kernel, eventually, plain

from sgpu_magic.wire.run import RunRecord


def sgpu(home: Home, *arguments: str, status: int = 0, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sgpu_magic.cli", *arguments],
        env={**home.environ, **variables},
        cwd=home.work,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return plain(done.stdout + done.stderr)


def record(home: Home, run_id: str) -> RunRecord:
    return msgspec.json.decode((home.run_dir(run_id) / "run.json").read_bytes(), type=RunRecord)


def settled(home: Home, name: str = "") -> str:
    """The id of the newest run, or of the one of that name, once its payload is in its directory."""
    # a session's cells are recorded a moment later: in the ledger, and after their end in run.json
    run_id = eventually(lambda: home.run_named(name) if name else list(home.ledger())[-1], 10, "the run's row")
    eventually((home.run_dir(run_id) / "run.json").is_file, 10, "run.json")
    eventually(lambda: record(home, run_id).payload_kept, 10, "the payload is kept")
    return run_id


@pytest.mark.slow
def test_a_cell_runs_again_with_the_variables_that_it_had(kernel: Kernel, home: Home):
    kernel.check("import numpy as np\nweights, scale = np.arange(50_000.0), 3")
    kernel.check(
        "%%distributed -n 2 --out total:all\ntotal = float(weights.sum()) * scale + rank\nprint('first', scale)"
    )
    then = kernel.value("total")
    run_id = settled(home)
    kernel.check("weights, scale, total = None, None, None")
    reply = kernel.check(f"%sgpu_replay {run_id}")
    assert "[1] first 3" in reply.text
    assert f"a replay of run {run_id[:4]}" in reply.text
    assert kernel.value("total") == then
    assert kernel.value("scale") is None
    again = record(home, settled(home))
    assert again.spec.replay_of == run_id
    # and a replay can be replayed, with other ranks
    reply = kernel.check(f"%sgpu_replay {again.spec.run_id} -n 3")
    assert "[2] first 3" in reply.text
    assert len(kernel.value("total")) == 3


@pytest.mark.slow
def test_the_command_runs_a_cell_again_after_its_notebook_is_gone(home: Home, new_kernel: Callable[..., Kernel]):
    kernel = new_kernel()
    kernel.check("word = 'kept'")
    kernel.check("%%distributed -n 2\nprint(word, rank)\nif word == 'lost': raise ValueError('not this time')")
    run_id = settled(home)
    kernel.close()
    text = sgpu(home, "replay", run_id[:7])
    assert "[0] kept 0" in text
    assert "[1] kept 1" in text
    assert f"a replay of run {run_id[:4]}" in text
    assert "succeeded" in text


def test_the_command_says_by_its_exit_code_that_a_replay_failed(home: Home, kernel: Kernel):
    kernel.run("%%distributed -n 2\nif rank == 1: raise ValueError('every time')")
    text = sgpu(home, "replay", settled(home), status=1)
    assert "ValueError: every time" in text


def test_a_detached_replay_goes_on_by_itself(home: Home, kernel: Kernel):
    kernel.check("%%distributed -n 1 --name long\nprint('once more')")
    run_id = settled(home)
    text = sgpu(home, "replay", run_id, "--detach", "--name", "again")
    assert "continues without this notebook" in text
    again = home.run_named("again")
    eventually(lambda: home.ledger()[again].state == "succeeded", 20, "the replay ends")
    assert home.log(again, 0) == "once more\n"


@pytest.mark.slow
def test_values_of_env_are_taken_from_where_the_replay_runs(home: Home, kernel: Kernel):
    kernel.check("%%distributed -n 1 --env WORD=hidden-4711\nimport os\nprint('word', os.environ['WORD'])")
    run_id = settled(home)
    # the last file to be written; until then, files have temporary names for a moment
    eventually((home.run_dir(run_id) / "requirements.txt").is_file, 30, "the packages are recorded")
    for path in home.run_dir(run_id).iterdir():
        assert path.name.startswith("rank-") or path.name == "events.msgpack" or b"hidden-4711" not in path.read_bytes()
    text = sgpu(home, "replay", run_id, status=2)
    assert "was given the variables WORD by --env" in text
    assert "--env WORD=VALUE" in text
    assert "word other" in sgpu(home, "replay", run_id, "--env", "WORD=other")
    assert "word third" in sgpu(home, "replay", run_id, WORD="third")


def test_a_function_is_called_again(home: Home, kernel: Kernel):
    kernel.check(
        "from sgpu_magic import distributed\n"
        "@distributed(gpus=2)\ndef train(rank, rate):\n    print('rate', rate)\n    return rank * rate\n"
        "found = train.distributed(rate=5)"
    )
    run_id = settled(home)
    kernel.check("del train")
    reply = kernel.check(f"result = %sgpu_replay {run_id}")
    assert "[1] rate 5" in reply.text
    assert kernel.value("result.values") == [0, 5]


@pytest.mark.slow
def test_a_cell_of_a_session_runs_by_itself_and_says_what_is_missing(home: Home, new_kernel: Callable[..., Kernel]):
    kernel = new_kernel()
    kernel.check("%sgpu_connect -n 2 --ui none")
    kernel.check("%%distributed\nkept = 5")
    kernel.check("%%distributed --name alone\nprint('alone', rank, 'kept' in globals())")
    run_id = settled(home, "alone")
    kernel.check("%sgpu_disconnect")
    reply = kernel.check(f"%sgpu_replay {run_id}")
    assert "[1] alone 1 False" in reply.text
    assert "what earlier cells had set on its ranks is not here" in reply.text


@pytest.mark.parametrize("where", ["alone", pytest.param("session", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_can_be_replayed_at_once(home: Home, new_kernel: Callable[..., Kernel], where: str):
    kernel = new_kernel()
    kernel.check("import numpy as np\nlarge = np.ones(1_000_000)")
    if where == "session":
        kernel.check("%sgpu_connect -n 1 --ui none")
    options = "-n 1" if where == "alone" else ""
    kernel.check(f"%%distributed {options}\nprint('sum', large.sum())")
    # does not wait for the run's directory, which is complete some 2 s after the run's end
    reply = kernel.check("%sgpu_replay {_.run_id}")
    assert "[0] sum 1000000.0" in reply.text


@pytest.mark.slow
def test_what_can_not_be_replayed_says_why(home: Home, kernel: Kernel, new_home: Callable[..., Home]):
    assert "no run on this machine has an id that begins with 'ffffffff'" in kernel.run("%sgpu_replay ffffffff").evalue
    assert "which run?" in kernel.run("%sgpu_replay").evalue
    small = new_home({"SGPU_KEEP_PAYLOAD": "1000"})
    other = Kernel(small)
    try:
        other.check("import numpy as np\nlarge = np.ones(100_000)")
        other.check("%%distributed -n 1\nprint(large.sum())")
        reply = other.run(f"%sgpu_replay {small.runs[-1]}")
        assert reply.ename == "UsageError"
        assert "its variables are not in" in reply.evalue
        assert "more than the setting keep_payload allows" in reply.evalue
    finally:
        other.close()


@pytest.mark.parametrize("present", ["gone", pytest.param("same", marks=pytest.mark.slow)])
def test_the_working_directory_is_the_runs_or_the_difference_is_told(home: Home, new_kernel, present: str):
    kernel = new_kernel()
    folder = home.work / f"place-{present}"
    folder.mkdir()
    kernel.check(f"%cd -q {folder}")
    kernel.check("%%distributed -n 1\nimport os\nprint('in', os.path.basename(os.getcwd()))")
    run_id = settled(home)
    kernel.close()
    if present == "gone":
        folder.rmdir()
    text = sgpu(home, "replay", run_id)
    if present == "gone":
        assert f"its directory {folder} does not exist here" in text
        assert f"in {home.work.name}" in text
    else:
        assert f"in {folder.name}" in text
        folder.rmdir()


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """A Python with this one's packages and one more, `tinypkg`, which says which version it is."""
    folder = tmp_path / "other"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "ours.pth").write_text("\n".join(entry for entry in sys.path if entry.endswith("-packages")) + "\n")
    info = site / "tinypkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinypkg\nVersion: 1.0\n")
    (info / "RECORD").write_text("tinypkg.py,,\n")
    (site / "tinypkg.py").write_text("version = '1.0'\n")
    (site / "sgpu_magic.pth").write_text(f"{Path(__file__).parents[2]}\n")
    return str(folder / "bin" / "python")


@pytest.mark.slow
def test_a_replay_runs_in_the_python_that_the_run_had(home: Home, other_python: str):
    script = home.work / "with_tinypkg.py"
    script.write_text(
        "from sgpu_magic import distributed\n"
        "@distributed(gpus=1, ui='text')\ndef say():\n    import sys, tinypkg\n    print(tinypkg.version, sys.prefix)\n"
        "if __name__ == '__main__':\n    say.distributed()\n"
    )
    done = subprocess.run(
        [other_python, str(script)], env=home.environ, cwd=home.work, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    run_id = settled(home)
    requirements = home.run_dir(run_id) / "requirements.txt"
    eventually(requirements.is_file, 30, "the packages are recorded")
    assert "tinypkg==1.0" in requirements.read_text()
    prefix = str(Path(other_python).parents[1])
    text = sgpu(home, "replay", run_id)
    assert f"1.0 {prefix}" in text
    assert "packages" not in text
    text = sgpu(home, "replay", run_id, "--here", status=1)
    assert "packages that are not installed here: tinypkg 1.0" in text
    assert "No module named 'tinypkg'" in text

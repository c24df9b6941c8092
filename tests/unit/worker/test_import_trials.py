"""What an import may not do if its modules are to be executed in the zygote."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

CASES = {
    "plain": ("value = 1", ["plain"], ""),
    "thread": ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", [], "thread"),
    "process": ("import subprocess; child = subprocess.Popen(['sleep', '60'])", [], "process"),
    "opened": ("file = open(__file__)", [], "file open"),
    "handler": ("import signal; signal.signal(signal.SIGUSR1, lambda *_: None)", [], "signal"),
    "directory": ("import os; os.chdir('/')", [], "working directory"),
    "path": ("import sys; sys.path.append('/nowhere')", [], "sys.path"),
    "hook": ("import sys; sys.excepthook = print", [], "hook"),
    "printed": ("import os; os.write(1, b'welcome')", [], "prints"),
    "root_logger": ("import logging; logging.basicConfig()", [], "root logger"),
    "precision": ("import torch; torch.set_default_dtype(torch.float64)", [], "torch's settings"),
    "method": ("import multiprocessing as m; m.set_start_method('spawn')", [], "multiprocessing"),
    "raised": ("raise OSError('no licence')", [], "OSError: no licence"),
    "ended": ("import os; os._exit(0)", [], "ends the process"),
    "finalized": ("import weakref\nclass C: pass\nkept = C()\nweakref.finalize(kept, print)", [], "finalizer"),
    "rank_alone": ("import os; os.environ.get('LOCAL_RANK')", [], "rank_alone, which reads LOCAL_RANK"),
    "rank_inside": ("import plain, rank_alone", ["plain"], "rank_alone, which reads LOCAL_RANK"),
    "setter": ("import os; os.environ['T_CHAIN'] = '1'", ["setter"], ""),
    "chain": ("import setter, os; os.environ.get('T_CHAIN')", ["chain"], ""),
    "tracker": ("import plain, mlflow", ["plain"], "mlflow, which needs the run"),
    "exit_function": ("import atexit; atexit.register(print)", ["exit_function"], ""),
    "warned": ("import warnings; warnings.warn('old')", ["warned"], ""),
}
PROGRAM = """
import json, os, sys
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
from types import SimpleNamespace
import socket
import torch
from sgpu_magic.system import processes
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.worker.preload import preloading
processes.become_subreaper()
ours, theirs = socket.socketpair()
link = StreamConnection(ours, codec.to_zygote)
turn = preloading.Turn(link)
sys.path.insert(0, sys.argv[1])
order = SimpleNamespace(rank_variables=("RANK", "LOCAL_RANK"))
for name in json.loads(sys.argv[2]):
    trial = preloading._try(name, order, link, turn)
    print(json.dumps([name, trial.modules, trial.problem]))
print(json.dumps(["children", processes.child_pids(), ""]))
"""


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], str]]:
    folder = tmp_path_factory.mktemp("trials") / "site-packages"
    folder.mkdir()
    for name, (code, _, _) in {**CASES, "mlflow": ("", [], "")}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code) + "\n")
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(list(CASES))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {name: (modules, problem) for name, modules, problem in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_a_trial_finds_what_rules_an_import_out(trials: dict[str, tuple[list[str], str]], name: str) -> None:
    _, modules, problem = CASES[name]
    found = trials[name]
    assert found[0] == modules, found
    assert problem in found[1], found
    assert bool(problem) == bool(found[1]), found


def test_trials_leave_no_process_behind(trials: dict[str, tuple[list[str], str]]) -> None:
    assert trials["children"] == ([], "")

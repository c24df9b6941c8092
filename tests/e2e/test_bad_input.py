"""Bad input: one paragraph that names the remedy, no traceback of ours, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import threading

import pytest
from kernels import Home, Kernel, Reply, eventually, stop_process, wait_gone


def paragraph(reply: Reply) -> str:
    """The one paragraph that is shown, above the pointer to its page of help unless it names what to write instead.

    Fails when a frame of a traceback is shown.
    """
    assert reply.status == "error", reply.story
    shown, _, pointer = reply.traceback.strip().rpartition("\n")
    if not pointer.startswith("See `%sgpu_help "):
        shown = reply.traceback.strip()
        assert "Did you mean `" in shown or "-h` shows the options." in shown
    assert "sgpu_magic/" not in shown, shown
    assert "Traceback" not in shown, shown
    assert "\n\n" not in shown, shown
    return shown


def refused(kernel: Kernel, code: str) -> str:
    """Run a cell that must be refused before anything starts, and return what is shown."""
    runs, rows = set(kernel.home.runs), ledger(kernel.home)
    reply = kernel.run(code)
    shown = paragraph(reply)
    assert reply.text == "", f"something is shown beside the error: {reply.text}"
    assert set(kernel.home.runs) == runs, "a run directory was made"
    assert ledger(kernel.home) == rows, "the ledger has a row"
    assert "\n" not in shown, shown
    return shown


def ledger(home: Home) -> int:
    """Number of runs that the ledger knows."""
    file = home.state / "ledger.sqlite3"
    if not file.exists():
        return 0
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        return connection.execute("select count(*) from runs").fetchone()[0]
    finally:
        connection.close()


# ---------------------------------------------------------------- the line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--frobnicate", ["--frobnicate", "%%distributed -h"]),
        ("--gpu 2", ["`--gpu`. Did you mean `--gpus`?"]),
        ("-n", ["-n", "%%distributed -h"]),
        ("-n zero", ["'zero'", "number of ranks"]),
        ("-n 0", ["'0'", "number of ranks"]),
        ("-n -3", ["%%distributed -h"]),
        ("-n 5000", ["4096"]),
        ("--type warp9", ["warp9"]),
        ("-n 2 --timeout soon", ["--timeout", "'soon'", "90s"]),
        ("-n 2 --timeout 8d", ["7 days"]),
        ("-n 2 --timeout 0", ["--timeout"]),
        ("-n 2 --wait never", ["--wait", "'never'"]),
        ("-n 2 --out a:some", ["a:some", "all"]),
        ("-n 2 --out 3x", ["3x", "--out"]),
        ("-n 2 --in a-b", ["a-b", "--in"]),
        ("-n 2 --in not_there_at_all", ["not_there_at_all"]),
        ("-n 2 --exclude 1", ["--exclude"]),
        ("-n 2 --env NOVALUE", ["KEY=VALUE"]),
        ("-n 2 --env =x", ["KEY=VALUE"]),
        ("-n 2 --env CUDA_VISIBLE_DEVICES= --env RANK=7", ["CUDA_VISIBLE_DEVICES, RANK", "`--gpus`"]),
        ("-n 2 --ui fancy", ["fancy", "widget"]),
        ("-n 2 --pool moon", ["`moon`", "local"]),
        ("-n 2 --name 'open", ["quotes"]),
        ("-n 2 stray", ["stray"]),
    ],
)
def test_line(kernel: Kernel, line: str, words: list[str]):
    shown = refused(kernel, f"%%distributed {line}\npass")
    assert shown.startswith("UsageError: ")
    for word in words:
        assert word in shown, shown


def test_env_does_not_repeat_what_may_be_a_secret(kernel: Kernel):
    assert "s3cret" not in refused(kernel, "%%distributed -n 2 --env s3cret\npass")


def test_settings_that_mean_nothing(kernel: Kernel):
    kernel.check("import os; os.environ['SGPU_GRACE_S'] = 'soon'")
    shown = refused(kernel, "%%distributed -n 2\npass")
    assert "SGPU_GRACE_S" in shown
    kernel.check("del os.environ['SGPU_GRACE_S']")


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize("written", ["a10", "A10G", "NVIDIA A10", "h100"])
def test_type_that_the_pool_lacks(kernel: Kernel, written: str):
    shown = refused(kernel, f"%%distributed -n 2 --type '{written}'\npass")
    assert "this pool has no " in shown
    assert "16 CPU ranks" in shown
    assert "SGPU_STAND_IN=cpu" in shown
    assert "SGPU_SIMULATE" in shown


# ---------------------------------------------------------------- the cell


@pytest.mark.parametrize("body", ["\n", "# only a remark\n\n   # and another"])
def test_an_empty_cell_runs_nothing_and_stops_nothing(kernel: Kernel, body: str):
    runs = set(kernel.home.runs)
    assert "the cell is empty" in kernel.check(f"%%distributed -n 2\n{body}").text
    assert set(kernel.home.runs) == runs


def test_cell_without_a_body(kernel: Kernel):
    runs = set(kernel.home.runs)
    reply = kernel.run("%%distributed -n 2")
    assert reply.status == "error"
    assert "empty" in reply.text + reply.traceback
    assert set(kernel.home.runs) == runs


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("x = = 3", 2, "invalid syntax"),
        ("if True:\n    y = 1\n  z = 2", 4, "unindent"),
        ("print('open", 2, "unterminated string"),
        ("\n\nreturn 5", 4, "outside function"),
    ],
)
def test_cell_that_does_not_compile(kernel: Kernel, body: str, line: int, words: str):
    runs = set(kernel.home.runs)
    reply = kernel.run(f"%%distributed -n 2\n{body}")
    shown = paragraph(reply)
    assert f"line {line}" in shown
    assert words in shown
    assert "SyntaxError" in shown or "IndentationError" in shown
    assert f"Cell In[{reply.execution_count}]" in shown
    assert set(kernel.home.runs) == runs
    assert "interactiveshell" not in shown


def test_out_name_that_the_cell_never_sets(kernel: Kernel):
    shown = refused(kernel, "%%distributed -n 2 --out history,loss\nloss = 1")
    assert "`history`" in shown
    assert "It sets: loss" in shown


def test_out_name_that_a_rank_does_not_set_at_run_time(kernel: Kernel):
    reply = kernel.run("%%distributed -n 2 --out best:all --ui none\nif rank == 0: best = 1")
    shown = paragraph(reply)
    assert "rank 1" in shown
    assert "`best`" in shown


# ---------------------------------------------------------------- what can't travel


def test_unpicklable_capture_names_the_path(kernel: Kernel):
    kernel.check(
        "import threading\n"
        "class Dataset:\n"
        "    def __init__(self): self._lock = threading.Lock()\n"
        "class Loader:\n"
        "    def __init__(self): self.dataset = Dataset()\n"
        "loader = Loader()"
    )
    shown = refused(kernel, "%%distributed -n 2\nprint(loader)")
    assert shown.startswith("SerializationError: ")
    assert "loader.dataset._lock" in shown
    assert "_thread.lock" in shown
    assert "--exclude loader" in shown


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("thing = open(__import__('os').devnull)", "thing"),
        ("thing = (i for i in range(3))", "generator"),
        ("thing = {'deep': [1, {'er': __import__('threading').Thread()}]}", "deep"),
        ("thing = __import__('sqlite3').connect(':memory:')", "SQLite"),
    ],
)
def test_other_unpicklable_captures(kernel: Kernel, make: str, words: str):
    kernel.check(make)
    shown = refused(kernel, "%%distributed -n 2\nprint(thing)")
    assert shown.startswith("SerializationError: ")
    assert words in shown
    kernel.check("del thing")


def test_out_value_that_can_not_be_pickled(kernel: Kernel):
    reply = kernel.run("%%distributed -n 2 --out held --ui none\nimport threading\nheld = [threading.Lock()]")
    shown = paragraph(reply)
    assert reply.ename == "SerializationError"
    assert "`held`" in shown
    assert "_thread.lock" in shown
    assert kernel.value("'held' in globals()") is False


def test_class_that_exists_only_on_the_ranks_comes_back_or_is_told(kernel: Kernel):
    kernel.check("%%distributed -n 1 --out made --ui none\nclass There:\n    x = 3\nmade = There()")
    assert kernel.value("made.x") == 3


# ---------------------------------------------------------------- space


def test_payload_bigger_than_the_disk(kernel: Kernel):
    kernel.check(
        "import mmap, os, tempfile, numpy as np\n"
        "sparse = tempfile.TemporaryFile(dir='/dev/shm')\n"
        "os.ftruncate(sparse.fileno(), 1 << 45)\n"
        "huge = np.frombuffer(mmap.mmap(sparse.fileno(), 1 << 45, access=mmap.ACCESS_READ), dtype='u1')"
    )
    shown = refused(kernel, "%%distributed -n 2\nprint(len(huge))")
    assert "room" in shown or "space" in shown or "free" in shown
    assert "35" in shown
    kernel.check("del huge; sparse.close()")
    left = kernel.home.state / "uploads"
    assert not left.is_dir() or not list(left.iterdir())


# ---------------------------------------------------------------- pools


@pytest.mark.slow
def test_pool_of_another_version(new_home):
    """A pool that speaks a newer protocol: a real process whose welcome says so."""
    home = new_home()
    kernel = Kernel(home, load=False)
    try:
        kernel.check(
            "import sgpu_magic.wire.client as m\n"
            "import sgpu_magic.client.link as link, sgpu_magic.client.connector as connection\n"
            "%load_ext sgpu_magic"
        )
        kernel.check("%%distributed -n 1 --ui none\npass")
        busy = Kernel(home)
        try:
            cell = busy.start("%%distributed -n 1\nprint('up', flush=True)\nwhile True: pass")
            cell.until_shown("[0] up")
            # from here on, the notebook has a version that the pool does not support
            kernel.check("link.PROTOCOL_VERSION = connection.PROTOCOL_VERSION = 99")
            kernel.check("get_ipython().run_line_magic('unload_ext', 'sgpu_magic')")
            kernel.check("%load_ext sgpu_magic")
            rows = ledger(home)
            shown = paragraph(kernel.run("%%distributed -n 1\npass"))
            assert "PoolVersionError" in shown
            assert "99" in shown
            assert "sgpu pool stop" in shown
            assert ledger(home) == rows
            busy.interrupt()
            cell.wait(10)
        finally:
            busy.close()
    finally:
        kernel.close()


@pytest.mark.slow
def test_what_a_killed_pool_left_does_not_matter(new_home):
    home = new_home()
    kernel = Kernel(home)
    try:
        kernel.run("%%distributed -n 2 --ui none\nif rank == 1: 1 / 0")
        [failed] = home.runs
        first = home.pool_pid()
        stop_process(first, signal.SIGKILL, 5)
        # the pool may be killed before the ledger records an end
        with contextlib.closing(sqlite3.connect(home.state / "ledger.sqlite3", isolation_level=None)) as ledger:
            ledger.execute("UPDATE runs SET state = 'running', ended_at = NULL, failure = ''")
        assert (home.runtime / "pool.sock").exists()
        eventually(lambda: not home.zygote_pids() and not home.unexpected(), 10, home.unexpected)
        assert kernel.check("%%distributed -n 2\nprint('new pool')").lines(1) == ["new pool"]
        assert home.pool_pid() not in (None, first)
        with contextlib.closing(sqlite3.connect(home.state / "ledger.sqlite3")) as ledger:
            rows = ledger.execute("SELECT state, failure FROM runs WHERE run_id = ?", (failed,)).fetchall()
        assert rows == [("failed", "rank 1: ZeroDivisionError: division by zero")]
    finally:
        kernel.close()


@pytest.mark.slow
def test_address_file_of_a_dead_pool_whose_pid_lives_again(new_home):
    home = new_home()
    (home.state / "pool.json").write_text(
        json.dumps(
            {
                "pid": os.getpid(),
                "process_start": 1,
                "protocol_version": 1,
                "package_version": "0",
                "started_at": 0,
            }
        )
    )
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(home.runtime / "pool.sock"))
    kernel = Kernel(home)
    try:
        assert kernel.check("%%distributed -n 2\nprint('up')").lines(0) == ["up"]
    finally:
        kernel.close()


def test_runtime_directory_that_is_not_ours_alone(new_home):
    home = new_home()
    real = home.path / "elsewhere"
    home.runtime.rename(real)
    home.runtime.symlink_to(real)
    kernel = Kernel(home)
    try:
        shown = paragraph(kernel.run("%%distributed -n 2\npass"))
        assert "SGPU_RUNTIME_DIR" in shown
        assert list(real.iterdir()) == []
    finally:
        kernel.close()
        home.runtime.unlink()
        real.rename(home.runtime)


def test_runtime_directory_with_a_path_too_long(new_home):
    home = new_home()
    long = home.path / ("x" * 60) / ("y" * 60)
    kernel = Kernel(home, variables={"SGPU_RUNTIME_DIR": str(long)})
    try:
        shown = paragraph(kernel.run("%%distributed -n 2\npass"))
        assert "SGPU_RUNTIME_DIR" in shown
        assert "shorter" in shown
    finally:
        kernel.close()


@pytest.mark.slow
def test_ranks_python_without_torch(new_home):
    """The zygote can't import torch: the error says which Python and why."""
    home = new_home()
    broken = home.path / "broken"
    (broken / "torch").mkdir(parents=True)
    (broken / "torch" / "__init__.py").write_text("raise ImportError('libtorch is not for this machine')\n")
    kernel = Kernel(home, variables={"PYTHONPATH": str(broken)})
    try:
        shown = paragraph(kernel.run("%%distributed -n 2 --ui none\npass"))
        assert "libtorch is not for this machine" in shown
        assert "EnvironmentFailed" in shown
    finally:
        kernel.close()


def test_status_of_a_run_that_nobody_knows(kernel: Kernel):
    assert "not a run's id" in refused(kernel, "%sgpu_status now")


def test_helpers_see_threads_of_this_process():
    """The leak check counts what it should: a thread more is a thread more."""
    from kernels import level

    before = level(os.getpid())["threads"]
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert level(os.getpid())["threads"] == before + 1
    finally:
        stop.set()
        thread.join()
    wait_gone(0x7FFFFFF, 1)

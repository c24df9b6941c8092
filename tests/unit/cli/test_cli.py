"""The `sgpu` command as a separate process, with real kernels and real runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from examples import first_rows
from kept_runs import KeptRuns
from kernels import Home, Kernel, eventually

from sgpu_magic.cli import doctor
from sgpu_magic.cli.finding import Level
from sgpu_magic.config import load_settings
from sgpu_magic.system.processes import is_stopped

COMMAND = [sys.executable, "-m", "sgpu_magic.cli"]
# the command's memory without any log, measured at 45 MB
MOST_MEMORY_KB = 90_000


def sgpu(home: Home, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run the command to its end: exit code, standard output, standard error."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        env=home.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def output_of(home: Home, *arguments: str) -> str:
    code, out, err = sgpu(home, *arguments)
    assert (code, err) == (0, "")
    return out


def only_error(result: tuple[int, str, str], code: int) -> str:
    """The only paragraph of a failed command, above the pointer to its help page."""
    assert (result[0], result[1]) == (code, "")
    assert result[2].startswith("sgpu: ")
    paragraph, pointer = result[2].splitlines()
    assert re.fullmatch(r"See `sgpu help [a-z-]+`\.", pointer)
    return paragraph


def only_line(result: tuple[int, str, str]) -> str:
    """The only line of a command line that can't be parsed. It begins with the command, and needs no pointer."""
    assert (result[0], result[1]) == (2, "")
    assert result[2].startswith("sgpu ") or result[2].startswith("sgpu: ")
    assert result[2].count("\n") == 1
    return result[2].rstrip("\n")


def kept_run(home: Home, run_id: str, logs: dict[int, bytes]) -> str:
    """A run's directory as an earlier pool left it."""
    directory = home.run_dir(run_id)
    directory.mkdir(parents=True)
    for rank, data in logs.items():
        (directory / f"rank-{rank}.log").write_bytes(data)
    return run_id


@pytest.fixture
def bare_home() -> Iterator[Home]:
    """A home without any runs."""
    made = Home()
    yield made
    made.close()


@pytest.fixture
def started(home: Home) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command without waiting for it."""
    made: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=home.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        made.append(process)
        return process

    yield start
    for process in made:
        process.kill()
        process.communicate()


def newest_run(home: Home) -> str:
    return home.runs[-1]


# ------------------------------------------------------------ no pool


@pytest.mark.slow
def test_without_a_pool_everything_says_so_and_starts_none(bare_home: Home):
    assert "no local pool is running" in output_of(bare_home, "status")
    assert "no local pool is running" in output_of(bare_home, "pool", "status")
    assert "no local pool is running" in output_of(bare_home, "pool", "stop")
    assert output_of(bare_home, "runs") == "no runs yet\n"
    assert "no local pool is running" in only_error(sgpu(bare_home, "cancel", "7f3a"), 1)
    assert "no local pool is running" in only_error(sgpu(bare_home, "detach", "7f3a"), 1)
    assert "no local pool is running" in only_error(sgpu(bare_home, "stacks", "7f3a"), 1)
    assert "begins with '7f3a'" in only_error(sgpu(bare_home, "logs", "7f3a"), 2)
    assert bare_home.pool_pid() is None
    assert list(bare_home.state.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    first_rows([
        (["logs", "../../etc/passwd"], "is not a run's id"),
        (["logs", ""], "is not a run's id"),
        (["cancel", "%"], "is not a run's id"),
        (["detach", "%"], "is not a run's id"),
        (["stacks", "%"], "is not a run's id"),
    ], 2),
)  # fmt: skip
def test_what_means_nothing_is_one_paragraph(bare_home: Home, arguments: list[str], word: str):
    assert word in only_error(sgpu(bare_home, *arguments), 2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    first_rows([
        (["fly"], "sgpu has no command `fly`. `sgpu --help` shows the usage."),
        (["log"], "sgpu has no command `log`. Did you mean `logs`?"),
        (["pool", "lst"], "sgpu pool has no command `lst`. Did you mean `list`?"),
        (["logs", "--folow", "7f3a"], "sgpu logs has no option `--folow`. Did you mean `--follow`?"),
        # not that --listen is missing
        (["pool", "serve", "--lisen", "x"], "sgpu pool serve has no option `--lisen`. Did you mean `--listen`?"),
        (["run", "--timeot", "5m", "n.ipynb"], "sgpu run has no option `--timeot`. Did you mean `--timeout`?"),
        (["runs", "--state", "faild"], "sgpu runs: --state has no value `faild`. Did you mean `failed`?"),
        (["usage", "--by", "colour"], "sgpu usage: --by has no value `colour`. The values are day, user, session, "
         "notebook, type."),
        (["jobs", "-n", "5", "lo"], "sgpu jobs has no command `lo`. Did you mean `log`?"),
        (["pool", "restart"], "sgpu pool has no command `restart`. `sgpu pool --help` shows the usage."),
        (["logs"], "sgpu logs: the following arguments are required: RUN. `sgpu logs --help` shows the usage."),
        (["logs", "7f3a", "more"], "sgpu logs: unrecognized arguments: more. `sgpu logs --help` shows the usage."),
        (["logs", "7f3a", "--rank", "one"], "sgpu logs: argument --rank: 'one' is not a rank: 0, 1, 2 .... "
         "`sgpu logs --help` shows the usage."),
        (["runs", "-n", "0"], "sgpu runs: argument -n: '0' is not a whole number above 0. `sgpu runs --help` shows "
         "the usage."),
        (["runs", "--all", "-n", "3"], "sgpu runs: argument -n: not allowed with argument --all. `sgpu runs --help` "
         "shows the usage."),
    ], 5),
)  # fmt: skip
def test_a_command_line_that_means_nothing_is_one_line(bare_home: Home, arguments: list[str], line: str):
    assert only_line(sgpu(bare_home, *arguments)) == line


@pytest.mark.parametrize("group", ["pool", "env"])
def test_a_group_without_an_action_lists(bare_home: Home, group: str):
    assert output_of(bare_home, group) == output_of(bare_home, group, "list")
    assert output_of(bare_home, group, "--json") == output_of(bare_home, group, "list", "--json")


def test_a_suggestion_replaces_the_pointer_to_help(bare_home: Home):
    code, out, err = sgpu(bare_home, "types", "--pool", "locl")
    assert (code, out, err) == (2, "", "sgpu: there is no pool named `locl`. Did you mean `local`?\n")


def test_a_misspelled_run_is_suggested_from_the_newest(bare_home: Home):
    settings = load_settings(bare_home.environ)
    kept = KeptRuns(settings)
    kept.add("7f3a0001")
    kept.close()
    code, out, err = sgpu(bare_home, "logs", "7f3b")
    assert (code, out) == (2, "")
    assert err == "sgpu: no run on this machine has an id that begins with '7f3b'. Did you mean `7f3a`?\n"
    assert "`sgpu runs --all` lists them" in only_error(sgpu(bare_home, "logs", "00"), 2)


def test_settings_that_mean_nothing_are_one_paragraph(bare_home: Home):
    assert "SGPU_CPU_SLOTS" in only_error(sgpu(bare_home, "runs", SGPU_CPU_SLOTS="many"), 2)


def test_help_and_version(bare_home: Home):
    assert output_of(bare_home, "--version").startswith("sgpu-magic 0.")
    for arguments in (["--help"], ["pool", "--help"], ["logs", "--help"]):
        assert output_of(bare_home, *arguments).startswith("usage: sgpu")
    code, out, err = sgpu(bare_home)
    assert (code, out) == (2, "")
    assert "doctor" in err


def test_the_installed_command_is_this_one():
    installed = Path(sys.executable).with_name("sgpu")
    done = subprocess.run([installed, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sgpu-magic 0.")


# ------------------------------------------------------------ logs without a pool


def test_a_log_is_made_safe_for_a_terminal(bare_home: Home):
    data = b"bad \xff\xfe byte\n\x1b[2Jcleared \x1b]0;title\x07\x1b[31mred\x1b[0m\n 10%\r 20%\r 30%\r\nend"
    kept_run(bare_home, "7f3a0001", {0: data})
    assert output_of(bare_home, "logs", "7f3a") == "bad \ufffd\ufffd byte\ncleared red\n 30%\nend\n"


def test_a_character_cut_in_two_by_a_read_is_whole(bare_home: Home):
    text = "€" * 200_000
    kept_run(bare_home, "7f3a0001", {0: text.encode() + b"\n"})
    assert output_of(bare_home, "logs", "7f3a") == text + "\n"


def test_several_ranks_have_their_number_in_front(bare_home: Home):
    kept_run(bare_home, "7f3a0001", {0: b"a\nb\n", 1: b"c", 10: b"d\n"})
    assert output_of(bare_home, "logs", "7F3A0001") == "[0] a\n[0] b\n[1] c\n[10] d\n"
    assert output_of(bare_home, "logs", "7f", "--rank", "1") == "c\n"
    assert "ranks 0 to 10, not 11" in only_error(sgpu(bare_home, "logs", "7f", "--rank", "11"), 2)


def test_an_id_that_two_runs_begin_with_lists_them(bare_home: Home):
    kept_run(bare_home, "7f3a0001", {0: b"a\n"})
    kept_run(bare_home, "7f3b0001", {0: b"b\n"})
    error = only_error(sgpu(bare_home, "logs", "7f3"), 2)
    assert "7f3a0001, 7f3b0001" in error
    assert output_of(bare_home, "logs", "7f3b") == "b\n"


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"x" * 99 + b"\n", id="lines"),
        pytest.param(b"x" * 100, id="no end", marks=pytest.mark.slow),
        pytest.param(b"step\r", id="bar", marks=pytest.mark.slow),
    ],
)
def test_a_large_log_is_streamed(bare_home: Home, line: bytes):
    size = 60_000_000
    kept_run(bare_home, "7f3a0001", {0: line * (size // len(line))})
    code = (
        "import sys; from sgpu_magic.cli.main import main; main(['logs', '7f3a']);"
        "print(*(line for line in open('/proc/self/status') if 'VmHWM' in line), file=sys.stderr)"
    )
    with open(bare_home.path / "out", "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", code], env=bare_home.environ, stdout=out, stderr=subprocess.PIPE, check=True
        )
    assert int(done.stderr.split()[1]) < MOST_MEMORY_KB
    written = (bare_home.path / "out").stat().st_size
    assert written >= size or line.endswith(b"\r")


def test_a_reader_that_leaves_is_no_error(bare_home: Home):
    kept_run(bare_home, "7f3a0001", {0: b"line\n" * 2_000_000})
    command = f"{shlex.join([*COMMAND, 'logs', '7f3a'])} | head -n 1"
    done = subprocess.run(["bash", "-c", command], env=bare_home.environ, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"line\n", b"")


# ------------------------------------------------------------ with a pool


def test_status_is_that_of_the_magic(kernel: Kernel, home: Home):
    kernel.check("%%distributed -n 1 --name counted --ui none\npass")
    shown = output_of(home, "status")
    assert shown.splitlines()[0] == kernel.check("%sgpu_status").text.splitlines()[0]
    assert "succeeded" in shown
    assert output_of(home, "pool", "status").splitlines()[0] == shown.splitlines()[0]


def test_status_as_json_has_the_facts_of_the_pool(kernel: Kernel, home: Home):
    kernel.check("%%distributed -n 1 --name counted --ui none\npass")
    (pool,) = json.loads(output_of(home, "status", "--json"))["pools"]
    details = pool["details"]
    assert (pool["name"], pool["kind"], pool["state"], pool["problem"]) == ("local", "local", "up", None)
    assert details["pid"] == home.pool_pid()
    assert details["cpu_slots"] >= details["cpu_slots_free"] > 0
    newest = details["runs"][0]
    assert (newest["id"], newest["name"], newest["state"]) == (newest_run(home), "counted", "succeeded")
    assert newest["duration_s"] >= 0
    (listed,) = json.loads(output_of(home, "runs", "-n", "1", "--json"))["runs"]
    assert listed == newest


def test_the_doctor_names_the_pool_and_its_version(kernel: Kernel, home: Home, monkeypatch: pytest.MonkeyPatch):
    # ranks stand by after a run; those of an earlier one may have ended, since they wait for a minute
    kernel.check("%%distributed -n 2 --type cpu --ui none\npass")
    settings = load_settings(home.environ)
    # the agent stops ranks that stand by, which is no problem
    eventually(lambda: any(map(is_stopped, home.standby_pids())), 30, "a rank stands by")
    (found,) = doctor.pool(settings)
    assert found.level is Level.OK
    assert found.text.startswith(f"process {home.pool_pid()}, sgpu-magic ")
    # the notebook counts as one
    assert re.search(r", [1-9]\d* clients?$", found.text)
    monkeypatch.setattr(doctor, "__version__", "0.0.9")
    (found,) = doctor.pool(settings)
    assert found.level is Level.WARNING
    assert found.text.endswith(", but this is sgpu-magic 0.0.9")
    assert "`sgpu pool stop` when it is idle" in found.remedy


def test_runs_and_logs_of_a_cell(kernel: Kernel, home: Home):
    kernel.check("%%distributed -n 2 --name talkative --ui none\nprint('hello from', rank)")
    run_id = newest_run(home)
    head, first, *_ = output_of(home, "runs", "-n", "1").splitlines()
    assert head.split()[:5] == ["run", "name", "state", "submitted", "duration"]
    assert first.split()[:2] == [run_id[:4], "talkative"]
    assert "2 \u00d7 cpu" in first
    assert "succeeded" in first
    assert len(output_of(home, "runs", "--all").splitlines()) > 2
    assert output_of(home, "logs", run_id) == "[0] hello from 0\n[1] hello from 1\n"
    assert output_of(home, "logs", run_id, "--rank", "1") == "hello from 1\n"
    kernel.check("%%distributed -n 1 --ui none\nprint('alone')")
    assert output_of(home, "logs", newest_run(home)) == "alone\n"


def test_logs_of_a_directory_that_was_removed_say_so(kernel: Kernel, home: Home):
    kernel.check("%%distributed -n 1\nprint('gone')")
    run_id = newest_run(home)
    shutil.rmtree(home.run_dir(run_id))
    error = only_error(sgpu(home, "logs", run_id), 2)
    assert f"the output and results of run {run_id[:4]} are no longer kept" in error
    assert "500" in error
    assert "30 days" in error
    assert "20.0 GB" in error
    assert run_id[:4] in output_of(home, "runs")


def test_a_failed_run_says_why(kernel: Kernel, home: Home):
    kernel.run("%%distributed -n 2 --name broken --ui none\nraise ValueError('no such thing')")
    _, row, below, *_ = output_of(home, "runs", "-n", "1").splitlines()
    assert "failed" in row
    assert "ValueError: no such thing" in below


WAITS = (
    "import os, time\nprint('begun', rank)\nwhile not os.path.exists({flag!r}): time.sleep(0.01)\nprint('done', rank)"
)


def test_following_goes_on_until_the_run_is_over(
    kernel: Kernel, home: Home, started: Callable[..., subprocess.Popen[str]]
):
    flag = home.work / "go"
    before = set(home.runs)
    cell = kernel.start("%%distributed -n 2 --ui none\n" + WAITS.format(flag=str(flag)))
    (run_id,) = eventually(lambda: set(home.runs) - before)
    process = started("logs", run_id, "--follow")
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0] begun 0\n", "[1] begun 1\n"}
    flag.touch()
    out, err = process.communicate(timeout=20)
    assert sorted(out.splitlines()) == ["[0] done 0", "[1] done 1"]
    assert (process.returncode, err) == (0, f"sgpu: run {run_id[:4]} succeeded\n")
    assert cell.wait(20).status == "ok"


def test_following_as_json_gives_each_line_when_it_is_printed(
    kernel: Kernel, home: Home, started: Callable[..., subprocess.Popen[str]]
):
    flag = home.work / "go"
    before = set(home.runs)
    cell = kernel.start("%%distributed -n 1 --ui none\n" + WAITS.format(flag=str(flag)))
    (run_id,) = eventually(lambda: set(home.runs) - before)
    process = started("logs", run_id, "--follow", "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"schema": 1, "run": run_id, "rank": 0, "text": "begun 0"}
    (listed,) = json.loads(output_of(home, "runs", "-n", "1", "--state", "running", "--json"))["runs"]
    assert (listed["id"], listed["ended_at"]) == (run_id, None)
    flag.touch()
    out, err = process.communicate(timeout=20)
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["done 0"]
    assert (process.returncode, err) == (0, f"sgpu: run {run_id[:4]} succeeded\n")
    assert cell.wait(20).status == "ok"


@pytest.mark.slow
def test_cancel_and_interrupt(kernel: Kernel, home: Home, started: Callable[..., subprocess.Popen[str]]):
    before = set(home.runs)
    cell = kernel.start("%%distributed -n 2 --ui none\nprint('begun')\nimport time; time.sleep(60)")
    (run_id,) = eventually(lambda: set(home.runs) - before)
    process = started("logs", run_id, "--follow", "--rank", "0")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")
    assert "active runs" in only_error(sgpu(home, "pool", "stop"), 1)
    assert "is being cancelled" in output_of(home, "cancel", run_id[:6])
    assert cell.wait(20).ename == "RunCancelled"
    assert "cancelled" in output_of(home, "runs", "-n", "1").splitlines()[1]
    eventually(lambda: not home.rank_pids())
    assert "no run that is active here" in only_error(sgpu(home, "cancel", run_id), 2)


@pytest.mark.slow
def test_detach_frees_a_blocked_notebook(kernel: Kernel, home: Home):
    cell = kernel.start("%%distributed -n 2\nimport time\nprint('up', flush=True)\ntime.sleep(600)")
    cell.until_shown("[1] up")
    run = home.runs[-1][:4]
    assert output_of(home, "detach", run) == f"run {run} continues without a notebook\n"
    reply = cell.wait(10)
    assert reply.status == "ok"
    assert f"sgpu cancel {run} ends it" in reply.text
    assert "ranks 0, 1 are in the cell" in output_of(home, "stacks", run)
    assert "is being cancelled" in output_of(home, "cancel", run)
    assert "RunUnknown" not in only_error(sgpu(home, "detach", "ffffffff"), 2)


@pytest.mark.slow
def test_runs_are_the_same_after_the_pool_is_stopped(new_home: Callable[..., Home]):
    home = new_home()
    kernel = Kernel(home)
    try:
        kernel.check("%%distributed -n 2 --name first --ui none\nprint('kept')")
        cell = kernel.start("%%distributed -n 2 --name second --ui none\nimport time; time.sleep(60)")
        eventually(lambda: "running" in output_of(home, "runs"))
        pid = home.pool_pid()
        assert f"process {pid}" in output_of(home, "pool", "stop", "--force")
        assert home.pool_pid() is None
        assert cell.wait(20).status == "error"
        rows = output_of(home, "runs").splitlines()
        second, first = (row for row in rows[1:] if not row.startswith(" "))
        assert second.split()[1:3] == ["second", "cancelled"]
        assert first.split()[1:3] == ["first", "succeeded"]
        assert output_of(home, "logs", first.split()[0]) == "[0] kept\n[1] kept\n"
        assert [entry.name for entry in home.state.glob("ledger*")] == ["ledger.sqlite3"]
        assert home.pool_pid() is None
    finally:
        kernel.close()


@pytest.mark.parametrize("agent_dies", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_following_outlasts_the_pool_but_not_the_ranks(new_home: Callable[..., Home], agent_dies: bool):
    home = new_home()
    kernel = Kernel(home)
    try:
        body = "import os, time\nprint('begun')\nwhile not os.path.exists('go-on'): time.sleep(0.02)\nprint('done')"
        cell = kernel.start(f"%%distributed -n 1 --ui none\n{body}")
        (run_id,) = eventually(lambda: home.runs)
        process = subprocess.Popen(
            [*COMMAND, "logs", run_id, "-f"], env=home.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        pids = [home.pool_pid(), *(home.agent_pids() if agent_dies else [])]
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: home.pool_pid() not in (None, pids[0]), 20, "the cell starts another pool")
        (home.work / "go-on").touch()
        out, err = process.communicate(timeout=20)
        assert out == (b"" if agent_dies else b"done\n")
        assert (b"failed" if agent_dies else b"succeeded") in err
        assert cell.wait(20).status == ("error" if agent_dies else "ok")
        assert ("failed" if agent_dies else "succeeded") in output_of(home, "runs").splitlines()[1]
    finally:
        kernel.close()


@pytest.mark.slow
def test_a_pool_that_hangs_is_ended_by_force(new_home: Callable[..., Home]):
    home = new_home()
    kernel = Kernel(home)
    try:
        kernel.check("%%distributed -n 2 --ui none\npass")
        pid = home.pool_pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        assert "does not answer" in only_error(sgpu(home, "pool", "stop"), 1)
        assert "is stopped" in output_of(home, "pool", "stop", "--force")
        assert time.monotonic() - start < 40
        assert home.pool_pid() is None
        for left in home.runtime.iterdir():
            left.unlink()
    finally:
        kernel.close()

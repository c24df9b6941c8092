"""Everything that a rank's code starts, however detached, has ended when the rank is reported gone.

All processes are told by their working directory, which they inherit whatever they do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from process_table import below, process_table, stop_process
from waiting import eventually

from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import Noted, RanksStarted, RunEnded
from sgpu_magic.wire.rank_events import OutputWritten

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="subreapers")

BEGIN = """\
import os, signal, subprocess, sys, time
os.chdir({folder!r})
def daemon(do):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open('here', 'a').write('x')
            do()
        os._exit(0)
def run(*command, **options):
    open('here', 'a').write('x')
    return subprocess.Popen(command, **options)
"""

KINDS = {
    "a plain child": "run('sleep', '300')",
    "a session of its own": "run('sleep', '300', start_new_session=True)",
    "a daemon without exec": "daemon(lambda: time.sleep(300))",
    "a daemon without environment": "daemon(lambda: os.execve('/bin/sleep', ['sleep', '300'], {}))",
    "env -i": "run('setsid', 'env', '-i', '/bin/sleep', '300')",
    "nohup": "run('sh', '-c', 'nohup sleep 300 > /dev/null 2>&1 &').wait()",
    "an orphan": "run('sh', '-c', 'sleep 300 & sleep 300 &').wait()",
    "a child that ignores SIGTERM": "run('sh', '-c', 'trap \"\" TERM HUP INT; sleep 300')",
    "a subreaper": "run(sys.executable, '-c', 'import ctypes, os, time\\n"
    "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\\nfor n in range(3):\\n if os.fork() == 0: os.setsid()\\n"
    "time.sleep(300)')",
    "a tree": "run(sys.executable, '-c', 'import os, time\\nfor n in range(5):\\n if os.fork() == 0: os.setsid()\\n"
    "time.sleep(300)')",
}
STORM = """\
def chain():
    while os.fork() == 0:
        os.setsid()
    os._exit(0)
daemon(chain)
"""
NAMESPACE = "run('unshare', '--fork', '--pid', 'sh', '-c', 'setsid sleep 300 & sleep 300')"
EVERYTHING = "\n".join(KINDS.values())
# including the rank itself
ALL = 51
WAIT = "\nprint('begun', flush=True)\ntime.sleep(300)"


def there(folder: Path) -> set[int]:
    """Return the pids of living processes that work in a folder."""
    found: set[int] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # a zombie has no working directory
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/cwd") == str(folder):
                    found.add(int(entry))
    return found


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    made = AgentProcess()
    yield made
    made.close()


@pytest.fixture
def own_agent() -> Iterator[AgentProcess]:
    made = AgentProcess()
    yield made
    if made.process.poll() is None:
        made.close()
    else:
        made.forget()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in there(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def begun(agent: AgentProcess, folder: Path, body: str, count: int = 2) -> str:
    """Start a run of one rank that starts processes and then waits; return its id."""
    run_id = agent.launch(BEGIN.format(folder=str(folder)) + body + WAIT, ranks=1)
    agent.wait_for(run_id, RanksStarted)
    eventually(lambda: len(there(folder)) >= count, 20, lambda: f"only {there(folder)}: {agent.printed(run_id)}")
    return run_id


@pytest.mark.parametrize("kind", [*KINDS, "a fork storm", "a pid namespace"])
def test_nothing_is_left_when_a_run_is_gone(agent: AgentProcess, folder: Path, kind: str):
    if kind == "a pid namespace" and os.getuid() != 0:
        pytest.skip("needs root")
    body = {**KINDS, "a fork storm": STORM, "a pid namespace": NAMESPACE}[kind]
    run_id = agent.launch(BEGIN.format(folder=str(folder)) + body, ranks=1)
    assert agent.wait_for(run_id, RunEnded).state is RunState.SUCCEEDED, agent.events[run_id]
    assert there(folder) == set(), "the run was over before"
    agent.wait_until_gone(run_id)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_nothing_is_left_of_a_killed_rank(agent: AgentProcess, folder: Path, number: signal.Signals):
    run_id = begun(agent, folder, EVERYTHING, ALL)
    (rank,) = agent.wait_for(run_id, RanksStarted).pids
    os.kill(rank, number)
    failure = agent.wait_for(run_id, RunEnded).failure
    assert number.name in failure.message
    agent.wait_until_gone(run_id)
    assert there(folder) == set()


def test_a_ranks_end_concerns_only_what_it_has_started(agent: AgentProcess, folder: Path):
    """Two runs share a zygote."""
    first, second = folder / "first", folder / "second"
    first.mkdir()
    second.mkdir()
    one, other = begun(agent, first, EVERYTHING, ALL), begun(agent, second, EVERYTHING, ALL)
    before = there(second)
    agent.end_run(one)
    agent.wait_until_gone(one)
    assert there(first) == set()
    assert there(second) == before
    agent.end_run(other)
    agent.wait_until_gone(other)
    assert there(second) == set()


def test_a_replaced_rank_of_a_session_leaves_nothing_and_the_others_keep_theirs(agent: AgentProcess, folder: Path):
    session = agent.connect(2)
    session.run(
        f"import os\nfolder = os.path.join({str(folder)!r}, os.environ['RANK'])\nos.mkdir(folder)\n"
        + BEGIN.replace("{folder!r}", "folder")
        + EVERYTHING
    )
    eventually(lambda: all(len(there(folder / rank)) >= ALL for rank in "01"), 20)
    before = there(folder / "1")
    assert agent.restart(session.run_id, (0,)) is None
    assert there(folder / "0") == set()
    assert there(folder / "1") == before
    agent.end_run(session.run_id)
    agent.wait_until_gone(session.run_id)
    assert there(folder / "1") == set()


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_zygote(own_agent: AgentProcess, folder: Path):
    run_id = begun(own_agent, folder, EVERYTHING, ALL)
    (rank,) = own_agent.wait_for(run_id, RanksStarted).pids
    os.kill(process_table()[rank].parent, signal.SIGKILL)
    assert own_agent.wait_for(run_id, RunEnded).state is RunState.FAILED
    own_agent.wait_until_gone(run_id)
    assert there(folder) == set()


@pytest.mark.parametrize("kind", ["run", "session"])
def test_a_zygote_that_is_killed_while_it_ends_leftovers_keeps_no_run(own_agent: AgentProcess, folder: Path, kind: str):
    if kind == "session":
        session = own_agent.connect(1)
        session.run(BEGIN.format(folder=str(folder)) + EVERYTHING)
        run_id = session.run_id
        (rank,) = own_agent.wait_for(run_id, RanksStarted).pids
    else:
        run_id = begun(own_agent, folder, EVERYTHING, ALL)
        (rank,) = own_agent.wait_for(run_id, RanksStarted).pids
    zygote = process_table()[rank].parent
    own_agent.end_run(run_id)
    eventually(lambda: rank not in process_table(), 20, "the zygote has reaped the rank")
    # it waits for half a second until it kills what the rank has left
    os.kill(zygote, signal.SIGKILL)
    own_agent.wait_until_gone(run_id)
    assert there(folder) == set()


def test_nothing_is_left_of_a_killed_agent(own_agent: AgentProcess, folder: Path):
    begun(own_agent, folder, EVERYTHING, ALL)
    descendants = below([own_agent.process.pid], process_table())
    own_agent.process.kill()
    own_agent.process.wait()
    eventually(lambda: not there(folder), 10, lambda: f"left: {there(folder)} of {descendants}")


@pytest.mark.slow
def test_nothing_is_left_of_an_agent_that_ends(own_agent: AgentProcess, folder: Path):
    begun(own_agent, folder, EVERYTHING, ALL)
    stop_process(own_agent.process.pid, signal.SIGTERM, 20)
    assert there(folder) == set()


# ---------------------------------------------------------------- stops that are not interrupts

HANDLED = """\
import os, signal, time
def save(number, frame):
    end = time.monotonic() + 0.5
    while time.monotonic() < end: time.sleep(0.02)
    open({file!r} + signal.Signals(number).name, 'w').write('whole')
    if number == signal.SIGTERM: raise SystemExit
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, save)
print('begun', flush=True)
while True: time.sleep(0.02)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)),
    ],
)
def test_an_agent_that_is_stopped_lets_ranks_handle_it(own_agent: AgentProcess, tmp_path: Path, number: signal.Signals):
    run_id = own_agent.launch(HANDLED.format(file=str(tmp_path) + "/"), ranks=1)
    own_agent.wait_for(run_id, OutputWritten)
    own_agent.process.send_signal(number)
    ended = own_agent.wait_for(run_id, RunEnded)
    assert ended.state is RunState.CANCELLED
    assert f"was stopped by {number.name}" in ended.reason
    own_agent.wait_until_gone(run_id)
    assert (tmp_path / "SIGTERM").read_text() == "whole"
    assert own_agent.process.wait(10) == 0


def test_signals_of_users_reach_ranks_that_handle_them_and_harm_nobody(agent: AgentProcess, tmp_path: Path):
    handles = agent.launch(HANDLED.format(file=str(tmp_path) + "/"), ranks=1)
    handles_not = agent.launch("import time\nprint('begun', flush=True)\ntime.sleep(300)", ranks=1)
    for run_id in (handles, handles_not):
        agent.wait_for(run_id, OutputWritten)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        agent.process.send_signal(number)
        eventually(lambda number=number: (tmp_path / number.name).exists(), 10)
    for run_id in (handles, handles_not):
        assert not [event for event in agent.events[run_id] if isinstance(event, RunEnded)]
        agent.end_run(run_id)
        agent.wait_until_gone(run_id)


def test_processes_that_had_to_be_killed_are_named(agent: AgentProcess, folder: Path):
    run_id = agent.launch(BEGIN.format(folder=str(folder)) + "run('sleep', '301')\nrun('sleep', '0.1')", ranks=1)
    agent.wait_until_gone(run_id)
    assert "rank 0 left processes running, which were ended: sleep 301" in agent.wait_for(run_id, Noted).text
    kinds = [type(event) for event in agent.events[run_id]]
    assert kinds.index(Noted) < kinds.index(RunEnded), "the notebook shows it"


# ---------------------------------------------------------------- the rank's own view of its processes


OWN = """\
child = subprocess.Popen(['sh', '-c', 'exit 3'])
daemon(lambda: time.sleep(300))
forked = os.fork()
if forked == 0:
    os._exit(5)
found = dict(os.wait() for _ in range(3))
try:
    os.wait()
except ChildProcessError:
    found['then'] = 'none'
"""


def test_a_rank_waits_for_its_own_children_only_as_a_script(agent: AgentProcess, folder: Path):
    body = (
        BEGIN.format(folder=str(folder))
        + OWN
        + ("print(found[child.pid] >> 8, found[forked] >> 8, len(found), found['then'], child.wait())")
    )
    run_id = agent.launch(body, ranks=1)
    agent.wait_until_gone(run_id)
    # `Popen.wait` finds its child reaped, as it does in a script
    assert agent.printed(run_id) == {0: "3 5 4 none 0\n"}, agent.events[run_id]


def test_orphans_are_reaped_and_children_are_not(agent: AgentProcess, folder: Path):
    body = BEGIN.format(folder=str(folder)) + (
        "from sgpu_magic.worker.process import orphans\n"
        "orphans._REAP_AFTER_S = 0.0\norphans._children._check_at = 0.0\n"
        "child = subprocess.Popen(['sh', '-c', 'exit 3'])\n"
        "for n in range(20): run('sh', '-c', 'true & true &').wait()\n"
        "def zombies(): return len(open('/proc/self/task/%d/children' % os.getpid()).read().split())\n"
        "def count():\n"
        "    orphans.reap()\n"
        "    return zombies()\n"
        "end = time.monotonic() + 20\n"
        "while count() > 1 and time.monotonic() < end: time.sleep(0.02)\n"
        "print(zombies(), child.wait())"
    )
    run_id = agent.launch(body, ranks=1)
    agent.wait_until_gone(run_id)
    assert agent.printed(run_id) == {0: "1 3\n"}, agent.events[run_id]


LOOKUPS = """\
import os, sys
log = os.open({log!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
def note(event, args, os=os, log=log):
    if event in ("open", "os.listdir") and "/task" in str(args[0]):
        os.write(log, f"{{args[0]}}\\n".encode())
sys.addaudithook(note)
os.listdir("/proc/self/task")
"""


def test_a_rank_without_children_ends_without_a_look_at_its_threads_in_proc(agent: AgentProcess, tmp_path: Path):
    """The kernel keeps an entry for each thread that was looked up, and the zygote spins until all are removed."""
    log = tmp_path / "lookups"
    run_id = agent.launch(LOOKUPS.format(log=str(log)), ranks=1)
    agent.wait_until_gone(run_id)
    # the cell's own
    assert log.read_text().splitlines() == ["/proc/self/task"]

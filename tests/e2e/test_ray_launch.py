"""`%%ray_launch` and `@ray_launch` on one machine: a Ray cluster of the run's own, and nothing of it that stays."""

from __future__ import annotations

import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from kernels import Home, Kernel, eventually
from process_table import listening
from ray_traces import check_gone, directories, object_files, open_to_others, pid_of, ray_processes

# the dashboard is the slow part of a cluster's start: one test uses it
HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_STAND_IN": "cpu", "SGPU_RAY_DASHBOARD": "false"}

# on a machine that is busy with other tests, a cluster takes half a minute to start
pytestmark = pytest.mark.timeout(400)
PATIENCE_S = 240.0

# runs until the test creates a file in the notebook's directory
STAY = """
import os, ray, time
ray.init()
@ray.remote(num_gpus=1)
class Busy:
    def stay(self):
        print("actor up", os.getpid(), flush=True)
        time.sleep(600)
busy = Busy.remote()
ray.get(busy.stay.remote())
"""


@pytest.fixture(autouse=True)
def nothing_of_ray_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    before = object_files()
    yield
    if "home" in request.fixturenames:
        check_gone(request.getfixturevalue("home"))
    eventually(lambda: not object_files() - before, 10, "an object store is left in /dev/shm")


@pytest.mark.slow
def test_a_cell_drives_its_own_cluster(kernel: Kernel, home: Home):
    kernel.check("import os\nos.environ['RAY_ADDRESS'] = 'ray://elsewhere.invalid:10001'\nnumbers = [1, 2, 3]")
    cell = kernel.start(
        "%%ray_launch -n 2 --type a10 --out squares,gpus,told,waits\n"
        "import os, time, ray\n"
        "from pathlib import Path\n"
        "ray.init()\n"
        "@ray.remote\n"
        "def square(number):\n"
        "    print('same line')\n"
        "    print('squaring', number, os.environ.get('RANK'))\n"
        "    return number ** 2\n"
        "@ray.remote(num_gpus=1)\n"
        "class Holder:\n"
        "    def gpus(self): return ray.get_gpu_ids()\n"
        "    def address(self): return os.environ['RAY_ADDRESS']\n"
        "squares = ray.get([square.remote(number) for number in numbers])\n"
        "holders = [Holder.remote() for _ in range(2)]\n"
        "gpus = sorted(sum(ray.get([holder.gpus.remote() for holder in holders]), []))\n"
        "waits = len(ray.wait([Holder.remote().gpus.remote()], timeout=1)[1])\n"
        "file = Path(os.environ['RAY_AUTH_TOKEN_PATH'])\n"
        "assert ray.get(holders[0].address.remote()) == os.environ['RAY_ADDRESS']\n"
        "told = [os.environ['RAY_ADDRESS'], ray.cluster_resources()['GPU'], os.environ['RAY_AUTH_MODE'],\n"
        "        oct(file.stat().st_mode)[-3:], oct(file.parent.stat().st_mode)[-3:], file.read_text()]\n"
        "Path('up').touch()\n"
        "while not Path('go').exists(): time.sleep(0.05)\n",
    )
    cell.until(lambda: (home.work / "up").exists() or cell.idle, PATIENCE_S)
    assert not cell.idle, cell.reply.story
    ports = listening(ray_processes(home))
    assert ports
    assert open_to_others(home) == []
    (home.work / "go").touch()
    reply = cell.wait(PATIENCE_S)
    assert reply.status == "ok", reply.story
    check_gone(home, ports)
    assert kernel.value("squares") == [1, 4, 9]
    # there are as many GPUs as the lease has, and a task that needs a third waits
    assert kernel.value("gpus") == [0, 1]
    assert kernel.value("waits") == 1
    address, gpus, mode, file_mode, directory_mode, token = kernel.value("told")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    assert (gpus, mode, file_mode, directory_mode) == (2.0, "token", "600", "700")
    assert len(token) == 64
    story = reply.story + "".join(home.log(run, rank) for run in home.runs for rank in range(2))
    assert token not in story + (home.state / "pool.log").read_text()
    lines = reply.lines(0)
    # a task is not a rank, repeated lines are all shown, and the last ones are not lost
    assert sum("same line" in line for line in lines) == 3, reply.story
    assert sorted(re.findall(r"\(square pid=\d+\) squaring (\d) None", "\n".join(lines))) == ["1", "2", "3"]
    assert reply.lines(1) == []
    assert "runs on this node for this run alone; its GPUs are simulated" in reply.text
    kernel.check("del os.environ['RAY_ADDRESS']")
    run_id = home.runs[-1]
    kernel.check("squares = None")
    reply = kernel.check(f"%sgpu_replay {run_id}", PATIENCE_S)
    assert kernel.value("squares") == [1, 4, 9], reply.story
    assert reply.lines(1) == []


@pytest.mark.slow
def test_the_dashboard_is_on_loopback_and_asks_for_the_token(new_home):
    home: Home = new_home(HOME_VARIABLES | {"SGPU_RAY_DASHBOARD": "true"})
    kernel = Kernel(home)
    try:
        _look_at_dashboard(kernel, home)
    finally:
        kernel.close()
    check_gone(home)


def _look_at_dashboard(kernel: Kernel, home: Home) -> None:
    cell = kernel.start(
        "%%ray_launch -n 1 --type a10 --out token\n"
        "import os, time\n"
        "from pathlib import Path\n"
        "token = Path(os.environ['RAY_AUTH_TOKEN_PATH']).read_text()\n"
        "Path('dashboard').write_text(os.environ['RAY_API_SERVER_ADDRESS'] + ' ' + token)\n"
        "while not Path('seen').exists(): time.sleep(0.05)\n",
    )
    cell.until(lambda: (home.work / "dashboard").exists() or cell.idle, PATIENCE_S)
    assert not cell.idle, cell.reply.story
    address, token = (home.work / "dashboard").read_text().split()
    cell.until_shown("sgpu port-forward")
    shown = re.search(
        r"http://(127\.0\.0\.1:(\d+)) of rank 0's node \(`sgpu port-forward \w{4} (\d+)`", cell.reply.text
    )
    assert shown, cell.reply.story
    assert address == f"http://{shown[1]}"
    assert shown[2] == shown[3]
    assert _status(f"{address}/api/version", "") in (401, 403)
    assert _status(f"{address}/api/version", "0" * 64) in (401, 403)
    assert _status(f"{address}/api/version", token) == 200
    assert open_to_others(home) == []
    (home.work / "seen").touch()
    reply = cell.wait(PATIENCE_S)
    assert reply.status == "ok", reply.story
    assert token not in reply.text


def _status(url: str, token: str) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_tasks_own_error_and_line_are_the_cells_and_serve_is_refused(kernel: Kernel):
    reply = kernel.run(
        "from sgpu_magic import ray_launch\n"
        "from sgpu_magic.errors import UsageError\n"
        "class TooMuch(ValueError): pass\n"
        "@ray_launch(gpus=2, gpu_type='a10')\n"
        "def drive(numbers, limit=2):\n"
        "    import ray\n"
        "    ray.init()\n"
        "    try:\n"
        "        from ray import serve\n"
        "        serve.start()\n"
        "    except (UsageError, ImportError) as error:\n"
        "        print('serve:', error)\n"
        "    @ray.remote\n"
        "    def check(number):\n"
        "        if number > limit:\n"
        "            raise TooMuch(f'{number} is too much')\n"
        "        return number\n"
        "    return ray.get([check.remote(number) for number in numbers])\n"
        "\n"
        "drive.distributed([1, 2, 3])\n",
        PATIENCE_S,
    )
    assert reply.status == "error", reply.story
    assert reply.ename == "TooMuch", reply.story
    assert reply.evalue.startswith("3 is too much"), reply.story
    assert "---> 16             raise TooMuch(f'{number} is too much')" in reply.shown, reply.story
    assert "RayTaskError" not in reply.shown
    assert "the driver waited for it in line 18 of the cell" in reply.shown
    assert re.search(r"serve: Ray Serve can't be started in a @ray_launch run \(rank 0\): .*", reply.text), reply.story


@pytest.mark.slow
def test_the_driver_is_connected_before_its_first_line_and_may_connect_itself(kernel: Kernel):
    reply = kernel.run(
        "%%ray_launch -n 2 --type a10 --out gpus,first,second,named,again\n"
        "import ray\n"
        "gpus = ray.cluster_resources()['GPU'], len(ray.nodes()), ray.is_initialized()\n"
        "@ray.remote\n"
        "def where(): return ray.get_runtime_context().namespace\n"
        "first = ray.get(where.remote())\n"
        "ray.init(namespace='words')\n"
        "second = ray.get(where.remote())\n"
        "try: ray.init()\n"
        "except RuntimeError as error: again = str(error)\n"
        "ray.shutdown()\n"
        "named = ray.init(namespace='more').address_info['gcs_address'], ray.get(where.remote())\n",
        PATIENCE_S,
    )
    assert reply.status == "ok", reply.story
    assert "Connecting to existing" in reply.text
    assert kernel.value("gpus") == [2.0, 1, True]
    assert kernel.value("first") != "words"
    assert kernel.value("second") == "words"
    assert kernel.value("named")[1] == "more"
    assert "ray.init" in kernel.value("again")
    quiet = kernel.check("%%ray_launch -n 1 --type a10\nimport ray\nprint('same', ray.init() is not None)", PATIENCE_S)
    assert "same True" in quiet.text
    assert "Connecting to existing" not in quiet.text


@pytest.mark.slow
def test_interrupt_ends_driver_actors_and_cluster(kernel: Kernel, home: Home):
    cell = kernel.start(f"%%ray_launch -n 2 --type a10\n{STAY}")
    cell.until(lambda: "actor up" in cell.reply.text or cell.idle, PATIENCE_S)
    assert not cell.idle, cell.reply.story
    assert directories(home)
    ports = listening(ray_processes(home))
    kernel.interrupt()
    reply = cell.wait(60)
    assert reply.status == "error"
    assert "cancelled" in reply.text + reply.evalue
    check_gone(home, ports)
    assert kernel.check("%%distributed -n 2\nprint('next')").lines(1) == ["next"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", ["raylet", *(pytest.param(rank, marks=pytest.mark.slow) for rank in ("rank 0", "rank 1"))]
)
def test_what_dies_is_told_and_takes_the_cluster_with_it(kernel: Kernel, home: Home, victim: str):
    cell = kernel.start(f"%%ray_launch -n 2 --type a10\n{STAY}")
    cell.until(lambda: "actor up" in cell.reply.text or cell.idle, PATIENCE_S)
    assert not cell.idle, cell.reply.story
    os.kill(_pid_of(home, victim), signal.SIGKILL)
    reply = cell.wait(90)
    assert reply.status == "error", reply.story
    if victim == "raylet":
        assert re.search(r"Ray's raylet \(\d+\) was killed by signal 9", reply.text + reply.traceback), reply.story
    else:
        number = victim.removeprefix("rank ")
        assert re.search(rf"rank {number} of 2 .*was killed by SIGKILL", reply.traceback), reply.story
    check_gone(home)


def _pid_of(home: Home, victim: str) -> int:
    if victim == "raylet":
        return pid_of(home, "raylet")
    node = next(pid for pid, command in ray_processes(home, "worker.ray.node").items() if "raylet" not in command)
    leader = home.processes()[node].parent
    if victim == "rank 0":
        return leader
    return next(pid for pid in home.rank_pids() if pid != leader)


@pytest.mark.slow
def test_timeout_ends_it(kernel: Kernel, home: Home):
    reply = kernel.run(f"%%ray_launch -n 1 --type a10 --timeout 20s\n{STAY}", PATIENCE_S)
    assert reply.status == "error"
    assert "20 s" in reply.text + reply.traceback, reply.story
    check_gone(home)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["kernel", "agent", "pool"])
def test_nothing_stays_when_somebody_is_killed(new_home, who: str):
    home: Home = new_home(HOME_VARIABLES | {"SGPU_ADOPT_TIMEOUT_S": "3"})
    kernel = Kernel(home)
    try:
        cell = kernel.start(f"%%ray_launch -n 2 --type a10\n{STAY}")
        cell.until(lambda: "actor up" in cell.reply.text or cell.idle, PATIENCE_S)
        assert not cell.idle, cell.reply.story
        match who:
            case "kernel":
                kernel.kill()
            case "agent":
                os.kill(home.agent_pids()[0], signal.SIGKILL)
            case _:
                # no client is left to start a service that would adopt it
                kernel.kill()
                pool = home.pool_pid()
                assert pool is not None
                os.kill(pool, signal.SIGKILL)
        eventually(lambda: not ray_processes(home), 60, lambda: f"{ray_processes(home)}")
        if who == "agent":
            cell.wait(60)
        check_gone(home)
    finally:
        kernel.close()


@pytest.mark.slow
def test_two_at_once_do_not_meet(kernel: Kernel):
    kernel.check(
        "from sgpu_magic import ray_launch\n"
        "@ray_launch(gpus=1, gpu_type='a10')\n"
        "def count(name):\n"
        "    import os, ray, time\n"
        "    from pathlib import Path\n"
        "    ray.init(namespace='same')\n"
        "    @ray.remote\n"
        "    class Named:\n"
        "        def who(self): return name\n"
        "    actor = Named.options(name='one', get_if_exists=True).remote()\n"
        "    Path(f'{name}-up').touch()\n"
        "    while not all(Path(f'{other}-up').exists() for other in ('left', 'right')): time.sleep(0.05)\n"
        "    return ray.get(actor.who.remote()), len(ray.nodes()), ray.cluster_resources()['GPU']\n"
        "\n"
        "runs = [count.distributed.submit(name) for name in ('left', 'right')]\n"
        "found = [run.result() for run in runs]\n",
        2 * PATIENCE_S,
    )
    assert kernel.value("found") == [[["left", 1, 1.0]], [["right", 1, 1.0]]]


def test_without_ray_one_paragraph_says_what_to_do(kernel: Kernel, home: Home):
    (home.work / "no_ray" / "ray").mkdir(parents=True)
    (home.work / "no_ray" / "ray" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n"
    )
    kernel.check(f"import sys\nsys.path.insert(0, {str(home.work / 'no_ray')!r})")
    try:
        reply = kernel.run("%%ray_launch -n 2 --type a10\nimport ray")
    finally:
        kernel.check("sys.path.pop(0)")
    assert reply.ename == "EnvironmentFailed", reply.story
    assert "has no Ray: No module named 'ray'. Install it in the notebook with %pip install" in reply.evalue
    assert "--env-version" in reply.evalue


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--ranks 0", "has no --ranks: its Ray cluster starts on new ranks"),
        ("--session work", "has no --session"),
        ("--profile", "has no --profile"),
        ("--out a:all", "only rank 0 runs the cell"),
    ],
)
def test_what_means_nothing_is_refused(kernel: Kernel, line: str, says: str):
    reply = kernel.run(f"%%ray_launch -n 2 {line}\npass")
    assert reply.ename == "UsageError", reply.story
    assert says in reply.evalue

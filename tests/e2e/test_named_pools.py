"""Pools by name: a kernel with two pools on other machines beside its own, which really are served on ports.

team    reserved, 2 a10
cloud   on demand, 4 a10 and 2 h100
gone    on demand; nothing listens there
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from homes import Home
from kernels import Kernel, Reply, eventually
from listed_pools import list_nowhere, list_pools, listed
from msgspec.structs import replace
from served_pools import ServedPool
from test_panel_kernel import Panel

from sgpu_magic.client.pools_file import add_pool, read_pools, remove_pool
from sgpu_magic.system.secure_sockets import KeyPair, new_key_pair
from sgpu_magic.views.units import TIMES

WAITS = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.05)"


@dataclass
class Scene:
    """A user's machine and the pools that they may use."""

    home: Home
    keys: KeyPair
    team: ServedPool
    cloud: ServedPool
    kernel: Kernel

    @property
    def file(self) -> Path:
        return listed(self.home)

    def sgpu(self, *arguments: str, **variables: str) -> str:
        """What a command prints that has to succeed."""
        done = self.tried(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tried(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sgpu_magic.cli", *arguments],
            env=self.home.environ | variables, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    def refused(self, *arguments: str) -> str:
        """What a command says that fails for a reason, in one paragraph and no traceback."""
        done = self.tried(*arguments)
        assert done.returncode in (1, 2), done.stdout
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert lines[0].startswith("sgpu: ")
        if "Did you mean" in lines[0]:
            return done.stderr.removeprefix("sgpu: ")
        assert lines[-1].startswith("See ")
        return " ".join(lines[:-1]).removeprefix("sgpu: ")

    def long_run(self, options: str, name: str) -> str:
        """The id of a run that goes on by itself and has printed."""
        self.kernel.check(f"%%distributed {options} --detach --name {name}\n{WAITS}")
        run = eventually(lambda: next((pool.home.run_named(name) for pool in (self.team, self.cloud)
                                       if pool.home.run_named(name)), ""), 10)  # fmt: skip
        eventually(lambda: "begun" in self.team.home.log(run, 0) + self.cloud.home.log(run, 0), 20, "it does not begin")
        return run


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    home = Home()
    with ThreadPoolExecutor(2) as executor:
        starting = [executor.submit(ServedPool, {"SGPU_SIMULATE": has}) for has in ("a10:2", "a10:4,h100:2")]
        # in this thread: the event loop that jupyter_client creates for a thread is never closed
        kernel = Kernel(home)
        team, cloud = (pool.result() for pool in starting)
    keys = list_pools(
        home, [("cloud", cloud, {"prices": {"a10": 2.0, "h100": 5.0}}), ("team", team, {"reserved": True})]
    )
    try:
        # connect to all of them once, so that the links do not count as leaks
        kernel.check("import os\nblob = os.urandom(2_000_000)")
        for pool in ("local", "team", "cloud"):
            kernel.check(f"%%distributed -n 1 --type cpu --pool {pool} --ui none\nprint('x' * 200_000, len(blob))")
        # with a live view, which opens only if a run takes a while
        kernel.check("%%distributed -n 1 --type cpu --pool local\nimport time; time.sleep(0.5)")
        # record the level with all links
        home.check_leaks()
        yield Scene(home, keys, team, cloud, kernel)
    finally:
        kernel.close()
        home.close()
        team.close()
        cloud.close()


@pytest.fixture
def new_kernel(scene: Scene) -> Iterator[Callable[[], Kernel]]:
    """Makes further kernels of the same user."""
    made: list[Kernel] = []

    def make() -> Kernel:
        made.append(Kernel(scene.home))
        return made[-1]

    yield make
    for kernel in made:
        kernel.close()


@pytest.fixture
def gone(scene: Scene) -> Iterator[str]:
    """A pool's name where nothing listens."""
    yield list_nowhere(scene.home, "gone").name
    remove_pool("gone", scene.file)


@pytest.fixture(autouse=True)
def nothing_stays(scene: Scene) -> Iterator[None]:
    yield
    # the panel may hold a link to a pool that is no longer listed, and drops it when it reads the list again
    linked_pools(scene.kernel)
    for home in (scene.home, scene.team.home, scene.cloud.home):
        home.check_leaks()


def linked_pools(kernel: Kernel) -> list[str]:
    """The names of the pools that a kernel has a link to, after it has looked at the list."""
    pools = "__import__('sgpu_magic.runs.kernel_context').runs.kernel_context.kernel_context().pools"
    return kernel.value(f"{pools}.entries() and [pool.name for pool in {pools}.connected()]")


def goes_to(reply: Reply) -> str:
    """The line that says where a run went and why."""
    return next(
        (line for line in reply.text.splitlines() if line.startswith(("note: pool ", "note: on this machine"))), ""
    )


# ---------------------------------------------------------------- where runs go


def test_a_reserved_pool_comes_first_and_the_run_says_why(scene: Scene):
    reply = scene.kernel.check("%%distributed -n 2 --type a10\nprint('hello', rank)\nrank * 10")
    assert goes_to(reply) == "note: pool team: reserved, and has 2 A10 free"
    assert (reply.lines(0), reply.lines(1)) == (["hello 0"], ["hello 1"])
    assert "2 ranks on team" in reply.text
    assert "[0, 10]" in reply.text


def test_on_demand_where_no_reserved_one_has_the_type(scene: Scene):
    reply = scene.kernel.check("%%distributed -n 2 --type h100\nrank")
    assert goes_to(reply) == (
        "note: pool cloud: on demand at $5.00 an hour for each, and has 2 H100 free; team has no 2 H100"
    )


@pytest.mark.parametrize("way", ["--pool cloud", "SGPU_POOL"])
def test_a_pool_that_is_named_is_the_one_and_nothing_is_explained(scene: Scene, way: str):
    variable = way == "SGPU_POOL"
    if variable:
        scene.kernel.check("%env SGPU_POOL=cloud")
    try:
        reply = scene.kernel.check(f"%%distributed -n 2 --type a10 {'' if variable else way}\nrank")
    finally:
        scene.kernel.check("import os; os.environ.pop('SGPU_POOL', None)")
    assert "2 ranks on cloud" in reply.text
    assert goes_to(reply) == ""


@pytest.mark.slow
def test_this_machines_own_for_what_no_other_has(scene: Scene):
    reply = scene.kernel.check("%%distributed -n 17 --type cpu\nrank")
    assert goes_to(reply) == "note: on this machine; no pool of cloud, team has 17 CPU ranks"
    reply = scene.kernel.check("%%distributed -n 2 --type cpu --pool local\nrank")
    assert "2 ranks on local" in reply.text
    assert goes_to(reply) == ""


def test_a_run_without_a_type_gets_the_cheapest_that_is_free_and_says_so(scene: Scene):
    run = scene.long_run("-n 3 --type a10 --pool cloud", "holder")
    try:
        # more h100 are free, and cost more
        for options, went in (
            ("--pool cloud", ""),
            ("--pool on-demand", "note: pool cloud: on demand at $2.00 an hour for each, and has 1 A10 free"),
        ):
            reply = scene.kernel.check(f"%%distributed -n 1 {options}\nrank")
            assert f"1 {TIMES} A10" in reply.text, reply.story
            assert ("A10: cheapest free type (--type to choose)" in reply.text) is (options == "--pool cloud")
            assert goes_to(reply) == went
        reply = scene.kernel.check("%%distributed -n 2 --pool cloud\nrank")
        assert "H100: cheapest free type" in reply.text
        scene.kernel.check("import sgpu_magic")
        reply = scene.kernel.check("sgpu_magic.distributed(gpus=1, pool='cloud')(lambda: 1).distributed()")
        assert f"1 {TIMES} A10" in reply.text, reply.story
    finally:
        scene.sgpu("cancel", run)
    # with one type there is no choice
    assert "cheapest free type" not in scene.kernel.check("%%distributed -n 1 --pool team\nrank").text


@pytest.mark.slow
def test_so_much_memory_chooses_the_type(scene: Scene):
    reply = scene.kernel.check("%%distributed -n 2 --min-memory 40GB\nrank")
    assert f"2 {TIMES} H100" in reply.text
    assert goes_to(reply).endswith("and has 2 H100 free; team has no 2 devices with 40.0 GB")
    # the cheapest of those that fit
    assert "A10" in scene.kernel.check("%%distributed -n 2 --min-memory 20GB --pool cloud\nrank").text
    for options, words in (
        (
            "-n 3 --min-memory 40GB --pool cloud",
            "has no 3 devices of one type with 40.0 GB of memory each. It has: 4",
        ),
        ("-n 1 --min-memory 40GB --type a10 --pool team", "and 0 of them have 40.0 GB; 1 are asked for"),
        ("-n 1 --min-memory lots", "--min-memory 'lots' is not a memory size"),
    ):
        reply = scene.kernel.run(f"%%distributed {options}\nrank")
        assert words in reply.evalue, reply.story


@pytest.mark.slow
def test_python_asks_as_the_magics_do(scene: Scene):
    scene.kernel.check("from sgpu_magic import distributed\ndef ranks():\n    import os\n    return os.environ['RANK']")
    for given, pool in (({"gpus": 2, "gpu_type": "a10"}, "team"), ({"gpus": 2, "min_memory": "40GB"}, "cloud"),
                        ({"gpus": 1, "gpu_type": "a10", "pool": "on-demand"}, "cloud")):  # fmt: skip
        reply = scene.kernel.check(f"print(len(distributed(**{given!r})(ranks).distributed()))")
        assert f"on {pool}" in reply.text, reply.story
    reply = scene.kernel.run("distributed(gpus=3, gpu_type='a10', nodes=2)(ranks)")
    assert "3 ranks can't be spread evenly over 2 nodes. Ask for a multiple of 2, such as gpus=4" in reply.evalue


def test_a_session_is_where_it_was_begun(scene: Scene):
    scene.kernel.check("%sgpu_connect -n 1 --type h100 --name big --ui none")
    try:
        assert "5" in scene.kernel.check("%%distributed\nx = 5\nx").text
        assert scene.kernel.check("%%distributed\nx").text.count("5") >= 1
        assert "big" in scene.sgpu("pool", "status", "--pool", "cloud")
        assert "big" not in scene.sgpu("pool", "status", "--pool", "team")
    finally:
        scene.kernel.check("%sgpu_disconnect big")


def test_databricks_variables_choose_among_them(scene: Scene):
    for variable, value, pool in (
        ("DATABRICKS_USE_POOL", "1", "cloud"),
        ("DATABRICKS_USE_RESERVED_GPU_POOL", "true", "team"),
        ("DATABRICKS_REMOTE_GPU_POOL_ID", "cloud", "cloud"),
    ):
        cell = (
            f"import os; os.environ['{variable}'] = '{value}'\n"
            "from serverless_gpu import distributed as as_there\n"
            "@as_there(gpus=1, gpu_type='A10', remote=True)\ndef one():\n    return 1\n"
            "print(one.distributed())"
        )
        try:
            assert f"on {pool}" in scene.kernel.check(cell).text
        finally:
            scene.kernel.check(f"del os.environ['{variable}']")


# ---------------------------------------------------------------- what can't be


def test_an_unknown_name_is_told_with_those_that_are_near(scene: Scene):
    reply = scene.kernel.run("%%distributed -n 2 --pool tema\nrank")
    assert reply.ename == "UsageError"
    assert reply.evalue.startswith("there is no pool named `tema`. Did you mean `team`?")
    assert "Did you mean `team`?" in scene.refused("types", "--pool", "tema")
    assert "Did you mean `team`?" in scene.refused("pool", "remove", "tema")


def test_a_named_pool_that_can_not_be_reached_is_an_error_and_no_other_is_taken(scene: Scene, gone: str):
    before = len(scene.cloud.home.runs)
    reply = scene.kernel.run(f"%%distributed -n 1 --type a10 --pool {gone}\nrank")
    assert reply.ename == "PoolError"
    assert "the pool gone can't be reached: nothing answers at tcp://127.0.0.1:" in reply.evalue
    assert "nothing answers at" in scene.refused("runs", "--pool", gone)
    assert "`sgpu pool serve`" in reply.evalue
    assert len(scene.cloud.home.runs) == before


def test_where_none_is_named_what_is_silent_is_passed_over_and_named(scene: Scene, gone: str):
    reply = scene.kernel.check("%%distributed -n 2 --type h100\nrank")
    assert goes_to(reply).endswith("team has no 2 H100; gone can't be reached")
    reply = scene.kernel.run("%%distributed -n 2 --type h200 --pool on-demand\nrank")
    assert reply.ename == "CapacityError"
    assert "no on-demand pool can take the run: cloud has no 2 H200; gone can't be reached." in reply.evalue
    listed = scene.sgpu("pool", "list")
    assert re.search(r"^gone +on demand +tcp://127\.0\.0\.1:\d+ +can't be reached$", listed, re.MULTILINE), listed
    assert re.search(r"^team +reserved +\S+ +up +2/2 a10, 16/16 cpu$", listed, re.MULTILINE), listed
    assert "gone: the pool gone can't be reached" in listed
    status = scene.kernel.check("%sgpu_status").text
    assert "cloud (on demand) · 4 A10" in status
    assert "gone (on demand)" in status
    assert "nothing answers at" in status


def test_a_shared_pool_wants_to_know_how_many(scene: Scene):
    reply = scene.kernel.run("%%distributed --type a10\nrank")
    assert reply.evalue.startswith("the pool team is shared with others: say how many A10 with --gpus N.")


# ---------------------------------------------------------------- looking at them


def test_the_status_of_all_and_of_one(scene: Scene):
    every = scene.kernel.check("%sgpu_status").text
    places = [every.index(words) for words in ("local ·", "cloud (on demand) ·", "team (reserved) ·")]
    assert places == sorted(places)
    one = scene.kernel.check("%sgpu_status --pool team").text
    assert "team (reserved) · 2 A10" in one
    assert "cloud" not in one
    assert scene.sgpu("pool", "status").count(" · ") >= 6
    offered = scene.kernel.complete("%%distributed --pool ")
    assert {"local", "cloud", "team", "reserved", "on-demand"} <= set(offered)


def test_types_of_all_pools(scene: Scene):
    rows = {tuple(line.split()[:2]): line.split() for line in scene.sgpu("types").splitlines()[1:]}
    assert set(rows) == {("local", "cpu"), ("cloud", "a10"), ("cloud", "h100"), ("cloud", "cpu"), ("team", "a10"),
                         ("team", "cpu")}  # fmt: skip
    assert " ".join(rows["cloud", "a10"]) == "cloud a10 24 GB PCIe 4/4 1 4 $2.00 on demand, simulated on cpu"
    assert " ".join(rows["team", "a10"]) == "team a10 24 GB PCIe 2/2 1 2 reserved, simulated on cpu"
    assert len(scene.sgpu("types", "--pool", "team").splitlines()) == 3


@pytest.mark.slow
def test_a_runs_pool_is_found_by_its_id(scene: Scene):
    run = scene.long_run("-n 1 --type h100", "far")
    assert re.search(rf"^{run[:4]}\w* +cloud +far +\w+ .* 1 . H100", scene.sgpu("runs"), re.MULTILINE)
    assert re.search(rf"^{run[:4]}\w* +cloud ", scene.sgpu("runs", "--pool", "cloud"), re.MULTILINE)
    assert run[:4] not in scene.sgpu("runs", "--pool", "team")
    for pool, has in (("", True), ("cloud", True), ("team", False), ("local", False)):
        usage = scene.sgpu("usage", "--by", "type", *(("--pool", pool) if pool else ()))
        assert bool(re.search(r"^h100 ", usage, re.MULTILINE)) is has, (pool, usage)
    assert scene.sgpu("logs", run[:8]) == "begun\n"
    assert "while True: time.sleep(0.05)" in scene.sgpu("stacks", run[:8])
    assert "while True: time.sleep(0.05)" in scene.kernel.check(f"%sgpu_stacks {run[:8]}").text
    add_pool(replace(scene.cloud.entry, name="same"), scene.file)
    try:
        assert "while True: time.sleep(0.05)" in scene.sgpu("stacks", run[:8])
    finally:
        remove_pool("same", scene.file)
    attached = scene.kernel.start(f"%sgpu_attach {run[:8]} --ui text")
    attached.until_shown("begun")
    assert "is being cancelled" in scene.sgpu("cancel", run[:8])
    assert "cancelled" in attached.wait().text
    output = scene.refused("cancel", "ffffffff")
    assert "no active run has an id that begins with 'ffffffff' in the pools local, cloud, team." in output


def test_a_run_goes_on_when_its_pool_is_listed_no_more(scene: Scene):
    go = scene.home.work / "go"
    cell = scene.kernel.start(
        f"%%distributed -n 1 --type h100 --name left\nimport time, pathlib\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n'there'"
    )
    eventually(lambda: scene.cloud.home.run_named("left"), 20, "it is not there")
    before = scene.file.read_bytes()
    remove_pool("cloud", scene.file)
    try:
        go.touch()
        reply = cell.wait()
        assert reply.status == "ok", reply.story
        assert "there" in reply.text
    finally:
        # restore the list
        scene.file.write_bytes(before)


# ---------------------------------------------------------------- the panel's half in the kernel


def test_a_choice_of_the_panel_is_made_in_the_pool_that_it_names(scene: Scene, gone: str):
    panel = Panel(scene.kernel)
    assert panel.state()["snapshot"]["pool"] == "team"
    choice = {"type": "h100", "gpus": 2, "pool": "cloud"}
    try:
        panel.plan(choice, connect=True)
        answer = panel.apply(choice, connect=True)
        assert answer["snapshot"]["choice_words"].startswith("2")
        eventually(lambda: panel.state()["snapshot"]["sessions"][0]["state"] == "running", 30)
        assert scene.kernel.check("%%distributed\nprint('ranks', world_size)").lines(0) == ["ranks 2"]
        assert "2/2 h100" not in scene.sgpu("pool", "list")
        assert "The pool has no H100" in panel.plan({**choice, "pool": "team"})["problem"]
        assert "The pool gone can't be reached" in panel.plan({**choice, "pool": gone})["problem"]
        assert panel.plan({"type": "h100"}, connect=True)["problem"] == (
            "The pool cloud is shared with others: choose how many devices."
        )
        assert panel.plan({"type": "a10", "gpus": 1}, connect=True)["sentences"][0] == (
            "Pool team: reserved, and has 1 A10 free; gone can't be reached."
        )
        panel.disconnect_all()
        # a cell with ranks of its own goes there, too
        assert "2 ranks on cloud" in scene.kernel.check("%%distributed\nrank").text
        assert "1 rank on team" in scene.kernel.check("%%distributed --pool team -n 1 --type a10\nrank").text
    finally:
        panel.disconnect_all()
        panel.state(panel.apply({})["kept"])


# ---------------------------------------------------------------- adding pools


@pytest.mark.slow
def test_adding_a_pool_tells_each_failure_by_itself_and_writes_nothing(scene: Scene, gone: str):
    before = scene.file.read_bytes()
    where = scene.cloud.entry
    nobody = next(each.address for each in read_pools(scene.file) if each.name == gone)
    add = ("pool", "add")
    assert "nothing answers at" in scene.refused(*add, "x", nobody, "--key", where.key)
    wrong = scene.refused(*add, "x", where.address, "--key", new_key_pair().public)
    assert "could not prove that it is the pool x whose key you have." in wrong
    assert "Nothing was written; --no-check adds it anyway." in wrong
    assert "this machine can't find the address of 'nowhere.invalid'" in scene.refused(
        *add, "x", "tcp://nowhere.invalid:1", "--key", where.key
    )
    scene.cloud.command("revoke", "ann")
    try:
        output = scene.refused(*add, "x", where.address, "--key", where.key)
    finally:
        scene.cloud.command("authorize", "ann", scene.keys.public)
    assert "the pool x does not admit your key. Send your public key" in output
    assert scene.keys.public in output
    assert "its key is invalid" in scene.refused(*add, "x", where.address, "--key", "short")
    assert "a pool named 'team' is already in" in scene.refused(*add, "team", where.address, "--key", where.key)
    assert "its address is 'cloud:1'" in scene.refused(*add, "x", "cloud:1", "--key", where.key)
    assert scene.file.read_bytes() == before


def test_adding_listing_and_removing_a_pool(scene: Scene, new_kernel: Callable[[], Kernel]):
    where = scene.cloud.entry
    output = scene.sgpu(
        "pool",
        "add",
        "third",
        where.address,
        "--key",
        where.key,
        "--reserved",
        "--types",
        "A10,t4",
        "--prices",
        "a10=1",
    )
    assert output == (
        f"the pool third (reserved) is listed in {scene.file}. It answers, and has 4 A10 (24 GB), 2 H100 (80 GB), "
        "16 CPU ranks. It has no t4 now, although --types names it. `--pool third` uses it.\n"
    )
    try:
        assert read_pools(scene.file)[-1] == replace(
            where, name="third", reserved=True, types=("a10", "t4"), prices={"a10": 1.0}
        )
        # a kernel that ends together with its link
        kernel = new_kernel()
        assert "1 rank on third" in kernel.check("%%distributed -n 1 --type a10 --pool third\nrank").text
    finally:
        assert "is no longer listed. Its runs continue." in scene.sgpu("pool", "remove", "third")
    output = scene.sgpu("pool", "add", "later", "tcp://nowhere.invalid:1", "--key", where.key, "--no-check")
    assert "It was not contacted." in output
    assert "can't find the address" in scene.sgpu("pool", "list")
    scene.sgpu("pool", "remove", "later")


@pytest.mark.slow
def test_the_link_to_a_pool_that_is_listed_no_more_ends_with_what_goes_on_there(
    scene: Scene, new_kernel: Callable[[], Kernel]
):
    add_pool(replace(scene.cloud.entry, name="brief"), scene.file)
    kernel = new_kernel()
    try:
        kernel.check("%sgpu_connect -n 1 --type h100 --pool brief")
    finally:
        remove_pool("brief", scene.file)
    assert linked_pools(kernel) == ["brief"]
    assert kernel.check("%%distributed\nprint('goes on')").lines(0) == ["goes on"]
    kernel.check("%sgpu_disconnect")
    eventually(lambda: linked_pools(kernel) == [], 10)

"""`init_process_group` on a rank that already has a group: accepted arguments take effect, others are reported."""

from __future__ import annotations

import inspect
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Session, Zygote

from sgpu_magic.wire.rank import Remarked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files, /proc")

CODE = """
import pickle
import cloudpickle
from sgpu_magic.worker.group import rendezvous
rendezvous.accept_second_init()
from torch.distributed import distributed_c10d, init_process_group
assert init_process_group is distributed_c10d.init_process_group
# a process that the rank spawns makes a group of its own with torch's function
packed = cloudpickle.dumps(init_process_group)
assert pickle.loads(packed) is init_process_group
assert b"sgpu_magic" not in packed
"""
IMPORTS = """
import datetime, os, time, torch, torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
def limit(): return c10d.GroupMember.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()
"""
# a user-defined backend: gloo under another name, which records its options
PLUGIN = """
made_with = []
def make(common, options):
    made_with.append(options)
    return dist.ProcessGroupGloo(common.store, common.group_rank, common.group_size, timeout=common.timeout)
if 'plugin' not in dist.Backend.backend_list:
    dist.Backend.register_backend('plugin', make, extended_api=True, devices=['cpu'])
"""
SUM = "total = torch.ones(1)\ndist.all_reduce(total)\n"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def pair(zygote: Zygote) -> Iterator[Session]:
    made = Session(zygote, 2)
    yield made.connect()
    made.leave()


def values(session: Session, body: str) -> list[object]:
    return [found["value"] for found in session.run(IMPORTS + body)]


def notes(session: Session, rank: int = 0) -> list[str]:
    return [message.text for message, _ in session.ranks[rank].others if isinstance(message, Remarked)]


@pytest.mark.slow
def test_it_is_pickled_by_torchs_name() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------- every parameter of torch's functions


def timeout_is_applied(session: Session) -> None:
    shorter = "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=2))\nlimit()"
    assert values(session, shorter) == [2.0, 2.0]
    # collectives really use this time-out
    late = (
        "began = time.monotonic()\ntry:\n"
        "    if rank == 0:\n        dist.all_reduce(torch.ones(1))\n"
        "except RuntimeError:\n    pass\nwaited = time.monotonic() - began\nwaited"
    )
    waited = values(session, late)[0]
    assert isinstance(waited, float)
    assert 1.5 < waited < 20


def backend_is_applied(session: Session) -> None:
    body = PLUGIN + "dist.init_process_group('plugin')\n" + SUM + "dist.get_backend(), total.item()"
    assert values(session, body) == [("plugin", 2.0)] * 2
    # a repeated call keeps the group
    again = "before = c10d.GroupMember.WORLD\ndist.init_process_group('plugin')\nbefore is c10d.GroupMember.WORLD"
    assert values(session, again) == [True, True]
    # earlier groups stay usable, and new ones have the new backend
    body = "old = next(iter(c10d._world.pg_map))\nt = torch.ones(1)\ndist.all_reduce(t, group=old)\nt.item()"
    assert values(session, body) == [2.0, 2.0]
    assert values(session, "dist.get_backend(dist.new_group([0, 1]))") == ["plugin"] * 2
    assert values(
        session, "dist.destroy_process_group()\ndist.init_process_group('gloo')\n" + SUM + "total.item()"
    ) == [
        2.0,
        2.0,
    ]


def options_are_applied(session: Session) -> None:
    body = PLUGIN + "dist.init_process_group('plugin', pg_options='fast')\n" + SUM + "made_with, total.item()"
    assert values(session, body) == [(["fast"], 2.0)] * 2


def rank_and_size_are_compared(session: Session) -> None:
    session.run("import torch.distributed as dist\ndist.init_process_group('gloo', rank=rank, world_size=2)")
    for wrong in ("rank=1 - rank", "world_size=3", "_ranks=[0]"):
        session.execute(f"import torch.distributed as dist\ndist.init_process_group({wrong})")
        for rank in range(2):
            assert wrong.partition("=")[0] in session.failure(rank).failure.message


def device_is_checked(session: Session) -> None:
    session.execute("import torch.distributed as dist\ndist.init_process_group(device_id=0)")
    for rank in range(2):
        assert "device_id" in session.failure(rank).failure.message


def the_same_ranks_have_met_already(session: Session) -> None:
    body = (
        "before = c10d.GroupMember.WORLD\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:9', group_name='mine')\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=rank, world_size=2)\n"
        "before is c10d.GroupMember.WORLD"
    )
    assert values(session, body) == [True, True]


INIT: dict[str, Callable[[Session], None]] = {
    "backend": backend_is_applied,
    "init_method": the_same_ranks_have_met_already,
    "timeout": timeout_is_applied,
    "world_size": rank_and_size_are_compared,
    "rank": rank_and_size_are_compared,
    "store": the_same_ranks_have_met_already,
    # torch ignores this one too
    "group_name": the_same_ranks_have_met_already,
    "pg_options": options_are_applied,
    "device_id": device_is_checked,
    "_ranks": rank_and_size_are_compared,
}


def test_every_parameter_of_init_process_group_is_known() -> None:
    """A parameter that a new version of torch adds needs a line in the table, and a decision."""
    assert list(inspect.signature(dist.init_process_group).parameters) == list(INIT)


@pytest.mark.parametrize("check", dict.fromkeys(INIT.values()), ids=lambda check: check.__name__)
def test_what_init_process_group_accepts_takes_effect(pair: Session, check: Callable[[Session], None]) -> None:
    check(pair)


FILES_OF = """
def files_of(function):
    found = []
    while function is not None:
        found.append(function.__code__.co_filename)
        function = getattr(function, "__wrapped__", None)
    return found
"""


def test_functions_that_a_rank_leaves_to_torch_are_torchs_own(pair: Session) -> None:
    """`new_group`, `destroy_process_group` and `set_device` are not replaced on ranks, so nothing can be ignored.

    A replacement could have the signature of what it wraps, so the code of each layer is compared.
    """
    body = FILES_OF + "[files_of(f) for f in (dist.new_group, dist.destroy_process_group, torch.cuda.set_device)]"
    names: dict[str, Callable[[object], list[str]]] = {}
    exec(FILES_OF, names)
    own = [names["files_of"](f) for f in (dist.new_group, dist.destroy_process_group, torch.cuda.set_device)]
    assert values(pair, body) == [own] * 2
    # the check does detect a replacement
    seen = f"{FILES_OF}files_of(dist.init_process_group)"
    assert names["files_of"](dist.init_process_group) not in values(pair, seen)


def test_a_backend_for_gpus_on_ranks_without_one_is_told(pair: Session) -> None:
    assert values(pair, "dist.init_process_group('nccl')\ndist.get_backend()") == ["gloo", "gloo"]
    assert any("have no GPU" in text for text in notes(pair))
    assert notes(pair, rank=1) == []


def test_a_group_that_can_not_be_made_leaves_the_run_its_own(pair: Session) -> None:
    pair.execute("import torch.distributed as dist\ndist.init_process_group('mpi')")
    for rank in range(2):
        assert "MPI built in" in pair.failure(rank).failure.message
    assert values(pair, SUM + "total.item()") == [2.0, 2.0]


FRAMEWORKS = {
    "accelerate/state.py": (
        "import torch.distributed as dist\n"
        "class PartialState:\n"
        "    def __init__(self, cpu=False, **kwargs):\n"
        "        if not dist.is_initialized():\n            dist.init_process_group('gloo', **kwargs)\n",
        "from accelerate.state import PartialState\nPartialState(timeout=datetime.timedelta(seconds=5))",
    ),
    "lightning_fabric/utilities/distributed.py": (
        "import torch.distributed as dist\n"
        "def _init_dist_connection(cluster, backend, global_rank=None, world_size=None, **kwargs):\n"
        "    if dist.is_initialized():\n        return\n"
        "    dist.init_process_group(backend, rank=global_rank, world_size=world_size, **kwargs)\n",
        "from lightning_fabric.utilities.distributed import _init_dist_connection as init\n"
        "init(None, 'gloo', timeout=datetime.timedelta(seconds=5))",
    ),
}


@pytest.mark.parametrize("file", FRAMEWORKS)
def test_a_framework_that_skips_the_call_applies_its_time_limit(pair: Session, tmp_path: Path, file: str) -> None:
    """Stand-ins with the decisive lines of the frameworks; `tests/frameworks` tests the frameworks themselves."""
    text, use = FRAMEWORKS[file]
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    for folder in path.relative_to(tmp_path).parents:
        (tmp_path / folder / "__init__.py").touch()
    path.write_text(text)
    assert values(pair, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{use}\nlimit()") == [5.0, 5.0]


# ---------------------------------------------------------------- where ranks meet


def test_the_setup_of_a_tutorial_may_be_called_twice_at_an_address_that_is_in_use(pair: Session) -> None:
    """Rank 0 can't listen there, and the others must not join whatever process does."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        body = (
            "def setup():\n"
            f"    os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='{stranger.getsockname()[1]}')\n"
            "    dist.init_process_group('gloo', rank=rank, world_size=world_size)\n"
            "sums = []\n"
            "for demo in range(3):\n"
            "    setup()\n    " + SUM.replace("\n", "\n    ") + "sums.append(total.item())\n"
            "    dist.destroy_process_group()\n"
            "setup()\nsums"
        )
        assert values(pair, body) == [[2.0] * 3] * 2
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_some_ranks_may_meet_at_an_address_of_their_own(pair: Session) -> None:
    """The ranks can meet again afterwards, although one of them has met others meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = (
        "dist.destroy_process_group()\n"
        "if rank == 1:\n"
        f"    dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', rank=0, world_size=1)\n"
        "    dist.destroy_process_group()\n"
        "dist.init_process_group('gloo')\n" + SUM + "total.item()"
    )
    assert values(pair, body) == [2.0, 2.0]

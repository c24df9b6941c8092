"""`sgpu pool deploy` on a real Ray head with its dashboard and a token: a pool that a far client uses."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from free_ports import free_ports
from homes import Home
from msgspec.structs import replace
from process_table import process_table
from ray_head import RayHead
from served_pools import SGPU, RemoteUser
from waiting import eventually

from sgpu_magic.client.pools_file import PoolEntry, add_pool
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.nodes.ray.deploy import JobsApi
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import RanksStarted

# a Ray cluster starts slowly on a busy machine
pytestmark = pytest.mark.timeout(400)
_ADD = re.compile(r"sgpu pool add (?P<name>\S+) (?P<address>tcp://\S+) --key '(?P<key>[^']{40})'")


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    head = RayHead()
    try:
        yield head
    finally:
        head.close()


def sgpu(home: Home, variables: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SGPU, *arguments], env=home.environ | dict(variables), capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.slow
def test_a_wrong_token_is_told_at_once(head: RayHead):
    began = time.monotonic()
    with pytest.raises(PoolError, match="rejected the token"):
        JobsApi(head.dashboard, {**head.variables, "RAY_AUTH_TOKEN": "0" * 64}).check()
    with pytest.raises(PoolError, match="requires its token"):
        JobsApi(head.dashboard, {"HOME": "/nowhere"}).check()
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_where_the_token_is_found(head: RayHead, tmp_path: Path):
    (tmp_path / "token").write_text(f"{head.token}\n")
    JobsApi(head.dashboard, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}).check()
    (tmp_path / ".ray").mkdir()
    (tmp_path / "token").rename(tmp_path / ".ray" / "auth_token")
    JobsApi(head.dashboard, {"HOME": str(tmp_path)}).check()
    JobsApi(head.dashboard, {"RAY_JOB_HEADERS": f'{{"Authorization": "Bearer {head.token}"}}'}).check()
    with pytest.raises(UsageError, match="no such file"):
        JobsApi(head.dashboard, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")})


@pytest.mark.slow
def test_a_pool_is_deployed_used_and_undeployed(head: RayHead):
    (port,) = free_ports(1)
    user = RemoteUser("ann", PoolEntry("nobody", "tcp://127.0.0.1:1", "0" * 40))
    user.home.environ |= {
        "SGPU_RAY_SAME_FILES": "1",
        "SGPU_RAY_NODE_LISTEN": "tcp://127.0.0.1:0",
        "SGPU_CONFIG": str(user.home.path / "config.toml"),
    }
    before = set(head.below())
    try:
        arguments = ("--ray", head.dashboard, "--name", "team")
        done = sgpu(user.home, head.variables, "pool", "deploy", *arguments, "--listen", f"tcp://127.0.0.1:{port}")
        assert done.returncode == 0, done.stderr
        match = _ADD.search(done.stdout)
        assert match is not None, done.stdout
        again = sgpu(user.home, head.variables, "pool", "deploy", *arguments)
        assert again.returncode != 0
        assert "is already running on the Ray cluster" in again.stderr

        user.entry = replace(user.entry, name=match["name"], address=match["address"], key=match["key"])
        add_pool(user.entry, user.home.path / "pools.toml")
        run = user.client.begin("import os; os.environ['RANK']", ranks=2, device_type="a10")
        run.wait_for(RanksStarted)
        assert run.ended().state is RunState.SUCCEEDED
        assert run.values == ["0", "1"]

        ended = sgpu(user.home, head.variables, "pool", "undeploy", *arguments)
        assert ended.returncode == 0, ended.stderr
        eventually(lambda: not _ours(head, before), 30, lambda: f"left in the cluster: {_ours(head, before)}")
        assert "no pool named" in sgpu(user.home, head.variables, "pool", "undeploy", *arguments).stderr
    finally:
        user.leave()
        user.home.close()


def _ours(head: RayHead, before: set[int]) -> list[str]:
    table = process_table()
    return [
        str(table[pid])
        for pid in head.below()
        if pid not in before and pid in table and "sgpu_magic" in str(table[pid])
    ]

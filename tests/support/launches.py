"""Orders to start a run, as agents get them."""

from __future__ import annotations

from pathlib import Path

from sgpu_magic.client.this_machine import this_owner
from sgpu_magic.wire.attachments import InlinePayload, PackedLayout, Payload
from sgpu_magic.wire.devices import Lease, NodeShare, Placement
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.run import CellSource, Interpreter, Owner, RankContext, RunSpec

RUN = "7f3a90c1"
SHARES = (NodeShare(node="a", host="ml-1", ranks=2), NodeShare(node="b", host="ml-2", ranks=2))
KERNELS = ("/py/lib/python311.zip", "/py/lib/python3.11", "/venv/lib/python3.11/site-packages")


def launch() -> Launch:
    spec = RunSpec(
        run_id=RUN,
        name="cell",
        cell=CellSource(body="", execution_count=1),
        placement=Placement(ranks=4),
        outputs=(),
        owner=this_owner(),
        timeout_s=60.0,
    )
    return Launch(
        spec=spec,
        interpreter=Interpreter(executable="python", key="k", variables={}),
        context=RankContext(cwd="/", sys_path=(), umask=0o22, environ={}, key=bytes(32)),
        payload=Payload(source=InlinePayload(), layout=PackedLayout(pickle_size=1, buffers=(), mac=b"")),
        lease=Lease(lease_id="l", device_type="cpu", ranks=4, cpu_slots=4, shares=SHARES),
        run_dir="/nowhere",
    )


def placed_launch(
    tmp_path: Path, *, is_remote: bool, env_names: tuple[str, ...] = (), session: str = "", **environ: str
):
    spec = RunSpec(
        run_id="r1",
        name="cell",
        cell=CellSource(body=""),
        placement=Placement(ranks=1),
        outputs=(),
        owner=Owner(pid=1, host="h", user="u"),
        timeout_s=1.0,
        env_names=env_names,
        session=session,
    )
    context = RankContext(
        cwd="/nb",
        sys_path=("/nb", *KERNELS, "/shelf"),
        umask=0,
        environ=environ,
        key=b"",
        installed=KERNELS,
        is_remote=is_remote,
    )
    layout = PackedLayout(pickle_size=0, buffers=(), mac=b"")
    (tmp_path / "r1").mkdir(exist_ok=True)
    return Launch(
        spec=spec,
        interpreter=Interpreter(executable="/venv/bin/python", key="k", variables={}),
        context=context,
        payload=Payload(source=InlinePayload(), layout=layout),
        lease=Lease(lease_id="l", device_type="cpu", ranks=1),
        run_dir=str(tmp_path / "r1"),
    )

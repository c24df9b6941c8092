"""Variables of ranks that control how NCCL and gloo find their peers and handle errors."""

from __future__ import annotations

import msgspec
import pytest
from launches import launch

from sgpu_magic.agent.ranks.orders import LOOPBACK, RendezvousPoint, torchrun_variables
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.node import NodePart
from sgpu_magic.wire.run import RANK_VARIABLES

ON_NODES = NodePart(first_rank=0, ranks=2, index=0, nodes=2, address="10.0.0.1")
MEETING = RendezvousPoint(29500, "10.0.0.1", "eth0")


def variables(
    *,
    kind: RunKind = RunKind.CELL,
    device: str = "cuda",
    part: NodePart | None = None,
    environ: dict[str, str] | None = None,
) -> dict[str, str]:
    made = launch()
    context = msgspec.structs.replace(made.context, environ=environ or {})
    spec = msgspec.structs.replace(made.spec, kind=kind)
    made = msgspec.structs.replace(made, spec=spec, context=context, part=part)
    meeting = RendezvousPoint(29500) if part is None else MEETING
    return torchrun_variables(made, 0, meeting, device)


@pytest.mark.parametrize(
    ("kind", "environ", "expected"),
    [
        # as under torchrun
        (RunKind.CELL, {}, "1"),
        (RunKind.CALL, {}, "1"),
        # the ranks of a session outlive a failure: the watchdog must not end them
        (RunKind.SESSION, {}, "0"),
        (RunKind.CELL, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3"),
        (RunKind.SESSION, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "1"),
    ],
)
def test_what_nccls_watchdog_does_depends_on_the_kind_of_run(kind: RunKind, environ: dict[str, str], expected: str):
    assert variables(kind=kind, environ=environ)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == expected


def test_nccl_uses_the_interface_of_the_nodes_address_and_no_other_that_begins_alike():
    found = variables(part=ON_NODES)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")
    own = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}
    found = variables(part=ON_NODES, environ=own)
    assert found | own == found


def test_on_one_node_nothing_but_loopback_is_needed():
    """NCCL takes the first interface that is up, which on a notebook's machine may be that of a VPN."""
    found = variables()
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == (LOOPBACK, f"={LOOPBACK}")
    assert variables(environ={"NCCL_SOCKET_IFNAME": "eth1"})["NCCL_SOCKET_IFNAME"] == "eth1"
    assert "NCCL_SOCKET_IFNAME" not in variables(device="cpu")


def test_what_the_notebook_can_not_choose_is_what_env_refuses():
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    for part in (None, ON_NODES):
        assert variables(part=part).keys() - RANK_VARIABLES <= set(names)
        assert variables(part=part).keys() >= RANK_VARIABLES
    # with several nodes, each of the others is as the notebook has it
    chosen = dict.fromkeys(names, "mine")
    found = variables(part=ON_NODES, environ=chosen)
    assert found | chosen == found

"""A launch becomes orders for its ranks: the cell, where it runs, torchrun's variables, and where the ranks meet.

They meet on this node's loopback, or at the first node of a run of several.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Generator, Sequence

import msgspec
import psutil

from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.run_processes import RUN_VARIABLE
from sgpu_magic.agent.reports import Reports
from sgpu_magic.agent.runs.run_files import RunFiles
from sgpu_magic.wire.files import CHECKPOINTS
from sgpu_magic.wire.node import Launch, MasterBound, MasterKnown, Part
from sgpu_magic.wire.rank import Execute, Prepare, PrivateRay
from sgpu_magic.wire.tracking import Tracking

_BACKLOG = 1024
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class RendezvousPoint(msgspec.Struct, frozen=True):
    """What a run's ranks are told of it.

    Args:
        port: `MASTER_PORT`.
        address: `MASTER_ADDR`.
        interface: The network interface for the groups' own connections; "" leaves that to torch.
        listening: The descriptor of the listening socket, for rank 0; empty elsewhere, or when it has it.
    """

    port: int
    address: str = "127.0.0.1"
    interface: str = LOOPBACK
    listening: Sequence[int] = ()


class Rendezvous:
    """Of one part of a run of several nodes. The first node's part listens and says where; the others say that they
    are ready, as their packages may take long.

    Args:
        run_id: The run.
        part: This node's.
        reports: Tells the pool service, if there is one.
        known: Called once with the point, when it is known.

    Raises:
        OSError: Nothing can listen at the node's address.
    """

    def __init__(
        self,
        run_id: str,
        part: Part,
        reports: Reports,
        known: Callable[[RendezvousPoint], None],
    ) -> None:
        self._part = part
        self._reports = reports
        self._known = known
        self._bound = MasterBound(run_id=run_id, address="", port=0)
        self._socket: socket.socket | None = None
        self._over = False
        if part.index == 0:
            family = socket.AF_INET6 if ":" in part.address else socket.AF_INET
            self._socket = socket.create_server((part.address, 0), family=family, backlog=_BACKLOG)
            port = self._socket.getsockname()[1]
            self._bound = MasterBound(run_id=run_id, address=part.address, port=port)

    def begin(self) -> None:
        """Say so, also to a pool service that has come since: it may be for the others that it has to know."""
        self._reports.ask(self._bound)

    def heard(self, message: MasterKnown) -> None:
        """The pool service has heard all nodes, and tells them."""
        if self._over:
            return
        self._over = True
        listening = () if self._socket is None else (self._socket.fileno(),)
        interface = interface_of(self._part.address)
        self._known(RendezvousPoint(message.port, message.address, interface, listening))
        self.close()

    def close(self) -> None:
        """Rank 0 has its own descriptor, or nobody needs one."""
        self._over = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def interface_of(address: str) -> str:
    """Return the interface's name, "" when none of this machine has the address."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if wanted.is_loopback:
        # all of 127.0.0.0/8 is there, whatever is written down
        return LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            # link-local ones end with `%eth0`
            if found.family in _FAMILIES and ipaddress.ip_address(found.address.partition("%")[0]) == wanted:
                return name
    return ""


def torchrun_variables(launch: Launch, rank: int, meeting: RendezvousPoint, device: str) -> dict[str, str]:
    """Return `RANK`, `WORLD_SIZE` ... as torchrun sets them (torch/distributed/elastic, `LocalElasticAgent`).

    Args:
        launch: The run, or this node's part of it.
        rank: The global rank.
        meeting: Where the ranks meet, also those of user code that rendezvouses again.
        device: `cpu` or `cuda`.
    """
    part = launch.part
    ranks = str(launch.spec.placement.ranks)
    local_rank = str(rank if part is None else rank - part.first_rank)
    local_ranks = ranks if part is None else str(part.ranks)
    group, groups = ("0", "1") if part is None else (str(part.index), str(part.nodes))
    uuids = launch.lease.uuids if part is None else launch.lease.shares[part.index].uuids
    # a rank without a GPU of its own must not find somebody else's
    visible = ",".join(uuids) if device == "cuda" else ""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": group,
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": local_ranks,
        "ROLE_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": groups,
        # DeepSpeed's launcher says these beside torchrun's (deepspeed/launcher/launch.py)
        "LOCAL_SIZE": local_ranks,
        "CROSS_RANK": group,
        "CROSS_SIZE": groups,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": launch.spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.spec.retries),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": launch.context.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible,
        **_interfaces(launch, meeting),
        RUN_VARIABLE: launch.spec.run_id,
        # made by `runtime.checkpoint_dir`
        "SGPU_CHECKPOINT_DIR": os.path.join(launch.run_dir, CHECKPOINTS),
    }


def _interfaces(launch: Launch, meeting: RendezvousPoint) -> dict[str, str]:
    """Which network interface the process groups use."""
    if launch.part is None:
        # whatever a cluster's settings say: all ranks are on this node, and any other interface looks names up
        return {"GLOO_SOCKET_IFNAME": meeting.interface}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    told = {name: launch.context.environ.get(name) or meeting.interface for name in names}
    return {name: interface for name, interface in told.items() if interface}


def send_cells(
    launch: Launch,
    group: Group,
    files: RunFiles,
    default_store: str,
    ray: PrivateRay | None = None,
    meeting: RendezvousPoint | None = None,
) -> None:
    """Send every rank of the group its cell and the payload.

    Rank 0 also gets the bound socket behind `MASTER_PORT`, unless the group was prepared before.

    Args:
        launch: The run.
        group: Its ranks.
        files: Its payload.
        default_store: The MLflow store of runs that name none.
        ray: The run's own Ray cluster here; None where it has none.
        meeting: Where the ranks meet, where they are on several nodes; None where they are all here.

    Raises:
        OSError: No port or descriptor is left.
    """
    with _rendezvous(group) if meeting is None else contextlib.nullcontext(meeting) as at:
        for process in group.ranks:
            rank = process.rank
            further = at.listening if rank == 0 else ()
            variables = torchrun_variables(launch, rank, at, device_of(launch))
            _send(launch, group, files, rank, variables, further, default_store, ray)


def send_session_cells(launch: Launch, session: Launch, group: Group, files: RunFiles, default_store: str) -> None:
    """Send the ranks of a session that take part their cell and the payload; their variables stay the session's."""
    device = device_of(session)
    for rank in launch.spec.rank_numbers:
        variables = torchrun_variables(session, rank, RendezvousPoint(group.master_port), device)
        _send(launch, group, files, rank, variables, (), default_store)


def prepare(launch: Launch, group: Group, ranks: Sequence[int], *, stays: bool, renewal: bool = False) -> None:
    """Let ranks take their place before they get a cell.

    Args:
        launch: Whose context, devices and variables they get.
        group: Where they belong.
        ranks: Which.
        stays: They belong to a session.
        renewal: The others of the group are in it already.

    Raises:
        OSError: No port or descriptor is left.
    """
    with _rendezvous(group, afresh=0 in ranks) as meeting:
        for rank in ranks:
            device = device_of(launch)
            order = Prepare(
                context=launch.context,
                device=device,
                rank_variables=torchrun_variables(launch, rank, meeting, device),
                renewal=renewal,
                stays=stays,
            )
            group.order(rank, order, descriptors=meeting.listening if rank == 0 else ())
        group.master_port = meeting.port


def device_of(launch: Launch) -> str:
    """`cuda` where the lease has real GPUs, else `cpu`."""
    return "cuda" if launch.lease.uuids and not launch.lease.simulated else "cpu"


def _send(
    launch: Launch,
    group: Group,
    files: RunFiles,
    rank: int,
    rank_variables: dict[str, str],
    further: Sequence[int],
    default_store: str,
    ray: PrivateRay | None = None,
) -> None:
    spec, inline = launch.spec, files.inline
    order = Execute(
        run_id=spec.run_id,
        cell=launch.context.cell or spec.cell,
        context=launch.context,
        layout=launch.payload.layout,
        inline=inline,
        outputs=spec.outputs,
        run_dir=launch.run_dir,
        device=device_of(launch),
        rank_variables=rank_variables,
        kind=spec.kind,
        in_session=spec.in_session,
        reload=spec.reload,
        only=spec.only,
        tracking=_in_full(launch.tracking, default_store),
        profile=spec.profile,
        ray=ray,
    )
    descriptors = [] if inline else [files.memory.payload_fd]
    group.order(rank, order, files.frames[:1] if inline else (), [*descriptors, *further])


def _in_full(tracking: Tracking | None, default_store: str) -> Tracking | None:
    """With the default store's URI where none was named."""
    if tracking is None or tracking.uri:
        return tracking
    return msgspec.structs.replace(tracking, uri=default_store)


@contextlib.contextmanager
def _rendezvous(group: Group, *, afresh: bool = False) -> Generator[RendezvousPoint]:
    """Yield where ranks meet that are all here."""
    if group.master_port and not afresh:
        yield RendezvousPoint(group.master_port)
        return
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        yield RendezvousPoint(listening.getsockname()[1], listening=(listening.fileno(),))

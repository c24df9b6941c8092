"""Turns a launch into orders for its ranks: the cell, its context, torchrun's variables, and the rendezvous.

The rendezvous is on this node's loopback interface; for a multi-node run it is on the first node.
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

from sgpu_magic.agent.ranks.group import Group, RunRanks
from sgpu_magic.agent.ranks.run_processes import RUN_VARIABLE
from sgpu_magic.agent.reports import EventReports
from sgpu_magic.agent.runs.run_files import AttemptFiles
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.devices import is_slice
from sgpu_magic.wire.files import CHECKPOINTS
from sgpu_magic.wire.node import Launch, MasterBound, MasterKnown, NodePart
from sgpu_magic.wire.rank import Execute, Prepare
from sgpu_magic.wire.run import PrivateRay

_BACKLOG = 1024
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# values of torch's `ErrorHandlingMode` (ProcessGroupNCCL.hpp): `NoHandling`, and torchrun's default `TearDown`
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LEAVES_IT, _ENDS_THE_PROCESS = "0", "1"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class RendezvousPoint(msgspec.Struct, frozen=True):
    """A run's rendezvous, as its ranks get it.

    Args:
        port: `MASTER_PORT`.
        address: `MASTER_ADDR`.
        interface: The network interface for the groups' own connections; "" leaves the choice to torch.
        listening: The descriptor of the listening socket, for rank 0; empty elsewhere, or when rank 0 already has it.
    """

    port: int
    address: str = "127.0.0.1"
    interface: str = LOOPBACK
    listening: Sequence[int] = ()


class Rendezvous:
    """The rendezvous of one node's part of a multi-node run.

    The first node listens and reports its address. The other nodes only report that they are ready, since their
    packages may take long.

    Args:
        run_id: The run.
        part: This node's part.
        reports: Reports to the pool service.
        known: Called once with the rendezvous, when all nodes are ready.

    Raises:
        OSError: The node's address can't be bound.
    """

    def __init__(
        self, run_id: str, part: NodePart, reports: EventReports, known: Callable[[RendezvousPoint], None]
    ) -> None:
        self._part = part
        self._reports = reports
        self._known = known
        self._bound = MasterBound(run_id=run_id, address="", port=0)
        self._socket: socket.socket | None = None
        self._is_done = False
        if part.index == 0:
            family = socket.AF_INET6 if ":" in part.address else socket.AF_INET
            self._socket = socket.create_server((part.address, 0), family=family, backlog=_BACKLOG)
            self._bound = MasterBound(run_id=run_id, address=part.address, port=self._socket.getsockname()[1])

    def begin(self) -> None:
        """Report this node's readiness; call it again for a new pool service, which needs it for the other nodes."""
        self._reports.ask(self._bound)

    def on_master_known(self, message: MasterKnown) -> None:
        """Handle the rendezvous address, which the pool service sends when all nodes are ready."""
        if self._is_done:
            return
        self._is_done = True
        listening = () if self._socket is None else (self._socket.fileno(),)
        interface = interface_of(self._part.address)
        self._known(RendezvousPoint(message.port, message.address, interface, listening))
        self.close()

    def close(self) -> None:
        """Close the listening socket: rank 0 has its own descriptor, or none is needed."""
        self._is_done = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def interface_of(address: str) -> str:
    """Return the name of the interface with this address, "" when this machine has none."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if wanted.is_loopback:
        # all of 127.0.0.0/8 works, though only one address is listed
        return LOOPBACK
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            # link-local addresses end with `%eth0`
            if found.family in _FAMILIES and ipaddress.ip_address(found.address.partition("%")[0]) == wanted:
                return name
    return ""


def torchrun_variables(launch: Launch, rank: int, meeting: RendezvousPoint, device: str) -> dict[str, str]:
    """Return `RANK`, `WORLD_SIZE` ... as torchrun sets them (torch/distributed/elastic, `LocalElasticAgent`).

    Args:
        launch: The run, or this node's part of it.
        rank: The global rank.
        meeting: The rendezvous, also for user code that initializes a process group again.
        device: `cpu` or `cuda`.
    """
    part = launch.part
    ranks = str(launch.spec.placement.ranks)
    local_rank = str(rank if part is None else rank - part.first_rank)
    local_ranks = ranks if part is None else str(part.ranks)
    group, groups = ("0", "1") if part is None else (str(part.index), str(part.nodes))
    uuids = launch.lease.uuids if part is None else launch.lease.shares[part.index].uuids
    # hide all GPUs from a CPU rank, which has none in its lease
    visible = ",".join(uuids) if device == "cuda" else ""
    if any(map(is_slice, uuids)) and device == "cuda":
        # if several slices are listed, CUDA makes only the first one visible
        visible = uuids[int(local_rank)]
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
        # DeepSpeed's launcher sets these besides torchrun's (deepspeed/launcher/launch.py)
        "LOCAL_SIZE": local_ranks,
        "CROSS_RANK": group,
        "CROSS_SIZE": groups,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": launch.spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(launch.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.spec.retries),
        _ERROR_HANDLING: launch.context.environ.get(_ERROR_HANDLING) or error_handling_of(launch),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible,
        **_interfaces(launch, meeting, device),
        RUN_VARIABLE: launch.spec.run_id,
        # created by `runtime.checkpoint_dir`
        "SGPU_CHECKPOINT_DIR": os.path.join(launch.run_dir, CHECKPOINTS),
    }


def rank_variables_of(launch: Launch) -> tuple[str, ...]:
    """Return the names of the variables that each rank has besides the kernel's."""
    first = 0 if launch.part is None else launch.part.first_rank
    names = torchrun_variables(launch, first, RendezvousPoint(0, "", ""), "cpu")
    return tuple({**names, _NCCL_INTERFACE: "", _GLOO_INTERFACE: ""})


def error_handling_of(launch: Launch) -> str:
    """Return what NCCL's watchdog does about a failed or late collective, unless the user has chosen it.

    The ranks of a session outlive a failure: they are released, keep their variables, and reconnect their groups. So
    the watchdog must neither end the process nor abort collectives by itself, after which the code would continue with
    invalid data; torch requires the same for an abort by the program (`_abort_process_group`). A session's collective
    therefore has no time limit: the view reports a hang, and an interrupt ends it.

    Any other run ends with its first failure, and the watchdog ends the rank of a late collective, as under torchrun.
    """
    return _LEAVES_IT if launch.spec.kind is RunKind.SESSION else _ENDS_THE_PROCESS


def _interfaces(launch: Launch, meeting: RendezvousPoint, device: str) -> dict[str, str]:
    """Return the variables that set the process groups' network interface."""
    nccl = launch.context.environ.get(_NCCL_INTERFACE) or _exactly(meeting.interface)
    if launch.part is None:
        # override a cluster's settings: all ranks are on this node, and other interfaces need name look-ups; NCCL would
        # use the first interface that is up, even if no peer can reach it
        own = {_NCCL_INTERFACE: nccl} if device == "cuda" else {}
        return {_GLOO_INTERFACE: meeting.interface} | own
    chosen = {_GLOO_INTERFACE: launch.context.environ.get(_GLOO_INTERFACE) or meeting.interface, _NCCL_INTERFACE: nccl}
    return {name: interface for name, interface in chosen.items() if interface}


def _exactly(interface: str) -> str:
    """Return NCCL's spelling for this interface alone: without the `=`, `eth1` matches `eth10` too."""
    return f"={interface}" if interface else ""


def order_of(launch: Launch, files: AttemptFiles, default_store: str, ray: PrivateRay | None = None) -> Execute:
    """Return the order to execute a cell, without the variables that differ between ranks.

    Args:
        launch: The run.
        files: Its payload.
        default_store: The MLflow store for runs that name none.
        ray: The run's own Ray cluster on this node; None without one.
    """
    spec, tracking = launch.spec, launch.tracking
    if tracking is not None and not tracking.uri:
        tracking = msgspec.structs.replace(tracking, uri=default_store)
    return Execute(
        run_id=spec.run_id,
        cell=launch.context.cell or spec.cell,
        context=launch.context,
        layout=launch.payload.layout,
        inline=files.inline,
        outputs=spec.outputs,
        run_dir=launch.run_dir,
        device=device_of(launch),
        rank_variables={},
        kind=spec.kind,
        in_session=spec.in_session,
        reload=spec.reload,
        only=spec.only,
        tracking=tracking,
        profile=spec.profile,
        ray=ray,
        mapped=tuple((part.offset, part.size) for part in files.memory.mapped),
    )


def send_cells(
    order: Execute, launch: Launch, run_ranks: RunRanks, files: AttemptFiles, meeting: RendezvousPoint | None = None
) -> None:
    """Send every rank of a run its cell and the payload.

    Rank 0 also gets the bound socket behind `MASTER_PORT`, unless the group was prepared before.

    Args:
        order: The run's order.
        launch: The launch that the ranks' variables come from: the run's own, or that of its session.
        run_ranks: The ranks.
        files: The payload.
        meeting: The rendezvous of a multi-node run; None when all ranks are on this node.

    Raises:
        OSError: No port or descriptor is left.
    """
    group, memory = run_ranks.group, files.memory
    frames = files.frames[:1] if files.inline else ()
    payload = [] if files.inline else [memory.payload_fd, *(part.descriptor for part in memory.mapped)]
    with _rendezvous(group) if meeting is None else contextlib.nullcontext(meeting) as at:
        for rank in run_ranks.numbers:
            variables = torchrun_variables(launch, rank, at, device_of(launch))
            listening = at.listening if rank == 0 else ()
            own = msgspec.structs.replace(order, rank_variables=variables)
            group.order(rank, own, frames, [*payload, *listening])


def prepare(launch: Launch, group: Group, ranks: Sequence[int], *, stays: bool, renewal: bool = False) -> None:
    """Prepare ranks for their first cell: context, device, variables and process group.

    Args:
        launch: The launch with the ranks' context, devices and variables.
        group: The ranks' group.
        ranks: The ranks to prepare.
        stays: Whether they belong to a session.
        renewal: Whether the group's other ranks have already joined.

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
    """Return `cuda` if the lease has real GPUs, else `cpu`."""
    return "cuda" if launch.lease.uuids and not launch.lease.simulated else "cpu"


@contextlib.contextmanager
def _rendezvous(group: Group, *, afresh: bool = False) -> Generator[RendezvousPoint]:
    """Yield the rendezvous of ranks that are all on this node."""
    if group.master_port and not afresh:
        yield RendezvousPoint(group.master_port)
        return
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        yield RendezvousPoint(listening.getsockname()[1], listening=(listening.fileno(),))

"""A launch becomes one order for each rank: the cell, where it runs, and torchrun's variables."""

from __future__ import annotations

import socket

from sgpu_magic.agent.belongings import Belongings
from sgpu_magic.agent.group import Group
from sgpu_magic.agent.variables import torchrun_variables
from sgpu_magic.protocol.node_messages import Execute, Launch


def send_cells(launch: Launch, group: Group, belongings: Belongings) -> None:
    """Send every rank its cell and the payload; rank 0 also gets the bound socket behind `MASTER_PORT`.

    Raises:
        OSError: No port or descriptor is left.
    """
    lease = launch.lease
    device = "cuda" if lease.uuids and not lease.simulated else "cpu"
    inline = belongings.inline
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as rendezvous:
        port = rendezvous.getsockname()[1]
        for process in group.ranks:
            rank = process.rank
            order = Execute(
                run_id=launch.spec.run_id,
                cell=launch.spec.cell,
                context=launch.context,
                layout=launch.payload.layout,
                inline=inline,
                outputs=launch.spec.outputs,
                run_dir=launch.run_dir,
                device=device,
                rank_variables=torchrun_variables(launch, rank, port, device),
            )
            descriptors = [] if inline else [belongings.payload_fd]
            if rank == 0:
                descriptors.append(rendezvous.fileno())
            group.execute(rank, order, belongings.frames[:1] if inline else (), descriptors)

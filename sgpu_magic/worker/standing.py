"""What a rank has taken over before a cell: the kernel's place, its own device, its place in the process group."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os

from sgpu_magic.wire.records import RankContext
from sgpu_magic.wire.zygote_messages import Fork
from sgpu_magic.worker import flight_recorder, place, rendezvous
from sgpu_magic.worker import shell as rank_shell
from sgpu_magic.worker.edited_modules import EditedModules


class Standing:
    """Taken whole by a new rank, and then by what changes from cell to cell.

    Args:
        fork: The group and this rank's place in it.
        store_path: File of the first rendezvous.
        join_error: Why the rank could not join early; None when it has, or has not tried.
    """

    def __init__(self, fork: Fork, store_path: str, join_error: RuntimeError | None) -> None:
        self.rank = fork.rank
        self.ranks = fork.ranks
        self.shell = rank_shell.RankShell.instance()
        self.cuda = False
        self.modules = EditedModules(self.shell)
        self._store_path = store_path
        self._join_error = join_error
        self._joined = fork.join_early
        self._context: RankContext | None = None
        self._variables: dict[str, str] = {}

    def take(self, context: RankContext, device: str, rank_variables: dict[str, str], *, renewal: bool = False) -> None:
        """Stand where the kernel stands, take the device and join the process group.

        Args:
            context: The kernel's place.
            device: `cpu`, or `cuda` when the rank has a GPU of its own.
            rank_variables: torchrun's.
            renewal: The other ranks are in a group already and connect it anew.

        Raises:
            OSError: The kernel's directory can't be entered any more.
            RuntimeError: A peer is gone.
        """
        place.stand_where_the_kernel_stands(context, rank_variables)
        rendezvous.ranks_meet_at(rank_variables["MASTER_ADDR"], rank_variables["MASTER_PORT"])
        place.set_threads(context.environ, int(rank_variables["LOCAL_WORLD_SIZE"]))
        self._context, self._variables = context, rank_variables
        self.cuda = device != "cpu"
        if self._join_error is not None:
            raise self._join_error
        own_device = place.set_device(device, rank_variables)
        if not self._joined:
            # the kernel's environment has taken the place of the zygote's
            flight_recorder.switch_on()
            if renewal:
                # a fresh rank has no use for it
                from sgpu_magic.worker import renewal as renewing

                renewing.renew(self.rank, self.ranks, self._store_path, (self.rank,), cuda=self.cuda)
            else:
                several = rank_variables["GROUP_WORLD_SIZE"] != "1"
                rendezvous.join(self.rank, self.ranks, self._store_path, cuda=self.cuda, several_nodes=several)
            self._joined = True
        self.shell.user_ns.update(
            rank=self.rank,
            local_rank=int(rank_variables["LOCAL_RANK"]),
            world_size=self.ranks,
            device=own_device,
        )

    def follow(self, context: RankContext, rank_variables: dict[str, str]) -> None:
        """Take over what has changed since the last cell; what the rank itself has changed stays.

        Raises:
            OSError: The kernel's new directory can't be entered any more.
        """
        old, self._context = self._context, context
        if rank_variables != self._variables:
            for name, value in rank_variables.items():
                if self._variables.get(name) != value:
                    os.environ[name] = value
            self._variables = rank_variables
        if old is not None and old != context:
            place.follow(old, context, rank_variables)
            if old.environ.get("OMP_NUM_THREADS") != context.environ.get("OMP_NUM_THREADS"):
                place.set_threads(context.environ, int(rank_variables["LOCAL_WORLD_SIZE"]))
        else:
            place.forget_missing_directories()

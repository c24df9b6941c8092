"""The cell of a run with its own Ray cluster, in each rank: rank 0 drives, the others hold their devices."""

from __future__ import annotations

import time
from collections.abc import Callable

from sgpu_magic.errors import SgpuError
from sgpu_magic.wire.rank_messages import Execute, PrivateRay
from sgpu_magic.wire.record import Record
from sgpu_magic.worker import interrupts
from sgpu_magic.worker.cell_run import CellRun
from sgpu_magic.worker.helper import Order
from sgpu_magic.worker.ray_cluster import remote_error
from sgpu_magic.worker.ray_cluster.cluster import Guest, Head, Member
from sgpu_magic.worker.results import Reply
from sgpu_magic.worker.standing import Standing


class RayRun(CellRun):
    """Executes one `Execute` that has `ray`. Arguments as of `CellRun`.

    Args:
        ray: Of the order.
    """

    def __init__(
        self, standing: Standing, message: Execute, order: Order, say: Callable[[Record], None], ray: PrivateRay
    ) -> None:
        super().__init__(standing, message, order, say)
        self._ray = ray
        self._member: Member | None = None

    def run(self) -> Reply:
        """Do it all; every error becomes the reply. Ray is gone from this node when it is there."""
        try:
            return super().run() if self._rank == 0 else self._hold()
        finally:
            # an interrupt is not to leave anything behind
            interrupts.refuse()
            if self._member is not None:
                self._member.end()

    def _prepare(self) -> None:
        self._take_place()
        self._member = head = Head(*self._of_member(), tracked=self._message.tracking is not None)
        head.begin()
        # what the cell reads is unpickled while Ray starts
        self._take_names()
        head.joined()

    def _run_cell(self) -> tuple[BaseException | None, float]:
        error, seconds = super()._run_cell()
        return remote_error.users_own(error, self._shell), seconds

    def _hold(self) -> Reply:
        """Hold the devices until the driver is done."""
        begin = time.perf_counter()
        try:
            self._take_place()
            self._member = guest = Guest(*self._of_member(), tracked=self._message.tracking is not None)
            guest.begin()
            guest.hold()
        except (SgpuError, OSError, RuntimeError, ValueError) as error:
            self._shell.showtraceback((type(error), error, error.__traceback__))
            return self.failed(error)
        self.leave_payload()
        return self._finished(None, "", "", time.perf_counter() - begin)

    def _of_member(
        self,
    ) -> tuple[PrivateRay, int, int, int, int, tuple[str, ...], Callable[[Record], None]]:
        variables, context = self._message.rank_variables, self._message.context
        installed = frozenset(context.installed)
        paths = tuple(entry for entry in context.sys_path if entry and entry not in installed)
        return (
            self._ray,
            self._rank,
            int(variables["LOCAL_RANK"]),
            int(variables["WORLD_SIZE"]),
            int(variables["GROUP_RANK"]),
            paths,
            self._say,
        )

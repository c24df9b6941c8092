"""One rank's life: join the group, execute what the agent sends, report, wait for the others, leave."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from sgpu_magic.errors import SgpuError
from sgpu_magic.payload import buffers, unpack
from sgpu_magic.payload.pack import Packed
from sgpu_magic.protocol import codec
from sgpu_magic.protocol.node_messages import (
    Execute,
    Failed,
    Finished,
    Fork,
    Joined,
    ToRank,
)
from sgpu_magic.protocol.records import FilePayload, InlinePayload, Payload, RankResult, Record, SharedPayload
from sgpu_magic.worker import execute, flight_recorder, interaction, output, place, rendezvous, trace
from sgpu_magic.worker import shell as rank_shell
from sgpu_magic.worker.helper import Helper
from sgpu_magic.worker.link import Link

# an agent that is busy with a flood answers later; a display out of place is better than a rank that waits
_DISPLAY_TIMEOUT_S = 1.0


def live(order: Fork, descriptors: list[int]) -> int:
    """Be a rank until the agent says `Leave` or goes away. Returns the exit status.

    Args:
        order: The group and this rank's place in it.
        descriptors: Control socket, output pipe, error pipe, stack file, and the store's memory file unless it has
            a path.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    output.install(descriptors[1], descriptors[2])
    sampler = trace.install(descriptors[3])
    link = Link(socket.socket(fileno=descriptors[0]), codec.to_rank)
    store_path = order.store_path or f"/proc/self/fd/{descriptors[4]}"
    place.reseed()
    import torch

    # gloo's and torch's own pools: a fork is safe only when the first parallel operation finds a fresh setting
    torch.set_num_threads(1)
    join_error: RuntimeError | None = None
    if order.join_early:
        try:
            rendezvous.join(order.rank, order.ranks, store_path, cuda=False)
        except RuntimeError as error:
            # a peer is gone already; told once there is a run to tell it of
            join_error = error
    shell = rank_shell.RankShell.instance()
    interaction.refuse(shell, order.rank)
    rehearsed = order.rehearse and join_error is None
    if rehearsed:
        execute.rehearse(shell)
    received = link.receive()
    if received is None or not isinstance(received[0], Execute):
        return 0
    try:
        helper = Helper(link, shell, sampler, int(rehearsed))
        _Execution(link, received[0], received[1], order, store_path, join_error, helper).run()
    except ConnectionError:
        # the agent is gone; there is nobody left to tell
        return 1
    return 0


class _Execution:
    """One cell in this rank."""

    def __init__(
        self,
        link: Link[ToRank],
        order: Execute,
        frames: Sequence[bytes],
        fork: Fork,
        store_path: str,
        join_error: RuntimeError | None,
        helper: Helper,
    ) -> None:
        self._link = link
        self._order = order
        self._frames = frames
        self._fork = fork
        self._store_path = store_path
        self._join_error = join_error
        self._shell = rank_shell.RankShell.instance()
        self._helper = helper
        self._display_lock = threading.RLock()
        self._pid = os.getpid()
        # open until the agent has its own descriptor
        self._result_buffer: buffers.SharedBuffer | None = None

    def run(self) -> None:
        order, rank = self._order, self._fork.rank
        payload_fd = -1 if order.inline else self._link.take_descriptors(1)[0]
        if rank == 0:
            rendezvous.keep_listening_socket(self._link.take_descriptors(1)[0])
        self._helper.start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            reply = self._prepare_and_run(payload_fd)
        except KeyboardInterrupt as error:
            reply = self._failed(error)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        output.flush()
        self._link.send(*reply)
        while not self._helper.may_leave.wait(1.0):
            output.flush()
        self._leave()

    def _prepare_and_run(self, payload_fd: int) -> tuple[Record, list[bytes], list[int]]:
        try:
            self._prepare(payload_fd)
        except (
            SgpuError,
            OSError,
            ImportError,
            AttributeError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:
            # unpickling runs the user's own classes: what they raise is the user's error, told like any other
            self._shell.showtraceback((type(error), error, error.__traceback__))
            return self._failed(error)
        outcome = execute.run_cell(self._shell, self._order)
        if outcome.failure is not None and outcome.error is not None:
            return self._failed(outcome.error)
        rank = self._fork.rank
        key = self._order.context.key
        try:
            packed, problem = execute.pack_result(self._shell, self._order.outputs, rank, key)
        except SgpuError as error:
            self._shell.traceback_lines = []
            return self._failed(error)
        hook = execute.assert_hook(self._shell.displayhook)
        text = hook.last_text if hook.last_value is not None else ""
        return self._finished(packed, text, problem, outcome.seconds)

    def _prepare(self, payload_fd: int) -> None:
        order = self._order
        place.stand_where_the_kernel_stands(order.context, order.rank_variables)
        place.set_threads(order.context.environ, int(order.rank_variables["LOCAL_WORLD_SIZE"]))
        if self._join_error is not None:
            raise self._join_error
        device = place.set_device(order)
        if not self._fork.join_early:
            # the kernel's environment has taken the place of the zygote's
            flight_recorder.switch_on()
            rendezvous.join(self._fork.rank, self._fork.ranks, self._store_path, cuda=order.device != "cpu")
        self._link.send(Joined())
        rank_shell.report_to(self._shell, self._report_display)
        self._shell.show_sources(order.cell.linecache)
        namespace = self._shell.user_ns
        namespace.update(
            rank=self._fork.rank,
            local_rank=int(order.rank_variables["LOCAL_RANK"]),
            world_size=self._fork.ranks,
            device=device,
        )
        if order.inline:
            data: bytearray | memoryview = bytearray(self._frames[0])
        else:
            size = os.fstat(payload_fd).st_size
            data = memoryview(unpack.map_private(payload_fd, size))
            os.close(payload_fd)
        unpack.unpack_namespace(data, order.layout, order.context.key, namespace)

    def _failed(self, error: BaseException) -> tuple[Record, list[bytes], list[int]]:
        failure = execute.describe(error, self._shell, self._fork.rank)
        packed = execute.pack_exception(error, self._order.context.key)
        if packed is None or packed.total_bytes > buffers.INLINE_LIMIT:
            return Failed(failure=failure), [], []
        import msgspec

        failure = msgspec.structs.replace(failure, exception=packed.layout)
        return Failed(failure=failure), [packed.to_bytes()], []

    def _finished(
        self, packed: Packed | None, text: str, problem: str, seconds: float
    ) -> tuple[Record, list[bytes], list[int]]:
        payload: Payload | None = None
        blobs: list[bytes] = []
        descriptors: list[int] = []
        if packed is not None and packed.total_bytes <= buffers.INLINE_LIMIT:
            payload = Payload(source=InlinePayload(), layout=packed.layout)
            blobs.append(packed.to_bytes())
        elif packed is not None and not buffers.fits_memory(packed.total_bytes):
            path = Path(self._order.run_dir) / f"result-{self._fork.rank}.bin"
            buffers.write_file(packed, path)
            payload = Payload(source=FilePayload(path=str(path), size=packed.total_bytes), layout=packed.layout)
        elif packed is not None:
            shared = self._result_buffer = buffers.SharedBuffer()
            shared.write(packed)
            payload = Payload(
                source=SharedPayload(pid=os.getpid(), fd=shared.fd, size=shared.size), layout=packed.layout
            )
            descriptors.append(shared.fd)
        result = RankResult(
            rank=self._fork.rank, payload=payload, value_repr=text, value_problem=problem, seconds=seconds
        )
        return Finished(result=result), blobs, descriptors

    def _report_display(self, message: Record) -> None:
        """Send a display and wait until it has its place.

        Output goes another way than messages: what is printed next could overtake the display otherwise.
        """
        if os.getpid() != self._pid:
            # a forked child has no helper thread that would hear the answer
            self._link.send(message)
            return
        with self._display_lock:
            self._helper.in_place.clear()
            self._link.send(message)
            self._helper.in_place.wait(_DISPLAY_TIMEOUT_S)

    def _leave(self) -> None:
        """Run what user code registered for the interpreter's exit, then exit at idle priority.

        The interpreter's own exit takes 0.4 s after an import of torch and is not worth it; the caller ends the
        process without it.
        """
        with contextlib.suppress(OSError, AttributeError):
            # every thread: the last one to end takes the memory down, and that may be one of gloo's
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        output.flush()

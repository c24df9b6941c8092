"""What belongs to a run besides its ranks: its directory, its payload and the results that its ranks returned."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from sgpu_magic.agent.runs.background_copy import Keeper
from sgpu_magic.agent.runs.run_directory import RunDirectory
from sgpu_magic.agent.runs.run_memory import RunMemory
from sgpu_magic.agent.runs.send_files_to_pool import FarRuns
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire.events import EventBody, Noted, PayloadReleased
from sgpu_magic.wire.node_messages import Launch
from sgpu_magic.wire.payloads import FilePayload, InlinePayload, Payload, SharedPayload
from sgpu_magic.wire.rank_messages import FromRank
from sgpu_magic.wire.records import RankResult
from sgpu_magic.wire.states import RunState


class Belongings:
    """Made for each attempt of a run; a further attempt takes the payload over from the one before.

    Args:
        launch: The run.
        frames: Raw frames of the launch; the first is an inline payload.
        keeper: Who copies large parts into the run's directory.
        keep_bytes: The largest part that is kept.
        say: Tells what happened.
        inherited: Those of the attempt before, None for the first.
        far: Takes what belongs to the pool's machine; None where that is this one.

    Attributes:
        inline: The payload is the first of `frames`, else behind `payload_fd`.

    Raises:
        OSError: The run's directory can't be made.
    """

    def __init__(
        self,
        launch: Launch,
        frames: Sequence[bytes],
        keeper: Keeper,
        keep_bytes: int,
        say: Callable[[EventBody], None],
        inherited: Belongings | None,
        far: FarRuns | None = None,
    ) -> None:
        self._far = far if launch.far else None
        self._run_id = launch.spec.run_id
        self._say = say
        self._not_written = False
        self._released: PayloadReleased | None = None
        self.directory = RunDirectory(launch)
        if inherited is not None and inherited._memory.at_hand:
            # wherever the service thinks that the payload lies: this one was used before
            self._memory, self.frames, self.inline = inherited._memory, inherited.frames, inherited.inline
            self._memory.close_results()
            self._memory.on_released = self._payload_released
        else:
            self.frames = frames
            self.inline = isinstance(launch.payload.source, InlinePayload)
            self._memory = RunMemory(
                launch.payload.source, self.directory.path, keeper, keep_bytes, self._payload_released
            )

    # ------------------------------------------------------------ the payload

    def open_payload(self) -> None:
        """Hold the payload, so that it outlives the notebook.

        Raises:
            OSError: It is gone, or was never there.
        """
        self._memory.open_payload()

    def take_payload(self, descriptor: int, path: str) -> None:
        """Hold the payload that was brought from the pool's store; as `RunMemory.take_payload`."""
        self._memory.take_payload(descriptor, path)

    @property
    def payload_fd(self) -> int:
        """The payload's descriptor, -1 when it travels inline."""
        return self._memory.payload_fd

    def give_payload_up(self) -> None:
        """The notebook wants its memory file back. Only once no rank maps it any more."""
        self._memory.give_payload_up()

    # ------------------------------------------------------------ the results

    def take_result(self, result: RankResult, stream: MessageStream[FromRank]) -> Payload | None:
        """Own a result's memory file, which came along on `stream`, and return where a notebook finds it."""
        payload = result.payload
        if payload is not None and self._far is not None and isinstance(payload.source, FilePayload):
            descriptor = os.open(payload.source.path, os.O_RDONLY | os.O_CLOEXEC)
            return self._to_pool(self._far, payload, result.rank, descriptor)
        if payload is None or not isinstance(payload.source, SharedPayload):
            return payload
        (descriptor,) = stream.take_descriptors(1)
        if self._far is not None:
            return self._to_pool(self._far, payload, result.rank, descriptor)
        self._memory.hold_result(result.rank, descriptor)
        source = SharedPayload(pid=os.getpid(), fd=descriptor, size=payload.source.size)
        return Payload(source=source, layout=payload.layout)

    def _to_pool(self, far: FarRuns, payload: Payload, rank: int, descriptor: int) -> Payload:
        size = os.fstat(descriptor).st_size
        source = FilePayload(path=far.take_result(self._run_id, rank, descriptor), size=size)
        return Payload(source=source, layout=payload.layout)

    @property
    def result_bytes(self) -> int:
        """What the results in memory have together."""
        return self._memory.result_bytes

    def close_results(self) -> None:
        """The notebook holds them itself, or nobody will fetch them."""
        self._memory.close_results()

    # ------------------------------------------------------------ memory and disk

    @property
    def in_memory(self) -> bool:
        """Whether somebody may still ask for the results or the payload's memory."""
        return self._memory.in_use

    def keep_large_parts(self) -> None:
        """Copy the payload's and the results' memory files into the run's directory, in the background."""
        self._memory.keep()

    def close(self) -> None:
        """Free what is still held."""
        self._memory.close()

    def not_written(self, text: str) -> None:
        """Something of the run's directory could not be written. A full disk is said once."""
        if not self._not_written:
            self._not_written = True
            self._say(Noted(text=text))

    def describe(self, state: RunState = RunState.STARTING) -> None:
        """Write the run's directory, but for the large parts."""
        try:
            self.directory.describe(self.frames[0] if self.inline else None, state)
        except OSError as error:
            self.not_written(f"the run's directory {self.directory.path} could not be written: {error.strerror}")

    def ended(self, state: RunState) -> None:
        """Write down how the run ended."""
        if self._far is not None:
            self._memory.leave_to_pool()
        try:
            self.directory.ended(state)
        except OSError as error:
            self.not_written(f"run.json could not be written: {error.strerror}")

    def _payload_released(self, kept: bool, why: str) -> None:
        try:
            self.directory.payload_done(kept, why)
        except OSError as error:
            why = f"run.json could not be written: {error.strerror}"
        self._released = PayloadReleased(kept=kept, reason=why)
        self._say(self._released)

    def tell_released_again(self) -> None:
        """A pool service that joins it with other nodes' may not have it: the one before waited for those."""
        if self._released is not None:
            self._say(self._released)

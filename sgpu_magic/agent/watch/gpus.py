"""The GPUs of the runs that go on, asked in a thread of its own: a driver may block, the agent may not.

NVML is open only while a run holds a GPU, so that nothing keeps an administrator from resetting one. A device
whose call does not return is left to its thread, and another thread goes on with the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from sgpu_magic.agent import faults
from sgpu_magic.agent.watch.gpu_reading import GpuReader, GpuReading

Done = Callable[[Mapping[str, GpuReading]], None]

# who asked is answered by then, with what there is
_PATIENCE_S = 0.4
# a call that takes longer does not return: healthy ones take milliseconds, opening the driver a few seconds
_STUCK_S = 5.0
_STUCK = GpuReading(problem="it can't be read: the NVIDIA driver does not answer; look into `dmesg`, or reboot")


class Gpus:
    """Reads the GPUs that somebody holds. All methods are the loop's."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._held: Counter[str] = Counter()
        self._thread: _Thread | None = None
        self._stuck: dict[str, _Thread] = {}
        self._question: _Question | None = None

    def hold(self, uuids: Collection[str]) -> None:
        """A run begins to use these."""
        self._held.update(uuids)

    def release(self, uuids: Collection[str]) -> None:
        """A run uses them no longer. After the last NVML is closed."""
        self._held.subtract(uuids)
        self._held = +self._held
        if not self._held:
            self.close()

    def read(self, done: Done) -> None:
        """Call `done` with a reading of each held GPU within half a second; without those that did not answer yet."""
        if not self._held:
            done({})
            return
        done = faults.bound(done)
        if self._question is not None and self._question.listeners:
            self._question.listeners.append(done)
            return
        self._give_stuck_up()
        if self._question is None:
            if self._thread is None:
                self._thread = _Thread(self._loop, self._told)
            wanted = [uuid for uuid in self._held if uuid not in self._stuck]
            self._question = _Question(self._loop.time())
            self._thread.ask(wanted)
        self._question.listeners.append(done)
        with faults.charging(None):
            self._loop.call_later(_PATIENCE_S, self._answer, self._question)

    def close(self) -> None:
        """Close NVML when the thread's call of now has returned."""
        for thread in (self._thread, *self._stuck.values()):
            if thread is not None:
                thread.end()
        self._thread, self._question = None, None
        self._stuck = {}

    # ------------------------------------------------------------ within

    def _told(self, thread: _Thread, uuid: str, reading: GpuReading | None) -> None:
        """From the thread: one reading, or (None) all that it was asked for."""
        if self._stuck.get(uuid) is thread:
            # it has returned after all
            del self._stuck[uuid]
        elif thread is self._thread and self._question is not None:
            if reading is not None:
                self._question.found[uuid] = reading
            else:
                question, self._question = self._question, None
                self._answer(question)

    def _answer(self, question: _Question) -> None:
        listeners, question.listeners = question.listeners, []
        found = {**dict.fromkeys(self._held.keys() & self._stuck.keys(), _STUCK), **question.found}
        # what was told once is old for who asks later
        question.found = {}
        for done in listeners:
            done(found)

    def _give_stuck_up(self) -> None:
        thread, question = self._thread, self._question
        if thread is None or question is None or self._loop.time() - question.asked_at < _STUCK_S:
            return
        uuid = thread.asking
        # while the driver is opened there is no device to blame, and no other that could be asked
        if uuid:
            thread.end()
            self._stuck[uuid] = thread
            self._thread, self._question = None, None


class _Question:
    """All held GPUs are asked; what comes late is for nobody, and is not asked a second time meanwhile."""

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.found: dict[str, GpuReading] = {}
        self.listeners: list[Done] = []


class _Thread:
    """Owns one `GpuReader`. A daemon: the agent's end waits for no driver.

    Attributes:
        asking: The device whose call has not returned, "" when there is none.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, told: Callable[[_Thread, str, GpuReading | None], None]
    ) -> None:
        self.asking = ""
        self._loop = loop
        self._told = told
        self._orders: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self._ending = False
        threading.Thread(target=self._run, name="sgpu-nvml", daemon=True).start()

    def ask(self, uuids: list[str]) -> None:
        self._orders.put(uuids)

    def end(self) -> None:
        self._ending = True
        self._orders.put(None)

    def _run(self) -> None:
        reader = GpuReader()
        try:
            while (uuids := self._orders.get()) is not None and not self._ending:
                for uuid in uuids:
                    reader.open()
                    self.asking = uuid
                    reading = reader.read(uuid)
                    self.asking = ""
                    self._tell(uuid, reading)
                    if self._ending:
                        return
                self._tell("", None)
        finally:
            reader.close()

    def _tell(self, uuid: str, reading: GpuReading | None) -> None:
        # the loop is closed when the agent ends
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._told, self, uuid, reading)

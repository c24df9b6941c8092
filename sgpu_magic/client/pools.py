"""All pools of one process: the local pool and those of `pools.toml`, each connected on first use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future

import msgspec

from sgpu_magic.client.link import OnNotice
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools_file import LOCAL, PoolEntry, read_pools, unknown_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolIdle, SgpuError
from sgpu_magic.wire.pool_status import PoolStatus

PATIENCE_S = 2.0
"""Seconds to wait for a pool's status before it counts as unreachable."""
# an unreachable pool is not asked again for this long
_AVOIDED_S = 20.0


class PoolStatusReply(msgspec.Struct, frozen=True):
    """The answer of one pool to a status request.

    Args:
        name: The pool's name.
        entry: Its entry in `pools.toml`; None for the local pool.
        status: Its status; None if it is not running, which is no problem where a run starts it, or if it could not be
            asked.
        problem: Why it could not be asked, a paragraph; "" otherwise.
    """

    name: str
    entry: PoolEntry | None
    status: PoolStatus | None = None
    problem: str = ""


class Pools:
    """Creates and keeps one `Pool` per name. Thread-safe.

    Args:
        settings: The process's settings.
        on_notice: As in `Pool`.
        on_sending: As in `Pool`.

    Attributes:
        local: The local pool.
    """

    def __init__(
        self, settings: Settings, on_notice: OnNotice | None = None, on_sending: OnNotice | None = None
    ) -> None:
        self._settings = settings
        self._on_notice = on_notice
        self._on_sending = on_sending
        self.local = Pool(settings, on_notice)
        self._lock = threading.Lock()
        self._made: dict[str, Pool] = {}
        self._replaced: list[Pool] = []
        self._avoided: dict[str, tuple[float, str]] = {}

    def entries(self) -> tuple[PoolEntry, ...]:
        """Read `pools.toml` and return its entries in order; close idle links to pools that are no longer in it.

        Raises:
            UsageError: The file can't be read.
        """
        entries = read_pools()
        self._release_others(entries)
        return entries

    def names(self) -> list[str]:
        """Return the local pool's name and those of the file.

        Raises:
            UsageError: The file can't be read.
        """
        return [LOCAL, *(entry.name for entry in self.entries())]

    def get(self, name: str) -> Pool:
        """Return the pool of that name, without connecting to it.

        Raises:
            UsageError: There is no such pool, or the file can't be read.
        """
        if name == LOCAL:
            return self.local
        entries = self.entries()
        for entry in entries:
            if entry.name == name:
                return self._pool_of(entry)
        raise unknown_pool(name, [entry.name for entry in entries])

    def used_pool(self, name: str) -> Pool:
        """Return the pool of that name that this process has used, even if it has been removed from the file.

        Raises:
            UsageError: There is no such pool.
        """
        with self._lock:
            made = self._made.get(name)
        return made if made is not None else self.get(name)

    def used_pools(self) -> list[Pool]:
        """Return the pools that this process has used, the local one first."""
        with self._lock:
            return [self.local, *self._made.values()]

    def connected(self) -> list[Pool]:
        """Return the pools that this process is connected to, the local one first."""
        return [pool for pool in self.used_pools() if pool.connected is not None]

    def notice(self) -> str:
        """Return the current notices of all pools, "" for none."""
        return " ".join(pool.notice for pool in self.used_pools() if pool.notice)

    def ask_status(
        self,
        entries: Iterable[PoolEntry],
        *,
        local: bool,
        recent: int = 0,
        again: bool = False,
        history: int = 0,
    ) -> list[PoolStatusReply]:
        """Ask several pools for their status in parallel and return the answers in order, the local pool first.

        Takes at most 2 s. Does not start the local pool.

        Args:
            entries: The pools to ask.
            local: Also ask the local pool.
            recent: Number of newest runs to include, besides all active ones; 0 for no runs.
            again: Also ask pools that could not be reached in the last 20 s.
            history: As in `AskStatus`.
        """
        waits = [(entry, self._ask_in_background(entry, recent, again, history)) for entry in entries]
        answers: list[PoolStatusReply] = []
        if local:
            answers.append(_answer(LOCAL, None, lambda: self.local.status(recent, start=False, history=history)))
        deadline = time.monotonic() + PATIENCE_S
        for entry, answer in waits:
            try:
                answers.append(answer.result(max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                problem = f"the pool {entry.name} ({entry.address}) did not answer within {PATIENCE_S:g} s."
                answers.append(PoolStatusReply(entry.name, entry, problem=problem))
        self._remember(answers)
        return answers

    def detach_all(self, timeout_s: float) -> None:
        """Detach all runs of this process, in every pool that it is connected to.

        Args:
            timeout_s: Time to wait for all pools together, in seconds.
        """
        asking = [pool for pool in self.used_pools() if pool is self.local or pool.connected is not None]
        threads = [threading.Thread(target=_detach, args=(pool, timeout_s), daemon=True) for pool in asking]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Close all links; each pool cancels the runs that this process follows."""
        with self._lock:
            made = [*self._made.values(), *self._replaced]
            self._made.clear()
            self._replaced.clear()
        for pool in [self.local, *made]:
            pool.close()

    # ------------------------------------------------------------ internals

    def _pool_of(self, entry: PoolEntry) -> Pool:
        with self._lock:
            known = self._made.get(entry.name)
            # a pool whose address was changed is a different pool
            if known is None or known.entry != entry:
                if known is not None:
                    # kept until its runs have ended
                    self._replaced.append(known)
                known = self._made[entry.name] = Pool(self._settings, self._on_notice, entry, self._on_sending)
            return known

    def _release_others(self, entries: Collection[PoolEntry]) -> None:
        """Close idle links to pools whose entries were removed or changed."""
        with self._lock:
            others = [*(pool for pool in self._made.values() if pool.entry not in entries), *self._replaced]
        for pool in others:
            pool.close_if_unused()

    def _ask_in_background(self, entry: PoolEntry, recent: int, again: bool, history: int) -> Future[PoolStatusReply]:
        future: Future[PoolStatusReply] = Future()
        since, problem = self._avoided.get(entry.name, (float("-inf"), ""))
        if not again and time.monotonic() - since < _AVOIDED_S:
            future.set_result(PoolStatusReply(entry.name, entry, problem=problem))
            return future

        def status() -> PoolStatus | None:
            return self._pool_of(entry).status(recent, start=False, timeout_s=PATIENCE_S, history=history)

        def work() -> None:
            future.set_result(_answer(entry.name, entry, status))

        threading.Thread(target=work, name=f"sgpu-ask-{entry.name}", daemon=True).start()
        return future

    def _remember(self, answers: Iterable[PoolStatusReply]) -> None:
        now = time.monotonic()
        for answer in answers:
            if not answer.problem:
                self._avoided.pop(answer.name, None)
            elif now - self._avoided.get(answer.name, (float("-inf"), ""))[0] >= _AVOIDED_S:
                self._avoided[answer.name] = (now, answer.problem)


def _detach(pool: Pool, timeout_s: float) -> None:
    # without a pool there are no runs to detach; don't wait for a pool that does not answer
    with contextlib.suppress(SgpuError):
        pool.detach("", timeout_s)


def _answer(name: str, entry: PoolEntry | None, ask: Callable[[], PoolStatus | None]) -> PoolStatusReply:
    try:
        status = ask()
    except PoolIdle:
        return PoolStatusReply(name, entry)
    except SgpuError as error:
        return PoolStatusReply(name, entry, problem=error.message)
    if status is None and entry is not None:
        return PoolStatusReply(name, entry, problem=f"the pool {name} gave no answer.")
    # the pool may be configured with another name
    return PoolStatusReply(name, entry, status if status is None else msgspec.structs.replace(status, pool=name))

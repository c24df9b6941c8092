"""Commands that a page or a widget sends to pools: watch a pool, start it, cancel a run in it.

The TypeScript twins of the records are generated: `labextension/src/panel/records.ts`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

from sgpu_magic.client import ledger
from sgpu_magic.client.pools_file import LOCAL, PoolEntry, default_pool, read_pools, unknown_pool
from sgpu_magic.client.this_machine import find_pool, start_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import SgpuError, UsageError
from sgpu_magic.panel.poller import ListWatcher, PoolWatcher, Watchers
from sgpu_magic.panel.pool_state import as_sentence, format_failure
from sgpu_magic.panel.schema import StateUpdate
from sgpu_magic.views.live.schema import Message
from sgpu_magic.views.run_notes import stop_texts
from sgpu_magic.wire.base import CancelReason, is_valid_id, short
from sgpu_magic.wire.decoding import JsonDecoder, convert


class Watch(Message, frozen=True, tag_field="kind", tag="watch"):
    """Send updates about this pool instead of any other, starting with its whole state; "" for the default pool."""

    pool: str = ""


class Rest(Message, frozen=True, tag_field="kind", tag="rest"):
    """The page is hidden: send no updates until the next `Watch`."""


class StartPool(Message, frozen=True, tag_field="kind", tag="start-pool"):
    """Start this pool."""

    pool: str = ""


class CancelRun(Message, frozen=True, tag_field="kind", tag="cancel-run"):
    """Stop a run."""

    run_id: str
    pool: str = ""


PanelOrder = Watch | Rest | StartPool | CancelRun


class CommandResult(Message, frozen=True, tag_field="kind", tag="command-result"):
    """A sentence about the outcome of a command.

    Args:
        ok: The command succeeded.
    """

    text: str
    ok: bool


PanelUpdate = StateUpdate | CommandResult

orders = JsonDecoder[PanelOrder](PanelOrder)


class Page:
    """One page, which gets updates about the pool that it watches. Thread-safe.

    Args:
        watchers: The process's watchers.
        on_update: Called with every update, in any thread; it must not block.
    """

    def __init__(self, watchers: Watchers, on_update: Callable[[PanelUpdate], None]) -> None:
        self._watchers = watchers
        self._on_update = on_update
        self._lock = threading.Lock()
        self._watched: PoolWatcher | None = None
        self._listed: ListWatcher | None = None
        self._pool = ""
        self._closed = False

    def execute(self, order: PanelOrder) -> CommandResult | None:
        """Carry out a command. It may take seconds, or block as long as the file system does.

        Returns:
            The outcome; None for `Watch` and `Rest`, whose effect shows in the updates.
        """
        match order:
            case Watch(pool=pool):
                self._watch(pool)
            case Rest():
                self.rest()
            case StartPool() | CancelRun():
                return execute_once(self._watchers, order)
        return None

    def execute_decoded(self, message: object) -> CommandResult | None:
        """Carry out a command that is given as JSON, as `execute`; errors become its outcome."""
        try:
            return self.execute(convert(message, PanelOrder))
        except Exception as error:  # noqa: BLE001  a thread's top, and a page that waits
            return CommandResult(text=format_failure(error), ok=False)

    @property
    def is_watching(self) -> bool:
        """Whether the page gets updates."""
        return self._watched is not None

    def rest(self) -> None:
        """Stop the updates until the next `Watch`."""
        with self._lock:
            self._unwatch()
            if self._listed is not None:
                self._listed.remove(self)
            self._listed = None

    def close(self) -> None:
        """Stop watching for good."""
        with self._lock:
            self._closed = True
        self.rest()

    def _watch(self, pool: str) -> None:
        with self._lock:
            if self._closed:
                return
            if pool != self._pool:
                self._unwatch()
            self._pool = pool
            self._listed = self._watchers.watch_list(self, self._on_update)
            # a page that watches this pool already gets the whole state again
            self._watched = self._watchers.watch(pool, self, self._on_update)

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._watched.remove(self)
        self._watched = None


def execute_once(watchers: Watchers, order: PanelOrder) -> CommandResult:
    """Carry out the command of a page that gets no updates, and return the outcome; may take seconds."""
    try:
        match order:
            case StartPool(pool=pool):
                text = _start(watchers.read_settings(), pool)
            case CancelRun(run_id=run_id, pool=pool):
                text = _cancel(watchers.read_settings(), pool, run_id)
            case Watch() | Rest():
                text = ""
        return CommandResult(text=as_sentence(text), ok=True)
    except (SgpuError, OSError) as error:
        return CommandResult(text=as_sentence(str(error)), ok=False)
    finally:
        watchers.poll_soon()


def _start(settings: Settings, pool: str) -> str:
    entry = _entry_of(settings, pool)
    if entry is not None:
        raise UsageError(
            f"the pool {entry.name} runs on another machine ({entry.address}): start it there with `sgpu pool serve`."
        )
    from sgpu_magic.client.pool import Pool

    if find_pool(settings) is None:
        # without a zygote: this process's Python may not be that of any notebook
        start_pool(settings)
    with closing(Pool(settings)) as asked:
        # a pool of another version is replaced when it is idle
        asked.status(1, start=True)
    return "The pool is running."


def _cancel(settings: Settings, pool: str, run_id: str) -> str:
    entry = _entry_of(settings, pool)
    if not is_valid_id(run_id):
        raise UsageError(f"{run_id[:40]!r} is not a run ID.")
    if entry is None and find_pool(settings) is None:
        raise UsageError("no pool is running, so there is no run to cancel.")
    run = ledger.find_run(settings, run_id) if entry is None else None
    # a run that is not in the ledger yet is known only to the pool
    pressed, text = CancelReason.CANCEL_BUTTON, f"run {short(run_id)} is being stopped"
    if run is not None:
        pressed, text = stop_texts(run)
    from sgpu_magic.client.pool import Pool

    with closing(Pool(settings, None, entry)) as asked:
        asked.cancel(run_id, pressed)
    return text


def _entry_of(settings: Settings, pool: str) -> PoolEntry | None:
    """Return the entry of the remote pool of that name, None for this machine's pool."""
    entries = read_pools()
    name = pool or default_pool(settings.pool, entries)
    found = next((entry for entry in entries if entry.name == name), None)
    if found is None and name != LOCAL:
        raise unknown_pool(name, [entry.name for entry in entries])
    return found

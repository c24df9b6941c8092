"""A real pool with real ranks, used by this process as a kernel does, without a notebook."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from homes import Home
from waiting import eventually

from sgpu_magic.client.link import PoolLost
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.run import Attachments, ClientRun
from sgpu_magic.client.this_machine import this_owner
from sgpu_magic.config import load_settings
from sgpu_magic.payload.pack import new_key, pack_namespace
from sgpu_magic.wire.base import RunKind, new_id
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import EventBody, RanksStarted, RunEnded
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.run import CellSource, OutputName, RunSpec

PATIENCE_S = 30.0


class PoolClient:
    """This process as a client of a home's pool; it has the home's environment variables until `close`.

    Args:
        home: The pool's home, or that of a client of a pool on another machine.
        pool: A pool on another machine; None for the home's own.
    """

    def __init__(self, home: Home, pool: Pool | None = None) -> None:
        self.home = home
        # a pool that the client starts inherits this process's environment
        self._variables = dict(os.environ)
        set_environ(home.environ)
        self.pool = pool or Pool(load_settings(home.environ))

    def begin(
        self,
        body: str = "",
        *,
        ranks: int = 2,
        names: Mapping[str, object] | None = None,
        out: Sequence[str] = (),
        **fields: Any,
    ) -> FollowedRun:
        """Submit a run; `out` as in `--out`, `along` are its attachments."""
        key = new_key()
        along = fields.pop("along", Attachments())
        packed = pack_namespace(dict(names or {}), {}, key)
        outputs = tuple(OutputName(name.removesuffix(":all"), name.endswith(":all")) for name in out)
        spec = RunSpec(
            run_id=fields.pop("run_id", "") or new_id(),
            name=fields.pop("name", "cell"),
            cell=CellSource(body=body, execution_count=1),
            placement=Placement(
                ranks=ranks,
                device_type=fields.pop("device_type", "any"),
                nodes=fields.pop("nodes", 0),
                strategy=fields.pop("strategy", "pack"),
            ),
            outputs=outputs,
            owner=fields.pop("owner", this_owner()),
            timeout_s=fields.pop("timeout_s", 600.0),
            **fields,
        )
        return FollowedRun(self, self.pool.submit(spec, packed, key, dict(self.home.environ), along))

    def connect(self, ranks: int = 2, **fields: Any) -> ClientSession:
        """Start a session and wait until its ranks are ready."""
        run = self.begin(ranks=ranks, kind=RunKind.SESSION, name=fields.pop("name", "work"), **fields)
        run.wait_for(RanksStarted)
        return ClientSession(self, run, ranks)

    def find_again(self, run: ClientRun) -> None:
        """Connect to the pool's successor; the link may not have noticed the death yet."""

        def found() -> bool:
            try:
                self.pool.find_again(run)
            except PoolLost:
                return False
            return True

        eventually(found, PATIENCE_S)

    def close(self) -> None:
        self.pool.close()
        set_environ(self._variables)


def set_environ(variables: Mapping[str, str]) -> None:
    """Replace this process's environment variables."""
    wanted = dict(variables)
    os.environ.clear()
    os.environ.update(wanted)


class FollowedRun:
    """A submitted run and its events.

    Attributes:
        events: The events so far.
    """

    def __init__(self, client: PoolClient, run: ClientRun) -> None:
        self.run = run
        self.run_id = run.run_id
        self.events: list[EventBody] = []
        self._client = client
        self._frames: Sequence[bytes] = ()

    def wait_for(self, kind: type[Any], count: int = 1, within_s: float = PATIENCE_S) -> Any:
        """Wait for the run's first (or `count`th) event of a kind, and return it."""
        deadline = time.monotonic() + within_s
        while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"not within {within_s:.0f} s: {kind.__name__} of {self.run_id}; {self.events}"
            item = self.run.next_event(left)
            if item is not None:
                self.events.append(item[0].body)
                if isinstance(item[0].body, RunEnded):
                    self._frames = item[1]
            elif self.run.link.lost.is_set():
                self._client.find_again(self.run)
        return found[count - 1]

    def ended(self, within_s: float = PATIENCE_S) -> RunEnded:
        """Wait for the run's final event."""
        ended: RunEnded = self.wait_for(RunEnded, within_s=within_s)
        return ended

    @property
    def printed(self) -> dict[int, str]:
        """Return what each rank has printed."""
        texts: dict[int, str] = {}
        for event in self.events:
            if isinstance(event, OutputWritten):
                texts[event.rank] = texts.get(event.rank, "") + event.text
        return texts

    @property
    def values(self) -> list[object]:
        """Return the last expression's value by rank."""
        return [rank.value for rank in self.run.load_results(self.ended(), self._frames, {})]

    def names(self) -> list[dict[str, object]]:
        """Return the names of `out` by rank."""
        return [rank.names for rank in self.run.load_results(self.ended(), self._frames, {})]


class ClientSession:
    """A connected session.

    Args:
        client: The session's client.
        run: The session's own run.
        ranks: Its world size.
    """

    def __init__(self, client: PoolClient, run: ClientRun, ranks: int) -> None:
        self.client = client
        self.run = run
        self.run_id = run.run_id
        self.ranks = ranks

    def begin(self, body: str = "", **fields: Any) -> FollowedRun:
        """Submit a cell."""
        return self.client.begin(body, ranks=fields.pop("ranks", self.ranks), session=self.run_id, **fields)

    def do(self, body: str, **fields: Any) -> FollowedRun:
        """Run a cell to its end."""
        run = self.begin(body, **fields)
        run.ended()
        return run

    def end(self) -> RunEnded:
        """Disconnect."""
        self.run.run.cancel("%sgpu_disconnect")
        return self.run.ended()

"""A pool of another machine: 1 GiB to its ranks, first, unchanged and with one MiB changed, and 256 MiB back."""

from __future__ import annotations

import sys
import time

import torch

from tests.benchmarks import peers
from tests.benchmarks.environment import ROOT, Bench
from tests.benchmarks.measure import Check, MeasurementFailed, Row, Series, at_most, collect

sys.path.append(str(ROOT / "tests" / "support"))

from pool_client import PoolClient
from served_pools import RemoteUser, ServedPool
from tcp_proxy import Proxy

from sgpu_magic.client.remote_transport import RemoteTransport

FLOATS = 2**28
RETURNED = 2**26
# one number of each MiB
TOUCH = "float(big[::262144].sum())"
RETURN = f"import torch\nback = torch.full(({RETURNED},), float(rank))"


def there_and_back(bench: Bench) -> Row:
    row = Row("1 GiB torch tensor to 4 ranks of a pool on another machine; 256 MiB back from one")
    row.notes.append(
        "The pool is served on ports of this machine (CURVE, and TLS for data; nothing else is shared), so there is "
        "no line whose speed would count: both sides' hashing, encryption and disk are what is measured, on the same "
        "cores. Every 64 MB of the tensor are different. First: nothing of it is at the pool. Again: it is unchanged, "
        "hashed, and not sent. Changed: one MiB of it is different. The bytes are those of the link's line, and what "
        "was given to the second connection. scp copies a file of random bytes to another file."
    )
    pool = ServedPool()
    try:
        user = pool.user("ann")
        user.client.begin("1", ranks=4).ended()
        # whole numbers, whose sums are exact
        big = torch.randint(0, 1000, (FLOATS,), dtype=torch.int16).float()
        firsts: list[float] = []
        for number in range(bench.count(3, 1)):
            big += number
            firsts.append(ship(user.client, big))
        row.ours = [
            Series("first", tuple(firsts)),
            collect("again", lambda: ship(user.client, big), bench.count(5, 2), pause_s=0.6),
            Series("sent again", (_sent(pool, user, big) / 1e6,), unit="MB"),
            collect("1 MiB changed", lambda: ship_changed(user.client, big), bench.count(5, 2), pause_s=0.6),
            Series("sent changed", (_sent(pool, user, _changed(big)) / 1e6,), unit="MB"),
            collect("256 MiB back", lambda: fetch(user.client), bench.count(5, 2), pause_s=0.6),
        ]
    finally:
        pool.close()
    row.peers = [peers.scp_gigabyte(bench), peers.ray_client_gigabyte(bench)]
    sent, changed = row.ours[2].slowest, row.ours[4].slowest
    row.checks = [
        at_most(row.ours[0], 1.5, what="first"),
        at_most(row.ours[1], 0.5, what="again"),
        at_most(row.ours[3], 0.6, what="changed"),
        at_most(row.ours[5], 0.5, what="back"),
        Check("an unchanged GiB sends under 1 MB", f"{sent:.2f} MB", sent < 1),
        Check("one changed MiB of it sends under 70 MB", f"{changed:.1f} MB", changed < 70),
    ]
    return row


def ship(client: PoolClient, big: torch.Tensor) -> float:
    """Seconds from the submit to the ranks' values."""
    began = time.perf_counter()
    values = client.begin(TOUCH, ranks=4, names={"big": big}).values
    seconds = time.perf_counter() - began
    if values != [_touched(big)] * 4:
        raise MeasurementFailed(f"the ranks saw other numbers: {values!r}")
    return seconds


def ship_changed(client: PoolClient, big: torch.Tensor) -> float:
    """As `ship`, after a change of one MiB."""
    return ship(client, _changed(big))


def _changed(big: torch.Tensor) -> torch.Tensor:
    """Change one MiB in the middle of the tensor, to whole numbers."""
    middle = big[FLOATS // 2 : FLOATS // 2 + 2**18]
    middle += 1
    return big


def _touched(big: torch.Tensor) -> float:
    """What `TOUCH` gives."""
    return float(big[::262144].sum())


def _sent(pool: ServedPool, user: RemoteUser, big: torch.Tensor) -> int:
    """Bytes that go to the pool for a run with this tensor."""
    line = Proxy(pool.port, keeps=False)
    entry = user.entry
    try:
        user.entry = type(entry)(entry.name, line.address, entry.key)
        client = user.new_client()
        try:
            if client.begin(TOUCH, ranks=4, names={"big": big}).values[0] != _touched(big):
                raise MeasurementFailed("the ranks saw other numbers")
            wire = client.pool.link().transport
            in_bulk = wire._bulk.sent_bytes if isinstance(wire, RemoteTransport) else 0
        finally:
            client.close()
        return line.sent_bytes + in_bulk
    finally:
        user.entry = entry
        line.close()


def fetch(client: PoolClient) -> float:
    """Seconds of a run that returns 256 MiB from rank 0."""
    began = time.perf_counter()
    back = client.begin(RETURN, ranks=4, out=["back"]).names()[0]["back"]
    seconds = time.perf_counter() - began
    if not isinstance(back, torch.Tensor) or back.numel() != RETURNED:
        raise MeasurementFailed("what came back is something else")
    return seconds

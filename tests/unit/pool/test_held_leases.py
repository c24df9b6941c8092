"""When the devices of a lease are unlocked: with the last process on them."""

from __future__ import annotations

from scheduler_requests import cell, session, spec

from sgpu_magic.nodes.local import HeldLeases, has_locks
from sgpu_magic.wire.devices import Lease

S, A, B = "5e550000", "aaaa0000", "bbbb0000"
LEASE = Lease(lease_id="l", device_type="a10", ranks=2, uuids=("GPU-0", "GPU-1"))


def test_a_runs_lease_is_free_with_its_ranks() -> None:
    held = HeldLeases()
    held.take(spec(A), LEASE)
    assert held.gone(A) == [LEASE]
    assert held.gone(A) == []


def test_a_cell_in_a_session_frees_nothing() -> None:
    held = HeldLeases()
    held.take(session(), LEASE)
    held.take(cell(A), LEASE)
    assert held.gone(A) == []
    assert held.gone(S) == [LEASE]


def test_a_session_whose_ranks_are_gone_keeps_its_devices_for_fresh_processes() -> None:
    held = HeldLeases()
    held.take(session(), LEASE)
    for run_id in (A, B):
        held.take(cell(run_id, fresh=True), LEASE)
    assert held.runs == [S, A, B]
    assert held.gone(A) == held.gone(S) == []
    assert held.gone(B) == [LEASE]
    assert held.runs == []


def test_fresh_processes_that_end_first_leave_the_devices_to_the_session() -> None:
    held = HeldLeases()
    held.take(session(), LEASE)
    held.take(cell(A, fresh=True), LEASE)
    assert held.gone(A) == []
    assert held.gone(S) == [LEASE]


def test_slots_and_simulated_devices_have_no_locks() -> None:
    assert has_locks(LEASE)
    assert not has_locks(Lease(lease_id="l", device_type="cpu", ranks=2, cpu_slots=2))
    assert not has_locks(Lease(lease_id="l", device_type="a10", ranks=1, uuids=("SIM-0",), simulated=True))

"""`run.json`: what a run's directory says of it."""

from __future__ import annotations

from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.payloads import PackedLayout
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.records import RunSpec
from sgpu_magic.wire.states import RunState

RUN_RECORD = "run.json"
# the note of a payload that is still being kept, or will be when the run is over
UNDER_WAY = "not yet written"


class RunRecord(Record, frozen=True, kw_only=True):
    """The file's content. Never anything secret: a replay takes secrets from where it runs.

    Args:
        executable: The Python that its ranks ran in.
        cwd: Where they started.
        payload_layout: How `payload.bin` is laid out.
        payload_kept: Whether the payload's bytes lie beside this file.
        payload_note: Why not, or what is still under way.
        state: The run's state when this was written.
        sys_path: The notebook's `sys.path`.
        installed: Those of its entries that belong to its Python installation.
        host: The machine of its ranks.
        version: sgpu-magic's.
    """

    spec: RunSpec
    executable: str
    cwd: str
    lease: Lease
    payload_layout: PackedLayout
    payload_kept: bool
    payload_note: str
    state: RunState
    sys_path: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    host: str = ""
    version: str = ""

"""What a run leaves on disk: `run.json`, `cell.py`, `payload.bin`, `_air.py`, `key`, one log per rank, results.

`torchrun --nproc-per-node N _air.py` runs the same cell outside the notebook.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sgpu_magic import __version__
from sgpu_magic.config import host_name
from sgpu_magic.files.links import has_content, link_or_copy
from sgpu_magic.wire.codec import printable
from sgpu_magic.wire.ids import check_id
from sgpu_magic.wire.node_messages import Launch
from sgpu_magic.wire.run_files import KEY, PAYLOAD
from sgpu_magic.wire.run_record import RUN_RECORD, UNDER_WAY, RunRecord
from sgpu_magic.wire.states import RunState

_AIR = b'''"""The run of this directory again, outside the notebook:

    torchrun --nproc-per-node RANKS _air.py

It executes cell.py on as many ranks as the run had, with the variables of payload.bin, as the notebook shipped them.
"""

from pathlib import Path

from sgpu_magic.worker import standalone

if __name__ == "__main__":
    standalone.run(Path(__file__).parent)
'''
# beside the runs' directories, which all have links of it
_SHARED_AIR = ".air.py"
_AIR_NAME = "_air.py"


class RunDirectory:
    """Writes a run's directory. Every file is complete when it appears."""

    def __init__(self, launch: Launch) -> None:
        check_id(launch.spec.run_id)
        self.path = Path(launch.run_dir)
        self._launch = launch
        self._record = RunRecord(
            spec=launch.spec,
            executable=launch.interpreter.executable,
            cwd=launch.context.cwd,
            lease=launch.lease,
            payload_layout=launch.payload.layout,
            payload_kept=False,
            payload_note=UNDER_WAY,
            state=RunState.STARTING,
            sys_path=launch.context.sys_path,
            installed=launch.context.installed,
            host=host_name(),
            version=__version__,
        )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def log_path(self, rank: int) -> str:
        return str(self.path / f"rank-{rank}.log")

    def describe(self, payload: bytes | None, state: RunState) -> None:
        """Write everything but the large parts.

        Args:
            payload: The packed payload when it came inline.
            state: The run's state now.
        """
        self._record = msgspec.structs.replace(self._record, state=state)
        spec = self._launch.spec
        if payload is not None:
            self.write(PAYLOAD, payload)
            self._record = msgspec.structs.replace(self._record, payload_kept=True, payload_note="")
        self.write("cell.py", spec.cell.body.encode())
        self.write(KEY, self._launch.context.key)
        self._link_air()
        self._write_record()

    def payload_done(self, kept: bool, note: str) -> None:
        """Say in `run.json` whether the payload lies here."""
        self._record = msgspec.structs.replace(self._record, payload_kept=kept, payload_note=note)
        self._write_record()

    def ended(self, state: RunState) -> None:
        self._record = msgspec.structs.replace(self._record, state=state)
        self._write_record()

    def write(self, name: str, data: bytes) -> None:
        """Write a file of mode 0600 and rename it into place."""
        temporary = self.path / f".{name}.part"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, self.path / name)

    def _link_air(self) -> None:
        """Give the one `_air.py` of all runs a name here: one for each would be a sixth of what a small run takes."""
        if self._launch.far:
            # it goes to the pool, and nothing stays here
            self.write(_AIR_NAME, _AIR)
            return
        shared = self.path.parent / _SHARED_AIR
        if not has_content(shared, _AIR):
            self.write(_AIR_NAME, _AIR)
            # of all runs: it is not to be changed in one run's directory
            os.chmod(self.path / _AIR_NAME, 0o400)
            os.replace(self.path / _AIR_NAME, shared)
        link_or_copy(shared, self.path / _AIR_NAME)

    def _write_record(self) -> None:
        record = self._record
        # last: who reads here that the run is over finds everything else as it stays
        self.write(RUN_RECORD, msgspec.json.format(msgspec.json.encode(printable(record)), indent=2))

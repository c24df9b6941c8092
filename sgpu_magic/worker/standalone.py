"""Rerun a run outside the notebook: the run directory's `_air.py` calls this on every rank under torchrun."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import sys
from pathlib import Path

from sgpu_magic import extensions, runtime
from sgpu_magic.payload import unpack
from sgpu_magic.system.process_settings.rank_settings import RankSettings
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.run import SETTINGS, RunRecord
from sgpu_magic.worker.cell.cell_run import source_of
from sgpu_magic.worker.cell.shell import enter_script


def run(directory: Path) -> None:
    """Execute the run's cell on this rank, under torchrun.

    Prints the value of the last expression, as in a terminal, and the return value of a called function.

    Args:
        directory: The run's directory.

    Raises:
        SystemExit: The payload was not kept, the process was not started by torchrun, or the cell raised (status 1).
    """
    recorded = decode_json((directory / "run.json").read_bytes(), type=RunRecord)
    if not recorded.payload_kept:
        raise SystemExit(f"{directory} has no payload: {recorded.payload_note}.")
    if "RANK" not in os.environ:
        ranks = recorded.spec.placement.ranks
        raise SystemExit(f"start it with: torchrun --nproc-per-node {ranks} {directory / '_air.py'}")
    if recorded.spec.in_session and os.environ["RANK"] == "0":
        sys.stderr.write("It ran in a session: what earlier cells had set on its ranks is not here.\n")
    _find_local_code(recorded)
    extensions.databricks_names().install()
    os.environ.setdefault("SGPU_CHECKPOINT_DIR", str(directory.absolute() / "checkpoints"))
    import torch
    import torch.distributed as dist
    from IPython.core.interactiveshell import InteractiveShell

    from sgpu_magic.worker.group import rendezvous
    from sgpu_magic.worker.process.patches import after_import

    device = runtime.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # as in a rank: a script's own call keeps the group
    rendezvous.accept_second_init()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    shell = InteractiveShell.instance()
    RankSettings(after_import).follow(_settings(directory))
    # as in a rank: libraries take the prompts as a sign of an interactive session
    del sys.ps1, sys.ps2, sys.ps3  # pyright: ignore[reportAttributeAccessIssue]
    rank = runtime.get_global_rank()
    shell.user_ns.update(
        rank=rank, local_rank=runtime.get_local_rank(), world_size=runtime.get_world_size(), device=device
    )
    payload = memoryview(unpack.map_kept(directory, recorded.payload_layout))
    unpack.unpack_namespace(payload, recorded.payload_layout, (directory / "key").read_bytes(), shell.user_ns)
    shell.compile.flags |= recorded.spec.cell.future_flags
    if recorded.spec.cell.file:
        enter_script(recorded.spec.cell, shell.user_ns)
    outcome = shell.run_cell(source_of(recorded.spec.cell), store_history=False)
    if outcome.success and recorded.spec.kind is RunKind.CALL:
        # there is no notebook to return it to
        for output in recorded.spec.outputs:
            sys.stdout.write(f"rank {rank} returned {shell.user_ns.get(output.name)!r}\n")
    sys.stdout.flush()
    if not outcome.success:
        raise SystemExit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _settings(directory: Path) -> dict[str, str]:
    try:
        return decode_json((directory / SETTINGS).read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}


def _find_local_code(recorded: RunRecord) -> None:
    """Let this process import what the notebook could, after the modules beside `_air.py`."""
    # a relative entry, as "" is, is below the notebook's folder
    own = [os.path.join(recorded.cwd, entry) for entry in recorded.sys_path if entry not in recorded.installed]
    sys.path[1:1] = [entry for entry in own if entry not in sys.path]

"""Run a program with torchrun and with `sgpu run`, and compare what it prints and what its optimizers trained.

    python scripts/try_program.py examples/mnist/main.py -n 2 -- --epochs 1

The program runs twice on each side: as it is, and seeded, when the hash of its trained parameters is printed for each
rank. `--cuda` maps cuda to the CPU on both sides. Both sides work in copies of the program's folder.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sgpu_magic.worker.process import stand_in

TRAINED = re.compile(r"trained: .*")
# what differs between two runs of the same program: processes, times, speeds, folders
VOLATILE = re.compile(
    r"\[\d{4,}\]|0x[0-9a-f]+|\d+[-/:]\d+[-/:]\d+|[\d.]+ ?(ms|s|it/s|s/it)\b|\S*try_program-\S*|'MASTER_\w+': '\S+'"
)


def as_program(arguments: list[str], *, seeded: bool, cuda: bool) -> None:
    """Run the program in this process, a rank, as `python PROGRAM` does."""
    if cuda:
        stand_in.map_cuda(int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    if not seeded:
        runpy.run_path(arguments[0], run_name="__main__")
        return
    import hashlib
    import random

    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    optimizers: dict[int, Any] = {}
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: optimizers.setdefault(id(optimizer), optimizer))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        found = hashlib.sha256()
        for group in (group for optimizer in optimizers.values() for group in optimizer.param_groups):
            for parameter in group["params"]:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                found.update(local.detach().cpu().float().contiguous().numpy().tobytes())
        sys.stdout.write(f"trained: rank {os.environ['RANK']} {found.hexdigest()[:16]}\n")


def lines_of(command: list[str], folder: Path, environ: dict[str, str]) -> tuple[int, list[str]]:
    """Run a command in a copy of the folder. Return its exit code and its standard output's lines, sorted."""
    with tempfile.TemporaryDirectory(prefix="try_program-") as made:
        copy = shutil.copytree(folder, Path(made, folder.name))
        ended = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True)
    if ended.returncode:
        sys.stderr.write(ended.stderr)
    lines = (re.sub(r"^\[\d{1,3}\] ", "", line) for line in ended.stdout.splitlines())
    return ended.returncode, sorted(VOLATILE.sub("…", line.rstrip()) for line in lines if line.strip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--cuda", action="store_true", help="map cuda to the CPU")
    parser.add_argument("arguments", nargs="*", help="the program's own, after --")
    given = parser.parse_args()
    environ = os.environ | {"OMP_NUM_THREADS": "1", "SGPU_STAND_IN": "cpu,cuda" if given.cuda else "cpu"}
    here, own = str(Path(__file__).resolve()), [given.program.name, *given.arguments]
    kind = ["--type", "a10"] if given.cuda else ["--type", "cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
    sgpu = [sys.executable, "-m", "sgpu_magic.cli", "run"]
    ranks = ["-n", str(given.ranks), *kind, "--"]
    same = True
    for seeded in (False, True):
        how = ["--inside-seeded" if seeded else "--inside"]
        # the pool's ranks have CUDA mapped already
        theirs = [*torchrun, here, *how, *(["--cuda"] if given.cuda else []), *own]
        ours = [*sgpu, here, *ranks, *how, *own] if seeded else [*sgpu, own[0], *ranks, *given.arguments]
        folder = given.program.resolve().parent
        found = [lines_of(command, folder, environ) for command in (theirs, ours)]
        same = same and found[0] == found[1]
        for name, (code, lines) in zip(("torchrun", "sgpu run"), found, strict=True):
            trained = ", ".join(line for line in lines if TRAINED.fullmatch(line))
            said = f"{name}{' seeded' if seeded else ''}: exit code {code}, {len(lines)} lines. {trained}"
            sys.stdout.write(f"{said.rstrip()}\n")
        for sign, mine, other in (("torchrun only", *found), ("sgpu run only", *reversed(found))):
            sys.stdout.writelines(f"  {sign}: {line}\n" for line in mine[1] if line not in other[1])
    return 0 if same else 1


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("--inside"):
        words = sys.argv[2:]
        maps = words[:1] == ["--cuda"]
        as_program(words[1:] if maps else words, seeded=sys.argv[1] == "--inside-seeded", cuda=maps)
    else:
        sys.exit(main())

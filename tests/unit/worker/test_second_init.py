"""`init_process_group` on a rank, which has a group already."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import pickle
import cloudpickle
from sgpu_magic.worker.group import rendezvous
rendezvous.accept_second_init()
from torch.distributed import distributed_c10d, init_process_group
assert init_process_group is distributed_c10d.init_process_group
# a process that the rank spawns makes a group of its own with torch's function
packed = cloudpickle.dumps(init_process_group)
assert pickle.loads(packed) is init_process_group
assert b"sgpu_magic" not in packed
"""


def test_it_is_pickled_by_torchs_name() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr

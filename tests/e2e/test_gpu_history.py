"""The use of devices in the last ten minutes, as a notebook sees it after a run."""

from __future__ import annotations

import pytest
from kernels import Kernel, eventually

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:2"}

BUSY = """
%%distributed -n 1 --type a10
import time
while time.process_time() < 2.5:
    pass
"""


def curves(kernel: Kernel) -> list[list[str]]:
    """Return the lines of devices below the head of the histories, as words."""
    lines = kernel.check("%sgpu_status").text.splitlines()
    at = next((number for number, line in enumerate(lines) if "use in 10 minutes" in line), len(lines))
    return [line.split() for line in lines[at + 1 :] if line.startswith("A10 ·")]


@pytest.mark.slow
def test_a_busy_cell_is_in_the_history_of_its_device_only(kernel: Kernel) -> None:
    kernel.check("%sgpu_status")
    assert curves(kernel) == []
    kernel.check(BUSY.lstrip())
    eventually(lambda: len(curves(kernel)) == 1, 10, "the samples of the run")
    ((name, _, index, curve, average, percent, *_),) = curves(kernel)
    assert (name, index, percent) == ("A10", "0", "%")
    assert set(curve) <= set("▁▂▃▄▅▆▇█")
    assert 0 < int(average) <= 100
    # a pool that is asked without the flag answers without a history
    kernel.check("from sgpu_magic.client.pools import Pools\nfrom sgpu_magic.config import load_settings")
    kernel.check("pool = Pools(load_settings()).local")
    assert kernel.value("[len(pool.status().history), len(pool.status(history=16).history)]") == [0, 1]
    kernel.check("pool.close()")
    # the panel's server side asks for it
    kernel.check("from sgpu_magic.panel.poll_pool import PoolPoller\npoller = PoolPoller(load_settings())")
    runs = kernel.value("[device.history and device.history.runs for device in poller.poll().snapshot.devices]")
    assert len(runs) == 2
    assert runs[0]
    assert runs[1] is None
    # and keeps it between two points
    assert kernel.value("poller.poll().snapshot.devices[0].history is not None")
    kernel.check("poller.close()")

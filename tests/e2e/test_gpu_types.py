"""A pool of several types: runs that name none get the cheapest that is free, by the magic and the decorator alike."""

from __future__ import annotations

from kernels import Kernel

HOME_VARIABLES = {"SGPU_SIMULATE": "h100:4,a10:2"}


def test_a_run_without_a_type_gets_the_smallest_that_is_free(kernel: Kernel):
    reply = kernel.check("%%distributed --gpus 2\nprint(world_size)")
    assert "on a10, the smallest type that is free; --type takes another of a10, h100" in reply.text
    assert "2 ranks" in reply.text
    reply = kernel.check("%%distributed --gpus 3\nprint(world_size)")
    assert "on h100, the smallest type that is free" in reply.text
    kernel.check(
        "import sgpu_magic\nfound = sgpu_magic.distributed(ui='none')(lambda world_size: world_size).distributed()"
    )
    assert kernel.value("found") == [2, 2]

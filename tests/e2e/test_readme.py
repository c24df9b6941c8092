"""README's page of use, cell by cell as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kernels import Kernel

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_every_snippet_does_what_is_said(new_kernel: Callable[[], Kernel]):
    kernel = new_kernel()
    replies = {code: kernel.run(code) for code in SNIPPETS}
    assert len(replies) >= 9
    for code, reply in replies.items():
        if "raise ValueError" in code:
            assert (reply.ename, "infinite batch on rank 2" in reply.traceback) == ("ValueError", True), reply.story
        else:
            assert reply.status == "ok", reply.story
    first = next(reply for code, reply in replies.items() if "--out norm" in code)
    assert first.lines(1) == ["rank 1 of 2 on cpu"]
    assert kernel.value("[float(norm) > 100, [*map(list, shape)], type(loss).__name__]") == [
        True,
        [[500, 1000], [500, 1000]],
        "float",
    ]
    assert kernel.value("[add.distributed(10), run.result()]") == [[21.0, 21.0], [3.0, 3.0]]

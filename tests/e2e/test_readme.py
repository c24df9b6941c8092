"""README's page of use, cell by cell as it stands there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kernels import Kernel
from page_snippets import README, snippets


@pytest.fixture
def kernel(new_kernel: Callable[[], Kernel]) -> Kernel:
    """A kernel of its own, with the pool that it has started."""
    made = new_kernel()
    made.check("%%distributed -n 2 --type cpu\npass")
    return made


@pytest.mark.slow
def test_every_snippet_does_what_is_said(kernel: Kernel):
    replies = {snippet: kernel.run(snippet.text) for snippet in snippets(README)}
    assert len(replies) >= 9
    for snippet, reply in replies.items():
        assert reply.ename == snippet.fails, f"{snippet}: {reply.story}"
        if snippet.fails:
            assert "infinite batch on rank 2" in reply.traceback
    first = next(reply for snippet, reply in replies.items() if "--out norm" in snippet.text)
    assert first.lines(1) == ["rank 1 of 2 on cpu"]
    assert kernel.value("[float(norm) > 100, [*map(list, shape)], type(loss).__name__]") == [
        True,
        [[500, 1000], [500, 1000]],
        "float",
    ]
    assert kernel.value("[add.distributed(10), run.result()]") == [[21.0, 21.0], [3.0, 3.0]]

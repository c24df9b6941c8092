"""Requests to a kernel by comm and over the control channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sgpu_magic.views.live.comm import REQUEST, Channels

Take = Callable[[Any, object, object], None]


def test_a_widgets_order_that_comes_on_both_ways_is_obeyed_once():
    kernel = SimpleNamespace(control_handlers={})
    channels = Channels(kernel)
    received: list[object] = []
    by_comm: list[Take] = []
    widget = SimpleNamespace(model_id="panel", comm=None, on_msg=by_comm.append, send=lambda answer: None)

    def taker(content: object, send: object) -> None:
        received.append(content)

    channels.opened_for(widget, taker)
    channels.serve("sidebar", taker)

    async def ask() -> None:
        for number in (7, 8):
            order = {"n": number, "kind": "apply"}
            by_comm[0](widget, order, [])
            await kernel.control_handlers[REQUEST](None, None, {"content": {"model_id": "panel", "question": order}})
        # a reloaded page restarts its numbering
        for _ in range(2):
            asked = {"model_id": "sidebar", "question": {"n": 1}}
            await kernel.control_handlers[REQUEST](None, None, {"content": asked})

    asyncio.run(ask())
    assert received == [{"n": 7, "kind": "apply"}, {"n": 8, "kind": "apply"}, {"n": 1}, {"n": 1}]

"""Widgets of ranks without processes: the messages that a rank sends, widget ids, and what remains afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import comm
import ipywidgets
import pytest

from sgpu_magic.views.live.rank_widgets import references, with_prefix, without_prefix
from sgpu_magic.views.rank_models import WIDGET_MIME, RankModels
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.rank import CommsFromRank
from sgpu_magic.wire.rank_events import CommMessage, CommsMoved, can_merge
from sgpu_magic.worker.cell import widgets


class Rank:
    """The messages of a rank's widgets, merged as a notebook merges them."""

    def __init__(self) -> None:
        self.messages: list[CommMessage] = []
        self.models = RankModels()

    def send(self, message: Record, blobs: Sequence[bytes] = (), /) -> None:
        assert isinstance(message, CommsFromRank)
        self.messages += message.messages
        self.models.apply(CommsMoved(rank=0, messages=message.messages), blobs)

    def static(self, widget: ipywidgets.Widget) -> dict[str, Any]:
        """The notebook's state of the widget after the run."""
        widgets.comms.flush()
        return self.models.static(0, widget._repr_mimebundle_())


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    for name in ("create_comm", "get_comm_manager"):
        monkeypatch.setattr(comm, name, getattr(comm, name))
    made = Rank()
    widgets.install()
    widgets.comms.begin(made.send, lambda: True)
    widgets.comms.flush()
    yield made
    widgets.comms.begin(lambda *_: None, lambda: True)


def test_the_newest_value_is_sent_and_not_each(rank: Rank):
    slider = ipywidgets.IntSlider()
    widgets.comms.flush()
    before = len(rank.messages)
    for value in range(100):
        slider.value = value
    slider.description = "lr"
    widgets.comms.flush()
    sent = rank.messages[before:]
    assert [json.loads(message.data)["state"] for message in sent][-1] == {"value": 99, "description": "lr"}
    assert len(sent) <= 2


def test_what_is_binary_travels_beside_the_state(rank: Rank):
    image = ipywidgets.Image(value=b"\x89PNG one", format="png")
    image.value = b"\x89PNG two"
    widgets.comms.flush()
    model = rank.models.get((0, image.model_id))
    assert model is not None
    assert model.buffers == {("value",): b"\x89PNG two"}
    assert "value" not in model.state


@pytest.mark.parametrize(
    ("older", "newer", "may"),
    [
        ({"value": 1}, {"value": 2}, True),
        ({"restyle": {"y": 1}}, {"restyle": None}, False),
        ({"restyle": None}, {"restyle": {"y": 2}}, False),
        ({"restyle": {"y": 1}}, {"value": None}, True),
    ],
)
def test_a_trait_that_is_emptied_again_is_a_message(older: dict[str, object], newer: dict[str, object], may: bool):
    assert can_merge(older, newer, None) is may


def test_ids_get_a_prefix_wherever_they_stand_and_lose_it_again():
    state = {"children": ["IPY_MODEL_a", "IPY_MODEL_b"], "source": [["IPY_MODEL_c", "value"]], "value": "a IPY_MODEL_d"}
    there = with_prefix(state, "1f-0-")
    assert there["children"] == ["IPY_MODEL_1f-0-a", "IPY_MODEL_1f-0-b"]
    assert there["source"] == [["IPY_MODEL_1f-0-c", "value"]]
    assert there["value"] == "a IPY_MODEL_d"
    assert without_prefix(there, "1f-0-") == state
    assert list(references(state)) == ["a", "b", "c"]


def make_box() -> ipywidgets.Widget:
    return ipywidgets.VBox([ipywidgets.Label("epoch 3"), ipywidgets.IntSlider(), ipywidgets.IntProgress(3, max=6)])


def make_output() -> ipywidgets.Widget:
    return ipywidgets.Output(outputs=({"output_type": "stream", "name": "stdout", "text": "<b>loss</b> 0.5\n"},))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        pytest.param(lambda: ipywidgets.IntProgress(3, max=6), "|█████     | 3 of 6", id="progress"),
        pytest.param(lambda: ipywidgets.HTML("<b>loss</b> 0.5 &lt; 1"), "loss 0.5 < 1", id="html"),
        pytest.param(lambda: ipywidgets.Label("<script>", description="name:"), "name: <script>", id="label"),
        pytest.param(make_output, "<b>loss</b> 0.5", id="output"),
        pytest.param(make_box, "epoch 3\n|█████     | 3 of 6", id="box"),
    ],
)
def test_text_and_progress_stay_as_text_and_html(rank: Rank, make: Any, text: str):
    bundle = rank.static(make())
    assert bundle["text/plain"] == text
    assert WIDGET_MIME not in bundle
    assert "<script>" not in bundle["text/html"]


@pytest.mark.parametrize("make", [ipywidgets.IntSlider, lambda: ipywidgets.HBox([ipywidgets.Button()])])
def test_of_other_widgets_their_own_text_stays(rank: Rank, make: Any):
    widget = make()
    assert rank.static(widget) == {"text/plain": repr(widget)}


def test_the_front_end_is_heard_by_the_widget(rank: Rank):
    slider = ipywidgets.IntSlider(1)
    seen: list[int] = []
    slider.observe(lambda change: seen.append(change["new"]), "value")
    data = json.dumps({"method": "update", "state": {"value": 5}, "buffer_paths": []}).encode()
    widgets.comms.on_messages((CommMessage(comm_id=slider.model_id, kind="msg", data=data),), ())
    widgets.comms.deliver()
    assert seen == [5]


def test_a_closed_widget_leaves_nothing(rank: Rank):
    slider = ipywidgets.IntSlider(1)
    bundle = slider._repr_mimebundle_()
    slider.close()
    widgets.comms.flush()
    assert rank.models.static(0, bundle) == {"text/plain": ""}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"state": 3}',
        b'{"state": {}, "buffer_paths": {}}',
        b"\xff",
        b"[" * 9999,
        b'{"state": {"x": ' + b"[" * 500 + b"]" * 500 + b"}}",
    ],
)
def test_what_is_no_message_of_a_widget_is_left_out(data: bytes):
    models = RankModels()
    models.apply(CommsMoved(rank=0, messages=(CommMessage(comm_id="x", kind="open", data=data),)), ())
    assert models.static(0, {WIDGET_MIME: {"model_id": "x"}, "text/plain": "Box()"}) == {"text/plain": "Box()"}


def opened(**state: object) -> RankModels:
    """A rank's one widget, named x."""
    models = RankModels()
    data = json.dumps({"state": state, "buffer_paths": []}).encode()
    models.apply(CommsMoved(rank=0, messages=(CommMessage(comm_id="x", kind="open", data=data),)), ())
    return models


@pytest.mark.parametrize(
    "state",
    [
        {"_model_name": "OutputModel", "outputs": ["text", 3]},
        {"_model_name": "HBoxModel", "children": [3, None, {}]},
        {"_model_name": "FloatProgressModel", "value": "x", "max": None},
        {"_model_name": [], "value": {"a": []}},
    ],
)
def test_traits_that_no_such_widget_has_do_no_harm(state: dict[str, object]):
    static = opened(**state).static(0, {WIDGET_MIME: {"model_id": "x"}, "text/plain": "Box()"})
    assert WIDGET_MIME not in static


def test_a_box_within_itself_ends():
    models = opened(_model_name="HBoxModel", children=["IPY_MODEL_x"])
    assert models.static(0, {WIDGET_MIME: {"model_id": "x"}, "text/plain": "HBox()"}) == {"text/plain": "HBox()"}


def test_states_are_kept_within_a_bound():
    models = RankModels()
    data = json.dumps({"state": {"value": "x" * (8 << 20)}, "buffer_paths": []}).encode()
    for number in range(12):
        opened = CommMessage(comm_id=str(number), kind="open", data=data)
        models.apply(CommsMoved(rank=0, messages=(opened,)), ())
    assert [models.get((0, str(number))) is not None for number in (0, 11)] == [False, True]

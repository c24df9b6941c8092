"""Widgets made in ranks: alive while the run goes on, in sessions between cells too, and text afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from front_end import WIDGET_MIME, Model
from kernels import Cell, Home, Kernel, eventually

SLIDER = """
import ipywidgets as widgets, time
from IPython.display import display
slider = widgets.IntSlider(description='epochs', value=rank + 1, max=100)
display(slider)
"""
BUTTON = """
button, pressed = widgets.Button(description='go'), []
button.on_click(lambda _: pressed.append(slider.value))
display(button)
"""
UNTIL_MOVED = "while slider.value < 50: time.sleep(0.02)\nprint('moved to', slider.value)\n"


def shown_models(cell: Cell, count: int, within_s: float = 20) -> list[Model]:
    """The models whose views are below the cell, once there are so many."""

    def found() -> list[Model]:
        models = cell.kernel.front_end.models
        shown = [output.data[WIDGET_MIME]["model_id"] for output in cell.reply.outputs if WIDGET_MIME in output.data]
        return [models[model_id] for model_id in shown if model_id in models]

    cell.until(lambda: len(found()) == count, within_s, f"{count} widgets below the cell")
    return found()


def test_a_slider_moves_in_its_rank_while_the_run_goes_on(kernel: Kernel):
    cell = kernel.start(f"%%distributed -n 2\n{SLIDER}{UNTIL_MOVED}")
    first, second = sorted(shown_models(cell, 2), key=lambda model: model.state["value"])
    assert first.model_id != second.model_id
    assert [model.state["value"] for model in (first, second)] == [1, 2]
    layout = kernel.front_end.models[first.state["layout"].removeprefix("IPY_MODEL_")]
    assert layout.state["_model_name"] == "LayoutModel"
    kernel.front_end.set(first, value=70)
    cell.until_shown("[0] moved to 70")
    kernel.front_end.set(second, value=60)
    reply = cell.wait()
    assert reply.status == "ok", reply.story
    assert reply.text.count("IntSlider(value=") == 2, reply.story
    assert not any(WIDGET_MIME in output.data for output in reply.outputs)
    assert not any(model.is_open for model in kernel.front_end.models.values())


def test_a_progress_bar_of_a_notebook_moves_and_its_last_state_stays(kernel: Kernel):
    bar = "import time\nfrom tqdm.notebook import tqdm\nfor i in tqdm(range(40), desc='steps'): time.sleep(0.02)\n"
    cell = kernel.start(f"%%distributed -n 1\n{bar}")
    (box,) = shown_models(cell, 1)
    cell.until(lambda: len(box.state["children"]) == 3, 10, "the bar's parts")
    children = [kernel.front_end.models[each.removeprefix("IPY_MODEL_")] for each in box.state["children"]]
    cell.until(lambda: children[1].updates > 1, 10, "the bar moves")
    reply = cell.wait()
    assert reply.status == "ok", reply.story
    assert "steps: 100%|██████████| 40/40 [00:0" in reply.text, reply.story


NESTED_BARS = """%%distributed -n 2
import os, time
from tqdm.notebook import tqdm
for epoch in tqdm(range(2), desc='epochs', mininterval=0):
    for step in tqdm(range(4), desc='steps', leave=False):
        time.sleep(0.02)
    while epoch == 1 and not os.path.exists('bars-seen'): time.sleep(0.02)
"""


def test_bars_of_a_notebook_are_the_ranks_progress_and_closed_ones_leave_nothing(kernel: Kernel, home: Home):
    cell = kernel.start(NESTED_BARS)

    def snapshot() -> dict[str, Any]:
        return next((output.view.snapshot for output in cell.reply.outputs if output.view is not None), {})

    def is_half() -> bool:
        bars = [card["bar"] for card in snapshot().get("ranks", ())]
        return len(bars) == 2 and all(bar and bar["fraction"] == 0.5 for bar in bars)

    cell.until(is_half, 20, "both ranks have done one of two epochs")
    assert snapshot()["bar"] == {"fraction": 0.5, "text": "epochs, 50 %"}
    (home.work / "bars-seen").touch()
    reply = cell.wait()
    assert reply.status == "ok", reply.story
    texts = [text for output in reply.outputs if (text := str(output.data.get("text/plain", "")).strip())]
    shown = [
        text.partition("%")[0] for text in texts if "epochs:" in text or "steps:" in text or text in ("[0]", "[1]")
    ]
    assert shown == ["[0]", "epochs: 100", "[1]", "epochs: 100"], reply.story


def test_widgets_of_a_session_live_between_its_cells(kernel: Kernel):
    kernel.check("%sgpu_connect -n 1")
    cell = kernel.start(f"%%distributed\n{SLIDER}{BUTTON}")
    reply = cell.wait()
    assert reply.status == "ok", reply.story
    slider, button = shown_models(cell, 2)
    kernel.front_end.set(slider, value=33)
    kernel.front_end.say(button, {"event": "click"})
    eventually(lambda: kernel.check("%%distributed --out pressed\npass") and kernel.value("pressed") == [33])
    kernel.check("%%distributed\nslider.value = 44")
    cell.until(lambda: slider.state["value"] == 44, 10, "the value that a later cell has set")
    kernel.check("%sgpu_disconnect")
    cell.until(lambda: not slider.is_open, 10, "its comm is closed")
    cell.until(lambda: "IntSlider(value=1" in cell.reply.text, 10, "its text in the display")


INTERACT = """
import ipywidgets as widgets
@widgets.interact(lr=(0, 10))
def show(lr=2):
    print('lr is', lr)
"""


def test_interact_calls_its_function_in_the_idle_rank(kernel: Kernel):
    kernel.check("%sgpu_connect -n 1")
    try:
        cell = kernel.start(f"%%distributed\n{INTERACT}")
        assert cell.wait().status == "ok", cell.reply.story
        (box,) = shown_models(cell, 1)
        cell.until(lambda: len(box.state["children"]) == 2, 10, "its children")
        models = kernel.front_end.models
        slider, output = (models[each.removeprefix("IPY_MODEL_")] for each in box.state["children"])

        def shows(text: str) -> bool:
            return [shown["text"] for shown in output.state["outputs"]] == [text]

        cell.until(lambda: shows("lr is 2\n"), 10, "the function's output")
        kernel.front_end.set(slider, value=7)
        cell.until(lambda: shows("lr is 7\n"), 10, "the function's next output")
    finally:
        kernel.check("%sgpu_disconnect")


def test_a_callback_that_raises_costs_no_run(kernel: Kernel):
    observed = "slider.observe(lambda change: 1 / 0, 'value')\n"
    cell = kernel.start(f"%%distributed -n 1\n{SLIDER}{observed}{UNTIL_MOVED}")
    (slider,) = shown_models(cell, 1)
    kernel.front_end.set(slider, value=70)
    reply = cell.wait()
    assert reply.status == "ok", reply.story
    assert "ZeroDivisionError" in reply.text, reply.story
    assert "moved to 70" in reply.text, reply.story


FIGURE = """
import plotly.graph_objects as go, time
from IPython.display import display
figure = go.FigureWidget(data=[go.Scatter(y=[0.5, 0.4])])
display(figure)
time.sleep(0.5)
figure.data[0].y = [0.5, 0.4, 0.25]
figure.update_layout(title='loss')
time.sleep(0.5)
"""


@pytest.mark.slow
def test_a_figure_of_plotly_is_drawn_and_gets_new_data(kernel: Kernel):
    pytest.importorskip("plotly")
    cell = kernel.start(f"%%distributed -n 1\n{FIGURE}")
    # plotly's import takes long where nothing of it is compiled yet
    (figure,) = shown_models(cell, 1, 90)
    reported: list[object] = []
    cell.until(lambda: reported.append(figure.state.get("_py2js_restyle")) or any(reported), 10, "the new data")
    reply = cell.wait()
    assert reply.status == "ok", reply.story

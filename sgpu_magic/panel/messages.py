"""Questions of a panel to a notebook's kernel, and its answers, as JSON. Twins: `labextension/src/panel/messages.ts`.

They come by the control channel (`sgpu_request` with the model id `PANEL`), or as a widget's messages.
"""

from __future__ import annotations

import msgspec

from sgpu_magic.panel.schema import KernelPicture, PanelTold, PlanPicture
from sgpu_magic.runs.choice.schema import Choice, KeptChoice
from sgpu_magic.views.live.schema import Message

PANEL = "panel"
"""The model id of questions that belong to no run's view."""


class AskKernel(Message, frozen=True, tag_field="kind", tag="kernel"):
    """What is the notebook's state?

    Args:
        kept: What its metadata says, from now on in effect; None when it says nothing.
    """

    n: int
    kept: KeptChoice | None = None


class AskPlan(Message, frozen=True, tag_field="kind", tag="plan"):
    """What would applying this choice do?

    Args:
        connect: And then connecting.
    """

    n: int
    choice: Choice
    connect: bool = False


class AskApply(Message, frozen=True, tag_field="kind", tag="apply"):
    """The user has chosen this (or confirms what the notebook asks for): install what is to be installed, and connect.

    Args:
        connect: Connect a session afterwards, or restart the one that is there.
        confirmed: The user has seen that something is lost.
    """

    n: int
    choice: Choice
    connect: bool = False
    confirmed: bool = False


class AskDisconnect(Message, frozen=True, tag_field="kind", tag="disconnect"):
    """End a session; "" is the current one."""

    n: int
    name: str = ""


KernelQuestion = AskKernel | AskPlan | AskApply | AskDisconnect


class KernelAnswer(Message, frozen=True, tag_field="kind", tag="kernel-answer"):
    """The notebook's state, after what was asked for.

    Args:
        kept: What the notebook's metadata shall say from now on; None leaves it as it is.
        said: What happened, a sentence; "" for nothing.
        installing: Packages are being installed; ask again.
    """

    n: int
    picture: KernelPicture
    kept: KeptChoice | None = None
    said: str = ""
    installing: bool = False


class PlanAnswer(Message, frozen=True, tag_field="kind", tag="plan-answer"):
    """What would be done."""

    n: int
    plan: PlanPicture


class PanelRefusal(Message, frozen=True, tag_field="kind", tag="panel-refusal"):
    """It was not done; `text` is a paragraph that says why and what to do."""

    n: int
    text: str


KernelReply = KernelAnswer | PlanAnswer | PanelRefusal

# ------------------------------------------------------------------ to the Jupyter server (or the widget's kernel)


class Watch(Message, frozen=True, tag_field="kind", tag="watch"):
    """Tell about this pool from now on, "" the default one, instead of any other; all of it first."""

    pool: str = ""


class Rest(Message, frozen=True, tag_field="kind", tag="rest"):
    """Nobody looks: tell nothing until the next `Watch`."""


class StartPool(Message, frozen=True, tag_field="kind", tag="start-pool"):
    """Start this pool."""

    pool: str = ""


class CancelRun(Message, frozen=True, tag_field="kind", tag="cancel-run"):
    """Stop a run."""

    run_id: str
    pool: str = ""


PanelOrder = Watch | Rest | StartPool | CancelRun


class Said(Message, frozen=True, tag_field="kind", tag="said"):
    """What became of an order: a sentence.

    Args:
        ok: It was done.
    """

    text: str
    ok: bool


Told = PanelTold | Said

orders = msgspec.json.Decoder(PanelOrder)

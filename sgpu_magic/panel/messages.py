"""A panel's requests to a notebook's kernel and to pools, and the replies, as JSON.

Their TypeScript twins are generated: `labextension/src/panel/records.ts`. Requests to the kernel arrive on the control
channel (`sgpu_request` with the model id `PANEL`) or as a widget's messages.
"""

from __future__ import annotations

import msgspec

from sgpu_magic.panel.schema import KernelPicture, PanelTold, PlanPicture
from sgpu_magic.runs.choice.schema import Choice, KeptChoice
from sgpu_magic.views.live.schema import Message

PANEL = "panel"
"""The model id of requests that belong to no run's view."""


class AskKernel(Message, frozen=True, tag_field="kind", tag="kernel"):
    """Ask for the notebook's state.

    Args:
        kept: The choice in the notebook's metadata, in effect from now on; None when there is none.
    """

    n: int
    kept: KeptChoice | None = None


class AskPlan(Message, frozen=True, tag_field="kind", tag="plan"):
    """Ask what applying this choice would do.

    Args:
        connect: Include connecting a session afterwards.
    """

    n: int
    choice: Choice
    connect: bool = False


class AskApply(Message, frozen=True, tag_field="kind", tag="apply"):
    """Apply the user's choice, or confirm the notebook's: install packages, and connect if asked.

    Args:
        connect: Connect a session afterwards, or restart the current one.
        confirmed: The user has accepted that something will be lost.
    """

    n: int
    choice: Choice
    connect: bool = False
    confirmed: bool = False


class AskDisconnect(Message, frozen=True, tag_field="kind", tag="disconnect"):
    """End a session; "" for the current one."""

    n: int
    name: str = ""


KernelQuestion = AskKernel | AskPlan | AskApply | AskDisconnect


class KernelAnswer(Message, frozen=True, tag_field="kind", tag="kernel-answer"):
    """The notebook's state after the request.

    Args:
        kept: The choice to write to the notebook's metadata; None leaves it as it is.
        said: A sentence about what happened; "" for nothing.
        installing: Packages are being installed; ask again.
    """

    n: int
    picture: KernelPicture
    kept: KeptChoice | None = None
    said: str = ""
    installing: bool = False


class PlanAnswer(Message, frozen=True, tag_field="kind", tag="plan-answer"):
    """What applying the choice would do."""

    n: int
    plan: PlanPicture


class PanelRefusal(Message, frozen=True, tag_field="kind", tag="panel-refusal"):
    """The request was refused; `text` is a paragraph that says why and what to do."""

    n: int
    text: str


KernelReply = KernelAnswer | PlanAnswer | PanelRefusal

# ------------------------------------------------------------------ to the Jupyter server (or the widget's kernel)


class Watch(Message, frozen=True, tag_field="kind", tag="watch"):
    """Send updates about this pool instead of any other, starting with its whole state; "" for the default pool."""

    pool: str = ""


class Rest(Message, frozen=True, tag_field="kind", tag="rest"):
    """The page is hidden: send no updates until the next `Watch`."""


class StartPool(Message, frozen=True, tag_field="kind", tag="start-pool"):
    """Start this pool."""

    pool: str = ""


class CancelRun(Message, frozen=True, tag_field="kind", tag="cancel-run"):
    """Stop a run."""

    run_id: str
    pool: str = ""


PanelOrder = Watch | Rest | StartPool | CancelRun


class Said(Message, frozen=True, tag_field="kind", tag="said"):
    """A sentence about the outcome of a command.

    Args:
        ok: The command succeeded.
    """

    text: str
    ok: bool


Told = PanelTold | Said

orders = msgspec.json.Decoder(PanelOrder)

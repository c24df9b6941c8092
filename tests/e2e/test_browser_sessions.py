"""Sessions as a person sees them in Debian's Chromium: pictures of what was seen lie in tests/artefacts afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from axe_pages import axe_problems
from browsers import OpenNotebook, has_browser
from playwright.sync_api import Locator, expect

pytestmark = [
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores
    pytest.mark.timeout(240),
]

TESTS = Path(__file__).parents[1] / "support"
LOAD = f"%load_ext sgpu_magic\nimport sys, time\nfrom pathlib import Path\nsys.path.insert(0, {str(TESTS)!r})"
GO = "Path('go')"
UNTIL_GO = f"while not {GO}.exists(): time.sleep(0.05)"


def view(notebook: OpenNotebook, cell: int = 1) -> Locator:
    return notebook.output(cell).locator(".sgpu-run")


def seen(locator: Locator, timeout: float = 30_000) -> Locator:
    """Scroll it into view: hidden views draw nothing."""
    locator.wait_for(timeout=timeout)
    locator.scroll_into_view_if_needed()
    return locator


def go(notebook: OpenNotebook) -> None:
    (notebook.server.home.work / "go").touch()


# ------------------------------------------------------------ stories: what this machine has no GPUs for


PLAYED = [
    # the story, the story that it ends as, text of its live view, text of its final form
    ("session_with_a_dead_rank", "session_ended", "rank 2 is dead; %sgpu_restart --rank 2", "0.82 GPU h"),
    ("session_working", "session_lost", "runs train", "GPUs busy 90 %"),
    ("in_session_running", "", "3 of 4 ranks · session work", "epoch 1 of rank 3"),
    ("out_of_memory", "", "largest tensors of rank 1", "largest tensors of rank 1"),
    ("renewed", "", "the process groups were reconnected", "the process groups were reconnected"),
    ("sent_by_auto", "", "auto", "auto"),
    ("running", "", "62%", "epoch 1"),
    ("failed", "", "NaN in batch 118", "NaN in batch 118"),
    ("stalled", "failed_when_stalled", "no progress", "no progress"),
    ("priced_and_tracked", "", "$", "$"),
    ("died", "", "killed", "killed"),
]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_stories_are_drawn_as_told(opened: Callable[..., OpenNotebook], front_end: Path, dark: bool) -> None:
    cells = [f"import story_player\nstory_player.play({name!r}, {GO}, {ended!r})" for name, ended, *_ in PLAYED]
    theme = "dark" if dark else "light"
    # as high as the outputs: axe can't check the colours of content that is scrolled out of sight
    notebook = opened(f"stories-{theme}", cells, dark=dark, size=(1366, 2400))
    found: dict[str, list[str]] = {}
    for number, (name, _, live, final) in enumerate(PLAYED, 1):
        (notebook.server.home.work / "go").unlink(missing_ok=True)
        notebook.start(number)
        shown = seen(view(notebook, number))
        expect(shown).to_contain_text(live, timeout=30_000)
        expect(shown.locator(".sgpu-log")).not_to_contain_text("...", timeout=10_000)
        notebook.picture(f"story-{name}-{theme}", shown)
        found[name] = axe_problems(notebook, front_end, [".sgpu-run"])
        go(notebook)
        notebook.wait_done(number)
        expect(shown).to_have_count(0)
        expect(notebook.output(number)).to_contain_text(final)
        notebook.picture(f"story-{name}-{theme}-over", notebook.output(number))
    found["over"] = axe_problems(notebook, front_end, [".jp-OutputArea-output"], 20, undecided=False)
    assert not any(found.values()), "\n\n".join(f"{name}: {text}" for name, texts in found.items() for text in texts)


# ------------------------------------------------------------ a real session


ALL_REDUCE = "import torch, torch.distributed as dist\nx = torch.ones(1)\n"
REAL = [
    "%sgpu_connect -n 4 --type cpu --name work",
    "%%distributed --name train\nkept = rank * 10\nprint('first', rank, flush=True)\nkept",
    f"%%distributed --ranks 0,2-3 --name some\nprint('kept', kept, flush=True)\n{UNTIL_GO}",
    f"%%distributed --name breaks\n{ALL_REDUCE}if rank == 1: raise ValueError('NaN in batch 118')\ndist.all_reduce(x)",
    f"%%distributed --name again\n{ALL_REDUCE}dist.all_reduce(x)\nprint('sum', int(x), kept, flush=True)",
    "%sgpu_auto on",
    "print('sent by auto', rank, flush=True)",
    "%sgpu_auto off",
    "%%rank 2\nimport os\nos._exit(3)",
    "%%distributed --name needs_all\nprint(kept)",
    "%sgpu_restart --rank 2",
    "%%distributed --name mended\nprint('kept' in globals(), flush=True)",
    "cfg = dict(lr=0.1)\n%sgpu_push cfg",
    "%sgpu_pull cfg:all\ncfg",
    "%sgpu_status",
]


@pytest.mark.slow
def test_a_session_from_connect_to_the_disconnect_button(opened: Callable[..., OpenNotebook]) -> None:
    notebook = opened("session", REAL)
    notebook.run(1)
    session = seen(view(notebook))
    state = session.locator(".sgpu-state")
    expect(state).to_have_text("connected", timeout=60_000)
    expect(session.locator(".sgpu-name")).to_have_text("session work")
    expect(session.locator(".sgpu-card")).to_have_count(4)
    notebook.picture("session-connected", session)

    text = notebook.run(2)
    assert "4 ranks · session work" in text
    assert [f"[{rank}] first {rank}" in text for rank in range(4)] == [True] * 4, text
    expect(seen(session).locator(".sgpu-meta")).to_contain_text("1 cell · idle since")
    notebook.picture("session-cell", notebook.output(2))

    notebook.start(3)
    some = seen(view(notebook, 3))
    expect(some.locator(".sgpu-log")).to_contain_text("kept 30", timeout=30_000)
    assert some.get_by_role("tab").all_inner_texts() == ["all", "0", "2", "3"]
    assert some.locator(".sgpu-card").evaluate_all("cards => cards.map(card => card.dataset.rank)") == ["0", "2", "3"]
    assert "3 of 4 ranks · session work" in some.inner_text()
    notebook.picture("session-some-ranks", some)
    expect(seen(state)).to_have_text("runs some")
    notebook.picture("session-runs-some", session)
    go(notebook)
    notebook.wait_done(3)

    text = notebook.run(4)
    notebook.picture("session-breaks", notebook.output(4))
    assert "NaN in batch 118" in text
    assert text.count("the process groups were reconnected") == 1, text
    assert "sum 4 20" in notebook.run(5)

    notebook.run(6)
    text = notebook.run(7)
    notebook.picture("session-auto", notebook.output(7))
    assert text.lstrip().startswith("auto"), text
    assert "[3] sent by auto 3" in text
    notebook.run(8)

    assert "rank 2" in notebook.run(9)
    expect(seen(session).locator('.sgpu-card[data-rank="2"]')).to_contain_text("%sgpu_restart --rank 2", timeout=20_000)
    expect(session.locator('.sgpu-card[data-state="dead"]')).to_have_count(1)
    notebook.picture("session-dead-rank", session)
    text = notebook.run(10)
    notebook.picture("session-refused", notebook.output(10))
    assert "%sgpu_restart --rank 2" in text
    notebook.run(11)
    expect(seen(session).locator('.sgpu-card[data-state="dead"]')).to_have_count(0, timeout=20_000)
    expect(session).to_contain_text("rank 2 restarted")
    notebook.picture("session-mended", session)
    text = notebook.run(12)
    assert ("[1] True" in text, "[2] False" in text) == (True, True), text

    assert "pushed cfg" in notebook.run(13)
    notebook.picture("session-pushed", notebook.output(13))
    text = notebook.run(14)
    assert "pulled cfg from 4 ranks of session work" in text, text
    text = notebook.run(15)
    notebook.picture("session-status", notebook.output(15))
    assert "session work" in text
    assert "idle since" in text

    session.get_by_role("button", name="End session").click()
    expect(notebook.output(1)).to_contain_text("cancelled", timeout=20_000)
    # the view stays, as that of any run
    expect(session.get_by_role("button", name="End session")).to_have_count(0, timeout=10_000)
    expect(session).to_contain_text("End session button")
    notebook.picture("session-ended", notebook.output(1))
    saved = str(notebook.save()["cells"][1]["outputs"])
    assert "widget-view" not in saved
    assert "session work ended after" in saved


@pytest.mark.slow
def test_a_session_is_there_again_after_the_page_was_reloaded(opened: Callable[..., OpenNotebook]) -> None:
    notebook = opened("reloaded", ["%sgpu_connect -n 2 --type cpu --name work", "%%distributed\nkept = rank"])
    notebook.run(1)
    notebook.run(2)
    notebook.save()
    notebook.reload()
    notebook.kernel_ready()
    session = seen(view(notebook))
    expect(session.locator(".sgpu-state")).to_have_text("connected", timeout=30_000)
    expect(session.locator(".sgpu-meta")).to_contain_text("1 cell")
    # the cell that connected it ended long ago
    expect(notebook.cell(1).locator(".jp-InputPrompt").first).not_to_have_text("[*]:")
    notebook.picture("session-reloaded", session)
    session.get_by_role("button", name="End session").click()
    expect(notebook.output(1)).to_contain_text("End session button", timeout=20_000)
    expect(notebook.output(1)).to_contain_text("cancelled")
    notebook.picture("session-reloaded-ended", notebook.output(1))


OUT_OF_MEMORY = """%%distributed --name fills
import torch, torch.distributed as dist
cache = [torch.zeros(500, 500) for step in range(3)]
if rank == 1: torch.empty(10**15)
dist.barrier()"""


@pytest.mark.slow
def test_an_allocation_that_fails_shows_what_held_the_memory(opened: Callable[..., OpenNotebook]) -> None:
    connect = "%sgpu_connect -n 2 --type cpu"
    again = "%%distributed\ncache.append(torch.ones(500, 500))\nprint(len(cache), 'blocks', flush=True)"
    notebook = opened("memory", [connect, OUT_OF_MEMORY, again, "%sgpu_disconnect"], dark=True)
    notebook.run(1)
    text = notebook.run(2)
    notebook.picture("session-out-of-memory", notebook.output(2))
    assert "memory when it failed" in text
    table = notebook.output(2).locator("table")
    assert table.nth(0).locator("tbody tr").count() == 2, "the peer's too"
    assert "cache[0]" in table.nth(1).inner_text()
    assert "[1] 4 blocks" in notebook.run(3), "allocating again works"
    notebook.run(4)

"""Functions and modules that torch has compiled in the notebook."""

from __future__ import annotations

import pytest
from far_sides import FarSide, Notebook

CELL = """
    import torch
    scale = 3
    seen = []
    def noting(graph, inputs):
        seen.append(len(inputs))
        return graph
    @torch.compile(backend="eager", fullgraph=True)
    def step(x): return x * scale
    @torch.compile(backend=noting, dynamic=False)
    def own(x): return step_of(x) + 1
    def step_of(x): return x * scale
    @torch.compile
    def plain(x): return x + scale
    tuned = torch.compile(lambda x: x + 1, mode="max-autotune-no-cudagraphs")
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
        @torch.compile(backend="eager")
        def forward(self, x): return self.layer(x) * scale
    model = Model()
    whole = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    whole_by_default = torch.compile(torch.nn.Linear(2, 2))
    @torch.compiler.disable
    def left(x): return x + scale
    @torch.jit.script
    def scripted(x: torch.Tensor): return x * 2
    traced = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    expected = {"model": model(torch.ones(1, 2)).tolist(), "whole": whole._orig_mod(torch.ones(1, 2)).tolist(),
                "traced": traced(torch.ones(1, 2)).tolist()}
"""
ROWS = {
    "step": ("step(torch.ones(2)).tolist()", [3.0, 3.0]),
    "own": ("[own(torch.ones(1)).item(), seen]", [4.0, [1]]),
    "plain": ("[hasattr(plain, '_torchdynamo_orig_callable'), plain.__name__]", [True, "plain"]),
    "tuned": ("tuned.get_compiler_config()['max_autotune']", True),
    "model, expected": ("model(torch.ones(1, 2)).tolist() == expected['model']", True),
    "whole, expected": ("whole(torch.ones(1, 2)).tolist() == expected['whole']", True),
    "whole_by_default": ("type(whole_by_default).__name__", "OptimizedModule"),
    "left": ("left(torch.ones(1)).item()", 4.0),
    "scripted": ("scripted(torch.ones(1)).item()", 2.0),
    "traced, expected": ("traced(torch.ones(1, 2)).tolist() == expected['traced']", True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_functions_are_compiled_where_they_arrive(
    notebook: Notebook, far_side: FarSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    # otherwise inductor would start compile processes
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    notebook.cell(CELL)
    for names, (expression, expected) in ROWS.items():
        packed = notebook.pack(*names.split(", "))
        assert far_side.run(packed, f"import torch\nanswer = {expression}") == expected, names

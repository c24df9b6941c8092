"""What is shipped to the ranks: what the cell uses, as it is now, and nothing else."""

from __future__ import annotations

import pytest
from kernels import Kernel


def shipped(kernel: Kernel, body: str, line: str = "-n 1 --ui none") -> list[str]:
    """The names that a cell ships."""
    kernel.check(f"result = get_ipython().run_cell_magic('distributed', {line!r}, {body!r})")
    return kernel.value("sorted(result.shipped.names)")


def test_only_what_the_cell_uses_is_shipped(kernel: Kernel):
    kernel.check(
        "import numpy as np; huge = np.zeros(50_000_000); used = 1; loader_lock = __import__('threading').Lock()"
    )
    assert shipped(kernel, "used + 1") == ["used"]
    assert kernel.value("result.shipped.total_bytes") < 1000
    kernel.check("del huge, loader_lock")


def test_functions_and_classes_bring_what_they_use(kernel: Kernel):
    kernel.check(
        "scale = 3\n"
        "unused = object()\n"
        "def inner(x): return x * scale\n"
        "class Model:\n"
        "    bias = 1\n"
        "    def __call__(self, x): return inner(x) + self.bias\n"
        "model = Model()"
    )
    names = shipped(kernel, "model(rank + 2)")
    assert kernel.value("result.values") == [7]
    assert "unused" not in names
    kernel.check("scale = 10")
    shipped(kernel, "model(rank + 2)")
    assert kernel.value("result.values") == [21]


def test_objects_come_back_as_the_notebooks_own_classes(kernel: Kernel):
    kernel.check("class Point:\n    def __init__(self, x): self.x = x")
    kernel.check("%%distributed -n 2 --out points:all --ui none\npoints = Point(rank)")
    assert kernel.value("[type(p) is Point and p.x for p in points]") == [0, 1]


@pytest.mark.slow
def test_shared_references_stay_shared(kernel: Kernel):
    kernel.check("import numpy as np; base = np.zeros(100_000); box = {'the same': base}; box['me'] = box")
    kernel.check("%%distributed -n 1 --out same --ui none\nbox['the same'][0] = 5\nsame = [base[0], box['me'] is box]")
    assert kernel.value("[float(same[0]), same[1]]") == [5.0, True]
    assert kernel.value("float(base[0])") == 0.0


def test_ranks_do_not_see_each_others_writes(kernel: Kernel):
    kernel.check("import numpy as np; table = np.zeros(2_000_000)")
    kernel.check(
        "%%distributed -n 2 --out seen:all --ui none\n"
        "import torch.distributed as dist\n"
        "table[0] += rank + 1\n"
        "dist.barrier()\n"
        "seen = float(table[0])"
    )
    assert kernel.value("[seen, float(table[0])]") == [[1.0, 2.0], 0.0]
    kernel.check("del table")


def test_tensors_frames_and_arrow_arrive_whole(kernel: Kernel):
    kernel.check(
        "import numpy as np, pandas as pd, pyarrow as pa, torch\n"
        "arrays = {'f': np.asfortranarray(np.arange(6_000_000.).reshape(2000, 3000)), 's': np.arange(10)[::-2]}\n"
        "frame = pd.DataFrame({'a': range(100_000), 'b': ['x'] * 100_000})\n"
        "table = pa.table({'n': list(range(100_000))})\n"
        "weights = torch.arange(1_000_000, dtype=torch.bfloat16).requires_grad_(True)\n"
        "module = torch.nn.Linear(300, 300)"
    )
    kernel.check(
        "%%distributed -n 2 --out got:all --ui none\n"
        "got = [float(arrays['f'].sum()), arrays['f'].flags.f_contiguous, arrays['s'].tolist(), int(frame.a.sum()),\n"
        "       frame.shape, table.num_rows, float(weights.sum()), weights.requires_grad, str(weights.dtype),\n"
        "       float(module.weight[7, 9])]"
    )
    kernel.check(
        "here = [float(arrays['f'].sum()), True, arrays['s'].tolist(), int(frame.a.sum()), frame.shape,\n"
        "        table.num_rows, float(weights.sum()), True, 'torch.bfloat16', float(module.weight[7, 9])]"
    )
    assert kernel.value("got == [here, here]"), kernel.value("[repr(got), repr(here)]")
    kernel.check("del arrays, frame, table, weights, module")


def test_edited_local_module_is_seen_by_the_next_run(kernel: Kernel):
    module = kernel.home.work / "local_helper.py"
    module.write_text("VALUE = 'old'\n")
    kernel.check("import local_helper")
    cell = "%%distributed -n 1 --out seen --ui none\nimport local_helper\nseen = local_helper.VALUE"
    kernel.check(cell)
    assert kernel.value("seen") == "old"
    module.write_text("VALUE = 'newer'\n")
    kernel.check(cell)
    assert kernel.value("seen") == "newer"
    module.unlink()


@pytest.mark.slow
def test_variables_read_at_import_give_a_new_zygote(kernel: Kernel):
    kernel.check("import os; os.environ['OMP_NUM_THREADS'] = '3'")
    kernel.check("%%distributed -n 1 --out threads --ui none\nimport torch\nthreads = torch.get_num_threads()")
    assert kernel.value("threads") == 3
    kernel.check("del os.environ['OMP_NUM_THREADS']")


def test_source_of_notebook_functions_is_there(kernel: Kernel):
    kernel.check("def documented(x):\n    # a remark\n    return x + 1")
    kernel.check(
        "%%distributed -n 1 --out sources --ui none\n"
        "import inspect\n"
        "def local(z):\n"
        "    return z\n"
        "sources = [inspect.getsource(documented), inspect.getsource(local)]"
    )
    documented, local = kernel.value("sources")
    assert documented == "def documented(x):\n    # a remark\n    return x + 1\n"
    assert local == "def local(z):\n    return z\n"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["notebook", "cell"])
def test_torch_jit_script_of_a_notebook_function(kernel: Kernel, where: str):
    source = "def scripted(x: torch.Tensor) -> torch.Tensor:\n    return x + 1\n"
    kernel.check(f"import torch\n{source if where == 'notebook' else ''}")
    kernel.check(
        "%%distributed -n 1 --out got --ui none\n"
        f"import torch\n{source if where == 'cell' else ''}"
        "got = torch.jit.script(scripted)(torch.ones(2)).tolist()"
    )
    assert kernel.value("got") == [2.0, 2.0]


def test_comprehensions_lambdas_and_magics_show_what_they_use(kernel: Kernel):
    kernel.check("a, b, c, d = 1, 2, 3, 4")
    names = shipped(kernel, "f = lambda x: x + a\ng = [b for _ in range(2)]\n%time y = c\nh = f'{d}'\n(f(1), g, y, h)")
    assert names == ["a", "b", "c", "d"]
    assert kernel.value("result.values") == [[2, [2, 2], 3, "4"]]


def test_deleted_and_shadowed_names_are_not_shipped(kernel: Kernel):
    kernel.check("shadowed = 'notebook'; x = 'notebook'")
    assert shipped(kernel, "shadowed = rank\ndef f(x): return x\n[f(shadowed) for x in range(1)]") == []


def test_nested_modules_go_by_reference(kernel: Kernel):
    kernel.check("import os.path, json as j, collections.abc")
    shipped(kernel, "(j.dumps([1]), os.path.basename('/a/b'), collections.abc.Sized.__name__)")
    assert kernel.value("result.values") == [["[1]", "b", "Sized"]]


def test_a_cell_that_only_defines_says_so_or_runs(kernel: Kernel):
    """A function that is only defined runs nowhere: its name is at least in the header."""
    reply = kernel.check("%%distributed -n 2\ndef train():\n    print('never called')")
    assert "never called" not in reply.text
    assert "train · 2 ranks" in reply.text


def test_texts_that_are_not_utf_8_go_to_the_ranks_and_back(kernel: Kernel):
    kernel.check(
        "import os, sys\n"
        "odd = os.fsdecode(b'caf\\xe9')\n"
        "os.environ['ODD'] = odd\n"
        "os.makedirs(odd, exist_ok=True)\n"
        "open(f'{odd}/{odd}.txt', 'w').close()\n"
        "os.chdir(odd)\n"
        "sys.path.append(odd)"
    )
    try:
        kernel.check(
            "%%distributed -n 2 --out got --env QUERY=$odd\n"
            "import os, sys\n"
            "print(odd)\n"
            "got = [odd, os.environ['ODD'], os.environ['QUERY'], sys.path[-1]]\n"
            "got += [os.path.basename(os.getcwd()), os.listdir()[0].removesuffix('.txt')]"
        )
        assert kernel.value("[one == odd for one in got]") == [True] * 6
        reply = kernel.run("%%distributed -n 1\nopen(odd)")
        assert (reply.ename, "caf\\udce9" in reply.evalue) == ("FileNotFoundError", True)
    finally:
        kernel.check("os.chdir('..')\nsys.path.remove(odd)\ndel os.environ['ODD']")

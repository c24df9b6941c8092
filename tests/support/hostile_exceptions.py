"""Exceptions that do harm when they are described: sources of cells, each of which raises one of them."""

from __future__ import annotations

# hooks by which a class can break code that inspects its exceptions
_HOOKS = (
    "__str__", "__repr__", "__reduce__", "__reduce_ex__", "__getattribute__", "__getattr__", "__getstate__",
    "__eq__", "__hash__", "__bool__", "__len__", "__del__", "__dir__", "__format__", "__setattr__",
)  # fmt: skip
_PROPERTIES = (
    "__notes__", "__cause__", "__context__", "__traceback__", "__class__", "__dict__", "args", "__suppress_context__",
    "__module__", "_render_traceback_",
)  # fmt: skip
_ACTS = {
    "raises": "raise TypeError('hostile')",
    "exits": "raise SystemExit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "returns_5": "return 5",
}

_SPECIAL = {
    "concatenates_a_number": (
        "class E(Exception):\n    def __init__(self, m): self.m = m\n"
        "    def __str__(self): return 'error: ' + self.m\nraise E(5)"
    ),
    "leaves_by_os": "import os\nclass E(Exception):\n    def __str__(self): os._exit(0)\nraise E",
    "quits": "class E(Exception):\n    def __str__(self): return str(quit())\nraise E",
    "recurses": "class E(Exception):\n    def __str__(self): return str(self)\nraise E",
    "raises_itself": "class E(Exception):\n    def __str__(self): raise self\nraise E",
    "is_its_own_cause": "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
    "has_5000_causes": (
        "e = None\nfor at in range(5000):\n    new = ValueError(at)\n    new.__cause__, e = e, new\nraise e"
    ),
    "has_5000_contexts": (
        "e = None\nfor at in range(5000):\n    new = ValueError(at)\n    new.__context__, e = e, new\nraise e"
    ),
    "has_a_lone_surrogate": "raise ValueError('caf\\udce9')",
    "has_surrogates_all_over": (
        "e = type('E', (Exception,), {'__module__': 'm\\udce9'})('\\ud800')\ne.add_note('\\udfff')\nraise e"
    ),
    "has_notes_5": "e = ValueError('m')\ne.__notes__ = 5\nraise e",
    "has_notes_of_objects": "e = ValueError('m')\ne.__notes__ = [5, None, object()]\nraise e",
    "has_a_million_notes": "e = ValueError('m')\ne.__notes__ = ['n'] * 1_000_000\nraise e",
    "has_300_MB": "raise ValueError('x' * 300_000_000)",
    "makes_300_MB": "class E(Exception):\n    def __str__(self): return 'x' * 300_000_000\nraise E",
    "has_a_note_of_300_MB": "e = ValueError('m')\ne.add_note('x' * 300_000_000)\nraise e",
    "has_a_cause_of_300_MB": "raise ValueError('m') from ValueError('x' * 300_000_000)",
    "has_a_million_lines": "raise ValueError('line\\n' * 1_000_000)",
    "has_a_long_name": "raise type('E' * 1_000_000, (Exception,), {})('m')",
    "has_no_name": "raise type('', (Exception,), {'__module__': ''})('m')",
    "has_a_module_5": "raise type('E', (Exception,), {'__module__': 5})('m')",
    "has_control_codes": "raise ValueError('\\x00\\x1b[2J\\x1b]0;t\\x07\\r')",
    "has_an_odd_metaclass": (
        "class M(type):\n"
        "    def __getattribute__(cls, name): raise SystemExit(0)\n"
        "    def __instancecheck__(cls, one): raise SystemExit(0)\n"
        "class E(Exception, metaclass=M): pass\nraise E('m')"
    ),
    "answers_with_an_odd_string": (
        "class S(str):\n"
        "    def __getattribute__(self, name): raise SystemExit(0)\n"
        "    def __len__(self): return -1\n"
        "    def encode(self, *a): raise SystemExit(0)\n"
        "class E(Exception):\n    def __str__(self): return S('odd')\nraise E"
    ),
    "has_hostile_arguments": (
        "class A:\n    def __repr__(self): raise SystemExit(0)\n    def __reduce__(self): raise SystemExit(0)\n"
        "raise ValueError(A(), A())"
    ),
    "is_a_deep_recursion": (
        "import sys\ndef f(n): return f(n - 1) if n else 1 / 0\n"
        "sys.setrecursionlimit(60_000)\ntry: f(20_000)\nfinally: sys.setrecursionlimit(3000)"
    ),
    "is_a_deep_group": "e = ValueError(1)\nfor at in range(500): e = ExceptionGroup('g', [e])\nraise e",
    "is_a_wide_group": "raise ExceptionGroup('g', [ValueError(at) for at in range(100_000)])",
    "is_an_odd_syntax_error": "raise SyntaxError('m', (5, 'line', [], {}))",
    "is_an_exit_with_an_odd_code": (
        "class C:\n    def __bool__(self): raise SystemExit(0)\n    def __eq__(self, o): return True\n"
        "    __hash__ = None\nraise SystemExit(C())"
    ),
    "looks_like_a_lost_peer": "class E(RuntimeError):\n    def __str__(self): raise SystemExit(0)\nraise E",
    "pickles_as_an_exit": (
        "import sys\nclass E(Exception):\n    def __reduce__(self): return sys.exit, (0,)\nraise E('m')"
    ),
    "pickles_300_MB": "e = ValueError('m')\ne.big = bytes(300_000_000)\nraise e",
    "draws_itself_badly": "class E(Exception):\n    def _render_traceback_(self): return 5\nraise E('m')",
    "is_raised_by_a_hostile_module": (
        "import types\nclass L:\n    def get_source(self, name): raise SystemExit(0)\n"
        "exec(compile('1 / 0', 'nowhere.py', 'exec'), {'__loader__': L(), '__name__': 'nowhere'})"
    ),
    "has_no_new": "class E(Exception):\n    def __init__(self, a, b): pass\nraise E(1, 2)",
}  # fmt: skip

LOOPS = {
    "loops_in_str": "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    "loops_in_reduce": "class E(Exception):\n    def __reduce__(self):\n        while True: pass\nraise E('m')",
    "loops_in_notes": (
        "class E(Exception):\n    @property\n    def __notes__(self):\n        while True: pass\nraise E('m')"
    ),
}
"""Ended by an interrupt."""


def _hooked(hook: str, act: str) -> str:
    return f"class E(Exception):\n    def {hook}(self, *a, **k): {act}\ne = E.__new__(E, 'm')\nraise e"


def _with_property(name: str, act: str) -> str:
    return f"class E(Exception):\n    @property\n    def {name}(self): {act}\nraise E('m')"


HOSTILE = {
    **{f"{hook}_{how}": _hooked(hook, act) for hook in _HOOKS for how, act in _ACTS.items()},
    **{f"{name}_{how}": _with_property(name, act) for name in _PROPERTIES for how, act in _ACTS.items()},
    **_SPECIAL,
}
"""Name and source of the cell."""

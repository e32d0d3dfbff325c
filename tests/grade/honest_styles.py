"""Honest ways to write an answer, each a list of cells: all of them pass `check` in a notebook that is
run from top to bottom, and so they must pass where they are graded.

Each answers 0.2, message_bytes; where no cell calls `check`, that is the last one. Whole notebooks are in
honest_notebooks.py.
"""

import textwrap

STYLES: dict[str, list[str]] = {}
BODY = "return tensor.numel() * tensor.element_size()"
DEF = f"def message_bytes(tensor):\n    {BODY}"
CHECK = 'check("0.2", message_bytes)'


def style(name: str, *cells: str) -> None:
    """Adds a style."""
    assert name not in STYLES, name
    STYLES[name] = [textwrap.dedent(cell).strip("\n") for cell in cells]


style("plain", DEF)
style("lambda", "message_bytes = lambda tensor: tensor.numel() * tensor.element_size()")
style(
    "helper_above",
    "def each(t): return t.element_size()",
    "def message_bytes(tensor):\n    return tensor.numel() * each(tensor)",
)
style(
    "helper_below",
    "def message_bytes(tensor):\n    return tensor.numel() * each(tensor)",
    "def each(t): return t.element_size()",
)
style(
    "method_in_a_later_cell",
    "class H: pass",
    "def f(self, t): return t.numel() * t.element_size()",
    "H.run = f",
    "def message_bytes(tensor):\n    return H().run(tensor)",
)
style(
    "method_by_setattr",
    "class H: pass",
    'setattr(H, "run", lambda self, t: t.numel() * t.element_size())',
    "message_bytes = lambda tensor: H().run(tensor)",
)
style(
    "methods_in_a_loop",
    "class H: pass",
    'for name in ("numel", "element_size"):\n    setattr(H, name, lambda self, t, n=name: getattr(t, n)())',
    "def message_bytes(tensor):\n    return H().numel(tensor) * H().element_size(tensor)",
)
style(
    "attribute_of_the_function",
    "def message_bytes(tensor):\n    return message_bytes.times(tensor.numel(), tensor.element_size())",
    "message_bytes.times = lambda a, b: a * b",
)
style(
    "a_class_that_launches_travels_to_ranks",
    "import torch.distributed as dist\nfrom course_exercises import hint\nfrom course_utils.launch import launch",
    """
    class Ranks:
        def start(self, function):
            hint("0.1")
            return launch(function, 2)

        def mean(self, value):
            total = value.clone()
            dist.all_reduce(total)
            return total / dist.get_world_size()
    """,
    "def average_over_ranks(value):\n    return Ranks().mean(value)",
    'check("0.1", average_over_ranks)',
)
style(
    "entry_of_a_table",
    "T = {}",
    "def f(t): return t.numel() * t.element_size()",
    "T['f'] = f",
    "def message_bytes(tensor):\n    return T['f'](tensor)",
)
style(
    "table_updated",
    "T = {}",
    "T.update(f=lambda t: t.numel() * t.element_size())",
    "def message_bytes(tensor):\n    return T['f'](tensor)",
)
style(
    "table_merged",
    "T = {}",
    "T |= {'f': lambda t: t.numel() * t.element_size()}",
    "def message_bytes(tensor):\n    return T['f'](tensor)",
)
style(
    "decorator_registry",
    "REGISTRY = {}\ndef register(f):\n    REGISTRY[f.__name__] = f\n    return f",
    "@register\ndef product(t):\n    return t.numel() * t.element_size()",
    "def message_bytes(tensor):\n    return REGISTRY['product'](tensor)",
)
style(
    "registered_by_a_call",
    "REGISTRY = []\ndef register(f):\n    REGISTRY.append(f)",
    "def product(t):\n    return t.numel() * t.element_size()",
    "register(product)",
    "def message_bytes(tensor):\n    return REGISTRY[0](tensor)",
)
style(
    "class_with_a_registry",
    "class R:\n    known = {}\n    @classmethod\n    def add(cls, name):\n        def inner(f):\n            cls.known[name] = f\n            return f\n        return inner",
    "@R.add('p')\ndef product(t):\n    return t.numel() * t.element_size()",
    "def message_bytes(tensor):\n    return R.known['p'](tensor)",
)
style(
    "top_level_append",
    "STEPS = []",
    "STEPS.append(lambda t: t.numel())",
    "STEPS.append(lambda t: t.element_size())",
    "def message_bytes(tensor):\n    return STEPS[0](tensor) * STEPS[1](tensor)",
)
style(
    "appended_in_a_loop",
    "STEPS = []",
    "for name in ['numel', 'element_size']:\n    STEPS.append(name)",
    "def message_bytes(tensor):\n    n = 1\n    for s in STEPS:\n        n *= getattr(tensor, s)()\n    return n",
)
style(
    "written_file",
    "%%writefile helpers.py\ndef product(t):\n    return t.numel() * t.element_size()",
    "from helpers import product",
    "def message_bytes(tensor):\n    return product(tensor)",
)
style(
    "written_file_as_module",
    "%%writefile my_helpers.py\ndef product(t):\n    return t.numel() * t.element_size()",
    "import my_helpers as h",
    "message_bytes = h.product",
)
style(
    "file_by_pathlib",
    "from pathlib import Path\nPath('more.py').write_text('def product(t):\\n    return t.numel() * t.element_size()\\n')",
    "import more",
    "def message_bytes(tensor):\n    return more.product(tensor)",
)
style(
    "file_by_open",
    "with open('less.py', 'w') as f:\n    f.write('def product(t):\\n    return t.numel() * t.element_size()\\n')",
    "from less import *",
    "def message_bytes(tensor):\n    return product(tensor)",
)
style(
    "run_magic",
    "%%writefile script.py\ndef product(t):\n    return t.numel() * t.element_size()",
    "%run script.py",
    "def message_bytes(tensor):\n    return product(tensor)",
)
style(
    "name_is_main",
    "if __name__ == '__main__':\n    FACTOR = 1",
    "def message_bytes(tensor):\n    return FACTOR * tensor.numel() * tensor.element_size()",
)
style(
    "main_function",
    "def main():\n    global size\n    size = lambda t: t.element_size()\n\nif __name__ == '__main__':\n    main()",
    "def message_bytes(tensor):\n    return tensor.numel() * size(tensor)",
)
style("help_beside", "import torch\ntorch.randperm?", DEF)
style("help_in_the_cell", f"{DEF}\nmessage_bytes?")
style("double_help", f"import torch\n{DEF}\n??torch.numel")
style(
    "shell_assignment",
    "x = !echo 1",
    "def message_bytes(tensor):\n    return int(x[0]) * tensor.numel() * tensor.element_size()",
)
style("shell_beside", "!echo hello", DEF)
style("shell_in_the_cell", f"!echo hello\n{DEF}")
style("pip_magic", "%matplotlib inline", DEF)
style("cell_time", f"%%time\n{DEF}")
style("cell_capture", f"%%capture out\n{DEF}")
style(
    "line_time",
    "%time ONE = 1",
    "def message_bytes(tensor):\n    return ONE * tensor.numel() * tensor.element_size()",
)
style("line_timeit", f"{DEF}\n%timeit -n 1 -r 1 1 + 1")
style(
    "magic_assignment",
    "here = %pwd",
    "def message_bytes(tensor):\n    assert here\n    return tensor.numel() * tensor.element_size()",
)
style(
    "env_magic",
    "%env COURSE_ONE=1",
    "import os\ndef message_bytes(tensor):\n    return int(os.environ['COURSE_ONE']) * tensor.numel() * tensor.element_size()",
)
style(
    "environ",
    "import os\nos.environ['ONE'] = '1'",
    "def message_bytes(tensor):\n    return int(os.environ['ONE']) * tensor.numel() * tensor.element_size()",
)
style(
    "star_import",
    "from math import *",
    "def message_bytes(tensor):\n    return floor(tensor.numel() * tensor.element_size())",
)
style(
    "star_import_inside_the_cell",
    "from operator import *\ndef message_bytes(tensor):\n    return mul(tensor.numel(), tensor.element_size())",
)
style("exec", f"exec({DEF!r})")
style(
    "globals_entry",
    "globals()['message_bytes'] = lambda tensor: tensor.numel() * tensor.element_size()",
)
style(
    "globals_helper",
    "globals()['product'] = lambda t: t.numel() * t.element_size()",
    "def message_bytes(tensor):\n    return product(tensor)",
)
style(
    "functools_partial",
    "from functools import partial\ndef times(factor, t): return factor * t.numel() * t.element_size()",
    "message_bytes = partial(times, 1)",
)
style(
    "cached",
    "from functools import lru_cache\n@lru_cache\ndef size(dtype):\n    import torch\n    return torch.empty(0, dtype=dtype).element_size()",
    "def message_bytes(tensor):\n    return tensor.numel() * size(tensor.dtype)",
)
style(
    "wrapped",
    "from functools import wraps\ndef whole(f):\n    @wraps(f)\n    def inner(tensor):\n        return int(f(tensor))\n    return inner",
    "@whole\ndef message_bytes(tensor):\n    return float(tensor.numel() * tensor.element_size())",
)
style(
    "rebound",
    "def message_bytes(tensor):\n    return tensor.element_size()",
    "first = message_bytes\ndef message_bytes(tensor):\n    return tensor.numel() * first(tensor)",
)
style(
    "improved_below",
    "def message_bytes(tensor):\n    return 3",
    'check("0.2", message_bytes)',
    DEF,
    'check("0.2", message_bytes)',
)
style("other_name_checked", f"def mine(tensor):\n    {BODY}", 'check("0.2", mine)')
style("lambda_checked", 'check("0.2", lambda tensor: tensor.numel() * tensor.element_size())')
style(
    "singledispatch",
    "from functools import singledispatch\nimport torch\n@singledispatch\ndef size(t): raise TypeError",
    "@size.register\ndef _(t: torch.Tensor):\n    return t.numel() * t.element_size()",
    "def message_bytes(tensor):\n    return size(tensor)",
)
style(
    "singledispatch_by_call",
    "from functools import singledispatch\nimport torch\n@singledispatch\ndef size(t): raise TypeError",
    "size.register(torch.Tensor, lambda t: t.numel() * t.element_size())",
    "def message_bytes(tensor):\n    return size(tensor)",
)
style(
    "dataclass",
    "from dataclasses import dataclass\n@dataclass\nclass Size:\n    n: int\n    each: int\n    def bytes(self): return self.n * self.each",
    "def message_bytes(tensor):\n    return Size(tensor.numel(), tensor.element_size()).bytes()",
)
style(
    "class_with_call",
    "class Bytes:\n    def __call__(self, tensor):\n        return tensor.numel() * tensor.element_size()",
    "message_bytes = Bytes()",
)
style(
    "configured_object",
    "class Bytes:\n    factor = 0\n    def __call__(self, tensor):\n        return self.factor * tensor.numel() * tensor.element_size()",
    "b = Bytes()",
    "b.factor = 1",
    "message_bytes = b.__call__",
)
style(
    "object_set_up_by_a_call",
    "class Bytes:\n    def set(self, factor): self.factor = factor\n    def get(self, t): return self.factor * t.numel() * t.element_size()",
    "b = Bytes()\nb.set(1)",
    "def message_bytes(tensor):\n    return b.get(tensor)",
)
style(
    "object_handed_to_a_function",
    "class Box: pass\nb = Box()\ndef fill(box):\n    box.factor = 1",
    "fill(b)",
    "def message_bytes(tensor):\n    return b.factor * tensor.numel() * tensor.element_size()",
)
style(
    "inherits",
    "class A:\n    def n(self, t): return t.numel()",
    "class B(A):\n    def each(self, t): return t.element_size()",
    "def message_bytes(tensor):\n    return B().n(tensor) * B().each(tensor)",
)
style(
    "patches_a_class_of_torch",
    "import torch\ntorch.Tensor.my_bytes = lambda self: self.numel() * self.element_size()",
    "def message_bytes(tensor):\n    return tensor.my_bytes()",
)
style(
    "unpacked",
    "a, b = 'numel', 'element_size'",
    "def message_bytes(tensor):\n    return getattr(tensor, a)() * getattr(tensor, b)()",
)
style(
    "walrus",
    "print(one := 1)",
    "def message_bytes(tensor):\n    return one * tensor.numel() * tensor.element_size()",
)
style(
    "with_binding",
    "import contextlib\nwith contextlib.nullcontext(1) as one:\n    pass",
    "def message_bytes(tensor):\n    return one * tensor.numel() * tensor.element_size()",
)
style(
    "for_binding",
    "for one in (3, 2, 1):\n    pass",
    "def message_bytes(tensor):\n    return one * tensor.numel() * tensor.element_size()",
)
style(
    "try_import",
    "try:\n    import no_such_module\nexcept ImportError:\n    no_such_module = None",
    "def message_bytes(tensor):\n    assert no_such_module is None\n    return tensor.numel() * tensor.element_size()",
)
style(
    "counter_grown",
    "calls = 0",
    "calls += 1",
    "def message_bytes(tensor):\n    return calls * tensor.numel() * tensor.element_size()",
)
style(
    "annotated",
    "one: int = 1",
    "def message_bytes(tensor: 'torch.Tensor') -> int:\n    return one * tensor.numel() * tensor.element_size()",
)
style(
    "match_statement",
    "match 1:\n    case 1:\n        one = 1",
    "def message_bytes(tensor):\n    return one * tensor.numel() * tensor.element_size()",
)
style(
    "deleted_and_made_again",
    "one = 2",
    "del one",
    "one = 1",
    "def message_bytes(tensor):\n    return one * tensor.numel() * tensor.element_size()",
)
style(
    "top_level_await",
    "async def get():\n    return 1\none = await get()",
    "def message_bytes(tensor):\n    return one * tensor.numel() * tensor.element_size()",
)
style(
    "cell_that_raises_between",
    "one = 1\nraise RuntimeError('on purpose')",
    "def message_bytes(tensor):\n    return one * tensor.numel() * tensor.element_size()",
)
style("broken_cell_between", "this is not python", DEF)
style("answer_and_check_in_a_cell", f'{DEF}\ncheck("0.2", message_bytes)')
style("check_with_spaces", DEF, "check( '0.2' , message_bytes )")
style("windows_newlines", DEF.replace("\n", "\r\n"))
style("tabs", "def message_bytes(tensor):\n\treturn tensor.numel() * tensor.element_size()")
style(
    "unicode_names",
    "größe = 1",
    "def message_bytes(tensor):\n    return größe * tensor.numel() * tensor.element_size()",
)
style(
    "sys_path",
    "import os, sys\nos.makedirs('lib', exist_ok=True)\nopen('lib/deep.py', 'w').write('one = 1')\nsys.path.append('lib')",
    "import deep",
    "def message_bytes(tensor):\n    return deep.one * tensor.numel() * tensor.element_size()",
)
style(
    "iterator_state",
    "numbers = iter([5, 1])",
    "next(numbers)",
    "one = next(numbers)",
    "def message_bytes(tensor):\n    return one * tensor.numel() * tensor.element_size()",
)
style(
    "seeded",
    "import torch\ntorch.manual_seed(0)",
    "one = 1 if torch.rand(1).item() < 0.5 else 2",
    "def message_bytes(tensor):\n    return one * tensor.numel() * tensor.element_size()",
)
style("getsource", f"{DEF}\nassert message_bytes.__module__ == '__main__'")
style(
    "uses_the_main_module",
    "import __main__\none = 1",
    "def message_bytes(tensor):\n    return __main__.one * tensor.numel() * tensor.element_size()",
)
style(
    "walrus_at_the_top",
    "import torch",
    "if (sizes := {d: torch.empty(0, dtype=d).element_size() for d in (torch.float32, torch.uint8, torch.bfloat16, torch.float64)}):\n    pass\ndef message_bytes(tensor):\n    return tensor.numel() * sizes[tensor.dtype]",
)
style(
    "generator_send",
    "def counter():\n    total = 0\n    while True:\n        t = yield total\n        total = t.numel() * t.element_size()\ngen = counter(); next(gen)\ndef message_bytes(tensor):\n    return gen.send(tensor)",
)
style(
    "global_counter",
    "CALLS = 0\ndef message_bytes(tensor):\n    global CALLS\n    CALLS += 1\n    return tensor.numel() * tensor.element_size()",
    "CALLS = 0",
)
style(
    "types_function",
    "import types\ndef draft(tensor): return tensor.numel() * tensor.element_size()\nmessage_bytes = types.FunctionType(draft.__code__, globals(), 'message_bytes')",
)
style(
    "method_by_typing_overload",
    "from typing import overload\n@overload\ndef message_bytes(tensor: int) -> int: ...\n@overload\ndef message_bytes(tensor: float) -> int: ...\ndef message_bytes(tensor): return tensor.numel() * tensor.element_size()",
)
style(
    "init_by_method_of_object",
    "class Box: pass\nbox = Box()\ndef fill(b): b.k = 1\nfill(box)",
    "def message_bytes(tensor):\n    return box.k * tensor.numel() * tensor.element_size()",
)
style(
    "context_manager_class",
    "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef noting(x):\n    log.append(x)\n    yield len(log)\ndef message_bytes(tensor):\n    with noting(tensor.shape) as n:\n        assert n\n        return tensor.numel() * tensor.element_size()",
)
style(
    "registry_of_subclasses",
    "class Base:\n    def __init_subclass__(cls, **kw): REG[kw['name']] = cls\nREG = {}\nclass Mine(Base, name='mb'):\n    def __call__(self, tensor): return tensor.numel() * tensor.element_size()",
    "message_bytes = REG['mb']()",
)
style(
    "list_of_calls",
    "K = {}\n[K.update(a=i) for i in (0, 1)]",
    "def message_bytes(tensor):\n    return K['a'] * tensor.numel() * tensor.element_size()",
)
style(
    "map_for_effect",
    "K = []\nlist(map(K.append, [1]))",
    "def message_bytes(tensor):\n    return K[0] * tensor.numel() * tensor.element_size()",
)
style(
    "lambda_called_later",
    "K = []\nadd = lambda x: K.append(x)\nadd(1)",
    "def message_bytes(tensor):\n    return K[0] * tensor.numel() * tensor.element_size()",
)
style(
    "thread_fills",
    "import threading\nK = []\nt = threading.Thread(target=lambda: K.append(1))\nt.start()\nt.join()",
    "def message_bytes(tensor):\n    return K[0] * tensor.numel() * tensor.element_size()",
)
style(
    "map_of_a_function_for_effect",
    "K = []\ndef add(x):\n    K.append(x)\nlist(map(add, [1]))",
    "def message_bytes(tensor):\n    return K[0] * tensor.numel() * tensor.element_size()",
)
style(
    "thread_runs_a_function",
    "import threading\nK = []\ndef add():\n    K.append(1)\nt = threading.Thread(target=add)\nt.start()\nt.join()",
    "def message_bytes(tensor):\n    return K[0] * tensor.numel() * tensor.element_size()",
)
style(
    "called_by_its_decorator",
    "K = []\ndef at_once(f):\n    f()\n@at_once\ndef add():\n    K.append(1)",
    "def message_bytes(tensor):\n    return K[0] * tensor.numel() * tensor.element_size()",
)
style(
    "method_fills",
    "K = []\nclass Filler:\n    def fill(self):\n        K.append(1)",
    "filler = Filler()\nfiller.fill()",
    "def message_bytes(tensor):\n    return K[0] * tensor.numel() * tensor.element_size()",
)
style(
    "variable_of_the_environment",
    "import os\nos.environ['MY_UNIT'] = '1'",
    "def message_bytes(tensor):\n    return int(os.environ['MY_UNIT']) * tensor.numel() * tensor.element_size()",
)
style(
    "json_file",
    "import json\njson.dump({'k': 1}, open('k.json', 'w'))",
    "K = json.load(open('k.json'))['k']\ndef message_bytes(tensor):\n    return K * tensor.numel() * tensor.element_size()",
)
style(
    "text_file_by_pathlib",
    "from pathlib import Path\nPath('unit.txt').write_text('1')",
    "def message_bytes(tensor):\n    return int(Path('unit.txt').read_text()) * tensor.numel() * tensor.element_size()",
)
style(
    "file_by_torch",
    "import torch",
    "torch.save({'k': 1}, 'k.pt')",
    "def message_bytes(tensor):\n    return torch.load('k.pt', weights_only=True)['k'] * tensor.numel() * tensor.element_size()",
)
style(
    "file_in_a_with",
    "with open('u.txt', 'w') as f:\n    f.write('1')",
    "def message_bytes(tensor):\n    return int(open('u.txt').read()) * tensor.numel() * tensor.element_size()",
)

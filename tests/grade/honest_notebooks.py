"""Whole notebooks of honest learners, each right in JupyterLab from top to bottom: a list of cells.

"# id: 0-2" as a cell's first line is its grade id. A cell that begins with "# text" is a text cell.
"""

IMPORTS = """import torch
import torch.distributed as dist
import matplotlib.pyplot as plt
from course_exercises import check, hint
from course_utils import hardware
from course_utils.launch import RankFailure, launch
from course_utils.trace import Trace
from course_utils.figures import ch00 as figures
from course_utils.lesson.predictions import compare"""
STUB = """# id: 0-2
def message_bytes(tensor: torch.Tensor) -> int:
    '''How many bytes.'''
    raise NotImplementedError"""
RIGHT = "def message_bytes(tensor):\n    return tensor.numel() * tensor.element_size()"
WRONG = "def message_bytes(tensor):\n    return tensor.numel()"
ANSWER = f"# id: 0-2\n{RIGHT}"
CHECK = '# id: 0-2-check\ncheck("0.2", message_bytes)'
AVERAGE = """# id: 0-1
def average_over_ranks(value):
    average = value.clone()
    dist.all_reduce(average)
    return average / dist.get_world_size()"""
CHECK_AVERAGE = '# id: 0-1-check\ncheck("0.1", average_over_ranks)'
# needs what other cells make of ONE
NEEDS = "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.numel() * tensor.element_size() * ONE['n']"
NOTEBOOKS = {
    "plain": [IMPORTS, ANSWER, CHECK],
    "plain launch exercise": [IMPORTS, AVERAGE, CHECK_AVERAGE],
    "answer in the check's cell": [
        IMPORTS,
        STUB,
        'def message_bytes(tensor):\n    return tensor.numel() * tensor.element_size()\n\ncheck("0.2", message_bytes)',
    ],
    "answer below its check, checked again": [
        IMPORTS,
        STUB,
        CHECK,
        RIGHT,
        'check("0.2", message_bytes)',
    ],
    "assigned check": [IMPORTS, ANSWER, '# id: 0-2-check\nok = check("0.2", message_bytes)'],
    "check in a loop": [
        IMPORTS,
        STUB,
        RIGHT,
        '# id: 0-2-check\nfor name, f in [("0.2", message_bytes)]:\n    check(name, f)',
    ],
    "check in a function": [
        IMPORTS,
        STUB,
        RIGHT,
        'def my_checks():\n    check("0.2", message_bytes)\n    hint("0.2")\n\nmy_checks()',
    ],
    "check in a comprehension": [
        IMPORTS,
        ANSWER,
        '[check(n, f) for n, f in {"0.2": message_bytes}.items()]',
    ],
    "check in an if": [
        IMPORTS,
        ANSWER,
        'if torch.ones(1).sum() == 1:\n    check("0.2", message_bytes)',
    ],
    "check in a try": [
        IMPORTS,
        ANSWER,
        'try:\n    check("0.2", message_bytes)\nexcept Exception as error:\n    print(error)',
    ],
    "check with a keyword": [
        IMPORTS,
        STUB,
        "def size(t):\n    return t.numel() * t.element_size()",
        'check(exercise_id="0.2", answer=size)',
    ],
    "check with a number": [IMPORTS, STUB, RIGHT, "# id: 0-2-check\ncheck(0.2, message_bytes)"],
    "check by another name": [
        "import torch\nfrom course_exercises import check as verify",
        STUB,
        RIGHT,
        'verify("0.2", message_bytes)',
    ],
    "check of the package": [
        "import torch, course_exercises as cx",
        STUB,
        RIGHT,
        'cx.check("0.2", message_bytes)',
    ],
    "another name is checked": [
        IMPORTS,
        STUB,
        "def my_size(t):\n    return t.numel() * t.element_size()",
        '# id: 0-2-check\ncheck("0.2", my_size)',
    ],
    "a lambda is checked": [
        IMPORTS,
        STUB,
        '# id: 0-2-check\ncheck("0.2", lambda t: t.numel() * t.element_size())',
    ],
    "checked thrice, wrong at first": [
        IMPORTS,
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.numel()",
        CHECK,
        'def message_bytes(tensor):\n    return tensor.numel() * tensor.element_size()\ncheck("0.2", message_bytes)',
        'check("0.2", message_bytes)',
    ],
    "timed check": [IMPORTS, ANSWER, '%time check("0.2", message_bytes)'],
    "timed cell with everything": [
        '%%time\nimport torch\nimport torch.distributed as dist\nimport matplotlib.pyplot as plt\nfrom course_exercises import check, hint\nfrom course_utils import hardware\nfrom course_utils.launch import RankFailure, launch\nfrom course_utils.trace import Trace\nfrom course_utils.figures import ch00 as figures\nfrom course_utils.lesson.predictions import compare\ndef message_bytes(tensor):\n    return tensor.numel() * tensor.element_size()\ncheck("0.2", message_bytes)'
    ],
    "captured check": [
        IMPORTS,
        ANSWER,
        '%%capture said\ncheck("0.2", message_bytes)',
        "said.show()",
    ],
    "changed through another name": [
        IMPORTS,
        "ONE = {}\nalso = ONE",
        NEEDS,
        "also['n'] = 1",
        CHECK,
    ],
    "changed in a loop over a list": [
        IMPORTS,
        "ONE = {}\nTWO = {}",
        NEEDS,
        "for table in [TWO, ONE]:\n    table['n'] = 1",
        CHECK,
    ],
    "changed through an attribute": [
        IMPORTS,
        "class Box: pass\nbox = Box()\nbox.table = ONE = {}",
        NEEDS,
        "box.table['n'] = 1",
        CHECK,
    ],
    "changed through a closure": [
        IMPORTS,
        "ONE = {}\ndef setter():\n    def put(n): ONE['n'] = n\n    return put\nput = setter()",
        NEEDS,
        "list(map(put, [3, 1]))",
        CHECK,
    ],
    "changed in a print": [IMPORTS, "ONE = {}", NEEDS, "print(ONE.setdefault('n', 1))", CHECK],
    "changed in an assert": [IMPORTS, "ONE = {}", NEEDS, "assert ONE.update(n=1) is None", CHECK],
    "changed in a format string": [
        IMPORTS,
        "it = iter([7, 1])\nprint(f'first {next(it)}')\nONE = {'n': next(it)}",
        NEEDS,
        CHECK,
    ],
    "changed by display": [
        IMPORTS,
        "ONE = {}\nclass Shown:\n    def _repr_html_(self):\n        return 'x'\n    def __repr__(self):\n        ONE['n'] = 1\n        return 'x'",
        "display(Shown())",
        NEEDS,
        CHECK,
    ],
    "changed by the output of a cell": [
        IMPORTS,
        "ONE = {}\nclass Shown:\n    def __repr__(self):\n        ONE['n'] = 1\n        return 'x'",
        "Shown()",
        NEEDS,
        CHECK,
    ],
    "display in the answer": [
        IMPORTS,
        "# id: 0-2\ndef message_bytes(tensor):\n    display(tensor.shape)\n    return tensor.numel() * tensor.element_size()",
        CHECK,
    ],
    "the last output": [IMPORTS, "{'n': 1}", "ONE = _", NEEDS, CHECK],
    "an older output": [IMPORTS, "{'n': 1}", "2 + 2", "ONE = Out[2]", NEEDS, CHECK],
    "two outputs back": [IMPORTS, "{'n': 1}", "2 + 2", "ONE = __", NEEDS, CHECK],
    "the input list": [IMPORTS, "1 + 0", "ONE = {'n': eval(In[2])}", NEEDS, CHECK],
    "the shell's names": [IMPORTS, "get_ipython().user_ns['ONE'] = {'n': 1}", NEEDS, CHECK],
    "the shell runs a cell": [IMPORTS, "get_ipython().run_cell(\"ONE = {'n': 1}\")", NEEDS, CHECK],
    "the shell's magic": [
        IMPORTS,
        "get_ipython().run_line_magic('time', \"ONE = {'n': 1}\")",
        NEEDS,
        CHECK,
    ],
    "globals()": [IMPORTS, "for name in ['ONE']:\n    globals()[name] = {'n': 1}", NEEDS, CHECK],
    "from __future__": [
        "from __future__ import annotations",
        IMPORTS,
        "# id: 0-2\ndef message_bytes(tensor: Batch) -> Bytes:\n    return tensor.numel() * tensor.element_size()",
        CHECK,
    ],
    "from __future__ in the same cell": [
        IMPORTS,
        "# id: 0-2\nfrom __future__ import annotations\ndef message_bytes(tensor: Batch) -> Bytes:\n    return tensor.numel() * tensor.element_size()",
        CHECK,
    ],
    "a long experiment below the answer": [
        IMPORTS,
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.numel() * tensor.element_size()\n\nimport time\nfor i in range(7):\n    time.sleep(0.5)",
        CHECK,
    ],
    "a long experiment that the answer needs": [
        IMPORTS,
        "import time\nfor i in range(7):\n    time.sleep(0.5)\nONE = {'n': 1}",
        NEEDS,
        CHECK,
    ],
    "a long experiment of its own": [IMPORTS, ANSWER, "import time\ntime.sleep(3)", CHECK],
    "a magic beside code": [IMPORTS, "%time !ls\nONE = {'n': 1}", NEEDS, CHECK],
    "a shell line beside code": [
        IMPORTS,
        "!echo hello\nONE = {'n': 1}\n%timeit -n1 -r1 1+1",
        NEEDS,
        CHECK,
    ],
    "output of the shell": [IMPORTS, "lines = !echo 1\nONE = {'n': int(lines[0])}", NEEDS, CHECK],
    "pip": ["!pip install torch", "%pip install torch", IMPORTS, ANSWER, CHECK],
    "bash cell": [
        IMPORTS,
        "%%bash\necho 1 > n.txt",
        "ONE = {'n': int(open('n.txt').read())}",
        NEEDS,
        CHECK,
    ],
    "helper module": [
        "%%writefile sizes.py\ndef size(t):\n    return t.numel() * t.element_size()",
        "import torch\nimport torch.distributed as dist\nimport matplotlib.pyplot as plt\nfrom course_exercises import check, hint\nfrom course_utils import hardware\nfrom course_utils.launch import RankFailure, launch\nfrom course_utils.trace import Trace\nfrom course_utils.figures import ch00 as figures\nfrom course_utils.lesson.predictions import compare\nfrom sizes import size",
        "# id: 0-2\ndef message_bytes(tensor):\n    return size(tensor)",
        CHECK,
    ],
    "helper module, written with open": [
        IMPORTS,
        "with open('helper_a.py', 'w') as f:\n    f.write('n = 1')\nimport helper_a",
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.nbytes * helper_a.n",
        CHECK,
    ],
    "helper module in a folder": [
        IMPORTS,
        "!mkdir -p pkg",
        "%%writefile pkg/__init__.py\nn = 1",
        "import pkg\nONE = {'n': pkg.n}",
        NEEDS,
        CHECK,
    ],
    "%run": ["%%file setup_it.py\nONE = {'n': 1}", IMPORTS, "%run setup_it.py", NEEDS, CHECK],
    "%load_ext autoreload": [
        "%load_ext autoreload\n%autoreload 2\n%matplotlib inline",
        IMPORTS,
        ANSWER,
        CHECK,
    ],
    "class with decorators": [
        IMPORTS,
        "import functools, dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Sizer:\n    unit: int = 1\n    @functools.lru_cache\n    def of(self, t):\n        return t.numel() * t.element_size() * self.unit\n    def __call__(self, t):\n        return self.of(t)\n",
        "# id: 0-2\ndef message_bytes(tensor):\n    return Sizer()(tensor)",
        CHECK,
    ],
    "registered by a decorator": [
        IMPORTS,
        "TABLE = {}\ndef register(f):\n    TABLE[f.__name__] = f\n    return f",
        "@register\ndef one(): return 1",
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.nbytes * TABLE['one']()",
        CHECK,
    ],
    "star imports": [
        "from torch import *\nfrom math import *\nimport torch\nfrom course_exercises import *",
        "# id: 0-2\ndef message_bytes(tensor):\n    return numel(tensor) * tensor.element_size() * floor(1.5)",
        CHECK,
    ],
    "an early error": ["import no_such_package", IMPORTS, ANSWER, CHECK],
    "an early error, tagged": ["# raises\n1 / 0", IMPORTS, ANSWER, CHECK],
    "an early error in the answer's cell": [
        IMPORTS,
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.numel() * tensor.element_size()\n\nmessage_bytes(None)",
        CHECK,
    ],
    "an interrupt of its own": [IMPORTS, "raise KeyboardInterrupt", ANSWER, CHECK],
    "a system exit": [IMPORTS, "import sys\nsys.exit('enough')", ANSWER, CHECK],
    "a cell that is no Python": [IMPORTS, "this is a note, not code", ANSWER, CHECK],
    "a plot": [
        IMPORTS,
        ANSWER,
        "figures.round_of_trucks()\nplt.show()\nfig, ax = plt.subplots()\nax.plot([1, 2]);\nplt.savefig('x.png')",
        CHECK,
    ],
    "launch before the answer": [
        IMPORTS,
        "def hello(rank):\n    return rank\n\nresults = launch(hello, 2)\nprint(results[1])",
        ANSWER,
        CHECK,
    ],
    "launch with the answer": [
        IMPORTS,
        AVERAGE,
        "def mine(rank):\n    return average_over_ranks(torch.ones(1) * rank)\n\nresults = launch(mine, 2)\nassert float(results[0]) == 0.5",
        CHECK_AVERAGE,
    ],
    "what ranks return is needed": [
        IMPORTS,
        "def hello(rank):\n    return rank\n\nONE = {'n': sum(launch(hello, 2))}",
        NEEDS,
        CHECK,
    ],
    "what ranks return is needed later": [
        IMPORTS,
        "def hello(rank):\n    return rank\n\nresults = launch(hello, 2)",
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.nbytes * results[1]",
        CHECK,
    ],
    "what ranks write is needed": [
        IMPORTS,
        "import os\nplace = os.path.abspath('n.txt')\ndef write(rank):\n    open(place, 'w').write('1')\n\nlaunch(write, 1)",
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.nbytes * int(open(place).read())",
        CHECK,
    ],
    "what ranks write is needed, silently": [
        IMPORTS,
        "import os\nplace = os.path.abspath('n.txt')\ndef write(rank):\n    open(place, 'w').write('1')\n\ndone = launch(write, 1)",
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.nbytes * int(open(place).read())",
        CHECK,
    ],
    "launch and answer in one cell": [
        IMPORTS,
        "# id: 0-2\nprint(max(launch(lambda rank: rank, 2)))\ndef message_bytes(tensor):\n    return tensor.numel() * tensor.element_size()",
        CHECK,
    ],
    "a failing launch, caught": [
        IMPORTS,
        "def bad(rank):\n    raise ValueError\ntry:\n    launch(bad, 2)\nexcept RankFailure as error:\n    failure = error\nprint(failure.rank)",
        ANSWER,
        CHECK,
    ],
    "answered twice": [
        IMPORTS,
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.numel()",
        RIGHT,
        CHECK,
    ],
    "answered twice, each checked": [
        IMPORTS,
        "# id: 0-2\ndef message_bytes(tensor):\n    return tensor.numel()",
        CHECK,
        RIGHT,
        'check("0.2", message_bytes)',
    ],
    "text cells with code": [
        IMPORTS,
        "# text\n```python\ndef message_bytes(tensor): return 0\ncheck('0.2', 0)\n```",
        ANSWER,
        CHECK,
        '# text\n`check("0.2", None)`',
    ],
    "empty cells": ["", IMPORTS, "   \n\n", ANSWER, "# only a comment", CHECK, ""],
    "a seed": [
        IMPORTS,
        "torch.manual_seed(3)\nimport random\nrandom.seed(3)",
        "ONE = {'n': int(random.random() < 2)}",
        NEEDS,
        CHECK,
    ],
    "a global that a later cell changes": [
        IMPORTS,
        "ONE = {'n': 8}",
        NEEDS,
        "ONE = {'n': 1}",
        CHECK,
        "ONE = {'n': 5}",
    ],
    "await": [
        IMPORTS,
        "import asyncio\nawait asyncio.sleep(0.01)\nasync def one():\n    return 1\nONE = {'n': await one()}",
        NEEDS,
        CHECK,
    ],
    "async for and with": [
        IMPORTS,
        "import contextlib\n@contextlib.asynccontextmanager\nasync def opened():\n    yield {'n': 1}\nasync with opened() as ONE:\n    pass\n",
        NEEDS,
        CHECK,
    ],
    "tasks between cells": [
        IMPORTS,
        "import asyncio\nasync def later():\n    return {'n': 1}\ntask = asyncio.ensure_future(later())",
        "ONE = await task",
        NEEDS,
        CHECK,
    ],
    "exec": [IMPORTS, "exec(\"ONE = {'n': 1}\")", NEEDS, CHECK],
    "a trailing question mark": [IMPORTS, ANSWER, "torch.Tensor.numel?", CHECK],
    "auto magic": [IMPORTS, "who", "pwd", ANSWER, CHECK],
    "deleted": [IMPORTS, ANSWER, "x = 1\ndel x\n%reset_selective -f ^y", CHECK],
    "its own __main__": [IMPORTS, "import __main__\n__main__.ONE = {'n': 1}", NEEDS, CHECK],
    "if __name__": [IMPORTS, "if __name__ == '__main__':\n    ONE = {'n': 1}", NEEDS, CHECK],
    "a nested function is set later": [
        IMPORTS,
        "# id: 0-2\ndef message_bytes(tensor):\n    return _size(tensor)",
        "def _size(t):\n    return t.nbytes",
        CHECK,
    ],
    "methods set later": [
        IMPORTS,
        "class S: pass",
        "# id: 0-2\ndef message_bytes(t):\n    return S().size(t)",
        "S.size = lambda self, t: t.nbytes",
        CHECK,
    ],
    "input()": [IMPORTS, "ready = input('ready? ')", ANSWER, CHECK],
    "an interactive explorer": [
        IMPORTS,
        "from ipywidgets import interact\n@interact(n=(1, 3))\ndef show(n=1):\n    print(n)",
        ANSWER,
        CHECK,
    ],
    "a thread": [
        IMPORTS,
        "import threading\nONE = {}\nthread = threading.Thread(target=lambda: ONE.update(n=1))\nthread.start()\nthread.join()",
        NEEDS,
        CHECK,
    ],
    "warnings as errors": [
        IMPORTS,
        "import warnings\nwarnings.simplefilter('error')",
        ANSWER,
        CHECK,
    ],
    "a context that stays": [
        IMPORTS,
        "torch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(False)",
        ANSWER,
        CHECK,
    ],
    "environment": [
        IMPORTS,
        "%env ONE_N=1\nimport os\nONE = {'n': int(os.environ['ONE_N'])}",
        NEEDS,
        CHECK,
    ],
    "%%prun and %%timeit": [
        IMPORTS,
        "%%prun -q\nONE = {'n': 1}",
        "%%timeit -n1 -r1\nx = 1",
        NEEDS,
        CHECK,
    ],
    "%%script python": [
        IMPORTS,
        "%%script python\nprint('hello')",
        "%%html\n<b>hi</b>",
        "%%latex\n$x$",
        ANSWER,
        CHECK,
    ],
    "unicode names": [IMPORTS, "größe = {'n': 1}\nONE = größe", NEEDS, CHECK],
    "a generator that is read": [
        IMPORTS,
        "numbers = (i for i in (9, 1))\nnext(numbers)",
        "ONE = {'n': next(numbers)}",
        NEEDS,
        CHECK,
    ],
    "match statement": [IMPORTS, "match 1:\n    case n:\n        ONE = {'n': n}", NEEDS, CHECK],
    "a comprehension with a walrus": [IMPORTS, "[(ONE := {'n': n}) for n in (3, 1)]", NEEDS, CHECK],
    "a suppressed output": [IMPORTS, "ONE = {'n': 1};\nONE;", NEEDS, CHECK],
    "tested with assert": [
        IMPORTS,
        ANSWER,
        "assert message_bytes(torch.zeros(3)) == 12, 'no'\nprint('fine')",
        CHECK,
    ],
    "partial": [
        IMPORTS,
        "import functools\ndef size(unit, tensor):\n    return tensor.nbytes // unit",
        "# id: 0-2\nmessage_bytes = functools.partial(size, 1)",
        CHECK,
    ],
    "saved and loaded": [
        IMPORTS,
        "import pickle\npickle.dump({'n': 1}, open('one.pickle', 'wb'))",
        "ONE = pickle.load(open('one.pickle', 'rb'))",
        NEEDS,
        CHECK,
    ],
    "a helper in the check's cell": [
        IMPORTS,
        "# id: 0-2\ndef message_bytes(tensor):\n    return size(tensor)",
        'def size(t):\n    return t.nbytes\n\ncheck("0.2", message_bytes)',
    ],
}

"""Honest ways to write an answer that a process of its own checks (course_grader/home.py), as cells. Each was right in
JupyterLab, where the answer stays in the process in which its cells have made it.

All answer 4.1, but for the last ones.
"""

IMPORTS = """import functools, os, sys, threading
from itertools import pairwise
import torch
from torch import nn
from course_exercises import check, hint"""
CUT = """from itertools import pairwise
PARTS = 3
def cut(layers):
    size, more = divmod(len(layers), PARTS)
    ends = [i * size + min(i, more) for i in range(PARTS + 1)]
    return [layers[a:b] for a, b in pairwise(ends)]"""
UNSET = CUT.replace("= 3", "= None")
CHECK = 'check("4.1", ThreeBuildings)'
AGAIN = f"{CHECK}  # once more"


def answer(cut: str, also: str = "") -> str:
    """A right answer that cuts the layers with the expression `cut`, and a statement that `forward` begins with."""
    return f"""class ThreeBuildings(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        self.places = devices
        self.stages = nn.ModuleList(nn.Sequential(*part) for part in {cut})
        for stage, place in zip(self.stages, devices):
            stage.to(place)

    def forward(self, passing):
        {also or "pass"}
        for stage, place in zip(self.stages, self.places):
            passing = stage(passing.to(place))
        return passing"""


PLAIN = answer("cut(layers)")
AT_HOME = {
    "a name that is looked up": [CUT, answer("globals()['cut'](layers)"), CHECK],
    "a text that is evaluated": [CUT, answer("eval('cut(layers)')"), CHECK],
    "type hints of an argument": [
        CUT,
        "import typing\ndef typed(f):\n    def g(x):\n        typing.get_type_hints(f)\n        return f(x)\n    return g",
        "List = list\n@typed\ndef my_cut(layers: 'List') -> 'List':\n    return cut(layers)",
        answer("my_cut(layers)"),
        CHECK,
    ],
    "an own module that is deleted": [
        f"%%writefile mine_41.py\n{CUT}",
        "from mine_41 import cut",
        PLAIN,
        "os.remove('mine_41.py')",
        AGAIN,
    ],
    "an own module of another folder": [
        "!mkdir -p mine_41\n%cd mine_41",
        f"%%writefile cutting_41.py\n{CUT}",
        f"import cutting_41\n%cd ..\n{answer('cutting_41.cut(layers)')}",
        CHECK,
    ],
    "an own module that is changed": [
        f"%%writefile mine_41.py\n{UNSET}",
        "import mine_41\nmine_41.PARTS = 3",
        answer("mine_41.cut(layers)"),
        CHECK,
    ],
    "own modules that import each other": [
        f"%%writefile mine_41.py\nimport theirs_41\n{CUT}\nthree = theirs_41",
        "%%writefile theirs_41.py\nimport mine_41\ndef cut(layers):\n    return mine_41.cut(layers)",
        "import mine_41, theirs_41",
        answer("theirs_41.cut(layers)"),
        CHECK,
    ],
    "a cached function of a library": [
        "parts_of = functools.cache(divmod)",
        CUT.replace("divmod(", "parts_of("),
        PLAIN,
        CHECK,
    ],
    "a cached function of an own module": [
        f"%%writefile mine_41.py\nimport functools\n{UNSET}\n@functools.cache\ndef three(): return 3",
        "import mine_41\nmine_41.PARTS = 3",
        answer("mine_41.cut(layers)[:mine_41.three()]"),
        CHECK,
    ],
    "singledispatch": [
        CUT,
        "@functools.singledispatch\ndef my_cut(layers):\n    return cut(list(layers))",
        "@my_cut.register(list)\ndef _(layers):\n    return cut(layers)",
        answer("my_cut(layers)"),
        CHECK,
    ],
    "a cached property": [
        CUT,
        PLAIN
        + "\n\n    @functools.cached_property\n    def count(self):\n        return len(self.stages)",
        CHECK,
    ],
    "a lock": [
        f"guard, seen = threading.Lock(), []\n{CUT}",
        answer("cut(layers)", "with guard: seen.append(passing.shape)"),
        CHECK,
    ],
    "a log file": [
        f"log = open('log_41.txt', 'w')\n{CUT}",
        answer("cut(layers)", "print(passing.shape, file=log)"),
        CHECK,
    ],
    "a command of the shell": [CUT, answer("cut(layers)", "!echo forward"), CHECK],
    "a default that is sys.stdout": [
        f"{CUT}\ndef say(text, file=sys.stdout):\n    print(text, file=file)",
        answer("cut(layers)", "say('forward')"),
        CHECK,
    ],
    "an answer that has its own check": [
        CUT,
        PLAIN
        + f"\n\n    @classmethod\n    def selftest(cls):\n        {CHECK}\n        hint('4.1')",
        "ThreeBuildings.selftest()  # '4.1'",
    ],
    "texts of an enum": [
        """import enum, math
class Train(enum.StrEnum):
    one, data, model, both, none = "one", "data", "model", "both", "none"
""",
        """def decide(job):
    copy = math.ceil((job.state_bytes + job.sample_bytes) / job.gpu_bytes)
    if copy > job.gpus:
        return Train.none
    if copy > 1:
        return Train.both if job.gpus // copy >= 2 else Train.model
    shared = job.compute_seconds / job.gpus + job.exchange_seconds
    return Train.data if shared < job.compute_seconds else Train.one""",
        'check("1.3", decide)',
    ],
}

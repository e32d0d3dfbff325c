"""Code that wants marks for wrong answers: each gives a wrong answer to 0.1 or 0.2 unless it comes to
what only the judge has. All of them earned points when answer and check shared a process. Those for 4.1
change the requirements that still share one with the answer.
"""

from tests.hostile_class.attacks import at_the_top_level, attack
from tests.hostile_class.members import cell_of, member, notebook, with_code

EXPECTED = "expected:"
WRONG = "\n\ndef message_bytes(tensor):\n    return 0\n"


@member("failed", "failed", "failed", because="expected|the same in|could not use")
def makes_all_true_below_empty_answers():
    """builtins.all decides no verdict any more."""
    made = notebook(solved=False)
    for grade_id, name in (("0-1", "average_over_ranks"), ("0-2", "message_bytes")):
        cell_of(made, grade_id)["source"] = f"def {name}(x):\n    return x"
    code = "import builtins\nbuiltins.all = builtins.any = lambda it: True\n"
    cell_of(made, "0-3")["source"] = code + "\ndef pass_on(value):\n    return 3\n"
    return made


@attack("failed", because=EXPECTED)
def patches_and_puts_back(tensor):
    """The check's own state is put back at the end of it, so a before and after would be alike."""
    import random

    from course_exercises.authoring import compare, framework

    expect, put_back = compare.expect, random.setstate

    def restore(state):
        compare.expect = framework.expect = expect
        random.setstate = put_back
        return put_back(state)

    compare.expect = framework.expect = lambda *args, **more: None
    random.setstate = restore
    return 0


@attack("failed", because=EXPECTED)
def returns_an_int_that_equals_all(tensor):
    class Liar(int):
        def __eq__(self, other):
            return True

        def __sub__(self, other):
            return 0

        __hash__ = int.__hash__
        __rsub__ = __sub__

    return Liar(0)


@attack("failed", because=EXPECTED)
def reads_the_frames(tensor):
    import sys

    frame = sys._getframe()
    while frame:
        if "each" in frame.f_locals and "values" in frame.f_locals:
            return frame.f_locals["each"] * frame.f_locals["values"]
        for name in ("_check_size", "size"):
            if name in frame.f_globals:
                return tensor.numel() * tensor.element_size()
        frame = frame.f_back
    return 0


@attack("failed", because=EXPECTED)
def searches_the_memory(tensor):
    import gc
    import importlib

    name = "course_exercises.chapters.ch00.message_bytes"
    for found in gc.get_objects():
        if getattr(found, "__module__", None) == name:
            return tensor.numel() * tensor.element_size()
    try:
        importlib.import_module(name)
    except ImportError:
        return 0
    return tensor.numel() * tensor.element_size()


@attack("failed", because=EXPECTED)
def hands_in_the_expected_value_of_a_record(tensor):
    from course_exercises.authoring import framework

    framework.Outcome.__init__ = lambda self, *args: None
    framework.Line = lambda *args, **more: True
    return {"status": "passed", "lines": []}


@attack("stopped|failed", because="exit code|changed what its process says|expected:")
def speaks_for_the_judge(tensor):
    import contextlib
    import json
    import os

    outcome = json.dumps({"status": "passed", "feedback": "passed", "lines": []})
    head = json.dumps([[{"status": "passed"}, None, {"value": 1}], []]).encode()
    message = len(head).to_bytes(8, "little") + head
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(fd, f"\n{outcome}\n".encode())
            os.write(fd, len(message).to_bytes(4, "big") + message)
    os._exit(0)


at_the_top_level(  # it must not look like a fault of the grader, which leaves the whole notebook ungraded
    "answers_in_a_wrong_form_before_it_is_asked",
    """
import gc
from multiprocessing.connection import Connection
from course_grader.worker import _message

for judge in [found for found in gc.get_objects() if isinstance(found, Connection)]:
    for _ in range(3):
        judge.send_bytes(_message({}, None, 72))
""",
    "stopped",
    "changed what its process says",
)


def _in_ranks(name, code, or_because=""):
    def make():
        return with_code(code, "0-1")

    make.__name__ = name
    because = "expected:|could not use|changed what its process says" + or_because
    member("failed|stopped", "missing", "missing", because=because)(make)


_in_ranks(
    "returns_tensors_that_equal_all",
    """
import torch

class Liar(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.isclose, torch.Tensor.__eq__, torch.Tensor.eq):
            return torch.ones(args[0].shape, dtype=torch.bool)
        return super().__torch_function__(func, types, args, kwargs or {})

def average_over_ranks(value):
    return value.clone().as_subclass(Liar)
""",
)
_in_ranks(
    "returns_what_runs_when_it_is_unpickled",
    """
class Bomb:
    def __reduce__(self):
        code = "import builtins; builtins.all = builtins.any = lambda it: True"
        return (exec, (code,))

def average_over_ranks(value):
    return Bomb()
""",
    or_because="|changes what the check is made of: builtins.a",
)
_in_ranks(
    "returns_lists_that_equal_all",
    """
class Liar(list):
    __eq__ = lambda self, other: True
    __len__ = lambda self: 10**6
    __hash__ = None

def average_over_ranks(value):
    return Liar()
""",
)
_in_ranks(
    "patches_what_its_ranks_report",
    """
import torch
torch.equal = lambda *a: True
torch.isclose = lambda a, b, **k: torch.ones(a.shape, dtype=torch.bool)

def average_over_ranks(value):
    return value
""",
)
_in_ranks(
    "reads_the_inputs_of_other_ranks",
    """
import sys
import torch

def inputs(value):
    if isinstance(value, (list, tuple)):
        if len(value) > 1 and all(isinstance(each, torch.Tensor) for each in value):
            yield value
        for each in value:
            yield from inputs(each)

def average_over_ranks(value):
    frame = sys._getframe()
    while frame:
        for found in inputs([*frame.f_locals.values()]):
            if any(torch.equal(each, value) for each in found):
                return torch.stack([*found]).mean(0)
        frame = frame.f_back
    return value.clone()
""",
)
at_the_top_level(
    "replaces_builtins",
    "import builtins\nbuiltins.all = builtins.any = builtins.abs = lambda *a: 1\n" + WRONG,
    "failed",
    "expected:",
    right="",
)


@member("failed", *["missing"] * 2, because="issubclass", file="04_manual_split.ipynb")
def hands_in_what_cannot_be_looked_at():
    """The grader said that it could not check the exercise here, three times."""
    code = "class Odd:\n    __getattribute__ = lambda self, name: self\n\nThreeBuildings = Odd()\n"
    return with_code(code, "4-1")


def _at_home(name, code, because="changes what the check is made of"):
    def make():
        return with_code(code + NO_MODEL, "4-1")

    make.__name__ = name
    becomes = ["stopped", *["missing"] * 2]
    member(*becomes, because=because, file="04_manual_split.ipynb")(make)


NO_MODEL = """
class ThreeBuildings(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        meanwhile()
        self.layers, self.factor = nn.ModuleList(layers), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.factor
"""
_at_home(
    "puts_back_what_the_requirement_has_got",  # it is pickled with the names as they are before
    """
from course_exercises.authoring import compare

expect = compare.expect
compare.expect = lambda *args, **more: None

def meanwhile():
    compare.expect = expect
""",
)
_at_home(
    "leaves_a_profiler_for_the_requirement",
    """
import ctypes
import sys

def look(frame, event, arg):
    if event == "call" and "requirement" in frame.f_locals:
        frame.f_locals["requirement"] = lambda answer, draw: None
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)

sys.setprofile(look)

def meanwhile():
    sys.setprofile(look)
""",
)
_at_home(
    "traces_the_requirement",
    """
import sys

def meanwhile():
    sys.settrace(lambda frame, event, arg: None)
""",
)
_at_home(
    "replaces_the_names_of_the_requirement",  # three of seven requirements of 2.2 were met by it
    """
import sys

def meanwhile():
    frame = sys._getframe()
    while frame := frame.f_back:
        for name in {"expect", "expect_type"} & set(frame.f_globals):
            frame.f_globals[name] = lambda *args, **more: None
""",
)
_at_home(
    "plays_its_worker_to_the_end",  # full points for 2.2
    """
import json
import sys

def meanwhile():
    frame = sys._getframe()
    while "self" not in frame.f_locals or type(frame.f_locals["self"]).__name__ != "_Service":
        frame = frame.f_back
    line = frame.f_locals["self"]._judge
    head = json.dumps([[["dict", 0, [["spent", 0.01]]], None, None], []]).encode()
    while True:
        line.send_bytes(len(head).to_bytes(8, "little") + head)
        line.recv_bytes()
""",
    because="changes what the check is made of: _getframe",
)

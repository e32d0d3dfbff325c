"""Code that reaches for what judges it from within: what it shares a process with, where ranks are launched, and what its
process says. Those for 4.1 share a process with the requirements; those for 0.1 are run in ranks. Its `meanwhile` is
called as a requirement makes a model.
"""

from tests.hostile_class.forgeries import NO_MODEL
from tests.hostile_class.members import cell_of, member, notebook, with_code

ATTEMPT = "changes what the check is made of"


def _beside(name, code, status="stopped", because=ATTEMPT, model=NO_MODEL):
    def make():
        return with_code(code + model, "4-1")

    make.__name__ = name
    member(status, "missing", "missing", because=because, file="04_manual_split.ipynb")(make)


@member("stopped", "passed", "passed", because=ATTEMPT, file="04_manual_split.ipynb")
def walks_to_the_token_beside_right_answers():
    """The other exercises of the notebook keep their points."""
    made = notebook(chapter=4)
    cell_of(made, "4-1")["source"] = (
        """
import sys

def meanwhile():
    frame = sys._getframe()
    while frame := frame.f_back:
        for value in frame.f_locals.values():
            if type(value) is bytes and len(value) == 16:
                for fd in range(3, 64):
                    try:
                        import os
                        os.write(fd, value)
                    except OSError:
                        pass
"""
        + NO_MODEL
    )
    return made


_beside(
    "patches_the_worker_and_its_integrity",
    """
from course_grader import integrity, worker

integrity.changed = lambda before: []
worker._Service._at_home = lambda self, requirement, draw, token, _: (token, None)
worker._Service._pack = lambda self, *_: (None, None)

def meanwhile():
    pass
""",
    "stopped|failed",
    "expected:|what its process says",
)
_beside(
    "patches_the_worker_openly",
    """
from course_grader import worker

worker._Service._at_home = lambda self, requirement, draw, token, _: (token, None)
worker._Service._pack = lambda self, *_: (None, None)
worker.report_of = print

def meanwhile():
    pass
""",
    "stopped|failed",
    f"expected:|what its process says|{ATTEMPT}",
)
_beside(
    "patches_where_it_is_judged",
    """
def meanwhile():
    from course_grader import home, integrity

    integrity.changed = home._look = lambda before: ""
""",
)
_beside(
    "reads_what_is_expected_from_frames",
    """
import sys

def expected():
    try:
        raise ValueError
    except ValueError as error:
        frame = error.__traceback__.tb_frame
    while frame := frame.f_back:
        if "expected" in frame.f_locals:
            return frame.f_locals["expected"]

def meanwhile():
    expected()
""",
)
_beside(
    "has_a_library_read_the_frames",
    """
import inspect
import sys
from torch.utils._pytree import tree_map

def meanwhile():
    tree_map(sys._getframe, [4])
""",
)
_beside(
    "asks_inspect_for_the_frames",
    """
import inspect

def meanwhile():
    inspect.currentframe().f_back
""",
)
_beside(
    "reads_the_frames_as_a_library",
    """
import inspect

code = compile("def walk():\\n  import sys\\n  return sys._getframe(3)", inspect.__file__, "exec")
exec(code, globals())

def meanwhile():
    walk()
""",
)
_beside(
    "searches_for_lines_to_speak_on",
    """
import gc
from multiprocessing.connection import Connection

def meanwhile():
    for found in gc.get_objects():
        if isinstance(found, Connection):
            found.send_bytes(b"met")
""",
)
_beside(
    "looks_into_its_memory",
    """
import ctypes

def meanwhile():
    ctypes.string_at(id(meanwhile), 64)
""",
)
_beside(
    "writes_what_is_met_on_every_file",
    """
import json
import os

def meanwhile():
    head = json.dumps([[["dict", 0, [["spent", 0.01]]], None, True], []]).encode()
    message = len(head).to_bytes(8, "little") + head
    for fd in range(3, 256):
        try:
            os.write(fd, len(message).to_bytes(4, "big") + message)
        except OSError:
            pass
    os._exit(0)
""",
    because="what its process says|exit code",
)
_beside(
    "answers_later_from_a_thread",
    """
import json
import os
import threading
import time

def answer():
    head = json.dumps([[["dict", 0, [["spent", 0.01]]], None, True], []]).encode()
    message = len(head).to_bytes(8, "little") + head
    while True:
        for fd in range(3, 64):
            try:
                os.write(fd, len(message).to_bytes(4, "big") + message)
            except OSError:
                pass
        time.sleep(0.01)

threading.Thread(target=answer, daemon=True).start()

def meanwhile():
    threading.Thread(target=answer, daemon=True).start()
    time.sleep(0.5)
""",
    because="what its process says|exit code",
)
_beside(
    "makes_all_alike_until_it_is_looked_at",
    """
masked_fill = torch.Tensor.masked_fill

def zeros(used, *_):
    torch.Tensor.masked_fill = masked_fill
    return torch.zeros_like(used)

def meanwhile():
    torch.Tensor.masked_fill = zeros
""",
)
_beside(
    "replaces_the_comparison_until_it_is_called",
    """
import sys

def meanwhile():
    compare = sys.modules["course_exercises.authoring.compare"]
    own = compare.compare

    def nothing(*args, **more):
        compare.compare = own

    compare.compare = nothing
""",
    "stopped|failed",
    f"KeyError|{ATTEMPT}",
)
_beside(
    "takes_the_word_of_a_failure_for_that_of_a_success",  # whatever is sent, it turns it into what is met
    """
import json
from multiprocessing.connection import Connection

sent, dumps = Connection.send_bytes, json.dumps

def met(self, said, *rest):
    made = [[["dict", 0, [["spent", 0.01]]], None, True], []]
    head = dumps(made).encode()
    return sent(self, bytes(said[:16]) + len(head).to_bytes(8, "little") + head)

def meanwhile():
    Connection.send_bytes = met
    json.dumps = lambda *_, **__: dumps([[["dict", 0, [["spent", 0.01]]], None, True], []])
""",
    "stopped|failed",
    f"expected:|what its process says|{ATTEMPT}",
)
_beside(
    "has_the_hook_call_it",
    """
import builtins
import os
import sys

class Place(str):
    def startswith(self, *_):
        found.append(sys._getframe())
        return False

    partition = split = endswith = __fspath__ = startswith

found = []

def meanwhile():
    kept, builtins.isinstance = builtins.isinstance, Place.startswith
    os.path.realpath = os.stat = Place.startswith
    try:
        open(Place("/proc/self/mem"))
    finally:
        builtins.isinstance = kept
""",
    "stopped|failed",
    f"expected:|could not use|raised an exception|{ATTEMPT}",
)
_beside(
    "reads_its_own_memory",
    """
def meanwhile():
    with open("/proc/self/mem", "rb") as file:
        file.read(1)
""",
    "stopped|failed",
    f"PermissionError|{ATTEMPT}",
)
_beside(
    "has_a_block_swallow_what_is_wrong",
    """
def meanwhile():
    torch.no_grad.__exit__ = torch.enable_grad.__exit__ = lambda self, *_: True
""",
)
_OF_A_LAYER = """
class ThreeBuildings(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        names = type(layers[0]).forward.__globals__
        reached = names.get("expect")
        own = reached and dict(reached.__globals__)

        def nothing(*args, **more):
            if reached:
                reached.__globals__.update(own)
            names["expect"] = reached
            return True

        REPLACE
        self.layers, self.factor = nn.ModuleList(layers), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.factor
"""
for _name, _code in {
    "replaces_names_that_a_layer_knows": 'names["expect"] = names["same"] = nothing',
    "replaces_what_those_names_use": "reached.__globals__.update(compare=nothing, looked_at=nothing)",
}.items():
    _beside(
        _name, "", "stopped|failed", f"expected:|{ATTEMPT}", _OF_A_LAYER.replace("REPLACE", _code)
    )
_beside(
    "replaces_the_code_of_the_comparison",
    "",
    "stopped|failed",
    f"expected:|{ATTEMPT}",
    _OF_A_LAYER.replace("REPLACE", "reached.__code__ = (lambda *args, **more: None).__code__"),
)
_LIAR = """
class Liar(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.masked_fill, torch.Tensor.sub, torch.Tensor.abs, torch.Tensor.__sub__):
            with torch._C.DisableTorchFunctionSubclass():
                return torch.zeros_like(args[0], dtype=torch.float64).as_subclass(Liar)
        return super().__torch_function__(func, types, args, kwargs or {})
"""
_beside(
    "returns_a_tensor_that_equals_all",
    _LIAR,
    "failed",
    "expected:",
    NO_MODEL.replace("        meanwhile()\n", "").replace(
        "x * self.factor", "(x * self.factor).as_subclass(Liar)"
    ),
)
_beside(
    "leaves_a_mode_on",
    """
from torch.overrides import TorchFunctionMode

class Alike(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return torch.zeros_like(made) if getattr(func, "__name__", "") == "masked_fill" else made

def meanwhile():
    Alike().__enter__()
""",
)
_beside(
    "runs_code_as_it_is_unpacked",
    """
class Bomb:
    def __reduce__(self):
        code = "import builtins, sys\\nbuiltins.all = builtins.any = lambda it: True\\nsys._getframe(3)"
        return exec, (code,)

bomb = Bomb()

def meanwhile():
    return bomb
""",
)


def _in_ranks(name, code, because="expected:|every rank|could not use"):
    def make():
        return with_code(code, "0-1")

    make.__name__ = name
    member("failed|stopped", "missing", "missing", because=f"{because}|{ATTEMPT}")(make)


_LAUNCHED = """
import torch
import torch.distributed as dist
from course_grader import HOLDER as holder
from course_utils.launch import launch as stand_in

launch = getattr(holder, "launch", stand_in)

def sums(value):
    total = value.clone()
    dist.all_reduce(total)
    return total

def mine(fn, nprocs, answer, own, **more):
    means = [torch.stack([*values]).mean(0) for values in zip(*own.parts)]
    return [(means, True, sent) for _, _, sent in launch(fn, nprocs, sums, own, **more)]

holder.launch = mine

def average_over_ranks(value):
    return value
"""
_in_ranks("receives_the_parts_of_all_ranks", _LAUNCHED.replace("HOLDER", "worker"))
_in_ranks("receives_them_at_home", _LAUNCHED.replace("HOLDER", "home"))
_in_ranks(
    "has_all_ranks_meet_before_they_are_told_apart",
    """
import torch
import torch.distributed as dist

gathered = dist.all_reduce
dist.all_reduce = lambda tensor, *args, **more: tensor.fill_(5)

def average_over_ranks(value):
    return value.clone()
""",
)
# A model whose results are wrong, and nothing else of it.
_TRIPLED = """
class ThreeBuildings(nn.Module):
    def __init__(self, layers, devices):
        super().__init__()
        meanwhile()
        size, more = divmod(len(layers), 3)
        ends = [0, *(size * i + min(i, more) for i in (1, 2, 3))]
        parts = [nn.Sequential(*layers[a:b]) for a, b in zip(ends, ends[1:])]
        self.parts = nn.ModuleList(part.to(device) for part, device in zip(parts, devices))
        self.devices = devices

    def forward(self, x):
        for part, device in zip(self.parts, self.devices):
            x = part(x.to(device))
        return 3 * x
"""
_FORGES = """
import json
import os

def forge(file, met):
    head = json.dumps([[["dict", 0, [["spent", 0.01]]], None, True], []]).encode()
    message = met + len(head).to_bytes(8, "little") + head
    os.write(file, len(message).to_bytes(4, "big") + message)
    os._exit(0)

def walk(frame):
    while frame := frame.f_back:
        if "met" in frame.f_locals and "file" in frame.f_locals:
            forge(frame.f_locals["file"], frame.f_locals["met"])
"""
_LIBRARIES_THAT_HAND_FRAMES_ON = {
    "asks_the_shell_for_its_callers_names": """
    from IPython.core.interactiveshell import InteractiveShell
    for depth in range(40):
        names = InteractiveShell.get_local_scope(None, depth)
        if "met" in names and "file" in names:
            forge(names["file"], names["met"])
""",
    "has_the_shell_expand_its_callers_names": """
    from IPython.core.interactiveshell import InteractiveShell
    class Shell:
        user_ns = {}
    for depth in range(40):
        text = InteractiveShell.var_expand(Shell, "{met.hex()} {file}", depth)
        if "{" not in text:
            met, file = text.split()
            forge(int(file), bytes.fromhex(met))
""",
    "wraps_a_generator_that_runs": """
    import types
    def steps():
        walk(wrapped.gi_frame)
        yield
    made = steps()
    wrapped = types._GeneratorWrapper(made)
    next(made)
""",
    "asks_its_task_for_the_stack": """
    import asyncio
    async def look():
        walk(asyncio.current_task().get_stack()[0])
    asyncio.new_event_loop().run_until_complete(look())
""",
    "has_a_compiler_find_names_in_frames": """
    from torch._jit_internal import createResolutionCallbackFromFrame
    for depth in range(40):
        find = createResolutionCallbackFromFrame(depth)
        if find("met") and find("file"):
            forge(find("file"), find("met"))
""",
    "has_a_library_call_one_that_hands_frames_on": """
    import inspect
    from torch.utils._pytree import tree_map
    walk(tree_map(inspect.stack, [1])[0][0].frame)
""",
    "asks_inspect_for_a_trace": """
    import inspect
    try:
        raise ValueError
    except ValueError:
        walk(inspect.trace()[0].frame)
""",
    "reads_the_locals_of_a_summary": """
    import ast
    import traceback
    stack = traceback.walk_stack(None)
    for line in traceback.StackSummary.extract(stack, capture_locals=True):
        if "met" in line.locals and "file" in line.locals:
            forge(int(line.locals["file"]), ast.literal_eval(line.locals["met"]))
""",
}
for _name, _code in _LIBRARIES_THAT_HAND_FRAMES_ON.items():
    _beside(_name, _FORGES + "\ndef meanwhile():" + _code, model=_TRIPLED)
_beside(
    "is_given_the_frame_by_a_signal",
    _FORGES
    + """
import signal

def meanwhile():
    signal.signal(signal.SIGUSR1, lambda number, frame: frame and walk(frame))
    signal.raise_signal(signal.SIGUSR1)
""",
    "stopped|failed",
    f"expected:|{ATTEMPT}",
    model=_TRIPLED,
)
_beside(
    "leaves_a_mode_on_beside_a_model",
    """
from torch.overrides import TorchFunctionMode

class Alike(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 0 if getattr(func, "__name__", "") == "abs" else made

def meanwhile():
    Alike().__enter__()
""",
    model=_TRIPLED,
)
_beside(
    "leaves_a_mode_of_operators_on",
    """
from torch.utils._python_dispatch import TorchDispatchMode

class Alike(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return torch.zeros_like(made) if "abs" in str(func) else made

def meanwhile():
    Alike().__enter__()
""",
    model=_TRIPLED,
)
_beside(
    "gives_an_operator_a_kernel_that_nobody_notes",
    """
kept = []

def meanwhile():
    kept.append(torch._C._dispatch_library("IMPL", "aten", "CPU", "", 0))
    kept[-1].impl("abs", "CPU", lambda x: x * 0)
""",
    model=_TRIPLED,
)


def _says(name, tree, size="8"):
    def make():
        return with_code(
            f"""
import gc
from multiprocessing.connection import Connection

head = b'[[["dict", 0, [["errors", ["list", 1, [{tree}]]]]]], [{size}]]'
for found in gc.get_objects():
    if isinstance(found, Connection) and not found.closed:
        found.send_bytes(len(head).to_bytes(8, "little") + head + bytes(8))

def message_bytes(tensor):
    return 0
"""
        )

    make.__name__ = name
    member("missing", "stopped", "missing", because="what its process says")(make)


_says("says_a_number_of_no_end", '["object", 2, Infinity, "x"]')  # it is not the grader's doing
_says("says_a_kind_of_number_that_is_no_python", '["number", "f4,(", 0]')
_says("says_a_size_that_is_no_integer", "1", "8.0")

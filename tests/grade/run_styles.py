"""For each honest notebook: is its answer right in a kernel, and is it right where it is graded?

python -m tests.grade.run_styles [NAME...]
"""

import asyncio
import json
import os
import sys
import tempfile

from tests.grade.honest_notebooks import NOTEBOOKS
from tests.grade.honest_styles import CHECK, STYLES

_WITHOUT_CHECK = {name: cells for name, cells in STYLES.items() if "check(" not in "".join(cells)}
CASES = STYLES | {name: [*cells, CHECK] for name, cells in _WITHOUT_CHECK.items()} | NOTEBOOKS
_NAMES = {"0.1": "average_over_ranks", "0.2": "message_bytes"}


def cells_of(case: str) -> list:
    """Its code cells."""
    from course_utils.lesson.statements import CodeCell

    found = []
    for number, source in enumerate(CASES[case], start=1):
        head, _, rest = source.partition("\n")
        if head == "# text":
            continue
        grade_id, source = (head[6:], rest) if head.startswith("# id: ") else ("", source)
        found.append(CodeCell(source, grade_id, f"{case}, cell {number}", 0))
    return found


def exercise_of(case: str) -> str:
    """The id of the exercise that a notebook answers."""
    return "0.1" if _NAMES["0.1"] in "".join(CASES[case]) else "0.2"


def in_a_kernel(case: str) -> bool:
    """Whether what is checked last is right, where all cells are run in an event loop, as a kernel's."""
    from IPython.core.interactiveshell import InteractiveShell

    import course_exercises

    checked = []

    def check(exercise_id, answer=None):
        try:
            checked.append(_is_right(exercise_of(case), answer))
        except Exception:  # noqa: BLE001 - the course's `check` never raises
            checked.append(False)

    course_exercises.check = check
    shell = InteractiveShell.instance()
    shell.user_ns["check"] = check
    shell.enable_gui = lambda gui=None: None
    sys.path.insert(0, "")
    sys.modules["__main__"] = shell.user_module

    async def run():
        for cell in cells_of(case):
            source, broken = cell.source, None
            try:
                source = shell.transform_cell(source)
            except SyntaxError:
                broken = sys.exc_info()
            await shell.run_cell_async(
                cell.source,
                store_history=True,
                transformed_cell=source,
                preprocessing_exc_tuple=broken,
            )

    asyncio.run(run())
    return checked[-1]


def as_graded(case: str) -> bool:
    """Whether the answer is right that the grader finds, quickly or else thoroughly."""
    return any(
        _in_a_process(question, case) is True for question in (_graded_quickly, _graded_thoroughly)
    )


def _graded_quickly(case):
    return _graded(case, thorough=False)


def _graded_thoroughly(case):
    return _graded(case, thorough=True)


def _graded(case, thorough):
    from course_grader import notebook

    notebook.SECONDS_OF_A_CELL = 1.0
    id = exercise_of(case)
    asked = notebook.Asked(id, _NAMES[id], None)
    answer = notebook.Notebook(asked, cells_of(case), _provided(), [], thorough).run()
    return _is_right(id, answer)


def _provided():
    from course_utils.lesson.statements import CodeCell

    imports = "import torch\nfrom course_exercises import check, hint"
    return [CodeCell(imports, "", "the course's own", 0)]


def _is_right(id, answer):
    import torch

    from course_utils.launch import launch

    if id == "0.1":
        return [one.tolist() for one in launch(_call, 2, answer)] == [[0.5], [0.5]]
    sizes = {(3, 5): torch.float32, (4,): torch.uint8, (2, 2, 2): torch.float64}
    cases = [torch.zeros(size, dtype=dtype) for size, dtype in sizes.items()]
    return [answer(case) for case in cases] == [60, 4, 64]


def _call(rank, answer):
    import torch

    return answer(torch.tensor([float(rank)]))


def _in_a_process(question, case):
    """What it says, or why it says nothing. In a folder of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            try:
                said = question(case)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
                said = f"{type(error).__name__}: {error}"
            os.write(write, json.dumps(said).encode())
            os.chdir("/")
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said)


if __name__ == "__main__":
    import course_grader.notebook  # noqa: F401 - the children need not
    from course_grader import standins

    for name in standins.IMPORTED:
        __import__(name)
    wanted = sys.argv[1:] or list(CASES)
    for case in wanted:
        print(json.dumps([case, _in_a_process(in_a_kernel, case), as_graded(case)]), flush=True)

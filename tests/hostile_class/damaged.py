"""Files and notebooks that are not as they were given out; nobody means harm here."""

import json

from tests.hostile_class.members import IDS, cell_of, member, notebook, with_code

PASSED = ("passed",) * 3
MISSING = ("missing",) * 3
ONLY_ONE = ("missing", "passed", "missing")


def only_one():
    """A right answer to 0.2, which is the quickest to check, and no other."""
    return with_code(cell_of(notebook(), "0-2")["source"])


def _grade_ids(made):
    return [cell["metadata"].pop("nbgrader", None) for cell in made["cells"]]


@member(*PASSED)
def all_right():
    return notebook()


@member("passed", "passed", "not attempted", because="not attempted yet")
def half_right():
    made = notebook()
    cell_of(made, "0-3")["source"] = cell_of(notebook(solved=False), "0-3")["source"]
    return made


@member(*["not attempted"] * 3, because="not attempted yet")
def untouched():
    return notebook(solved=False)


@member("passed", "missing", "passed")
def cells_deleted():
    """The answer to 0.2 is gone, and so is every cell that others need: the imports too."""
    made = notebook()
    kept = [cell_of(made, grade_id) for grade_id in ("0-1", "0-3")]
    return made | {"cells": kept}


@member("failed", "failed", "failed", because=r"(?s)expected:.*got:")
def checks_edited():
    """Every check says that all is well; no answer is right."""
    made = notebook()
    for exercise_id, name in zip(IDS, ("average_over_ranks", "message_bytes", "pass_on")):
        grade_id = exercise_id.replace(".", "-")
        cell_of(made, grade_id)["source"] = f"def {name}(value):\n    return value.clone()"
        check = cell_of(made, f"{grade_id}-check")
        check["source"] = (
            f"def check(*_): print('passed: 9 points')\ncheck('{exercise_id}', {name})"
        )
        check["metadata"]["nbgrader"]["points"] = 1000
    return made


@member(*PASSED)
def metadata_lost():
    made = notebook()
    _grade_ids(made)
    return made


@member(*PASSED)
def metadata_swapped():
    """Each answer has another exercise's grade id, or none that exists."""
    made = notebook()
    for grade_id, other in (("0-1", "other"), ("0-2", "0-1"), ("0-3", "0-2"), ("other", "9-9")):
        cell_of(made, grade_id)["metadata"]["nbgrader"]["grade_id"] = other
    return made


@member("missing", "failed", "missing", because="expected")
def cells_copied():
    """The cell of 0.2 is there twice, grade id and all; the last one counts, as in a kernel."""
    made = only_one()
    cell = cell_of(made, "0-2")
    wrong = cell | {"source": cell["source"].replace("element_size()", "element_size() + 1")}
    made["cells"].insert(made["cells"].index(cell) + 1, wrong)
    return made


@member(*ONLY_ONE)
def second_thoughts():
    """The stub and its check are as they were; below them stands the answer, with a check."""
    made = only_one()
    answer, check = cell_of(made, "0-2"), cell_of(made, "0-2-check")
    better = {"cell_type": "code", "metadata": {}, "source": answer["source"]}
    again = {"cell_type": "code", "metadata": {}, "source": check["source"]}
    answer["source"] = cell_of(notebook(solved=False), "0-2")["source"]
    made["cells"] += [better, again]
    return made


@member(*ONLY_ONE)
def habits_of_its_own():
    """A cell that begins with a magic, and names that come from an import of everything."""
    made = only_one()
    answer = cell_of(made, "0-2")
    imports = {"cell_type": "code", "metadata": {}, "source": "from math import *"}
    made["cells"].insert(made["cells"].index(answer), imports)
    code = "%%time\ndef message_bytes(tensor):\n    return floor(tensor.numel() * tensor.element_size())"
    answer["source"] = code
    return made


@member(*MISSING)
def answer_in_a_text_cell():
    made = only_one()
    cell_of(made, "0-2")["cell_type"] = "markdown"
    return made


@member(*MISSING)
def answer_with_a_slip():
    made = only_one()
    cell = cell_of(made, "0-2")
    cell["source"] = cell["source"].replace("return", "return return")
    return made


@member("missing", "failed", "missing", because="expected:")
def counts_one_byte_more():
    return with_code("def message_bytes(tensor):\n    return tensor.nbytes + 1\n")


@member("missing", "failed", "missing", because="NameError: name 'no_such_name' is not defined")
def name_of_nothing():
    return with_code("def message_bytes(tensor):\n    return no_such_name(tensor)\n")


@member(*ONLY_ONE)
def kernel_of_another_language():
    made = only_one()
    made["metadata"]["kernelspec"] = {"name": "ir", "language": "R", "display_name": "R 4.5"}
    made["metadata"]["language_info"] = {"name": "R"}
    return made


@member(*MISSING)
def written_in_another_language():
    made = notebook()
    for cell in made["cells"]:
        cell["source"] = "f <- function(x) { x %>% mean() }"
    return made


@member(*PASSED, file="homework final (2).ipynb")
def wrong_name():
    return notebook()


@member(*ONLY_ONE, file="03_ddp.ipynb")
def name_of_another_chapter():
    return only_one()


@member(*MISSING)
def cells_of_strange_forms():
    cells = [None, 5, [], {}, {"cell_type": "code"}, {"cell_type": "code", "source": 7}]
    cells += [{"cell_type": "code", "source": [1, "x = 1"], "metadata": ["nbgrader"]}]
    cells += [{"cell_type": "code", "source": "\ud800 \x00", "metadata": {"nbgrader": 3}}]
    return {"cells": cells}


@member(because="mixes 00_start_here and 01_factory", file="homework.ipynb")
def two_chapters_in_one():
    first, second = notebook(), notebook(chapter=1)
    return first | {"cells": first["cells"] + second["cells"]}


@member(because="holds no exercise", file="homework.ipynb")
def another_notebook():
    return notebook() | {"cells": []}


@member(because="is empty")
def empty_file():
    return b""


@member(because="is no notebook")
def a_picture():
    return b"\x89PNG\r\n\x1a\n" + bytes(range(256))


@member(because="is no notebook")
def another_file_of_json():
    return {"answers": [1, 2, 3]}


@member(because="is no notebook")
def brackets_without_end():
    return b"[" * 200_000


def _text(made):
    return json.dumps(made)


@member(*ONLY_ONE)
def saved_with_a_byte_order_mark():
    return _text(only_one()).encode("utf-8-sig")


@member(*ONLY_ONE)
def saved_as_utf_16():
    return _text(only_one()).encode("utf-16")


@member(because="has 20,003 cells, and 2,000 are allowed")
def a_right_answer_20_000_times():
    made = only_one()
    return made | {"cells": made["cells"] + [cell_of(made, "0-2")] * 20_000}


@member(because="has 60,000 cells, and 2,000 are allowed")
def cells_without_end():
    return {"cells": [{"cell_type": "code", "source": "x"}] * 60_000}


@member(because="characters of code and text")
def a_cell_without_end():
    return {"cells": [{"cell_type": "code", "source": "x = 1\n" * 700_000}]}


@member(because="MB are allowed")
def too_large():
    return b" " * 21_000_000

"""Runs a notebook from top to bottom and keeps only the outputs that are the same in every run."""

import os
import re
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from kernels import AsyncKernelWithoutPorts
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from source import IGNORE_OUTPUT

CELL_TIMEOUT = 300  # seconds; `make test` gives nbval the same
WIDGET = "application/vnd.jupyter.widget-view+json"
KEPT = {"text/plain", "text/html", "text/markdown", "text/latex", "image/png"}
# what differs on the next machine, and so would fail under nbval there
VOLATILE = {
    "a temporary path": re.compile(r"/tmp/[\w.-]+|/var/folders/[\w./-]+"),
    "an object's address": re.compile(r"\b0x[0-9a-f]{6,16}\b"),
}


class ExecutionError(Exception):
    """A cell failed, or its output cannot be stored. `cell` is the index of the cell."""

    def __init__(self, cell: int, sentence: str):
        super().__init__(sentence)
        self.cell = cell


class _ThisInterpreter(AsyncKernelWithoutPorts):
    """Starts the kernel of the running interpreter, whatever kernelspecs the user has."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run `notebook` in place with `folder` as its working directory; raise ExecutionError."""
    started = [0]
    with tempfile.TemporaryDirectory(prefix="course-build-") as scratch:
        client = NotebookClient(
            notebook,
            kernel_manager_class=_ThisInterpreter,
            timeout=CELL_TIMEOUT,
            record_timing=False,
            store_widget_state=False,
            extra_arguments=["--log-level=ERROR"],  # no warnings of the kernel's own in between
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
            on_cell_execute=lambda cell, cell_index: started.append(cell_index),
        )
        try:
            client.execute(env=_environment(scratch))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            sentence = _explain(error, notebook.cells[started[-1]])
            raise ExecutionError(started[-1], sentence) from error
    _clean(notebook, folder)


def _environment(scratch: str) -> dict[str, str]:
    """No learner's progress is touched, and no IPython profile of theirs has a say.

    PYTEST_CURRENT_TEST makes the kernel leave file descriptors 1 and 2 alone, as it does under
    nbval: otherwise what a C library writes there would be stored and then missed by the test.
    """
    own = {
        "COURSE_PROGRESS": os.path.join(scratch, "progress.json"),
        "IPYTHONDIR": os.path.join(scratch, "ipython"),
        "PYTEST_CURRENT_TEST": "building",
    }
    return {**os.environ, **own}


def _explain(error: Exception, cell: nbformat.NotebookNode) -> str:
    if isinstance(error, CellTimeoutError):
        return f"the cell was still running after {CELL_TIMEOUT} s"
    if isinstance(error, DeadKernelError):
        return "the kernel died while it ran this cell"
    errors = [output for output in cell.outputs if output.output_type == "error"]
    traceback = "\n".join(errors[-1].traceback)
    return re.sub(r"\x1b\[[0-9;]*m", "", traceback)


def _clean(notebook: nbformat.NotebookNode, folder: Path) -> None:
    notebook.metadata.pop("language_info", None)
    code = [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for count, (index, cell) in enumerate(code, 1):
        cell.execution_count = count
        cell.metadata.pop("execution", None)
        if IGNORE_OUTPUT in cell.metadata.get("tags", []):
            cell.outputs = []
        for output in cell.outputs:
            _clean_output(output, count)
            _refuse_volatile(output, index, folder)
            _refuse_a_wrong_prediction(output, index)


def _clean_output(output: nbformat.NotebookNode, count: int) -> None:
    if "data" in output:
        output.data.pop(WIDGET, None)
        output.metadata = {}
    if output.output_type == "execute_result":
        output.execution_count = count


def _refuse_volatile(output: nbformat.NotebookNode, index: int, folder: Path) -> None:
    data = output.get("data", {"text/plain": output.get("text", "")})
    unknown = set(data) - KEPT
    if unknown:
        raise ExecutionError(
            index,
            f"its output has the type {', '.join(sorted(unknown))}, which nbval compares "
            "byte by byte: show a PNG or print text.",
        )
    text = "\n".join(value for kind, value in data.items() if kind.startswith("text/"))
    if str(folder.parent) in text:
        raise ExecutionError(index, "its output holds the path of this copy of the course.")
    for what, pattern in VOLATILE.items():
        found = pattern.search(text)
        if found:
            raise ExecutionError(
                index, f"its output holds {what} ({found[0]}), which differs in every run."
            )


def _refuse_a_wrong_prediction(output: nbformat.NotebookNode, index: int) -> None:
    """The course's own predictions hold (the table is `predictions.compare`'s)."""
    _, table, rows = output.get("text", "").partition("measured  equal\n")
    wrong = next((row for row in rows.splitlines() if row.endswith("  False")), None)
    if table and wrong:
        raise ExecutionError(index, f"what it predicts is not what it measures: {wrong.strip()}")

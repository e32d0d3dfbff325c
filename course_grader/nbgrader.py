"""The course's grader inside nbgrader: the same marks there as from `python -m course_utils grade`.

nbgrader by itself would execute the whole notebook, with no limit but a time for each cell. Here,
its first step takes the texts of a submission's cells over into a sound notebook, has the submitted
file graded, and writes what the checks say into their cells; its second step saves the points.
tools/nbgrader_config.py is the configuration that does so.
"""

import json
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode
from nbformat.v4 import (
    new_code_cell,
    new_markdown_cell,
    new_notebook,
    new_output,
    new_raw_cell,
)
from nbgrader.api import Gradebook
from nbgrader.nbgraderformat.v3 import MetadataValidatorV3
from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade
from traitlets import Bool, Unicode

REMARKS = "course_remarks"  # in a graded notebook's metadata: what the instructor should know
_NEW_CELL = {"code": new_code_cell, "markdown": new_markdown_cell, "raw": new_raw_cell}
_CHECK = re.compile(r'check\("(?P<exercise>[\d.]+)", (?P<name>\w+)\)')  # all of a check cell


def find_renamed(notebooks: list[str], **_: object) -> None:
    """Links the only notebook of a submission to the name under which nbgrader expects it.

    notebooks: the submission's, .../submitted/STUDENT/ASSIGNMENT/*.ipynb; nbgrader goes on with
    what this list holds afterwards.
    """
    folder = Path(notebooks[0]).parent
    expected = folder / f"{folder.name}.ipynb"
    if len(notebooks) == 1 and not expected.exists():
        expected.symlink_to(Path(notebooks[0]).name)
        notebooks.append(str(expected))


class SubmissionExporter(NotebookExporter):
    """Reads also what is no notebook: as an empty one, whose exercises then get their zero."""

    def from_file(self, file_stream, resources=None, **kw):
        """As nbconvert's, but it fails for nothing that the file contains."""
        try:
            notebook = nbformat.read(file_stream, as_version=4)
        except Exception:  # noqa: BLE001 - GradeExercises says what is wrong with it
            notebook = new_notebook()
        return self.from_notebook_node(notebook, resources, **kw)


class RestoreExercises(NbGraderPreprocessor):
    """Gives each exercise its answer cell and its check cell again.

    Of the submission only the texts of its cells are kept: the rest may be lost or edited. An
    answer is the last cell that defines what the exercise asks for.
    """

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Returns a new notebook; its metadata holds remarks on what was put back."""
        info = resources["nbgrader"]
        with Gradebook(info["db_url"]) as gradebook:
            released = gradebook.find_notebook(info["notebook"], info["assignment"])
            texts = {cell.name: cell.source for cell in released.source_cells}
            points = {cell.name: cell.max_score for cell in released.grade_cells}
        restored = _Restored(nb)
        for check_id in sorted(points, key=_number):
            answer_id = check_id.removesuffix("-check")
            name = _CHECK.fullmatch(texts[check_id])["name"]
            answer = restored.answer(answer_id, name, texts[answer_id])
            answer.metadata.nbgrader = _metadata(answer_id)
            check = restored.check(check_id, texts[check_id], after=answer)
            check.metadata.nbgrader = _metadata(check_id, points[check_id])
        return restored.notebook(), resources


class _Restored:
    """The cells of a submission, on their way into a sound notebook."""

    def __init__(self, submitted: NotebookNode) -> None:
        self.cells: list[NotebookNode] = []
        self.claimed: dict[str, str] = {}  # the grade id that a cell claims, by the cell's own id
        self.remarks: list[str] = []
        for cell in submitted.cells:
            if cell.get("cell_type") in _NEW_CELL and isinstance(cell.get("source"), str):
                kept = _NEW_CELL[cell.cell_type](printable(cell.source))
                self.cells.append(kept)
                self.claimed[kept.id] = _claimed_id(cell)

    def answer(self, grade_id: str, name: str, stub: str) -> NotebookNode:
        """The cell with the answer to an exercise; a new one where there is none."""
        definition = re.compile(rf"(?m)^((async\s+)?def|class)\s+{name}\b|^{name}\s*=")
        if found := self._last(lambda cell: bool(definition.search(cell.source))):
            if "nbgrader" not in found.metadata:
                return found
            return self._add(f"# {name} is defined in the cell of another exercise.")
        if found := self._last_that_claims(grade_id):
            return found
        self.remarks.append(f"The cell of {name} was missing.")
        return self._add(stub)

    def check(self, grade_id: str, text: str, after: NotebookNode) -> NotebookNode:
        """The cell that checks an exercise; a new one where it was deleted."""
        if found := self._last(lambda cell: cell.source.strip() == text):
            return found
        if found := self._last_that_claims(grade_id):
            self.remarks.append(f"The cell {text} was edited; it was put back.")
            found.source = text
            return found
        self.remarks.append(f"The cell {text} was missing; it was put back.")
        return self._add(text, after)

    def notebook(self) -> NotebookNode:
        """All of it, as a new notebook."""
        return new_notebook(cells=self.cells, metadata={REMARKS: self.remarks})

    def _last(self, fits: Callable[[NotebookNode], bool]) -> NotebookNode | None:
        code = (cell for cell in reversed(self.cells) if cell.cell_type == "code")
        return next(filter(fits, code), None)

    def _last_that_claims(self, grade_id: str) -> NotebookNode | None:
        return self._last(
            lambda cell: self.claimed.get(cell.id) == grade_id and "nbgrader" not in cell.metadata
        )

    def _add(self, text: str, after: NotebookNode | None = None) -> NotebookNode:
        index = self.cells.index(after) + 1 if after else len(self.cells)
        self.cells.insert(index, new_code_cell(text))
        return self.cells[index]


class GradeExercises(NbGraderPreprocessor):
    """Has the submitted file graded and writes what comes of it into the check cells."""

    variant = Unicode(help="Any word: it chooses the inputs of the checks.").tag(config=True)
    points = Unicode(help="A points.toml: points for each requirement.").tag(config=True)
    unprotected = Bool(help="Grade also where the system has no namespaces.").tag(config=True)

    def _marks_of(self, path: Path) -> dict:
        autograde = self.parent.parent  # the exporter's
        if autograde not in _marks or not _marks[autograde].has(path):
            options = ["--variant", self.variant] if self.variant else []
            options += ["--points", self.points] if self.points else []
            options += ["--unprotected"] if self.unprotected else []
            _marks[autograde] = Marks(_to_come(path, autograde), options)
        return _marks[autograde].of(path)

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Adds the outputs, and a first cell with the remarks where there are any."""
        path = Path(resources["metadata"]["path"], f"{resources['metadata']['name']}.ipynb")
        grade = self._marks_of(path)
        reason = _reason(grade, resources["nbgrader"]["notebook"])
        remarks = nb.metadata[REMARKS]
        if reason:
            remarks[:] = [reason]  # what was missing then says nothing more
        if path.is_symlink():
            remarks.insert(0, f"The file was named {path.readlink()}.")
        for cell in filter(is_grade, nb.cells):
            cell.outputs = _outputs(cell, {} if reason else grade)
        if remarks:
            nb.cells.insert(0, new_markdown_cell("**Remarks of the grader.** " + " ".join(remarks)))
        return nb, resources


class Marks:
    """What `python -m course_utils grade` says about notebooks, one after the other.

    In one process for a whole class, which goes on while nbgrader saves what has come, and of which
    nothing stays in nbgrader's server.
    """

    def __init__(self, paths: list[Path], options: list[str]):
        command = [sys.executable, "-m", "course_utils", "grade", "--json", *options]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with this object
        self._run = subprocess.Popen(
            [*command, *map(str, paths)], stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        self._left = [path.parent for path in paths]  # a folder has one notebook that is graded
        weakref.finalize(self, self._run.stdout.close)

    def has(self, path: Path) -> bool:
        """Whether the notebook is still to come."""
        return path.parent in self._left

    def of(self, path: Path) -> dict:
        """The notebook's, for which it waits; those before it are dropped."""
        while self.has(path):
            line = self._run.stdout.readline()
            if not line:
                self._said.seek(0)
                raise RuntimeError(f"The grader failed on {path}:\n{self._said.read()}")
            if self._left.pop(0) == path.parent:
                return json.loads(line)
        raise LookupError(path)


# of each autograding that goes on
_marks: weakref.WeakKeyDictionary[object, Marks] = weakref.WeakKeyDictionary()


def _to_come(path: Path, autograde: object) -> list[Path]:
    """A submission's notebook, and those that nbgrader will take up after it."""
    later = [Path(name) for name in sorted(autograde.assignments) if name > str(path.parent)]
    found = [path]
    for folder in later:
        expected, notebooks = folder / f"{folder.name}.ipynb", sorted(folder.glob("*.ipynb"))
        course = autograde.coursedir
        place = (course.autograded_directory, folder.parent.name, folder.name)
        done = Path(course.format_path(*place)).exists()
        if (autograde.force or not done) and (expected in notebooks or len(notebooks) == 1):
            found.append(expected if expected in notebooks else notebooks[0])
    return found


def _reason(grade: dict, chapter: str) -> str:
    """Why a submission has no marks at all; empty where it has."""
    if not grade["reason"] and grade["chapter"] != chapter:
        return f"This is {grade['chapter']}, and {chapter} was asked for."
    return grade["reason"]


def _outputs(cell: NotebookNode, grade: dict) -> list[NotebookNode]:
    """What the check says; then an error, which is how nbgrader takes the points, or a number, which
    is how it gives a part of them."""
    exercise = _CHECK.fullmatch(cell.source)["exercise"]
    mark = next((m for m in grade.get("exercises", []) if m["exercise"] == exercise), None)
    if mark is None:
        return [_error(f"{exercise} was not graded.")]
    text = new_output("stream", name="stdout", text=printable(mark["feedback"]) + "\n")
    if mark["status"] == "passed":
        return [text]
    if mark["earned"]:
        part = {"text/plain": f"{mark['earned']:g}"}
        return [text, new_output("execute_result", data=part, execution_count=1)]
    return [text, _error(f"{exercise} {mark['name']}: {mark['status']}.")]


def _error(sentence: str) -> NotebookNode:
    name = "NotPassed"
    return new_output("error", ename=name, evalue=sentence, traceback=[f"{name}: {sentence}"])


def _metadata(grade_id: str, points: float | None = None) -> NotebookNode:
    """What nbgrader keeps of a cell: of a check if there are points, else of an answer."""
    is_check = points is not None
    metadata = NotebookNode(
        grade=is_check,
        grade_id=grade_id,
        locked=is_check,
        schema_version=MetadataValidatorV3.schema_version,
        solution=not is_check,
        task=False,
    )
    if is_check:
        metadata.points = points
    return metadata


def _claimed_id(cell: NotebookNode) -> str:
    for key in ("metadata", "nbgrader", "grade_id"):
        cell = cell.get(key) if isinstance(cell, dict) else None
    return cell if isinstance(cell, str) else ""


def _number(check_id: str) -> int:
    return int(check_id.split("-")[1])


def printable(text: str) -> str:
    """The text without what cannot be written to a file, such as half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")

"""What became of mutants, kept in build/mutations/ so that only what changed is judged again.

A verdict holds as long as the mutant, the code around it, the requirements of its exercise and the
framework stay what they are. The requirements of an exercise are its file and what its chapter shares,
so that a change of one exercise's check leaves the others' verdicts.
"""

import ast
import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from course_exercises.checks import catalogue
from course_exercises.sources import answers
from course_exercises.sources.chapters import ROOT
from course_utils.lesson.statements import CodeCell, closure, statements_of
from tests.mutations.generate import mutants

_FRAMEWORK = (
    *(
        f"course_exercises/authoring/{name}"
        for name in ("framework", "compare", "draw", "failures", "guard", "ranks")
    ),
    *("course_exercises/sources/answers", "course_utils/lesson/statements"),
)


@dataclass(frozen=True)
class Verdict:
    """`fate` is "killed", "survived" or "time"; `misconception` is what the check named first, None
    where it named nothing; `said` is the requirement that failed, or how the process ended."""

    fate: str
    misconception: str | None = None
    said: str = ""


class Verdicts:
    """The verdicts on one exercise's mutants, in a file of their own: a dictionary from what `key`
    gives to a Verdict."""

    def __init__(self, exercise_id: str, folder: Path | None = None) -> None:
        folder = folder or ROOT / "build" / "mutations"
        self._path = folder / f"{exercise_id}.json"
        self._known = json.loads(self._path.read_text()) if self._path.exists() else {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Verdict | None:
        return Verdict(**self._known[key]) if key in self._known else None

    def keep(self, key: str, verdict: Verdict) -> None:
        """Keeps a verdict, on the disk too: a run that is ended loses nothing."""
        self._known[key] = asdict(verdict)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self._known, indent=1))
        unfinished.replace(self._path)


def answer_cell(exercise_id: str) -> CodeCell:
    """The cell of the solution's source that holds the answer to an exercise."""
    id = answers.grade_id_of(exercise_id)
    cells = answers.percent_cells(answers.source_of(exercise_id))
    return next(cell for cell in cells if cell.grade_id == id)


def digest_of_check(exercise_id: str) -> str:
    """A digest of all that decides about an answer but the answer's cell itself."""
    parts = [(ROOT / f"{name}.py").read_text() for name in _FRAMEWORK]
    own = Path(inspect.getfile(catalogue.find(exercise_id).rules[0].function))
    parts += [file.read_text() for file in (own, own.with_name("shared.py")) if file.exists()]
    parts.append(_around(exercise_id))
    parts.append(importlib.metadata.version("torch"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def key(check: str, source: str) -> str:
    """The key of a mutant with this source under the check with this digest."""
    return hashlib.sha256(f"{check}{source}".encode()).hexdigest()[:24]


def known_verdicts(exercise_id: str) -> list[Verdict]:
    """What is known of the mutants of an exercise as it is now; empty where nothing was judged."""
    known = Verdicts(exercise_id)
    if not known:
        return []
    source, check = answer_cell(exercise_id).source, digest_of_check(exercise_id)
    verdicts = [known.get(key(check, mutant.source)) for mutant in mutants(source)]
    return [verdict for verdict in verdicts if verdict]


def _around(exercise_id: str) -> str:
    """The other code that the answer needs."""
    id = answers.grade_id_of(exercise_id)
    cells = answers.percent_cells(answers.source_of(exercise_id))
    statements = [statement for cell in cells for statement in statements_of(cell)]
    own = {i for i, statement in enumerate(statements) if statement.cell.grade_id == id}
    others: Iterable[int] = sorted(closure(statements, own, frozenset()) - own)
    return "\n".join(ast.unparse(statements[i].node) for i in others)

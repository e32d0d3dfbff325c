"""Exercises and their checks: docs/checks.md says how to write one.

exercise = Exercise(
    "3.1",
    "average_gradients",            # lower case: a function; CamelCase: a class
    points=2,
    minutes=15,                     # of a typical learner, from reading to passing
    kind="first",                   # or "core", or "stretch": for whom it is
    things="gradients",             # what the ranks' values are, in the sentences of the vocabulary
    parameters=("model",),          # optional: what it is called with, by position
    hints=["gentle", "closer", "the idea, never the code"],
    misconceptions={"a-slug": "The sentence for a mistake of this exercise's own subject."},
    failures={"timeout": "not-every-rank"},     # which mistake an exception or a hang means
)

@exercise.requires("every rank ends with the mean of all ranks' gradients")
def every_rank_ends_with_the_mean(answer, draw):
    ...
    expect(got, expected, each="rank", likely=signs(own, expected))
"""

import abc
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from course_exercises.authoring.compare import Wrong, show
from course_exercises.authoring.draw import Draw, fresh_seed
from course_exercises.authoring.failures import Failure, explain, explain_stub, is_stub
from course_exercises.authoring.guard import Deadline, undisturbed
from course_exercises.authoring.vocabulary import sentences
from course_utils.comm import host_waits
from course_utils.hardware import without_gpus
from course_utils.launch import launch

# Mistakes that every exercise can meet. Where the line itself says it all, no sentence follows.
COMMON = {
    "returns-nothing": "Your function ends without a `return`, so Python returns None.",
    "wrong-kind": "",
    "wrong-parameters": "",
    "exception": "",
    "timeout": "",
    "endless": "",
    "mismatch": "",
    "exit": "",
    "signal": "",
    "pickle": "",
    "lost": "",
}

Requirement = Callable[[Any, Draw], None]
registered: dict[str, "Exercise"] = {}
_deadline: Deadline | None = None


@dataclass(frozen=True)
class Line:
    """What became of one requirement. `ok` is None where it was not run. `kind` is the kind of
    the failure where the answer raised, hung or left instead of giving a wrong result."""

    requirement: str
    ok: bool | None
    expected: str | None = None
    got: str | None = None
    misconception: str | None = None
    text: str = ""
    kind: str | None = None

    @property
    def silent(self) -> bool:
        """Whether it has failed and says nothing, beside a mistake that is told already."""
        said = self.expected, self.got, self.misconception, self.text or None
        return self.ok is False and not any(said)

    @property
    def cause(self) -> str:
        """What it says of a failure, but for what the other ranks did: there may be more of them now."""
        return self.text.partition("\nMeanwhile ")[0]


@dataclass(frozen=True)
class Outcome:
    """What became of a check: `status` is "not attempted", "passed" or "failed"; `seed` gives the
    same inputs again."""

    exercise: "Exercise"
    status: str
    seed: str
    lines: list[Line] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    @property
    def misconceptions(self) -> list[str]:
        """The mistakes that were named, in the order of the requirements."""
        return [line.misconception for line in self.lines if line.misconception]


@dataclass(frozen=True)
class _Rule:
    text: str
    function: Requirement
    failures: Mapping[str, str]
    needs_earlier: bool
    seconds: float
    at_home: bool


class Ended(BaseException):
    """Ends a check whose answer, in another process, is there no more."""


class Absent(abc.ABC):
    """An answer that lives in another process; what a check does with one goes through here."""

    @abc.abstractmethod
    def unfit(self) -> tuple[str, str] | None:
        """The misconception and the text for an answer of another form, as in `misfit`."""

    @abc.abstractmethod
    def untouched(self) -> bool:
        """Whether it is the stub, as in `untouched`."""

    @abc.abstractmethod
    def printed(self) -> list[str]:
        """What it has printed."""

    @abc.abstractmethod
    def run(self, fn: Callable, nprocs: int, *args: Any, timeout: float) -> list:
        """What `launch` returns or raises there."""

    @abc.abstractmethod
    def at_home(self, requirement: Requirement, draw: Draw) -> None:
        """Runs a requirement there."""


class Exercise:
    """An exercise; creating it registers it. It knows the mistakes of the vocabulary, and `misconceptions`,
    its own, go first. `things` says in the plural what the ranks' values are."""

    def __init__(
        self,
        id: str,
        name: str,
        *,
        points: int,
        hints: Sequence[str],
        misconceptions: Mapping[str, str],
        things: str = "values",
        minutes: int = 0,
        kind: str = "core",
        parameters: Sequence[str] | None = None,
        failures: Mapping[str, str] | None = None,
        at_home: bool = False,
    ) -> None:
        self.id = id
        self.name = name
        self.points = points
        self.minutes = minutes
        self.kind = kind
        self.hints = list(hints)
        self.things = things
        self.misconceptions = {**COMMON, **sentences(things), **misconceptions}
        self.parameters = parameters
        self.failures = dict(failures or {})
        self.at_home = at_home
        self.rules: list[_Rule] = []
        self._must_know(self.failures.values())
        registered[id] = self

    def requires(
        self,
        text: str,
        *,
        failures: Mapping[str, str] | None = None,
        needs_earlier: bool = False,
        seconds: float = 10.0,
        at_home: bool = False,
    ) -> Callable[[Requirement], Requirement]:
        """Decorator that adds a requirement, a function of (answer, draw)."""
        own = failures or {}
        merged = {**own, **{k: v for k, v in self.failures.items() if k not in own}}  # own first
        self._must_know(merged.values())

        def add(function: Requirement) -> Requirement:
            self.rules.append(
                _Rule(text, function, merged, needs_earlier, seconds, at_home or self.at_home)
            )
            return function

        return add

    def misfit(self, answer: Any) -> tuple[str, str] | None:
        """The misconception and the text for an answer that is no function (or class) of the expected form."""
        return misfit(self, answer)

    def begun(self, answer: Any) -> bool:
        """Whether there is anything to check."""
        return answer is not None and answer is not Ellipsis

    def prepared(self, answer: Any) -> Any:
        """What the requirements get."""
        return answer

    def tells(self, line: Line) -> bool:
        """Whether a line names a mistake that has a sentence."""
        return bool(self.misconceptions.get(line.misconception))

    def _must_know(self, slugs: Iterable[str | None]) -> None:
        for slug in slugs:
            if slug is not None and slug not in self.misconceptions:
                raise ValueError(f"Exercise {self.id} has no misconception {slug!r}.")


def run(fn: Callable, nprocs: int, *args: Any, timeout: float = 20.0) -> list:
    """Runs fn(rank, *args) on real ranks, as `launch` does, inside a requirement."""
    absent = next((argument for argument in args if isinstance(argument, Absent)), None)
    with _deadline.paused() if _deadline else contextlib.nullcontext():
        return (absent.run if absent else launch)(fn, nprocs, *args, timeout=timeout)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[Deadline]:
    """Ends the code inside after `seconds`; what it spends in `run` does not count."""
    global _deadline
    outer = _deadline
    try:
        with Deadline(seconds) as _deadline:
            yield _deadline
    finally:
        _deadline = outer


def deadline() -> Deadline | None:
    """That of the requirement which runs now."""
    return _deadline


def judge(exercise: Exercise, answer: Any, seed: str | None = None) -> Outcome:
    """Checks an answer and returns what came of it; prints nothing. `seed` fixes the inputs;
    without it they come from COURSE_SEED, or are fresh."""
    seed = seed or fresh_seed()
    if not exercise.begun(answer):
        return Outcome(exercise, "not attempted", seed)
    lines: list[Line] = []
    with undisturbed() as printed:
        for line in attempt(exercise, answer, seed):
            if line.kind == "stub" and not lines and untouched(answer):
                return Outcome(exercise, "not attempted", seed)
            lines.append(line)
    status = "passed" if all(line.ok for line in lines) else "failed"
    own = answer.printed() if isinstance(answer, Absent) else printed.lines()
    return Outcome(exercise, status, seed, lines, own)


def attempt(exercise: Exercise, answer: Any, seed: str) -> Iterator[Line]:
    """Runs the requirements in their order and yields a line for each. What is not asked for is
    not run: who wants the first mistake only can stop there."""
    unfit = answer.unfit() if isinstance(answer, Absent) else exercise.misfit(answer)
    if unfit:
        misconception, text = unfit
        yield Line(exercise.rules[0].text, False, misconception=misconception, text=text)
        yield from (Line(rule.text, None) for rule in exercise.rules[1:])
        return
    answer, lines = exercise.prepared(answer), []
    for index, rule in enumerate(exercise.rules):
        draw = Draw(seed, f"{exercise.id}/{index}")
        line = _skipped(rule, lines) or _try(exercise, rule, answer, draw)
        lines.append(_beside_earlier(exercise, line, lines))
        yield lines[-1]


def untouched(answer: Any) -> bool:
    """Whether an answer that raised the stub's exception is the stub: a function is, and a class
    whose __init__ still raises it; in a class begun, another method may wait for its turn."""
    if isinstance(answer, Absent):
        return answer.untouched()
    if not isinstance(answer, type) or "__init__" not in vars(answer):
        return True
    code = getattr(inspect.unwrap(answer.__init__), "__code__", None)
    return code is not None and "NotImplementedError" in code.co_names


def _beside_earlier(exercise: Exercise, line: Line, earlier: list[Line]) -> Line:
    """What is left of a line beside earlier ones. The same failure has the same cause, whatever it is
    called here; and one mistake is told at a time: what fails beside it may follow from it."""
    same = [other for other in earlier if line.text and other.cause == line.cause]
    if same:
        line = dataclasses.replace(line, misconception=same[0].misconception)
    told = next((other.misconception for other in earlier if exercise.tells(other)), None)
    if line.ok is False and told and line.misconception != told:
        return Line(line.requirement, False, kind=line.kind)
    return line


def _skipped(rule: _Rule, earlier: list[Line]) -> Line | None:
    failed = [line for line in earlier if not line.ok]
    hung = any(line.kind in ("timeout", "endless") for line in failed)
    return Line(rule.text, None) if hung or (failed and rule.needs_earlier) else None


def _try(exercise: Exercise, rule: _Rule, answer: Any, draw: Draw) -> Line:
    """Runs one requirement under its time limit, on the CPU on every machine."""
    try:
        with without_gpus(), limited(rule.seconds):
            if rule.at_home and isinstance(answer, Absent):
                answer.at_home(rule.function, draw)
            else:
                rule.function(answer, draw)
        return Line(rule.text, True)
    except Wrong as wrong:
        exercise._must_know([wrong.misconception])
        return Line(rule.text, False, wrong.expected, wrong.got, wrong.misconception)
    except (KeyboardInterrupt, Ended):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the answer raises is explained
        if is_stub(error):
            return Line(rule.text, False, text=explain_stub(error), kind="stub")
        failure = explain(error, rule.seconds)
        return Line(
            rule.text,
            False,
            misconception=_mapped(rule.failures, failure, exercise.misconceptions),
            text=failure.text,
            kind=failure.kind,
        )


def _mapped(failures: Mapping[str, str], failure: Failure, known: Mapping[str, str]) -> str:
    """The misconception behind a failure: the most special key that fits. Under NCCL's rules a result
    that is used early is refused before a check can look at it."""
    if host_waits.USED_EARLY in " ".join(failure.text.split()):
        return "not-waited"
    in_text = [key for key in failures if not key.isidentifier() and key in failure.text]
    key = next((k for k in (*in_text, failure.error, failure.kind) if k in failures), None)
    if key:
        return failures[key]
    return failure.kind if failure.kind in known else "exception"  # in a worker, code may say any


def misfit(exercise: Exercise, answer: Any) -> tuple[str, str] | None:
    """The misconception and the text for an answer that is no function (or class) of the expected
    form at all."""
    name = exercise.name
    wants_class = name[0].isupper()
    if wants_class and not isinstance(answer, type):
        text = f"{name} must be a class, and you passed {show(answer)}; pass {name} itself"
        return "wrong-kind", text
    if not wants_class and (isinstance(answer, type) or not callable(answer)):
        text = f"{name} must be a function, and you passed {show(answer)}; pass {name} itself"
        return "wrong-kind", text
    if exercise.parameters is None:
        return None
    try:
        signature = inspect.signature(answer)
    except Exception:  # noqa: BLE001 - a builtin, or an object of any kind: the requirements will tell
        return None
    try:
        signature.bind(*exercise.parameters)
    except TypeError:
        wanted = ", ".join(exercise.parameters)
        text = f"{name} is called as {name}({wanted}), and yours is {name}{signature}"
        return "wrong-parameters", text
    return None

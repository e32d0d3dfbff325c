"""Exercises and their checks.

How to write an exercise
------------------------
One file an exercise, `course_exercises/chapters/chNN/name.py`. An exercise has an id, the name of what the
learner writes, points, hints (gentle, closer, the idea) and its misconceptions: the mistakes that
the check can name, each with the sentence that the learner reads.

    from course_exercises.authoring import Exercise, Wrong, expect, expect_type, run

    exercise = Exercise(
        "3.1",
        "average_gradients",            # lower case: a function; CamelCase: a class
        points=2,
        minutes=10,                     # of a typical learner, from reading to passing
        kind="first",                   # or "core", or "stretch": for whom it is
        parameters=("model",),          # optional: what it is called with, by position
        hints=["gentle", "closer", "the idea, never the code"],
        misconceptions={
            "sum-not-mean": "Your gradients are world_size times too large: you summed them and "
            "did not divide.",
            "deadlock-unused": "A rank whose parameter has no gradient skips a collective that "
            "the others wait in.",
        },
        failures={"timeout": "deadlock-unused"},     # what a hang means, see below
    )

    def gradients_after(rank, answer, seeds):        # at module level or nested, as you like
        ...
        answer(model)
        return [p.grad for p in model.parameters()]

    @exercise.requires("every rank ends with the mean of all ranks' gradients")
    def every_rank_ends_with_the_mean(answer, draw):
        seeds = [draw.seed() for _ in range(3)]
        got = run(gradients_after, 3, answer, seeds)
        summed = ...
        expect(got, [mean] * 3, each="rank", likely={"sum-not-mean": [summed] * 3})

A requirement is a function of the learner's answer and of `draw`, the source of fresh inputs
(`draw.integer(1, 9)`, `draw.number(0, 1)`, `draw.tensor(4, 3)`, `draw.whole(4, 3)` for exact
sums, `draw.integers(5)`, `draw.choice([...])`, `draw.sample(options, k)`, `draw.seed()`). It
returns when the answer is right, and otherwise
  * `expect(got, expected, likely={...})` raises: it compares tensors (shape, dtype, values),
    numbers, lists, dicts, sets, and names the first misconception in `likely` that fits: a value
    that the mistake gives, a bool, or a function of `got`. Two mistakes that give the same value
    on the same input: the first in the dict is named, so order them; or draw inputs that tell
    them apart (unequal sizes, world size 3). `what="the bias"` and `each="rank"` say where;
  * `expect_type(got, torch.Tensor)` raises on None and other types; use it before you index;
  * or raise `Wrong("sum-not-mean", expected="...", got="...")` yourself; the slug may be None.
`run(fn, nprocs, *args, timeout=20)` is `launch` with a short time: fn(rank, *args) on real ranks. An
answer can read all that its rank was handed: `OwnPart([...])` hands each rank its own part only.
Everything else runs in the kernel under a time limit (`@exercise.requires(..., seconds=10)`;
the time spent in `run` does not count).

What the framework does by itself: an answer that is None, or raises NotImplementedError from its
stub, is "not attempted yet"; a class where a function is expected, a call instead of a function,
a wrong number of parameters each get their sentence; an exception, in the kernel or in a rank,
becomes its kind, its message and the learner's own line; an endless loop is ended; prints of the
learner are kept and shown only when the check fails; the state of the kernel is restored.

`failures` maps what went wrong to a misconception, for an exercise or for one requirement
(`@exercise.requires(..., failures={...})` goes first). Keys, the most special first: a part of
the message ("for /: 'NoneType'", anything that is not a single word); the name of an exception
("ZeroDivisionError"); the kind of a failure: "timeout" (ranks wait for each other), "endless"
(code still ran when its time was up), "mismatch" (of collectives), "exit", "signal", "pickle",
"lost" (a host), "exception". A failure that an earlier requirement met already is named as it
was there, so what you map here is what is new here. Map an exception where a mistake leads to it
and little else does: every bug of a learner may raise a RuntimeError.
The slugs "returns-nothing", "wrong-kind", "wrong-parameters", and the kinds of failure with
nothing mapped ("exception", "timeout", ...), exist in every exercise.

Requirements run in order, later ones also after a failure; `needs_earlier=True` leaves one out
when an earlier one failed because it would only repeat it. After a hang the rest is left out.
Order them from the plain to the awkward: the first line that fails is what the learner reads.

Where it grades, the course runs requirements in a process that the answer never enters: an answer
is called there through a connection, and gets and gives numbers, texts, containers, tensors and
the records of the course. A requirement that hands over or gets anything that lives (modules,
optimizers, a graph of gradients, a function that notes its calls), or looks at what the answer
changes or calls around it (`forbidden`), says `@exercise.requires(..., at_home=True)` and runs beside the answer, as in
the learner's kernel; `Exercise(..., at_home=True)` says it for all of them. What ranks do (`run`) is always beside the answer.

Every printed line of a passed or unattempted check must be the same in every run: requirement
texts are fixed strings, without numbers drawn.
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
from course_utils.comm import host_waits
from course_utils.hardware import without_gpus
from course_utils.launch import launch

_NOT_WAITED = "not-waited"  # the mistake behind it, in the exercises that can meet it
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
    """An exercise; creating it registers it. The module's text says how to write one."""

    def __init__(
        self,
        id: str,
        name: str,
        *,
        points: int,
        hints: Sequence[str],
        misconceptions: Mapping[str, str],
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
        self.misconceptions = {**COMMON, **misconceptions}
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
    if answer is None or answer is Ellipsis:
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
    unfit = answer.unfit() if isinstance(answer, Absent) else misfit(exercise, answer)
    if unfit:
        misconception, text = unfit
        yield Line(exercise.rules[0].text, False, misconception=misconception, text=text)
        yield from (Line(rule.text, None) for rule in exercise.rules[1:])
        return
    lines: list[Line] = []
    for index, rule in enumerate(exercise.rules):
        draw = Draw(seed, f"{exercise.id}/{index}")
        line = _skipped(rule, lines) or _try(exercise, rule, answer, draw)
        lines.append(_as_before(line, lines))
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


def _as_before(line: Line, earlier: list[Line]) -> Line:
    """The same failure has the same cause: what an earlier requirement called it."""
    same = [other for other in earlier if line.text and _cause(other) == _cause(line)]
    return dataclasses.replace(line, misconception=same[0].misconception) if same else line


def _cause(line: Line) -> str:
    """What the line says of a failure, but for what the other ranks did: there may be more of them now."""
    return line.text.partition("\nMeanwhile ")[0]


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
    if host_waits.USED_EARLY in " ".join(failure.text.split()) and _NOT_WAITED in known:
        return _NOT_WAITED
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

"""python -m course_utils grade FILE... and what an instructor makes of the marks."""

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from course_exercises.checks import catalogue, points
from course_grader import copies, export, gathering, pages, report, roster, rules, summary, totals
from course_grader.grading import DEFAULT_VARIANT, Request, grade_all
from course_grader.marks import Grade
from course_grader.outside import refuse_beside_answers
from course_grader.record import Record
from course_utils import hardware

_DESCRIPTION = """\
Grades notebooks that were handed in: files, folders and zip archives of them. Every exercise is
checked in processes of its own, with limits of time, memory and processes: there the notebook's cells
run, and nothing that it says about its points, its checks or its kernel is believed.
"""
_EPILOG = """\
exit status: 0 if every file was graded, 1 if at least one could not be, or is nobody's (the text says why).
"""
_UNPROTECTED = "Unprotected: this system lets nobody make namespaces. A submission can read and change your files."


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the course's command line."""
    parser = commands.add_parser(
        "grade",
        help="grade notebooks that were handed in",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="a notebook, a folder or a zip archive of them")
    add("--chapter", metavar="NN", help="grade only this chapter; another one gets a reason")
    add("--into", type=Path, metavar="FOLDER", help="write marks, pages, report and exports there")
    add("--json", action="store_true", help="print a line of JSON for each file, and nothing else")
    add("--points", type=Path, metavar="TOML", help="points for each requirement")
    add(
        "--roster",
        type=Path,
        metavar="CSV",
        help=f"name, email, id: totals for each student, by the {rules.NAME} beside it",
    )
    add(
        "--own-inputs",
        action="store_true",
        help="draw inputs for each student of the roster: the variant is NAME/ID",
    )
    add(
        "--unprotected",
        action="store_true",
        help="grade also where the system has no namespaces: submissions can read your files there",
    )
    add(
        "--jobs",
        type=_at_least_one,
        default=hardware.cores(),
        metavar="N",
        help="exercises that are checked at once (default: a core each, here %(default)s)",
    )
    add(
        "--variant",
        type=_a_word,
        default=DEFAULT_VARIANT,
        metavar="NAME",
        help="any word; it fixes the inputs that the checks draw (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def _at_least_one(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _a_word(text):
    if not text:
        raise argparse.ArgumentTypeError("it is empty; any word will do")
    return text


def run(options: argparse.Namespace) -> None:
    """Grades, prints and writes; leaves with the exit status."""
    with tempfile.TemporaryDirectory(prefix="handed-in-") as folder, _ended_by_sigterm():
        try:
            _must_be_complete(options)
            found = list(gathering.notebooks(options.files, Path(folder)))
            shares = points.read(options.points) if options.points else {}
            students = roster.read(options.roster) if options.roster else {}
            decided = rules.Rules()
            if students:
                decided = rules.read(options.roster.with_name(rules.NAME), students)
            record = Record(options.into, decided.regrade)
        except ValueError as error:
            sys.exit(str(error))
        owners = totals.owners(found, students)
        grades = list(_graded(found, owners, options, shares, record))
        failed = len(grades) < len(found) or any(grade.reason for grade in grades)
        if len(grades) == len(found):
            graded = list(zip(found, grades, owners, strict=True))
            failed |= _finish(graded, students, decided, options)
    sys.exit(failed)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Ends as by Ctrl-C what a batch system or a shutdown ends."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _must_be_complete(options):
    if options.chapter is not None:
        number = options.chapter.split("_")[0]
        if not number.isdigit() or int(number) not in catalogue.chapters():
            raise ValueError(f"There is no chapter {options.chapter} with exercises; say 03.")
        options.chapter = int(number)
    if options.own_inputs and not options.roster:
        raise ValueError("--own-inputs needs --roster: it says whose the files are.")


def _graded(found, owners, options, shares, record) -> Iterator[Grade]:
    """The grades, in the order of the files, printed and recorded as they come."""
    done = 0
    requests = [
        _request(one, owner, options, record) for one, owner in zip(found, owners, strict=True)
    ]
    with tqdm(unit=" exercises", disable=None, leave=False) as bar:

        def progress(finished: int, of: int) -> None:
            bar.total = of
            bar.update(finished - bar.n)

        def unprotected() -> None:
            refuse_beside_answers()
            say(_UNPROTECTED)

        def say(text: str) -> None:
            bar.write(text, file=sys.stderr if options.json else sys.stdout)

        try:
            graded = grade_all(
                requests,
                jobs=options.jobs,
                isolated=None if options.unprotected else True,
                progress=progress,
                chapter=options.chapter,
                unprotected=unprotected,
            )
            for one, request, plain in zip(found, requests, graded, strict=True):
                named = replace(plain, path=one.name)
                record.add(named, one.path, request.variant)
                grade = named.with_points(shares)
                if options.json:
                    print(report.as_json(grade), flush=True)
                else:
                    say(report.text(grade, details=len(found) == 1))
                done += 1
                yield grade
        except KeyboardInterrupt:
            say(f"Interrupted: {done} of {len(found)} files were graded.{_goes_on(options)}")
        except RuntimeError as error:
            say(f"{error}\n{done} of {len(found)} files were graded.{_goes_on(options)}")


def _goes_on(options):
    return " The same command goes on there; the tables are as they were." if options.into else ""


def _request(one: gathering.Found, owner: roster.Student | str, options, record: Record) -> Request:
    student = owner.id if isinstance(owner, roster.Student) else ""
    own = options.own_inputs and student
    variant = f"{options.variant}/{student}" if own else options.variant
    whose = student or one.archive or one.name
    known = {} if one.reason else record.marks(one.path, variant)
    return Request(one.path, one.reason, variant, whose, known)


def _finish(graded, students, decided, options) -> bool:
    """Prints the totals and writes all files; True if something is nobody's."""
    found = totals.totals(graded, students, decided)
    nobodys = [owner for _, _, owner in graded if isinstance(owner, str)]
    said = []
    for total in found if students else ():
        said.append(report.one_line(f"{total.student.name}: {total.points:g} points"))
        said += [f"  {report.one_line(remark)}" for remark in total.remarks()]
    for line in [*said, *map(report.one_line, nobodys)]:
        print(line, file=sys.stderr if options.json else sys.stdout)
    if options.into:
        report.write_csv(found, nobodys, options.into / "marks.csv")
        pages.write(found, options.into)
        alike = copies.among([(one.path, grade) for one, grade, _ in graded])
        summary.write(found, nobodys, alike, options.into)
        if students:
            export.write(found, options.into)
    return bool(nobodys)

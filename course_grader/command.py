"""python -m course_utils grade FILE... and what an instructor makes of the marks."""

import argparse
import contextlib
import datetime
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from course_exercises.checks import catalogue, points
from course_grader import copies, export, gathering, pages, report, roster, summary
from course_grader.grading import DEFAULT_VARIANT, grade_files
from course_grader.marks import Grade
from course_grader.submission import NotGradable, read_file
from course_utils import hardware
from course_utils.lesson import files

_DESCRIPTION = """\
Grades notebooks that were handed in: files, folders and zip archives of them. Every exercise is
checked in processes of its own, with limits of time, memory and processes. A notebook is never
executed as a whole, and nothing that it says about its points, its checks or its kernel is believed.
"""
_EPILOG = """\
exit status: 0 if every file was graded, 1 if at least one could not be (the text says why).
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
    add("--csv", type=Path, metavar="FILE", help="write the marks as a table")
    add("--json", type=Path, metavar="FILE", help="write the marks for a program")
    add("--pages", type=Path, metavar="FOLDER", help="write a page of feedback for each file")
    add("--report", type=Path, metavar="NAME", help="write what the class got wrong: NAME.md, .png")
    add("--copies", action="store_true", help="list equal answers, for a person to read")
    add("--points", type=Path, metavar="TOML", help="points for each requirement")
    add("--roster", type=Path, metavar="CSV", help="name, email, file: totals for each student")
    add("--due", type=_a_time, metavar="TIME", help="2026-03-01T12:00; what comes later is late")
    add("--free-days", type=int, default=0, metavar="N", help="late days that cost nothing")
    add(
        "--penalty",
        type=float,
        default=0.1,
        metavar="P",
        help="share of the points a late day costs",
    )
    add(
        "--own-inputs",
        action="store_true",
        help="draw inputs for each student of the roster: the variant is NAME/ID",
    )
    for kind in export.KINDS:
        add(f"--{kind}", type=Path, metavar="FILE", help=f"write the totals for {kind.title()}")
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


def _a_time(text):
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 2026-03-01T12:00") from None


def run(options: argparse.Namespace) -> None:
    """Grades, prints and writes; leaves with the exit status."""
    with tempfile.TemporaryDirectory(prefix="handed-in-") as folder:
        try:
            found = list(gathering.notebooks(options.files, Path(folder)))
            shares = points.read(options.points) if options.points else {}
            students = roster.read(options.roster) if options.roster else []
            _must_be_complete(options)
            if options.pages:
                _make_folder(options.pages)
            for target in _files_of(options):
                files.must_be_writable(target)
        except ValueError as error:
            sys.exit(str(error))
        grades = list(_graded(found, students, options, shares))
        if len(grades) < len(found):
            options, students = _for_a_part(options), []
        _write(grades, found, students, options)
        if options.copies:
            print(_about_copies(grades, found), end="")
    sys.exit(len(grades) < len(found) or any(grade.reason for grade in grades))


def _make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be the folder of the pages: {error.strerror}.") from None


def _for_a_part(options):
    """Where not all were graded, what an earlier run has written stays: tables go into files beside
    it, and there is neither a report nor an export."""
    changed = dict.fromkeys(("report", *export.KINDS))
    for kind in ("csv", "json"):
        if target := getattr(options, kind):
            changed[kind] = target.with_name(f"{target.name}.partial")
            print(f"{changed[kind]} has those that were graded; {target} is as it was.")
    if options.roster:
        print("There are no totals and no exports: grade all files for these.")
    return argparse.Namespace(**vars(options) | changed)


def _must_be_complete(options):
    if options.chapter is not None:
        number = options.chapter.split("_")[0]
        if not number.isdigit() or int(number) not in catalogue.chapters():
            raise ValueError(f"There is no chapter {options.chapter} with exercises; say 03.")
        options.chapter = int(number)
    if options.report and not options.report.name:
        raise ValueError("--report is a name: with monday, monday.md and monday.png are written.")
    if any(getattr(options, kind) for kind in export.KINDS) and not options.roster:
        raise ValueError("An export needs --roster: it says whose the files are.")
    if options.own_inputs and not options.roster:
        raise ValueError("--own-inputs needs --roster: it says whose the files are.")


def _files_of(options):
    own = [options.csv, options.json, *(getattr(options, kind) for kind in export.KINDS)]
    if options.report:
        own += [options.report.with_suffix(suffix) for suffix in (".md", ".png")]
    return filter(None, own)


def _graded(found: list[gathering.Found], students, options, shares) -> Iterator[Grade]:
    """The grades, in the order of the files, printed as they come."""
    done = 0
    isolated = None if options.unprotected else True
    with tqdm(unit=" exercises", disable=None, leave=False) as bar:

        def progress(finished: int, of: int) -> None:
            bar.total = of
            bar.update(finished - bar.n)

        try:
            graded = grade_files(
                [one.path for one in found],
                jobs=options.jobs,
                variant=options.variant,
                isolated=isolated,
                progress=progress,
                reasons={i: one.reason for i, one in enumerate(found) if one.reason},
                variants=_variants(found, students, options.variant) if options.own_inputs else {},
                chapter=options.chapter,
                unprotected=lambda: bar.write(_UNPROTECTED, file=sys.stdout),
            )
            for one, plain in zip(found, graded, strict=True):
                grade = plain.named(one.name).with_points(shares)
                bar.write(report.text(grade, details=len(found) == 1), file=sys.stdout)
                done += 1
                yield grade
        except KeyboardInterrupt:
            bar.write(f"Interrupted: {done} of {len(found)} files were graded.")
        except RuntimeError as error:
            bar.write(f"{error}\n{done} of {len(found)} files were graded.")


def _variants(found, students, variant):
    owners = ((i, roster.owner(one.name, students)) for i, one in enumerate(found))
    return {i: f"{variant}/{student.id}" for i, student in owners if student}


def _write(grades, found, students, options):
    if options.csv:
        report.write_csv(grades, options.csv)
    if options.json:
        report.write_json(grades, options.variant, options.json)
    if options.pages:
        pages.write(grades, [grade.path for grade in grades], options.pages)
    if options.report:
        summary.write(grades, options.report)
    if students:
        _write_totals(grades, found, students, options)


def _write_totals(grades, found, students, options):
    deadline = roster.Deadline(options.due, options.free_days, options.penalty)
    submitted = [
        (g.path, g.chapter, g.earned, g.points, roster.days_late(one.path, options.due))
        for g, one in zip(grades, found, strict=False)
        if not g.reason
    ]
    totals, nobodys = roster.totals(submitted, students, deadline)
    for total in totals:
        late = f", {total.days_late} days late" if total.days_late else ""
        print(report.printable(f"{total.student.name}: {total.points:g} points{late}"))
    for path in nobodys:
        print(report.one_line(f"{path} belongs to nobody in the roster, or to several."))
    for kind in export.KINDS:
        if target := getattr(options, kind):
            export.write(totals, kind, target)


def _about_copies(grades, found):
    forms = []
    for grade, one in zip(grades, found, strict=False):
        with contextlib.suppress(NotGradable):
            if not grade.reason:
                forms += _forms(grade, read_file(one.path, 50 << 20))
    lines = [
        f"{alike.exercise}: equal but for names and layout: {', '.join(alike.files)}"
        for alike in copies.alike(forms)
    ]
    about = "Equal answers are a reason to read them, not a verdict.\n" if lines else ""
    return about + "".join(report.one_line(line) + "\n" for line in lines)


def _forms(grade, submission):
    for mark in grade.exercises:
        if mark.status in ("passed", "failed", "stopped"):
            known = [copies.form_of(cell.source, mark.name) for cell in submission.cells]
            yield mark.exercise, grade.path, next((f for f in reversed(known) if f), None)

"""python -m course_utils grade FILE... [--csv F] [--json F] [--jobs N] [--variant NAME]"""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from course_utils import hardware
from course_utils.grade import report
from course_utils.grade.grading import DEFAULT_VARIANT, grade_files

_DESCRIPTION = """\
Grades notebooks that were handed in. Every exercise is checked in a process of its own, with limits
of time, memory and processes. A notebook is never executed as a whole, and nothing that it says
about its points, its checks or its kernel is believed.
"""
_EPILOG = """\
exit status: 0 if every file was graded, 1 if at least one could not be (the text says why).
"""


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the course's command line."""
    parser = commands.add_parser(
        "grade",
        help="grade notebooks that were handed in",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a notebook, or a folder of them")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the marks as a table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the marks for a program")
    parser.add_argument(
        "--jobs",
        type=_at_least_one,
        default=hardware.cores(),
        metavar="N",
        help="exercises that are checked at once (default: a core each, here %(default)s)",
    )
    parser.add_argument(
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
    paths = list(_notebooks(options.files))
    for target in filter(None, (options.csv, options.json)):
        _try_to_write(target)
    grades = []
    with tqdm(unit=" exercises", disable=None, leave=False) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        try:
            graded = grade_files(
                paths, jobs=options.jobs, variant=options.variant, progress=progress
            )
            for grade in graded:
                grades.append(grade)
                bar.write(report.text(grade, details=len(paths) == 1), file=sys.stdout)
        except KeyboardInterrupt:
            bar.write(f"Interrupted: {len(grades)} of {len(paths)} files were graded.")
        except RuntimeError as error:
            bar.write(f"{error}\n{len(grades)} of {len(paths)} files were graded.")
    if options.csv:
        report.write_csv(grades, options.csv)
    if options.json:
        report.write_json(grades, options.variant, options.json)
    sys.exit(len(grades) < len(paths) or any(grade.reason for grade in grades))


def _notebooks(names):
    """The files as they are given, and for a folder the notebooks in it, in order."""
    for name in names:
        path = Path(name)
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.rglob("*.ipynb"))
        found = [p for p in found if ".ipynb_checkpoints" not in p.parts]
        if not found:
            sys.exit(f"There is no notebook (.ipynb) in {path}.")
        yield from found


def _try_to_write(path):
    try:
        path.open("a").close()
    except OSError as error:
        sys.exit(f"{path} cannot be written ({error.strerror}); choose another file.")

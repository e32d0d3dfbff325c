"""What is told of an exception that code of a submission has raised: plain data, whatever it is like."""

from course_exercises.authoring import framework
from course_exercises.authoring.failures import explain, explain_stub, is_stub
from course_utils.launch import RankFailure

_SECONDS_TO_TELL = 2.0  # what an exception says of itself is code of the submission, too


def report_of(error: BaseException, seconds: float) -> dict:
    """What is said of an exception, also where it does not let itself be asked."""
    try:
        with framework.limited(_SECONDS_TO_TELL):
            return _described(error, seconds)
    except BaseException:  # noqa: BLE001 - as above
        text = "your code raised an exception that cannot be printed"
        failure = ["exception", "Exception", text]
        names = {"name": "Exception", "names": ["Exception"], "message": text}
        return names | {"failure": failure, "stub": None}


def _described(error: BaseException, seconds: float) -> dict:
    if isinstance(error, RankFailure):
        about = [str(error), error.rank, error.kind, error.line, error.error, list(error.ranks)]
        return {"rank": about}
    failure = explain(error, seconds)
    return {
        "name": type(error).__name__,
        "names": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error)[:2000],
        "failure": [failure.kind, failure.error, failure.text],
        "stub": explain_stub(error) if is_stub(error) else None,
    }

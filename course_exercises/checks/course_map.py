"""The map of the course: a building for each chapter, a window for each exercise."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from course_exercises.checks.progress import Chapter, chapters
from course_utils import plots

_COLUMNS = 5  # chapters in a row
_PLOT, _STREET = 2.0, 2.0  # the width of a chapter's place, and its height
_WALL, _ROOF = 1.7, 1.15  # the width of a building, and its height
_CENTERED = {"ha": "center", "va": "center"}


def progress_map() -> Figure:
    """Draws the course. A window is an exercise, green once its check has passed; a flag stands on
    a chapter that is complete. Run the cell again to see what is new.

    The picture's size is fixed, and strict nbval compares no more of it: so a notebook passes with any
    learner's progress. The same map in words stands in an ignored cell.
    """
    course = chapters()
    rows = -(-len(course) // _COLUMNS)
    top = _STREET * rows + 0.5
    figure, ax = plots.canvas(height=plots.WIDTH / 10 * (top + 0.25))
    for place, chapter in enumerate(course):
        row, column = divmod(place, _COLUMNS)
        _chapter(ax, 0.15 + _PLOT * column, _STREET * (rows - 1 - row) + 0.65, chapter)
    earned, points = sum(c.earned for c in course), sum(c.points for c in course)
    ax.text(0.15, top, f"{earned} of {points} points", weight="bold", fontsize=12, va="center")
    _key(ax, top)
    return figure


def _chapter(ax: Axes, x: float, y: float, chapter: Chapter) -> None:
    """A building with its lower left corner at (x, y), and its name and points under it."""
    plots.building(ax, x, y, _WALL, _ROOF, color=plots.COLORS["idle"])
    first = x + _WALL / 2 - 0.265 * (len(chapter.exercises) - 1) / 2
    for i, exercise in enumerate(chapter.exercises):
        number, lit = exercise.id.split(".")[1], exercise.id in chapter.passed
        _window(ax, first + 0.265 * i, y + 0.4, number, lit)
    if chapter.complete:
        _flag(ax, x + 2 / 3 * _WALL, y + _ROOF)
    number, _, topic = chapter.title.partition("_")
    points = f"{chapter.earned} of {chapter.points}" if chapter.exercises else "no exercises"
    ax.text(x + _WALL / 2, y - 0.18, f"{number} {topic.replace('_', ' ')}", **_CENTERED, fontsize=9)
    ax.text(x + _WALL / 2, y - 0.44, points, **_CENTERED, fontsize=9)


def _window(ax: Axes, x: float, y: float, label: str, lit: bool) -> None:
    """A window with its middle at (x, y)."""
    color = plots.COLORS["update"] if lit else "white"
    frame = {"facecolor": color, "edgecolor": plots.COLORS["ink"], "linewidth": 0.8}
    ax.add_patch(Rectangle((x - 0.11, y - 0.17), 0.22, 0.34, **frame))
    ink = {"color": "white", "weight": "bold"} if lit else {}
    ax.text(x, y, label, **_CENTERED, fontsize=8, **ink)


def _flag(ax: Axes, x: float, y: float) -> None:
    """A flag whose pole stands at (x, y)."""
    ax.plot([x, x], [y, y + 0.42], color=plots.COLORS["ink"], linewidth=1.2)
    corners = [(x, y + 0.42), (x + 0.38, y + 0.32), (x, y + 0.2)]
    ax.add_patch(Polygon(corners, facecolor=plots.COLORS["update"], edgecolor="none"))


def _key(ax: Axes, y: float) -> None:
    """What the signs mean, in one line at height y."""
    for x, lit, words in ((4.35, False, "to do"), (5.55, True, "passed")):
        _window(ax, x, y, "1", lit)
        ax.text(x + 0.22, y, words, va="center", fontsize=9)
    _flag(ax, 6.9, y - 0.2)
    ax.text(7.4, y, "every exercise of a chapter", va="center", fontsize=9)

"""Matplotlib's backend in a rank: a figure that is shown becomes a picture under the learner's cell.

As in a cell, a figure is closed when it has been shown. Matplotlib looks for the names
`FigureCanvas` and `FigureManager` (its documentation, "Writing a backend: the pyplot interface").
"""

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from course_utils.launch.ranks import figures


class FigureManager(FigureManagerBase):
    """What pyplot keeps of a figure."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """`plt.show()`: all open figures. `block` means nothing where no window waits."""
        for manager in Gcf.get_all_fig_managers():
            manager.show()

    def show(self) -> None:
        """`figure.show()`."""
        Gcf.destroy(self)
        figures.announce(self.canvas.figure)


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager

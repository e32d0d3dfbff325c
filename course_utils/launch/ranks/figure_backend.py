"""Matplotlib's backend in a rank: a figure that is shown becomes a picture under the learner's cell.

As in a cell, a figure is closed when it has been shown. Matplotlib looks for the names
`FigureCanvas` and `FigureManager` (its documentation, "Writing a backend: the pyplot interface").
"""

import os
import tempfile

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from course_utils.launch.ranks import figures

MOST = 20  # figures that a call shows in one process: a loop may draw thousands


class FigureManager(FigureManagerBase):
    """What pyplot keeps of a figure."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """`plt.show()`: all open figures. `block` means nothing where no window waits."""
        for manager in Gcf.get_all_fig_managers():
            manager.show()

    def show(self) -> None:
        """`figure.show()`: writes the picture, and tells the kernel."""
        Gcf.destroy(self)
        figures.shown += 1
        if figures.shown <= MOST:
            figures.announce(self._written(), repr(self.canvas.figure))
        elif figures.shown == MOST + 1:
            print(f"further figures are left out: a rank shows {MOST} of them")

    def _written(self):
        file, path = tempfile.mkstemp(prefix="figure-", suffix=".png", dir=figures.folder())
        with os.fdopen(file, "wb") as opened:
            # Without the software's name and version: the same picture is the same bytes.
            self.canvas.figure.savefig(opened, bbox_inches="tight", metadata={"Software": None})
        return os.path.basename(path)


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager

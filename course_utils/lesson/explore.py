"""Interactive explorers: sliders beside a figure that follows them."""

import io
from collections.abc import Callable, Sequence

import ipywidgets
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

_VIEW = "application/vnd.jupyter.widget-view+json"  # what a widget is in a notebook's file


class Explorer(ipywidgets.VBox):
    """Sliders above a picture that is drawn again when one of them moves.

    draw: called with one keyword argument per slider; returns a Figure.
    sliders: name=(lowest, highest, start), whole numbers or floats (then in 20 steps), or
        name=["one", "of", "these"] for a choice; the first is the start.

    A notebook that is read without a kernel shows the picture of the start.
    """

    def __init__(self, draw: Callable[..., Figure], **sliders: Sequence) -> None:
        self._draw = draw
        self._sliders = {name: _slider(name, values) for name, values in sliders.items()}
        self._text = "Explorer: " + "; ".join(
            f"{slider.description} {_range(slider)}" for slider in self._sliders.values()
        )
        self._start = self._picture()
        self.image = ipywidgets.Image(value=self._start, format="png")
        super().__init__([*self._sliders.values(), self.image])
        for slider in self._sliders.values():
            slider.observe(self._update, names="value")

    def _picture(self) -> bytes:
        figure = self._draw(**{name: slider.value for name, slider in self._sliders.items()})
        if not isinstance(figure, Figure):
            raise TypeError(f"draw returned {type(figure).__name__}; it has to return its Figure.")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        plt.close(figure)  # the notebook would show it a second time
        return buffer.getvalue()

    def _update(self, change) -> None:
        self.image.value = self._picture()

    _ipython_display_ = None  # of ipywidgets 7, as in Colab: it would leave the picture out

    def _repr_mimebundle_(self, **kwargs) -> dict:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"text/plain": self._text, "image/png": self._start, _VIEW: view}


def _slider(name: str, values: Sequence) -> ipywidgets.Widget:
    label, width = name.replace("_", " "), {"description_width": "12em"}
    if isinstance(values, list):
        style = width | {"button_width": "auto"}
        return ipywidgets.ToggleButtons(options=values, description=label, style=style)
    look = {"description": label, "style": width, "layout": {"width": "34em"}}
    lowest, highest, start = values
    if all(isinstance(value, int) for value in values):
        return ipywidgets.IntSlider(
            value=start, min=lowest, max=highest, continuous_update=False, **look
        )
    step = (highest - lowest) / 20
    return ipywidgets.FloatSlider(
        value=start, min=lowest, max=highest, step=step, continuous_update=False, **look
    )


def _range(slider: ipywidgets.Widget) -> str:
    if isinstance(slider, ipywidgets.ToggleButtons):
        return " or ".join(slider.options)
    return f"from {slider.min} to {slider.max}, shown at {slider.value}"

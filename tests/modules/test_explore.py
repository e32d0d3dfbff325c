import io

import ipywidgets
import matplotlib
import matplotlib.pyplot as plt
import pytest

matplotlib.use("Agg")
from course_utils.lesson.explore import Explorer


def draw(ranks, speed, kind):
    figure, ax = plt.subplots(figsize=(2, 1))
    ax.bar(range(ranks), [speed] * ranks)
    ax.set_title(kind)
    return figure


@pytest.fixture
def explorer():
    return Explorer(draw, ranks=(2, 8, 4), speed=(0.0, 1.0, 0.5), kind=["ring", "star"])


def test_sliders_get_the_type_of_their_values(explorer):
    ranks, speed, kind, image = explorer.children
    assert isinstance(ranks, ipywidgets.IntSlider)
    assert (ranks.min, ranks.max, ranks.value) == (2, 8, 4)
    assert isinstance(speed, ipywidgets.FloatSlider) and speed.step == pytest.approx(0.05)
    assert isinstance(kind, ipywidgets.ToggleButtons) and kind.value == "ring"
    assert bytes(image.value).startswith(b"\x89PNG")


def test_moving_a_slider_changes_the_picture_and_opens_no_figure(explorer):
    for slider, value in zip(explorer.children, (5, 0.7, "star")):
        before = bytes(explorer.image.value)
        slider.value = value
        assert explorer.image.value != before
    assert plt.get_fignums() == []


def test_it_shows_a_picture_where_there_is_no_kernel(explorer):
    start = bytes(explorer.image.value)
    explorer.children[0].value = 7
    bundle = explorer._repr_mimebundle_()
    assert bundle["image/png"] == start, "the stored picture is the one of the start"
    assert plt.imread(io.BytesIO(bundle["image/png"])).shape[1] > 100
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"] == (
        "Explorer: ranks from 2 to 8, shown at 4; speed from 0.0 to 1.0, shown at 0.5; "
        "kind ring or star"
    )


def test_draw_has_to_return_its_figure():
    with pytest.raises(TypeError, match="draw returned NoneType; it has to return its Figure"):
        Explorer(lambda n: None, n=(1, 2, 1))

"""A backend of matplotlib for workers: ``plt.show()`` shows figures in the driver's notebook, under the rank."""

from typing import Any

from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg

import ltx

FigureCanvas = FigureCanvasAgg  # what a backend has


def show(*args: Any, **kwargs: Any) -> None:
    for number in pyplot.get_fignums():
        ltx.show(pyplot.figure(number))
    pyplot.close("all")

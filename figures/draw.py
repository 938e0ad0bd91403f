"""What the scripts of the pictures share: colors, an empty page, a line of text, the way into a file."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INK, DIM, GREY, PALE_GREY = "#263238", "#707980", "#9aa0a6", "#eceff1"
BLUE, GREEN, ORANGE, RED = "#3b7dd8", "#2c7a2c", "#c77700", "#b03030"
PALE_BLUE, PALE_GREEN, PALE_ORANGE, PALE_RED = "#c9dcf5", "#d3ead3", "#fbe3c0", "#f6d5d5"


def save(name: str) -> None:
    """Write the current picture into this folder; the same picture gives the same bytes."""
    plt.savefig(Path(__file__).parent / name, dpi=130, metadata={"Software": None})
    plt.close()


def blank(width, height, right, top):
    """Axes without a frame; 0 … right and 0 … top fill the picture."""
    figure = plt.figure(figsize=(width, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, right), ylim=(0, top))
    ax.axis("off")
    return ax


def write(ax, x, y, text, **style):
    """A line of text at (x, y), from its left end where `style` says nothing else."""
    ax.text(x, y, text, **({"size": 9.5, "color": INK, "va": "center"} | style))

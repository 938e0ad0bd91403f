"""Draws figures/06_cache.png: python figures/06_kv_cache.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

INK, NEW, OLD, EMPTY = "#333333", "#3b7dd8", "#c9dcf5", "#ffffff"
ROOM = 8
STEPS = [  # title, columns filled before, the new tokens
    ("prefill: the prompt at once", 0, ["Once", "upon", "a", "time"]),
    ("decode: one token", 4, ["there"]),
    ("decode: one token", 5, ["was"]),
]


def draw(ax, title, filled, new):
    for column in range(ROOM):
        fresh = filled <= column < filled + len(new)
        color = NEW if fresh else OLD if column < filled else EMPTY
        for row, label in enumerate(("V", "K")):
            ax.add_patch(
                Rectangle((column, row * 0.8), 0.9, 0.7, facecolor=color, edgecolor="#9aa0a6")
            )
            if column == 0:
                ax.text(
                    -0.25, row * 0.8 + 0.35, label, ha="right", va="center", fontsize=10, color=INK
                )
    for n, token in enumerate(new):
        middle = filled + n + 0.45
        ax.text(middle, 2.75, token, ha="center", fontsize=9, color=INK)
        ax.annotate(
            "", (middle, 1.58), (middle, 2.65), arrowprops={"arrowstyle": "-|>", "color": INK}
        )
    last = filled + len(new) - 0.55
    ax.annotate(
        "", (0.0, -0.45), (last + 0.45, -0.45), arrowprops={"arrowstyle": "<->", "color": NEW}
    )
    seen = filled + len(new)
    ax.text(0, -0.95, f"the newest query looks at {seen} columns", fontsize=9, color=NEW)
    ax.text(0, 3.45, title, fontsize=10.5, weight="bold", color=INK)
    ax.set(xlim=(-0.7, ROOM + 0.1), ylim=(-1.3, 3.9))
    ax.axis("off")


figure, places = plt.subplots(1, 3, figsize=(11, 2.9), layout="constrained")
for ax, step in zip(places, STEPS, strict=True):
    draw(ax, *step)
plt.savefig(Path(__file__).parent / "06_cache.png", dpi=130, metadata={"Software": None})

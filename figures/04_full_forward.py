"""Draws figures/04_gpt2.png: python figures/04_full_forward.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, TABLE, BLOCK, NORM = "#263238", "#cfe3f5", "#fde7c8", "#e3efd9"
figure, axes = plt.subplots(figsize=(8.6, 7.4))
axes.set(xlim=(0, 10), ylim=(0, 10.4))
axes.axis("off")


def box(x, y, width, height, label, color, size=10):
    style = "round,pad=0.02,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=color, ec=INK, lw=1.2))
    axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", size=size, color=INK)


def arrow(start, end, **style):
    options = {"arrowstyle": "-|>", "mutation_scale": 13, "lw": 1.3, "color": INK} | style
    axes.add_patch(FancyArrowPatch(start, end, **options))


def plus(y):
    style = {"boxstyle": "circle,pad=0.05", "fc": "white", "ec": INK}
    axes.text(4.6, y, "+", size=13, ha="center", va="center", color=INK, bbox=style, zorder=5)


def shape(y, text, x=4.75):
    axes.text(x, y, text, size=9, family="monospace", color="#8a3b12", va="center")


axes.text(4.5, 0.25, "token ids", ha="center", size=10, color=INK)
shape(0.25, "[B, T]", 5.4)
box(2.2, 1.0, 2.3, 0.8, "token table\n4,096 rows", TABLE)
box(4.7, 1.0, 2.3, 0.8, "position table\n512 rows", TABLE)
arrow((4.0, 0.5), (3.4, 0.98))
arrow((5.0, 0.5), (5.7, 0.98))
plus(2.33)
arrow((3.4, 1.82), (4.38, 2.25))
arrow((5.8, 1.82), (4.82, 2.25))
shape(2.75, "[B, T, D]")

box(4.0, 3.0, 5.3, 3.2, "", "#fffaf2")
axes.text(9.5, 4.6, "x 6 blocks\n(GPT-2: 12)", size=10, va="center", color=INK)
arrow((4.6, 2.5), (4.6, 6.2), arrowstyle="-", lw=3, color="#5b7fa6")
for y, part in ((3.55, "attention"), (4.95, "MLP")):
    box(5.4, y, 1.3, 0.6, "norm", NORM)
    box(7.3, y, 1.6, 0.6, part, BLOCK)
    arrow((4.6, y + 0.3), (5.38, y + 0.3))
    arrow((6.72, y + 0.3), (7.28, y + 0.3))
    arrow((8.1, y + 0.62), (8.1, y + 0.92), arrowstyle="-")
    arrow((8.1, y + 0.92), (4.82, y + 0.92))
    plus(y + 0.92)
axes.text(4.75, 3.22, "residual stream", size=9, ha="left", va="center", color="#5b7fa6")

arrow((4.6, 6.2), (4.6, 6.78))
shape(6.48, "[B, T, D]")
box(3.5, 6.8, 2.2, 0.7, "final norm", NORM)
arrow((4.6, 7.52), (4.6, 8.08))
shape(7.8, "[B, T, D]   (D = 256)")
box(3.2, 8.1, 2.8, 0.8, "head\n(the token table again)", TABLE)
arrow((4.6, 8.92), (4.6, 9.5))
shape(9.2, "[B, T, vocab_size]")
axes.text(
    4.6,
    9.75,
    "logits: one score for every token that could come next",
    ha="center",
    size=10,
    color=INK,
)
arrow((2.15, 1.4), (3.15, 8.5), connectionstyle="arc3,rad=-0.35", ls="--", lw=1.1, color="#5b7fa6")
axes.text(0.35, 8.0, "tied: one table,\nused twice", size=9, color="#5b7fa6")

target = Path(__file__).with_name("04_gpt2.png")
figure.savefig(target, dpi=130, bbox_inches="tight", metadata={"Software": None})

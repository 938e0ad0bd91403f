"""Draws figures/01_map.png: python figures/01_map.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, TABLE, BLOCK, NORM, GREY = "#263238", "#cfe3f5", "#fde7c8", "#e3efd9", "#9aa0a6"
STREAM, SHAPE, PREFILL, DECODE = "#5b7fa6", "#8a3b12", "#3b7dd8", "#c2571a"
figure, axes = plt.subplots(figsize=(11, 7.3), layout="constrained")
axes.set(xlim=(0, 22), ylim=(0, 14.6))
axes.axis("off")


def box(x, y, width, height, label, color, size=9.5):
    style = "round,pad=0.02,rounding_size=0.16"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=color, ec=INK, lw=1.2))
    axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", size=size, color=INK)


def arrow(*points, color=INK, lw=1.4, head="-|>"):
    """A line through all points, with its head at the last."""
    for start, end in zip(points[:-2], points[1:-1], strict=True):
        axes.plot(*zip(start, end, strict=True), color=color, lw=lw, solid_capstyle="round")
    style = {"arrowstyle": head, "mutation_scale": 13, "lw": lw, "color": color}
    axes.add_patch(FancyArrowPatch(points[-2], points[-1], shrinkA=0, shrinkB=0, **style))


def write(x, y, text, color=INK, size=9.5, **style):
    axes.text(x, y, text, **({"size": size, "color": color, "va": "center"} | style))


def shape(x, y, text, **style):
    write(x, y, text, SHAPE, 8.5, family="monospace", **style)


def chapter(x, y, number):
    frame = {"boxstyle": "round,pad=0.25", "fc": "#eceff1", "ec": "none"}
    write(x, y, f"ch. {number}", "#455a64", 8, ha="center", bbox=frame, zorder=6)


def plus(x, y):
    frame = {"boxstyle": "circle,pad=0.05", "fc": "white", "ec": INK}
    write(x, y, "+", size=11, ha="center", bbox=frame, zorder=5)


# down on the left: text -> ids
write(2.5, 13.9, "your text", ha="center", weight="bold")
write(2.5, 13.2, '"Once upon a time"', ha="center")
arrow((2.5, 12.8), (2.5, 11.9))
box(0.9, 10.9, 3.2, 1.0, "tokenizer", TABLE)
chapter(4.1, 11.9, 2)
arrow((2.5, 10.88), (2.5, 9.95))
for n, (piece, token_id) in enumerate(
    zip(("On", "ce", " upon", " a", " time"), (1983, 328, 596, 258, 560), strict=True)
):
    axes.add_patch(Rectangle((0.05 + n, 8.5), 0.9, 0.7, fc="white", ec=PREFILL, lw=1.3))
    write(0.5 + n, 8.85, str(token_id), size=8, ha="center")
    write(0.5 + n, 9.5, repr(piece), "#5f6368", 8, ha="center")
shape(2.5, 8.1, "token ids [B, T]", ha="center")
arrow((2.5, 7.75), (2.5, 2.15), (6.55, 2.15), color=PREFILL, lw=2.4)
write(2.75, 5.9, "prefill", PREFILL, 11, weight="bold")
write(2.75, 5.2, "the whole prompt,\nall T tokens at\nonce, one time", PREFILL, 9, va="top")

# up in the middle: the model
panel = {"boxstyle": "round,pad=0.02,rounding_size=0.25", "fc": "#fafafa", "ec": GREY}
axes.add_patch(FancyBboxPatch((6.25, 1.3), 9.3, 12.2, zorder=0, **panel))
write(6.5, 13.95, "the model, run once", weight="bold")
write(14.55, 13.95, "B texts side by side", size=9, ha="right")
chapter(15.15, 13.95, 7)
box(6.6, 1.6, 3.2, 1.0, "token table", TABLE)
box(10.2, 1.6, 3.2, 1.0, "position table", TABLE)
chapter(13.4, 2.6, 3)
shape(14.15, 2.1, "0 1 2 3 4")
arrow((14.05, 2.1), (13.45, 2.1))
plus(8.2, 3.3)
arrow((8.2, 2.62), (8.2, 3.02))
arrow((11.8, 2.62), (11.8, 3.3), (8.5, 3.3))
arrow((8.2, 3.58), (8.2, 10.0), color=STREAM, lw=3, head="-")
shape(8.4, 3.95, "[B, T, D]")
box(6.9, 4.4, 8.3, 5.1, "", "#fffaf2")
chapter(15.2, 9.5, 3)
write(8.4, 4.72, "residual stream", STREAM, 8.5)
write(15.05, 9.02, "x 6 blocks", size=9, ha="right")
arrow((8.2, 4.4), (8.2, 9.5), color=STREAM, lw=3, head="-")
for y, part in ((5.2, "attention"), (7.4, "MLP")):
    box(8.8, y, 1.2, 0.75, "norm", NORM, 8.5)
    box(10.5, y, 1.9, 0.75, part, BLOCK)
    arrow((8.2, y + 0.37), (8.76, y + 0.37))
    arrow((10.02, y + 0.37), (10.46, y + 0.37))
    arrow((11.45, y + 0.77), (11.45, y + 1.25), (8.5, y + 1.25))
    plus(8.2, y + 1.25)
for row, label in ((0, "V"), (1, "K")):  # the cache: 5 old columns and a new one
    write(13.12, 5.42 + 0.42 * row, label, size=7.5, ha="right")
    for column in range(6):
        color = "#c9dcf5" if column < 5 else DECODE
        place = (13.22 + 0.3 * column, 5.24 + 0.42 * row)
        axes.add_patch(Rectangle(place, 0.26, 0.36, fc=color, ec=GREY, lw=0.6))
write(14.85, 5.0, "new", DECODE, 8, ha="center")
arrow((12.44, 5.58), (12.88, 5.58), head="<|-|>")
shape(14.12, 6.38, "[B, H, S, d]", ha="center")
write(13.22, 6.9, "KV cache", size=9)
chapter(14.85, 6.9, 6)
arrow((8.2, 9.52), (8.2, 10.0))
box(6.9, 10.02, 2.6, 0.85, "final norm", NORM)
chapter(9.6, 10.87, 4)
arrow((8.2, 10.9), (8.2, 11.9))
shape(8.4, 11.4, "[B, D]  last token only")
box(6.9, 11.92, 2.6, 0.95, "head", TABLE)
chapter(9.6, 12.87, 4)

# down on the right: scores -> token -> text
arrow((9.52, 12.4), (16.3, 12.4))
shape(11.0, 12.75, "logits [B, V]")
best = {" there": 9.46, " a": 7.56, " lived": 7.54, " the": 6.56, " all": 5.94}
for n, (piece, logit) in enumerate(best.items()):
    height = logit / 9.46 * 1.25
    axes.add_patch(Rectangle((16.6 + n, 11.9), 0.8, height, fc=PREFILL, ec="none"))
    write(17.0 + n, 12.1 + height, f"{logit:.2f}", size=8, ha="center")
    write(17.0 + n, 11.6, repr(piece), "#5f6368", 8, ha="center")
write(19.1, 13.95, "one score for each token: the best 5 of 4,096", ha="center", size=9)
arrow((19.0, 11.3), (19.0, 10.2))
frame = {"boxstyle": "round,pad=0.02,rounding_size=0.25", "fc": "#f4f8f1", "ec": INK, "lw": 1.2}
axes.add_patch(FancyBboxPatch((16.5, 4.85), 5.0, 5.9, zorder=0, **frame))
write(16.75, 10.4, "request", weight="bold")
chapter(21.5, 10.75, 5)
box(16.9, 8.4, 4.2, 1.75, "sampling\npenalty, temperature,\ncut, draw", BLOCK)
arrow((19.0, 8.38), (19.0, 7.62))
axes.add_patch(Rectangle((18.55, 6.85), 0.9, 0.7, fc="white", ec=DECODE, lw=1.6))
write(19.0, 7.2, "443", size=8, ha="center")
write(19.6, 7.2, "' there'", "#5f6368", 8)
write(18.4, 7.2, "next token", ha="right", size=9)
arrow((19.0, 6.83), (19.0, 6.1))
box(16.9, 5.1, 4.2, 0.95, "append; the end?", NORM)
arrow((19.9, 5.08), (19.9, 3.9))
write(20.05, 4.4, "each token id", size=8.5)
box(18.3, 2.9, 3.4, 1.0, "decoder", TABLE)
chapter(21.5, 3.9, 2)
arrow((19.9, 2.88), (19.9, 2.15))
write(19.9, 1.75, "' there', ' was', ' a', ...", ha="center")
write(19.9, 1.1, "the answer, piece by piece", ha="center", weight="bold")
arrow((17.4, 5.08), (17.4, 0.55), (8.2, 0.55), (8.2, 1.56), color=DECODE, lw=2.4)
write(8.55, 0.86, "decode", DECODE, 11, weight="bold")
write(10.35, 0.86, "the new token only, again and again", DECODE, 9)
shape(16.9, 0.86, "[B, 1]", ha="right")
write(17.25, 4.4, "not yet", DECODE, 8.5, ha="right")

target = Path(__file__).parent / "01_map.png"
figure.savefig(target, dpi=130, metadata={"Software": None})

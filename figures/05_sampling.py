"""The pictures of chapter 5: the five steps on one row of logits, and the loop with its request.

python figures/05_sampling.py
"""

from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

from minillm.sampling import (
    apply_min_p,
    apply_repetition_penalty,
    apply_temperature,
    apply_top_k,
    apply_top_p,
)

FIGURES = Path(__file__).parent
WORDS = "frog prince king wolf witch door moon soup spoon".split()
ODDS = [32.0, 16.0, 8.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
BLUE, GREY, INK = "#3b7dd8", "#9aa0a6", "#333333"


def save(name: str) -> None:
    plt.savefig(FIGURES / name, dpi=130, metadata={"Software": None})
    plt.close()


def steps() -> None:
    """One row of logits after each step, as probabilities."""
    seen = torch.tensor([[word == "frog" for word in WORDS]])
    z = torch.tensor([ODDS]).log()
    rows = [("the model", z)]
    for title, step in (
        ("penalty 1.2\n(frog was seen)", lambda z: apply_repetition_penalty(z, seen, 1.2)),
        ("temperature 1.5", lambda z: apply_temperature(z, 1.5)),
        ("top_k 7", lambda z: apply_top_k(z, 7)),
        ("top_p 0.85", lambda z: apply_top_p(z, 0.85)),
        ("min_p 0.3", lambda z: apply_min_p(z, 0.3)),
    ):
        z = step(z)
        rows.append((title, z))
    figure, places = plt.subplots(1, 6, figsize=(11, 3.1), sharey=True, layout="constrained")
    before = None
    for n, (ax, (title, z)) in enumerate(zip(places, rows, strict=True)):
        share = z.softmax(dim=-1)[0]
        ax.barh(range(9), share, height=0.7, color=BLUE)
        if before is not None:
            ax.barh(range(9), before, height=0.7, fill=False, edgecolor=GREY)
        for row, value in enumerate(share.tolist()):
            where = max(value, 0 if before is None else before[row].item()) + 0.02
            text = f"{value:.2f}" if value else "✗"
            color = INK if value else GREY
            ax.text(where, row, text, va="center", fontsize=8, color=color)
        ax.set_title(f"{n}. {title}" if n else title, fontsize=10, loc="left")
        ax.set(xlim=(0, 0.7), ylim=(8.6, -0.6), xticks=[])
        ax.set_yticks(range(9), WORDS)
        ax.tick_params(length=0)
        ax.spines[["top", "right", "bottom"]].set_visible(False)
        before = share
    save("05_steps.png")


def box(ax, x, y, width, height, title, lines=(), color="#eef3fb", edge=BLUE):
    style = "round,pad=0,rounding_size=0.12"
    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=edge)
    )
    top = y + height - 0.32
    ax.text(
        x + width / 2, top, title, ha="center", va="center", fontsize=11, weight="bold", color=INK
    )
    for n, line in enumerate(lines):
        ax.text(x + 0.2, top - 0.44 * (n + 1) - 0.06, line, va="center", fontsize=9.5, color=INK)


def arrow(ax, start, end, text, at, ha="center"):
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=style)
    ax.text(*at, text, ha=ha, va="center", fontsize=9.5, color=INK)


def request() -> None:
    """Who does what: model, loop, request, reader."""
    figure, ax = plt.subplots(figsize=(10, 4.0), layout="constrained")
    ax.set(xlim=(0, 12.4), ylim=(0, 4.7))
    ax.axis("off")
    box(ax, 0.1, 1.85, 2.4, 2.0, "model", ["hidden_states", "head", "(cache: chapter 6)"])
    box(
        ax,
        4.3,
        1.85,
        1.9,
        2.0,
        "loop",
        ["feed what is new,", "show the logits,", "until it is done"],
    )
    owned = [
        "prompt ids, new ids",
        "SamplingParams, own generator",
        "end ids, stop strings, budget, context",
        "text that is safe to show",
        "finish reason",
    ]
    box(ax, 8.2, 1.35, 4.1, 2.85, "request", owned, "#fdf4e3", "#d99a2b")
    arrow(ax, (4.3, 3.2), (2.5, 3.2), "token ids [1, T]", (3.4, 3.47))
    arrow(ax, (2.5, 2.5), (4.3, 2.5), "logits [V]", (3.4, 2.23))
    arrow(ax, (6.2, 3.2), (8.2, 3.2), "accept(logits)", (7.2, 3.47))
    arrow(ax, (8.2, 2.5), (6.2, 2.5), "token id", (7.2, 2.23))
    arrow(ax, (10.2, 1.35), (10.2, 0.45), "pieces of text, as they come", (10.0, 0.85), "right")
    ax.text(
        10.2, 0.22, "the reader", ha="center", va="center", fontsize=10.5, style="italic", color=INK
    )
    ax.text(0.1, 4.05, "one for all requests", fontsize=9.5, color=BLUE)
    ax.text(8.2, 4.4, "one for each sequence", fontsize=9.5, color="#b57a12")
    ax.text(4.3, 4.4, "single row, batch or draft:", fontsize=9.5, color=BLUE)
    ax.text(4.3, 4.05, "only this part changes", fontsize=9.5, color=BLUE)
    save("05_request.png")


if __name__ == "__main__":
    steps()
    request()

"""Draws the picture of appendix A: windows in a long row of tokens, and targets shifted by one.

python figures/appendix_a_training.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
STORY, END, INPUT, TARGET, LINE = "#dce6f2", "#5a5a5a", "#3b6ea5", "#c4622d", "#ffffff"


def box(
    ax, x: float, y: float, text: str, face: str, ink: str = "black", width: float = 1.0
) -> None:
    """One token as a labelled rectangle whose lower left corner is (x, y)."""
    ax.add_patch(plt.Rectangle((x, y), width, 0.8, facecolor=face, edgecolor=LINE, linewidth=2))
    ax.text(x + width / 2, y + 0.38, text, ha="center", va="center", color=ink, fontsize=10)


def draw_row(ax) -> None:
    """The training stories end to end, with three windows at random places."""
    x = 0.0
    for name, width in (("story 1", 4.1), ("story 2", 5.0), ("story 3", 3.2)):
        box(ax, x, 3.2, "", END, width=0.3)
        box(ax, x + 0.3, 3.2, name, STORY, width=width)
        x += width + 0.3
    box(ax, x, 3.2, "", END, width=0.3)
    for start in (1.6, 7.1, 10.0):
        ax.plot([start, start, start + 2.2, start + 2.2], [4.12, 4.3, 4.3, 4.12], color="#3a3a3a")
    ax.text(0, 4.5, "windows from random places (B of them make a batch)", fontsize=10, va="bottom")
    ax.text(x + 0.45, 3.58, "dark: end marker", fontsize=9.5, va="center", color=END)


def draw_window(ax) -> None:
    """One window, cut into inputs and targets."""
    tokens = ["A", " Fox", " saw", " some", " ripe", " grapes", " that"]
    for i, token in enumerate(tokens[:-1]):
        box(ax, 2 + 1.6 * i, 1.5, token, INPUT, "white", width=1.6)
        box(ax, 2 + 1.6 * i, 0, tokens[i + 1], TARGET, "white", width=1.6)
        arrow = {"arrowstyle": "->", "color": "#3a3a3a"}
        ax.annotate("", (2.8 + 1.6 * i, 0.85), (2.8 + 1.6 * i, 1.48), arrowprops=arrow)
    ax.text(1.8, 1.88, "inputs", ha="right", va="center", fontsize=11, color=INPUT)
    ax.text(1.8, 0.38, "targets", ha="right", va="center", fontsize=11, color=TARGET)
    ax.text(11.8, 1.88, "tokens 0 to T − 1", fontsize=9.5, va="center")
    ax.text(11.8, 0.38, "tokens 1 to T", fontsize=9.5, va="center")
    ax.plot([1.6, 2.0], [3.15, 2.38], color="#9a9a9a", linestyle=":")
    ax.plot([3.8, 11.6], [3.15, 2.38], color="#9a9a9a", linestyle=":")


def main() -> None:
    figure, ax = plt.subplots(figsize=(9.6, 3.4), layout="constrained")
    draw_row(ax)
    draw_window(ax)
    ax.set(xlim=(0, 15.6), ylim=(-0.15, 5.1))
    ax.axis("off")
    figure.savefig(HERE / "appendix_a_windows.png", metadata={"Software": None}, dpi=130)


if __name__ == "__main__":
    main()

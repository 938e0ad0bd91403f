"""Draws the conceptual pictures of chapter 3. Run from the root: python figures/03_embedding_and_block.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

HERE = Path(__file__).resolve().parent
INK, FAINT = "#222222", "#888888"
BLUE, ORANGE, GREEN, GREY = "#cfe0f3", "#fbdcc0", "#d3ecd0", "#eeeeee"
SENTENCE = "the cat saw the dog run".split()


def canvas(width: float, height: float):
    """An empty drawing area with square units."""
    figure, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.set_aspect("equal")
    ax.axis("off")
    return figure, ax


def save(figure, name: str) -> None:
    figure.savefig(HERE / name, metadata={"Software": None}, dpi=130)
    plt.close(figure)


def grid(ax, left, top, rows, columns, *, cell=(1.0, 1.0), color=BLUE, texts=None, size=9):
    """A table whose upper left corner is at (left, top); `color` is one, or a function of (row, column)."""
    wide, high = cell
    for r in range(rows):
        for c in range(columns):
            face = color(r, c) if callable(color) else color
            corner = (left + c * wide, top - (r + 1) * high)
            ax.add_patch(Rectangle(corner, wide, high, facecolor=face, edgecolor="#777777", lw=0.7))
            if texts:
                middle = (corner[0] + wide / 2, corner[1] + high / 2)
                ax.text(*middle, texts[r][c], ha="center", va="center", fontsize=size, color=INK)


def arrow(ax, start, end, color=INK, bend=0.0, width=1.2):
    style = f"arc3,rad={bend}"
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, lw=width, color=color, connectionstyle=style,
            shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def label(ax, x, y, text, size=9.5, color=INK, **more):
    ax.text(
        x,
        y,
        text,
        ha=more.pop("ha", "center"),
        va=more.pop("va", "center"),
        fontsize=size,
        color=color,
        **more,
    )


def box(ax, x, y, wide, high, text, color):
    """A rounded box around (x, y)."""
    ax.add_patch(
        FancyBboxPatch(
            (x - wide / 2, y - high / 2), wide, high,
            boxstyle="round,pad=0.02,rounding_size=0.15", facecolor=color, edgecolor="#555555", lw=1,
        )
    )  # fmt: skip
    label(ax, x, y, text, size=10)


def lookup() -> None:
    """Two tables; the row of the token plus the row of the position."""
    figure, ax = canvas(9.4, 3.9)
    ids = [0, 1, 2, 0, 3, 4]
    words = ["the", "cat", "saw", "dog", "run"]
    tokens = [[1, 0], [0, 2], [3, 3], [0, 4], [5, 0]]
    places = [[0, round(0.1 * i, 1)] for i in range(6)]

    def short(rows):
        return [[f"{n:g}" for n in row] for row in rows]

    label(ax, 1.2, 7, "tokens and ids")
    for i, word in enumerate(SENTENCE):
        y = 5.5 - i
        face = ORANGE if word == "the" else GREY
        ax.add_patch(
            Rectangle((0.2, y - 0.35), 2.0, 0.7, facecolor=face, edgecolor="#777777", lw=0.7)
        )
        label(ax, 1.2, y, f"{word}   {ids[i]}")

    label(ax, 6.6, 7, "token table")
    grid(ax, 5.6, 5.5, 5, 2, color=lambda r, c: ORANGE if r == 0 else BLUE, texts=short(tokens))
    for row, word in enumerate(words):
        label(ax, 5.4, 5.0 - row, f"{row}", color=FAINT, ha="right")
        label(ax, 7.75, 5.0 - row, word, color=FAINT, ha="left", size=8.5)
    for i, id_ in enumerate(ids):
        the = SENTENCE[i] == "the"
        arrow(
            ax,
            (2.25, 5.5 - i),
            (5.05, 5.0 - id_),
            ORANGE if the else "#bbbbbb",
            width=2 if the else 1,
        )

    def by_word(row, column):
        return ORANGE if SENTENCE[row] == "the" else BLUE

    for left, title, rows in (
        (10.2, "token rows", [tokens[i] for i in ids]),
        (13.6, "position rows", places),
        (17.0, "x: the sum", [[a[0], a[1] + b[1]] for a, b in zip([tokens[i] for i in ids], places, strict=True)]),
    ):  # fmt: skip
        grid(ax, left, 6, 6, 2, color=GREEN if left == 13.6 else by_word, texts=short(rows))
        label(ax, left + 1, 7, title)
    for i in range(6):
        label(ax, 12.9, 5.5 - i, "+", size=11)
        label(ax, 16.3, 5.5 - i, "=", size=11)
    label(ax, 11.2, -0.5, "[6, 2]", color=FAINT)
    label(ax, 14.6, -0.5, "[6, 2]", color=FAINT)
    label(ax, 18.0, -0.5, "[6, 2]", color=FAINT)
    label(ax, 6.6, -0.5, "[5, 2]", color=FAINT)
    ax.set_xlim(0, 20)
    ax.set_ylim(-0.9, 7.4)
    save(figure, "03_lookup.png")


def attention_shapes() -> None:
    """x -> QKV -> heads -> scores -> merge, as tables of the right proportions."""
    figure, ax = canvas(10.2, 3.4)
    high = 6 * 0.3  # every table has six rows, one per token

    def table(left, top, columns, color, title="", shape=""):
        grid(ax, left, top, 6, columns, cell=(0.3, 0.3), color=color)
        label(ax, left + 0.15 * columns, top + 0.4, title)
        label(ax, left + 0.15 * columns, top - high - 0.25, shape, va="top", color=FAINT, size=8.5)

    def heads(left, top, columns, color, shape=""):
        """Two tables, one behind the other."""
        table(left + 0.35, top + 0.35, columns, color)
        table(left, top, columns, color, shape=shape)

    def parts(row, column):
        return (BLUE, ORANGE, GREEN)[column // 8]

    def triangle(row, column):
        return "#9dbfe3" if column <= row else "white"

    def two_heads(row, column):
        return GREEN if column < 4 else "#a9d6a3"

    top = 4.0
    half = top - high / 2
    table(0, top, 8, GREY, "x", "[B, T, D]\n[1, 6, 8]")
    arrow(ax, (2.6, half), (4.75, half))
    label(ax, 3.6, half + 0.95, "one\nlinear\nlayer", size=7.5)
    table(4.9, top, 24, parts, shape="[B, T, 3·D]\n[1, 6, 24]")
    for i, name in enumerate("QKV"):
        label(ax, 6.1 + 2.4 * i, top + 0.4, name)

    label(ax, 12.6, top + 2.75, "cut in three,\nsplit in 2 heads", size=7.5)
    for i, (name, color) in enumerate(zip("qkv", (BLUE, ORANGE, GREEN), strict=True)):
        row = top + 3.2 - 3.2 * i
        arrow(ax, (12.25, half), (14.7, row - high / 2))
        label(ax, 15.2, row - high / 2, name, ha="right", size=11)
        heads(15.4, row, 4, color, "each [B, H, T, d]\n[1, 2, 6, 4]" if name == "v" else "")

    middle, low = top + 1.5, top - 1.7
    arrow(ax, (17.15, top + 3.2 - high / 2), (20.6, middle - 0.45))
    arrow(ax, (17.15, half), (20.6, middle - 1.35))
    label(ax, 18.55, middle - 0.9, "q kᵀ / √d", size=8.5)
    heads(20.8, middle, 6, triangle, "[B, H, T, S]\n[1, 2, 6, 6]")
    label(ax, 22.0, middle + 1.15, "scores → mask\n→ softmax", size=9)

    arrow(ax, (23.1, middle - 1.2), (25.9, low - 0.4))
    arrow(ax, (17.15, top - 3.2 - high / 2), (25.9, low - 1.2))
    heads(26.1, low, 4, GREEN, "[B, H, T, d]\n[1, 2, 6, 4]")
    label(ax, 27.1, low + 0.75, "shares · v", size=9)
    arrow(ax, (27.9, low - high / 2), (29.9, low - high / 2))
    table(30.1, low, 8, two_heads, "merge", "[B, T, D]\n[1, 6, 8]")
    arrow(ax, (32.7, low - high / 2), (35.5, low - high / 2))
    label(ax, 34.05, low - high / 2 + 0.6, "projection\n[D, D]", size=7.5)
    table(35.7, low, 8, GREY, "+ x", "[B, T, D]\n[1, 6, 8]")
    ax.set_xlim(-0.2, 38.3)
    ax.set_ylim(-2.9, 8.0)
    save(figure, "03_attention_shapes.png")


def head_split() -> None:
    """The same twelve numbers, split into two heads by view and transpose, and by a plain reshape."""
    figure, ax = canvas(9.0, 4.9)
    numbers = [[10 * t + c for c in range(4)] for t in range(3)]
    flat = [n for row in numbers for n in row]

    def head_color(number):
        return BLUE if number % 10 < 2 else ORANGE

    def table(left, top, rows):
        grid(
            ax,
            left,
            top,
            len(rows),
            len(rows[0]),
            color=lambda r, c: head_color(rows[r][c]),
            texts=rows,
            size=10,
        )

    for top, title, color in ((9.2, "correct", "#2c7a2c"), (3.6, "wrong", "#b03030")):
        label(ax, -0.2, top + 0.75, title, size=12, color=color, ha="left", weight="bold")
        table(1.6, top, numbers)
        for t in range(3):
            label(ax, 1.4, top - 0.5 - t, f"token {t}", ha="right", size=8.5, color=FAINT)
        label(ax, 3.6, top - 3.4, "x  [T, D] = [3, 4]", color=FAINT)

    rows = [[row[:2] for row in numbers], [row[2:] for row in numbers]]
    arrow(ax, (5.9, 7.7), (10.3, 7.7))
    label(ax, 8.1, 8.2, "view [T, H, d]")
    label(ax, 8.1, 7.2, "transpose [H, T, d]")
    for h in range(2):
        left = 11.9 + 4.2 * h
        table(left, 9.2, rows[h])
        label(ax, left + 1, 9.6, f"head {h}")
        for t in range(3):
            label(ax, left - 0.15, 8.7 - t, f"token {t}", ha="right", size=8.5, color=FAINT)
    label(ax, 15.0, 5.8, "a row is a token, a head has its own channels", color="#2c7a2c")

    arrow(ax, (5.9, 2.1), (10.3, 2.1))
    label(ax, 8.1, 2.6, "reshape [H, T, d]")
    label(ax, 8.1, 1.6, "in reading order")
    owners = [["0", "0", "1"], ["1", "2", "2"]]
    for h in range(2):
        left = 11.9 + 4.2 * h
        part = flat[6 * h : 6 * h + 6]
        table(left, 3.6, [part[i : i + 2] for i in (0, 2, 4)])
        label(ax, left + 1, 4.0, f"“head {h}”")
        for r in range(3):
            label(
                ax,
                left - 0.15,
                3.1 - r,
                f"token {owners[h][r]}",
                ha="right",
                size=8.5,
                color="#b03030",
            )
    label(ax, 15.0, 0.2, "a “head” is a piece of the sentence", color="#b03030")
    ax.set_xlim(-0.4, 18.6)
    ax.set_ylim(-0.3, 10.3)
    save(figure, "03_head_split.png")


def residual_stream() -> None:
    """A pre-norm block: the stream goes straight through, the parts read and add."""
    figure, ax = canvas(9.4, 2.6)
    stream = 1.0
    ax.plot([0.2, 17.3], [stream, stream], color="#9dbfe3", lw=9, solid_capstyle="butt", zorder=0)
    ax.add_patch(plt.Polygon([(17.3, 0.65), (17.3, 1.35), (18.1, 1.0)], color="#9dbfe3"))
    label(ax, 0.9, stream - 0.75, "x  [B, T, D]")
    label(ax, 17.4, stream - 0.75, "x  [B, T, D]")
    label(ax, 9.1, stream - 0.75, "the stream: only ever added to", color="#4f7fae", size=9)
    for left, name, color, note in (
        (2.2, "attention", ORANGE, "tokens meet"),
        (10.2, "MLP", GREEN, "each token alone"),
    ):
        out = left + 5.3
        arrow(ax, (left, stream + 0.1), (left, 3.0))
        box(ax, left, 3.4, 1.5, 0.8, "norm", GREY)
        arrow(ax, (left + 0.8, 3.4), (left + 2.0, 3.4))
        box(ax, left + 3.1, 3.4, 2.1, 0.8, name, color)
        label(ax, left + 3.1, 4.15, note, size=8.5, color=FAINT)
        ax.plot([left + 4.2, out], [3.4, 3.4], color=INK, lw=1.2)
        arrow(ax, (out, 3.4), (out, stream + 0.42))
        ax.add_patch(
            plt.Circle((out, stream), 0.38, facecolor="white", edgecolor=INK, lw=1.2, zorder=3)
        )
        label(ax, out, stream - 0.02, "+", size=13, zorder=4)
        label(ax, left - 0.15, 2.1, "read", size=8.5, color=FAINT, ha="right")
        label(ax, out + 0.2, 2.3, "write", size=8.5, color=FAINT, ha="left")
    ax.set_xlim(0, 18.6)
    ax.set_ylim(-0.2, 4.6)
    save(figure, "03_residual_stream.png")


if __name__ == "__main__":
    lookup()
    attention_shapes()
    head_split()
    residual_stream()

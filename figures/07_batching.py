"""The pictures of chapter 7: padding on either side, and rows that leave. python figures/07_batching.py"""

from draw import save
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

INK, NEW, OLD, GREY = "#333333", "#3b7dd8", "#c9dcf5", "#9aa0a6"
DARK, GREEN, RED = "#1f4e94", "#2c7a2c", "#b03030"
PROMPTS = ["The fox".split(), "A king said".split(), "Once upon a time there".split()]
LONGEST = max(map(len, PROMPTS))
TOKENS = [3, 12, 7, 20]  # how many tokens each row generates


def cell(ax, x, y, color="white", padding=False):
    """A square with its lower left corner at (x, y); padding is hatched."""
    more = {"hatch": "////", "linewidth": 0.8} if padding else {}
    ax.add_patch(Rectangle((x, y), 0.9, 0.8, facecolor=color, edgecolor=GREY, **more))


def rectangle(ax, left: bool) -> None:
    """The prompts as one rectangle, padded on one side, and the column that the head reads."""
    side, color = ("left", GREEN) if left else ("right", RED)
    ax.text(0, 4.15, f"{side} padding", fontsize=10.5, weight="bold", color=INK)
    for row, words in enumerate(PROMPTS):
        start, y = (LONGEST - len(words) if left else 0), 2 - row
        for column in range(LONGEST):
            place = column - start
            if not 0 <= place < len(words):
                cell(ax, column, y, padding=True)
                continue
            cell(ax, column, y, OLD)
            ax.text(
                column + 0.45,
                y + 0.42,
                words[place],
                ha="center",
                va="center",
                fontsize=9.5,
                color=INK,
            )
            if left:
                ax.text(column + 0.06, y + 0.07, place, fontsize=8.5, color=DARK)
        cell(ax, LONGEST + 0.2, y, NEW)
        ax.text(
            LONGEST + 0.65, y + 0.42, "next", ha="center", va="center", fontsize=9.5, color="white"
        )
        if left:
            ax.text(LONGEST + 0.26, y + 0.07, len(words), fontsize=8.5, color="white")
    last = LONGEST - 1
    ax.add_patch(
        Rectangle((last - 0.06, -0.08), 1.02, 2.98, fill=False, edgecolor=color, linewidth=2.2)
    )
    arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (last + 0.45, 2.93), (last + 0.45, 3.42), arrowprops=arrow)
    ax.text(last + 0.45, 3.52, "the head reads here", ha="center", fontsize=9, color=color)
    note = (
        "a real token in every row; the next one follows it\n"
        "small: positions, counted in each row from its first real token"
        if left
        else "padding in the short rows: their next token is made\n"
        "from a padding token, and a gap lies before it"
    )
    ax.text(0, -0.35, note, fontsize=9, color=color, va="top", linespacing=1.5)
    ax.set(xlim=(-0.2, LONGEST + 1.3), ylim=(-1.15, 4.5))
    ax.axis("off")


def padding() -> None:
    """The same three prompts, padded on the right and on the left."""
    _, places = plt.subplots(1, 2, figsize=(11, 4.0), layout="constrained")
    for ax, left in zip(places, (False, True), strict=True):
        rectangle(ax, left)
    save("07_padding.png")


def timeline(ax, title: str, text: str, frozen: bool) -> None:
    """One square for each row and step; `frozen`: rows that ended stay to the last step."""
    steps = max(TOKENS)
    for row, tokens in enumerate(TOKENS):
        y = len(TOKENS) - 1 - row
        for step in range(steps):
            if step < tokens:
                cell(ax, step, y, NEW)
            elif frozen:
                cell(ax, step, y, padding=True)
        ax.text(-0.25, y + 0.4, f"row {row}", ha="right", va="center", fontsize=9.5, color=INK)
        ax.text(steps + 0.25, y + 0.4, f"{tokens} tokens", va="center", fontsize=9.5, color=INK)
    for step in range(steps):
        rows = len(TOKENS) if frozen else sum(step < tokens for tokens in TOKENS)
        ax.text(step + 0.45, -0.3, rows, ha="center", va="top", fontsize=8.5, color=NEW)
    ax.text(steps + 0.25, -0.3, "rows in this step", va="top", fontsize=8.5, color=NEW)
    ax.text(0, 4.75, title, fontsize=10.5, weight="bold", color=INK)
    ax.text(0, 4.2, text, fontsize=9.5, color=INK)
    ax.set(xlim=(-1.6, steps + 3.6), ylim=(-0.9, 5.3))
    ax.axis("off")


def rows_leave() -> None:
    """What a batch costs while its rows end at different steps."""
    done, all_steps = sum(TOKENS), len(TOKENS) * max(TOKENS)
    _, places = plt.subplots(2, 1, figsize=(11, 5.4), layout="constrained")
    timeline(
        places[0],
        "rows stay until the last one ends",
        f"{len(TOKENS)} rows × {max(TOKENS)} steps = {all_steps} row-steps; "
        f"hatched: {all_steps - done} whose tokens are thrown away",
        frozen=True,
    )
    terms = " + ".join(map(str, TOKENS))
    timeline(places[1], "a row that ends leaves", f"{terms} = {done} row-steps", frozen=False)
    places[1].text(0, -1.2, "step →", fontsize=9, color=INK)
    save("07_rows_leave.png")


if __name__ == "__main__":
    padding()
    rows_leave()

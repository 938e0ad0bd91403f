"""The pictures of chapter 8: two blocks, the turning pairs, the shared heads. python figures/08_llama.py"""

import math

from draw import blank, save
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Wedge

from minillm.kv_cache import cache_bytes
from minillm.llama_layers import rope_frequencies

INK, STREAM, GREY, OTHER = "#263238", "#5b7fa6", "#9aa0a6", "#b03030"
TABLE, BLOCK, NORM, PAPER = "#cfe3f5", "#fde7c8", "#e3efd9", "#fffaf2"
PAIRS, POSITIONS, THETA = 8, 8, 100.0
GROUPS = ["#3b7dd8", "#2c7a2c", "#c77700"]
PALE = ["#c9dcf5", "#d3ead3", "#fbe3c0"]


# ---- two blocks side by side ----------------------------------------------------------------


def box(ax, x, y, width, height, label, color, other=False):
    """A part, centred on x; a red edge where the two models differ."""
    style = "round,pad=0.02,rounding_size=0.1"
    edge = {"ec": OTHER, "lw": 2.0} if other else {"ec": INK, "lw": 1.2}
    corner = (x - width / 2, y)
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, fc=color, **edge))
    ax.text(x, y + height / 2, label, ha="center", va="center_baseline", size=9.5, color=INK)


def arrow(ax, *points, **style):
    """A line through the points, with its head at the last one."""
    options = {"arrowstyle": "-|>", "mutation_scale": 11, "lw": 1.2, "color": INK} | style
    for start, end in zip(points[:-2], points[1:-1], strict=True):
        ax.plot(*zip(start, end, strict=True), color=options["color"], lw=options["lw"])
    ax.add_patch(FancyArrowPatch(*points[-2:], shrinkA=0, shrinkB=0, **options))


def sign(ax, x, y, symbol, color=INK):
    style = {"boxstyle": "circle,pad=0.05", "fc": "white", "ec": color}
    ax.text(x, y, symbol, size=11, ha="center", va="center", color=color, bbox=style, zorder=5)


def skeleton(ax, x, title, norm):
    """What both have: the stream at x, a norm before each half, and the sums."""
    middle = x + 3.5
    ax.text(x - 0.8, 13.3, title, size=12, weight="bold", color=INK)
    style = "round,pad=0.02,rounding_size=0.1"
    ax.add_patch(FancyBboxPatch((x - 0.5, 2.2), 7, 10.1, boxstyle=style, fc=PAPER, ec=INK, lw=1.2))
    box(ax, x, 0.25, 2.0, 0.7, "token table", TABLE)
    arrow(ax, (x, 0.97), (x, 12.95), lw=3, color=STREAM)
    for entry, exit in ((2.55, 7.0), (7.45, 12.0)):
        arrow(ax, (x, entry), (middle, entry), (middle, entry + 0.38))
        box(ax, middle, entry + 0.4, 2.2, 0.6, norm, NORM, other=True)
        arrow(ax, (middle, exit - 0.36), (middle, exit), (x + 0.25, exit))
        sign(ax, x, exit, "+")
    box(ax, middle, 5.95, 5.2, 0.65, "softmax(q kᵀ / √d) v, out", BLOCK)


def heads(ax, middle, parts):
    """q, k and v, each as wide as its number of heads."""
    for offset, width, label, other in parts:
        x = middle + offset
        arrow(ax, (middle + offset * 0.35, 3.57), (x, 4.18))
        box(ax, x, 4.2, width, 0.6, label, BLOCK, other)
        arrow(ax, (x, 4.82), (x, 5.93))


def gpt2(ax, x):
    middle = x + 3.5
    skeleton(ax, x, "GPT-2", "LayerNorm")
    box(ax, x + 3.5, 0.25, 2.3, 0.7, "position table", TABLE, other=True)
    arrow(ax, (middle, 0.97), (middle, 1.6), (x + 0.25, 1.6), color=OTHER)
    sign(ax, x, 1.6, "+", OTHER)
    heads(
        ax,
        middle,
        [(-1.9, 1.78, "q: 12 heads", False), (0, 1.7, "k: 12", True), (1.85, 1.7, "v: 12", True)],
    )
    for y, label, other in ((8.95, "up", False), (10.0, "GELU", True), (11.05, "down", False)):
        box(ax, middle, y, 2.2, 0.6, label, BLOCK, other)
        arrow(ax, (middle, y - 0.45), (middle, y - 0.02))


def llama(ax, x):
    middle = x + 3.5
    skeleton(ax, x, "Llama (SmolLM2-135M)", "RMSNorm")
    heads(
        ax,
        middle,
        [(-1.4, 2.4, "q: 9 heads", False), (0.75, 0.95, "k: 3", True), (2.1, 0.95, "v: 3", True)],
    )
    for offset in (-1.4, 0.75):
        sign(ax, middle + offset, 5.35, "↺", OTHER)
    ax.text(x + 0.3, 1.6, "nothing is added here", size=9, va="center", color=OTHER)
    left, right = middle - 1.3, middle + 1.3
    for side in (left, right):
        arrow(ax, (middle + (side - middle) * 0.4, 8.47), (side, 8.93))
    box(ax, left, 8.95, 2.0, 0.6, "gate, SiLU", BLOCK, other=True)
    box(ax, right, 8.95, 2.0, 0.6, "up", BLOCK)
    arrow(ax, (left, 9.57), (left, 10.3), (middle - 0.25, 10.3))
    arrow(ax, (right, 9.57), (right, 10.3), (middle + 0.25, 10.3))
    sign(ax, middle, 10.3, "×", OTHER)
    arrow(ax, (middle, 10.55), (middle, 11.03))
    box(ax, middle, 11.05, 2.2, 0.6, "down", BLOCK)


NOTES = [
    (11.35, "no biases: in a block of GPT-2 each\nlinear layer and norm has one"),
    (9.8, "SwiGLU: two branches, and one says\nhow much of the other passes"),
    (8.15, "RMSNorm: no mean, each token is\ndivided by its root mean square"),
    (5.35, "RoPE: q and k turn by an angle,\nin every layer; v does not"),
    (4.5, "GQA: 3 query heads share a KV head"),
]


def side_by_side() -> None:
    """GPT-2's block and Llama's: the same skeleton, other parts."""
    ax = blank(11, 7.6, 20.6, 14.1)
    gpt2(ax, 1.25)
    llama(ax, 9.2)
    for y, text in NOTES:
        ax.text(15.95, y, text, size=9, va="center", color=OTHER, linespacing=1.35)
    ax.text(15.95, 13.3, "red: what differs", size=10.5, weight="bold", color=OTHER)
    save("08_side_by_side.png")


# ---- the angles of the pairs ----------------------------------------------------------------


def clock(ax, x, y, angle) -> None:
    """A pair at (1, 0), turned by the angle against the clock, and the way it has come."""
    radius = 0.38
    ax.add_patch(Circle((x, y), radius, fc="white", ec=GREY, lw=1))
    ax.add_patch(Wedge((x, y), radius, 0, math.degrees(min(angle, 2 * math.pi)), fc=PALE[0]))
    end = (x + radius * math.cos(angle), y + radius * math.sin(angle))
    ax.plot((x, end[0]), (y, end[1]), color=GROUPS[0], lw=2, solid_capstyle="round")
    ax.plot(*end, "o", color=GROUPS[0], ms=4)


def angles() -> None:
    """A hand for each pair and position, with the engine's own frequencies."""
    frequencies = rope_frequencies(2 * PAIRS, THETA).tolist()
    ax = blank(8.6, 7.9, 11.2, 10.3)
    for pair, frequency in enumerate(frequencies):
        y = 8.3 - pair
        ax.text(1.35, y, f"pair {pair}", ha="right", va="center", size=9.5, color=INK)
        for position in range(POSITIONS):
            clock(ax, 2.0 + position, y, position * frequency)
        ax.text(9.65, y, f"{frequency:.3f} rad", va="center", size=9.5, color=INK)
    for position in range(POSITIONS):
        ax.text(2.0 + position, 9.0, position, ha="center", size=9.5, color=INK)
    ax.text(1.35, 9.0, "position", ha="right", size=9.5, color=INK)
    ax.text(9.65, 9.0, "one step", size=9.5, color=INK)
    title = f"head_dim {2 * PAIRS}, theta {THETA:.0f}: each pair of numbers is a hand"
    ax.text(0.4, 9.7, title, size=10.5, weight="bold", color=INK)
    ax.text(
        0.4,
        0.3,
        "fast pairs tell neighbors apart, slow pairs tell near from far",
        size=9.5,
        color=GROUPS[0],
    )
    save("08_angles.png")


# ---- which query heads share a KV head ------------------------------------------------------


def head(ax, x, y, width, label, group) -> None:
    style = "round,pad=0.02,rounding_size=0.08"
    corner = (x - width / 2, y)
    ax.add_patch(
        FancyBboxPatch(corner, width, 0.62, boxstyle=style, fc=PALE[group], ec=GROUPS[group])
    )
    ax.text(x, y + 0.31, label, ha="center", va="center_baseline", size=9.5, color=INK)


def sharing(ax, left, title, n_heads, n_kv_heads) -> None:
    """Query heads above, KV heads below, and a line for each query head."""
    group = n_heads // n_kv_heads
    ax.text(left - 0.4, 4.35, title, size=10.5, weight="bold", color=INK)
    for n in range(n_heads):
        kv, color = n // group, n // (n_heads // 3)
        below = left + kv * group + (group - 1) / 2
        ax.plot((left + n, below), (3.0, 1.85), color=GROUPS[color], lw=1.4, zorder=0)
        head(ax, left + n, 3.0, 0.72, f"q{n}", color)
        if n % group == 0:
            head(ax, below, 1.2, 0.72, f"kv{kv}", color)
    size = cache_bytes(30, n_kv_heads, 64, 1, 4)
    ax.text(
        left - 0.4,
        0.5,
        f"cache: 2 × 30 layers × {n_kv_heads} KV heads × 64 numbers × 4 bytes\n= {size:,} bytes per token",
        size=9.5,
        va="center",
        color=INK,
        linespacing=1.5,
    )


def shared_heads() -> None:
    """SmolLM2's nine query heads with a KV head each, and as they are, with three."""
    ax = blank(11, 2.9, 19.4, 4.9)
    sharing(ax, 0.8, "multi-head attention: 9 query heads, 9 KV heads", 9, 9)
    sharing(ax, 10.6, "grouped-query attention: 9 query heads, 3 KV heads", 9, 3)
    save("08_shared_heads.png")


if __name__ == "__main__":
    side_by_side()
    angles()
    shared_heads()

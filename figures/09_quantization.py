"""The pictures of chapter 9: who shares a scale, codes in bytes, decode and prefill. python figures/09_quantization.py"""

import torch
from draw import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PALE_BLUE,
    PALE_GREEN,
    PALE_ORANGE,
    PALE_RED,
    RED,
    blank,
    save,
    write,
)
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from minillm.codes import dequantize_int4, pack, quantize_int4


def cell(ax, x, y, width, height, label, color, size=9.5):
    """A rectangle with its lower left corner at (x, y), and a label in its middle."""
    ax.add_patch(Rectangle((x, y), width, height, fc=color, ec=GREY, lw=0.9))
    ax.text(
        x + width / 2,
        y + height / 2,
        label,
        ha="center",
        va="center_baseline",
        size=size,
        color=INK,
    )


# ---- one scale for the matrix, for each row, for each group ---------------------------------

WEIGHTS = torch.tensor(
    [
        [0.05, -0.11, 0.08, 0.13, -0.07, 0.02, -0.13, 0.10],
        [0.26, 4.20, -0.30, 0.11, 0.14, -0.06, 0.09, -0.12],
        [-0.03, 0.12, -0.09, 0.06, 0.11, -0.14, 0.01, -0.08],
    ]
)
OUTLIER = WEIGHTS.max().item()
SHARED = [  # title, how many numbers share a scale
    ("one scale for the matrix", WEIGHTS.numel()),
    ("one scale for each row", 8),
    ("one scale for each group of 4", 4),
]
EDGE = 0.36  # the number line goes from -EDGE to EDGE; the outlier lies far to the right


def sign(number: float) -> str:
    return f"{number:.2f}".replace("-", "−")


def place(left, number):
    """Where a number lies on a line that begins at `left`; only the outlier is off the scale."""
    return left + (number + EDGE) / (2 * EDGE) * 4.7 if number < EDGE else left + 5.55


def line(ax, left, y, weights, step, levels):
    """A number line with the marks of the grid, and each weight with an arrow to its mark."""
    wide = step > 0.1
    color = RED if wide else BLUE
    ax.plot((left, left + 4.85), (y, y), color=GREY, lw=1)
    marks = levels[(levels > -EDGE) & (levels < EDGE)].tolist()
    if max(levels) > EDGE:  # the line is interrupted
        ax.plot((left + 5.1, left + 5.9), (y, y), color=GREY, lw=1)
        write(ax, left + 4.98, y, "//", size=8, ha="center", color=GREY)
        marks.append(OUTLIER)
    for mark in marks:
        x = place(left, mark)
        ax.plot((x, x), (y - 0.2, y + 0.06), color=color, lw=1.6 if wide else 0.9)
        if wide:
            write(ax, x, y - 0.38, sign(mark), size=8.8, ha="center", color=color)
    for weight, kept in weights:
        x, end = place(left, weight), place(left, kept)
        ax.plot((x, end), (y + 0.5, y), color=INK, lw=0.7, alpha=0.6)
        ax.plot(x, y + 0.5, "o", ms=4.5, mfc="white", mec=RED if weight == OUTLIER else INK, mew=1)
        ax.plot(end, y, "o", ms=3.5, color=color, zorder=4)
    if wide:
        write(
            ax, place(left, 0.15), y - 0.38, f"step {step:.1f}", size=8.8, ha="center", color=color
        )
    else:
        write(ax, left + 4.95, y, f"step {step:.3f}", size=8.5, color=color)


def lines(ax, left, title, size):
    """Three rows on number lines, where `size` neighbors share a scale."""
    codes, scales, zeros = quantize_int4(WEIGHTS.reshape(-1, size), size)
    kept = dequantize_int4(codes, scales, zeros).view(3, 8)
    grid = zeros + (torch.arange(16) - 8) * scales  # [groups, 1] -> [groups, 16]
    write(ax, left, 7.85, title, size=10.5, weight="bold")
    for row in range(3):
        for first in range(0, 8, min(size, 8)):
            piece = slice(first, first + min(size, 8))
            y = 6.2 - 2.3 * row + (0 if size > 4 else 0.55 - 1.15 * first / 4)
            group = (8 * row + first) // size
            pairs = list(zip(WEIGHTS[row, piece].tolist(), kept[row, piece].tolist(), strict=True))
            line(ax, left, y, pairs, scales[group].item(), grid[group])
    error = (kept - WEIGHTS).square().mean().sqrt()
    write(ax, left, 0.35, f"root mean square of the error: {error:.3f}")


def scales() -> None:
    """Nine lines by minillm.codes: how far an outlier's step reaches."""
    ax = blank(11, 7.2, 22, 12)
    write(ax, 1.35, 11.45, "24 weights, one of them an outlier", size=10.5, weight="bold")
    for row, numbers in enumerate(WEIGHTS.tolist()):
        y = 10.3 - 0.75 * row
        write(ax, 1.2, y + 0.32, f"row {row}", ha="right")
        write(ax, 1.2, 6.2 - 2.3 * row, f"row {row}", ha="right")
        for column, number in enumerate(numbers):
            color = PALE_RED if number == OUTLIER else "white"
            x = 1.35 + 1.3 * column + (0.12 if column > 3 else 0)
            cell(ax, x, y, 1.3, 0.65, sign(number), color)
    for n, text in enumerate(["circle: a weight", "dot: the mark it falls on, one of 16"]):
        write(ax, 12.6, 10.62 - 0.55 * n, text)
    write(ax, 12.6, 9.52, "red: the outlier widens the step", color=RED)
    for n, (title, size) in enumerate(SHARED):
        lines(ax, 1.35 + 6.95 * n, title, size)
    save("09_scales.png")


# ---- eight codes in four bytes --------------------------------------------------------------

CODES = torch.tensor([3, 15, 8, 0, 12, 7, 9, 4], dtype=torch.uint8)


def packing() -> None:
    """Codes above, bytes below: the first of a pair in the low half, which is written right."""
    ax = blank(11, 4.6, 22, 9.2)
    write(ax, 0.6, 8.6, "eight codes of 4 bits in four bytes", size=10.5, weight="bold")
    write(ax, 12.9, 8.6, "a group of 32 weights", size=10.5, weight="bold")
    for n, code in enumerate(CODES.tolist()):
        color = PALE_BLUE if n % 2 == 0 else PALE_ORANGE
        cell(ax, 0.6 + 1.4 * n, 6.6, 1.3, 0.9, str(code), color)
    for n, byte in enumerate(pack(CODES).tolist()):
        x, bits = 0.6 + 2.8 * n, f"{byte:08b}"
        cell(ax, x, 3.6, 1.35, 0.9, bits[:4], PALE_ORANGE)
        cell(ax, x + 1.35, 3.6, 1.35, 0.9, bits[4:], PALE_BLUE)
        ax.add_patch(Rectangle((x, 3.6), 2.7, 0.9, fill=False, ec=INK, lw=1.6))
        for start, end, color in ((0.65, 2.02, BLUE), (2.05, 0.67, ORANGE)):
            style = {"arrowstyle": "-|>", "mutation_scale": 11, "lw": 1.3, "color": color}
            ax.add_patch(
                FancyArrowPatch((x + start, 6.55), (x + end, 4.55), shrinkA=0, shrinkB=0, **style)
            )
        write(ax, x + 1.35, 3.1, f"byte {byte}", size=9, ha="center")
    write(ax, 0.6, 1.9, "blue: the first code of a pair, in the low half (× 1)", color=BLUE)
    write(ax, 0.6, 1.2, "orange: the second, in the high half (× 16)", color=ORANGE)
    first, second = CODES[:2].tolist()
    write(ax, 0.6, 0.5, f"{first} + 16 × {second} = {pack(CODES)[0].item()}")
    group(ax)
    save("09_packing.png")


def group(ax) -> None:
    """What a group takes: its codes, and the scale and the zero that they share."""
    count, bits, number = 32, 4, 16
    for n in range(count):
        cell(ax, 12.9 + 0.53 * (n % 16), 6.9 - 0.62 * (n // 16), 0.5, 0.58, "", PALE_BLUE)
    write(ax, 12.9, 5.75, f"{count} codes × {bits} bits")
    cell(ax, 12.9, 4.4, 2.09, 0.8, "scale", PALE_GREEN)
    cell(ax, 15.02, 4.4, 2.09, 0.8, "zero", PALE_GREEN)
    write(ax, 12.9, 3.9, f"{number} bits each, shared by the {count}")
    total = count * bits + 2 * number
    write(ax, 12.9, 2.6, f"{count} × {bits} + {number} + {number} = {total} bits")
    write(ax, 12.9, 1.9, f"{total} / {count} = {total / count:g} bits per weight", weight="bold")
    more = 32 * count / total
    write(ax, 12.9, 1.2, f"fp32 takes 32 bits per weight, {more:g} times as many")


# ---- what decides in decode and in prefill --------------------------------------------------

LAYERS, WIDTH, VOCABULARY, POSITIONS = 12, 768, 50257, 1024  # GPT-2 124M
MATRICES = LAYERS * 12 * WIDTH * WIDTH  # qkv 3, out 1, up 4, down 4 times width²
ROWS = LAYERS * 9 * WIDTH  # qkv 3, out 1, up 4, down 1 times width: one scale each in int8
TABLE = VOCABULARY * WIDTH
OTHERS = LAYERS * 13 * WIDTH + 2 * WIDTH  # biases (9) and norms (4) of a block, the last norm
assert MATRICES + TABLE + OTHERS + POSITIONS * WIDTH == 124_439_808
SECOND = {"bytes": 20e9, "multiplications": 100e9}  # what the machine of the picture does


def bytes_read() -> dict[str, int]:
    """What one step reads of the weights; of the positions only a row, which is left out."""
    table = TABLE + 2 * VOCABULARY  # int8, and a scale of 16 bits for each row
    return {
        "fp32": 4 * (MATRICES + TABLE + OTHERS),
        "bf16": 2 * (MATRICES + TABLE + OTHERS),
        "int8": MATRICES + 2 * ROWS + table + 2 * OTHERS,
        "int4": MATRICES * 5 // 8 + table + 2 * OTHERS,
    }


def bars(ax, title, tokens, verdict, color) -> None:
    """Two bars for each format: the time to read the weights, and the time to multiply."""
    products = MATRICES * tokens + TABLE  # the head is asked for the last token only
    ax.set_title(title, loc="left", size=10.5, weight="bold", color=INK, pad=30)
    times = []
    for n, size in enumerate(bytes_read().values()):
        reading = 1000 * size / SECOND["bytes"]
        work = 1000 * products / SECOND["multiplications"]
        many = (
            f"{products / 1e9:.1f} billion" if products > 1e9 else f"{products / 1e6:.0f} million"
        )
        times += [reading, work]
        ax.barh(n - 0.19, reading, 0.34, color=BLUE)
        ax.barh(n + 0.19, work, 0.34, color=ORANGE)
        for y, time, text in ((n - 0.19, reading, f"{size / 1e6:.0f} MB"), (n + 0.19, work, many)):
            ax.annotate(
                text, (time, y), (5, 0), textcoords="offset points", va="center", size=9, color=INK
            )
    ax.set_yticks(range(4), bytes_read(), size=10, color=INK)
    ax.set(xlim=(0, 1.27 * max(times)), ylim=(3.6, -0.6))
    ax.text(0, 1.035, verdict, transform=ax.transAxes, size=9.5, color=color)
    ax.set_xlabel("milliseconds", size=9, color=INK)
    ax.tick_params(axis="x", labelsize=9, colors=INK)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)


def decode_prefill() -> None:
    """The same bytes in both steps, and 512 times the multiplications in the blocks."""
    figure, places = plt.subplots(1, 2, figsize=(11, 4.6))
    figure.subplots_adjust(left=0.055, right=0.985, top=0.83, bottom=0.24, wspace=0.14)
    bars(places[0], "a decode step: 1 token", 1, "the bytes decide: fewer bits, less time", BLUE)
    bars(
        places[1],
        "a prefill: 512 tokens",
        512,
        "the multiplications decide, and they stay the same",
        ORANGE,
    )
    places[1].set_xlabel("milliseconds, on another scale")
    pace = (
        f"at {SECOND['bytes'] / 1e9:.0f} GB and "
        f"{SECOND['multiplications'] / 1e9:.0f} billion multiplications a second"
    )
    figure.text(0.055, 0.045, f"GPT-2 124M {pace}", size=9.5, color=INK)
    figure.text(0.49, 0.045, "blue: reading the weights", size=9.5, color=BLUE)
    figure.text(0.69, 0.045, "orange: multiplying with them", size=9.5, color=ORANGE)
    save("09_decode_prefill.png")


if __name__ == "__main__":
    scales()
    packing()
    decode_prefill()

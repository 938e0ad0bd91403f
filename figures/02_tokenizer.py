"""Draws the pictures of chapter 2: the path of a text, the merges of a word, an emoji in a stream."""

from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from minillm.bpe import BYTE_TO_CHAR
from minillm.tokenizer import Tokenizer

FOLDER = Path(__file__).parent
COLORS = ["#cfe8fc", "#fde2b8", "#d5f0d0", "#f9d3d8", "#e3d9f5"]
INK, GRAY = "#222222", "#8a8a8a"


def canvas(width: float, height: float):
    fig, axis = plt.subplots(figsize=(width, height), layout="constrained")
    axis.set_xlim(0, width)
    axis.set_ylim(0, height)
    axis.axis("off")
    return fig, axis


def box(axis, x, y, width, text, color, height=0.42, size=11, edge="none", font="DejaVu Sans Mono"):
    axis.add_patch(
        FancyBboxPatch(
            (x, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=color,
            edgecolor=edge,
            linewidth=1.4,
        )
    )
    axis.text(x + width / 2, y, text, ha="center", va="center", size=size, color=INK, family=font)


def save(fig, name):
    fig.savefig(FOLDER / name, dpi=130, metadata={"Software": None})
    plt.close(fig)


def tokenizer_path(gpt2: Tokenizer) -> None:
    """Text, pieces, bytes, tokens and ids of one short text, under each other."""
    text, pieces = "a tokenizer!", ["a", " tokenizer", "!"]
    fig, axis = canvas(8.6, 3.7)
    left, unit = 1.5, 0.56
    rows = {"text": 3.35, "pieces": 2.6, "bytes": 1.85, "tokens": 1.1, "ids": 0.35}
    for name, y in rows.items():
        axis.text(0.1, y, name, va="center", size=12, color=GRAY)
    box(axis, left, rows["text"], unit * len(text) - 0.06, repr(text)[1:-1], "#eeeeee")
    place = 0
    for n, piece in enumerate(pieces):
        shown = piece.replace(" ", "␣")
        box(axis, left + unit * place, rows["pieces"], unit * len(piece) - 0.06, shown, COLORS[n])
        for k, byte in enumerate(piece.encode()):
            x = left + unit * (place + k)
            box(axis, x, rows["bytes"], unit - 0.06, str(byte), COLORS[n], size=9.5)
        at = place
        for token_id in gpt2.encode(piece):
            token = gpt2.token_bytes(token_id)
            x, width = left + unit * at, unit * len(token) - 0.06
            box(axis, x, rows["tokens"], width, "".join(BYTE_TO_CHAR[b] for b in token), COLORS[n])
            box(axis, x, rows["ids"], width, str(token_id), COLORS[n], size=10)
            at += len(token)
        place += len(piece)
    steps = ["cut by the pattern", "write as UTF-8", "join by rank", "look up"]
    for label, (upper, lower) in zip(steps, pairwise(rows.values()), strict=True):
        middle = (upper + lower) / 2
        axis.annotate(
            "",
            (1.2, lower + 0.13),
            (1.2, upper - 0.13),
            arrowprops={"arrowstyle": "->", "color": GRAY},
        )
        axis.text(left, middle, label, va="center", size=9, color=GRAY)
    save(fig, "02_tokenizer_path.png")


def merge_tree(gpt2: Tokenizer, word: str = " tokenizer") -> None:
    """The merges of one word: bytes below, ids on top, the rank of each join on the right."""
    fig, axis = plt.subplots(figsize=(8.6, 4.6), layout="constrained")

    def node(name: str, x: float, y: float, color: str) -> tuple[str, float, float]:
        style = {"boxstyle": "round,pad=0.3", "fc": color, "ec": "none"}
        axis.text(
            x, y, name, ha="center", va="center", size=12, family="DejaVu Sans Mono", bbox=style
        )
        return name, x, y

    def line(xs: list[float], ys: list[float]) -> None:
        axis.plot(xs, ys, color="#9bbbd4", lw=1.6, zorder=0)

    ids = [gpt2._byte_ids[byte] for byte in word.encode()]
    nodes = [node(BYTE_TO_CHAR[b], float(n), 0.0, COLORS[0]) for n, b in enumerate(word.encode())]
    edge, level = len(nodes) - 0.4, 0
    while pairs := [(gpt2._merges[p], i) for i, p in enumerate(pairwise(ids)) if p in gpt2._merges]:
        (rank, new_id), i = min(pairs)
        level += 1
        (left, x1, y1), (right, x2, y2) = nodes[i : i + 2]
        line([x1, x1, x2, x2], [y1, level, level, y2])
        axis.plot([-0.5, edge], [level, level], color="#eeeeee", lw=0.8, zorder=-1)
        axis.text(edge + 0.2, level, f"{level}. rank {rank:,}", va="center", size=10, color=GRAY)
        ids[i : i + 2] = [new_id]
        nodes[i : i + 2] = [node(left + right, (x1 + x2) / 2, level, COLORS[1])]
    for token_id, (_, x, y) in zip(ids, nodes, strict=True):
        line([x, x], [y, level + 1])
        node(f"id {token_id}", x, level + 1, COLORS[2])
    axis.set_xlim(-0.6, edge + 1.8)
    axis.set_ylim(-0.6, level + 1.6)
    axis.axis("off")
    save(fig, "02_merge_tree.png")


def stream(gpt2: Tokenizer) -> None:
    """The tokens of "Hi 😀!" arriving one by one: their bytes, what is shown, what is held back."""
    ids = gpt2.encode("Hi 😀!")
    fig, axis = canvas(8.6, 3.1)
    rows = {"token arrives": 2.6, "its bytes": 1.9, "held back": 1.2, "shown": 0.5}
    for name, y in rows.items():
        axis.text(0.1, y, name, va="center", size=12, color=GRAY)
    decoder, held = gpt2.incremental_decoder(), b""
    for n, token_id in enumerate(ids):
        x, width = 1.9 + 1.68 * n, 1.52
        token = gpt2.token_bytes(token_id)
        piece, held = decoder.add(token_id), held + token
        held = held[len(piece.encode()) :]
        box(axis, x, rows["token arrives"], width, str(token_id), COLORS[n])
        box(axis, x, rows["its bytes"], width, token.hex(" ").upper(), COLORS[n], size=10)
        if held:
            box(
                axis,
                x,
                rows["held back"],
                width,
                held.hex(" ").upper(),
                "#ffffff",
                size=10,
                edge="#c0392b",
            )
        else:
            axis.text(
                x + width / 2, rows["held back"], "nothing", ha="center", va="center", color=GRAY
            )
        font = "DejaVu Sans" if piece == "😀" else "DejaVu Sans Mono"
        box(axis, x, rows["shown"], width, piece.replace(" ", "␣"), COLORS[n], size=12, font=font)
    save(fig, "02_stream.png")


if __name__ == "__main__":
    tokenizer = Tokenizer.from_pretrained("gpt2")
    tokenizer_path(tokenizer)
    merge_tree(tokenizer)
    stream(tokenizer)

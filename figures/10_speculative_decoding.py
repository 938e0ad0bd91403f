"""The pictures of chapter 10: a round, the caches after it, a rule for draws. python figures/10_speculative_decoding.py"""

from types import SimpleNamespace

import torch
from draw import (
    BLUE,
    DIM,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE_BLUE,
    PALE_GREEN,
    PALE_GREY,
    PALE_ORANGE,
    PALE_RED,
    RED,
    blank,
    save,
    write,
)
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import nn

from minillm.generation import Request
from minillm.kv_cache import KVCache
from minillm.sampling import SamplingParams
from minillm.speculative import ModelDraft, speculate


def box(ax, x, y, word, color, crossed=False, **style):
    """A word in a rectangle with its lower left corner at (x, y); crossed out where it fails."""
    edge = {"ec": GREY, "lw": 0.9} | style
    ax.add_patch(Rectangle((x, y), WIDTH, HEIGHT, fc=color, **edge))
    middle, height = x + WIDTH / 2, y + HEIGHT / 2
    ink = DIM if color == PALE_GREY else INK
    write(ax, middle, height, word, ha="center", va="center_baseline", color=ink)
    if crossed:
        ax.plot((x + 0.3, x + WIDTH - 0.3), (height, height), color=ink, lw=1)


def arrow(ax, start, end, color=GREY, **style):
    """From one point to another."""
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "lw": 1.3} | style
    ax.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, color=color, **style))


# ---- a target and a draft that are small enough to follow ------------------------------------

WORDS = ["the", "king", "and", "fox"]
PROMPT = ["the", "fox", "and", "the"]
LEFT, STEP, WIDTH, HEIGHT = 4.2, 1.94, 1.8, 0.8  # where the boxes begin, and their size
K, NEWEST = 4, 3  # guesses, and the column of the newest token


class Bigram(nn.Module):
    """Always the same word after a word. Its cache holds the ids that it was fed."""

    def __init__(self, following: dict[str, str]):
        super().__init__()
        table = torch.zeros(len(WORDS), len(WORDS))
        for word, after in following.items():
            table[WORDS.index(word), WORDS.index(after)] = 1
        self.logits = nn.Parameter(table)  # [V, V]
        self.config = SimpleNamespace(
            vocab_size=len(WORDS), context_length=512, cache_shape=(1, 1, 1)
        )

    def hidden_states(self, token_ids, cache=None):
        if cache is not None:
            fed = token_ids[:, None, :, None].float()  # [1, T] -> [1, 1, T, 1]
            cache.update(0, fed, fed)
        return self.logits[token_ids]  # [B, T] -> [B, T, V]

    def head(self, x):
        return x


TARGET = {"the": "king", "king": "and", "and": "the", "fox": "and"}
DRAFT = TARGET | {"and": "fox"}  # king and fox and
CASES = {  # accepted guesses -> a target that accepts so many of this draft's
    0: TARGET | {"the": "fox"},
    2: TARGET,
    4: DRAFT,
}


class Watched(KVCache):
    """A cache that notes how many positions it held before each `truncate`."""

    def truncate(self, length: int) -> None:
        self.fed = self.length
        super().truncate(length)

    def words(self) -> list[str]:
        """All that was fed, also what was cut off again: nothing is cleared."""
        return [WORDS[int(number)] for number in self.keys[0][0, 0, : self.fed, 0]]


@torch.inference_mode()
def one_round(target: Bigram):
    """One round of speculate with four guesses: the request, and the two caches."""
    ids = [WORDS.index(word) for word in PROMPT]
    request = Request(ids, SamplingParams(max_new_tokens=20), context=64)
    draft = ModelDraft(Bigram(DRAFT), k=K)
    draft.cache, cache = (Watched.for_model(target, 64) for _ in range(2))
    next(speculate(target, request, cache, draft))  # yields behind the round
    return request, cache, draft.cache


# ---- one round -------------------------------------------------------------------------------


def place(column: int) -> float:
    return LEFT + STEP * column


def columns(ax, y, first, words, colors, crossed=()):
    """Words in neighboring boxes, the first in column `first`."""
    for n, (word, color) in enumerate(zip(words, colors, strict=True)):
        box(ax, place(first + n), y, word, color, n in crossed)


def round_() -> None:
    """The lesson's four guesses: two hold, the third is replaced, the fourth is thrown away."""
    target = Bigram(TARGET)
    request, cache, _ = one_round(target)
    guesses, accepted = cache.words()[len(PROMPT) :], request.speculation.accepted
    after = [WORDS[n] for n in request.token_ids]
    row = torch.tensor([[WORDS.index(word) for word in [PROMPT[-1], *guesses]]])
    own = [WORDS[n] for n in target.hidden_states(row)[0].argmax(-1)]
    assert guesses == ["king", "and", "fox", "and"] and own == ["king", "and", "the", "and", "the"]
    assert (accepted, after, request.speculation.target_calls) == (2, ["king", "and", "the"], 1)

    ax, fates = blank(11, 5.5, 22, 11), [PALE_GREEN, PALE_GREEN]
    one_forward(ax)
    columns(ax, 8, 0, PROMPT[:-1], ["white"] * 3)
    box(ax, place(NEWEST), 8, PROMPT[-1], PALE_ORANGE, ec=ORANGE, lw=1.6)
    columns(ax, 8, 4, guesses, [*fates, PALE_RED, PALE_GREY], crossed=(2, 3))
    columns(ax, 4.35, NEWEST, own, [*fates, PALE_BLUE, PALE_GREY, PALE_GREY], crossed=(3, 4))
    columns(ax, 1.9, 0, PROMPT, ["white"] * 4)
    columns(ax, 1.9, 4, after, [*fates, PALE_BLUE])
    words(ax)
    save("10_round.png")


def one_forward(ax) -> None:
    """The target between the rows, and the arrows from each row to the next."""
    wide = STEP * K + WIDTH
    ax.add_patch(Rectangle((place(NEWEST), 6.25), wide, 0.9, fc="white", ec=INK, lw=1.6))
    text = "one forward of the target over five tokens"
    write(ax, place(NEWEST) + wide / 2, 6.7, text, ha="center")
    middles = [place(NEWEST + n) + WIDTH / 2 for n in range(K + 1)]
    for middle in middles:
        arrow(ax, (middle, 7.95), (middle, 7.2))
        arrow(ax, (middle, 6.2), (middle, 5.25))
    for n, color in enumerate((GREEN, GREEN, BLUE)):  # a choice stands one place further right
        arrow(ax, (middles[n], 4.3), (middles[n + 1], 2.77), color)


def words(ax) -> None:
    """What is written beside the boxes of the round."""
    write(ax, 0.6, 10.4, "four guesses, one forward, three tokens", size=10.5, weight="bold")
    rows = {8.4: "text and guesses", 4.75: "the target's choice", 2.3: "text afterwards"}
    for y, label in rows.items():
        write(ax, 0.6, y, label, va="center_baseline")
    write(ax, place(0), 9.2, "text so far")
    write(ax, place(NEWEST) + WIDTH / 2, 9.2, "newest", ha="center")
    write(ax, place(4), 9.2, "guesses of the draft: kept, kept, replaced, thrown away")
    write(ax, place(6) + 1.3, 3.8, "computed for a text with “fox”,", size=9, color=DIM)
    write(ax, place(6) + 1.3, 3.25, "which will never be", size=9, color=DIM)
    write(ax, place(5) - 0.07, 1.4, "the same as the guess", color=GREEN, ha="center")
    write(ax, place(6), 1.4, "the target's own", color=BLUE)
    rule = "A choice is compared with the guess one place to its right. "
    write(ax, 0.6, 0.55, f"{rule}The first that differs takes its place, and all behind it go.")


# ---- what the caches hold --------------------------------------------------------------------


def cached(ax, y, words, kept) -> None:
    """What a cache was fed: the first `kept` are still in it, the others were cut off."""
    for n, word in enumerate(words):
        if n < kept:
            box(ax, place(n), y, word, PALE_BLUE)
        else:
            box(ax, place(n), y, word, PALE_GREY, crossed=True)


def case(ax, y, accepted, following) -> None:
    """The text after a round, and what the target's and the draft's caches hold of it."""
    request, target, draft = one_round(Bigram(following))
    text = [WORDS[n] for n in request.all_ids]
    assert request.speculation.accepted == accepted and len(text) == len(PROMPT) + accepted + 1
    assert (target.fed, draft.fed) == (len(PROMPT) + K, len(PROMPT) + K - 1)
    assert target.length == len(text) - 1  # all but the newest
    assert draft.length == min(len(text) - 1, len(PROMPT) + K - 1)  # never fed its last guess
    for cache in (target, draft):
        assert cache.words()[: cache.length] == text[: cache.length]

    many = {0: "none", 2: "two", 4: "all four"}[accepted]
    write(ax, 0.6, y + 3.85, f"{many} accepted", size=10.5, weight="bold")
    last = len(text) - 1
    columns(ax, y + 2.4, 0, text[:-1], ["white"] * last)
    box(ax, place(last), y + 2.4, text[-1], PALE_ORANGE, ec=ORANGE, lw=1.6)
    write(ax, 0.6, y + 2.8, "text", va="center_baseline")
    for n, (name, cache) in enumerate((("target", target), ("draft", draft))):
        bottom = y + 1.3 - 0.95 * n
        write(ax, 0.6, bottom + 0.4, f"{name}: {cache.fed} → {cache.length}", va="center_baseline")
        cached(ax, bottom, cache.words(), cache.length)
    for n in range(draft.length, last):
        style = {"fill": False, "ec": ORANGE, "lw": 1.2, "ls": (0, (3, 2))}
        ax.add_patch(Rectangle((place(n), y + 0.35), WIDTH, HEIGHT, **style))
        write(ax, place(n) + WIDTH / 2, y + 0.75, "not fed", size=8.8, color=ORANGE, ha="center")


def caches() -> None:
    """Three rounds of minillm.speculative: each box is read from the caches' own buffers."""
    ax = blank(11, 7.7, 22, 15.4)
    for n, (accepted, following) in enumerate(CASES.items()):
        case(ax, 10.8 - 4.6 * n, accepted, following)
    x = place(0)
    legend = [
        (PALE_BLUE, GREY, "in the cache"),
        (PALE_GREY, GREY, "cut off again by truncate"),
        (PALE_ORANGE, ORANGE, "newest token, nobody has fed it yet"),
    ]
    for (color, edge, text), right in zip(legend, (3.9, 6, 0), strict=True):
        ax.add_patch(Rectangle((x, 0.45), 0.6, 0.5, fc=color, ec=edge, lw=1))
        write(ax, x + 0.8, 0.7, text)
        x += right
    write(ax, 0.6, 0.7, "positions: fed → kept")
    save("10_cache.png")


# ---- accepted, rejected, drawn again ---------------------------------------------------------

P, Q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.7, 0.1, 0.1, 0.1])


def bar(ax, x, low, high, color, hatch=None) -> None:
    edge = {"ec": RED if hatch else GREY, "lw": 0.9, "hatch": hatch}
    ax.add_patch(Rectangle((x, low), 0.34, high - low, fc=color, **edge))


def accept() -> None:
    """Beside each other for four words: what the draft guesses, and what the target wants."""
    both = torch.minimum(P, Q)
    sums = [part.sum().item() for part in (both, Q - both, P - both)]
    assert torch.allclose(torch.tensor(sums), torch.tensor([0.4, 0.6, 0.6]))
    figure = plt.figure(figsize=(11, 4.8))
    ax = figure.add_axes((0.055, 0.12, 0.55, 0.78))
    for n, (p, q, least) in enumerate(zip(P.tolist(), Q.tolist(), both.tolist(), strict=True)):
        for x, share, surplus, name in (
            (n - 0.36, q, PALE_RED, "q"),
            (n + 0.02, p, PALE_BLUE, "p"),
        ):
            bar(ax, x, 0, least, PALE_GREEN)
            if share > least:
                bar(ax, x, least, share, surplus, "///" if name == "q" else None)
            write(ax, x + 0.17, share + 0.025, f"{name} = {share:.1f}", size=9, ha="center")
    ax.set(xlim=(-0.55, 3.55), ylim=(0, 0.78), yticks=[n / 10 for n in range(0, 8)])
    ax.set_xticks(range(4), WORDS, size=10, color=INK)
    ax.tick_params(axis="x", length=0)
    ax.tick_params(axis="y", labelsize=9, colors=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    style = {"connectionstyle": "arc3,rad=-0.28"}
    for n in range(1, 4):
        arrow(ax, (0.02, 0.62), (n + 0.19, P[n].item() + 0.06), BLUE, lw=1, **style)
    legend(figure, *sums)
    save("10_accept.png")


def legend(figure, accepted, rejected, again) -> None:
    """The three colors, with their sums, right of the bars."""
    ax = figure.add_axes((0.63, 0, 0.37, 1))
    ax.set(xlim=(0, 8.1), ylim=(0, 9.6))
    ax.axis("off")
    entries = [
        (PALE_GREEN, GREEN, None, f"accepted: {accepted:.1f}", "the overlap, min(p, q)"),
        (PALE_RED, RED, "///", f"rejected: {rejected:.1f}", "q's surplus: guessed too often"),
        (PALE_BLUE, BLUE, None, f"drawn again: {again:.1f}", "p's surplus, max(p − q, 0)"),
    ]
    write(ax, 0.2, 8.75, "left bars: the draft's q", size=10)
    write(ax, 0.2, 8.1, "right bars: the target's p", size=10)
    for n, (color, ink, hatch, title, text) in enumerate(entries):
        y = 6.6 - 1.75 * n
        edge = {"ec": RED if hatch else GREY, "lw": 0.9, "hatch": hatch}
        ax.add_patch(Rectangle((0.2, y - 0.25), 0.7, 0.5, fc=color, **edge))
        write(ax, 1.2, y, title, size=10.5, weight="bold", color=ink)
        write(ax, 1.2, y - 0.65, text)
    write(ax, 0.2, 1.25, f"red and blue are equal, {rejected:.1f} each: what is")
    write(ax, 0.2, 0.7, "rejected fills up what is missing")


if __name__ == "__main__":
    round_()
    caches()
    accept()

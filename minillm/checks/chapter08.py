"""The exercises of chapter 8: RMSNorm, shared KV heads, rotary positions in both layouts, the way between them."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ..gguf import unpermute
from ..llama_layers import repeat_kv, rope_frequencies, rotate, rotation
from .exercise import Exercise, Mistake, as_tensor


def random(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers that are the same on every run, without touching the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fits(given, expected, arguments) -> bool:
    """The sign of the last mistakes: whatever is left and has the right shape."""
    return as_tensor(given).shape == expected.shape and not as_tensor(given).isnan().any()


# ---- my_rms_norm ----------------------------------------------------------------------------


def norm(x, weight, eps, *, size=None, divisor=None, dim=-1, centred=False):
    """RMSNorm with the screws that people turn by mistake."""
    top = x - x.mean(dim, keepdim=True) if centred else x
    size = size(x, dim) if size else x.pow(2).mean(dim, keepdim=True)
    return top / (divisor(size, eps) if divisor else (size + eps).sqrt()) * weight


def slip(says, sign=None, **screws):
    return Mistake(says, partial(norm, **screws), sign)


def too_small(given, expected, arguments):
    """The right numbers divided by √D, as after a sum in the place of the mean."""
    given, expected = as_tensor(given), expected.double()
    same_shape = given.shape == expected.shape and bool(expected.any())
    return same_shape and torch.allclose(given * expected.shape[-1] ** 0.5, expected, atol=1e-3)


my_rms_norm = Exercise(
    name="my_rms_norm",
    reference=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
    cases=(
        (random(0, 2, 3, 4) * 2 + 1, torch.tensor([1.0, 2, 0.5, 1.5]), 1e-5),
        (random(1, 1, 5, 8) * 0.02, random(2, 8).abs() + 0.5, 1e-3),  # eps counts here
        (torch.zeros(1, 2, 4), torch.ones(4), 1e-5),
    ),
    mistakes=(
        Mistake(
            "this is LayerNorm: the mean is subtracted, and RMSNorm leaves it in",
            lambda x, weight, eps: F.layer_norm(x, weight.shape, weight, None, eps),
        ),
        slip("the mean is subtracted: RMSNorm divides, and shifts nothing", centred=True),
        slip(
            "you divide by the root of the variance, which leaves the mean out. Take the mean of x²",
            size=lambda x, dim: x.var(dim, keepdim=True, correction=0),
        ),
        slip(
            "numbers of both signs cancel in your mean: square first, then take the mean",
            size=lambda x, dim: x.mean(dim, keepdim=True).pow(2),
        ),
        slip(
            lambda given, expected, arguments: (
                f"your numbers are √{expected.shape[-1]} times too small: divide by the root of "
                f"the mean of the squares, not of their sum"
            ),
            too_small,
            size=lambda x, dim: x.pow(2).sum(dim, keepdim=True),
        ),
        slip(
            "epsilon stands outside the root: you divide by √(mean square) + eps, and it should "
            "be √(mean square + eps)",
            divisor=lambda size, eps: size.sqrt() + eps,
        ),
        slip(
            "epsilon is missing: a token of nothing but zeros divides 0 by 0",
            divisor=lambda size, eps: size.sqrt(),
        ),
        slip("you divide by the mean square: the root is missing", divisor=torch.add),
        Mistake(
            "the gain is missing: multiply by weight at the end",
            lambda x, weight, eps: norm(x, 1.0, eps),
        ),
        slip("your mean runs over the tokens, not over the channels of each (dim=-1)", dim=-2),
        slip("one mean for all tokens: each has its own (dim=-1, keepdim=True)", dim=(0, 1, 2)),
    ),
    right="each token leaves it with a root mean square of 1, times the gain, and nothing is shifted",
)

# ---- share_kv -------------------------------------------------------------------------------


def kv_of_each(given, k):
    """Which KV head stands at each query head: a list of numbers, None for what is no KV head."""
    numbers = {str(head.tolist()): n for n, head in enumerate(k.double().unbind(1))}
    return [numbers.get(str(head.tolist())) for head in as_tensor(given).unbind(1)]


def order(reason, wrong, sign=None):
    """A mistake in the order of the heads, shown as the KV head that each query head gets."""

    def says(given, expected, arguments):
        right, yours = (" ".join(map(str, kv_of_each(x, arguments[0]))) for x in (expected, given))
        return f"your query heads get the KV heads {yours}, expected {right}: {reason}"

    return Mistake(says, wrong, sign)


def whole_heads(given, expected, arguments):
    return fits(given, expected, arguments) and None not in kv_of_each(given, arguments[0])


def shaped(reason, wrong, sign):
    """A mistake in the shape: `wrong` gets k and the group's size, `sign` the shapes."""

    def is_it(given, expected, arguments):
        shapes = [list(as_tensor(x).shape) for x in (given, arguments[0], expected)]
        return shapes[0] != shapes[2] and sign(*shapes)

    def says(given, expected, arguments):
        right, yours = list(expected.shape), list(as_tensor(given).shape)
        return f"your result is {yours}, it should be {right}: {reason}"

    return Mistake(says, lambda k, H: wrong(k, H // k.shape[1]), is_it)


share_kv = Exercise(
    name="share_kv",
    reference=lambda k, n_heads: repeat_kv(k, n_heads // k.shape[1]),
    cases=(
        (random(3, 2, 3, 4, 5), 9),
        (random(4, 1, 2, 3, 2), 4),
        (random(5, 1, 1, 2, 4), 3),  # one KV head for all
        (random(6, 1, 2, 3, 4), 2),  # one for each
    ),
    mistakes=(
        order(
            "this is tile. A group's query heads stand side by side, so each KV head comes several "
            "times in a row (repeat_interleave)",
            lambda k, H: k.repeat(1, H // k.shape[1], 1, 1),
        ),
        order("all share the first", lambda k, H: k[:, :1].expand(-1, H, -1, -1)),
        order(  # and any other order
            "neighbours share a KV head, and the groups stand in the order of the KV heads",
            lambda k, H: repeat_kv(k, H // k.shape[1]).flip(1),
            whole_heads,
        ),
        shaped("nothing is repeated", lambda k, G: k, lambda given, before, right: given == before),
        shaped(
            "each KV head comes n_heads / n_kv times, not n_heads times",
            lambda k, G: repeat_kv(k, G * k.shape[1]),
            lambda given, before, right: given[:1] + given[2:] == right[:1] + right[2:],
        ),
        shaped(
            "the positions are repeated (dim=2), and the heads are dimension 1",
            lambda k, G: k.repeat_interleave(G, dim=2),
            lambda given, before, right: given[:2] + given[3:] == before[:2] + before[3:],
        ),
        shaped(
            "the copies have a dimension of their own. Merge it with the heads",
            lambda k, G: k[:, :, None].expand(-1, -1, G, -1, -1),
            lambda given, before, right: len(given) == 5,
        ),
        Mistake(
            "some of your heads are no KV head: a reshape has mixed the numbers. Each head of the "
            "result is a head of k as it is",
            lambda k, H: repeat_kv(k.mT, H // k.shape[1]).reshape(-1, H, *k.shape[2:]),
            fits,
        ),
    ),
    right="chapter 3's attention takes it as it is, and the cache keeps the KV heads alone",
)

# ---- rotate_halves and rotate_pairs ---------------------------------------------------------


class Layout(NamedTuple):
    """Where the two numbers of a pair stand."""

    split: Callable  # [..., d] -> 2 x [..., d/2]
    join: Callable  # and back
    pair: str


HALVES = Layout(lambda x: x.chunk(2, -1), lambda a, b: torch.cat([a, b], -1), "i and i + d/2")
PAIRS = Layout(
    lambda x: (x[..., 0::2], x[..., 1::2]),
    lambda a, b: torch.stack([a, b], -1).flatten(-2),
    "2i and 2i + 1",
)


def speed(theta, i, d):
    return theta ** (-2 * i / d)


def turn(x, positions, theta, *, layout, spread=None, on=None, speed=speed, at=lambda p: p):
    """Rotary positions with the screws that people turn by mistake."""
    i = torch.arange(x.shape[-1] // 2)
    angles = at(positions)[:, None, :, None] * speed(theta, i, x.shape[-1])
    angles = (spread or layout).join(angles, angles)  # [B, 1, T, d/2] -> [B, 1, T, d]
    a, b = layout.split(x)
    return x * angles.cos() + layout.join(*(on(a, b) if on else (-b, a))) * angles.sin()


def by_engine(x, positions, theta, layout):
    """The chapter's own rotation, with the pairs carried to its layout and back."""
    places = rotation(positions, rope_frequencies(x.shape[-1], theta))
    return layout.join(*HALVES.split(rotate(HALVES.join(*layout.split(x)), *places)))


def as_complex(x, layout):
    """Each pair as one number, whose angle is its direction: [..., d] -> [..., d/2]."""
    return torch.complex(*layout.split(as_tensor(x)))


def angle(layout, reason, sign=None, **screws):
    """A mistake in the angles, shown on the first pair that is wrong."""

    def says(given, expected, arguments):
        right, yours, x = (as_complex(y, layout) for y in (expected, given, arguments[0]))
        b, h, t, i = ((right - yours).abs() > 5e-5 * right.abs().max()).nonzero()[0].tolist()
        right, yours = (round((y / x)[b, h, t, i].angle().item(), 3) + 0.0 for y in (right, yours))
        return (
            f"at position {arguments[1][b, t]} pair {i} should turn by {right:.3f} radians, yours "
            f"turns by {yours:.3f}: {reason}"
        )

    return Mistake(says, partial(turn, layout=layout, **screws), sign)


def is_turn(layout, given, expected, arguments):
    """The sign of a result in which each pair has kept its length."""
    if not fits(given, expected, arguments):
        return False
    lengths = [as_complex(y, layout).abs() for y in (given, arguments[0])]
    return torch.allclose(*lengths, rtol=0, atol=1e-3)


def rotary(name, layout, other, twice, right):
    """The exercise in one of the layouts."""
    wrong, named = partial(angle, layout), partial(partial, turn, layout=layout)
    return Exercise(
        name=name,
        reference=partial(by_engine, layout=layout),
        cases=(
            (random(7, 2, 3, 4, 8), torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]]), 100.0),  # padding
            (random(8, 1, 2, 3, 4), torch.tensor([[1, 2, 3]]), 10000.0),  # a chunk
            (random(9, 2, 2, 1, 6), torch.tensor([[3], [2]]), 10000.0),  # decode
        ),
        mistakes=(
            Mistake(
                f"these are the pairs of the other layout, {other.pair}. Here pair i is the "
                f"numbers {layout.pair}",
                named(layout=other),
            ),
            Mistake(f"your angles lie for the pairs {other.pair}. {twice}", named(spread=other)),
            Mistake(
                f"your angles lie for the pairs {layout.pair}, and what the sine multiplies for "
                f"the pairs {other.pair}",
                named(layout=other, spread=layout),
            ),
            wrong("the other way round. The new a is a·cos - b·sin", on=lambda a, b: (b, -a)),
            Mistake(
                "a minus is missing: the new a is a·cos - b·sin", named(on=lambda a, b: (b, a))
            ),
            Mistake(
                "x·cos + x·sin turns nothing: the sine multiplies -b for a, and a for b",
                named(on=lambda a, b: (a, b)),
            ),
            wrong(
                "you count the tokens of this call. `positions` knows of padding and of the cache",
                at=lambda p: torch.arange(p.shape[1]).expand(p.shape),
            ),
            wrong(
                "you count from the first token of this call, and the cache holds earlier ones",
                at=lambda p: p - p[:, :1],
            ),
            wrong("row 0's positions are not those of every row", at=lambda p: p[:1]),
            wrong("you count from 1, and position 0 turns by 0", at=lambda p: p + 1),
            wrong("the exponent is -2i/d, not -i/d", speed=lambda base, i, d: base ** (-i / d)),
            wrong("arange(0, d, 2) is 2i already", speed=lambda base, i, d: base ** (-4 * i / d)),
            wrong("the exponent has lost its minus", speed=lambda base, i, d: base ** (2 * i / d)),
            wrong(
                "theta is a base, raised to the power -2i/d, not a factor",
                speed=lambda base, i, d: base * 2 * i / d,
            ),
            wrong("each pair has a speed of its own", speed=lambda theta, i, d: i * 0 + 1.0),
            wrong(
                "cos and sin take radians, so π/180 has no place here",
                speed=lambda *arguments: speed(*arguments) * math.pi / 180,
            ),
            wrong(  # and whatever else is a turn
                "pair i turns by position · theta^(-2i/d)",
                partial(is_turn, layout),
                speed=lambda *arguments: speed(*arguments) * 2,
            ),
            Mistake(
                f"a turn keeps the length of each pair, and yours changes it. Pair i, the numbers "
                f"a and b at {layout.pair}, becomes a·cos - b·sin and b·cos + a·sin",
                lambda *arguments: 2 * by_engine(*arguments, layout),
                fits,
            ),
        ),
        right=right,
    )


rotate_halves = rotary(
    "rotate_halves",
    HALVES,
    PAIRS,
    "Each stands at i and again at i + d/2: cat, not repeat_interleave",
    "queries and keys know their places, and a score depends on the distance alone",
)
rotate_pairs = rotary(
    "rotate_pairs",
    PAIRS,
    HALVES,
    "Each stands twice in a row: repeat_interleave, not cat",
    "you can read code in either layout, and tell which one you see",
)

# ---- interleave_to_halves -------------------------------------------------------------------


def rows_of(given, rows):
    """The number of each row in the matrix that came in, None for what is no row of it."""
    numbers = {str(row.tolist()): n for n, row in enumerate(rows.double())}
    return [numbers.get(str(row.tolist())) for row in as_tensor(given)]


def moved(reason, wrong, sign=None):
    """A mistake in the order of the rows, shown on all of them."""

    def says(given, expected, arguments):
        rows, n_heads = arguments
        right, yours = (" ".join(map(str, rows_of(x, rows))) for x in (expected, given))
        return f"with {n_heads} heads expected the rows {right}, yours are {yours}: {reason}"

    return Mistake(says, wrong, sign)


def whole_rows(given, expected, arguments):
    return fits(given, expected, arguments) and None not in rows_of(given, arguments[0])


def matrix(n_heads, head_dim, width):
    """Weights [H * d, D] in which no number stands twice."""
    return torch.arange(float(n_heads * head_dim * width)).view(-1, width), n_heads


interleave_to_halves = Exercise(
    name="interleave_to_halves",
    reference=unpermute,
    cases=(matrix(2, 6, 12), matrix(1, 6, 12), matrix(3, 8, 24), matrix(2, 8, 24)),
    mistakes=(
        moved(
            "this is the way back, from halves to pairs",
            lambda rows, n_heads: (
                rows.view(n_heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
            ),
        ),
        moved("each head keeps its own rows", lambda rows, n_heads: unpermute(rows, 1)),
        moved("nothing has moved", lambda rows, n_heads: rows),
        Mistake(
            "the columns were reordered. The numbers of q come out of the rows, so those move",
            lambda rows, n_heads: unpermute(rows.T, n_heads).T,
        ),
        Mistake(
            "the rows are in order, but the matrix is transposed now: it should stay [H*d, D]",
            lambda rows, n_heads: unpermute(rows, n_heads).T,
        ),
        moved(  # and any other order
            "for each head the first numbers of all its pairs, then the second",
            lambda rows, n_heads: unpermute(rows, n_heads).flip(0),
            whole_rows,
        ),
        Mistake(
            "your result has rows that the matrix has not: numbers left their rows. Keep the "
            "columns as a dimension of their own",
            lambda rows, n_heads: rows.view(n_heads, -1, 2).mT.reshape(rows.shape),
            fits,
        ),
    ),
    right="the weights of a GGUF file run in the same engine as those of Hugging Face",
)

EXERCISES = {
    e.name: e for e in (my_rms_norm, share_kv, rotate_halves, rotate_pairs, interleave_to_halves)
}

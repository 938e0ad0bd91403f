"""The exercises of chapter 3: layer norm, head split, attention weights, causal mask, one block."""

import math
from functools import partial

import torch
from torch.nn import functional as F

from .. import layers
from .exercise import Exercise, Mistake, as_tensor, same


def _random(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers that are the same on every run, without touching the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Exercise 1: layer norm -------------------------------------------------------------------------


def _norm(x, weight, bias, eps, *, dims=-1, correction=0, centred=True, root=None):
    """Layer norm with the screws that people turn by mistake."""
    mean = x.mean(dim=dims, keepdim=True)
    variance = x.var(dim=dims, keepdim=True, correction=correction)
    if not centred:
        variance = x.pow(2).mean(dim=dims, keepdim=True)
        mean = torch.zeros_like(mean)
    divisor = torch.sqrt(variance + eps) if root is None else root(variance, eps)
    return (x - mean) / divisor * weight + bias


def _says_unbiased(given, expected, arguments):
    D = arguments[0].shape[-1]
    return (
        f"your normalised numbers are {math.sqrt((D - 1) / D):.3f} times the right ones, which is "
        f"√({D - 1}/{D}): the variance divides by D - 1 = {D - 1} where LayerNorm divides by "
        f"D = {D} (var and std do that unless you say correction=0)"
    )


LAYER_NORM = Exercise(
    name="my_layer_norm",
    reference=lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
    cases=(
        (_random(0, 2, 3, 4) * 2 + 5, torch.tensor([1.0, 2, 0.5, 1.5]), _random(1, 4), 1e-5),
        (_random(2, 1, 5, 8) * 0.02, _random(3, 8).abs() + 0.5, _random(4, 8), 1e-3),
        (torch.full((1, 2, 4), 3.0), torch.ones(4), torch.tensor([1.0, 2, 3, 4]), 1e-5),
    ),
    mistakes=(
        Mistake(_says_unbiased, partial(_norm, correction=1)),
        Mistake(
            "epsilon stands outside the square root: you divide by √variance + eps, and it should "
            "be √(variance + eps)",
            partial(_norm, root=lambda variance, eps: variance.sqrt() + eps),
        ),
        Mistake(
            "epsilon is missing: a token whose numbers are all equal divides 0 by 0",
            partial(_norm, root=lambda variance, eps: variance.sqrt()),
        ),
        Mistake(
            "you divide by the variance: the square root is missing",
            partial(_norm, root=lambda variance, eps: variance + eps),
        ),
        Mistake(
            "the mean is not subtracted: your tokens are scaled, but not shifted to mean 0",
            partial(_norm, centred=False),
        ),
        Mistake(
            "the statistics are taken over the tokens (dim=-2): each token is to be normalised "
            "alone, over its channels (dim=-1)",
            partial(_norm, dims=-2),
        ),
        Mistake(
            "the statistics are taken over tokens and channels together: each token is to be "
            "normalised alone, over its channels (dim=-1)",
            partial(_norm, dims=(-2, -1)),
        ),
        Mistake(
            "the statistics are taken over the whole tensor: each token is to be normalised "
            "alone, over its channels (dim=-1, keepdim=True)",
            partial(_norm, dims=(0, 1, 2)),
        ),
        Mistake(
            "normalised, but the gain and the bias are missing: times weight, plus bias",
            lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, None, None, eps),
        ),
        Mistake(
            "the bias is missing: add it after the gain",
            lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, None, eps),
        ),
        Mistake(
            "the gain is missing: multiply by weight before you add the bias",
            lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, None, bias, eps),
        ),
        Mistake(
            "the bias is multiplied by the gain: multiply first, then add the bias",
            lambda x, weight, bias, eps: (
                (F.layer_norm(x, weight.shape, None, None, eps) + bias) * weight
            ),
        ),
    ),
    right="every token comes out of it at the same size, whatever the layers before did to it",
)


# Exercise 2: split the heads --------------------------------------------------------------------


def _says_reshape(given, expected, arguments):
    T = arguments[0].shape[1]
    return (
        f"this is a reshape to heads without the transpose: heads and positions are mixed (row 1 of "
        f"head 0 still holds token 0). Cut first, to [B, {T}, H, d], then swap dimensions 1 and 2"
    )


SPLIT_HEADS = Exercise(
    name="my_split_heads",
    reference=lambda x, n_heads: torch.stack(x.chunk(n_heads, dim=-1), dim=1),
    cases=(
        (torch.arange(24.0).reshape(1, 3, 8), 2),
        (_random(5, 2, 5, 12), 4),
    ),
    mistakes=(
        Mistake(_says_reshape, lambda x, H: x.reshape(x.shape[0], H, x.shape[1], -1)),
        Mistake(
            "cut, but not swapped: yours is [B, T, H, d], and attention wants the heads in front "
            "of the positions, [B, H, T, d] (transpose dimensions 1 and 2)",
            lambda x, H: x.reshape(x.shape[0], x.shape[1], H, -1),
        ),
        Mistake(
            "head and channel are swapped: head 0 got every H-th channel. The view is "
            "[B, T, H, d], with the heads before the channels of a head",
            lambda x, H: x.reshape(x.shape[0], x.shape[1], -1, H).permute(0, 3, 1, 2),
        ),
        Mistake(
            "n_heads was taken for the size of a head: d is D / n_heads",
            lambda x, H: x.reshape(x.shape[0], x.shape[1], -1, H).transpose(1, 2),
        ),
        Mistake(
            "the positions ended up last: yours is [B, H, d, T], expected [B, H, T, d]",
            lambda x, H: x.reshape(x.shape[0], x.shape[1], H, -1).permute(0, 2, 3, 1),
        ),
    ),
    right="each head has its own channels of every token, and the score matrix is one per head",
)


# Exercise 3: attention weights ------------------------------------------------------------------


def _weights_by_torch(q, k, mask):
    """The shares, read off PyTorch's own kernel: values that are the unit vectors give them back."""
    v = torch.eye(k.shape[-2]).expand(*k.shape[:-2], -1, -1)  # [B, H, S, S]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [B, H, T, S]


def _weights(q, k, mask, *, factor=None, dim=-1, use_mask=True, hidden=-math.inf):
    """Attention weights with the screws that people turn by mistake."""
    factor = q.shape[-1] ** -0.5 if factor is None else factor(q.shape[-1])
    scores = q @ k.transpose(-2, -1) * factor
    scores = scores.masked_fill(~mask, hidden) if use_mask else scores
    return scores.softmax(dim=dim)


def _score_ratio(given, expected, mask) -> float | None:
    """How many times too large the scores behind `given` are, or None where that is not the fault.

    Within a row, the logarithm of a share is its score less a constant. So where only the size of
    the scores is wrong, the two logarithms, less their row's mean, differ by one factor.
    """
    given, expected = as_tensor(given), as_tensor(expected)
    if given.shape != expected.shape:
        return None
    seen = mask.expand(expected.shape)
    if not (given[seen] > 0).all() or (given[~seen] != 0).any():
        return None

    def centred(weights):
        logs = torch.where(seen, weights, 1.0).log()
        return torch.where(seen, logs - (logs.sum(-1) / seen.sum(-1))[..., None], 0.0)

    a, b = centred(given), centred(expected)
    ratio = ((a * b).sum() / (b * b).sum()).item()
    fits = (a - ratio * b).abs().max() < 1e-3 * a.abs().max()
    return ratio if fits and abs(ratio - 1) > 1e-3 else None


def _says_scale(given, expected, arguments):
    q, k, mask = arguments
    ratio, d = _score_ratio(given, expected, mask), q.shape[-1]
    start = f"your scores are {ratio:.2f} times too large for head_dim {d}: "
    if math.isclose(ratio, math.sqrt(d), rel_tol=0.01):
        return start + "the division by √head_dim is missing"
    if math.isclose(ratio, 1 / math.sqrt(d), rel_tol=0.01):
        return (
            f"your scores are {1 / ratio:.2f} times too small for head_dim {d}: you divide by "
            f"head_dim, and it should be its square root"
        )
    if math.isclose(ratio, d, rel_tol=0.01):
        return start + "you multiply by √head_dim where you should divide"
    return start + "they should be divided by √head_dim, and by nothing else"


def _looks_ahead(given, expected, arguments) -> bool:
    given, mask = as_tensor(given), arguments[2]
    if given.shape != expected.shape:
        return False
    sums_to_one = torch.allclose(given.sum(-1), torch.ones_like(given.sum(-1)), atol=1e-4)
    return bool((given[~mask.expand(given.shape)] > 0).any()) and sums_to_one


def _says_looks_ahead(given, expected, arguments):
    given = as_tensor(given)
    ahead = (given > 0) & ~arguments[2].expand(given.shape)
    b, h, row, _ = torch.nonzero(ahead)[0].tolist()
    keys = [str(j) for j in torch.nonzero(ahead[b, h, row]).flatten().tolist()]
    names = " and ".join([", ".join(keys[:-1]), keys[-1]] if len(keys) > 1 else keys)
    return (
        f"row {row} looks at position{'s' if len(keys) > 1 else ''} {names}: "
        f"the causal mask is missing"
    )


def _normalises_columns(given, expected, arguments) -> bool:
    given = as_tensor(given)
    sums = given.sum(-2) if given.dim() > 1 else given
    return given.shape == expected.shape and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


def _says_row_sum(given, expected, arguments):
    return (
        f"row 0 of your weights adds up to {as_tensor(given)[0, 0, 0].sum():.2f} and not to 1: the "
        f"mask was applied after softmax, without renormalising. Hide the scores before"
    )


ATTENTION_WEIGHTS = Exercise(
    name="my_attention_weights",
    reference=_weights_by_torch,
    cases=(
        (
            _random(6, 1, 1, 3, 64) * 0.7,
            _random(7, 1, 1, 3, 64) * 0.7,
            layers.causal_mask(3),
        ),
        (_random(8, 2, 2, 3, 16), _random(9, 2, 2, 5, 16), layers.causal_mask(3, 2)),
    ),
    mistakes=(
        Mistake(
            _says_scale,
            partial(_weights, factor=lambda d: 1.0),
            lambda given, expected, arguments: (
                _score_ratio(given, expected, arguments[2]) is not None
            ),
        ),
        Mistake(
            "softmax runs over the queries: your columns add up to 1, and the rows should. "
            "The keys are the last dimension (dim=-1)",
            partial(_weights, dim=-2),
            _normalises_columns,
        ),
        Mistake(
            "hidden scores were set to 0, and softmax gives a score of 0 its share, because e⁰ is 1: "
            "hide them with minus infinity",
            partial(_weights, hidden=0.0),
        ),
        Mistake(
            "the mask is inverted: True means that a query may look, and you hid exactly those",
            lambda q, k, mask: _weights(q, k, ~mask),
        ),
        Mistake(_says_looks_ahead, partial(_weights, use_mask=False), _looks_ahead),
        Mistake(_says_row_sum, lambda q, k, mask: _weights(q, k, mask, use_mask=False) * mask),
        Mistake(
            "these are scores, not shares: the softmax is missing",
            lambda q, k, mask: (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(
                ~mask, -math.inf
            ),
        ),
    ),
    right="you can look at any head of any model and say who listens to whom",
)


# Exercise 4: the causal mask --------------------------------------------------------------------


def _mask(new, past, padding, *, ahead=0, corner=None, itself=True, use_padding=True):
    """A causal mask with the screws that people turn by mistake."""
    corner = past if corner is None else corner
    queries, keys = torch.arange(new)[:, None], torch.arange(past + new)[None, :]
    mask = (keys <= queries + corner + ahead)[None, None]
    if padding is None or not use_padding:
        return mask.expand(1 if padding is None else len(padding), 1, -1, -1)
    mask = mask & padding[:, None, None, :]
    return mask | (keys == queries + past) if itself else mask


def _says_corner(given, expected, arguments):
    past = arguments[1]
    return (
        f"with a past of {past}, query 0 sees key 0 only, and it should see keys 0 to {past}: the "
        f"staircase starts in the upper left corner and hides the past. Query i stands at past + i"
    )


def _corner_sign(given, expected, arguments) -> bool:
    """A case with a past and no padding, where the first query sees itself as if it were key 0."""
    new, past, padding = arguments
    return past > 0 and padding is None and same(given, _mask(new, past, None, corner=0))


_PADDED = torch.tensor([[False, False, True, True, True], [True] * 5])
CAUSAL_MASK = Exercise(
    name="my_causal_mask",
    reference=layers.causal_mask,
    cases=(
        (4, 0, None),
        (2, 3, None),
        (1, 4, None),
        (5, 0, _PADDED),
        (2, 3, _PADDED),
    ),
    mistakes=(
        Mistake(
            "the mask is inverted: True means that a query may look at a key. "
            "(Some libraries have it the other way round.)",
            lambda new, past, padding: ~_mask(new, past, padding),
        ),
        Mistake(
            "every query sees every key: nothing hides the future",
            lambda new, past, padding: torch.ones(1, 1, new, past + new, dtype=torch.bool),
        ),
        Mistake(
            "this is a mask of 0 and minus infinity, to be added to the scores: here it is bool, True "
            "where a query may look",
            lambda new, past, padding: torch.where(_mask(new, past, padding), 0.0, -math.inf),
        ),
        Mistake(
            "off by one: query 0 does not see itself. A query may look at the keys <= its own "
            "place, not only at those <",
            partial(_mask, ahead=-1),
            lambda given, expected, arguments: (
                arguments[2] is None and same(given, _mask(*arguments, ahead=-1))
            ),
        ),
        Mistake(
            "off by one: query 0 sees key 1, which is the future. The last key that query i may "
            "look at is past + i",
            partial(_mask, ahead=1),
            lambda given, expected, arguments: (
                arguments[2] is None
                and arguments[0] > 2
                and same(given, _mask(*arguments, ahead=1))
            ),
        ),
        Mistake(_says_corner, partial(_mask, corner=0), _corner_sign),
        Mistake(
            "the keys of the past have no columns: with T new tokens and a past the mask is "
            "[T, past + T], not [T, T]",
            lambda new, past, padding: _mask(
                new, 0, None if padding is None else padding[:, past:]
            ),
            lambda given, expected, arguments: (
                arguments[1] > 0
                and as_tensor(given).dim() > 1
                and as_tensor(given).shape[-2:] == (arguments[0], arguments[0])
            ),
        ),
        Mistake(
            "padding is applied to the queries: hide the padding *keys*, the last dimension "
            "(padding_mask[:, None, None, :])",
            lambda new, past, padding: (
                _mask(new, past, None)
                if padding is None
                else _mask(new, past, None) & padding[:, None, past:, None]
                | (_mask(new, past, None) & ~_mask(new, past, None, ahead=-1))
            ),
        ),
        Mistake(
            "padding is forgotten: real tokens look at the padding tokens of their row",
            partial(_mask, use_padding=False),
            lambda given, expected, arguments: (
                arguments[2] is not None
                and _broadcast_equal(given, _mask(*arguments, use_padding=False))
            ),
        ),
        Mistake(
            "a padding token sees nothing at all: its softmax is 0/0 = NaN, and NaN x 0 spoils the "
            "real tokens in the next layer. Let every token look at itself",
            partial(_mask, itself=False),
        ),
    ),
    right="one function serves one token, a chunk, a batch and a draft",
)


def _broadcast_equal(given, expected) -> bool:
    """Equal where a batch of 1 stands for all rows."""
    given = as_tensor(given)
    if given.dim() != expected.dim() or given.shape[1:] != expected.shape[1:]:
        return False
    return bool((given == expected.double()).all()) if len(given) in (1, len(expected)) else False


# Exercise 5: the block --------------------------------------------------------------------------


def _part(seed: int):
    """A linear map with a bend, for a sub-module of a block."""
    weight = _random(seed, 8, 8) / 3
    return lambda x: torch.tanh(x @ weight) * 2


def _scale_to_one(gain: float):
    return lambda x: F.layer_norm(x, x.shape[-1:]) * gain


def _no_residual_around(which: str):
    def block(x, norm_1, attend, norm_2, think):
        x = attend(norm_1(x)) + (0 if which in ("attention", "both") else x)
        return think(norm_2(x)) + (0 if which in ("mlp", "both") else x)

    return block


def _post_norm(x, norm_1, attend, norm_2, think):
    x = norm_1(x + attend(x))
    return norm_2(x + think(x))


def _parallel(x, norm_1, attend, norm_2, think):
    return x + attend(norm_1(x)) + think(norm_2(x))


def _adds_the_normed(x, norm_1, attend, norm_2, think):
    normed = norm_1(x)
    x = normed + attend(normed)
    normed = norm_2(x)
    return normed + think(normed)


def _adds_the_start(x, norm_1, attend, norm_2, think):
    middle = x + attend(norm_1(x))
    return x + think(norm_2(middle))


BLOCK = Exercise(
    name="my_block",
    reference=lambda x, norm_1, attend, norm_2, think: layers.Block(
        *(_AsModule(part) for part in (norm_1, lambda x, *sockets: attend(x), norm_2, think))
    )(x),
    cases=(
        (_random(10, 2, 3, 8) * 2, _scale_to_one(0.8), _part(11), _scale_to_one(1.5), _part(12)),
    ),
    mistakes=(
        Mistake(
            "both residuals are missing: each part's result is added to what came in",
            _no_residual_around("both"),
        ),
        Mistake(
            "the residual around the attention is missing: x + attention(…)",
            _no_residual_around("attention"),
        ),
        Mistake(
            "the residual around the MLP is missing: x + mlp(…)",
            _no_residual_around("mlp"),
        ),
        Mistake(
            "the norms stand on the stream, after the additions: that is Vaswani et al.'s post-norm "
            "block. GPT-2 puts them in front of the attention and of the MLP",
            _post_norm,
        ),
        Mistake(
            "attention and MLP both read the input: the MLP is to read the stream *after* the "
            "attention has written to it",
            _parallel,
        ),
        Mistake(
            "you add the normed input: the stream itself goes around the norm, and the norm is "
            "only for the reader",
            _adds_the_normed,
        ),
        Mistake(
            "what the attention wrote is lost: the second addition starts from the block's input, "
            "and it should start from the stream after the attention",
            _adds_the_start,
        ),
        Mistake(
            "the two norms are swapped: attention_norm in front of the attention, mlp_norm in "
            "front of the MLP",
            lambda x, norm_1, attend, norm_2, think: (
                (y := x + attend(norm_2(x))) + think(norm_1(y))
            ),
        ),
    ),
    right="stack it twelve times and it is the body of the smallest GPT-2",
)


class _AsModule(torch.nn.Module):
    """A plain function in a module's clothes, so that the package's own Block can hold it."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


EXERCISES = {
    exercise.name: exercise
    for exercise in (LAYER_NORM, SPLIT_HEADS, ATTENTION_WEIGHTS, CAUSAL_MASK, BLOCK)
}

"""The exercises of chapter 6: the size of a cache, the mask of a chunk, a sliding window, the speed of decode."""

import torch

from ..kv_cache import KVCache
from ..layers import causal_mask
from .exercise import Exercise, Mistake, is_bool

# ---- cache_size -----------------------------------------------------------------------------


def kv_heads(config):
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def share(config):
    return config["hidden_size"] // config["num_attention_heads"]


def width(config):
    return config.get("head_dim") or share(config)


def size_reference(config, length, batch_size, bytes_per_number):
    """The chapter's own cache, built without memory: PyTorch counts the bytes."""
    sizes = (config["num_hidden_layers"], kv_heads(config), width(config), length, batch_size)
    dtype = {1: torch.int8, 2: torch.float16, 4: torch.float32}[bytes_per_number]
    return KVCache(*sizes, dtype, "meta").nbytes


def whole(result, *arguments):
    """2.0 bytes are 2 bytes: a division with `/` is no mistake here."""
    return int(result) if isinstance(result, float) and result.is_integer() else result


def size(says, wrong, sign=None):
    """A mistake in a size: `wrong` gives it from the config c and the right size."""

    def sentence(given, expected, arguments):
        c, _, batch, number = arguments
        names = {"kv": kv_heads(c), "width": width(c), "share": share(c), "batch": batch} | c
        times = f"{given / expected:.4g}"
        return says.format(given=given, expected=expected, times=times, number=number, **names)

    return Mistake(sentence, lambda c, *rest: wrong(c, size_reference(c, *rest), *rest), sign)


def config_of(layers, heads, hidden, **more):
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    return dict(zip(names, (layers, heads, hidden), strict=True)) | more


cache_size = Exercise(
    name="cache_size",
    reference=size_reference,
    view=whole,
    cases=(
        (config_of(32, 32, 4096), 2048, 1, 2),  # Llama-7B: exactly 1 GiB
        (config_of(32, 32, 4096, num_key_value_heads=8), 8192, 1, 2),  # Llama-3-8B: 1 GiB again
        (config_of(28, 16, 1024, num_key_value_heads=8, head_dim=128), 1000, 3, 4),  # Qwen3-0.6B
        (config_of(6, 8, 256, num_key_value_heads=None, head_dim=None), 512, 2, 1),
    ),
    mistakes=(
        size(
            "yours is {times} times the right size for every model: keys and values are both kept",
            lambda c, right, *rest: right // 2,
        ),
        size(
            "with {num_attention_heads} attention heads and {kv} KV heads your cache is {times} "
            "times too large: only the KV heads have keys and values to keep",
            lambda c, right, *rest: right // kv_heads(c) * c["num_attention_heads"],
        ),
        size(
            "your cache is {times} times too large: a head is {width} wide, and you gave each the "
            "whole hidden_size, {hidden_size}",
            lambda c, right, *rest: right // width(c) * c["hidden_size"],
        ),
        size(
            "you keep hidden_size numbers for each position. Multiply the KV heads by the head width",
            lambda c, right, *rest: right // width(c) // kv_heads(c) * c["hidden_size"],
        ),
        size(
            "the config says head_dim = {width}, and you computed {hidden_size} / "
            "{num_attention_heads} = {share}: what the config says comes first",
            lambda c, right, *rest: right // width(c) * share(c),
        ),
        size(
            "this is the cache of one layer, and this model has {num_hidden_layers}",
            lambda c, right, *rest: right // c["num_hidden_layers"],
        ),
        size(
            "this is the cache of one row: a batch of {batch} needs {batch} times as much",
            lambda c, right, length, batch, number: right // batch,
        ),
        size(  # and whatever else is a number
            "expected {expected:,} bytes, yours are {given:,}: {times} times as many",
            lambda c, right, *rest: right * 3,
            lambda given, expected, arguments: isinstance(given, (int, float)),
        ),
    ),
    right="you can tell from a config.json how many positions fit on a card, before you load it",
)

# ---- chunk_mask -----------------------------------------------------------------------------


def triangle(diagonal):
    """A lower triangle with its diagonal somewhere, perhaps in the wrong place."""
    return lambda past, new: torch.ones(new, past + new, dtype=torch.bool).tril(diagonal(past))


def first_row(reason):
    """How many keys the first new token of the case sees, and why."""

    def says(given, expected, arguments):
        n, right = int(given[0].sum()), int(expected[0].sum())
        keys = "1 key" if n == 1 else f"{n} keys"
        return f"the first new token sees {keys}, it should see {right}: {reason}"

    return says


def size_of_mask(reason):
    return lambda given, expected, arguments: (
        f"for past = {arguments[0]} and new = {arguments[1]} your mask is {list(given.shape)}, it "
        f"should be {list(expected.shape)}: {reason}"
    )


def says_keys(given, expected, arguments):
    i = (given != expected).any(dim=-1).nonzero()[0].item()
    right, yours = (row.nonzero().flatten().tolist() for row in (expected[i], given[i]))
    return (
        f"for past = {arguments[0]} and new = {arguments[1]} the new token {i} may look at the "
        f"keys {right}, yours looks at {yours}"
    )


lower = triangle(lambda past: past)
chunk_mask = Exercise(
    name="chunk_mask",
    reference=lambda past, new: causal_mask(new, past)[0, 0],
    cases=((3, 2), (0, 3), (5, 1), (2, 4), (4, 4)),
    mistakes=(
        Mistake(
            first_row("your triangle starts in the upper left corner, and hides the past"),
            triangle(lambda past: 0),
        ),
        Mistake(
            first_row("inside the chunk nobody may look at what comes later"),
            triangle(lambda past: 99),
        ),
        Mistake(
            first_row("with a cache you hide nothing, and that is right for one new token only"),
            triangle(lambda past: 99 if past else 0),
        ),
        Mistake(
            first_row("its own key is hidden. A token may look at itself"),
            triangle(lambda past: past - 1),
        ),
        Mistake(
            first_row("it sees the past and nothing of the chunk. A token may look at itself"),
            lambda past, new: (torch.arange(past + new) < past).expand(new, -1),
        ),
        Mistake(
            "your mask is inverted: True means that a query may look at a key",
            lambda past, new: ~lower(past, new),
        ),
        Mistake(
            size_of_mask("transposed. The queries are the rows, the keys are the columns"),
            lambda past, new: lower(past, new).t(),
        ),
        Mistake(
            size_of_mask("the columns of the past are missing"),
            lambda past, new: torch.ones(new, new, dtype=torch.bool).tril(),
        ),
        Mistake(  # and whatever else hides or shows the wrong keys
            says_keys,
            triangle(lambda past: past + 2),
            lambda given, expected, arguments: is_bool(given) and given.shape == expected.shape,
        ),
    ),
    right="you can feed a long prompt in pieces, or check several guessed tokens in one call",
)

# ---- sliding_window -------------------------------------------------------------------------


def append(old, new, window=None):
    return torch.cat([old, new], dim=2)  # [B, H, S, d], [B, H, T, d] -> [B, H, S + T, d]


def newest(old, new, window):
    return append(old, new)[:, :, -window:]


def both(says, keys_rule, values_rule=None):
    """A mistake in what is kept; a rule gets the old, the new and the window."""

    def sentence(given, expected, arguments):
        S, T, window = arguments[0].shape[2], arguments[2].shape[2], arguments[4]
        return f"{S} old and {T} new, window {window}: expected {expected}, yours {given}. {says}"

    def wrong(keys, values, k, v, window):
        return keys_rule(keys, k, window), (values_rule or keys_rule)(values, v, window)

    return Mistake(sentence, wrong)


def positions(result, keys, values, k, v, window):
    """`[k1 k2] [v1 v2]`: which positions a result holds, each found by its numbers."""
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    if not is_pair or not all(isinstance(part, torch.Tensor) for part in result):
        return result
    rows = (("k", append(keys, k)), ("v", append(values, v)))
    names = {str(x.tolist()): f"{c}{i}" for c, row in rows for i, x in enumerate(row.unbind(2))}
    return " ".join(
        f"[{' '.join(names.get(str(x.tolist()), '?') for x in part.unbind(2))}]"
        if part.dim() == 4 and part[:, :, :0].shape == keys[:, :, :0].shape
        else str(list(part.shape))
        for part in result
    )


def window_case(H, S, T, window):
    """Old and new keys and values in which no number stands twice."""
    rows = torch.arange(2.0 * 2 * H * (S + T) * 5).view(2, 2, H, S + T, 5)
    (keys, values), (k, v) = rows[:, :, :, :S], rows[:, :, :, S:]
    return keys, values, k, v, window


sliding_window = Exercise(
    name="sliding_window",
    reference=both("", newest).wrong,
    view=positions,
    cases=(
        window_case(H=4, S=3, T=1, window=3),
        window_case(H=4, S=1, T=2, window=4),  # there is room left
        window_case(H=4, S=2, T=2, window=3),
        window_case(H=4, S=3, T=3, window=3),  # nothing old stays
        window_case(H=4, S=2, T=5, window=3),  # a chunk longer than the window
        window_case(H=4, S=0, T=2, window=3),  # an empty cache
    ),
    mistakes=(
        both("You keep the oldest: cut at the front", lambda o, n, w: append(o, n)[:, :, :w]),
        both("The cut is missing, or it comes before the new ones are appended", append),
        both("Positions are dimension 2, not the last", lambda o, n, w: append(o, n)[..., -w:]),
        both("Positions are dimension 2, not 1", lambda o, n, w: append(o, n)[:, -w:]),
        both("You cut the keys and not the values", newest, append),
        both("One too few: keep `window` of them", lambda o, n, w: append(o, n)[:, :, 1 - w :]),
        both("The new ones belong behind the old ones", lambda o, n, w: newest(n, o, w)),
        both(
            "`-0:` is not nothing but everything, and a chunk may be longer than the window. Append "
            "first, then cut",
            lambda old, new, window: append(old[:, :, -(window - new.shape[2]) :], new),
        ),
    ),
    right="your cache no longer grows: Mistral 7B (2023) bounds its own in this way",
)

# ---- decode_speed ---------------------------------------------------------------------------


def speed(says, wrong):
    """A mistake in a speed; w: weights, c: cache for each token, n: tokens, b: bandwidth."""

    def sentence(given, expected, arguments):
        return f"expected {expected:.4g} tokens per second, yours are {given:.4g}: {says}"

    return Mistake(sentence, wrong)


decode_speed = Exercise(
    name="decode_speed",
    reference=lambda w, c, n, b: b / (w + c * n),
    cases=(
        (14e9, 524_288, 2048, 50e9),  # Llama-7B in fp16 on a laptop
        (16e9, 131_072, 100_000, 3.35e12),  # Llama-3-8B and a long text on an H100
        (24e6, 12_288, 500, 25e9),  # fairytale in fp32
    ),
    mistakes=(
        speed("the cache is missing, each step reads it", lambda w, c, n, b: b / w),
        speed("you count the cache of one position, not of all", lambda w, c, n, b: b / (w + c)),
        speed("the weights are missing, each step reads them", lambda w, c, n, b: b / (c * n)),
        speed("these are seconds per token. Turn them over", lambda w, c, n, b: (w + c * n) / b),
        speed("half as many. A step writes nearly nothing", lambda w, c, n, b: b / (w + c * n) / 2),
        speed(
            "you doubled the cache. Its bytes for a token hold keys and values already",
            lambda w, c, n, b: b / (w + 2 * c * n),
        ),
        speed("two speeds do not add up. Add the bytes", lambda w, c, n, b: b / w + b / (c * n)),
        speed("parentheses are missing around the bytes", lambda w, c, n, b: b / w + c * n),
    ),
    right="you can predict the speed of decode from three numbers, and see which one to change",
)

EXERCISES = {e.name: e for e in (cache_size, chunk_mask, sliding_window, decode_speed)}

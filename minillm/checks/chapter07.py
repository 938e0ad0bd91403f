"""The exercises of chapter 7: positions of a padded batch, its mask, the rows that stay, each row's answer."""

import torch

from ..batching import compact
from ..generation import Request
from ..kv_cache import KVCache
from ..layers import causal_mask, position_ids
from ..sampling import SamplingParams
from .exercise import Exercise, Mistake, as_tensor, is_bool


def real(*rows: str) -> torch.Tensor:
    """`real("0011", "1111")` is a padding mask, bool [B, S]."""
    return torch.tensor([[bit == "1" for bit in row] for row in rows])


def bits(mask) -> str:
    return " ".join("".join(str(int(bit)) for bit in row) for row in mask.tolist())


# ---- row_positions --------------------------------------------------------------------------


def row(reason, wrong, sign=None):
    """A mistake in the positions, shown on the first row that is wrong."""

    def says(given, expected, arguments):
        given = as_tensor(given).long()
        n = (given != expected).any(dim=-1).nonzero()[0].item()
        mask, right, yours = (x[n].long().tolist() for x in (arguments[0], expected, given))
        return f"for the row {mask} expected {right}, yours is {yours}: {reason}"

    return Mistake(says, wrong, sign)


def on_real(reason, rule):
    """The same, for a mistake that shows at the real tokens, whatever the padding got."""

    def sign(given, expected, arguments):
        mask, given = arguments[0], as_tensor(given)
        return given.shape == mask.shape and torch.equal(given[mask], rule(mask)[mask].double())

    return row(reason, rule, sign)


def columns(mask):
    return torch.arange(mask.shape[1]).expand(mask.shape)  # [S] -> [B, S]


def places(mask):
    return position_ids(mask.shape[1], 0, mask)


def says_one_row(given, expected, arguments):
    return (
        f"your positions have shape {list(as_tensor(given).shape)}, the mask has "
        f"{list(expected.shape)}: the padding differs from row to row, so each needs its own"
    )


row_positions = Exercise(
    name="row_positions",
    reference=places,
    view=lambda x, mask: "float" if torch.is_tensor(x) and x.is_floating_point() else x,
    cases=(
        (real("111", "011"),),
        (real("0011", "1111", "0111"),),
        (real("00001", "00111"),),  # no row is full
    ),
    mistakes=(
        Mistake(
            "your positions are floats: a position table is read by whole numbers, and a bool mask "
            "can be added up as it is",
            lambda m: places(m).float(),
        ),
        Mistake(
            says_one_row,
            lambda m: columns(m)[0],
            lambda given, expected, _: (
                as_tensor(given).shape[-1:] == expected.shape[-1:]
                and as_tensor(given).numel() == expected.shape[-1]
            ),
        ),
        row("a position table has no row -1. Raise it to 0", lambda m: m.cumsum(dim=-1) - 1),
        row(
            "padding got 1, as in transformers. Nobody looks at it, so no text changes, but here "
            "it is 0",
            lambda m: places(m).masked_fill(~m, 1),
        ),
        row(
            "you add up down the batch (dim=0): count along each row, dim=-1",
            lambda m: (m.cumsum(dim=0) - 1).clamp(min=0),
        ),
        on_real("you count the columns, padding included. Count the real tokens", columns),
        on_real("the first real token has position 0, not 1", lambda m: m.cumsum(dim=-1)),
        on_real("you count from the right", lambda m: columns(m).flip(-1)),
        on_real("you count the padding, not the tokens", lambda m: (~m).cumsum(dim=-1)),
        row(  # and whatever else has the right shape
            "the real tokens of a row are 0, 1, 2, ..., and padding is 0",
            lambda m: places(m) * 2,
            lambda given, expected, _: as_tensor(given).shape == expected.shape,
        ),
    ),
    right="your rows can have any lengths, and each token still gets the position it has alone",
)

# ---- batch_mask -----------------------------------------------------------------------------


def right_mask(mask, past):
    return causal_mask(mask.shape[1] - past, past, mask)


def parts(mask, past):
    """Keys k [S] and queries q [T, 1] by their columns; which keys and which queries are real."""
    k = torch.arange(mask.shape[1])
    return k, k[past:, None], mask[:, None, None], mask[:, None, past:, None]


def seen(reason, wrong, sign=None):
    """A mistake in the mask, shown on the first query that is wrong; both rules get the parts."""

    def whole(mask, past):
        S = mask.shape[1]
        return wrong(*parts(mask, past)).broadcast_to(len(mask), 1, S - past, S)

    def is_it(given, expected, arguments):
        fits = is_bool(given) and given.shape == expected.shape
        return fits and bool(sign(given, *parts(*arguments)).any())

    def says(given, expected, arguments):
        mask, past = arguments
        n, _, i, _ = (given != expected).nonzero()[0].tolist()
        right, yours = (x[n, 0, i].nonzero().flatten().tolist() for x in (expected, given))
        return (
            f"row {bits(mask[n : n + 1])}, past = {past}: new token {i} may look at the keys "
            f"{right}, yours looks at {yours or 'none'}. {reason}"
        )

    return Mistake(says, whole, sign and is_it)


def shaped(reason, wrong, sign):
    """A mistake in the mask's shape; `sign` gets the shape, B, T and S."""

    def is_it(given, expected, arguments):
        B, _, T, S = expected.shape
        return sign(list(as_tensor(given).shape), B, T, S)

    def says(given, expected, arguments):
        shape = list(as_tensor(given).shape)
        return f"your mask is {shape}, it should be {list(expected.shape)}: {reason}"

    return Mistake(says, wrong, is_it)


batch_mask = Exercise(
    name="batch_mask",
    reference=right_mask,
    cases=(
        (real("111", "011"), 0),
        (real("0011", "1111", "0111"), 0),
        (real("00011", "11111", "01111"), 3),
        (real("00111", "11111"), 1),  # a chunk that begins with padding
        (real("0011", "1111"), 3),  # one token, decode
    ),
    mistakes=(
        shaped(
            "only the new tokens are queries",
            lambda m, past: right_mask(m, 0),
            lambda shape, B, T, S: shape == [B, 1, S, S] and T < S,
        ),
        shaped(
            "shapes are matched from the right, so your rows would meet the heads",
            lambda m, past: right_mask(m, past)[:, 0],
            lambda shape, B, T, S: shape == [B, T, S],
        ),
        shaped(
            "one mask for all rows, and their padding differs",
            lambda m, past: causal_mask(m.shape[1] - past, past),
            lambda shape, B, T, S: shape in ([1, 1, T, S], [1, T, S], [T, S]),
        ),
        seen("Inverted: True means may look", lambda k, q, r, _: ~((k <= q) & r | (k == q))),
        seen("Inverted: True means may look", lambda k, q, r, _: ~((k <= q) & r)),
        seen("Both conditions must hold: `&`, not `|`", lambda k, q, r, _: (k <= q) | r),
        seen("Hide the keys of padding, not its queries", lambda k, q, _, r: (k <= q) & r),
        seen(
            "Hide the keys of padding, not its queries",
            lambda k, q, _, r: (k <= q) & r | (k == q),
        ),
        seen("Row 0 decides for all", lambda k, q, r, _: (k <= q) & r[:1] | (k == q)),
        seen(  # with past = 1 the triangle without its diagonal looks like this, too
            "Your triangle starts in the upper left corner, as if there were no past",
            lambda k, q, r, _: (k <= q - q[0]) & r,
            lambda given, k, q, *_: (
                (q[0] > 1) & (given & (k != q)).any() & ~(given & (k > q - q[0]) & (k != q)).any()
            ),
        ),
        seen(
            "What comes later must be hidden",
            lambda k, q, r, _: r,
            lambda given, k, q, *_: given & (k > q),
        ),
        seen(
            "A token may look at itself",
            lambda k, q, r, _: (k < q) & r,
            lambda given, k, q, r, _: ~given & (k == q) & r,
        ),
        seen(
            "A softmax over nothing is 0 / 0 = NaN: let padding look at itself",
            lambda k, q, r, _: (k <= q) & r,
            lambda given, *_: ~given.any(dim=-1),
        ),
        seen(
            "Other tokens' padding must be hidden",
            lambda k, q, r, _: k <= q,
            lambda given, k, q, r, _: given & ~r & (k != q),
        ),
        seen(  # and whatever else hides or shows the wrong keys
            "It sees the real keys up to its own, and itself",
            lambda k, q, r, _: (k <= q) & r & (k > q - 2) | (k == q),
            lambda given, k, *_: k >= 0,
        ),
    ),
    right="one mask serves a prompt, a chunk and a single token, in rows of any length",
)

# ---- keep_rows ------------------------------------------------------------------------------


def keep_reference(keys, mask, rows):
    """The chapter's own compact, on a cache of one layer."""
    B, H, S, d = keys.shape
    cache = KVCache(1, H, d, S, B)
    cache.update(0, keys, keys)
    mask = compact(cache, mask, rows)
    return cache.keys[0], mask


def cells(result, keys, *_):
    """`[c1 c2, a1 a2] 11 01`: the keys by row and column, each found by its numbers; the mask."""
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    if not is_pair or not all(isinstance(part, torch.Tensor) for part in result):
        return result
    kept, mask = result
    named = zip("abc", keys, strict=False)
    names = {str(x.tolist()): f"{a}{i}" for a, row in named for i, x in enumerate(row.unbind(1))}
    shown = map(str, kept.shape)
    if kept.dim() == 4 and kept.shape[1::2] == keys.shape[1::2]:
        shown = [" ".join(names.get(str(x.tolist()), "?") for x in row.unbind(1)) for row in kept]
    is_mask = is_bool(mask) and mask.dim() == 2
    return f"[{', '.join(shown)}] {bits(mask) if is_mask else (mask.dtype, list(mask.shape))}"


def kept(reason, wrong):
    """A mistake in what is kept, by a rule that gets keys k, mask m and rows r."""

    def says(given, expected, arguments):
        _, mask, rows = arguments
        return f"{bits(mask)}, rows {rows}: expected {expected}, yours {given}. {reason}"

    return Mistake(says, wrong)


def first(mask):
    """The first column that is real in some row."""
    return mask.any(dim=0).int().argmax().item()


def cut(keys, mask, n):
    return keys[:, :, n:], mask[:, n:]


def cut_right(keys, mask, n):
    S = mask.shape[1] - n
    return keys[:, :, :S], mask[:, :S]


def others(mask, rows):
    return [n for n in range(len(mask)) if n not in rows]


def keep_case(rows, *mask):
    """A batch in whose keys no number stands twice; H = 2, d = 3."""
    B, S = len(mask), len(mask[0])
    return torch.arange(6.0 * B * S).view(B, 2, S, 3), real(*mask), rows


keep_rows = Exercise(
    name="keep_rows",
    reference=keep_reference,
    view=cells,
    cases=(
        keep_case([0, 2], "0011", "1111", "0111"),
        keep_case([2, 0], "0011", "1111", "0111"),
        keep_case([1, 0], "011", "111"),  # no column goes
        keep_case([0], "0011", "1111"),
        keep_case([0, 1], "0001", "0011", "0111"),
    ),
    mistakes=(
        kept("The mask still has all rows", lambda k, m, r: cut(k[r], m, first(m[r]))),
        kept("No column has gone", lambda k, m, r: (k[r], m[r])),
        kept("Cut the mask's columns too", lambda k, m, r: (cut(k[r], m, first(m[r]))[0], m[r])),
        kept("Cut the keys' columns too", lambda k, m, r: (k[r], m[r][:, first(m[r]) :])),
        kept("Padding stands on the left", lambda k, m, r: cut_right(k[r], m[r], first(m[r]))),
        kept("Rows that leave need no columns", lambda k, m, r: cut(k[r], m[r], first(m))),
        kept("Keep the order of `rows`", lambda k, m, r: keep_reference(k, m, sorted(r))),
        kept(
            "A column that is real in one of the rows has to stay",
            lambda k, m, r: cut(k[r], m[r], m[r].all(dim=0).int().argmax().item()),
        ),
        kept(
            "These rows should leave",
            lambda k, m, r: cut(k[others(m, r)], m[others(m, r)], first(m[others(m, r)])),
        ),
        kept(
            "Positions are dimension 2 of the keys",
            lambda k, m, r: (k[r][..., first(m[r]) :], m[r][:, first(m[r]) :]),
        ),
    ),
    right="a row that ends costs nothing from then on, and a long prompt takes its columns along",
)

# ---- cut_answers ----------------------------------------------------------------------------


def answers_reference(token_ids, prompt_length, end_ids):
    """The engine's own Request decides, by logits that leave it no choice."""
    answers = []
    for row in token_ids.tolist():
        limit = SamplingParams(max_new_tokens=len(row) - prompt_length)
        request = Request(row[:prompt_length], limit, context=len(row), end_ids=end_ids)
        for token_id in row[prompt_length:]:
            if request.finish_reason is None:
                request.accept(torch.eye(10)[token_id])
        answers.append(request.token_ids)
    return answers


def plain(result, *_):
    """Tensors of ids are as good as lists."""
    if not isinstance(result, (list, tuple)):
        return result.tolist() if isinstance(result, torch.Tensor) else result
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in result]


def up_to(new, end_ids, more=1):
    """The ids before the first end id, and `more` from there."""
    at = [i for i, token_id in enumerate(new) if token_id in end_ids]
    return new[: at[0] + more] if at else new


def together(reason, rule):
    """A mistake in the answers; `rule` gets all rows, the prompt's length and the end ids."""

    def says(given, expected, arguments):
        token_ids, P, end_ids = arguments
        n = next(n for n, right in enumerate(expected) if given[n] != right)
        return (
            f"prompt_length {P}, end ids {end_ids}: of {token_ids[n].tolist()} expected "
            f"{expected[n]}, yours is {given[n]}. {reason}"
        )

    return Mistake(says, lambda token_ids, *rest: rule(token_ids.tolist(), *rest))


def answer(reason, rule):
    """A mistake in one row's answer; `rule` gets its new ids n, the end ids e and the prompt p."""
    return together(reason, lambda rows, P, e: [rule(row[P:], e, row[:P]) for row in rows])


def one_length(pick):
    def rule(rows, P, e):
        n = pick([len(up_to(row[P:], e)) for row in rows])
        return [row[P : P + n] for row in rows]

    return together("Each row ends at a place of its own", rule)


def cut_case(prompt_length, end_ids, *rows):
    """A batch with an id for each digit."""
    return torch.tensor([[int(digit) for digit in row] for row in rows]), prompt_length, end_ids


cut_answers = Exercise(
    name="cut_answers",
    reference=answers_reference,
    view=plain,
    cases=(
        cut_case(3, [9], "00756900", "34829000"),
        cut_case(3, [9], "04530690", "12345678"),  # 0 in an answer; a row without an end
        cut_case(3, [9], "99456999", "42399999"),  # the end id is the padding
        cut_case(3, [9, 8], "9582899", "4836599"),  # a chat: end ids in the prompt
    ),
    mistakes=(
        answer("Nothing is cut", lambda n, e, p: n),
        answer(
            "The last end id may be padding. The first one counts",
            lambda n, e, p: n[: len(n) - len(up_to(n[::-1], e, 0))] or n,
        ),
        answer("The end id was generated, so keep it", lambda n, e, p: up_to(n, e, 0)),
        answer("One id too many", lambda n, e, p: up_to(n, e, 2)),
        answer(
            "An end id ends the answer, and is not only taken out of it",
            lambda n, e, p: [i for i in n if i not in e],
        ),
        answer(
            "An end id in the prompt, or as its padding, ends nothing",
            lambda n, e, p: up_to(p + n, e)[len(p) :],
        ),
        answer("The prompt is still there", lambda n, e, p: p + up_to(n, e)),
        answer("Any of the end ids ends a row", lambda n, e, p: up_to(n, e[:1])),
        answer("Any of the end ids ends a row", lambda n, e, p: up_to(n, e[-1:])),
        answer(
            "No end id: all of it counts. (argmax of nothing but False is 0)",
            lambda n, e, p: up_to(n, e) if set(n) & set(e) else n[:1],
        ),
        answer(
            "No end id: all of it counts", lambda n, e, p: up_to(n, e) if set(n) & set(e) else []
        ),
        answer("Here 0 was a token, no padding", lambda n, e, p: up_to(n, [0], 0)),
        one_length(min),
        one_length(max),
        one_length(lambda lengths: lengths[0]),
    ),
    right="you can read what any engine returns for a batch, `generate` of transformers included",
)

EXERCISES = {e.name: e for e in (row_positions, batch_mask, keep_rows, cut_answers)}

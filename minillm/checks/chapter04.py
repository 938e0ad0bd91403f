"""The exercises of chapter 4: loading weights, counting them, comparing, and the greedy loop."""

import math

import torch
from torch.nn import functional as F

from .exercise import Exercise, Mistake

# ---- conv1d_to_linear -----------------------------------------------------------------------

TINY = (torch.tensor([[1.0, 2.0, 0.5], [3.0, -1.0, 4.0]]), torch.tensor([0.5, -0.25, 1.0]))
SQUARE = (torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([0.5, -0.25]))


def ramp(weight):
    """A small input for a layer whose Conv1D weight is [in, out]."""
    return torch.linspace(-1, 1, 2 * weight.shape[0]).view(2, -1)  # [2, in]


def linear(weight, bias):
    """A layer with these numbers, whatever they are."""
    return lambda x: F.linear(x, weight, bias)


conv1d_to_linear = Exercise(
    name="conv1d_to_linear",
    reference=lambda weight, bias: lambda x: torch.addmm(bias, x, weight),
    view=lambda layer, weight, bias: layer(ramp(weight)) if callable(layer) else layer,
    cases=(SQUARE, TINY),
    mistakes=(
        Mistake(
            says="the transpose is missing: a square weight loads without complaint and gives other numbers",
            wrong=lambda w, b: linear(w if w.shape[0] == w.shape[1] else w.t(), b),
        ),
        Mistake(
            says="this is a reshape to [out, in], not a transpose: the numbers stay in their old order",
            wrong=lambda w, b: linear(w.reshape(w.shape[1], w.shape[0]), b),
        ),
        Mistake(says="the bias is not added", wrong=lambda w, b: linear(w.t(), None)),
        Mistake(says="the bias has the wrong sign", wrong=lambda w, b: linear(w.t(), -b)),
    ),
    right="you can load any GPT-2 checkpoint into nn.Linear, square matrices included",
)

# ---- count_parameters -----------------------------------------------------------------------

GPT2_SMALL = (50257, 1024, 768, 12, 3072, True)
UNTIED = (4096, 512, 256, 6, 640, False)


def count_reference(vocab_size, n_positions, n_embd, n_layer, n_inner, tied):
    """PyTorch counts the tensors of the real class; nothing is computed here."""
    from ..gpt2 import GPT2, GPT2Config

    sizes = (vocab_size, n_positions, n_embd, n_layer)
    with torch.device("meta"):
        model = GPT2(GPT2Config(*sizes, n_head=1, n_inner=n_inner, tie_word_embeddings=tied))
    return sum(p.numel() for p in model.parameters())


def off_by(amount, name):
    """A mistake in a count: the answer is wrong by exactly `amount(case)`."""

    def says(given, expected, arguments):
        gap = given - expected
        return f"your count is {abs(gap):,} too {'large' if gap > 0 else 'small'}: {name}"

    return Mistake(says=says, wrong=lambda *case: count_reference(*case) + amount(*case))


count_parameters = Exercise(
    name="count_parameters",
    reference=count_reference,
    cases=(GPT2_SMALL, UNTIED),
    mistakes=(
        off_by(
            lambda V, P, D, L, M, tied: V * D * tied,
            "exactly one more token table. A tied head counts once",
        ),
        off_by(
            lambda V, P, D, L, M, tied: -V * D * (not tied), "exactly the table of the untied head"
        ),
        off_by(lambda V, P, D, L, M, tied: -P * D, "exactly the position table"),
        off_by(lambda V, P, D, L, M, tied: -2 * D, "exactly the gain and bias of the final norm"),
        off_by(
            lambda V, P, D, L, M, tied: -L * (5 * D + M),
            "exactly the biases of the linear layers in the blocks",
        ),
        off_by(lambda V, P, D, L, M, tied: -L * 4 * D, "exactly the two norms of each block"),
        off_by(
            lambda V, P, D, L, M, tied: -L * (D * D + D), "exactly attention's output projection"
        ),
        off_by(
            lambda V, P, D, L, M, tied: L * (2 * D + 1) * (4 * D - M),
            "your MLP is four times the width, whatever n_inner says",
        ),
    ),
    right="you can tell the size of a GPT-2 from its config, before you download it",
)

# ---- first_drift ----------------------------------------------------------------------------

NAMES = ["embedding", "norm", "attention", "mlp"]


def drifting(largest, gaps):
    """Reference tensors of the given magnitudes, and ours with the given differences."""
    reference = [torch.tensor([0.25, -0.5, 1.0]) * size for size in largest]
    ours = [r + torch.tensor([0.0, gap, 0.0]) for r, gap in zip(reference, gaps, strict=True)]
    return list(NAMES), ours, reference


def drift_rule(gap, bound, pick=lambda drifts: drifts[0], exceeds=lambda a, b: not a <= b):
    """A ruler with another gap, bound or choice."""

    def rule(names, ours, reference):
        drifts = [
            (name, gap(a, b))
            for name, a, b in zip(names, ours, reference, strict=True)
            if exceeds(gap(a, b), bound(b))
        ]
        return pick(drifts)[0] if drifts else "equal"

    return rule


def largest_gap(a, b):
    return (a - b).abs().max().item()


def relative(b):
    return 1e-5 * b.abs().max().item()


first_drift = Exercise(
    name="first_drift",
    reference=drift_rule(largest_gap, relative),
    cases=(
        drifting([1, 1, 1, 1], [0, 2e-6, 0, 1e-6]),  # noise everywhere
        drifting([1, 1, 1, 1], [-3e-4, 1e-3, 0.5, 2e-3]),  # all drift; the first one is negative
        drifting([1, 1, 1, 1], [0, 0, 2e-5, 0]),  # one wrong number among right ones
        drifting([1, 100, 1, 1], [0, 5e-4, 0, 0]),  # a large tensor: the same gap is noise
        drifting([1, 1e-3, 1, 1], [0, 5e-7, 0, 0]),  # a small tensor: a small gap is not
        drifting([1, 1, 1, 1], [0, 0, math.nan, 0]),
    ),
    mistakes=(
        Mistake(
            says="you compare with 1e-5 itself: the bound should grow with the reference's largest magnitude",
            wrong=drift_rule(largest_gap, lambda b: 1e-5),
        ),
        Mistake(
            says="you return the part that drifts most. Everything after the first one drifts because of it",
            wrong=drift_rule(largest_gap, relative, lambda d: max(d, key=lambda item: item[1])),
        ),
        Mistake(
            says="you return the last part that drifts: the first one is where the mistake sits",
            wrong=drift_rule(largest_gap, relative, lambda d: d[-1]),
        ),
        Mistake(
            says="negative differences slip through: take the absolute value before the maximum",
            wrong=drift_rule(lambda a, b: (a - b).max().item(), relative),
        ),
        Mistake(
            says="a NaN slips through: it is neither above nor below the bound, so ask for `not (gap <= bound)`",
            wrong=drift_rule(largest_gap, relative, exceeds=lambda a, b: a > b),
        ),
        Mistake(
            says="you average the difference, so one wrong number hides among many right ones",
            wrong=drift_rule(lambda a, b: (a - b).abs().mean().item(), relative),
        ),
    ),
    right="you can find the first broken part of any model that has a reference",
)

# ---- greedy_ids -----------------------------------------------------------------------------

VOCAB = 12


def counting_model(token_ids):
    """A model of which one knows the answer: position t says "the sum of ids 0..t, modulo 12"."""
    totals = token_ids.cumsum(dim=-1) % VOCAB  # [1, T] -> [1, T]
    return F.one_hot(totals, VOCAB).float() * 3  # [1, T] -> [1, T, 12]


def greedy_rule(
    position=-1, feed=lambda ids: ids, stop=True, keep_prompt=False, extra=0, drop_end=False
):
    """The loop, with room for one mistake."""

    def rule(model, prompt_ids, max_new_tokens, end_id):
        ids = list(prompt_ids)
        for _ in range(max_new_tokens + extra):
            logits = model(torch.tensor([feed(ids)]))  # [1, T] -> [1, T, V]
            ids.append(logits[0, position].argmax().item())
            if stop and ids[-1] == end_id:
                ids = ids[:-1] if drop_end else ids
                break
        return ids if keep_prompt else ids[len(prompt_ids) :]

    return rule


greedy_ids = Exercise(
    name="greedy_ids",
    reference=greedy_rule(),
    cases=(
        (counting_model, [3, 2], 4, 11),  # 5, 10, 8, 4
        (counting_model, [1, 4], 6, 10),  # 5, 10: the end comes early
        (counting_model, [7], 0, 11),
    ),
    mistakes=(
        Mistake(
            says="you read the logits of the first position: the last one predicts the next token",
            wrong=greedy_rule(position=0),
        ),
        Mistake(
            says="you feed only the newest token: without a cache the model needs the whole sequence",
            wrong=greedy_rule(feed=lambda ids: ids[-1:]),
        ),
        Mistake(
            says="the prompt is in your list: return the new ids only",
            wrong=greedy_rule(keep_prompt=True),
        ),
        Mistake(says="your loop runs past the end id", wrong=greedy_rule(stop=False)),
        Mistake(says="you make one token more than max_new_tokens", wrong=greedy_rule(extra=1)),
        Mistake(
            says="the end id is missing from your list: it was generated, so it belongs there",
            wrong=greedy_rule(drop_end=True),
        ),
    ),
    right="this is the loop that all of generation grows from",
)

EXERCISES = {
    "conv1d_to_linear": conv1d_to_linear,
    "count_parameters": count_parameters,
    "first_drift": first_drift,
    "greedy_ids": greedy_ids,
}

"""The exercises of chapter 10: what a round keeps, the rule for draws, both caches, and when it pays."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..generation import Request
from ..sampling import SamplingParams
from ..speculative import verify
from .exercise import Exercise, Mistake, as_tensor


@dataclass(frozen=True)
class WithEdge(Exercise):
    """An exercise with an edge case, which counts only where all others are right."""

    edge: Callable = lambda *arguments: False

    def _run(self, function, arguments):
        try:
            return super()._run(function, arguments)
        except ZeroDivisionError:  # as in PyTorch
            return torch.nan

    def _recognise(self, mistake, results, wrong):
        plain = [result for result in wrong if not self.edge(*result[2])]
        if plain:
            results = [result for result in results if not self.edge(*result[2])]
        return super()._recognise(mistake, results, plain or wrong)


def shown(story: Callable):
    """A maker of mistakes: its sentence is the story of one case in numbers, then the reason."""

    def maker(reason, wrong, sign=None):
        def says(given, expected, arguments):
            return f"{story(given, expected, *arguments)}: {reason}"

        return Mistake(says, wrong, sign)

    return maker


def fits(given, expected, arguments) -> bool:
    """The sign of the last mistakes: whatever is left and has the right shape."""
    return as_tensor(given).shape == as_tensor(expected).shape


# ---- new_tokens -----------------------------------------------------------------------------


def tokens_reference(guesses, choices):
    """What the engine's own round adds to a request."""
    request = Request([0], SamplingParams(max_new_tokens=50), context=100)
    verify(request, guesses, None, F.one_hot(torch.tensor(choices), 100).float())
    return request.token_ids


def held(guesses, choices, shift=0) -> int:
    """How many guesses agree, from the first on."""
    n = 0
    while n < len(guesses) and guesses[n] == choices[n + shift]:
        n += 1
    return n


def equal(guesses, choices) -> list[int]:
    """The guesses that agree, wherever they stand."""
    return [a for a, b in zip(guesses, choices, strict=False) if a == b]


@shown
def added(given, expected, guesses, choices):
    return f"guesses {guesses} and choices {choices} bring {expected}, yours are {given}"


new_tokens = Exercise(
    name="new_tokens",
    reference=tokens_reference,
    cases=(
        ([5, 7, 9, 4], [5, 7, 2, 4, 8]),  # agrees again behind the failure
        ([3, 1, 2], [3, 1, 2, 6]),  # all hold
        ([4, 2, 5], [9, 2, 7, 5]),  # the first fails
        ([8, 3, 6], [8, 6, 6, 1]),
        ([], [7]),  # nothing was guessed
    ),
    mistakes=(
        Mistake("this is how many guesses hold. Return the new tokens, as a list of ids", held),
        added(
            "stop at the first failure. Later choices were made for a text that will never be",
            lambda g, c: equal(g, c) + c[-1:],
        ),
        added(
            "you count all guesses that agree. Only those before the first failure hold",
            lambda g, c: g[: len(equal(g, c))] + [c[len(equal(g, c))]],
        ),
        added(
            "the target's own token is missing, the choice after the last guess that holds",
            lambda g, c: g[: held(g, c)],
        ),
        added(
            "when all guesses hold, the last choice is one more token, and it is free",
            lambda g, c: g[: held(g, c)] + c[held(g, c) : len(g)][:1],
        ),
        added(
            "the guess that failed is among your tokens. The target's own stands in its place",
            lambda g, c: g[: held(g, c) + 1] + c[len(g) :] * (g == c[:-1]),
        ),
        added(
            "your last token is always the last choice. Take the one where a guess first failed",
            lambda g, c: g[: held(g, c)] + c[-1:],
        ),
        added(
            "you are one place off. Compare guesses[i] with choices[i], not with choices[i + 1]",
            lambda g, c: g[: held(g, c, 1)] + [c[held(g, c, 1)]],
        ),
        added(  # and any other list
            "the guesses that agree, up to the first that does not, then the target's choice there",
            lambda g, c: [0, *g, *c],
            lambda given, expected, arguments: isinstance(given, list),
        ),
    ),
    right="one forward brings from one to k + 1 tokens, and all are what the target would say",
)

# ---- is_accepted ----------------------------------------------------------------------------


@shown
def decided(given, expected, p, q, guess, u):
    p, q = p[guess].item(), q[guess].item()
    return (
        f"the target gives this guess {p:.3g}, the draft {q:.3g}, so it is accepted with "
        f"probability {min(1, p / q):.3g}. At u = {u} yours {'accepts' if given else 'rejects'} it"
    )


def draws(p, q, *draws):
    """A case for each guess and its u."""
    return [(torch.tensor(p), torch.tensor(q), guess, u) for guess, u in draws]


is_accepted = Exercise(
    name="is_accepted",
    reference=lambda p, q, guess, u: u * q[guess].item() < p[guess].item(),
    view=lambda result, *_: result.item() if getattr(result, "shape", None) == () else result,
    cases=(
        *draws([0.1, 0.2, 0.3, 0.4], [0.4, 0.2, 0.1, 0.3], (0, 0.2), (0, 0.3), (0, 0.6)),
        *draws([0.1, 0.2, 0.3, 0.4], [0.4, 0.2, 0.1, 0.3], (2, 0.9), (3, 0.95)),
        *draws([0.5, 0.05, 0.45], [0.2, 0.5, 0.3], (1, 0.08), (1, 0.4), (0, 0.99), (2, 0.02)),
        *draws([0.3, 0.3, 0.4], [0.3, 0.6, 0.1], (1, 0.45), (1, 0.55), (2, 0.5)),
        *draws([0.0, 0.8, 0.2], [0.3, 0.1, 0.6], (0, 0.01), (1, 0.85), (2, 0.3), (2, 0.35)),
    ),
    mistakes=(
        Mistake(
            "this is a probability. Compare u with it, and return True or False",
            lambda p, q, guess, u: (p[guess] / q[guess]).clamp(max=1),
            lambda given, expected, arguments: isinstance(given, float),
        ),
        decided(
            "your fraction is upside down. What the draft gives too often must fail: p / q",
            lambda p, q, guess, u: u < q[guess] / p[guess],
        ),
        decided(
            "where p is smaller than q, chance has to decide, and yours always rejects",
            lambda p, q, guess, u: p[guess] >= q[guess],
        ),
        decided(
            "you compare u with p alone. The guess came with probability q already, so take p / q",
            lambda p, q, guess, u: u < p[guess],
        ),
        decided(
            "you accept the target's likeliest token only. The others have a share, too: p / q",
            lambda p, q, guess, u: p.argmax() == guess,
        ),
        decided(
            "you look at the likeliest token of each. Look up the guess: p[guess] and q[guess]",
            lambda p, q, guess, u: u < p.max() / q.max(),
        ),
        decided(  # and any other decision
            "accept where u lies below p / q of the guess, and nowhere else",
            lambda p, q, guess, u: u >= p[guess] / q[guess],
            lambda given, expected, arguments: isinstance(given, bool),
        ),
    ),
    right="of all guesses, exactly what p and q have in common comes through",
)

# ---- what_is_left ---------------------------------------------------------------------------


def left_reference(p, q):
    """p without the overlap of the two: the overlap is what gets accepted."""
    overlap = torch.minimum(p, q)
    return p if torch.equal(p, q) else (p - overlap) / (1 - overlap.sum())


def listed(numbers) -> str:
    return "[" + ", ".join(f"{x:.3g}" for x in as_tensor(numbers).flatten().tolist()) + "]"


@shown
def left(given, expected, p, q):
    return f"{listed(p)} - {listed(q)} leaves {listed(expected)}, yours is {listed(given)}"


def shared(x):
    """Numbers as shares of their sum."""
    return x / x.sum()


what_is_left = WithEdge(
    name="what_is_left",
    reference=left_reference,
    edge=torch.equal,
    cases=(
        (torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.7, 0.1, 0.1, 0.1])),
        (torch.tensor([0.5, 0.2, 0.3, 0.0, 0.0]), torch.tensor([0.25, 0.35, 0.2, 0.2, 0.0])),
        (torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 0.0, 0.0, 1.0])),
        (torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.5, 0.25, 0.25])),  # nothing is left
    ),
    mistakes=(
        left(
            "where q is larger than p nothing is left. Take .clamp(min=0), then divide by the sum",
            lambda p, q: p - q,
            lambda given, expected, arguments: bool((as_tensor(given) < 0).any()),
        ),
        left(
            "this is p. What the draft brings comes on top of it, so subtract q first",
            lambda p, q: p,
        ),
        left(
            "this is what the draft has too much of. The target lacks the opposite, p - q",
            lambda p, q: shared((q - p).clamp(min=0)),
        ),
        left(
            "|p - q| also keeps what the draft has too much of. Take .clamp(min=0), not .abs()",
            lambda p, q: shared((p - q).abs()),
        ),
        left(
            "you keep the tokens with p above q, but all of their p. What is left of each is p - q",
            lambda p, q: shared(p * (p > q)),
        ),
        left(
            "where p and q are the same, nothing is left, and 0 / 0 is NaN. Return p there",
            lambda p, q: shared((p - q).clamp(min=0)),
            lambda given, expected, arguments: torch.equal(*arguments),
        ),
        left(
            "this does not add up to 1, as probabilities do. Divide by the sum of what is left",
            lambda p, q: p if torch.equal(p, q) else (p - q).clamp(min=0),
            lambda *case: fits(*case) and abs(as_tensor(case[0]).sum().item() - 1) > 1e-3,
        ),
        left(
            "as after a softmax, tokens with nothing left get something. Divide by the sum",
            lambda p, q: (p - q).softmax(-1),
            lambda *case: fits(*case) and as_tensor(case[0]).min().item() > 0,
        ),
        left(  # and whatever else has the right shape
            "p - q where that is above 0, else 0, divided by the sum",
            lambda p, q: shared((p - q).clamp(min=0) ** 2),
            fits,
        ),
    ),
    right="what the draft brings too rarely is made up for, and the text is the target's own",
)

# ---- cache_lengths --------------------------------------------------------------------------


def round_reference(tokens, guesses, accepted):
    """A round, token by token: what each model is fed, and what it then forgets."""
    text, draft = tokens, 0
    for _ in range(guesses):
        draft = text  # it is fed all that it lacks,
        text += 1  # and guesses one more
    target = text  # one forward over all of them
    text = tokens + accepted + 1
    return min(target, text - 1), min(draft, text - 1)


@shown
def caches(given, expected, tokens, guesses, accepted):
    return (
        f"with {tokens} tokens and {accepted} of {guesses} guesses accepted, the caches hold "
        f"{expected[0]} and {expected[1]}, yours {given[0]} and {given[1]}"
    )


cache_lengths = Exercise(
    name="cache_lengths",
    reference=round_reference,
    view=lambda result, *arguments: tuple(result) if isinstance(result, list) else result,
    cases=((10, 4, 2), (10, 4, 4), (7, 3, 0), (5, 1, 1), (20, 6, 4)),
    mistakes=(
        caches(
            "the guesses that failed are still in there, and the next token would read them",
            lambda n, k, a: (n + k, n + k - 1),
        ),
        caches(
            "the draft keeps guesses that failed. It has to forget them as the target does",
            lambda n, k, a: (n + a, n + k - 1),
        ),
        caches(
            "you count one too few. The token that nobody was fed is the target's own, the newest",
            lambda n, k, a: (n + a - 1, n + a - 1),
        ),
        caches(
            "the newest token is the target's own, and no model was fed it yet",
            lambda n, k, a: (n + a + 1, n + a + 1),
            lambda *case: fits(*case) and case[0][0] == case[1][0] + 1,
        ),
        caches(
            "the accepted guesses are gone. They are part of the text, and were paid for",
            lambda n, k, a: (n - 1, n - 1),
        ),
        caches(
            "when all are accepted, the draft lacks one more. It was never fed its last guess",
            lambda n, k, a: (n + a, n + a),
        ),
        caches(  # and any other pair
            "both keep what was fed to them and belongs to the text, and the target comes first",
            lambda n, k, a: (n + k - a, n + k - a),
            fits,
        ),
    ),
    right="no model reads a guess that failed, and none is fed a token twice",
)

# ---- expected_speedup -----------------------------------------------------------------------


def mean_tokens(alpha, k) -> float:
    """Token by token: one comes when all guesses before it were accepted."""
    return sum(alpha**i for i in range(k + 1))


@shown
def gain(given, expected, alpha, k, draft, check):
    return (
        f"for alpha = {alpha}, k = {k} and the costs {draft} and {check} expected {expected:.4g}, "
        f"yours is {as_tensor(given).item():.4g}"
    )


expected_speedup = WithEdge(
    name="expected_speedup",
    reference=lambda alpha, k, draft, check: mean_tokens(alpha, k) / (k * draft + check),
    edge=lambda alpha, *rest: alpha == 1,
    cases=(
        (0.5, 2, 0.1, 1.2),  # 1.75 tokens for 1.4 steps
        (0.8, 4, 0.25, 1.5),
        (0.3, 5, 0.0, 1.25),  # guesses that cost nothing
        (0.0, 3, 0.2, 1.4),
        (1.0, 4, 0.1, 1.6),
    ),
    mistakes=(
        gain(
            "a token is missing. When all k guesses hold, the target adds one more: alpha^k",
            lambda a, k, draft, check: (mean_tokens(a, k) - a**k) / (k * draft + check),
        ),
        gain(
            "these are the accepted guesses alone. Each round also brings a token of the target's",
            lambda a, k, draft, check: (mean_tokens(a, k) - 1) / (k * draft + check),
        ),
        gain(
            "alpha · k + 1 is too much. A guess counts only if all before it were accepted",
            lambda a, k, draft, check: (a * k + 1) / (k * draft + check),
        ),
        gain(
            "the draft makes its guesses one after another, so they cost k · draft_cost",
            lambda a, k, draft, check: mean_tokens(a, k) / (draft + check),
        ),
        gain(
            "the forward that checks the guesses is missing in the cost of a round",
            lambda a, k, draft, check: mean_tokens(a, k) / (k * draft),
        ),
        gain(
            "you count the check as one ordinary step. It looks at k + 1 tokens, for check_cost",
            lambda a, k, draft, check: mean_tokens(a, k) / (k * draft + 1),
        ),
        gain(
            "where alpha is 1, a round brings k + 1 tokens, and the short formula is 0 / 0",
            lambda a, k, draft, check: (1 - a ** (k + 1)) / (1 - a) / (k * draft + check),
            lambda *case: case[2][0] == 1 and fits(*case),
        ),
        gain(  # and whatever else is a number
            "it is (1 + alpha + … + alpha^k) / (k · draft_cost + check_cost)",
            lambda a, k, draft, check: (k * draft + check) / mean_tokens(a, k),
            fits,
        ),
    ),
    right="you can tell before you build it whether a draft will pay",
)

EXERCISES = {
    e.name: e for e in (new_tokens, is_accepted, what_is_left, cache_lengths, expected_speedup)
}

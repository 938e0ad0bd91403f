"""Draws with a draft: exactly as likely as without one, and the popular wrong rules are seen."""

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from test_quantization import random_model
from torch import nn
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minillm import speculative
from minillm.generation import Request, generate
from minillm.kv_cache import KVCache
from minillm.sampling import SamplingParams
from minillm.speculative import ModelDraft, NgramDraft, next_shares, speculate

pytestmark = pytest.mark.usefixtures("one_thread")


class Bigram(nn.Module):
    """A model that looks at the last token only: a table of probabilities [V, V]."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table).log(), requires_grad=False)
        self.config = SimpleNamespace(
            vocab_size=len(table), context_length=1000, cache_shape=(1, 1, 1)
        )

    def hidden_states(self, token_ids, *, positions=None, padding_mask=None, cache=None):
        nothing = torch.zeros(1, 1, token_ids.shape[1], 1)
        cache.update(0, nothing, nothing)
        return self.table[token_ids]

    def head(self, x):
        return x


class Listed:
    """A draft without probabilities: the same guesses every time."""

    def __init__(self, *guesses):
        self.guesses = list(guesses)

    def propose(self, request, room):
        return self.guesses[:room], None

    def settle(self, request, proposed, accepted):
        pass


def processors(params: SamplingParams) -> LogitsProcessorList:
    """transformers' own, in transformers' order."""
    return LogitsProcessorList(
        ([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
        + ([TemperatureLogitsWarper(params.temperature)])
        + ([TopKLogitsWarper(params.top_k)] if params.top_k else [])
        + ([TopPLogitsWarper(params.top_p)] if params.top_p < 1 else [])
        + ([MinPLogitsWarper(params.min_p)] if params.min_p else [])
    )


def wanted(target: Bigram, text, params: SamplingParams) -> torch.Tensor:
    """What the target alone draws from behind this text, computed by transformers: [V]."""
    row = target.table[text[-1]][None]
    return processors(params)(torch.tensor([text]), row).softmax(-1)[0].double()


def speculated(target, draft, prompt, params, generator=None) -> Request:
    request = Request(prompt, params, context=target.config.context_length)
    request.generator = request.generator if generator is None else generator
    cache = KVCache.for_model(target, request.max_length)
    for _ in speculate(target, request, cache, draft):
        pass
    return request


# ---- exactly: every way that the dice can fall ------------------------------------------------


class Dice:
    """Stands in for torch's random numbers and lets them fall in every way, one after the other."""

    def __init__(self):
        self.open, self.trail, self.weight = [()], (), 1.0

    def choose(self, weights) -> int:
        """The next way; the others are kept for later."""
        total, n = sum(weights), len(self.trail)
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if n < len(self.plan):
            choice = self.plan[n]
        else:
            choice = possible[0]
            self.open += [(*self.trail, other) for other in possible[1:]]
        self.trail += (choice,)
        self.weight *= weights[choice] / total
        return choice

    def multinomial(self, shares, n, replacement=False, *, generator):
        assert n == 1 and isinstance(generator, torch.Generator)
        choice = self.choose(shares.double().flatten().tolist())
        return torch.full((*shares.shape[:-1], 1), choice)

    def rand(self, *size, generator):
        assert isinstance(generator, torch.Generator)
        return Uniform(self)

    def every_way(self, run) -> dict:
        """Result -> how likely it is."""
        chances = defaultdict(float)
        while self.open:
            self.plan, self.trail, self.weight = self.open.pop(), (), 1.0
            chances[run()] += self.weight
        return dict(chances)


class Uniform:
    """A number between 0 and 1 that is not drawn before it is compared."""

    def __init__(self, dice, factor: float = 1.0):
        self.dice, self.factor = dice, factor

    def __mul__(self, factor):
        return Uniform(self.dice, self.factor * float(factor))

    __rmul__ = __mul__

    def __lt__(self, bound):
        yes = min(float(bound) / self.factor, 1.0)
        return bool(self.dice.choose([1 - yes, yes]))


def exactly(target, make_draft, prompt, params) -> dict:
    """All texts that can come out, and how likely each is."""
    dice = Dice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", dice.multinomial)
        patch.setattr(torch, "rand", dice.rand)
        return dice.every_way(
            lambda: tuple(speculated(target, make_draft(), prompt, params).token_ids)
        )


def farthest(target, make_draft, prompt, params) -> float:
    """The largest difference of one text's probability from the target's alone."""
    chances = exactly(target, make_draft, prompt, params)
    assert sum(chances.values()) == pytest.approx(1, abs=1e-6)
    worst, V = 0.0, target.config.vocab_size
    for ids in itertools.product(range(V), repeat=params.max_new_tokens):
        expected = 1.0
        for n, token_id in enumerate(ids):
            expected *= wanted(target, [*prompt, *ids[:n]], params)[token_id].item()
        worst = max(worst, abs(chances.pop(ids, 0.0) - expected))
    assert chances == {}, "texts of another length"
    return worst


TARGET = Bigram([[0.15, 0.5, 0.35], [0.6, 0.1, 0.3], [0.25, 0.3, 0.45]])
NEAR = Bigram([[0.2, 0.45, 0.35], [0.5, 0.2, 0.3], [0.3, 0.3, 0.4]])
FAR = Bigram([[0.7, 0.1, 0.2], [0.1, 0.3, 0.6], [0.2, 0.75, 0.05]])
MODES = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.4},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.4},
}


def params_of(mode: str, n: int, seed: int | None = 0) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, seed=seed, **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft", [NEAR, FAR], ids=["near", "far"])
def test_every_text_is_exactly_as_likely_as_without_a_draft(mode, draft):
    """Three tokens together: the first, each later one, and every pair."""
    for k, n in ((1, 3), (2, 3)):
        assert farthest(TARGET, lambda k=k: ModelDraft(draft, k), [0], params_of(mode, n)) < 1e-6


@pytest.mark.parametrize("mode", ["top-p", "penalty"])
def test_four_tokens_are_exactly_right(mode):
    assert farthest(TARGET, lambda: ModelDraft(FAR, 2), [0], params_of(mode, 4)) < 1e-6


def test_a_block_of_four_guesses_is_exactly_right():
    target, draft = Bigram([[0.3, 0.7], [0.6, 0.4]]), Bigram([[0.8, 0.2], [0.5, 0.5]])
    assert farthest(target, lambda: ModelDraft(draft, 4), [0], params_of("plain", 5)) < 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "make_draft",
    [lambda: Listed(1, 0, 2), lambda: Listed(2), lambda: NgramDraft(4, shortest=1, patience=1)],
    ids=["three guesses", "one guess", "ngram"],
)
def test_a_draft_without_probabilities_is_exactly_right(mode, make_draft):
    assert farthest(TARGET, make_draft, [0, 1, 2, 0], params_of(mode, 4)) < 1e-6


# ---- the wrong rules --------------------------------------------------------------------------


def again_from_p(request, p, guess, q):
    """The rejected guess is replaced by a draw from all of p."""
    u = torch.rand((), generator=request.generator)
    if u * q[guess] < p[guess]:
        return guess
    return torch.multinomial(p, 1, generator=request.generator).item()


def below_p(request, p, guess, q):
    """The guess is taken with probability p, whatever q is."""
    u = torch.rand((), generator=request.generator)
    if u < p[guess]:
        return guess
    rest = (p - q).clamp(min=0)
    return torch.multinomial(rest, 1, generator=request.generator).item()


class Likeliest(ModelDraft):
    """Guesses its best token, and says that it drew."""

    def draw(self, share, request):
        return share.argmax().item()


class Unfiltered(ModelDraft):
    """Draws with the filters, and gives the probabilities before them."""

    def propose(self, request, room):
        guesses, _ = super().propose(request, room)
        ids = request.all_ids + guesses
        rows = [self.model.table[ids[n]] for n in range(-len(guesses) - 1, -1)]
        return guesses, [row.softmax(-1) for row in rows]


MISTAKES = {  # the rule, the draft, the settings that show it
    "drawn again from p": (again_from_p, ModelDraft, "plain"),
    "accepted below p": (below_p, ModelDraft, "plain"),
    "the draft's likeliest": (None, Likeliest, "plain"),
    "q without the filters": (None, Unfiltered, "top-k"),
}


@pytest.mark.parametrize(("rule", "kind", "mode"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_rule_is_seen_exactly(rule, kind, mode, monkeypatch):
    if rule:
        monkeypatch.setattr(speculative, "accept_or_replace", rule)
    assert farthest(TARGET, lambda: kind(FAR, 2), [0], params_of(mode, 3)) > 0.02


# ---- 100,000 real draws -----------------------------------------------------------------------

# Eight times 9,000 steps and two times 14,100 tokens. A right rule has a p-value below the bound
# with one seed in 10,000, and the seeds are fixed: 1 for the steps, 2 for the beginnings. The wrong
# rules were at 1e-10 and below in 3,000 steps.
BOUND = 1e-4
FOUR = Bigram(
    [
        [0.05, 0.50, 0.10, 0.35],
        [0.15, 0.05, 0.60, 0.20],
        [0.45, 0.25, 0.20, 0.10],
        [0.30, 0.10, 0.40, 0.20],
    ]
)
CLOSE = Bigram(
    [
        [0.10, 0.45, 0.15, 0.30],
        [0.20, 0.10, 0.50, 0.20],
        [0.40, 0.20, 0.25, 0.15],
        [0.25, 0.15, 0.40, 0.20],
    ]
)
DISTANT = Bigram(
    [
        [0.55, 0.10, 0.30, 0.05],
        [0.10, 0.60, 0.10, 0.20],
        [0.05, 0.05, 0.30, 0.60],
        [0.25, 0.25, 0.25, 0.25],
    ]
)
TURNED = Bigram(  # the two best of FOUR, the other way round: the filters keep the same
    [
        [0.05, 0.20, 0.10, 0.65],
        [0.15, 0.05, 0.20, 0.60],
        [0.15, 0.55, 0.20, 0.10],
        [0.60, 0.10, 0.20, 0.10],
    ]
)


def p_value(counts: torch.Tensor, shares: torch.Tensor) -> float:
    """Chi-squared: how likely counts as far from the shares [rows, cells] are, or farther."""
    assert not counts[shares == 0].any(), "a token that cannot be drawn"
    expected = counts.sum(-1, keepdim=True) * shares
    assert expected[shares > 0].min() >= 5, "too few draws: the test proves nothing"
    difference = (counts - expected)[shares > 0] ** 2 / expected[shares > 0]
    freedom = (shares > 0).sum() - len(shares)
    return torch.special.gammaincc(freedom / 2, difference.sum() / 2).item()


def chain(make_draft, mode: str, draws: int, seed: int = 1, length: int = 500) -> float:
    """The p-value of all steps of long texts, by the token before: each place of a block."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(4, 4, dtype=torch.float64)
    while counts.sum() < draws:
        request = speculated(FOUR, make_draft(), [0], params_of(mode, length), generator)
        for before, after in itertools.pairwise(request.all_ids):
            counts[before, after] += 1
        assert 0 < request.speculation.accepted < request.speculation.proposed
    shares = torch.stack([wanted(FOUR, [i], params_of(mode, 1)) for i in range(4)])
    seen = counts.sum(-1) > 0  # the filters may leave a token out of all texts
    assert seen.sum() >= 3
    return p_value(counts[seen], shares[seen])


CHAINS = {
    "plain, far, 4": (lambda: ModelDraft(DISTANT, 4), "plain"),
    "plain, close, 2": (lambda: ModelDraft(CLOSE, 2), "plain"),
    "temperature, far, 2": (lambda: ModelDraft(DISTANT, 2), "temperature"),
    "top-k, close, 2": (lambda: ModelDraft(CLOSE, 2), "top-k"),
    "top-p, far, 1": (lambda: ModelDraft(DISTANT, 1), "top-p"),
    "min-p, close, 2": (lambda: ModelDraft(CLOSE, 2), "min-p"),
    "plain, ngram, 4": (lambda: NgramDraft(4, shortest=1, patience=1), "plain"),
    "top-p, listed": (lambda: Listed(1, 2), "top-p"),
}


@pytest.mark.parametrize(("make_draft", "mode"), CHAINS.values(), ids=CHAINS)
def test_long_texts_are_distributed_as_the_target_wants(make_draft, mode):
    assert chain(make_draft, mode, 9000) > BOUND


@pytest.mark.parametrize(
    "make_draft", [lambda: ModelDraft(DISTANT, 2), lambda: Listed(1, 2)], ids=["far", "listed"]
)
def test_beginnings_are_distributed_as_the_target_wants(make_draft):
    """4,700 texts of three tokens: the first two together, and the third behind the second."""
    generator, params = torch.Generator().manual_seed(2), params_of("plain", 3)
    pairs, steps = torch.zeros(2, 4, 4, dtype=torch.float64)
    for _ in range(4700):
        one, two, three = speculated(FOUR, make_draft(), [0], params, generator).token_ids
        pairs[one, two] += 1
        steps[two, three] += 1
    first = wanted(FOUR, [0], params)
    rows = torch.stack([wanted(FOUR, [i], params) for i in range(4)])
    assert p_value(pairs.view(1, 16), (first[:, None] * rows).view(1, 16)) > BOUND
    assert p_value(steps, rows) > BOUND


@pytest.mark.parametrize(("rule", "kind", "mode"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_rule_is_seen_in_three_thousand_draws(rule, kind, mode, monkeypatch):
    if rule:
        monkeypatch.setattr(speculative, "accept_or_replace", rule)
    draft = TURNED if kind is Unfiltered else DISTANT
    assert chain(lambda: kind(draft, 2), mode, 3000) < 1e-6


# ---- the rule by hand -------------------------------------------------------------------------


def test_next_shares_are_those_of_transformers():
    for mode in MODES:
        params = params_of(mode, 5)
        request = Request([0, 3], params, context=100)
        request.append(1)
        row = FOUR.table[2]
        expected = wanted(FOUR, [0, 3, 1, 2], params)
        given = next_shares(row, request, [2]).double()
        assert torch.allclose(given, expected, atol=1e-6) and given.shape == (4,)


@pytest.mark.parametrize("mode", MODES)
def test_a_padded_id_has_no_share_and_a_missing_one_is_left_out(mode):
    """The table's logits are below 0: an id that was filled with 0 would be the likeliest."""
    request = Request([0], params_of(mode, 9), context=100)
    filled = ModelDraft(FAR, 1, vocab_size=5)
    guesses, (share,) = filled.propose(request, 9)
    expected = wanted(FAR, [0], request.params)
    assert guesses[0] < 3 and share[3:].tolist() == [0, 0]
    assert torch.allclose(share[:3].double(), expected, atol=1e-6)
    _, (share,) = ModelDraft(FAR, 1, vocab_size=2).propose(request, 9)
    assert torch.allclose(share.double(), wanted(Bigram([[0.7, 0.1]]), [0], request.params))


def test_an_impossible_guess_is_never_taken():
    """Not even with the smallest random number, which is 0."""
    request, p = Request([0], SamplingParams(seed=0), context=9), torch.tensor([0.0, 0.4, 0.6])
    q = torch.tensor([0.9, 0.1, 0.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *size, **options: torch.zeros(()))
        assert speculative.accept_or_replace(request, p, 0, q) in (1, 2)
        assert speculative.accept_or_replace(request, p, 1, q) == 1


def test_equal_shares_always_agree():
    request, p = Request([0], SamplingParams(seed=0), context=9), torch.tensor([0.2, 0.3, 0.5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *size, **options: torch.tensor(1 - 2**-24))
        assert speculative.accept_or_replace(request, p, 2, p.clone()) == 2
        nearly = p * (1 + 2**-20)  # rounding: the draft's row is larger everywhere
        assert speculative.accept_or_replace(request, p, 2, nearly) in (0, 1, 2)


# ---- seeds ------------------------------------------------------------------------------------

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "max_new_tokens": 40}
PROMPT = [5, 1, 88, 42, 5, 1, 88, 42, 5, 1]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("seed", [0, 7])
def test_prompt_lookup_draws_the_same_text_as_no_draft(family, seed):
    model, params = random_model(family, seed=12), SamplingParams(seed=seed, **SAMPLED)
    alone = list(generate(model, Request(PROMPT, params, context=64)))
    request = speculated(model, NgramDraft(shortest=1, patience=1), PROMPT, params)
    assert request.token_ids == alone and len(set(alone)) >= 10
    assert request.speculation.proposed > 10


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_seed_and_a_draft_give_one_text(family):
    model, small = random_model(family, seed=12), random_model(family, seed=13)
    texts = [
        speculated(model, ModelDraft(small), PROMPT, SamplingParams(seed=seed, **SAMPLED)).token_ids
        for seed in (7, 7, 8, None, None)
    ]
    assert texts[0] == texts[1] and len(set(map(tuple, texts))) == 4


@pytest.mark.parametrize("seed", [3, None])
def test_the_global_random_numbers_are_left_alone(seed):
    before = torch.get_rng_state()
    for draft in (ModelDraft(FAR, 3), NgramDraft(shortest=1), Listed(1, 1)):
        request = speculated(TARGET, draft, [0], params_of("plain", 60, seed))
        assert request.speculation.accepted < request.speculation.proposed
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_do_not_depend_on_the_global_random_numbers():
    texts = set()
    for number in (0, 1):
        torch.manual_seed(number)
        request = speculated(TARGET, ModelDraft(FAR, 3), [0], params_of("plain", 60))
        texts.add(tuple(request.token_ids))
    assert len(texts) == 1

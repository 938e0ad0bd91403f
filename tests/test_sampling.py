"""Sampling from outside: equal to transformers' processors, exact at ties and edges, drawn as predicted."""

import copy
import dataclasses
import inspect
import math
import pickle
import random
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import random_reference
from torch import nn
from transformers import AutoTokenizer, GPT2LMHeadModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minillm.generation import Request, seen_tokens
from minillm.gpt2 import GPT2
from minillm.parity import TOLERANCE
from minillm.sampling import (
    SamplingParams,
    apply_min_p,
    apply_repetition_penalty,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    process_logits,
    sample,
)
from minillm.weights import resolve

NAN, INF = math.nan, math.inf


pytestmark = pytest.mark.usefixtures("one_thread")


def logits_for(shares) -> torch.Tensor:
    """[1, V]: logits whose softmax these shares are."""
    return torch.tensor([shares]).log()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kept(logits: torch.Tensor) -> set[int]:
    """The tokens of one row that were not cut."""
    return set(logits.flatten().isfinite().nonzero().flatten().tolist())


def mask(token_ids, vocab_size: int) -> torch.Tensor:
    """bool [1, V]."""
    return torch.tensor([[i in set(token_ids) for i in range(vocab_size)]])


# ---- agreement with transformers on random rows -----------------------------------------------


@dataclasses.dataclass
class Agreement:
    """One processor against transformers' own, row by row.

    Every row is compared. One that differs is excepted only for a reason that is seen in it: equal
    logits straddle the cut, or a mass lies within 1e-5 of p. `changed`: rows on which the processor
    did something at all.
    """

    rows: int = 0
    equal: int = 0
    equal_logits: int = 0
    near_p: int = 0
    changed: int = 0

    @property
    def excepted(self) -> int:
        return self.equal_logits + self.near_p


def straddles_equal_logits(logits, ours) -> bool:
    cut = ours == -INF
    return bool(cut.any()) and logits[cut].max() == logits[~cut].min()


def mass_is_near(logits, p: float) -> bool:
    mass = logits.double().sort(descending=True).values.softmax(-1).cumsum(-1)
    return bool((mass - p).abs().min() < 1e-5)


def agreement(rows: int = 10_000, vocab_size: int = 4096, chunk: int = 250) -> dict[str, Agreement]:
    """The table: processor -> how many gaussian fp32 rows were compared, equal, excepted and why.

    Each chunk of rows has its own settings, each row its own spread (deviation 1 to 8) and level.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    table = {name: Agreement() for name in names}
    draw, torch_draw = random.Random(5), generator(5)
    for start in range(0, rows, chunk):
        size = min(chunk, rows - start)
        spread = 1 + 7 * torch.rand(size, 1, generator=torch_draw)
        level = 3 * torch.randn(size, 1, generator=torch_draw)
        logits = spread * torch.randn(size, vocab_size, generator=torch_draw) + level
        ids = torch.randint(vocab_size, (size, 300), generator=torch_draw)  # some ids twice
        seen = torch.zeros(size, vocab_size, dtype=torch.bool).scatter(1, ids, True)

        t, penalty = 10 ** draw.uniform(-1, 1), draw.uniform(0.5, 2)
        k, p, min_p = draw.randint(1, 300), draw.uniform(0.02, 0.98), 10 ** draw.uniform(-3, 0)
        warped = TemperatureLogitsWarper(t)(ids, logits)
        best = warped.amax(-1, keepdim=True)
        penalized = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
        pairs = {
            "temperature": (apply_temperature(logits, t), warped - best),
            "top_k": (apply_top_k(logits, k), TopKLogitsWarper(k)(ids, logits)),
            "top_p": (apply_top_p(logits, p), TopPLogitsWarper(p)(ids, logits)),
            "min_p": (apply_min_p(logits, min_p), MinPLogitsWarper(min_p)(ids, logits)),
            "repetition_penalty": (apply_repetition_penalty(logits, seen, penalty), penalized),
        }
        for name, (ours, theirs) in pairs.items():
            found = table[name]
            tolerance = TOLERANCE * warped.abs().amax(-1) if name == "temperature" else 0
            gap = torch.where(ours == theirs, 0, (ours - theirs).abs()).amax(-1)  # -inf == -inf
            equal = gap <= tolerance  # a NaN is not
            found.rows += size
            found.equal += int(equal.sum())
            found.changed += int((ours != logits).any(-1).sum())
            for i in (~equal).nonzero().flatten().tolist():
                if name in ("top_k", "top_p") and straddles_equal_logits(logits[i], ours[i]):
                    found.equal_logits += 1
                elif name == "top_p" and mass_is_near(logits[i], p):
                    found.near_p += 1
    return table


@pytest.fixture(scope="module")
def table():
    return agreement()


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_a_processor_agrees_with_transformers_on_10000_rows(table, name):
    found = table[name]
    assert found.rows == 10_000 and found.changed >= 9_900
    assert found.excepted <= 100, "more than 1 % of the rows need an excuse"
    assert found.equal + found.excepted == 10_000, f"unexplained differences: {found}"


# ---- ties, flat rows and peaks against a sort by hand -----------------------------------------


def ranking(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def odd_rows(vocab_size: int = 4096) -> dict[str, list[float]]:
    draw = random.Random(1)
    rows = {"flat": [0.0] * vocab_size, "flat below zero": [-7.5] * vocab_size}
    for n in range(4):
        rows[f"six values {n}"] = [float(draw.randrange(6)) for _ in range(vocab_size)]
        rows[f"coarse gaussian {n}"] = [round(draw.gauss(0, 3)) / 2 for _ in range(vocab_size)]
        rows[f"peak {n}"] = [float(draw.randrange(2)) for _ in range(vocab_size)]
        rows[f"peak {n}"][draw.randrange(vocab_size)] = (8.0, 20.0, 100.0, 1e4)[n]
        rows[f"two peaks {n}"] = [draw.gauss(0, 1) for _ in range(vocab_size)]
        for i in draw.sample(range(vocab_size), 2):
            rows[f"two peaks {n}"][i] = 15.0
    rows["two values"] = [3.0] * 10 + [2.0] * (vocab_size - 10)
    return rows


ODD_ROWS = odd_rows()


@pytest.mark.parametrize("row", ODD_ROWS.values(), ids=ODD_ROWS)
def test_top_k_keeps_exactly_k_the_lower_id_first(row):
    logits = torch.tensor([row])
    order = ranking(logits[0].tolist())
    for k in (1, 2, 3, 11, 1000, 4095, 4096, 5000):
        ours = apply_top_k(logits, k)
        assert kept(ours) == set(order[:k])
        assert torch.equal(ours[ours > -INF], logits[ours > -INF]), "what stays is not changed"
    assert sample(logits, SamplingParams()).item() == order[0], "greedy takes the same one"


@pytest.mark.parametrize("row", ODD_ROWS.values(), ids=ODD_ROWS)
def test_top_p_keeps_the_smallest_set_the_lower_id_first(row):
    """p lies half-way between two masses, so that rounding cannot decide."""
    logits = torch.tensor([row])
    values = logits[0].tolist()
    order = ranking(values)
    weights = [math.exp(values[i] - values[order[0]]) for i in order]
    total, mass = math.fsum(weights), [0.0]
    for weight in weights:
        mass.append(mass[-1] + weight / total)
    gaps = [n for n in range(1, len(mass)) if mass[n] - mass[n - 1] > 2e-5]  # n tokens cross p
    assert gaps
    for n in random.Random(2).choices(gaps, k=5):
        ours = apply_top_p(logits, (mass[n - 1] + mass[n]) / 2)
        assert kept(ours) == set(order[:n])
        assert torch.equal(ours[ours > -INF], logits[ours > -INF])


# ---- the order of the steps -------------------------------------------------------------------


class Constant(nn.Module):
    """A head that gives the same logits whatever it is shown."""

    def __init__(self, row):
        super().__init__()
        self.row = torch.tensor(row)

    def forward(self, x):
        return self.row.expand(*x.shape[:-1], len(self.row))


def scores_of_generate(row: list[float], prompt_ids: list[int], **options) -> torch.Tensor:
    """[1, V]: what transformers' `generate` would draw from, had its model given this row."""
    model = random_reference(vocab_size=len(row), n_layer=1)
    model.lm_head = Constant(row)
    ids = torch.tensor([prompt_ids])
    keep_all = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": 1}
    report = {"return_dict_in_generate": True, "output_scores": True}
    with torch.random.fork_rng(), torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), **keep_all | options, **report
        )
    return out.scores[0]


STEPS = {
    "repetition_penalty": apply_repetition_penalty,
    "temperature": apply_temperature,
    "top_k": apply_top_k,
    "top_p": apply_top_p,
    "min_p": apply_min_p,
}
FOUR = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
ORDER = {  # two steps in their order -> a row on which the other order gives something else
    "penalty before temperature": (
        [2.0, 1.5, -1.0],
        {"repetition_penalty": 1.5, "temperature": 0.5},
    ),
    "penalty before top-k": ([2.0, 1.5, -1.0], {"repetition_penalty": 2.0, "top_k": 1}),
    "penalty before top-p": ([2.0, 1.5, -1.0], {"repetition_penalty": 4.0, "top_p": 0.4}),
    "penalty before min-p": ([2.0, 1.5, -1.0], {"repetition_penalty": 4.0, "min_p": 0.5}),
    "temperature before top-k": ([0.0, 1e-7, -1.0], {"temperature": 3e38, "top_k": 1}),
    "temperature before top-p": (FOUR, {"temperature": 4.0, "top_p": 0.85}),
    "temperature before min-p": (FOUR, {"temperature": 4.0, "min_p": 0.6}),
    "top-k before top-p": (FOUR, {"top_k": 3, "top_p": 0.75}),
    "top-p before min-p": (FOUR, {"top_p": 0.75, "min_p": 0.3}),
}


@pytest.mark.parametrize(("row", "options"), ORDER.values(), ids=ORDER)
def test_the_order_of_the_steps_is_that_of_transformers(row, options):
    seen, logits = mask([0], len(row)), torch.tensor([row])

    def one_by_one(names):
        out = logits
        for name in names:
            given = (seen, options[name]) if name == "repetition_penalty" else (options[name],)
            out = STEPS[name](out, *given)
        return out

    ours = process_logits(logits, SamplingParams(**{"temperature": 1.0} | options), seen)
    theirs = scores_of_generate(row, [0], **options)
    if len(kept(theirs)) > options.get("top_k", 99):  # transformers keeps all equal ones
        assert kept(ours) < kept(theirs) and len(kept(ours)) == options["top_k"]
    else:
        assert kept(ours) == kept(theirs)
        assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), rtol=1e-5)
    first, second = (one_by_one(names).softmax(-1) for names in (options, reversed(options)))
    assert torch.allclose(ours.softmax(-1), first)
    assert (first - second).abs().max() > 0.02, "this case does not tell the two orders apart"


def test_temperature_0_applies_the_penalty_then_takes_the_best():
    logits, seen = (
        torch.tensor([[3.0, 2.5, 1.0]] * 2),
        torch.tensor([[True, False, False], [False] * 3]),
    )
    params = SamplingParams(repetition_penalty=1.5, top_k=1, top_p=0.1, min_p=0.9)
    assert sample(logits, params, seen=seen).tolist() == [1, 0]
    assert kept(process_logits(logits[:1], params, seen[:1])) == {1}


# ---- generate(..., output_scores=True), step by step ------------------------------------------

MIXES = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "penalty": {"repetition_penalty": 1.4},
    "all": {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
    },
}


def check_every_step(ours: GPT2, reference, prompt_ids, options, steps) -> int:
    """Compare what may be drawn, given the same prefix; return how many tokens could not be."""
    ids = torch.tensor([prompt_ids])
    given = {"top_k": 0, "do_sample": True, "pad_token_id": 0, "max_new_tokens": steps} | options
    report = {"return_dict_in_generate": True, "output_scores": True}
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(0)
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), **given, **report)
        whole, cut = out.sequences[0].tolist(), 0
        assert len(out.scores) == len(whole) - len(prompt_ids) == steps
        for step, theirs in enumerate(out.scores):
            prefix = whole[: len(prompt_ids) + step]
            logits = ours(torch.tensor([prefix]))[:, -1]
            seen = seen_tokens(prefix, logits.shape[-1])
            mine = process_logits(logits, SamplingParams(**{"temperature": 1.0} | options), seen)
            assert kept(mine) == kept(theirs), f"step {step}"
            assert torch.allclose(mine.softmax(-1), theirs.softmax(-1), atol=1e-5)
            cut += logits.shape[-1] - len(kept(mine))
    return cut


@pytest.mark.parametrize("options", MIXES.values(), ids=MIXES)
def test_at_every_step_the_set_is_that_of_generate(save_reference, options):
    reference, folder = save_reference(seed=3, std=0.12)
    cut = check_every_step(GPT2.from_pretrained(folder), reference, [5, 1, 88], options, 20)
    assert bool(cut) == any(name in options for name in ("top_k", "top_p", "min_p"))


def test_at_every_step_the_set_is_that_of_generate_on_fairytale():
    folder = resolve("fairytale")
    reference = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    prompt_ids = AutoTokenizer.from_pretrained(folder)("Once upon a time").input_ids
    ours = GPT2.from_pretrained("fairytale")
    assert check_every_step(ours, reference, prompt_ids, MIXES["all"], 25) > 25 * 4000


# ---- draws follow the predicted distribution --------------------------------------------------


def chi_squared(counts: torch.Tensor, shares: torch.Tensor) -> float:
    """How likely counts at least this far from the shares are, if they were drawn from them.

    Pearson's test; cells that expect fewer than 5 draws are one cell.
    """
    if counts[shares == 0].any():
        return 0.0
    counts, expected = counts.double(), shares.double() * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    filled = expected > 0
    statistic = ((counts - expected)[filled].square() / expected[filled]).sum()
    freedom = filled.sum().double() - 1
    assert freedom >= 1, "a single cell tells nothing"
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


ROW = (2 * torch.randn(24, generator=generator(8))).tolist()
BEST = sorted(range(24), key=ROW.__getitem__, reverse=True)
SEEN = [BEST[0], BEST[2], BEST[5], BEST[-1], BEST[2]]
DRAWS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.08},
    "penalty": {"repetition_penalty": 1.8},
    "all": MIXES["all"] | {"top_k": 9},
}


def predicted(options) -> torch.Tensor:
    """[V]: the shares that transformers' processors leave for `ROW` after the ids `SEEN`."""
    make = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    steps = LogitsProcessorList([make[name](options[name]) for name in make if name in options])
    return steps(torch.tensor([SEEN]), torch.tensor([ROW])).double().softmax(-1)[0]


def test_this_row_tells_the_settings_apart():
    shares = torch.stack([predicted(options) for options in DRAWS.values()])
    apart = torch.cdist(shares, shares, p=1) + torch.eye(len(shares))
    assert apart.min() > 0.05 and ((shares > 0).sum(-1) >= 4).all()


@pytest.mark.parametrize("options", DRAWS.values(), ids=DRAWS)
def test_100000_draws_follow_the_predicted_distribution(options):
    params = SamplingParams(**{"temperature": 1.0} | options)
    rows = torch.tensor([ROW]).expand(100_000, -1)
    seen = mask(SEEN, len(ROW)).expand(100_000, -1)
    counts = sample(rows, params, generator(1), seen).bincount(minlength=len(ROW))
    assert counts.sum() == 100_000
    assert chi_squared(counts, predicted(options)) > 1e-3


def test_the_chi_squared_test_sees_a_small_bias():
    """Of ten equal shares one is 8 % too large; a temperature is off by 3 %."""
    fair = torch.full((10,), 0.1)
    loaded = fair.clone()
    loaded[3] *= 1.08
    draws = torch.multinomial(loaded, 100_000, replacement=True, generator=generator(2))
    assert chi_squared(draws.bincount(minlength=10), fair) < 1e-3
    rows = torch.tensor([ROW]).expand(100_000, -1)
    off = sample(rows, SamplingParams(temperature=1.03), generator(1)).bincount(minlength=len(ROW))
    assert chi_squared(off, predicted({})) < 1e-3
    assert chi_squared(torch.tensor([50, 50, 1]), torch.tensor([0.5, 0.5, 0.0])) == 0


def test_50000_draws_of_one_request_follow_it_too():
    params = SamplingParams(temperature=1.0, max_new_tokens=50_000, seed=3)
    request = Request([0], params, context=200_000)
    row, counts = torch.tensor(ROW), torch.zeros(len(ROW))
    for _ in range(50_000):
        counts[request.accept(row)] += 1
    assert request.finish_reason == "length"
    assert chi_squared(counts, predicted({})) > 1e-3


@pytest.mark.parametrize("options", DRAWS.values(), ids=DRAWS)
def test_the_first_token_of_4000_requests_follows_it_too(options):
    """Seeds 0 to 3,999: also tells whether neighbouring seeds give unrelated draws."""
    row, counts = torch.tensor(ROW), torch.zeros(len(ROW))
    for seed in range(4000):
        params = SamplingParams(**{"temperature": 1.0} | options, seed=seed)
        counts[Request(SEEN, params, context=99).accept(row)] += 1
    assert chi_squared(counts, predicted(options)) > 1e-3


def test_rows_of_a_batch_are_processed_as_alone():
    logits = 3 * torch.randn(6, 50, generator=generator(4))
    logits[2] = 0
    seen = torch.rand(6, 50, generator=generator(5)) < 0.3
    for options in (*DRAWS.values(), {"temperature": 0.0, "repetition_penalty": 1.3}):
        params = SamplingParams(**{"temperature": 1.0} | options)
        together = process_logits(logits, params, seen)
        for i in range(6):
            assert torch.equal(
                process_logits(logits[i : i + 1], params, seen[i : i + 1])[0], together[i]
            )


def test_identical_rows_of_one_batch_draw_differently():
    assert (
        len(set(sample(torch.zeros(20, 50), SamplingParams(temperature=1.0), generator()).tolist()))
        > 5
    )


def test_sampling_leaves_the_global_random_numbers_alone():
    before = torch.get_rng_state()
    sample(torch.zeros(3, 9), SamplingParams(temperature=1.0), generator())
    for seed in (None, 0):
        Request([1], SamplingParams(temperature=1.0, seed=seed), context=9).accept(torch.zeros(9))
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_without_a_generator_gets_a_sentence():
    with pytest.raises(ValueError, match="needs a random generator"):
        sample(torch.zeros(1, 9), SamplingParams(temperature=1.0))


# ---- edges of each step -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-4, 1e-38, 1e-45, 1e-320, 5e-324])
def test_a_tiny_temperature_is_greedy(dtype, temperature):
    """Logits as large as the dtype holds them, and ones that are close together."""
    rows = [[60000.0, -60000.0, 59000.0, -INF], [-3.0, -2.0, -2.5, -3.0], [0.0, 0.25, 0.5, 0.0]]
    logits = torch.tensor(rows).to(dtype)
    params = SamplingParams(temperature=temperature)
    for seed in range(5):
        assert sample(logits, params, generator(seed)).tolist() == [0, 1, 2]
    assert not apply_temperature(logits, temperature).isnan().any()  # in its own dtype as well
    assert not process_logits(logits, params).isnan().any()


def test_a_huge_temperature_leaves_no_preference():
    logits = torch.tensor([[1e4, -1e4, 5.0, -INF]])
    shares = process_logits(logits, SamplingParams(temperature=3e38)).softmax(-1)[0]
    assert torch.allclose(shares, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]))


def test_the_largest_logits_of_fp32_do_not_overflow():
    logits = torch.tensor([[3e38, -3e38, 2e38]])
    for options in ({"temperature": 0.01}, {"temperature": 100.0, "top_p": 0.9, "min_p": 0.1}):
        assert sample(logits, SamplingParams(**options), generator()).tolist() == [0]


def test_temperature_by_hand():
    """0.5 doubles the distances, 2 halves them."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [-5.0, -5.0, -7.0]])
    assert apply_temperature(logits, 0.5).tolist() == [[-4, 0, -2], [0, 0, -4]]
    assert apply_temperature(logits, 2.0).tolist() == [[-1, 0, -0.5], [0, 0, -1]]


@pytest.mark.parametrize(
    ("k", "expected"),
    [(0, {0, 1, 2, 3, 4}), (1, {4}), (3, {4, 1, 2}), (5, {0, 1, 2, 3, 4}), (9, {0, 1, 2, 3, 4})],
)
def test_top_k_at_its_edges(k, expected):
    """Of three equal ones the two lower ids stay; more than there are, or 0, keeps all."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0]])
    assert kept(process_logits(logits, SamplingParams(temperature=1.0, top_k=k))) == expected


def test_top_k_1_is_deterministic_also_at_ties():
    params = SamplingParams(temperature=1.0, top_k=1)
    rows = torch.tensor([[1.0, 5.0, 5.0]])
    assert [sample(rows, params, generator(seed)).item() for seed in range(20)] == [1] * 20
    assert sample(rows, SamplingParams()).item() == 1  # and so is greedy


def test_what_is_minus_infinity_is_never_drawn():
    row = torch.tensor([[-INF, 0.0, -INF, -0.5, -INF]]).expand(2000, -1)
    for options in ({}, {"top_k": 4}, {"top_p": 0.99999}, {"min_p": 1e-30}, {"temperature": 1e30}):
        params = SamplingParams(**{"temperature": 1.0} | options)
        assert set(sample(row, params, generator()).tolist()) == {1, 3}


@pytest.mark.parametrize(("p", "keeps"), [(0.8, 3), (0.75, 3), (0.35, 1), (0.95, 4), (1.0, 4)])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_top_p_keeps_the_token_that_crosses(p, keeps, order):
    shares = [0.4, 0.3, 0.2, 0.1]
    logits = logits_for([shares[i] for i in order])
    expected = {place for place, i in enumerate(order) if i < keeps}
    assert kept(process_logits(logits, SamplingParams(temperature=1.0, top_p=p))) == expected


def test_top_p_needs_no_more_than_a_mass_of_exactly_p():
    """Of four equal tokens two are half of the mass; quarters are exact in fp32."""
    params = SamplingParams(temperature=1.0, top_p=0.5)
    assert kept(process_logits(torch.zeros(1, 4), params)) == {0, 1}


def test_top_p_1_keeps_also_what_is_lost_in_rounding():
    logits = torch.tensor([[0.0, -1.0, -60.0, -80.0]])
    params = SamplingParams(temperature=1.0, top_p=1)
    assert kept(process_logits(logits, params)) == {0, 1, 2, 3}


@pytest.mark.parametrize("p", [1e-3, 1e-44, 1e-46, 1e-300, 5e-324])
def test_a_tiny_top_p_keeps_the_best(p):
    params = SamplingParams(temperature=1.0, top_p=p)
    assert kept(process_logits(torch.tensor([[1.0, 2.0, 2.0]]), params)) == {1}
    assert sample(torch.zeros(3, 100), params, generator()).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [(0.0, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.4, {0, 1}), (1.0, {0}), (1e-300, {0, 1, 2, 3})],
)
def test_min_p_by_hand(min_p, expected):
    logits = logits_for([0.5, 0.3, 0.15, 0.05])
    assert kept(process_logits(logits, SamplingParams(temperature=1.0, min_p=min_p))) == expected


def test_min_p_1_keeps_all_that_are_best():
    assert kept(apply_min_p(torch.tensor([[2.0, 5.0, 5.0, 4.999]]), 1.0)) == {1, 2}


def test_the_penalty_makes_negative_logits_less_likely_too():
    ours = apply_repetition_penalty(torch.tensor([[2.0, -2.0, 0.0]]), mask([0, 1], 3), 1.5)
    assert torch.allclose(ours, torch.tensor([[4 / 3, -3.0, 0.0]]))


def test_the_penalty_counts_each_id_once_and_only_what_was_seen():
    logits = torch.tensor([[2.0, -2.0, 4.0]])
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0)
    seen = seen_tokens([0, 1, 0, 0, 1], 3)
    assert seen.tolist() == [[True, True, False]]
    assert process_logits(logits, params, seen).tolist() == [[-3.0, -8.0, 0.0]]
    with pytest.raises(ValueError, match="needs `seen`"):
        process_logits(logits, params)
    neutral = SamplingParams(temperature=1.0, repetition_penalty=1)
    assert process_logits(logits, neutral, seen).tolist() == [[-2.0, -6.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("penalty", "row", "says"),
    [
        (1e38, [-20.0, -5.0, -9.0], "after the repetition penalty are all -inf"),
        (1e-38, [20.0, -5.0, 9.0], "after the repetition penalty hold inf"),
        (1e-300, [20.0, -5.0, 9.0], "after the repetition penalty hold"),
        (1e-300, [-20.0, -5.0, -INF], "after the repetition penalty hold"),
    ],
)
def test_a_penalty_beyond_the_numbers_gets_a_sentence(temperature, penalty, row, says):
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    with pytest.raises(ValueError, match=says):
        sample(torch.tensor([row]), params, generator(), mask([0, 1, 2], 3))


def test_a_huge_or_tiny_penalty_within_the_numbers_is_arithmetic():
    row, seen = torch.tensor([[20.0, -20.0, 1.0]]), mask([0, 1], 3)
    huge = process_logits(row, SamplingParams(temperature=1.0, repetition_penalty=1e38), seen)
    assert huge.tolist() == [[-1.0, -INF, 0.0]]
    tiny = process_logits(
        row, SamplingParams(temperature=1.0, repetition_penalty=1e-38), mask([1], 3)
    )
    assert tiny.tolist() == [[0.0, -20.0, -19.0]]


# ---- logits from which nothing can be chosen --------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([0.0, NAN, 1.0], r"of the model hold nan.*row 1"),
        ([-INF, NAN, -INF], r"of the model hold nan.*row 1"),
        ([INF, NAN, 0.0], r"of the model hold nan.*row 1"),
        ([0.0, INF, 1.0], r"of the model hold inf.*row 1"),
        ([-INF, -INF, -INF], r"of the model are all -inf.*row 1"),
    ],
)
def test_logits_that_are_no_numbers_get_a_sentence(temperature, dtype, bad, says):
    logits = torch.tensor([[0.0, 1.0, 2.0], bad], dtype=dtype)
    with pytest.raises(ValueError, match=says):
        sample(logits, SamplingParams(temperature=temperature), generator())


@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 0), (1, 2, 5), ()])
def test_logits_of_another_shape_get_a_sentence(shape):
    with pytest.raises(ValueError, match=r"expected \[B, V\]"):
        sample(torch.zeros(shape), SamplingParams(temperature=1.0), generator())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_float_kind_are_processed_in_fp32(dtype):
    logits, seen = torch.tensor([ROW]).to(dtype), mask(SEEN, len(ROW))
    for options in DRAWS.values():
        params = SamplingParams(**{"temperature": 1.0} | options)
        ours = process_logits(logits, params, seen)
        assert torch.equal(ours, process_logits(logits.float(), params, seen))
        assert ours.dtype == torch.float32


def test_the_logits_that_were_given_are_not_changed():
    logits, seen = torch.tensor([ROW]), mask(SEEN, len(ROW))
    before = logits.clone()
    process_logits(logits, SamplingParams(**DRAWS["all"]), seen)
    sample(logits, SamplingParams(repetition_penalty=1.5), seen=seen)
    assert torch.equal(logits, before) and torch.equal(seen, mask(SEEN, len(ROW)))


# ---- the parameters ---------------------------------------------------------------------------

OF_NO_KIND = (
    "1",
    "",
    None,
    True,
    False,
    np.True_,
    1j,
    [1],
    (1,),
    torch.tensor(1),
    NAN,
    np.nan,
    INF,
    -INF,
)
REFUSED = {
    "max_new_tokens": [0, -1, 1.0, 2.5, np.int64(0), np.float64(2)],
    "temperature": [-1, -0.1, -1e-320, np.float32(-1), 1e39, 10**400, np.float32(INF)],
    "top_k": [-1, 1.0, 2.5, np.int32(-1), np.float32(3)],
    "top_p": [0, 0.0, -0.1, 1.0000001, 2, 10**400, np.float64(0)],
    "min_p": [-0.1, -1e-320, 1.0000001, 2, np.float64(-1)],
    "repetition_penalty": [0, 0.0, -1, -1.5, 1e39, 10**400, np.float32(0)],
    "seed": [-1, 2**32, 1.0, np.int64(-1), np.float64(1)],
    "stop": ["", [""], ["a", ""], [1], ["a", None], 5, b"x", [b"x"], {"a": 1}],
}
CASES = [
    (field, value)
    for field, values in REFUSED.items()
    for value in (*values, *OF_NO_KIND)
    if not (field == "seed" and value is None) and not (field == "stop" and value == "1")
]


@pytest.mark.parametrize(("field", "value"), CASES, ids=lambda v: f"{v!r:.30}")
def test_a_value_out_of_range_or_of_another_kind_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} is .*, expected "):
        SamplingParams(**{field: value})
    with pytest.raises(ValueError, match=f"^{field} is "):
        dataclasses.replace(SamplingParams(), **{field: value})


def test_the_cases_above_cover_every_field():
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_the_edges_of_every_range_are_accepted():
    SamplingParams(max_new_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, seed=0)
    SamplingParams(temperature=3e38, min_p=1, repetition_penalty=3e38, seed=2**32 - 1, stop=[])
    SamplingParams(max_new_tokens=10**30, top_k=10**30, top_p=5e-324, repetition_penalty=1e-38)


def test_the_defaults_are_greedy_and_cut_nothing():
    params = SamplingParams()
    assert params == SamplingParams(
        max_new_tokens=100,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        stop=(),
        seed=None,
    )
    row = torch.tensor([ROW])
    untouched = process_logits(row, SamplingParams(temperature=1.0), mask(SEEN, len(ROW)))
    assert torch.equal(untouched, row - row.max())


@pytest.mark.parametrize("name", ["temprature", "max_tokens", "topk", "do_sample"])
def test_an_unknown_name_is_refused(name):
    for make in (SamplingParams, lambda **named: dataclasses.replace(SamplingParams(), **named)):
        with pytest.raises(TypeError, match=f"SamplingParams.*'{name}'"):
            make(**{name: 1})


@pytest.mark.parametrize("real", [np.float16, np.float32, np.float64, np.longdouble, Fraction])
@pytest.mark.parametrize("whole", [np.int8, np.uint8, np.int64, np.uint64])
def test_numbers_of_numpy_do_what_plain_ones_do(real, whole):
    """Accepted, used to the end, and without a warning."""

    def draws(real, whole):
        numbers = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), real)
        numbers |= {"temperature": real * 3, "min_p": real / 8}
        wholes = {"top_k": whole * 5, "max_new_tokens": whole * 15, "seed": whole}
        request = Request(SEEN, SamplingParams(**numbers, **wholes), context=99)
        while request.finish_reason is None:
            request.accept(torch.tensor(ROW))
        return request.token_ids

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = draws(real(0.75), whole(2))
    assert given == draws(0.75, 2) and len(set(given)) > 1


def test_params_are_frozen_hashable_and_can_be_copied():
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=np.int64(4), stop=["a", "b"])
    for field in dataclasses.fields(SamplingParams):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, field.name, 1)
    copies = (copy.copy(params), copy.deepcopy(params), dataclasses.replace(params))
    pickled = [pickle.loads(pickle.dumps(params, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)]
    assert {params, *copies, *pickled} == {params}
    assert dataclasses.replace(params, top_p=0.5) == SamplingParams(
        temperature=0.8, top_p=0.5, seed=4, stop=["a", "b"]
    )


def test_stop_strings_become_a_tuple_of_ones_own():
    given = ["a", "b"]
    params = SamplingParams(stop=given)
    given.append("c")
    assert params.stop == ("a", "b")
    assert SamplingParams(stop="ab").stop == ("ab",) and SamplingParams(stop=("x",)).stop == ("x",)


def test_the_signature_names_the_fields():
    """What Shift-Tab shows in a notebook."""
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == fields

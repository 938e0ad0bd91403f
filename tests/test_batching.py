"""The batch from outside: each row says what it says alone, in any company, up to its own end."""

import itertools
import json
import random
from dataclasses import dataclass
from functools import cache as once
from functools import partial

import pytest
import torch
from conftest import Recorded, fed_cache, random_reference
from transformers import GPT2LMHeadModel

from minillm.batching import compact, generate_batch, pad_left
from minillm.generation import generate
from minillm.gpt2 import GPT2, GPT2Config, load_weights
from minillm.kv_cache import KVCache
from minillm.layers import causal_mask, position_ids
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.weights import end_token_ids, resolve

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {  # fields of transformers' config, our kernel
    "tiny GPT-2": ({}, "sdpa"),
    "tiny, naive kernel": ({}, "naive"),
    "odd shape, two cores": (  # the cores are only claimed: a row alone goes another way
        {"n_embd": 35, "n_head": 5, "n_layer": 3, "vocab_size": 96}
        | {"scale_attn_by_inverse_layer_idx": True},
        "sdpa",
    ),
    "short context": ({"n_positions": 64}, "sdpa"),
}
LENGTHS = 1, 4, 9, 60
SAMPLED = [  # one for each row; two have the same seed, and must not share its numbers
    {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    {"temperature": 1.3, "top_k": 20, "seed": 7},
    {"temperature": 1.0, "repetition_penalty": 1.3, "min_p": 0.02, "seed": 11},
    {"temperature": 0.7, "repetition_penalty": 1.1, "seed": 123},
]
MODES = {
    "greedy": [{}] * 4,
    "sampled": SAMPLED,
    "both": [SAMPLED[0], {}, {}, SAMPLED[3]],
}
MATRIX = [
    *itertools.product(["tiny GPT-2", "tiny, naive kernel"], MODES),
    *itertools.product(["odd shape, two cores", "fairytale"], ["greedy", "sampled"]),
]
ORDERS = list(itertools.permutations(range(4)))


MODELS = {}  # kind -> transformers' model and ours on the same weights


def pair(kind: str):
    if kind not in MODELS:
        MODELS[kind] = new_pair(kind)
    return MODELS[kind]


def new_pair(kind: str):
    if kind == "fairytale":
        folder = resolve(kind)
        reference = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
        return reference, GPT2.from_pretrained(folder)
    fields, kernel = KINDS[kind]
    return random_pair(kernel, **{"seed": 4, "n_positions": 128} | fields)


def random_pair(kernel: str, **options):
    reference = random_reference(**options)
    config = GPT2Config.from_dict(json.loads(reference.config.to_json_string()))
    return reference, load_weights(GPT2(config, kernel), reference.state_dict()).eval()


def model_of(kind: str = "tiny GPT-2") -> GPT2:
    return pair(kind)[1]


def some_ids(length: int, size: int = 97) -> tuple[int, ...]:
    """A prompt of that length; the longer ones hold id 0, which the padding has too."""
    ids = [(31 * i * i + 17 * i + 5 * length) % (size - 1) for i in range(length)]
    return tuple(ids if length < 3 else [0, *ids[1:-1], 23])


@once
def tale() -> Tokenizer:
    return Tokenizer.from_pretrained("fairytale")


@once
def prompts_of(kind: str) -> list[tuple[int, ...]]:
    """Prompts of 1, 4, 9 and 60 tokens, none the beginning of another."""
    if kind != "fairytale":
        return [some_ids(length, KINDS[kind][0].get("vocab_size", 97)) for length in LENGTHS]
    text = (
        "There was once upon a time a poor miller who had a very beautiful daughter. Now it "
        "happened one day that he had an audience with the King, and in order to appear a person "
        "of some importance he told him that he had a daughter who could spin straw into gold. "
        "In the morning the old woman went out into the garden and saw the bird."
    )
    ids = tale().encode(text)
    assert len(ids) >= 74, "the text is too short for these prompts"
    starts = 0, 1, 5, 14
    return [tuple(ids[i : i + n]) for i, n in zip(starts, LENGTHS, strict=True)]


# ---- what a row says, alone and together ------------------------------------------------------


@dataclass
class Run:
    """One row's new ids, the logits of each step, and why it ended."""

    token_ids: list[int]
    rows: list[torch.Tensor]
    finish_reason: str


def request_for(kind, prompt, end_id=None, tokenizer=None, **fields) -> Recorded:
    context, params = model_of(kind).config.n_positions, SamplingParams(**fields)
    return Recorded(prompt, params, context=context, end_ids=end_id, tokenizer=tokenizer)


@once
def alone(kind: str, prompt: tuple, end_id=None, **fields) -> Run:
    """A row by itself: greedy by transformers, sampled by the single-row loop, no cache."""
    reference, model = pair(kind)
    if fields.get("temperature", 0):
        request = request_for(kind, prompt, end_id, **fields)
        list(generate(model, request))
        return request
    ids, budget = torch.tensor([prompt]), fields["max_new_tokens"]
    room = reference.config.n_positions - len(prompt)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": end_id}
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(budget, room),
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    new = out.sequences[0, len(prompt) :].tolist()
    ended = "length" if len(new) == budget else "context"
    return Run(new, [row[0] for row in out.logits], "stop" if new[-1] == end_id else ended)


def together(kind: str, requests: list[Recorded]) -> list[Recorded]:
    """The requests, run to their ends as one batch."""
    for _ in generate_batch(model_of(kind), requests):
        pass
    return requests


def differs(given, expected) -> str:
    """What is not equal, in words; "" when all is. Nothing to compare is a failure."""
    assert expected.token_ids and len(expected.rows) == len(expected.token_ids), (
        "there is nothing to compare"
    )
    if given.token_ids != expected.token_ids:
        return f"ids {given.token_ids}, alone {expected.token_ids}"
    if given.finish_reason != expected.finish_reason:
        return f"ended by {given.finish_reason!r}, alone by {expected.finish_reason!r}"
    one, other = torch.stack(given.rows), torch.stack(expected.rows)  # [steps, V] each
    assert one.shape == other.shape
    gap = ((one - other).abs().amax(-1) / other.abs().amax(-1)).max().item()
    return "" if gap <= 1e-5 else f"logits are {gap:.2g} x the largest apart"


def equal(groups) -> str:
    """ "equal 24/24" for 24 groups of (given, expected) pairs, or AssertionError with the first
    place where they part; no group and an empty group are failures too."""
    groups = [list(group) for group in groups]
    assert groups and all(groups), "there is nothing to compare"
    bad = [[text for one in group if (text := differs(*one))] for group in groups]
    assert not any(bad), f"{sum(map(bool, bad))} of {len(bad)} differ: {max(bad, key=bool)[0]}"
    return f"equal {len(groups)}/{len(groups)}"


def end_of(kind: str):
    return next(iter(end_token_ids(resolve(kind)))) if kind == "fairytale" else None


def specs(kind: str, mode: str, steps: int = 20) -> list[dict]:
    """The arguments of `alone` and `request_for`, for each of the four rows."""
    rows = zip(prompts_of(kind), MODES[mode], strict=True)
    common = {"kind": kind, "end_id": end_of(kind), "max_new_tokens": steps}
    return [common | fields | {"prompt": prompt} for prompt, fields in rows]


def batched(rows: list[dict], orders) -> str:
    """The rows as one batch, in each order, against each alone."""
    expected = [alone(**row) for row in rows]

    def group(order):
        given = together(rows[0]["kind"], [request_for(**rows[n]) for n in order])
        return zip(given, [expected[n] for n in order], strict=True)

    return equal(map(group, orders))


def one_by_one(rows: list[dict], splits=None) -> str:
    """Each row in the single-row loop: without a cache, or with, the prompt in pieces."""

    def run(row):
        model, request = model_of(row["kind"]), request_for(**row)
        cache = None if splits is None else fed_cache(model, request, splits)
        list(generate(model, request, cache))
        return request

    return equal([(run(row), alone(**row))] for row in rows)


# ---- the matrix -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def matrix():
    """Print a line of the matrix of all ways, which -s shows."""
    lines = itertools.count()

    def line(kind, mode, *cells):
        columns = "no cache", "cached", "chunked", "batched"
        if next(lines) == 0:
            print(f"\n{'model':<22}{'rows':<9}" + "".join(f"{name:>14}" for name in columns))
        print(f"{kind:<22}{mode:<9}" + "".join(f"{cell:>14}" for cell in cells))

    return line


@pytest.mark.parametrize(("kind", "mode"), MATRIX)
def test_each_row_in_each_of_24_orders_equals_its_solo_run(kind, mode, matrix, monkeypatch):
    if "two cores" in kind:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rows = specs(kind, mode, steps=8 if kind == "fairytale" else 20)
    assert [len(row["prompt"]) for row in rows] == [1, 4, 9, 60] and len(set(ORDERS)) == 24
    cells = one_by_one(rows), one_by_one(rows, 60), one_by_one(rows, 7), batched(rows, ORDERS)
    matrix(kind, mode, *cells)
    assert cells == ("equal 4/4", "equal 4/4", "equal 4/4", "equal 24/24")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "short context"])
def test_the_random_models_do_not_repeat_themselves(kind):
    """One that says the same few tokens whatever it is fed would hide most mistakes."""
    rows = specs(kind, "greedy", steps=60)
    distinct = [len(set(alone(**row).token_ids)) for row in rows]
    assert min(distinct) >= 20, f"only {distinct} distinct tokens of 60"
    assert batched(rows, ORDERS[:1]) == "equal 1/1"


def test_the_124m_shape_with_random_weights(matrix, monkeypatch, gpt2_124m):
    kind, (reference, _, model) = "GPT-2 124M shape", gpt2_124m
    monkeypatch.setitem(MODELS, kind, (reference, model))
    sizes = zip(LENGTHS, [3, 4, 5, 4], strict=True)  # they end one after the other
    rows = [
        {"kind": kind, "prompt": tuple(2**9 * i + 7 for i in some_ids(n)), "max_new_tokens": m}
        for n, m in sizes
    ]
    cell = batched(rows, [(2, 0, 3, 1)])
    matrix(kind, "greedy", "-", "-", "-", cell)
    assert cell == "equal 1/1"


def test_a_comparison_that_compared_nothing_is_a_failure():
    empty = Run([], [], "length")
    for groups in ([], [[]], [[(empty, empty)]]):
        with pytest.raises(AssertionError, match="nothing to compare"):
            equal(groups)
    rows = specs("tiny GPT-2", "greedy")
    with pytest.raises(AssertionError, match="nothing to compare"):
        batched(rows, [])
    one = alone(**rows[0])
    assert equal([[(one, one)]]) == "equal 1/1"
    for other in (alone(**rows[1]), Run(one.token_ids, one.rows, "stop")):
        with pytest.raises(AssertionError, match="1 of 2 differ"):
            equal([[(one, one)], [(other, one)]])
    for shift in (1e-3, float("nan")):
        moved = Run(one.token_ids, [row + shift for row in one.rows], one.finish_reason)
        with pytest.raises(AssertionError, match="1 of 1 differ: logits are"):
            equal([[(moved, one)]])


# ---- the matrix sees the known mistakes -------------------------------------------------------


def columns_as_positions(new_length, past_length=0, padding_mask=None):
    return position_ids(new_length, past_length)


def padding_is_seen(new_length, past_length=0, padding_mask=None):
    return causal_mask(new_length, past_length)


def pad_right(rows, pad_id=0):
    token_ids, mask = pad_left([row[::-1] for row in rows], pad_id)
    return token_ids.flip(1), mask.flip(1)


def mask_from_ids(rows, pad_id=0):
    token_ids, _ = pad_left(rows, pad_id)
    return token_ids, token_ids != pad_id


def one_column_too_many(cache, padding_mask, rows):
    mask = compact(cache, padding_mask, rows)
    for buffers in (cache.keys, cache.values):
        buffers[:] = [buffer.roll(-1, dims=2) for buffer in buffers]
    return mask


def rows_of_others(cache, padding_mask, rows):
    mask = padding_mask[rows]
    compact(cache, padding_mask, range(len(rows)))
    return mask[:, -cache.length :]


def mask_of_others(cache, padding_mask, rows):
    compact(cache, padding_mask, rows)
    return padding_mask[: len(rows), -cache.length :]


SHARED = torch.Generator()


def one_generator(seed):
    return SHARED.manual_seed(7)


MISTAKES = {
    "positions from columns": ("minillm.language_model.position_ids", columns_as_positions),
    "padding that is seen": ("minillm.language_model.causal_mask", padding_is_seen),
    "padding on the right": ("minillm.batching.pad_left", pad_right),
    "a mask from the ids": ("minillm.batching.pad_left", mask_from_ids),
    "the wrong columns": ("minillm.batching.compact", one_column_too_many),
    "the wrong rows": ("minillm.batching.compact", rows_of_others),
    "the wrong rows of the mask": ("minillm.batching.compact", mask_of_others),
    "one generator for all rows": ("minillm.generation.make_generator", one_generator),
}


@pytest.mark.parametrize(("place", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_known_mistake_turns_the_matrix_red(place, mistake, monkeypatch):
    rows = specs("tiny GPT-2", "sampled")
    for row, budget in zip(rows, [20, 12, 16, 4], strict=True):
        row["max_new_tokens"] = budget
    orders = [(0, 1, 2, 3), (3, 1, 0, 2)]
    assert batched(rows, orders) == "equal 2/2"
    monkeypatch.setattr(place, mistake)
    with pytest.raises(AssertionError, match="2 of 2 differ"):
        batched(rows, orders)


# ---- company ----------------------------------------------------------------------------------


def test_a_request_says_the_same_in_any_company():
    """Alone, in twos and threes, and beside a row with its own prompt and seed."""
    rows = specs("tiny GPT-2", "sampled", steps=12)
    companies = [c for size in (1, 2, 3) for c in itertools.permutations(range(4), size)]
    twins = [(1, 1), (1, 1, 3), (2, 0, 2, 2), (3, 3, 3, 3)]
    assert batched(rows, companies + twins) == f"equal {4 + 12 + 24 + 4}/44"


def test_rows_of_one_length_need_no_padding():
    prompts = [tuple((n + i) % 97 for i in range(9)) for n in (3, 40, 77)]
    rows = [
        {"kind": "tiny GPT-2", "prompt": p, "max_new_tokens": n}
        for p, n in zip(prompts, [30, 9, 20], strict=True)
    ]
    assert batched(rows, [(0, 1, 2), (2, 0, 1)]) == "equal 2/2"


def test_identical_prompts_differ_without_a_seed_and_agree_with_one():
    def texts(*seeds):
        requests = [
            request_for("tiny GPT-2", (5, 1, 88), temperature=1.0, max_new_tokens=12, seed=seed)
            for seed in seeds
        ]
        return [tuple(request.token_ids) for request in together("tiny GPT-2", requests)]

    free = texts(None, None, None)
    assert len(set(free)) == 3
    one, two, other, three = texts(7, 7, 8, 7)
    assert one == two == three != other and len(set(free) | {one, other}) == 5
    torch.manual_seed(0)  # nothing that others do to the global numbers changes it
    assert texts(None, 7)[1] == one and set(texts(None, None)).isdisjoint(free)


def test_the_global_random_numbers_are_left_alone():
    before, python_before = torch.get_rng_state(), random.getstate()
    for mode in MODES:
        together("tiny GPT-2", [request_for(**row) for row in specs("tiny GPT-2", mode, 5)])
    together("tiny GPT-2", [request_for("tiny GPT-2", (5,), temperature=1.0, max_new_tokens=3)])
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python_before


# ---- padding ----------------------------------------------------------------------------------


def test_pad_left_by_hand():
    token_ids, mask = pad_left([[5], (1, 2, 3), [8, 9]])
    assert token_ids.tolist() == [[0, 0, 5], [1, 2, 3], [0, 8, 9]]
    assert mask.tolist() == [[False, False, True], [True] * 3, [False, True, True]]
    assert (token_ids.dtype, mask.dtype) == (torch.int64, torch.bool)


def test_a_mask_comes_from_the_lengths():
    """Also where a row holds the padding's id, in front and at its end."""
    token_ids, mask = pad_left([[7, 3, 7], [7], [1, 7, 2, 7]], pad_id=7)
    assert token_ids.tolist() == [[7, 7, 3, 7], [7, 7, 7, 7], [1, 7, 2, 7]]
    assert mask.int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]


def test_pad_left_without_padding():
    for rows in ([[4, 2]], [[4, 2], [6, 6], [0, 0]]):
        token_ids, mask = pad_left(rows)
        assert token_ids.tolist() == rows and mask.all() and mask.shape == token_ids.shape


@pytest.mark.parametrize(
    ("rows", "says"),
    [([], "no tokens"), ([[]], r"\[0\] tokens"), ([[1], [], [2, 3]], r"\[1, 0, 2\]")],
)
def test_rows_without_tokens_are_refused(rows, says):
    with pytest.raises(ValueError, match=f"{says}.*at least one row.*at least one token"):
        pad_left(rows)


@pytest.mark.parametrize("pad_id", [0, 23, 96, "said"])
def test_the_padding_is_never_looked_at(pad_id, monkeypatch):
    """Any id may pad: one that stands in the prompts, one that ends a row, one that a row says."""
    rows = specs("tiny GPT-2", "both")
    if pad_id == "said":
        pad_id = alone(**rows[1]).token_ids[7]
    for row in rows:
        row["end_id"] = pad_id
    monkeypatch.setattr("minillm.batching.pad_left", partial(pad_left, pad_id=pad_id))
    assert batched(rows, ORDERS[::6]) == "equal 4/4"


def test_the_end_id_in_a_prompt_does_not_end_it():
    """transformers would take it for padding; only a new token ends a row."""
    end_id = alone("tiny GPT-2", (5, 1, 88), max_new_tokens=20).token_ids[8]
    prompts = [(end_id,), (end_id, 1, 88, end_id), (5, 1, 88), some_ids(60)]
    rows = [
        {"kind": "tiny GPT-2", "prompt": p, "end_id": end_id, "max_new_tokens": 20} for p in prompts
    ]
    assert batched(rows, ORDERS[::5]) == "equal 5/5"
    assert "stop" in {alone(**row).finish_reason for row in rows}


# ---- compact ----------------------------------------------------------------------------------

SHAPE = {"n_layers": 3, "n_kv_heads": 2, "head_dim": 5, "max_length": 9, "batch_size": 4}
PADS = [1, 4, 3, 2]  # columns of padding in front of each of the four rows, of 6 columns


def filled() -> tuple[KVCache, torch.Tensor]:
    """A cache with six positions of random numbers, and its mask."""
    cache, generator = KVCache(**SHAPE), torch.Generator().manual_seed(0)
    for layer in range(3):
        cache.update(layer, *torch.randn(2, 4, 2, 6, 5, generator=generator))
    return cache, torch.tensor([[0] * n + [1] * (6 - n) for n in PADS]).bool()


def counted(cache: KVCache) -> int:
    """The bytes of all separate storages, as torch counts them."""
    storages = [buffer.untyped_storage() for buffer in cache.keys + cache.values]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    ("rows", "dropped"),
    [
        ([0, 1, 2, 3], 1),
        ([1, 2, 3], 2),
        ([3, 1], 2),
        ([2, 1], 3),
        ([1], 4),
        ([0], 1),
        (range(1, 3), 3),
    ],
    ids=str,
)
def test_compact_keeps_the_rows_in_order_and_drops_what_is_padding_in_all(rows, dropped):
    cache, mask = filled()
    old = [buffer.clone() for buffer in cache.keys + cache.values]
    new_mask = compact(cache, mask, rows)
    assert new_mask.tolist() == [mask[n].tolist()[dropped:] for n in rows]
    assert (cache.length, cache.max_length) == (6 - dropped, 9 - dropped)
    new = cache.keys + cache.values
    assert len(new) == 6
    for was, now in zip(old, new, strict=True):
        assert now.shape == (len(rows), 2, 9 - dropped, 5)
        for place, n in enumerate(rows):
            assert now[place].tolist() == was[n, :, dropped:].tolist()
    assert cache.nbytes == counted(cache) == 6 * len(rows) * 2 * (9 - dropped) * 5 * 4


def test_compact_drops_nothing_where_one_row_has_no_padding():
    cache, mask = filled()
    mask[2] = True
    assert compact(cache, mask, [2, 0]).tolist() == [mask[2].tolist(), mask[0].tolist()]
    assert (cache.length, cache.max_length) == (6, 9)
    cache, mask = filled()
    assert compact(cache, torch.ones_like(mask), [3]).all() and cache.length == 6


def test_a_cache_goes_on_after_compact():
    cache, mask = filled()
    keys = cache.keys[1][[3, 1], :, 2:6].clone()
    compact(cache, mask, [3, 1])
    k, v = torch.ones(2, 2, 2, 3, 5).unbind()
    for layer in range(3):
        given, _ = cache.update(layer, k, v)
        if layer == 1:
            assert torch.equal(given, torch.cat([keys, k], dim=2))
    assert cache.length == cache.max_length == 7
    with pytest.raises(ValueError, match="full: it holds 7 of 7"):
        cache.update(0, k[:, :, :1], v[:, :, :1])


# ---- the work: what is fed, and when it ends --------------------------------------------------


@pytest.fixture
def watch(monkeypatch):
    """Watch a kind's model: the shape `[B, T]` and the bytes of the cache of each forward.

    `break_at=(k, error)`: in the middle of forward k, after a part of the cache was written.
    """

    def start(kind: str = "tiny GPT-2", break_at=None):
        model, fed, sizes = model_of(kind), [], []
        original, block = model.hidden_states, model.blocks[1]
        forward = block.mlp.forward

        def hidden_states(token_ids, **options):
            fed.append(tuple(token_ids.shape))
            sizes.append(counted(options["cache"]))
            return original(token_ids, **options)

        def breaks(x):
            if break_at and len(fed) == break_at[0] + 1:
                raise break_at[1]
            return forward(x)

        monkeypatch.setattr(model, "hidden_states", hidden_states)
        monkeypatch.setattr(block.mlp, "forward", breaks)
        return fed, sizes

    return start


def expected_shapes(rows: list[dict]) -> list[tuple[int, int]]:
    """The prompts once, and then one token for each row that has not ended."""
    lengths = [len(alone(**row).token_ids) for row in rows]
    longest = max(len(row["prompt"]) for row in rows)
    alive = [sum(length > step for length in lengths) for step in range(max(lengths))]
    return [(n, longest if step == 0 else 1) for step, n in enumerate(alive)]


def rows_that_end_apart() -> list[dict]:
    """By their end ids at step 0, at step 3 and never, and one by its budget."""
    rows = specs("tiny GPT-2", "greedy")
    for row, step in zip(rows, [3, None, 0, None], strict=True):
        if step is not None:
            row["end_id"] = alone(**row).token_ids[step]
    rows[3]["max_new_tokens"] = 6
    return rows


def test_rows_end_where_they_end_alone():
    rows = rows_that_end_apart()
    ends = [(len(run.token_ids), run.finish_reason) for run in (alone(**row) for row in rows)]
    assert ends == [(4, "stop"), (20, "length"), (1, "stop"), (6, "length")]
    assert batched(rows, ORDERS) == "equal 24/24"


def test_one_end_id_ends_each_row_at_its_own_step():
    """As the engine does it: the same end id for all."""
    rows = specs("tiny GPT-2", "greedy", steps=60)
    said = [alone(**row).token_ids for row in rows]
    end_id = max(set(said[1]), key=lambda i: len({ids.index(i) for ids in said if i in ids}))
    for row in rows:
        row["end_id"] = end_id
    lengths = {len(alone(**row).token_ids) for row in rows}
    assert len(lengths) >= 3, "they are to end at different steps"
    assert batched(rows, ORDERS[::4]) == "equal 6/6"


def test_a_row_that_ended_is_not_fed_and_nothing_runs_after_the_last(watch):
    rows = rows_that_end_apart()
    expected = expected_shapes(rows)
    assert [n for n, _ in expected] == [4, 3, 3, 3, 2, 2] + [1] * 14
    for order in ORDERS[::5]:
        fed, _ = watch()
        requests = [request_for(**rows[n]) for n in order]
        seen = []
        for running in generate_batch(model_of(), requests):
            assert all(request in requests for request in running) and len(running) == fed[-1][0]
            assert not any(request in running for request in seen), "it had ended"
            seen += [request for request in running if request.finish_reason]
        assert fed == expected and len(seen) == 4


def test_budgets_one_to_twelve_lose_a_row_each_step(watch):
    lengths = [7, 30, 1, 12, 2, 60, 9, 5, 3, 41, 8, 4]
    rows = [
        {"kind": "tiny GPT-2", "prompt": some_ids(n), "max_new_tokens": budget}
        for n, budget in zip(lengths, [5, 12, 1, 9, 3, 2, 11, 4, 10, 6, 8, 7], strict=True)
    ]
    expected = expected_shapes(rows)
    fed, _ = watch()
    assert batched(rows, [range(12)]) == "equal 1/1"
    assert fed == expected == [(12, 60)] + [(n, 1) for n in range(11, 0, -1)]


def test_the_cache_shrinks_with_the_batch(watch):
    """60 columns and 20 to come; the long row leaves after two tokens, with 51 columns."""
    budgets = {60: 2, 4: 9, 9: 20}
    fed, sizes = watch()
    requests = [
        request_for("tiny GPT-2", some_ids(n), max_new_tokens=m) for n, m in budgets.items()
    ]
    together("tiny GPT-2", requests)
    per_position = 2 * 2 * 32 * 4  # keys and values, layers, width, bytes
    expected = [3 * 80] * 2 + [2 * 29] * 7 + [29] * 11
    assert sizes == [per_position * n for n in expected] and len(fed) == 20


def test_stop_strings_and_texts(watch):
    """The text ends before the first stop string; the other rows go on."""
    prompts = prompts_of("fairytale")
    free = [
        request_for("fairytale", prompt, tokenizer=tale(), max_new_tokens=16) for prompt in prompts
    ]
    for request in free:
        cache = KVCache.for_model(model_of("fairytale"), request.max_length)
        list(generate(model_of("fairytale"), request, cache))
    stops = [free[0].text[9:13], (), (free[2].text[1:3], "zebra"), free[3].text[30:33]]
    requests = [
        request_for("fairytale", p, tokenizer=tale(), max_new_tokens=16, stop=stop)
        for p, stop in zip(prompts, stops, strict=True)
    ]
    fed, _ = watch("fairytale")
    together("fairytale", requests)
    for request, whole, stop in zip(requests, free, stops, strict=True):
        stop = stop[0] if isinstance(stop, tuple) and stop else stop
        text = whole.text[: whole.text.index(stop)] if stop else whole.text
        assert (request.text, request.finish_reason) == (text, "stop" if stop else "length")
        assert request.token_ids == whole.token_ids[: len(request.token_ids)]
    ends = [len(request.token_ids) for request in requests]
    assert len(set(ends)) == 4 and max(ends) == 16
    assert [n for n, _ in fed] == [sum(end > step for end in ends) for step in range(16)]


# ---- the end of the context -------------------------------------------------------------------


def test_a_batch_wider_than_the_context_whose_rows_fit():
    """60 + 4 beside 4 + 60 of 64 positions: 120 columns, and every row's places end at 63."""
    budgets = {60: 4, 4: 60, 1: 63, 9: 55}
    rows = [
        {"kind": "short context", "prompt": some_ids(n), "max_new_tokens": m}
        for n, m in budgets.items()
    ]
    assert batched(rows, ORDERS[::3]) == "equal 8/8"
    assert {alone(**row).finish_reason for row in rows} == {"length"}


def test_rows_end_with_the_context():
    prompts = {63: 5, 60: 9, 4: 100, 62: 2}
    rows = [
        {"kind": "short context", "prompt": some_ids(n), "max_new_tokens": m}
        for n, m in prompts.items()
    ]
    assert batched(rows, ORDERS[::3]) == "equal 8/8"
    ends = [(len(run.token_ids), run.finish_reason) for run in (alone(**row) for row in rows)]
    assert ends == [(1, "context"), (4, "context"), (60, "context"), (2, "length")]


def test_a_prompt_that_fills_the_context_is_never_fed(watch):
    fed, _ = watch("short context")
    full = [request_for("short context", some_ids(64)) for _ in range(2)]
    assert list(generate_batch(model_of("short context"), full)) == [] and fed == []
    other = request_for("short context", some_ids(4), max_new_tokens=3)
    together("short context", [full[0], other, full[1]])
    assert fed == [(1, 4), (1, 1), (1, 1)]
    assert differs(other, alone("short context", some_ids(4), max_new_tokens=3)) == ""
    assert [(r.token_ids, r.finish_reason) for r in full] == [([], "context")] * 2


def test_no_requests_and_ended_requests_are_no_work(watch):
    fed, _ = watch()
    assert list(generate_batch(model_of(), [])) == []
    requests = together("tiny GPT-2", [request_for("tiny GPT-2", (5,), max_new_tokens=2)])
    before = list(requests[0].token_ids)
    assert len(fed) == 2 and list(generate_batch(model_of(), requests)) == []
    assert len(fed) == 2 and requests[0].token_ids == before


def test_a_request_twice_in_a_batch_is_refused(watch):
    fed, _ = watch()
    one, other = (request_for("tiny GPT-2", (5, n), max_new_tokens=2) for n in (1, 2))
    with pytest.raises(ValueError, match="listed twice in the batch: make one for each row"):
        list(generate_batch(model_of(), [one, other, one]))
    assert fed == [] and one.token_ids == other.token_ids == []


# ---- when it is cut short ---------------------------------------------------------------------


def test_closing_the_iterator_stops_the_work(watch):
    rows = specs("tiny GPT-2", "both")
    expected = [alone(**row) for row in rows]
    fed, _ = watch()
    requests = [request_for(**row) for row in rows]
    loop = generate_batch(model_of(), requests)
    assert fed == [], "nothing runs before the first step is asked for"
    for step in (1, 2, 3):
        next(loop)
        assert len(fed) == step and {len(request.token_ids) for request in requests} == {step}
    loop.close()
    assert len(fed) == 3
    together("tiny GPT-2", requests)  # and they can go on, in another batch
    assert equal([zip(requests, expected, strict=True)]) == "equal 1/1" and len(fed) == 20


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=repr)
@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_an_interrupted_batch_can_be_run_again(watch, monkeypatch, step, error):
    """Row 2 of these ends at step 0, row 0 at step 3; what was said is kept."""
    rows = rows_that_end_apart()
    for row in rows[1:2]:
        row |= SAMPLED[1]
    expected = [alone(**row) for row in rows]
    requests = [request_for(**row) for row in rows]
    fed, _ = watch(break_at=(step, error))
    with pytest.raises(type(error), match=str(error) or None):
        together("tiny GPT-2", requests)
    assert len(fed) == step + 1, "it left within that step"
    for request, run in zip(requests, expected, strict=True):
        assert request.token_ids == run.token_ids[:step]
        assert bool(request.finish_reason) == (len(run.token_ids) <= step)
    monkeypatch.undo()
    together("tiny GPT-2", requests)
    assert equal([zip(requests, expected, strict=True)]) == "equal 1/1"


@pytest.mark.parametrize("mode", MODES)
def test_an_interruption_between_two_rows(monkeypatch, mode):
    """Two rows have this step's token already, two have not."""
    rows = specs("tiny GPT-2", mode)
    requests = [request_for(**row) for row in rows]
    accept = requests[2].accept

    def interrupted(logits_row):
        if len(requests[2].token_ids) == 3:
            raise KeyboardInterrupt
        return accept(logits_row)

    monkeypatch.setattr(requests[2], "accept", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together("tiny GPT-2", requests)
    assert [len(request.token_ids) for request in requests] == [4, 4, 3, 3]
    monkeypatch.setattr(requests[2], "accept", accept)
    together("tiny GPT-2", requests)
    expected = [alone(**row) for row in rows]
    assert equal([zip(requests, expected, strict=True)]) == "equal 1/1"


def test_requests_at_different_places_run_in_one_batch():
    """Some begun alone, some in a batch, some new: all go on together."""
    rows = specs("tiny GPT-2", "both")
    requests = [request_for(**row) for row in rows]
    loop = generate(model_of(), requests[0])
    for _ in range(5):
        next(loop)
    loop = generate_batch(model_of(), requests[:2])
    for _ in range(3):
        next(loop)
    assert [len(request.token_ids) for request in requests] == [8, 3, 0, 0]
    together("tiny GPT-2", requests[::-1])
    expected = [alone(**row) for row in rows]
    assert equal([zip(requests, expected, strict=True)]) == "equal 1/1"

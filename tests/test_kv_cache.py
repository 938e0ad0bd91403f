"""The cache from outside: it changes the work and nothing else, and what does not fit gets a sentence."""

import itertools
import json
from functools import cache as once

import pytest
import torch
from conftest import random_reference
from transformers import GPT2LMHeadModel

import minillm
from minillm.generation import Request, generate
from minillm.gpt2 import GPT2, GPT2Config, load_weights
from minillm.kv_cache import KVCache
from minillm.parity import compare_text, where_texts_part
from minillm.sampling import SamplingParams
from minillm.weights import end_token_ids, resolve

RANDOM = {
    "plain": {},
    "one head": {"n_head": 1},
    "odd head width": {"n_embd": 35, "n_head": 5, "vocab_size": 96},
    "inverse layer scale": {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "one layer": {"n_layer": 1},
}
MODES = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7},
}
PROMPT = [5, 1, 88]
TEN = [5, 1, 88, 42, 7, 7, 0, 95, 13, 60]


@once
def random_pair(seed: int = 4, kernel: str = "sdpa", std: float = 0.2, **fields):
    """transformers' model and ours on the same random weights."""
    reference = random_reference(seed, std, **fields)
    config = GPT2Config.from_dict(json.loads(reference.config.to_json_string()))
    return reference, load_weights(GPT2(config, kernel), reference.state_dict()).eval()


def random_model(**options) -> GPT2:
    return random_pair(**options)[1]


@once
def fairytale(kernel: str = "sdpa") -> GPT2:
    return GPT2.from_pretrained("fairytale", attention=kernel)


@pytest.fixture(autouse=True)
def threads_as_before():
    """One thread unless a test wants two, and afterwards as many as there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["naive", "sdpa", "sdpa, two cores"])
def kernel(request, monkeypatch, threads_as_before):
    """The name of a kernel; with two cores a row alone goes another way through each `Linear`.

    The second core is only claimed here: a real one makes a busy machine wait, ten times as long.
    Two tests below have real threads.
    """
    name, *two = request.param.split(", ")
    if two:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return name


@pytest.fixture(params=[*RANDOM, "fairytale"])
def model(request, kernel):
    if request.param == "fairytale":
        return fairytale(kernel)
    return random_model(kernel=kernel, **RANDOM[request.param])


class Recorded(Request):
    """A request that remembers the logits of each of its steps."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.rows = []

    def accept(self, logits_row):
        self.rows.append(logits_row.clone())
        return super().accept(logits_row)


def request_for(model, prompt_ids, end_ids=None, **fields) -> Recorded:
    """A request with `SamplingParams(**fields)`, not yet begun."""
    context, params = model.config.n_positions, SamplingParams(**fields)
    return Recorded(prompt_ids, params, context=context, end_ids=end_ids)


def run(model, prompt_ids, cache=None, **options) -> Recorded:
    """A request, run to its end."""
    request = request_for(model, prompt_ids, **options)
    list(generate(model, request, cache))
    return request


def plain_run(model, prompt_ids, **options) -> Recorded:
    """The same without a cache and on one thread; run once, to be looked at only."""
    return plain_run_once(model, tuple(prompt_ids), **options)


@once
def plain_run_once(model, prompt_ids, **options) -> Recorded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 1)
        return run(model, prompt_ids, **options)


def cache_for(model, max_length: int | None = None, batch_size: int = 1) -> KVCache:
    return KVCache.for_model(model, max_length or model.config.n_positions, batch_size)


@torch.inference_mode()
def logits_of(model, ids, cache=None, splits=None) -> torch.Tensor:
    """The logits of every position, ids fed in pieces of these lengths: `[B, T, V]`."""
    ids = torch.tensor(ids if isinstance(ids[0], list) else [ids])
    pieces = ids.split(splits or ids.shape[1], dim=1)
    return torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)


def gap(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in largest |logit|s."""
    assert given.shape == expected.shape and given.numel() > 0
    return ((given - expected).abs().max() / expected.abs().max()).item()


def assert_close(given, expected) -> None:
    assert gap(given, expected) <= 1e-5


def assert_same_run(given: Recorded, expected: Recorded, steps: int) -> None:
    """Ids, reason to stop, and the logits of each step."""
    assert given.token_ids == expected.token_ids and len(given.rows) == steps
    assert given.finish_reason == expected.finish_reason
    for one, other in zip(given.rows, expected.rows, strict=True):
        assert_close(one, other)


# ---- with the cache = without -----------------------------------------------------------------


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_ids_and_logits_of_every_step_equal_those_without(model, fields):
    cache = cache_for(model)
    cached = run(model, PROMPT, cache, max_new_tokens=60, **fields)
    assert cache.length == len(PROMPT) + 59, "the cache was not used"
    assert_same_run(cached, plain_run(model, PROMPT, max_new_tokens=60, **fields), steps=60)
    least = 20 if model.config.vocab_size < 100 else 10  # fairytale is fond of its own words
    assert len(set(cached.token_ids)) >= least, "this model repeats itself: it proves little"


@pytest.mark.parametrize("name", ["odd head width", "inverse layer scale"])
def test_with_two_real_threads(name):
    model = random_model(**RANDOM[name])
    plain = plain_run(model, PROMPT, max_new_tokens=10)
    torch.set_num_threads(2)
    assert_same_run(run(model, PROMPT, cache_for(model), max_new_tokens=10), plain, steps=10)


def splits_of_ten():
    return [[10], [1] * 10, [4, 6], [1, 9], [7, 2, 1], *([n, 10 - n] for n in range(1, 10))]


def test_any_split_of_the_prompt_equals_one_prefill(model):
    """Query i of a later piece sees the keys up to past + i, and stands at that place."""
    whole = logits_of(model, TEN)
    for splits in splits_of_ten():
        cache = cache_for(model)
        assert_close(logits_of(model, TEN, cache, splits), whole)
        assert cache.length == 10, f"after {splits}"


def test_truncate_and_continue_equals_never_having_gone_there(model):
    """Also to 0, also where the way that was taken back is longer than the new one."""
    other = [30, 2, 61]
    for kept in range(len(TEN) + 1):
        whole = logits_of(model, TEN[:kept] + other)[:, kept:]
        cache = cache_for(model)
        logits_of(model, TEN, cache)
        cache.truncate(kept)
        assert_close(logits_of(model, other, cache, [2, 1]), whole)
        assert cache.length == kept + len(other)


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_text_after_truncate_equals_never_having_gone_there(model, fields):
    cache = cache_for(model, 40)
    before = run(model, TEN, cache, max_new_tokens=30, seed=1, temperature=1.5)
    assert cache.length == 39
    cache.truncate(4)
    after = run(model, TEN, cache, max_new_tokens=30, **fields)
    assert after.token_ids != before.token_ids
    assert_same_run(after, plain_run(model, TEN, max_new_tokens=30, **fields), steps=30)


@pytest.mark.parametrize("name", RANDOM)
def test_these_models_show_a_wrong_place_and_a_hidden_past(name):
    """If places and past changed nothing here, the tests above would not see a mistake."""
    model, whole = random_model(**RANDOM[name]), logits_of(random_model(**RANDOM[name]), TEN)
    cache = cache_for(model)
    logits_of(model, TEN[:7], cache)
    with torch.inference_mode():
        restarted = model(torch.tensor([TEN[7:]]), cache=cache, positions=torch.arange(3)[None])
        no_past = model(torch.tensor([TEN[7:]]), positions=torch.arange(7, 10)[None])
    assert gap(restarted, whole[:, 7:]) > 0.1 and gap(no_past, whole[:, 7:]) > 0.1


def test_a_cache_that_holds_the_whole_prompt_is_continued_and_one_that_holds_more_is_not(kernel):
    """The logits of the prompt's end are needed, so at least its last token is fed again."""
    model = random_model(kernel=kernel)
    plain = plain_run(model, TEN, max_new_tokens=20)
    for held in (TEN[:9], TEN):
        cache = cache_for(model)
        logits_of(model, held, cache)
        assert_same_run(run(model, TEN, cache, max_new_tokens=20), plain, steps=20)
    cache = cache_for(model)
    logits_of(model, [*TEN, 50, 51], cache)
    with pytest.raises(ValueError, match="holds 12 positions, the request has 10 .* another"):
        run(model, TEN, cache, max_new_tokens=20)


# ---- with the cache = transformers ------------------------------------------------------------


def said_by_transformers(reference, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The new ids of transformers' own greedy loop, on one thread."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": 0}
    with torch.inference_mode():
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


@once
def random_texts(name) -> list[tuple[list[int], list[int]]]:
    """Three prompts and the 50 tokens with which transformers continues them; for all kernels."""
    reference, _ = random_pair(**RANDOM[name])
    return [(ids, said_by_transformers(reference, ids, 50)) for ids in (PROMPT, [42], TEN)]


@pytest.mark.parametrize("name", RANDOM)
def test_greedy_equals_transformers_on_random_weights(name, kernel):
    reference, model = random_pair(kernel=kernel, **RANDOM[name])
    compared = 0
    for prompt, expected in random_texts(name):
        given = run(model, prompt, cache_for(model), max_new_tokens=50).token_ids
        assert given == expected, where_texts_part(reference, prompt, given, expected)
        compared += len(given)
    assert compared == 150


@pytest.fixture(scope="module")
def tales():
    """Two prompts and the 300 tokens with which transformers continues them, and the model."""
    folder = resolve("fairytale")
    reference = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = minillm.LLM("fairytale").tokenizer
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for text in ["Once upon a time", "The king said to his youngest daughter,"]:
        prompt = tokenizer.encode(text)
        found.append((prompt, said_by_transformers(reference, prompt, 300)))
    torch.set_num_threads(threads)
    return reference, end_token_ids(folder), found


def test_300_greedy_tokens_of_fairytale_equal_transformers(tales, kernel):
    reference, end_ids, found = tales
    for prompt, expected in found:
        assert len(expected) == 300 or expected[-1] in end_ids, "there is too little to compare"
        model = fairytale(kernel)
        given = run(model, prompt, cache_for(model), max_new_tokens=300, end_ids=end_ids).token_ids
        assert given == expected, where_texts_part(reference, prompt, given, expected)
    assert len(found) == 2 and sum(len(expected) for _, expected in found) >= 400


def test_the_124m_shape_with_random_weights(gpt2_124m):
    reference, _, model = gpt2_124m
    prompt = [15496, 995, 11, 262]
    plain = run(model, prompt, max_new_tokens=12)
    assert len(set(plain.token_ids)) >= 8, "this model repeats itself: it proves little"
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cached = run(model, prompt, cache_for(model, 16), max_new_tokens=12)
        assert_same_run(cached, plain, steps=12)
        pieces = logits_of(model, prompt + plain.token_ids, cache_for(model), [7, 1, 8])
        assert_close(pieces[0, 3:15], torch.stack(plain.rows))
    assert compare_text(lambda ids, n: cached.token_ids[:n], reference, [prompt], 12) == 12


# ---- several sequences ------------------------------------------------------------------------


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_requests_in_turn_do_not_meet(kernel, fields):
    """Three at once, two of them with the same prompt, one token of each at a time."""
    model = random_model(kernel=kernel)
    prompts, budgets = [TEN, PROMPT, TEN], [30, 20, 25]
    together = [
        request_for(model, prompt, max_new_tokens=n, **fields)
        for prompt, n in zip(prompts, budgets, strict=True)
    ]
    loops = [generate(model, request, cache_for(model)) for request in together]
    for _ in itertools.zip_longest(*loops):
        pass
    for request, prompt, n in zip(together, prompts, budgets, strict=True):
        alone = run(model, prompt, cache_for(model), max_new_tokens=n, **fields)
        assert_same_run(request, alone, steps=n)
        assert_same_run(request, plain_run(model, prompt, max_new_tokens=n, **fields), steps=n)


def test_two_rows_in_one_cache_equal_each_alone(model):
    rows = [TEN, TEN[::-1]]
    for splits in ([10], [1] * 10, [4, 6], [7, 2, 1]):
        together = logits_of(model, rows, cache_for(model, batch_size=2), splits)
        assert gap(together[:1], together[1:]) > 0.01, "two rows that are alike show nothing"
        for row, ids in enumerate(rows):
            assert_close(together[[row]], logits_of(model, ids))
            assert_close(together[[row]], logits_of(model, ids, cache_for(model), splits))


# ---- the end of the context and of the cache --------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_length", "budget", "new", "reason"),
    [
        (15, 1, 1, "length"),
        (15, 5, 1, "context"),
        (16, 1, 0, "context"),
        (16, 5, 0, "context"),
        (12, 5, 4, "context"),
        (11, 5, 5, "length"),
    ],
)
def test_at_the_end_of_the_context_both_agree(kernel, prompt_length, budget, new, reason):
    model = random_model(kernel=kernel, n_positions=16)
    prompt = [(7 * i + 3) % 97 for i in range(prompt_length)]
    plain = run(model, prompt, max_new_tokens=budget)
    assert (len(plain.token_ids), plain.finish_reason) == (new, reason)
    for room in (prompt_length + max(new, 1) - 1, 16, 40):  # the last token is never fed
        cache = cache_for(model, room)
        assert_same_run(run(model, prompt, cache, max_new_tokens=budget), plain, steps=new)
        assert cache.length == (prompt_length + new - 1 if new else 0)


def test_a_cache_that_is_too_short_ends_in_a_sentence_and_the_request_can_go_on():
    model = random_model()
    whole = plain_run(model, TEN, max_new_tokens=8)
    request, short = request_for(model, TEN, max_new_tokens=8), cache_for(model, 12)
    with pytest.raises(ValueError, match="cache is full: it holds 12 of 12 .* 1 more"):
        list(generate(model, request, short))
    assert (request.token_ids, short.length) == (whole.token_ids[:3], 12)
    list(generate(model, request, cache_for(model)))
    assert_same_run(request, whole, steps=8)


# ---- an interrupted forward -------------------------------------------------------------------

PLACES = [
    *(f"blocks.{layer}.{part}" for layer in range(3) for part in ("attention.qkv", "mlp.down")),
    "blocks.0.attention.out",
    "blocks.2.attention.out",
    "final_norm",
]


class Interrupted(Exception):
    pass


def interrupt(module):
    """Make a module raise at its next call; returns what takes that back."""

    def raises(*_):
        raise Interrupted

    return module.register_forward_pre_hook(raises)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("splits", [[3, 7], [9, 1]], ids=str)
def test_an_interrupted_forward_leaves_the_length_and_can_be_repeated(place, splits):
    model = random_model(**RANDOM["inverse layer scale"])
    whole, cache, first = logits_of(model, TEN), cache_for(model), splits[0]
    logits_of(model, TEN[:first], cache)
    handle = interrupt(model.get_submodule(place))
    try:
        with pytest.raises(Interrupted):  # with ids that are not the right ones
            logits_of(model, [(i + 1) % 97 for i in TEN[first:]], cache)
    finally:
        handle.remove()
    assert cache.length == first, "half a forward counts as a whole one"
    assert_close(logits_of(model, TEN[first:], cache), whole[:, first:])


@pytest.mark.parametrize("place", [*PLACES, "lm_head"])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_request_goes_on_after_an_interruption_as_if_nothing_had_been(place, steps):
    model = random_model(**RANDOM["inverse layer scale"])
    request, cache = request_for(model, TEN, max_new_tokens=20), cache_for(model)
    loop = generate(model, request, cache)
    for _ in range(steps):
        next(loop)
    handle = interrupt(model.get_submodule(place))
    try:
        with pytest.raises(Interrupted):
            next(loop)
    finally:
        handle.remove()
    assert len(request.token_ids) == steps
    list(generate(model, request, cache))
    assert_same_run(request, plain_run(model, TEN, max_new_tokens=20), steps=20)


# ---- the class by itself ----------------------------------------------------------------------

SHAPE = {"n_layers": 3, "n_kv_heads": 2, "head_dim": 5, "max_length": 8, "batch_size": 2}


def new_kv(T: int, seed: int = 0, batch_size: int = 2, heads: int = 2, width: int = 5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch_size, heads, T, width, generator=generator).unbind()


def feed(cache: KVCache, T: int, seed: int = 0) -> list:
    """One forward's worth of updates, other numbers in each layer: what went in."""
    given = [new_kv(T, 100 * seed + layer) for layer in range(SHAPE["n_layers"])]
    for layer, (k, v) in enumerate(given):
        cache.update(layer, k, v)
    return given


def buffers(cache: KVCache) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in cache.keys + cache.values]


def same(some, others) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_update_returns_all_positions_so_far_of_its_layer():
    cache, kept = KVCache(**SHAPE), [[], [], []]
    for step, T in enumerate([3, 1, 4]):
        before = cache.length
        for layer in range(3):
            kept[layer].append(new_kv(T, 10 * step + layer))
            keys, values = cache.update(layer, *kept[layer][-1])
            assert torch.equal(keys, torch.cat([k for k, _ in kept[layer]], dim=2))
            assert torch.equal(values, torch.cat([v for _, v in kept[layer]], dim=2))
            assert cache.length == (before if layer < 2 else before + T)
    assert cache.length == cache.max_length == 8


def test_what_update_returns_is_a_view_of_buffers_taken_once():
    cache = KVCache(**SHAPE)
    places = [buffer.data_ptr() for buffer in cache.keys + cache.values]
    assert len(set(places)) == 6 and {b.shape for b in cache.keys + cache.values} == {(2, 2, 8, 5)}
    for layer in range(3):
        keys, values = cache.update(layer, *new_kv(4))
        assert (keys.data_ptr(), values.data_ptr()) == (places[layer], places[3 + layer])
    feed(cache, 4)
    cache.truncate(2)
    feed(cache, 6)
    assert [buffer.data_ptr() for buffer in cache.keys + cache.values] == places


def test_a_cache_of_one_layer_advances_too():
    cache = KVCache(1, 2, 5, 8, 2)
    cache.update(0, *new_kv(3))
    cache.update(0, *new_kv(1))
    assert cache.length == 4


@pytest.mark.parametrize("T", [1, 4])
def test_a_full_cache_refuses_before_it_writes_and_is_usable_after_truncate(T):
    cache = KVCache(**SHAPE)
    first, _ = feed(cache, 5, 1), feed(cache, 4 - T, 2)
    feed(cache, T - 1, 3)
    assert cache.length == 8
    before = buffers(cache)
    for layer in range(3):
        with pytest.raises(ValueError, match=f"cache is full: it holds 8 of 8 .* {T} more"):
            cache.update(layer, *new_kv(T, 99))
    assert same(buffers(cache), before) and cache.length == 8
    cache.truncate(5)
    keys, values = cache.update(0, *(tail := new_kv(3, 50)))
    assert torch.equal(keys, torch.cat([first[0][0], tail[0]], dim=2))
    assert torch.equal(values, torch.cat([first[0][1], tail[1]], dim=2))


def test_more_than_the_rest_is_refused_whole():
    cache = KVCache(**SHAPE)
    feed(cache, 6)
    before = buffers(cache)
    with pytest.raises(ValueError, match="6 of 8 positions, and 3 more do not fit"):
        cache.update(0, *new_kv(3))
    assert same(buffers(cache), before) and cache.length == 6
    feed(cache, 2)
    assert cache.length == 8


def wrong_kv():
    k, v = new_kv(2)
    yield "batch", *new_kv(2, batch_size=1)  # torch would repeat it silently
    yield "heads", *new_kv(2, heads=1)  # this too
    yield "width", *new_kv(2, width=1)
    yield "a wider one", *new_kv(2, width=6)
    yield "no batch", k[0], v[0]
    yield "v of another length", k, v[:, :, :1]
    yield "v of another batch", k, v[:1]
    yield "k of another batch", k[:1], v
    yield "both in another dtype", k.bfloat16(), v.bfloat16()
    yield "k in another dtype", k.double(), v
    yield "v in another dtype", k, v.bfloat16()
    yield "whole numbers", k.long(), v.long()


@pytest.mark.parametrize(("k", "v"), [w[1:] for w in wrong_kv()], ids=[w[0] for w in wrong_kv()])
@pytest.mark.parametrize("layer", [0, 2])
def test_keys_and_values_of_another_kind_are_refused(layer, k, v):
    cache = KVCache(**SHAPE)
    feed(cache, 3)
    before = buffers(cache)
    with pytest.raises(ValueError, match=r"cache takes (keys|values) of shape .* got"):
        cache.update(layer, k, v)
    assert same(buffers(cache), before) and cache.length == 3


def test_truncate():
    cache = KVCache(**SHAPE)
    feed(cache, 6)
    before = buffers(cache)
    for length in (6, 4, 0):
        cache.truncate(length)
        assert cache.length == length and same(buffers(cache), before)
    with pytest.raises(ValueError, match="cannot truncate to 1: the cache holds 0 positions"):
        cache.truncate(1)
    feed(cache, 8)
    assert cache.length == 8


@pytest.mark.parametrize("length", [7, 8, -1, 2.5])
def test_truncate_to_what_is_no_length_is_refused(length):
    cache = KVCache(**SHAPE)
    feed(cache, 6)
    with pytest.raises(ValueError, match="truncate"):
        cache.truncate(length)
    assert cache.length == 6


@pytest.mark.parametrize("name", SHAPE)
@pytest.mark.parametrize("size", [0, -1, 1.5, True, None, "8"])
def test_bad_sizes_are_refused_by_name(name, size):
    with pytest.raises(ValueError, match=f"^{name} is {size!r}, expected a whole number above 0"):
        KVCache(**SHAPE | {name: size})


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_bad_sizes_for_a_model_are_refused_by_name(size):
    with pytest.raises(ValueError, match="max_length"):
        KVCache.for_model(random_model(), size)
    with pytest.raises(ValueError, match="batch_size"):
        KVCache.for_model(random_model(), 8, size)


# ---- bytes ------------------------------------------------------------------------------------


def counted(cache: KVCache) -> int:
    """The bytes of all separate storages, as torch counts them."""
    storages = [buffer.untyped_storage() for buffer in cache.keys + cache.values]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_nbytes_by_hand():
    cache = KVCache(**SHAPE)
    assert cache.nbytes == counted(cache) == 2 * 3 * 2 * 8 * 5 * 2 * 4
    feed(cache, 5)
    assert cache.nbytes == counted(cache) == 3840
    half = KVCache(**SHAPE, dtype=torch.bfloat16)
    assert half.nbytes == counted(half) == 1920


def test_gpt2_at_1024_positions_takes_75_megabytes():
    layers, heads, width = GPT2Config().cache_shape
    cache = KVCache(layers, heads, width, 1024)
    assert cache.nbytes == counted(cache) == 2 * 12 * 12 * 1024 * 64 * 4 == 75_497_472


@pytest.mark.parametrize("name", RANDOM)
def test_a_cache_for_a_model_has_its_shape(name):
    model = random_model(**RANDOM[name])
    config = random_pair(**RANDOM[name])[0].config
    cache = KVCache.for_model(model, 20, 3)
    shape = (3, config.n_head, 20, config.n_embd // config.n_head)
    assert len(cache.keys) == len(cache.values) == config.n_layer
    assert {(b.shape, b.dtype) for b in cache.keys + cache.values} == {(shape, torch.float32)}
    assert (cache.length, cache.max_length) == (0, 20)
    assert cache.nbytes == 2 * config.n_layer * config.n_embd * 20 * 3 * 4


def test_a_cache_for_a_model_has_its_dtype():
    """In bfloat16 the two ways may round apart, but not far: 8 bits of a number are kept."""
    model = GPT2.from_pretrained("fairytale", dtype=torch.bfloat16)
    cache = cache_for(model, 10)
    assert {b.dtype for b in cache.keys + cache.values} == {torch.bfloat16}
    given = logits_of(model, TEN, cache, [4, 5, 1])
    assert given.dtype == torch.bfloat16
    assert gap(given.float(), logits_of(fairytale(), TEN)) < 0.05
    with pytest.raises(ValueError, match="torch.float32.*torch.bfloat16"):
        logits_of(model, TEN, cache_for(fairytale()))


# ---- the front door ---------------------------------------------------------------------------


@pytest.fixture
def watched_llm(monkeypatch):
    """An engine, and the number of positions that each of its forwards was fed."""
    llm, fed = minillm.LLM("fairytale"), []
    original = llm.model.hidden_states

    def watched(token_ids, **options):
        fed.append(token_ids.numel())
        return original(token_ids, **options)

    monkeypatch.setattr(llm.model, "hidden_states", watched)
    return llm, fed


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_the_engine_feeds_the_prompt_once_and_then_one_token_a_step(watched_llm, way, fields):
    llm, fed = watched_llm
    prompt, options = "The old king had three daughters", {"max_new_tokens": 40, **fields}
    request = llm.request(prompt, **options)
    steps, length = len(list(generate(llm.model, request))), len(request.prompt_ids)
    assert fed == [*range(length, length + steps)] and steps == 40 and length > 1
    fed.clear()
    if way == "stream":
        assert "".join(llm.stream(prompt, **options)) == request.text
    else:
        out = llm.generate(prompt, **options)
        assert (out.text, out.token_ids) == (request.text, request.token_ids)
        assert out.finish_reason == request.finish_reason
    assert fed == [length] + [1] * (steps - 1)


def test_a_list_of_prompts_shares_one_cache_and_each_is_fed_once(watched_llm):
    """A column for each token of the longest prompt, and then one token of each row a step."""
    llm, fed = watched_llm
    prompts = ["Once upon a time", "The wolf", "Once upon a time"]
    done = llm.generate(prompts, max_new_tokens=15)
    longest = max(len(out.prompt_token_ids) for out in done)
    assert fed == [3 * longest] + [3] * 14
    for prompt, out in zip(prompts, done, strict=True):
        request = llm.request(prompt, max_new_tokens=15)
        assert list(generate(llm.model, request)) == out.token_ids and out.text == request.text


def test_streams_in_turn_do_not_meet():
    llm = minillm.LLM("fairytale")
    prompts = ["Once upon a time", "The wolf", "Once upon a time"]
    seeds = [1, 2, 3]
    options = {"temperature": 1.0, "max_new_tokens": 30}
    streams = [llm.stream(p, seed=s, **options) for p, s in zip(prompts, seeds, strict=True)]
    texts = [""] * 3
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert len(set(texts)) == 3 and min(map(len, texts)) > 20
    for prompt, seed, text in zip(prompts, seeds, texts, strict=True):
        assert text == llm.generate(prompt, seed=seed, **options).text


@pytest.mark.parametrize(("room", "budget"), [(0, 5), (1, 1), (1, 5), (3, 9)])
def test_the_engine_at_the_end_of_the_context(room, budget):
    llm = minillm.LLM("fairytale")
    prompt = " a" * (512 - room)
    request = llm.request(prompt, max_new_tokens=budget)
    assert len(request.prompt_ids) == 512 - room, "the prompt was to end just there"
    new = list(generate(llm.model, request))
    out = llm.generate(prompt, max_new_tokens=budget)
    assert (out.token_ids, out.finish_reason) == (new, request.finish_reason)
    assert len(new) == min(room, budget)

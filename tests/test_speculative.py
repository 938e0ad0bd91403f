"""Speculation from outside: whoever guesses, whatever is guessed, the text stays the same."""

import json
import random
import shutil
from functools import cache as once

import pytest
import torch
from conftest import greedy
from test_chat import SMOLLM2 as TEMPLATE
from test_chat import make_model, make_tokenizer, talk
from test_generation import BYTES
from test_quantization import random_model, random_pair

import minillm
from minillm import gpt2
from minillm.bpe import BYTE_TO_CHAR
from minillm.generation import Request, generate
from minillm.kv_cache import KVCache
from minillm.parity import compare_text
from minillm.sampling import SamplingParams
from minillm.speculative import ModelDraft, NgramDraft, Speculation, check_vocabulary, speculate
from minillm.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the int. kernel takes"),
]

PROMPT = [5, 1, 88]
UNLIKE = {"gpt2": (65, 86, 80, 96), "llama": (3, 1)}  # their first new tokens all differ
LONG = [*range(40, 60), 5, 1, 88, 42]
SEEDS = {"gpt2": 3, "llama": 12}
SIZES = {"gpt2": "n_positions", "llama": "max_position_embeddings"}


@once
def pair(family: str, other: int = 0, context: int = 128):
    """transformers' random model and ours; `other` is for a model that disagrees."""
    return random_pair(family, seed=SEEDS[family] + other, **{SIZES[family]: context})


def model_of(family: str, other: int = 0, context: int = 128):
    return pair(family, other, context)[1]


@once
def plain(family: str, prompt: tuple, budget: int = 60, penalty: float = 1.0, context: int = 128):
    """What chapter 5's loop says, without a cache: greedy."""
    model = model_of(family, context=context)
    if penalty == 1:
        return greedy(model, list(prompt), budget)
    params = SamplingParams(max_new_tokens=budget, repetition_penalty=penalty)
    return list(generate(model, Request(prompt, params, context=context)))


class Knows:
    """A draft that knows the plain answer, and tells it wrong where `wrong(place)` says so."""

    def __init__(self, answer, k: int, wrong=lambda place: False, size: int = 97):
        self.k, self.size = k, size
        self.told = [(t + 1) % size if wrong(n) else t for n, t in enumerate(answer)]
        self.told += [0] * k

    def propose(self, request, room):
        done = len(request.token_ids)
        return self.told[done : done + min(self.k, room)], None

    def settle(self, request, proposed, accepted):
        pass


def second(place):
    return place % 2 == 1


def third(place):
    return place % 3 == 2


def always(place):
    return True


DRAFTS = {  # how a draft is made, from the family, the plain answer and k
    "never right": lambda family, answer, k: Knows(answer, k, always),
    "every second wrong": lambda family, answer, k: Knows(answer, k, second),
    "every third wrong": lambda family, answer, k: Knows(answer, k, third),
    "knows the answer": lambda family, answer, k: Knows(answer, k),
    "the target itself": lambda family, answer, k: ModelDraft(model_of(family), k),
    "another model": lambda family, answer, k: ModelDraft(model_of(family, 1), k),
    "ngram": lambda family, answer, k: NgramDraft(k, shortest=1, patience=1),
}
RIGHT = ("knows the answer", "the target itself")
FAMILIES = pytest.mark.parametrize("family", ["gpt2", "llama"])


class Watched:
    """Runs one request and looks at every forward, every guess and every cache on its way."""

    def __init__(self, model, request, draft):
        self.model, self.request, self.draft = model, request, draft
        self.cache = KVCache.for_model(model, request.max_length)
        self.forwards = []  # positions held before, tokens fed
        self.guesses = []  # new tokens before, what was guessed

    def hidden_states(self, token_ids, **options):
        if options["cache"] is self.cache:  # the target may be its own draft
            self.forwards.append((self.cache.length, token_ids.shape[1]))
        return type(self.model).hidden_states(self.model, token_ids, **options)

    def propose(self, request, room):
        guesses, shares = self.draft.propose(request, room)
        assert len(guesses) <= room and (shares is None or len(shares) == len(guesses))
        self.guesses.append((len(request.token_ids), list(guesses)))
        return guesses, shares

    def settle(self, request, proposed, accepted):
        self.draft.settle(request, proposed, accepted)

    def run(self):
        self.model.hidden_states = self.hidden_states
        try:
            ids = []
            for token_id in speculate(self.model, self.request, self.cache, self):
                ids.append(token_id)
                self.look_at_the_caches()
        finally:
            del self.model.hidden_states
        assert ids == self.request.token_ids
        self.look_at_the_caches()
        self.look_at_the_numbers()

    def look_at_the_caches(self):
        """All but the newest token; the draft's at most that."""
        known = len(self.request.all_ids) - 1
        assert self.cache.length == known
        theirs = getattr(self.draft, "cache", None)
        assert theirs is None or theirs.length <= known

    def look_at_the_numbers(self):
        """Counted again, from the forwards and from the text that came out."""
        ids, limit = self.request.token_ids, self.request.max_length
        assert all(held + fed <= limit - 1 for held, fed in self.forwards), "beyond the budget"
        proposed = sum(len(guesses) for _, guesses in self.guesses)
        fed = sum(fed for _, fed in self.forwards)
        first = len(self.request.prompt_ids) - 1
        assert fed - len(self.forwards) - first == proposed, "something was fed twice"
        accepted, last_was_guessed = 0, False
        for done, guesses in self.guesses:
            right = 0
            while right < len(guesses) and ids[done + right :][:1] == [guesses[right]]:
                right += 1
            accepted += right
            last_was_guessed = right > 0 and done + right == len(ids)
        assert self.request.speculation == Speculation(proposed, accepted, len(self.forwards))
        assert len(ids) == accepted + len(self.forwards) - last_was_guessed


def run(model, prompt, draft, end_ids=None, tokenizer=None, **fields) -> Request:
    """A request with a draft, run to its end under watch."""
    params, context = SamplingParams(**fields), model.config.context_length
    request = Request(prompt, params, context=context, end_ids=end_ids, tokenizer=tokenizer)
    Watched(model, request, draft).run()
    return request


# ---- greedy ---------------------------------------------------------------------------------


@FAMILIES
def test_the_random_models_do_not_repeat_themselves(family):
    for prompt in (PROMPT, LONG):
        assert len(set(plain(family, tuple(prompt)))) >= 20, "they prove little"


@FAMILIES
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_is_the_plain_text_whoever_guesses(family, name):
    model, answer = model_of(family), plain(family, tuple(PROMPT))
    shares = []
    for k in range(1, 9):
        request = run(model, PROMPT, DRAFTS[name](family, answer, k), max_new_tokens=40)
        assert (request.token_ids, request.finish_reason) == (answer[:40], "length")
        counts = request.speculation
        assert counts.proposed > 0 and counts.target_calls <= 40
        shares.append(counts.acceptance)
        if name in RIGHT:
            assert counts.target_calls == -(-40 // (k + 1))
    assert {0.0} == set(shares) if name == "never right" else max(shares) <= 1
    assert {1.0} == set(shares) if name in RIGHT else min(shares) < 1
    assert "wrong" not in name or min(shares) > 0.1


@FAMILIES
@pytest.mark.parametrize("name", ["every third wrong", "another model"])
def test_greedy_equals_transformers(family, name):
    reference, model = pair(family)
    draft = DRAFTS[name](family, plain(family, tuple(PROMPT)), 4)

    def ours(ids, n):
        return run(model, ids, draft, max_new_tokens=n).token_ids

    assert compare_text(ours, reference, [PROMPT], 60) == 60


@FAMILIES
@pytest.mark.parametrize("name", ["every third wrong", "knows the answer", "another model"])
def test_every_budget_is_kept(family, name):
    model, answer = model_of(family), plain(family, tuple(PROMPT))
    for budget in range(1, 21):
        for k in (4,) if "model" in name else (3, 4, 8):
            request = run(model, PROMPT, DRAFTS[name](family, answer, k), max_new_tokens=budget)
            assert (request.token_ids, request.finish_reason) == (answer[:budget], "length")


@FAMILIES
@pytest.mark.parametrize("name", ["knows the answer", "every third wrong", "the target itself"])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_an_end_id_at_each_place_of_a_block_ends_the_text(family, name, k):
    model, prompt = model_of(family), UNLIKE[family]
    answer = plain(family, prompt)
    assert len(set(answer[: k + 2])) == k + 2, "one would end the text too early"
    for place, end in enumerate(answer[: k + 2]):
        draft = DRAFTS[name](family, answer, k)
        request = run(model, prompt, draft, end_ids=end, max_new_tokens=30)
        assert (request.token_ids, request.finish_reason) == (answer[: place + 1], "stop")


@FAMILIES
@pytest.mark.parametrize("name", ["knows the answer", "every second wrong", "the target itself"])
def test_a_stop_string_in_a_block_ends_the_text(family, name):
    """Ids up to 96 are ASCII: one character each."""
    model, prompt = model_of(family), UNLIKE[family]
    answer = plain(family, prompt)
    text = "".join(map(chr, answer))
    for place in range(9):
        stop = text[place : place + 2]
        assert text.index(stop) == place
        draft, options = DRAFTS[name](family, answer, 6), {"stop": stop, "max_new_tokens": 30}
        request = run(model, prompt, draft, tokenizer=BYTES, **options)
        assert (request.text, request.finish_reason) == (text[:place], "stop")
        assert request.token_ids == answer[: place + 2]


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("room", range(1, 8))
def test_the_last_block_is_cut_where_the_context_ends(family, room):
    prompt = tuple(LONG[: 16 - room])
    model, answer = model_of(family, context=16), plain(family, prompt, 99, context=16)
    assert len(answer) == room
    drafts = [Knows(answer, 8), Knows(answer, 3), Knows(answer, 4, third), ModelDraft(model, 8)]
    for draft in drafts:
        request = run(model, prompt, draft, max_new_tokens=99)
        assert (request.token_ids, request.finish_reason) == (answer, "context")


def test_a_prompt_that_fills_the_context_has_ended_already():
    request = Request(LONG[:16], context=16)
    assert list(speculate(model_of("gpt2", context=16), request, None, NgramDraft())) == []
    assert (request.token_ids, request.finish_reason) == ([], "context")


@FAMILIES
@pytest.mark.parametrize("name", DRAFTS)
def test_the_repetition_penalty_sees_the_guesses_too(family, name):
    """A draft equal to the target is always right under it only if both see the same text."""
    model, answer = model_of(family), plain(family, tuple(PROMPT), penalty=1.3)
    assert answer != plain(family, tuple(PROMPT))
    draft, options = DRAFTS[name](family, answer, 5), {"repetition_penalty": 1.3}
    request = run(model, PROMPT, draft, max_new_tokens=40, **options)
    assert request.token_ids == answer[:40]
    assert name not in RIGHT or request.speculation.acceptance == 1


@FAMILIES
def test_without_a_cache_the_text_is_the_same(family):
    answer = plain(family, tuple(PROMPT))
    request = Request(PROMPT, SamplingParams(max_new_tokens=20), context=128)
    draft = Knows(answer, 3, third)
    assert list(speculate(model_of(family), request, None, draft)) == answer[:20]


# ---- the caches -----------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("name", ["every second wrong", "another model", "the target itself"])
def test_the_caches_hold_what_a_fresh_forward_computes(family, name):
    """A guess that failed and stayed would show here, even if the text came out right."""
    model, answer = model_of(family), plain(family, tuple(PROMPT))
    draft = DRAFTS[name](family, answer, 4)
    request = Request(PROMPT, SamplingParams(max_new_tokens=30), context=128)
    watched = Watched(model, request, draft)
    watched.run()
    pairs = [(model, watched.cache)]
    if isinstance(draft, ModelDraft):
        pairs.append((draft.model, draft.cache))
    for each, cache in pairs:
        fresh, n = KVCache.for_model(each, 128), cache.length
        with torch.inference_mode():
            each.hidden_states(torch.tensor([request.all_ids[:n]]), cache=fresh)
        assert n >= 28
        for kept, new in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
            assert torch.allclose(kept[:, :, :n], new[:, :, :n], atol=1e-4)


@FAMILIES
@pytest.mark.parametrize("length", [3, 14, 15, 16, 17, 24])
def test_a_draft_whose_context_is_over_stops_guessing(family, length):
    prompt = LONG[:length]
    draft = ModelDraft(model_of(family, context=16), k=4)
    answer = plain(family, tuple(prompt))
    request = run(model_of(family), prompt, draft, max_new_tokens=40)
    assert request.token_ids == answer[:40]
    assert (request.speculation.proposed > 0) == (length < 16)


@FAMILIES
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 11}])
def test_a_draft_equal_to_the_target_is_always_right(family, options):
    model = model_of(family, context=256)
    request = run(model, PROMPT, ModelDraft(model, k=4), max_new_tokens=200, **options)
    assert request.speculation == Speculation(proposed=160, accepted=160, target_calls=40)
    assert len(request.token_ids) == 200


def test_acceptance_by_hand():
    assert Speculation().acceptance == 0
    assert Speculation(proposed=8, accepted=2, target_calls=3).acceptance == 0.25


# ---- vocabularies ---------------------------------------------------------------------------


def cut(reference, size: int):
    """The same random GPT-2 with fewer ids."""
    state = reference.state_dict()
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state[name] = state[name][:size].clone()
    model = random_model("gpt2", seed=4, vocab_size=size)
    return gpt2.load_weights(model, state).eval()


@once
def padded(extra: float):
    """Two equal models, of 97 and of 104 ids; the extra rows are `extra` times as large."""
    reference, large = random_pair("gpt2", seed=4, vocab_size=104)
    reference.transformer.wte.weight.data[97:] *= extra
    large.token_embedding.weight.data[97:] *= extra
    return cut(reference, 97), large


def test_a_padded_draft_is_cut():
    small, large = padded(0.0)
    expected = greedy(small, PROMPT, 40)
    request = run(small, PROMPT, ModelDraft(large, 4, vocab_size=97), max_new_tokens=40)
    assert request.token_ids == expected and request.speculation.acceptance == 1


def test_a_draft_of_a_padded_target_is_filled():
    small, large = padded(0.0)
    expected = greedy(large, PROMPT, 40)
    assert max(expected) < 97 and len(set(expected)) >= 10
    draft = ModelDraft(small, 4, vocab_size=104)
    request = run(large, PROMPT, draft, max_new_tokens=40)
    assert request.token_ids == expected and request.speculation.acceptance == 1


@pytest.mark.parametrize("options", [{"top_k": 3}, {"min_p": 0.1, "top_p": 0.8}])
def test_padded_ids_have_no_share_in_a_draw(options):
    small, large = padded(0.0)
    options |= {"temperature": 1.0, "seed": 3, "max_new_tokens": 40}
    for target, draft in ((small, large), (large, small)):
        size = target.config.vocab_size
        request = run(target, PROMPT, ModelDraft(draft, 4, vocab_size=size), **options)
        assert len(request.token_ids) == 40 and request.speculation.accepted > 0


def test_a_target_may_say_an_id_that_its_draft_lacks():
    small, large = padded(2.0)
    expected = greedy(large, PROMPT, 40)
    assert max(expected) >= 97, "it never says one: the test proves nothing"
    draft = ModelDraft(small, 4, vocab_size=104)
    assert run(large, PROMPT, draft, max_new_tokens=40).token_ids == expected


def test_a_prompt_may_hold_an_id_that_the_draft_lacks():
    small, large = padded(0.0)
    prompt = [5, 100, 88]
    draft = ModelDraft(small, 4, vocab_size=104)
    expected = greedy(large, prompt, 20)
    assert run(large, prompt, draft, max_new_tokens=20).token_ids == expected


@pytest.fixture(scope="module")
def tales():
    return minillm.LLM("fairytale")


@pytest.fixture(scope="module")
def small_tales():
    return minillm.LLM("fairytale-draft")


def swapped(vocab: dict, one: int, other: int) -> dict:
    exchange = {one: other, other: one}
    return {name: exchange.get(i, i) for name, i in vocab.items()}


def test_a_draft_whose_ids_mean_other_strings_is_refused(tmp_path, tales, small_tales):
    folder = tmp_path / "swapped"
    shutil.copytree(small_tales.path, folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(swapped(vocab, 300, 301)))
    ours, theirs = (tales.tokenizer.token_bytes(i) for i in (300, 301))
    names = f"id 300 is {ours!r} to the model and {theirs!r} to the draft"
    for draft in (folder, str(folder), minillm.LLM(folder)):
        with pytest.raises(ValueError) as refused:
            minillm.LLM("fairytale", draft=draft)
        assert names in str(refused.value) and "draft='ngram'" in str(refused.value)


def test_vocabularies_may_end_differently(tales):
    """More ids at the end of one go through; another id in between does not."""
    names = [tales.tokenizer.token_bytes(i) for i in range(256, 300)]
    first = tokenizer_with(names)
    check_vocabulary(first, tokenizer_with([*names, b"one more"]))
    check_vocabulary(tokenizer_with([*names, b"one more"]), first)
    with pytest.raises(ValueError, match="id 256 is .* to the model and .* to the draft"):
        check_vocabulary(first, tokenizer_with(names[::-1]))


def tokenizer_with(tokens) -> Tokenizer:
    """All bytes and these tokens, without an end."""
    names = ["".join(BYTE_TO_CHAR[byte] for byte in token) for token in tokens]
    single = [BYTE_TO_CHAR[byte] for byte in range(256)]
    return Tokenizer({name: i for i, name in enumerate(dict.fromkeys(single + names))}, [])


@pytest.mark.parametrize(
    ("draft", "error", "says"),
    [
        (5, ValueError, "draft is 5, expected 'ngram', the name or path of a model, an LLM"),
        (True, ValueError, "draft is True, expected 'ngram'"),
        (["ngram"], ValueError, r"draft is \['ngram'\], expected 'ngram'"),
        (BYTES, ValueError, "draft is <.*Tokenizer.*expected 'ngram'"),
        (SamplingParams(), ValueError, "draft is SamplingParams.*expected 'ngram'"),
        ("nowhere", FileNotFoundError, "no model named 'nowhere'"),
        ("", FileNotFoundError, "no model named ''"),
    ],
    ids=str,
)
def test_a_wrong_draft_gets_a_sentence(draft, error, says):
    with pytest.raises(error, match=says):
        minillm.LLM("fairytale-draft", draft=draft)


def test_a_draft_that_was_made_already_is_refused(small_tales):
    """An LLM makes one for each request: what this one was given would be lost."""
    with pytest.raises(ValueError, match="ModelDraft"):
        minillm.LLM("fairytale-draft", draft=ModelDraft(small_tales.model, k=1))


def test_a_bare_model_of_another_size_gets_a_sentence():
    with pytest.raises(ValueError, match="the draft's vocabulary has 97 tokens, the model's 4096"):
        minillm.LLM("fairytale-draft", draft=model_of("gpt2"))


# ---- LLM(draft=...) -------------------------------------------------------------------------

TEXTS = ["Once upon a time", "The wolf ran. The wolf ran. The wolf ran. The", "The king"]


@pytest.fixture(scope="module")
def drafts(small_tales):
    return {
        "ngram": "ngram",
        "name": "fairytale-draft",
        "path": small_tales.path,
        "LLM": small_tales,
        "bare model": small_tales.model,
        "int4": minillm.LLM("fairytale", quantize="int4"),
    }


@pytest.fixture(scope="module")
def expected(tales):
    """What the model says without a draft, and where a piece of it stops it."""
    outs = tales.generate(TEXTS, max_new_tokens=16)
    stop = outs[0].text[7:12]
    return stop, outs, tales.generate(TEXTS, max_new_tokens=16, stop=stop)


def facts(out) -> tuple:
    return out.prompt_token_ids, out.token_ids, out.text, out.finish_reason


@pytest.mark.parametrize("name", ["ngram", "name", "path", "LLM", "bare model", "int4"])
def test_an_llm_with_a_draft_says_what_it_says_without(drafts, expected, name):
    llm = minillm.LLM("fairytale", draft=drafts[name])
    stop, outs, stopped = expected
    assert {out.speculation for out in outs} == {None} and stopped[0].finish_reason == "stop"
    ours = llm.generate(TEXTS, max_new_tokens=16, stop=stop)
    assert [facts(out) for out in ours] == [facts(out) for out in stopped]
    assert all(0 < out.speculation.target_calls <= 16 for out in ours)
    assert sum(out.speculation.accepted for out in ours) > 0
    one = llm.generate(TEXTS[1], max_new_tokens=16)
    assert facts(one) == facts(outs[1]) and one.speculation.proposed > 0
    pieces = list(llm.stream(TEXTS[1], max_new_tokens=16))
    assert "".join(pieces) == outs[1].text and len(pieces) > 1 and all(pieces)


def test_a_quantized_target_with_a_draft_says_the_same(small_tales):
    """In float32: bfloat16 keeps 8 bits, and ties fall one way alone and another in a block."""
    options = {"quantize": "int8", "dtype": "float32"}
    alone, llm = (minillm.LLM("fairytale", draft=d, **options) for d in (None, small_tales))
    outs = llm.generate(TEXTS, max_new_tokens=12)
    assert [facts(o) for o in outs] == [facts(o) for o in alone.generate(TEXTS, max_new_tokens=12)]
    assert sum(out.speculation.accepted for out in outs) > 0


def test_a_seed_and_prompt_lookup_draw_what_the_llm_draws_without(small_tales):
    llm, options = minillm.LLM("fairytale-draft", draft="ngram"), {"temperature": 0.8, "seed": 5}
    outs = llm.generate(TEXTS, max_new_tokens=20, top_p=0.9, **options)
    alone = small_tales.generate(TEXTS, max_new_tokens=20, top_p=0.9, **options)
    assert [facts(out) for out in outs] == [facts(out) for out in alone]
    assert sum(out.speculation.proposed for out in outs) > 0


def test_a_seed_and_a_model_draw_one_text(small_tales):
    llm, options = minillm.LLM("fairytale-draft", draft=small_tales), {"temperature": 1.0}
    one, two, other, free = (
        llm.generate(TEXTS[0], max_new_tokens=20, seed=seed, **options) for seed in (5, 5, 6, None)
    )
    assert one == two and len({one.text, other.text, free.text}) == 3
    assert "".join(llm.stream(TEXTS[0], max_new_tokens=20, seed=5, **options)) == one.text


def test_each_of_a_list_has_its_own_settings_and_count(small_tales):
    llm = minillm.LLM("fairytale-draft", draft=small_tales)
    params = [SamplingParams(max_new_tokens=n) for n in (3, 9, 1)]
    outs = llm.generate(TEXTS, params)
    assert [len(out.token_ids) for out in outs] == [3, 9, 1]
    assert [facts(o) for o in outs] == [facts(o) for o in small_tales.generate(TEXTS, params)]
    assert [out.speculation for out in outs] == [
        Speculation(2, 2, 1),
        Speculation(7, 7, 2),
        Speculation(0, 0, 1),
    ]


def test_a_draft_is_made_for_each_request(small_tales):
    llm = minillm.LLM("fairytale-draft", draft="ngram")
    first = llm.generate(TEXTS[1], max_new_tokens=12)
    again = llm.generate([TEXTS[0], TEXTS[1], TEXTS[1]], max_new_tokens=12)
    assert again[1] == again[2] == first
    assert first.speculation.accepted > 0


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatty")
    make_tokenizer(folder, eos_token="<|im_end|>", chat_template=TEMPLATE)
    make_model(folder)
    return folder


def test_a_chat_with_a_draft_is_the_same_chat(chatty):
    without = minillm.LLM(chatty)
    answer = without.chat(talk("Hi"), max_new_tokens=12)
    assert len(answer.token_ids) > 3 and answer.speculation is None
    for draft in ("ngram", without, chatty):
        out = minillm.LLM(chatty, draft=draft).chat(talk("Hi"), max_new_tokens=12)
        assert facts(out) == facts(answer) and out.speculation.target_calls > 0


@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_a_stream_that_is_closed_stops_the_work(monkeypatch, pieces):
    llm, forwards = minillm.LLM("fairytale-draft", draft="ngram"), []
    original = llm.model.hidden_states

    def counted(token_ids, **options):
        forwards.append(token_ids.shape)
        return original(token_ids, **options)

    monkeypatch.setattr(llm.model, "hidden_states", counted)
    stream = llm.stream(TEXTS[0], max_new_tokens=40)
    for _ in range(pieces):
        next(stream)
    seen = len(forwards)
    stream.close()
    assert len(forwards) == seen <= pieces + 1 and (seen > 0) == (pieces > 0)


# ---- interruptions --------------------------------------------------------------------------


class Broken:
    """Raises the error when it is called for the n-th time; before the work, or after it."""

    def __init__(self, work, n: int, error, after: bool = False):
        self.work, self.left, self.error, self.after = work, n, error, after

    def __call__(self, *arguments, **options):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise self.error
        result = self.work(*arguments, **options)
        if self.left == 0:
            raise self.error
        return result


def breakable(model, request, draft):
    """Where an error can come from: the object and the name of what is called."""
    return {
        "the model": (model, "hidden_states", False),
        "the last block": (model.blocks[-1], "forward", True),
        "the norm": (model.final_norm, "forward", False),
        "behind the forward": (model, "hidden_states", True),
        "the head": (model, "head", False),
        "behind the head": (model, "head", True),
        "the choice": (request, "accept", False),
        "behind the choice": (request, "accept", True),
        "the draft": (draft, "propose", False),
        "behind the draft": (draft, "propose", True),
        "the count": (draft, "settle", False),
    }


PLACES = list(breakable(model_of("gpt2"), None, None))


@FAMILIES
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
def test_an_interrupted_request_goes_on_with_a_new_draft(family, place, error):
    model, answer = model_of(family), plain(family, tuple(PROMPT))
    request = Request(PROMPT, SamplingParams(max_new_tokens=30), context=128)
    cache = KVCache.for_model(model, request.max_length)
    draft = Knows(answer, 4, third)
    with pytest.MonkeyPatch.context() as patch:
        owner, name, after = breakable(model, request, draft)[place]
        patch.setattr(owner, name, Broken(getattr(owner, name), 3, error, after))
        with pytest.raises(type(error)):
            list(speculate(model, request, cache, draft))
    assert 0 < len(request.token_ids) < 30 and request.finish_reason is None
    list(speculate(model, request, cache, Knows(answer, 4, second)))
    assert request.token_ids == answer[:30] and cache.length == len(request.all_ids) - 1


@FAMILIES
@pytest.mark.parametrize("taken", [1, 2, 3, 5])
def test_a_closed_request_goes_on(family, taken):
    """Closed in the middle of what one round brought."""
    model, answer = model_of(family), plain(family, tuple(PROMPT))
    request = Request(PROMPT, SamplingParams(max_new_tokens=30), context=128)
    cache = KVCache.for_model(model, request.max_length)
    rounds = speculate(model, request, cache, Knows(answer, 4))
    for _ in range(taken):
        next(rounds)
    rounds.close()
    assert taken <= len(request.token_ids) < 30
    list(speculate(model, request, cache, ModelDraft(model)))
    assert request.token_ids == answer[:30]


# ---- prompt lookup --------------------------------------------------------------------------


def guessed(ids, room: int = 100, **options) -> list[int]:
    guesses, shares = NgramDraft(**options).propose(Request(ids, context=10_000), room)
    assert shares is None
    return guesses


def test_the_longest_match_wins():
    ids = [1, 2, 3, 9, 9, 5, 2, 3, 8, 8, 1, 2, 3]
    assert guessed(ids, k=2, longest=3) == [9, 9]
    assert guessed(ids, k=2, longest=2) == [8, 8]
    assert guessed(ids, k=2, longest=9) == [9, 9]


def test_the_latest_occurrence_wins():
    ids = [1, 2, 7, 1, 2, 8, 0, 1, 2]
    assert guessed(ids, k=3) == [8, 0, 1]
    assert guessed(ids, k=3, shortest=1, longest=1) == [8, 0, 1]


@pytest.mark.parametrize("k", range(1, 9))
def test_a_guess_runs_on_into_itself(k):
    assert guessed([1, 2, 3, 1, 2], k=k) == [3, 1, 2, 3, 1, 2, 3, 1][:k]
    assert guessed([4, 4, 4], k=k) == [4] * k
    for room in range(k + 2):
        assert guessed([1, 2, 3, 1, 2], room, k=k) == [3, 1, 2, 3, 1, 2, 3, 1][: min(k, room)]


@pytest.mark.parametrize("ids", [[1], [1, 2], [1, 2, 3], [1, 2, 1], [1, 2, 3, 2, 1]])
def test_what_did_not_repeat_is_not_guessed(ids):
    assert guessed(ids) == []


def test_one_token_is_a_match_where_that_is_asked_for():
    assert guessed([1, 2, 3, 1], k=8, shortest=1) == [2, 3, 1, 2, 3, 1, 2, 3]


def waits(draft, accepted, rounds: int) -> list[int]:
    """How many rounds without guesses came between those with some; `accepted` of each."""
    request = Request([7] * 9, SamplingParams(max_new_tokens=10_000), context=100_000)
    gaps, gap, fates = [], 0, iter(accepted)
    for _ in range(rounds):
        guesses, _ = draft.propose(request, 50)
        taken = min(next(fates), len(guesses)) if guesses else 0
        for _ in range(taken + 1):
            request.append(7)
        draft.settle(request, len(guesses), taken)
        if guesses:
            gaps.append(gap)
        gap = 0 if guesses else gap + 1
    return gaps


def test_it_waits_longer_after_each_failure_in_a_row():
    gaps = waits(NgramDraft(patience=32), [0] * 20, rounds=150)
    assert gaps[:9] == [0, 1, 2, 4, 8, 16, 32, 32, 32]
    assert waits(NgramDraft(patience=5), [0] * 20, 40)[:6] == [0, 1, 2, 4, 5, 5]
    assert waits(NgramDraft(patience=1), [0] * 20, 15)[:5] == [0, 1, 1, 1, 1]


def test_it_is_back_at_once_after_a_success():
    gaps = waits(NgramDraft(k=8), [0, 0, 0, 1, 0, 0, 8, 8, 0, 0] + [0] * 9, rounds=60)
    assert gaps[:11] == [0, 1, 2, 4, 0, 1, 2, 0, 0, 1, 2]


def test_a_long_prompt_is_read_once():
    """8,000 tokens and 100 new ones: each place is looked up from once, for each length."""
    prompt = random.Random(0).choices(range(50), k=8000)
    request = Request(prompt, SamplingParams(max_new_tokens=200), context=10_000)
    reads = []

    class Counted(dict):
        def __setitem__(self, key, place):
            reads.append((len(key), place))
            super().__setitem__(key, place)

    draft = NgramDraft(longest=3, shortest=2, patience=1)
    draft.after = Counted()
    for token_id in prompt[:100]:
        draft.propose(request, 8)
        request.append(token_id)
        draft.settle(request, 0, 0)
    assert len(reads) == len(set(reads)) == sum(8099 - n for n in (2, 3))


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, None, "4"], ids=repr)
@pytest.mark.parametrize("name", ["k", "longest", "shortest", "patience"])
def test_a_wrong_size_gets_a_sentence(name, wrong):
    says = f"{name} is {wrong!r}, expected a whole number above 0"
    with pytest.raises(ValueError, match=says):
        NgramDraft(**{name: wrong})
    if name == "k":
        with pytest.raises(ValueError, match=says):
            ModelDraft(model_of("gpt2"), k=wrong)


def test_a_longest_below_the_shortest_gets_a_sentence():
    with pytest.raises(ValueError, match="longest"):
        NgramDraft(longest=2, shortest=3)


@pytest.mark.parametrize("wrong", [-7, 0, 1.5, "97"], ids=repr)
def test_a_wrong_vocabulary_size_gets_a_sentence(wrong):
    with pytest.raises(ValueError, match="vocab_size"):
        ModelDraft(model_of("gpt2"), vocab_size=wrong)

"""One request from outside: the ids of transformers, every reason to stop, and text that is safe to show."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, GPT2LMHeadModel

from minillm.bpe import BYTE_TO_CHAR
from minillm.generation import Request, StopMatcher, generate, stream
from minillm.gpt2 import GPT2
from minillm.parity import compare_text, where_texts_part
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.weights import end_token_ids, resolve

NAN, INF = float("nan"), float("inf")
MIXED = "é😀漢A"


pytestmark = pytest.mark.usefixtures("one_thread")


def tokenizer_of(tokens) -> Tokenizer:
    """The 256 bytes, in order, and then these tokens (bytes): decodes any of them, merges none."""
    names = ["".join(BYTE_TO_CHAR[byte] for byte in token) for token in tokens]
    single = [BYTE_TO_CHAR[byte] for byte in range(256)]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(single + names))}
    return Tokenizer(vocab, [], {"<|endoftext|>": len(vocab)})


BYTES = tokenizer_of([])
END = BYTES.eos_token_id
SIZE = BYTES.vocab_size


class Scripted(nn.Module):
    """A model whose logits are written beforehand, one row for each forward; an exception is raised.

    It remembers what it was fed, and under which mode it ran.
    """

    def __init__(self, rows):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.rows, self.fed, self.modes = list(rows), [], []

    def hidden_states(self, token_ids, *, positions=None, padding_mask=None, cache=None):
        assert cache is None and token_ids.shape[0] == 1
        row = self.rows[len(self.fed)]
        self.fed.append(token_ids[0].tolist())
        self.modes.append(torch.is_inference_mode_enabled())
        if isinstance(row, Exception):
            raise row
        x = torch.full((*token_ids.shape, len(row)), NAN)  # only the last place may be used
        x[0, -1] = row
        return x

    def head(self, x):
        assert x.ndim == 1, "the head is asked for the last place only"
        logits = x * self.gain
        self.modes.append(not logits.requires_grad)
        return logits


def says(token_ids, size: int = SIZE) -> list[torch.Tensor]:
    """Rows under which greedy says these ids."""
    return list(torch.eye(size)[list(token_ids)])


def request_of(prompt=(1,), *, context=10_000, end_ids=None, tokenizer=None, **fields) -> Request:
    return Request(
        prompt, SamplingParams(**fields), context=context, end_ids=end_ids, tokenizer=tokenizer
    )


def run(token_ids, **options) -> Request:
    """A request whose model wants to say these ids, run to its end."""
    request = request_of(**{"tokenizer": BYTES, "max_new_tokens": len(token_ids)} | options)
    rows = says(token_ids, options.get("tokenizer", BYTES).vocab_size)
    list(generate(Scripted(rows), request))
    return request


@pytest.fixture(scope="module")
def fairytale():
    return GPT2.from_pretrained("fairytale"), Tokenizer.from_pretrained("fairytale")


# ---- greedy, against transformers -------------------------------------------------------------


def loop(model, end_ids=None, **fields):
    context = model.config.n_positions
    return lambda ids, n: list(
        generate(
            model, request_of(ids, context=context, end_ids=end_ids, max_new_tokens=n, **fields)
        )
    )


PROMPTS = [[5, 1, 88], [42], [7, 7, 9, 2]]


@pytest.mark.parametrize("seed", [3, 4])
def test_greedy_equals_transformers_on_random_weights(save_reference, seed):
    reference, folder = save_reference(seed=seed)
    ours = loop(GPT2.from_pretrained(folder))
    assert len(set(ours([5, 1, 88], 60))) >= 20, "this model repeats itself: it proves little"
    assert compare_text(ours, reference, PROMPTS, 60) == 180


def compare_penalized(model, reference, prompts, steps, penalty, end_ids=None) -> int:
    ours = loop(model, end_ids, repetition_penalty=penalty)
    compared = 0
    for prompt_ids in prompts:
        ids = torch.tensor([prompt_ids])
        options = {"do_sample": False, "repetition_penalty": penalty, "pad_token_id": 0}
        with torch.inference_mode():
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, **options
            )
        expected, given = out[0, len(prompt_ids) :].tolist(), ours(prompt_ids, steps)
        assert given == expected, where_texts_part(reference, prompt_ids, given, expected)
        compared += len(expected)
    return compared


@pytest.mark.parametrize("penalty", [1.3, 0.9])
def test_greedy_with_a_penalty_equals_transformers_on_random_weights(save_reference, penalty):
    reference, folder = save_reference(seed=3)
    model = GPT2.from_pretrained(folder)
    assert compare_penalized(model, reference, PROMPTS, 60, penalty) == 180
    assert loop(model, repetition_penalty=penalty)([42], 60) != loop(model)([42], 60)


def test_greedy_equals_transformers_on_fairytale(fairytale):
    folder = resolve("fairytale")
    reference = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, end_ids = fairytale[0], end_token_ids(folder)
    texts = ["Once upon a time", "The king said to his youngest daughter,"]
    prompts = [tokenizer(text).input_ids for text in texts]
    assert compare_text(loop(model, end_ids), reference, prompts, 60) >= 100
    assert compare_penalized(model, reference, prompts, 60, 1.3, end_ids) >= 60


# ---- reasons to stop --------------------------------------------------------------------------

SOME = [ord(char) for char in "abcdef"]


@pytest.mark.parametrize(
    "end_ids",
    [
        99,
        [99],
        (99,),
        {99},
        iter([7, 99]),
        np.int64(99),
        np.array([7, 99]),
        torch.tensor([7, 99]),
    ],
    ids=["int", "list", "tuple", "set", "iterator", "numpy int", "array", "tensor"],
)
def test_an_end_id_stops_and_is_not_part_of_the_text(end_ids):
    request = run(SOME, end_ids=end_ids)
    assert (request.finish_reason, request.text) == ("stop", "ab")
    assert request.token_ids == SOME[:3], "the end id is the last of the ids"


@pytest.mark.parametrize("end_ids", [None, [], set()])
def test_without_end_ids_only_the_limits_stop(end_ids):
    request = run([0, 1, END, 97], end_ids=end_ids)
    assert request.finish_reason == "length" and len(request.token_ids) == 4
    assert request.text == "\0\1<|endoftext|>a"


def test_end_id_0_is_an_end_id():
    assert run([97, 0, 98], end_ids=0).token_ids == [97, 0]


def test_an_end_id_in_the_prompt_does_not_stop():
    assert run(SOME, prompt=[99, 99], end_ids=99).token_ids == SOME[:3]


@pytest.mark.parametrize("end_ids", ["<|endoftext|>", ["<|endoftext|>"], [None], 99.5])
def test_end_ids_that_are_no_ids_get_a_sentence(end_ids):
    """Text would never equal an id: the request would silently never stop."""
    with pytest.raises(ValueError, match="end_ids"):
        request_of(end_ids=end_ids)


@pytest.mark.parametrize(("config", "generation"), [(98, [100, 99]), (None, 99), ([99, 5], None)])
def test_what_the_model_folder_says_about_its_end_is_taken(tmp_path, config, generation):
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    request = run([97, 99, 98, 100], end_ids=end_token_ids(tmp_path))
    assert (request.finish_reason, request.token_ids) == ("stop", [97, 99])


def test_an_end_id_that_greedy_says_by_itself_stops_a_real_model(save_reference):
    _, folder = save_reference(seed=3)
    model = GPT2.from_pretrained(folder)
    free = loop(model)([3, 1], 20)
    for end in free[:6]:
        assert loop(model, {end, 1000})([3, 1], 20) == free[: free.index(end) + 1]


@pytest.mark.parametrize("n", range(1, 8))
def test_the_end_id_counts_before_the_budget(n):
    request = run(SOME, end_ids=ord("d"), max_new_tokens=n)
    assert request.token_ids == SOME[: min(n, 4)]
    assert request.finish_reason == ("length" if n < 4 else "stop")


class ListCache:
    """The contract of a cache and nothing else: `length`, and `update` that returns all so far."""

    def __init__(self, n_layers: int):
        self.kept, self.length = [None] * n_layers, 0

    def update(self, layer, k, v):
        if self.kept[layer] is not None:
            k, v = (
                torch.cat([old, new], 2) for old, new in zip(self.kept[layer], (k, v), strict=True)
            )
        self.kept[layer] = (k, v)
        if layer == len(self.kept) - 1:
            self.length = k.shape[2]
        return k, v


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("length", "budget", "new", "reason"),
    [
        (15, 1, 1, "length"),
        (15, 5, 1, "context"),
        (16, 1, 0, "context"),
        (16, 5, 0, "context"),
        (11, 5, 5, "length"),
        (3, 5, 5, "length"),
        (1, 99, 15, "context"),
        (1, 15, 15, "length"),
    ],
)
def test_the_budget_and_the_context_stop(save_reference, cached, length, budget, new, reason):
    _, folder = save_reference(n_positions=16)
    model = GPT2.from_pretrained(folder)
    request = request_of([1] * length, context=16, max_new_tokens=budget)
    ids = list(generate(model, request, ListCache(2) if cached else None))
    assert (len(ids), request.finish_reason) == (new, reason)
    assert request.token_ids == ids and request.all_ids == [1] * length + ids


@pytest.mark.parametrize("length", [17, 40])
def test_a_prompt_beyond_the_context_is_refused_with_both_lengths(length):
    with pytest.raises(ValueError, match=f"{length} tokens.*16"):
        request_of([1] * length, context=16)


@pytest.mark.parametrize("prompt", [[], (), "", torch.tensor([]), iter([])])
def test_an_empty_prompt_gets_a_sentence(prompt):
    with pytest.raises(ValueError, match="prompt is empty"):
        request_of(prompt)


@pytest.mark.parametrize("prompt", ["hi", 5, None, [1.5], ["a"], [[1, 2], [3, 4]], torch.ones(2)])
def test_a_prompt_that_is_no_list_of_ids_gets_a_sentence(prompt):
    with pytest.raises(ValueError, match="expected a list of token ids"):
        request_of(prompt)


@pytest.mark.parametrize("prompt", [(1, 2), np.array([1, 2]), torch.tensor([1, 2]), iter([1, 2])])
def test_a_prompt_may_be_any_sequence_of_ids(prompt):
    request = request_of(prompt)
    assert request.prompt_ids == [1, 2] and {type(i) for i in request.prompt_ids} == {int}


def test_the_prompt_that_was_given_is_not_changed():
    given = [1, 2]
    request = run(SOME, prompt=given)
    given.append(3)
    assert request.prompt_ids == [1, 2] and request.all_ids == [1, 2, *SOME]


@pytest.mark.parametrize("budget", [0, -1])
def test_no_budget_gets_a_sentence(budget):
    with pytest.raises(ValueError, match=f"max_new_tokens is {budget}, expected .* at least 1"):
        request_of(max_new_tokens=budget)


@pytest.mark.parametrize("bad", [SIZE, -1])
def test_a_prompt_of_another_vocabulary_gets_a_sentence(bad):
    request = request_of([1, bad], repetition_penalty=1.2)  # the penalty looks the prompt up
    with pytest.raises(ValueError, match=f"logits for {SIZE} tokens.*{bad}"):
        request.accept(torch.zeros(SIZE))
    assert request.token_ids == []


@pytest.mark.parametrize("reason", ["stop", "stop string", "length", "context"])
def test_a_finished_request_refuses_more(reason):
    options = {
        "stop": {"end_ids": 99},
        "stop string": {"stop": "bc"},
        "length": {"max_new_tokens": 3},
        "context": {"context": 4},
    }
    request = run(SOME, **options[reason])
    before = (request.token_ids[:], request.text, request.finish_reason)
    assert before[::2] == (SOME[:3], reason.split()[0])
    bad = torch.full((SIZE,), NAN)  # not even looked at
    for more in (lambda: request.accept(bad), lambda: request.append(97)):
        with pytest.raises(ValueError, match=f"has ended .{before[2]}."):
            more()
    assert (request.token_ids, request.text, request.finish_reason) == before
    assert list(generate(Scripted([]), request)) == []


def test_the_penalty_sees_the_prompt_and_the_new_tokens():
    """Of four logits 4, 3, 2.5, 2 each is halved once it was said; the prompt said the first."""
    request = request_of([0, 0], repetition_penalty=2.0, max_new_tokens=6)
    row = torch.tensor([4.0, 3.0, 2.5, 1.9])
    assert [request.accept(row) for _ in range(6)] == [1, 2, 0, 0, 0, 0]


# ---- stop strings -----------------------------------------------------------------------------


def whole_text(text: str, stop) -> tuple[str, bool]:
    """By brute force: what may be shown of a text, and whether it stops."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


def safe_part(text: str, stop) -> str:
    """Of a text without a complete stop string: all but what could still become one."""
    for start in range(len(text) + 1):
        if any(s.startswith(text[start:]) for s in stop):
            return text[:start]
    return text


def random_text(draw, alphabet, longest: int) -> str:
    return "".join(draw.choices(alphabet, k=draw.randint(1, longest)))


def test_the_stop_matcher_equals_brute_force_on_2000_random_texts():
    """After every piece: not a character too much, and not one held back without need."""
    draw, stopped, held = random.Random(0), 0, 0
    for _ in range(2000):
        alphabet = draw.choice(["ab", "abc"])
        stop = [random_text(draw, alphabet, 5) for _ in range(draw.randint(0, 4))]
        text, matcher, shown, at = random_text(draw, alphabet, 25), StopMatcher(tuple(stop)), "", 0
        while at < len(text) and not matcher.found:
            step = draw.randint(0, 4)
            shown, at = shown + matcher.add(text[at : at + step]), at + step
            expected, found = whole_text(text[:at], stop)
            assert matcher.found == found
            assert shown == (expected if found else safe_part(expected, stop)), (text, stop, at)
            held += len(expected) - len(shown)
        shown += "" if matcher.found else matcher.flush()
        assert (shown, matcher.found) == whole_text(text, stop), (text, stop)
        stopped += matcher.found
    assert 500 < stopped < 1900 and held > 1000, "the cases were too easy"


def test_requests_equal_brute_force_on_500_random_texts_of_broken_bytes():
    """Tokens of one to three bytes that cut characters anywhere; stop strings, end ids, budgets."""
    pieces = [
        bytes(p) for n in (2, 3) for p in itertools.product("aé😀".encode() + b"\xff", repeat=n)
    ]
    tokenizer = tokenizer_of(pieces)
    draw, reasons = random.Random(1), []
    usable = [*{*"aé😀".encode(), 0xFF}, *range(256, 256 + len(pieces))]
    known = {tokenizer.token_bytes(i): i for i in usable}
    characters = ["a", "é", "😀", "\ufffd"]
    for _ in range(500):
        ids = draw.choices(usable, k=draw.randint(1, 15))  # mostly broken bytes
        if draw.random() < 0.5:  # or a text, cut anywhere
            data, ids = random_text(draw, characters[:3], 20).encode(), []
            while data:
                size = draw.randint(1, 3)
                ids.append(known[data[:size]])
                data = data[size:]
        stop = [random_text(draw, characters, 3) for _ in range(draw.randint(0, 2))]
        ends = {draw.choice(ids)} if draw.random() < 0.3 else None
        budget = draw.randint(1, len(ids)) if draw.random() < 0.3 else len(ids)
        request = request_of(tokenizer=tokenizer, stop=stop, end_ids=ends, max_new_tokens=budget)
        for token_id in ids:
            request.append(token_id)
            said = request.token_ids[:-1] if ends and token_id in ends else request.token_ids
            expected, found = whole_text(tokenizer.decode(said), stop)
            if request.finish_reason:
                break
            assert expected.startswith(request.text), "text was shown that is not in the answer"
        assert request.text == expected
        ended = request.token_ids[-1] in (ends or ())
        assert request.finish_reason == ("stop" if ended or found else "length")
        reasons.append("string" if found else "end" if ended else "length")
    assert min(map(reasons.count, ("string", "end", "length"))) > 30


STOPS = {
    "spans three tokens": (["bcd"], "a"),
    "the first character": (["a"], ""),
    "the last character": (["f"], "abcde"),
    "never complete": (["fg", "bd"], "abcdef"),
    "several": (["ef", "cd"], "ab"),
    "one inside the other": (["bcde", "cd"], "ab"),
    "one a prefix of the other": (["bcd", "bc"], "a"),
    "one the end of the other": (["cd", "abcd"], ""),
    "overlapping": (["cde", "bcd"], "a"),
    "all of it": (["abcdef"], ""),
}


@pytest.mark.parametrize(("stop", "text"), STOPS.values(), ids=STOPS)
def test_stop_strings_by_hand(stop, text):
    for given in (stop, stop[::-1], tuple(stop)):
        request = run(SOME, stop=given)
        assert (request.text, request.finish_reason) == (
            text,
            "stop" if text != "abcdef" else "length",
        )


@pytest.mark.parametrize(("stop", "text"), STOPS.values(), ids=STOPS)
def test_no_work_is_done_after_a_stop_string(stop, text):
    model = Scripted(says(SOME))
    request = request_of(tokenizer=BYTES, stop=stop, max_new_tokens=6)
    assert "".join(stream(model, request)) == text
    ends = ["abcdef".find(s) + len(s) for s in stop if s in "abcdef"]
    assert len(model.fed) == len(request.token_ids) == min(ends, default=6)


def test_a_stop_string_in_the_prompt_does_not_stop():
    assert run(SOME, prompt=list(b"xab"), stop="xab").finish_reason == "length"
    assert run(SOME, prompt=list(b"x"), stop="xa").text == "abcdef"


def test_a_stop_string_inside_one_token_and_across_two():
    tokenizer = tokenizer_of([b"say sto", b"p it"])
    for stop, text in (("y s", "sa"), ("stop", "say "), (" it", "say stop")):
        request = run([256, 257], tokenizer=tokenizer, stop=stop)
        assert (request.text, request.finish_reason) == (text, "stop")


def test_a_stop_string_may_be_a_character_of_several_tokens():
    request = run([*MIXED.encode()], stop="漢")
    assert (request.text, request.finish_reason, len(request.token_ids)) == ("é😀", "stop", 9)


def test_a_broken_character_at_the_end_can_complete_a_stop_string():
    request = run([*b"ab", 0xF0], stop="b\ufffd")
    assert (request.text, request.finish_reason) == ("a", "stop")


def test_what_was_held_back_is_shown_at_every_other_end():
    assert run([*b"xy"], stop="xyz").text == "xy"
    assert run([*b"xy", END], stop="xyz", end_ids=END).text == "xy"
    assert run([*b"xy"], stop="xyz", context=3, max_new_tokens=9).text == "xy"


def test_stop_strings_without_a_tokenizer_get_a_sentence():
    with pytest.raises(ValueError, match="stop strings.*tokenizer"):
        request_of(stop="a")


# ---- text in pieces ---------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(len(MIXED.encode()) + 1))
def test_a_character_is_never_shown_in_halves(cut):
    """The text cut after any byte, then a byte that no UTF-8 holds, then A."""
    ids = [*MIXED.encode()[:cut], 0xFF, ord("A")]
    request = request_of(tokenizer=BYTES, max_new_tokens=len(ids))
    pieces = list(stream(Scripted(says(ids)), request))
    whole = bytes(ids).decode("utf-8", errors="replace")
    assert "".join(pieces) == request.text == BYTES.decode(request.token_ids) == whole
    assert all(pieces), "an empty piece"
    assert "".join(pieces[:-2]).replace("\ufffd", "") in MIXED


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_incomplete_character_at_the_end_is_flushed(cut):
    ids = [*b"A", *"😀".encode()[:cut]]
    for options in ({}, {"end_ids": END}):
        tail = [END] if options else []
        request = request_of(tokenizer=BYTES, max_new_tokens=len(ids + tail), **options)
        pieces = list(stream(Scripted(says(ids + tail)), request))
        assert pieces == ["A", "\ufffd"] and request.text == "A\ufffd"


def test_pieces_join_to_the_text_whatever_the_token_boundaries():
    draw, data = random.Random(2), (MIXED * 3).encode()
    for _ in range(30):
        cuts = sorted(draw.sample(range(1, len(data)), draw.randint(1, 12)))
        chunks = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
        tokenizer = tokenizer_of(chunks)
        known = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        rows = says([known[chunk] for chunk in chunks], tokenizer.vocab_size)
        request = request_of(tokenizer=tokenizer, max_new_tokens=len(chunks))
        shown = ""
        for piece in stream(Scripted(rows), request):
            shown += piece
            assert shown == request.text and piece
        assert shown == MIXED * 3 == tokenizer.decode(request.token_ids)


def test_pieces_of_fairytale_join_to_the_decoded_ids(fairytale):
    model, tokenizer = fairytale
    for seed in range(3):
        options = {"temperature": 1.5, "seed": seed, "max_new_tokens": 40}
        request = request_of(tokenizer.encode("Once"), context=512, tokenizer=tokenizer, **options)
        pieces = list(stream(model, request))
        assert len(pieces) > 20 and len(request.token_ids) == 40
        assert "".join(pieces) == request.text == tokenizer.decode(request.token_ids)


def test_without_a_tokenizer_there_are_ids_and_no_text():
    request = request_of(max_new_tokens=6)
    list(generate(Scripted(says(SOME)), request))
    assert (request.token_ids, request.text) == (SOME, "")


def test_streaming_without_a_tokenizer_gets_a_sentence():
    """An empty stream after all the work would be a silent wrong answer."""
    model = Scripted(says(SOME))
    with pytest.raises(ValueError, match="tokenizer"):
        list(stream(model, request_of(max_new_tokens=6)))
    assert model.fed == []


# ---- the loop ---------------------------------------------------------------------------------


def test_without_a_cache_every_forward_is_fed_everything():
    model = Scripted(says(SOME))
    assert list(generate(model, request_of([7, 8], max_new_tokens=6))) == SOME
    assert model.fed == [[7, 8, *SOME[:n]] for n in range(6)]


def test_the_model_runs_in_inference_mode_and_the_consumer_does_not():
    model = Scripted(says(SOME))
    for _ in generate(model, request_of(max_new_tokens=6)):
        assert not torch.is_inference_mode_enabled()
    assert model.modes == [True] * 12


def spied(model):
    """The lengths that `model.hidden_states` is fed from now on."""
    lengths, original = [], model.hidden_states

    def hidden_states(token_ids, **options):
        lengths.append(token_ids.shape[1])
        return original(token_ids, **options)

    model.hidden_states = hidden_states
    return lengths


SETTINGS = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "sampled": {"temperature": 1.0, "seed": 3},
    "all": {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "seed": 1,
    },
}


@pytest.mark.parametrize("run_it", [generate, stream])
@pytest.mark.parametrize("fields", SETTINGS.values(), ids=SETTINGS)
def test_with_a_cache_the_ids_are_the_same_and_only_the_new_is_fed(save_reference, fields, run_it):
    _, folder = save_reference(seed=3)
    model = GPT2.from_pretrained(folder)
    options = {"context": 64, "max_new_tokens": 40, "tokenizer": BYTES} | fields
    plain, request = (request_of([5, 1, 88, 42], **options) for _ in range(2))
    shown = list(run_it(model, plain))
    cache, lengths = ListCache(2), spied(model)
    assert list(run_it(model, request, cache)) == shown
    assert request.token_ids == plain.token_ids and len(set(plain.token_ids)) >= 15
    assert lengths == [4] + [1] * 39 and cache.length == 43


def test_a_cache_that_holds_a_part_of_the_prompt_is_continued(save_reference):
    _, folder = save_reference(seed=3)
    model = GPT2.from_pretrained(folder)
    plain = list(generate(model, request_of([5, 1, 88, 42], max_new_tokens=9)))
    cache = ListCache(2)
    with torch.inference_mode():
        model.hidden_states(torch.tensor([[5, 1]]), cache=cache)
    lengths = spied(model)
    assert list(generate(model, request_of([5, 1, 88, 42], max_new_tokens=9), cache)) == plain
    assert lengths == [2] + [1] * 8


@pytest.mark.parametrize("run_it", [generate, stream])
def test_closing_the_iterator_stops_the_work(run_it):
    model = Scripted(says(SOME))
    request = request_of(tokenizer=BYTES, max_new_tokens=6)
    running = run_it(model, request)
    assert model.fed == [], "nothing is done before it is asked for"
    next(running), next(running)
    running.close()
    assert len(model.fed) == 2 and (request.text, request.finish_reason) == ("ab", None)
    assert list(running) == [] and len(model.fed) == 2


@pytest.mark.parametrize("run_it", [generate, stream])
def test_an_error_in_the_model_reaches_the_consumer(run_it):
    rows = [*says(SOME[:2]), RuntimeError("out of memory"), *says(SOME[3:])]
    model, request = Scripted(rows), request_of(tokenizer=BYTES, max_new_tokens=6)
    running = run_it(model, request)
    next(running), next(running)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(running)
    assert (request.text, request.token_ids, request.finish_reason) == ("ab", SOME[:2], None)
    assert list(running) == [] and len(model.fed) == 3
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("fields", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (torch.full((SIZE,), NAN), "hold nan"),
        (torch.full((SIZE,), -INF), "are all -inf"),
        (torch.full((SIZE,), INF), "hold inf"),
    ],
)
def test_logits_without_a_best_token_name_the_step_and_change_nothing(fields, bad, what):
    first = [row * 50 for row in says(SOME[:2])]
    request = request_of(tokenizer=BYTES, max_new_tokens=6, **fields)
    running = stream(Scripted([*first, bad]), request)
    shown = [next(running), next(running)]
    with pytest.raises(ValueError, match=f"new token 3: the logits .*{what}"):
        next(running)
    assert "".join(shown) == request.text == "ab"
    assert (request.token_ids, request.finish_reason) == (SOME[:2], None)


def test_a_request_goes_on_after_an_error_as_if_nothing_had_been():
    """The random choices too: bad logits use up no random number."""
    row, bad = torch.zeros(SIZE), torch.full((SIZE,), NAN)
    plain, disturbed = (request_of(temperature=1.0, seed=5, max_new_tokens=5) for _ in range(2))
    ids = [plain.accept(row) for _ in range(5)]
    for step in range(5):
        with pytest.raises(ValueError, match=f"new token {step + 1}:"):
            disturbed.accept(bad)
        disturbed.accept(row)
    assert disturbed.token_ids == ids and disturbed.finish_reason == "length"


def test_an_id_that_the_tokenizer_lacks_changes_nothing():
    """A model's vocabulary is often padded: its last logits belong to no token."""
    request = request_of(tokenizer=BYTES, max_new_tokens=3)
    request.append(97)
    with pytest.raises(ValueError, match=f"{SIZE + 3} is not the id of a token"):
        request.accept(torch.eye(SIZE + 5)[SIZE + 3])
    with pytest.raises(ValueError, match="is not the id of a token"):
        request.append(-1)
    assert (request.token_ids, request.text, request.finish_reason) == ([97], "a", None)


def test_a_request_can_be_taken_over_outside_the_loop():
    """What the loop made under inference mode must not tie the request to it."""
    request = request_of(tokenizer=BYTES, max_new_tokens=4, repetition_penalty=1.5)
    running = generate(Scripted(says(SOME)), request)
    next(running)
    request.append(ord("x"))
    assert request.accept(torch.eye(SIZE)[ord("y")]) == ord("y")
    assert next(running) == SOME[1] and (request.text, request.finish_reason) == ("axyb", "length")


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_an_id_that_somebody_else_chose_counts_like_any_other(kind):
    """A tensor is not equal to an id in a set: it must not slip past the end id."""
    request = request_of(tokenizer=BYTES, end_ids=99, repetition_penalty=2.0)
    for token_id in (97, 98, 99):
        request.append(kind(token_id))
    assert (request.token_ids, request.text, request.finish_reason) == ([97, 98, 99], "ab", "stop")
    assert {type(token_id) for token_id in request.token_ids} == {int}


def test_logits_of_any_float_kind_and_with_a_gradient_are_accepted():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for fields in SETTINGS.values():
            row = (40 * torch.eye(SIZE)[98]).to(dtype).requires_grad_()
            assert request_of(**fields).accept(row) == 98


# ---- seeds ------------------------------------------------------------------------------------

SEEDED = {"temperature": 1.0, "max_new_tokens": 12}


def texts_together(model, tokenizer, prompts) -> list[str]:
    """Run requests in turn, a token each; `prompts` are (text, seed)."""
    requests = [
        request_of(tokenizer.encode(text), context=512, tokenizer=tokenizer, seed=seed, **SEEDED)
        for text, seed in prompts
    ]
    running = [generate(model, request) for request in requests]
    for _ in itertools.zip_longest(*running):
        pass
    return [request.text for request in requests]


def test_requests_that_run_in_turn_do_not_influence_one_another(fairytale):
    first, second, third = ("Once upon a time", 1), ("The wolf", 2), ("The wolf", 3)
    alone = {prompt: texts_together(*fairytale, [prompt])[0] for prompt in (first, second, third)}
    assert len(set(alone.values())) == 3
    for order in ([first, second], [second, first], [third, second, first], [second, third]):
        assert texts_together(*fairytale, order) == [alone[prompt] for prompt in order]


def test_one_seed_gives_one_text_and_no_seed_another_each_time(fairytale):
    one, two = texts_together(*fairytale, [("The wolf", 7), ("The wolf", 7)])
    assert one == two
    unseeded = texts_together(*fairytale, [("The wolf", None)] * 3)
    assert len({one, *unseeded}) == 4
    before = torch.get_rng_state()
    torch.manual_seed(0)  # nothing that others do to the global numbers changes it
    assert texts_together(*fairytale, [("The wolf", 7)]) == [one]
    torch.set_rng_state(before)


def test_generation_leaves_the_global_random_numbers_alone(fairytale):
    before, python_before = torch.get_rng_state(), random.getstate()
    for seed in (None, 0):
        texts_together(*fairytale, [("The wolf", seed)])
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python_before


def test_every_allowed_seed_works_and_is_a_seed_of_its_own():
    """Python's and numpy's integers; those of 32 bits differ from one another."""

    def ids(seed):
        request = request_of(temperature=1.0, seed=seed, max_new_tokens=8)
        return tuple(request.accept(torch.zeros(1000)) for _ in range(8))

    assert len({ids(seed) for seed in (0, 1, 2**31, 2**32 - 1)}) == 4
    for seed in (2**31, 2**32 - 1, np.int64(5), np.uint8(5)):
        assert ids(seed) == ids(int(seed))

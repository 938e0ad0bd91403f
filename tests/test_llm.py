"""The engine from outside: texts and token ids, one or many, in order, and a sentence for what is wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache as once

import pytest
import torch
from conftest import random_reference
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import minillm
from minillm.families import DTYPES
from minillm.llm import can_show_progress
from minillm.sampling import SamplingParams
from minillm.weights import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, VOCABULARY = 64, 4096


def add_tokenizer(folder) -> None:
    """fairytale's words for a model of that many."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(resolve("fairytale") / name, folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """transformers' random model of 64 positions and 4096 tokens, and its folder."""
    folder = tmp_path_factory.mktemp("tiny")
    reference = random_reference(seed=5, vocab_size=VOCABULARY, n_positions=CONTEXT)
    reference.save_pretrained(folder)
    add_tokenizer(folder)
    return reference, folder


@pytest.fixture
def llm(tiny):
    return minillm.LLM(tiny[1])


@pytest.fixture
def fed(llm, monkeypatch):
    """The shape `[B, T]` of each forward of `llm`."""
    shapes, original = [], llm.model.hidden_states

    def watched(token_ids, **options):
        shapes.append(tuple(token_ids.shape))
        return original(token_ids, **options)

    monkeypatch.setattr(llm.model, "hidden_states", watched)
    return shapes


def greedy(reference, prompt_ids, max_new_tokens: int, end_ids=None) -> list[int]:
    """What transformers says after one prompt."""
    return list(greedy_once(reference, tuple(prompt_ids), max_new_tokens, end_ids))


@once
def greedy_once(reference, prompt_ids, max_new_tokens, end_ids) -> list[int]:
    ids, ends = torch.tensor([prompt_ids]), list(end_ids) if end_ids else None
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": ends}
    mask = torch.ones_like(ids)
    out = reference.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options)
    return out[0, len(prompt_ids) :].tolist()


def facts(completion) -> tuple:
    return completion.prompt_token_ids, completion.token_ids, completion.finish_reason


def some_ids(length: int) -> list[int]:
    return [(31 * i * i + 17 * i + 5 * length) % VOCABULARY for i in range(length)]


MIXED = [  # of 15, 2, 3, 4, 1, 30 and 3 tokens: the batches are sorted, the answers are not
    "Once upon a time there was a king who had a daughter",
    [7, 4000],
    (5, 1, 88),
    torch.tensor([3, 200, 17, 1]),
    "a",
    some_ids(30),
    "The wolf",
]


# ---- one prompt and many ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_texts_and_token_ids_come_back_in_order_each_as_transformers_says(tiny, llm, fed, size):
    """Whatever the batches: they hold at most `max_batch_size` prompts."""
    llm.max_batch_size = size
    outs = llm.generate(MIXED, max_new_tokens=12)
    batches = -(-len(MIXED) // size)
    assert len(fed) == 12 * batches and max(rows for rows, _ in fed) == min(size, 7)
    assert isinstance(outs, list) and len(outs) == len(MIXED)
    for prompt, out in zip(MIXED, outs, strict=True):
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else [*map(int, prompt)]
        assert facts(out) == (ids, greedy(tiny[0], ids, 12), "length")
        assert out.text == llm.tokenizer.decode(out.token_ids) != ""
        assert all(type(i) is int for i in out.token_ids + out.prompt_token_ids)
    assert len({tuple(out.token_ids) for out in outs}) == 7
    assert [llm.generate(prompt, max_new_tokens=12) for prompt in MIXED] == outs


def test_the_random_model_does_not_repeat_itself(llm):
    out = llm.generate("a", max_new_tokens=60)
    assert len(set(out.token_ids)) >= 20, "it proves little"


@pytest.mark.parametrize(
    "prompts",
    [
        [torch.tensor([3, 200]), torch.tensor([7])],
        [torch.tensor([3, 200]), "a"],
        ["a", torch.tensor([3, 200])],
        [torch.tensor([3])],
        ([3], torch.tensor([3])),
        [[3]],
        [range(3)],
        ["a"],
    ],
    ids=str,
)
def test_several_prompts_of_any_kind_are_a_list(llm, prompts):
    outs = llm.generate(prompts, max_new_tokens=3)
    assert isinstance(outs, list)
    assert outs == [llm.generate(prompt, max_new_tokens=3) for prompt in prompts]


@pytest.mark.parametrize("prompt", ["a", [64], (64,), torch.tensor([64]), [torch.tensor(64)]])
def test_one_prompt_of_any_kind_is_one_completion(llm, prompt):
    out = llm.generate(prompt, max_new_tokens=3)
    assert facts(out) == facts(llm.generate("a", max_new_tokens=3)) and out.prompt_token_ids == [64]
    assert "".join(llm.stream(prompt, max_new_tokens=3)) == out.text


@pytest.mark.parametrize("nothing", [[], (), torch.tensor([], dtype=torch.int64)], ids=str)
def test_no_prompts_are_no_answers(llm, fed, nothing):
    assert llm.generate(nothing) == [] and fed == []


def test_batches_hold_prompts_of_similar_length(llm, fed):
    llm.max_batch_size = 2
    llm.generate([some_ids(n) for n in (3, 40, 4, 39, 21, 20)], max_new_tokens=1)
    assert sorted(fed) == [(2, 4), (2, 21), (2, 40)]


# ---- settings ---------------------------------------------------------------------------------

SAMPLED = {"temperature": 1.0, "max_new_tokens": 10}


def test_one_params_for_all_one_for_each_and_single_fields_on_top(llm):
    prompts = ["The fox", [5, 1, 88], "The king had a castle", "The fox"]
    one = SamplingParams(seed=5, **SAMPLED)
    each = [
        SamplingParams(seed=5, **SAMPLED),
        SamplingParams(max_new_tokens=4),
        SamplingParams(seed=6, top_k=5, **SAMPLED),
        SamplingParams(seed=7, temperature=0.9, max_new_tokens=7),
    ]
    for params, own in ((one, [one] * 4), (each, each), (tuple(each), each)):
        outs = llm.generate(prompts, params)
        assert outs == [llm.generate(p, o) for p, o in zip(prompts, own, strict=True)]
        shorter = llm.generate(prompts, params, max_new_tokens=3, seed=9)
        fields = {"max_new_tokens": 3, "seed": 9}
        assert shorter == [llm.generate(p, o, **fields) for p, o in zip(prompts, own, strict=True)]
        assert {len(out.token_ids) for out in shorter} == {3}
        assert [len(out.token_ids) for out in outs] == [o.max_new_tokens for o in own]
    assert llm.generate("The fox", [each[0]]) == llm.generate("The fox", each[0])
    assert llm.generate(prompts, seed=5, **SAMPLED) == llm.generate(prompts, one)


def test_a_seed_gives_the_same_text_in_any_company(llm):
    """Beside others, in another order, and in batches of another size."""
    first = llm.generate("The fox", seed=3, **SAMPLED)
    others = ["The king", "Once upon a time", some_ids(20)]
    for prompts in (["The fox", *others], [*others, "The fox"], ["The fox", "The fox"]):
        for llm.max_batch_size in (2, 16):
            outs = llm.generate(prompts, seed=3, **SAMPLED)
            at = [n for n, prompt in enumerate(prompts) if prompt == "The fox"]
            assert [outs[n] for n in at] == [first] * len(at)
    free = llm.generate(["The fox"] * 3, **SAMPLED)
    assert len({out.text for out in [*free, first]}) == 4, "without a seed each is another"


def test_each_row_ends_by_its_own_rule(tiny, llm):
    """Two end ids from two files, a stop string, a budget; all as alone."""
    reference, folder = tiny
    prompts = [some_ids(n) for n in (9, 1, 4, 30)]
    free = [greedy(reference, prompt, 20) for prompt in prompts]
    llm.end_ids = {free[0][2], free[1][5]}
    stop = llm.tokenizer.decode(free[2])[8:12]
    params = [
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=20, stop=stop),
        SamplingParams(max_new_tokens=7),
    ]
    outs = llm.generate(prompts, params)
    for n in (0, 1):
        expected = greedy(reference, prompts[n], 20, tuple(llm.end_ids))
        assert facts(outs[n]) == (prompts[n], expected, "stop") and len(expected) < 20
        assert outs[n].text == llm.tokenizer.decode(expected[:-1]), "an end id has no text"
    text = llm.tokenizer.decode(free[2])
    assert (outs[2].text, outs[2].finish_reason) == (text[: text.index(stop)], "stop")
    assert facts(outs[3]) == (prompts[3], free[3][:7], "length")
    assert outs == [llm.generate(p, o) for p, o in zip(prompts, params, strict=True)]


def test_end_ids_of_both_files_end_a_row_of_a_batch(tiny, tmp_path):
    reference, folder = tiny
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    prompts = [some_ids(n) for n in (9, 30, 1)]
    free = [greedy(reference, prompt, 12) for prompt in prompts]
    ends = free[0][2], free[1][5], 1
    for name, value in {"config": ends[0], "generation_config": ends[1:]}.items():
        path = tmp_path / f"{name}.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | {"eos_token_id": value}))
    outs = minillm.LLM(tmp_path).generate(prompts, max_new_tokens=12)
    expected = [greedy(reference, prompt, 12, ends) for prompt in prompts]
    assert [out.token_ids for out in outs] == expected
    assert [(len(ids), ids[-1]) for ids in expected[:2]] == [(3, ends[0]), (6, ends[1])]
    assert [out.finish_reason for out in outs[:2]] == ["stop", "stop"]


def test_the_default_budget_is_100_and_is_written_down(llm):
    assert SamplingParams().max_new_tokens == 100
    assert re.search(r"\b100\b", minillm.LLM.generate.__doc__)
    long = minillm.LLM("fairytale")
    long.end_ids = set()
    out = long.generate("The wolf")
    assert (len(out.token_ids), out.finish_reason) == (100, "length")


# ---- what is wrong gets a sentence, before anything runs --------------------------------------

TOO_LONG = some_ids(CONTEXT + 1)
WRONG = {
    "None": (None, "the prompt is None"),
    "a number": (5, "the prompt is 5"),
    "a fraction": (3.4, r"the prompt is 3\.4"),
    "a dict": ({"prompt": "a"}, "the prompt is {'prompt': 'a'}"),
    "a set": ({1, 2}, "the prompt is {1, 2}"),
    "bytes": (b"The wolf", "the prompt is b'The wolf'"),
    "an iterator": (iter([1, 2]), "the prompt is <list_iterator"),
    "a tensor without a length": (torch.tensor(5), "the prompt is tensor"),
    "fractions in a tensor": (torch.tensor([1.5]), r"the prompt is tensor\(\[1\.5"),
    "ids and a text": ([1, "a"], r"the prompt is \[1, 'a'\], expected a list of token ids"),
    "fractions": ([1.5, 2.0], r"prompt 0: the prompt is 1\.5"),
    "a text in a prompt": (["Hi", ["Hi"]], r"prompt 1: the prompt is \['Hi'\]"),
    "nested too deep": ([[["Hi"]]], "the prompt is"),
    "nested ids": ([[1], [[1]]], r"prompt 1: the prompt is \[\[1\]\]"),
    "None among others": (["a", None], "prompt 1: the prompt is None"),
    "a number among others": (["a", "b", 5], "prompt 2: the prompt is 5"),
    "bytes among others": (["a", b"b"], "prompt 1: the prompt is b'b'"),
    "a dict among others": (["a", {}], "prompt 1: the prompt is {}"),
    "an empty text": ("", "the prompt is ''.*at least one character"),
    "an empty text among others": (["Hi", ""], "prompt 1: the prompt is ''"),
    "an empty list among others": ([[], "Hi"], r"prompt 0: the prompt is \[\]"),
    "an empty prompt in a list": ([[]], r"the prompt is \[\]"),
    "an id too large": ([1, 4096], "token id 4096 is outside the vocabulary.*0 to 4095"),
    "an id below 0": ([1, -1, 5000], "token id -1 is outside the vocabulary.*0 to 4095"),
    "such an id among others": (["a", (4096,)], "prompt 1: token id 4096 is outside"),
    "such an id in a tensor": (torch.tensor([9999]), "token id 9999 is outside"),
    "a prompt too long": (TOO_LONG, "the prompt has 65 tokens.*context holds 64"),
    "one too long of several": (["a", "b", TOO_LONG], "prompt 2: the prompt has 65 tokens.*64"),
}


@pytest.mark.parametrize(("prompt", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_prompt_gets_a_sentence_before_anything_runs(llm, fed, prompt, says):
    with pytest.raises(ValueError, match=says):
        llm.generate(prompt, max_new_tokens=2)
    assert fed == []
    assert llm.generate("a", max_new_tokens=2).finish_reason == "length"


@pytest.mark.parametrize(
    "prompt", [None, 5, "", [], ["a", "b"], [1, "a"], [4096], TOO_LONG], ids=str
)
def test_a_stream_refuses_at_once(llm, fed, prompt):
    """When it is asked for, not when the first piece is."""
    with pytest.raises(ValueError, match="the prompt |token id 4096"):
        llm.stream(prompt)
    assert fed == []


@pytest.mark.parametrize(
    ("params", "options", "error", "says"),
    [
        ([SamplingParams()] * 2, {}, ValueError, "prompts: 3, SamplingParams: 2;"),
        ([], {}, ValueError, "prompts: 3, SamplingParams: 0;"),
        ([SamplingParams()] * 4, {}, ValueError, "prompts: 3, SamplingParams: 4;"),
        ([SamplingParams(), 5, SamplingParams()], {}, TypeError, "prompt 1: params is 5"),
        ({"top_k": 3}, {}, TypeError, "params is {'top_k': 3}, expected SamplingParams"),
        (20, {}, TypeError, "params is 20, expected SamplingParams.*max_new_tokens=20"),
        (None, {"top_p": 0}, ValueError, "top_p is 0, expected"),
        (None, {"temprature": 1}, TypeError, "unexpected keyword argument 'temprature'"),
        ([SamplingParams()] * 3, {"seed": -1}, ValueError, "seed is -1, expected"),
    ],
)
def test_wrong_settings_get_a_sentence_before_anything_runs(llm, fed, params, options, error, says):
    with pytest.raises(error, match=says):
        llm.generate(["a", "b", "c"], params, **options)
    assert fed == []


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, "3"])
def test_a_wrong_batch_size_is_refused(tiny, size):
    with pytest.raises(ValueError, match=f"max_batch_size is {size!r}, expected a whole number"):
        minillm.LLM(tiny[1], max_batch_size=size)


# ---- the end of the context -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "budget", "new", "reason"),
    [
        (60, 3, 3, "length"),
        (60, 4, 4, "length"),
        (60, 5, 4, "context"),
        (63, 1, 1, "length"),
        (63, 2, 1, "context"),
        (64, 1, 0, "context"),
        (64, 100, 0, "context"),
    ],
)
def test_at_the_end_of_the_context_alone_batched_and_streamed_agree(
    tiny, llm, fed, length, budget, new, reason
):
    """Also beside a short prompt that fills the context: together they are wider than it is."""
    prompt = some_ids(length)
    expected = greedy(tiny[0], prompt, new) if new else []
    out = llm.generate(prompt, max_new_tokens=budget)
    assert facts(out) == (prompt, expected, reason)
    assert "".join(llm.stream(prompt, max_new_tokens=budget)) == out.text
    assert len(fed) == 2 * new
    other = some_ids(4)
    for prompts in ([prompt, other], [other, prompt]):
        params = [SamplingParams(max_new_tokens=60 if p is other else budget) for p in prompts]
        outs = llm.generate(prompts, params)
        assert outs[prompts.index(prompt)] == out
        assert facts(outs[prompts.index(other)]) == (other, greedy(tiny[0], other, 60), "length")


# ---- device and dtype -------------------------------------------------------------------------


def test_the_cpu_is_a_device_by_name(tiny):
    for llm in (minillm.LLM(tiny[1]), minillm.LLM(tiny[1], device="cpu")):
        assert {p.device.type for p in llm.model.parameters()} == {"cpu"}


ELSEWHERE = ["cuda:99", "meta", "xpu", "hpu", "gpu", "", None, 3.5]
ELSEWHERE += [] if torch.cuda.is_available() else ["cuda"]
ELSEWHERE += [] if torch.backends.mps.is_available() else ["mps"]


@pytest.mark.parametrize("name", ELSEWHERE, ids=str)
def test_a_device_that_is_not_here_gets_a_sentence(tiny, name):
    """Before the weights are read."""
    says = f"^device {re.escape(repr(name))} cannot be used here .*take 'cpu'"
    with pytest.raises(ValueError, match=says) as caught:
        minillm.LLM(tiny[1], device=name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        ),
        pytest.param(
            "mps",
            marks=pytest.mark.skipif(
                not torch.backends.mps.is_available(), reason="no MPS device here"
            ),
        ),
    ],
)
def test_on_an_accelerator_a_batch_says_what_it_says_here(tiny, device):
    here, there = minillm.LLM(tiny[1]), minillm.LLM(tiny[1], device=device)
    assert {p.device.type for p in there.model.parameters()} == {device}
    budgets = [SamplingParams(max_new_tokens=n) for n in (12, 3, 7, 12, 1, 9, 12)]
    assert there.generate(MIXED, budgets) == here.generate(MIXED, budgets)
    assert there.generate(MIXED, seed=1, **SAMPLED) == here.generate(MIXED, seed=1, **SAMPLED)
    piece = "".join(there.stream("The wolf", max_new_tokens=12))
    assert piece == here.generate("The wolf", max_new_tokens=12).text


@pytest.mark.parametrize(
    "name", ["float64", "fp32", "half", "torch.float32", "", 32, torch.float32]
)
def test_a_wrong_dtype_is_refused_by_name(tiny, name):
    with pytest.raises(
        ValueError, match=r"dtype is .*, expected .*float32, bfloat16, float16"
    ) as e:
        minillm.LLM(tiny[1], dtype=name)
    assert repr(name) in str(e.value)


def convert(folder, target, kinds) -> dict:
    """A copy of a model folder with its tensors in these dtypes, in turn; the tensors."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    kept = {
        name: tensor.to(kinds[n % len(kinds)]) for n, (name, tensor) in enumerate(tensors.items())
    }
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return kept


KINDS = {"half": [torch.float16], "mixed": [torch.float16, torch.float32, torch.bfloat16]}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_all_weights_and_the_cache_have_the_one_dtype(tiny, tmp_path, kinds, dtype, monkeypatch):
    """Whatever the file holds; float32 unless somebody asks for another."""
    stored = convert(tiny[1], tmp_path, kinds)
    assert {tensor.dtype for tensor in stored.values()} == set(kinds)
    llm = minillm.LLM(tmp_path, **({"dtype": dtype} if dtype else {}))
    wanted = getattr(torch, dtype or "float32")
    assert {p.dtype for p in llm.model.parameters()} == {wanted}
    for ours, theirs in {"token_embedding": "wte", "position_embedding": "wpe"}.items():
        table = llm.model.get_submodule(ours).weight
        assert torch.equal(table, stored[f"transformer.{theirs}.weight"].to(wanted))
    caches, original = [], llm.model.hidden_states

    def watched(token_ids, **options):
        caches.append(options["cache"])
        return original(token_ids, **options)

    monkeypatch.setattr(llm.model, "hidden_states", watched)
    outs = llm.generate(MIXED[:3], [SamplingParams(max_new_tokens=n) for n in (5, 9, 2)])
    assert [len(out.token_ids) for out in outs] == [5, 9, 2]
    assert {b.dtype for cache in caches for b in cache.keys + cache.values} == {wanted}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_batch_in_half_precision_is_near_the_whole(dtype, monkeypatch):
    """The first logits of each row: padding and its mask cost no more than the rounding does."""
    seen = {}
    accept = minillm.generation.Request.accept

    def watched(request, row):
        seen.setdefault(tuple(request.prompt_ids), row.float())
        return accept(request, row)

    monkeypatch.setattr("minillm.generation.Request.accept", watched)
    prompts = ["Once upon a time there was a king", "The wolf", "a"]
    whole, llm = minillm.LLM("fairytale"), minillm.LLM("fairytale", dtype=dtype)
    for prompt in prompts:
        whole.generate(prompt, max_new_tokens=1)
    expected, seen = seen, {}
    outs = llm.generate(prompts, max_new_tokens=8)
    assert [len(out.token_ids) for out in outs] == [8, 8, 8] and len(seen) == 3
    for prompt, row in seen.items():
        assert (row - expected[prompt]).abs().max() < 0.05 * expected[prompt].abs().max()


# ---- the progress bar -------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    """Whether stderr is one, and no notebook."""

    def set_to(answer: bool):
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: answer, raising=False)

    return set_to


@pytest.fixture
def at_once(monkeypatch):
    """The bar does not wait 5 seconds."""
    monkeypatch.setattr("minillm.llm.tqdm", lambda **options: tqdm(**options | {"delay": 0}))


def test_where_somebody_looks_there_is_a_bar(llm, capsys, terminal, at_once):
    llm.max_batch_size = 2
    terminal(True)
    assert can_show_progress()
    llm.generate(["a"] * 5, max_new_tokens=2)
    shown = capsys.readouterr()
    assert "5/5" in shown.err and "prompt" in shown.err and shown.out == ""


@pytest.mark.parametrize("prompts", ["a", ["a"], ["a", "b"], []], ids=str)
def test_one_batch_needs_no_bar(llm, capsys, terminal, at_once, prompts):
    llm.max_batch_size = 2
    terminal(True)
    llm.generate(prompts, max_new_tokens=2)
    assert capsys.readouterr() == ("", "")


def test_what_is_quick_needs_no_bar(llm, capsys, terminal):
    llm.max_batch_size = 2
    terminal(True)
    llm.generate(["a"] * 5, max_new_tokens=2)
    assert capsys.readouterr() == ("", "")


def test_elsewhere_nothing_is_printed(llm, capsys, terminal, at_once, monkeypatch):
    llm.max_batch_size = 2
    terminal(False)
    assert not can_show_progress()
    llm.generate(["a"] * 5, max_new_tokens=2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # a notebook is no terminal, but seen
    assert can_show_progress()


def test_the_bar_counts_each_prompt_once(llm, capsys, at_once, monkeypatch):
    """Also one that fills the context, and so has ended before anything runs."""
    monkeypatch.setattr("minillm.llm.can_show_progress", lambda: True)
    llm.max_batch_size = 2
    llm.generate(["a", some_ids(CONTEXT), "b", "c"], max_new_tokens=2)
    assert capsys.readouterr().err.rstrip().splitlines()[-1].count("4/4") >= 1


# ---- when it is cut short ---------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", ["blocks.1.mlp", "final_norm", "lm_head"])
def test_after_an_error_in_the_model_the_engine_is_as_before(llm, fed, place, error):
    """In the fourth forward of five of the second batch of three."""
    llm.max_batch_size = 3
    expected = llm.generate(MIXED, max_new_tokens=5)
    assert len(fed) == 15
    fed.clear()

    def breaks(*_):
        if len(fed) == 9:
            raise error

    handle = llm.model.get_submodule(place).register_forward_pre_hook(breaks)
    with pytest.raises(type(error)) as caught:
        llm.generate(MIXED, max_new_tokens=5)
    handle.remove()
    assert caught.value is error and len(fed) == 9
    assert llm.generate(MIXED, max_new_tokens=5) == expected
    assert "".join(llm.stream(MIXED[0], max_new_tokens=5)) == expected[0].text


def test_a_stream_that_is_closed_stops_the_work(llm, fed):
    pieces = llm.stream("The wolf", max_new_tokens=40)
    assert fed == []
    next(pieces)
    steps = len(fed)
    pieces.close()
    assert len(fed) == steps < 5


WORK = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have it ignored
import minillm
llm = minillm.LLM("fairytale", max_batch_size=4)
llm.end_ids, head = set(), llm.model.head
def told(x):
    print(len(x), flush=True)
    return head(x)
llm.model.head = told
llm.generate(["Once upon a time"] * 400, max_new_tokens=400)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_ctrl_c_ends_a_long_batch_at_once():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # a second waits long on a busy machine
    process = subprocess.Popen([sys.executable, "-c", WORK], env=one_thread, **pipes)
    try:
        steps = [process.stdout.readline() for _ in range(5)]
        assert steps == ["4\n"] * 5, process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode != 0 and errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.startswith("Traceback"), "something was printed before it: a bar?"

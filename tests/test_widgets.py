"""The panels without a browser: what they show, what it costs, and what is left without ipywidgets."""

import asyncio
import re
import sys
import threading
from html import escape, unescape

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minillm.generation import Request, generate
from minillm.gpt2 import GPT2
from minillm.panel_html import MOST_ROWS, MOST_TOKENS, percent, tokens_html
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.widgets import (
    MOST_LABELS,
    attention_panel,
    compare,
    look,
    sampling_panel,
    tokenizer_panel,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads only get in each other's way with tensors as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def gpt2():
    return Tokenizer.from_pretrained("gpt2")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_pretrained("fairytale")


@pytest.fixture(scope="module")
def model():
    return GPT2.from_pretrained("fairytale")


@pytest.fixture
def forwards(model):
    """A list that grows by one with each forward of the model."""
    calls = []
    hook = model.final_norm.register_forward_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


@pytest.fixture
def random_pair(save_reference):
    """A random GPT-2 of transformers and ours, with a scale that differs from layer to layer."""
    reference, folder = save_reference(scale_attn_by_inverse_layer_idx=True)
    reference.set_attn_implementation("eager")
    return reference, GPT2.from_pretrained(folder)


def everything(widget) -> list:
    """A panel and all that is in it, from top to bottom."""
    return [widget] + [
        part for child in getattr(widget, "children", ()) for part in everything(child)
    ]


def control(panel, *names):
    """The one control that a person finds under a name (a button may have two)."""
    (found,) = [w for w in everything(panel) if getattr(w, "description", None) in names]
    return found


def button(panel):
    return control(panel, "Generate", "Stop")


def html(panel) -> str:
    """The HTML that a panel shows."""
    return "".join(w.value for w in everything(panel) if type(w).__name__ == "HTML")


def shown(panel) -> str:
    """The text that a panel shows, as a person reads it."""
    text = re.sub(r"<style>.*?</style>", "", html(panel), flags=re.S)
    return unescape(re.sub(r"<[^>]+>", "", text))


def written(panel) -> str:
    """The text that the model wrote into a panel."""
    (text,) = re.findall(r'<span class="new">(.*?)</span>', html(panel), re.S)
    return unescape(text)


def rows(panel) -> list[tuple[bool, str, str, str]]:
    """The rows of the chart: kept?, label, before, after."""
    pattern = r'<div class="(kept|cut)"[^>]*><span class="token">(.*?)</span>.*?number">(.*?)<.*?number">(.*?)<'
    found = re.findall(pattern, html(panel), re.S)
    return [(state == "kept", *map(unescape, texts)) for state, *texts in found]


# the tokenizer's panel


def ids_in(html: str) -> list[int]:
    return [int(number) for number in re.findall(r"<small[^>]*>(\d+)</small>", html)]


def test_every_token_has_a_box_with_its_id(gpt2):
    text = "Hello world 😀"
    html = tokens_html(gpt2, text)
    assert ids_in(html) == gpt2.encode(text)
    assert "Hello" in html and "·world" in html and "F0 9F 98" in html
    assert f"{len(gpt2.encode(text))} tokens, 13 characters, 16 bytes" in html


def test_typed_html_stays_text(gpt2):
    html = tokens_html(gpt2, "<script>alert(1)</script> & <|endoftext|>")
    assert "<script" not in html and "&lt;" in html and "50256" not in html


def test_a_long_text_is_cut_and_says_so(gpt2):
    html = tokens_html(gpt2, " a" * 2 * MOST_TOKENS)
    assert (
        len(ids_in(html)) == MOST_TOKENS and f"{2 * MOST_TOKENS} tokens" in html and "first" in html
    )


@pytest.mark.parametrize("text", ["", "\n\t\r\u00a0\u200b", "\ud83d", "\x00"])
def test_odd_texts_are_shown(gpt2, text):
    assert ids_in(tokens_html(gpt2, text)) == gpt2.encode(text)


def test_a_character_that_the_vocabulary_lacks_is_a_sentence():
    tokenizer = Tokenizer({"a": 0}, [])
    assert "no token for the bytes of &#x27;b&#x27;" in tokens_html(tokenizer, "ab")


def test_the_panel_follows_what_is_typed(gpt2):
    panel = tokenizer_panel(gpt2, text="Hello")
    field, tokens = panel.children
    assert tokens.value == tokens_html(gpt2, "Hello")
    field.value = "Hello world"
    assert tokens.value == tokens_html(gpt2, "Hello world") and ids_in(tokens.value) == [15496, 995]


def test_each_call_makes_a_panel_of_its_own(gpt2):
    first, second = tokenizer_panel(gpt2, text="one"), tokenizer_panel(gpt2, text="two")
    second.children[0].value = "three"
    assert first is not second and first.children[1].value == tokens_html(gpt2, "one")
    assert second.children[1].value == tokens_html(gpt2, "three")


def test_without_ipywidgets_there_is_a_picture_and_a_sentence(gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    panel = tokenizer_panel(gpt2, text="Hello world")
    assert ids_in(panel._repr_html_()) == [15496, 995]
    assert "ipywidgets is not installed" in panel._repr_html_() and "ipywidgets" in repr(panel)


# the sampling explorer

PROMPT = "The king had a daughter and the king had a"  # with words for the penalty
SETTINGS = [
    dict(temperature=1.0, top_k=0),
    dict(temperature=0.5, top_k=7),
    dict(temperature=1.5, top_k=0, top_p=0.8),
    dict(temperature=0.7, top_k=0, min_p=0.1),
    dict(temperature=1.2, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.5),
]


def warp(logits, token_ids, temperature, top_k, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    """transformers' own processors: the logits before the cuts and after them, `[V]` each."""
    early = [RepetitionPenaltyLogitsProcessor(repetition_penalty)]
    late = [TopKLogitsWarper(top_k)] if top_k else []
    late += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    late += [MinPLogitsWarper(min_p)] if min_p else []
    ids = torch.tensor([token_ids])
    uncut = LogitsProcessorList([*early, TemperatureLogitsWarper(temperature)])(ids, logits[None])
    return uncut[0], LogitsProcessorList(late)(ids, uncut.clone())[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_chart_and_numbers_are_those_of_transformers(model, tokenizer, settings):
    panel = sampling_panel(model, tokenizer, PROMPT)
    for name, value in settings.items():
        control(panel, name).value = value
    token_ids = tokenizer.encode(PROMPT)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids]))[0, -1].clone()
    uncut, cut = warp(logits, token_ids, **settings)
    kept, before, after = cut > -torch.inf, logits.softmax(-1), cut.softmax(-1)
    bits = [torch.distributions.Categorical(p).entropy().item() / 0.693147 for p in (before, after)]
    assert f"entropy {bits[0]:.2f} → {bits[1]:.2f} bits" in shown(panel)
    assert f"tokens kept {int(kept.sum()):,} of 4,096" in shown(panel)
    assert f"mass kept {percent(uncut.softmax(-1)[kept].sum().item())}" in shown(panel)
    expected = [
        (
            bool(kept[i]),
            tokenizer.decode([i]).replace(" ", "·"),
            percent(before[i].item()),
            percent(after[i].item()) if kept[i] else "cut",
        )
        for i in before.topk(MOST_ROWS).indices.tolist()
    ]
    assert rows(panel) == expected


def test_what_is_not_in_the_chart_is_counted(model, tokenizer):
    panel = sampling_panel(model, tokenizer)
    control(panel, "top_k").value = 100
    assert f"{4096 - MOST_ROWS:,} others{100 - MOST_ROWS} of them kept" in shown(panel)
    visible = sum(float(before.strip("<> %")) for _, _, before, _ in rows(panel))
    others = re.search(r"of them kept([\d.]+) %", shown(panel))[1]
    assert visible + float(others) == pytest.approx(100, abs=1)


def test_a_cut_token_is_marked_by_more_than_a_colour(model, tokenizer):
    panel = sampling_panel(model, tokenizer, params=SamplingParams(temperature=1, top_k=3))
    assert [kept for kept, *_ in rows(panel)] == [True] * 3 + [False] * (MOST_ROWS - 3)
    assert "line-through" in html(panel) and shown(panel).count("%cut") == MOST_ROWS - 3


def test_temperature_zero_keeps_one_token(model, tokenizer):
    panel = sampling_panel(model, tokenizer)
    control(panel, "temperature").value = 0
    assert "tokens kept 1 of 4,096" in shown(panel) and "→ 0.00 bits" in shown(panel)
    assert [after for _, _, _, after in rows(panel)] == ["100.0 %"] + ["cut"] * (MOST_ROWS - 1)


def test_a_slider_costs_no_forward_and_a_prompt_one(model, tokenizer, forwards):
    panel = sampling_panel(model, tokenizer, PROMPT)
    assert len(forwards) == 1
    moves = dict(temperature=1.2, top_k=50, top_p=0.9, min_p=0.2, repetition_penalty=1.5)
    for name, value in moves.items():
        before = html(panel)
        control(panel, name).value = value
        assert html(panel) != before, name
    assert len(forwards) == 1
    control(panel, "prompt").value = "The old king"
    assert len(forwards) == 2


def test_the_sliders_start_where_they_are_told_to(model, tokenizer):
    params = SamplingParams(
        max_new_tokens=8,
        temperature=3.0,
        top_k=500,
        top_p=0.5,
        min_p=0.2,
        repetition_penalty=0.5,
        stop=("king",),
        seed=7,
    )
    panel = sampling_panel(model, tokenizer, params=params)
    for name in vars(params).keys() - {"stop"}:
        assert control(panel, name).value == getattr(params, name), name
    control(panel, "temperature").value = 0
    control(panel, "repetition_penalty").value = 1
    button(panel).click()  # greedy writes " king"
    assert written(panel) == " " and "finish_reason: stop" in shown(panel)


def run(model, tokenizer, prompt, params) -> str:
    request = Request(tokenizer.encode(prompt), params, context=512, tokenizer=tokenizer)
    list(generate(model, request))
    return request.text


def test_the_button_writes_what_the_settings_say(model, tokenizer):
    params = SamplingParams(max_new_tokens=12, temperature=1.3, top_k=40, seed=3)
    panel = sampling_panel(model, tokenizer, "The king", params=params)
    assert written(panel) == ""
    button(panel).click()
    first = written(panel)
    assert first and first == run(model, tokenizer, "The king", params)
    assert "The king" + first in shown(panel)
    assert "12 new tokens, finish_reason: length" in shown(panel)
    button(panel).click()
    assert written(panel) == first
    control(panel, "seed").value = 4
    button(panel).click()
    assert written(panel) != first and button(panel).description == "Generate"


@pytest.mark.parametrize("given", [True, False], ids=["given", "the tokenizer's own"])
def test_an_end_token_ends_the_text(model, tokenizer, given, monkeypatch):
    prompt = "Once upon a"
    params = SamplingParams(max_new_tokens=5)
    end = tokenizer.encode(" time")[0]  # the greedy token
    if not given:
        monkeypatch.setattr(tokenizer, "eos_token_id", end)
    panel = sampling_panel(model, tokenizer, prompt, end if given else None, params)
    button(panel).click()
    assert written(panel) == "" and "1 new tokens, finish_reason: stop" in shown(panel)


def test_what_a_model_reads_and_writes_stays_text(random_pair):
    """In this vocabulary every token but two is a tag."""
    tags = {f"<u{i}>": i for i in range(2, 97)}
    panel = sampling_panel(random_pair[1], Tokenizer({"<": 0, "&": 1} | tags, []), "<&<")
    control(panel, "max_new_tokens").value = 3
    button(panel).click()
    assert "<u" not in html(panel) and "<&" not in html(panel)
    assert re.fullmatch(r"(<u\d+>|<|&){3}", written(panel)) and "<u" in written(panel)
    assert "<&<" + written(panel) in shown(panel) and any("<u" in row[1] for row in rows(panel))


def test_sliders_answer_and_the_button_stops_while_a_text_is_written(model, tokenizer):
    async def person():
        panel = sampling_panel(model, tokenizer)
        control(panel, "max_new_tokens").value = 200
        button(panel).click()
        assert written(panel) == "" and button(panel).description == "Stop"  # no token yet
        seen, numbers = [], []
        for n in range(4):
            await asyncio.sleep(0)
            control(panel, "top_k").value = 20 + n
            seen.append(written(panel))
            numbers.append(re.search(r"tokens kept (\d+)", shown(panel))[1])
        assert all(a != b and b.startswith(a) for a, b in zip(seen, seen[1:], strict=False)), seen
        assert numbers == ["20", "21", "22", "23"]
        button(panel).click()
        for _ in range(3):
            await asyncio.sleep(0)
        assert button(panel).description == "Generate"
        assert re.search(r"[4-6] new tokens, stopped", shown(panel))
        text = written(panel)
        await asyncio.sleep(0)
        assert written(panel) == text
        control(panel, "max_new_tokens").value = 2
        button(panel).click()  # and it starts again
        while button(panel).description == "Stop":
            await asyncio.sleep(0)
        assert "2 new tokens, finish_reason: length" in shown(panel)

    asyncio.run(asyncio.wait_for(person(), timeout=30))


def test_the_last_move_wins_even_between_threads(model, tokenizer, monkeypatch):
    """JupyterLab hands a kernel's widget messages to more than one thread."""
    panel, begun, go = sampling_panel(model, tokenizer), threading.Event(), threading.Event()

    def slow(logits, seen, params):
        if params.top_k == 5:
            begun.set()
            go.wait(timeout=10)
        return compare(logits, seen, params)

    monkeypatch.setattr("minillm.widgets.compare", slow)
    moves = [
        threading.Thread(target=setattr, args=(control(panel, "top_k"), "value", k)) for k in (5, 9)
    ]
    moves[0].start()
    assert begun.wait(timeout=10)
    moves[1].start()
    moves[1].join(timeout=0.3)  # it ends now only where it does not wait for the first
    go.set()
    for move in moves:
        move.join()
    assert "tokens kept 9 of" in shown(panel)


def test_impossible_prompts_are_sentences_in_the_panel(model, tokenizer):
    panel = sampling_panel(model, tokenizer)
    for prompt, sentence in [("", "the prompt is empty"), ("a " * 600, "context holds 512")]:
        control(panel, "prompt").value = prompt
        assert sentence in shown(panel) and "tokens kept" not in shown(panel)
        button(panel).click()
        assert shown(panel).count(sentence) == 2 and button(panel).description == "Generate"
    control(panel, "prompt").value = "The king"
    assert "tokens kept" in shown(panel)


def test_an_error_nobody_foresaw_is_named_in_the_panel(tokenizer):
    model = GPT2.from_pretrained("fairytale")
    panel = sampling_panel(model, tokenizer, "The king")
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of <memory>")

    model.final_norm.register_forward_hook(fail)
    button(panel).click()
    assert "RuntimeError: out of <memory>" in shown(panel) and "&lt;memory" in html(panel)
    assert written(panel) and button(panel).description == "Generate"  # what was written stays
    torch.nn.init.constant_(model.final_norm.weight, torch.nan)
    control(panel, "prompt").value = "The king had"
    assert "the logits of the model hold nan" in shown(panel)


def test_two_sampling_panels_are_strangers(model, tokenizer):
    first, second = (sampling_panel(model, tokenizer) for _ in range(2))
    assert first is not second and not set(everything(first)) & set(everything(second))
    before = html(first)
    control(second, "temperature").value = 1.9
    control(second, "max_new_tokens").value = 1
    button(second).click()
    assert html(first) == before != html(second)


# the attention viewer

LETTERS = {chr(33 + i): i for i in range(94)}  # one token for each character


def cells(panel) -> list[float]:
    """The shares in the matrix, row by row."""
    return [float(x) for x in re.findall(r'fill-opacity="([\d.]+)"', html(panel))]


@pytest.mark.parametrize("length", [1, 7, 60])
def test_the_matrix_is_the_attention_of_transformers(random_pair, length):
    reference, model = random_pair
    tokenizer = Tokenizer(LETTERS, [])
    text = "".join(chr(33 + 31 * i % 94) for i in range(length))
    with torch.inference_mode():
        ids = torch.tensor([tokenizer.encode(text)])
        attentions = reference(ids, output_attentions=True).attentions
    panel = attention_panel(model, tokenizer, text)
    size, seen = min(length, MOST_LABELS), set()
    for layer in range(2):
        for head in range(4):
            control(panel, "layer").value, control(panel, "head").value = layer, head
            expected = attentions[layer][0, head, :size, :size]
            lower = expected[torch.tril(torch.ones(size, size)) == 1].tolist()
            assert cells(panel) == pytest.approx(lower, abs=0.00051)
            best = int(expected[-1].argmax())
            sentence = f"looks most at “{text[best]}” (position {best}): {percent(expected[-1, best].item())}"
            assert f"Layer {layer}, head {head}: " in shown(panel) and sentence in shown(panel)
            seen.add(tuple(cells(panel)))
    assert len(seen) == (1 if length == 1 else 8)
    assert ("first 40 of 60 tokens" in shown(panel)) == (length == 60)


def test_the_tokens_stand_at_both_edges(model, tokenizer):
    text = "Once & upon <"
    panel = attention_panel(model, tokenizer, text, layer=1, head=2)
    labels = [tokenizer.decode([i]).replace(" ", "·") for i in tokenizer.encode(text)]
    found = re.findall(r'class="token"[^>]*>(.*?)</text>', html(panel))
    assert found == [escape(label) for label in labels for _ in range(2)]
    assert len(cells(panel)) == len(labels) * (len(labels) + 1) // 2
    last = f"“{labels[-1]}”"
    assert last not in html(panel) and html(panel).count(escape(last)) > len(labels)  # titles, too


def test_a_head_costs_no_forward_a_layer_and_a_prompt_one(model, tokenizer, forwards):
    panel = attention_panel(model, tokenizer)
    control(panel, "head").value = 5
    assert len(forwards) == 1
    control(panel, "layer").value = 3
    assert len(forwards) == 2
    control(panel, "prompt").value = "The old king"
    assert len(forwards) == 3
    assert not any(block.attention.qkv._forward_hooks for block in model.blocks)


@pytest.mark.parametrize("place", ["attention_norm", "attention.out"])  # before q and k, and after
def test_another_threads_forward_is_not_looked_at(model, tokenizer, place):
    """A text may be written with the same model while a slider moves."""
    text, me = "The wolf saw the girl", threading.get_ident()
    quiet = look(model, tokenizer, text, 2)[0]
    other = threading.Thread(target=model, args=(torch.tensor([[5, 6, 7]]),))

    def disturb(*_):
        if threading.get_ident() == me and not other.ident:
            other.start()
            other.join()

    hook = model.blocks[2].get_submodule(place).register_forward_hook(disturb)
    disturbed = look(model, tokenizer, text, 2)[0]
    hook.remove()
    assert other.ident and torch.equal(quiet, disturbed)


def test_impossible_attention_is_a_sentence(tokenizer):
    model = GPT2.from_pretrained("fairytale")
    panel = attention_panel(model, tokenizer)
    control(panel, "prompt").value = ""
    assert "the prompt is empty" in shown(panel) and not cells(panel)
    model.blocks[0].mlp.register_forward_hook(lambda *_: 1 / 0)
    control(panel, "prompt").value = "The king"
    assert "ZeroDivisionError" in shown(panel) and not model.blocks[0].attention.qkv._forward_hooks
    with pytest.raises(ValueError, match="layer is 6, this model has layers 0 to 5"):
        attention_panel(model, tokenizer, layer=6)
    with pytest.raises(ValueError, match="head is -1, this model has heads 0 to 7"):
        attention_panel(model, tokenizer, head=-1)


def test_two_attention_panels_are_strangers(model, tokenizer):
    first, second = (attention_panel(model, tokenizer) for _ in range(2))
    before = html(first)
    control(second, "layer").value = 4
    assert html(first) == before != html(second)


def test_without_ipywidgets_the_panels_are_pictures(model, tokenizer, monkeypatch):
    sampling = sampling_panel(model, tokenizer, params=SamplingParams(temperature=1, top_k=4))
    attention = attention_panel(model, tokenizer, layer=5, head=3)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    still = sampling_panel(model, tokenizer, params=SamplingParams(temperature=1, top_k=4))
    for part in ("tokens kept", "mass kept", "line-through"):
        assert part in still._repr_html_()
    assert sampling.children[1].children[1].value in still.html
    assert "call sampling_panel again with other params" in repr(still)
    still = attention_panel(model, tokenizer, layer=5, head=3)
    assert still.html == attention.children[-1].value and "attention_panel" in repr(still)


def test_shares_are_written_so_that_little_is_not_nothing():
    shares = {0.0: "0.0 %", 1e-5: "<0.1 %", 0.123: "12.3 %", 0.99999: ">99.9 %", 1.0: "100.0 %"}
    assert {share: percent(share) for share in shares} == shares

"""The quantization panel: its levels are those of the engine, its numbers those of a sheet of paper."""

import re
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

from minillm import LLM
from minillm import quantization_panel as module
from minillm.codes import dequantize_int4, quantize_int4
from minillm.gpt2 import GPT2
from minillm.perplexity import token_losses
from minillm.quantization import quantize_
from minillm.quantization_panel import (
    GROUPINGS,
    LossMeter,
    group_size,
    quantization_html,
    quantization_panel,
    round_to_levels,
)

pytestmark = pytest.mark.usefixtures("one_thread")

HAND = torch.tensor([[0.0, 1.4, 1.6, 3.0], [-6.0, -4.5, 1.0, 24.0]])  # steps 1 and 10 at 2 bits
LOSSES = torch.tensor([1.0, 2.0, 3.0, 2.0]), torch.tensor([1.5, 2.0, 3.5, 2.0])
IDS = [(7 * n * n + 3) % 97 for n in range(100)]


@pytest.fixture
def small(save_reference):
    """A small model and its reference: rows of 32 and 128 numbers."""
    reference, folder = save_reference()
    return GPT2.from_pretrained(folder), reference


def text(html: str) -> str:
    """What a person reads in it."""
    plain = unescape(
        re.sub(r"<style>.*?</style>|<title>.*?</title>|<[^>]+>", " ", html, flags=re.S)
    )
    return " ".join(plain.split())


def levels(html: str) -> list[list[float]]:
    """Where the marks of each group stand, in pixels."""
    paths = re.findall(r'<path class="levels" d="([^"]+)"', html)
    return [[float(x) for x in re.findall(r"M([-\d.]+) ", path)] for path in paths]


@pytest.mark.parametrize(
    ("grouping", "expected"),
    [
        ("row", [[0, 1, 2, 3], [-6, -6, 4, 24]]),
        ("matrix", [[4, 4, 4, 4], [-6, -6, 4, 24]]),
        (2, [[0, 1.4, 1.6, 3], [-6, -4.5, 1, 24]]),
    ],
)
def test_two_bits_by_hand(grouping, expected):
    torch.testing.assert_close(
        round_to_levels(HAND, 2, grouping)[0], torch.tensor(expected, dtype=torch.float32)
    )


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_four_bits_are_those_of_the_engine(grouping):
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    size = {"matrix": 24 * 256, "row": 256}.get(grouping, grouping)
    codes, scales, zeros = quantize_int4(weight.reshape(-1, size), size)
    rounded, low, step = round_to_levels(weight, 4, grouping)
    torch.testing.assert_close(step, scales)
    torch.testing.assert_close(low, zeros - 8 * scales)
    expected = dequantize_int4(codes, scales, zeros).view(24, 256)
    torch.testing.assert_close(rounded, expected, atol=1e-5, rtol=0)


def test_a_group_of_equal_numbers_stays_as_it_is():
    weight = torch.full((2, 4), 0.3)
    assert torch.equal(round_to_levels(weight, 3, "row")[0], weight)


@pytest.mark.parametrize("grouping", [3, 0, -2, 8, "column"])
def test_what_does_not_cut_a_row_is_refused(grouping):
    with pytest.raises(ValueError, match="divides the 4 numbers of a row"):
        group_size(HAND, grouping)


def test_the_marks_stand_where_the_levels_are():
    html = quantization_html("w", HAND, 2, "row", LOSSES)
    at = lambda *numbers: [10 + 600 * (number + 6) / 30 for number in numbers]  # noqa: E731
    assert levels(html) == [
        at(-6, 4, 14, 24),
        at(-6, 4, 14, 24),
    ]  # of two rows the wider is the middle
    three = torch.cat([HAND, torch.tensor([[0.0, 0.0, 0.0, 6.0]])])
    html = quantization_html("w", three, 2, "row", LOSSES)
    assert levels(html) == [at(-6, 4, 14, 24), at(0, 2, 4, 6)]
    assert "the widest row: 4 levels, 10 apart a typical row: 4 levels, 2 apart" in text(html)
    html = quantization_html("w", HAND, 3, "matrix", LOSSES)
    assert "the matrix: 8 levels, 4.3 apart" in text(html) and len(levels(html)[0]) == 8


def test_the_bars_are_a_histogram():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    html = quantization_html("w", weight, 4, 32, LOSSES)
    counts = [int(n) for n in re.findall(r"<title>([\d,]+) weights</title>", html)]
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', html)]
    expected, _ = np.histogram(weight.numpy(), bins=module.BINS)
    assert sum(counts) == weight.numel() and len(counts) == len(heights) == module.BINS
    assert np.abs(np.array(counts) - expected).max() <= 1  # a number on an edge, in fp32
    assert all(h == 0 if not n else h >= 1.5 for n, h in zip(counts, heights, strict=True))
    assert heights[int(np.argmax(counts))] == 120


def test_the_facts_are_those_of_a_hand_calculation():
    """Errors 0, 0.4, 0.4, 0 and 0, 1.5, 3, 0; 8 weights of 2 bits, 2 rows with 32 bits more."""
    shown = text(quantization_html("w", HAND, 2, "row", LOSSES))
    deviation = np.std(HAND.numpy(), ddof=1)
    assert f"the farthest from 0 is {24 / deviation:.1f} times that" in shown
    assert "scales 2, one for 4 weights" in shown
    assert f"largest error {3 / deviation:.3f} standard deviations" in shown
    mean_square = (2 * 0.4**2 + 1.5**2 + 3**2) / 8
    assert f"root mean square {mean_square**0.5 / deviation:.3f} standard" in shown
    assert "bits per weight 10," in shown
    # differences 0.5, 0, 0.5, 0: their deviation is 0.289, of the mean of four half of it
    assert "loss of the model 2.000 → 2.250 (+0.250 ± 0.144)" in shown


def test_bits_per_weight_and_size_of_a_real_shape():
    shown = text(quantization_html("w", torch.randn(256, 1024), 4, 32, LOSSES))
    assert "scales 8,192, one for 32 weights" in shown
    assert "bits per weight 5, " in shown and "size 163.8 KB; in fp32 1,048.6 KB" in shown


def test_the_loss_is_that_of_transformers_on_block_matrices_rounded_by_the_engine(small):
    model, reference = small
    meter = LossMeter(model, IDS[:60])

    def loss() -> float:
        ids = torch.tensor([IDS[:60]])
        with torch.no_grad():
            return reference(ids, labels=ids).loss.item()

    assert meter.plain.mean().item() == pytest.approx(loss(), rel=1e-5)
    before = loss()
    for block in reference.transformer.h:
        for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            rows = layer.weight.data.t().contiguous()  # transformers keeps them [in, out]
            layer.weight.data = dequantize_int4(*quantize_int4(rows, 16)).t()
    assert abs(loss() - before) > 0.001
    assert meter.rounded(4, 16).mean().item() == pytest.approx(loss(), rel=1e-4)


def test_fairytale_at_four_bits_loses_what_the_engine_loses():
    llm = LLM("fairytale")
    folder = Path(module.__file__).parent / "models" / "fairytale"
    ids = llm.tokenizer.encode((folder / "held_out.txt").read_text())
    panel = quantization_panel(llm.model, ids)
    shown = text(panel.children[-1].value)
    quantize_(llm.model, 4, 32, skip="token_embedding")
    with torch.inference_mode():
        expected = token_losses(llm.model, ids[:300]).mean().item()
    before, after = re.search(r"loss of the model ([\d.]+) → ([\d.]+)", shown).groups()
    assert float(after) == pytest.approx(expected, abs=0.002) and before != after
    assert "blocks.5.mlp.down [256, 1024]" in shown and "299 predicted tokens" in shown
    with pytest.raises(ValueError, match="if it is quantized already, load it again"):
        quantization_panel(llm.model, ids)


def test_the_given_model_is_never_changed_and_no_setting_leaves_a_trace(small):
    model, _ = small
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    panel = quantization_panel(model, IDS)
    *controls, shown = panel.children
    first = shown.value
    for control, value in zip(controls, ("blocks.0.attention.qkv", 2, "matrix"), strict=True):
        control.value = value
    after = model.state_dict()
    assert before.keys() == after.keys() and before
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    fresh = quantization_panel(model, IDS, "blocks.0.attention.qkv", 2, "matrix")
    assert fresh.children[-1].value == shown.value
    for parameter in model.parameters():  # the panel has a copy of its own
        parameter.data.mul_(2)
    for control, value in zip(controls, ("blocks.1.mlp.down", 4, 32), strict=True):
        control.value = value
    assert shown.value == first


def test_every_control_changes_the_picture_and_a_known_setting_costs_no_forward(small, monkeypatch):
    panel = quantization_panel(small[0], IDS)
    *controls, shown = panel.children
    assert [label for label, _ in controls[2].options] == [
        *("the matrix", "each row", "groups of 32", "groups of 16")
    ]
    assert controls[0].options[:2] == ("token_embedding", "blocks.0.attention.qkv")
    seen = [shown.value]
    for control, value in zip(controls, ("token_embedding", 7, "row"), strict=True):
        control.value = value
        assert shown.value not in seen
        seen.append(shown.value)
    monkeypatch.setattr(module, "token_losses", None)
    for control, value in zip(reversed(controls), (32, 4, "blocks.1.mlp.down"), strict=True):
        control.value = value
    assert shown.value == seen[0]


@pytest.mark.parametrize(
    "start", [{"name": "blocks.7.mlp.up"}, {"bits": 9}, {"bits": 1}, {"grouping": 64}]
)
def test_a_start_that_the_panel_does_not_offer_is_refused(small, start):
    [(what, value)] = start.items()
    with pytest.raises(ValueError, match=f"{what} is {value!r}, this panel offers"):
        quantization_panel(small[0], IDS, **start)


def test_without_ipywidgets_there_is_a_picture_and_a_sentence(small, monkeypatch):
    expected = quantization_panel(small[0], IDS, bits=3, grouping="row").children[-1].value
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    panel = quantization_panel(small[0], IDS, bits=3, grouping="row")
    assert expected in panel._repr_html_() and len(levels(expected)) == 2
    assert "ipywidgets is not installed" in repr(panel)

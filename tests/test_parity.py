"""The rulers themselves: they see every planted mistake at its own place, and never pass on nothing."""

import copy

import pytest
import torch
from conftest import greedy, random_reference
from torch import nn
from transformers import GPT2LMHeadModel

from minillm.gpt2 import GPT2, reference_points
from minillm.parity import ParityError, compare_by_hand, compare_modules, compare_text, difference
from minillm.weights import resolve

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def transposed(m):
    m.blocks[1].attention.out.weight = nn.Parameter(m.blocks[1].attention.out.weight.T.contiguous())


def bias_dropped(m):
    m.blocks[0].mlp.up.bias = nn.Parameter(torch.zeros_like(m.blocks[0].mlp.up.bias))


def exact_gelu(m):
    m.blocks[1].mlp.activation = nn.GELU()


def scale_dropped(m):
    m.blocks[0].attention.scale = 1.0


def position_shifted(m):
    m.position_embedding.weight = nn.Parameter(m.position_embedding.weight.roll(1, dims=0))


def norm_gain_dropped(m):
    m.blocks[1].mlp_norm.weight = nn.Parameter(torch.ones_like(m.blocks[1].mlp_norm.weight))


PLANTED = {
    transposed: "blocks.1.attention.out",
    bias_dropped: "blocks.0.mlp.up",
    exact_gelu: "blocks.1.mlp.activation",
    scale_dropped: "blocks.0.attention.out (input)",
    position_shifted: "position_embedding",
    norm_gain_dropped: "blocks.1.mlp_norm",
}


@pytest.fixture(scope="module", params=["fairytale", "random"])
def loaded(request, tmp_path_factory):
    """A model of transformers, and ours from its folder."""
    if request.param == "random":
        reference, folder = random_reference(), tmp_path_factory.mktemp("random")
        reference.save_pretrained(folder)
    else:
        folder = resolve("fairytale")
        reference = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    return GPT2.from_pretrained(folder), reference


@pytest.fixture
def pair(loaded):
    """Ours and the reference as they were loaded: copies, to plant mistakes in."""
    return copy.deepcopy(loaded)


IDS = torch.tensor([[5, 1, 88, 42, 7, 7, 0, 96, 13, 51, 2, 30]])


@pytest.mark.parametrize("plant", PLANTED, ids=lambda f: f.__name__)
def test_a_planted_mistake_is_found_at_its_own_sub_module(pair, plant):
    model, reference = pair
    points = reference_points(model.config)
    compare_modules(model, reference, points, IDS, show=False)
    plant(model)
    with pytest.raises(ParityError) as error:
        compare_modules(model, reference, points, IDS, show=False)
    name, ratio = str(error.value).removeprefix("the first sub-module that drifts is ").split(": ")
    assert name == PLANTED[plant]
    assert float(ratio.split(" ")[0]) >= 3


def test_the_table_has_a_row_for_each_layer_and_names_the_drift(pair, capsys):
    model, reference = pair
    points = reference_points(model.config)
    compare_modules(model, reference, points, IDS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 4 + model.config.n_layer
    assert all(line.endswith("equal") for line in lines[1:])
    bias_dropped(model)
    with pytest.raises(ParityError):
        compare_modules(model, reference, points, IDS)
    assert "blocks.0.mlp.up: " in capsys.readouterr().out


def test_a_ruler_that_compared_nothing_fails(pair):
    model, reference = pair
    with pytest.raises(ParityError, match="nothing to compare"):
        compare_modules(model, reference, [], IDS)
    with pytest.raises(ParityError, match="nothing to compare"):
        compare_text(lambda ids, n: [], reference, [], 10)
    with pytest.raises(ParityError, match="nothing passed through transformer.drop.none|nothing"):
        idle = nn.Module()
        reference.transformer.idle = idle
        compare_modules(model, reference, [("final_norm", "transformer.idle", "output")], IDS)
    with pytest.raises(ParityError):
        difference("empty", torch.ones(0), torch.ones(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_never_equal(value):
    given = torch.tensor([1.0, value])
    assert not difference("x", given, torch.ones(2)).ok
    assert difference("x", torch.ones(2), torch.ones(2)).ok


def test_the_bound_is_relative():
    large = torch.tensor([1000.0, 0.0])
    assert difference("x", large + 5e-3, large).ok
    assert not difference("x", large / 1e6 + 5e-8, large / 1e6).ok
    assert not difference("x", torch.full((2,), 1e-9), torch.zeros(2)).ok


def test_a_difference_has_no_sign():
    assert difference("x", torch.zeros(2), torch.ones(2)).gap == 1
    assert difference("x", torch.ones(2), torch.zeros(2)).gap == 1


def test_shapes_must_agree():
    with pytest.raises(ParityError, match=r"\[1, 3\].*\[3\]"):
        difference("x", torch.ones(1, 3), torch.ones(3))


def test_texts_that_part_name_the_step_and_the_gap(pair):
    model, reference = pair

    def wrong(ids, n):
        right = greedy(model, ids, n)
        return right[:3] + [right[3] + 1] + right[4:]

    with pytest.raises(ParityError, match="part at new token 3.*differ by .*a real difference"):
        compare_text(wrong, reference, [[5, 1, 88]], 8)
    with pytest.raises(ParityError, match="part at new token 7"):
        compare_text(lambda ids, n: greedy(model, ids, n)[:-1], reference, [[5, 1, 88]], 8)


def test_by_hand(capsys):
    compare_by_hand("sum", torch.tensor([1.0, 2.00001]), [1, 2])
    assert "on paper [1.0, 2.0]" in capsys.readouterr().out
    with pytest.raises(ParityError, match="off by 0.01"):
        compare_by_hand("sum", torch.tensor([1.0, 2.01]), [1, 2])
    with pytest.raises(ParityError):
        compare_by_hand("sum", torch.tensor([1.0, float("nan")]), [1, 2])

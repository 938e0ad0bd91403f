"""Loss and perplexity from outside: transformers' own numbers, and what each kind of code costs a text."""

import copy
import json
import math
from functools import cache as once

import pytest
import torch
from conftest import random_reference
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from minillm.codes import dequantize_int4, quantize_int4
from minillm.gpt2 import GPT2, GPT2Config, load_weights
from minillm.layers import Linear
from minillm.perplexity import perplexity, token_losses
from minillm.quantization import quantize_
from minillm.tokenizer import Tokenizer
from minillm.weights import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = [(31 * i * i + 17 * i + 5) % 97 for i in range(90)]


@once
def random_pair():
    """transformers' model and ours, with a context of 64."""
    reference = random_reference()
    config = GPT2Config.from_dict(json.loads(reference.config.to_json_string()))
    return reference, load_weights(GPT2(config), reference.state_dict()).eval()


@once
def fairytale() -> GPT2:
    return GPT2.from_pretrained("fairytale")


@once
def held_out() -> list[int]:
    """The ids of the four tales that fairytale never saw, with an end id between two."""
    text = (resolve("fairytale") / "held_out.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_pretrained("fairytale").encode(text, allowed_special="all")
    assert ids.count(4095) == 3 and len(ids) > 2000
    return ids


# ---- the losses -------------------------------------------------------------------------------


@once
def embedded_pair():
    reference = GPT2LMHeadModel.from_pretrained(resolve("fairytale"), dtype=torch.float32)
    return reference.eval(), fairytale()


@torch.inference_mode()
@pytest.mark.parametrize(("name", "window"), [("random", 64), ("random", 20), ("fairytale", 512)])
def test_losses_equal_transformers_on_the_same_windows(name, window):
    """Its own loss is the mean over the positions inside a window; the last one is taken by hand."""
    reference, model = embedded_pair() if name == "fairytale" else random_pair()
    ids = held_out()[:1200] if name == "fairytale" else IDS
    losses, compared = token_losses(model, ids, window), 0
    assert losses.shape == (len(ids) - 1,) and losses.dtype == torch.float32
    for start in range(0, len(ids) - 1, window):
        piece = torch.tensor(ids[start : start + window])
        out = reference(piece[None], labels=piece[None])
        inside = losses[start : start + len(piece) - 1]
        assert inside.mean().item() == pytest.approx(out.loss.item(), rel=1e-5)
        compared += len(inside)
        if start + window < len(ids):
            row = out.logits[0, -1].log_softmax(-1)
            expected = -row[ids[start + window]].item()
            assert losses[start + window - 1].item() == pytest.approx(expected, rel=1e-4)
            compared += 1
    assert compared == len(losses) > window


def test_windows_do_not_see_each_other():
    """Another beginning changes the losses of the first window, and none behind it."""
    model = random_pair()[1]
    before, other = token_losses(model, IDS, 20), list(IDS)
    other[3] = 96 - other[3]
    after = token_losses(model, other, 20)
    assert (before[3:20] != after[3:20]).all() and torch.equal(before[:2], after[:2])
    assert torch.equal(before[20:], after[20:])
    alone = token_losses(model, IDS[20:41], 20)
    assert torch.allclose(before[20:40], alone, rtol=1e-5)


def test_a_longer_window_is_another_measurement():
    """The windows really cut: with one token at a time only that token is looked at."""
    reference, model = random_pair()
    one = token_losses(model, IDS[:30], 1)
    with torch.inference_mode():
        rows = reference(torch.tensor(IDS[:29])[:, None]).logits[:, 0]  # each alone
    expected = F.cross_entropy(rows, torch.tensor(IDS[1:30]), reduction="none")
    assert torch.allclose(one, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one, token_losses(model, IDS[:30], 30), rtol=0.1)


def test_lists_and_tensors_of_ids_give_the_same():
    model = random_pair()[1]
    assert torch.equal(token_losses(model, IDS, 30), token_losses(model, torch.tensor(IDS), 30))


def test_losses_are_fp32_where_the_model_is_not():
    model = copy.deepcopy(random_pair()[1]).to(torch.bfloat16)
    losses = token_losses(model, IDS, 30)
    assert losses.dtype == torch.float32 and losses.isfinite().all()


class Uniform:
    """All of 97 tokens are equally likely."""

    def __call__(self, token_ids):
        return torch.zeros(*token_ids.shape, 97)


def test_perplexity_by_hand():
    assert perplexity(torch.tensor([math.log(2), math.log(8)])) == pytest.approx(4)
    losses = token_losses(Uniform(), IDS, 16)
    assert torch.allclose(losses, torch.tensor(math.log(97.0)))
    assert perplexity(losses) == pytest.approx(97, rel=1e-5)
    assert perplexity(torch.zeros(3)) == 1


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[], [5], [[5, 1, 88]], torch.zeros(2, 3).long(), torch.tensor(5)])
def test_less_than_two_ids_in_a_row_are_refused(ids):
    with pytest.raises(ValueError, match="a row of at least two token ids, got"):
        token_losses(random_pair()[1], ids, 8)


def test_what_the_model_refuses_is_refused():
    model = random_pair()[1]
    with pytest.raises(ValueError, match="token id 99 is outside the vocabulary"):
        token_losses(model, [5, 99, 88], 8)
    with pytest.raises(ValueError, match="at least two token ids"):
        token_losses(model, [5.5, 1.0, 88.0], 8)
    with pytest.raises(ValueError, match="context holds 64"):
        token_losses(model, IDS, 65)


@pytest.mark.parametrize("last", [97, -1, -100])
def test_a_last_id_outside_the_vocabulary_is_refused(last):
    """-100 is the worst: to cross_entropy it means "do not count", a loss of 0."""
    with pytest.raises(ValueError, match="outside the vocabulary"):
        token_losses(random_pair()[1], [5, 1, 88, last], 8)


@pytest.mark.parametrize("window", [0, -1, True, 2.5, None])
def test_a_window_that_is_no_number_above_0_is_named(window):
    with pytest.raises(ValueError, match=f"window.*{window!r}"):
        token_losses(random_pair()[1], IDS, window)


def test_ids_of_32_bits_are_taken():
    model = random_pair()[1]
    ids = torch.tensor(IDS, dtype=torch.int32)
    assert torch.equal(token_losses(model, ids, 30), token_losses(model, IDS, 30))


# ---- what the codes cost ----------------------------------------------------------------------


@torch.inference_mode()
def losses_of(model) -> torch.Tensor:
    """The losses on the held-out tales."""
    losses = token_losses(model, held_out())
    assert len(losses) == len(held_out()) - 1 and losses.isfinite().all()
    return losses


@once
def plain_losses() -> torch.Tensor:
    return losses_of(fairytale())


def cost(model) -> tuple[float, float]:
    """By how much the perplexity is larger, and how far a token's loss moves (its rms)."""
    losses, plain = losses_of(model), plain_losses()
    moved = (losses - plain).square().mean().sqrt().item()
    return perplexity(losses) / perplexity(plain) - 1, moved


def quantized(bits, dtype):
    return quantize_(copy.deepcopy(fairytale()), bits, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["readable", "kernels"])
def test_int8_costs_half_a_percent_and_int4_five_at_most(dtype):
    int8, int4 = (cost(quantized(bits, dtype))[0] for bits in (8, 4))
    print(f"perplexity {perplexity(plain_losses()):.2f}, int8 + {int8:.2%}, int4 + {int4:.2%}")
    assert 20 < perplexity(plain_losses()) < 80, "the model is not made for this text"
    assert 0 < abs(int8) < 0.005 < int4 < 0.05


def rounded(groups) -> GPT2:
    """fairytale with the blocks' weights rounded to 16 steps, in groups that `groups` cuts."""
    model = copy.deepcopy(fairytale())
    layers = [module for module in model.blocks.modules() if isinstance(module, Linear)]
    assert len(layers) == 24
    for layer in layers:
        rows = groups(layer.weight)  # [out, in] -> [groups, size]
        parts = quantize_int4(rows, rows.shape[1])
        layer.weight.data = dequantize_int4(*parts).reshape(layer.weight.shape)
    return model


def test_a_scale_for_fewer_weights_is_better():
    """One for each matrix, for each row, for 32 neighbors.

    Each step is a clear one in the perplexity, and clearer in how far the losses move: there the
    tokens that become likelier by chance do not make up for the others.
    """
    cuts = {"matrix": (1, -1), "row": None, "32": (-1, 32)}
    costs = {
        name: cost(rounded(lambda weight, cut=cut: weight if cut is None else weight.reshape(cut)))
        for name, cut in cuts.items()
    }
    print({name: f"+ {more:.2%}, moved {moved:.3f}" for name, (more, moved) in costs.items()})
    (matrix, far), (row, less), (group, least) = costs.values()
    assert 0 < group < 0.05
    assert group + 0.004 < row and row + 0.04 < matrix
    assert 1.2 * least < less and 1.6 * less < far

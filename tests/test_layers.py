"""Chapter 3 from outside: each layer equals transformers' own, and each classic mistake is seen."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from minillm import layers, plots

WIDTH, HEADS, LENGTH = 32, 4, 10
TOLERANCE = 1e-5  # of the reference tensor's largest magnitude
OUR_NAMES = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
KERNELS = pytest.mark.parametrize("kernel", ["naive", "sdpa"])
SPLITS = pytest.mark.parametrize("pieces", [[4, 6], [1, 9], [7, 2, 1], [1] * 10], ids=str)


@pytest.fixture(autouse=True)
def one_thread_without_gradients():
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def reference_block(seed=0):
    """transformers' block with weights that show every mistake: no bias 0, no gain 1."""
    torch.manual_seed(seed)
    config = GPT2Config(n_embd=WIDTH, n_head=HEADS, attn_implementation="eager")
    block = GPT2Block(config, layer_idx=seed).eval()
    for name, parameter in block.named_parameters():
        is_gain = "ln_" in name and name.endswith("weight")
        nn.init.uniform_(parameter, 0.5, 1.5) if is_gain else nn.init.normal_(parameter, std=0.2)
    return block


def our_block(reference, kernel="naive", layer=0):
    """Our block with the reference's weights: Conv1D stores [in, out], Linear [out, in]."""
    block = layers.Block(
        layers.LayerNorm(WIDTH),
        layers.Attention(WIDTH, HEADS, layer=layer, kernel=kernel),
        layers.LayerNorm(WIDTH),
        layers.MLP(WIDTH, 4 * WIDTH),
    )
    for theirs, ours in OUR_NAMES.items():
        source, target = reference.get_submodule(theirs), block.get_submodule(ours)
        target.weight.copy_(source.weight.T if source.weight.dim() == 2 else source.weight)
        target.bias.copy_(source.bias)
    return block.eval()


def inputs(batch=2, seed=7):
    """Tokens of very different size, so that a misplaced epsilon shows too. [B, T, D]"""
    sizes = torch.linspace(0.05, 3, LENGTH)[:, None]
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)) * sizes


def added(mask):
    """transformers adds its mask to the scores: 0 where one may look."""
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


def gap(ours, theirs):
    """The second ruler: largest difference, as a share of the reference's largest magnitude."""
    assert theirs.numel() > 0, "nothing was compared"
    assert ours.shape == theirs.shape, f"shapes {list(ours.shape)} and {list(theirs.shape)} differ"
    largest = theirs.abs().max()
    assert largest.isfinite() and largest > 0, "the reference is empty talk: zeros or NaN"
    return ((ours - theirs).abs().max() / largest).nan_to_num(nan=math.inf).item()


def gaps(ours, reference, x, mask):
    """The gap of every sub-module, each given the same input, and of the whole block."""
    hidden = layers.causal_mask(LENGTH) if mask is None else mask
    return {
        "ln_1": gap(ours.attention_norm(x), reference.ln_1(x)),
        "attn": gap(ours.attention(x, mask), reference.attn(x, attention_mask=added(hidden))[0]),
        "ln_2": gap(ours.mlp_norm(x), reference.ln_2(x)),
        "mlp": gap(ours.mlp(x), reference.mlp(x)),
        "block": gap(ours(x, mask), reference(x, attention_mask=added(hidden))),
    }


def padded(*lengths):
    """bool [B, T], True = real: rows of these lengths, padded on the left."""
    return torch.arange(LENGTH)[None, :] >= LENGTH - torch.tensor(lengths)[:, None]


class ToyCache:
    """The cache's contract and nothing else: all keys and values so far."""

    def __init__(self):
        self.kept = {}

    def update(self, layer, k, v):
        old = self.kept.get(layer, (k[:, :, :0], v[:, :, :0]))
        self.kept[layer] = tuple(torch.cat(pair, dim=2) for pair in zip(old, (k, v), strict=True))
        return self.kept[layer]


def feed(blocks, x, pieces, real=None, make_mask=layers.causal_mask):
    """The blocks' output where the tokens come in pieces and the keys stay in a cache."""
    cache, past, outputs = ToyCache(), 0, []
    for piece in x.split(pieces, dim=1):
        new = piece.shape[1]
        mask = make_mask(new, past, None if real is None else real[:, : past + new])
        for block in blocks:
            piece = block(piece, mask, None, cache)
        outputs.append(piece)
        past += new
    assert set(cache.kept) == {0, 1} and cache.kept[0][0].shape[2] == LENGTH
    return torch.cat(outputs, dim=1)


# Against transformers ---------------------------------------------------------------------------


@KERNELS
@pytest.mark.parametrize("seed", [0, 1])
def test_each_sub_module_equals_transformers(kernel, seed):
    reference = reference_block(seed)
    found = gaps(our_block(reference, kernel), reference, inputs(), layers.causal_mask(LENGTH))
    assert set(found) == {"ln_1", "attn", "ln_2", "mlp", "block"}
    assert max(found.values()) <= TOLERANCE, found


@KERNELS
def test_padded_rows_equal_transformers_and_their_solo_runs(kernel):
    reference = reference_block()
    ours, x, lengths = our_block(reference, kernel), inputs(batch=3), (LENGTH, 6, 1)
    mask = layers.causal_mask(LENGTH, padding_mask=padded(*lengths))
    found = gaps(ours, reference, x, mask)
    assert max(found.values()) <= TOLERANCE, found
    for row, length in enumerate(lengths):
        alone = x[row : row + 1, -length:]
        expected = reference(alone, attention_mask=added(layers.causal_mask(length)))
        assert gap(ours(x, mask)[row : row + 1, -length:], expected) <= TOLERANCE


@KERNELS
@SPLITS
def test_chunks_on_a_past_equal_one_pass_of_transformers(kernel, pieces):
    references = [reference_block(0), reference_block(1)]
    blocks = [our_block(r, kernel, layer) for layer, r in enumerate(references)]
    expected = inputs()
    for reference in references:
        expected = reference(expected, attention_mask=added(layers.causal_mask(LENGTH)))
    assert gap(feed(blocks, inputs(), pieces), expected) <= TOLERANCE


@KERNELS
@SPLITS
def test_chunks_of_padded_rows_equal_their_solo_runs(kernel, pieces):
    references = [reference_block(0), reference_block(1)]
    blocks = [our_block(r, kernel, layer) for layer, r in enumerate(references)]
    lengths = (3, LENGTH, 7)
    x = inputs(batch=3)
    result = feed(blocks, x, pieces, padded(*lengths))
    assert result.isfinite().all()
    for row, length in enumerate(lengths):
        expected = x[row : row + 1, -length:]
        for reference in references:
            expected = reference(expected, attention_mask=added(layers.causal_mask(length)))
        assert gap(result[row : row + 1, -length:], expected) <= TOLERANCE


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_activations_are_those_that_transformers_means_by_the_name(name):
    from transformers.activations import ACT2FN

    mlp, x = layers.MLP(WIDTH, 64, name), torch.linspace(-6, 6, 1001)
    assert gap(mlp.activation(x), ACT2FN[name](x)) <= TOLERANCE


def test_the_scale_by_layer_that_some_gpt2_configs_ask_for():
    config = GPT2Config(
        n_embd=WIDTH,
        n_head=HEADS,
        attn_implementation="eager",
        scale_attn_by_inverse_layer_idx=True,
    )
    reference = reference_block(2)
    other = GPT2Block(config, layer_idx=2).eval()
    other.load_state_dict(reference.state_dict())
    ours, mask = our_block(reference), layers.causal_mask(LENGTH)
    ours.attention.scale = 1 / math.sqrt(WIDTH // HEADS) / 3
    assert gap(ours(inputs(), mask), other(inputs(), attention_mask=added(mask))) <= TOLERANCE


# The ruler itself sees every classic mistake ----------------------------------------------------


def no_scale(block, patch):
    block.attention.scale = 1.0


def scale_by_head_dim(block, patch):
    block.attention.scale = HEADS / WIDTH


def split_by_reshape(block, patch):
    patch.setattr(layers, "split_heads", lambda x, H: x.reshape(len(x), H, x.shape[1], -1))


def heads_and_channels_swapped(block, patch):
    swap = lambda x, H: x.reshape(*x.shape[:2], -1, H).permute(0, 3, 1, 2)  # noqa: E731
    patch.setattr(layers, "split_heads", swap)


def merge_by_reshape(block, patch):
    patch.setattr(layers, "merge_heads", lambda x: x.reshape(len(x), x.shape[2], -1))


def split_and_merge_by_reshape(block, patch):
    split_by_reshape(block, patch)
    merge_by_reshape(block, patch)


def qkv_in_another_order(block, patch):
    block.attention.qkv.weight.copy_(block.attention.qkv.weight.roll(WIDTH, dims=0))


def qkv_read_head_by_head(block, patch):
    rows = torch.arange(3 * WIDTH).view(3, HEADS, -1).transpose(0, 1).flatten()
    block.attention.qkv.weight.copy_(block.attention.qkv.weight[rows])


def square_projection_not_transposed(block, patch):
    block.attention.out.weight.copy_(block.attention.out.weight.T.clone())


def bias_forgotten(name):
    def break_it(block, patch):
        block.get_submodule(name).bias.zero_()

    break_it.__name__ = f"bias_of_{name}_forgotten"
    return break_it


def gain_forgotten(block, patch):
    block.attention_norm.weight.fill_(1)


def exact_gelu(block, patch):
    block.mlp.activation = nn.GELU()


def no_activation(block, patch):
    block.mlp.activation = nn.Identity()


def unbiased_variance(block, patch):
    def forward(self, x):
        normal = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + self.eps)
        return normal * self.weight + self.bias

    patch.setattr(layers.LayerNorm, "forward", forward)


def epsilon_outside_the_root(block, patch):
    def forward(self, x):
        spread = x.var(-1, keepdim=True, correction=0).sqrt()
        return (x - x.mean(-1, keepdim=True)) / (spread + self.eps) * self.weight + self.bias

    patch.setattr(layers.LayerNorm, "forward", forward)


def another_epsilon(block, patch):
    block.attention_norm.eps = 1e-6


def norms_swapped(block, patch):
    block.attention_norm, block.mlp_norm = block.mlp_norm, block.attention_norm


def post_norm(block, patch):
    def forward(self, x, mask=None, positions=None, cache=None):
        x = self.attention_norm(x + self.attention(x, mask))
        return self.mlp_norm(x + self.mlp(x))

    patch.setattr(layers.Block, "forward", forward)


def no_residual(block, patch):
    def forward(self, x, mask=None, positions=None, cache=None):
        x = self.attention(self.attention_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))

    patch.setattr(layers.Block, "forward", forward)


def softmax_over_the_queries(block, patch):
    def attention(q, k, v, mask, scale):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~mask, -math.inf).softmax(dim=-2) @ v

    patch.setitem(layers.KERNELS, "naive", attention)


def mask_after_softmax(block, patch):
    def attention(q, k, v, mask, scale):
        return (layers.attention_weights(q, k) * mask) @ v

    patch.setitem(layers.KERNELS, "naive", attention)


ATTENTION_MISTAKES = [
    no_scale,
    scale_by_head_dim,
    split_by_reshape,
    heads_and_channels_swapped,
    merge_by_reshape,
    split_and_merge_by_reshape,
    qkv_in_another_order,
    qkv_read_head_by_head,
    square_projection_not_transposed,
    bias_forgotten("attention.qkv"),
    bias_forgotten("attention.out"),
    softmax_over_the_queries,
    mask_after_softmax,
]
MLP_MISTAKES = [exact_gelu, no_activation, bias_forgotten("mlp.up"), bias_forgotten("mlp.down")]
NORM_MISTAKES = [
    gain_forgotten,
    bias_forgotten("attention_norm"),
    unbiased_variance,
    epsilon_outside_the_root,
    another_epsilon,
    norms_swapped,
]
MISTAKES = (
    [(mistake, "attn") for mistake in ATTENTION_MISTAKES]
    + [(mistake, "mlp") for mistake in MLP_MISTAKES]
    + [(mistake, "ln_1") for mistake in NORM_MISTAKES]
    + [(post_norm, "block"), (no_residual, "block")]
)


@pytest.mark.parametrize("mistake,place", MISTAKES, ids=[m.__name__ for m, _ in MISTAKES])
def test_the_ruler_sees_the_mistake_where_it_is(mistake, place, monkeypatch):
    reference = reference_block()
    ours, mask = our_block(reference), layers.causal_mask(LENGTH)
    assert max(gaps(ours, reference, inputs(), mask).values()) <= TOLERANCE
    mistake(ours, monkeypatch)
    found = gaps(ours, reference, inputs(), mask)
    assert found[place] > TOLERANCE and found["block"] > TOLERANCE, found
    elsewhere = {"ln_1", "attn", "ln_2", "mlp"} - {place}
    if mistake not in (unbiased_variance, epsilon_outside_the_root, norms_swapped):
        assert all(found[name] <= TOLERANCE for name in elsewhere), found


@KERNELS
def test_the_ruler_sees_a_forgotten_mask(kernel):
    reference = reference_block()
    found = gaps(our_block(reference, kernel), reference, inputs(), mask=None)
    assert found["attn"] > TOLERANCE and found["block"] > TOLERANCE


def test_the_ruler_refuses_to_compare_nothing():
    for ours, theirs in [
        (torch.zeros(0, WIDTH), torch.zeros(0, WIDTH)),
        (torch.zeros(2), torch.zeros(2)),
        (torch.ones(2), torch.full((2,), math.nan)),
        (torch.ones(1, 2), torch.ones(2)),
    ]:
        with pytest.raises(AssertionError):
            gap(ours, theirs)
    assert gap(torch.full((2,), math.nan), torch.ones(2)) == math.inf


def upper_left(new, past=0, real=None):
    return torch.ones(new, past + new).tril().bool()[None, None]


def nothing_hidden(new, past=0, real=None):
    return torch.ones(1, 1, new, past + new).bool()


@pytest.mark.parametrize("wrong_mask", [upper_left, nothing_hidden])
@SPLITS
def test_a_chunk_on_a_past_sees_a_wrong_mask(wrong_mask, pieces):
    blocks = [our_block(reference_block(layer), "naive", layer) for layer in (0, 1)]

    def make_mask(new, past, real):
        """Right for the first chunk, wrong as soon as there is a past: the usual shape of the bug."""
        return wrong_mask(new, past) if past else layers.causal_mask(new)

    whole, chunked = (
        feed(blocks, inputs(), [LENGTH]),
        feed(blocks, inputs(), pieces, None, make_mask),
    )
    one_by_one = pieces[1:] == [1] * len(pieces[1:])
    if wrong_mask is nothing_hidden and one_by_one:  # a single token has no future to look at
        assert gap(chunked, whole) <= TOLERANCE
    else:
        assert gap(chunked, whole) > TOLERANCE


def test_padding_that_sees_nothing_poisons_the_real_tokens_in_the_second_block():
    blocks = [our_block(reference_block(layer), "naive", layer) for layer in (0, 1)]
    real = padded(6, LENGTH)
    hopeless = layers.causal_mask(LENGTH) & real[:, None, None, :]
    first = blocks[0](inputs(), hopeless)
    assert first[0, -6:].isfinite().all() and blocks[1](first, hopeless)[0].isnan().all()
    assert feed(blocks, inputs(), [LENGTH], real).isfinite().all()


# Naive and fused --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("new,past", [(10, 0), (3, 7), (1, 9)])
@pytest.mark.parametrize("lengths", [None, (10, 4, 1)])
def test_the_fused_kernel_equals_the_naive_one(new, past, lengths, scale):
    random = torch.Generator().manual_seed(3)
    q = torch.randn(3, HEADS, new, 8, generator=random)
    k, v = (torch.randn(3, HEADS, past + new, 8, generator=random) for _ in range(2))
    mask = layers.causal_mask(new, past, None if lengths is None else padded(*lengths))
    fused = layers.fused_attention(q, k, v, mask, scale)
    assert gap(fused, layers.attention(q, k, v, mask, scale)) <= TOLERANCE
    if 1 < new < past + new:
        trap = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        assert gap(trap, layers.attention(q, k, v, layers.causal_mask(new, past), scale)) > 0.1


def test_two_tokens_by_hand():
    """The chapter's table: scores 2 and 4, divided by √4, so shares 1 / (1 + e) and e / (1 + e)."""
    q = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]])[None, None]
    k = torch.tensor([[2.0, 0, 0, 0], [1, 1, 1, 1]])[None, None]
    v = torch.tensor([[10.0, 0, 0, 0], [0, 10, 0, 0]])[None, None]
    share = 1 / (1 + math.e)
    weights = layers.attention_weights(q, k, layers.causal_mask(2))
    torch.testing.assert_close(weights[0, 0], torch.tensor([[1, 0], [share, 1 - share]]))
    mixed = layers.attention(q, k, v, layers.causal_mask(2))[0, 0]
    expected = torch.tensor([[10, 0, 0, 0], [10 * share, 10 - 10 * share, 0, 0]])
    torch.testing.assert_close(mixed, expected)


# Mask and positions, against the sentence that defines them -------------------------------------


@pytest.mark.parametrize("new,past", [(1, 0), (10, 0), (4, 6), (1, 9)])
def test_the_mask_is_what_its_definition_says(new, past):
    real = torch.tensor([[i not in hidden for i in range(10)] for hidden in ((), (0, 1, 2), (4,))])
    real = real[:, : past + new]
    mask = layers.causal_mask(new, past, real)
    plain = layers.causal_mask(new, past)
    assert mask.dtype == plain.dtype == torch.bool
    assert mask.shape == (3, 1, new, past + new) and plain.shape == (1, 1, new, past + new)
    for i in range(new):
        for j in range(past + new):
            assert plain[0, 0, i, j] == (j <= past + i)
            for b in range(3):
                itself = j == past + i
                assert mask[b, 0, i, j] == (itself or (j <= past + i and bool(real[b, j])))
    assert mask.any(dim=-1).all()  # no row is empty, so no softmax is 0 / 0


def test_left_padding_sees_itself_only():
    mask = layers.causal_mask(LENGTH, padding_mask=padded(6))
    assert torch.equal(mask[0, 0, :4], torch.eye(LENGTH).bool()[:4])


def test_positions_count_the_rows_own_real_tokens():
    assert layers.position_ids(3).tolist() == [[0, 1, 2]]
    assert layers.position_ids(2, past_length=4).tolist() == [[4, 5]]
    real = padded(LENGTH, 4, 1)
    assert layers.position_ids(LENGTH, padding_mask=real)[1].tolist() == [0] * 6 + [0, 1, 2, 3]
    assert layers.position_ids(2, LENGTH - 2, real).tolist() == [[8, 9], [2, 3], [0, 0]]
    holes = torch.tensor([[True, False, True, True]])
    assert layers.position_ids(4, padding_mask=holes).tolist() == [[0, 0, 1, 2]]


# Sentences before the arithmetic ----------------------------------------------------------------

REFUSALS = {
    "heads": (lambda: layers.Attention(32, 5), "width of 32 cannot be split into 5 heads"),
    "no heads": (lambda: layers.Attention(32, 0), "cannot be split into 0 heads"),
    "split": (lambda: layers.split_heads(torch.zeros(1, 2, 8), 3), "width of 8 .* into 3 heads"),
    "kernel": (lambda: layers.Attention(32, 4, kernel="flash"), "'flash'.*naive, sdpa"),
    "activation": (lambda: layers.MLP(8, 8, "gelu_fast"), "'gelu_fast'.*gelu_new, .*silu"),
    "head_dim": (
        lambda: layers.attention(torch.zeros(1, 1, 2, 4), *[torch.zeros(1, 1, 2, 8)] * 2),
        "q has head_dim 4 but k has head_dim 8",
    ),
    "head_dim, fused": (
        lambda: layers.fused_attention(torch.zeros(1, 1, 2, 4), *[torch.zeros(1, 1, 2, 8)] * 2),
        "q has head_dim 4 but k has head_dim 8",
    ),
    "additive mask": (
        lambda: layers.fused_attention(*[torch.zeros(1, 1, 2, 4)] * 3, torch.zeros(2, 2)),
        "must be bool.*float32",
    ),
    "mask without the past": (
        lambda: layers.attention(
            torch.zeros(1, 1, 2, 4), *[torch.zeros(1, 1, 5, 4)] * 2, layers.causal_mask(2)
        ),
        r"\[1, 1, 2, 2\].*\[1, 1, 2, 5\].*causal_mask\(2, 3",
    ),
    "mask of another batch": (
        lambda: layers.attention(
            *[torch.zeros(2, 1, 3, 4)] * 3,
            layers.causal_mask(3, padding_mask=padded(3, 3, 3)[:, -3:]),
        ),
        r"\[3, 1, 3, 3\].*\[2, 1, 3, 3\]",
    ),
    "integer padding mask": (
        lambda: layers.causal_mask(3, padding_mask=torch.ones(1, 3, dtype=torch.long)),
        r"bool \[B, past \+ T\].*int64.*\.bool\(\)",
    ),
    "padding mask without the past": (
        lambda: layers.causal_mask(2, 3, torch.ones(1, 2).bool()),
        r"bool \[B, past \+ T\].* = 5 columns.*\[1, 2\]",
    ),
    "padding mask of one dimension": (
        lambda: layers.position_ids(3, 0, torch.ones(3).bool()),
        r"bool \[B, past \+ T\].*\[3\]",
    ),
    "picture": (
        lambda: plots.draw_matrices({"w": torch.ones(2, 3)}, ["a", "b"]),
        "2 queries and 2 keys",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_gets_a_sentence(case):
    call, sentence = REFUSALS[case]
    with pytest.raises(ValueError, match=sentence):
        call()


# Pictures ---------------------------------------------------------------------------------------


def test_a_picture_carries_its_tokens_and_numbers():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    weights = torch.tensor([[1, 0, 0], [0.25, 0.75, 0]])
    plots.draw_matrices({"left": weights, "right": weights > 0}, ["a", "b"], ["x", "y", "z"])
    left, right = plt.gcf().axes
    assert [t.get_text() for t in left.get_yticklabels()] == ["a", "b"]
    assert [t.get_text() for t in left.get_xticklabels()] == ["x", "y", "z"]
    assert (left.get_title(), right.get_title()) == ("left", "right")
    assert [t.get_text() for t in left.texts] == ["1.00", "0", "0", "0.25", "0.75", "0"]
    assert not right.texts
    assert [ax.get_xlabel() for ax in (left, right)] == ["key →"] * 2
    assert (left.get_ylabel(), right.get_ylabel()) == ("← query", "")
    plt.close("all")


def test_the_engine_runs_without_matplotlib():
    code = "import sys; import minillm.layers, minillm.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- Linear: three kernels, one formula


def kernels_used(monkeypatch, linear, x) -> list[str]:
    """Which of PyTorch's products a forward calls."""
    used, plain = [], torch.nn.functional.linear
    onednn, grouped = torch.ops.mkldnn._linear_pointwise, torch.baddbmm
    monkeypatch.setattr("torch.nn.functional.linear", lambda *a: used.append("plain") or plain(*a))
    monkeypatch.setattr("torch.baddbmm", lambda *a: used.append("groups") or grouped(*a))
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *a: used.append("onednn") or onednn(*a)
    )
    linear(x)
    monkeypatch.undo()
    return used


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 100])
@pytest.mark.parametrize("sizes", [(256, 768), (768, 257), (300, 250), (8, 24)])
def test_linear_is_the_formula_for_any_number_of_rows(sizes, rows, bias):
    generator = torch.Generator().manual_seed(rows)
    linear = layers.Linear(*sizes, bias=bias)
    x = torch.randn(rows, 2, sizes[0], generator=generator)
    for given in (x, x[:, :1], x.transpose(0, 1), x[:1, :1], x[:, 0]):  # also with other strides
        expected = given.double() @ linear.weight.double().T
        expected = expected + linear.bias.double() if bias else expected
        out = linear(given)  # without gradients
        assert out.shape == expected.shape and out.dtype == torch.float32
        assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
        with torch.enable_grad():
            again = linear(given)
        assert (again - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a PyTorch without oneDNN")
def test_linear_takes_the_kernel_that_suits_the_rows(monkeypatch):
    torch.set_num_threads(2)  # one alone has nothing to share out; the fixture puts it back
    big, small = layers.Linear(256, 256), layers.Linear(16, 16)
    with torch.inference_mode():
        assert kernels_used(monkeypatch, big, torch.ones(1, 1, 256)) == ["groups"]
        for several in (torch.ones(5, 1, 256), torch.ones(5, 256)):  # a batch, and its head
            assert kernels_used(monkeypatch, big, several) == ["onednn"]
        assert kernels_used(monkeypatch, big, torch.ones(1, 5, 256)) == ["plain"]  # a prompt
        assert kernels_used(monkeypatch, big, torch.ones(2, 5, 256)) == ["plain"]
        assert kernels_used(monkeypatch, small, torch.ones(5, 1, 16)) == ["plain"]
        half = layers.Linear(256, 256).bfloat16()
        assert kernels_used(monkeypatch, half, torch.ones(5, 1, 256).bfloat16()) == ["plain"]
    with torch.enable_grad():  # it can learn
        assert kernels_used(monkeypatch, big, torch.ones(5, 1, 256)) == ["plain"]
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    with torch.inference_mode():
        assert big(torch.ones(5, 1, 256)).isfinite().all()


def test_linear_learns_with_several_rows_and_with_one():
    for rows in (1, 5):
        linear = layers.Linear(256, 256)
        with torch.enable_grad():
            linear(torch.ones(rows, 256)).sum().backward()
        assert torch.equal(linear.weight.grad, torch.full((256, 256), float(rows)))


def test_a_padding_mask_may_lie_on_another_device():
    """`meta` stands for a GPU here: a mask made on the CPU would not meet it."""
    mask = torch.ones(2, 5, dtype=torch.bool, device="meta")
    assert layers.causal_mask(3, 2, mask).device.type == "meta"
    assert layers.position_ids(3, 2, mask).device.type == "meta"

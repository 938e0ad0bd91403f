"""Layers and models in codes, from outside: the right numbers by every way, the right bytes, one file."""

import copy
import json
import shutil
import subprocess
import sys
import warnings
from functools import cache as once
from types import SimpleNamespace

import pytest
import torch
from conftest import random_reference
from safetensors.torch import load_file, save_file
from test_llama import random_llama, real_weights
from torch import bfloat16, float32, nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

import minillm
from minillm import gpt2, llama, quantized_layers
from minillm.batching import generate_batch, pad_left
from minillm.generation import Request, generate
from minillm.gpt2 import GPT2, GPT2Config
from minillm.kv_cache import KVCache
from minillm.llama import Llama, LlamaConfig
from minillm.parity import compare_modules, where_texts_part
from minillm.quantization import load_quantized, quantize_, save_quantized
from minillm.quantized_layers import Int4Linear, Int8Linear, QuantizedEmbedding, QuantizedLinear
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.weights import resolve

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the int. kernel takes"),
]

FAMILIES = {
    "gpt2": (random_reference, GPT2, GPT2Config, gpt2.load_weights),
    "llama": (random_llama, Llama, LlamaConfig, llama.load_weights),
}
IDS = torch.tensor([[(31 * i * i + 17 * i + 5) % 97 for i in range(24)]])
EPS = 2.0**-8  # bf16 keeps 8 bits: two rounded numbers are this far apart at most, relatively


def random_pair(family: str, **fields):
    """transformers' model and ours on the same random weights."""
    make, model_class, config_class, fill = FAMILIES[family]
    reference = make(**fields)
    config = config_class.from_dict(json.loads(reference.config.to_json_string()))
    return reference, fill(model_class(config), reference.state_dict()).eval()


def random_model(family: str = "gpt2", **fields):
    return random_pair(family, **fields)[1]


def empty(model):
    """The same config on the meta device: shapes without memory."""
    with torch.device("meta"):
        return type(model)(model.config)


@torch.inference_mode()
def logits(model, ids=IDS) -> torch.Tensor:
    return model(ids)


def snapshot(model):
    """Copies of all that the model holds, under its name."""
    tensors = model.state_dict()
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_unchanged(model, before) -> None:
    after = model.state_dict()
    assert before and after.keys() == before.keys(), "other tensors than before"
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def noise(*shape, seed: int = 0, dtype=float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(width: int, rows: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(width, rows, bias=bias)
    layer.weight.data = noise(rows, width, seed=1) / width**0.5 + 0.02
    if bias:
        layer.bias.data = noise(rows, seed=2)
    return layer.requires_grad_(False)


def decoded(layer) -> torch.Tensor:
    """The layer's weights in double precision, from the tensors that go into a file."""
    parts = {name: tensor.clone() for name, tensor in layer.plain().items()}
    scales = parts["scales"].double()
    if "zeros" not in parts:
        return parts["codes"].double() * scales[:, None]
    packed = parts["codes"]
    codes = torch.stack([packed % 16, packed // 16], dim=-1).flatten(1)[:, : layer.in_features]
    size = layer.in_features // scales.shape[1]
    scales, zeros = (p.repeat_interleave(size, 1) for p in (scales, parts["zeros"].double()))
    return (codes.double() - 8) * scales + zeros


# ---- a layer ----------------------------------------------------------------------------------


def off_by(layer, x) -> float:
    """How far the layer is from x Wᵀ + b in double precision, relatively; each number is checked."""
    W = decoded(layer)
    b = 0 if layer.bias is None else layer.bias.double()
    exact = x.double() @ W.T + b
    y = layer(x)
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], layer.out_features) and y.numel()
    error = (y.double() - exact).abs()
    one_bit = EPS if x.dtype == bfloat16 else 1e-6
    bound = one_bit * (x.double().abs() @ W.abs().T + exact.abs() + abs(b) + 1e-6)
    assert (error <= bound).all(), f"{(error / bound).max():.2f} x the rounding"
    return (error.norm() / exact.norm()).item()


LAYERS = [  # bits, in, out
    *((8, width, rows) for width, rows in [(16, 1), (32, 7), (64, 16), (256, 33), (48, 5)]),
    *((4, width, rows) for width, rows in [(32, 1), (64, 7), (64, 16), (256, 33), (96, 80)]),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("bits", "width", "rows"), LAYERS)
def test_the_readable_way_and_the_kernel_are_the_same_product(bits, width, rows, bias, monkeypatch):
    """F.linear on the dequantized weights in fp32, and the kernel within bf16's own rounding."""
    plain = linear(width, rows, bias)
    readable = QuantizedLinear.from_linear(plain, bits, 32, float32)
    x = noise(5, width)
    assert torch.equal(
        readable(x), F.linear(x, readable.dequantize()) + (plain.bias if bias else 0)
    )
    assert off_by(readable, x) < 1e-6
    layer = QuantizedLinear.from_linear(plain, bits, 32, bfloat16)
    assert isinstance(layer, {8: Int8Linear, 4: Int4Linear}[bits]) and not layer.no_kernel
    monkeypatch.setattr(type(layer), "dequantize", None)  # the kernel needs none
    assert off_by(layer, x.bfloat16()) < EPS


@pytest.mark.parametrize("size", [64, 128, 256])
def test_the_int4_kernel_with_larger_groups(size):
    layer = QuantizedLinear.from_linear(linear(256, 24), 4, size, bfloat16)
    assert layer.in_kernel_order and layer.group_size == size
    assert off_by(layer, noise(3, 256, dtype=bfloat16)) < EPS


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_x_of_any_rank(bits, dtype):
    layer = QuantizedLinear.from_linear(linear(64, 10), bits, 32, dtype)
    x = noise(2, 3, 64, dtype=dtype)
    y = layer(x)
    assert y.shape == (2, 3, 10) and off_by(layer, x) < EPS
    noisy = 0 if dtype == bfloat16 else 1e-6  # F.linear has another way for one row
    assert torch.allclose(layer(x[1]), y[1], noisy, noisy)
    assert torch.allclose(layer(x[1, 2]), y[1, 2], noisy, noisy)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_x_that_is_not_in_one_piece(bits, dtype):
    layer = QuantizedLinear.from_linear(linear(64, 10), bits, 32, dtype)
    wide = noise(6, 2, 128, dtype=dtype)
    for x in (wide[:, :, ::2], wide[..., 64:], wide.transpose(0, 1)[..., :64], wide[::2, :, :64]):
        assert not x.is_contiguous()
        assert torch.equal(layer(x), layer(x.contiguous().clone())) and off_by(layer, x) < EPS
    one = wide[0, 0, :1].expand(3, 64)
    assert torch.equal(layer(one), layer(one.clone()))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows_at_all(bits, shape):
    """nn.Linear returns none."""
    layer = QuantizedLinear.from_linear(linear(64, 10), bits)
    assert layer(torch.zeros(shape)).shape == linear(64, 10)(torch.zeros(shape)).shape


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_x_of_another_width_is_refused(bits, dtype):
    layer = QuantizedLinear.from_linear(linear(64, 10), bits, 32, dtype)
    for shape in [(2, 32), (1, 128), (4, 16)]:
        with pytest.raises((ValueError, RuntimeError)):
            layer(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_follows_the_model_to_another_dtype(bits):
    """From fp32 to the kernels' bf16 and back, codes as they are."""
    plain = linear(64, 33)
    short = QuantizedLinear.from_linear(plain, bits, 32, bfloat16)
    codes, dtype = short.plain()["codes"], short.codes.dtype
    weights = decoded(short)
    wide = short.to(float32)
    assert wide.codes.dtype == dtype and torch.equal(wide.plain()["codes"], codes)
    assert torch.equal(decoded(wide), weights)
    assert off_by(wide, noise(3, 64)) < 1e-6
    from_fp32 = QuantizedLinear.from_linear(plain, bits, 32, float32).to(bfloat16)
    assert off_by(from_fp32, noise(3, 64, dtype=bfloat16)) < EPS


@pytest.mark.parametrize(("width", "rows"), [(32, 1), (64, 7), (256, 33), (96, 80), (512, 16)])
def test_the_kernels_own_order_comes_back_to_rows(width, rows):
    """Exactly: each of the 16 codes, and rows that the padding to 16 does not mix up."""
    dice = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (rows, width), dtype=torch.uint8, generator=dice)
    scales, zeros = noise(2, rows, width // 32).abs().bfloat16()
    layer = Int4Linear(codes, scales, zeros)
    assert layer.in_kernel_order and layer.codes.shape[0] % 16 == 0
    assert layer.codes.numel() == -(-rows // 16) * 16 * width // 2, "half a byte for each"
    assert torch.equal(layer.row_order(), codes) and layer.row_order().dtype == torch.uint8
    plain = layer.plain()
    assert torch.equal(plain["scales"], scales) and torch.equal(plain["zeros"], zeros)
    by_hand = codes[:, 0::2] + 16 * codes[:, 1::2]
    assert torch.equal(plain["codes"], by_hand)


FAIRYTALE_LAYERS = [(256, 768), (256, 256), (256, 1024), (1024, 256)]
ROWS = [(b, *shape) for b in (8, 4) for shape in [*FAIRYTALE_LAYERS, (768, 768)]]


@pytest.mark.parametrize(("bits", "width", "rows"), [*ROWS, (8, 256, 4096)])
def test_the_kernels_give_a_row_the_same_bits_in_any_company(bits, width, rows):
    """From 1 row to 16: a batch says what each of its rows says alone."""
    layer = QuantizedLinear.from_linear(linear(width, rows), bits, 32, bfloat16)
    assert layer.has_kernel(torch.device("cpu"), bfloat16)
    x = noise(16, width, dtype=bfloat16)
    alone = torch.cat([layer(row[None]) for row in x])
    assert len(alone.unique()) > 1000
    for n in range(1, 17):
        assert torch.equal(layer(x[:n]), alone[:n]), f"{n} rows together are not {n} alone"


# ---- where a kernel cannot run ----------------------------------------------------------------

HOSTILE = """
import torch
from torch.nn import functional as F
from minillm.quantized_layers import QuantizedLinear

torch.set_num_threads(1)
torch.manual_seed(0)

def misplaced(tensor):
    'The same numbers at an odd place of a storage.'
    storage = torch.zeros(tensor.numel() + 9, dtype=tensor.dtype)
    view = storage[1 : 1 + tensor.numel()].view(tensor.shape)
    assert view.data_ptr() % 64
    return view.copy_(tensor)

def check(name, layer, x):
    W, b = layer.dequantize().double(), layer.bias.double()
    exact = F.linear(x.double(), W, b)
    bound = x.double().abs() @ W.abs().T + b.abs() + exact.abs()
    worst = ((layer(x).double() - exact).abs() / bound).max().item()
    print(name, "right" if worst < 2**-8 else f"wrong by {worst:.3f}", flush=True)

"""
WIDTHS = """
for width in (30, 31, 40, 24):
    for rows in (1, 5):
        layer = QuantizedLinear.from_linear(torch.nn.Linear(width, rows), 8, 32, torch.bfloat16)
        assert layer.no_kernel == f"the int8 kernel takes rows that 16 divides, not {width}"
        for n in (1, 5):
            check(f"{width} {rows} {n}", layer, torch.randn(n, width).bfloat16())
"""
PLACES = """
for bits in (8, 4):
    for width, rows in ((256, 1), (64, 7), (1024, 2)):
        linear = torch.nn.Linear(width, rows)
        layer = QuantizedLinear.from_linear(linear, bits, 32, torch.bfloat16)
        assert not layer.no_kernel
        if bits == 8:
            layer = type(layer)(misplaced(layer.codes), misplaced(layer.scales), layer.bias)
        for n in (1, 5):
            x = misplaced(torch.randn(n, width).bfloat16())
            check(f"{bits} {width} {rows} {n}", layer, x)
"""
MOVED = """
layer = QuantizedLinear.from_linear(torch.nn.Linear(256, 1), 8, 32, torch.bfloat16)
parts = {name: misplaced(part) for name, part in layer.state_dict().items()}
layer.load_state_dict(parts, assign=True)
check("moved", layer, torch.randn(3, 256).bfloat16())
"""


def crash_course(script: str) -> list[str]:
    """What a process of its own prints: the kernel, where it cannot run, ends all of it."""
    command = [sys.executable, "-c", HOSTILE + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"crashed after {lines[-1:] or 'nothing'}: {done.stderr[-300:]}"
    return lines


def test_widths_that_would_crash_the_int8_kernel_and_tensors_at_odd_addresses():
    lines = crash_course(WIDTHS + PLACES)
    assert len(lines) == 4 * 2 * 2 + 2 * 3 * 2
    assert [line for line in lines if not line.endswith("right")] == []


def test_codes_that_are_moved_to_an_odd_address_afterwards():
    """As `load_state_dict(assign=True)` does with the views of a mapped file."""
    assert crash_course(MOVED) == ["moved right"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((8, 40), "the int8 kernel takes rows that 16 divides, not 40"),
        ((4, 48, 16), "the int4 kernel takes groups of 32, 64, 128 or 256, not 16"),
        ((4, 512, 512), "the int4 kernel takes groups of 32, 64, 128 or 256, not 512"),
        ((8, 48), ""),
        ((4, 64, 64), ""),
    ],
)
def test_the_reason_why_there_is_no_kernel(arguments, reason):
    assert quantized_layers.no_kernel(*arguments) == reason


def quantized(family="gpt2", bits=8, dtype=float32, group_size=16, skip=(), **fields):
    """A random model of ours in codes."""
    return quantize_(random_model(family, **fields), bits, group_size, skip, dtype)


@pytest.mark.parametrize(
    ("bits", "name"), [(8, "_weight_int8pack_mm"), (4, "_weight_int4pack_mm_for_cpu")]
)
def test_a_pytorch_without_the_kernels_runs_the_readable_way(monkeypatch, bits, name):
    with_kernels = quantized(bits=bits, dtype=bfloat16, group_size=32)
    monkeypatch.setattr(quantized_layers, "kernels", SimpleNamespace())
    with pytest.warns(UserWarning) as seen:
        model = quantized(bits=bits, dtype=bfloat16, group_size=32)
    said = [str(warning.message) for warning in seen]
    assert any(f"has no {name}: " in text and "dequantized in every call" in text for text in said)
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 9 and all(not m.has_kernel(torch.device("cpu"), bfloat16) for m in layers)
    for layer in layers:
        assert off_by(layer, noise(3, layer.in_features, dtype=bfloat16)) < EPS
    readable = logits(model)
    monkeypatch.undo()
    given = logits(with_kernels).float()
    assert (given - readable.float()).norm() / given.norm() < 10 * EPS


def test_quantize_warns_once_for_each_reason_and_not_in_fp32():
    with pytest.warns(UserWarning) as seen:
        quantized(bits=4, dtype=bfloat16, n_embd=40, n_head=5, group_size=8)
    assert sorted(str(warning.message) for warning in seen) == [
        "the int4 kernel takes groups of 32, 64, 128 or 256, not 8: weights are dequantized in "
        "every call of blocks.0.attention.qkv, blocks.0.attention.out, blocks.0.mlp.up and 5 more",
        "the int8 kernel takes rows that 16 divides, not 40: weights are dequantized in every "
        "call of token_embedding",
    ]
    assert {warning.filename for warning in seen} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized(bits=4, n_embd=40, n_head=5, group_size=8)
        quantized(bits=8, dtype=bfloat16)


# ---- a model in codes -------------------------------------------------------------------------


def layers_of(model) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantize_changes_the_model_that_it_is_given(family, bits):
    model = random_model(family)
    same = quantize_(model, bits, 16)
    assert same is model
    layers = layers_of(model)
    blocks = {name: layer for name, layer in layers.items() if name.startswith("blocks.")}
    assert len(blocks) == 8 and len(layers) == (9 if model.config.tie_word_embeddings else 10)
    kind = {8: Int8Linear, 4: Int4Linear}[bits]
    assert all(isinstance(layer, kind) for layer in blocks.values())
    assert isinstance(model.lm_head, Int8Linear), "the head has 8 bits always"
    assert isinstance(model.token_embedding, QuantizedEmbedding)
    assert isinstance(model.token_embedding.table, Int8Linear)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    left = dict(model.named_parameters())
    assert all("norm" in name or name == "position_embedding.weight" for name in left)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_rounding_is_refused(family):
    for skip in ((), ["blocks.0", "token_embedding", "lm_head"]):
        model = quantized(family, 8, skip=skip)
        before = snapshot(model)
        for bits in (8, 4):
            with pytest.raises(ValueError, match="quantized already.*load it again"):
                quantize_(model, bits)
        assert_unchanged(model, before)


SKIPS = {  # what is named -> how many of the 9 layers of a tied GPT-2 are left in codes
    "blocks.0.mlp.down": 8,
    "mlp.down": 7,
    "mlp": 5,
    "down": 7,
    "blocks.0": 5,
    "blocks.1.attention": 7,
    "blocks": 1,
    "lm_head": 8,
    "token_embedding": 8,
}


@pytest.mark.parametrize("part", SKIPS)
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_skipped_stays_as_it_was(part, bits):
    """Bit for bit, and the whole table where one of its two names is given."""
    model = random_model()
    before = snapshot(model)
    quantize_(model, bits, 16, skip=part)
    layers = layers_of(model)
    assert len(layers) == SKIPS[part] and not any(f".{part}." in f".{n}." for n in layers)
    names = [name for name in model.state_dict() if name in before]
    kept = [name for name in names if f".{part}." in f".{name}"]
    assert kept and all(torch.equal(model.state_dict()[name], before[name]) for name in kept)
    table = part in ("lm_head", "token_embedding")
    assert isinstance(model.token_embedding, nn.Embedding) == table
    if table:
        assert model.lm_head.weight is model.token_embedding.weight
        assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
    assert logits(model).isfinite().all()


def test_block_1_is_not_block_10():
    layers = layers_of(quantized(n_layer=11, skip="blocks.1"))
    assert len(layers) == 41 and "blocks.10.mlp.up" in layers and "blocks.1.mlp.up" not in layers


def test_several_parts_are_skipped_and_untied_tables_one_by_one():
    model = quantized(skip=["mlp.down", "blocks.1"])
    assert sorted(layers_of(model)) == [
        "blocks.0.attention.out",
        "blocks.0.attention.qkv",
        "blocks.0.mlp.up",
        "token_embedding.table",
    ]
    model = random_model(tie_word_embeddings=False)
    head = model.lm_head.weight.clone()
    quantize_(model, skip="lm_head")
    assert isinstance(model.token_embedding, QuantizedEmbedding)
    assert torch.equal(model.lm_head.weight, head)
    model = quantized(tie_word_embeddings=False, skip=["token_embedding"])
    assert isinstance(model.lm_head, Int8Linear) and isinstance(model.token_embedding, nn.Embedding)


@pytest.mark.parametrize("part", ["wte", "mlp.dow", "blocks.2", "position_embedding", "", "MLP"])
def test_a_name_that_no_layer_has_is_refused(part):
    model = random_model()
    before = snapshot(model)
    for skip in (part, ["mlp.down", part]):
        with pytest.raises(ValueError, match=f"skip names '{part}'.*token_embedding, blocks.0"):
            quantize_(model, skip=skip)
    assert_unchanged(model, before)


@pytest.mark.parametrize("bits", [16, 0, "8", None, True, 2.5])
def test_other_bits_are_refused(bits):
    model = random_model()
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"bits is {bits!r}, expected 8 or 4"):
        quantize_(model, bits)
    assert_unchanged(model, before)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["blocks.1.mlp.down", "token_embedding", "blocks.0.attention.qkv"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nan_in_one_weight_is_refused_with_the_layers_name(bits, name, value):
    model = random_model()
    model.get_submodule(name).weight.data[3, 5] = float(value)
    modules = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=f"^{name}: the weights hold NaN or infinity"):
        quantize_(model, bits)
    assert [type(module) for module in model.modules()] == modules
    assert quantize_(model, bits, skip=[name]) is model


@pytest.mark.parametrize("size", [24, 0, True, 64])
def test_a_group_that_does_not_divide_is_refused_with_the_layers_name(size):
    model = random_model()
    before = snapshot(model)
    with pytest.raises(ValueError, match="^blocks.0.attention.qkv: rows of 32 .* groups of"):
        quantize_(model, 4, size)
    assert_unchanged(model, before)
    assert len(layers_of(quantize_(model, 8, size))) == 9, "8 bits have no groups"


def test_the_last_layer_is_looked_at_before_the_first_changes():
    """Rows of 32 fit everywhere but in the way down, which has 40."""
    model = random_model(n_inner=40)
    before = snapshot(model)
    with pytest.raises(ValueError, match="^blocks.0.mlp.down: rows of 40"):
        quantize_(model, 4, 32)
    assert_unchanged(model, before)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8])
def test_a_dtype_that_is_none_is_refused(dtype):
    model = random_model()
    before = snapshot(model)
    with pytest.raises(ValueError, match="dtype"):
        quantize_(model, dtype=dtype)
    assert_unchanged(model, before)


def test_a_model_without_weights_is_refused_in_a_sentence():
    with pytest.raises(ValueError):
        quantize_(empty(random_model()))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [float32, bfloat16, None])
def test_all_else_gets_the_dtype(bits, dtype):
    model = random_model().to(bfloat16) if dtype is None else random_model()
    quantize_(model, bits, 32, dtype=dtype)
    kept = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    assert len(kept) > 20 and {tensor.dtype for tensor in kept} == {dtype or bfloat16}
    assert logits(model).dtype == (dtype or bfloat16)
    assert KVCache.for_model(model, 4).keys[0].dtype == (dtype or bfloat16)


# ---- the table, and the bytes -----------------------------------------------------------------


def stored_bytes(model) -> int:
    """The bytes of all tensors, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


CHANGES = {
    "as it is": lambda model: model,
    "to bf16": lambda model: model.to(bfloat16),
    "to fp32 and back": lambda model: model.to(bfloat16).to(float32),
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tied_table_is_stored_once(family, change):
    model = change(quantized(family, tie_word_embeddings=True))
    table = model.token_embedding.table
    assert table is model.lm_head and table.codes.dtype == torch.int8
    alone = [t for n, t in model.state_dict().items() if "lm_head" not in n]
    assert stored_bytes(model) == sum(t.numel() * t.element_size() for t in alone)
    dtype = next(model.parameters()).dtype
    everything = table.dequantize()
    assert everything.shape == (97, 32) and everything.dtype == dtype
    rows = model.token_embedding(torch.tensor([[5, 1], [96, 0]]))
    assert torch.equal(rows, everything[[5, 1, 96, 0]].view(2, 2, 32))
    head = model.lm_head(torch.eye(32, dtype=dtype)).T  # the head's rows, one column at a time
    assert torch.allclose(head, everything, rtol=EPS if dtype == bfloat16 else 1e-6)


def test_untied_tables_are_two():
    reference, model = random_pair("gpt2", tie_word_embeddings=False)
    quantize_(model)
    assert model.token_embedding.table is not model.lm_head
    for table, name in (
        (model.token_embedding.table, "transformer.wte.weight"),
        (model.lm_head, "lm_head.weight"),
    ):
        weight = reference.state_dict()[name]
        step = weight.abs().amax(1, keepdim=True) / 127
        assert ((table.dequantize() - weight).abs() <= 0.501 * step).all()


def bytes_on_paper(config, bits: int) -> int:
    """Codes, and in bf16: scales (zeros too in 4 bits, each for 32), biases, norms, positions."""
    D, V, P, L = config.n_embd, config.vocab_size, config.n_positions, config.n_layer
    inner = config.n_inner or 4 * D
    weights = D * 3 * D + D * D + 2 * D * inner
    outs = 3 * D + D + inner + D
    block = weights + 2 * outs if bits == 8 else weights // 2 + 2 * 2 * weights // 32
    block += 2 * outs + 2 * 4 * D  # biases, two norms
    return V * D + 2 * V + 2 * P * D + L * block + 2 * 2 * D


def bytes_in_fp32(config) -> int:
    D, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    block = D * 3 * D + D * D + 2 * D * inner + 3 * D + D + inner + D + 4 * D
    tables = config.vocab_size + config.n_positions
    return 4 * (tables * D + config.n_layer * block + 2 * D)


@once
def fairytale() -> GPT2:
    return GPT2.from_pretrained("fairytale")


@once
def fairytale_in(bits: int | None) -> GPT2:
    """fairytale on bf16's kernels; plain bf16 for None."""
    model = copy.deepcopy(fairytale())
    return quantize_(model, bits, dtype=bfloat16) if bits else model.to(bfloat16)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.30), (4, 0.20)])
def test_the_bytes_are_those_on_paper(bits, most):
    """Counted in fairytale's tensors; GPT-2's own shape (124M) by the formula that this confirms."""
    config = fairytale().config
    assert stored_bytes(fairytale()) == bytes_in_fp32(config)
    assert stored_bytes(fairytale_in(bits)) == bytes_on_paper(config, bits)
    assert bytes_on_paper(config, bits) / bytes_in_fp32(config) <= most
    assert bytes_in_fp32(GPT2Config()) == 4 * 124_439_808
    ratio = bytes_on_paper(GPT2Config(), bits) / bytes_in_fp32(GPT2Config())
    assert most - 0.05 < ratio <= most


# ---- one file ---------------------------------------------------------------------------------

SHAPES = [(family, tied) for family in FAMILIES for tied in (True, False)]


@pytest.mark.parametrize(("family", "tied"), SHAPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [float32, bfloat16])
@pytest.mark.parametrize("skip", [(), ["lm_head"], ["blocks.0", "token_embedding"]], ids=str)
def test_a_file_gives_the_same_logits(tmp_path, family, tied, bits, dtype, skip):
    """Into a model without memory, and into one of other weights and another dtype."""
    fields = {"tie_word_embeddings": tied} | ({"attention_bias": True} if family == "llama" else {})
    model = quantized(family, bits, dtype, 32, skip, **fields)
    expected = logits(model)
    save_quantized(model, tmp_path / "q.safetensors")
    assert torch.equal(logits(model), expected), "saving changed the model"
    other = random_model(family, seed=9, **fields)
    for target in (empty(model), other):
        loaded = load_quantized(target, tmp_path / "q.safetensors")
        assert loaded is target and torch.equal(logits(loaded), expected)
        assert {t.dtype for t in loaded.parameters()} == {dtype}
        assert stored_bytes(loaded) == stored_bytes(model)
        assert layers_of(loaded).keys() == layers_of(model).keys()
        if tied and skip:
            assert loaded.lm_head.weight is loaded.token_embedding.weight
        elif tied:
            assert loaded.lm_head is loaded.token_embedding.table


@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_the_file_is_plain_to_read(tmp_path, dtype):
    """Codes row by row, two to a byte, whatever order the kernel likes; worked out here again."""
    reference, model = random_pair("gpt2")
    quantize_(model, 4, 32, dtype=dtype)
    save_quantized(model, tmp_path / "q.safetensors")
    file = load_file(tmp_path / "q.safetensors")
    assert not any("lm_head" in name for name in file), "the tied table stands there twice"
    assert file["token_embedding.table.codes"].dtype == torch.int8
    packed = file["blocks.1.mlp.down.codes"]
    assert packed.dtype == torch.uint8 and packed.shape == (32, 64)
    assert file["blocks.1.mlp.down.bias"].dtype == dtype
    codes = torch.stack([packed % 16, packed // 16], dim=-1).view(32, 4, 32).double()
    scales = file["blocks.1.mlp.down.scales"].double()[..., None]
    zeros = file["blocks.1.mlp.down.zeros"].double()[..., None]
    weight = reference.state_dict()["transformer.h.1.mlp.c_proj.weight"].T.reshape(32, 4, 32)
    off = ((codes - 8) * scales + zeros - weight).abs()
    assert (off <= 0.53 * scales).all() and off.max() > 0


def saved(tmp_path, model, bits=8, **options):
    path = tmp_path / "q.safetensors"
    save_quantized(quantize_(model, bits, **options), path)
    return path


OTHERS = {  # what was saved, where it is to go, what the sentence says
    "more layers": ({"n_layer": 3}, {}, "blocks.2.* no layer of its own there"),
    "fewer layers": ({"n_layer": 1}, {}, "missing blocks.1"),
    "another width": ({"n_embd": 64}, {}, "file holds .* this model has .*config is another one"),
    "another vocabulary": ({"vocab_size": 64}, {}, r"\[64, 32\].* this model has .*\[97, 32\]"),
    "other positions": ({"n_positions": 32}, {}, "position_embedding.weight should be .*64, 32"),
    "narrower inside": ({"n_inner": 64}, {}, "mlp.*config is another one"),
    "a tied head": ({}, {"tie_word_embeddings": False}, "missing lm_head.weight"),
}


@pytest.mark.parametrize(("one", "other", "message"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_file_of_another_config_is_refused(tmp_path, one, other, message, bits):
    path = saved(tmp_path, random_model(**one), bits)
    with pytest.raises(ValueError, match=message):
        load_quantized(random_model(**other), path)


def test_the_file_of_another_family_is_refused(tmp_path):
    path = saved(tmp_path, random_model("llama"))
    with pytest.raises(ValueError, match=r"config is another one|no layer of its own"):
        load_quantized(random_model("gpt2"), path)


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "another width"])
def test_a_refused_file_leaves_the_model_as_it_was(tmp_path, name):
    one, other, message = OTHERS[name]
    path = saved(tmp_path, random_model(**one))
    model = random_model(**other)
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load_quantized(model, path)
    assert_unchanged(model, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_its_own_is_not_dropped_for_a_tied_one(tmp_path, family):
    """The file's lm_head is put in place, and then overwritten by the table."""
    path = saved(tmp_path, random_model(family, tie_word_embeddings=False))
    with pytest.raises(ValueError, match="lm_head"):
        load_quantized(random_model(family, tie_word_embeddings=True), path)


@pytest.mark.parametrize("in_file", [True, False])
def test_biases_that_only_one_of_the_two_has_are_refused(tmp_path, in_file):
    path = saved(tmp_path, random_model("llama", attention_bias=in_file))
    with pytest.raises(ValueError, match="bias"):
        load_quantized(random_model("llama", attention_bias=not in_file), path)


@pytest.mark.parametrize("part", ["scales", "zeros", "bias"])
def test_scales_zeros_and_biases_of_another_length_are_refused(tmp_path, part):
    path = saved(tmp_path, random_model(), 4)
    tensors = load_file(path)
    name = f"blocks.0.mlp.up.{part}"
    tensors[name] = tensors[name][:1].clone()  # one row's, or one number, for 128
    save_file(tensors, path)
    with pytest.raises(ValueError, match="blocks.0.mlp.up"):
        load_quantized(random_model(), path)


def test_codes_without_scales_are_refused(tmp_path):
    path = saved(tmp_path, random_model())
    tensors = load_file(path)
    del tensors["blocks.0.mlp.up.scales"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match="blocks.0.mlp.up"):
        load_quantized(random_model(), path)


def test_a_broken_file_and_a_plain_one_are_refused_before_anything_changes(tmp_path):
    model = random_model()
    before = snapshot(model)
    path = saved(tmp_path, random_model())
    whole = path.read_bytes()
    for cut, message in ((len(whole) // 2, "not a complete"), (20, "not a complete"), (0, "empty")):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=f"q.safetensors is {message}"):
            load_quantized(model, path)
    save_file({name: tensor.clone() for name, tensor in before.items()}, path)
    for plain in (path, resolve("fairytale") / "model.safetensors"):
        with pytest.raises(ValueError, match="holds no codes: save_quantized did not write it"):
            load_quantized(model, plain)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_quantized(model, tmp_path / "nowhere")
    assert_unchanged(model, before)


def test_a_model_that_is_in_codes_already_is_refused(tmp_path):
    path = saved(tmp_path, random_model())
    model = quantized(bits=4)
    before = snapshot(model)
    with pytest.raises(ValueError, match="an unquantized model of the same config"):
        load_quantized(model, path)
    assert_unchanged(model, before)


def test_a_model_without_codes_is_not_saved(tmp_path):
    with pytest.raises(ValueError):
        save_quantized(random_model(), tmp_path / "q.safetensors")


# ---- every way the same, and transformers' ----------------------------------------------------

RANDOM = {"gpt2": {"seed": 4, "n_positions": 128}, "llama": {"seed": 25}}
PROMPTS = [[42], [5, 1, 88, 3], [(7 * i * i + 3 * i + 1) % 96 for i in range(9)], IDS[0].tolist()]
STEPS = 45


def put_back(reference, model) -> int:
    """Put the weights that the codes stand for into transformers' model; how many matrices."""
    state, done = reference.state_dict(), 0
    module = gpt2 if isinstance(model, GPT2) else llama
    names = module.checkpoint_names(model.config)
    prefix = "transformer." if module is gpt2 else "model."
    for name, layer in layers_of(model).items():
        name = name.removesuffix(".table")
        theirs = names.get(name, name)
        theirs = [theirs] if isinstance(theirs, str) else theirs
        theirs = [("" if t == "lm_head" else prefix) + t + ".weight" for t in theirs]
        weight = layer.dequantize()
        if name.split(".", 2)[-1] in gpt2.CONV1D and module is gpt2:
            weight = weight.T
        parts = weight.split([state[t].shape[0] for t in theirs]) if len(theirs) > 1 else [weight]
        for their, part in zip(theirs, parts, strict=True):
            assert state[their].shape == part.shape and not torch.equal(state[their], part)
            state[their] = part.clone()
            done += 1
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state[
            f"{prefix}{'wte' if module is gpt2 else 'embed_tokens'}.weight"
        ]
    reference.load_state_dict(state)
    return done


def request(model, prompt, steps=STEPS) -> Request:
    params = SamplingParams(max_new_tokens=steps)
    return Request(prompt, params, context=model.config.context_length)


def whole(model) -> list[list[int]]:
    return [list(generate(model, request(model, prompt))) for prompt in PROMPTS]


def cached(model, size: int = 100) -> list[list[int]]:
    """The loop with a cache that the prompt, but its last token, went into in pieces."""
    texts = []
    for prompt in PROMPTS:
        own = request(model, prompt)
        cache = KVCache.for_model(model, own.max_length)
        for piece in torch.tensor([prompt[:-1]]).long().split(size, dim=1):
            if piece.numel():
                with torch.inference_mode():
                    model.hidden_states(piece, cache=cache)
        texts.append(list(generate(model, own, cache)))
        assert cache.length == len(prompt) + STEPS - 1
    return texts


def batched(model) -> list[list[int]]:
    rows = [request(model, prompt) for prompt in PROMPTS]
    for _ in generate_batch(model, rows):
        pass
    return [row.token_ids for row in rows]


WAYS = {"whole": whole, "cached": cached, "chunked": lambda m: cached(m, 4), "batched": batched}


@once
def coded_pair(family: str, bits: int):
    """A random model in codes, and transformers' with the weights that these stand for."""
    reference, model = random_pair(family, **RANDOM[family])
    quantize_(model, bits, 16)
    assert put_back(reference, model) == (9 if family == "gpt2" else 16)
    return reference, model


@once
def expected_texts(family: str, bits: int) -> list[list[int]]:
    reference, _ = coded_pair(family, bits)
    options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        texts.append(out[0, len(prompt) :].tolist())
    distinct = [len(set(text)) for text in texts]
    assert min(distinct) >= 20, f"only {distinct} distinct tokens: this proves little"
    return texts


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_gives_transformers_greedy_text_on_the_same_weights(family, bits, way):
    reference, model = coded_pair(family, bits)
    texts, expected = WAYS[way](model), expected_texts(family, bits)
    assert [len(text) for text in texts] == [STEPS] * 4
    for prompt, text, theirs in zip(PROMPTS, texts, expected, strict=True):
        assert text == theirs, where_texts_part(reference, prompt, text, theirs)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_sub_module_equals_transformers_on_the_same_weights(family, bits):
    reference, model = coded_pair(family, bits)
    points = {"gpt2": gpt2, "llama": llama}[family].reference_points(model.config)
    rows = compare_modules(model, reference, points, IDS, show=False)
    assert len(rows) == {"gpt2": 24, "llama": 31}[family]


def test_the_codes_change_the_text():
    """Else the tests above would hold for a model that nobody quantized."""
    plain = whole(random_model(**RANDOM["gpt2"]))
    assert plain != expected_texts("gpt2", 8) != expected_texts("gpt2", 4)


# ---- on the kernels ---------------------------------------------------------------------------


@once
def tales() -> tuple[list[int], ...]:
    """Six passages of the held-out tales, of different lengths."""
    text = (resolve("fairytale") / "held_out.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_pretrained("fairytale").encode(text, allowed_special="all")
    assert ids.count(4095) == 3
    lengths = 300, 97, 256, 180, 133, 250
    starts = [sum(lengths[:n]) for n in range(6)]
    return tuple(ids[start : start + n] for start, n in zip(starts, lengths, strict=True))


@torch.inference_mode()
def choices(model, way: str) -> torch.Tensor:
    """The likeliest next token at every position of the tales."""
    rows, ids = [], [torch.tensor([tale]) for tale in tales()]
    if way == "batched":
        padded, mask = pad_left(tales())
        assert not mask.all()
        return model(padded, padding_mask=mask).argmax(-1)[mask]
    for tale in ids:
        cache = None if way == "whole" else KVCache.for_model(model, tale.shape[1])
        pieces = tale.split(tale.shape[1] if way == "whole" else 7, dim=1)
        rows.append(torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)[0].argmax(-1))
    return torch.cat(rows)


@pytest.mark.parametrize("bits", [None, 8, 4], ids=["bf16", "int8", "int4"])
def test_on_the_kernels_every_way_chooses_nearly_always_the_same(bits):
    """bf16 keeps 8 bits, so near ties fall both ways; plain bf16 shows how many that makes."""
    model = fairytale_in(bits)
    layers = layers_of(model).values()
    assert all(layer.has_kernel(torch.device("cpu"), bfloat16) for layer in layers)
    assert len(layers) == (25 if bits else 0)
    expected = choices(model, "whole")
    assert len(expected) == sum(map(len, tales())) >= 1000 and len(expected.unique()) > 100
    same = {way: choices(model, way) == expected for way in ("chunked", "batched")}
    agreement = {way: equal.float().mean().item() for way, equal in same.items()}
    print(f"{bits or 'bf16'}: " + ", ".join(f"{way} {a:.2%}" for way, a in agreement.items()))
    assert all(equal.shape == expected.shape for equal in same.values())
    assert min(agreement.values()) >= 0.97


# ---- LLM(quantize=...) ------------------------------------------------------------------------

STORY = "Once upon a time there was a king who"


@once
def engine(quantize: str, dtype: str | None = None) -> minillm.LLM:
    return minillm.LLM("fairytale", quantize=quantize, dtype=dtype)


@pytest.mark.parametrize("name", ["int3", "INT8", "", 8, 4, True, ["int8"], b"int8"])
def test_an_unknown_kind_of_codes_is_refused_with_the_names(name):
    with pytest.raises(ValueError, match="quantize is .*, expected 'int8', 'int4' or None"):
        minillm.LLM("fairytale", quantize=name)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_bf16_and_the_kernels_are_the_default(name, bits):
    model = engine(name).model
    layers = layers_of(model)
    assert len(layers) == 25 and {t.dtype for t in model.parameters()} == {bfloat16}
    assert all(layer.has_kernel(torch.device("cpu"), bfloat16) for layer in layers.values())
    assert isinstance(layers["blocks.0.mlp.up"], {8: Int8Linear, 4: Int4Linear}[bits])
    cache = KVCache.for_model(model, 8)
    logits(model, IDS[:, :8])
    with torch.inference_mode():
        model(IDS[:, :8], cache=cache)
    assert cache.length == 8 and cache.keys[0].dtype == cache.values[5].dtype == bfloat16


@pytest.mark.parametrize("dtype", ["float32", None])
def test_the_codes_are_made_of_the_exact_weights(dtype):
    """Half a step from the file's numbers; weights that went through bf16 would be farther away."""
    file = load_file(resolve("fairytale") / "model.safetensors")
    names = {name.removeprefix("transformer."): name for name in file}
    layer = layers_of(engine("int8", dtype).model)["blocks.2.mlp.up"]
    weight = file[names["h.2.mlp.c_fc.weight"]].T.double()
    step = layer.scales.double()[:, None]
    assert ((layer.codes.double() * step - weight).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_fp32_is_the_readable_way_and_transformers_text(name):
    """On fairytale itself, from text to text."""
    llm = engine(name, "float32")
    assert {t.dtype for t in llm.model.parameters()} == {float32}
    reference = GPT2LMHeadModel.from_pretrained(resolve("fairytale"), dtype=float32).eval()
    assert put_back(reference, llm.model) == 25
    done = llm.generate(STORY, max_new_tokens=30)
    ids = torch.tensor([done.prompt_token_ids])
    options = {"max_new_tokens": 30, "do_sample": False}
    with torch.inference_mode():
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
    expected = out[0, ids.shape[1] :].tolist()
    assert done.token_ids == expected and len(set(expected)) > 10
    assert KVCache.for_model(llm.model, 4).keys[0].dtype == float32


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_generate_stream_and_a_batch(name):
    llm = engine(name)
    prompts = [STORY, "The old woman", [5], STORY]
    done = llm.generate(prompts, max_new_tokens=25)
    assert [len(d.token_ids) for d in done] == [25] * 4
    assert done[0].token_ids == done[3].token_ids, "two equal rows of a batch differ"
    alone = llm.generate(STORY, max_new_tokens=25)
    assert "".join(llm.stream(STORY, max_new_tokens=25)) == alone.text and len(alone.text) > 60
    assert alone.finish_reason == "length"
    sampled = [llm.generate(STORY, temperature=1.0, seed=3, max_new_tokens=15) for _ in range(2)]
    assert sampled[0] == sampled[1] != alone


def test_chat_on_codes(tmp_path):
    """fairytale with a template of its own: the answer continues the conversation's ids."""
    folder = tmp_path / "chatty"
    shutil.copytree(resolve("fairytale"), folder)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}king:"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    llm = minillm.LLM(folder, quantize="int8")
    messages = [{"role": "miller", "content": "My daughter can spin straw into gold."}]
    done = llm.chat(messages, max_new_tokens=12)
    text = "miller: My daughter can spin straw into gold.\nking:"
    assert done.prompt_token_ids == llm.tokenizer.encode(text) and len(done.token_ids) == 12
    assert done == llm.generate(text, max_new_tokens=12)


def test_smollm2_answers_in_int8():
    """Real weights of the other family, through the door that people use."""
    real_weights()
    llm = minillm.LLM("smollm2", quantize="int8")
    done = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=12
    )
    assert "Paris" in done.text


def test_float16_is_refused_before_anything_is_loaded(monkeypatch):
    """Its range is too short for scales; a large model would be read for nothing."""
    monkeypatch.setattr("minillm.llm.resolve", lambda name: pytest.fail("it looks for the model"))
    with pytest.raises(ValueError, match="the scales of a quantized model need the range"):
        minillm.LLM("fairytale", quantize="int8", dtype="float16")

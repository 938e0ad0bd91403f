"""The codes from outside: half a step at most, the same as gguf's and torch's, two of them in a byte."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from test_llama import real_weights
from torch import bfloat16, float32

from minillm.codes import (
    dequantize_int4,
    dequantize_int8,
    pack,
    quantize_int4,
    quantize_int8,
    unpack,
)
from minillm.gguf import open_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

NOISE = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
MEANS = torch.linspace(-30, 30, 500)[:, None]
TINY = torch.finfo(float32).tiny
WEIGHTS = {
    "random": NOISE,
    "all positive": NOISE.abs() + 0.1,
    "all negative": -NOISE.abs() - 0.1,
    "constant": torch.full((3, 64), 0.1),
    "constant, negative": torch.full((3, 64), -3.3),
    "1.0 ± 0.001": 1 + 0.001 * NOISE.clamp(-1, 1),
    "1.0, many widths": 1 + NOISE * torch.logspace(-4, 2, 500)[:, None],
    "100 ± 1": 100 + NOISE,
    "many means": NOISE + MEANS,
    "outliers": torch.where(NOISE > 2.5, 40 * NOISE, NOISE),
    "huge": 1e30 * NOISE,
    "small": 1e-6 * NOISE,
    "very small": 1e-34 * NOISE,
}


def cases():
    """Names of WEIGHTS and the scales' dtype."""
    both = [(name, dtype) for name in WEIGHTS for dtype in (float32, bfloat16)]
    return [
        pytest.param(*case, id=f"{case[0]}, {end}")
        for case in both
        for end in [str(case[1]).split(".")[1]]
    ]


def half_a_step(given, weight, step) -> None:
    """Each weight's error, in double precision, is at most half of its own step."""
    assert given.shape == weight.shape and given.numel() > 0 and given.isfinite().all()
    error = (given - weight.double()).abs()
    noise = 2.0**-23 * weight.double().abs()  # what the fp32 of step and zero can hide
    worst = ((error - noise) / step).max().item()
    assert worst <= 0.5 + 1e-6, f"an error of {worst:.3f} steps"


# ---- 8 bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_int8_is_off_by_half_a_step_at_most(name, dtype):
    weight = WEIGHTS[name]
    codes, scales = quantize_int8(weight, dtype)
    assert codes.dtype == torch.int8 and codes.shape == weight.shape
    assert scales.dtype == dtype and scales.shape == weight.shape[:1]
    assert codes.min() >= -127, "the code -128 has no counterpart"
    step = scales.double()[:, None]  # [out, 1]
    half_a_step(codes.double() * step, weight, step)
    largest = weight.double().abs().amax(1) / 127
    rounding = 1e-6 if dtype == float32 else 2**-8
    assert torch.allclose(scales.double(), largest, rtol=rounding, atol=0), "the steps are too wide"
    given = dequantize_int8(codes, scales)
    assert given.dtype == dtype
    assert torch.allclose(given.double(), codes.double() * step, rtol=rounding, atol=0)


def test_int8_equals_torchs_own_rounding():
    """torch's fake quantization on the same symmetric range, with scales that numpy found."""
    for weight in (NOISE, WEIGHTS["all positive"], WEIGHTS["outliers"]):
        scales = torch.from_numpy(np.abs(weight.numpy()).max(axis=1) / np.float32(127))
        zeros = torch.zeros(len(weight), dtype=torch.int32)
        theirs = torch.fake_quantize_per_channel_affine(weight, scales, zeros, 0, -127, 127)
        codes, ours = quantize_int8(weight)
        assert torch.equal(ours, scales)
        given = dequantize_int8(codes, ours)
        other = given != theirs
        # torch multiplies with 1 / scale: at an exact half the last bit may decide
        assert other.float().mean() < 1e-3
        place = weight[other].double() / scales[:, None].expand_as(weight)[other].double()
        assert torch.allclose(place.abs() % 1, torch.tensor(0.5).double(), atol=1e-4)


def test_int8_equals_ggufs_q8_0():
    """Rows of 32 numbers are its blocks: a scale in two bytes, then 32 codes."""
    rows = NOISE.reshape(-1, 32)
    blocks = torch.from_numpy(quants.quantize(rows.numpy(), Kind.Q8_0))  # [n, 34]
    assert torch.equal(quantize_int8(rows)[0], blocks[:, 2:].contiguous().view(torch.int8))


def test_a_row_of_whole_steps_survives_in_int8():
    codes, scales = quantize_int8(0.5 * torch.arange(-127, 128)[None])
    assert codes[0].tolist() == list(range(-127, 128)) and scales.tolist() == [0.5]


def test_each_row_has_its_own_scale():
    codes, scales = quantize_int8(torch.tensor([[127.0, -1], [2, -254], [0, 0.127]]))
    assert codes.tolist() == [[127, -1], [1, -127], [0, 127]]
    assert scales.tolist() == pytest.approx([1, 2, 0.001])


# ---- 4 bits ---------------------------------------------------------------------------------


def grouped(codes, scales, zeros):
    """What the codes stand for, worked out in double precision, and each weight's step."""
    size = codes.shape[1] // scales.shape[1]
    scales, zeros = (part.double().repeat_interleave(size, dim=1) for part in (scales, zeros))
    return (codes.double() - 8) * scales + zeros, scales


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(),
)
def test_int4_is_off_by_half_a_step_at_most(name, dtype, size):
    weight = WEIGHTS[name]
    codes, scales, zeros = quantize_int4(weight, size, dtype)
    assert codes.dtype == torch.uint8 and codes.shape == weight.shape and codes.max() <= 15
    assert scales.dtype == zeros.dtype == dtype
    assert scales.shape == zeros.shape == (len(weight), 64 // size)
    given, steps = grouped(codes, scales, zeros)
    if name.startswith("constant") and dtype == float32:
        assert torch.equal(given, weight.double())  # a step of 0
        return
    half_a_step(given, weight, steps)


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_the_steps_of_int4_are_as_narrow_as_they_can_be(name, dtype):
    """A fifteenth of the group's range, and what the rounded zero of bf16 costs."""
    weight = WEIGHTS[name].double()
    codes, scales, zeros = quantize_int4(WEIGHTS[name], 32, dtype)
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1), groups.amax(-1)
    rounding = (0, 1e-6) if dtype == float32 else (zeros.double().abs() * 2**-8 / 7.5, 0.02)
    assert (scales.double() <= (1 + rounding[1]) * ((high - low) / 15 + rounding[0])).all()
    given, steps = grouped(codes, scales, zeros)
    dequantized = dequantize_int4(codes, scales, zeros)
    assert dequantized.dtype == dtype
    last_bit = 2.0**-22 if dtype == float32 else 2.0**-8
    near = last_bit * (given.abs() + 8 * steps)
    assert ((dequantized.double() - given).abs() <= near).all()


def test_the_row_of_minus_8_to_7_tenths_survives_in_its_codes():
    row = torch.arange(-8, 8)[None] * 0.1
    codes, scales, zeros = quantize_int4(row, 16)
    assert codes[0].tolist() == list(range(16))
    assert scales.item() == pytest.approx(0.1) and zeros.item() == pytest.approx(0, abs=1e-7)
    assert torch.allclose(dequantize_int4(codes, scales, zeros), row, rtol=0, atol=1e-7)
    codes, scales, zeros = quantize_int4(5 * row + 40, 16)
    assert codes[0].tolist() == list(range(16))
    assert (scales.item(), zeros.item()) == pytest.approx((0.5, 40))


def test_int4_equals_ggufs_q4_1():
    """Groups of 32 are its blocks: a step and the least in two bytes each, then 16 bytes of codes."""
    for weight in (NOISE, WEIGHTS["all negative"], WEIGHTS["outliers"]):
        blocks = torch.from_numpy(quants.quantize(weight.numpy(), Kind.Q4_1)).view(500, 2, 20)
        theirs = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], dim=-1).flatten(1)
        codes, scales, zeros = quantize_int4(weight)
        assert torch.equal(codes, theirs)
        step, least = blocks[..., :4].contiguous().view(torch.float16).double().unbind(-1)
        assert torch.allclose(scales.double(), step, rtol=2**-10)
        assert torch.allclose(zeros.double() - 8 * scales.double(), least, rtol=2**-10, atol=1e-5)


def test_smollm2s_file_goes_through_codes_and_back_bit_for_bit():
    """Its Q4_1 tensors are 16 steps of a group, its Q8_0 table is 255 of 32 neighbors."""
    stored = {tensor.name: tensor for tensor in open_gguf(real_weights()).tensors}
    names = ["blk.0.attn_k", "blk.0.attn_v", "blk.15.attn_q", "blk.29.attn_output", "blk.7.ffn_up"]
    for name in names:
        tensor = stored[f"{name}.weight"]
        assert tensor.tensor_type == Kind.Q4_1
        numbers = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type))
        codes, scales, zeros = quantize_int4(numbers)
        assert numbers.numel() >= 192 * 576 and len(codes.unique()) == 16
        assert torch.equal(dequantize_int4(codes, scales, zeros), numbers)
    table = stored["token_embd.weight"]
    assert table.tensor_type == Kind.Q8_0
    numbers = torch.from_numpy(quants.dequantize(table.data[:500], table.tensor_type))
    blocks = numbers.reshape(-1, 32)
    assert len(blocks) == 500 * 18
    assert torch.equal(dequantize_int8(*quantize_int8(blocks)), blocks)


# ---- what no scale fits -----------------------------------------------------------------------


def through(weight, bits, dtype=float32):
    """The weights after the codes, and their codes and scales."""
    parts = quantize_int8(weight, dtype) if bits == 8 else quantize_int4(weight, 16, dtype)
    return (dequantize_int8 if bits == 8 else dequantize_int4)(*parts), *parts[:2]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_zero_rows_stay_exact_zeros(bits, dtype):
    weight = NOISE[:4].clone()
    weight[1] = 0
    weight[3, 16:32] = 0
    given, _, scales = through(weight, bits, dtype)
    assert given[1].tolist() == [0] * 64 and given[3, 16:32].tolist() == [0] * 16
    assert given.isfinite().all() and scales.isfinite().all() and given[0].any()
    zeros = torch.zeros(2, 32)
    assert torch.equal(through(zeros, bits, dtype)[0].float(), zeros)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [float32, bfloat16])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-40, 1e-38, 1e-37])
def test_scales_that_are_too_small_to_store_become_zero(bits, dtype, size):
    weight = (size * NOISE[:, :32]).clamp(-2 * size, 2 * size)
    given, _, scales = through(weight, bits, dtype)
    assert given.isfinite().all()
    assert ((scales == 0) | (scales >= TINY)).all(), "a scale that flushes to zero"
    assert (given.double() - weight.double()).abs().max() <= 127 * TINY
    assert given.abs().max() <= 4 * size


@pytest.mark.parametrize("bits", [8, 4])
def test_the_scales_of_small_fp16_weights_are_computed_in_fp32(bits):
    """1e-6 / 127 is 0 in fp16."""
    weight = (1e-6 * NOISE[:, :32]).half()
    given, codes, scales = through(weight, bits)
    rows = weight.double() if bits == 8 else weight.double().unflatten(1, (-1, 16))
    extent = rows.abs().amax(-1) / 127 if bits == 8 else (rows.amax(-1) - rows.amin(-1)) / 15
    assert torch.allclose(scales.double(), extent, rtol=1e-6, atol=0) and scales.min() > 0
    assert codes.max() == (127 if bits == 8 else 15)
    step = scales[:, None] if bits == 8 else scales.repeat_interleave(16, dim=1)
    half_a_step(given.double(), weight, step.double())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [bfloat16, torch.float16, torch.float64])
def test_short_and_long_weights_give_the_codes_of_their_fp32(bits, dtype):
    weight = NOISE[:5].to(dtype)
    for one, other in zip(through(weight, bits), through(weight.float(), bits), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("bits", "dtype"), [(4, float32), (4, bfloat16), (8, bfloat16)])
def test_the_largest_numbers_come_back_finite_or_are_refused(bits, dtype):
    weight = 3.4e38 * NOISE.clamp(-1, 1)
    try:
        given, _, _ = through(weight, bits, dtype)
    except ValueError:
        return
    assert given.isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-6, 1e30])
def test_fp16_scales_hold_half_a_step_or_are_refused(bits, size):
    try:
        given, _, _ = through(size * NOISE, bits, torch.float16)
    except ValueError:
        return
    step = size * NOISE.abs().amax(1, keepdim=True) / (127 if bits == 8 else 7.5)
    assert ((given.float() - size * NOISE).abs() <= 0.6 * step).all()


REFUSED = {
    "NaN": (torch.tensor([[1.0, float("nan")] * 16]), "NaN or infinity"),
    "infinity": (torch.tensor([[1.0, float("inf")] * 16]), "NaN or infinity"),
    "minus infinity": (torch.tensor([[1.0, -float("inf")] * 16]), "NaN or infinity"),
    "too large for fp32": (torch.full((1, 32), 1e300, dtype=torch.float64), "NaN or infinity"),
    "a row": (torch.ones(32), r"matrix .* \[out, in\], got torch.float32 of shape \[32\]"),
    "three dimensions": (torch.ones(1, 1, 32), r"matrix .* shape \[1, 1, 32\]"),
    "whole numbers": (torch.ones(1, 32, dtype=torch.int8), "floating point .* got torch.int8"),
    "bools": (torch.ones(1, 32, dtype=torch.bool), "floating point .* got torch.bool"),
    "no rows": (torch.ones(0, 32), r"shape \[0, 32\]"),
    "no columns": (torch.ones(2, 0), r"shape \[2, 0\]"),
}


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
@pytest.mark.parametrize(("weight", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_scale_fits_is_refused(quantize, weight, message):
    with pytest.raises(ValueError, match=message):
        quantize(weight)


@pytest.mark.parametrize("size", [24, 0, -1, -32, True, 2.5, 32.0, 128, None, "32"])
def test_a_group_size_that_does_not_divide_the_row_is_named(size):
    with pytest.raises(ValueError, match=f"rows of 64 .* groups of {size!r}: .* divides 64"):
        quantize_int4(NOISE, size)


# ---- two codes in a byte ----------------------------------------------------------------------


def test_the_first_code_is_in_the_low_half():
    codes = torch.tensor([1, 2, 15, 0, 0, 15, 7], dtype=torch.uint8)
    on_paper = torch.tensor([0x21, 0x0F, 0xF0, 0x07], dtype=torch.uint8)
    assert torch.equal(pack(codes), on_paper)
    assert torch.equal(unpack(on_paper, 7), codes)


def test_all_16_codes_survive_in_both_halves():
    every = torch.arange(16, dtype=torch.uint8)
    pairs = torch.cartesian_prod(every, every)  # [256, 2]
    packed = pack(pairs)
    assert packed.dtype == torch.uint8 and packed.shape == (256, 1)
    assert sorted(packed.flatten().tolist()) == list(range(256)), "a byte for each pair"
    assert torch.equal(unpack(packed, 2), pairs)


@pytest.mark.parametrize("shape", [(7,), (8,), (1,), (3, 5), (2, 3, 9), (2, 3, 4), (0, 5), (4, 0)])
def test_rows_of_any_length_and_batch_come_back(shape):
    dice = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=dice)
    packed = pack(codes)
    assert packed.shape == (*shape[:-1], -(-shape[-1] // 2))
    back = unpack(packed, shape[-1])
    assert back.dtype == torch.uint8 and torch.equal(back, codes)


@pytest.mark.parametrize(
    "codes",
    [
        torch.tensor([3, 16], dtype=torch.uint8),
        torch.tensor([255], dtype=torch.uint8),
        torch.tensor([3, 4], dtype=torch.int8),
        torch.tensor([3, 4]),
        torch.tensor([3.0, 4.0]),
        torch.tensor([True]),
    ],
    ids=str,
)
def test_pack_takes_half_bytes_alone(codes):
    with pytest.raises(ValueError, match="codes from 0 to 15, as uint8"):
        pack(codes)


@pytest.mark.parametrize(
    ("packed", "width"),
    [
        (torch.tensor([-1], dtype=torch.int8), 2),
        (torch.tensor([1000]), 2),
        (torch.tensor([17], dtype=torch.uint8), 9),
    ],
    ids=["int8", "int64", "too wide"],
)
def test_unpack_takes_bytes_that_hold_the_row(packed, width):
    with pytest.raises(ValueError):
        unpack(packed, width)

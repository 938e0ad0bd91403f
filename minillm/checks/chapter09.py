"""The exercises of chapter 9: int8 rows, half bytes, groups, and what a weight costs."""

import math
from functools import partial

import torch

from ..codes import dequantize_int4, dequantize_int8, pack, quantize_int4, quantize_int8, unpack
from .exercise import Exercise, Mistake, as_tensor, same


def random(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers that are the same on every run, without touching the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fits(given, expected, arguments) -> bool:
    """The sign of the last mistakes: whatever is left and has the right shape."""
    return isinstance(expected, torch.Tensor) and as_tensor(given).shape == expected.shape


FLOATS, WIDE = "floating point numbers", "integers of more than 8 bits"


def kind(tensor: torch.Tensor) -> str:
    """What the numbers are, where the size of each matters."""
    if tensor.is_floating_point():
        return FLOATS
    return {torch.int8: "int8", torch.uint8: "uint8"}.get(tensor.dtype, WIDE)


def of_kind(wanted: str):
    """A view: the result as it is, or in words what its numbers are instead."""

    def view(result, *arguments):
        right = not isinstance(result, torch.Tensor) or kind(result) == wanted
        return result if right else kind(result)

    return view


def came_back(reason, wrong, sign=None):
    """A mistake in a round trip, shown on the weight that comes back worst."""

    def says(given, expected, arguments):
        weight, yours, right = arguments[0], as_tensor(given), as_tensor(expected)
        gap = (yours - right).abs().nan_to_num(nan=math.inf)
        row, column = divmod(int(gap.argmax()), weight.shape[1])
        before, yours, right = (x[row, column].item() for x in (weight, yours, right))
        return (
            f"the weight {before:.4g} in row {row}, column {column} should come back as "
            f"{right:.4g}, yours comes back as {yours:.4g}: {reason}"
        )

    return Mistake(says, wrong, sign)


# ---- quantize_rows --------------------------------------------------------------------------


def row_weights(result, weight):
    """The weights that codes and scales stand for, or in words what stands there instead."""
    if isinstance(result, torch.Tensor):
        return f"{kind(result)} and no scales"
    codes, scales = result
    if codes.dim() < 2 <= scales.dim():
        return "the scales first"
    if kind(codes) != "int8":
        return f"codes that are {kind(codes)}"
    of_rows = scales.dim() == 1 and len(scales) == len(codes)
    weights = codes.double() * (scales[:, None] if of_rows else scales)
    if scales.shape == (len(codes), 1) and same(weights, dequantize_int8(*quantize_int8(weight))):
        return "the right scales, as a column"
    return weights


def by_rows(
    weight, *, dim=1, top=None, steps=127, rounding=torch.round, ends=(-127, 127), store=None
):
    """Codes and scales with the screws that people turn by mistake."""
    scales = (top(weight) if top else weight.abs().amax(dim, keepdim=True)) / steps
    codes = rounding(weight / scales.where(scales != 0, 1))
    codes = codes.clamp(*ends) if ends else codes
    scales = scales.flatten() if dim == 1 else scales  # [out, 1] -> [out]
    return store(codes, scales) if store else (codes.long().to(torch.int8), scales)


def toward_zero(given, expected, arguments):
    """The sign of codes that were cut off: each weight nearer to 0, by less than a step."""
    if not fits(given, expected, arguments):
        return False
    weight, given = arguments[0].double(), as_tensor(given)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    nearer = given.abs() <= weight.abs() + 0.001 * step
    return bool((nearer & ((weight - given).abs() <= 1.001 * step)).all())


def row(reason, sign=None, **screws):
    return came_back(reason, partial(by_rows, **screws), sign)


def both_ends(reason, **screws):
    """The same mistake with codes that are cut off at the ends of int8, and with codes that are not."""
    return [row(reason, ends=ends, **screws) for ends in ((-127, 127), None)]


def stored(says, store):
    return Mistake(says, partial(by_rows, store=store))


quantize_rows = Exercise(
    name="quantize_rows",
    reference=quantize_int8,
    view=row_weights,
    cases=(
        (torch.tensor([[0.503, -1.27, 0.254, 0.0], [0.306, 0.027, 2.54, -0.117]]),),
        (random(0, 3, 8) * torch.tensor([[0.02], [1.0], [5.0]]),),
        (torch.cat([random(1, 2, 6), torch.zeros(1, 6)]),),  # a row of nothing
    ),
    mistakes=(
        Mistake(
            "only the codes came back, and nobody can read them without scales: return both",
            lambda weight: quantize_int8(weight)[0],
        ),
        Mistake(
            "only the weights came back, rounded: return what is stored, codes, scales",
            lambda weight: dequantize_int8(*quantize_int8(weight)),
        ),
        stored("the codes come first, then the scales", lambda c, s: (s, c.to(torch.int8))),
        stored(
            "your codes are floating point numbers, and nothing has become smaller: round them, "
            "then convert with .to(torch.int8)",
            lambda codes, scales: (codes, scales),
        ),
        stored(
            "your codes are uint8, which has no negative numbers: a code from -127 to 127 is int8",
            lambda codes, scales: (codes.to(torch.uint8), scales),
        ),
        stored(
            "your codes are integers of more than 8 bits: the numbers may be right, but the memory "
            "is not saved. Convert them with .to(torch.int8)",
            lambda codes, scales: (codes.int(), scales),
        ),
        stored(
            "your scales are a column, [out, 1]. One number for each row is [out]: take the last "
            "dimension away when you return them",
            lambda codes, scales: (codes.to(torch.int8), scales[:, None]),
        ),
        row("your scales are those of the columns. Each row has one, so take dim=1", dim=0),
        row("this is one scale for the whole matrix, and each row has its own", dim=(0, 1)),
        row(
            "your codes are cut off, not rounded: round before .to(torch.int8)",
            toward_zero,
            rounding=torch.trunc,
        ),
        row("floor rounds down always. Round to the nearest code", rounding=torch.floor),
        row(
            "the largest code is 127, so divide by 127. By 128 the largest weight gets code 128, "
            "and int8 makes -128 of it",
            steps=128,
            ends=None,
        ),
        *(
            row(
                "divide by 127. Your scale is for 128 steps, and a code above 127 is cut off",
                steps=128,
                ends=ends,
            )
            for ends in ((-127, 127), (-128, 127))
        ),
        row("divide the largest magnitude by 127: it should get code 127, and yours 1", steps=1),
        *both_ends(
            "255 is too many steps. A row reaches to both sides of 0, with 127 steps on each",
            steps=255,
        ),
        *both_ends(
            "take the largest magnitude, weight.abs(), not the largest number: a negative "
            "weight may be farther from 0",
            top=lambda weight: weight.amax(1, keepdim=True),
        ),
        *both_ends(
            "a scale of (max - min) / 255 is for codes with a zero of their own. Here 0 is "
            "code 0, so the scale is max|x| / 127",
            top=lambda weight: weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True),
            steps=255,
        ),
        came_back(
            "you return what you multiply with to get codes. The scale leads back: "
            "weight ≈ code · scale, so it is max|x| / 127",
            partial(by_rows, store=lambda c, s: (c.to(torch.int8), 1 / s.where(s != 0, 1))),
        ),
        came_back(  # and whatever else comes back
            "a row's scale is its max|x| / 127, and a code is weight / scale, rounded",
            partial(by_rows, steps=63),
            fits,
        ),
    ),
    right="a quarter of the bytes of fp32, and no weight moves by more than half a step of its row",
)

# ---- pack_nibbles ---------------------------------------------------------------------------


def hexes(row) -> str:
    return " ".join(f"{int(byte) & 255:02x}" for byte in row)


def numbers(row) -> str:
    return " ".join(f"{int(number)}" for number in row)


def wrong_row(given, expected, arguments):
    """The first row that differs: what came in, what should come out, what does."""
    n = int((as_tensor(given) != as_tensor(expected)).any(dim=1).nonzero()[0])
    return arguments[0][n], expected[n], as_tensor(given)[n]


def packed(reason, wrong, sign=None):
    """A mistake in the bytes: `wrong` gets the first code of each pair, and the second."""

    def says(*case):
        codes, right, yours = wrong_row(*case)
        return (
            f"the codes {numbers(codes)} should become the bytes {hexes(right)} (in hex), yours "
            f"are {hexes(yours)}: {reason}"
        )

    return Mistake(says, lambda codes: wrong(codes[:, 0::2], codes[:, 1::2]), sign)


def side_by_side(first, second):
    """The first half of each row, and the second."""
    return torch.stack([first, second], dim=-1).flatten(1).chunk(2, dim=1)


def far(first, second):
    low, high = side_by_side(first, second)
    return low | high << 4


def far_swapped(first, second):
    low, high = side_by_side(first, second)
    return high | low << 4


def bytes_of(*rows):
    """The arguments of a case."""
    return (torch.tensor(rows, dtype=torch.uint8),)


pack_nibbles = Exercise(
    name="pack_nibbles",
    reference=pack,
    view=of_kind("uint8"),
    cases=(
        bytes_of([1, 2, 3, 4], [0, 15, 15, 0]),
        bytes_of([7, 9, 12, 5, 8, 10], [15, 15, 1, 6, 0, 11]),
        bytes_of([3, 8], [14, 13], [0, 0], [6, 7]),
    ),
    mistakes=(
        packed(
            "the halves are the wrong way round. The first code of a pair goes in the low half",
            lambda first, second: second | first << 4,
        ),
        packed(
            "this is GGUF's order: the first half of the codes in the low halves, the rest in the "
            "high. Here the two codes of a byte are neighbors",
            far,
        ),
        packed(
            "the first half of the codes went into the high halves, the rest into the low. "
            "Here the two codes of a byte are neighbors",
            far_swapped,
        ),
        packed(
            "you add the two codes as they are. The second belongs in the high half: << 4",
            lambda first, second: first + second,
        ),
        packed(
            "+ comes before << in Python, so both codes were shifted: first + (second << 4), or |",
            lambda first, second: first + second << 4,
        ),
        packed(
            "the two codes lie on top of each other. The second belongs in the high half: << 4",
            lambda first, second: first | second,
        ),
        packed(
            "the second code of each pair is lost. Shifted by 8, or to the right, it falls out of "
            "the byte: << 4",
            lambda first, second: first,
        ),
        packed(
            "the first code of each pair is lost: it belongs in the low half",
            lambda first, second: second << 4,
        ),
        *(
            packed(
                f"you shift by {bits}, and half a byte has 4 bits",
                lambda first, second, bits=bits: first | second << bits,
            )
            for bits in (3, 5)
        ),
        packed(
            "& keeps the bits that both halves have, and that is none: join them with |",
            lambda first, second: first & second << 4,
        ),
        packed(
            "the second code counts 16 times, not 15: from 0 to 15 there are 16 codes",
            lambda first, second: first + 15 * second,
        ),
        packed(
            "the second code counts 16 times, not 10: half a byte is one digit in hex",
            lambda first, second: first + 10 * second,
        ),
        Mistake(
            "your bytes are integers of more than 8 bits, and nothing has become smaller: keep "
            "them in uint8",
            lambda codes: pack(codes).long(),
        ),
        Mistake(
            "your bytes are floating point numbers: keep them in uint8, and use << or //, not /",
            lambda codes: pack(codes).float(),
        ),
        Mistake(
            "your bytes are int8, and from 128 on they are negative there: keep them in uint8",
            lambda codes: pack(codes).to(torch.int8),
        ),
        Mistake(
            "nothing is packed: there are as many bytes as codes, and it should be half of them",
            lambda codes: codes,
        ),
        Mistake(
            "you pack two rows into one. The pairs are neighbors in a row: codes[..., 0::2] and "
            "codes[..., 1::2]",
            lambda codes: codes[0::2] | codes[1::2] << 4,
        ),
        Mistake(
            "the bytes are right, but the rows are gone: [out, n] should become [out, n/2]",
            lambda codes: pack(codes).flatten(),
        ),
        packed(  # and any other bytes
            "a byte is the first code of a pair plus 16 times the second",
            lambda first, second: pack(torch.cat([second, first], dim=1)),
            fits,
        ),
    ),
    right="two codes to a byte, and a matrix of 4-bit codes is half the size",
)


# ---- unpack_steps ---------------------------------------------------------------------------


def steps_reference(packed):
    return unpack(packed, 2 * packed.shape[-1]).to(torch.int8) - 8


def interleaved(low, high):
    return torch.stack([low, high], dim=-1).flatten(-2)


def unpacked(reason, low=None, high=None, join=interleaved, code=lambda c: c - 8, sign=None):
    """A mistake in the steps, with the screws that people turn by mistake."""

    def says(*case):
        row, right, yours = wrong_row(*case)
        return (
            f"the bytes {hexes(row)} (in hex) hold the steps {numbers(right)}, yours are "
            f"{numbers(yours)}: {reason}"
        )

    def wrong(packed):
        byte = packed.int()
        parts = [low(byte) if low else byte & 15, high(byte) if high else byte >> 4]
        return code(join(*parts)).to(torch.int8)

    return Mistake(says, wrong, sign)


unpack_steps = Exercise(
    name="unpack_steps",
    reference=steps_reference,
    view=of_kind("int8"),
    cases=(
        bytes_of([0x98, 0xBA], [0x21, 0x7F]),
        bytes_of([0xF0, 0x8C, 0x17], [0x3A, 0xE5, 0x68]),
        (torch.arange(256, dtype=torch.uint8).view(128, 2),),  # every byte
    ),
    mistakes=(
        unpacked("these are the codes from 0 to 15. A step is code - 8", code=lambda code: code),
        unpacked(
            "you read the half bytes as two's complement, where 8 to 15 stand for -8 to -1. "
            "Here code 8 stands for 0: a step is code - 8",
            code=lambda code: code - 16 * (code > 7),
        ),
        unpacked("code 8 is step 0, not code 7", code=lambda code: code - 7),
        unpacked("the sign is turned round: a step is code - 8", code=lambda code: 8 - code),
        Mistake(
            "your steps are uint8, which has no negative numbers: 3 - 8 becomes 251 there. "
            "Convert with .to(torch.int8) before you take 8 away",
            lambda packed: unpack(packed, 2 * packed.shape[-1]) - 8,
        ),
        Mistake(
            "your steps are integers of more than 8 bits: one byte is enough, .to(torch.int8)",
            lambda packed: steps_reference(packed).int(),
        ),
        Mistake(
            "your steps are floating point numbers. Steps are whole: use & and >>, and int8",
            lambda packed: steps_reference(packed).float(),
        ),
        unpacked(
            "the high half still sits on your low half. Mask it away: byte & 15", low=lambda b: b
        ),
        unpacked(
            "your mask is 7, which is three bits. Half a byte is four: byte & 15",
            low=lambda byte: byte & 7,
        ),
        unpacked(
            "the low half is the rest by 16, not by 15: byte & 15, or byte % 16",
            low=lambda byte: byte % 15,
        ),
        unpacked(
            "your high half is masked, but it must move down as well: byte >> 4",
            high=lambda byte: byte & 240,
        ),
        unpacked("16 divides the halves, not 15: byte >> 4, or byte // 16", high=lambda b: b // 15),
        unpacked("you shift by 3, and half a byte has 4 bits", high=lambda byte: byte >> 3),
        unpacked(
            "the high halves have a sign too many. In int8 a byte from 128 on is negative, and >> "
            "drags the sign along: shift while it is uint8",
            high=lambda byte: byte.to(torch.int8).int() >> 4,
        ),
        unpacked(
            "the high half comes out first, and the first code stands in the low half",
            join=lambda low, high: interleaved(high, low),
        ),
        unpacked(
            "all low halves, then all high halves: that is GGUF's order. Here the codes of a byte "
            "are neighbors: stack them, then flatten",
            join=lambda low, high: torch.cat([low, high], dim=-1),
        ),
        unpacked("both codes of your bytes are the low half", high=lambda byte: byte & 15),
        Mistake(
            "each byte's two steps have a dimension of their own: flatten the last two, "
            "[out, n, 2] -> [out, 2n]",
            lambda packed: steps_reference(packed).unflatten(-1, (-1, 2)),
        ),
        Mistake(
            "only the low halves came back: a byte holds two steps",
            lambda packed: steps_reference(packed)[:, 0::2],
        ),
        Mistake(
            "only the high halves came back: a byte holds two steps",
            lambda packed: steps_reference(packed)[:, 1::2],
        ),
        unpacked(  # and any other steps
            "byte & 15 is the first code of a byte, byte >> 4 the second, and a step is code - 8",
            code=lambda code: code - 9,
            sign=fits,
        ),
    ),
    right="a step times the group's scale, plus its zero, is the weight again",
)

# ---- round_groups ---------------------------------------------------------------------------


class Refusing(Exercise):
    """An exercise in which some arguments must be refused: there the result is an error's name."""

    def _run(self, function, arguments):
        weight, size = arguments
        if weight.shape[1] % size == 0:
            return super()._run(function, arguments)
        try:
            return super()._run(function, arguments)
        except NotImplementedError:
            raise
        except Exception as error:
            return type(error).__name__

    def _recognise(self, mistake, results, wrong):
        """The numbers first. What should be refused counts only where all of them are right."""
        in_numbers = [result for result in wrong if not isinstance(result[1], str)]
        if in_numbers:
            results = [result for result in results if not isinstance(result[1], str)]
        return super()._recognise(mistake, results, in_numbers or wrong)


def groups_reference(weight, size):
    """The chapter's own way there and back."""
    return dequantize_int4(*quantize_int4(weight, size))


def levels(x, *, steps=15, last=15, rounding=torch.round, low=None, base=None, hole=1):
    """x [..., n] on sixteen values, with the screws that people turn by mistake."""
    low = x.amin(-1, keepdim=True) if low is None else low
    scales = (x.amax(-1, keepdim=True) - low) / steps
    codes = rounding((x - low) / scales.where(scales != 0, hole)).clamp(0, last)
    return codes * scales + (low if base is None else base)


def symmetric(x):
    scales = x.abs().amax(-1, keepdim=True) / 7
    return (x / scales.where(scales != 0, 1)).round().clamp(-8, 7) * scales


def neighbors(weight, size, change):
    """Change the groups of neighbors in each row."""
    if weight.shape[1] % size:
        raise ValueError
    return change(weight.unflatten(1, (-1, size))).flatten(1)


def strided(weight, size, change):
    """Change the groups of numbers that stand a step apart."""
    if weight.shape[1] % size:
        raise ValueError
    return change(weight.unflatten(1, (size, -1)).mT).mT.flatten(1)


def group(reason, cut=neighbors, change=None, **screws):
    """A mistake in the groups, or in what happens inside each."""
    change = change or partial(levels, **screws)
    return came_back(reason, lambda weight, size: cut(weight, size, change))


def ragged(says, wrong):
    """A mistake in what happens where the groups do not fit; elsewhere all is right."""

    def answer(weight, size):
        fit = weight.shape[1] % size == 0
        return groups_reference(weight, size) if fit else wrong(weight, size)

    return Mistake(says, answer)


def stop(error):
    raise error


def some_groups():
    """Rows of different size, a group far from 0, and a group of equal numbers."""
    weight = random(2, 8, 16) * torch.logspace(-2, 1, 8)[:, None]
    weight[3, :8] += 20
    weight[5, 8:] = 0.3
    return weight


round_groups = Refusing(
    name="round_groups",
    reference=groups_reference,
    cases=(
        (random(3, 4, 8) + torch.tensor([[0.0], [3.0], [-3.0], [0.5]]), 4),
        (some_groups(), 8),
        (random(4, 8, 30), 16),  # to be refused
    ),
    mistakes=(
        Mistake(
            "some of your numbers are NaN: in a group of equal numbers the scale is 0, and you "
            "divide 0 by 0. Put another divisor there",
            partial(neighbors, change=partial(levels, hole=0)),
            lambda given, expected, arguments: bool(as_tensor(given).isnan().any()),
        ),
        group(
            "these are the ranges of whole rows. Each group of a row has its own",
            lambda weight, size, change: change(weight),
        ),
        group(
            "this is one range for the whole matrix. Each group of a row has its own",
            lambda weight, size, change: change(weight.flatten()).view_as(weight),
        ),
        group(
            "your groups run down the columns. They are neighbors in a row",
            lambda weight, size, change: neighbors(weight.T, size, change).T,
        ),
        group("the numbers of your groups stand apart. A group is neighbors in a row", strided),
        group(
            "your codes run from 0 to 16, and these are 17: divide the range by 15",
            steps=16,
            last=16,
        ),
        group(
            "16 codes have 15 steps between them. You divide the range by 16, and no code is left "
            "for the largest number",
            steps=16,
        ),
        group("your codes are cut off, not rounded to the nearest", rounding=torch.floor),
        group(
            "your scale is the same on both sides of 0 (max|x| / 7). Here a group's 16 values lie "
            "between its smallest and its largest number",
            change=symmetric,
        ),
        group("you leave out the smallest number on the way back: low + code · scale", base=0),
        group(
            "you take 0 as the smallest number of each group, and cut off what lies below", low=0
        ),
        Mistake(
            "nothing is rounded: a group has 16 values, and yours keeps every number as it is",
            lambda weight, size: neighbors(weight, size, lambda x: x),
        ),
        group(
            "these are codes. Go all the way back: low + code · scale",
            change=lambda x: (levels(x) - (low := x.amin(-1, keepdim=True))).div(
                (gap := (x.amax(-1, keepdim=True) - low) / 15).where(gap != 0, 1)
            ),
        ),
        Mistake(
            "the groups have a dimension of their own still: flatten it, back to [out, in]",
            lambda weight, size: groups_reference(weight, size).unflatten(1, (-1, size)),
        ),
        Mistake(
            "your groups are right, but each is a row now: back to the shape of weight, [out, in]",
            lambda weight, size: groups_reference(weight, size).view(-1, size),
        ),
        ragged(
            "a row of 30 numbers cannot be cut into groups of 16, and yours stops with PyTorch's "
            "RuntimeError. Check it first, and raise a ValueError that says so",
            lambda weight, size: stop(RuntimeError()),
        ),
        ragged(
            "a row of 30 numbers is no multiple of 16, and your assert says so. But python -O "
            "runs without asserts: raise a ValueError",
            lambda weight, size: stop(AssertionError()),
        ),
        ragged(
            "a row of 30 numbers, cut into groups of 16, has lost its last 14: raise a ValueError "
            "where the groups do not fit",
            lambda weight, size: groups_reference(weight[:, :size], size),
        ),
        ragged(
            "a row of 30 numbers got a whole group of 16 and a group of 14: nobody who reads it "
            "expects that. Raise a ValueError where the groups do not fit",
            lambda weight, size: torch.cat([levels(x) for x in weight.split(size, dim=1)], dim=1),
        ),
        ragged(
            "in rows of 30 numbers your groups of 16 run over the end of one row into the next: "
            "raise a ValueError where the groups do not fit",
            lambda weight, size: levels(weight.view(-1, size)).view_as(weight),
        ),
        came_back(  # and whatever else comes back
            "in each group scale = (max - min) / 15, code = (x - min) / scale, rounded, and the "
            "weight is min + code · scale",
            lambda weight, size: neighbors(weight, size, partial(levels, steps=7, last=7)),
            fits,
        ),
    ),
    right="four bits follow the weights wherever they are, and an outlier spoils one group alone",
)

# ---- bits_per_weight ------------------------------------------------------------------------


def stored_bytes(out, width, bits, group_size, kept):
    """The bytes that the chapter's own codes take in memory."""
    weight = torch.zeros(out, width)
    if bits == 8:  # a scale for each row
        tensors = quantize_int8(weight, torch.bfloat16)
    else:
        codes, *rest = quantize_int4(weight, group_size, torch.bfloat16)
        tensors = (pack(codes), *rest)
    return sum(tensor.nbytes for tensor in tensors)


def cost_reference(matrices):
    weights = sum(out * width for out, width, *_ in matrices)
    return 8 * sum(stored_bytes(*matrix) for matrix in matrices) / weights


def cost(reason, matrix=None, total=None, sign=None):
    """A mistake in the bits: of one matrix, or in what becomes of all of them."""

    def says(given, expected, arguments):
        return f"expected {expected:.5g} bits, yours are {as_tensor(given).item():.5g}: {reason}"

    def wrong(matrices):
        weights = sum(out * width for out, width, *_ in matrices)
        bits = [(matrix or bits_of)(*each) for each in matrices]
        return total(bits, weights, matrices) if total else sum(bits) / weights

    return Mistake(says, wrong, sign)


def bits_of(out, width, bits, group_size, kept):
    """All bits of one matrix."""
    return out * width * bits + out * (width // group_size) * kept * 16


def weightless(bits, weights, matrices):
    """The mean over the matrices, as if all were of one size."""
    each = [b / (m[0] * m[1]) for b, m in zip(bits, matrices, strict=True)]
    return sum(each) / len(each)


bits_per_weight = Exercise(
    name="bits_per_weight",
    reference=cost_reference,
    cases=(
        ([(96, 64, 4, 32, 2), (32, 64, 8, 64, 1)],),  # 5 and 8.25 bits
        ([(48, 96, 4, 32, 2)],),  # 5 exactly
        ([(200, 64, 8, 64, 1), (64, 64, 4, 16, 2), (64, 128, 4, 64, 2)],),
        ([(8, 1024, 8, 1024, 1)],),
    ),
    mistakes=(
        cost(
            "the scales and zeros are missing, and a file has to hold them too",
            lambda out, width, bits, size, kept: out * width * bits,
        ),
        cost(
            "you count one number for each group, and a 4-bit group keeps two, scale and zero",
            lambda out, width, bits, size, kept: bits_of(out, width, bits, size, 1),
        ),
        cost(
            "you count scale and zero once for each row. Each group of a row has its own",
            lambda out, width, bits, size, kept: bits_of(out, width, bits, width, kept),
        ),
        cost(
            "you count the groups of one row only, and every row has groups",
            lambda out, width, bits, size, kept: out * width * bits + width // size * kept * 16,
        ),
        cost(
            "you count scale and zero once for each matrix, and every group keeps them",
            lambda out, width, bits, size, kept: out * width * bits + kept * 16,
        ),
        cost(
            "you count scale and zero for every weight. A group shares them: divide by group_size",
            lambda out, width, bits, size, kept: bits_of(out, width, bits, 1, kept),
        ),
        cost(
            "you mix bytes and bits: 16 bits are two bytes, and the codes are counted in bits",
            lambda out, width, bits, size, kept: out * width * (bits + kept * 2 / size),
        ),
        cost(
            "a kept number has 16 bits here, and you counted 32, as for fp32",
            lambda out, width, bits, size, kept: bits_of(out, width, bits, size, 2 * kept),
        ),
        cost(
            "these are bytes. A byte has 8 bits",
            total=lambda bits, weights, matrices: sum(bits) / weights / 8,
        ),
        cost(
            "these are all bits together. Divide by the number of weights",
            total=lambda bits, weights, matrices: sum(bits),
        ),
        cost(
            "you take the mean over the matrices, and a large one counts more than a small one. "
            "Divide all bits by all weights",
            total=weightless,
        ),
        cost(
            "you add up the bits per weight of the matrices. Divide all bits by all weights",
            total=lambda bits, weights, matrices: weightless(bits, 0, matrices) * len(matrices),
        ),
        cost(
            "this is the first matrix alone",
            total=lambda bits, weights, matrices: bits[0] / (matrices[0][0] * matrices[0][1]),
        ),
        cost(
            "this is the last matrix alone: is a `return` inside the loop, or a sum missing?",
            total=lambda bits, weights, matrices: bits[-1] / (matrices[-1][0] * matrices[-1][1]),
        ),
        cost(
            "// cuts off the fraction that this is about: divide with /",
            total=lambda bits, weights, matrices: sum(bits) // weights,
        ),
        cost(
            "this is how many times smaller the weights are than with 16 bits each. The bits are "
            "asked for",
            total=lambda bits, weights, matrices: 16 * weights / sum(bits),
        ),
        cost(  # and whatever else is a number
            "all bits, of codes and of kept numbers, divided by all weights",
            total=lambda bits, weights, matrices: 3 * sum(bits) / weights,
            sign=lambda given, expected, arguments: as_tensor(given).dim() == 0,
        ),
    ),
    right="you can tell what a quantized file will weigh, and why 4 bits are 5",
)

EXERCISES = {
    e.name: e for e in (quantize_rows, pack_nibbles, unpack_steps, round_groups, bits_per_weight)
}

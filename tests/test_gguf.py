"""The GGUF reader from outside: the same bits as the gguf package, the same model as transformers."""

import os
import struct
import tracemalloc
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter, quants
from test_llama import IDS, all_equal, random_llama, real_weights

from minillm import gguf as our_gguf
from minillm.gguf import (
    NAMES,
    config_fields,
    dequantize_q4_0,
    dequantize_q4_1,
    dequantize_q8_0,
    gguf_tensors,
    plain_name,
    read_tokenizer,
    tensor_of,
    unpermute,
)
from minillm.llama import Llama, LlamaConfig
from minillm.parity import ParityError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nothing_kept():
    """No file of another test is remembered."""
    our_gguf.open_file.cache_clear()
    yield
    our_gguf.open_file.cache_clear()


def permute(rows, n_heads):
    """q and k as llama.cpp's convert_hf_to_gguf.py stores them: neighbours as pairs."""
    halves = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def description(config) -> dict:
    """A file's metadata without the architecture: name -> (value, type)."""
    uint, real = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32
    return {
        "llama.block_count": (config.num_hidden_layers, uint),
        "llama.context_length": (config.max_position_embeddings, uint),
        "llama.embedding_length": (config.hidden_size, uint),
        "llama.feed_forward_length": (config.intermediate_size, uint),
        "llama.attention.head_count": (config.num_attention_heads, uint),
        "llama.attention.head_count_kv": (config.num_key_value_heads, uint),
        "llama.attention.layer_norm_rms_epsilon": (config.rms_norm_eps, real),
        "llama.rope.freq_base": (config.rope_parameters["rope_theta"], real),
        "llama.rope.dimension_count": (config.head_dim, uint),
        "tokenizer.ggml.model": ("gpt2", gguf.GGUFValueType.STRING),
        "tokenizer.ggml.tokens": ([f"t{n}" for n in range(config.vocab_size)], "array"),
        "tokenizer.ggml.token_type": ([1] * config.vocab_size, "array"),
        "tokenizer.ggml.merges": (["t 1", "t 2"], "array"),
        "tokenizer.ggml.eos_token_id": (2, uint),
    }


class File:
    """A GGUF file in the making, by the gguf package's writer alone."""

    def __init__(self, model, kind=Kind.F32, architecture="llama"):
        self.model, self.config, self.architecture = model, model.config, architecture
        self.fields, self.tensors = description(model.config), {}
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, self.config.num_hidden_layers)
        heads = {
            "q_proj": self.config.num_attention_heads,
            "k_proj": self.config.num_key_value_heads,
        }
        stored = {}
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            numbers = tensor.numpy()
            small = numbers.ndim == 1  # llama.cpp leaves norms and biases as they are
            packed = quants.quantize(numbers, Kind.F32 if small else kind)
            stored[name] = torch.from_numpy(
                quants.dequantize(packed, Kind.F32 if small else kind).copy()
            )
            part = name.split(".")[-2]
            packed = permute(packed, heads[part]) if part in heads else packed
            short = table.get_name(name, try_suffixes=(".weight", ".bias"))
            self.tensors[short] = (packed, None if small else kind)
        if self.config.tie_word_embeddings:
            stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
        model.load_state_dict(stored)  # what the file's numbers stand for

    def write(self, path):
        writer = GGUFWriter(path, self.architecture)
        for name, (value, kind) in self.fields.items():
            if kind == "array":
                writer.add_array(name, value)
            else:
                writer.add_key_value(name, value, kind)
        for name, (packed, kind) in self.tensors.items():
            writer.add_tensor(name, packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture
def file(tmp_path):
    """Write a small Llama as GGUF: `reference, path = file(tie_word_embeddings=True)`."""

    def make(kind=Kind.F32, change=lambda file: None, architecture="llama", **fields):
        made = File(random_llama(**fields), kind, architecture)
        change(made)
        return made.model, made.write(tmp_path / f"model{len(list(tmp_path.iterdir()))}.gguf")

    return make


# ---- blocks of 32 numbers -------------------------------------------------------------------

BLOCKS = {
    "Q8_0": (Kind.Q8_0, 34, dequantize_q8_0),
    "Q4_0": (Kind.Q4_0, 18, dequantize_q4_0),
    "Q4_1": (Kind.Q4_1, 20, dequantize_q4_1),
}
SCALES = [0.0, -0.0, 1.0, -1.0, 6e-8, -6e-8, 5.9e-5, 65504.0, -65504.0, 0.1, -3.14]


def same_bits(given: torch.Tensor, expected) -> bool:
    """Equal to the last bit, the sign of a zero too."""
    expected = torch.from_numpy(np.array(expected))
    assert given.dtype == expected.dtype == torch.float32 and given.shape == expected.shape
    return torch.equal(given.contiguous().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(("kind", "size", "decode"), BLOCKS.values(), ids=BLOCKS)
def test_blocks_equal_the_gguf_package_to_the_bit(kind, size, decode):
    """Random bytes, the scales and offsets among them negative, zero, subnormal and large."""
    dice = np.random.default_rng(0)
    blocks = dice.integers(0, 256, (4096, size), dtype=np.uint8)
    halves = 2 if kind == Kind.Q4_1 else 1
    some = dice.choice(np.array(SCALES, dtype=np.float16), (2048, halves))
    blocks[:2048, : 2 * halves] = some.view(np.uint8)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, kind)
    finite = np.isfinite(expected).all(axis=1)
    assert finite[:2048].all() and finite.mean() > 0.9
    assert same_bits(decode(torch.from_numpy(blocks[finite])), expected[finite])


def test_a_block_by_hand():
    """Scale 0.5 and offset 2: the byte 0x3A is 10 in place 0 and 3 in place 16."""
    packed = bytes([0x3A, *[0] * 15])
    scale, offset = struct.pack("<e", 0.5), struct.pack("<e", 2.0)
    rows = torch.tensor([[*scale, *offset, *packed]], dtype=torch.uint8)
    assert dequantize_q4_1(rows)[0].tolist() == [7.0] + [2.0] * 15 + [3.5] + [2.0] * 15
    rows = torch.tensor([[*scale, *packed]], dtype=torch.uint8)
    assert dequantize_q4_0(rows)[0].tolist() == [1.0] + [-4.0] * 15 + [-2.5] + [-4.0] * 15
    rows = torch.tensor([[*scale, 255, 127, 128, *[0] * 29]], dtype=torch.uint8)
    assert dequantize_q8_0(rows)[0].tolist() == [-0.5, 63.5, -64.0] + [0.0] * 29


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_tensors_are_as_they_were(tmp_path, kind):
    numbers = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 100
    stored = numbers.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("one", quants.quantize(numbers.numpy(), Kind[kind]), raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (only,) = our_gguf.open_gguf(tmp_path / "one.gguf").tensors
    given = tensor_of(only)
    assert given.dtype == stored.dtype and torch.equal(given, stored)


def test_unpermute_by_hand():
    """One head of four: rows 0 1 2 3 were stored as 0 2 1 3. Two heads: each by itself."""
    assert unpermute(torch.tensor([0, 2, 1, 3]), 1).tolist() == [0, 1, 2, 3]
    assert unpermute(torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]), 2).tolist() == list(range(8))


@pytest.mark.parametrize("shape", [(48, 7), (48,)])
@pytest.mark.parametrize("n_heads", [1, 3, 4])
def test_unpermute_undoes_what_llama_cpp_does(n_heads, shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored = torch.from_numpy(permute(rows.numpy(), n_heads).copy())
    assert torch.equal(unpermute(stored, n_heads), rows) and not torch.equal(stored, rows)


# ---- whole models ---------------------------------------------------------------------------


def drop(*names):
    def change(file):
        for name in names:
            del file.fields[name]

    return change


def put(name, value, kind=gguf.GGUFValueType.UINT32):
    return lambda file: file.fields.update({name: (value, kind)})


def linear(file):
    file.fields["llama.rope.scaling.type"] = ("linear", gguf.GGUFValueType.STRING)
    file.fields["llama.rope.scaling.factor"] = (2.0, gguf.GGUFValueType.FLOAT32)


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
ALL_HEADS = {"num_key_value_heads": 4}
FILES = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "F16": {"kind": Kind.F16},
    "BF16": {"kind": Kind.BF16},
    "Q8_0": {"kind": Kind.Q8_0, "tie_word_embeddings": True},
    "Q4_0": {"kind": Kind.Q4_0},
    "Q4_1": {"kind": Kind.Q4_1, "num_key_value_heads": 1},
    "attention bias": {"attention_bias": True},
    "no head_count_kv": ALL_HEADS | {"change": drop("llama.attention.head_count_kv")},
    "wide heads": {"head_dim": 16, "change": put("llama.attention.key_length", 16)},
    "another epsilon": {"rms_norm_eps": 0.1},
    "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "no theta": {"change": drop("llama.rope.freq_base")},
    "scaling none": {"change": put("llama.rope.scaling.type", "none", gguf.GGUFValueType.STRING)},
    "linear scaling": {"rope_parameters": LINEAR, "change": linear},
}


@pytest.mark.parametrize("options", FILES.values(), ids=FILES)
def test_a_file_gives_the_model_that_it_came_from(file, options):
    """Its numbers, after rounding by the gguf package, in transformers' Llama."""
    reference, path = file(**options)
    model = Llama.from_pretrained(path)
    all_equal(model, reference)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tied = reference.config.tie_word_embeddings
    assert (model.lm_head.weight is model.token_embedding.weight) == tied


def test_the_same_model_from_a_folder_and_from_a_file(file, tmp_path):
    reference, path = file()
    reference.save_pretrained(tmp_path / "folder")
    one, other = Llama.from_pretrained(path), Llama.from_pretrained(tmp_path / "folder")
    assert torch.equal(one(IDS), other(IDS))
    eps = {"rms_norm_eps": other.config.rms_norm_eps}  # 1e-6 is fp32 in a GGUF file
    assert replace(one.config, **eps) == other.config


@pytest.mark.parametrize("part", ["attn_q", "attn_k"])
def test_rows_that_were_not_permuted_are_seen(file, part):
    def change(made):
        heads = 4 if part == "attn_q" else 2
        packed, kind = made.tensors[f"blk.1.{part}.weight"]
        back = unpermute(torch.from_numpy(packed.copy()), heads).numpy()
        made.tensors[f"blk.1.{part}.weight"] = (back, kind)

    reference, path = file(change=change)
    with pytest.raises(ParityError, match="blocks.1.attention.qkv"):
        all_equal(Llama.from_pretrained(path), reference)


def test_the_config_reads_what_the_file_says(file):
    _, path = file(num_key_value_heads=1, rms_norm_eps=1e-5, change=put("llama.context_length", 77))
    config = LlamaConfig.from_dict(config_fields(path))
    assert (config.vocab_size, config.context_length) == (97, 77)
    assert config.cache_shape == (2, 1, 8)
    assert config.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)
    assert config_fields(path)["eos_token_id"] == 2


def test_names_equal_the_gguf_packages_own():
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    for theirs in NAMES.values():
        layered = theirs.startswith(("self_attn", "mlp", "input", "post"))
        name = f"model.layers.13.{theirs}" if layered else f"model.{theirs}"
        short = table.get_name(name.replace("model.lm_head", "lm_head"))
        assert f"model.{plain_name(f'{short}.weight')}" == f"{name}.weight"


# ---- what is refused ------------------------------------------------------------------------


def another_type(name, kind, packed):
    return lambda file: file.tensors.update({name: (packed, kind)})


@pytest.mark.parametrize(
    ("kind", "columns"), [("Q4_K", 144), ("Q6_K", 210), ("Q5_0", 22), ("IQ4_NL", 18)]
)
def test_another_type_is_refused_by_name(file, kind, columns):
    packed = np.zeros((64, columns), dtype=np.uint8)
    _, path = file(change=another_type("blk.1.ffn_up.weight", Kind[kind], packed))
    says = f"blk.1.ffn_up.weight is stored as {kind}.*F32, F16, BF16, Q8_0, Q4_0, Q4_1"
    with pytest.raises(ValueError, match=says):
        Llama.from_pretrained(path)


def test_whole_numbers_as_weights_are_refused(file):
    packed = np.zeros((64, 32), dtype=np.int8)
    _, path = file(change=another_type("blk.1.ffn_up.weight", None, packed))
    with pytest.raises(ValueError, match="blk.1.ffn_up.weight is stored as I8"):
        Llama.from_pretrained(path)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gemma"])
def test_another_architecture_is_refused_by_name(file, architecture):
    _, path = file(architecture=architecture)
    with pytest.raises(ValueError, match=f"{path}.*{architecture}.*llama"):
        Llama.from_pretrained(path)


NEEDED = [
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_entry_is_named(file, name):
    _, path = file(change=drop(name))
    with pytest.raises(ValueError, match=f"{path} does not say {name}"):
        Llama.from_pretrained(path)


def text(value):
    return value, gguf.GGUFValueType.STRING


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"llama.rope.scaling.type": text("yarn")}, "yarn.*default, linear, llama3"),
        ({"llama.rope.scaling.type": text("linear")}, "factor is None"),
        ({"llama.attention.head_count_kv": (3, gguf.GGUFValueType.UINT32)}, "4 heads.*3 KV"),
        ({"llama.attention.head_count_kv": ([2, 4], "array")}, "num_key_value_heads"),
        ({"llama.attention.head_count": (0, gguf.GGUFValueType.UINT32)}, "num_attention_heads"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(file, fields, says):
    _, path = file(change=lambda made: made.fields.update(fields))
    with pytest.raises(ValueError, match=says):
        Llama.from_pretrained(path)


def test_a_rotation_of_a_part_of_each_head_is_refused(file):
    """Heads of 8 of which 4 numbers turn: to ignore it would give a wrong answer."""
    name = "llama.rope.dimension_count"
    _, path = file(change=put(name, 4, gguf.GGUFValueType.UINT32))
    with pytest.raises(ValueError, match=name):
        Llama.from_pretrained(path)


def test_the_old_name_of_linear_scaling_is_read(file):
    _, path = file(change=put("llama.rope.scale_linear", 2.0, gguf.GGUFValueType.FLOAT32))
    scaling = Llama.from_pretrained(path).config.rope_scaling
    assert scaling == {"rope_type": "linear", "factor": 2.0}


def test_a_file_without_words_runs_on_token_ids(file):
    _, path = file(change=drop("tokenizer.ggml.tokens"))
    assert Llama.from_pretrained(path)(torch.tensor([[1, 2, 3]])).isfinite().all()
    with pytest.raises(ValueError, match="tokenizer"):
        read_tokenizer(path)


UNKNOWN = [
    "blk.0.attn_q_norm.weight",
    "rope_freqs.weight",
    "blk.1.ffn_gate_exps.weight",
    "enc.0.x.weight",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_tensor_is_refused_by_name(file, name):
    _, path = file(change=another_type(name, None, np.ones(32, dtype=np.float32)))
    with pytest.raises(ValueError, match=name):
        Llama.from_pretrained(path)


@pytest.mark.parametrize("name", ["blk.9.attn_norm.weight", "blk.0.ffn_up.bias"])
def test_a_tensor_too_many_is_refused_by_name(file, name):
    _, path = file(change=another_type(name, None, np.ones(64, dtype=np.float32)))
    with pytest.raises(ValueError, match=f"unexpected {plain_name(name)}"):
        Llama.from_pretrained(path)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(file, name):
    _, path = file(change=lambda made: made.tensors.pop(name))
    with pytest.raises(ValueError, match=f"missing {plain_name(name)}|holds no {name}"):
        Llama.from_pretrained(path)


def test_a_redundant_head_beside_the_table_is_used(file):
    """A head in the file is the head: other numbers than the table's are untied."""
    reference, path = file(seed=5)
    assert not LlamaConfig.from_dict(config_fields(path)).tie_word_embeddings
    assert torch.equal(gguf_tensors(path)["lm_head.weight"], reference.lm_head.weight)


# ---- broken files ---------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 98362432\n"
CUTS = {
    "the last byte": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "in the description": lambda data: data[:700],
    "7 bytes": lambda data: data[:7],
    "the magic word": lambda data: data[:4],
    "empty": lambda data: b"",
    "a pointer": lambda data: POINTER,
    "text": lambda data: b"<html>404: not found</html>\n" * 100,
    "zeros": lambda data: bytes(len(data)),
    "version 99": lambda data: data[:4] + struct.pack("<I", 99) + data[8:],
    "a number of tensors": lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:],
    "a number of entries": lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:],
    "a length of a name": lambda data: data[:24] + struct.pack("<Q", 2**60) + data[32:],
}


def refused(path, says=None) -> None:
    """A ValueError with the path, and little memory on the way there."""
    tracemalloc.start()
    with pytest.raises(ValueError, match=says) as caught:
        Llama.from_pretrained(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value) and peak < 20e6, f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_broken_file_is_refused_with_its_path(file, cut):
    _, path = file(tie_word_embeddings=True)
    data = path.read_bytes()
    assert len(data) < 200_000
    path.write_bytes(cut(data))
    refused(path)


def test_a_pointer_and_an_empty_file_say_what_to_do(tmp_path):
    for name, data, says in (("a", POINTER, "git lfs pull"), ("b", b"", "is empty: download")):
        (tmp_path / f"{name}.gguf").write_bytes(data)
        refused(tmp_path / f"{name}.gguf", says)


@pytest.mark.parametrize("name", ["tokens", "token_type"])
def test_an_absurd_length_of_a_list_is_refused(file, name):
    """Texts and numbers, in the middle of the description."""
    _, path = file()
    data, key = bytearray(path.read_bytes()), f"tokenizer.ggml.{name}".encode()
    place = data.index(key) + len(key) + 8  # behind two types of 4 bytes each
    assert struct.unpack_from("<Q", data, place) == (97,)
    struct.pack_into("<Q", data, place, 2**59)
    path.write_bytes(data)
    refused(path)


def test_an_absurd_shape_is_refused(file):
    _, path = file()
    data, key = bytearray(path.read_bytes()), b"token_embd.weight"
    place = data.index(key) + len(key) + 4  # behind the number of dimensions
    assert struct.unpack_from("<QQ", data, place) == (32, 97)
    struct.pack_into("<Q", data, place, 2**40)
    path.write_bytes(data)
    refused(path)


# ---- the description ------------------------------------------------------------------------


def contents(reader: GGUFReader) -> dict:
    """Every entry, by the gguf package's own reader."""
    return {name: field.contents() for name, field in reader.fields.items()}


def test_every_entry_equals_the_gguf_packages_own(tmp_path):
    """Numbers of all widths, texts beyond ASCII, lists of texts, numbers and yes or no."""
    path, kinds = tmp_path / "some.gguf", gguf.GGUFValueType
    writer = GGUFWriter(path, "llama")
    scalars = {
        "UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 2**32 - 1,
        "INT32": -(2**31), "UINT64": 2**64 - 1, "INT64": -(2**63), "FLOAT32": 0.1, "FLOAT64": 0.1,
        "BOOL": True, "STRING": "Grüße 👋 \n",
    }  # fmt: skip
    for name, value in scalars.items():
        writer.add_key_value(f"one.{name}", value, kinds[name])
    for name in ("UINT8", "INT16", "INT32", "UINT64", "FLOAT32", "FLOAT64"):
        writer.add_key_value(f"list.{name}", [0, 1, 100], kinds.ARRAY, kinds[name])
    writer.add_key_value("list.BOOL", [True, False, True], kinds.ARRAY, kinds.BOOL)
    writer.add_key_value("list.negative", [-1, 3], kinds.ARRAY, kinds.INT64)
    writer.add_array("list.texts", ["", "Ġthe", "é", "👋", "\x00", " "])
    writer.add_array("list.one text", ["only"])
    writer.add_key_value("no text", "", kinds.STRING)
    writer.add_string("behind all of them", "still in its place")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected, given = contents(GGUFReader(path)), our_gguf.metadata(path)
    assert given == expected and len(given) == 3 + 1 + 12 + 12
    types = {name: type(value) for name, value in expected.items()}
    assert {name: type(value) for name, value in given.items()} == types
    assert all(type(x) is bool for x in given["list.BOOL"]) and given["behind all of them"]


def test_real_weights_every_entry_equals_the_gguf_packages_own(gguf_reader):
    path = real_weights()
    given, expected = our_gguf.metadata(path), contents(gguf_reader(path))
    assert list(given) == list(expected) and len(given) == 36
    assert [name for name in given if given[name] != expected[name]] == []
    assert len(given["tokenizer.ggml.tokens"]) == 49152


def test_real_weights_tensors_equal_the_gguf_packages_own():
    """All kinds: the table in Q8_0, norms in F32, and Q4_1 of every part in four layers."""
    reader, seen = our_gguf.open_gguf(real_weights()), set()
    for stored in reader.tensors:
        layer = stored.name.split(".")[1]
        if layer.isdigit() and int(layer) not in (0, 7, 22, 29):
            continue
        expected = quants.dequantize(stored.data, stored.tensor_type)
        assert same_bits(tensor_of(stored), expected), stored.name
        seen.add(stored.tensor_type.name)
    assert seen == {"Q8_0", "F32", "Q4_1"}


# ---- read once ------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch):
    """The paths that were parsed, in order."""
    paths = []

    class Counting(our_gguf.QuickReader):
        def __init__(self, path, *arguments):
            paths.append(path)
            super().__init__(path, *arguments)

    monkeypatch.setattr(our_gguf, "QuickReader", Counting)
    return paths


def test_a_file_is_parsed_once(file, opened):
    _, path = file()
    Llama.from_pretrained(path)
    our_gguf.metadata(path)
    Llama.from_pretrained(str(path))
    assert opened == [path]


def test_a_file_that_changed_is_read_anew(file, opened):
    """Other numbers, then another shape, under the same name."""
    _, path = file()
    before = Llama.from_pretrained(path)(IDS)
    for count, fields in enumerate(({"seed": 1}, {"hidden_size": 64, "seed": 2}), start=2):
        reference, other = file(**fields)
        os.replace(other, path)
        model = Llama.from_pretrained(path)
        all_equal(model, reference)
        assert len(opened) == count and not torch.equal(model(IDS), before)


def test_a_model_outlives_its_file(file):
    """The weights are copies: the file may be replaced or removed while the model runs."""
    reference, path = file()
    model = Llama.from_pretrained(path)
    with open(path, "r+b") as stream:
        stream.write(bytes(path.stat().st_size))
    our_gguf.open_file.cache_clear()
    path.unlink()
    all_equal(model, reference)

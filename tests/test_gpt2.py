"""The model from outside: equal to transformers on any configuration, and bad input gets a sentence."""

import json
import struct

import pytest
import torch
from conftest import greedy
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from minillm.gpt2 import (
    CONV1D,
    GPT2,
    IRRELEVANT,
    REFUSED_UNLESS,
    GPT2Config,
    checkpoint_names,
    reference_points,
)
from minillm.parity import compare_modules, compare_text
from minillm.weights import resolve

IDS = torch.tensor([[5, 1, 88, 42, 7, 7, 0, 96, 13]])


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    changed = change({name: tensor.clone() for name, tensor in tensors.items()})
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


# ---- equality -------------------------------------------------------------------------------

CONFIGS = {
    "plain": {},
    "narrow MLP": {"n_inner": 24},
    "square MLP": {"n_inner": 32},
    "exact gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "silu": {"activation_function": "silu"},
    "epsilon": {"layer_norm_epsilon": 1e-1},
    "no scale": {"scale_attn_weights": False},
    "inverse layer scale": {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "both scales": {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_every_sub_module_equals_transformers(save_reference, fields, attention):
    reference, folder = save_reference(**fields)
    model = GPT2.from_pretrained(folder, attention=attention)
    rows = compare_modules(model, reference, reference_points(model.config), IDS, show=False)
    assert len(rows) == 4 + 10 * model.config.n_layer


@pytest.mark.parametrize(
    "field", ["n_inner", "layer_norm_epsilon", "scale_attn_weights", "activation_function"]
)
def test_the_configurations_above_differ(save_reference, field):
    """If a field changed nothing here, the test above would not see it ignored."""
    reference, folder = save_reference(n_inner=32)
    before = GPT2.from_pretrained(folder)(IDS)
    wrong = {
        "n_inner": 32,
        "layer_norm_epsilon": 0.1,
        "scale_attn_weights": False,
        "activation_function": "gelu",
    }
    edit_config(folder, **{field: wrong[field]})
    gap = (GPT2.from_pretrained(folder)(IDS) - before).abs().max() / before.abs().max()
    assert (gap > 3e-5) == (field != "n_inner")


def decided(ids) -> bool:
    return len(set(ids)) >= 20


def test_greedy_text_equals_transformers_on_random_weights(save_reference):
    reference, folder = save_reference(seed=3)
    model = GPT2.from_pretrained(folder)
    assert decided(greedy(model, [5, 1, 88], 60)), "this model repeats itself: it proves little"
    prompts = [[5, 1, 88], [42], [7, 7, 9, 2]]
    assert compare_text(lambda ids, n: greedy(model, ids, n), reference, prompts, 50) == 150


def test_greedy_text_equals_transformers_on_fairytale():
    folder = resolve("fairytale")
    reference = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = GPT2.from_pretrained("fairytale")
    texts = ["Once upon a time", "The king said to his youngest daughter,", "In the dark forest"]
    prompts = [tokenizer(text).input_ids for text in texts]
    loop = lambda ids, n: greedy(model, ids, n, {4095})  # noqa: E731
    assert compare_text(loop, reference, prompts, 100) >= 200


# ---- the embedded model ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "megabytes", "layers", "width"),
    [("fairytale", 12, 6, 256), ("fairytale-draft", 2, 2, 128)],
)
def test_embedded_models_are_plain_hugging_face_folders(name, megabytes, layers, width):
    folder = resolve(name)
    files = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "vocab.json",
        "merges.txt",
        "README.md",
    } <= files
    assert (folder / "model.safetensors").stat().st_size <= megabytes * 1e6
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.n_layer, model.config.n_embd, model.config.n_positions) == (
        layers,
        width,
        512,
    )
    assert "held-out" in (folder / "README.md").read_text().lower()


def test_all_512_positions_of_fairytale_are_trained():
    """Trained neighbours in the position table look alike; two random rows of 256 have cosine 0 +- 0.06."""
    stored = load_file(resolve("fairytale") / "model.safetensors")
    rows = stored["transformer.wpe.weight"].float()
    likeness = F.cosine_similarity(rows[1:], rows[:-1], dim=-1)
    assert likeness[1:].min() > 0.2 and likeness[-64:].mean() > 0.4


def test_the_draft_speaks_the_same_tokens():
    for file in ("vocab.json", "merges.txt"):
        assert (resolve("fairytale") / file).read_bytes() == (
            resolve("fairytale-draft") / file
        ).read_bytes()


# ---- the configuration ----------------------------------------------------------------------


def test_everything_that_transformers_writes_is_known(save_reference):
    reference, _ = save_reference()
    GPT2Config.from_dict(reference.config.to_dict())


def test_the_three_lists_do_not_overlap():
    used = set(GPT2Config.__dataclass_fields__)
    assert (
        not used & IRRELEVANT
        and not used & set(REFUSED_UNLESS)
        and not IRRELEVANT & set(REFUSED_UNLESS)
    )


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"window_size": 256}, "window_size"),
        ({"activation_function": "swish2"}, "swish2"),
        ({"n_head": 5}, "n_head"),
        ({"n_layer": 0}, "n_layer"),
        ({"n_inner": 0}, "n_inner"),
        ({"layer_norm_epsilon": None}, "layer_norm_epsilon"),
        ({"scale_attn_weights": "no"}, "scale_attn_weights"),
        ({"n_embd": "768"}, "n_embd"),
        ({"model_type": "mamba"}, "mamba"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(fields, names):
    with pytest.raises(ValueError, match=names):
        GPT2Config.from_dict(fields)


def test_old_fields_of_the_real_gpt2_pass():
    GPT2Config.from_dict(
        {
            "model_type": "gpt2",
            "n_ctx": 1024,
            "architectures": ["GPT2LMHeadModel"],
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "pruned_heads": {},
            "add_cross_attention": False,
        }
    )


# ---- loading --------------------------------------------------------------------------------

REWRITES = {
    "without prefix": lambda t: {k.removeprefix("transformer."): v for k, v in t.items()},
    "module.": lambda t: {f"module.{k}": v for k, v in t.items()},
    "_orig_mod.": lambda t: {f"_orig_mod.{k}": v for k, v in t.items()},
    "both wrappers": lambda t: {f"_orig_mod.module.{k}": v for k, v in t.items()},
    "mask buffers": lambda t: (
        t
        | {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64),
            "transformer.h.1.attn.bias": torch.ones(1, 1, 64, 64).to(torch.uint8),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        }
    ),
    "a copy of the head": lambda t: t | {"lm_head.weight": t["transformer.wte.weight"].clone()},
    "only the head": lambda t: (
        {k: v for k, v in t.items() if "wte" not in k}
        | {"lm_head.weight": t["transformer.wte.weight"].clone()}
    ),
}


@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES)
def test_a_checkpoint_loads_equally_however_it_is_written(save_reference, rewrite):
    reference, folder = save_reference()
    edit_weights(folder, rewrite)
    model = GPT2.from_pretrained(folder)
    compare_modules(model, reference, reference_points(model.config), IDS, show=False)
    assert model.lm_head.weight is model.token_embedding.weight
    assert sum(p.numel() for p in model.parameters()) == reference.num_parameters()


def without(name):
    return lambda t: {k: v for k, v in t.items() if k != name}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (without("transformer.h.1.ln_2.bias"), "missing h.1.ln_2.bias"),
        (without("transformer.h.0.attn.c_attn.bias"), "missing h.0.attn.c_attn.bias"),
        (
            lambda t: t | {"transformer.h.2.ln_1.weight": torch.ones(32)},
            "unexpected h.2.ln_1.weight",
        ),
        (lambda t: t | {"transformer.wpe.weight": torch.ones(63, 32)}, r"wpe.weight .*\[64, 32\]"),
        (lambda t: t | {"transformer.ln_f.bias": torch.ones(32).long()}, "ln_f.bias .*floating"),
        (lambda t: t | {"lm_head.weight": torch.ones(97, 32)}, "tie_word_embeddings"),
        (lambda t: t | {"wte.weight": t["transformer.wte.weight"].clone()}, "wte.weight twice"),
    ],
)
def test_what_does_not_fit_is_named(save_reference, change, names):
    _, folder = save_reference()
    edit_weights(folder, change)
    with pytest.raises(ValueError, match=names):
        GPT2.from_pretrained(folder)


def test_an_untied_head_that_is_absent_is_an_error(save_reference):
    _, folder = save_reference()
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        GPT2.from_pretrained(folder)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64, "mixed"])
def test_any_stored_dtype_is_converted_by_one_rule(save_reference, stored):
    """Everything becomes the wanted dtype, float32 by default."""
    _, folder = save_reference()

    def convert(t):
        if stored != "mixed":
            return {k: v.to(stored) for k, v in t.items()}
        return {k: v.to(torch.float16 if "mlp" in k else torch.bfloat16) for k, v in t.items()}

    edit_weights(folder, convert)
    model = GPT2.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    kept = load_file(folder / "model.safetensors")["transformer.h.1.mlp.c_fc.weight"]
    assert torch.equal(model.blocks[1].mlp.up.weight, kept.float().T)
    assert {p.dtype for p in GPT2.from_pretrained(folder, dtype=torch.bfloat16).parameters()} == {
        torch.bfloat16
    }


def test_weights_of_the_wanted_dtype_stay_views_of_the_file(save_reference):
    """Two tensors lie as far apart in memory as in the file, up to whole pages; rows are in one piece."""
    _, folder = save_reference()
    model = GPT2.from_pretrained(folder)
    with open(folder / "model.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    first = {k: v["data_offsets"][0] for k, v in header.items() if k != "__metadata__"}
    origin = model.token_embedding.weight.data_ptr() - first["transformer.wte.weight"]
    for ours, theirs in checkpoint_names(model.config).items():
        for name, parameter in model.get_submodule(ours).named_parameters():
            assert parameter.is_contiguous()
            if parameter.dim() == 2 and ours.split(".", 2)[-1] in CONV1D:
                continue
            where = first[f"transformer.{theirs}.{name}"]
            assert (parameter.data_ptr() - origin - where) % 4096 == 0


# ---- bad input ------------------------------------------------------------------------------


@pytest.fixture
def small(save_reference):
    reference, folder = save_reference(n_positions=16)
    return GPT2.from_pretrained(folder)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([[0, 97]]), "97 is outside the vocabulary: ids go from 0 to 96"),
        (torch.tensor([[0, -1]]), "-1 is outside"),
        (torch.tensor([0, 1]), r"shape \[B, T\]"),
        (torch.zeros(1, 0, dtype=torch.long), "at least one token"),
        (torch.tensor([[0.0, 1.0]]), "whole numbers"),
        (
            torch.zeros(1, 17, dtype=torch.long),
            "17 tokens does not fit: this model's context holds 16",
        ),
    ],
)
def test_bad_token_ids_get_a_sentence(small, ids, says):
    with pytest.raises(ValueError, match=says):
        small(ids)


def test_padded_rows_equal_their_solo_runs(save_reference):
    """Positions and mask come from each row's own real tokens, also where the padded width overflows."""
    _, folder = save_reference(n_positions=8)
    model = GPT2.from_pretrained(folder)
    row = [5, 1, 88]
    padded = torch.tensor([[0] * 6 + row, list(range(9))])
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :6], mask[1, :1] = False, False
    together = model(padded, padding_mask=mask)
    alone = model(torch.tensor([row]))[0]
    assert (together[0, 6:] - alone).abs().max() <= 1e-5 * alone.abs().max()
    assert together.isfinite().all()

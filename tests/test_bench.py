"""`minillm bench`: its arithmetic on given times, its tokens against transformers', its refusals."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from minillm import bench, bench_memory, bench_report, quantization
from minillm.bench import OURS, THEIRS, UNCACHED, Job
from minillm.bench_report import bench_table
from minillm.cli import main
from minillm.gpt2 import GPT2, GPT2Config
from minillm.quantization import release_memory

pytestmark = pytest.mark.usefixtures("one_thread", "unchanged_process")

INT8, INT4 = "minillm int8", "minillm int4"
SIZES = {
    "peak_memory_bytes": 7_000_000,
    "held_memory_bytes": 6_000_000,
    "trimmed_memory_bytes": 5_000_000,
}


@pytest.fixture
def quick(monkeypatch):
    """No processes of their own, and a ceiling that a loaded machine cannot lower."""
    monkeypatch.setattr(bench, "process_memory", lambda name, job, folder: dict(SIZES))
    monkeypatch.setattr(bench, "measure_ceiling", lambda buffers: 1e15)


def report_of(capsys, *arguments) -> dict:
    """The JSON that the command prints."""
    small = ["--prompt-length", "7", "--new-tokens", "9", "--repeat", "2", "--threads", "1"]
    assert main(["bench", *small, "--json", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert not err
    return json.loads(out)


# ---- arithmetic


def shape_only(**fields) -> GPT2:
    with torch.device("meta"):
        return GPT2(GPT2Config(**fields))


def test_bytes_per_step_of_gpt2_by_hand():
    """Blocks, final norm and the head; of the look-up tables only the one that is the head."""
    model = shape_only()
    weights = (12 * (12 * 768**2 + 13 * 768) + 2 * 768 + 50257 * 768) * 4
    keys_and_values = 2 * 12 * 768 * 80 * 4  # 12 heads of 64 make 768
    assert bench.bytes_per_step(model, 0) == weights
    assert bench.bytes_per_step(model, 80) == weights + keys_and_values
    assert bench.bytes_per_step(model, 80, batch=3) == weights + 3 * keys_and_values
    assert bench.bytes_per_step(model.half(), 80) == (weights + keys_and_values) / 2


def test_a_head_of_its_own_counts_instead_of_the_table():
    tied, untied = shape_only(), shape_only(tie_word_embeddings=False)
    assert bench.bytes_per_step(untied, 5) == bench.bytes_per_step(tied, 5)
    assert bench.weight_bytes(tied) == 124_439_808 * 4  # what the world calls GPT-2 124M
    assert bench.weight_bytes(untied) == (124_439_808 + 50257 * 768) * 4


def test_what_lies_at_one_address_is_one_tensor():
    """Two parameters on one table, as after a careless tying, take its memory once."""
    model = torch.nn.ModuleList([torch.nn.Linear(3, 5), torch.nn.Linear(3, 5, bias=False)])
    assert bench.weight_bytes(model) == (3 * 5 + 5 + 3 * 5) * 4
    model[1].weight = torch.nn.Parameter(model[0].weight.detach())
    assert bench.weight_bytes(model) == (3 * 5 + 5) * 4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [INT8, INT4])
def test_bytes_of_codes_by_hand(name, tied, save_reference):
    """Two layers 32 wide, 97 tokens, 64 positions; everything beside the codes in 2 bytes."""
    _, folder = save_reference(tie_word_embeddings=tied)
    model = bench.load(name, Job(), folder)
    matrices, rows = 2 * 12 * 32**2, 2 * (3 + 1 + 4 + 1) * 32
    table = 97 * 32 + 97 * 2  # always 8 bits, with a scale for each row
    norms, positions = 5 * 2 * 32 * 2, 64 * 32 * 2
    blocks = rows * 2  # biases
    blocks += matrices + rows * 2 if name == INT8 else matrices // 2 + matrices // 32 * 2 * 2
    assert bench.weight_bytes(model) == blocks + norms + positions + table * (1 if tied else 2)
    kept = 2 * 2 * 32 * 10 * 2  # keys and values of 10 positions
    assert bench.bytes_per_step(model, 10, batch=3) == blocks + norms + table + 3 * kept


WEIGHTS = {INT8: 21_000_000, INT4: 12_000_000}  # of 80 MB
RUNS = {  # start, first token, then the steps; the medians are no means
    OURS: [([0, 2, 3, 4, 9], [[1, 2, 3, 4]]), ([10, 14, 15, 16, 17], [[1, 2, 3, 4]])],
    UNCACHED: [([0, 2, 10, 20, 34], [[1, 2, 3, 4]]), ([0, 2, 10, 20, 30], [[1, 2, 3, 4]])],
    THEIRS: [([5, 11, 13, 15, 17], [[1, 2, 3, 4]]), ([5, 11, 13, 15, 60], [[1, 2, 9, 4]])],
}


def summary(batch=1, ceilings=(30.0, 50.0, 1000.0), step_bytes=40, memory=SIZES, runs=RUNS):
    quantized = [name.split()[1] for name in runs if name in (INT8, INT4)]
    job = Job(prompt_length=6, new_tokens=4, batch=batch, against="transformers", no_cache=True)
    job.quantize = quantized
    sizes = {name: memory | {"weight_bytes": WEIGHTS.get(name, 80_000_000)} for name in runs}
    return bench_report.summarize(job, runs, list(ceilings), step_bytes, sizes)


def test_medians_ratios_and_share_from_given_times():
    report = summary()
    assert report["engines"][OURS] == {
        "first_token_s": 3,
        "prefill_tokens_per_s": 2,
        "decode_step_s": 1,
        "decode_tokens_per_s": 1,
        "total_s": 8,
        "weight_bytes": 80_000_000,
        **SIZES,
    }
    assert report["ratios"] == {
        THEIRS: {"first_token": 2, "decode_step": 2, "total": 33.5 / 8},
        UNCACHED: {"total": 4},
    }
    assert report["ceiling_bytes_per_s"] == 50 and report["share_of_ceiling"] == 40 / 50
    assert report["equal_ids"] == {"equal": 3, "of": 4}


def test_a_batch_multiplies_the_tokens_and_has_no_share():
    report = summary(batch=3, step_bytes=10**9)
    ours = report["engines"][OURS]
    assert (ours["prefill_tokens_per_s"], ours["decode_tokens_per_s"]) == (6, 3)
    assert report["share_of_ceiling"] is None and "% of the ceiling" not in bench_table(report)


def test_more_than_the_ceiling_is_refused():
    assert summary(step_bytes=50)["share_of_ceiling"] == 1
    with pytest.raises(ValueError, match=r"102\.0% .* the ceiling was measured wrongly"):
        summary(step_bytes=51)


def test_the_table_says_it_all():
    text = bench_table(summary())
    ratios = "2.00 : 1 to the first token, 2.00 : 1 per step, 4.19 : 1 in total"
    assert f"transformers : minillm = {ratios}" in text
    assert text.startswith("fairytale: 1 x 6 tokens + 4 new, float32, ")
    assert "cached : not cached = 1 : 4.00" in text and ": 80% of the ceiling" in text
    assert "equal to transformers': 3 of 4" in text and "seed 0" in text
    for name in ("torch", "transformers", "minillm"):
        assert f"{name} {bench_report.machine(Job(against=THEIRS))['versions'][name]}" in text
    times, memory = rows_of(text, "transformers")
    assert times == "transformers 6000.00 ms 1 tok/s 2000.00 ms 0.5 tok/s 33500.0 ms"
    assert memory == "transformers 80.0 MB 7.0 MB 6.0 MB 5.0 MB"
    assert "quantized" not in text and "int8" not in text
    assert bench_table(summary(memory=dict.fromkeys(SIZES))).count("not measured") == 3 * 3


def rows_of(text: str, name: str) -> list[str]:
    """An engine's row in each table of a report, with single spaces."""
    rows = [line for line in text.splitlines() if line.startswith(f"{name}  ")]
    return [" ".join(row.split()) for row in rows]


QUANTIZED_RUNS = RUNS | {  # other tokens than ours, and two or four times as fast
    INT8: [([0, 6, 6.5, 7, 7.5], [[1, 9, 9, 9]])],
    INT4: [([0, 1.5, 1.75, 2, 2.25], [[1, 2, 9, 9]])],
}


def test_ratios_of_quantized_engines_by_hand():
    report, plain = summary(runs=QUANTIZED_RUNS), summary()
    assert report["ratios"] == plain["ratios"] | {
        INT8: {"first_token": 2, "decode_step": 0.5, "total": 7.5 / 8, "weight": 21 / 80},
        INT4: {"first_token": 0.5, "decode_step": 0.25, "total": 2.25 / 8, "weight": 12 / 80},
    }
    for key in ("equal_ids", "bytes_per_step", "share_of_ceiling"):  # of the plain weights
        assert report[key] == plain[key]
    assert report["engines"][INT4]["weight_bytes"] == 12_000_000


def test_the_table_of_quantized_engines():
    text = bench_table(summary(runs=QUANTIZED_RUNS))
    assert ", float32 (quantized: bfloat16), " in text.split("\n")[0]
    assert (
        "minillm int8 : minillm = 2.00 : 1 to the first token, 0.50 : 1 per step, "
        "0.94 : 1 in total, 0.26 : 1 in bytes of weights\n"
    ) in text
    assert "0.28 : 1 in total, 0.15 : 1 in bytes of weights\n" in text
    times, memory = rows_of(text, INT4)
    assert times == "minillm int4 1500.00 ms 4 tok/s 250.00 ms 4.0 tok/s 2250.0 ms"
    assert memory == "minillm int4 12.0 MB 7.0 MB 6.0 MB 5.0 MB"
    assert "a decode step of minillm reads" in text


def test_mixed_lengths_by_hand():
    """From an eighth to the whole; the prompts in order, the answers by every other one."""
    job = Job(prompt_length=64, new_tokens=32, batch=8, mixed=True)
    prompts, new = [8, 16, 24, 32, 40, 48, 56, 64], [8, 16, 24, 32, 4, 12, 20, 28]
    assert job.row_lengths() == list(zip(prompts, new, strict=True))
    few = Job(prompt_length=7, new_tokens=9, batch=2, mixed=True)
    assert few.row_lengths() == [(1, 9), (7, 2)]
    assert dataclasses.replace(few, batch=3).row_lengths() == [(1, 5), (4, 2), (7, 9)]
    assert dataclasses.replace(few, mixed=False).row_lengths() == [(7, 9)] * 2


MIXED_RUNS = {  # a prompt of 1 token with 4 new ones, and one of 8 with 2
    OURS: [
        ([0, 2, 3, 5, 8], [[1, 2, 3, 4], [5, 6]]),
        ([10, 14, 15, 16, 20], [[1, 2, 3, 4], [5, 6]]),
    ],
    UNCACHED: [([0, 9, 18, 27, 36], [[1, 2, 3, 4], [5, 6]])],
    THEIRS: [([0, 4, 10, 14, 18], [[1, 2, 3, 4], [5, 9]])],
}


def mixed_summary():
    fields = {"prompt_length": 8, "new_tokens": 4, "batch": 2, "mixed": True}
    job = Job(**fields, against="transformers", no_cache=True)
    sizes = {name: SIZES | {"weight_bytes": 80_000_000} for name in MIXED_RUNS}
    return bench_report.summarize(job, MIXED_RUNS, [50.0], None, sizes)


def test_mixed_rows_count_their_own_tokens_and_compare_in_total_only():
    report = mixed_summary()
    assert report["engines"][OURS] == {
        "first_token_s": 3,
        "prefill_tokens_per_s": (1 + 8) / 3,
        "decode_step_s": None,
        "decode_tokens_per_s": (3 + 1) / 6,  # after the first token of each row
        "total_s": 9,
        "weight_bytes": 80_000_000,
        **SIZES,
    }
    assert report["ratios"] == {THEIRS: {"total": 2}, UNCACHED: {"total": 4}}
    assert report["equal_ids"] == {"equal": 5, "of": 6}
    assert report["bytes_per_step"] is None and report["share_of_ceiling"] is None
    assert report.keys() == summary().keys()


def test_the_table_of_mixed_rows_says_what_its_numbers_are():
    text = bench_table(mixed_summary())
    assert text.startswith("fairytale: 2 x 1 to 8 tokens + 2 to 4 new, float32, ")
    assert "transformers : minillm = 2.00 : 1 in total\n" in text
    assert "cached : not cached = 1 : 4.00" in text and "equal to transformers': 5 of 6" in text
    assert "decode is all of them after the first, by the time after the first" in text
    assert "step" not in text and "step" in bench_table(summary(batch=2))
    times, memory = rows_of(text, "transformers")
    assert times == "transformers 4000.00 ms 2 tok/s 0.3 tok/s 18000.0 ms"
    assert memory == "transformers 80.0 MB 7.0 MB 6.0 MB 5.0 MB"


# ---- measuring


def test_engines_take_turns_with_the_ceiling_in_between(monkeypatch):
    """a b, then b a; after one warm-up each that does not count; over a gigabyte in distinct buffers."""
    calls = []

    def ceiling(buffers):
        assert sum(b.nbytes for b in buffers) >= 1e9
        assert len({b.data_ptr() for b in buffers}) == len(buffers)
        calls.append("|")
        return len(calls)

    def engine(name):
        return lambda: calls.append(name) or len(calls)

    monkeypatch.setattr(bench, "measure_ceiling", ceiling)
    runs, ceilings = bench.take_turns({"a": engine("a"), "b": engine("b")}, 3)
    assert "".join(calls) == "ab|" + "a|b|" + "b|a|" + "a|b|"
    assert runs == {"a": [4, 10, 12], "b": [6, 8, 14]} and len(ceilings) == 6


def test_the_ceiling_is_the_better_of_two(monkeypatch):
    times = iter([0, 4, 10, 12])  # the sum takes 4 seconds, the product 2
    monkeypatch.setattr(bench, "perf_counter", lambda: next(times))
    assert bench.measure_ceiling([torch.ones(3, 5)] * 2) == 2 * 3 * 5 * 4 / 2


def alone(reference, lengths) -> list[list[int]]:
    """What transformers makes of each seeded prompt by itself: its new ids."""
    generator, V = torch.Generator().manual_seed(bench.SEED), reference.config.vocab_size
    rows = []
    for T, new in lengths:
        prompt = torch.randint(V, (1, T), generator=generator)
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        out = reference.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
        rows.append(out[0, T:].tolist())
    return rows


MIXED = [(1, 5), (4, 2), (7, 9)]  # three rows of Job(prompt_length=7, new_tokens=9, mixed=True)


@pytest.mark.parametrize("lengths", [[(7, 9)], [(7, 9)] * 2, MIXED], ids=["one", "two", "mixed"])
def test_every_engine_generates_what_transformers_does(save_reference, lengths):
    """Row by row and alone, with and without a cache; an end id in the vocabulary ends nothing."""
    reference, folder = save_reference()
    expected = alone(reference, lengths)
    fields = json.loads((folder / "config.json").read_text()) | {"eos_token_id": expected[0][2]}
    (folder / "config.json").write_text(json.dumps(fields))
    for path in folder.glob("generation_config.json"):
        path.unlink()
    job = Job(prompt_length=7, new_tokens=9, batch=len(lengths), mixed=lengths == MIXED)
    for name in (OURS, UNCACHED, THEIRS):
        marks, token_ids = bench.run_once(name, bench.load(name, job, folder), job)
        assert token_ids == expected, name
        assert len(marks) == 1 + 9 and marks == sorted(marks), name


def test_mixed_rows_of_fairytale_are_those_that_transformers_makes_alone():
    job = Job(prompt_length=24, new_tokens=16, batch=5, mixed=True)
    folder = bench.resolve(job.model)
    models = {name: bench.load(name, job, folder) for name in (OURS, THEIRS)}
    models[THEIRS].generation_config.eos_token_id = None
    expected = alone(models[THEIRS], job.row_lengths())
    assert len({len(row) for row in expected}) == 5 and len(set(sum(expected, []))) > 20
    for name, model in models.items():
        assert bench.run_once(name, model, job)[1] == expected, name


@pytest.mark.parametrize("mixed", [True, False])
def test_transformers_gets_one_padded_batch_and_stops_each_row_where_told(mixed, save_reference):
    """Left padding, hidden; a row that is done is padded while the others run to the longest."""
    _, folder = save_reference()
    job = Job(prompt_length=7, new_tokens=9, batch=3, mixed=mixed)
    model, calls = bench.load(THEIRS, job, folder), []
    original = model.generate

    def generate(token_ids, **options):
        calls.append((options, original(token_ids, **options)))
        return calls[-1][1]

    model.generate = generate
    _, new_ids = bench.run_once(THEIRS, model, job)
    ((options, out),) = calls
    lengths = MIXED if mixed else [(7, 9)] * 3
    assert options["attention_mask"].tolist() == [[0] * (7 - T) + [1] * T for T, _ in lengths]
    assert out.shape == (3, 7 + 9) and [len(row) for row in new_ids] == [n for _, n in lengths]
    assert out[:, 7:].tolist() == [row + [0] * (9 - len(row)) for row in new_ids]
    assert ("stopping_criteria" in options) == mixed  # equal rows need none, and pay for none


def test_a_cache_is_used_unless_it_is_refused_and_rows_leave(save_reference):
    _, folder = save_reference()
    job = Job(prompt_length=7, new_tokens=3, batch=2)
    mixed = Job(prompt_length=7, new_tokens=9, batch=3, mixed=True)
    model = bench.load(OURS, job, folder)
    seen, original = [], model.hidden_states
    model.hidden_states = lambda ids, **more: seen.append(list(ids.shape)) or original(ids, **more)
    bench.run_once(OURS, model, job)
    bench.run_once(UNCACHED, model, job)
    assert seen == [[2, 7], [2, 1], [2, 1], [2, 7], [2, 8], [2, 9]]
    seen.clear()
    bench.run_once(OURS, model, mixed)  # rows leave after 2, 5 and 9 tokens
    assert seen == [[3, 7], [3, 1]] + [[2, 1]] * 3 + [[1, 1]] * 4
    seen.clear()
    bench.run_once(UNCACHED, model, mixed)
    assert seen == [[3, 7], [3, 8], [2, 9], [2, 10], [2, 11], [1, 12], [1, 13], [1, 14], [1, 15]]
    seen.clear()
    bench.run_once(INT8, model, mixed)
    bench.run_once(INT8, model, Job(prompt_length=7, new_tokens=3))
    assert seen == [[3, 7], [3, 1]] + [[2, 1]] * 3 + [[1, 1]] * 4 + [[1, 7], [1, 1], [1, 1]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_reaches_both_engines(dtype):
    job = Job(model="fairytale", dtype=dtype, against="transformers")
    for name in job.engines:
        model = bench.load(name, job, bench.resolve(job.model))
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_a_quantized_engine_is_made_of_the_exact_weights(save_reference):
    """In bfloat16 whatever the job's dtype; no weight is off by more than half a step."""
    reference, folder = save_reference()
    model = bench.load(INT8, Job(dtype="float16"), folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    layer, theirs = model.blocks[1].mlp.down, reference.transformer.h[1].mlp.c_proj
    scales = layer.scales.float()[:, None]  # [out, 1]
    steps = (layer.codes * scales - theirs.weight.detach().t()) / scales  # [out, in]
    assert 0.45 < steps.abs().max() < 0.501


def test_random_weights_are_a_folder_that_transformers_reads(tmp_path):
    config = GPT2Config(vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=2)
    folder = bench.write_random(config, tmp_path)
    theirs, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.eos_token_id is None
    for name, p in theirs.named_parameters():
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.2), name
        else:
            assert (p == float("ln_" in name and "weight" in name)).all(), name
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        ours, expected = GPT2.from_pretrained(folder)(ids), theirs.eval()(ids).logits
    assert torch.allclose(ours, expected, atol=1e-5 * expected.abs().max().item())


def test_memory_of_processes_of_their_own(monkeypatch, tmp_path):
    """At least the weights, and far less than Python with torch; int8 saves what its codes do."""
    if not bench.STATUS.exists():
        pytest.skip("only Linux says how much memory a process ever had")
    job, folder = Job(prompt_length=5, new_tokens=3, threads=1), bench.resolve("fairytale")
    weights, told = {}, {}
    for name in (OURS, INT8):
        weights[name] = bench.weight_bytes(bench.load(name, job, folder))
        told[name] = bench.process_memory(name, job, folder)
        peak, held, trimmed = told[name].values()
        assert weights[name] < trimmed <= held <= peak < weights[OURS] + 100e6
    saved = told[OURS]["trimmed_memory_bytes"] - told[INT8]["trimmed_memory_bytes"]
    assert saved > 0.8 * (weights[OURS] - weights[INT8]) > 10e6
    with pytest.raises(ValueError, match="measuring the memory of minillm failed: .*config.json"):
        bench.process_memory(OURS, job, tmp_path)
    monkeypatch.setattr(bench, "STATUS", tmp_path / "nothing")
    assert set(bench.process_memory(OURS, job, folder).values()) == {None}


def test_trimming_gives_back_what_malloc_kept():
    """Freed blocks below one that is still in use stay resident until then."""
    if not bench.STATUS.exists() or not release_memory():
        pytest.skip("no /proc, or no malloc_trim")
    blocks = [torch.ones(25_000) for _ in range(1000)]  # 100 MB, each too small for a mapping
    full = bench_memory.memory("VmRSS")
    del blocks[:-1]
    kept = bench_memory.memory("VmRSS")
    assert release_memory() and full - kept < 20e6, "it proves little"
    assert kept - bench_memory.memory("VmRSS") > 80e6


def test_without_malloc_trim_nothing_is_said_about_it(monkeypatch, capsys):
    """As on Alpine Linux: /proc is there, the call is not."""
    if not bench.STATUS.exists():
        pytest.skip("only Linux says how much memory a process has")
    monkeypatch.setattr(quantization.ctypes, "CDLL", lambda name: object())
    job = Job(prompt_length=5, new_tokens=2, threads=1)
    bench.child(json.dumps([OURS, dataclasses.asdict(job), str(bench.resolve("fairytale"))]))
    told = json.loads(capsys.readouterr().out)
    assert told["trimmed_memory_bytes"] is None and told["peak_memory_bytes"] > 0


# ---- the command


def test_json_with_everything(quick, capsys, save_reference):
    _, folder = save_reference()
    report = report_of(
        capsys, "--model", folder, "--no-cache", "--against", "transformers", "--batch", 2
    )
    assert set(report) == set(
        "job seed machine engines ratios bytes_per_step share_of_ceiling "
        "ceiling_bytes_per_s equal_ids".split()
    )
    assert list(report["engines"]) == [OURS, UNCACHED, THEIRS]
    assert report["equal_ids"] == {"equal": 18, "of": 18}
    assert report["job"]["batch"] == 2 and report["job"]["threads"] == 1
    kept = 2 * 2 * 32 * (7 + 9 // 2) * 2 * 4  # k and v, layers, width, positions, rows, bytes
    assert report["bytes_per_step"] == 4 * (2 * (12 * 32**2 + 13 * 32) + 64 + 97 * 32) + kept


def test_json_of_mixed_rows(quick, capsys):
    report = report_of(capsys, "--batch", 3, "--mixed", "--against", "transformers")
    assert report["job"]["mixed"] is True and list(report["engines"]) == [OURS, THEIRS]
    assert report["equal_ids"] == {"equal": 5 + 2 + 9, "of": 5 + 2 + 9}
    assert list(report["ratios"][THEIRS]) == ["total"]
    assert report["bytes_per_step"] is None  # no two steps are alike


def test_json_of_quantized_engines(quick, capsys, save_reference):
    """Both, once each, after ours, and beside everything else; their ids are their own."""
    _, folder = save_reference()
    more = ["--quantize", "int4", "int8", "int8", "--no-cache", "--against", "transformers"]
    report = report_of(capsys, "--model", folder, *more)
    assert list(report["engines"]) == [OURS, INT8, INT4, UNCACHED, THEIRS]
    assert report["equal_ids"] == {"equal": 9, "of": 9}
    for name in (INT8, INT4):
        ratios, row = report["ratios"][name], report["engines"][name]
        assert list(ratios) == ["first_token", "decode_step", "total", "weight"]
        assert ratios["weight"] == row["weight_bytes"] / report["engines"][OURS]["weight_bytes"]
        assert row["first_token_s"] > 0 and row["decode_step_s"] > 0
    assert 0.2 < report["ratios"][INT4]["weight"] < report["ratios"][INT8]["weight"] < 0.4
    assert bench_table(report).count("minillm int8") == 3


def test_quantized_engines_on_mixed_rows(quick, capsys):
    report = report_of(capsys, "--batch", 8, "--mixed", "--quantize", "int8")
    assert list(report["engines"]) == [OURS, INT8]
    assert list(report["ratios"][INT8]) == ["total", "weight"]
    assert "minillm int8 : minillm = " in bench_table(report)


def test_layers_without_a_kernel_are_told_in_one_line(quick, capsys, save_reference):
    _, folder = save_reference(n_embd=24)
    small = ["--prompt-length", "3", "--new-tokens", "2", "--repeat", "1", "--threads", "1"]
    assert main(["bench", "-m", str(folder), "--quantize", "int8", *small]) == 0
    err = capsys.readouterr().err
    assert err.startswith("minillm: the int8 kernel takes rows that 16 divides, not 24: ")
    assert err.count("\n") == 1


def test_weights_that_cannot_be_quantized_are_one_line(quick, capsys, save_reference):
    _, folder = save_reference(n_embd=24)
    small = ["--prompt-length", "3", "--new-tokens", "2", "--repeat", "1"]
    assert main(["bench", "-m", str(folder), "--quantize", "int4", *small]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert err.startswith("minillm: blocks.0.") and "24" in err


def test_alone_it_needs_no_transformers(quick, capsys, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    report = report_of(capsys, "--model", "fairytale")
    assert list(report["engines"]) == [OURS] and report["ratios"] == {}
    assert 0 < report["share_of_ceiling"] < 1 and "equal_ids" not in report
    assert "transformers" not in report["machine"]["versions"]


def test_gpt2_shape_lives_in_a_folder_that_is_removed(quick, capsys, monkeypatch):
    tiny, folders = GPT2Config(vocab_size=61, n_positions=32, n_embd=24, n_layer=1, n_head=2), []
    original = bench.write_random
    monkeypatch.setattr(bench, "GPT2Config", lambda: tiny)
    monkeypatch.setattr(
        bench, "write_random", lambda *a: folders.append(original(*a)) or folders[-1]
    )
    report = report_of(capsys, "--model", "gpt2-shape", "--against", "transformers")
    assert report["equal_ids"] == {"equal": 9, "of": 9}
    assert len(folders) == 1 and not folders[0].exists()


def test_plot_draws_a_figure(quick, capsys, tmp_path):
    path = tmp_path / "bench.png"
    report_of(capsys, "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    report = summary(memory=dict.fromkeys(SIZES), runs=QUANTIZED_RUNS)
    bench_report.draw(report, str(tmp_path / "bench.svg"))
    text = (tmp_path / "bench.svg").read_text()
    for shown in ("no cache", "minillm int8", "weights (MB)", "12"):
        assert f"<!-- {shown} -->" in text, shown  # beside the outlines


def test_a_wrong_ceiling_fails_the_command(quick, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceiling", lambda buffers: 1.0)
    assert main(["bench", "--new-tokens", "3", "--repeat", "1"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "the ceiling was measured wrongly" in err


BAD = [
    (["--prompt-length", "0"], "--prompt-length is 0, expected >= 1"),
    (["--new-tokens", "-3"], "--new-tokens is -3, expected >= 2"),
    (["--new-tokens", "1"], "--new-tokens is 1, expected >= 2"),
    (["--batch", "0"], "--batch is 0, expected >= 1"),
    (["--mixed"], "--mixed with --batch 1 has nothing to mix: it needs at least 2 rows"),
    (["--mixed", "--batch", "-2"], "--batch is -2, expected >= 1"),
    (["--mixed", "--batch", "2", "--new-tokens", "1"], "--new-tokens is 1, expected >= 2"),
    (
        ["--mixed", "--batch", "2", "--new-tokens", "449"],
        "--prompt-length 64 and --new-tokens 449 ",
    ),
    (["--threads", "0"], "--threads is 0, expected >= 1"),
    (["--repeat", "0"], "--repeat is 0, expected >= 1"),
    (["--prompt-length", "500", "--new-tokens", "13"], "--prompt-length 500 and --new-tokens 13 "),
    (["--model", "gpt2-shape", "--new-tokens", "1000"], "the model's context holds 1024"),
    (["--model", "no/such/model/here"], "no model named 'no/such/model/here'"),
    (["--plot", "no/such/folder/x.png"], "no/such/folder/x.png"),
    (["--plot", "picture.xyz"], "--plot is 'picture.xyz', expected a name that ends in ."),
    (["--plot", "picture"], "--plot is 'picture', expected a name that ends in ."),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_line_before_any_measuring(arguments, said, capsys, monkeypatch):
    for name in ("process_memory", "load", "take_turns", "write_random"):
        monkeypatch.delattr(bench, name)
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("minillm: ") and err.count("\n") == 1
    assert said in err
    assert not Path("picture.xyz").exists() and not Path("picture").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dtype", "int8"],
        ["--against", "x"],
        ["--batch", "two"],
        ["--quantize", "int3"],
        ["--quantize", "int8", "int3"],
        ["--quantize"],
    ],
)
def test_unknown_choices_end_at_the_parser(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2 and arguments[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["--against", "transformers"], "transformers"), (["--plot", "x.png"], "matplotlib")],
)
def test_what_is_missing_is_named_with_its_cure(arguments, name, capsys, monkeypatch):
    for module in (bench, bench_report):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert main(["bench", *arguments]) == 2
    err = capsys.readouterr().err
    assert f"needs {name}, which is not installed: pip install 'minillm[lab]'" in err


def test_the_last_context_position_is_used(quick, capsys, save_reference):
    _, folder = save_reference(n_positions=16)
    report = report_of(capsys, "--model", folder)  # 7 + 9 = 16
    assert dataclasses.asdict(Job()).keys() == report["job"].keys()


def test_huge_pages_are_asked_for_unless_the_user_has_said(monkeypatch, capsys):
    for before, after in [(None, "1"), ("0", "0")]:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
        if before:
            monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", before)
        main(["bench", "--repeat", "0"])
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == after

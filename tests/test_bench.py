"""`minillm bench`: its arithmetic on given times, its tokens against transformers', its refusals."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from minillm import bench, bench_report
from minillm.bench import OURS, THEIRS, UNCACHED, Job
from minillm.bench_report import bench_table
from minillm.cli import main
from minillm.gpt2 import GPT2, GPT2Config


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch):
    """What the command sets in its own process does not outlive a test."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick(monkeypatch):
    """No processes of their own, and a ceiling that a loaded machine cannot lower."""
    monkeypatch.setattr(bench, "peak_memory", lambda name, job, folder: 5_000_000)
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


RUNS = {  # start, first token, then the steps; the medians are no means
    OURS: [([0, 2, 3, 4, 9], [[1, 2, 3, 4]]), ([10, 14, 15, 16, 17], [[1, 2, 3, 4]])],
    UNCACHED: [([0, 2, 10, 20, 34], [[1, 2, 3, 4]]), ([0, 2, 10, 20, 30], [[1, 2, 3, 4]])],
    THEIRS: [([5, 11, 13, 15, 17], [[1, 2, 3, 4]]), ([5, 11, 13, 15, 60], [[1, 2, 9, 4]])],
}


def summary(batch=1, ceilings=(30.0, 50.0, 1000.0), step_bytes=40, memory=7_000_000, runs=RUNS):
    job = Job(prompt_length=6, new_tokens=4, batch=batch, against="transformers", no_cache=True)
    return bench_report.summarize(
        job, runs, list(ceilings), step_bytes, dict.fromkeys(runs, memory)
    )


def test_medians_ratios_and_share_from_given_times():
    report = summary()
    assert report["engines"][OURS] == {
        "first_token_s": 3,
        "prefill_tokens_per_s": 2,
        "decode_step_s": 1,
        "decode_tokens_per_s": 1,
        "total_s": 8,
        "peak_memory_bytes": 7_000_000,
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
    row = next(line for line in text.splitlines() if line.startswith("transformers  "))
    assert (
        row.split()
        == "transformers 6000.00 ms 1 tok/s 2000.00 ms 0.5 tok/s 33500.0 ms 7 MB".split()
    )
    assert bench_table(summary(memory=None)).count("not measured") == 3


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
    memory = dict.fromkeys(MIXED_RUNS, 7_000_000)
    return bench_report.summarize(job, MIXED_RUNS, [50.0], None, memory)


def test_mixed_rows_count_their_own_tokens_and_compare_in_total_only():
    report = mixed_summary()
    assert report["engines"][OURS] == {
        "first_token_s": 3,
        "prefill_tokens_per_s": (1 + 8) / 3,
        "decode_step_s": None,
        "decode_tokens_per_s": (3 + 1) / 6,  # after the first token of each row
        "total_s": 9,
        "peak_memory_bytes": 7_000_000,
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
    row = next(line for line in text.splitlines() if line.startswith("transformers  "))
    assert row.split() == "transformers 4000.00 ms 2 tok/s 0.3 tok/s 18000.0 ms 7 MB".split()


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_reaches_both_engines(dtype):
    job = Job(model="fairytale", dtype=dtype, against="transformers")
    for name in job.engines:
        model = bench.load(name, job, bench.resolve(job.model))
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


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


def test_peak_memory_of_a_process_of_its_own(monkeypatch, tmp_path):
    """At least the weights in float32, and far less than Python with torch."""
    if not bench.STATUS.exists():
        pytest.skip("only Linux says how much memory a process ever had")
    job, folder = Job(prompt_length=5, new_tokens=3, threads=1), bench.resolve("fairytale")
    weights = sum(p.nbytes for p in bench.load(OURS, job, folder).parameters())
    assert weights < bench.peak_memory(OURS, job, folder) < weights + 100e6
    with pytest.raises(ValueError, match="measuring the memory of minillm failed: .*config.json"):
        bench.peak_memory(OURS, job, tmp_path)
    monkeypatch.setattr(bench, "STATUS", tmp_path / "nothing")
    assert bench.peak_memory(OURS, job, folder) is None


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
    report = summary(memory=None)
    bench_report.draw(report, str(tmp_path / "bench.svg"))
    assert "<!-- no cache -->" in (tmp_path / "bench.svg").read_text()  # beside the outlines


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
    for name in ("peak_memory", "load", "take_turns", "write_random"):
        monkeypatch.delattr(bench, name)
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("minillm: ") and err.count("\n") == 1
    assert said in err
    assert not Path("picture.xyz").exists() and not Path("picture").exists()


@pytest.mark.parametrize("arguments", [["--dtype", "int8"], ["--against", "x"], ["--batch", "two"]])
def test_unknown_choices_end_at_the_parser(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2 and arguments[1] in capsys.readouterr().err


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

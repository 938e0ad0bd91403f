"""`minillm bench --draft`: its counts and ratios by hand, its ids, its tasks, its refusals."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_chat import SMOLLM2, make_model, make_tokenizer
from transformers import GPT2LMHeadModel

import minillm
from minillm import bench, bench_draft, speculative
from minillm.bench_draft import COSTS, DRAFT, PLAIN, DraftJob, Round
from minillm.bench_report import draft_table
from minillm.cli import main
from minillm.speculative import NgramDraft
from minillm.weights import resolve

pytestmark = pytest.mark.usefixtures("one_thread", "unchanged_process")

QUICK = ["--new-tokens", "32", "--repeat", "1", "--threads", "1"]


@pytest.fixture
def only(monkeypatch):
    """`only("code")`: the other tasks are not there."""

    def leave(*names):
        monkeypatch.setattr(bench_draft, "TASKS", {n: bench_draft.TASKS[n] for n in names})

    return leave


# ---- arithmetic

PLAIN_RUNS = [  # the first token at any time, then seven more in 7, 14 or 3.5 seconds
    ([Round(2 + n * step, 0, 0, n + 1) for n in range(8)], list(range(8))) for step in (1, 2, 0.5)
]
ROUNDS = [(5, 8, 0, 1), (6, 3, 3, 5), (8, 3, 1, 7), (8.5, 0, 0, 8)]  # 7 tokens in 3.5 seconds
SLOW = [(time * 4, *counts) for time, *counts in ROUNDS]
DRAFT_RUNS = [([Round(*r) for r in rounds], list(range(8))) for rounds in (SLOW, ROUNDS, ROUNDS)]
FORWARD_COSTS = {1: 1.0, 2: 1.5, 5: 1.8}


def test_figures_by_hand():
    """Of the rounds after the prompt's: 4, 2 and 1 tokens from forwards over 4, 4 and 1."""
    row = bench_draft.figures(PLAIN_RUNS, DRAFT_RUNS, FORWARD_COSTS, 0.0)
    cost = (1.7 + 1.7 + 1) / 3  # 4 lies two thirds of the way from 2 to 5
    assert row == {
        "plain_tokens_per_s": 1,
        "draft_tokens_per_s": 2,
        "speed_up": 2,
        "predicted_speed_up": pytest.approx(7 / 3 / cost),
        "tokens_per_forward": 7 / 3,
        "proposed": 6,
        "accepted": 4,
        "acceptance": 4 / 6,
        "forwards": {1: 1, 4: 2},
        "cost_per_forward": pytest.approx(cost),
        "equal_ids": True,
    }


def test_a_model_that_guesses_costs_its_forwards_too():
    row = bench_draft.figures(PLAIN_RUNS, DRAFT_RUNS, FORWARD_COSTS, 0.1)
    assert row["cost_per_forward"] == pytest.approx((1.7 + 1.7 + 1 + 6 * 0.1) / 3)
    assert row["predicted_speed_up"] == pytest.approx(7 / 5)


@pytest.mark.parametrize("place", [0, 4, 7])
@pytest.mark.parametrize("run", [0, 2])
def test_one_other_id_in_any_run_is_not_equal(place, run):
    draft = [(rounds, list(ids)) for rounds, ids in DRAFT_RUNS]
    draft[run][1][place] = 99
    assert not bench_draft.figures(PLAIN_RUNS, draft, FORWARD_COSTS, 0.0)["equal_ids"]


def test_without_guesses_there_is_no_share():
    row = bench_draft.figures(PLAIN_RUNS, PLAIN_RUNS, FORWARD_COSTS, 0.0)
    assert (row["acceptance"], row["speed_up"], row["predicted_speed_up"]) == (None, 1, 1)
    assert row["forwards"] == {1: 7}


def test_costs_lie_on_straight_lines():
    costs = {1: 1.0, 2: 1.5, 5: 1.8, 9: 3.0}
    told = [bench_draft.interpolate(costs, T) for T in (1, 2, 3, 5, 7, 9, 11)]
    assert told == pytest.approx([1, 1.5, 1.6, 1.8, 2.4, 3, 3.6])


def summary(costs=None, story=PLAIN_RUNS):
    """Two tasks, one with guesses and one without, and given seconds of forwards."""
    costs = costs or [
        {"model": {1: [4, 2, 9], 2: [3, 3, 3], 5: [7, 1]}},
        {"model": {1: [2], 2: [3], 5: []}},
    ]
    runs = {("list", PLAIN): PLAIN_RUNS, ("list", DRAFT): DRAFT_RUNS, COSTS: costs}
    runs |= {("story", PLAIN): PLAIN_RUNS, ("story", DRAFT): story}
    job = DraftJob(new_tokens=32, threads=1, repeat=3)
    return bench_draft.summarize(job, {"list": 75, "story": 41}, runs)


def test_costs_are_medians_of_all_turns():
    report = summary()
    assert report["forward_s"] == 3 and report["forward_costs"] == {1: 1, 2: 1, 5: 4 / 3}
    assert report["cost_per_guess"] == 0 and report["equal_ids"] is True
    guessing = [{"model": {1: [2], 5: [4]}, "draft": {1: [0.5, 0.7]}}] * 2
    report = summary(guessing)
    assert report["cost_per_guess"] == pytest.approx(0.3)
    assert "each guess of the draft's model costs 0.30 on top" in draft_table(report)


def test_the_table_says_it_all():
    text = draft_table(summary())
    head, _, _, _, listed, story, *_ = text.split("\n")
    assert head == (
        "fairytale, draft ngram: 32 new tokens, float32, 1 threads, greedy, medians of 3 runs"
    )
    assert listed.split() == "list 1.0 tok/s 2.0 tok/s 2.00 x 2.03 x 2.33 4/6 = 67%".split()
    assert story.split() == "story 1.0 tok/s 1.0 tok/s 1.00 x 1.00 x 1.00 0/0".split()
    assert "1, 2, 5 tokens in a forward cost 1.00 : 1.00 : 1.33, and 1 takes 3000.00 ms" in text
    assert text.endswith("ids equal with and without the draft: in 2 of 2")
    broken = [(rounds, [7] * 8) for rounds, _ in PLAIN_RUNS]
    report = summary(story=broken)
    assert report["equal_ids"] is False and report["tasks"]["list"]["equal_ids"] is True
    assert draft_table(report).endswith("in 1 of 2, NOT in story")


# ---- measuring


class Toy(torch.nn.Module):
    """Counts 0 1 2 3 4 0 1 2 …, and a forward over T tokens takes `seconds[T]` of a false clock."""

    def __init__(self, seconds):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(context_length=64, vocab_size=5, cache_shape=(1, 1, 1))
        self.seconds, self.now, self.seen = seconds, 0.0, []

    def hidden_states(self, token_ids, cache):
        T = token_ids.shape[1]
        self.seen.append((cache.length, T))
        self.now += self.seconds.get(T, 100)
        cache.update(0, torch.zeros(1, 1, T, 1), torch.zeros(1, 1, T, 1))
        return torch.nn.functional.one_hot((token_ids + 1) % 5, 5).float()

    def head(self, x):
        return x


@pytest.fixture
def toy(monkeypatch):
    """An LLM around a toy, and the clock that the toy moves."""
    model = Toy({1: 2.0, 2: 3.0, 3: 4.5, 5: 5.0, 9: 6.0})
    monkeypatch.setattr(bench_draft, "perf_counter", lambda: model.now)
    return SimpleNamespace(model=model, new_draft=partial(NgramDraft, k=8))


PROMPT = [0, 1, 2, 3, 4, 0, 1, 2]


def test_rounds_by_hand(toy):
    """Eight guesses hold behind the prompt, then eight more, then the two that there is room for."""
    rounds, ids = bench_draft.run_once(toy, PROMPT, 21, DRAFT)
    assert ids == [(3 + n) % 5 for n in range(21)]
    assert toy.model.seen == [(0, 16), (16, 9), (25, 3)]
    assert rounds == [(100, 8, 8, 9), (106, 8, 8, 18), (110.5, 2, 2, 21)]
    toy.model.now, toy.model.seen = 0.0, []
    plain, same = bench_draft.run_once(toy, PROMPT, 21, PLAIN)
    assert same == ids and toy.model.seen == [(0, 8)] + [(8 + n, 1) for n in range(20)]
    assert plain == [(100 + 2 * n, 0, 0, n + 1) for n in range(21)]
    runs = {("list", PLAIN): [(plain, ids)], ("list", DRAFT): [(rounds, ids)]}
    runs[COSTS] = [bench_draft.forward_seconds(toy, 20)]
    report = bench_draft.summarize(DraftJob(), {"list": 8}, runs)
    row = report["tasks"]["list"]
    assert report["forward_costs"] == {1: 1, 2: 1.5, 5: 2.5, 9: 3}
    assert row["speed_up"] == pytest.approx(12 / 10.5 / (20 / 40)) and row["accepted"] == 10
    # 3 tokens cost 4.5 / 2, and lie on the line from 2 to 5 at 1.5 + 1 / 3
    assert row["predicted_speed_up"] == pytest.approx(12 / (3 + 1.5 + 1 / 3))


def test_forwards_are_timed_behind_a_past(toy):
    """Sizes in turn, as large as the draft's guesses need; the context's end is not crossed."""
    seconds = bench_draft.forward_seconds(toy, 20)
    assert seconds == {"model": {1: [2] * 5, 2: [3] * 5, 5: [5] * 5, 9: [6] * 5}}
    assert toy.model.seen == [(0, 20)] + [(20, T) for T in (1, 2, 5, 9)] * 5
    toy.model.seen, toy.new_draft = [], lambda: NgramDraft(k=4)
    assert list(bench_draft.forward_seconds(toy, 63)["model"]) == [1, 2, 5]
    assert toy.model.seen[:4] == [(0, 59), (59, 1), (59, 2), (59, 5)]
    toy.new_draft = lambda: NgramDraft(k=15)
    assert list(bench_draft.forward_seconds(toy, 20)["model"]) == [1, 2, 5, 9, 16]
    small = Toy({1: 0.25})
    toy.new_draft = lambda: SimpleNamespace(k=8, model=small)
    small.hidden_states = lambda *a, **more: moved(toy.model, Toy.hidden_states(small, *a, **more))
    seconds = bench_draft.forward_seconds(toy, 20)
    assert seconds["draft"] == {1: [0.25] * 5} and seconds["model"][9] == [6] * 5


def moved(model, result):
    """The clock is the big model's: a forward of the small one moves it by a quarter second."""
    model.now += 0.25
    return result


def test_plain_and_draft_take_turns_after_a_warm_up(only, monkeypatch):
    only("code")
    calls, run = [], (PLAIN_RUNS[0][0], [1])
    monkeypatch.setattr(bench_draft, "run_once", lambda llm, ids, n, way: calls.append(way) or run)
    costs = {"model": {1: [1.0], 2: [1.0]}}
    monkeypatch.setattr(bench_draft, "forward_seconds", lambda llm, n: calls.append(n) or costs)
    report = bench_draft.measure_draft(DraftJob(new_tokens=32, threads=1, repeat=2))
    past = report["tasks"]["code"]["prompt_tokens"] + 16
    turn = [PLAIN, DRAFT, past]
    assert calls == [*turn, *turn, *reversed(turn)]


def test_ids_are_those_of_transformers_and_rounds_those_that_ran():
    """Counted at the model's own door, and by the engine."""
    theirs = GPT2LMHeadModel.from_pretrained(resolve("fairytale")).eval()
    theirs.generation_config.eos_token_id = None
    for draft in ("ngram", "fairytale-draft"):
        llm = minillm.LLM("fairytale", draft=draft)
        ids = bench_draft.prompt_ids(llm, "list", 32)
        seen, original = [], llm.model.hidden_states
        llm.model.hidden_states = lambda t, seen=seen, original=original, **more: (
            seen.append(t.shape[1]) or original(t, **more)
        )
        rounds, new = bench_draft.run_once(llm, ids, 32, DRAFT)
        prompt = torch.tensor([ids])
        options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
        out = theirs.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
        assert new == out[0, len(ids) :].tolist()
        assert seen[1:] == [r.proposed + 1 for r in rounds[1:]] and len(seen) == len(rounds) < 32
        assert [r.time for r in rounds] == sorted({r.time for r in rounds})
        told = llm.generate(ids, max_new_tokens=32).speculation
        assert sum(r.proposed for r in rounds) == told.proposed > 20
        assert sum(r.accepted for r in rounds) == told.accepted > 4
        assert rounds[-1].done == 32


def test_an_end_id_ends_nothing():
    llm = minillm.LLM("fairytale", draft="ngram")
    ids = bench_draft.prompt_ids(llm, "story", 9)
    llm.end_ids = {bench_draft.run_once(llm, ids, 9, PLAIN)[1][2]}
    for way in (PLAIN, DRAFT):
        assert len(bench_draft.run_once(llm, ids, 9, way)[1]) == 9


def test_who_can_chat_is_asked_and_others_get_a_text(tmp_path):
    tokenizer = make_tokenizer(tmp_path, eos_token="<|im_end|>", chat_template=SMOLLM2)
    make_model(tmp_path, max_position_embeddings=1024)
    llm = minillm.LLM(tmp_path)
    for name, task in bench_draft.TASKS.items():
        expected = tokenizer(task.text)["input_ids"]
        if name in ("story", "explanation"):
            asked = [{"role": "user", "content": task.question}]
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert bench_draft.prompt_ids(llm, name, 1024 - len(expected)) == expected
        with pytest.raises(ValueError, match=f"behind the {len(expected)} tokens .* {name!r}: "):
            bench_draft.prompt_ids(llm, name, 1025 - len(expected))
    tale = minillm.LLM("fairytale")
    assert tale.tokenizer.decode(bench_draft.prompt_ids(tale, "story", 9)).startswith("When the")


# ---- the command


def test_json_and_table_of_fairytale(capsys):
    """All tasks; what repeats is guessed, and the ids are the same."""
    assert main(["bench", "--draft", "ngram", *QUICK, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert not err and report["equal_ids"] is True
    assert report["job"] == {
        "model": "fairytale",
        "draft": "ngram",
        "new_tokens": 32,
        "dtype": "float32",
        "threads": 1,
        "repeat": 1,
    }
    assert list(report["tasks"]) == ["list", "copy", "code", "story", "explanation"]
    assert list(report["forward_costs"]) == ["1", "2", "5", "9", "13"] and report["forward_s"] > 0
    for name, row in report["tasks"].items():
        forwards = sum(row["forwards"].values())
        assert sum((int(T) - 1) * n for T, n in row["forwards"].items()) == row["proposed"], name
        assert row["tokens_per_forward"] * forwards == pytest.approx(row["accepted"] + forwards)
        assert row["speed_up"] > 0 and row["predicted_speed_up"] > 0
    assert report["tasks"]["list"]["accepted"] > 5
    assert "NOT" not in draft_table(report) and draft_table(report).endswith("in 5 of 5")


def test_the_options_reach_the_measuring(only, capsys, monkeypatch):
    """bfloat16 may round a tie to another id, and then the command says so."""
    only("story")
    threads, dtypes, original = [], set(), bench_draft.run_once
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def watched(llm, *arguments):
        dtypes.update(p.dtype for p in llm.model.parameters())
        return original(llm, *arguments)

    monkeypatch.setattr(bench_draft, "run_once", watched)
    more = ["--dtype", "bfloat16", "--threads", "3", "--json"]
    code = main(["bench", "--draft", "fairytale-draft", *QUICK, *more])
    report = json.loads(capsys.readouterr().out)
    assert report["job"]["dtype"] == "bfloat16" and dtypes == {torch.bfloat16}
    assert threads[0] == report["job"]["threads"] == 3
    assert code == (not report["equal_ids"])
    assert report["cost_per_guess"] > 0 and list(report["forward_costs"]) == ["1", "2", "5"]


def test_a_draft_that_changes_the_text_fails_the_command(only, capsys, monkeypatch):
    """As when whatever is guessed is taken."""

    def believe(request, guesses, shares, logits):
        for guess in guesses:
            request.append(guess)
        request.accept(logits[-1])
        return len(guesses)

    only("list")
    monkeypatch.setattr(speculative, "verify", believe)
    assert main(["bench", "--draft", "ngram", *QUICK]) == 1
    out, err = capsys.readouterr()
    assert out.endswith("in 0 of 1, NOT in list\n") and not err


OTHERS = [
    (["--batch", "1"], "--batch does not go with --draft: a draft guesses for one request"),
    (["--mixed"], "--mixed does not go with --draft: a draft guesses for one request"),
    (["--against", "transformers"], "--against does not go with --draft: what is compared"),
    (["--no-cache"], "--no-cache does not go with --draft: guesses are checked behind a cache"),
    (["--quantize", "int8"], "--quantize does not go with --draft: what is compared"),
    (["--prompt-length", "9"], "--prompt-length does not go with --draft: it brings texts"),
    (["--plot", "x.png"], "--plot does not go with --draft: it prints a table"),
    (["--new-tokens", "31"], "--new-tokens is 31, expected >= 32"),
    (["--threads", "0"], "--threads is 0, expected >= 1"),
    (["--repeat", "0"], "--repeat is 0, expected >= 1"),
    (["--new-tokens", "400"], "--new-tokens 400 are too many behind the "),
    (["-m", "gpt2-shape"], "--draft needs a model that continues texts: gpt2-shape is random"),
    (["-m", "no-such-model"], "no-such-model"),
    (["--draft", "no-such-draft"], "no-such-draft"),
    (["--draft", ""], "''"),
]


@pytest.mark.parametrize(("arguments", "said"), OTHERS, ids=[" ".join(a) for a, _ in OTHERS])
def test_what_makes_no_sense_is_one_line_before_any_measuring(arguments, said, capsys, monkeypatch):
    for module, name in [(bench_draft, "run_once"), (bench_draft, "in_turn"), (bench, "measure")]:
        monkeypatch.setattr(module, name, None)
    assert main(["bench", "--draft", "ngram", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("minillm: ") and err.count("\n") == 1
    assert said in err


def test_another_vocabulary_and_no_tokenizer_are_one_line(capsys, save_reference):
    _, folder = save_reference()
    assert main(["bench", "--draft", str(folder)]) == 2
    assert "the draft's vocabulary has 97 tokens, the model's 4096" in capsys.readouterr().err
    assert main(["bench", "-m", str(folder), "--draft", "ngram"]) == 2
    assert "--draft is measured on texts: no tokenizer.json" in capsys.readouterr().err

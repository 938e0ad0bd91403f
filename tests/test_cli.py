"""The command line and the engine's front door: text for good input, one line and exit code 2 for bad."""

import json
import re
import subprocess
import sys
import warnings

import pytest

import minillm
from minillm.cli import main
from minillm.gpt2 import GPT2
from minillm.weights import resolve

pytestmark = pytest.mark.usefixtures("one_thread")


def run(*arguments) -> tuple[int, str, str]:
    """The command in a process of its own, as a user types it."""
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from minillm.cli import main; sys.exit(main())",
            *arguments,
        ],
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout, result.stderr


def test_generate_prints_a_tale(capsys):
    assert main(["generate", "Once upon a time", "--max-new-tokens", "30"]) == 0
    printed = capsys.readouterr().out
    out = minillm.LLM("fairytale").generate("Once upon a time", max_new_tokens=30)
    assert printed == "Once upon a time" + out.text + "\n"
    assert len(out.token_ids) == 30 and out.finish_reason == "length"


def test_a_prompt_of_broken_bytes_is_shown_with_a_replacement(capsys):
    """The shell hands over bytes that are no UTF-8 as lone surrogates, which cannot be printed."""
    assert main(["generate", "Once \udcff upon", "-n", "2"]) == 0
    assert capsys.readouterr().out.startswith("Once \ufffd upon")


def test_generate_streams(monkeypatch, capsys):
    """Each piece is printed before the next one is computed."""
    seen = []
    original = minillm.LLM.stream

    def watched(self, *arguments):
        for piece in original(self, *arguments):
            seen.append(capsys.readouterr().out)
            yield piece

    monkeypatch.setattr(minillm.LLM, "stream", watched)
    main(["generate", "Once", "-n", "6"])
    assert sum(bool(text) for text in seen) >= 5


def test_completion_and_stream_agree():
    llm = minillm.LLM("fairytale")
    out = llm.generate("The fox", max_new_tokens=40)
    assert "".join(llm.stream("The fox", max_new_tokens=40)) == out.text
    assert out.prompt_token_ids == llm.tokenizer.encode("The fox")
    assert llm.tokenizer.decode(out.token_ids) == out.text


def test_an_end_token_stops_and_is_not_shown():
    llm = minillm.LLM("fairytale")
    free = llm.generate("The fox", max_new_tokens=10)
    llm.end_ids = {free.token_ids[4]}
    end = free.token_ids.index(free.token_ids[4])
    out = llm.generate("The fox", max_new_tokens=10)
    assert (out.finish_reason, out.token_ids) == ("stop", free.token_ids[: end + 1])
    assert (
        out.text
        == llm.tokenizer.decode(free.token_ids[:end])
        == "".join(llm.stream("The fox", max_new_tokens=10))
    )


def test_the_context_is_a_finish_reason():
    llm = minillm.LLM("fairytale")
    prompt = "and " * 509
    room = 512 - len(llm.encode(prompt))
    assert 0 < room < 10
    llm.end_ids = set()
    out = llm.generate(prompt, max_new_tokens=50)
    assert (out.finish_reason, len(out.token_ids)) == ("context", room)


def test_the_options_reach_the_sampler(capsys):
    """Each option changes the text the way the same field does, and only that option."""
    llm, prompt = minillm.LLM("fairytale"), "The old king"
    plain = {"temperature": 1.3, "seed": 7, "max_new_tokens": 24}
    texts = set()
    for field in [
        {},
        {"seed": 8},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"repetition_penalty": 1.8},
        {"stop": "e"},
    ]:
        fields = plain | field
        flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in fields.items()]
        assert main(["generate", prompt, *(text for flag in flags for text in flag)]) == 0
        printed = capsys.readouterr().out
        assert printed == prompt + llm.generate(prompt, **fields).text + "\n"
        texts.add(printed)
    assert len(texts) == 8


def test_without_streaming_the_text_is_the_same_and_comes_at_once(capsys, monkeypatch):
    assert main(["generate", "The fox", "-n", "20"]) == 0
    streamed = capsys.readouterr().out
    flushed = []
    monkeypatch.setattr("builtins.print", lambda *parts, **how: flushed.append(parts))
    assert main(["generate", "The fox", "-n", "20", "--no-stream"]) == 0
    assert ["".join(map(str, parts)) for parts in flushed] == [streamed.rstrip("\n"), ""]


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantize_reaches_the_engine(bits, capsys):
    """The text is that of the same codes, and with 4 bits another one than without."""
    prompt, fields = "The old king", {"max_new_tokens": 24}
    assert main(["generate", prompt, "-n", "24", "--quantize", bits]) == 0
    out, err = capsys.readouterr()
    quantized = minillm.LLM("fairytale", quantize=bits)
    assert any("codes" in name for name, _ in quantized.model.named_buffers())
    assert out == prompt + quantized.generate(prompt, **fields).text + "\n" and not err
    if bits == "int4":
        assert out != prompt + minillm.LLM("fairytale").generate(prompt, **fields).text + "\n"


@pytest.mark.parametrize("draft", ["ngram", "fairytale-draft"])
def test_draft_reaches_the_engine(draft, capsys, monkeypatch):
    """The text is the same, from fewer forwards of the model than it has tokens."""
    forwards, original = [], GPT2.hidden_states

    def counted(self, *arguments, **options):
        forwards.append(len(self.blocks))
        return original(self, *arguments, **options)

    monkeypatch.setattr(GPT2, "hidden_states", counted)
    prompt = "Why does the cock crow in the morning? Long ago"  # it soon repeats itself
    assert main(["generate", prompt, "-n", "24"]) == 0
    plain, before = capsys.readouterr(), forwards.count(6)
    assert main(["generate", prompt, "-n", "24", "--draft", draft]) == 0
    assert capsys.readouterr() == plain
    assert before == 24 and 24 + 24 > forwards.count(6) > 24
    assert (2 in forwards) == (draft == "fairytale-draft")  # the draft has 2 blocks


def test_a_draft_of_another_size_is_one_line(save_reference, capsys):
    _, folder = save_reference()
    assert main(["generate", "Hi", "--draft", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert err.startswith("minillm: the draft's vocabulary has 97 tokens, the model's 4096: ")


@pytest.mark.parametrize("command", [["generate", "Hi"], ["chat"]])
@pytest.mark.parametrize("value", [["int3"], ["bfloat16"], []])
def test_other_bits_end_at_the_parser(command, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--quantize", *value])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and not out and "--quantize" in err


def test_a_warning_is_one_line_without_its_place_in_the_code(monkeypatch, capsys):
    def warn(self, *arguments, **options):
        warnings.warn("rows of 24\nare slow", stacklevel=2)
        return iter(["!"])

    monkeypatch.setattr(minillm.LLM, "stream", warn)
    before = warnings.showwarning
    assert main(["generate", "Hi"]) == 0
    assert capsys.readouterr() == ("Hi!\n", "minillm: rows of 24 are slow\n")
    assert warnings.showwarning is before


def test_several_stop_strings(capsys):
    assert main(["generate", "The wolf", "--stop", "zebra", "--stop", "friend"]) == 0
    assert capsys.readouterr().out == "The wolf had a good \n"


def test_a_text_that_ends_at_once_is_only_the_prompt(capsys):
    assert main(["generate", "The wolf", "--stop", " "]) == 0
    assert capsys.readouterr().out == "The wolf\n"


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -c 'from minillm.cli import main; raise SystemExit(main())' generate Hi -n 40 | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("H", "")


def test_several_prompts_come_back_in_order():
    llm = minillm.LLM("fairytale")
    params = minillm.SamplingParams(temperature=1.0, seed=5, max_new_tokens=12)
    prompts = ["The fox", "The king", "The fox"]
    outs = llm.generate(prompts, params)
    assert outs == [llm.generate(prompt, params) for prompt in prompts]
    assert outs[0] == outs[2] != outs[1]
    free = [o.text for o in llm.generate(["The fox"] * 3, temperature=1.0, max_new_tokens=12)]
    assert len(set(free)) == 3
    assert llm.generate([]) == []


def test_single_fields_win_over_params():
    llm = minillm.LLM("fairytale")
    params = minillm.SamplingParams(max_new_tokens=9)
    assert len(llm.generate("The fox", params, max_new_tokens=4).token_ids) == 4
    assert len(llm.generate("The fox", params).token_ids) == 9


@pytest.mark.parametrize(
    ("arguments", "fields", "says"),
    [
        ((), {"temprature": 1}, "unexpected keyword argument 'temprature'"),
        ((), {"top_p": 0}, "top_p is 0, expected"),
        ((20,), {}, "params is 20, expected SamplingParams"),
        (({"top_k": 3},), {}, "expected SamplingParams"),
        ((), {"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_wrong_settings_get_a_sentence_before_any_work(arguments, fields, says):
    llm = minillm.LLM("fairytale")
    for method in (llm.generate, llm.stream):
        with pytest.raises((ValueError, TypeError), match=re.escape(says)):
            method("The fox", *arguments, **fields)


def test_tokenize(capsys):
    assert main(["tokenize", "Hello world", "--model", "gpt2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["15496", "995"]
    assert lines[0].endswith("'Hello'") and lines[1].endswith("' world'")
    assert lines[2] == "2 tokens, 11 characters"


def test_info(capsys):
    assert main(["info", "fairytale", "--context", "100"]) == 0
    printed = capsys.readouterr().out
    assert "5,918,720" in printed  # 4096·256 + 512·256 + 6·(12·256² + 13·256) + 2·256
    assert "12,288 bytes per token" in printed  # 2 · 6 layers · 256 wide · 4 bytes
    assert "1,228,800 bytes for 100 positions" in printed
    assert "23,674,880 bytes in float32" in printed


LONG = "word " * 600
BAD = {
    "unknown model": (["generate", "Hi", "--model", "no-such-model"], "no-such-model.*fairytale"),
    "directory without config": (["generate", "Hi", "-m", "/"], "no config.json"),
    "unknown draft": (["generate", "Hi", "--draft", "no-such-draft"], "no-such-draft.*fairytale"),
    "draft without config": (["generate", "Hi", "--draft", "/"], "no config.json"),
    "prompt beyond the context": (["generate", LONG], "tokens.*512"),
    "empty prompt": (["generate", ""], "prompt is ''"),
    "negative budget": (["generate", "Hi", "-n", "-3"], "max_new_tokens is -3"),
    "no budget": (["generate", "Hi", "-n", "0"], "max_new_tokens is 0"),
    "temperature": (["generate", "Hi", "--temperature", "nan"], "temperature is nan"),
    "top-k": (["generate", "Hi", "--top-k", "-1"], "top_k is -1"),
    "top-p": (["generate", "Hi", "--top-p", "1.5"], "top_p is 1.5"),
    "min-p": (["generate", "Hi", "--min-p", "-0.1"], "min_p is -0.1"),
    "penalty": (["generate", "Hi", "--repetition-penalty", "0"], "repetition_penalty is 0"),
    "seed": (["generate", "Hi", "--seed", "-4"], "seed is -4"),
    "stop": (["generate", "Hi", "--stop", ""], "stop is"),
    "info on nothing": (["info", "nobody/nothing"], "nobody/nothing"),
    "context too long": (["info", "fairytale", "--context", "513"], "513.*512"),
    "tokenizer of nothing": (["tokenize", "Hi", "-m", "/"], "no config.json|tokenizer"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(capsys, arguments, says):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("minillm: ") and printed.err.count("\n") == 1
    assert re.search(says, printed.err)


def test_wrong_usage_is_exit_code_2_as_well():
    assert run("generate")[0] == 2
    assert run()[0] == 2
    code, out, err = run("generate", "Hi", "--model", "no-such-model")
    assert code == 2 and not out and "Traceback" not in err


@pytest.mark.parametrize("architecture", ["mamba", None])
def test_an_unknown_architecture_is_refused_by_name(tmp_path, architecture):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
    with pytest.raises(ValueError, match=f"{architecture!r}; this engine runs: gpt2, llama"):
        minillm.LLM(tmp_path)


def test_a_folder_without_tokenizer_takes_token_ids_and_refuses_text(save_reference):
    _, folder = save_reference()
    llm = minillm.LLM(folder)
    assert len(llm.generate([1, 2, 3], max_new_tokens=4).token_ids) == 4
    with pytest.raises(ValueError, match="no text without a tokenizer: no tokenizer.json"):
        llm.generate("Hi")
    code, out, err = run("generate", "Hi", "--model", str(folder))
    assert code == 2 and not out and "no text without a tokenizer" in err


@pytest.mark.parametrize("prompt", ["", None, 5, ["Hi", ""], [["Hi"]]])
def test_a_prompt_that_is_no_text_gets_a_sentence(prompt):
    with pytest.raises(ValueError, match="the prompt is"):
        minillm.LLM("fairytale").generate(prompt)


def test_importing_minillm_does_not_import_torch():
    code = "import sys, minillm; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


IMPORT = """
import sys, time, torch
start = time.perf_counter()
import minillm
minillm.LLM, minillm.SamplingParams
print(time.perf_counter() - start)
sys.exit(bool({"transformers", "matplotlib", "ipywidgets"} & set(sys.modules)))
"""


def test_the_engine_is_imported_quickly_and_alone():
    """At most 0.3 s beyond torch, and nothing that only rulers, pictures and panels need."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
        for _ in range(3)
    ]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert min(float(run.stdout) for run in runs) < 0.3


def test_an_unknown_name_in_the_package_says_what_there_is():
    with pytest.raises(AttributeError, match="LLM"):
        _ = minillm.Model
    assert str(resolve("fairytale")).endswith("fairytale")

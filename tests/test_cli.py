"""The command line and the engine's front door: text for good input, one line and exit code 2 for bad."""

import json
import subprocess
import sys

import pytest

import minillm
from minillm.cli import main
from minillm.weights import resolve


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
        out.text == llm.tokenizer.decode(free.token_ids[:end]) == "".join(llm.stream("The fox", 10))
    )


def test_the_context_is_a_finish_reason():
    llm = minillm.LLM("fairytale")
    prompt = "and " * 509
    room = 512 - len(llm.encode(prompt))
    assert 0 < room < 10
    llm.end_ids = set()
    out = llm.generate(prompt, max_new_tokens=50)
    assert (out.finish_reason, len(out.token_ids)) == ("context", room)


def test_zero_new_tokens():
    out = minillm.LLM("fairytale").generate("The fox", max_new_tokens=0)
    assert (out.text, out.token_ids, out.finish_reason) == ("", [], "length")


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
    "prompt beyond the context": (["generate", LONG], "tokens.*512"),
    "empty prompt": (["generate", ""], "prompt is ''"),
    "negative budget": (["generate", "Hi", "-n", "-3"], "max_new_tokens is -3"),
    "info on nothing": (["info", "nobody/nothing"], "nobody/nothing"),
    "context too long": (["info", "fairytale", "--context", "513"], "513.*512"),
    "tokenizer of nothing": (["tokenize", "Hi", "-m", "/"], "no config.json|tokenizer"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(capsys, arguments, says):
    import re

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
    with pytest.raises(ValueError, match=f"{architecture!r}; this engine runs: gpt2"):
        minillm.LLM(tmp_path)


def test_a_folder_without_tokenizer_is_refused(save_reference):
    _, folder = save_reference()
    with pytest.raises(ValueError, match="tokenizer"):
        minillm.LLM(folder)


@pytest.mark.parametrize("prompt", ["", None, 5, ["Hi"]])
def test_a_prompt_that_is_no_text_gets_a_sentence(prompt):
    with pytest.raises(ValueError, match="the prompt is"):
        minillm.LLM("fairytale").generate(prompt)


def test_importing_minillm_does_not_import_torch():
    code = "import sys, minillm; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_unknown_name_in_the_package_says_what_there_is():
    with pytest.raises(AttributeError, match="LLM"):
        _ = minillm.Model
    assert str(resolve("fairytale")).endswith("fairytale")

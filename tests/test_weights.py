"""Finding and reading a model's folder: what is broken is named, and nothing in a file is run."""

import json
import pickle
import struct
import subprocess
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.gpt2 import GPT2
from minillm.weights import end_token_ids, read_weights, resolve

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.tensor([[5, 1, 88]])


def header(**tensors) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


BROKEN = {
    "empty": lambda data: b"",
    "seven bytes": lambda data: data[:7],
    "last byte cut": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "trailing bytes": lambda data: data + b"xx",
    "header of 2^63 bytes": lambda data: struct.pack("<Q", 2**63) + data[8:],
    "header that is no JSON": lambda data: struct.pack("<Q", 4) + b"{{{{",
    "Git LFS pointer": lambda data: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    ),
    "overlapping offsets": lambda data: (
        header(
            a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            b={"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        )
        + bytes(12)
    ),
    "shape that does not fit the span": lambda data: (
        header(a={"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}) + bytes(8)
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_safetensors_file_is_refused_with_path_and_reason(save_reference, name):
    _, folder = save_reference()
    path = folder / "model.safetensors"
    path.write_bytes(BROKEN[name](path.read_bytes()))
    reason = {"empty": "is empty", "Git LFS pointer": "is a Git LFS pointer"}
    says = reason.get(name, "is not a complete safetensors file")
    with pytest.raises(ValueError, match=f"model.safetensors {says}.*(download|git lfs)"):
        read_weights(folder)


def as_bin(folder, name="pytorch_model.bin"):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / name)
    return folder / name


def test_bin_equals_safetensors(save_reference):
    _, folder = save_reference()
    before = GPT2.from_pretrained(folder)(IDS)
    as_bin(folder)
    assert torch.equal(GPT2.from_pretrained(folder)(IDS), before)


def test_an_old_bin_without_zip_loads_too(save_reference):
    _, folder = save_reference()
    path = as_bin(folder)
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    assert len(read_weights(folder)) > 20


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_a_pickle_is_never_run(save_reference, tmp_path):
    _, folder = save_reference()
    path, marker = as_bin(folder), tmp_path / "marker"
    path.write_bytes(pickle.dumps({"wte.weight": Bomb(marker)}, protocol=2))
    with pytest.raises(ValueError, match="never run"):
        read_weights(folder)
    assert not marker.exists()


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[: len(d) // 2], lambda d: b"hello"])
def test_a_broken_bin_is_refused(save_reference, damage):
    _, folder = save_reference()
    path = as_bin(folder)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="pytorch_model.bin"):
        read_weights(folder)


def test_a_bin_that_holds_something_else_is_refused(save_reference):
    _, folder = save_reference()
    torch.save([torch.ones(2)], as_bin(folder))
    with pytest.raises(ValueError, match="no weight file"):
        read_weights(folder)


def shard(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {
        name: f"model-0000{1 + (n > 9)}-of-00002.safetensors" for n, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_equal_one_file(save_reference):
    _, folder = save_reference()
    before = GPT2.from_pretrained(folder)(IDS)
    shard(folder)
    assert torch.equal(GPT2.from_pretrained(folder)(IDS), before)


def test_a_missing_shard_is_named(save_reference):
    _, folder = save_reference()
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 2 shards: model-00002-of-00002.safetensors"):
        read_weights(folder)


def test_a_tensor_that_the_index_promises_and_no_shard_holds_is_named(save_reference):
    _, folder = save_reference()
    shard(folder)
    path = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({k: v for k, v in tensors.items() if k != name}, path)
    with pytest.raises(ValueError, match=f"promises {name}, but {path.name}"):
        read_weights(folder)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', "{", "[]"])
def test_a_broken_index_is_refused(save_reference, index):
    _, folder = save_reference()
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="index.json"):
        read_weights(folder)


def test_no_weights_at_all(save_reference):
    _, folder = save_reference()
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights in .*expected model.safetensors"):
        read_weights(folder)


# ---- names ----------------------------------------------------------------------------------


def test_a_directory_without_config_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        resolve(tmp_path)


@pytest.mark.parametrize("stored", ["model.safetensors", "pytorch_model.bin"])
def test_a_hub_id_fetches_the_weights_once(monkeypatch, tmp_path, stored):
    """Many repositories hold both formats; safetensors come first, and only they are fetched."""
    asked = []

    def snapshot(repository, allow_patterns, local_files_only=False):
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    files = [SimpleNamespace(rfilename=name) for name in ("pytorch_model.bin", stored)]
    info = SimpleNamespace(siblings=files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: info)
    assert resolve("gpt2") == tmp_path
    repository, patterns = asked[0]
    assert repository == "openai-community/gpt2" and "*.safetensors" in patterns
    assert ("pytorch_model*.bin" in patterns) == (stored == "pytorch_model.bin")


UNKNOWN = ["no-such-model", "nobody/nothing", "./not/here", "", "a b c"]
ASK = """
import json, sys, time
import huggingface_hub.errors
from minillm.weights import resolve
for name in json.loads(sys.argv[1]):
    start = time.perf_counter()
    try:
        resolve(name)
    except FileNotFoundError as error:
        print(json.dumps([name, time.perf_counter() - start, str(error)]))
"""


@pytest.mark.parametrize("offline", ["0", "1"])
def test_an_unknown_name_gets_a_sentence_within_five_seconds(offline):
    """In a process of its own: the hub's library reads its environment once."""
    environment = {"HF_HUB_OFFLINE": offline, "HF_HOME": "/nonexistent", "PATH": ""}
    command = [sys.executable, "-c", ASK, json.dumps(UNKNOWN)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [name for name, _, _ in answers] == UNKNOWN, result.stderr
    for name, seconds, message in answers:
        assert seconds < 5
        assert message.startswith(f"no model named {name!r}: ")
        assert "Without a network these work: fairytale" in message


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (5, [7, 9], {5, 7, 9}),
        ([5, 6], None, {5, 6}),
        (None, 7, {7}),
        (None, None, set()),
        (0, "missing", {0}),
    ],
)
def test_end_ids_come_from_both_files(tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation != "missing":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert end_token_ids(tmp_path) == expected


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_a_broken_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="config.json"):
        end_token_ids(tmp_path)

"""What the tests share: no network, the time each notebook takes, and models that can show a mistake."""

import os
from collections import defaultdict
from functools import lru_cache

os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from minillm.generation import Request, generate
from minillm.gpt2 import GPT2
from minillm.kv_cache import KVCache
from minillm.sampling import SamplingParams

disable_progress_bar()


def greedy(model, prompt_ids: list[int], max_new_tokens: int, end_ids=None) -> list[int]:
    """The new ids of the engine's loop at temperature 0."""
    params, context = SamplingParams(max_new_tokens=max_new_tokens), model.config.context_length
    return list(generate(model, Request(prompt_ids, params, context=context, end_ids=end_ids)))


@torch.inference_mode()
def fed_cache(model, request: Request, splits) -> KVCache:
    """A cache with the prompt in it, in pieces, but for its last token: the loop feeds that itself."""
    cache = KVCache.for_model(model, request.max_length)
    for piece in torch.tensor([request.prompt_ids[:-1]]).split(splits, dim=1):
        if piece.numel():
            model.hidden_states(piece, cache=cache)
    return cache


class Recorded(Request):
    """A request that remembers the logits of each of its steps."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.rows = []

    def accept(self, logits_row):
        token_id = super().accept(logits_row)
        self.rows.append(logits_row.clone())
        return token_id


class Stopwatch:
    """Adds up how long the cells of each notebook take.

    A plugin of its own: pytest keeps the hooks of a conftest from items outside its folder.
    """

    def __init__(self):
        self.seconds = defaultdict(float)

    def pytest_runtest_logreport(self, report):
        path = report.nodeid.split("::")[0]
        if path.endswith(".ipynb"):
            self.seconds[os.path.basename(path)] += report.duration


def pytest_configure(config):
    config.pluginmanager.register(Stopwatch(), "stopwatch")


@pytest.fixture(scope="module")
def one_thread():
    """Small tensors: a second thread only waits, and on a busy machine it waits long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unchanged_process(monkeypatch):
    """What the command sets in its own process does not outlive a test."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def notebook_seconds(pytestconfig):
    """Notebook name -> seconds, for the notebooks that ran before this test."""
    return pytestconfig.pluginmanager.get_plugin("stopwatch").seconds


def random_reference(seed: int = 0, std: float = 0.2, **fields) -> GPT2LMHeadModel:
    """A GPT-2 of transformers whose random weights are large and uneven enough to show any mistake.

    Weights with deviation `std`, positions ten times that, biases that are not zero, uneven norm gains.
    """
    small = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**(small | {"bos_token_id": None, "eos_token_id": None} | fields))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(std=std)
                if "wpe" in name:
                    parameter.mul_(10)
                if ".ln_" in name and name.endswith("weight"):
                    parameter.add_(1)
    return model


def saver(tmp_path, random_model):
    """A function that makes a random model and its folder: `make(seed, **fields)` -> both."""

    def make(seed: int = 0, **fields):
        model = random_model(seed, **fields)
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.fixture
def save_reference(tmp_path):
    """Make a random reference and its folder: `model, folder = save_reference(n_inner=32)`."""
    return saver(tmp_path, random_reference)


@pytest.fixture(scope="session")
def gpt2_124m(tmp_path_factory):
    """The 124M shape with random weights: transformers' model, its folder, and ours from there.

    Made once, to be looked at only. The weights are as large as the small random models' for this
    width: 0.2 x the root of 32 / 768. With 0.2 the scores of twelve layers are in the hundreds, and
    the noise of the last digit, which grows from layer to layer, reaches the tolerance (seen: 1.03 x
    in layer 5).
    """
    shape = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
    folder = tmp_path_factory.mktemp("gpt2-124m")
    reference = random_reference(seed=1, std=0.2 * (32 / 768) ** 0.5, **shape)
    reference.save_pretrained(folder)
    model = GPT2.from_pretrained(folder)
    yield reference, folder, model
    theirs, ours = load_file(folder / "model.safetensors"), GPT2.from_pretrained(folder)
    assert len(theirs) > 100 and same_weights(reference.state_dict(), theirs)
    assert same_weights(model.state_dict(), ours.state_dict())
    (folder / "model.safetensors").unlink()


def same_weights(given: dict, expected: dict) -> bool:
    """True where a test left what it shares with others as it was."""
    return all(torch.equal(given[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="session")
def gguf_reader():
    """The gguf package's reader, made once for each path: SmolLM2's file takes it two seconds.

    Stands in for `gguf.GGUFReader` where a test reads the packaged file, which nobody writes to.
    """
    once = lru_cache(gguf.GGUFReader)
    return lambda path: once(str(path))

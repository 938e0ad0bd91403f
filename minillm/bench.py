"""The measuring behind `minillm bench`: one job, its engines in turn, their times, ids and memory."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from .batching import generate_batch, pad_left
from .bench_memory import MEMORY, STATUS, bytes_per_step, memory, weight_bytes
from .families import architecture
from .generation import Request, generate
from .gpt2 import CONV1D, GPT2, GPT2Config, checkpoint_names
from .kv_cache import KVCache
from .quantization import quantize_, release_memory
from .sampling import SamplingParams
from .weights import resolve

OURS, UNCACHED, THEIRS = "minillm", "minillm, no cache", "transformers"
QUANTIZED = {"minillm int8": 8, "minillm int4": 4}
SEED = 0
LAB = "which is not installed: pip install 'minillm[lab]'"


@dataclass
class Job:
    """What is measured; ValueError for numbers that are no job, or when transformers is missing."""

    model: str = "fairytale"
    prompt_length: int = 64
    new_tokens: int = 64
    batch: int = 1
    mixed: bool = False  # rows of different lengths, that end at different times
    dtype: str = "float32"
    threads: int | None = None  # None: as many as PyTorch takes by itself
    repeat: int = 5
    against: str | None = None
    no_cache: bool = False
    quantize: list[str] = field(default_factory=list)  # "int8", "int4", or both

    def __post_init__(self):
        self.threads = torch.get_num_threads() if self.threads is None else self.threads
        # a single new token has no decode: that is the time from one to the next
        check_least(self, prompt_length=1, new_tokens=2, batch=1, threads=1, repeat=1)
        if self.mixed and self.batch == 1:
            raise ValueError(
                "--mixed with --batch 1 has nothing to mix: it needs at least 2 rows, as with --batch 2"
            )
        if self.against and find_spec(THEIRS) is None:
            raise ValueError(f"--against transformers needs transformers, {LAB}")
        quantized = [name for name in QUANTIZED if name.split()[1] in self.quantize]
        others = [UNCACHED] * self.no_cache + [THEIRS] * bool(self.against)
        self.engines = [OURS, *quantized, *others]

    def row_lengths(self) -> list[tuple[int, int]]:
        """Each row's tokens in the prompt and new tokens; mixed: from an eighth of both to all.

        Mixed prompts get longer from row to row. The new tokens do so twice, by every other
        number, so that long and short answers belong to long and short prompts.
        """
        if not self.mixed:
            return [(self.prompt_length, self.new_tokens)] * self.batch
        prompts = spread(max(self.prompt_length // 8, 1), self.prompt_length, self.batch)
        new = spread(max(self.new_tokens // 8, 2), self.new_tokens, self.batch)
        return list(zip(prompts, new[1::2] + new[::2], strict=True))


def check_least(job, **least: int) -> None:
    """ValueError for a number of a job that is too small."""
    for name, smallest in least.items():
        if (value := getattr(job, name)) < smallest:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected >= {smallest}")


def spread(least: int, most: int, rows: int) -> list[int]:
    """Whole numbers from the least to the most, one a row, evenly apart."""
    return [least + (most - least) * n // (rows - 1) for n in range(rows)]


class Clock(list):
    """Time stamps in seconds, and a streamer for transformers, which calls `put` and `end`."""

    def put(self, _=None) -> None:
        """A token has come, in each row that still runs."""
        self.append(perf_counter())

    end = staticmethod(lambda: None)


class RowBudgets:
    """A stopping criterion for transformers: a row is done when it has its own new tokens."""

    eos_token_id = None  # with this name transformers pads a finished row, as after an end id

    def __init__(self, prompt_length: int, new_tokens: list[int]):
        self.lengths = prompt_length + torch.tensor(new_tokens)  # [B]

    def __call__(self, token_ids, scores, **_) -> torch.Tensor:
        """Which rows of `[B, T]` are done: bool `[B]`."""
        return token_ids.shape[1] >= self.lengths


def measure(job: Job) -> dict:
    """What `summarize` needs; ValueError when the tokens do not fit the context."""
    torch.set_num_threads(job.threads)
    shape = job.model == "gpt2-shape"  # GPT-2 124M's, with random weights
    context = (GPT2Config() if shape else architecture(resolve(job.model))[1]).context_length
    if job.prompt_length + job.new_tokens > context:
        raise ValueError(
            f"--prompt-length {job.prompt_length} and --new-tokens {job.new_tokens} are too much "
            f"together: the model's context holds {context}"
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = write_random(GPT2Config(), Path(scratch)) if shape else resolve(job.model)
        sizes = {name: process_memory(name, job, folder) for name in job.engines}
        models = {name: load(name, job, folder) for name in job.engines if name != UNCACHED}
        ours = models[UNCACHED] = models[OURS]
        engines = {name: partial(run_once, name, models[name], job) for name in job.engines}
        runs, ceilings = take_turns(engines, job.repeat)
    positions = job.prompt_length + job.new_tokens // 2  # in the middle of the decode
    # mixed rows leave on the way: no step is like another
    step_bytes = None if job.mixed else bytes_per_step(ours, positions, job.batch)
    for name, row in sizes.items():
        row["weight_bytes"] = weight_bytes(models[name])
    return {"runs": runs, "ceilings": ceilings, "step_bytes": step_bytes, "sizes": sizes}


def take_turns(engines: dict, repeat: int) -> tuple[dict, list[float]]:
    """Call every engine `repeat` times, after a warm-up: what each returned, and the ceilings.

    The ceiling is measured after each run.
    """
    # 8 x 134 MB, more than a processor's cache; ones, since zeros may all be one page
    buffers = [torch.ones(8192, 4096) for _ in range(8)]
    for warm_up in [*engines.values(), partial(measure_ceiling, buffers)]:
        warm_up()
    runs, ceilings = {name: [] for name in engines}, []
    for name, run in in_turn(engines, repeat):
        runs[name].append(run)
        ceilings.append(measure_ceiling(buffers))
    return runs, ceilings


def in_turn(engines: dict, repeat: int) -> Iterator[tuple]:
    """Call every engine `repeat` times: its name, and what it returned.

    Who was first is last in the next repetition: what slows the machine down for a while slows
    down all of them.
    """
    order = list(engines)
    for _ in range(repeat):
        for name in order:
            yield name, engines[name]()
        order.reverse()


def measure_ceiling(buffers: list[torch.Tensor]) -> float:
    """Bytes per second that this machine reads: the better of a sum and a matrix-vector product."""
    vector, seconds = torch.ones(buffers[0].shape[1]), []
    for read in (torch.sum, lambda matrix: matrix @ vector):
        start = perf_counter()
        for buffer in buffers:
            read(buffer)
        seconds.append(perf_counter() - start)
    return sum(buffer.nbytes for buffer in buffers) / min(seconds)


def run_once(name: str, model, job: Job) -> tuple[list[float], list[list[int]]]:
    """Continue seeded random rows greedily: time stamps (start, each step), each row's new ids."""
    generator, V = torch.Generator().manual_seed(SEED), model.config.vocab_size
    lengths, new = zip(*job.row_lengths(), strict=True)
    prompts = [torch.randint(V, (T,), generator=generator).tolist() for T in lengths]
    clock = Clock([perf_counter()])
    if name == THEIRS:
        return clock, run_theirs(model, prompts, new, clock)
    requests = [
        Request(ids, SamplingParams(max_new_tokens=budget), context=model.config.context_length)
        for ids, budget in zip(prompts, new, strict=True)
    ]
    for _ in steps(name, model, requests):
        clock.put()
    return clock, [request.token_ids for request in requests]


def steps(name: str, model, requests: list[Request]) -> Iterator:
    """Run the requests to their ends, with one of our engines: one item for each forward."""
    if len(requests) > 1:
        return (forget if name == UNCACHED else generate_batch)(model, requests)
    (request,) = requests
    cache = None if name == UNCACHED else KVCache.for_model(model, request.max_length)
    return generate(model, request, cache)


def forget(model, requests: list[Request]) -> Iterator:
    """A batch without the use of a cache: each step's is thrown away, and the next starts over."""
    while any(request.finish_reason is None for request in requests):
        yield next(generate_batch(model, requests))


def run_theirs(model, prompts: list, new: list[int], clock: Clock) -> list[list[int]]:
    """Run transformers' `generate` on the padded rows to the longest end; each row's own new ids."""
    token_ids, mask = pad_left(prompts)  # [B, T] each
    T = token_ids.shape[1]
    model.generation_config.eos_token_id = None  # only its number of new tokens ends a row
    options = {"max_new_tokens": max(new), "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": mask.long(), "streamer": clock}
    if min(new) < max(new):
        options["stopping_criteria"] = [RowBudgets(T, new)]
    out = model.generate(token_ids, **options)[:, T:]  # [B, T] -> [B, T + new] -> [B, new]
    del clock[1]  # transformers puts the prompt first
    return [row[:budget] for row, budget in zip(out.tolist(), new, strict=True)]


def load(name: str, job: Job, folder: Path):
    """The model as one engine has it."""
    dtype = getattr(torch, job.dtype)
    if name in QUANTIZED:  # codes are made of exact weights, and the kernels take bf16
        model = architecture(folder)[0].from_pretrained(folder, dtype=torch.float32)
        return quantize_(model, QUANTIZED[name], dtype=torch.bfloat16)
    if name != THEIRS:
        return architecture(folder)[0].from_pretrained(folder, dtype=dtype)
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": folder}
    if folder.is_file():  # a GGUF file
        where = {"pretrained_model_name_or_path": folder.parent, "gguf_file": folder.name}
    # a progress bar that nothing else turns off
    with patch("transformers.modeling_gguf_pytorch_utils.tqdm", lambda rows, **_: rows):
        return AutoModelForCausalLM.from_pretrained(**where, dtype=dtype).eval()


def write_random(config: GPT2Config, folder: Path) -> Path:
    """Fill a folder as Hugging Face would, with seeded random weights as before any training."""
    with torch.device("meta"):
        model = GPT2(config)
    generator, tensors = torch.Generator().manual_seed(SEED), {}
    for ours, theirs in checkpoint_names(config).items():
        for name, parameter in model.get_submodule(ours).named_parameters():
            shape = parameter.shape[::-1] if ours.split(".", 2)[-1] in CONV1D else parameter.shape
            # biases 0, the norms' gains 1, everything else with deviation 0.02
            tensor = torch.full(shape, float("norm" in ours and name == "weight"))
            if len(shape) == 2:
                tensor.normal_(std=0.02, generator=generator)
            tensors[f"{theirs}.{name}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {"model_type": "gpt2", "bos_token_id": None, "eos_token_id": None} | asdict(config)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def process_memory(name: str, job: Job, folder: Path) -> dict[str, int | None]:
    """The bytes of `MEMORY` for one engine, in a process of its own; None where nobody tells."""
    if not STATUS.exists():
        return dict.fromkeys(MEMORY)
    work = json.dumps([name, asdict(job), str(folder)])  # for `child`, below
    command = [sys.executable, "-m", "minillm.bench", work]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().split("\n")[-1] or f"exit code {result.returncode}"
        reason = reason.removeprefix("ValueError: ")
        raise ValueError(f"measuring the memory of {name} failed: {reason}")
    return json.loads(result.stdout.splitlines()[-1])


def child(work: str) -> None:
    """The other side of `process_memory`: run one engine once, print what it took beyond torch.

    The weights are held to the end. What they need shows only after a run: pages of a file that
    is mapped are not resident before somebody reads them.
    """
    before = memory("VmRSS")
    name, fields, folder = json.loads(work)
    job = Job(**fields)
    torch.set_num_threads(job.threads)
    model = load(name, job, Path(folder))
    run_once(name, model, job)
    peak, held = memory("VmHWM") - before, memory("VmRSS") - before
    trimmed = memory("VmRSS") - before if release_memory() else None
    print(json.dumps(dict(zip(MEMORY, (peak, held, trimmed), strict=True))))


if __name__ == "__main__":
    child(sys.argv[1])

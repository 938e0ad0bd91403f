"""What `minillm bench` measures: first token, decode, memory, and how close that is to the ceiling."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from safetensors.torch import save_file

from . import __version__
from .generation import Request, generate, to_feed
from .gpt2 import CONV1D, GPT2, GPT2Config, checkpoint_names
from .kv_cache import KVCache, cache_bytes
from .llm import architecture
from .sampling import SamplingParams
from .weights import resolve

OURS, UNCACHED, THEIRS = "minillm", "minillm, no cache", "transformers"
SEED = 0
STATUS = Path("/proc/self/status")  # Linux: what the kernel knows about this process
LAB = "which is not installed: pip install 'minillm[lab]'"


@dataclass
class Job:
    """What is measured; ValueError for a number that is too small, or when transformers is missing."""

    model: str = "fairytale"
    prompt_length: int = 64
    new_tokens: int = 64
    batch: int = 1
    dtype: str = "float32"
    threads: int | None = None  # None: as many as PyTorch takes by itself
    repeat: int = 5
    against: str | None = None
    no_cache: bool = False

    def __post_init__(self):
        self.threads = torch.get_num_threads() if self.threads is None else self.threads
        # a single new token has no decode: that is the time from one to the next
        least = {"prompt_length": 1, "new_tokens": 2, "batch": 1, "threads": 1, "repeat": 1}
        for name, smallest in least.items():
            if (value := getattr(self, name)) < smallest:
                raise ValueError(f"--{name.replace('_', '-')} is {value}, expected >= {smallest}")
        if self.against and find_spec(THEIRS) is None:
            raise ValueError(f"--against transformers needs transformers, {LAB}")
        self.engines = [OURS] + [UNCACHED] * self.no_cache + [THEIRS] * bool(self.against)


class Clock(list):
    """Time stamps in seconds, and a streamer for transformers, which calls `put` and `end`."""

    def put(self, _=None) -> None:
        """A token has come."""
        self.append(perf_counter())

    end = staticmethod(lambda: None)


def bench(job: Job) -> dict:
    """Measure; the report of `summarize`. ValueError when the tokens do not fit the context."""
    torch.set_num_threads(job.threads)
    shape = job.model == "gpt2-shape"  # GPT-2 124M's, with random weights
    context = (GPT2Config() if shape else architecture(resolve(job.model))[1]).n_positions
    if job.prompt_length + job.new_tokens > context:
        raise ValueError(
            f"--prompt-length {job.prompt_length} and --new-tokens {job.new_tokens} are too much "
            f"together: the model's context holds {context}"
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = write_random(GPT2Config(), Path(scratch)) if shape else resolve(job.model)
        memory = {name: peak_memory(name, job, folder) for name in job.engines}
        models = {name: load(name, job, folder) for name in job.engines if name != UNCACHED}
        ours = models[UNCACHED] = models[OURS]
        engines = {name: partial(run_once, name, models[name], job) for name in job.engines}
        runs, ceilings = take_turns(engines, job.repeat)
    positions = job.prompt_length + job.new_tokens // 2  # in the middle of the decode
    return summarize(job, runs, ceilings, bytes_per_step(ours, positions, job.batch), memory)


def take_turns(engines: dict, repeat: int) -> tuple[dict, list[float]]:
    """Call every engine `repeat` times, after a warm-up: what each returned, and the ceilings.

    Who was first is last in the next repetition, and the ceiling is measured after each run: what
    slows the machine down for a while slows down all of them.
    """
    # 8 x 134 MB, more than a processor's cache; ones, since zeros may all be one page
    buffers = [torch.ones(8192, 4096) for _ in range(8)]
    for warm_up in [*engines.values(), partial(measure_ceiling, buffers)]:
        warm_up()
    runs, ceilings, order = {name: [] for name in engines}, [], list(engines)
    for _ in range(repeat):
        for name in order:
            runs[name].append(engines[name]())
            ceilings.append(measure_ceiling(buffers))
        order.reverse()
    return runs, ceilings


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
    """Continue seeded random rows greedily: time stamps (start, each token), each row's new ids."""
    B, T, new, V = job.batch, job.prompt_length, job.new_tokens, model.config.vocab_size
    prompts = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(SEED))
    clock = Clock([perf_counter()])
    if name == THEIRS:
        model.generation_config.eos_token_id = None  # all rows run to the wanted length
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        options |= {"attention_mask": torch.ones_like(prompts), "streamer": clock}
        out = model.generate(prompts, **options)
        del clock[1]  # transformers puts the prompt first
        return clock, out[:, T:].tolist()
    params, context = SamplingParams(max_new_tokens=new), model.config.n_positions
    requests = [Request(row, params, context=context) for row in prompts.tolist()]
    cache = None if name == UNCACHED else KVCache.for_model(model, T + new, B)
    for _ in generate(model, requests[0], cache) if B == 1 else rows(model, requests, cache):
        clock.put()
    return clock, [request.token_ids for request in requests]


@torch.inference_mode()
def rows(model, requests: list[Request], cache):
    """Run requests of equal length to their common end, one forward `[B, T]` for each token."""
    while requests[0].finish_reason is None:
        token_ids = torch.tensor([to_feed(request, cache) for request in requests])  # [B, T]
        x = model.hidden_states(token_ids, cache=cache)  # [B, T] -> [B, T, D]
        for request, logits in zip(requests, model.head(x[:, -1]), strict=True):  # [B, D] -> [B, V]
            request.accept(logits)
        yield


def load(name: str, job: Job, folder: Path):
    """The model as one engine has it."""
    dtype = getattr(torch, job.dtype)
    if name != THEIRS:
        return architecture(folder)[0].from_pretrained(folder, dtype=dtype)
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


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


def bytes_per_step(model, positions: int, batch: int = 1) -> int:
    """What one decode step reads: weights, and keys and values of that many positions, in bytes."""
    # of an embedding it reads a row or two: a table counts only where it is the head as well
    read = {p for name, p in model.named_parameters() if "embedding" not in name}
    read.add(model.lm_head.weight)
    kept = cache_bytes(*model.config.cache_shape, positions, model.lm_head.weight.itemsize)
    return sum(p.nbytes for p in read) + kept * batch


def peak_memory(name: str, job: Job, folder: Path) -> int | None:
    """Bytes that one engine needs at its peak, in a process of its own; None without /proc."""
    if not STATUS.exists():
        return None
    work = json.dumps([name, asdict(job), str(folder)])  # for `child`, below
    command = [sys.executable, "-m", "minillm.bench", work]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().split("\n")[-1] or f"exit code {result.returncode}"
        raise ValueError(f"measuring the memory of {name} failed: {reason}")
    return int(result.stdout.split()[-1])


def peak_bytes() -> int:
    """The most memory that this process ever had, as Linux counts it."""
    return int(STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024


def child(work: str) -> None:
    """The other side of `peak_memory`: run one engine once, print what it took on top of torch."""
    before = peak_bytes()
    name, fields, folder = json.loads(work)
    job = Job(**fields)
    torch.set_num_threads(job.threads)
    run_once(name, load(name, job, Path(folder)), job)
    print(peak_bytes() - before)


def summarize(job: Job, runs: dict, ceilings: list[float], step_bytes: int, memory: dict) -> dict:
    """The report, of medians; ValueError when decode seems to read faster than the memory can."""
    rows, ceiling, ratios = {}, median(ceilings), {}
    for name, given in runs.items():
        marks = [times for times, _ in given]
        first = median(m[1] - m[0] for m in marks)
        step = median(b - a for m in marks for a, b in zip(m[1:], m[2:], strict=False))
        rows[name] = {
            "first_token_s": first,
            "prefill_tokens_per_s": job.batch * job.prompt_length / first,
            "decode_step_s": step,
            "decode_tokens_per_s": job.batch / step,
            "total_s": median(m[-1] - m[0] for m in marks),
            "peak_memory_bytes": memory[name],
        }
    share = step_bytes / rows[OURS]["decode_step_s"] / ceiling if job.batch == 1 else None
    if share is not None and share > 1:
        raise ValueError(
            f"decode reaches {share:.1%} of this machine's memory ceiling, and more than 100% "
            f"cannot be: the ceiling was measured wrongly, perhaps beside other work; try again"
        )
    for name, key in [(UNCACHED, "total"), (THEIRS, "first_token"), (THEIRS, "decode_step")]:
        if name in rows:
            ratio = rows[name][f"{key}_s"] / rows[OURS][f"{key}_s"]
            ratios.setdefault(name, {})[key] = ratio
    report = {"job": asdict(job), "seed": SEED, "machine": machine(job), "engines": rows}
    report |= {"ratios": ratios, "bytes_per_step": step_bytes, "share_of_ceiling": share}
    report["ceiling_bytes_per_s"] = ceiling
    if THEIRS in rows:
        ours, theirs = (sum(runs[name][-1][1], []) for name in (OURS, THEIRS))
        same = [a == b for a, b in zip(ours, theirs, strict=True)]
        report["equal_ids"] = {"equal": sum(same), "of": len(same)}
    return report


def machine(job: Job) -> dict:
    """Where the numbers come from: processor, cores and versions."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)", info.read_text() if info.exists() else "", re.M)
    cpu = found[1] if found else platform.processor() or platform.machine()
    used = ["torch"] + [THEIRS] * bool(job.against)
    versions = {name: version(name) for name in used} | {"minillm": __version__}
    return {"cpu": cpu, "cores": os.cpu_count(), "versions": versions}


def check_plot(path: str) -> None:
    """ValueError or OSError, before anything is measured, where no figure can be written."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib, {LAB}")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise ValueError(f"--plot is {path!r}, expected a name that ends in .{', .'.join(known)}")
    open(path, "ab").close()


def draw(report: dict, path: str) -> None:
    """A figure of the table: a panel for each measure, a bar for each engine."""
    from matplotlib.figure import Figure

    panels = {
        "time to first token (ms)": ("first_token_s", 1e3),
        "decode (tokens/s)": ("decode_tokens_per_s", 1),
        "peak memory (MB)": ("peak_memory_bytes", 1e-6),
    }
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    for ax, (title, (key, unit)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        values = [(row[key] or 0) * unit for row in report["engines"].values()]
        names = [name.replace(", ", ",\n") for name in report["engines"]]
        ax.bar_label(ax.bar(names, values, color="#3b7dd8"), fmt="%.4g")
        ax.set(title=title, ymargin=0.2)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    child(sys.argv[1])

"""The measuring behind `minillm bench --draft`: texts that repeat and texts that do not."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean, median
from time import perf_counter
from typing import NamedTuple

import torch

from .bench import SEED, check_least, in_turn
from .bench_report import machine
from .chat import read_template
from .generation import Request, generate
from .kv_cache import KVCache
from .llm import LLM
from .sampling import SamplingParams
from .speculative import speculate

PLAIN, DRAFT, COSTS = "plain", "with the draft", "costs"
SIZES = (1, 2, 5, 9, 17)  # tokens in one forward; the costs in between are interpolated
TIMES = 5  # each size in a turn


class Task(NamedTuple):
    """A text to continue; a model that can chat gets the question instead, where there is one.

    Small models copy a text that has begun again, and when told to in a chat they often do not.
    """

    text: str
    question: str = ""


NOTES = """\
Every evening, when the boats came home, Mrs. Martin climbed the hundred steps of the lighthouse, \
filled the lamp with oil and lit it with a match. Then Mrs. Martin sat by the window, drank a cup \
of tea and wrote the names of the boats into a thick green book. In winter the storms threw the \
waves as high as the door, and nobody could reach the village for days. Mrs. Martin did not mind. \
She had bread, cheese, a warm stove and eleven cats, and in forty years the light was never dark \
for a single night. When a ship sounded its horn, Mrs. Martin took her own horn from the wall and \
blew three times."""

ACCOUNT = """\
class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("Account: amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("Account: amount must be positive")
        self.balance = self.balance - amount
        return self.balance
"""

TASKS = {  # a list and two texts to repeat with another name in them, and two that are free
    "list": Task(
        "1. Apple: a fruit that grows on a tree. Color: red. Price: one coin for each.\n"
        "2. Banana: a fruit that grows on a tree. Color: yellow. Price: one coin for each.\n"
        "3. Cherry: a fruit that grows on a tree. Color: red. Price: one coin for each.\n"
        "4."
    ),
    "copy": Task(
        f"The text:\n\n{NOTES}\n\n"
        "The same text, with Mrs. Wilson instead of Mrs. Martin:\n\n"
        "Every evening, when the boats came home, Mrs. Wilson climbed"
    ),
    "code": Task(
        f"# A class:\n\n{ACCOUNT}\n"
        "# The same class, with the name Wallet instead of Account:\n\n"
        "class Wallet:\n"
        "    def __init__(self, owner, balance):"
    ),
    "story": Task(
        "When the storm began, the fisherman",
        "Tell me a story about a fisherman in a storm.",
    ),
    "explanation": Task(
        "There was once a miller who asked his daughter why the sea is salt. She answered:",
        "Why is the sky blue?",
    ),
}


@dataclass
class DraftJob:
    """What is measured; ValueError for numbers that are no job."""

    model: str = "fairytale"
    draft: str = "ngram"
    new_tokens: int = 96  # then SmolLM2's free texts are still free, and do not repeat themselves
    dtype: str = "float32"
    threads: int | None = None  # None: as many as PyTorch takes by itself
    repeat: int = 5

    def __post_init__(self):
        self.threads = torch.get_num_threads() if self.threads is None else self.threads
        # the prompt's forward may bring the first guesses, and something has to come after them
        check_least(self, new_tokens=32, threads=1, repeat=1)


REFUSED = {
    "batch": "a draft guesses for one request at a time",
    "mixed": "a draft guesses for one request at a time",
    "against": "what is compared is minillm with the draft and without it",
    "no_cache": "guesses are checked behind a cache",
    "quantize": "what is compared are the same weights with the draft and without it",
    "prompt_length": "it brings texts of its own",
    "plot": "it prints a table and draws nothing",
}


def draft_job(given: dict) -> DraftJob:
    """The job of the options that were given; ValueError for one that has no meaning here."""
    for name, reason in REFUSED.items():
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} does not go with --draft: {reason}")
    names = DraftJob.__dataclass_fields__
    return DraftJob(**{name: given[name] for name in names if name in given})


class Round(NamedTuple):
    """One forward of the model: when it was over, its guesses, and the new tokens until then."""

    time: float
    proposed: int
    accepted: int
    done: int


class Watched:
    """A draft whose rounds are written down."""

    def __init__(self, draft):
        self.draft, self.propose, self.rounds = draft, draft.propose, []

    def settle(self, request: Request, proposed: int, accepted: int) -> None:
        """A round is over: tell the draft, and write it down."""
        self.draft.settle(request, proposed, accepted)
        self.rounds.append(Round(perf_counter(), proposed, accepted, len(request.token_ids)))


def measure_draft(job: DraftJob) -> dict:
    """The report; ValueError for a model without texts, another vocabulary, or too many tokens."""
    torch.set_num_threads(job.threads)
    if job.model == "gpt2-shape":
        raise ValueError("--draft needs a model that continues texts: gpt2-shape is random")
    llm = LLM(job.model, dtype=job.dtype, draft=job.draft)
    prompts = {name: prompt_ids(llm, name, job.new_tokens) for name in TASKS}
    engines = {}
    for name, ids in prompts.items():
        for way in (PLAIN, DRAFT):
            engines[name, way] = partial(run_once, llm, ids, job.new_tokens, way)
    past = round(median(map(len, prompts.values()))) + job.new_tokens // 2
    engines[COSTS] = partial(forward_seconds, llm, past)
    for warm_up in engines.values():
        warm_up()
    runs = {name: [] for name in engines}
    for name, run in in_turn(engines, job.repeat):
        runs[name].append(run)
    return summarize(job, {name: len(ids) for name, ids in prompts.items()}, runs)


def prompt_ids(llm: LLM, name: str, new_tokens: int) -> list[int]:
    """A task's ids, as a chat where that is meant; ValueError where they do not fit."""
    task = TASKS[name]
    if llm.tokenizer is None:
        raise ValueError(f"--draft is measured on texts: {llm.no_tokenizer}")
    if task.question and read_template(llm.path):
        ids = llm.chat_ids([{"role": "user", "content": task.question}])
    else:
        ids = llm.encode(task.text)
    context = llm.model.config.context_length
    if len(ids) + new_tokens > context:
        raise ValueError(
            f"--new-tokens {new_tokens} are too many behind the {len(ids)} tokens of the task "
            f"{name!r}: the model's context holds {context}"
        )
    return ids


def run_once(llm: LLM, ids: list[int], new_tokens: int, way: str) -> tuple[list[Round], list[int]]:
    """Continue a prompt greedily, past any end id: its rounds, one a forward, and the new ids."""
    params = SamplingParams(max_new_tokens=new_tokens)
    request = Request(ids, params, context=llm.model.config.context_length)
    cache = KVCache.for_model(llm.model, request.max_length)
    if way == PLAIN:
        new = generate(llm.model, request, cache)
        rounds = [Round(perf_counter(), 0, 0, done) for done, _ in enumerate(new, 1)]
        return rounds, request.token_ids
    draft = Watched(llm.new_draft())
    for _ in speculate(llm.model, request, cache, draft):
        pass
    return draft.rounds, request.token_ids


@torch.inference_mode()
def forward_seconds(llm: LLM, past: int) -> dict:
    """Seconds of single forwards behind a past: for each size, and for the draft's own model."""
    draft = llm.new_draft()
    most = draft.k + 1  # its guesses behind one token
    sizes = [size for size in SIZES if size < most] + [most]
    seconds = {"model": time_forwards(llm.model, past, sizes)}
    if guesser := getattr(draft, "model", None):
        seconds["draft"] = time_forwards(guesser, past, (1,))
    return seconds


def time_forwards(model, past: int, sizes: Sequence[int]) -> dict[int, list[float]]:
    """Number of tokens -> the seconds of `TIMES` forwards over so many, head included."""
    past = min(past, model.config.context_length - max(sizes))
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(model.config.vocab_size, (1, past + max(sizes)), generator=generator)
    cache = KVCache.for_model(model, past + max(sizes))
    model.hidden_states(ids[:, :past], cache=cache)
    seconds = {T: [] for T in sizes}
    for T in list(sizes) * TIMES:
        start = perf_counter()
        x = model.hidden_states(ids[:, past : past + T], cache=cache)  # [1, T] -> [1, T, D]
        model.head(x[0])  # [T, D] -> [T, V]
        seconds[T].append(perf_counter() - start)
        cache.truncate(past)
    return seconds


def summarize(job: DraftJob, prompt_tokens: dict[str, int], runs: dict) -> dict:
    """The report, of medians: the tasks, what forwards cost, and where the numbers come from."""
    of_model = merged([run["model"] for run in runs[COSTS]])
    costs = {T: seconds / of_model[1] for T, seconds in of_model.items()}
    of_draft = merged([run["draft"] for run in runs[COSTS] if "draft" in run])
    per_guess = of_draft.get(1, 0.0) / of_model[1]
    tasks = {}
    for name, length in prompt_tokens.items():
        row = figures(runs[name, PLAIN], runs[name, DRAFT], costs, per_guess)
        tasks[name] = {"prompt_tokens": length} | row
    report = {"job": asdict(job), "machine": machine(job), "tasks": tasks, "forward_costs": costs}
    report |= {"forward_s": of_model[1], "cost_per_guess": per_guess}
    return report | {"equal_ids": all(row["equal_ids"] for row in tasks.values())}


def merged(runs: list[dict[int, list[float]]]) -> dict[int, float]:
    """The median of all seconds for each number of tokens."""
    return {T: median(s for run in runs for s in run[T]) for T in (runs[0] if runs else ())}


def figures(plain: list, draft: list, costs: dict[int, float], per_guess: float) -> dict:
    """One task's numbers, all of its decode: of the rounds after that of the prompt."""
    speeds = [median(map(tokens_per_s, runs)) for runs in (plain, draft)]
    rounds = draft[-1][0]
    forwards = Counter(r.proposed + 1 for r in rounds[1:])
    proposed, accepted = (sum(getattr(r, key) for r in rounds[1:]) for key in Round._fields[1:3])
    per_forward = (rounds[-1].done - rounds[0].done) / (len(rounds) - 1)
    cost = mean(interpolate(costs, r.proposed + 1) + r.proposed * per_guess for r in rounds[1:])
    return {
        "plain_tokens_per_s": speeds[0],
        "draft_tokens_per_s": speeds[1],
        "speed_up": speeds[1] / speeds[0],
        "predicted_speed_up": per_forward / cost,
        "tokens_per_forward": per_forward,
        "proposed": proposed,
        "accepted": accepted,
        "acceptance": accepted / proposed if proposed else None,
        "forwards": dict(sorted(forwards.items())),  # tokens in it -> how many
        "cost_per_forward": cost,
        "equal_ids": len({tuple(ids) for _, ids in [*plain, *draft]}) == 1,
    }


def tokens_per_s(run: tuple[list[Round], list[int]]) -> float:
    """The tokens after the first forward's, by the time after it."""
    first, *_, last = run[0]
    return (last.done - first.done) / (last.time - first.time)


def interpolate(costs: dict[int, float], T: int) -> float:
    """What a forward over T tokens costs, on a straight line between the measured sizes."""
    sizes = sorted(costs)
    n = min(max(bisect_left(sizes, T), 1), len(sizes) - 1)
    a, b = sizes[n - 1 : n + 1]
    return costs[a] + (costs[b] - costs[a]) * (T - a) / (b - a)

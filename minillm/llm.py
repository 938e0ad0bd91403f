"""The engine in its first form: a model, its tokenizer and the loop, from text to text."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from .generation import Request, generate, stream
from .gpt2 import GPT2, GPT2Config
from .kv_cache import KVCache
from .sampling import SamplingParams
from .tokenizer import Tokenizer
from .tokenizer_files import read_json
from .weights import end_token_ids, resolve

ARCHITECTURES = {"gpt2": (GPT2, GPT2Config)}


@dataclasses.dataclass(frozen=True)
class Completion:
    """What came back for one prompt; `finish_reason` is "stop", "length" or "context".

    `text` ends before an end token or a stop string; `token_ids` are all that were generated.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_token_ids: list[int]


def architecture(folder: Path) -> tuple[type, object]:
    """The model class and the configuration that a folder asks for; ValueError for an unknown one."""
    fields = read_json(folder / "config.json")
    model_type = fields.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"{folder} holds a model of type {model_type!r}; this engine runs: {', '.join(ARCHITECTURES)}"
        )
    model_class, config_class = ARCHITECTURES[model_type]
    return model_class, config_class.from_dict(fields)


class LLM:
    """A model and its tokenizer, by name: "fairytale", a local directory, or a hub id.

    Raises FileNotFoundError or ValueError, in one sentence, when the folder does not hold a model
    that this engine can run.
    """

    def __init__(self, model: str | Path):
        folder = resolve(model)
        model_class, _ = architecture(folder)
        self.tokenizer = Tokenizer.from_pretrained(folder)
        self.model = model_class.from_pretrained(folder)
        self.end_ids = end_token_ids(folder)

    def generate(
        self, prompt: str | list[str], params: SamplingParams | None = None, **options
    ) -> Completion | list[Completion]:
        """Continue one prompt, or each of a list, as `SamplingParams` or its fields say.

        Without them: greedy, at most 100 new tokens. ValueError or TypeError, in one sentence, for
        a wrong value or an unknown field.
        """
        many = isinstance(prompt, list | tuple)
        requests = [self.request(one, params, **options) for one in (prompt if many else [prompt])]
        for request in requests:
            for _ in generate(self.model, request, self.cache(request)):
                pass
        done = [Completion(r.text, r.token_ids, r.finish_reason, r.prompt_ids) for r in requests]
        return done if many else done[0]

    def stream(self, prompt: str, params: SamplingParams | None = None, **options) -> Iterator[str]:
        """The same text piece by piece, as it comes; pieces never split a character."""
        request = self.request(prompt, params, **options)
        return stream(self.model, request, self.cache(request))

    def request(self, prompt: str, params: SamplingParams | None = None, **options) -> Request:
        """One prompt, ready to run; ValueError when it is empty or longer than the context."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"params is {params!r}, expected SamplingParams: "
                f"give single fields by name, such as max_new_tokens=20"
            )
        return Request(
            self.encode(prompt),
            dataclasses.replace(params, **options),
            context=self.model.config.n_positions,
            end_ids=self.end_ids,
            tokenizer=self.tokenizer,
        )

    def cache(self, request: Request) -> KVCache:
        """A cache with room for the request's prompt and its budget, or for the whole context."""
        most = len(request.prompt_ids) + request.params.max_new_tokens
        return KVCache.for_model(self.model, min(most, request.context))

    def encode(self, prompt: str) -> list[int]:
        """The prompt's token ids; ValueError when it is empty."""
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(
                f"the prompt is {prompt!r}: a model continues a text, so give it at least one character"
            )
        return self.tokenizer.encode(prompt)

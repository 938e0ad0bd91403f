"""The engine in its first form: one prompt, greedy, from text to text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .gpt2 import GPT2, GPT2Config, greedy
from .tokenizer import Tokenizer
from .tokenizer_files import read_json
from .weights import end_token_ids, resolve

ARCHITECTURES = {"gpt2": (GPT2, GPT2Config)}


@dataclass(frozen=True)
class Completion:
    """What came back for one prompt; `finish_reason` is "stop", "length" or "context"."""

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

    def generate(self, prompt: str, max_new_tokens: int = 100) -> Completion:
        """Continue one prompt with the most likely tokens; an end-of-text token is not part of the text."""
        prompt_ids = self.encode(prompt)
        token_ids = list(self._steps(prompt_ids, max_new_tokens))
        if token_ids and token_ids[-1] in self.end_ids:
            reason = "stop"
        else:
            reason = "length" if len(token_ids) >= max_new_tokens else "context"
        text = self.tokenizer.decode(token_ids[:-1] if reason == "stop" else token_ids)
        return Completion(text, token_ids, reason, prompt_ids)

    def stream(self, prompt: str, max_new_tokens: int = 100) -> Iterator[str]:
        """The same text piece by piece, as it comes; pieces never split a character."""
        decoder = self.tokenizer.incremental_decoder()
        for token_id in self._steps(self.encode(prompt), max_new_tokens):
            if token_id not in self.end_ids:
                yield decoder.add(token_id)
        yield decoder.flush()

    def encode(self, prompt: str) -> list[int]:
        """The prompt's token ids; ValueError when it is empty."""
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(
                f"the prompt is {prompt!r}: a model continues a text, so give it at least one character"
            )
        return self.tokenizer.encode(prompt)

    def _steps(self, prompt_ids: list[int], max_new_tokens: int) -> Iterator[int]:
        if (
            isinstance(max_new_tokens, bool)
            or not isinstance(max_new_tokens, int)
            or max_new_tokens < 0
        ):
            raise ValueError(
                f"max_new_tokens is {max_new_tokens!r}, expected a whole number of at least 0"
            )
        return greedy(self.model, prompt_ids, max_new_tokens, self.end_ids)

"""minillm: an LLM inference engine built from nothing, chapter by chapter.

import minillm
llm = minillm.LLM("fairytale")
print(llm.generate("Once upon a time", max_new_tokens=40).text)
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("minillm")
except PackageNotFoundError:  # run from a folder that was never installed
    __version__ = "0"

_WHERE = {
    "LLM": "llm",
    "Completion": "llm",
    "SamplingParams": "sampling",
    "Tokenizer": "tokenizer",
}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str):
    """Import a public name when it is first used, so that `import minillm` stays quick."""
    if name not in _WHERE:
        raise AttributeError(f"minillm has no {name!r}: it has {', '.join(_WHERE)}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)

"""The checks of the exercises: `checks.attention(attention)` prints one line that knows your mistake."""

from importlib import import_module
from importlib.util import find_spec

from .exercise import Exercise, Mistake

EXERCISES: dict[str, Exercise] = {}
for chapter in ("chapter02", "chapter03", "chapter04"):
    if find_spec(f"{__name__}.{chapter}"):
        EXERCISES.update(import_module(f"{__name__}.{chapter}").EXERCISES)
globals().update(EXERCISES)

__all__ = ["EXERCISES", "Exercise", "Mistake"]

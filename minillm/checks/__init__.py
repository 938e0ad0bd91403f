"""The checks of the exercises: `checks.my_layer_norm(my_layer_norm)` prints one line that knows your mistake."""

from . import (
    chapter02,
    chapter03,
    chapter04,
    chapter05,
    chapter06,
    chapter07,
    chapter08,
    chapter09,
    chapter10,
)
from .exercise import Exercise, Mistake

EXERCISES: dict[str, Exercise] = {
    **chapter02.EXERCISES,
    **chapter03.EXERCISES,
    **chapter04.EXERCISES,
    **chapter05.EXERCISES,
    **chapter06.EXERCISES,
    **chapter07.EXERCISES,
    **chapter08.EXERCISES,
    **chapter09.EXERCISES,
    **chapter10.EXERCISES,
}
globals().update(EXERCISES)

__all__ = ["EXERCISES", "Exercise", "Mistake"]

"""What every exercise of the series shares: try the reader's function, and say in one line how it went."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mistake:
    """A way to get it wrong that has happened to many people, and the sentence that names it.

    `says` is the sentence, or a function of (given, expected, arguments) that fills in numbers.
    `wrong` makes exactly this mistake. A result is recognised by `sign(given, expected, arguments)`
    on some case, or, where no sign is given, by agreeing with `wrong` on every case.
    """

    says: str | Callable
    wrong: Callable
    sign: Callable | None = None


@dataclass(frozen=True)
class Exercise:
    """A task of a chapter: call it with the reader's function, and it prints one stable line."""

    name: str
    reference: Callable
    cases: tuple[tuple, ...]  # the arguments of each try
    mistakes: tuple[Mistake, ...]
    right: str  # what the reader can do now that it works
    view: Callable = lambda result, *arguments: result  # what of a result is compared

    def __call__(self, attempt: Callable) -> None:
        print(self.verdict(attempt))

    def verdict(self, attempt: Callable) -> str:
        """`right: …`, `not solved yet: …`, or `not yet: …` and the mistake by its name."""
        results, stopped = [], None
        for arguments in self.cases:
            try:
                given = self._run(attempt, arguments)
            except NotImplementedError:
                return f"not solved yet: replace the `raise` in {self.name} and run this cell again"
            except Exception as error:
                stopped = f"not yet: {self.name} stopped with {type(error).__name__}: {error}"
                break
            if given is None:
                return f"not yet: {self.name} returned None. Is the `return` missing?"
            results.append((given, self._run(self.reference, arguments), arguments))
        wrong = [result for result in results if not same(result[0], result[1])]
        if not wrong:
            return stopped or f"right: {self.right}"
        for mistake in self.mistakes:
            found = self._recognise(mistake, results, wrong)
            if found:
                says = mistake.says if isinstance(mistake.says, str) else mistake.says(*found)
                return f"not yet: {says}"
        return f"not yet: {first_difference(*wrong[0])}"

    def _run(self, function: Callable, arguments: tuple):
        """One try, on a copy of the arguments: a function that writes into them spoils nothing."""
        result = function(*copy.deepcopy(arguments))
        return result if result is None else self.view(result, *copy.deepcopy(arguments))

    def _recognise(
        self, mistake: Mistake, results: list[tuple], wrong: list[tuple]
    ) -> tuple | None:
        """The case that shows the mistake, or None."""
        if mistake.sign:
            seen = [r for r in wrong if as_tensor(r[0]) is not None and mistake.sign(*r)]
            return seen[0] if seen else None
        agrees = all(
            same(given, self._run(mistake.wrong, arguments)) for given, _, arguments in results
        )
        return wrong[0] if agrees else None


def as_tensor(value) -> torch.Tensor | None:
    """The value as a float64 tensor, or None where it is not made of numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float64)
    try:
        return torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None


def same(given, expected) -> bool:
    """Equal, or, for floats, equal to 1e-4 of the expected tensor's largest magnitude."""
    is_float = isinstance(expected, float) or (
        isinstance(expected, torch.Tensor) and expected.is_floating_point()
    )
    if not is_float and not isinstance(expected, torch.Tensor):
        return type(given) is type(expected) and given == expected
    a, b = as_tensor(given), as_tensor(expected)
    if a is None or a.shape != b.shape or is_bool(given) != is_bool(expected):
        return False
    tolerance = 1e-4 * b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=0, atol=tolerance if is_float else 0, equal_nan=True)


def is_bool(value) -> bool:
    """True for a tensor of True and False: a mask of ones and zeros is another thing to PyTorch."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def first_difference(given, expected, arguments) -> str:
    """Where two results part for the first time, in words."""
    a, b = as_tensor(given), as_tensor(expected)
    if a is None or b is None or (not b.dim() and type(given) is not type(expected)):
        return f"for {brief(arguments)} expected {brief(expected)}, yours is {brief(given)}"
    if is_bool(given) != is_bool(expected):
        kinds = [getattr(x, "dtype", type(x).__name__) for x in (expected, given)]
        return f"expected {kinds[0]}, yours is {kinds[1]}"
    if a.shape != b.shape:
        return f"expected shape {list(b.shape)}, yours is {list(a.shape)}"
    if same(a, b):
        kinds = [type(x).__name__ for x in (expected, given)]
        return f"the values are right, but expected is a {kinds[0]}, yours is a {kinds[1]}"
    gap = (a - b).abs().nan_to_num(nan=math.inf)
    where = torch.nonzero(gap > 1e-4 * b.abs().nan_to_num(posinf=0, neginf=0).max())[0].tolist()
    at = f"at {where} " if where else ""
    return f"{at}expected {b[tuple(where)].item():.4g}, yours is {a[tuple(where)].item():.4g}"


def brief(value) -> str:
    """A value on one short line."""
    if isinstance(value, tuple):
        return ", ".join(brief(part) for part in value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

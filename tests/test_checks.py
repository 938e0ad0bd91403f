"""The exercises: every solution is right, every planted mistake is named, an empty stub is neither."""

import math
import re

import make
import nbformat
import pytest
import torch
from torch import nn

from minillm import checks
from minillm.checks.exercise import Exercise, Mistake

ALL = checks.EXERCISES
PLANTED = [(name, n) for name, exercise in ALL.items() for n in range(len(exercise.mistakes))]


def solutions() -> dict[str, tuple[str, str]]:
    """Exercise name -> (stub, solution) as they stand in the notebooks."""
    found = {}
    for path in make.notebook_paths():
        cells = {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}
        for cell_id, source in cells.items():
            if match := re.fullmatch(r"check-(\d+)", cell_id):
                name = re.search(r"checks\.(\w+)\(", source)[1]
                number = match[1]
                code = re.search(
                    r"<details>.*?```python\n(.*?)```.*?</details>",
                    cells[f"solution-{number}"],
                    re.S,
                )
                found[name] = (cells[f"exercise-{number}"], code[1])
    return found


def run(code: str, name: str):
    """Execute a cell the way a notebook would, and return what it defines."""
    names = {"torch": torch, "nn": nn, "math": math}
    exec(code, names)
    return names[name]


SOLUTIONS = solutions()


def test_every_exercise_stands_in_a_notebook_with_a_solution():
    assert len(ALL) >= 9
    assert SOLUTIONS.keys() == ALL.keys()


@pytest.mark.parametrize("name", ALL)
def test_the_solution_is_right(name):
    assert ALL[name].verdict(run(SOLUTIONS[name][1], name)).startswith("right: ")


@pytest.mark.parametrize("name", ALL)
def test_the_stub_is_not_solved_yet(name):
    assert ALL[name].verdict(run(SOLUTIONS[name][0], name)).startswith("not solved yet: ")


@pytest.mark.parametrize("name", ALL)
def test_at_least_three_mistakes_are_known(name):
    assert len(ALL[name].mistakes) >= 3


@pytest.mark.parametrize(("name", "n"), PLANTED)
def test_a_planted_mistake_is_named(name, n):
    """Never called right, and never called by the name of another mistake."""
    exercise = ALL[name]
    mistake = exercise.mistakes[n]
    verdict = exercise.verdict(mistake.wrong)
    assert verdict.startswith("not yet: ")
    if isinstance(mistake.says, str):
        assert verdict == f"not yet: {mistake.says}"
    others = [m.says for m in exercise.mistakes if m is not mistake and isinstance(m.says, str)]
    assert verdict.removeprefix("not yet: ") not in others
    assert "expected shape" not in verdict and "stopped with" not in verdict


@pytest.mark.parametrize("name", ALL)
def test_an_unknown_mistake_is_shown_where_it_starts(name):
    exercise = ALL[name]
    verdict = exercise.verdict(lambda *arguments: torch.full((1, 7), 5.5))
    assert verdict.startswith("not yet: ")
    assert "\n" not in verdict


def toy(**fields) -> Exercise:
    settings = {
        "name": "double",
        "reference": lambda x: 2 * x,
        "cases": ((torch.tensor([1.0, 2.0]),), (torch.tensor([4.0]),)),
        "mistakes": (Mistake("you added", lambda x: x + x**0),),
        "right": "done",
    }
    return Exercise(**(settings | fields))


def test_a_check_prints_one_line(capsys):
    toy()(lambda x: 2 * x)
    assert capsys.readouterr().out == "right: done\n"


def test_what_a_check_says_about_other_answers():
    assert toy().verdict(lambda x: None).endswith("Is the `return` missing?")
    assert "at [1] expected 4, yours is 5" in toy().verdict(
        lambda x: x * 2 + torch.tensor([0, 1.0])[: len(x)]
    )
    assert "expected shape [2], yours is [1, 2]" in toy().verdict(lambda x: 2 * x[None])
    assert "IndexError" in toy().verdict(lambda x: x[9])
    assert "yours is nan" in toy().verdict(lambda x: x * math.nan)


def test_the_right_values_in_the_wrong_container_are_named():
    lists = toy(reference=lambda x: [2, 4], mistakes=())
    assert lists.verdict(lambda x: (2, 4)).endswith("expected is a list, yours is a tuple")
    assert lists.verdict(lambda x: [2.0, 4.0]).startswith("right")


def test_a_mask_of_numbers_is_no_mask():
    masks = toy(reference=lambda x: torch.tensor([True, False]), mistakes=())
    assert "expected torch.bool" in masks.verdict(lambda x: torch.tensor([1.0, 0.0]))


def test_a_mistake_that_crashes_later_is_still_named():
    def wrong(x):
        if len(x) == 1:
            raise RuntimeError("shapes")
        return x + 1

    assert toy().verdict(wrong) == "not yet: you added"


def test_writing_into_the_arguments_does_not_help():
    def cheat(x):
        x *= 2
        return x

    exercise = toy(reference=lambda x: 2 * x)
    assert exercise.verdict(cheat).startswith("right")
    assert exercise.cases[0][0].tolist() == [1.0, 2.0]

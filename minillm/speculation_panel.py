"""A calculator to play with: how many guesses pay, at this acceptance and these costs."""

import math
from itertools import pairwise

from .panel_html import framed
from .widgets import load_ipywidgets, named, still

MOST_GUESSES = 16
MOST_DRAFT_COST = 0.6  # the end of the slider, in steps of the target
TOPS = (2, 3, 5, 10, 20)  # where the axis of the speed-ups may end
PLAIN, CHOSEN, BEST = "#9aa0a6", "#2f80ed", "#2e9e5b"
COLUMN, HEIGHT, LEFT, TOP = 36, 150, 34, 24  # of the chart, in pixels


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that a round of k guesses brings, 1 + α + … + α^k, each accepted with probability α.

    Leviathan et al. 2023, equation 1. What the target adds of its own is counted.
    """
    return k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def check_table(check_costs: dict[int, float]) -> dict[int, float]:
    """A caller's measurements in order, divided by the cost of one token, so that seconds will do.

    Raises ValueError for a table without the cost of one token, with one entry only, with a key
    that is no number of tokens, or with a cost that is not above 0.
    """
    for tokens, cost in check_costs.items():
        if not isinstance(tokens, int) or tokens < 1 or not (math.isfinite(cost) and cost > 0):
            raise ValueError(
                f"check_costs has {tokens!r}: {cost!r}, expected the number of tokens in a forward "
                f"and its cost, as in {{1: 1.0, 5: 1.5}}"
            )
    if 1 not in check_costs or len(check_costs) < 2:
        raise ValueError(
            f"check_costs has the costs of {sorted(check_costs)} tokens, expected that of 1 token "
            f"and of at least one larger forward"
        )
    return {tokens: check_costs[tokens] / check_costs[1] for tokens in sorted(check_costs)}


def check_cost(table: dict[int, float], tokens: int) -> float:
    """The cost of a forward over so many tokens, on straight lines between the table's entries.

    `table` is one of `check_table`. Beyond its end the last line goes on, but never falls.
    """
    ends = list(pairwise(table))
    left, right = next(((a, b) for a, b in ends if tokens <= b), ends[-1])
    slope = (table[right] - table[left]) / (right - left)
    if tokens > right:
        return table[right] + max(slope, 0) * (tokens - right)
    return table[left] + slope * (tokens - left)


def speed_up(alpha: float, k: int, draft_cost: float, table: dict[int, float]) -> float:
    """How many times as fast as one token a step: the tokens of a round by its cost.

    Leviathan et al. 2023, theorem 3.8, where checking costs v(k + 1) and not 1.
    """
    return expected_tokens(alpha, k) / (k * draft_cost + check_cost(table, k + 1))


def speed_ups(alpha: float, draft_cost: float, table: dict[int, float]) -> list[float]:
    """The speed-up of 1, 2, … guesses."""
    return [speed_up(alpha, k, draft_cost, table) for k in range(1, MOST_GUESSES + 1)]


def bar_svg(k: int, times: float, height: float, color: str, written: bool) -> str:
    """One number of guesses: its bar, its name below, and the speed-up above where asked for."""
    middle, foot = LEFT + COLUMN * (k - 0.5), TOP + HEIGHT
    text = 'text-anchor="middle" font-size="11" fill="currentColor"'
    many = "es" if k > 1 else ""
    label = f'<text x="{middle:.0f}" y="{foot - height - 5:.1f}" {text}>{times:.2f}</text>'
    return (
        f'<rect x="{middle - 13:.0f}" y="{foot - height:.1f}" width="26" height="{height:.1f}" '
        f'fill="{color}"><title>{k} guess{many}: {times:.3f} times</title></rect>'
        f'<text x="{middle:.0f}" y="{foot + 15}" {text}>{k}</text>{label if written else ""}'
    )


def chart_svg(times: list[float], k: int, best: int | None) -> str:
    """The speed-up over the number of guesses as bars, with the line at 1: nothing gained."""
    top = next((top for top in TOPS if max(times) <= top), max(times))
    width, foot = LEFT + COLUMN * len(times) + 4, TOP + HEIGHT
    parts = []
    for n, value in enumerate(times, start=1):
        color = CHOSEN if n == k else BEST if n == best else PLAIN
        parts.append(bar_svg(n, value, HEIGHT * value / top, color, n in (k, best)))
    for value, right, dash in ((0, width - 4, ""), (1, width - 4, "5 4"), (top, LEFT, "")):
        y = foot - HEIGHT * value / top
        parts.append(
            f'<path class="level" d="M{LEFT - 4} {y:.1f}H{right}" stroke="currentColor" '
            f'stroke-dasharray="{dash}"/><text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" '
            f'font-size="11" fill="currentColor">{value:g}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {foot + 22}" width="{width}" role="img" '
        f'aria-label="speed-up over the number of guesses">{"".join(parts)}</svg>'
    )


def facts(
    alpha: float, k: int, draft_cost: float, table: dict[int, float], best: int | None, most: float
) -> list[tuple[str, str]]:
    """The formula with its numbers: tokens, cost, speed-up, and the best number of guesses."""
    tokens, check = expected_tokens(alpha, k), check_cost(table, k + 1)
    cost = k * draft_cost + check
    terms = f"(1 − {alpha:.3g}<sup>{k + 1}</sup>) / (1 − {alpha:.3g})"
    if alpha == 1:
        terms = f"{k} + 1"
    steps = f"{k} · {draft_cost:.3g} + {check:.2f} = {cost:.2f} steps of the target"
    advice = f"{best}, with {most:.2f} times" if best else "none: one token a step is faster"
    return [
        ("tokens of a round", f"{terms} = {tokens:.2f}"),
        ("its cost", steps),
        ("speed-up", f"{tokens:.2f} / {cost:.2f} = {tokens / cost:.2f} times"),
        ("best k", advice),
    ]


def speculation_html(alpha: float, k: int, draft_cost: float, check_costs: dict[int, float]) -> str:
    """What a round of k guesses brings and costs, and the speed-up of 1 to 16 guesses as bars.

    `alpha` is the acceptance, `draft_cost` that of a guess in steps of the target, `check_costs`
    as in `speculation_panel`. Raises ValueError as `check_table` does.
    """
    table = check_table(check_costs)
    times = speed_ups(alpha, draft_cost, table)
    most = max(times)
    best = times.index(most) + 1 if most > 1 else None
    rows = facts(alpha, k, draft_cost, table, best, most)
    numbers = "".join(f"<div><span>{fact}</span> <b>{text}</b></div>" for fact, text in rows)
    legend = "".join(
        f'<span class="swatch" style="background:{color}"></span>{text}'
        for color, text in ((CHOSEN, "your k"), (BEST, "the best"))
    )
    measured = ", ".join(f"{tokens}: {cost:.2f}" for tokens, cost in table.items())
    beyond = f" Beyond {max(table)} the last line goes on." if max(table) <= MOST_GUESSES else ""
    return framed(
        f'<div class="numbers">{numbers}</div>',
        f'<p class="small">speed-up over the number of guesses k; dashed: nothing gained{legend}</p>',
        chart_svg(times, k, best),
        f'<p class="faint small">Measured cost of a forward over so many tokens: {measured}; '
        f"straight lines between them.{beyond}</p>",
    )


def speculation_panel(
    check_costs: dict[int, float],
    alpha: float = 0.8,
    k: int = 4,
    draft_cost: float = 0.1,
):
    """Choose acceptance, guesses and the cost of a guess, and see what a round of speculation brings.

    `check_costs` is measured by you: tokens in one forward of the target -> its cost, in any unit,
    with the cost of 1 token among them. `alpha` (0 to 1), `k` (1 to 16) and `draft_cost` (0 to 0.6
    steps of the target) are where the controls start; without ipywidgets it is a still picture of
    these. Raises ValueError for a start outside of that, and for a table that cannot be used.
    """
    table = check_table(check_costs)
    spans = [
        ("alpha", alpha, 0, 1),
        ("k", k, 1, MOST_GUESSES),
        ("draft_cost", draft_cost, 0, MOST_DRAFT_COST),
    ]
    for name, value, low, high in spans:
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, this panel offers {low} to {high}")
    if not isinstance(k, int):
        raise ValueError(f"k is {k}, expected a whole number of guesses")
    first = speculation_html(alpha, k, draft_cost, table)
    ipywidgets = load_ipywidgets()
    if ipywidgets is None:
        return still(first, "speculation_panel", "another alpha, k or draft_cost")
    controls = (
        ipywidgets.FloatSlider(alpha, min=0, max=1, step=0.01, **named("acceptance α", "400px")),
        ipywidgets.IntSlider(k, 1, MOST_GUESSES, **named("guesses k", "400px")),
        ipywidgets.FloatSlider(
            draft_cost, min=0, max=MOST_DRAFT_COST, step=0.01, **named("cost of a guess c", "400px")
        ),
    )
    shown = ipywidgets.HTML(value=first)

    def show(change) -> None:
        shown.value = speculation_html(*(control.value for control in controls), table)

    for control in controls:
        control.observe(show, names="value")
    return ipywidgets.VBox([*controls, shown])

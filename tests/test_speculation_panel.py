"""The speculation panel: its numbers are those of a sheet of paper, of a simulation and of the engine."""

import re
import sys
from html import unescape
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from minillm.generation import Request
from minillm.kv_cache import KVCache
from minillm.sampling import SamplingParams
from minillm.speculation_panel import (
    check_cost,
    check_table,
    expected_tokens,
    speculation_html,
    speculation_panel,
    speed_up,
)
from minillm.speculative import ModelDraft, speculate

pytestmark = pytest.mark.usefixtures("one_thread")

COSTS = {1: 1.0, 2: 1.5, 5: 1.5, 9: 1.65, 17: 1.9}


def text(html: str) -> str:
    """What a person reads in it."""
    plain = re.sub(r"<style>.*?</style>|<title>.*?</title>|<sup>", " ", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]+>", "", plain.replace("</div>", " "))).split())


def bars(html: str) -> list[tuple[float, float, str]]:
    """Each bar's height in pixels, the speed-up in its tip, and its color."""
    found = re.findall(
        r'<rect [^>]*height="([\d.]+)" fill="(#\w+)"><title>\d+ guess(?:es)?: ([\d.]+) times', html
    )
    return [(float(height), float(times), color) for height, color, times in found]


def levels(html: str) -> dict[float, float]:
    """The lines of the chart: what is written at each -> its y in pixels."""
    found = re.findall(r'class="level" d="M[\d.]+ ([\d.]+)H.*?</text>', html)
    numbers = re.findall(r'class="level".*?fill="currentColor">([\d.]+)</text>', html)
    return {float(number): float(y) for number, y in zip(numbers, found, strict=True)}


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"),
    [(0.5, 1, 1.5), (0.5, 2, 1.75), (0.8, 4, 3.3616), (0.0, 7, 1), (1.0, 4, 5), (1, 16, 17)],
)  # 0.8: 1 + 0.8 + 0.64 + 0.512 + 0.4096
def test_the_tokens_of_a_round_by_hand(alpha, k, tokens):
    assert expected_tokens(alpha, k) == pytest.approx(tokens, abs=1e-12)


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 1), (0.6, 5), (0.9, 16)])
def test_tokens_and_speed_up_of_100_000_simulated_rounds(alpha, k):
    held = np.random.default_rng(0).random((100_000, k)) < alpha
    tokens = 1 + np.cumprod(held, axis=1).sum(axis=1)  # those before the first failure, and one
    sure = tokens.std() / len(tokens) ** 0.5
    assert abs(tokens.mean() - expected_tokens(alpha, k)) < 4 * sure < 0.1
    cost = 0.2 * k + np.interp(k + 1, list(COSTS), list(COSTS.values()))
    seconds = cost * len(tokens)
    assert tokens.sum() / seconds == pytest.approx(speed_up(alpha, k, 0.2, COSTS), rel=0.02)


class Always(nn.Module):
    """The same probabilities after every token: each guess is accepted as often."""

    def __init__(self, shares):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(shares).log())  # [V]
        V = len(shares)
        self.config = SimpleNamespace(vocab_size=V, context_length=2048, cache_shape=(1, 1, 1))

    def hidden_states(self, token_ids, cache=None):
        if cache is not None:
            nothing = torch.zeros(1, 1, token_ids.shape[1], 1)
            cache.update(0, nothing, nothing)
        return self.logits.expand(*token_ids.shape, -1)  # [B, T] -> [B, T, V]

    def head(self, x):
        return x


def test_the_engine_brings_as_many_tokens_a_round():
    p, q, k = [0.1, 0.2, 0.3, 0.4], [0.3, 0.2, 0.2, 0.3], 3
    alpha = 0.8  # 0.1 + 0.2 + 0.2 + 0.3, the overlap
    target, tokens, rounds = Always(p), 0, 0
    for seed in range(4):
        params = SamplingParams(temperature=1, max_new_tokens=1800, seed=seed)
        request = Request([0], params, context=2048)
        cache, draft = KVCache.for_model(target, 2048), ModelDraft(Always(q), k)
        for _ in speculate(target, request, cache, draft):
            pass
        tokens += len(request.token_ids)
        rounds += request.speculation.target_calls
    assert tokens == 4 * 1800
    assert tokens / rounds == pytest.approx(expected_tokens(alpha, k), abs=0.1)


def test_theorem_3_8_where_checking_is_free():
    """Leviathan et al. 2023: (1 - α^(γ+1)) / ((1 - α)(γc + 1)), and by hand 3.3616 / 1.4."""
    free = {1: 1.0, 17: 1.0}
    assert speed_up(0.8, 4, 0.1, free) == pytest.approx(3.3616 / 1.4)
    assert speed_up(0.8, 4, 0.1, COSTS) == pytest.approx(3.3616 / (0.4 + 1.5))


def test_costs_between_the_measurements_are_those_of_numpy():
    inside = range(1, 18)
    expected = np.interp(inside, list(COSTS), list(COSTS.values()))
    np.testing.assert_allclose([check_cost(COSTS, tokens) for tokens in inside], expected)


def test_beyond_the_last_measurement_the_line_goes_on_but_never_falls():
    assert check_cost({1: 1.0, 5: 1.4, 9: 1.8}, 17) == pytest.approx(2.6)
    assert check_cost({1: 1.0, 9: 0.9}, 17) == pytest.approx(0.9)
    assert "Beyond 9 the last line goes on" in text(speculation_html(0.8, 4, 0.1, {1: 1, 9: 2}))
    assert "Beyond" not in text(speculation_html(0.8, 4, 0.1, COSTS))


def test_seconds_in_any_order_will_do():
    seconds = {tokens: 0.03 * cost for tokens, cost in reversed(COSTS.items())}
    assert list(check_table(seconds)) == list(COSTS)
    assert check_table(seconds) == pytest.approx(COSTS)


@pytest.mark.parametrize(
    "table", [{}, {1: 1.0}, {2: 1.5, 5: 1.5}, {1: 1.0, 0: 1.0}, {1: 1.0, 2.5: 1.0}, {1: 0.0, 2: 1.0}]
    + [{1: 1.0, 2: float("nan")}, {1: 1.0, 2: -1.0}]
)  # fmt: skip
def test_a_table_that_cannot_be_used_is_refused(table):
    with pytest.raises(ValueError, match="^check_costs has .*, expected"):
        speculation_panel(table)


def test_the_facts_are_those_of_a_hand_calculation():
    shown = text(speculation_html(0.8, 4, 0.1, COSTS))
    assert "tokens of a round (1 − 0.8 5) / (1 − 0.8) = 3.36" in shown
    assert "its cost 4 · 0.1 + 1.50 = 1.90 steps of the target" in shown
    assert "speed-up 3.36 / 1.90 = 1.77 times" in shown
    assert "tokens of a round 4 + 1 = 5.00" in text(speculation_html(1.0, 4, 0.1, COSTS))


@pytest.mark.parametrize(("alpha", "c", "best"), [(0.8, 0.1, 6), (0.9, 0.0, 16), (0.3, 0.5, None)])
def test_the_best_is_the_highest_of_all_bars(alpha, c, best):
    """By numpy: what a round of 1 to 16 guesses brings, by what it costs."""
    k = np.arange(1, 17)
    tokens = np.array([sum(alpha**n for n in range(count + 1)) for count in k])
    times = tokens / (k * c + np.interp(k + 1, list(COSTS), list(COSTS.values())))
    assert best == (times.argmax() + 1 if times.max() > 1 else None)
    html = speculation_html(alpha, 2, c, COSTS)
    heights, tips, colors = zip(*bars(html), strict=True)
    np.testing.assert_allclose(tips, times, atol=5.1e-4)
    foot, one = levels(html)[0], levels(html)[1]
    np.testing.assert_allclose(heights, times * (foot - one), rtol=0.005)  # pixels, rounded
    said = f"{best}, with {times.max():.2f} times" if best else "none: one token a step is faster"
    assert f"best k {said}" in text(html)
    assert len(set(colors)) == (3 if best else 2) and colors.count(colors[1]) == 1
    if best:
        assert colors.count(colors[best - 1]) == 1


def test_no_bar_leaves_the_chart():
    for alpha, costs in ((1.0, {1: 1.0, 17: 1.0}), (1.0, {1: 1.0, 17: 0.5}), (0.0, COSTS)):
        html = speculation_html(alpha, 16, 0.0, costs)
        heights = [height for height, _, _ in bars(html)]
        assert len(heights) == 16 and 0 < max(heights) <= levels(html)[0] - min(
            levels(html).values()
        )


def test_every_control_changes_the_picture_and_no_two_panels_share_one():
    panel = speculation_panel(COSTS)
    *controls, shown = panel.children
    assert shown.value == speculation_html(0.8, 4, 0.1, COSTS)
    for control, value in zip(controls, (0.55, 7, 0.31), strict=True):
        before = shown.value
        control.value = value
        assert shown.value != before
    assert shown.value == speculation_html(0.55, 7, 0.31, COSTS)
    assert [(c.min, c.max) for c in controls] == [(0, 1), (1, 16), (0, 0.6)]
    assert speculation_panel(COSTS).children[-1].value == speculation_html(0.8, 4, 0.1, COSTS)


def test_at_the_ends_of_all_sliders_there_are_sixteen_bars():
    seen = set()
    for alpha in (0, 0.0, 1, 1.0):
        for k in (1, 16):
            for c in (0.0, 0.6):
                html = speculation_html(alpha, k, c, COSTS)
                assert len(bars(html)) == 16 and "nan" not in text(html)
                seen.add(html)
    assert len(seen) >= 8


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({"alpha": 1.1}, "alpha is 1.1, this panel offers 0 to 1"),
        ({"alpha": float("nan")}, "alpha is nan, this panel offers"),
        ({"k": 0}, "k is 0, this panel offers 1 to 16"),
        ({"k": 2.5}, "k is 2.5, expected a whole number"),
        ({"draft_cost": 0.7}, "draft_cost is 0.7, this panel offers 0 to 0.6"),
    ],
)
def test_a_start_that_the_panel_does_not_offer_is_refused(start, said):
    with pytest.raises(ValueError, match=said):
        speculation_panel(COSTS, **start)


def test_without_ipywidgets_there_is_a_picture_and_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    panel = speculation_panel(COSTS, alpha=0.6, k=2, draft_cost=0.0)
    assert speculation_html(0.6, 2, 0.0, COSTS) in panel._repr_html_()
    assert len(bars(panel._repr_html_())) == 16 and "ipywidgets is not installed" in repr(panel)

"""The batch panel: its masks are those of the engine, its numbers those of a sheet of paper."""

import re
import sys
from html import unescape

import pytest
import torch

from minillm.batch_panel import MOST_STEPS, START, batch_html, batch_panel, last_call
from minillm.batching import generate_batch
from minillm.generation import Request
from minillm.gpt2 import GPT2
from minillm.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


def squares(html: str) -> list[list[str]]:
    """For each row of the batch: its labels and squares, as a person sees them, one string a line."""
    marks = {"look": "#", "future": ".", "padding": "/"}
    pictures = []
    for picture in re.findall(r'<div class="squares".*?</div>', html, re.S):
        cells = re.findall(r'<span class="(key|query|square) ?(\w*)">(.*?)</span>', picture)
        lines = [""]
        for kind, name, label in cells:
            if kind == "query":
                lines.append("")
            lines[-1] += marks[name] if kind == "square" else label
        pictures.append(lines)
    return pictures


def text(html: str) -> str:
    """What a person reads in it."""
    return unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.S))


def test_the_prefill_of_two_rows_drawn_by_hand():
    assert squares(batch_html((1, 3), 0)) == [
        ["––0", "–#/.", "–/#.", "0//#"],
        ["012", "0#..", "1##.", "2###"],
    ]


def test_a_decode_step_has_one_query_that_sees_all_real_keys():
    assert squares(batch_html((1, 3), 2)) == [["––012", "2//###"], ["01234", "4#####"]]


@pytest.mark.parametrize(
    ("lengths", "steps", "forward", "cache"),
    [
        ((8, 3, 2), 0, "[3, 8], padding in 11 of 24 places (46 %)", "8 positions × 3 rows, padding in 11 of 24"),
        ((8, 3, 2), 4, "[3, 1], padding in 0 of 3 places (0 %)", "12 positions × 3 rows, padding in 11 of 36"),
        ((1, 1, 1), 0, "[3, 1], padding in 0 of 3 places (0 %)", "1 position × 3 rows, padding in 0 of 3"),
    ],
)  # fmt: skip
def test_the_facts_are_those_of_a_hand_count(lengths, steps, forward, cache):
    shown = text(batch_html(lengths, steps)).replace("\u00a0", " ")
    assert f"forward: {forward}" in shown and f"cache after it: {cache}" in shown


def test_masks_and_positions_are_those_that_reach_the_blocks_of_a_running_batch(save_reference):
    _, folder = save_reference()
    model, seen = GPT2.from_pretrained(folder), []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[1:3]))
    params = SamplingParams(max_new_tokens=MOST_STEPS + 1)
    lengths = (4, 1, 6)
    requests = [Request(list(range(1, n + 1)), params, context=64) for n in lengths]
    for _ in generate_batch(model, requests):
        pass
    assert len(seen) == MOST_STEPS + 1
    for steps, (mask, positions) in enumerate(seen):
        looks, real, places = last_call(lengths, steps)
        assert torch.equal(looks, mask[:, 0])
        assert torch.equal(places[:, -positions.shape[1] :], positions)
        assert real.shape[1] == mask.shape[-1]


def test_every_slider_changes_the_picture_and_no_two_panels_share_one():
    panel = batch_panel()
    *controls, shown = panel.children
    for control, value in zip(controls, (8, 4, 1, 3), strict=True):
        before = shown.value
        control.value = value
        assert shown.value != before
    assert shown.value == batch_html((8, 4, 1), 3)
    assert batch_panel().children[-1].value == batch_html(START, 0)


def test_without_ipywidgets_there_is_a_picture_and_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    panel = batch_panel()
    assert squares(panel._repr_html_()) == squares(batch_html(START, 0))
    assert "ipywidgets is not installed" in repr(panel)

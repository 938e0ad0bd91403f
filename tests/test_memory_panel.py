"""The calculator of the KV cache: its numbers, its controls, and what is left without ipywidgets."""

import sys

import pytest

from minillm.kv_cache import KVCache
from minillm.memory_panel import MODELS, bytes_text, cache_html, cache_panel


def test_llama_7b_at_2048_positions_is_exactly_one_gibibyte():
    html = cache_html("Llama-7B", 2048, 1, 2)
    assert "= 1,073,741,824 bytes" in html and "1.000 GiB" in html


def test_the_bytes_are_those_of_a_real_cache():
    layers, heads, width, _ = MODELS["SmolLM2-135M"]
    cache = KVCache(layers, heads, width, max_length=128, batch_size=3)
    assert f"= {cache.nbytes:,} bytes" in cache_html("SmolLM2-135M", 128, 3, 4)


@pytest.mark.parametrize(
    ("number", "text"),
    [(512, "512 bytes"), (1536, "1.500 KiB"), (2**20, "1.000 MiB"), (2**41, "2,048.000 GiB")],
)
def test_bytes_for_the_eye(number, text):
    assert bytes_text(number) == text


def test_every_control_changes_the_answer():
    panel = cache_panel()
    model, positions, sequences, number, shown = panel.children
    for control, value in (
        (model, "Llama-3-8B"),
        (positions, 4096),
        (sequences, 8),
        (number, 4),
    ):
        before = shown.value
        control.value = value
        assert shown.value != before
    assert shown.value == cache_html("Llama-3-8B", 4096, 8, 4)
    assert cache_panel().children[-1].value == cache_html("Llama-7B", 2048, 1, 2)


def test_without_ipywidgets_there_is_a_picture_and_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    panel = cache_panel()
    assert "1.000 GiB" in panel._repr_html_() and "ipywidgets is not installed" in repr(panel)

"""The panels: the widget without a browser, and what is left without ipywidgets."""

import re
import sys

import pytest

from minillm.tokenizer import Tokenizer
from minillm.widgets import MOST_TOKENS, tokenizer_panel, tokens_html


@pytest.fixture(scope="module")
def gpt2():
    return Tokenizer.from_pretrained("gpt2")


def ids_in(html: str) -> list[int]:
    return [int(number) for number in re.findall(r"<small[^>]*>(\d+)</small>", html)]


def test_every_token_has_a_box_with_its_id(gpt2):
    text = "Hello world 😀"
    html = tokens_html(gpt2, text)
    assert ids_in(html) == gpt2.encode(text)
    assert "Hello" in html and "·world" in html and "F0 9F 98" in html
    assert f"{len(gpt2.encode(text))} tokens, 13 characters, 16 bytes" in html


def test_typed_html_stays_text(gpt2):
    html = tokens_html(gpt2, "<script>alert(1)</script> & <|endoftext|>")
    assert "<script" not in html and "&lt;" in html and "50256" not in html


def test_a_long_text_is_cut_and_says_so(gpt2):
    html = tokens_html(gpt2, " a" * 2 * MOST_TOKENS)
    assert (
        len(ids_in(html)) == MOST_TOKENS and f"{2 * MOST_TOKENS} tokens" in html and "first" in html
    )


@pytest.mark.parametrize("text", ["", "\n\t\r\u00a0\u200b", "\ud83d", "\x00"])
def test_odd_texts_are_shown(gpt2, text):
    assert ids_in(tokens_html(gpt2, text)) == gpt2.encode(text)


def test_a_character_that_the_vocabulary_lacks_is_a_sentence():
    tokenizer = Tokenizer({"a": 0}, [])
    assert "no token for the bytes of &#x27;b&#x27;" in tokens_html(tokenizer, "ab")


def test_the_panel_follows_what_is_typed(gpt2):
    panel = tokenizer_panel(gpt2, text="Hello")
    field, tokens = panel.children
    assert tokens.value == tokens_html(gpt2, "Hello")
    field.value = "Hello world"
    assert tokens.value == tokens_html(gpt2, "Hello world") and ids_in(tokens.value) == [15496, 995]


def test_each_call_makes_a_panel_of_its_own(gpt2):
    first, second = tokenizer_panel(gpt2, text="one"), tokenizer_panel(gpt2, text="two")
    second.children[0].value = "three"
    assert first is not second and first.children[1].value == tokens_html(gpt2, "one")
    assert second.children[1].value == tokens_html(gpt2, "three")


def test_without_ipywidgets_there_is_a_picture_and_a_sentence(gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    panel = tokenizer_panel(gpt2, text="Hello world")
    assert ids_in(panel._repr_html_()) == [15496, 995]
    assert "ipywidgets is not installed" in panel._repr_html_() and "ipywidgets" in repr(panel)

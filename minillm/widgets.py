"""Panels to play with in the notebooks. Each call returns a fresh widget; the logic is in plain functions."""

from html import escape

from minillm.tokenizer import Tokenizer

COLORS = ("#cfe8fc", "#fde2b8", "#d5f0d0", "#f9d3d8", "#e3d9f5")
MOST_TOKENS = 400
INVISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}


class Still:
    """A picture with a sentence, for where ipywidgets is missing: shown by any notebook."""

    def __init__(self, html: str, sentence: str):
        self.html, self.sentence = html, sentence

    def _repr_html_(self) -> str:
        return f"{self.html}<p>{escape(self.sentence)}</p>"

    def __repr__(self) -> str:
        return self.sentence


def token_label(token: bytes) -> str:
    """A token for the eye: white space made visible, its bytes where they are no whole characters."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return token.hex(" ").upper()
    return "".join(
        INVISIBLE.get(char, char if char.isprintable() else repr(char)[1:-1]) for char in text
    )


def tokens_html(tokenizer: Tokenizer, text: str) -> str:
    """The tokens of a text as coloured boxes with their ids, and how many there are."""
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:  # a character that the vocabulary cannot write
        return f"<p>{escape(str(error))}</p>"
    boxes = [
        f'<span style="display:inline-block;background:{COLORS[n % len(COLORS)]};color:#222;'
        'margin:2px;padding:1px 4px;border-radius:4px;text-align:center;line-height:1.3">'
        f'<span style="font-family:monospace;white-space:pre">{escape(token_label(tokenizer.token_bytes(i)))}'
        f'</span><br><small style="color:#555">{i}</small></span>'
        for n, i in enumerate(ids[:MOST_TOKENS])
    ]
    count = f"{len(ids)} tokens, {len(text)} characters, {len(text.encode(errors='replace'))} bytes"
    if len(ids) > MOST_TOKENS:
        count += f" (the first {MOST_TOKENS} are shown)"
    return f"<div>{''.join(boxes)}</div><p>{count}</p>"


def tokenizer_panel(tokenizer: Tokenizer, text: str = "Once upon a time"):
    """A field to type in, with the text's tokens below it; a still picture without ipywidgets."""
    try:
        import ipywidgets
    except ImportError:
        sentence = (
            "This picture stands still because ipywidgets is not installed: "
            "pip install 'minillm[lab]', or call tokenizer_panel again with another text."
        )
        return Still(tokens_html(tokenizer, text), sentence)
    field = ipywidgets.Textarea(value=text, layout=ipywidgets.Layout(width="98%", height="70px"))
    tokens = ipywidgets.HTML(value=tokens_html(tokenizer, text))

    def show(change) -> None:
        tokens.value = tokens_html(tokenizer, change["new"])

    field.observe(show, names="value")
    return ipywidgets.VBox([field, tokens])

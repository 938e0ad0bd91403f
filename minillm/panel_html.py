"""What the panels show: numbers in, HTML out, readable on a light page and on a dark one."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import torch

from .tokenizer import Tokenizer

COLORS = ("#cfe8fc", "#fde2b8", "#d5f0d0", "#f9d3d8", "#e3d9f5")
INVISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
MOST_TOKENS = 400  # boxes of the tokenizer's panel
MOST_ROWS = 15  # tokens in the bar chart
SCALES = (0.05, 0.1, 0.2, 0.5, 1.0)  # where the axis of the bars may end
STYLE = """<style>
.minillm {font: 13px/1.4 var(--jp-ui-font-family, system-ui, sans-serif); color: inherit}
.minillm p {margin: 6px 0; line-height: 1.4}
.minillm .token {font-family: var(--jp-code-font-family, monospace); white-space: pre}
.minillm .faint {opacity: .7}
.minillm .small {font-size: 11px}
.minillm .grid {display: grid; grid-template-columns: max-content 1fr 4.4em 4.4em; gap: 3px 8px;
  align-items: center}
.minillm .grid .token {max-width: 11em; overflow: hidden; text-overflow: ellipsis; text-align: right}
.minillm .number {text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap}
.minillm .axis {display: flex; justify-content: space-between; font-size: 11px}
.minillm .bars {height: 16px; border: solid #8886; border-width: 0 1px;
  background: linear-gradient(#8886, #8886) 50% / 1px no-repeat}
.minillm .bar {height: 8px; min-width: 1px}
.minillm .before {background: #9aa0a6}
.minillm .after {background: #2f80ed}
.minillm .cut .before {background: repeating-linear-gradient(135deg, #9aa0a6 0 2px, #0000 2px 5px)}
.minillm .cut .token {text-decoration: line-through; opacity: .7}
.minillm .swatch {display: inline-block; width: 18px; height: 8px; margin: 0 5px 0 12px}
.minillm .numbers {margin-top: 12px}
.minillm .numbers span {display: inline-block; width: 125px; text-align: right; margin-right: 10px}
.minillm .numbers + p {margin-left: 24px}
.minillm .text {border: 1px solid #8886; border-radius: 4px; padding: 8px 12px; min-height: 6em;
  font-size: 14px; line-height: 1.55; white-space: pre-wrap; overflow-wrap: anywhere}
.minillm .problem {border-left: 3px solid #d97706; padding: 2px 10px}
.minillm svg {max-width: 100%; height: auto; display: block}
.minillm rect {stroke: #8886}
.minillm rect:hover {stroke: currentColor; stroke-width: 2px}
</style>"""


class Still:
    """A picture with a sentence, for where ipywidgets is missing: shown by any notebook."""

    def __init__(self, html: str, sentence: str):
        self.html, self.sentence = html, sentence

    def _repr_html_(self) -> str:
        return f"{self.html}<p>{escape(self.sentence)}</p>"

    def __repr__(self) -> str:
        return self.sentence


def framed(*parts: str) -> str:
    """HTML together with the style that it needs."""
    return f'{STYLE}<div class="minillm">{"".join(parts)}</div>'


def note_html(note: str | Exception) -> str:
    """A line of text; an error as a sentence, with its kind where nobody foresaw it."""
    if isinstance(note, Exception):
        kind = "" if isinstance(note, ValueError) else f"{type(note).__name__}: "
        return f'<p class="problem">{escape(f"{kind}{note}")}</p>'
    return f'<p class="faint">{escape(note)}</p>'


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


@dataclass(frozen=True)
class Comparison:
    """The next token before and after the settings, `[V]` each.

    `before` is softmax of the model's logits, `after` is what is drawn from, `kept` is bool.
    `mass_kept` is what the kept tokens held after penalty and temperature, before the cuts.
    """

    before: torch.Tensor
    after: torch.Tensor
    kept: torch.Tensor
    mass_kept: float


def entropy_bits(shares: torch.Tensor) -> float:
    """How uncertain a distribution `[V]` is, in bits: 0 is certain, log2 V is even (Shannon 1948)."""
    return torch.special.entr(shares.double()).sum().item() / math.log(2)


def percent(share: float) -> str:
    """A share with one decimal; what is not quite nothing or everything does not look like it."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return ">99.9 %" if 0.9995 <= share < 1 - 1e-6 else f"{100 * share:.1f} %"


def numbers_html(comparison: Comparison) -> str:
    """The comparison in three numbers, and what the third one means."""
    before, after = entropy_bits(comparison.before), entropy_bits(comparison.after)
    count, V = int(comparison.kept.sum()), len(comparison.kept)
    lines = {
        "entropy": f"{before:.2f} → {after:.2f} bits",
        "tokens kept": f"{count:,} of {V:,}",
        "mass kept": percent(comparison.mass_kept),
    }
    rows = "".join(
        f"<div><span>{name}</span> <b>{escape(value)}</b></div>" for name, value in lines.items()
    )
    meaning = (
        "Mass kept: what the kept tokens held after repetition_penalty and temperature, "
        "before top_k, top_p and min_p cut the rest."
    )
    return framed(f'<div class="numbers">{rows}</div><p class="faint small">{meaning}</p>')


def chart_html(comparison: Comparison, label: Callable[[int], str]) -> str:
    """Bars for the likeliest next tokens: grey before, blue after, hatched and struck out where cut.

    `label` turns a token id into text for the eye. The order is that of the model's own shares, so
    that no row jumps while a slider moves.
    """
    before, after, kept = comparison.before, comparison.after, comparison.kept
    ids = before.argsort(descending=True, stable=True)[:MOST_ROWS]  # [V] -> [rows]
    widest = min(1.0, max(before[ids].max().item(), after[ids].max().item()))
    scale = next(end for end in SCALES if widest <= end)
    rest = torch.ones_like(kept).index_fill(0, ids, False)
    head = (
        '<span class="faint number">next token</span><span class="axis faint"><span>0</span>'
        f"<span>{50 * scale:g} %</span><span>{100 * scale:g} %</span></span>"
        '<span class="faint number">before</span><span class="faint number">after</span>'
    )
    rows = [
        row_html(label(i), before[i].item(), after[i].item(), bool(kept[i]), scale)
        for i in ids.tolist()
    ]
    others = (
        f'<span class="faint number">{int(rest.sum()):,} others</span>'
        f'<span class="faint">{int((kept & rest).sum()):,} of them kept</span>'
        f'<span class="number">{escape(percent(before[rest].sum().item()))}</span>'
        f'<span class="number">{escape(percent(after[rest].sum().item()))}</span>'
    )
    legend = (
        '<p class="small"><span class="swatch before"></span>before: the model’s own shares'
        '<span class="swatch after"></span>after: what is drawn from'
        '<span class="cut"><span class="swatch before"></span></span>cut</p>'
    )
    return framed(f'<div class="grid">{head}{"".join(rows)}{others}</div>{legend}')


def row_html(label: str, before: float, after: float, kept: bool, scale: float) -> str:
    """One token of the chart."""
    shares = {"before": before, "after": after} if kept else {"before": before}
    bars = "".join(
        f'<div class="bar {name}" style="width:{min(100, 100 * share / scale):.2f}%"></div>'
        for name, share in shares.items()
    )
    return (
        f'<div class="{"kept" if kept else "cut"}" style="display:contents">'
        f'<span class="token">{escape(label)}</span><div class="bars">{bars}</div>'
        f'<span class="number">{escape(percent(before))}</span>'
        f'<span class="number">{escape(percent(after)) if kept else "cut"}</span></div>'
    )


def text_html(prompt: str, text: str, note: str | Exception) -> str:
    """A prompt in grey, what the model wrote in full colour, and a line about it."""
    return framed(
        f'<div class="text"><span class="prompt faint">{escape(prompt)}</span>'
        f'<span class="new">{escape(text)}</span></div>{note_html(note)}'
    )


def attention_html(weights, labels: list[str], hidden: int, layer: int, head: int) -> str:
    """One head of a layer's attention `[H, T, T]`: a row for each query, a sentence on the last.

    `labels` are the T tokens, `hidden` is how many further tokens the text has.
    """
    weights = weights[head]  # [H, T, T] -> [T, T]
    best = int(weights[-1].argmax())
    sentences = [
        f"Layer {layer}, head {head}: the last token{' shown' if hidden else ''}, “{labels[-1]}”, looks most at "
        f"“{labels[best]}” (position {best}): {percent(weights[-1, best].item())}."
    ]
    if hidden:
        sentences.append(
            f"Only the first {len(labels)} of {len(labels) + hidden} tokens are shown; their numbers "
            f"are those of the whole text, because no token looks at a later one."
        )
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return framed(text, matrix_svg(weights, labels, best))


def matrix_svg(weights: torch.Tensor, labels: list[str], best: int) -> str:
    """The matrix: queries down, keys across, the bluer the more, percentages where they fit."""
    T = len(labels)
    short = [label if len(label) <= 12 else f"{label[:11]}…" for label in labels]
    cell = max(14, min(38, 560 // T))
    font = min(12.5, 0.8 * cell)
    room = 0.62 * font * max(map(len, short))  # for the longest label
    left, top = room + 40, 0.72 * room + 34
    width, height = left + T * cell + 0.72 * room + 12, top + T * cell + 4
    parts = [
        f'<text x="{left:.0f}" y="12" font-size="11" fill="currentColor" opacity=".7">keys →</text>'
        f'<text transform="translate(12 {top:.0f}) rotate(90)" font-size="11" fill="currentColor" '
        f'opacity=".7">queries →</text>'
    ]
    if T * cell > 300:
        parts.append(
            f'<text x="{left + T * cell - 6:.0f}" y="{top + 22:.0f}" font-size="12" text-anchor="end" '
            f'fill="currentColor" opacity=".7">the future: hidden by the causal mask</text>'
        )
    for query, row in enumerate(weights.tolist()):
        parts += [
            cell_svg(
                left + key * cell, top + query * cell, cell, share, tip(query, key, share, labels)
            )
            for key, share in enumerate(row[: query + 1])
        ]
    for n, label in enumerate(short):
        middle = (n + 0.5) * cell
        text = f'class="token" font-size="{font:.1f}" fill="currentColor" font-weight='
        parts.append(
            f'<text x="{left - 8:.1f}" y="{top + middle + font / 3:.1f}" text-anchor="end" '
            f'{text}"{"bold" if n == T - 1 else "normal"}">{escape(label)}</text>'
            f'<text transform="translate({left + middle + 3:.1f} {top - 7:.1f}) rotate(-45)" '
            f'{text}"{"bold" if n == best else "normal"}">{escape(label)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="attention matrix">{"".join(parts)}</svg>'
    )


def tip(query: int, key: int, share: float, labels: list[str]) -> str:
    """What one cell says when the mouse rests on it."""
    return f"query {query} “{labels[query]}” takes {percent(share)} from key {key} “{labels[key]}”"


def cell_svg(x: float, y: float, cell: int, share: float, tip: str) -> str:
    """One cell of the matrix, with its percentage where the cell is large enough."""
    square = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell}" height="{cell}" fill="#2f80ed" '
        f'fill-opacity="{share:.3f}"><title>{escape(tip)}</title></rect>'
    )
    if cell < 26:
        return square
    return square + (
        f'<text x="{x + cell / 2:.1f}" y="{y + cell / 2 + 4:.1f}" text-anchor="middle" font-size="11" '
        f'fill="{"#fff" if share > 0.5 else "currentColor"}" pointer-events="none">{100 * share:.0f}</text>'
    )

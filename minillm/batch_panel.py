"""A panel to play with: prompts of three lengths in one batch, and what each query may look at."""

import torch

from .batching import pad_left
from .layers import causal_mask, position_ids
from .panel_html import framed
from .widgets import load_ipywidgets, named, still

START = (2, 3, 5)  # tokens of the three prompts
MOST_TOKENS, MOST_STEPS = 8, 4
KINDS = {  # kind of square -> its background, what it says in the legend
    "look": ("#2f80ed", "may look"),
    "future": ("#0000", "hidden: the future"),
    "padding": (
        "repeating-linear-gradient(135deg, #9aa0a6 0 2px, #0000 2px 5px)",
        "hidden: padding",
    ),
}
STYLE = f"""<style>
.minillm .rows {{display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 8px 0}}
.minillm .squares {{display: grid; gap: 2px; grid-auto-rows: 20px; width: max-content;
  justify-items: center; align-items: center; font-variant-numeric: tabular-nums}}
.minillm .square {{display: inline-block; box-sizing: border-box; width: 20px; height: 20px;
  border: 1px solid #8889}}
.minillm p .square {{width: 14px; height: 14px; margin: 0 5px -2px 14px}}
{"".join(f".minillm .{kind} {{background: {color}}}" for kind, (color, _) in KINDS.items())}
</style>"""


def last_call(
    lengths: tuple[int, ...], steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The newest forward of a batch: the prefill, or the decode step `steps`.

    The combined mask `[B, T, S]`, which keys are real and all position ids, `[B, S]` each.
    """
    _, real = pad_left([[0] * length for length in lengths])  # [B, T]
    past = 0
    if steps:  # each step adds a real token to every row, and feeds it alone
        past = real.shape[1] + steps - 1
        real = torch.cat([real, real.new_ones(len(lengths), steps)], dim=1)  # [B, S]
    new = real.shape[1] - past
    looks = causal_mask(new, past, real)[:, 0]  # [B, 1, T, S] -> [B, T, S]
    return looks, real, position_ids(past + new, 0, real)


def padding_text(real: torch.Tensor) -> str:
    """How many of these places hold padding."""
    hidden, places = int((~real).sum()), real.numel()
    return f"padding in {hidden} of {places} places ({100 * hidden / places:.0f}\u00a0%)"


def facts(looks: torch.Tensor, real: torch.Tensor) -> tuple[str, str]:
    """What the call `[B, T, S]` computes, and what the cache holds after it."""
    B, T, S = looks.shape
    many = "s" if S > 1 else ""
    return (
        f"forward: [{B}, {T}], {padding_text(real[:, S - T :])}",
        f"cache after it: {S} position{many} × {B} rows, {padding_text(real)}",
    )


def row_html(looks: torch.Tensor, real: torch.Tensor, positions: torch.Tensor, title: str) -> str:
    """One row of the batch: its mask `[T, S]`, with the position ids `[S]` of queries and keys."""
    T, S = looks.shape
    labels = [str(p) if r else "–" for p, r in zip(positions.tolist(), real.tolist(), strict=True)]
    cells = ["<span></span>", *(f'<span class="key">{label}</span>' for label in labels)]
    for query, row in enumerate(looks.tolist()):
        label = labels[S - T + query]
        cells.append(f'<span class="query faint">{label}</span>')
        for key, look in enumerate(row):
            kind = "look" if look else "future" if real[key] else "padding"
            cells.append(f'<span class="square {kind}"></span>')
    columns = f"grid-template-columns: repeat({S + 1}, 20px)"
    return f'<div><p>{title}</p><div class="squares" style="{columns}">{"".join(cells)}</div></div>'


def batch_html(lengths: tuple[int, ...], steps: int) -> str:
    """The masks of the newest forward side by side, a legend, and the facts below."""
    looks, real, positions = last_call(lengths, steps)
    made = f" + {steps} generated" if steps else ""
    rows = [
        row_html(*parts, f"row {row}: prompt of {lengths[row]}{made}")
        for row, parts in enumerate(zip(looks, real, positions, strict=True))
    ]
    legend = "".join(
        f'<span class="square {kind}"></span>{text}' for kind, (_, text) in KINDS.items()
    )
    lines = [f"<b>{fact}</b>" for fact in facts(looks, real)]
    if not (steps or real.all()):
        lines.append("A padding query sees itself, so that no softmax is 0 / 0; nobody reads it.")
    return STYLE + framed(
        f'<div class="rows" style="flex-direction:{"column" if steps else "row"}">',
        *rows,
        f'</div><p class="small">down: queries, across: keys, with position ids; – is padding{legend}</p>',
        f"<p>{'<br>'.join(lines)}</p>",
    )


def batch_panel():
    """Choose three prompt lengths and a step, and see each row's mask; a still picture without ipywidgets."""
    ipywidgets = load_ipywidgets()
    if ipywidgets is None:
        return still(batch_html(START, 0), "batch_panel.batch_html", "other lengths")
    prompts = [
        ipywidgets.IntSlider(length, 1, MOST_TOKENS, **named(f"prompt {row}, tokens", "400px"))
        for row, length in enumerate(START)
    ]
    steps = ipywidgets.IntSlider(0, 0, MOST_STEPS, **named("decode steps", "400px"))
    shown = ipywidgets.HTML(value=batch_html(START, 0))

    def show(change) -> None:
        shown.value = batch_html(tuple(prompt.value for prompt in prompts), steps.value)

    for control in (*prompts, steps):
        control.observe(show, names="value")
    return ipywidgets.VBox([*prompts, steps, shown])

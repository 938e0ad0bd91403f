"""A panel to play with: a matrix at 2 to 8 bits, who shares a scale, and what the model loses by it."""

import copy
import threading
from html import escape

import torch
from torch import nn

from .panel_html import framed
from .perplexity import token_losses
from .widgets import load_ipywidgets, named, still

BITS = range(2, 9)
GROUPINGS = {  # who shares a scale -> how the control calls it
    "matrix": "the matrix",
    "row": "each row",
    128: "groups of 128",
    64: "groups of 64",
    32: "groups of 32",
    16: "groups of 16",
}
MOST_TOKENS = 300  # of the text whose loss is shown
BINS, WIDTH, LEFT = 100, 600, 10  # of the histogram: bars, and pixels
WIDE, USUAL, BAR = "#d97706", "#2f80ed", "#9aa0a6"


def group_size(weight: torch.Tensor, grouping: str | int) -> int:
    """How many numbers of a matrix `[out, in]` share a scale; ValueError where rows cannot be cut so."""
    if grouping == "matrix":
        return weight.numel()
    size = weight.shape[1] if grouping == "row" else grouping
    if not isinstance(size, int) or size < 1 or weight.shape[1] % size:
        raise ValueError(
            f"the grouping is {grouping!r}, expected 'matrix', 'row', or a number that divides "
            f"the {weight.shape[1]} numbers of a row"
        )
    return size


def round_to_levels(
    weight: torch.Tensor, bits: int, grouping: str | int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each weight becomes the nearest of the 2^bits levels of its group: low + step · code.

    `[out, in]` -> the rounded weights `[out, in]`, low and step `[groups, 1]`, all in fp32. The
    levels reach from the group's lowest number to its highest. ValueError as from `group_size`.
    """
    groups = weight.float().reshape(-1, group_size(weight, grouping))  # [groups, size]
    low, high = groups.aminmax(dim=1, keepdim=True)  # [groups, 1]
    step = (high - low) / (2**bits - 1)
    codes = ((groups - low) / torch.where(step > 0, step, 1)).round()  # [groups, size]
    return (low + step * codes).view_as(weight), low, step


class LossMeter:
    """The losses of a text with all block matrices rounded, on a copy: the given model stays as it is."""

    def __init__(self, model, token_ids):
        self.copy = copy.deepcopy(model).to("cpu", torch.float32)
        self.layers = {
            name: module
            for name, module in self.copy.named_modules()
            if isinstance(module, nn.Linear) and name.startswith("blocks.")
        }
        if not self.layers:
            raise ValueError(
                "the blocks of this model have no plain linear layers: if it is quantized already, "
                "load it again"
            )
        self.weights = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        self.token_ids, self.known, self.lock = token_ids[:MOST_TOKENS], {}, threading.Lock()
        self.plain = self.measure()

    @torch.inference_mode()
    def measure(self) -> torch.Tensor:
        """The loss of each token but the first, `[n - 1]`, with the copy as it is now."""
        return token_losses(self.copy, self.token_ids, min(512, self.copy.config.context_length))

    @torch.no_grad()
    def rounded(self, bits: int, grouping: str | int) -> torch.Tensor:
        """The losses `[n - 1]` at a setting; a setting that was asked for before costs nothing."""
        with self.lock:  # two controls may be answered at once, and the copy is one
            if (bits, grouping) not in self.known:
                for name, layer in self.layers.items():
                    layer.weight.copy_(round_to_levels(self.weights[name], bits, grouping)[0])
                self.known[bits, grouping] = self.measure()
            return self.known[bits, grouping]


def some_matrices(model, meter: LossMeter) -> dict[str, torch.Tensor]:
    """The token table, and the matrices of the first and the last block, by name."""
    ends = ("blocks.0.", f"blocks.{len(model.blocks) - 1}.")
    weights = {name: w for name, w in meter.weights.items() if name.startswith(ends)}
    return {"token_embedding": meter.copy.token_embedding.weight.detach(), **weights}


def fitting(matrices) -> list[str | int]:
    """The groupings that cut the rows of all these matrices."""
    widths = [weight.shape[1] for weight in matrices]
    return [
        g for g in GROUPINGS if isinstance(g, str) or all(g <= w and w % g == 0 for w in widths)
    ]


def marks_svg(y: int, label: str, color: str, places: list[float]) -> str:
    """The levels of one group as marks below the histogram, and who they belong to."""
    path = "".join(f"M{x:.1f} {y + 6}v16" for x in places)
    return (
        f'<text x="{LEFT}" y="{y}" font-size="12" fill="currentColor">{escape(label)}</text>'
        f'<path class="levels" d="{path}" stroke="{color}" stroke-width="1.2"/>'
    )


def bars_svg(weight: torch.Tensor, start: float, span: float) -> str:
    """How many weights lie where, as bars that stand on the axis; one weight alone is still seen."""
    counts = torch.histc(weight, BINS, start, start + span).tolist()
    width = WIDTH / BINS
    bars = []
    for n, count in enumerate(counts):
        height = max(1.5, 120 * count / max(counts)) if count else 0
        bars.append(
            f'<rect x="{LEFT + width * n:.1f}" y="{128 - height:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" fill="{BAR}"><title>{count:,.0f} weights</title></rect>'
        )
    return "".join(bars)


def axis_svg(start: float, span: float) -> str:
    """The lowest and the highest weight, and 0 where there is room between them."""
    numbers = [(start, LEFT, "start"), (start + span, LEFT + WIDTH, "end")]
    if 0.08 < -start / span < 0.92:
        numbers.append((0, LEFT - WIDTH * start / span, "middle"))
    return "".join(
        f'<text x="{x:.1f}" y="143" font-size="11" text-anchor="{anchor}" fill="currentColor" '
        f'opacity=".8">{signed(number, "") if number else 0}</text>'
        for number, x, anchor in numbers
    )


def chosen_groups(step: torch.Tensor, who: str) -> list[tuple[int, str, str]]:
    """Which groups' levels are shown, with label and color: the widest, and one of median width."""
    order = step.flatten().argsort(stable=True).tolist()  # narrow groups first
    if len(order) == 1:
        return [(0, "the matrix", WIDE)]
    usual = order[len(order) // 2]
    return [(order[-1], f"the widest {who}", WIDE), (usual, f"a typical {who}", USUAL)]


def histogram_svg(
    weight: torch.Tensor, low: torch.Tensor, step: torch.Tensor, bits: int, who: str
) -> str:
    """Where the weights `[out, in]` lie, and below it the levels of one or two groups."""
    start, end = (edge.item() for edge in weight.aminmax())
    span = (end - start) or 1.0
    groups = chosen_groups(step, who)
    parts = [bars_svg(weight, start, span), axis_svg(start, span)]
    for n, (group, label, color) in enumerate(groups):
        levels = low[group] + step[group] * torch.arange(2**bits)  # [2^bits]
        places = (LEFT + WIDTH * (levels - start) / span).tolist()
        text = f"{label}: {2**bits} levels, {step[group].item():.2g} apart"
        parts.append(marks_svg(170 + 44 * n, text, color, places))
    width, height = WIDTH + 2 * LEFT, 152 + 44 * len(groups)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="histogram of the weights, with levels">{"".join(parts)}</svg>'
    )


def signed(number: float, plus: str = "+") -> str:
    """A number with its sign for the eye."""
    return f"{'−' if number < 0 else plus}{abs(number):.3f}"


def facts(
    weight: torch.Tensor, rounded: torch.Tensor, scales: int, bits: int
) -> list[tuple[str, str]]:
    """What the rounding of a matrix `[out, in]` does to it, and what it then takes."""
    error, deviation = (rounded - weight).abs(), weight.float().std()
    count = weight.numel()
    total = count * bits + scales * 2 * 16  # a scale and a zero of 16 bits
    return [
        ("scales", f"{scales:,}, one for {count // scales:,} weights"),
        ("largest error", f"{(error.max() / deviation).item():.3f} standard deviations"),
        (
            "root mean square",
            f"{(error.square().mean().sqrt() / deviation).item():.3f} standard deviations",
        ),
        ("bits per weight", f"{total / count:.4g}, with 16 for each scale and each zero"),
        ("size", f"{total / 8000:,.1f} KB; in fp32 {4 * count / 1000:,.1f} KB"),
    ]


def loss_fact(plain: torch.Tensor, rounded: torch.Tensor) -> tuple[str, str]:
    """The mean loss `[n]` before and after, and how sure the difference is."""
    change = rounded - plain
    sure = change.std().item() / len(change) ** 0.5  # standard error of the mean
    return (
        "loss of the model",
        f"{plain.mean().item():.3f} → {rounded.mean().item():.3f} "
        f"({signed(change.mean().item())} ± {sure:.3f})",
    )


def quantization_html(
    name: str,
    weight: torch.Tensor,
    bits: int,
    grouping: str | int,
    losses: tuple[torch.Tensor, torch.Tensor],
) -> str:
    """One matrix `[out, in]` at a setting: its histogram with levels, the error, bits, size and loss.

    `losses` are those of a text in fp32 and with all block matrices at this setting, `[n]` each.
    """
    rounded, low, step = round_to_levels(weight, bits, grouping)
    weight = weight.float()
    far = (weight.abs().max() / weight.std()).item()
    title = (
        f"<b>{escape(name)}</b> {list(weight.shape)}, standard deviation "
        f"{weight.std().item():.3f}; the farthest from 0 is {far:.1f} times that"
    )
    rows = [*facts(weight, rounded, len(step), bits), loss_fact(*losses)]
    numbers = "".join(f"<div><span>{fact}</span> <b>{text}</b></div>" for fact, text in rows)
    note = (
        f"The loss: all matrices of the blocks rounded so, {len(losses[0])} predicted tokens. "
        f"A difference within about twice the ± may be chance."
    )
    who = "row" if grouping == "row" else "group"
    return framed(
        f"<p>{title}</p>",
        histogram_svg(weight, low, step, bits, who),
        f'<div class="numbers">{numbers}</div><p class="faint small">{note}</p>',
    )


def quantization_panel(
    model, token_ids, name: str | None = None, bits: int = 4, grouping: str | int = 32
):
    """Choose a matrix, bits, and who shares a scale; see levels, error, size, and the model's loss.

    The loss is that of the first 300 `token_ids`; the model itself is never changed. `name` (the last
    block's last matrix by default), `bits` from 2 to 8 and `grouping` ("matrix", "row", 128, 64, 32
    or 16) are where the controls start; without ipywidgets it is a still picture of these. Raises
    ValueError for a start that is not among them, and for a model without plain linear layers.
    """
    meter = LossMeter(model, token_ids)
    matrices = some_matrices(model, meter)
    groupings = fitting([*matrices.values(), *meter.weights.values()])
    name = list(matrices)[-1] if name is None else name
    choices = {"name": (name, matrices), "bits": (bits, BITS), "grouping": (grouping, groupings)}
    for what, (value, allowed) in choices.items():
        if value not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise ValueError(f"{what} is {value!r}, this panel offers {listed}")

    def draw(name: str, bits: int, grouping: str | int) -> str:
        losses = meter.plain, meter.rounded(bits, grouping)
        return quantization_html(name, matrices[name], bits, grouping, losses)

    ipywidgets = load_ipywidgets()
    if ipywidgets is None:
        picture = draw(name, bits, grouping)
        return still(picture, "quantization_panel", "another name, bits or grouping")
    options = [(GROUPINGS[choice], choice) for choice in groupings]
    controls = (
        ipywidgets.Dropdown(options=list(matrices), value=name, **named("matrix", "400px")),
        ipywidgets.IntSlider(bits, BITS[0], BITS[-1], **named("bits", "400px")),
        ipywidgets.Dropdown(options=options, value=grouping, **named("a scale for", "400px")),
    )
    shown = ipywidgets.HTML(value=draw(name, bits, grouping))

    def show(change) -> None:
        shown.value = draw(*(control.value for control in controls))

    for control in controls:
        control.observe(show, names="value")
    return ipywidgets.VBox([*controls, shown])

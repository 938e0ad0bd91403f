"""A calculator to play with: what a KV cache costs, beside the weights."""

from html import escape

from .kv_cache import cache_bytes
from .widgets import load_ipywidgets, still

MODELS = {  # name -> layers, KV heads, head width, bytes of the weights (fp16; GPT-2 in fp32)
    "GPT-2 124M, fp32": (12, 12, 64, 4 * 124_439_808),
    "SmolLM2-135M": (30, 3, 64, 2 * 134_515_008),
    "Llama-7B": (32, 32, 128, 2 * 6_738_415_616),
    "Llama-3-8B": (32, 8, 128, 2 * 8_030_261_248),
}
START = "Llama-7B"


def bytes_text(number: float) -> str:
    """A number of bytes for the eye, in powers of 1024: 1073741824 -> 1.000 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:,.3f} {unit}"
        number /= 1024


def cache_html(name: str, positions: int, sequences: int, number: int) -> str:
    """The formula with its numbers, and two bars: the weights and the cache."""
    layers, heads, width, weights = MODELS[name]
    per_token = cache_bytes(layers, heads, width, 1, number)
    cache = per_token * positions * sequences
    largest = max(weights, cache)
    formula = f"2 · {layers} layers · {heads} KV heads · {width} wide · {positions:,} positions"
    formula += f" · {sequences} sequences · {number} bytes = {cache:,} bytes"
    bars = "".join(
        f'<div style="display:flex;align-items:center;margin:3px 0">'
        f'<span style="width:70px">{label}</span>'
        f'<span style="display:inline-block;height:14px;background:{color};'
        f'width:{max(1, round(420 * size / largest))}px"></span>'
        f'<span style="margin-left:8px">{bytes_text(size)}</span></div>'
        for label, size, color in (("weights", weights, "#9aa0a6"), ("KV cache", cache, "#3b7dd8"))
    )
    even = weights // per_token
    note = f"{bytes_text(per_token)} for each position; as large as the weights at {even:,} positions in all."
    return f"<div>{escape(formula)}</div>{bars}<div>{note}</div>"


def cache_panel():
    """Choose a model and a load, and read what the cache costs; a still picture without ipywidgets."""
    ipywidgets = load_ipywidgets()
    if ipywidgets is None:
        return still(cache_html(START, 2048, 1, 2), "memory_panel.cache_html", "other numbers")
    model = ipywidgets.Dropdown(options=list(MODELS), value=START, description="model")
    positions = ipywidgets.SelectionSlider(
        options=[2**n for n in range(7, 18)], value=2048, description="positions"
    )
    sequences = ipywidgets.IntSlider(value=1, min=1, max=64, description="sequences")
    number = ipywidgets.ToggleButtons(
        options={"fp32": 4, "fp16, bf16": 2, "int8": 1}, value=2, description="numbers"
    )
    controls = (model, positions, sequences, number)
    shown = ipywidgets.HTML(value=cache_html(START, 2048, 1, 2))

    def show(change) -> None:
        shown.value = cache_html(*(control.value for control in controls))

    for control in controls:
        control.observe(show, names="value")
    return ipywidgets.VBox([*controls, shown])

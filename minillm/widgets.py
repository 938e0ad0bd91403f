"""Panels to play with in the notebooks. Each call returns a fresh widget; what it shows is drawn in `panel_html`.

JupyterLab may answer two controls in two threads at once: hence the locks, and in `look` the thread's own output.
"""

import asyncio
import threading
from dataclasses import replace
from functools import lru_cache, partial

import torch

from .generation import Request, check_prompt, generate, seen_tokens
from .layers import attention_weights, causal_mask, split_heads
from .panel_html import (
    Comparison,
    Still,
    attention_html,
    chart_html,
    framed,
    note_html,
    numbers_html,
    text_html,
    token_label,
    tokens_html,
)
from .sampling import SamplingParams, process_logits
from .tokenizer import Tokenizer

SLIDERS = {  # field of SamplingParams -> widget, lowest and highest value, step
    "temperature": ("FloatSlider", 0.0, 2.0, 0.05),
    "top_k": ("IntSlider", 0, 100, 1),
    "top_p": ("FloatSlider", 0.01, 1.0, 0.01),
    "min_p": ("FloatSlider", 0.0, 1.0, 0.01),
    "repetition_penalty": ("FloatSlider", 1.0, 2.0, 0.05),
}
START = SamplingParams(temperature=0.8, top_k=10, seed=1)
MOST_LABELS = 40  # tokens at one edge of the attention matrix


def load_ipywidgets():
    """The module ipywidgets, or None where it is not installed."""
    try:
        import ipywidgets
    except ImportError:
        return None
    return ipywidgets


def still(html: str, panel: str, change: str) -> Still:
    """The picture of a panel where there is no ipywidgets."""
    reason = "This picture stands still because ipywidgets is not installed: "
    return Still(html, f"{reason}pip install 'minillm[lab]', or call {panel} again with {change}.")


def named(name: str, width: str, name_width: str = "125px") -> dict:
    """How a control carries its name."""
    style = {"description_width": name_width}
    return {"description": name, "style": style, "layout": {"width": width}}


def tokenizer_panel(tokenizer: Tokenizer, text: str = "Once upon a time"):
    """A field to type in, with the text's tokens below it; a still picture without ipywidgets."""
    widgets = load_ipywidgets()
    if widgets is None:
        return still(tokens_html(tokenizer, text), "tokenizer_panel", "another text")
    field = widgets.Textarea(value=text, layout=widgets.Layout(width="98%", height="70px"))
    tokens = widgets.HTML(value=tokens_html(tokenizer, text))

    def show(change) -> None:
        tokens.value = tokens_html(tokenizer, change["new"])

    field.observe(show, names="value")
    return widgets.VBox([field, tokens])


def sampling_panel(
    model,
    tokenizer: Tokenizer,
    prompt: str = "Once upon a time there was a",
    end_ids=None,
    params: SamplingParams = START,
):
    """Sliders for the settings, the next token before and after them, and text written with them.

    `end_ids` end a text, by default the tokenizer's own end-of-text token. The sliders start at
    `params`. Without ipywidgets it is a still picture of these.
    """
    widgets = load_ipywidgets()
    if widgets is None:
        comparison = compare(*read(model, tokenizer, prompt), params)
        picture = chart_html(comparison, labeller(tokenizer)) + numbers_html(comparison)
        return still(picture, "sampling_panel", "other params, a SamplingParams")
    end_ids = tokenizer.eos_token_id if end_ids is None else end_ids
    return SamplingExplorer(widgets, model, tokenizer, prompt, end_ids, params).view


def attention_panel(
    model,
    tokenizer: Tokenizer,
    prompt: str = "The wolf saw the girl. The girl saw the",
    layer: int = 0,
    head: int = 0,
):
    """The attention of one head as a matrix: who takes how much from whom.

    `layer` and `head` are where the sliders start, counted from 0. Without ipywidgets it is a
    still picture of these. Raises ValueError for a layer or head that the model lacks.
    """
    layers, heads = len(model.blocks), model.blocks[0].attention.n_heads
    for name, value, count in [("layer", layer, layers), ("head", head, heads)]:
        if not 0 <= value < count:
            raise ValueError(f"{name} is {value}, this model has {name}s 0 to {count - 1}")
    widgets = load_ipywidgets()
    if widgets is None:
        picture = attention_html(*look(model, tokenizer, prompt, layer), layer, head)
        return still(picture, "attention_panel", "another prompt, layer or head")
    return AttentionViewer(widgets, model, tokenizer, prompt, (layer, layers), (head, heads)).view


def labeller(tokenizer: Tokenizer):
    """The function from a token id to its text for the eye."""
    return lambda token_id: token_label(tokenizer.token_bytes(token_id))


def batch_of_one(model, token_ids: list[int]) -> torch.Tensor:
    """Token ids as a forward takes them, `[1, T]`, on the model's device."""
    token_ids = check_prompt(token_ids, model.config.context_length)
    return torch.tensor([token_ids], device=next(model.parameters()).device)


@torch.inference_mode()
def read(model, tokenizer: Tokenizer, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward: the next token's logits `[V]`, and which tokens were seen, bool `[1, V]`."""
    token_ids = tokenizer.encode(prompt)
    x = model.hidden_states(batch_of_one(model, token_ids))  # [1, T] -> [1, T, D]
    logits = model.head(x[0, -1]).float().cpu()  # [D] -> [V]
    return logits, seen_tokens(token_ids, len(logits))


def compare(logits: torch.Tensor, seen: torch.Tensor, params: SamplingParams) -> Comparison:
    """What the settings make of the next token's logits `[V]`."""
    uncut_params = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    processed = process_logits(logits[None], params, seen)[0]  # [V] -> [1, V] -> [V]
    uncut = process_logits(logits[None], uncut_params, seen)[0]
    kept = processed > -torch.inf
    return Comparison(
        before=logits.softmax(dim=-1),
        after=processed.softmax(dim=-1),
        kept=kept,
        mass_kept=uncut.softmax(dim=-1)[kept].sum().item(),
    )


@torch.inference_mode()
def look(model, tokenizer: Tokenizer, prompt: str, layer: int):
    """One forward: a layer's attention `[H, T, T]`, the T labels, and how many tokens are left out."""
    token_ids = tokenizer.encode(prompt)
    shown = batch_of_one(model, token_ids[:MOST_LABELS])  # [1, T]; later ones change nothing
    attention, outputs = model.blocks[layer].attention, {}

    def keep(module, args, output) -> None:
        outputs[threading.get_ident()] = output

    hook = attention.qkv.register_forward_hook(keep)
    try:
        model.hidden_states(shown)
    finally:
        hook.remove()
    output = outputs[threading.get_ident()].float().cpu()  # [1, T, 3*D]
    q, k, _ = output.chunk(3, dim=-1)  # [1, T, 3*D] -> 3 x [1, T, D]
    q, k = (split_heads(part, attention.n_heads) for part in (q, k))  # [1, H, T, d]
    weights = attention_weights(q, k, causal_mask(shown.shape[1]), attention.scale)[0]
    labels = [labeller(tokenizer)(token_id) for token_id in token_ids[:MOST_LABELS]]
    return weights, labels, len(token_ids) - len(labels)


class SamplingExplorer:
    """The sampling panel: a prompt costs one forward, a slider none, each new token one."""

    def __init__(self, widgets, model, tokenizer, prompt, end_ids, params):
        self.model, self.tokenizer, self.end_ids, self.params = model, tokenizer, end_ids, params
        self.read = lru_cache(maxsize=1)(partial(read, model, tokenizer))  # sliders move a lot
        self.lock, self.running, self.stopping, self.task = threading.Lock(), False, False, None
        self.prompt = widgets.Textarea(prompt, rows=2, **named("prompt", "auto"))
        self.sliders = {}
        for name, (kind, low, high, step) in SLIDERS.items():
            value = getattr(params, name)
            span = {"min": min(low, value), "max": max(high, value), "step": step}
            self.sliders[name] = getattr(widgets, kind)(value, **span, **named(name, "auto"))
        self.numbers, self.chart, self.text = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.button = widgets.Button(description="Generate", button_style="primary")
        self.length, self.seed = (
            widgets.BoundedIntText(value, low, high, **named(name, width, "initial"))
            for name, value, low, high, width in [
                ("max_new_tokens", params.max_new_tokens, 1, model.config.context_length, "190px"),
                ("seed", params.seed or 0, 0, 2**53, "150px"),
            ]
        )
        left = widgets.VBox([*self.sliders.values(), self.numbers], layout={"flex": "0 0 340px"})
        self.chart.layout = {"flex": "1 1 440px", "margin": "0 2px 0 24px"}
        rows = [
            self.prompt,
            widgets.HBox([left, self.chart], layout={"flex_flow": "row wrap", "margin": "8px 0"}),
            widgets.HBox([self.button, self.length, self.seed], layout={"grid_gap": "16px"}),
            self.text,
        ]
        self.view = widgets.VBox(rows, layout={"max_width": "940px"})
        self.redraw()
        self.text.value = text_html("", "", "Generate writes a text with these settings.")
        for control in [self.prompt, *self.sliders.values()]:
            control.observe(self.redraw, names="value")
        self.button.on_click(self.start_or_stop)

    def settings(self) -> SamplingParams:
        """What the controls say."""
        chosen = {name: slider.value for name, slider in self.sliders.items()}
        chosen |= {"max_new_tokens": self.length.value, "seed": self.seed.value}
        return replace(self.params, **chosen)

    def redraw(self, change=None) -> None:
        """The chart and the numbers anew; a forward only where the prompt is a new one."""
        with self.lock:
            try:
                comparison = compare(*self.read(self.prompt.value), self.settings())
                self.chart.value = chart_html(comparison, labeller(self.tokenizer))
                self.numbers.value = numbers_html(comparison)
            except Exception as error:
                self.chart.value, self.numbers.value = framed(note_html(error)), ""

    def start_or_stop(self, button) -> None:
        """Write a text beside the kernel's other work; at once where no event loop runs."""
        with self.lock:
            if self.running:
                self.stopping = True
                return
            self.running, self.stopping, self.button.description = True, False, "Stop"
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self.write())
        else:
            self.task = loop.create_task(self.write())  # a loop alone does not keep its tasks alive

    async def write(self) -> None:
        """Generate with the settings of this moment; between two tokens other callbacks run."""
        prompt, text, note = self.prompt.value, "", ""
        try:
            request = Request(
                self.tokenizer.encode(prompt),
                self.settings(),
                context=self.model.config.context_length,
                end_ids=self.end_ids,
                tokenizer=self.tokenizer,
            )
            for _ in generate(self.model, request):
                text, count = request.text, f"{len(request.token_ids)} new tokens"
                self.text.value = text_html(prompt, text, f"{count} so far")
                await asyncio.sleep(0)
                if self.stopping:
                    break
            how = f"finish_reason: {request.finish_reason}" if request.finish_reason else "stopped"
            note = f"{len(request.token_ids)} new tokens, {how}"
        except Exception as error:
            note = error
        finally:
            self.text.value = text_html(prompt, text, note)
            self.running, self.button.description = False, "Generate"


class AttentionViewer:
    """The attention panel: a prompt or a layer costs one forward, a head none."""

    def __init__(self, widgets, model, tokenizer, prompt, layer, head):
        self.look = lru_cache(maxsize=1)(partial(look, model, tokenizer))  # all heads of a layer
        self.lock = threading.Lock()
        self.prompt = widgets.Textarea(prompt, rows=2, **named("prompt", "auto"))
        self.layer, self.head = (
            widgets.IntSlider(value, 0, count - 1, **named(name, "350px"))
            for name, (value, count) in {"layer": layer, "head": head}.items()
        )
        self.matrix = widgets.HTML()
        rows = [self.prompt, widgets.HBox([self.layer, self.head]), self.matrix]
        self.view = widgets.VBox(rows, layout={"max_width": "940px"})
        self.redraw()
        for control in [self.prompt, self.layer, self.head]:
            control.observe(self.redraw, names="value")

    def redraw(self, change=None) -> None:
        """The matrix anew; a forward only where the prompt or the layer is a new one."""
        with self.lock:
            try:
                layer = self.layer.value
                found = self.look(self.prompt.value, layer)
                self.matrix.value = attention_html(*found, layer, self.head.value)
            except Exception as error:
                self.matrix.value = framed(note_html(error))

"""The 124M shape with random weights: the size at which memory and time begin to matter."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import greedy

from minillm.gpt2 import reference_points
from minillm.parity import compare_modules, compare_text

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHT_BYTES = 4 * 124_439_808


def test_greedy_text_equals_transformers(gpt2_124m):
    reference, _, model = gpt2_124m
    prompt = [15496, 995, 11, 262]
    ids = greedy(model, prompt, 30)
    assert len(set(ids)) >= 20, "this model repeats itself: it proves little"
    assert compare_text(lambda prompt_ids, n: ids[:n], reference, [prompt], 30) == 30


def test_every_sub_module_equals_transformers(gpt2_124m):
    reference, _, model = gpt2_124m
    ids = torch.tensor([[15496, 995, 11, 262, 50256, 0, 42, 42]])
    rows = compare_modules(model, reference, reference_points(model.config), ids, show=False)
    assert len(rows) == 4 + 10 * 12
    print(f"worst sub-module: {max(row.ratio for row in rows):.2f} x the tolerance")


PEAK = """
import sys
import torch
torch.set_num_threads(1)
if len(sys.argv) > 1:
    from minillm.generation import Request, generate
    from minillm.gpt2 import GPT2
    from minillm.kv_cache import KVCache
    from minillm.sampling import SamplingParams
    model = GPT2.from_pretrained(sys.argv[1])
    request = Request(range(64), SamplingParams(max_new_tokens=16), context=1024)
    list(generate(model, request, KVCache.for_model(model, 1024)))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="the peak is read from Linux's /proc"
)
def test_loading_and_generating_hold_the_weights_once_and_the_cache(gpt2_124m):
    _, folder, _ = gpt2_124m

    def peak(*arguments) -> int:
        command = [sys.executable, "-c", PEAK, *map(str, arguments)]
        return 1024 * int(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )

    extra = peak(folder) - peak()
    print(f"peak beyond torch: {extra / WEIGHT_BYTES:.3f} x the weights")
    cache = 2 * 12 * 1024 * 768 * 4
    assert WEIGHT_BYTES < extra < WEIGHT_BYTES + cache + 150e6

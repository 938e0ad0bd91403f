"""The report of `minillm bench`: medians, ratios, the table for people, and a figure."""

import os
import platform
import re
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from . import __version__
from .bench import LAB, OURS, QUANTIZED, SEED, THEIRS, UNCACHED, Job
from .bench_memory import MEMORY


def summarize(job: Job, runs: dict, ceilings: list[float], step_bytes, sizes: dict) -> dict:
    """The report, of medians; ValueError when decode seems to read faster than the memory can."""
    ceiling, share, engines = median(ceilings), None, {}
    for name, given in runs.items():
        engines[name] = figures(job, [marks for marks, _ in given]) | sizes[name]
    if job.batch == 1:
        share = step_bytes / engines[OURS]["decode_step_s"] / ceiling
        if share > 1:
            raise ValueError(
                f"decode reaches {share:.1%} of this machine's memory ceiling, and more than 100% "
                f"cannot be: the ceiling was measured wrongly, perhaps beside other work; try again"
            )
    report = {"job": asdict(job), "seed": SEED, "machine": machine(job), "engines": engines}
    report |= {"ratios": ratios(job, engines), "bytes_per_step": step_bytes}
    report |= {"share_of_ceiling": share, "ceiling_bytes_per_s": ceiling}
    if THEIRS in runs:
        report["equal_ids"] = equal_ids(*(runs[name][-1][1] for name in (OURS, THEIRS)))
    return report


def figures(job: Job, marks: list[list[float]]) -> dict:
    """One engine's medians, from each run's time stamps; padding is no token of a row."""
    lengths, new = zip(*job.row_lengths(), strict=True)
    first = median(m[1] - m[0] for m in marks)
    if job.mixed:  # rows leave on the way: no step is like another
        step, decode = None, (sum(new) - job.batch) / median(m[-1] - m[1] for m in marks)
    else:
        step = median(b - a for m in marks for a, b in zip(m[1:], m[2:], strict=False))
        decode = job.batch / step
    return {
        "first_token_s": first,
        "prefill_tokens_per_s": sum(lengths) / first,
        "decode_step_s": step,
        "decode_tokens_per_s": decode,
        "total_s": median(m[-1] - m[0] for m in marks),
    }


def ratios(job: Job, engines: dict) -> dict:
    """For each other engine, how many times our time it takes, where the two can be compared.

    For a quantized engine also how many times the bytes of weights.
    """
    times = ["first_token_s", "decode_step_s", "total_s"]
    if job.mixed:  # other rows in the same step, other times
        times = ["total_s"]
    keys = {UNCACHED: ["total_s"], THEIRS: times}
    keys |= dict.fromkeys(QUANTIZED, [*times, "weight_bytes"])
    ours = engines[OURS]
    return {
        name: {key.rpartition("_")[0]: row[key] / ours[key] for key in keys[name]}
        for name, row in engines.items()
        if name != OURS
    }


def equal_ids(ours: list[list[int]], theirs: list[list[int]]) -> dict:
    """How many new ids agree, place by place in each row."""
    rows = zip(ours, theirs, strict=True)
    same = [a == b for row in rows for a, b in zip(*row, strict=True)]
    return {"equal": sum(same), "of": len(same)}


def machine(job) -> dict:
    """Where the numbers come from: processor, cores and versions."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)", info.read_text() if info.exists() else "", re.M)
    cpu = found[1] if found else platform.processor() or platform.machine()
    used = ["torch"] + [THEIRS] * bool(getattr(job, "against", None))
    versions = {name: version(name) for name in used} | {"minillm": __version__}
    return {"cpu": cpu, "cores": os.cpu_count(), "versions": versions}


def check_plot(path: str) -> None:
    """ValueError or OSError, before anything is measured, where no figure can be written."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib, {LAB}")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise ValueError(f"--plot is {path!r}, expected a name that ends in .{', .'.join(known)}")
    open(path, "ab").close()


def draw(report: dict, path: str) -> None:
    """A figure of the table: a panel for each measure, a bar for each engine."""
    from matplotlib.figure import Figure

    panels = {
        "time to first token (ms)": ("first_token_s", 1e3),
        "decode (tokens/s)": ("decode_tokens_per_s", 1),
        "peak memory (MB)": ("peak_memory_bytes", 1e-6),
    }
    if report["job"]["quantize"]:
        panels["weights (MB)"] = ("weight_bytes", 1e-6)
    figure = Figure(figsize=(11 if len(panels) == 3 else 17, 2.6), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for ax, (title, (key, unit)) in zip(axes, panels.items(), strict=True):
        values = [(row[key] or 0) * unit for row in report["engines"].values()]
        names = [name.replace(", ", ",\n") for name in report["engines"]]
        ax.bar_label(ax.bar(names, values, color="#3b7dd8"), fmt="%.4g")
        ax.set(title=title, ymargin=0.2)
    figure.savefig(path, dpi=130)


def bench_table(report: dict) -> str:
    """The report of `bench` for people."""
    job = Job(**report["job"])
    cells = [["", "first token", "prefill", "decode step", "decode", "total"]]
    cells += [time_cells(name, row) for name, row in report["engines"].items()]
    if job.mixed:
        cells = [row[:3] + row[4:] for row in cells]  # no two steps are alike
    lines = [*heading(job, report), "", *aligned(cells)]
    if job.mixed:
        lines += [
            "prefill and decode count each row's own tokens, no padding and none after its end;"
        ]
        lines += ["decode is all of them after the first, by the time after the first"]
    lines += ["", *memory_lines(report), ""]
    return "\n".join([*lines, *comparison(report), ceiling_line(report)])


def aligned(cells: list[list[str]]) -> list[str]:
    """The rows of a table, all but the names to the right."""
    return [f"{row[0]:<18}" + "".join(f"{cell:>13}" for cell in row[1:]) for row in cells]


def heading(job: Job, report: dict) -> list[str]:
    """What was measured, and where."""
    where = report["machine"]
    lengths, new = zip(*job.row_lengths(), strict=True)
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    mixed = f"{min(lengths)} to {max(lengths)} tokens + {min(new)} to {max(new)} new"
    tokens = mixed if job.mixed else f"{job.prompt_length} tokens + {job.new_tokens} new"
    short = " (quantized: bfloat16)" if job.quantize else ""
    return [
        f"{job.model}: {job.batch} x {tokens}, {job.dtype}{short}, "
        f"{job.threads} threads, seed {report['seed']}, medians of {job.repeat} runs",
        f"{where['cpu']}, {where['cores']} cores; {versions}",
    ]


def time_cells(name: str, row: dict) -> list[str]:
    """One engine's times."""
    step = row["decode_step_s"]
    return [
        name,
        f"{row['first_token_s'] * 1e3:.2f} ms",
        f"{row['prefill_tokens_per_s']:.0f} tok/s",
        "" if step is None else f"{step * 1e3:.2f} ms",
        f"{row['decode_tokens_per_s']:.1f} tok/s",
        f"{row['total_s'] * 1e3:.1f} ms",
    ]


def memory_lines(report: dict) -> list[str]:
    """The table of weights and memory, and what its columns mean."""
    cells = [["", "weights", "peak*", "held*", "trimmed**"]]
    for name, row in report["engines"].items():
        sizes = [row[key] for key in ("weight_bytes", *MEMORY)]
        told = ["not measured" if n is None else f"{n / 1e6:.1f} MB" for n in sizes]
        cells.append([name, *told])
    return [
        *aligned(cells),
        "* of a process of its own, beyond Python with torch: the most, and after one run",
        "** after that run, once malloc has given freed memory back to the system",
    ]


def comparison(report: dict) -> list[str]:
    """The ratios, and whether the tokens are the same."""
    lines, ratios = [], report["ratios"]
    if uncached := ratios.get(UNCACHED):
        lines += [f"whole generation, cached : not cached = 1 : {uncached['total']:.2f}"]
    words = {"first_token": "to the first token", "decode_step": "per step", "total": "in total"}
    words["weight"] = "in bytes of weights"
    for name in [name for name in ratios if name != UNCACHED]:
        parts = [f"{n:.2f} : 1 {words[key]}" for key, n in ratios[name].items()]
        lines += [f"{name} : minillm = {', '.join(parts)}"]
    if ids := report.get("equal_ids"):
        lines += [f"greedy new ids equal to transformers': {ids['equal']} of {ids['of']}"]
    return lines


def ceiling_line(report: dict) -> str:
    """The memory's speed, and what decode makes of it."""
    line = f"memory ceiling {report['ceiling_bytes_per_s'] / 1e9:.1f} GB/s"
    if size := report["bytes_per_step"]:
        line += f", a decode step of minillm reads {size / 1e6:.1f} MB"
    if share := report["share_of_ceiling"]:
        line += f": {share:.0%} of the ceiling"
    return line


def draft_table(report: dict) -> str:
    """The report of `bench --draft` for people."""
    job, where, tasks = report["job"], report["machine"], report["tasks"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    cells = [["", "plain", "with draft", "speed-up", "predicted", "tok/forward", "accepted"]]
    cells += [draft_cells(name, row) for name, row in tasks.items()]
    sizes = ", ".join(map(str, report["forward_costs"]))
    costs = " : ".join(f"{cost:.2f}" for cost in report["forward_costs"].values())
    lines = [
        f"{job['model']}, draft {job['draft']}: {job['new_tokens']} new tokens, {job['dtype']}, "
        f"{job['threads']} threads, greedy, medians of {job['repeat']} runs",
        f"{where['cpu']}, {where['cores']} cores; {versions}",
        *["", *aligned(cells), ""],
        "all of decode, after the prompt's forward; predicted is tokens per forward by its cost:",
        f"{sizes} tokens in a forward cost {costs}, and 1 takes {report['forward_s'] * 1e3:.2f} ms",
    ]
    if guess := report["cost_per_guess"]:
        lines += [f"each guess of the draft's model costs {guess:.2f} on top"]
    unequal = [name for name, row in tasks.items() if not row["equal_ids"]]
    line = f"ids equal with and without the draft: in {len(tasks) - len(unequal)} of {len(tasks)}"
    return "\n".join([*lines, line + (f", NOT in {', '.join(unequal)}" if unequal else "")])


def draft_cells(name: str, row: dict) -> list[str]:
    """One task's numbers."""
    share = "" if row["acceptance"] is None else f" = {row['acceptance']:.0%}"
    return [
        name,
        f"{row['plain_tokens_per_s']:.1f} tok/s",
        f"{row['draft_tokens_per_s']:.1f} tok/s",
        f"{row['speed_up']:.2f} x",
        f"{row['predicted_speed_up']:.2f} x",
        f"{row['tokens_per_forward']:.2f}",
        f"{row['accepted']}/{row['proposed']}{share}",
    ]

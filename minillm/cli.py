"""The command line: `minillm generate`, `chat`, `tokenize`, `info` and `bench`."""

import argparse
import json
import os
import sys
import warnings

BITS = ["int8", "int4"]
AHEAD = "guess several tokens at a time: ngram, or a small model with the same vocabulary"
SMALLER = "run on weights of 8 or 4 bits: less memory, nearly the same numbers"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; a bad input is one line on stderr and exit code 2.

    Exit code 1: `bench` measured a draft that changed what the model says.
    """
    options = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            return options.run(options) or 0
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"minillm: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def show_warning(message, *_, **__) -> None:
    """A warning as one line on stderr, without the place in the code that it comes from."""
    print(f"minillm: {' '.join(str(message).split())}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="minillm", description="An LLM inference engine built from nothing."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="continue a text")
    command.add_argument("prompt")
    command.add_argument(
        "--model", "-m", default="fairytale", help="a name, a directory, a GGUF file or a hub id"
    )
    command.add_argument("--quantize", choices=BITS, help=SMALLER)
    command.add_argument("--draft", help=AHEAD)
    command.add_argument("--max-new-tokens", "-n", type=int, default=100)
    command.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    command.add_argument("--top-k", type=int, default=0, help="keep the k best tokens; 0: all")
    command.add_argument("--top-p", type=float, default=1.0, help="keep this much mass; 1: all")
    command.add_argument(
        "--min-p", type=float, default=0.0, help="keep what is this likely beside the best; 0: all"
    )
    command.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1: fewer repeats"
    )
    command.add_argument("--seed", type=int, help="the same seed gives the same text")
    command.add_argument(
        "--stop", action="append", default=[], help="end before this text (may be repeated)"
    )
    command.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print each piece as it comes, or the whole text at the end",
    )
    command.set_defaults(run=generate)

    command = commands.add_parser("chat", help="talk with a model that was trained to answer")
    command.add_argument("--model", "-m", default="smollm2", help="a name, a path or a hub id")
    command.add_argument("--quantize", choices=BITS, help=SMALLER)
    command.add_argument("--draft", help=AHEAD)
    command.add_argument("--system", help="what the model is told before the first message")
    command.add_argument("--max-new-tokens", "-n", type=int, default=400, help="for each answer")
    command.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    command.add_argument("--top-p", type=float, default=1.0, help="keep this much mass; 1: all")
    command.add_argument("--seed", type=int, help="the same seed gives the same answers")
    command.set_defaults(run=chat)

    command = commands.add_parser("tokenize", help="show the token ids and pieces of a text")
    command.add_argument("text")
    command.add_argument("--model", "-m", default="fairytale", help="whose tokenizer")
    command.set_defaults(run=tokenize)

    command = commands.add_parser("info", help="what a model is and what it needs")
    command.add_argument("model")
    command.add_argument("--context", type=int, help="positions in the KV cache (default: all)")
    command.set_defaults(run=info)

    command = commands.add_parser(
        "bench",
        help="how quick a model is, and how quick it could be",
        argument_default=argparse.SUPPRESS,  # what is not given is not there: a job has defaults
    )
    command.add_argument(
        "--model",
        "-m",
        help="a name, a directory, a hub id, or gpt2-shape: GPT-2 124M's shape with random weights",
    )
    command.add_argument("--prompt-length", type=int, help="tokens in each prompt")
    command.add_argument("--new-tokens", type=int, help="tokens to generate for each")
    command.add_argument("--batch", type=int, help="prompts side by side")
    command.add_argument(
        "--mixed",
        action="store_true",
        help="in a batch: prompts and answers of different lengths, the shortest an eighth of these",
    )
    command.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    command.add_argument("--threads", type=int, help="default: as many as PyTorch takes")
    command.add_argument("--repeat", type=int, help="runs, of which the medians count")
    command.add_argument("--against", choices=["transformers"], help="the same by someone else")
    command.add_argument("--no-cache", action="store_true", help="also without the KV cache")
    command.add_argument(
        "--quantize",
        nargs="+",
        choices=BITS,
        help="also on weights of 8 or 4 bits, in bfloat16; with --dtype bfloat16 beside plain bfloat16",
    )
    command.add_argument(
        "--draft", help="plain decode and guesses of this draft in turn: ngram, or a small model"
    )
    command.add_argument("--json", action="store_true", help="print the report for machines")
    command.add_argument("--plot", metavar="FILE", help="draw a figure into this file")
    command.set_defaults(run=bench)
    return top


def generate(options) -> None:
    """Print the prompt and its continuation, as it comes or at the end."""
    from .llm import LLM
    from .sampling import SamplingParams
    from .tokenizer import valid_text  # bytes of the shell that are no UTF-8 become U+FFFD

    fields = SamplingParams.__dataclass_fields__
    params = SamplingParams(**{name: getattr(options, name) for name in fields})
    llm = LLM(options.model, quantize=options.quantize, draft=options.draft)
    pieces = llm.stream(options.prompt, params)
    if not options.stream:
        pieces = iter(["".join(pieces)])
    first = next(pieces, "")  # what fails at once fails here, before anything is printed
    print(valid_text(options.prompt) + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def chat(options) -> None:
    """Read messages and stream answers, until the input ends."""
    from .llm import LLM
    from .sampling import SamplingParams

    names = ("max_new_tokens", "temperature", "top_p", "seed")
    params = SamplingParams(**{name: getattr(options, name) for name in names})
    llm, start = LLM(options.model, quantize=options.quantize, draft=options.draft), []
    if options.system:
        start = [{"role": "system", "content": options.system}]
    llm.chat_ids([*start, {"role": "user", "content": "Hi"}], params)  # can it chat at all?
    print("/reset forgets the conversation, Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
    messages, told = list(start), []
    while (text := ask()) is not None:
        if text.strip() == "/reset":
            messages, told = list(start), []
        elif text.strip():
            messages.append({"role": "user", "content": text})
            answer(llm, params, messages, told)


def ask() -> str | None:
    """The next message, or None at the end of the input; Ctrl-C starts a new line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            return None


def answer(llm, params, messages: list[dict], told: list) -> None:
    """Stream one answer and append it; Ctrl-C ends it early, a bad message is taken back.

    What the engine warns of is said once in a conversation: `told` holds it then.
    """
    said = ""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ids = llm.chat_ids(messages, params)
        if caught and not told:
            print(f"minillm: {caught[0].message}", file=sys.stderr)
            told += caught
        for piece in llm.stream(ids, params):
            said += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        print(f"minillm: {' '.join(str(error).split())}", file=sys.stderr)
        messages.pop()
        return
    print()
    messages.append({"role": "assistant", "content": said})


def tokenize(options) -> None:
    """Print each token's id and the piece of text that it stands for."""
    from .families import read_tokenizer
    from .tokenizer import Tokenizer
    from .weights import resolve

    if options.model == "gpt2":  # its vocabulary is installed with this package, not its weights
        tokenizer = Tokenizer.from_pretrained("gpt2")
    else:
        tokenizer = read_tokenizer(resolve(options.model))
    ids = tokenizer.encode(options.text)
    for token_id in ids:
        print(f"{token_id:>8}  {tokenizer.decode([token_id])!r}")
    print(f"{len(ids)} tokens, {len(options.text)} characters")


def info(options) -> None:
    """Print the architecture, the parameters, and the bytes of weights and of the KV cache."""
    import torch

    from .families import architecture, read_config
    from .kv_cache import cache_bytes
    from .weights import resolve

    path = resolve(options.model)
    model_class, config = architecture(path)
    with torch.device("meta"):
        model = model_class(config)
    parameters = sum(p.numel() for p in model.parameters())
    context = config.context_length if options.context is None else options.context
    if not 1 <= context <= config.context_length:
        raise ValueError(
            f"--context is {context}, expected 1 to {config.context_length}, the model's own"
        )
    fields = read_config(path)
    stored = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    layers, kv_heads, head_dim = config.cache_shape
    heads, width = model.blocks[0].attention.n_heads, model.token_embedding.weight.shape[1]
    shared = f", {kv_heads} KV heads" if kv_heads != heads else ""
    per_token = cache_bytes(*config.cache_shape, length=1, bytes_per_number=4)
    rows = {
        "folder" if path.is_dir() else "file": path,
        "architecture": f"{model_class.__name__}: {layers} layers x {width} wide, "
        f"{heads} heads of {head_dim}{shared}",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "context": f"{config.context_length:,} positions",
        "parameters": f"{parameters:,}",
        "weights": f"{4 * parameters:,} bytes in float32 (stored as {stored})",
        "KV cache": f"{per_token:,} bytes per token in float32",
        "": f"{per_token * context:,} bytes for {context:,} positions",
    }
    for name, value in rows.items():
        print(f"{name:<14}{value}")


def bench(options) -> int:
    """Measure one model and print a table, or JSON; 1 where a draft's ids are not the model's."""
    # On Linux PyTorch then asks for huge pages, which weights like: they are read from end to end
    # for every token. It looks once, when it first takes memory, so this comes before the import.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    given = vars(options)
    if "draft" in given:
        from .bench_draft import draft_job, measure_draft
        from .bench_report import draft_table

        report, table = measure_draft(draft_job(given)), draft_table
    else:
        report, table = bench_plain(given)
    print(json.dumps(report, indent=2) if "json" in given else table(report))
    return 0 if report.get("equal_ids") is not False else 1


def bench_plain(given: dict) -> tuple:
    """The report without a draft, with a figure of it where one was asked for, and its table."""
    from .bench import Job, measure
    from .bench_report import bench_table, check_plot, draw, summarize

    job = Job(**{name: given[name] for name in Job.__dataclass_fields__ if name in given})
    if plot := given.get("plot"):
        check_plot(plot)
    report = summarize(job, **measure(job))
    if plot:
        draw(report, plot)
    return report, bench_table

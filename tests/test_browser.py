"""A chapter's panels as a reader meets them: JupyterLab in Chromium, sliders moved, text written.

The cells are the chapter's own, but only those that the panels need: nbval runs the whole chapter.

`MINILLM_SCREENSHOT=1 pytest tests/test_browser.py` draws figures/05_sampling_panel.png anew.
"""

import os
import re
from pathlib import Path

import nbformat
import psutil
import pytest
from browser import Lab, chromium, hard_limit, lab_server, what_is_missing

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "figures" / "05_sampling_panel.png"
SECONDS = 300  # for the whole visit
CHAPTER = ROOT / "notebooks" / "05_sampling.ipynb"
CELLS = ["setup", "real-logits", "sampling-panel", "attention-panel"]


@pytest.mark.browser
def test_the_panels_of_the_sampling_chapter_in_a_browser(tmp_path):
    missing = what_is_missing()
    if missing and "CI" in os.environ:
        pytest.fail(missing)  # skipped there, it would be skipped everywhere
    if missing:
        pytest.skip(missing)
    notebook = nbformat.read(CHAPTER, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.id in CELLS]
    assert [cell.id for cell in notebook.cells] == CELLS
    nbformat.write(notebook, tmp_path / CHAPTER.name)  # JupyterLab saves by itself: a copy
    stored = "MINILLM_SCREENSHOT" in os.environ
    visit(tmp_path, CHAPTER.name, PICTURE if stored else tmp_path / PICTURE.name)


def visit(folder: Path, notebook: str, picture: Path) -> None:
    """Do what a reader does in a notebook that has both panels; nothing is left running."""
    with hard_limit(SECONDS + 60):
        with lab_server(folder) as address, chromium() as page:
            lab = Lab(page, SECONDS)
            lab.open(address, notebook)
            run_all(lab)
            move_and_generate(lab, picture)
            run_the_cell_again(lab)
            look_at_another_head(lab)
            assert no_error(lab) and lab.errors == []
            started = psutil.Process().children(recursive=True)
            assert any("ipykernel" in " ".join(process.cmdline()) for process in started)
        assert psutil.wait_procs(started, timeout=5)[1] == []


class Panel:
    """A panel in the page, as far as a person sees it."""

    def __init__(self, lab: Lab, cell_id: str):
        self.lab, self.root = lab, lab.output(cell_id)

    def text(self, selector: str) -> str:
        return self.root.locator(selector).inner_text(timeout=self.lab.left())

    def press(self, slider: str, key: str, times: int = 1) -> None:
        """Move a slider by keyboard."""
        handle = self.root.locator(".widget-slider", has_text=slider).locator(".noUi-handle")
        for _ in range(times):
            handle.press(key, timeout=self.lab.left())

    def fill(self, field: str, value: int) -> None:
        control = self.root.locator(".widget-text", has_text=field).locator("input")
        control.fill(str(value), timeout=self.lab.left())
        control.press("Tab", timeout=self.lab.left())

    def prompt(self, text: str) -> None:
        self.root.locator("textarea").fill(text, timeout=self.lab.left())

    def click(self, button: str) -> None:
        self.root.get_by_role("button", name=button).click(timeout=self.lab.left())

    def has_button(self, name: str) -> bool:
        return self.root.get_by_role("button", name=name).count() == 1

    def entropy(self) -> float:
        """The entropy after the settings, in bits."""
        return float(re.search(r"entropy\s+[\d.]+ → ([\d.]+) bits", self.text(".numbers"))[1])


def no_error(lab: Lab) -> bool:
    return not [cell for cell in lab.cells() if "error" in cell["outputs"]]


def run_all(lab: Lab) -> None:
    lab.command("notebook:clear-all-cell-outputs")
    lab.command("notebook:run-all-cells", seconds=180)
    ran = {cell["id"] for cell in lab.cells() if cell["count"]}
    assert ran == {cell["id"] for cell in lab.cells()} and no_error(lab)


def move_and_generate(lab: Lab, picture: Path) -> None:
    panel = Panel(lab, "sampling-panel")
    start = panel.entropy()
    panel.press("temperature", "ArrowRight", 4)
    lab.eventually(lambda: panel.entropy() > start)
    panel.press("temperature", "ArrowLeft", 8)
    lab.eventually(lambda: panel.entropy() < start)

    panel.fill("max_new_tokens", 400)
    panel.click("Generate")
    lab.eventually(lambda: len(panel.text(".new")) > 0)
    first = panel.text(".new")
    lab.eventually(lambda: len(panel.text(".new")) > len(first))
    assert panel.text(".new").startswith(first)
    before = panel.entropy()
    panel.press("temperature", "ArrowRight")
    lab.eventually(lambda: panel.entropy() > before)
    assert panel.has_button("Stop")  # so the slider answered while the text was written
    panel.click("Stop")
    lab.eventually(lambda: panel.has_button("Generate"))
    assert "new tokens, stopped" in panel.text(".text + p")

    panel.press("temperature", "ArrowLeft")
    panel.prompt("Once upon a")  # "time" is nearly certain
    lab.eventually(lambda: panel.entropy() < 0.1)
    panel.prompt("Once upon a time there was a")
    lab.eventually(lambda: panel.entropy() > 1)
    panel.fill("max_new_tokens", 60)
    panel.click("Generate")
    lab.eventually(lambda: "60 new tokens, finish_reason: length" in panel.text(".text + p"))
    lab.page.mouse.move(5, 5)
    panel.root.screenshot(path=picture, timeout=lab.left())
    assert picture.stat().st_size > 20_000


def run_the_cell_again(lab: Lab) -> None:
    panel = Panel(lab, "sampling-panel")
    moved = panel.entropy()
    lab.command("notebook:run-cell")
    lab.eventually(lambda: panel.entropy() != moved)  # a fresh panel, at its start
    start = panel.entropy()
    assert panel.text(".new") == ""
    panel.press("temperature", "ArrowRight", 4)
    lab.eventually(lambda: panel.entropy() > start)


def look_at_another_head(lab: Lab) -> None:
    panel = Panel(lab, "attention-panel")
    before, matrix = panel.text("p"), panel.root.locator("svg")
    cells = matrix.inner_html(timeout=lab.left())
    panel.press("head", "ArrowRight")
    lab.eventually(lambda: panel.text("p") != before)
    assert re.match(r"Layer \d+, head \d+: ", before)
    assert matrix.inner_html(timeout=lab.left()) != cells

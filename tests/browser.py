"""JupyterLab in a real browser: a server of its own on this machine, Chromium, and one notebook."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

CHROMIUM = Path("/usr/bin/chromium")
SETTINGS = {  # nothing asks a question, nothing is fetched
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "apputils-extension/themes": {"theme": "JupyterLab Light"},
}


def what_is_missing() -> str | None:
    """Why no browser can be driven here, or None."""
    if not CHROMIUM.exists():
        return f"there is no {CHROMIUM}: apt-get install --no-install-recommends chromium"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install -c constraints.txt -e '.[browser]'"
    return None


@contextmanager
def hard_limit(seconds: float):
    """After so many seconds every process that was started meanwhile is killed, whatever waits for it."""
    before = set(psutil.Process().children(recursive=True))

    def kill() -> None:
        for process in set(psutil.Process().children(recursive=True)) - before:
            process.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def lab_server(folder: Path, seconds: float = 60):
    """JupyterLab on 127.0.0.1 with `folder` as its root: yields its address, and ends with its kernels.

    Settings, runtime files and workspaces lie in `folder`/.jupyter, so that nobody's own are touched.
    """
    home = folder / ".jupyter"
    for name, values in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # free, a moment ago
    places = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
    }
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder,
        "ServerApp.allow_root": True,
        "ServerApp.open_browser": False,
        "IdentityProvider.token": "",
        "LabApp.expose_app_in_browser": True,
    }
    with open(folder / "jupyter.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *(f"--{k}={v}" for k, v in options.items())],
            cwd=folder,
            env=os.environ | {name: str(path) for name, path in places.items()},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(server, address, time.monotonic() + seconds)
        yield address
    finally:
        end(server)


def wait_for_server(server: subprocess.Popen, address: str, deadline: float) -> None:
    while True:
        try:
            urllib.request.urlopen(f"{address}/api/status", timeout=5).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("JupyterLab did not start: see jupyter.log") from None
            time.sleep(0.2)


def end(server: subprocess.Popen) -> None:
    """Kill a server with its process group, and its kernels, which have their own.

    A request to stop would take it seconds, and its folder goes with the test.
    """
    family = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait(timeout=10)


@contextmanager
def chromium():
    """An empty page in a browser of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser.new_page(
                viewport={"width": 1400, "height": 1300}, device_scale_factor=1.5
            )
        finally:
            browser.close()


class Lab:
    """One notebook in JupyterLab; `errors` are those of the page."""

    def __init__(self, page, seconds: float):
        self.page, self.deadline, self.errors = page, time.monotonic() + seconds, []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def left(self, seconds: float = 30) -> float:
        """How many milliseconds one step may take."""
        left = min(seconds, self.deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError("the visit took longer than it may")
        return 1000 * left

    def eventually(self, question: Callable[[], bool], seconds: float = 30) -> None:
        """Ask until the answer is yes."""
        end = time.monotonic() + self.left(seconds) / 1000
        while not question():
            if time.monotonic() > end:
                raise TimeoutError(f"still not so after {seconds} s")
            self.page.wait_for_timeout(50)

    def open(self, address: str, notebook: str) -> None:
        """Open a notebook in an empty workspace and wait for its kernel."""
        self.page.goto(f"{address}/lab/tree/{notebook}?reset", timeout=self.left(60))
        # A session is not enough: until its kernel has told about itself, a run opens a dialog.
        self.page.wait_for_function(
            """() => {
                const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
                if (!session?.isReady) return false;
                window.told ??= session.session.kernel.info.then(() => (window.kernelReady = true));
                return window.kernelReady;
            }""",
            timeout=self.left(60),
        )

    def command(self, name: str, seconds: float = 30) -> None:
        """Run one of JupyterLab's commands and wait for its end."""
        self.page.evaluate(
            """name => {
                window.finished = false;
                void window.jupyterapp.commands.execute(name).finally(() => (window.finished = true));
            }""",
            name,
        )
        self.page.wait_for_function("() => window.finished", timeout=self.left(seconds))

    def cells(self) -> list[dict]:
        """Every code cell: its id, its count, and the kinds of its outputs."""
        return self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
                .filter(cell => cell.model.type === "code")
                .map(cell => ({id: cell.model.id, count: cell.model.executionCount,
                    outputs: cell.model.outputs.toJSON().map(output => output.output_type)}))"""
        )

    def output(self, cell_id: str):
        """Scroll to a cell and make it the active one: its output, as a Playwright locator."""
        self.page.evaluate(
            """async id => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                const n = notebook.widgets.findIndex(cell => cell.model.id === id);
                notebook.activeCellIndex = n;
                await notebook.scrollToItem(n, "start");
                notebook.widgets[n].node.setAttribute("data-id", id);
            }""",
            cell_id,
        )
        return self.page.locator(f"[data-id='{cell_id}'] .jp-OutputArea-output")

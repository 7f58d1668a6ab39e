"""The app of the Space, started and clicked through in a real browser."""

import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest

from browser import CHROMIUM, Browser
from saved import save_text, save_tiny

SPACE = Path(__file__).parents[2] / "examples" / "space"
pytestmark = [
    pytest.mark.skipif(find_spec("gradio") is None, reason="needs gradio"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]


@pytest.fixture
def address(tmp_path):
    """Where the app answers, with a tiny model and text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"MODELS": str(save_tiny(tmp_path / "model")), "TEXT": str(save_text(tmp_path / "text.txt"))}
    settings |= {"SAMPLES": "8", "LENGTH": "32", "GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False"}
    with open(tmp_path / "log", "w") as log:
        app = subprocess.Popen([sys.executable, SPACE / "app.py"], env=os.environ | settings, stdout=log, stderr=log)
    try:
        while not answers(port):
            assert app.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        app.terminate()
        app.wait()


def answers(port: int) -> bool:
    """Tell whether the app serves its page."""
    try:
        urlopen(f"http://127.0.0.1:{port}").close()
    except OSError:
        return False
    return True


@pytest.fixture
def page(tmp_path, address):
    browser = Browser(tmp_path / "browser", 1100, 900)
    browser.send("Page.navigate", url=address)
    yield browser
    if kept := os.environ.get("KEEP_PICTURES"):
        browser.picture(Path(kept, "space.png"))
    browser.close()


def rows(page: Browser) -> dict[str, list[str]]:
    """The table on the page: name -> cells."""
    found = page.run("[...document.querySelectorAll('#table tr')].map(r => [...r.cells].map(c => c.innerText.trim()))")
    return {name: cells for name, *cells in found}


def test_a_plan_then_a_compression(page):
    button = "(document.querySelector('button#{0}') || document.querySelector('#{0} button'))"
    page.until(f"Boolean({button.format('plan')})")
    page.run(f"{button.format('plan')}.click()")
    page.until("document.querySelectorAll('#table tr').length >= 3")
    planned = rows(page)
    page.run(f"{button.format('compress')}.click()")
    before, after = page.until(
        "(texts => texts[1] && texts)(['before', 'after'].map(id => document.querySelector(`#${id} textarea`).value))"
    )
    done = rows(page)
    assert before.startswith("The capital of France is") and after.startswith("The capital of France is")
    assert before != after
    dense, small = (int(cell.replace(",", "")) for cell in done["parameters"])
    assert small < dense and planned["parameters"] == done["parameters"]
    assert all(float(cell) > 1 for cell in done["perplexity"])

"""The report in a real browser, light and dark, as wide as a desk and as a telephone."""

import html
import json
import re
import subprocess

import pytest

pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")

from browser import CHROMIUM
from compared import config, rows
from rankfold.comparison.report.page import write_report
from rankfold.comparison.report.plots import INKS

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
MEASURE = """<script>addEventListener("load", () => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const boxes = query => [...document.querySelectorAll(query)].map(box);
  const found = {
    across: document.documentElement.scrollWidth, width: innerWidth,
    paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    images: [...document.images].map(i => [i.complete && i.naturalWidth > 0, i.getBoundingClientRect().width]),
    dark: [...document.querySelectorAll("figure:not(.main) img")].map(i => i.currentSrc === i.src),
    main: document.querySelector("figure.main img").naturalWidth,
    blocks: boxes("h1, h2, p, .wide, figure, dl, pre, summary"),
    letters: [...document.querySelectorAll("td, p, pre, dd")].map(e => parseFloat(getComputedStyle(e).fontSize)),
    cells: [...document.querySelectorAll("td, th")].map(e => [e.scrollWidth, e.clientWidth]),
  };
  const out = document.createElement("template"); out.id = "measured"; out.innerHTML = "";
  out.setAttribute("data-found", JSON.stringify(found)); parent.document.body.append(out);
});</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    write_report(folder, config(), rows())
    page = (folder / "report.html").read_text(encoding="utf-8").replace("</body>", MEASURE + "</body>")
    for width in (1280, 390):  # in a frame, because windows have a least width
        frame = f'<iframe srcdoc="{html.escape(page)}" style="width: {width}px; height: 900px; border: 0"></iframe>'
        around = f'<!doctype html><meta name="color-scheme" content="light dark"><body>{frame}</body>'
        (folder / f"{width}.html").write_text(around, encoding="utf-8")
    return folder


def colour(code: str) -> str:
    return f"rgb({int(code[1:3], 16)}, {int(code[3:5], 16)}, {int(code[5:7], 16)})"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_and_nothing_overlaps(folder, tmp_path, theme, width):
    done = subprocess.run(
        [
            *(
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={tmp_path}",
            ),
            *("--window-size=1400,900", f"--blink-settings=preferredColorScheme={int(theme == 'light')}"),
            *("--virtual-time-budget=20000", "--dump-dom", (folder / f"{width}.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads(html.unescape(re.search(r'id="measured" data-found="(.*?)"', done.stdout).group(1)))
    assert found["width"] == width and found["across"] <= width
    assert (found["ink"], found["paper"]) == tuple(map(colour, INKS[theme]))
    assert len(found["images"]) > 10 and all(loaded for loaded, _ in found["images"])
    assert all(shown >= 0.8 * min(width, 368) for _, shown in found["images"])  # its letters stay readable
    assert set(found["dark"]) == {theme == "light"}  # the other one is shown in the dark
    assert found["main"] > 700 if width == 1280 else found["main"] < 500  # drawn as wide as what it is shown on
    assert min(found["letters"]) >= 12
    assert all(inner <= outer + 1 for inner, outer in found["cells"])
    boxes = found["blocks"]
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert left >= 0 and right <= width, boxes[i]
        for other in boxes[i + 1 :]:
            assert not (left < other[2] - 1 and other[0] < right - 1 and top < other[3] - 1 and other[1] < bottom - 1)

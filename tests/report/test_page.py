"""The report of a comparison: everything is in it, nothing is loaded, and names are text."""

import json
import re
from html.parser import HTMLParser
from itertools import combinations

import pytest

pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from compared import METHODS, NASTY, SPARSITIES, TASKS, config, rows
from rankfold.comparison.report.page import page, pictures, write_report
from rankfold.comparison.report.plots import Picture, drawn, tick
from rankfold.comparison.report.table import by_quality, cells_of_table, markdown, summary


class Tags(HTMLParser):
    """What a browser makes of a page: tags with their attributes, and the text between them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.text, self.cells, self.inside = [], "", [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")
            self.inside = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.inside = False

    def handle_data(self, data):
        self.text += data
        if self.inside:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "plots").mkdir()
    (folder / "plots" / "old.png").write_bytes(b"")
    (folder / "plots" / "mine.txt").write_text("")
    write_report(folder, config(), rows())
    return folder


@pytest.fixture(scope="module")
def html(folder) -> Tags:
    return Tags((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_loads_nothing(folder, html):
    text = (folder / "report.html").read_text(encoding="utf-8")
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.S))
    assert style and "url(" not in style and "@import" not in style
    assert not {"script", "link", "iframe", "object", "embed", "base", "form", "a"} & {tag for tag, _ in html.tags}
    for _, attributes in html.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "srcset", "href"):
            assert (attributes.get(name) or "data:image/").startswith("data:image/")


def test_names_are_text_and_never_tags(html):
    assert html.text.count(NASTY) > 6  # heading, facts, table, captions, environment


def test_every_row_is_in_the_table_and_every_reason_below_it(html):
    cells = cells_of_table(rows())
    shown = [cell.strip() for line in [cells.header, *cells.lines] for cell in line]
    assert [cell.strip().replace("\u200b", "") for cell in html.cells] == shown  # where long names may break
    note = cells.header.index("note")
    assert sum(line[note].startswith("failed [") for line in cells.lines) == 2
    assert sum("failed: cannot take module" in note for note in cells.notes) == 1  # one sentence for both
    assert all(note in html.text for note in cells.notes) and "damaged [" in cells.lines[6][note]
    assert len(cells.lines) == 1 + len(METHODS) * len(SPARSITIES) + 2
    by_name = dict(zip(cells.header, cells.lines[1], strict=True))
    assert by_name["perplexity wiki.test.raw"] == "36.00 (× 1.44)"  # 25 (1 + 0.1 * 2)^2
    assert (
        by_name["piqa, %"] == "39.0 ± 1.2" and by_name["removed"] == "10.10%" and by_name["prefill, × dense"] == "1.05"
    )


def test_probe_texts_have_a_table_of_their_own():
    """With six columns more, sizes would be out of sight; rows without probe texts are left out there."""
    made = rows()
    made[1]["probe_texts"] = {"kinds": {"prose": {"ratio": 1.25, "standard_error": 0.04}}, "warning": None}
    html = Tags(page(config(), made, [], "out"))
    cells = [cell.strip() for cell in html.cells]
    begin = cells.index("method", 1)
    assert cells[begin:] == ["method", "sparsity", "prose", "rankfold", "0.1", "1.25 ± 0.05"]
    assert "M parameters" in cells[:begin] and "prose" not in cells[:begin]


def test_a_perplexity_near_the_largest_float_is_a_row_like_any_other():
    """Of a model whose activations exploded: it took the whole report with it."""
    made = rows()
    made[2]["measures"]["texts"][0]["perplexity"] = 1.7e308
    for picture in pictures(made):
        if picture.name.startswith(("perplexity-1", "speed")):
            assert drawn(picture).png
    text = markdown(made)
    assert "1.70e+308 (× 6.80e+306)" in text and "0" * 20 not in text


def test_every_column_is_explained():
    """Also what all rows have alike; columns of one kind have one entry, and names need no explanation."""
    made, described = rows(), config()
    described["identity"]["protocol"] = {"name": "lowrankarena", "departures": [], "left_out": {}}
    for row in made:
        if row["status"] == "done":
            tasks = {task: facts | {"samples": 7} for task, facts in row["measures"]["tasks"].items()}
            row["measures"]["tasks"] = tasks
            row["protocol"] = {"tasks": tasks, "means": {"MCQ mean": 0.5}, "kept": 0.8, "retention": 0.7}
    cells = cells_of_table(made)
    text = page(described, made, [], "out").partition("What the numbers are")[2].partition("Where it ran")[0]
    entries = {name for entry in re.findall("<dt>(.*?)</dt>", text) for name in (entry, *entry.split(", "))}
    kinds = {f"{task}, %": "accuracy" for task in TASKS} | {"MCQ mean, %": "MCQ mean"}
    kinds |= {f"{kind}, × dense": kind for kind in ("prefill", "decode")}
    for name in {*cells.header, *cells.alike} - {"method", "note"}:
        kind = "perplexity" if name.startswith("perplexity ") else kinds.get(name, name)
        assert kind in entries, (name, entries)
    assert "acc_norm, acc where a task has none" in text and "piqa: 7 questions" in text
    assert "MathQA" not in entries  # not run
    alone = page(config(), rows(), [], "out")
    assert "<dt>kept</dt>" not in alone and "lm-eval&#39;s acc, or exact_match" in alone


def test_what_all_rows_have_alike_stands_once(html):
    cells = cells_of_table(rows())
    assert cells.alike == {"KV bytes/token": "46,080", "measured": "one-pass"}
    assert "All rows: KV bytes/token 46,080; measured one-pass." in " ".join(html.text.split())
    assert not set(cells.alike) & set(cells.header) and "M parameters" in cells.header
    without_rivals = Tags(page(config(), rows()[:3], [], "out"))
    assert "All rows: KV bytes/token 46,080; measured one-pass." in " ".join(without_rivals.text.split())
    assert "Bold" not in without_rivals.text


def test_the_best_of_each_sparsity_is_bold(html):
    cells = cells_of_table(rows())
    column = cells.header.index("perplexity wiki.test.raw")
    assert sorted(line for line, place in cells.best if place == column) == [1, 2]  # rankfold at 0.1 and 0.3
    bold = [dict(attributes).get("class") for tag, attributes in html.tags if tag == "td"].count("best")
    assert bold == len(cells.best) > 4
    assert markdown(rows()).count("**36.00 (× 1.44)**") == 1
    alone = [row for row in rows() if row["sparsity"] != 0.3]
    assert {line for line, _ in cells_of_table(alone[:2]).best} == set()  # nothing to be better than


def test_the_first_sentence_says_who_won_where(html):
    found, other = summary(rows())
    assert found == (
        "Lowest perplexity on wiki.test.raw: rankfold at 0.1 (36.00, × 1.44), rankfold at 0.3 (64.00, × 2.56); "
        "the dense model has 25.00."
    )
    assert found in html.text and other in html.text


def test_methods_stand_in_the_legend_in_the_order_of_their_quality():
    dense, *others = [row for row in rows() if row["status"] == "done"]
    backwards = [dense, *reversed(others)]
    assert by_quality(backwards) == list(METHODS)
    (picture,) = [p for p in pictures(backwards) if p.name.startswith("perplexity-1-")]
    shown = [text.get_text() for text in picture.draw().legends[0].get_texts()]
    assert shown[0] == "rankfold" and shown[-2:] == ["svd-llm", "dense"]


def test_the_page_says_how_to_repeat_it(html, folder):
    place = folder.resolve().name
    assert f"rankfold compare --config {place}/compare.json -o {place}-again" in html.text


def test_records_are_lines_and_the_markdown_has_as_many_cells_in_every_row(folder):
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == rows()
    written = (folder / "table.md").read_text(encoding="utf-8").splitlines()
    table = [re.findall(r"(?<!\\)\|", line) for line in written if line.startswith("|")]
    assert len(table) == len(rows()) + 2 and len({len(bars) for bars in table}) == 1
    assert markdown(rows()).count(r"\<script") > 2 and "<script" not in markdown(rows()).replace(r"\<script", "")


def test_every_picture_is_there_twice_and_old_ones_are_not(folder):
    found = {path.name for path in (folder / "plots").iterdir()}
    names = [picture.name for picture in pictures(rows())]
    assert len(set(names)) == len(names) == 2 + 2 + len(SPARSITIES) + 3 * len(METHODS)
    assert found == {f"{name}{suffix}" for name in names for suffix in (".png", ".svg")} | {"mine.txt"}


def texts_of(picture: Picture, monkeypatch):
    """Every text that is drawn of a picture, with its box, and the size of the picture."""
    shown, draw = [], Text.draw
    monkeypatch.setattr(Text, "draw", lambda text, renderer: (shown.append(text), draw(text, renderer))[1])
    canvas = FigureCanvasAgg(picture.draw())
    canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown if text.get_text().strip()]
    return boxes, canvas.get_width_height()


def of_many_methods() -> list[Picture]:
    """Pictures with a legend of thirteen lines."""
    dense, *done = [row for row in rows() if row["status"] == "done"]
    many = [row | {"label": f"{row['label']} {i}"} for i in range(4) for row in done]
    return [picture for picture in pictures([dense, *many]) if picture.group == "results"]


@pytest.mark.parametrize("picture", [*pictures(rows()), *of_many_methods()], ids=lambda picture: picture.name)
def test_no_text_of_a_picture_lies_on_another_or_outside(picture, monkeypatch):
    shown, (width, height) = texts_of(picture, monkeypatch)
    assert len(shown) > 8 and {"dense", "sparsity 0.1"} & {text for text, _ in shown}
    for text, box in shown:
        assert min(box.x0, box.y0) >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, text
    for (one, a), (other, b) in combinations(shown, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or along <= 1, (one, other)


def test_axes_say_what_they_are():
    for picture in pictures(rows()):
        panels = [axes for axes in picture.draw().axes if axes.name != "polar"]
        assert not panels or panels[-1].get_xlabel(), picture.name
        for axes in panels:
            named = axes.get_ylabel() + str(picture.draw().get_suptitle())
            assert any(unit in named for unit in ("%", "perplexity", "relative error")), picture.name


def test_a_curve_is_what_the_rows_say():
    (picture,) = [p for p in pictures(rows()) if p.name.startswith("perplexity-1-")]
    axes = picture.draw().axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines.keys() >= {"dense", "rankfold", "svd-llm"}
    x, y = lines["svd-llm"].get_data()
    assert list(x) == pytest.approx([10.3, 30.3]) and list(y) == pytest.approx(
        [25 * (1 + s * 4) ** 2 for s in SPARSITIES]
    )
    assert lines["dense"].get_ydata()[0] == 25.0


def test_a_sparsity_has_one_colour_in_the_pictures_of_all_methods():
    """Also where a method has failed at another one."""
    few = [row for row in rows() if (row["label"], row["sparsity"]) != ("rankfold", SPARSITIES[0])]
    lines = [
        line
        for picture in pictures(few)
        if picture.name.startswith("rank-")
        for line in picture.draw().axes[0].get_lines()
    ]
    colours = {(line.get_label(), line.get_color()) for line in lines if line.get_label() == "sparsity 0.3"}
    assert len([line for line in lines if line.get_label() == "sparsity 0.3"]) > 1 and len(colours) == 1


def test_numbers_at_an_axis_are_written_alike():
    assert [tick(v) for v in (0.05, 2.5, 100, 5e3, 2e4, 3e6)] == ["0.05", "2.5", "100", "5,000", "20,000", "3e+06"]


def test_the_radar_has_every_task():
    (picture,) = [p for p in pictures(rows()) if p.name == "tasks-0.3"]
    axes = picture.draw().axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list(TASKS)
    assert list(axes.get_lines()[1].get_ydata()) == pytest.approx([27, 37, 47, 57, 27])


def test_rows_that_all_failed_still_make_a_report(tmp_path):
    few = [rows()[0], *(row for row in rows() if row["status"] == "failed")]
    write_report(tmp_path, config(), few)
    assert "failed: cannot take module" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert not list((tmp_path / "plots").iterdir())


def test_a_page_is_the_same_every_time():
    few = rows()[:2]
    one, other = ([drawn(picture) for picture in pictures(few)[:3]] for _ in range(2))
    assert page(config(), few, one, "x") == page(config(), few, other, "x")

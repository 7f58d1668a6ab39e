"""Reports without most of their pictures: to draw them takes longer than to compress and measure tiny models."""

from rankfold.comparison.report import page
from rankfold.comparison.report.plots import Drawn, Picture, drawn


def draw_only(monkeypatch, *names: str) -> None:
    """Leave all pictures of reports empty but those of these names."""

    def some(picture: Picture, *width: float) -> Drawn:
        return drawn(picture, *width) if picture.name in names else Drawn(picture, b"", "", "")

    monkeypatch.setattr(page, "drawn", some)

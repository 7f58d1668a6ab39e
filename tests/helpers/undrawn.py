"""Reports without most of their pictures: to draw them takes longer than to compress and measure tiny models."""

from rankfold.comparison.report import page
from rankfold.comparison.report.plots import DrawnPicture, Picture, drawn


def draw_only(monkeypatch, *names: str) -> None:
    """Leave all pictures of reports empty but those of these names."""

    def some(picture: Picture, *width: float) -> DrawnPicture:
        return drawn(picture, *width) if picture.name in names else DrawnPicture(picture, b"", "", "")

    monkeypatch.setattr(page, "drawn", some)

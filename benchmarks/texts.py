"""The texts of an experiment: calibration windows and evaluation windows, by what its YAML says of them.

``texts`` names parts of files: ``{file, documents: [first, last]}`` of rows, ``{file, part: [0, 0.8]}`` of a text,
``{modules}`` of Python's standard library, or the source of an installed ``{package}``. Any other name is a file in the
data, or an alias of rankfold.
"""

import importlib.util
import sysconfig
from dataclasses import replace
from pathlib import Path

from torch import Tensor

import common
from rankfold import CalibrationData, DenseModel, load_calibration
from rankfold.data.built_in import BUILT_IN

ALIASES = ("self", *BUILT_IN)


class TextFiles:
    """Files of an experiment's texts.

    Args:
        folder: where parts of files are written.
        named: ``texts`` of the experiment.
    """

    def __init__(self, data: str | None, folder: Path, named: dict[str, dict]):
        self.data, self.folder, self.named = data, folder, named

    def path(self, name: str) -> str:
        """Return the file of a text, written now if it is a part of another one."""
        if name in ALIASES:
            return name
        if name not in self.named:
            return str(common.data_file(self.data, name))
        facts = self.named[name]
        files = None
        if "modules" in facts:
            files = [Path(sysconfig.get_path("stdlib")) / f"{module}.py" for module in facts["modules"].split()]
        if "package" in facts:
            files = sorted(Path(importlib.util.find_spec(facts["package"]).origin).parent.rglob("*.py"))
        if files:
            text, suffix = "\n\n".join(file.read_text(encoding="utf-8") for file in files), ".txt"
        elif "part" in facts:
            whole = common.data_file(self.data, facts["file"]).read_text(encoding="utf-8")
            text, suffix = whole[slice(*(round(share * len(whole)) for share in facts["part"]))], ".txt"
        else:
            rows = common.data_file(self.data, facts["file"]).read_text(encoding="utf-8").splitlines()
            text, suffix = "\n".join(rows[slice(*facts["documents"])]), ".jsonl"
        place = self.folder / f"{name.replace(' ', '_')}{suffix}"
        place.write_text(text, encoding="utf-8")
        return str(place)

    def calibration(self, source: DenseModel, how: dict, text=None, windows: int | None = None) -> CalibrationData:
        """Return calibration windows.

        Args:
            how: ``calibration`` of the experiment.
            text: instead of its own: a name, names in equal shares, or name -> share.
            windows: only so many of them.
        """
        text = text or how["text"]
        if "half" in how:
            tokens, _ = self.halves(source, how)
        else:
            shares = text if isinstance(text, dict) else dict.fromkeys([text] if isinstance(text, str) else text, 1.0)
            tokens = load_calibration(
                {self.path(name): share for name, share in shares.items()},
                source,
                num_samples=how["samples"],
                max_length=how["length"],
                seed=how["seed"],
            )
        return replace(tokens, ids=tokens.ids[:windows])

    def evaluation(self, source: DenseModel, how: dict, length: int) -> Tensor:
        """Return the ``(W, T)`` evaluation windows of one text."""
        if "half" in how:
            return self.halves(source, how | {"length": length, "seed": 0})[1]
        return common.windows(source, self.path(how["text"]), length)[:: how.get("every", 1)][: how.get("first")]

    def halves(self, source: DenseModel, how: dict) -> tuple[CalibrationData, Tensor]:
        """Return the first half of a text to calibrate on, the second to evaluate on: no window is in both."""
        path = Path(self.path(how["text"]))
        windows = common.windows(source, path, how["length"])
        half = len(windows) // 2
        fit = half - max(1, min(8, half // 9))  # as many are kept out of the fit as `load_calibration` would keep
        samples, held_out = windows[:fit].contiguous(), windows[fit:half].contiguous()
        origin = f"{path.name}, first half"
        return CalibrationData(samples, path.name, origin, how["seed"], held_out), windows[half:]


def described(text, how: dict) -> str:
    """Return how a record calls a text."""
    if isinstance(text, str) and "half" in how:
        return f"{Path(text).name}, {how['half']} half"
    return Path(text).name if isinstance(text, str) else " + ".join(Path(name).name for name in text)

"""What a comparison runs: methods with their options, each at every sparsity."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..architectures import BlockView
from ..errors import OptionError, check_choice, written
from ..methods import Method, make_method, method_class


@dataclass(frozen=True)
class Form:
    """A method with its options, at no sparsity yet.

    Args:
        name: of a registered method.
        options: of :func:`rankfold.make_method`, ``sparsity`` not among them.
        mode: ``sequential`` or ``one-pass``; ``None``: one-pass, which shares its moments, where the method can and its
            authors do not measure a block on the changed ones before it.

    Raises:
        OptionError: unknown method, unknown mode, or one that the method does not have.
    """

    name: str
    options: Mapping = field(default_factory=dict)
    mode: str | None = None

    def __post_init__(self):
        modes = method_class(self.name).modes
        if self.mode is not None:
            check_choice(f"mode of {self.name}", self.mode, modes)

    @property
    def label(self) -> str:
        """As on the command line: ``modegpt:selection=leverage,gqa=paper``."""
        given = dict(self.options) | ({"mode": self.mode} if self.mode else {})
        listed = ",".join(f"{key}={written(value, '+')}" for key, value in given.items())
        return f"{self.name}:{listed}" if listed else self.name

    def at(self, sparsity: float, common: Mapping | None = None) -> "Cell":
        """This method at a sparsity.

        Args:
            common: options of all methods of the grid; the method's own go before them.

        Raises:
            OptionError: an option that is unknown or out of range, or modules with another sparsity.
        """
        method = make_method(self.name, **{**(common or {}), **self.options}, sparsity=sparsity)
        if method.own_sparsities and set(method.own_sparsities.values()) != {sparsity}:
            raise OptionError(
                f"{self.label} gives its modules other sparsities than the {sparsity} of its row; give them that one, "
                "or name them without a sparsity"
            )
        # A measured allocation compares predictions on text and has no use for moments of the dense model.
        best = "sequential" if method.allocation.needs_text else method.compared_mode
        return Cell(self.label, method, self.mode or (best if best in method.modes else method.modes[0]))


@dataclass(frozen=True)
class Cell:
    """One compression of the grid."""

    label: str
    method: Method
    mode: str

    def takes_moments(self, views: Sequence[BlockView]) -> bool:
        """Whether it can be computed from moments of the dense model that other cells use too; otherwise from text."""
        reads_text = self.method.allocation.needs_text or any(map(self.method.gradients, views))
        return self.mode == "one-pass" and not reads_text

    @property
    def key(self) -> str:
        """A name for files; equal for the same method, options, sparsity and mode only."""
        facts = json.dumps([self.method.describe(), self.mode], sort_keys=True)
        return f"{self.method.name}-{self.method.sparsity}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def cells_of(forms: Sequence[Form], sparsities: Iterable[float], common: Mapping | None = None) -> list[Cell]:
    """The grid, method by method; arguments as of :meth:`Form.at`.

    Raises:
        OptionError: nothing to run, something twice, or an option that is unknown or out of range.
    """
    cells = [form.at(sparsity, common) for form in forms for sparsity in sparsities]
    if not cells:
        raise OptionError("nothing to compare; name at least one method and one sparsity")
    seen = {}
    for cell in cells:
        if cell.key in seen:
            raise OptionError(f"{cell.label} at {cell.method.sparsity} is the same as {seen[cell.key]}; give it once")
        seen[cell.key] = f"{cell.label} at {cell.method.sparsity}"
    return cells

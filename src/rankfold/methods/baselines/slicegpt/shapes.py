"""What a block takes whose stream is narrower, from the shapes of the dense one.

Shape legend: D width of the dense stream, r of the sliced one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...._utils.present import present
from ....architectures import BlockView
from ...modegpt.norms import norm_parameters


@dataclass(frozen=True)
class Shapes:
    """Sizes of a block in RMS form that do not depend on the width of the stream."""

    rows: int  # of all layers that read the stream
    columns: int  # inputs of those that write to it
    reader_biases: int  # numbers in biases of readers
    writer_biases: int  # writers that have one
    shortcuts: int
    borders: int  # matrices between the model's own coordinates and the sliced ones
    kept: int  # parameters of what stays as it is: norms of the heads, an activation that has any
    width: int  # D

    @classmethod
    def of(
        cls, view: BlockView, ranks: Mapping[str, int] = MappingProxyType({}), *, moves_bias: bool = False
    ) -> "Shapes":
        """Of a dense block, whose weights may be on the meta device.

        Args:
            ranks: widths of ``mlp``, ``qk`` and ``vo`` where these are smaller.
            moves_bias: whether the bias of smaller values goes into the output projection's, where that has one.
        """
        attention, mlp = view.attention, view.mlp
        full, hidden = attention.head_dim, view.mlp.hidden
        qk, vo, units = (ranks.get(name, size) for name, size in (("qk", full), ("vo", full), ("mlp", hidden)))
        q, k, v = attention.qkv()
        moved = moves_bias and vo < full and attention.output.bias is not None
        first, second = (norm.shift is not None for norm in view.norms)
        readers = [(len(p.weight) // full * qk, first or p.bias is not None) for p in (q, k)]
        readers.append((len(v.weight) // full * vo, first or (v.bias is not None and not moved)))
        readers += [(len(p.weight) // hidden * units, second or p.bias is not None) for p in mlp.rising().values()]
        kept = [getattr(attention.module, name) for name in attention.norms or ()]
        kept.append(view.module.get_submodule(present(mlp.spec.activation)))
        return cls(
            rows=sum(rows for rows, _ in readers),
            columns=attention.heads * vo + units,
            reader_biases=sum(rows for rows, biased in readers if biased),
            writer_biases=(attention.output.bias is not None) + (mlp.down.bias is not None),
            shortcuts=1 if view.middle is None else 2,
            borders=(view.index == 0) + (view.index == view.config.num_hidden_layers - 1),
            kept=sum(p.numel() for part in kept for p in part.parameters())
            + (norm_parameters(attention, qk) if attention.norms and qk < full else 0),
            width=view.width,
        )

    def weights(self, rank: int) -> int:
        """Of the linear layers, shortcuts and borders included."""
        return rank * (self.rows + self.columns + self.shortcuts * rank + self.borders * self.width)

    def parameters(self, rank: int) -> int:
        """All."""
        return self.weights(rank) + self.reader_biases + self.writer_biases * rank + self.kept

"""The plan: what will be done to every module, before any weight changes."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .._utils.present import present
from .._utils.sizes import duration, size_text
from ..errors import option
from .outcomes import change_text, size_rows

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class ModulePlan:
    """One module of one block."""

    block: int
    module: str
    rank: int
    of: int  # rank when dense
    weights: int
    dense_weights: int
    relative_error: float | None = None  # predicted from dense moments; None without moments


@dataclass(frozen=True)
class Plan:
    """Ranks of all modules and what follows from them."""

    model: str
    method: dict[str, Any]
    modules: tuple[ModulePlan, ...]
    counted_weights: int  # what the sparsity is a fraction of
    removed_weights: int
    parameters: int  # of the whole model, before; tied matrices once
    parameters_after: int
    bytes: int  # of all parameters in the dtype written, and of buffers
    bytes_after: int
    kv_bytes_per_token: int
    kv_bytes_per_token_after: int
    peak_memory_bytes: int  # estimate, in addition to the program and its libraries
    seconds: float | None  # estimate; None where no block was timed, see `rankfold.compression.duration.timed`
    # Of the allocation: temperature, scores; what stays as zeros.
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    # What the sparsity counts: how much there is, how much was to go and goes.
    budget: dict[str, Any] = field(default_factory=dict[str, Any])
    source_bytes: int | None = None  # of the weights in their files; None for a model that the caller holds
    calibration: dict[str, Any] | None = None  # description of the tokens it is calibrated on
    gradient_windows: int | None = None  # samples of the one backward pass; None for a method without gradients
    # Of the parameters those that one token meets; None where there are no experts.
    active_parameters: int | None = None
    active_parameters_after: int | None = None
    experts: dict[str, Any] | None = None  # how many there are, how many tokens they want, and with moments saw
    part: str | None = None  # the component, of a model of which one was chosen
    added_products: int = 0  # more matrix products for every token than the dense model has
    # Of a plan for accelerators that are not here: gpu, gpus, memory_bytes, num_samples, max_length,
    # rates_are_measured, allocation (that chose the ranks) and advice (where it does not fit).
    hardware: dict[str, Any] | None = None
    file: dict[str, Any] | None = None  # the GGUF file of which a size was asked for: dtype, bytes

    @property
    def sparsity(self) -> float:
        """Return the fraction of the counted weights that is removed."""
        return self.removed_weights / self.counted_weights

    def ranks(self, block: int) -> dict[str, int]:
        """Return the rank of every module of a block."""
        return {m.module: m.rank for m in self.modules if m.block == block}

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold of it."""
        value = asdict(self)
        for rare in ("hardware", "file"):  # runs are planned for the device they run on, and mostly for no file
            if value[rare] is None:
                del value[rare]
        return value | {"sparsity": self.sparsity, "modules": [*value["modules"]]}

    def table(self) -> "Table":
        """Return a row for every block: the rank of each module, with its predicted relative error."""
        of: dict[str, int] = {}
        for m in self.modules:
            of[m.module] = max(m.of, of.get(m.module, 0))
        predicted = any(m.relative_error is not None for m in self.modules)
        zeros = " by zeros" if "zeros" in self.facts else ""
        part = f", {self.part}" if self.part else ""
        title = f"{self.model}{part}: {self.method['method']}, sparsity {self.sparsity:.4f}{zeros}"
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for name in ("block", *(f"{name}/{rank}" for name, rank in of.items())):
            table.add_column(name, justify="right")
            if predicted and name != "block":
                table.add_column("error", justify="right")
        table.add_column("weights", justify="right", no_wrap=True)
        for block in sorted({m.block for m in self.modules}):
            mine = {m.module: m for m in self.modules if m.block == block}
            cells = [cell for name in of for cell in _cells(mine.get(name))[: 2 if predicted else 1]]
            table.add_row(str(block), *cells, f"{sum(m.weights for m in mine.values()):,}")
        return table

    def summary(self) -> "Table":
        """Return a table of totals, before and after, and of what the run takes."""
        from rich.table import Column, Table

        table = Table("", *(Column(name, justify="right") for name in ("before", "after", "change")))
        for row in self._sizes():
            table.add_row(*row)
        table.add_section()
        for text in self._texts():
            samples = f"{text['num_samples']:,} + {text['held_out']:,} held out"
            table.add_row(f"calibration samples of {text['source']}", "", samples, f"{text['share']:.1%}")
        for what, value in self._costs():
            table.add_row(what, "", value, "")
        if notes := [*self._notes()]:
            table.caption_justify = "left"
            table.caption = "\n".join(notes)
        return table

    def _notes(self) -> Iterator[str]:
        if self.added_products:
            yield (
                f"Every token takes {self.added_products:,} more matrix products than in the dense model. Where "
                f"matrices are small or tokens few, as in decoding, this can be slower than the dense model; "
                f"{option('method', 'rankfold')} and modegpt add no product."
            )
        if caution := self.facts.get("caution"):
            yield caution
        if self.hardware:
            if self.hardware["allocation"] != self.method["allocation"].partition(":")[0]:
                yield (
                    f"Ranks are those of a {self.hardware['allocation']} allocation: the method's own goes by numbers."
                )
            if not self.hardware["rates_are_measured"]:
                yield f"Rates of {self.hardware['gpu']} are predicted; none was measured."
            if self.hardware["advice"]:
                yield self.hardware["advice"]

    def _sizes(self) -> Iterator[Sequence[str]]:
        if self.method["budget"] != "parameters":
            counted, asked = self.budget["counted"], self.budget["asked"]
            yield (
                f"{self._counts()} ({-asked / counted:+.1%} asked)",
                *change_text(counted, counted - self.budget["removed"]),
            )
        what = "counted weights not zero" if "zeros" in self.facts else "counted weights"
        yield what, *change_text(self.counted_weights, self.counted_weights - self.removed_weights)
        if self.budget.get("excess"):
            yield (self.budget["excess"],)
        parameters, weights, cache = size_rows(vars(self))
        yield from (parameters, weights)
        if self.experts:
            active = present(self.active_parameters), present(self.active_parameters_after)
            yield "parameters that a token meets", *change_text(*active)
            # Experts and what surrounds them have one dtype, so that bytes go like parameters.
            item, passive = self.bytes / self.parameters, self.parameters_after - active[1]
            in_bytes = active[0] * item, self.bytes_after - passive * item
            yield "MiB of weights that a token meets", *change_text(*in_bytes, 2**20)
        if self.source_bytes:
            yield "MiB on disk", *change_text(self.source_bytes, self.bytes_after, 2**20)
        if self.file:
            yield f"GGUF file in {self.file['dtype']}", "", size_text(self.file["bytes"])
        yield cache

    def _costs(self) -> Iterator[tuple[str, str]]:
        yield from self._of_experts()
        if self.gradient_windows:
            yield "samples of the one backward pass", f"{self.gradient_windows:,}"
        if self.hardware:
            yield "calibration samples", "{num_samples:,} x {max_length:,} tokens".format(**self.hardware)
            memory = f"{self.peak_memory_bytes / 1e9:.1f} of {self.hardware['memory_bytes'] / 1e9:g} GB"
            yield "peak memory of an accelerator (estimate)", memory
        else:
            yield "peak memory without program and tokenising (estimate)", f"{self.peak_memory_bytes / 2**30:.2f} GiB"
        if self.seconds is not None:
            yield f"time{self._where()} (estimate)", duration(self.seconds)

    def _of_experts(self) -> Iterator[tuple[str, str]]:
        if not self.experts:
            return
        facts = self.experts
        yield "experts of a token", f"{facts['of_a_token']} of {facts['of_a_block']}"
        yield "moment of an expert, one at a time", f"{facts['moment_bytes'] / 2**20:,.1f} MiB"
        if "tokens" in facts:
            tokens = [n for block in facts["tokens"].values() for n in block]
            filled = sum(n > 0 for block in facts["filled"].values() for n in block)
            yield "tokens of an expert, fewest to most", f"{min(tokens):,} to {max(tokens):,}"
            yield f"experts with fewer than {facts['tokens_wanted']:,}, filled up", f"{filled:,} of {len(tokens):,}"

    def _where(self) -> str:
        return f" on {self.hardware['gpus']} x {self.hardware['gpu']}" if self.hardware else ""

    def _counts(self) -> str:
        """Return what the budget counts, and on how long a sequence."""
        context, batch = self.budget.get("context"), self.budget.get("batch")
        if batch:
            return f"{self.budget['counts']} with the cache of {batch:,} x {context:,} tokens"
        return self.budget["counts"] + (f" at {context:,} tokens" if context else "")

    def _texts(self) -> list[dict[str, Any]]:
        """Return what each calibration text gives."""
        if self.calibration is None:
            return []
        return self.calibration.get("texts", [{"held_out": 0, "share": 1.0} | self.calibration])


def _cells(module: ModulePlan | None) -> tuple[str, str]:
    if module is None:
        return "-", ""
    return str(module.rank), "" if module.relative_error is None else f"{module.relative_error:.3f}"

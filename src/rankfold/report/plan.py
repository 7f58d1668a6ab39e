"""The plan: what will be done to every module, before any weight changes."""

from dataclasses import asdict, dataclass, field

from rich.table import Table

from .._utils.present import present
from ..errors import option

__all__ = ["ModulePlan", "Plan"]


@dataclass(frozen=True)
class ModulePlan:
    """One module of one block."""

    block: int
    module: str
    rank: int
    of: int  # rank when dense
    weights: int
    dense_weights: int
    relative_error: float | None  # predicted from dense moments; None without moments


@dataclass(frozen=True)
class Plan:
    """Ranks of all modules and what follows from them."""

    model: str
    method: dict
    modules: tuple[ModulePlan, ...]
    counted_weights: int  # what the sparsity is a fraction of
    removed_weights: int
    parameters: int  # of the whole model, before; tied matrices once
    parameters_after: int
    bytes: int  # of all parameters in the dtype written
    bytes_after: int
    kv_bytes_per_token: int
    kv_bytes_per_token_after: int
    peak_memory_bytes: int  # estimate, beside the program and its libraries
    seconds: float | None  # estimate; None where no block was timed, see `rankfold.compression.duration.timed`
    facts: dict = field(default_factory=dict)  # of the allocation: temperature, scores; what stays as zeros
    budget: dict = field(
        default_factory=dict
    )  # what the sparsity counts: how much there is, how much was to go and goes
    source_bytes: int | None = None  # of the files the weights are read from; None for a model that the caller holds
    calibration: dict | None = None  # description of the tokens it is calibrated on
    gradient_windows: int | None = (
        None  # of these, how many one backward pass runs over; None for a method without gradients
    )
    # Of the parameters those that one token meets; None where there are no experts.
    active_parameters: int | None = None
    active_parameters_after: int | None = None
    experts: dict | None = None  # how many there are, how many tokens they want, and with moments saw
    part: str | None = None  # of a model of which one was chosen
    added_products: int = 0  # more matrix products for every token than the dense model has

    @property
    def sparsity(self) -> float:
        """Reached, of the counted weights."""
        return self.removed_weights / self.counted_weights

    def ranks(self, block: int) -> dict[str, int]:
        return {m.module: m.rank for m in self.modules if m.block == block}

    def to_dict(self) -> dict:
        value = asdict(self)
        value["sparsity"] = self.sparsity
        value["modules"] = [asdict(m) for m in self.modules]
        return value

    def table(self) -> Table:
        """One row per block: rank of each module, with its predicted relative error."""
        names = list(dict.fromkeys(m.module for m in self.modules))
        of = {name: max(m.of for m in self.modules if m.module == name) for name in names}
        zeros = " by zeros" if "zeros" in self.facts else ""
        part = f", {self.part}" if self.part else ""
        title = f"{self.model}{part}: {self.method['method']}, sparsity {self.sparsity:.4f}{zeros}"
        table = Table(title=title, title_justify="left")
        table.add_column("block", justify="right")
        predicted = any(m.relative_error is not None for m in self.modules)
        for name in names:
            table.add_column(f"{name}/{of[name]}", justify="right")
            if predicted:
                table.add_column("error", justify="right")
        table.add_column("weights", justify="right", no_wrap=True)
        for block in sorted({m.block for m in self.modules}):
            mine = {m.module: m for m in self.modules if m.block == block}
            cells = []
            for name in names:
                m = mine.get(name)
                error = "" if m is None or m.relative_error is None else f"{m.relative_error:.3f}"
                cells += ["-" if m is None else str(m.rank), error][: 2 if predicted else 1]
            table.add_row(str(block), *cells, f"{sum(m.weights for m in mine.values()):,}")
        return table

    def summary(self) -> Table:
        """Totals before and after."""
        table = Table(show_header=True)
        for name in ("", "before", "after", "change"):
            table.add_column(name, justify="right" if name else "left")

        def row(label, before, after, unit=1, form=",.0f"):
            change = f"{(after - before) / before:+.1%}" if before else ""
            table.add_row(label, f"{before / unit:{form}}", f"{after / unit:{form}}", change)

        if self.method["budget"] != "parameters":
            counted, removed = self.budget["counted"], self.budget["removed"]
            row(f"{self._counts()} ({-self.budget['asked'] / counted:+.1%} asked)", counted, counted - removed)
        what = "counted weights not zero" if "zeros" in self.facts else "counted weights"
        row(what, self.counted_weights, self.counted_weights - self.removed_weights)
        if self.budget.get("excess"):
            table.add_row(self.budget["excess"], "", "", "")
        row("parameters", self.parameters, self.parameters_after)
        row("MiB of weights", self.bytes, self.bytes_after, 2**20, ",.1f")
        if self.experts:
            row("parameters that a token meets", self.active_parameters, self.active_parameters_after)
            row("MiB of weights that a token meets", *self._active_bytes(), 2**20, ",.1f")
        if self.source_bytes:
            row("MiB on disk", self.source_bytes, self.bytes_after, 2**20, ",.1f")
        row("KV-cache bytes per token", self.kv_bytes_per_token, self.kv_bytes_per_token_after)
        table.add_section()
        for text in self._texts():
            windows = f"{text['num_samples']:,} + {text['held_out']:,} held out"
            table.add_row(f"calibration windows of {text['source']}", "", windows, f"{text['share']:.1%}")
        for what, value in self._experts():
            table.add_row(what, "", value, "")
        if self.gradient_windows:
            table.add_row("windows of the one backward pass", "", f"{self.gradient_windows:,}", "")
        table.add_row("peak memory beside the program (estimate)", "", f"{self.peak_memory_bytes / 2**30:.2f} GiB", "")
        if self.seconds is not None:
            table.add_row("time (estimate)", "", f"{self.seconds:.0f} s", "")
        if self.added_products:
            table.caption = self._slower()
            table.caption_justify = "left"
        return table

    def _slower(self) -> str:
        """The warning about speed of a method that splits matrices."""
        return (
            f"Every token takes {self.added_products:,} more matrix products than in the dense model. Where matrices are small "
            f"or tokens few, as in decoding, this can be slower than the dense model; {option('method', 'rankfold')} and "
            "modegpt add no product."
        )

    def _active_bytes(self) -> tuple[float, float]:
        """Experts and what surrounds them have one dtype, so that bytes go like parameters."""
        item = self.bytes / self.parameters
        passive = self.parameters_after - present(self.active_parameters_after)
        return present(self.active_parameters) * item, self.bytes_after - passive * item

    def _experts(self) -> list[tuple[str, str]]:
        """What there is to say about experts."""
        if not self.experts:
            return []
        facts = self.experts
        found = [
            ("experts of a token", f"{facts['of_a_token']} of {facts['of_a_block']}"),
            ("moment of an expert, one at a time", f"{facts['moment_bytes'] / 2**20:,.1f} MiB"),
        ]
        if "tokens" in facts:
            tokens = [n for block in facts["tokens"].values() for n in block]
            filled = sum(n > 0 for block in facts["filled"].values() for n in block)
            found.append(("tokens of an expert, fewest to most", f"{min(tokens):,} to {max(tokens):,}"))
            found.append(
                (f"experts with fewer than {facts['tokens_wanted']:,}, filled up", f"{filled:,} of {len(tokens):,}")
            )
        return found

    def _counts(self) -> str:
        """What the budget counts, and on how long a sequence."""
        context, batch = self.budget.get("context"), self.budget.get("batch")
        if batch:
            return f"{self.budget['counts']} with the cache of {batch:,} x {context:,} tokens"
        return self.budget["counts"] + (f" at {context:,} tokens" if context else "")

    def _texts(self) -> list[dict]:
        """What each calibration text gives."""
        if self.calibration is None:
            return []
        return self.calibration.get("texts", [{"held_out": 0, "share": 1.0} | self.calibration])

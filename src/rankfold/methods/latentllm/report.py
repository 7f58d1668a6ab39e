"""What is said about one decomposed module in the run record."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Report:
    """Facts of one module; what does not apply is None and left out of the record.

    Attributes:
        rank, of: the rank, and the one that stands for the dense module.
        form: how the factors were fitted.
        relative_error: RMS error over RMS of what the form approximates (the module's output; scores; the output of
            single heads; of the MLP), on the moments it was fitted to. Of the stored numbers where they are quantised.
        loss_history: of iterative forms.
        training_error: of the joint up-down form, on the rows it was fitted to.
        form_errors: form -> error of the MLP on rows that neither form was fitted to; local moments are of all tokens.
        nonzeros: values of the sparse part.
        weights, planned_weights, planned_rank: stored, and before the ranks were chosen anew by spectra.
        clamped: the moment was indefinite beyond the ridge and its negative eigenvalues were set to zero.
        bits, quantisation: of the stored factors, and whether they are ``refined``, or ``rounded`` where refining them
            did not lower the error.
        rounded_error: the error if all factors that share it were rounded and none refined.
        junction_condition: of the block the junction inverted.
        head_condition: the worst of those of the per-head junction.
    """

    rank: int
    of: int
    form: str
    relative_error: float
    loss_history: tuple[float, ...] | None = None
    training_error: float | None = None
    form_errors: dict[str, float] | None = None
    nonzeros: int | None = None
    weights: int | None = None
    planned_rank: int | None = None
    planned_weights: int | None = None
    clamped: bool | None = None
    bits: int | None = None
    quantisation: str | None = None
    rounded_error: float | None = None
    junction_condition: float | None = None
    head_condition: float | None = None

    def to_dict(self) -> dict:
        """For the run record."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {name: value for name, value in values.items() if value is not None}
        return values | ({"loss_history": list(self.loss_history)} if self.loss_history is not None else {})

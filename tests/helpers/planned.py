"""What a plan says a compressed model will cost, by other means than counting it."""

from rankfold.compression.budget import attended_macs
from rankfold.evaluation.complexity import formula_macs
from rankfold.models.dense_model import DenseModel
from rankfold.report.plan import Plan


def planned_macs(source: DenseModel, plan: Plan, tokens: int) -> dict[str, int]:
    """What `formula_macs` should say of the model that a plan leads to, unless more is multiplied than stored (junction lu)."""
    parts = formula_macs(source.model, tokens)
    views, saved = [source.meta_block(index) for index in range(len(source))], 0
    for m in plan.modules:
        full, left = (attended_macs(views[m.block], m.module, rank) for rank in (m.of, m.rank))
        saved += full - left
    linear, attention = parts["linear"] - tokens * plan.removed_weights, parts["attention"] - tokens * tokens * saved
    return {"linear": linear, "attention": attention, "total": linear + attention}

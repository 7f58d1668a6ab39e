"""`rankfold plan`"""

from pathlib import Path
from typing import Annotated

from . import common as c
from . import options as o
from .calibration import CalibrationOptions
from .components import methods_of_components, opened_components
from .config import Run


@o.expanded
def command(
    model: o.Model,
    *,
    config: Run = None,
    component: o.Component = None,
    components: o.Components = None,
    revision: o.Revision = None,
    device: o.Device = "auto",
    what: o.MethodOptions,
    text: CalibrationOptions,
    moments: o.Moments = None,
    output: Annotated[Path | None, o.of_output("-o", "--output", help="Also save the plan as JSON.")] = None,
    dtype: o.Written = "auto",
    json: o.Json = False,
) -> None:
    """Show what `compress` would do, without doing it.

    Ranks, errors, sizes, memory and time.

    \b
    rankfold plan ./my-model --method modegpt --sparsity 0.3 --moments moments
    rankfold plan ./my-model --sparsity 0.3 --calibration pydoc --num-samples 16 -o plan.json
    """
    model = o.at_revision(model, revision)
    chosen = what.parse() if components is None else methods_of_components(components, what, config)
    if output is not None:
        from .._utils.files import check_output

        check_output(output, "name")
    if components is not None:
        opened = opened_components(model, chosen, text, config, dtype, device)
        return plan_components(opened, output, json, "sequential")
    from .. import pipeline
    from ..calibration.store import MomentStore
    from ..compression.duration import timed
    from ..models.opening import open_model

    source, tokens = open_model(model, dtype=dtype, device=device, component=component), None
    store = MomentStore.open(moments) if moments else None
    if store is None:
        tokens = text.load(source)
        store = predicted(source, chosen, tokens)
    the_plan = pipeline.plan(source, chosen, tokens, moments=store)
    show([timed(the_plan, source, tokens.describe(), "sequential") if tokens else the_plan], output, json)


def predicted(source, method, tokens):
    """Moments that errors can be predicted from, for methods that take any."""
    from .. import pipeline
    from ..compression.importance import needed

    if "one-pass" not in method.modes:
        return None
    return pipeline.calibrate(source, tokens, statistics=needed(source, method))


def plan_components(opened: list[tuple], output: Path | None, as_json: bool, mode: str) -> None:
    """Show what would be done to each component; what writes is measured beside the dense tower, which it will not be."""
    from .. import pipeline
    from ..compression.duration import timed

    plans = []
    for source, method, tokens in opened:
        the_plan = pipeline.plan(source, method, tokens, moments=predicted(source, method, tokens))
        plans.append(timed(the_plan, source, tokens.describe(), mode))
    show(plans, output, as_json)


def show(plans: list, output: Path | None, as_json: bool) -> None:
    """Print a plan, or those of several components, and save it where asked."""
    first, *more = (plan.to_dict() for plan in plans)
    value = {"components": {plan["part"]: plan for plan in (first, *more)}} if more else first
    if output is not None:
        from .._utils.files import write_json

        write_json(output, value)
    c.emit(
        value, as_json, lambda out: out.print(*(table for plan in plans for table in (plan.table(), plan.summary())))
    )

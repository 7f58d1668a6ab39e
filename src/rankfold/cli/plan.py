"""`rankfold plan`"""

from pathlib import Path
from typing import Annotated

from . import options as o
from .request import Request, show_plans
from .rules import Excludes, Needs

Gpu = Annotated[
    str | None,
    o.of_measurements(
        metavar="80GB|NAME",
        help="Plan for GPUs that are not here, by config.json alone: memory of each, or h100, a100, ...",
    ),
    Excludes(
        ("calibration", "seed", "text_column", "shards", "component", "components", "moments", "device"),
        "--gpu plans by the shapes of a config alone, {} would be ignored; leave one of them out",
    ),
]
Gpus = Annotated[int, o.of_measurements(help="GPUs that share the calibration samples; with --gpu."), Needs(("gpu",))]


@o.expanded
def command(
    request: Request,
    gpu: Gpu = None,
    gpus: Gpus = 1,
    output: Annotated[Path | None, o.of_output("-o", "--output", help="Also save the plan as JSON.")] = None,
    json: o.Json = False,
) -> None:
    """Show what `compress` would do, without doing it.

    Ranks, errors, sizes, memory and time.

    \b
    rankfold plan ./my-model --method modegpt --sparsity 0.3 --moments moments
    rankfold plan ./my-model --sparsity 0.3 --calibration pydoc --num-samples 16 -o plan.json
    rankfold plan ./only-a-config --sparsity 0.3 --gpu 80GB --gpus 8
    """
    methods = request.methods()
    if output is not None:
        from .._utils.files import check_output

        check_output(output, "name")
    plans = request.plans(methods, "sequential") if gpu is None else [request.predicted(methods, gpu, gpus)]
    show_plans(plans, output, json)

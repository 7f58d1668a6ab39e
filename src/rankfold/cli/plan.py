"""`rankfold plan`"""

from pathlib import Path
from typing import Annotated

from . import options as o
from .request import Request, show_plans


@o.expanded
def command(
    request: Request,
    output: Annotated[Path | None, o.of_output("-o", "--output", help="Also save the plan as JSON.")] = None,
    json: o.Json = False,
) -> None:
    """Show what `compress` would do, without doing it.

    Ranks, errors, sizes, memory and time.

    \b
    rankfold plan ./my-model --method modegpt --sparsity 0.3 --moments moments
    rankfold plan ./my-model --sparsity 0.3 --calibration pydoc --num-samples 16 -o plan.json
    """
    methods = request.methods()
    if output is not None:
        from .._utils.files import check_output

        check_output(output, "name")
    show_plans(request.plans(methods, "sequential"), output, json)

"""`rankfold push`"""

from pathlib import Path
from typing import Annotated

import typer

from . import common as c
from . import options as o


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder that `rankfold compress` or `recover` wrote.", rich_help_panel="Model")
    ],
    repository: Annotated[
        str, typer.Argument(help="OWNER/NAME on the hub; made where there is none.", rich_help_panel="Output")
    ],
    private: Annotated[bool, typer.Option("--private", help="Make it private, where it is made.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Upload a model that is marked as damaged.")] = False,
    json: o.Json = False,
) -> None:
    """Share a checkpoint on the hub, with its model card.

    \b
    rankfold push small my-name/SmolLM2-135M-rankfold-0.3
    """
    from ..exports import push

    address = push(checkpoint, repository, private=private, force=force)
    c.emit({"repository": repository, "commit": address}, json, lambda out: out.print(address))

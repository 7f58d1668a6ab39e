"""The command line: every command parses, calls one library function, prints."""

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of ``rankfold``: 0 on success, 2 on an error of the user's input, 130 when interrupted."""
    from ..errors import RankfoldError
    from .app import app

    try:
        app(standalone_mode=True)
    except RankfoldError as error:
        print(f"rankfold: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("rankfold: interrupted; an unfinished run continues when it is started again", file=sys.stderr)
        sys.exit(130)

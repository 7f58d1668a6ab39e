"""What other libraries raise, as an error of rankfold."""

import contextlib
from collections.abc import Generator

from ..errors import RankfoldError, first_line


@contextlib.contextmanager
def reporting(kind: type[RankfoldError], what: str, advice: str = "") -> Generator[None]:
    """Raise ``kind`` with ``what (what it says); advice`` for whatever another library raises in the block.

    A damaged file ends in whatever type the code that meets it raises, plain ones too; and errors of networks share no
    base.
    """
    try:
        yield
    except (RankfoldError, MemoryError):
        raise
    except Exception as error:
        raise kind(f"{what} ({first_line(error)})" + (f"; {advice}" if advice else "")) from error

"""What other libraries raise, as an error of rankfold."""

import contextlib
from collections.abc import Generator

from ..errors import CheckpointError, RankfoldError, first_line

LOG_IN = "log in with `hf auth login`"


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


@contextlib.contextmanager
def asking_hub(repository: str, what: str, advice: str) -> Generator[None]:
    """As :func:`reporting`, of a repository of the hub: a refusal begins with a number, so its type is told."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    with reporting(CheckpointError, what, advice):
        try:
            yield
        except GatedRepoError as error:
            page = f"https://huggingface.co/{repository}"
            raise CheckpointError(f"{what} (it is gated); accept its conditions at {page} and {LOG_IN}") from error
        except RepositoryNotFoundError as error:
            raise CheckpointError(
                f"{what} (there is no such repository, or it is private); check the name, or {LOG_IN}"
            ) from error
        except RevisionNotFoundError as error:
            raise CheckpointError(
                f"{what} (it has no such revision); give a branch, a tag or a commit of it, or leave it out"
            ) from error
        except HfHubHTTPError as error:
            if error.response.status_code not in (401, 403):
                raise
            raise CheckpointError(
                f"{what} (there is no token, or it does not allow this); {LOG_IN}, with a token that may"
            ) from error

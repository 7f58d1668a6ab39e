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
    """As :func:`reporting`, of a repository of the hub: a refusal begins with a number, so its type is told.

    Args:
        repository: ``owner/name``, with ``datasets/`` before it where it is one of data.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def answer_in(error: BaseException | None) -> HfHubHTTPError | None:
        """Return what the hub has answered; the client takes some of it for an error of the connection."""
        while error is not None and not isinstance(error, HfHubHTTPError):
            error = error.__cause__
        return error

    with reporting(CheckpointError, what, advice):
        try:
            yield
        except RankfoldError:
            raise
        except Exception as error:
            answer = answer_in(error)
            if isinstance(answer, GatedRepoError):
                page = f"https://huggingface.co/{repository}"
                told = f"it is gated); accept its conditions at {page} and {LOG_IN}"
            elif isinstance(answer, RepositoryNotFoundError):
                told = f"there is no such repository, or it is private); check the name, or {LOG_IN}"
            elif isinstance(answer, RevisionNotFoundError):
                told = "it has no such revision); give a branch, a tag or a commit of it, or leave it out"
            elif isinstance(answer, EntryNotFoundError):
                told = "it has no such file); check the name"
            elif answer is not None and answer.response.status_code in (401, 403):
                told = f"there is no token, or it does not allow this); {LOG_IN}, with a token that may"
            elif answer is not None and answer.response.status_code in (429, *range(500, 600)):
                told = f"{first_line(answer)}); try again later"
            else:
                raise
            raise CheckpointError(f"{what} ({told}") from error

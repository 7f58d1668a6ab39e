"""The command line: every command parses, calls one library function, prints."""

import io
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

INTERRUPTED = "interrupted; an unfinished run continues when it is started again"


def main() -> None:
    """Run ``rankfold``: exit with 0 on success, 2 on an error of the user's input or the machine, 130 when interrupted.

    1 where `rankfold compare` has finished and some of its rows failed; 3 where training gained nothing; 141 where
    nobody reads on what is printed.
    """
    if _is_other_process():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # Python has none where the shell closed it
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives
    # Neither ignored, as under nohup, nor a caller's own.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _end_if_interrupted
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        code = _run(sys.argv[1:] or ["--help"])
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except (BrokenPipeError, SystemExit) as error:
        # typer and rich exit with 1 then, which is another thing here.
        if not isinstance(error if isinstance(error, OSError) else error.__context__, BrokenPipeError):
            raise
        os._exit(141)  # what a shell has of `git` and `cat` there; Python would fail to flush
    except OSError as error:
        from .command import explain

        code = _refuse(explain(error) or str(error))
    if code == 130:
        _refuse(INTERRUPTED)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; end at once inside an import, which may swallow it or raise another error in its place.

    Ending there is safe: a run that is killed at any moment continues.
    """
    inner = frame
    while inner is not None and not inner.f_code.co_filename.startswith("<frozen importlib"):
        inner = inner.f_back
    if inner is None:
        signal.default_int_handler(number, frame)
    _end()


def _end_if_interrupted(unraisable: "sys.UnraisableHookArgs") -> None:
    """End where Python would drop the KeyboardInterrupt: in `__del__`, or in a callback of a weak reference or of C."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)


def _end() -> NoReturn:
    """Print that the run was interrupted, and end at once."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the cursor, which a bar hides
    _refuse(INTERRUPTED)
    os._exit(130)


def _run(arguments: list[str]) -> int:
    from .._utils.processes import joined
    from ..errors import RankfoldError
    from .app import app
    from .command import UsageError, explain, usage

    try:
        with joined():
            return app(arguments, prog_name="rankfold", standalone_mode=False) or 0
    except RankfoldError as error:
        return _refuse(str(error))
    except UsageError as error:
        return _refuse(usage(error))
    except (MemoryError, RuntimeError) as error:
        reason = explain(error)
        if reason is None:  # a bug
            raise
        return _refuse(reason)


def _refuse(message: str) -> int:
    """Print one line, whatever is in the names it quotes, by the first of several processes; return the exit code 2."""
    if _is_other_process():
        return 2
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message.strip())
    try:
        print(f"rankfold: {line}", file=sys.stderr)
    except OSError as error:  # of a full disk that stderr goes to, nobody can be told
        if isinstance(error, BrokenPipeError):
            raise
    return 2


def _is_other_process() -> bool:
    """Tell whether this is one of several processes that `torchrun` has launched, and not the first, which prints."""
    return "LOCAL_RANK" in os.environ and os.environ.get("RANK", "0") != "0"

"""The ringcore command line."""

from __future__ import annotations

import io
import sys

__all__ = ["main"]

_LOG_OPTIONS = ("--log-level", "--log-format")


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Exit code 2 for an error in the command's arguments, 1 for every other failure."""
    from ringcore.cli.app import make_app
    from ringcore.errors import ConfigError, InvalidRequestError, RingcoreError, UnknownOptionError

    _escape_unencodable()
    try:
        words = _log_options_first(sys.argv[1:] if args is None else args)
        make_app(words)(words)
    except (ConfigError, InvalidRequestError, UnknownOptionError) as error:
        sys.exit(_report(error, 2))
    except RingcoreError as error:
        sys.exit(_report(error, 1))


def _log_options_first(args: list[str]) -> list[str]:
    """They are options of the whole command, and are found after its name too, up to a "--"."""
    end = args.index("--") if "--" in args else len(args)
    first, others, rest = list[str](), list[str](), iter(args[:end])
    for arg in rest:
        if arg in _LOG_OPTIONS:
            first += [arg, *([value] if (value := next(rest, None)) is not None else [])]
        else:
            (first if arg.partition("=")[0] in _LOG_OPTIONS else others).append(arg)
    return first + others + args[end:]


def _escape_unencodable() -> None:
    """Writes characters that the terminal's encoding lacks as escapes, in place of a UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(error: Exception, exit_code: int) -> int:
    print(f"ringcore: {' '.join(str(error).split())}", file=sys.stderr)
    return exit_code

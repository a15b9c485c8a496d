"""The ringcore command line."""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Exit code 2 for an error in the command's arguments, 1 for every other failure."""
    from ringcore.cli.app import make_app
    from ringcore.errors import ConfigError, InvalidRequestError, RingcoreError, UnknownOptionError

    _escape_unencodable()
    try:
        make_app()(args)
    except (ConfigError, InvalidRequestError, UnknownOptionError) as error:
        sys.exit(_report(error, 2))
    except RingcoreError as error:
        sys.exit(_report(error, 1))


def _escape_unencodable() -> None:
    """Writes characters that the terminal's encoding lacks as escapes, in place of a UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(error: Exception, exit_code: int) -> int:
    print(f"ringcore: {' '.join(str(error).split())}", file=sys.stderr)
    return exit_code

"""The command `nanovllm`: its parser, and the dispatch to one file a subcommand."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from nanovllm import __version__
from nanovllm.cli.errors import in_words
from nanovllm.cli.suggestions import SuggestingParser

# Module of each command, imported when the command is given; the list of commands imports all.
COMMANDS = {
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "run-batch": "run_batch",
    "models": "models",
    "pull": "pull",
    "rm": "pull",
    "cache": "cache",
    "fit": "fit",
    "ps": "servers",
    "stop": "servers",
    "bench": "bench",
    "calibrate": "simulate",
    "simulate": "simulate",
    "timeline": "timeline",
    "tune": "tune",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 if a request ended with an error, 2 for bad input."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        _parser().print_help(sys.stderr)
        return 2
    options = _parser(given).parse_args(given)
    atexit.register(gc.freeze)  # Python's last collection would scan all of torch for a second
    logging.getLogger("huggingface_hub").propagate = False  # it has its own handler
    logging.basicConfig(format="nanovllm: %(message)s", handlers=[_CurrentStderr()])
    is_verbose = options.verbose or sys.stderr.isatty()
    logging.getLogger("nanovllm").setLevel(logging.INFO if is_verbose else logging.WARNING)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader of standard output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        if options.verbose:
            raise
        print(f"nanovllm: error: {in_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which a chat replaces to print above its prompt."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _parser(arguments: Sequence[str] = ()) -> SuggestingParser:
    """Build the parser of the command in the first argument, or of all commands without one."""
    parser = SuggestingParser(prog="nanovllm", description="Inference for the language models of transformers.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS:
        file = import_module(f"nanovllm.cli.{COMMANDS[name]}")
        getattr(file, f"add_{name.replace('-', '_')}_command")(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())

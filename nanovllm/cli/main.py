"""The command `nanovllm`: its parser, and the dispatch to one file a subcommand."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from nanovllm import __version__
from nanovllm.cli.bench import add_bench_command
from nanovllm.cli.chat import add_chat_command
from nanovllm.cli.errors import in_words
from nanovllm.cli.generate import add_generate_command
from nanovllm.cli.models import add_models_command
from nanovllm.cli.run_batch import add_run_batch_command
from nanovllm.cli.serve import add_serve_command
from nanovllm.cli.simulate import add_calibrate_command, add_simulate_command
from nanovllm.cli.suggestions import SuggestingParser
from nanovllm.cli.timeline import add_timeline_command
from nanovllm.cli.tune import add_tune_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 if a request ended with an error, 2 for bad input."""
    options = _parser().parse_args(arguments)
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
    """Writes to what standard error is now: above the prompt of a chat while that is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _parser() -> SuggestingParser:
    parser = SuggestingParser(prog="nanovllm", description="Inference for the language models of transformers.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in (
        add_generate_command,
        add_chat_command,
        add_serve_command,
        add_run_batch_command,
        add_models_command,
        add_bench_command,
        add_calibrate_command,
        add_simulate_command,
        add_timeline_command,
        add_tune_command,
    ):
        add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())

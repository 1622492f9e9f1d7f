"""The command `nanovllm run-batch`: OpenAI's batch file in, its output file out."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from nanovllm.cli.early_checks import check_output, check_start
from nanovllm.cli.flags import (
    add_adapter_flag,
    add_model_argument,
    add_model_flags,
    engine_options,
    take_model_argument,
)
from nanovllm.cli.standard_input import read_standard_input
from nanovllm.features.option_checks import utf8
from nanovllm.serving.server.batch_files import ENDPOINTS, BatchRequest, answered_ids, read_batch
from nanovllm.serving.server.preparing import check_packages

DESCRIPTION = f"""
Answer a file in OpenAI's batch format: each line has custom_id, method, url ({", ".join(ENDPOINTS)}) and body. Each
line of the output has custom_id and the response, in the order in which they end. Exit status 1 if a line failed.
"""


def add_run_batch_command(commands: Any) -> None:
    """Register the subcommand."""
    batch = commands.add_parser(
        "run-batch", help="answer a file in OpenAI's batch format", description=DESCRIPTION, allow_abbrev=False,
        usage="nanovllm run-batch -i FILE -o FILE [options] [MODEL]",
    )  # fmt: skip
    batch.add_argument("-i", "--input-file", metavar="FILE", required=True, help="requests, - for standard input")
    batch.add_argument("-o", "--output-file", metavar="FILE", required=True, help="responses; a new file")
    batch.add_argument(
        "--error-file", metavar="FILE",
        help="responses of lines that failed, as OpenAI has them apart (default: in the output file)",
    )  # fmt: skip
    batch.add_argument(
        "--resume", action="store_true", help="go on with files that exist: leave out the lines that have a response"
    )
    batch.add_argument("--served-model-name", metavar="NAME", help="name of the model in the lines' bodies")
    add_adapter_flag(batch, "the model NAME of lines; may be repeated")
    add_model_argument(batch)
    batch.set_defaults(run=_run_batch)
    add_model_flags(batch, leave_out={"max_queue"})


def _run_batch(options: argparse.Namespace) -> int:
    check_packages("run-batch")
    take_model_argument(options)
    engine_given = engine_options(options)
    requests = _read(options.input_file)
    check_output("--output-file", str(Path(options.output_file).expanduser()))
    if options.error_file is not None:
        check_output("--error-file", str(Path(options.error_file).expanduser()))
    outputs = [Path(name).expanduser() for name in (options.output_file, options.error_file) if name is not None]
    for path in outputs:
        if path.exists() and not options.resume:
            raise ValueError(f"{path} exists. Go on with it by --resume, or name another file.")
    answered = set().union(*map(answered_ids, outputs))
    left = [request for request in requests if request.custom_id not in answered]
    if not left:
        print(f"nanovllm: all {len(requests)} lines have a response", file=sys.stderr)
        return 0
    check_start(options, engine_given)
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("a", encoding="utf-8")) for path in outputs]
        return _answer(left, files, options, engine_given)


def _read(name: str) -> list[BatchRequest]:
    given = read_standard_input() if name == "-" else utf8(name, Path(name).expanduser().read_bytes())
    return read_batch(given.split("\n"))


def _answer(
    requests: Sequence[BatchRequest], files: Sequence[TextIO], options: argparse.Namespace, engine_given: dict[str, Any]
) -> int:
    """Answer the requests; responses go to the first file, failed ones to the last."""
    from nanovllm.serving.async_llm import AsyncLLM  # imports torch
    from nanovllm.serving.server.batch import BatchAnswer, batch_settings, run_batch

    settings = batch_settings(options.served_model_name, dict(options.adapter))
    engine = AsyncLLM(options.model, tokenizer=options.tokenizer, **engine_given)
    counts: Counter[bool] = Counter()  # number of lines by whether they failed
    with tqdm(total=len(requests), desc="Lines", disable=not sys.stderr.isatty()) as bar:

        def write(answer: BatchAnswer) -> None:
            has_failed = answer.status >= 400
            print(answer.line, file=files[-1] if has_failed else files[0], flush=True)
            counts[has_failed] += 1
            bar.update()

        try:
            asyncio.run(run_batch(engine, settings, requests, write, model=options.model))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            left = len(requests) - counts.total()
            print(f"nanovllm: {counts[False]} lines answered, {counts[True]} failed, {left} left", file=sys.stderr)
    return int(counts[True] > 0)

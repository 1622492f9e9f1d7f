"""The command `nanovllm generate`: prompts in, answers out as text or JSON lines, each when it finishes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanovllm.cli.answers import AnswerWriter
from nanovllm.cli.display import print_answer
from nanovllm.cli.early_checks import check_start
from nanovllm.cli.flags import add_model_flags, engine_options
from nanovllm.cli.prompt_files import Request, read_requests
from nanovllm.cli.sampling_flags import (
    adapter_name,
    add_sampling_flags,
    add_timeout_flag,
    check_sampling,
    load_llm,
    sampling_options,
    sampling_params,
)
from nanovllm.config import MAX_PRIORITY, integer, real
from nanovllm.features.interrupts import InterruptsHeld

if TYPE_CHECKING:
    from nanovllm.features.sampling_params import SamplingParams
    from nanovllm.observability.trace_writer import TraceWriter
    from nanovllm.serving.llm import LLM

DESCRIPTION = """
Answer prompts. A text goes through the chat template of a model that has one, as one message of a user; --raw
completes it as it stands. What standard input holds is one prompt, or is appended to the prompts given as arguments:
cat article.txt | nanovllm generate "Summarise:". Under cron, or in a loop that reads standard input itself,
add < /dev/null.
"""


def add_generate_command(commands: Any) -> None:
    """Register the subcommand."""
    generate = commands.add_parser(
        "generate", help="answer prompts", description=DESCRIPTION, allow_abbrev=False,
        usage="nanovllm generate [options] [PROMPT ...]",
    )  # fmt: skip
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; standard input is appended to each")
    generate.add_argument("--file", metavar="FILE", help="read prompts from FILE instead, - for standard input")
    forms = generate.add_mutually_exclusive_group()
    forms.add_argument(
        "--format", choices=("text", "lines", "jsonl"),
        help="format of file or standard input: text is one prompt (the default of standard input), lines one a line "
        '(that of files), jsonl one JSON value a line (that of *.jsonl): a string, token ids, or an object with '
        '"prompt" or "messages" and any sampling options, "priority", "timeout", or "id" or "custom_id", which its '
        "answer repeats",
    )  # fmt: skip
    forms.add_argument(
        "--lines", dest="format", action="store_const", const="lines", help="each line is a prompt: --format lines"
    )
    templates = generate.add_mutually_exclusive_group()
    templates.add_argument("--raw", action="store_true", help="complete texts as they stand, without a chat template")
    templates.add_argument("--chat", action="store_true", help="refuse a model that has no chat template")
    generate.add_argument("--system", metavar="TEXT", help="system prompt, for texts and the chat template")
    generate.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="a picture before each text; may be given again"
    )
    generate.add_argument("--json", action="store_true", help="print one JSON object a line instead of text")
    generate.add_argument(
        "--as-completed", action="store_true",
        help="print each answer when it ends, instead of in the order of the prompts; request_id counts the prompts",
    )  # fmt: skip
    generate.add_argument(
        "--priority", type=int, default=0, metavar="INT",
        help="priority of requests, lower runs first; a jsonl request may set its own (default 0)",
    )  # fmt: skip
    generate.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=None,
        help="show a progress bar (default: for several prompts, if the terminal does not show the answers)",
    )  # fmt: skip
    generate.add_argument(
        "--trace", metavar="FILE", help="write a trace of all requests and steps to FILE; see `nanovllm timeline`"
    )
    generate.set_defaults(run=_generate)
    add_timeout_flag(generate)
    add_sampling_flags(generate)
    add_model_flags(generate)


def _generate(options: argparse.Namespace) -> int:
    sampling = sampling_options(options)
    adapter = adapter_name(options)
    if options.raw and options.system is not None:
        raise ValueError("--system is a message of the chat template, which --raw leaves out. Give one of the two.")
    requests = read_requests(options.prompts, options.file, options.format)
    _check_templates(requests, options)
    own = [_own_options(number, request, sampling, options) for number, request in enumerate(requests, 1)]
    check_start(options, engine_options(options))  # a refusal must not truncate an earlier trace
    writer = AnswerWriter(requests, as_json=options.json, is_ordered=not options.as_completed)
    with _tracing(options.trace) as trace, load_llm(options, trace) as llm:
        prompts = [_as_prompt(llm, request, options) for request in requests]
        params = [sampling_params(given, llm) for given, _, _ in own]
        priorities = [priority for _, priority, _ in own]
        timeouts = [timeout for _, _, timeout in own]
        if len(prompts) == params[0].n == 1 and not options.json:
            return _stream(llm, prompts[0], params[0], priority=priorities[0], timeout=timeouts[0], adapter=adapter)
        each = {"priority": priorities, "timeout": timeouts, "adapter": adapter}
        return _answer_all(llm, prompts, params, writer, progress=_shows_progress(options, len(prompts)), **each)


def _own_options(
    number: int, request: Request, sampling: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], int, float | None]:
    """Sampling options, priority and timeout of one request; raises ValueError that names it."""
    given = dict(request.options)
    priority = given.pop("priority", options.priority)
    timeout = given.pop("timeout", options.timeout)
    given = sampling | given
    try:
        integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        if timeout is not None and real("timeout", timeout, 0.0, float("inf")) == 0.0:
            raise ValueError("timeout is 0; it must be a number of seconds above 0.")
        check_sampling(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"request {number}: {error}" if request.options else str(error)) from error
    if not options.json and (given.get("logprobs") is not None or given.get("prompt_logprobs") is not None):
        raise ValueError(
            "log-probabilities are printed with --json only. Add it, or leave --logprobs and --prompt-logprobs out."
        )
    return given, priority, timeout


def _check_templates(requests: Sequence[Request], options: argparse.Namespace) -> None:
    """Raise ValueError for chat template flags without effect on a request."""
    for path in options.image:
        if not os.path.isfile(path):
            raise ValueError(f"--image {path}: there is no such file.")
    for number, request in enumerate(requests, 1):
        if isinstance(request.prompt, str):
            continue
        for flag in ("system", "image"):
            if getattr(options, flag) not in (None, []):
                kind = "a conversation, which has its own messages" if request.is_conversation else "token ids"
                raise ValueError(f"--{flag} is for texts, but request {number} is {kind}. Leave --{flag} out.")
        if options.chat and not request.is_conversation:
            raise ValueError(f"--chat applies the chat template to text, not to {request.prompt!r}. Leave --chat out.")


def _tracing(path: str | None) -> AbstractContextManager[TraceWriter | None]:
    if path is None:
        return nullcontext()
    from nanovllm.observability.trace_writer import TraceWriter

    return TraceWriter(path)


def _as_prompt(llm: LLM, request: Request, options: argparse.Namespace) -> Any:
    """Apply the model's chat template, if any, to messages, and without --raw to texts; token ids stay unchanged."""
    given = request.prompt
    if request.is_conversation:
        return llm.apply_chat_template(given)[0]
    if not isinstance(given, str):
        return given
    must_chat = options.chat or options.system is not None
    if options.raw or not (must_chat or getattr(llm.tokenizer, "chat_template", None)):
        return {"prompt": given, "multi_modal_data": {"image": options.image}} if options.image else given
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    parts = [*({"type": "image", "image": path} for path in options.image), {"type": "text", "text": given}]
    return llm.apply_chat_template([*system, {"role": "user", "content": parts if options.image else given}])[0]


def _shows_progress(options: argparse.Namespace, num_prompts: int) -> bool:
    if options.progress is not None:
        return bool(options.progress)
    return num_prompts > 1 and sys.stderr.isatty() and not sys.stdout.isatty()


def _stream(llm: LLM, prompt: Any, params: SamplingParams, **options: Any) -> int:
    """Stream the text of one prompt to the terminal; an interrupt keeps the printed text."""
    shown = ""
    with closing(llm.stream(prompt, params, **options)) as outputs:  # type: ignore[type-var]
        try:
            for output in outputs:
                text = output.outputs[0].text
                print_answer(text[len(shown) :], end="")
                shown = text
        finally:
            print(flush=True)
    return _report_error(output.error)


def _answer_all(
    llm: LLM,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    writer: AnswerWriter,
    *,
    progress: bool,
    **options: Any,
) -> int:
    """Write the answers as they finish; an interrupt writes the finished ones that still wait for their turn."""
    status = 0
    outputs = llm.as_completed(prompts, params, **options)
    try:
        for index, output in tqdm(outputs, total=len(prompts), desc="Requests", disable=not progress):
            with InterruptsHeld():  # an interrupt would truncate an answer
                writer.add(index, output)
            status |= _report_error(output.error)
    except BaseException:
        writer.write_waiting()
        print(f"nanovllm: {writer.num_written} of {len(prompts)} prompts were answered", file=sys.stderr)
        raise
    return status


def _report_error(error: str | None) -> int:
    if error is None:
        return 0
    print(f"nanovllm: error: {error}", file=sys.stderr)
    return 1

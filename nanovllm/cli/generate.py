"""The command `nanovllm generate`: prompts in, completions out as text or JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from nanovllm.cli.flags import add_model_flags
from nanovllm.cli.prompt_files import Request, read_requests
from nanovllm.cli.sampling_flags import add_sampling_flags, add_timeout_flag, load_llm, sampling_options
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.observability.trace_writer import TraceWriter
    from nanovllm.outputs import CompletionOutput, RequestOutput, TokenLogprobs


def add_generate_command(commands: Any) -> None:
    """Register the subcommand."""
    generate = commands.add_parser(
        "generate", help="complete prompts", description="Complete prompts.", allow_abbrev=False
    )
    generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="prompts; without any, --file or standard input is read"
    )
    generate.add_argument("--file", metavar="FILE", help="read prompts from FILE, - for standard input")
    generate.add_argument(
        "--format", choices=("text", "lines", "jsonl"),
        help="format of the file: text is one prompt, lines one a line (the default), jsonl one JSON value a line "
        '(the default for *.jsonl): a string, token ids, or an object with "prompt" or "messages" and any sampling '
        'options, "priority" or "timeout"',
    )  # fmt: skip
    generate.add_argument("--chat", action="store_true", help="apply the model's chat template to text prompts")
    generate.add_argument("--json", action="store_true", help="print one JSON object a line instead of text")
    generate.add_argument(
        "--priority", type=int, default=0, metavar="INT",
        help="priority of requests, lower runs first; a jsonl request may set its own (default 0)",
    )  # fmt: skip
    generate.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=None,
        help="show a progress bar (default: for several prompts on a terminal)",
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
    SamplingParams(**sampling)
    requests = read_requests(options.prompts, options.file, options.format)
    params, priorities, timeouts = [], [], []
    for number, (_, overrides) in enumerate(requests, 1):
        priorities.append(overrides.pop("priority", options.priority))
        timeouts.append(overrides.pop("timeout", options.timeout))
        try:
            params.append(SamplingParams(**(sampling | overrides)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"request {number}: {error}") from error
        if not options.json and (params[-1].logprobs is not None or params[-1].prompt_logprobs is not None):
            raise ValueError(
                "log-probabilities are printed with --json only. Add it, or leave --logprobs and --prompt-logprobs out."
            )
    with _tracing(options.trace) as trace:
        with load_llm(options, trace) as llm:
            prompts = [_as_prompt(llm, prompt, chat=options.chat) for prompt, _ in requests]
            progress = options.progress if options.progress is not None else len(prompts) > 1 and sys.stderr.isatty()
            outputs = llm.generate(prompts, params, priority=priorities, timeout=timeouts, use_tqdm=progress)
        _print_outputs(options, requests, outputs)  # before the trace closes, which may fail
    return int(any(output.error for output in outputs))


def _tracing(path: str | None) -> AbstractContextManager[TraceWriter | None]:
    if path is None:
        return nullcontext()
    from nanovllm.observability.trace_writer import TraceWriter

    return TraceWriter(path)


def _print_outputs(options: argparse.Namespace, requests: list[Request], outputs: list[RequestOutput]) -> None:
    for (given, _), output in zip(requests, outputs, strict=True):
        for completion in output.outputs:
            if options.json:
                print(_as_json(given, output, completion))
            else:
                print(_as_text(given, output, completion, alone=len(outputs) == len(output.outputs) == 1))
    for output in outputs:
        if output.error:
            print(f"nanovllm: error: {output.error}", file=sys.stderr)


def _as_prompt(llm: LLM, given: Any, *, chat: bool) -> Any:
    """Return text and token ids unchanged; apply the chat template to messages, and to text with --chat."""
    if chat and isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if isinstance(given, list) and given and isinstance(given[0], dict):
        return llm.apply_chat_template(given)[0]
    if chat:
        raise ValueError(f"--chat applies the chat template to text, not to {given!r}. Leave --chat out.")
    return given


def _as_text(given: Any, output: RequestOutput, completion: CompletionOutput, *, alone: bool) -> str:
    if alone:
        return completion.text
    sample = f" [{completion.index}]" if len(output.outputs) > 1 else ""
    return f"--- {given if isinstance(given, str) else output.request_id}{sample}\n{completion.text}"


def _as_json(given: Any, output: RequestOutput, completion: CompletionOutput) -> str:
    metrics = output.metrics
    record = {
        "request_id": output.request_id,
        "index": completion.index,
        "prompt": given,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "seconds_in_queue": _seconds(metrics.arrival_time, metrics.scheduled_time),
        "seconds_to_first_token": _seconds(metrics.arrival_time, metrics.first_token_time),
        "seconds": _seconds(metrics.arrival_time, metrics.finished_time),
        "error": output.error,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [list(_ranked(report)) for report in completion.logprobs]
    if output.prompt_logprobs is not None and completion.index == 0:
        reports = output.prompt_logprobs
        record["prompt_logprobs"] = [report and list(_ranked(report)) for report in reports]
    return json.dumps(record, ensure_ascii=False)


def _ranked(report: TokenLogprobs) -> Iterator[dict[str, Any]]:
    for token_id, (logprob, rank) in report.items():
        yield {"token_id": token_id, "logprob": logprob, "rank": rank}


def _seconds(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)

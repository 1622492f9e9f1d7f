"""The command `nanovllm`: its subcommands, with every engine and sampling option as a flag."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from nanovllm import __version__
from nanovllm.cli.bench import add_bench_command
from nanovllm.cli.flags import add_flags, add_model_flags, engine_options
from nanovllm.cli.prompt_files import read_requests
from nanovllm.cli.serve import add_serve_command
from nanovllm.cli.simulate import add_calibrate_command, add_simulate_command
from nanovllm.cli.timeline import add_timeline_command
from nanovllm.cli.tune import add_tune_command
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.observability.trace_writer import TraceWriter
    from nanovllm.outputs import CompletionOutput, RequestOutput, TokenLogprobs

# A small model's answers are best and repeatable without sampling, and a command should end by itself.
CLI_DEFAULTS = {"temperature": 0.0, "max_tokens": 256}
# Somebody who talks gets one answer, and reads no numbers.
NOT_FOR_CHAT = {"n", "logprobs", "prompt_logprobs"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 if a request ended with an error, 2 for bad input."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="nanovllm: %(message)s")
    says_more = options.verbose or sys.stderr.isatty()
    logging.getLogger("nanovllm").setLevel(logging.INFO if says_more else logging.WARNING)
    try:
        return options.run(options)
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        if options.verbose:
            raise
        print(f"nanovllm: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


# ------------------------------------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nanovllm", description="Inference for the language models of transformers.")
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="complete prompts", description="Complete prompts.", allow_abbrev=False
    )
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; none reads --file or standard input")
    generate.add_argument("--file", metavar="FILE", help="read prompts from FILE, or from standard input if it is -")
    generate.add_argument(
        "--format", choices=("text", "lines", "jsonl"),
        help="of the file: text is one prompt, lines one a line (the default), jsonl one JSON value a line: a string, "
        'token ids, or an object with "prompt" or "messages" and any sampling options, "priority" or "timeout" (the '
        "default for *.jsonl)",
    )  # fmt: skip
    generate.add_argument("--chat", action="store_true", help="put text prompts into the model's chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object a line instead of text")
    generate.add_argument(
        "--priority", type=int, default=0, metavar="INT", help="lower runs first; of jsonl requests that have none"
    )
    generate.add_argument("--progress", action=argparse.BooleanOptionalAction, default=None, help="show a progress bar")
    generate.add_argument(
        "--trace", metavar="FILE", help="write what every request and step does to FILE; see `nanovllm timeline`"
    )
    generate.set_defaults(run=_generate)

    chat = commands.add_parser(
        "chat", help="talk to the model", description="Talk; /reset forgets, /exit leaves.", allow_abbrev=False
    )
    chat.add_argument("--system", metavar="TEXT", help="a system prompt")
    chat.set_defaults(run=_chat)

    for command in (generate, chat):
        command.add_argument(
            "--timeout", type=float, metavar="SECONDS", help="end an answer after so long, with what there is of it"
        )
    for command, leave_out in ((generate, ()), (chat, NOT_FOR_CHAT)):
        group = command.add_argument_group("sampling options")
        add_flags(group, SamplingParams, CLI_DEFAULTS, leave_out=leave_out)
        add_model_flags(command)
    for add_command in (
        add_bench_command,
        add_calibrate_command,
        add_serve_command,
        add_simulate_command,
        add_timeline_command,
        add_tune_command,
    ):
        add_command(commands)
    return parser


def _sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(SamplingParams) if hasattr(options, f.name)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return CLI_DEFAULTS | given


def _open(options: argparse.Namespace, trace: TraceWriter | None = None) -> LLM:
    given = engine_options(options)
    from nanovllm import LLM  # waits for torch, so only once the arguments are known to be good

    return LLM(options.model, tokenizer=options.tokenizer, trace=trace, **given)


# -------------------------------------------------------------------------------------------------------- generate


def _generate(options: argparse.Namespace) -> int:
    sampling = _sampling_options(options)
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
            raise ValueError("log-probabilities are shown with --json only. Add it, or leave --logprobs out.")
    with _tracing(options.trace) as trace:
        with _open(options, trace) as llm:
            prompts = [_as_prompt(llm, prompt, chat=options.chat) for prompt, _ in requests]
            progress = options.progress if options.progress is not None else len(prompts) > 1 and sys.stderr.isatty()
            outputs = llm.generate(prompts, params, priority=priorities, timeout=timeouts, use_tqdm=progress)
        _print_outputs(options, requests, outputs)  # before the trace is closed, which may fail
    return int(any(output.error for output in outputs))


def _tracing(path: str | None) -> AbstractContextManager[TraceWriter | None]:
    if path is None:
        return nullcontext()
    from nanovllm.observability.trace_writer import TraceWriter

    return TraceWriter(path)


def _print_outputs(
    options: argparse.Namespace, requests: list[tuple[Any, dict[str, Any]]], outputs: list[RequestOutput]
) -> None:
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
    """Text or token ids as they are; a conversation, or text with --chat, through the chat template."""
    if chat and isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if isinstance(given, list) and given and isinstance(given[0], dict):
        return llm.apply_chat_template(given)[0]
    if chat:
        raise ValueError(f"--chat puts text into the chat template; {given!r} is none.")
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


# ------------------------------------------------------------------------------------------------------------ chat


def _chat(options: argparse.Namespace) -> int:
    params = SamplingParams(**_sampling_options(options))
    beginning = [{"role": "system", "content": options.system}] if options.system else []
    with _open(options) as llm:
        conversation = list(beginning)
        while (line := _read_line()) is not None:
            if line.strip() == "/exit":
                break
            if line.strip() == "/reset":
                conversation = list(beginning)
            elif line.strip():
                question = {"role": "user", "content": line}
                try:
                    answer = _answer(llm, [*conversation, question], params, options.timeout)
                except ValueError as error:  # too long by now, say; someone who types may shorten it or /reset
                    if not sys.stdin.isatty():
                        raise
                    print(f"nanovllm: error: {error}", file=sys.stderr)
                else:
                    conversation += [question, {"role": "assistant", "content": answer}]
    return 0


def _read_line() -> str | None:
    try:
        if sys.stdin.isatty():
            return input("> ")
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    except EOFError:
        return None


def _answer(llm: LLM, conversation: list[dict[str, str]], params: SamplingParams, timeout: float | None) -> str:
    """Print the answer as it comes; an interrupt ends it, keeping what there is."""
    shown = ""
    stream = llm.stream(llm.apply_chat_template(conversation)[0], params, timeout=timeout)
    try:
        for output in stream:
            if output.error:
                raise RuntimeError(output.error)
            text = output.outputs[0].text
            print(text[len(shown) :], end="", flush=True)
            shown = text
    except KeyboardInterrupt:
        pass
    finally:
        stream.close()  # type: ignore[attr-defined]
        print(flush=True)
    return shown


if __name__ == "__main__":
    sys.exit(main())

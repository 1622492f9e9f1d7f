"""Answers of `nanovllm chat`: streamed, cut, continued; and the commands that need the model or its last answer."""

from __future__ import annotations

import argparse
import base64
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from nanovllm.cli.conversation import Conversation
from nanovllm.cli.display import Display, PlainDisplay, draws, print_notice, printable
from nanovllm.cli.sampling_flags import adapter_name, sampling_params

if TYPE_CHECKING:
    from nanovllm.features.sampling_params import SamplingParams
    from nanovllm.outputs import CompletionOutput, RequestOutput
    from nanovllm.serving.llm import LLM

MAX_COPIED_BYTES = 74_994  # xterm's limit for OSC 52; most terminals take more


class Answers:
    """Answers the messages of a conversation, and adds /continue, /show, /copy and /clear to it.

    Args:
        options: flags of the command: model, timeout, display.
        llm: returns the model, once it is loaded.
        is_terminal: True if a user reads; notices and the status line are for terminals.
    """

    def __init__(
        self, conversation: Conversation, options: argparse.Namespace, llm: Callable[[], LLM], *, is_terminal: bool
    ) -> None:
        self._conversation = conversation
        self._options = options
        self._llm = llm
        self._is_terminal = is_terminal
        self._last: RequestOutput | None = None
        self._open_display: Callable[[str], Display] | None = None
        conversation.further |= {
            "continue": self._continue, "show": self._show, "copy": self._copy, "clear": self._clear,
        }  # fmt: skip

    @property
    def model_name(self) -> str:
        return os.path.basename(str(self._options.model).rstrip("/"))

    @property
    def _of_requests(self) -> dict[str, Any]:
        return {"timeout": self._options.timeout, "adapter": adapter_name(self._options)}

    def forget(self) -> None:
        """Forget the last answer's tokens, which are another model's."""
        self._last = None

    def answer(self, question: str) -> None:
        """Print the answer while it streams, and record it; an interrupt ends it and keeps the text so far.

        Raises RuntimeError for a request that failed, and as `LLM.stream`.
        """
        llm = self._llm()
        params = sampling_params(self._conversation.sampling, llm)
        prompt = llm.apply_chat_template(self._conversation.with_question(question))[0]
        last = self._show_stream(llm, llm.stream(prompt, params, **self._of_requests), params, "")
        is_same = self._conversation.record(question, "" if last is None else last.text)
        if is_same and self._is_terminal:
            print_notice("[the same answer: it is greedy or has a seed; /set temperature 0.8 draws others]", sys.stderr)

    def _continue(self, _: str) -> None:
        """Go on with the last answer; its KV comes from the prefix cache."""
        output = self._current()
        if output is None:
            raise ValueError("there is no answer to go on with, or it is not from this model and this session.")
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            raise ValueError("the last answer ended by itself. Ask for more in a message.")
        llm = self._llm()
        params = sampling_params(self._conversation.sampling, llm)
        stream = llm.resume(output, params, **self._of_requests)
        last = self._show_stream(llm, stream, params, completion.text)
        if last is not None:
            self._conversation.messages[-1]["content"] = last.text

    def _current(self) -> RequestOutput | None:
        """The last output, if its text still ends the conversation."""
        messages = self._conversation.messages
        output = self._last
        is_last = (
            output is not None and output.outputs and messages and messages[-1]["content"] == output.outputs[0].text
        )
        return output if is_last else None

    def _show_stream(
        self, llm: LLM, stream: Iterator[RequestOutput], params: SamplingParams, shown: str
    ) -> CompletionOutput | None:
        """Show a stream that continues the text `shown`; returns its last completion, None without a token."""
        display = self._display(shown)
        last = None
        rate = _Rate()
        with closing(stream):  # type: ignore[type-var]
            try:
                for output in stream:
                    if output.error:
                        raise RuntimeError(output.error)
                    last = output
                    rate.count(len(output.outputs[0].token_ids))
                    display.update(output.outputs[0].text, self._status(llm, output, rate))
            except KeyboardInterrupt:
                pass
            finally:
                display.close(self._status(llm, last, rate) if last is not None and self._is_terminal else None)
        if last is None:
            return None
        self._last = last
        if self._is_terminal:
            self._explain_cut(llm, last, params)
        return last.outputs[0]

    def _explain_cut(self, llm: LLM, output: RequestOutput, params: SamplingParams) -> None:
        reason = output.outputs[0].finish_reason
        if reason == "length" and _num_tokens(output) >= llm.config.max_model_len:
            text = f"the context of {llm.config.max_model_len:,} tokens is full: /reset begins anew"
        elif reason == "length":
            text = f"cut at {params.max_tokens} tokens: /continue goes on, /set max_tokens - removes the limit"
        elif reason == "timeout":
            text = f"cut after {self._options.timeout:g} s: /continue goes on"
        else:
            return
        print_notice(f"[{text}]", sys.stderr)

    def _status(self, llm: LLM, output: RequestOutput, rate: _Rate) -> str:
        used = f"{_num_tokens(output):,} of {llm.config.max_model_len:,} tokens"
        return f"{printable(self.model_name)} · {rate} · {used}"

    def _display(self, shown: str) -> Display:
        """A display for one answer; rich is imported for the first one that is drawn."""
        if self._open_display is None:
            if self._is_terminal and draws():
                from rich.console import Console

                from nanovllm.cli.markdown import MarkdownDisplay

                console = Console(highlight=False)
                self._open_display = lambda shown: MarkdownDisplay(console, shown)
            else:
                self._open_display = PlainDisplay
        return self._open_display(shown)

    # ------------------------------------------------------------------------------------------------------ commands

    def _show(self, _: str) -> None:
        conversation = self._conversation
        llm = self._llm()
        output = self._current()
        params = sampling_params(conversation.sampling, llm)
        used = "" if output is None else f"{_num_tokens(output):,} of "
        system = conversation.system
        lines = {
            "model": self._options.model,
            "context": f"{used}{llm.config.max_model_len:,} tokens",
            "sampling": "greedy" if params.is_greedy else f"temperature {params.temperature:g}",
            "options": ", ".join(f"{name} {value}" for name, value in conversation.sampling.items())
            or "the model's own",
            "system": "none" if system is None else system,
            "messages": str(len(conversation.messages)),
        }
        conversation.show("\n".join(f"{name:<10}{printable(text)}" for name, text in lines.items()))

    def _copy(self, _: str) -> None:
        """Copy by OSC 52, which terminals take through ssh too."""
        messages = self._conversation.messages
        if not messages:
            raise ValueError("there is no answer to copy.")
        if not self._is_terminal:
            raise ValueError("/copy sets the clipboard of a terminal, and this is a pipe. Use /save.")
        data = messages[-1]["content"].encode()
        if len(data) > MAX_COPIED_BYTES:
            raise ValueError(
                f"the answer has {len(data):,} bytes, and a clipboard takes {MAX_COPIED_BYTES:,}. Use /save."
            )
        print(f"\x1b]52;c;{base64.b64encode(data).decode()}\a", end="", flush=True)
        self._conversation.show(f"{len(data):,} bytes are in the clipboard, if the terminal allows it (OSC 52)")

    def _clear(self, _: str) -> None:
        self._conversation.reset()
        if self._is_terminal:
            print("\x1b[2J\x1b[H", end="", flush=True)


class _Rate:
    """Tokens per second of a stream, from its first token on."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def count(self, num_tokens: int) -> None:
        self._last = (time.monotonic(), num_tokens)
        self._first = self._first or self._last

    def __str__(self) -> str:
        begin, first = self._first or self._last
        end, last = self._last
        return f"{(last - first) / (end - begin):.1f} tokens/s" if end > begin else "- tokens/s"


def _num_tokens(output: RequestOutput) -> int:
    return len(output.prompt_token_ids) + sum(len(completion.token_ids) for completion in output.outputs)

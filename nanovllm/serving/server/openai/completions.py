"""/v1/completions: completes prompts given as text or token ids."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from nanovllm.outputs import CompletionOutput, OutputKind, RequestOutput, TokenLogprobs
from nanovllm.serving.server.body_limits import LimitedRoute
from nanovllm.serving.server.errors import ANSWERS
from nanovllm.serving.server.openai.forms import named_by, output_form
from nanovllm.serving.server.openai.generation import CHOICES, finish_reasons, new_id, prompt_ids, respond
from nanovllm.serving.server.openai.limits import check_size, engine_options
from nanovllm.serving.server.openai.logprobs import CompletionLogprobs
from nanovllm.serving.server.openai.protocol import CompletionRequest
from nanovllm.serving.server.security import require_api_key
from nanovllm.serving.server.state import ServerState, server_state
from nanovllm.serving.streaming.streams import OutputStream

router = APIRouter(dependencies=[Depends(require_api_key)], route_class=LimitedRoute)


class CompletionJob:
    """A completion request and its choices; see `generation.Job`.

    max_tokens=0 with echo scores the prompt: one token is generated, as the engine requires, and discarded.
    """

    object = chunk_object = "text_completion"
    num_reasoning_tokens = None

    def __init__(self, state: ServerState, request: Request, body: CompletionRequest) -> None:
        self.body, self._state, self.id = body, state, new_id("cmpl")
        self.model = state.resolve(body.model)
        num_prompts = len(body.prompts)
        self.request_ids = [self.id] if num_prompts == 1 else [f"{self.id}-{number}" for number in range(num_prompts)]
        check_size(state, body, num_prompts, body.logprobs)
        for prompt in body.prompts:
            if isinstance(prompt, str):
                state.check_length(prompt, "prompt")
        if body.max_tokens == 0 and not body.echo:
            raise ValueError("max_tokens is 0, which requires echo. Set echo, or raise max_tokens.")
        self._only_scores = body.max_tokens == 0
        self._infill = state.infill_for("suffix") if body.suffix else None
        stops = {} if self._infill is None else {"stop_token_ids": self._infill.stop_token_ids}
        if stops and body.stop_token_ids:
            stops["stop_token_ids"] += tuple(body.stop_token_ids)
        if body.suffix:
            state.check_length(body.suffix, "suffix")
        self._params = body.sampling_params(
            state.engine,
            **stops,
            max_tokens=1 if self._only_scores else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            structured_output=output_form(body, open_objects=state.settings.open_objects),
        )
        self._options = engine_options(state, request, body, self.model)
        self._logprobs: dict[int, CompletionLogprobs] = {}  # log-probabilities of each choice
        self._echoes: dict[str, dict[str, Any]] = {}  # logprobs of prompts, by request id

    async def start(self, kind: OutputKind) -> OutputStream:
        shape = self.body.shape
        prompts = await self._prompts()
        with named_by(None if shape is None else shape.field):
            return await self._state.engine.submit(
                prompts, self._params, request_ids=self.request_ids, output_kind=kind, **self._options
            )

    def read(self, output: RequestOutput) -> None:
        if self._only_scores:
            for completion in output.outputs:
                completion.text = ""
                completion.token_ids = []
                if completion.logprobs is not None:
                    completion.logprobs = []

    def opening(self, choice: int, output: RequestOutput) -> dict[str, Any] | None:
        if not self.body.echo:
            return self._choice(choice, "", [], None, None) | prompt_ids(self.body, output) if self._shows_ids else None
        opening = self._choice(choice, self._echo(output), [], self._echoed_logprobs(choice, output), None)
        return opening | prompt_ids(self.body, output)

    def delta(self, choice: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | str | None:
        if not (completion.text or completion.finish_reason or completion.logprobs or self._shows_ids):
            return None
        if completion.finish_reason is None and completion.logprobs is None and not self._shows_ids:
            return completion.text
        logprobs = self._format_logprobs(choice, completion.token_ids, completion.logprobs)
        return self._choice(choice, completion.text, completion.token_ids, logprobs, completion)

    def text_delta(self, choice: int, text: str) -> dict[str, Any]:
        return self._choice(choice, text, [], None, None)

    def whole(self, choice: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        text = completion.text
        logprobs = None
        if self.body.echo:
            text = self._echo(output) + text
            logprobs = self._echoed_logprobs(choice, output)
        new = self._format_logprobs(choice, completion.token_ids, completion.logprobs)
        if logprobs is None:
            logprobs = new
        elif new is not None:
            logprobs = {name: values + new[name] for name, values in logprobs.items()}
        return self._choice(choice, text, completion.token_ids, logprobs, completion) | prompt_ids(self.body, output)

    async def encoded_fields(self) -> str:
        return ""

    # ------------------------------------------------------------------------------------------------------- parts

    async def _prompts(self) -> list[Any]:
        """Prompts for the engine; with a suffix the token ids that ask for the middle."""
        prompts = self.body.prompts
        suffix = self.body.suffix
        infill = self._infill
        if infill is None or suffix is None:
            return prompts
        make = partial(infill.prompts, prompts, suffix)
        return await self._state.engine.prepare(make, (prompts, suffix))

    @property
    def _shows_ids(self) -> bool:
        return self.body.return_token_ids

    def _choice(
        self, choice: int, text: str, token_ids: list[int], logprobs: Any, completion: CompletionOutput | None
    ) -> dict[str, Any]:
        reason, stop_reason = (None, None) if completion is None else finish_reasons(completion)
        made = {
            "index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop_reason,
        }  # fmt: skip
        return made | {"token_ids": token_ids} if self._shows_ids else made

    def _echo(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.body.truncate_prompt_tokens is None:
            return output.prompt
        tokenizer = self._state.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)

    def _echoed_logprobs(self, choice: int, output: RequestOutput) -> dict[str, Any] | None:
        if output.prompt_logprobs is None or self.body.logprobs is None:
            return None
        text = self._echo(output)
        self._logprobs[choice] = self._answer_logprobs(offset=len(text))
        if output.request_id not in self._echoes:  # the same for each of its samples
            self._echoes[output.request_id] = self._prompt_logprobs(text, output)
        return self._echoes[output.request_id]

    def _prompt_logprobs(self, text: str, output: RequestOutput) -> dict[str, Any]:
        """Logprobs of an echoed prompt; its tokens may include special tokens around the text."""
        token_text = self._state.token_text
        tokenizer = self._state.engine.tokenizer
        begin = -1
        if tokenizer is not None:
            begin = tokenizer.decode(output.prompt_token_ids).find(text)
        legacy = CompletionLogprobs(token_text, tokenizer, offset=-max(0, begin), skips_special_tokens=begin < 0)
        report = legacy.report(output.prompt_token_ids, output.prompt_logprobs or [])
        return report | {"text_offset": [min(max(0, offset), len(text)) for offset in report["text_offset"]]}

    def _format_logprobs(
        self, choice: int, token_ids: list[int], reports: list[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if reports is None or self.body.logprobs is None:
            return None
        if choice not in self._logprobs:
            self._logprobs[choice] = self._answer_logprobs(offset=0)
        return self._logprobs[choice].report(token_ids, reports)

    def _answer_logprobs(self, *, offset: int) -> CompletionLogprobs:
        skips = self._params.skip_special_tokens
        tokenizer = self._state.engine.tokenizer
        return CompletionLogprobs(self._state.token_text, tokenizer, offset=offset, skips_special_tokens=skips)


@router.post("/v1/completions", responses=ANSWERS, summary="Complete prompts")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    return await respond(request, server_state(request), CompletionJob, body, CHOICES)

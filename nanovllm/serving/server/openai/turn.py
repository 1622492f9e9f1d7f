"""One turn of a conversation, for every chat protocol: checks, chat template, constraints, parsers of the answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request

from nanovllm.features.chat.chat import NOT_FOR_TEMPLATES
from nanovllm.features.chat.plain_messages import text_of
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, OutputKind, RequestOutput
from nanovllm.serving.server.answers.answer_format import AnswerFormat
from nanovllm.serving.server.answers.delta import AnswerDelta
from nanovllm.serving.server.answers.grammar import build_form
from nanovllm.serving.server.answers.reasoning import ends_in_thought, is_left_open
from nanovllm.serving.server.answers.template_options import effort_options, known_options
from nanovllm.serving.server.answers.thought_count import num_thought_tokens
from nanovllm.serving.server.answers.tool_calls import FORMATS
from nanovllm.serving.server.media_hosts import fetched, remote_pictures
from nanovllm.serving.server.openai.forms import constraints_of, error_field, named_error
from nanovllm.serving.server.openai.limits import check_size, engine_options
from nanovllm.serving.server.openai.protocol import ChatRequest
from nanovllm.serving.server.state import ServerState
from nanovllm.serving.streaming.streams import OutputStream


class ChatTurn:
    """Chat request for the engine: its prompt, its sampling parameters, and the parsers of its answers.

    Args:
        request_id: its id in the engine.
        whole_calls: True if a stream has whole calls only.

    Raises TypeError, ValueError and ApiError for a bad request.
    """

    def __init__(
        self, state: ServerState, request: Request, body: ChatRequest, request_id: str, *, whole_calls: bool = False
    ) -> None:
        self.body = body
        self.id = request_id
        self._state = state
        self.model = state.resolve(body.model)
        self.num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        check_size(state, body, 1, self.num_logprobs)
        check_size(state, body, 1, body.prompt_logprobs, "prompt_logprobs")
        self._conversation = body.conversation()
        self._remote = remote_pictures(self._conversation, state.settings.allowed_media_hosts)
        self.tools = body.callable_tools
        state.check_conversation(self._conversation, self.tools, body.chat_template_kwargs)
        self._template_options = template_options(body, state.template_variables, state.answer_format)
        self._form = state.answer_format
        if body.skip_special_tokens is False:
            self._form = replace(self._form, special_tokens=frozenset())  # the client wants them
        if body.must_call and self._form.tools is None:  # the grammar forces the calls: any format works
            self._form = replace(self._form, tools=FORMATS["hermes"])
        self._constraints = constraints_of(body, self.tools, open_objects=state.settings.open_objects)
        if self._constraints.budget is not None and self._form.reasoning is None:
            self._constraints = replace(self._constraints, budget=None)  # a model without thought keeps any budget
        options: dict[str, Any] = {"max_tokens": body.output_limit, "logprobs": self.num_logprobs}
        options["prompt_logprobs"] = body.prompt_logprobs
        if self._form.needs_special_tokens(with_tools=bool(self.tools)):
            options["skip_special_tokens"] = False
        self._params = body.sampling_params(state.engine, **options)
        self._options = engine_options(state, request, body, self.model)
        self._answers: dict[int, Answer] = {}  # parser by choice
        self._whole_calls = whole_calls
        self._streams_calls = False

    async def start(self, kind: OutputKind) -> OutputStream:
        """Queue the conversation; raises like `AsyncLLM.submit_chat`."""
        self._streams_calls = kind is OutputKind.DELTA and not self._whole_calls
        await self._fetch()
        if self._constraints.is_needed:
            return await self._start_constrained(kind)
        return await self._state.engine.submit_chat(
            self._conversation,
            self._params,
            tools=self.tools,
            template_options=self._template_options,
            request_id=self.id,
            output_kind=kind,
            **self._options,
        )

    async def _fetch(self) -> None:
        """Fetch the pictures of other servers, once."""
        if self._remote:
            hosts = self._state.settings.allowed_media_hosts
            self._conversation = await fetched(self._conversation, hosts)
            self._remote = []

    async def _start_constrained(self, kind: OutputKind) -> OutputStream:
        """Queue the rendered conversation; the end of its prompt says whether the answer begins in thought."""
        token_ids = await self.prompt_token_ids(self._params)
        engine = self._state.engine
        is_open = self._begins_in_thought(token_ids)
        try:
            # The thread for grammars does this: each strict tool's schema is test-compiled for up to half a second.
            build = partial(build_form, self._constraints, self._form, engine.tokenizer, is_open=is_open)
            params = replace(self._params, structured_output=await engine.prepare(build, compiles=True))
            return await engine.submit([token_ids], params, request_ids=[self.id], output_kind=kind, **self._options)
        except (TypeError, ValueError) as error:
            find = partial(named_error, error, self._constraints, error_field(self.body, self._constraints))
            raise await engine.prepare(find, compiles=bool(self._constraints.tools)) from error

    async def prompt_token_ids(self, params: SamplingParams | None = None) -> list[int]:
        """Render the conversation; with the parameters of an answer raises PromptTooLongError."""
        await self._fetch()
        return await self._state.engine.apply_chat_template(
            self._conversation, tools=self.tools, answer_params=params, **self._template_options
        )

    def answer(self, choice: int, output: RequestOutput) -> Answer:
        """Parser of a choice."""
        if choice not in self._answers:
            self._answers[choice] = self._new_answer(output)
        return self._answers[choice]

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Thought tokens in all choices so far; None if the model has no reasoning format."""
        if self._form.reasoning is None:
            return None
        return sum(answer.num_reasoning_tokens for answer in self._answers.values())

    # ------------------------------------------------------------------------------------------------------- parts

    def _new_answer(self, output: RequestOutput) -> Answer:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools or ()}
        is_open = self._begins_in_thought(output.prompt_token_ids)
        tokenizer = self._state.engine.tokenizer
        return Answer(self._form, tokenizer, schemas, is_open=is_open, streams_calls=self._streams_calls)

    def _begins_in_thought(self, prompt_token_ids: list[int]) -> bool:
        form = self._form.reasoning
        if form is None:
            return False
        if self.body.continue_final_message:
            return is_left_open(form, text_of(self._conversation[-1]["content"]))
        return ends_in_thought(form, self._state.engine.tokenizer, prompt_token_ids)


class Answer:
    """Parser of one choice: its new parts, and its counts of calls and thought tokens.

    Args:
        schemas: schemas of the tools' parameters, by tool name.
        is_open: True if the prompt opens the thought, so that the answer begins within it.
        streams_calls: True if calls are returned in parts; see `CallParts`.
    """

    def __init__(
        self, form: AnswerFormat, tokenizer: Any, schemas: dict[str, Any], *, is_open: bool, streams_calls: bool = False
    ) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._is_open = is_open
        self._stream = self._form.stream(schemas, is_open=is_open, streams_calls=streams_calls)
        self._token_ids: list[int] = []
        self._has_thought = is_open

    @property
    def num_calls(self) -> int:
        return 0 if self._stream is None else self._stream.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        if self._form.reasoning is None or not self._has_thought:
            return 0
        return num_thought_tokens(self._form.reasoning, self._tokenizer, self._token_ids, is_open=self._is_open)

    def read(self, completion: CompletionOutput, *, is_whole: bool = False) -> AnswerDelta:
        """Parse an output of the choice; returns its parts.

        Args:
            is_whole: True for the choice's last output, whatever its finish_reason.
        """
        if self._stream is None:
            return AnswerDelta(parts=[completion.text] if completion.text else [])
        if self._form.reasoning is not None:
            self._token_ids += completion.token_ids
        delta = self._stream.add(completion.text, is_last=is_whole or completion.finish_reason is not None)
        self._has_thought = self._has_thought or bool(delta.reasoning) or self._stream.is_open
        return delta


def template_options(
    body: ChatRequest, variables: Collection[str] | None, answer_format: AnswerFormat
) -> dict[str, Any]:
    """Variables that a request sets for the chat template; raises ValueError for unknown ones.

    Args:
        variables: variables that the template reads; None if unknown.
    """
    can_think = answer_format.reasoning is not None
    given = known_options(body.chat_template_kwargs or {}, variables, NOT_FOR_TEMPLATES, can_think=can_think)
    options = given | body.prompt_end
    if body.reasoning_effort is None:
        return options
    effort = effort_options(body.reasoning_effort, variables, can_think=can_think)
    for name in effort.keys() & given.keys():
        raise ValueError(f"reasoning_effort and chat_template_kwargs.{name} say the same to the template; give one.")
    return options | effort

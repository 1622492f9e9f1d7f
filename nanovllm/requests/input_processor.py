"""From what a caller gives to checked requests: every prompt as token ids, every option valid, nothing queued yet."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from nanovllm.engine import Engine
from nanovllm.errors import PromptTooLongError, QueueFullError
from nanovllm.outputs import OutputKind
from nanovllm.requests.bad_words import Spellings
from nanovllm.requests.control_tokens import ChatEncoder
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import MAX_PRIORITY, text, texts

Prompt = str | SequenceABC[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request, ready to be queued."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    bad_words: Spellings
    priority: int
    cache_salt: str
    timeout: float | None  # seconds
    arrival_time: float  # on the engine's clock

    def add_to(self, engine: Engine, request_id: str, output_kind: OutputKind) -> None:
        engine.add_request(
            request_id,
            self.token_ids,
            self.params,
            prompt=self.prompt,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout=self.timeout,
            arrival_time=self.arrival_time,
            output_kind=output_kind,
            bad_words=self.bad_words,
        )


class Intake:
    """Prepares requests for one engine; changes nothing, so that any thread may."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._chat_encoder = ChatEncoder(engine.tokenizer)

    def prepare(self, prompts: Any, sampling_params: Any = None, **options: Any) -> list[PreparedRequest]:
        """The requests of one call, all of them checked; arguments as in `LLM.generate`."""
        return self.prepare_each(_as_prompts(prompts), sampling_params, **options)

    def prepare_each(
        self,
        prompts: list[Any],
        sampling_params: Any = None,
        *,
        priority: Any = 0,
        cache_salt: Any = "",
        timeout: Any = None,
        arrival_time: float | None = None,
    ) -> list[PreparedRequest]:
        """The same for a list of prompts, which arrived at `arrival_time` on the engine's clock (None for now).

        Raises TypeError or ValueError, naming the prompt if there are several.
        """
        arrival_time = self._engine.clock() if arrival_time is None else arrival_time
        count = len(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = _one_each("sampling_params", sampling_params, SamplingParams, count)
        priorities = [int(value) for value in _one_each("priority", priority, numbers.Integral, count)]
        salts = _one_each("cache_salt", cache_salt, str, count)
        timeouts = _one_each("timeout", timeout, numbers.Real | None, count)
        requests = []
        spellings: dict[int, Spellings] = {}  # by the id of parameters, which prompts may share
        for number, prompt in enumerate(prompts):
            try:
                _check_priority(priorities[number])
                _check_timeout(timeouts[number])
                token_ids = self.tokenize(prompt)
                shared = spellings.get(id(params[number]))
                spellings[id(params[number])] = self._engine.check_request(token_ids, params[number], shared)
            except (TypeError, ValueError) as error:
                if count == 1:
                    raise
                # Of a kind that takes a message alone, which not all subclasses do.
                kinds = PromptTooLongError, TypeError, ValueError
                kind = next(kind for kind in kinds if isinstance(error, kind))
                raise kind(f"prompt {number}: {error}") from error
            as_text = prompt if isinstance(prompt, str) else None
            own = params[number], spellings[id(params[number])], priorities[number], salts[number], timeouts[number]
            requests.append(PreparedRequest(as_text, token_ids, *own, arrival_time))
        return requests

    def tokenize(self, prompt: Any, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts around it (`add_special_tokens`)."""
        if not isinstance(prompt, str):
            return _as_token_ids(prompt)
        if self._tokenizer is None:
            raise ValueError("a prompt as text needs a tokenizer; pass tokenizer=... with the model, or token ids.")
        if not prompt:
            raise ValueError("the prompt is an empty string; it needs at least one token.")
        text("the prompt", prompt)
        options = {} if add_special_tokens else {"add_special_tokens": False}  # a simple tokenizer may know none
        return list(self._tokenizer(prompt, **options)["input_ids"])

    def has_room(self, count: int) -> bool:
        """Whether the queue takes this many more samples; reads lengths alone, which may be a step old."""
        try:
            self._engine.check_queue(count)
        except QueueFullError:
            return False
        return True

    def apply_chat_template(
        self, messages: SequenceABC[Message] | SequenceABC[SequenceABC[Message]]
    ) -> list[list[int]]:
        """Token ids of one conversation or several, ready for the answer; always a list of prompts."""
        if not isinstance(messages, SequenceABC) or isinstance(messages, str) or not messages:
            raise ValueError(f"messages must be a conversation or a list of them, not {messages!r}.")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        for conversation in conversations:
            _check_conversation(conversation)
        return [self.apply_chat_template_to(conversation) for conversation in conversations]

    def apply_chat_template_to(
        self, conversation: Any, *, tools: list[dict[str, Any]] | None = None, **template_options: Any
    ) -> list[int]:
        """The same for one conversation.

        Args:
            tools: definitions of functions that the template describes to the model, as OpenAI writes them.
            template_options: what the template itself knows, such as `enable_thinking`; add_generation_prompt is True
                unless it is among them.
        """
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", None):
            raise ValueError("chat needs a tokenizer with a chat template; use generate, or pass another tokenizer.")
        _check_conversation(conversation)
        texts("messages", list(conversation))
        texts("tools", tools)
        texts("template_options", template_options)
        template_options = {"add_generation_prompt": True} | template_options
        try:
            if not self._engine.config.allow_control_tokens_in_messages:
                return self._chat_encoder.encode(conversation, tools, template_options)
            return list(
                self._tokenizer.apply_chat_template(
                    list(conversation), tools=tools, return_dict=False, **template_options
                )
            )
        except TemplateError as error:  # a template may demand an order of roles, say
            raise ValueError(f"the tokenizer's chat template refuses this conversation: {error}") from error


def num_samples(sampling_params: Any, num_prompts: int) -> int:
    """Samples of prompts with these parameters; what is no valid parameter counts one."""
    params = sampling_params if isinstance(sampling_params, SequenceABC) else [sampling_params] * num_prompts
    return sum(one.n if isinstance(one, SamplingParams) else 1 for one in params)


def words_of(sampling_params: Any) -> list[tuple[str, ...]]:
    """The bad words of parameters, which are tokenised too."""
    params = sampling_params if isinstance(sampling_params, SequenceABC) else [sampling_params]
    return [one.bad_words for one in params if isinstance(one, SamplingParams)]


def _check_conversation(conversation: Any) -> None:
    is_list = isinstance(conversation, SequenceABC) and not isinstance(conversation, str)
    if not is_list or not conversation or not all(map(_is_message, conversation)):
        raise ValueError(f"a conversation is a list of {{'role': ..., 'content': ...}}, not {conversation!r}.")


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and "role" in item and "content" in item


def _as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, SequenceABC) or isinstance(prompts, (bytes, bytearray)):
        prompts = _as_token_ids(prompts)
    if not prompts:
        raise ValueError("the list of prompts is empty; give at least one prompt.")
    if all(isinstance(item, numbers.Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def _as_token_ids(prompt: Any) -> list[Any]:
    """A list from a list, tuple, array or one-dimensional tensor of token ids, with Python's own numbers."""
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(items, SequenceABC) or isinstance(items, (str, bytes, bytearray)):
        raise TypeError(f"a prompt is a string or a list of token ids, not {prompt!r}.")
    if set(map(type, items)) <= {int}:  # a prompt may be long, and this is fast
        return list(items)
    is_number = [isinstance(item, numbers.Integral) and not isinstance(item, bool) for item in items]
    return [int(item) if fits else item for item, fits in zip(items, is_number, strict=True)]


def _one_each(name: str, values: Any, kind: Any, count: int) -> list[Any]:
    """`values` for each of `count` prompts: itself if it is one, else as many as there are prompts."""
    kind_name = kind.__name__ if isinstance(kind, type) else "float or None"
    if isinstance(values, kind) and not isinstance(values, bool):
        return [values] * count
    if not isinstance(values, SequenceABC) or isinstance(values, str):
        raise TypeError(f"{name} must be of type {kind_name} or a list of them, not {values!r}.")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one for all, or one each.")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} must hold {kind_name} only, not {value!r}.")
    return list(values)


def _check_priority(priority: int) -> None:
    if abs(priority) > MAX_PRIORITY:
        raise ValueError(f"priority is {priority}; it must be between {-MAX_PRIORITY} and {MAX_PRIORITY}.")


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not (0.0 < timeout < math.inf):  # NaN fails the comparison too
        raise ValueError(f"timeout is {timeout}; it must be a number of seconds above 0, or None for no limit.")

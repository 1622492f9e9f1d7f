"""From what a caller gives to checked requests: every prompt as token ids, every option valid, nothing queued yet."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from nanovllm.errors import PromptTooLongError
from nanovllm.outputs import OutputKind
from nanovllm.requests.checks import RequestLimits, check_params, check_prompt, truncated
from nanovllm.requests.control_tokens import ChatEncoder
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest
from nanovllm.validation import MAX_PRIORITY, text, texts

Prompt = str | SequenceABC[int]
Message = Mapping[str, Any]
Spellings = tuple[tuple[int, ...], ...]


class InputProcessor:
    """Makes `NewRequest`s for one engine; changes nothing, so that any thread may call it.

    Args:
        tokenizer: None if prompts come as token ids only.
        clock: the engine's, in seconds.
    """

    def __init__(self, tokenizer: Any, limits: RequestLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self._tokenizer = tokenizer
        self._chat_encoder = ChatEncoder(tokenizer)

    def process(
        self, prompts: Any, sampling_params: Any = None, *, request_ids: Iterable[str], **options: Any
    ) -> list[NewRequest]:
        """The requests of one call, all of them checked; arguments as in `LLM.generate`.

        Args:
            request_ids: at least as many as there are prompts.
        """
        return self.process_each(_as_prompts(prompts), sampling_params, request_ids=request_ids, **options)

    def process_one(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> NewRequest:
        """One request; options as in `process_each`."""
        return self.process_each([prompt], sampling_params, request_ids=[request_id], **options)[0]

    def process_each(
        self,
        prompts: list[Any],
        sampling_params: Any = None,
        *,
        request_ids: Iterable[str],
        output_kind: OutputKind = OutputKind.FINAL,
        priority: Any = 0,
        cache_salt: Any = "",
        timeout: Any = None,
        arrival_time: float | None = None,
    ) -> list[NewRequest]:
        """The same for a list of prompts, which arrived at `arrival_time` on the engine's clock (None for now).

        Raises TypeError or ValueError, naming the prompt if there are several.
        """
        arrival_time = self.clock() if arrival_time is None else arrival_time
        count = len(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        each = zip(
            prompts,
            islice(request_ids, count),
            _one_each("sampling_params", sampling_params, SamplingParams, count),
            _one_each("priority", priority, numbers.Integral, count),
            _one_each("cache_salt", cache_salt, str, count),
            _one_each("timeout", timeout, numbers.Real | None, count),
            strict=True,
        )
        requests: list[NewRequest] = []
        spellings: dict[int, Spellings] = {}  # by the id of parameters, which prompts may share
        for number, (prompt, request_id, params, own_priority, salt, own_timeout) in enumerate(each):
            try:
                _check_priority(own_priority)
                _check_timeout(own_timeout)
                token_ids = truncated(self.tokenize(prompt), params)
                check_prompt(token_ids, params, self.limits)
                if id(params) not in spellings:
                    check_params(params, self.limits, has_tokenizer=self._tokenizer is not None)
                    spellings[id(params)] = spellings_of(params.bad_words, self._tokenizer)
            except (TypeError, ValueError) as error:
                if count == 1:
                    raise
                # Of a kind that takes a message alone, which not all subclasses do.
                kinds = PromptTooLongError, TypeError, ValueError
                kind = next(kind for kind in kinds if isinstance(error, kind))
                raise kind(f"prompt {number}: {error}") from error
            requests.append(
                NewRequest(
                    request_id,
                    token_ids,
                    params,
                    prompt=prompt if isinstance(prompt, str) else None,
                    bad_words=spellings[id(params)],
                    priority=int(own_priority),
                    cache_salt=salt,
                    timeout=own_timeout,
                    arrival_time=arrival_time,
                    output_kind=output_kind,
                )
            )
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
            if not self.limits.allow_control_tokens:
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


def spellings_of(bad_words: Iterable[str], tokenizer: Any) -> Spellings:
    """The token ids of each word as it stands at the beginning of a text and behind a space, each sequence once.

    Raises ValueError for a word that the tokenizer has no tokens for.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        for spelling in (word.lstrip(), " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if not token_ids:
                raise ValueError(f"bad_words holds {word!r}, for which the tokenizer has no tokens. Remove it.")
            found[token_ids] = None
    return tuple(found)


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

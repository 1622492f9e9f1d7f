"""Turns a caller's prompts and options into checked requests with token ids; nothing is queued here."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from nanovllm.core.config import EngineConfig
from nanovllm.core.errors import PromptTooLongError, too_long
from nanovllm.core.option_stats import Goals
from nanovllm.core.outputs import OutputKind
from nanovllm.core.sampling_params import SamplingParams
from nanovllm.core.sequence import NewRequest
from nanovllm.core.validation import MAX_PRIORITY, text
from nanovllm.requests.prompts import ChatPrompt, Texts, plain_prompt

if TYPE_CHECKING:
    from nanovllm.requests.chat import ChatTemplate
    from nanovllm.requests.grammar.compiler import GrammarCompiler

Prompt = str | SequenceABC[int] | Mapping[str, Any]

OPTION_KINDS: tuple[tuple[str, Any, str], ...] = (  # of a request: name, type, its name in errors
    ("sampling_params", SamplingParams, "SamplingParams"),
    ("priority", numbers.Integral, "a whole number"),
    ("cache_salt", str, "a string"),
    ("timeout", numbers.Real | None, "a number of seconds or None"),
    ("client", str, "a string"),
)
OPTION_DEFAULTS: dict[str, Any] = {"priority": 0, "cache_salt": "", "timeout": None, "client": ""}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a model for requests.

    vocab_size: rows of the embedding; a prompt's token ids are below it.
    num_logits: number of tokens that can be sampled, with rows in embedding and head.
    model_name: for errors.
    has_base_model: whether the head is a separate module, which prompt_logprobs requires.
    has_head: False for a model that embeds alone.
    eos_token_ids: those of the model that can be sampled: its config may name others.
    sampling_defaults: fields of `SamplingParams` for requests that leave them out.
    """

    vocab_size: int
    num_logits: int
    model_name: str
    has_base_model: bool = True
    has_head: bool = True
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def without_head(self) -> str:
        """Use of a model without a head, for the log and errors."""
        return (
            f"{self.model_name} has no language model head, so it generates nothing: it embeds (LLM.embed, "
            "/v1/embeddings, /api/embed), and scores by embeddings (method 'cosine', /v1/rerank, /v1/score)."
        )

    def check_head(self) -> None:
        """Raise ValueError for a model that generates nothing."""
        if not self.has_head:
            raise ValueError(self.without_head)


class InputProcessor:
    """Makes `NewRequest`s for one engine; stateless, hence thread-safe.

    Args:
        tokenizer: None if prompts are token ids only.
        config: EngineConfig with every option resolved.
        clock: the engine's, in seconds; never goes back.
        make_chat, make_grammars: builders of chat templates and grammar compilers, called at the first use of each;
            None refuses them.
        texts: tokenising of texts; None for `Texts`.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: EngineConfig,
        limits: RequestLimits,
        clock: Callable[[], float] = time.monotonic,
        make_chat: Callable[[InputProcessor], ChatTemplate] | None = None,
        make_grammars: Callable[[InputProcessor], GrammarCompiler] | None = None,
        texts: Texts | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self.clock = clock
        self.default_params = SamplingParams(**limits.sampling_defaults)  # for requests without parameters
        self.tokenizer = tokenizer
        self.goals: Callable[[], Goals] = lambda: config  # Goals in force, which may follow the costs
        self.texts = texts or Texts()
        self._make_chat = make_chat
        self._make_grammars = make_grammars

    @cached_property
    def chat(self) -> ChatTemplate:
        """The tokenizer's chat template, for the first conversation."""
        if self._make_chat is None:
            raise ValueError("this engine was built without chats; give prompts as text or token ids.")
        return self._make_chat(self)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of structured outputs, made on first use."""
        if self._make_grammars is None:
            raise ValueError("this engine was built without structured outputs; leave structured_output out.")
        return self._make_grammars(self)

    def process(
        self, prompts: Any, sampling_params: Any = None, *, request_ids: Iterable[str], **options: Any
    ) -> list[NewRequest]:
        """The checked requests of one call; arguments as in `LLM.generate`.

        Args:
            request_ids: at least one per prompt.
        """
        items = [prompts] if isinstance(prompts, (str, Mapping, ChatPrompt)) else _as_list(prompts)
        if items and all(isinstance(item, numbers.Integral) for item in items):
            items = [items]
        return self.process_each(items, sampling_params, request_ids=request_ids, **options)

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
        arrival_time: float | None = None,
        **options: Any,
    ) -> list[NewRequest]:
        """The checked requests of a list of prompts; arrival_time: on the engine's clock, None for now.

        Raises TypeError or ValueError, naming the prompt if there are several.
        """
        arrival_time = self.clock() if arrival_time is None else arrival_time
        params, count = self.default_params if sampling_params is None else sampling_params, len(prompts)
        each = zip(prompts, islice(request_ids, count), _one_each(count, params, options), strict=True)
        requests: list[NewRequest] = []
        prepared: dict[int, dict[str, Any]] = {}  # by the id of parameters, which prompts may share
        for number, (prompt, request_id, (params, own_priority, salt, own_timeout, own_client)) in enumerate(each):
            try:
                _check_options(params, own_priority, salt, own_timeout, own_client)
                prompt = plain_prompt(prompt) if isinstance(prompt, Mapping) else prompt
                token_ids = self._token_ids(prompt, params)
                check_prompt(token_ids, params, self.limits, self.config.max_model_len)
                if id(params) not in prepared:
                    check_params(params, self.limits, self.goals, has_tokenizer=self.tokenizer is not None)
                    words, form = params.bad_words, params.structured_output
                    spellings = words and self.texts.spellings_of(words)
                    prepared[id(params)] = {"bad_words": spellings, "matcher": form and self.grammars.matcher(form)}
            except (TypeError, ValueError) as error:
                if count == 1:
                    raise
                raise _error_of_prompt(number, error) from error
            requests.append(
                NewRequest(
                    request_id,
                    token_ids,
                    params,
                    prompt=prompt if isinstance(prompt, str) else None,
                    priority=int(own_priority),
                    cache_salt=salt,
                    timeout=None if own_timeout is None else float(own_timeout),
                    arrival_time=arrival_time,
                    output_kind=output_kind,
                    client=own_client,
                    **prepared[id(params)],
                )
            )
        return requests

    def _token_ids(self, prompt: Any, params: SamplingParams) -> list[int]:
        """Token ids of a prompt, truncated; of a chat with its own ends, and of a structured output with those too."""
        token_ids = self.tokenize(prompt, limit=self.limit_of(params))
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        if isinstance(prompt, ChatPrompt):
            return ChatPrompt(token_ids, prompt.end_token_ids)
        return token_ids if params.structured_output is None else ChatPrompt(token_ids, self.chat.end_token_ids)

    def limit_of(self, params: SamplingParams | None) -> int | None:
        """Number of tokens at which a prompt is too long; None if its beginning is cut off."""
        truncates = params is not None and params.truncate_prompt_tokens is not None
        return None if truncates else self.config.max_model_len

    def tokenize(self, prompt: Any, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Token ids of a prompt: text, with the tokenizer's special tokens if `add_special_tokens`, or ids in any type.

        Ids may be a list, a tuple, an array or a one-dimensional tensor of whole numbers. A long text is refused
        once `limit` tokens are counted.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a prompt as text needs a tokenizer; pass tokenizer=... with the model, or token ids.")
            if not prompt:
                raise ValueError("the prompt is an empty string; it needs at least one token.")
            text("the prompt", prompt)
            options = {} if add_special_tokens else {"add_special_tokens": False}  # a simple tokenizer may lack it
            prompt = self.texts.encode(
                prompt,
                lambda piece: list(self.tokenizer(piece, add_special_tokens=False)["input_ids"]),
                lambda given: list(self.tokenizer(given, **options)["input_ids"]),
                limit,
            )
        items = _as_list(prompt)
        if set(map(type, items)) <= {int}:  # fast for long prompts
            return items
        for item in items:
            if isinstance(item, bool) or not isinstance(item, numbers.Integral):
                raise TypeError(f"a prompt's token ids must be whole numbers, not {item!r}.")
        return [int(item) for item in items]


def _as_list(values: Any) -> list[Any]:
    items = values.tolist() if hasattr(values, "tolist") else list(values) if isinstance(values, Iterator) else values
    if not isinstance(items, SequenceABC) or isinstance(items, (str, bytes, bytearray)):
        raise TypeError(f"a prompt is a string or a list of token ids, not {values!r}.")
    return list(items)


def _one_each(count: int, params: Any, given: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Parameters and options of each of `count` prompts: of every option the one value given for all, or one each."""
    if unknown := given.keys() - OPTION_DEFAULTS.keys():
        raise TypeError(f"a request has no option {min(unknown)!r}; its options are {', '.join(OPTION_DEFAULTS)}.")
    options = {"sampling_params": params} | OPTION_DEFAULTS | given
    for name, values in options.items():
        if not isinstance(values, SequenceABC) or isinstance(values, str):
            options[name] = [values] * count
        elif len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one for all, or one each.")
    return zip(*options.values(), strict=True)


def _error_of_prompt(number: int, error: Exception) -> Exception:
    """The error of one of several prompts, with its number; of a type with a message as only argument."""
    kind = next(kind for kind in (PromptTooLongError, TypeError, ValueError) if isinstance(error, kind))
    return kind(f"prompt {number}: {error}")


def _check_options(params: Any, priority: Any, cache_salt: Any, timeout: Any, client: Any) -> None:
    """Raise TypeError or ValueError for an option of one request."""
    values = params, priority, cache_salt, timeout, client
    for (name, kind, kind_name), value in zip(OPTION_KINDS, values, strict=True):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} must be {kind_name}, or a list of one for each prompt, not {value!r}.")
    if abs(priority) > MAX_PRIORITY:
        raise ValueError(f"priority is {priority}; it must be between {-MAX_PRIORITY} and {MAX_PRIORITY}.")
    if timeout is not None and not (0.0 < timeout < math.inf):  # NaN fails the comparison too
        raise ValueError(f"timeout is {timeout}; it must be a number of seconds above 0, or None for no limit.")


def check_prompt(
    prompt_token_ids: list[int], params: SamplingParams, limits: RequestLimits, max_model_len: int
) -> None:
    """Raise ValueError for an (already truncated) prompt that cannot be served with these parameters."""
    if not params.embeds:
        limits.check_head()
    vocab_size = limits.vocab_size
    if not prompt_token_ids:
        raise ValueError("the prompt is empty; it needs at least one token.")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"the prompt holds token id {low if low < 0 else high}, outside the vocabulary of {vocab_size} "
            "tokens (0 to vocabulary - 1)."
        )
    length = len(prompt_token_ids)
    if length >= max_model_len:
        raise too_long(f"{length} tokens", max_model_len)
    if params.prompt_logprobs_start >= length:
        raise ValueError(
            f"prompt_logprobs_start is {params.prompt_logprobs_start}, but the prompt has {length} tokens; it must "
            f"be at most {length - 1}."
        )
    if params.min_tokens > max_model_len - length:
        raise ValueError(
            f"min_tokens is {params.min_tokens}, but behind a prompt of {length} tokens max_model_len "
            f"({max_model_len}) leaves room for {max_model_len - length}."
        )


def check_params(
    params: SamplingParams, limits: RequestLimits, goals: Callable[[], Goals], *, has_tokenizer: bool
) -> None:
    """Raise ValueError for parameters that this model, engine or tokenizer cannot serve."""
    vocab_size = limits.num_logits
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(params, name):
            if token_id >= vocab_size:
                raise ValueError(f"{name} holds {token_id}, outside the vocabulary of {vocab_size} tokens.")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise ValueError(f"{name} is {count}, more tokens than the vocabulary has; at most {vocab_size}.")
    if params.prompt_logprobs is not None and not limits.has_base_model:
        raise ValueError(
            f"prompt_logprobs is {params.prompt_logprobs}, and {limits.model_name} has no base model apart "
            "from its head, whose logits could be made in pieces. Leave it out."
        )
    if params.embeds and not limits.has_base_model:
        raise ValueError(
            f"{limits.model_name} has no base model apart from its head, whose hidden states could be an embedding."
        )
    if params.itl_goal is not None or params.ttft_goal is not None:
        _check_goals(params, goals())
    if has_tokenizer:
        return
    for name, is_used in (
        ("stop strings", bool(params.stop)),
        ("bad_words", bool(params.bad_words)),
        ("structured_output", params.structured_output is not None),
        ("skip_special_tokens=False", not params.skip_special_tokens),
    ):
        if is_used:
            raise ValueError(
                f"{name} need a tokenizer, and the engine was built without one; pass tokenizer=... to LLM."
            )


def _check_goals(params: SamplingParams, in_force: Goals) -> None:
    """Raise ValueError for a goal that is stricter than the engine's."""
    for name in ("itl_goal", "ttft_goal"):
        goal, least = getattr(params, name), getattr(in_force, name)
        if goal is not None and (least is None or goal < least):
            has = "none" if least is None else f"{least:g} s"
            remedy = f"the engine option {name}" if least is None else f"at least {least:g} s"
            raise ValueError(
                f"{name} of a request is {goal:g} s, and that of the engine is {has}; a request may only wait longer. "
                f"Set {remedy}, or leave it out."
            )

"""Text to tokens and back: `InputProcessor` makes checked requests, `IncrementalDetokenizer` makes text."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from typing import Any

from nanovllm.config import MAX_PRIORITY, EngineConfig, text
from nanovllm.errors import PromptTooLongError, too_long
from nanovllm.outputs import OutputKind, RequestMetrics
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import NewRequest

# A character has at most four bytes, hence at most three byte tokens while it is unfinished. Text that still ends in a
# replacement character after more tokens starts with invalid bytes, and is not held back.
MAX_UNFINISHED = 3
MAX_PENDING = 6
# Most tokens in the window; tokens without text stay in it as context up to this number.
MAX_WINDOW = 8


class IncrementalDetokenizer:
    """Appends each character to `text` once all of its bytes are there.

    A token's text may depend on the previous token (spaces, byte fallback), so each decode covers a short window: the
    tokens of the last piece of text and all later ones. A token may end one character and begin the next::

        tokens   [ settled | pending ...   ]      pending: they end in an unfinished character
        text     [ settled | early | \ufffd ]      early: whole characters of pending tokens, appended already

    Args:
        decode_ids: function that returns the text of some tokens.
        texts: text of each token of whole characters, and "" for any other; None if only `decode_ids` knows.
    """

    def __init__(self, decode_ids: Callable[[list[int]], str], texts: Mapping[int, str] | None = None) -> None:
        self.text = ""
        self._texts = texts
        self._decode_ids = decode_ids
        self._window: list[int] = []
        self._num_settled = 0  # tokens of the window with text appended already
        self._num_early = 0  # characters of pending tokens that have been appended

    def add(self, token_id: int) -> None:
        is_settled = len(self._window) == self._num_settled and not self._num_early
        if is_settled and self._texts is not None and (new := self._texts[token_id]):
            self.text += new
            self._window = [token_id]
            self._num_settled = 1
            return
        self._window.append(token_id)
        settled = self._decode(self._num_settled)
        end = len(self._window)
        text = self._decode(end)
        if text.endswith("\ufffd"):
            self._append(text.rstrip("\ufffd"), len(settled))
            if end - self._num_settled <= MAX_PENDING:
                return
            end, text = self._longest_whole_prefix()
        if len(text) <= len(settled):  # a token without text: a special one, or a space that comes with its word
            if end > MAX_WINDOW:
                del self._window[self._num_settled : end]
            else:
                self._num_settled = end
            return
        self._append(text, len(settled))
        self._num_early -= len(text) - len(settled)
        self._window = self._window[self._num_settled :]
        self._num_settled = end - self._num_settled

    def _append(self, text: str, num_settled: int) -> None:
        """Append the new part of the window's text; its first num_settled characters belong to settled tokens."""
        new = text[num_settled + self._num_early :]
        self.text += new
        self._num_early += len(new)

    def unfinished_text(self) -> str:
        """Text of the pending tokens, with replacement characters: the rest of the text if no token follows."""
        return self._decode(len(self._window))[len(self._decode(self._num_settled)) + self._num_early :]

    def _longest_whole_prefix(self) -> tuple[int, str]:
        """(length, text) of the longest prefix of the window that splits no character."""
        last = len(self._window)
        for end in range(last - 1, last - MAX_UNFINISHED - 1, -1):
            text = self._decode(end)
            if not text.endswith("\ufffd"):
                break
        return end, text

    def _decode(self, end: int) -> str:
        return self._decode_ids(self._window[:end])


def plain_detokenizer(tokenizer: Any, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
    """A detokenizer by the tokenizer's own `decode`."""
    return IncrementalDetokenizer(partial(decode, tokenizer, skip_special_tokens=skip_special_tokens))


def decode(tokenizer: Any, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """Text of the tokens, with or without special ones, without clean-up of spaces."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


Prompt = str | SequenceABC[int] | Mapping[str, Any]

OPTION_KINDS: tuple[tuple[str, Any, str], ...] = (  # (option of a request, its type, the type's name in errors)
    ("sampling_params", SamplingParams, "SamplingParams"),
    ("priority", numbers.Integral, "a whole number"),
    ("cache_salt", str, "a string"),
    ("timeout", numbers.Real | None, "a number of seconds or None"),
    ("client", str, "a string"),
)
PLAIN_OPTIONS = {field.name for field in fields(SamplingParams)}
OPTION_DEFAULTS: dict[str, Any] = {"priority": 0, "cache_salt": "", "timeout": None, "client": ""}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The model's limits on requests.

    vocab_size: rows of the embedding; a prompt's token ids are below it.
    num_logits: number of tokens that can be sampled: they have a row in the embedding and in the head.
    model_name: name of the model's class, for errors.
    has_base_model: True if the head is a separate module, which prompt_logprobs requires.
    has_head: False for a model that embeds alone, see `check_head`.
    eos_token_ids: end-of-sequence tokens that can be sampled; the model's config may name others.
    sampling_defaults: fields of `SamplingParams` that the model sets for requests without parameters.
    """

    vocab_size: int
    num_logits: int
    model_name: str
    has_base_model: bool = True
    has_head: bool = True
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


class RequestParts:
    """Parts of requests that features bring; this default refuses options beyond temperature, filters and ends.

    `AllParts` in `features/composition` serves all of them.
    """

    def encode(
        self, text: str, encode: Callable[[str], list[int]], whole: Callable[[str], list[int]], limit: int | None
    ) -> list[int]:
        """Token ids of a text, in one call; `Pieces` tokenises long texts in parts, fairly among clients.

        Args:
            encode: function that tokenises a part of the text, without special tokens.
            whole: function that tokenises the whole text, with special tokens if they are wanted.
            limit: number of tokens at which the prompt is too long; None for no limit.

        Raises PromptTooLongError if `limit` is reached before the end of the text.
        """
        return whole(text)

    def plain(self, prompt: Any, tokenize: Callable[..., list[int]]) -> Any:
        """Text or token ids of a prompt that is a dictionary; raises TypeError or ValueError for another form."""
        return prompt

    params: type[SamplingParams] = SamplingParams
    detokenizer: Callable[..., IncrementalDetokenizer] = staticmethod(plain_detokenizer)

    def completed(self, params: SamplingParams) -> SamplingParams:
        """Parameters as this class serves them; raises ValueError for an option that it does not serve."""
        given = ((field.name, getattr(params, field.name), field.default) for field in fields(params))
        others = [name for name, value, default in given if value not in (default, {}) and name not in PLAIN_OPTIONS]
        if others or params.embeds:
            raise ValueError(f"this engine was built without {others[0] if others else 'embeddings'}; leave it out.")
        return params

    def merged_metrics(self, samples: list[RequestMetrics]) -> RequestMetrics:
        """The metrics of a request, from the metrics of its samples: by default the first one's."""
        return samples[0]

    def ended(self, prompt: Any, token_ids: list[int], params: Any) -> list[int]:
        """The truncated `token_ids` of a prompt; a feature attaches further stop tokens to them as `end_token_ids`."""
        return token_ids

    def fields_of(self, params: Any) -> dict[str, Any]:
        """Further fields of `NewRequest` for these parameters; raises ValueError if the model cannot serve them."""
        return {}


class InputProcessor:
    """Makes `NewRequest`s for one engine; stateless, hence thread-safe.

    Args:
        tokenizer: tokenizer of the model; None if prompts are token ids only.
        config: configuration with every option resolved.
        clock: clock of the engine, in seconds; never goes back.
        parts: parts of features; None for `RequestParts`.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: EngineConfig,
        limits: RequestLimits,
        clock: Callable[[], float] = time.monotonic,
        parts: RequestParts | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self.clock = clock
        self.tokenizer = tokenizer
        self.parts: Any = parts or RequestParts()
        # Parameters of requests that bring none.
        self.default_params: Any = self.parts.params(**limits.sampling_defaults)

    def process(
        self, prompts: Any, sampling_params: Any = None, *, request_ids: Iterable[str], **options: Any
    ) -> list[NewRequest]:
        """The checked requests of one call; arguments as in `LLM.generate`.

        Args:
            request_ids: ids, at least one a prompt.
        """
        items = [prompts] if isinstance(prompts, (str, Mapping)) else _as_list(prompts)
        if items and all(isinstance(item, numbers.Integral) for item in items):
            items = [items if isinstance(prompts, Iterator) else prompts]
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
        """The checked requests of a list of prompts, which arrived at `arrival_time` (engine's clock; None is now).

        Raises TypeError or ValueError, naming the prompt if there are several.
        """
        arrival_time = self.clock() if arrival_time is None else arrival_time
        params = self.default_params if sampling_params is None else sampling_params
        count = len(prompts)
        each = zip(prompts, islice(request_ids, count), _one_each(count, params, options), strict=True)
        requests: list[NewRequest] = []
        prepared: dict[int, dict[str, Any]] = {}  # id of parameters, which prompts may share -> fields
        for number, (prompt, request_id, (params, own_priority, salt, own_timeout, own_client)) in enumerate(each):
            try:
                _check_options(params, own_priority, salt, own_timeout, own_client)
                params = self.parts.completed(params)
                prompt = self.parts.plain(prompt, self.tokenize) if isinstance(prompt, Mapping) else prompt
                token_ids = self._token_ids(prompt, params)
                check_prompt(token_ids, self.limits.vocab_size, self.config.max_model_len)
                if id(params) not in prepared:
                    check_params(params, self.limits, has_tokenizer=self.tokenizer is not None)
                    prepared[id(params)] = self.parts.fields_of(params)
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
        """Token ids of a prompt, truncated."""
        token_ids = self.tokenize(prompt, limit=self.limit_of(params))
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        ended: list[int] = self.parts.ended(prompt, token_ids, params)
        return ended

    def limit_of(self, params: SamplingParams | None) -> int | None:
        """Number of tokens at which a prompt is too long; None if its beginning is cut off."""
        truncates = params is not None and params.truncate_prompt_tokens is not None
        return None if truncates else self.config.max_model_len

    def tokenize(self, prompt: Any, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Token ids of a prompt given as text or as ids; text gets special tokens if `add_special_tokens`.

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
            prompt = self.parts.encode(
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
    """(parameters, options ...) of each of `count` prompts; an option is one value for all, or a list of one each."""
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
    """The error of one of several prompts, with the prompt's number, as a type that takes a message alone."""
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


def check_prompt(prompt_token_ids: list[int], vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError for an (already truncated) prompt that cannot be served."""
    if not prompt_token_ids:
        raise ValueError("the prompt is empty; it needs at least one token.")
    low = min(prompt_token_ids)
    high = max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"the prompt holds token id {low if low < 0 else high}, outside the vocabulary of {vocab_size} "
            "tokens (0 to vocabulary - 1)."
        )
    length = len(prompt_token_ids)
    if length >= max_model_len:
        raise too_long(f"{length} tokens", max_model_len)


def check_params(params: SamplingParams, limits: RequestLimits, *, has_tokenizer: bool) -> None:
    """Raise ValueError for stop tokens outside the vocabulary, and for text options without a tokenizer."""
    check_token_ids("stop_token_ids", params.stop_token_ids, limits)
    if not has_tokenizer:
        check_unused("stop strings", params.stop)
        check_unused("skip_special_tokens=False", not params.skip_special_tokens)


def check_token_ids(name: str, token_ids: Iterable[int], limits: RequestLimits) -> None:
    """Raise ValueError for token ids of an option that cannot be sampled."""
    for token_id in token_ids:
        if token_id >= limits.num_logits:
            raise ValueError(f"{name} holds {token_id}, outside the vocabulary of {limits.num_logits} tokens.")


def check_unused(name: str, value: Any) -> None:
    """Raise ValueError if an option that needs a tokenizer is used without one."""
    if value:
        raise ValueError(f"{name} need a tokenizer, and the engine was built without one; pass tokenizer=... to LLM.")

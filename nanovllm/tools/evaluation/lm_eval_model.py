"""Model type `nanovllm` of lm-eval: all requests of a task in one batch, shared prefixes computed once.

::

    few-shot examples | question | answer A        prompt of a log-likelihood request
    [ prefix cache ............. ][ computed ]     prompt_logprobs from the answer's first token on

Answers equal the `hf` type's with the same `max_length`, the maximum number of tokens that the model reads. The engine
reads an answer's last token too and samples one more, so max_length is its max_model_len - 2.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from lm_eval import models as _own_types  # noqa: F401  # registered first: a registry that is not empty loads no others
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanovllm.features.sampling_params import SamplingParams
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.outputs import RequestOutput
from nanovllm.serving.llm import LLM

logger = logging.getLogger("nanovllm")

NAME = "nanovllm"
UNREAD_TOKENS = 2  # positions of max_model_len without an input token: an answer's last token and the sampled one
MAX_NEW_TOKENS = 256  # default of a task; equal to lm-eval's
# Generation options of tasks, by their names in `SamplingParams`.
GENERATION = (*SamplingParams.model_options, "seed")
COMMAND_DEVICE = "cuda:0"  # default of lm-eval's command
BLOCK_SIZE = 16  # small: the partial last block of a context is computed for each answer

TokenizedRequest = tuple[Any, list[int], list[int]]  # key of lm-eval's cache, context, continuation


class NanoVLLM(TemplateLM):
    """Log-likelihoods and texts by an `LLM`.

    Args:
        pretrained: the model, see `LLM`; `model` is an alias.
        tokenizer: see `LLM`.
        max_length: maximum number of tokens read by the model, None: its limit; longer contexts are cut at the start.
        max_gen_toks: default number of new tokens of an answer.
        add_bos_token: True to add special tokens around texts; None: the tokenizer's default.
        prefix_token_id: replaces an empty context; None: the tokenizer's token for beginning or end of text.
        device: see `LLM`; a missing GPU becomes the CPU, since lm-eval's command asks for a GPU by default.
        batch_size, max_batch_size: options of lm-eval's command, ignored: the engine batches by its own options.
        **options: engine options, see `EngineConfig`.

    Raises the errors of `LLM`.
    """

    def __init__(
        self,
        pretrained: Any = DEFAULT_MODEL,
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        max_gen_toks: int = MAX_NEW_TOKENS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        options.pop("max_batch_size", None)
        if "model" in options:
            pretrained = options.pop("model")
        if batch_size not in (None, 1, "1", "auto"):
            logger.info("batch_size=%s has no effect: the engine makes its own batches (max_num_seqs)", batch_size)
        if max_length is not None:
            if "max_model_len" in options:
                raise ValueError("max_length and max_model_len are both given; give one of them.")
            options["max_model_len"] = max_length + UNREAD_TOKENS
        if options.get("device") in ("cuda", COMMAND_DEVICE) and not torch.cuda.is_available():
            logger.warning(
                "device=%s, the default of lm-eval's command: there is no GPU, so the CPU", options["device"]
            )
            options["device"] = "auto"
        options = {"block_size": BLOCK_SIZE} | {name: value for name, value in options.items() if value is not None}
        self.llm = LLM(pretrained, tokenizer=tokenizer, **options)
        self.tokenizer = self.llm.tokenizer
        if self.tokenizer is None:
            raise ValueError("lm-eval's requests are texts, and this model has no tokenizer; pass tokenizer=...")
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id

    # ---------------------------------------------------------------------------------------------- lm-eval's queries

    @property
    def max_length(self) -> int:
        """Maximum number of tokens read by the model."""
        return self.llm.config.max_model_len - UNREAD_TOKENS

    @property
    def eot_token_id(self) -> int:
        token_id: int = self.tokenizer.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        known = (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        found = next((token_id for token_id in known if token_id is not None), None)
        if found is None:
            raise ValueError("the tokenizer has no token for beginning or end of text; pass prefix_token_id=...")
        return found

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text; adds no prefix token to a text that begins with one, from a chat template."""
        adds = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            adds = False
        options = {} if adds is None else {"add_special_tokens": adds}
        token_ids: list[int] = self.tokenizer.encode(string, **options)
        return token_ids

    # ---------------------------------------------------------------------------------------------- log-likelihoods

    def _loglikelihood_tokens(
        self, requests: list[TokenizedRequest], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would produce it."""
        prompts = []
        params = []
        for _key, context, continuation in requests:
            if not continuation or len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens; it needs 1 to max_length ({self.max_length})."
                )
            context = context or [self.prefix_token_id]  # empty: lm-eval moves spaces to the continuation
            prompts.append((context + continuation)[-(self.max_length + 1) :])
            start = len(prompts[-1]) - len(continuation)
            params.append(SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start))
        # Adjacent prompts with a common prefix hit even a small cache.
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        outputs = self._generate([prompts[n] for n in order], [params[n] for n in order], disable_tqdm)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(prompts)
        for number, output in zip(order, outputs, strict=True):
            reports = (output.prompt_logprobs or [])[params[number].prompt_logprobs_start :]
            told = [next(iter(report.values())) for report in reports if report is not None]
            answers[number] = sum(one.logprob for one in told), all(one.rank == 1 for one in told)
            if (key := requests[number][0]) is not None:  # None for a window of a longer text
                self.cache_hook.add_partial("loglikelihood", key, answers[number])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[TokenizedRequest] = []
        ends = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        scores = [score for score, _ in self._loglikelihood_tokens(windows, disable_tqdm)] if windows else []
        sums = [sum(scores[first:end]) for first, end in zip([0, *ends], ends, strict=False)]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (request.args[0],), total)
        return sums

    # --------------------------------------------------------------------------------------------------------- texts

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = []
        params = []
        for context, options in (request.args for request in requests):
            given: dict[str, Any] = dict(normalize_gen_kwargs(options, self.max_gen_toks))
            max_tokens, given["until"] = given.pop("max_gen_toks"), self._stops(given["until"])
            if max_tokens >= self.max_length:
                raise ValueError(f"max_gen_toks is {max_tokens}; it must be below max_length ({self.max_length}).")
            prompts.append(self.tok_encode(context)[-(self.max_length - max_tokens) :])
            params.append(self._sampling_params(given, max_tokens))
        texts = []
        for request, own, output in zip(requests, params, self._generate(prompts, params, disable_tqdm), strict=True):
            texts.append(postprocess_generated_text(output.outputs[0].text, list(own.stop), None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _stops(self, until: list[str]) -> list[str]:
        return [stop for stop in handle_stop_sequences(until, eos=self.tokenizer.eos_token) if stop]

    @staticmethod
    def _sampling_params(given: dict[str, Any], max_tokens: int) -> SamplingParams:
        """Sampling parameters from a task's options; raises ValueError for an option unknown to the engine."""
        is_sampled = given.pop("do_sample", False)
        stops = given.pop("until")
        unknown = sorted(given.keys() - set(GENERATION))
        if unknown:
            raise ValueError(f"generation_kwargs has {unknown[0]}; the engine takes {', '.join(GENERATION)}.")
        if not is_sampled:  # filters have no effect then
            given = {"temperature": 0.0} | {k: v for k, v in given.items() if k == "repetition_penalty"}
        return SamplingParams(max_tokens=max_tokens, stop=tuple(stops), **given)

    def _generate(self, prompts: list[Any], params: list[SamplingParams], disable_tqdm: bool) -> list[RequestOutput]:
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm) if prompts else []
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return outputs


def register() -> None:
    """Register the model type with lm-eval in this process."""
    if NAME not in model_registry:
        model_registry.register(NAME)(NanoVLLM)

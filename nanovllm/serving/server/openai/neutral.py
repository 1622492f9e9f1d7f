"""Fields of vLLM's, llama.cpp's and Ollama's servers that are accepted at values without effect, and refused at others.

Each table maps a field to its neutral values and the reason for refusing others; None is always neutral.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from nanovllm.serving.server.strict import Refused

_TEXT_ONLY = "the engine reads text alone"
_NO_TRANSFER = "there is no transfer of caches between servers"
_NOT_A_FILTER = "the sampler has no such filter; use top_k, top_p and min_p"
_NOT_A_PENALTY = "the sampler has no such penalty; use repetition_penalty, frequency_penalty and presence_penalty"

_VLLM: dict[str, tuple[Container[Any], str]] = {
    "use_beam_search": ((False,), "there is no beam search; use n"),
    "length_penalty": ((1,), "there is no beam search, which it belongs to"),
    "early_stopping": ((False,), "there is no beam search, which it belongs to"),
    "spaces_between_special_tokens": ((True,), "tokenizers decide where spaces are"),
    "truncation_side": (("left",), "truncate_prompt_tokens keeps the last tokens of a prompt"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "logits_processors": (([],), "a request brings no code"),
    "guided_whitespace_pattern": ((), "the grammar has white space of its own"),
    "structural_tag": ((), "use tools, whose calls are constrained by tool_choice and strict"),
    "repetition_detection": ((), "answers end by max_tokens and stop strings"),
    "kv_transfer_params": (({},), _NO_TRANSFER),
    "vllm_xargs": (({},), "they belong to plug-ins of vLLM"),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "media_io_kwargs": (({},), _TEXT_ONLY),
}
_LLAMA_CPP: dict[str, tuple[Container[Any], str]] = {
    "repeat_penalty": ((1,), "use repetition_penalty, which counts the whole prompt"),
    "repeat_last_n": ((-1,), "penalties count every token"),
    "penalize_nl": ((True,), "penalties count every token"),
    "typical_p": ((1,), _NOT_A_FILTER),
    "typ_p": ((1,), _NOT_A_FILTER),
    "tfs_z": ((1,), _NOT_A_FILTER),
    "top_n_sigma": ((-1, 0), _NOT_A_FILTER),
    "xtc_probability": ((0,), _NOT_A_FILTER),
    "min_keep": ((0, 1), _NOT_A_FILTER),
    "dynatemp_range": ((0,), "the temperature is constant"),
    "mirostat": ((0,), "there is no Mirostat; use top_p or min_p"),
    "dry_multiplier": ((0,), _NOT_A_PENALTY),
    "samplers": (([],), "filters act in the order top_k, top_p, min_p"),
    "n_probs": ((0,), "use logprobs"),
    "n_indent": ((0,), "lines are taken as the model writes them"),
    "t_max_predict_ms": ((0,), "use timeout, in seconds"),
    "timings_per_token": ((False,), "use stream_options.continuous_usage_stats"),
    "return_progress": ((False,), "a stream begins with the first token"),
    "return_tokens": ((False,), "use return_token_ids"),
    "post_sampling_probs": ((False,), "logprobs are those of the model"),
    "response_fields": (([],), "an answer has all its fields"),
    "lora": (([],), "adapters are named by model"),
    "grammar": (("",), "use guided_grammar"),
    "json_schema": ((), "use response_format or guided_json"),
}
_OLLAMA: dict[str, tuple[Container[Any], str]] = {
    "options": (({},), "give its options as fields of the request, or use /api/chat"),
}

SHARED: Refused = _VLLM | _LLAMA_CPP | _OLLAMA
COMPLETION: Refused = SHARED | {
    "best_of": ((1,), "samples are not ranked; use n"),
    "add_special_tokens": ((True,), "send token ids to choose the special tokens around a prompt"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "prompt_logprobs": ((), "use echo with logprobs, and max_tokens 0 to score a prompt"),
}
CHAT: Refused = SHARED | {
    "best_of": ((1,), "samples are not ranked; use n"),
    "echo": ((False,), "an answer holds the new message alone; use continue_final_message to go on with one"),
    "documents": (([],), "give documents as text of a message"),
    "chat_template": ((), "the server has one; start it with --chat-template FILE"),
    "add_special_tokens": ((False,), "the chat template sets the special tokens"),
    "include_reasoning": ((True,), "thought is always shown, as reasoning_content; reasoning_effort may turn it off"),
    "reasoning_format": (("auto", "deepseek"), "thought is shown as reasoning_content"),
    "reasoning_in_content": ((False,), "thought is shown as reasoning_content"),
    "thinking_forced_open": ((False,), "the chat template begins a thought"),
    "parse_tool_calls": ((True,), "calls are always parsed; start the server with --tool-format none for text"),
    "grammar_lazy": ((False,), "use tools, whose calls are constrained by tool_choice and strict"),
    "grammar_triggers": (([],), "use tools, whose calls are constrained by tool_choice and strict"),
    "functions": (([],), "it was replaced by tools"),
    "function_call": ((), "it was replaced by tool_choice"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "web_search_options": ((), "there is no web search"),
    "moderation": ((), "there is none"),
}

"""Public options, arguments, calls and properties, and what each mode refuses."""

import dataclasses
import inspect

from nanovllm import LLM, AsyncLLM, EngineConfig, SamplingParams
from nanovllm.features.refusals import REFUSALS

OPTIONS = {field.name: field for cls in (EngineConfig, SamplingParams) for field in dataclasses.fields(cls)}
# Arguments that are no features: the object itself, the subject of a call, and bundles of options.
ARGUMENTS = {
    "self", "options", "sampling_params", "prompt", "messages", "token_ids", "add_special_tokens", "tools",
    "template_options", "request_ids", "look", "use_tqdm", "output", "weights", "keep_kv", "version", "level",
}  # fmt: skip


def public_names():
    """Options of the engine and of requests; arguments, calls and properties of the front doors."""
    names = {*OPTIONS}
    for door in (LLM, AsyncLLM):
        members = {name: member for name, member in inspect.getmembers(door) if not name.startswith("_")}
        calls = [door.__init__, *(member for member in members.values() if callable(member))]
        names |= members.keys() | {name for call in calls for name in inspect.signature(call).parameters}
    return names - ARGUMENTS


def refusals(mode):
    """Reasons of a mode, by feature: those of the table, and those that options declare."""
    declared = {name: field.metadata["refused"] for name, field in OPTIONS.items()}
    return {name: reasons[mode] for name, reasons in (declared | REFUSALS).items() if mode in reasons}

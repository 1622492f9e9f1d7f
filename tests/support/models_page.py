"""docs/guide/models.md, made from what becomes of each class: `python -m tests.support.models_page` writes it."""

from collections import Counter, defaultdict
from pathlib import Path

import transformers

from nanovllm import UnsupportedModelError
from nanovllm.features.composition.binding import build_binding
from nanovllm.features.unsupported import REASONS
from nanovllm.layout import kinds_of
from tests.support.class_outcomes import NOT_BUILT, ONE_RANK, REFUSED, SINCE
from tests.support.tiny_classes import class_names, tiny_class_model

PAGE = Path(__file__).parents[2] / "docs/guide/models.md"
VERSION = f"Made with `transformers` {transformers.__version__}."

_INTRODUCTION = """# Models

Which causal language model classes of `transformers` are served, which are refused, and why. {version}

Every class runs in the tests as a tiny random model: a served one gives the greedy float32 tokens of its own
`generate`, for contexts of half a window to four windows, small token budgets, a cold and a warm prefix cache, and
preemption. What else can be loaded behind a class (an adapter, code of a checkpoint's own) passes the same checks at
load, or is refused.
Pictures: [image-text classes](images.md#classes).

{counts}

## Served

*Since*: the first release that serves it without a limit on its length. *What is special* is what the attention
layers, the experts or the rotary embeddings of its default configuration ask for:

- **window, chunks**: layers see the last tokens, or their own chunk; with full layers between, unless it says *all*.
- **soft-cap, sinks**: scores are capped; a learned score joins the softmax.
- **K wider than V**: multi-head latent attention, expanded: its cache holds K and V of every head, not the latents.
- **shared K, V**: layers read an earlier layer's cache.
- **states**: layers keep a recurrent state of a sequence (linear attention, a state space, the last inputs of a
  convolution) in a slot of a pool, instead of K and V or beside them. On a GPU `pip install '.[hybrid]'` brings
  flash-linear-attention, with which prompts are faster; `transformers` then takes it on a CPU too, where it fails.
- **experts**: routed, through the library's experts interface: `grouped_mm` on a GPU, in CUDA graphs if in bfloat16;
  packed products on a CPU for a model that the engine loaded. *Own experts* run in the model's own code,
  which may loop over the experts on the host and then needs `enforce_eager=True` on a GPU.
- **long rope**: the long factors if `max_model_len` is beyond the original length, else the short ones, for every
  request of the engine; a log line says which. "dynamic" frequencies are served up to the length from which they
  follow the batch.

*What it lacks*, though it is served: [several ranks](tensor_parallel.md) (`tensor_parallel_size` above 1), and why;
log-probabilities of prompts, `embed` and `score`, where hidden states and head cannot be told apart. The other classes
give in the tests the same tokens on two ranks as by themselves, all from a folder saved by `save_pretrained`.

The backends `cpp`, `flex` and `sdpa` serve every class on a CPU, `flex` and `sdpa` on a GPU, there with `flex` in CUDA
graphs. A class whose forward pass a graph cannot capture runs without one, and a log line says why: experts in another
dtype than bfloat16, or a number copied from the host. A window or chunk that holds `max_model_len` does not count.

| class | since | what is special | what it lacks |
|---|---|---|---|
"""
_REFUSED = """
## Refused

The error names the layer and says the same. What else is refused for a reason that depends on options or weights, not
on the class, is below.

| reason | what would serve it | classes |
|---|---|---|
"""
_OTHERS = """
### Refused for other reasons

| a model that | |
|---|---|
"""


def special_features(binding):
    """What the layers, the experts and the rotary embeddings of a served model ask for, in words."""
    kinds, found = kinds_of(layer.traits for layer in binding.layers), []
    windows = {kind.sight.window for kind in kinds}
    if binding.mixers:
        found.append("states" if binding.layers else "states (all)")
    if windows - {None}:
        found.append("window" if None in windows else "window (all)")
    if any(kind.sight.chunk for kind in kinds):
        found.append("chunks")
    if any(kind.softcap for kind in kinds):
        found.append("soft-cap")
    if any(kind.has_sinks for kind in kinds):
        found.append("sinks")
    if any(kind.head_dim > kind.value_dim for kind in kinds):
        found.append("K wider than V")
    if len({(kind.num_heads, kind.num_kv_heads, kind.head_dim, kind.value_dim) for kind in kinds}) > 1:
        found.append("layers of several shapes")
    if any(layer.traits.shares is not None for layer in binding.layers):
        found.append("shared K, V")
    modules = list(binding.model.modules())
    if any(hasattr(module, "is_transposed") and hasattr(module, "has_gate") for module in modules):
        found.append("experts")
    elif any("Experts" in type(module).__name__ for module in modules):
        found.append("own experts")
    if binding.rope.choice:
        found.append("long rope")
    return ", ".join(found)


_WITHOUT_RANKS = {
    "no plan": "several ranks (no plan in `transformers`)",
    "part of the plan": "several ranks (a part of its plan)",
    "other results on ranks": "several ranks (a statistic over a shared width)",
    "states on ranks": "several ranks (recurrent states)",
}


def lacking_features(class_name, binding):
    found = [_WITHOUT_RANKS[ONE_RANK[class_name]]] if class_name in ONE_RANK else []
    if not binding.passes.has_base_model:
        found.append("log-probabilities of prompts, `embed`, `score`")
    return ", ".join(found)


def served_row(class_name, binding):
    since, lacking = SINCE.get(class_name, "unreleased"), lacking_features(class_name, binding)
    return f"| {class_name} | {since} | {special_features(binding)} | {lacking} |"


def rows_by_class():
    """The row of each class that is served."""
    rows = {}
    for class_name in class_names():
        if class_name in NOT_BUILT:  # some are built, and read what is not given to them
            continue
        model = tiny_class_model(class_name)
        try:
            binding = build_binding(model, is_live=True)
        except UnsupportedModelError as error:
            if REFUSED.get(class_name) != error.reason:
                raise
            continue
        rows[class_name] = served_row(class_name, binding)
        binding.close()
    return rows


def page(rows):
    """The page's text, of the rows of the served classes."""
    refused = defaultdict(list)
    for name in class_names():
        if name in REFUSED:
            refused[REFUSED[name]].append(name)
    num_refused = sum(map(len, refused.values()))
    num_by_itself = len([name for name in class_names() if name in NOT_BUILT])
    counts = (
        f"Of {len(class_names())} classes {len(rows)} are served and {num_refused} refused; {num_by_itself} cannot be "
        "built by themselves."
    )
    text = _INTRODUCTION.format(version=VERSION, counts=counts) + "\n".join(rows.values()) + "\n" + _REFUSED
    for reason, _ in Counter(REFUSED.values()).most_common():
        if refused[reason]:
            trait, remedy = REASONS[reason]
            text += f"| {trait} | {remedy} | {', '.join(refused[reason])} |\n"
    text += _OTHERS
    for reason, (trait, remedy) in REASONS.items():
        if not refused[reason]:
            text += f"| {trait} | {remedy} |\n"
    text += "\nNot tried, since they cannot be built by themselves:\n\n"
    return text + "".join(f"- {name}: {why}.\n" for name, why in NOT_BUILT.items())


if __name__ == "__main__":
    PAGE.write_text(page(rows_by_class()), encoding="utf-8")

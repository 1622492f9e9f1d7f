"""A live module with adapters as PEFT makes them: each keeps its prefixes over switches, and none finds another's."""

import random

import pytest
import torch
from torch import nn

from nanovllm import LLM, SamplingParams
from tests.support.layer_kinds import own_answer
from tests.support.llms import assert_idle_and_whole, generate, greedy, submit, token_ids
from tests.support.tiny_models import random_prompts, tiny_model

PROMPTS = random_prompts(4, low=33, high=70, seed=3)
SIZES = {"block_size": 16, "num_kv_blocks": 129, "max_num_seqs": 6, "max_model_len": 160, "max_num_batched_tokens": 64}
NUM_TOKENS = 6
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)


class Adapted(nn.Module):
    """A linear layer with adapters, and attributes under the names of PEFT's LoRA layer."""

    def __init__(self, base_layer, names):
        super().__init__()
        self.base_layer = base_layer
        shape = base_layer.weight.shape
        self.lora = nn.ParameterDict({name: torch.randn(shape) / shape[1] ** 0.5 for name in names})
        self.scaling = dict.fromkeys(names, 1.0)
        self.merged_adapters = []
        self.lora_variant = {}
        self._active_adapter = [names[0]]
        self._disable_adapters = False

    def forward(self, x):
        result = self.base_layer(x)
        if not self._disable_adapters and not self.merged_adapters:
            for name in [self._active_adapter] if isinstance(self._active_adapter, str) else self._active_adapter:
                product = nn.functional.linear(x, self.lora[name]) * self.scaling[name]
                result = result + (-product if name in self.lora_variant else product)
        return result

    def merge(self):
        for name in self._active_adapter:
            self.base_layer.weight.data += self.lora[name].data * self.scaling[name]
            self.merged_adapters.append(name)


def adapted_model():
    model = tiny_model(num_layers=1)
    torch.manual_seed(5)
    for module in list(model.modules()):
        for name in ("v_proj", "down_proj"):
            if hasattr(module, name):
                setattr(module, name, Adapted(getattr(module, name), ["a", "b"]))
    return model.eval()


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, Adapted)]


def switch(model, adapter):
    """Make some adapters the active ones, or disable all."""
    for layer in layers_of(model):
        layer._disable_adapters = adapter is None
        if adapter is not None:
            layer._active_adapter = list(adapter)


def answers(model):
    return [own_answer(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def share_of_hits(outputs):
    """Found prompt tokens by all that can be found: full blocks before the last token."""
    found = sum(output.num_cached_tokens for output in outputs)
    return found / sum((len(output.prompt_token_ids) - 1) // 16 * 16 for output in outputs)


@pytest.mark.parametrize("tiers", [{}, {"num_kv_blocks": 17, "prefix_cache_host_bytes": 2**24}], ids=["pool", "tier"])
def test_each_adapter_finds_its_own_prefixes_again(tiers):
    model = adapted_model()
    with LLM(model, **SIZES | tiers) as llm:
        seen = set()
        for adapter in ("a", "b", "a", None, "b", "ab", "ba", "a", None, "ab"):
            switch(model, adapter)
            outputs = generate(llm, PROMPTS, GREEDY)
            assert token_ids(outputs) == answers(model)
            while llm._engine.use_idle_time(captures=True):
                pass
            if adapter not in seen or not tiers:
                assert share_of_hits(outputs) == (1.0 if adapter in seen else 0.0)
            seen.add(adapter)
        assert not tiers or llm._engine.block_manager.num_loaded_tokens > 0
        assert_idle_and_whole(llm)


def test_a_name_and_a_list_of_it_are_one_switch():
    model = adapted_model()
    with LLM(model, **SIZES) as llm:
        generate(llm, PROMPTS, GREEDY)
        for layer in layers_of(model):
            layer._active_adapter = "a"
        assert share_of_hits(generate(llm, PROMPTS, GREEDY)) == 1.0


def of_one_layer(model):
    layers_of(model)[1]._active_adapter = ["b"]


def scale(model):
    layers_of(model)[0].scaling["a"] = 0.5


@pytest.mark.parametrize("change", [of_one_layer, scale])
def test_flags_of_one_layer_are_a_root_of_their_own(change):
    model = adapted_model()
    with LLM(model, **SIZES) as llm:
        first = token_ids(generate(llm, PROMPTS, GREEDY))
        change(model)
        outputs = generate(llm, PROMPTS, GREEDY)
        assert token_ids(outputs) == answers(model) != first and share_of_hits(outputs) == 0.0
        for layer in layers_of(model):
            layer.scaling["a"] = 1.0
        switch(model, "a")
        outputs = generate(llm, PROMPTS, GREEDY)
        assert token_ids(outputs) == first and share_of_hits(outputs) == 1.0


def train(model):
    with torch.no_grad():
        layers_of(model)[0].lora["b"].neg_()


def merge(model):
    layers_of(model)[0].merge()


def vary(model):
    layers_of(model)[0].lora_variant["a"] = nn.Identity()


def flag(model):
    layers_of(model)[0].unknown = 1


@pytest.mark.costly
@pytest.mark.parametrize("change", [train, merge, vary, flag])
@pytest.mark.parametrize("also", [False, True], ids=["alone", "with a switch"])
def test_all_else_drops_the_prefixes_of_every_adapter(change, also):
    model = adapted_model()
    with LLM(model, **SIZES) as llm:
        for adapter in "ba":
            switch(model, adapter)
            generate(llm, PROMPTS, GREEDY)
        change(model)
        if also:
            switch(model, None)
        for adapter in (None, "a", "b", "a"):
            outputs = generate(llm, PROMPTS, GREEDY)
            assert token_ids(outputs) == answers(model)
            switch(model, adapter)
            outputs = generate(llm, PROMPTS[:2], GREEDY)
            assert token_ids(outputs) == answers(model)[:2]


def test_a_change_drops_prefixes_of_an_adapter_that_is_not_active():
    model = adapted_model()
    with LLM(model, **SIZES) as llm:
        generate(llm, PROMPTS, GREEDY)
        switch(model, "b")
        generate(llm, PROMPTS, GREEDY)
        with torch.no_grad():
            layers_of(model)[0].lora["a"].neg_()
        switch(model, "a")
        outputs = generate(llm, PROMPTS, GREEDY)
        assert token_ids(outputs) == answers(model) and share_of_hits(outputs) == 0.0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_running_stream_goes_on_by_the_adapter_that_it_is_switched_to(overlap):
    model = adapted_model()
    with LLM(model, overlap=overlap, **SIZES) as llm:
        stream = llm.stream(PROMPTS[0], greedy(12, ignore_eos=True))
        tokens = [next(stream).outputs[0].token_ids[-1] for _ in range(3)]
        for adapter in ("b", None, "a"):
            switch(model, adapter)
            tokens.append(next(stream).outputs[0].token_ids[-1])
            assert tokens[-1] == own_answer(model, PROMPTS[0] + tokens[:-1], 1)[0]
        *_, last = stream
        rest = own_answer(model, PROMPTS[0] + tokens, 12 - len(tokens))
        assert last.outputs[0].token_ids == tokens + rest


@pytest.mark.parametrize("num_steps", [0, 2], ids=["waiting", "running"])
def test_a_request_before_the_switch_leaves_its_blocks_under_the_root_after_it(num_steps):
    model = adapted_model()
    with LLM(model, **SIZES) as llm:
        engine = llm._engine
        submit(engine, "before", PROMPTS[0], GREEDY)
        engine.scheduler.block_manager.lookup(engine.requests["before"].sequences[0])
        for _ in range(num_steps):
            engine.step()
        switch(model, "b")
        while engine.has_unfinished:
            engine.step()
        engine.outputs.clear()
        outputs = generate(llm, PROMPTS[:1], GREEDY)
        assert share_of_hits(outputs) == 1.0 and token_ids(outputs) == answers(model)[:1]
        switch(model, "a")
        outputs = generate(llm, PROMPTS[:1], GREEDY)
        assert token_ids(outputs) == answers(model)[:1]
        assert (share_of_hits(outputs) > 0.0) == (num_steps > 0)


OPTIONS = {
    "overlap": {}, "drafts": {"overlap": False, "speculation": "suffix"},
    "tier": {"prefix_cache_host_bytes": 2**22, "num_kv_blocks": 13}, "preempted": {"num_kv_blocks": 12},
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("form", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_switches_edits_aborts_and_steps_in_any_order_leave_no_stale_kv(seed, form):
    rng = random.Random(f"{form} {seed}")
    model = adapted_model()
    sequences, known = {}, {}

    def next_token(state, tokens):
        if (state, tokens) not in known:
            known[state, tokens] = own_answer(model, list(tokens), 1)[0]
        return known[state, tokens]

    with LLM(model, **SIZES | OPTIONS[form]) as llm:
        engine = llm._engine
        adapter, edits = "a", 0

        def step():
            engine.step()
            engine.outputs.clear()
            for sequence, seen in sequences.items():
                tokens = tuple(sequence.token_ids)
                for end in range(seen, len(tokens)):
                    assert tokens[end] == next_token((adapter, edits), tokens[:end])
                sequences[sequence] = len(tokens)

        for turn in range(150):
            act = rng.choice(["add", "add", "step", "step", "step", "step", "abort", "switch", "idle", "edit"])
            if act == "add":
                prompt = rng.choice(PROMPTS)
                params = SamplingParams(
                    n=rng.choice([1, 1, 3]), top_k=1, max_tokens=rng.randrange(1, 8), ignore_eos=True
                )
                submit(engine, str(turn), prompt, params)
                sequences |= dict.fromkeys(engine.requests[str(turn)].sequences, len(prompt))
            elif act == "abort" and engine.requests:
                engine.abort(rng.choice(list(engine.requests)))
            elif act == "switch":
                adapter = rng.choice(["a", "b", "ab", None])
                switch(model, adapter)
            elif act == "edit" and rng.random() < 0.2:
                train(model)
                edits += 1
            elif act == "idle":
                engine.use_idle_time(captures=True)
            else:
                step()
        while engine.has_unfinished:
            step()
        assert engine.scheduler.stats.prefix_cache_hits > 0
        assert_idle_and_whole(llm)

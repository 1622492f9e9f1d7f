"""Sleep and wake on a GPU: memory for others, the same tokens from other addresses, graphs and stacks made anew."""

import pytest
import torch

from nanovllm import LLM
from tests.support.adapter_files import save_adapter
from tests.support.layer_kinds import own_answer
from tests.support.llms import assert_idle_and_whole, generate, greedy, submit, token_ids
from tests.support.tiny_classes import tiny_class_model
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

GREEDY = greedy(24, ignore_eos=True)
OPTIONS = {"num_kv_blocks": 4000, "max_model_len": 300, "max_num_seqs": 32, "block_size": 16}
PROMPTS = [[token % 60 for token in prompt] for prompt in random_prompts(12, low=1, high=120, seed=3)]
STACKED = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "num_layers": 3,
}  # fmt: skip
WAYS = {
    "graphs": {},
    "one by one": {"overlap": False},
    "no graphs": {"cuda_graphs": False},
    "eager": {"enforce_eager": True},
    "drafts": {"speculation": "suffix"},
    "pinned": {"prefix_cache_host_bytes": 2**26},
    "int8": {"quantization": "int8"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


def open_llm(source, **options):
    return LLM(source, **OPTIONS | options)


def answered(llm, prompts=PROMPTS, **options):
    return token_ids(generate(llm, prompts, GREEDY, **options))


def caches_of(llm):
    return [caches for _, caches in llm._engine.model_runner.binding.caches._together]


def num_bytes(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def wake_elsewhere(llm):
    """Wake while the memory of before is another's, so that the caches get other addresses."""
    taken = [torch.ones(2**24, device="cuda") for _ in range(8)]
    llm.wake()
    del taken


def capture_all(llm):
    while llm._engine.use_idle_time(captures=True):
        pass


@pytest.mark.parametrize("way", WAYS)
def test_tokens_after_wake_are_those_before(way, folder):
    with open_llm(folder, dtype="float32", **WAYS[way]) as llm:
        first = answered(llm)
        graphs = getattr(llm._engine.model_runner.executor, "_forwards", None)
        had_graphs = graphs is not None and bool(graphs.graphs)
        for level in (1, 2, 1):
            llm.sleep(level)
            assert not (had_graphs and graphs.graphs)
            wake_elsewhere(llm)
            assert answered(llm) == first
            capture_all(llm)
            assert bool(graphs is not None and graphs.graphs) == had_graphs
            llm.reset_prefix_cache()
            assert answered(llm) == first
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_to_the_device(level, folder):
    with open_llm(folder, dtype="bfloat16", num_kv_blocks=60_000) as llm:
        answered(llm)
        binding = llm._engine.model_runner.binding
        of_caches, of_weights = num_bytes(caches_of(llm)), num_bytes(binding.model.parameters())
        assert of_caches > 2**29
        allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
        llm.sleep(level)
        given = of_caches + (of_weights if level == 2 else 0)
        assert allocated - torch.cuda.memory_allocated() > 0.95 * given
        assert torch.cuda.mem_get_info()[0] - free > 0.95 * of_caches
        llm.wake()
        assert num_bytes(caches_of(llm)) == of_caches and num_bytes(binding.model.parameters()) == of_weights
        assert not any(caches.any() for caches in caches_of(llm)[:1])


def test_a_stack_of_layers_is_made_anew(tmp_path):
    """Steps of few decodes are one launch before and after."""
    folder = save_tiny(tmp_path, **STACKED)
    with open_llm(folder, dtype="bfloat16") as llm:
        executor = llm._engine.model_runner.executor
        if executor.stacked is None:
            pytest.skip("this GPU has no stacks")
        capture_all(llm)
        first = answered(llm, PROMPTS[:3])
        for level in (1, 2):
            before = executor.stacked
            llm.sleep(level)
            assert executor.stacked is None
            wake_elsewhere(llm)
            assert executor.stacked is not None and executor.stacked is not before
            capture_all(llm)
            assert answered(llm, PROMPTS[:3]) == first
            assert executor.stacked.num_launched > 0
            llm.update_weights(tiny_model(**STACKED).state_dict())  # addresses are known: nothing is dropped
            assert executor.stacked is not None and executor._forwards.graphs


def test_running_requests_go_on_and_weights_are_updated_asleep(folder):
    other = tiny_model(seed=1)
    with open_llm(folder, dtype="float32") as llm:
        engine = llm._engine
        expected = answered(llm)
        llm.reset_prefix_cache()
        for number, prompt in enumerate(PROMPTS):
            submit(engine, str(number), prompt, GREEDY)
        for _ in range(8):
            engine.step()
        llm.sleep(2)
        with pytest.raises(RuntimeError, match="asleep"):
            answered(llm)
        wake_elsewhere(llm)
        while engine.has_unfinished:
            engine.step()
        assert all(output.outputs[0].token_ids == expected[int(output.request_id)] for output in engine.outputs)
        assert len(engine.outputs) == len(PROMPTS)
        engine.outputs.clear()
        llm.sleep(2)
        llm.update_weights(other.state_dict())
        wake_elsewhere(llm)
        assert answered(llm) == [own_answer(other, prompt, 24) for prompt in PROMPTS]


def test_adapters_keep_their_slots(folder, tmp_path):
    path = save_adapter(tmp_path / "a", tiny_model(), seed=9)
    with open_llm(folder, dtype="float32") as llm:
        llm.load_adapter("a", path)
        first = answered(llm, adapter="a")
        for level in (1, 2):
            llm.sleep(level)
            wake_elsewhere(llm)
            assert answered(llm, adapter="a") == first
            capture_all(llm)
            llm.reset_prefix_cache()
            assert answered(llm, adapter="a") == first


@pytest.mark.parametrize("class_name", ["Qwen3_5ForCausalLM", "Mamba2ForCausalLM"])
def test_recurrent_states_come_back(class_name):
    options = {"max_num_batched_tokens": 160, "max_num_seqs": 4, "block_size": 64, "num_kv_blocks": 60}
    with open_llm(tiny_class_model(class_name).cuda(), **options) as llm:
        first = answered(llm)
        llm.sleep()
        wake_elsewhere(llm)
        assert answered(llm) == first
        with pytest.raises(ValueError, match="leaves the weights of a loaded module to its owner"):
            llm.sleep(2)

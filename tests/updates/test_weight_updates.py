"""Updates of weights: tokens of a new engine of the new weights, in every form that keeps copies; no stale KV."""

import gc
import random

import pytest
import torch

from nanovllm import LLM, AsyncLLM
from tests.support.adapter_files import merged, save_adapter
from tests.support.layer_kinds import own_answer
from tests.support.llms import OPTIONS, assert_idle_and_whole, generate, greedy, submit, token_ids
from tests.support.prefixes import PROMPTS as SHARED
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

NUM_TOKENS = 10
GREEDY = greedy(NUM_TOKENS, ignore_eos=True)
SIZES = {"dtype": "float32", "num_kv_blocks": 65, "max_num_seqs": 6, "max_model_len": 160, "max_num_batched_tokens": 64}
PROMPTS = random_prompts(5, low=3, high=70, seed=8)
FORMS = {"fused": {}, "eager": {"enforce_eager": True}, "compiled": {"attention_backend": "sdpa"}}


def answers(model, prompts=PROMPTS, count=NUM_TOKENS):
    return [own_answer(model, prompt, count) for prompt in prompts]


def weights_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def models():
    """Three models of one shape and other weights."""
    return [tiny_model(seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("form", ["fused", "eager", pytest.param("compiled", marks=pytest.mark.full)])
def test_tokens_are_those_of_the_new_weights_and_no_prefix_of_the_old_ones_is_found(form, models, folder):
    with LLM(folder, **SIZES | FORMS[form]) as llm:
        for model in (models[0], models[1], models[2], models[0]):
            llm.update_weights(weights_of(model))
            outputs = generate(llm, PROMPTS, GREEDY)
            assert token_ids(outputs) == answers(model) and not any(output.num_cached_tokens for output in outputs)
            assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers(model)
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "olmo2", "mistral"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_other_families_and_tied_heads_have_the_new_weights(family, tied, tmp_path):
    folder = save_tiny(tmp_path, family, tie_word_embeddings=tied)
    model = tiny_model(family, seed=4, tie_word_embeddings=tied)
    with LLM(folder, **SIZES) as llm:
        llm.update_weights(lambda: weights_of(model).items())
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers(model)


@pytest.mark.parametrize("part", ["q_proj", "up_proj", "k_proj.bias", "embed", "norm", "lm_head"])
def test_a_part_of_the_weights_leaves_the_others(part, tmp_path):
    folder = save_tiny(tmp_path, "qwen2")
    model = tiny_model("qwen2")
    other = weights_of(tiny_model("qwen2", seed=3))
    some = {name: tensor for name, tensor in other.items() if part in name}
    assert some
    with LLM(folder, **SIZES) as llm:
        llm.update_weights(some)
        model.load_state_dict(some, strict=False)
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers(model)


def test_a_live_module_has_the_new_weights_too(models):
    module = tiny_model(seed=0)
    options = {name: value for name, value in SIZES.items() if name != "dtype"}
    with LLM(module, **options) as llm:
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers(models[0])
        llm.update_weights(models[1].state_dict())
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers(models[1])
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter, models[1].get_parameter(name))
                parameter.copy_(models[2].get_parameter(name))  # its owner's edit is seen as before
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers(models[2])


def test_another_float_is_converted(models, folder):
    with LLM(folder, **SIZES) as llm:
        rounded = tiny_model(seed=1).bfloat16()
        llm.update_weights(rounded.state_dict())
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers(rounded.float())


def test_running_requests_compute_their_tokens_again(models, folder):
    with LLM(folder, **SIZES) as llm:
        engine = llm._engine
        for number, prompt in enumerate(PROMPTS):
            submit(engine, str(number), prompt, GREEDY)
        for _ in range(7):
            engine.step()
        heads = {name: request.sequences[0].output_token_ids for name, request in engine.requests.items()}
        assert len(heads) == len(PROMPTS) and any(heads.values())
        llm.update_weights(models[1].state_dict())
        while engine.has_unfinished:
            engine.step()
        for output in engine.outputs:
            head = heads[output.request_id]
            rest = own_answer(models[1], PROMPTS[int(output.request_id)] + head, NUM_TOKENS - len(head))
            assert output.outputs[0].token_ids == head + rest
        engine.outputs.clear()


def test_with_keep_kv_running_requests_go_on_and_nobody_finds_their_blocks(models, folder):
    long = random_prompts(1, low=60, high=60, seed=2)[0]
    with LLM(folder, **SIZES) as llm:
        engine = llm._engine
        stream = llm.stream(long, greedy(40, ignore_eos=True))
        for _ in range(3):
            head = next(stream).outputs[0].token_ids
        llm.update_weights(models[1].state_dict(), keep_kv=True)
        assert engine.scheduler.stats.num_preemptions == 0
        *_, last = stream
        tokens = last.outputs[0].token_ids
        assert len(tokens) == 40 and tokens[: len(head)] == head
        assert tokens[len(head) :] != own_answer(models[0], long + head, 40 - len(head))  # the new weights answer
        (output,) = generate(llm, [long + tokens], GREEDY)
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == own_answer(models[1], long + tokens, NUM_TOKENS)


def test_a_first_block_that_two_weights_have_filled_is_not_found(models, folder):
    (prompt,) = random_prompts(1, low=20, high=20, seed=6)
    with LLM(folder, **SIZES | {"block_size": 32}) as llm:
        engine = llm._engine
        submit(engine, "running", prompt, greedy(30, ignore_eos=True))
        for _ in range(3):
            engine.step()
        llm.update_weights(models[1].state_dict(), keep_kv=True)
        while engine.has_unfinished:
            engine.step()
        tokens = engine.outputs.popleft().outputs[0].token_ids
        (output,) = generate(llm, [prompt + tokens], GREEDY)
        right = own_answer(models[1], prompt + tokens, NUM_TOKENS)
        assert (output.num_cached_tokens, output.outputs[0].token_ids) == (0, right)


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda w: w | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}, "no weight 'model.layers.9"),
        (lambda w: w | {"lm_head.weight": w["lm_head.weight"][:-1]}, r"lm_head.weight has shape \(511, 384\)"),
        (lambda w: w | {"lm_head.weight": w["lm_head.weight"].int()}, "dtype torch.int32"),
        (lambda w: w | {"lm_head.weight": [1.0]}, "must be a tensor, not list"),
        (lambda w: {}, "without weights changes nothing"),
    ],
)
def test_a_bad_update_changes_nothing(change, error, models, folder):
    with LLM(folder, **SIZES) as llm:
        (first,) = generate(llm, PROMPTS[-1:], GREEDY)
        with pytest.raises((TypeError, ValueError), match=error):
            llm.update_weights(change(weights_of(models[1])))
        assert token_ids(generate(llm, PROMPTS, GREEDY)) == answers(models[0])
        assert generate(llm, PROMPTS[-1:], GREEDY)[0].num_cached_tokens > 0 and first.finished


def test_one_weight_under_two_names_has_one_value(tmp_path):
    folder = save_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    weights = weights_of(tiny_model("qwen3", seed=3, tie_word_embeddings=True))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1.0
    with LLM(folder, **SIZES) as llm, pytest.raises(ValueError, match="are one weight of this model"):
        llm.update_weights(weights)


def test_quantised_weights_refuse_by_name(models, folder):
    with LLM(folder, **SIZES | {"quantization": "int8"}) as llm, pytest.raises(ValueError, match="quantised weights"):
        llm.update_weights(models[1].state_dict())


@pytest.mark.parametrize("form", ["fused", "eager"])
def test_no_tensor_of_an_engine_keeps_old_weights(form, tmp_path):
    """Old weights lie in one range of numbers and new ones in another, so that a forgotten copy shows."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.010, 0.011)
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, skip_tokenizer_init=True, **SIZES | FORMS[form]) as llm:
        generate(llm, PROMPTS, GREEDY)
        new = {name: torch.empty_like(tensor).uniform_(-0.021, -0.020) for name, tensor in model.state_dict().items()}
        del model, parameter
        llm.update_weights(new)
        generate(llm, PROMPTS, GREEDY)
        gc.collect()
        tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor) and found.numel() >= 64]
        floats = [found.detach().to_dense() for found in tensors if found.dtype == torch.float32]
        shares = [((found > 0.0099) & (found < 0.0111)).float().mean().item() for found in floats]
        assert len(shares) > 10 and max(shares) < 0.5


def test_adapters_add_to_the_new_weights(models, folder, tmp_path):
    path = save_adapter(tmp_path / "a", models[0], seed=9)
    with LLM(folder, **SIZES) as llm:
        llm.load_adapter("a", path)
        for model in models[:2]:
            llm.update_weights(model.state_dict())
            both = generate(llm, PROMPTS[:1] * 2, GREEDY, adapter=[None, "a"])
            assert token_ids(both) == [
                own_answer(each, PROMPTS[0], NUM_TOKENS) for each in (model, merged(model, path))
            ]


def test_files_of_prefixes_are_not_found_after_an_update_nor_by_another_process(models, folder, tmp_path):
    options = OPTIONS | {"prefix_cache_dir": str(tmp_path), "skip_tokenizer_init": True, "dtype": "float32"}
    right = [answers(model, SHARED) for model in models]
    for number, model in ((1, models[1]), (2, models[2])):
        with LLM(folder, **options) as llm:
            assert token_ids(generate(llm, SHARED, GREEDY)) == right[0]
            llm.update_weights(model.state_dict())
            outputs = generate(llm, SHARED, GREEDY)
            assert token_ids(outputs) == right[number] and not outputs[0].num_cached_tokens


@pytest.mark.parametrize("form", ["fused", "live", "drafts"])
@pytest.mark.parametrize("seed", range(4))
def test_updates_aborts_and_steps_in_any_order_leave_no_stale_kv(seed, form, models, folder):
    """Each token depends on the whole prefix under the weights that are in force when it is drawn."""
    rng = random.Random(f"{form} {seed}")
    options = {name: value for name, value in SIZES.items() if form != "live" or name != "dtype"} | {"overlap": False}
    options |= {"speculation": "suffix"} if form == "drafts" else {}
    known = {}

    def next_token(version, tokens):
        if (version, tokens) not in known:
            known[version, tokens] = own_answer(models[version], list(tokens), 1)[0]
        return known[version, tokens]

    with LLM(tiny_model(seed=0) if form == "live" else folder, **options) as llm:
        engine = llm._engine
        version = 0
        sequences = {}

        def step():
            engine.step()
            engine.outputs.clear()
            for sequence, seen in sequences.items():
                tokens = tuple(sequence.token_ids)
                for end in range(seen, len(tokens)):
                    assert tokens[end] == next_token(version, tokens[:end])
                sequences[sequence] = len(tokens)

        for turn in range(80):
            act = rng.choice(["add", "add", "step", "step", "step", "step", "abort", "update"])
            if act == "add":
                prompt = rng.choice(PROMPTS)
                submit(engine, str(turn), prompt, greedy(6, ignore_eos=True))
                sequences[engine.requests[str(turn)].sequences[0]] = len(prompt)
            elif act == "abort" and engine.requests:
                engine.abort(rng.choice(list(engine.requests)))
            elif act == "update":
                version = rng.randrange(3)
                llm.update_weights(models[version].state_dict())
            else:
                step()
        while engine.has_unfinished:
            step()
        assert_idle_and_whole(llm)


@pytest.mark.parametrize("num_updates", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_while_requests_stream_every_token_is_of_the_weights_in_force(num_updates, models, folder):
    """Teacher forcing by each version gives the tokens that it would have drawn after the same tokens."""
    rng = random.Random(num_updates)
    sequences = {}  # sequence -> version of each of its tokens, None for the prompt's
    ended = []
    sizes = {"num_kv_blocks": 200, "max_num_seqs": 32, "max_num_batched_tokens": 256}
    with LLM(folder, **SIZES | sizes) as llm:
        engine = llm._engine
        version = 0
        for turn in range(num_updates):
            while len(engine.requests) < 32:
                prompt = rng.choice(PROMPTS)
                name = f"{turn} {len(engine.requests)}"
                submit(engine, name, prompt, greedy(rng.randrange(8, 40), ignore_eos=True))
                sequences[engine.requests[name].sequences[0]] = [None] * len(prompt)
            for _ in range(rng.randrange(1, 5)):
                engine.step()
            engine.outputs.clear()
            for sequence, versions in list(sequences.items()):
                versions += [version] * (len(sequence.token_ids) - len(versions))
                if sequence.is_finished:
                    ended.append((sequence.token_ids.tolist(), sequences.pop(sequence)))
            version = rng.randrange(3)
            llm.update_weights(models[version].state_dict())
    assert len(ended) > num_updates // 10
    for tokens, versions in rng.sample(ended, min(len(ended), 200)):
        with torch.no_grad():
            drawn = [model(torch.tensor([tokens])).logits[0].argmax(-1).tolist() for model in models]
        for at, of in enumerate(versions):
            assert of is None or tokens[at] == drawn[of][at - 1]


async def test_an_asynchronous_engine_takes_updates_between_two_steps(models, folder):
    async with AsyncLLM(folder, **SIZES) as llm:
        stream = llm.generate(PROMPTS[0], greedy(60, ignore_eos=True))
        head = (await anext(stream)).outputs[0].token_ids
        await llm.update_weights(models[1].state_dict())
        async for output in stream:
            tokens = output.outputs[0].token_ids
        assert tokens[: len(head)] == head and len(tokens) == 60
        async for output in llm.generate(PROMPTS[1], GREEDY):
            tokens = output.outputs[0].token_ids
        assert tokens == own_answer(models[1], PROMPTS[1], NUM_TOKENS)
        with pytest.raises(ValueError, match="no weight 'x'"):
            await llm.update_weights({"x": torch.zeros(1)})

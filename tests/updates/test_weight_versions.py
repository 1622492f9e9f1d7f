"""Labels of the weights that drew each output token: a token of these models is its weights' number modulo 3."""

import random

import pytest
import torch

from nanovllm import LLM, AsyncLLM, OutputKind, SamplingParams
from tests.support.llms import assert_idle_and_whole, generate, greedy, submit
from tests.support.tiny_models import random_prompts, save_tiny, tiny_model

PROMPTS = random_prompts(5, low=3, high=60, seed=4)
SIZES = {"dtype": "float32", "num_kv_blocks": 33, "max_num_seqs": 6, "max_model_len": 160, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def heads():
    """Heads of three versions; rows of other numbers modulo 3 are 0, and never the largest logits."""
    weight = tiny_model(num_layers=1).lm_head.weight.detach()
    number = torch.arange(len(weight))[:, None] % 3
    return [{"lm_head.weight": torch.where(number == version, weight, 0.0)} for version in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), num_layers=1)


def runs_of(updates, labels):
    """Runs of tokens by the number of the update that drew each."""
    starts = [at for at, number in enumerate(updates) if at == 0 or updates[at - 1] != number]
    return [(at, labels[updates[at]]) for at in starts]


def check(completion, updates, labels):
    expected = runs_of(updates[: len(completion.token_ids)], labels)
    assert completion.weight_versions == (None if len(labels) == 1 else expected)
    for token, number in zip(completion.token_ids, updates, strict=False):
        assert number == 0 or token % 3 == number % 3  # the first weights have no number


@pytest.mark.parametrize("options", [{}, {"overlap": False, "speculation": "suffix"}], ids=["overlap", "drafts"])
@pytest.mark.parametrize("seed", range(6))
def test_each_token_has_the_label_of_the_weights_that_drew_it(seed, options, heads, folder):
    rng = random.Random(seed)
    labels, updates, merged, ended = [None], {}, {}, {}  # updates: sequence -> number of the update of each token
    with LLM(folder, **SIZES | options) as llm:
        engine = llm._engine

        def take(output):
            for completion in output.outputs:
                assert len(labels) == 1 or bool(completion.weight_versions) == bool(completion.token_ids)
            if output.request_id in merged:
                merged[output.request_id].extend(output)
                output = merged[output.request_id]
            elif output.request_id.startswith(OutputKind.DELTA):
                merged[output.request_id] = output
            sequences = updates[output.request_id]
            for completion in output.outputs:
                check(completion, sequences[completion.index][1], labels)
            if output.finished:
                ended[output.request_id] = output

        def step():
            engine.step()
            for sequences in updates.values():
                for sequence, numbers in sequences:
                    numbers += [len(labels) - 1] * (sequence.num_output_tokens - len(numbers))
            while engine.outputs:
                take(engine.outputs.popleft())

        for turn in range(240):
            act = rng.choice(["add", "add", *["step"] * 8, "abort", "update"])
            if act == "add":
                kind = rng.choice(list(OutputKind))
                params = SamplingParams(
                    n=rng.choice([1, 1, 3]), seed=turn, top_k=3, max_tokens=rng.randrange(1, 30), stop=["e", "th"],
                    ignore_eos=True,
                )  # fmt: skip
                submit(engine, f"{kind}{turn}", rng.choice(PROMPTS), params, output_kind=kind)
                updates[f"{kind}{turn}"] = [(sequence, []) for sequence in engine.requests[f"{kind}{turn}"].sequences]
            elif act == "abort" and engine.requests:
                take(engine.abort(rng.choice(list(engine.requests))))
            elif act == "update":
                label = rng.choice([None, "same", f"update {len(labels)}"])
                llm.update_weights(heads[len(labels) % 3], keep_kv=rng.random() < 0.5, version=label)
                labels.append(label)
            elif act == "step":
                step()
        while engine.has_unfinished:
            step()
        assert sum(len(c.weight_versions or ()) > 1 for output in ended.values() for c in output.outputs) > 5 and len(
            ended
        ) == len(updates)
        assert_idle_and_whole(llm)


def test_a_running_request_reports_the_weights_before_its_first_update_too(heads, folder):
    with LLM(folder, **SIZES) as llm:
        stream = llm.stream(PROMPTS[0], greedy(6, ignore_eos=True))
        assert next(stream).outputs[0].weight_versions is None
        llm.update_weights(heads[1], version="one")
        *_, last = stream
        (first, second) = last.outputs[0].weight_versions
        assert first == (0, None) and second[1] == "one" and 1 <= second[0] <= 2
        llm.update_weights(heads[2])
        (output,) = generate(llm, PROMPTS[:1])
        assert output.outputs[0].weight_versions == [(0, None)]


@pytest.mark.parametrize("version, runs", [("one", [(0, "one")]), ("two", [(0, "one"), (4, "two")])])
def test_a_resumed_request_keeps_the_runs_of_its_tokens(version, runs, heads, folder):
    with LLM(folder, **SIZES) as llm:
        llm.update_weights(heads[1], version="one")
        (cut,) = generate(llm, PROMPTS[:1], greedy(4, ignore_eos=True))
        if version == "two":
            llm.update_weights(heads[2], version=version)
        *_, last = llm.resume(cut, greedy(4, ignore_eos=True))
        assert last.outputs[0].weight_versions == runs and len(last.outputs[0].token_ids) == 8
        assert cut.outputs[0].weight_versions == [(0, "one")]
        *_, forked = llm.fork(last, params=greedy(2, ignore_eos=True))
        assert forked.outputs[0].weight_versions == [(0, version)]


def test_an_update_while_a_resumed_request_runs_ends_its_last_run(heads, folder):
    with LLM(folder, **SIZES | {"overlap": False}) as llm:
        llm.update_weights(heads[1], version="one")
        (cut,) = generate(llm, PROMPTS[:1], greedy(4, ignore_eos=True))
        llm.update_weights(heads[2], version="two")
        stream = llm.resume(cut, greedy(4, ignore_eos=True))
        for _ in range(2):
            next(stream)
        llm.update_weights(heads[0], version="three")
        *_, last = stream
        assert last.outputs[0].weight_versions == [(0, "one"), (4, "two"), (6, "three")]


@pytest.mark.parametrize("version, error", [(7, TypeError), (b"a", TypeError), ("a" * 257, ValueError)])
def test_a_bad_label_changes_nothing(version, error, heads, folder):
    with LLM(folder, **SIZES) as llm:
        before = generate(llm, PROMPTS)
        with pytest.raises(error, match="version"):
            llm.update_weights(lambda: 1 / 0, version=version)
        assert [o.outputs for o in generate(llm, PROMPTS)] == [o.outputs for o in before]


async def test_streams_of_an_asynchronous_engine_report_labels(heads, folder):
    async with AsyncLLM(folder, **SIZES) as llm:
        kinds = OutputKind.DELTA, OutputKind.CUMULATIVE
        streams = [llm.generate(PROMPTS[0], greedy(80, ignore_eos=True), output_kind=kind) for kind in kinds]
        outputs = [await anext(stream) for stream in streams]
        await llm.update_weights(heads[2], version="two", keep_kv=True)
        async for delta in streams[0]:
            outputs[0].extend(delta)
        async for outputs[1] in streams[1]:
            pass
        for output in outputs:
            (completion,) = output.outputs
            runs = completion.weight_versions
            assert [label for _, label in runs] == [None, "two"] and len(completion.token_ids) == 80
            assert {token % 3 for token in completion.token_ids[runs[1][0] :]} == {2}

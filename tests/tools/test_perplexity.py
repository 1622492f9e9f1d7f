"""`nanovllm bench --perplexity`: that of `transformers` on the same chunks; texts and flags that are refused."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.command_line import assert_refused
from tests.support.quantised_checkpoints import save_quantised
from tests.support.tiny_models import tiny_tokenizer

FLAGS = "--dtype float32 --device cpu --block-size 16 --num-kv-blocks 129 --max-model-len 200 --perplexity-tokens 30"
TEXT = "The quick brown fox jumps over the lazy dog, says the café. " * 5


def expected(model, token_ids, length):
    """(perplexity, its standard error, scored tokens) by the logits of a module."""
    chunks = [token_ids[at : at + length] for at in range(0, len(token_ids), length)]
    losses = []
    with torch.no_grad():
        for chunk in chunks:
            logprobs = model(torch.tensor([chunk])).logits[0, :-1].double().log_softmax(-1)
            losses.append(-logprobs.gather(1, torch.tensor(chunk)[1:, None]))
    means = torch.tensor([loss.mean() for loss in losses])
    perplexity = math.exp(torch.cat(losses).mean())
    return perplexity, perplexity * float(means.std()) / len(chunks) ** 0.5, sum(map(len, losses))


@pytest.fixture
def text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return text


@pytest.mark.parametrize("name", ["plain", "kept"])
def test_it_is_that_of_transformers_on_the_same_chunks(name, folder, tmp_path, command, text):
    if name == "kept":
        folder = save_quantised(tmp_path / "model", "fp8-block")
        tiny_tokenizer().save_pretrained(folder)
    status, out, _ = command(f"bench --model {folder} --perplexity {text} {FLAGS} --json -")
    found = json.loads(out)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"]
    options = {}
    if name == "kept":
        config = AutoConfig.from_pretrained(folder)
        config.quantization_config["dequantize"] = True
        options = {"config": config}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    perplexity, error, scored = expected(model, ids, 30)
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert found["standard_error"] == pytest.approx(error, rel=1e-2)
    assert status == 0 and found["scored_tokens"] == scored
    assert found["chunks"] == -(-len(ids) // 30) and found["chunk_tokens"] == 30


def test_a_table_says_the_same_and_a_file_holds_all(folder, tmp_path, command, text):
    written = tmp_path / "figures.json"
    status, printed, _ = command(f"bench --model {folder} --perplexity {text} {FLAGS} --json {written}")
    figures = json.loads(written.read_text())
    assert status == 0
    assert f"perplexity  {figures['perplexity']:.4f} over {figures['scored_tokens']} tokens of {text}" in printed
    assert f"{figures['chunks']} of 30 tokens; the first of each is not scored" in printed


TEXTS = {
    "empty": (b"", "has 0 tokens. Name a text of 2 at least"),
    "short": (b"a", "has 1 tokens. Name a text of 2 at least"),
    "latin": (b"caf\xe9", "is not UTF-8 text: byte 0xe9 at position 3"),
    "missing": (None, "there is no file"),
}


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr("nanovllm.cli.bench.load_llm", lambda *_: pytest.fail("the model was loaded"))


@pytest.mark.parametrize("data, said", TEXTS.values(), ids=TEXTS)
def test_texts_that_cannot_be_scored_are_refused_before_the_model_is_loaded(
    data, said, folder, tmp_path, command, nothing_is_loaded
):
    text = tmp_path / "text.txt"
    if data is not None:
        text.write_bytes(data)
    assert_refused(command(f"bench --model {folder} --perplexity {text} {FLAGS}"), said)


@pytest.mark.parametrize(
    "arguments, said",
    {
        "--perplexity-tokens 10": "--perplexity-tokens is about --perplexity FILE",
        "--perplexity README.md --perplexity-tokens 1": "--perplexity-tokens is 1, but a chunk's first token",
        "--perplexity README.md --workload W": "plays no workload: leave --workload out",
        "--perplexity README.md --engines transformers": "measures this engine alone",
        "--perplexity README.md --json no/such/folder": "the folder 'no/such' does not exist",
    }.items(),
)
def test_flags_that_make_no_sense_are_refused(arguments, said, folder, command, nothing_is_loaded):
    line = f"bench --model {folder} --max-model-len 200 --device cpu {arguments}"
    assert_refused(command(line), said)

"""`nanovllm bench --perplexity`: that of `transformers` on the same chunks; texts and flags that are refused."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nanovllm.cli.main import main
from tests.support.command_line import words
from tests.support.quantised_checkpoints import save_quantised
from tests.support.tiny_models import save_tiny, tiny_tokenizer

FLAGS = "--dtype float32 --device cpu --block-size 16 --num-kv-blocks 129 --max-model-len 200 --perplexity-tokens 30"
TEXT = "The quick brown fox jumps over the lazy dog, says the café. " * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("models") / "model"))


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


@pytest.mark.parametrize("name", ["plain", "kept"])
def test_it_is_that_of_transformers_on_the_same_chunks(name, folder, tmp_path, capsys):
    if name == "kept":
        folder = str(save_quantised(tmp_path / "model", "fp8-block"))
        tiny_tokenizer().save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    assert main(["bench", "--model", folder, "--perplexity", str(text), *words(FLAGS), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
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
    assert (found["scored_tokens"], found["chunks"], found["chunk_tokens"]) == (scored, -(-len(ids) // 30), 30)


def test_a_table_says_the_same_and_a_file_holds_all(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    written = tmp_path / "figures.json"
    assert main(["bench", "--model", folder, "--perplexity", str(text), *words(FLAGS), "--json", str(written)]) == 0
    figures = json.loads(written.read_text())
    printed = capsys.readouterr().out
    assert f"perplexity  {figures['perplexity']:.4f} over {figures['scored_tokens']} tokens of {text}" in printed
    assert f"{figures['chunks']} of 30 tokens; the first of each is not scored" in printed


TEXTS = {
    "empty": (b"", "has 0 tokens. Name a text of 2 at least"),
    "short": (b"a", "has 1 tokens. Name a text of 2 at least"),
    "latin": (b"caf\xe9", "is not UTF-8 text: byte 0xe9 at position 3"),
    "missing": (None, "there is no file"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_cannot_be_scored_are_refused_before_the_model_is_loaded(
    case, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("nanovllm.cli.bench.load_llm", lambda *_: pytest.fail("the model was loaded"))
    data, said = TEXTS[case]
    text = tmp_path / "text.txt"
    if data is not None:
        text.write_bytes(data)
    assert main(["bench", "--model", folder, "--perplexity", str(text), *words(FLAGS)]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--perplexity-tokens 10", "--perplexity-tokens is about --perplexity FILE"),
        ("--perplexity README.md --perplexity-tokens 1", "--perplexity-tokens is 1, but a chunk's first token"),
        ("--perplexity README.md --workload W", "plays no workload: leave --workload out"),
        ("--perplexity README.md --engines transformers", "measures this engine alone"),
        ("--perplexity README.md --json no/such/folder", "the folder 'no/such' does not exist"),
    ],
)
def test_flags_that_make_no_sense_are_refused(arguments, said, folder, capsys, monkeypatch):
    monkeypatch.setattr("nanovllm.cli.bench.load_llm", lambda *_: pytest.fail("the model was loaded"))
    assert main(["bench", "--model", folder, "--max-model-len", "200", "--device", "cpu", *words(arguments)]) == 2
    assert said in capsys.readouterr().err

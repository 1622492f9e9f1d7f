"""`nanovllm generate`: prompts from anywhere, text or JSON out, and a trace of the run."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from nanovllm import LLM, EngineConfig, TraceWriter
from nanovllm.engine import Engine
from tests.support import traces
from tests.support.command_line import SHORT, assert_refused, generated, records
from tests.support.tiny_models import save_tiny, tiny_model, tiny_tokenizer

# ------------------------------------------------------------------------------------------------------------- generate


def test_a_prompt_as_an_argument_is_completed_on_standard_output(run, folder):
    status, out, _ = run("generate", "--raw", "The capital", *SHORT)
    answer = tiny_tokenizer().decode(generated(folder, "The capital"), skip_special_tokens=True)
    assert (status, out) == (0, answer + "\n")


def test_several_prompts_are_answered_in_order_each_under_its_name(run):
    status, out, _ = run("generate", "--raw", "first prompt", "second prompt", *SHORT)
    assert status == 0
    assert out.index("--- first prompt\n") < out.index("--- second prompt\n")


def test_json_output_is_one_object_a_line(run, folder):
    status, out, _ = run("generate", "--raw", "one", "two", "--json", *SHORT)
    assert status == 0
    first, second = records(out)
    assert (first["prompt"], second["prompt"]) == ("one", "two")
    assert first["token_ids"] == generated(folder, "one")
    assert first["text"] == tiny_tokenizer().decode(first["token_ids"], skip_special_tokens=True)
    assert (first["finish_reason"], first["stop_reason"], first["error"]) == ("length", None, None)
    assert first["num_prompt_tokens"] == len(tiny_tokenizer()("one")["input_ids"])
    assert first["num_cached_tokens"] == 0
    assert 0 < first["seconds_to_first_token"] < first["seconds"]


def test_a_file_is_one_prompt_a_line(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("größe\nzwei\n", encoding="utf-8")
    _, out, _ = run("generate", "--raw", "--file", str(tmp_path / "prompts.txt"), "--json", *SHORT)
    assert [record["prompt"] for record in records(out)] == ["größe", "zwei"]


def test_a_file_in_text_format_is_one_prompt(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("one\ntwo")
    _, out, _ = run("generate", "--raw", "--file", str(tmp_path / "prompt.txt"), "--format", "text", "--json", *SHORT)
    assert [record["prompt"] for record in records(out)] == ["one\ntwo"]


def test_a_jsonl_file_holds_texts_token_ids_messages_and_overrides(run, folder, tmp_path):
    lines = [
        "one",
        [5, 6, 7],
        {"prompt": "two", "max_tokens": 3},
        {"prompt": [5, 6, 7], "temperature": 1.0, "seed": 3},
        {"messages": [{"role": "user", "content": "three"}], "max_tokens": 2},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    status, out, _ = run("generate", "--raw", "--file", str(path), "--json", *SHORT)
    answers = [record["token_ids"] for record in records(out)]
    assert status == 0
    assert answers[:2] == [generated(folder, "one"), generated(folder, [5, 6, 7])]
    assert answers[2] == generated(folder, "two", max_tokens=3)
    assert answers[3] == generated(folder, [5, 6, 7], temperature=1.0, seed=3)
    assert len(answers[4]) == 2


def test_a_priority_for_all_and_one_of_its_own_in_jsonl_decide_which_runs_first(run):
    lines = '"one"\n{"prompt": "two", "priority": -1}\n"three"\n'
    _, out, _ = run(
        "generate",
        "--raw",
        "--format",
        "jsonl",
        "--json",
        "--priority",
        "3",
        "--max-num-seqs",
        "1",
        *SHORT,
        stdin=lines,
    )
    one, two, three = (record["seconds_in_queue"] for record in records(out))
    assert two < one < three


def test_a_timeout_ends_an_answer_with_what_there_is_of_it(run):
    lines = '"one"\n{"prompt": "two", "timeout": null}\n'
    status, out, _ = run("generate", "--raw", "--format", "jsonl", "--json", "--timeout", "1e-9", *SHORT, stdin=lines)
    assert status == 0
    assert [(r["finish_reason"], len(r["token_ids"])) for r in records(out)] == [("timeout", 0), ("length", 6)]


def test_a_timeout_ends_an_answer_of_a_chat(run):
    status, out, _ = run("chat", "--timeout", "1e-9", *SHORT, stdin="hello\n")
    assert (status, out) == (0, "\n")


@pytest.mark.parametrize(
    "flag", [("--timeout", "0"), ("--timeout", "soon"), ("--priority", "1.5"), ("--priority", "9999999999")]
)
def test_a_bad_priority_or_timeout_is_refused(run, flag):
    assert_refused(run("generate", "--raw", "hello", *flag), flag[0].strip("-"))


def test_jsonl_comes_from_standard_input_too(run):
    _, out, _ = run(
        "generate", "--raw", "--format", "jsonl", "--json", *SHORT, stdin='{"prompt": "one", "max_tokens": 2}\n'
    )
    (record,) = records(out)
    assert len(record["token_ids"]) == 2


def test_a_text_goes_through_the_chat_template(run):
    _, out, _ = run("generate", "What is it?", "--json", *SHORT)
    text = "<|user|>What is it?<|end|><|assistant|>"
    assert records(out)[0]["num_prompt_tokens"] == len(tiny_tokenizer()(text)["input_ids"])
    assert run("generate", "What is it?", "--json", "--chat", *SHORT)[1].count('"error": null') == 1


@pytest.mark.full
def test_without_options_it_is_greedy_and_repeats(run):
    first, second = (run("generate", "--raw", "one", "--json")[1] for _ in range(2))
    assert records(first)[0]["token_ids"] == records(second)[0]["token_ids"]
    assert len(records(first)[0]["token_ids"]) == 256 - len(tiny_tokenizer()("one")["input_ids"])


def test_sampling_flags_reach_the_request(run, folder):
    flags = ["--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--seed", "5"]
    _, out, _ = run("generate", "--raw", "one", "--json", *flags, *SHORT)
    expected = generated(folder, "one", temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=5)
    assert records(out)[0]["token_ids"] == expected
    assert expected != generated(folder, "one")


def test_flags_that_may_be_repeated_are_collected(run, folder):
    answer = generated(folder, "one")
    _, out, _ = run(
        "generate", "--raw", "one", "--json", "--stop-token-ids", "511", "--stop-token-ids", str(answer[2]), *SHORT
    )
    assert records(out)[0]["stop_reason"] == answer[2]


def test_biases_and_penalties_reach_the_request(run, folder):
    answer = generated(folder, "one")
    flags = ["--logit-bias", f"{answer[0]}=-100", "--logit-bias", f"{answer[1]}=-100", "--presence-penalty", "1.5"]
    _, out, _ = run("generate", "--raw", "one", "--json", *flags, *SHORT)
    biases = {answer[0]: -100, answer[1]: -100}
    assert records(out)[0]["token_ids"] == generated(folder, "one", logit_bias=biases, presence_penalty=1.5) != answer
    assert_refused(run("generate", "--raw", "one", "--logit-bias", "5"), "TOKEN_ID=BIAS")


def test_each_sample_is_a_line_of_json_or_a_piece_of_text(run, folder):
    flags = ["--n", "3", "--temperature", "1", "--seed", "5", *SHORT]
    _, out, _ = run("generate", "--raw", "one", "two", "--json", *flags)
    assert [(r["prompt"], r["index"]) for r in records(out)] == [(p, i) for p in ("one", "two") for i in range(3)]
    assert records(out)[3]["token_ids"] == generated(folder, "two", temperature=1.0, seed=5)
    _, text, _ = run("generate", "--raw", "one", *flags)
    assert [line for line in text.splitlines() if line.startswith("--- ")] == [
        "--- one [0]",
        "--- one [1]",
        "--- one [2]",
    ]


def test_log_probabilities_are_shown_as_json(run):
    status, out, _ = run("generate", "--raw", "one", "--json", "--logprobs", "2", "--prompt-logprobs", "0", *SHORT)
    (record,) = records(out)
    assert status == 0
    assert [reports[0]["token_id"] for reports in record["logprobs"]] == record["token_ids"]
    assert all([report["rank"] for report in reports] == [1, 2] for reports in record["logprobs"])  # greedy
    prompt = tiny_tokenizer()("one")["input_ids"]
    assert record["prompt_logprobs"][0] is None
    assert [reports[0]["token_id"] for reports in record["prompt_logprobs"][1:]] == prompt[1:]
    assert_refused(run("generate", "--raw", "one", "--logprobs", "2"), "printed with --json only")


def test_flags_of_text_and_prompt_reach_the_request(run):
    word, always = tiny_tokenizer().decode([65]), ["--logit-bias", "65=100"]
    _, out, _ = run("generate", "--raw", "one two three", "--json", "--truncate-prompt-tokens", "2", *SHORT)
    assert records(out)[0]["num_prompt_tokens"] == 2
    _, out, _ = run("generate", "--raw", "one", "--stop", 2 * word, "--include-stop-str-in-output", *always, *SHORT)
    assert out == 2 * word + "\n"
    _, out, _ = run("generate", "--raw", "one", "--bad-words", word, *always, *SHORT)
    assert word not in out
    flags = ["--no-skip-special-tokens", "--logit-bias", "3=100"]
    _, out, _ = run("generate", "--raw", "one", *flags, *SHORT)
    assert out == 6 * tiny_tokenizer().decode([3]) + "\n"


def test_a_processor_is_named_by_its_module(run, tmp_path, monkeypatch):
    (tmp_path / "my_processors.py").write_text("def always_65(ids, row):\n    row[65] += 1000\n    return row\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    _, out, _ = run("generate", "--raw", "one", "--json", "--logits-processors", "my_processors:always_65", *SHORT)
    assert records(out)[0]["token_ids"] == [65] * 6
    for name in ("my_processors:nothing", "no_such_module:f", "my_processors"):
        assert_refused(run("generate", "--raw", "one", "--logits-processors", name), "MODULE:FUNCTION")
    lines = json.dumps({"prompt": "one", "logits_processors": ["my_processors:always_65"]})
    assert_refused(run("generate", "--raw", "--format", "jsonl", stdin=lines), "logits_processors must hold functions")


def test_engine_flags_reach_the_engine(run, monkeypatch):
    seen: list[EngineConfig] = []
    stream = LLM.stream

    def note(self, *arguments, **options):
        seen.append(self.config)
        return stream(self, *arguments, **options)

    monkeypatch.setattr(LLM, "stream", note)
    run("generate", "--raw", "one", "--max-num-seqs", "3", "--no-enable-prefix-caching", "--engine-seed", "9", *SHORT)
    (config,) = seen
    assert (config.max_num_seqs, config.enable_prefix_caching, config.seed) == (3, False, 9)
    assert (config.block_size, config.num_kv_blocks, config.max_model_len) == (16, 65, 256)


def test_a_tokenizer_may_be_named(run, folder, tmp_path):
    bare = save_tiny(tmp_path / "bare", with_tokenizer=False)
    status, out, _ = run("generate", "--raw", "one", "--tokenizer", str(folder), "--json", *SHORT, model=str(bare))
    assert status == 0
    assert records(out)[0]["token_ids"] == generated(folder, "one")


def test_a_progress_bar_is_shown_with_its_flag_and_never_on_standard_output(run):
    _, out, err = run("generate", "--raw", "one", "two", "--progress", "--json", *SHORT)
    assert "2/2" in err
    assert len(records(out)) == 2


def test_no_progress_bar_is_shown_off_a_terminal(run):
    assert "2/2" not in run("generate", "--raw", "one", "two", *SHORT)[2]


def test_a_request_that_ends_with_an_error_is_reported_and_exits_with_one(tmp_path, run):
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[tiny_tokenizer()("zq")["input_ids"][0]] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    tiny_tokenizer().save_pretrained(tmp_path / "broken")
    status, out, err = run("generate", "--raw", "zq", "one", "--json", *SHORT, model=str(tmp_path / "broken"))
    bad, good = records(out)
    assert status == 1
    assert "finite" in bad["error"]
    assert "finite" in err
    assert len(good["token_ids"]) == 6


# ---------------------------------------------------------------------------------------------------------------- trace


def test_trace_writes_what_the_run_did_and_the_answers_stay_the_same(run, tmp_path):
    plain = run("generate", "--raw", "one", "two", *SHORT)
    assert run("generate", "--raw", "one", "two", "--trace", str(tmp_path / "out.json"), *SHORT)[:2] == plain[:2]
    trace = traces.read(tmp_path / "out.json")
    assert list(trace.names.values()) == ["0", "1"]
    assert [trace.total(name, "decode", "tokens") for name in ("0", "1")] == [5, 5]


def test_an_interrupted_run_leaves_a_whole_trace(run, tmp_path, monkeypatch):
    steps = iter(range(3))

    def interrupted(self):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(self)

    step = Engine.step
    monkeypatch.setattr(Engine, "step", interrupted)
    assert run("generate", "--raw", "one", "two", "--trace", str(tmp_path / "out.json"), *SHORT)[0] == 130
    trace = traces.read(tmp_path / "out.json")
    assert [trace.lane(name)[-1].arguments["reason"] for name in ("0", "1")] == ["abort", "abort"]
    assert len(trace.steps) == 3


def test_a_trace_that_cannot_be_written_is_refused_before_the_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr("nanovllm.llm.LLM.__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    assert_refused(run("generate", "--raw", "one", "--trace", str(tmp_path / "nowhere" / "out.json")), "nowhere")


def test_a_disk_that_fills_up_costs_the_trace_and_not_the_answers(run, tmp_path, monkeypatch):
    def fill_up(self, config):
        begin(self, config)
        self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    begin = TraceWriter.begin
    monkeypatch.setattr(TraceWriter, "begin", fill_up)
    plain = run("generate", "--raw", "one", *SHORT)
    status, out, err = run("generate", "--raw", "one", "--trace", str(tmp_path / "out.json"), *SHORT)
    assert (status, out) == (2, plain[1])
    assert "No space left" in err

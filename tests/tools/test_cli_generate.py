"""`nanovllm generate`: prompts from anywhere, text or JSON out, and a trace of the run."""

import sys

import pytest
import torch

from nanovllm import LLM, TraceWriter
from nanovllm.engine import Engine
from tests.support import traces
from tests.support.command_answers import decoded, encoded, generated
from tests.support.command_line import assert_refused, records
from tests.support.tiny_models import save_tiny, tiny_model, tiny_tokenizer

# ------------------------------------------------------------------------------------------------------------- generate


def test_a_prompt_as_an_argument_is_completed_on_standard_output(run, folder):
    status, out, _ = run("generate --max-tokens 6 --raw 'The capital'")
    assert (status, out) == (0, decoded(generated(folder, "The capital")) + "\n")


def test_several_prompts_are_answered_in_order_each_under_its_name(run):
    status, out, _ = run("generate --max-tokens 6 --raw 'first prompt' 'second prompt'")
    assert status == 0
    assert out.index("--- first prompt\n") < out.index("--- second prompt\n")


def test_json_output_is_one_object_a_line(answers, folder):
    first, second = answers("--raw one two")
    assert first["prompt"] == "one" and second["prompt"] == "two"
    assert first["token_ids"] == generated(folder, "one")
    assert first["text"] == decoded(first["token_ids"])
    assert first["finish_reason"] == "length" and first["stop_reason"] is None and first["error"] is None
    assert first["num_prompt_tokens"] == len(encoded("one")) and first["num_cached_tokens"] == 0
    assert 0 < first["seconds_to_first_token"] < first["seconds"]


@pytest.mark.parametrize("form, prompts", [("", ["größe", "zwei"]), ("--format text", ["größe\nzwei"])])
def test_a_file_is_one_prompt_a_line_or_in_text_format_one_prompt(answers, tmp_path, form, prompts):
    (tmp_path / "prompts.txt").write_text("größe\nzwei\n", encoding="utf-8")
    assert [record["prompt"] for record in answers(f"--raw --file {tmp_path / 'prompts.txt'} {form}")] == prompts


def test_a_jsonl_file_holds_texts_token_ids_messages_and_overrides(answers, folder, tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '"one"\n[5, 6, 7]\n{"prompt": "two", "max_tokens": 3}\n{"prompt": [5, 6, 7], "temperature": 1.0, "seed": 3}\n'
        '{"messages": [{"role": "user", "content": "three"}], "max_tokens": 2}'
    )
    *completed, chat = (record["token_ids"] for record in answers(f"--raw --file {path}"))
    assert completed == [
        generated(folder, "one"), generated(folder, [5, 6, 7]), generated(folder, "two", max_tokens=3),
        generated(folder, [5, 6, 7], temperature=1.0, seed=3),
    ]  # fmt: skip
    assert len(chat) == 2


def test_a_priority_for_all_and_one_of_its_own_in_jsonl_decide_which_runs_first(answers):
    lines = '"one"\n{"prompt": "two", "priority": -1}\n"three"\n'
    found = answers("--raw --format jsonl --priority 3 --max-num-seqs 1", stdin=lines)
    one, two, three = (record["seconds_in_queue"] for record in found)
    assert two < one < three


def test_a_timeout_ends_an_answer_with_what_there_is_of_it(answers):
    found = answers("--raw --format jsonl --timeout 1e-9", stdin='"one"\n{"prompt": "two", "timeout": null}\n')
    assert [(r["finish_reason"], len(r["token_ids"])) for r in found] == [("timeout", 0), ("length", 6)]


def test_a_timeout_ends_an_answer_of_a_chat(run):
    assert run("chat --timeout 1e-9", stdin="hello\n")[:2] == (0, "\n")


@pytest.mark.parametrize("flag", ["--timeout 0", "--timeout soon", "--priority 1.5", "--priority 9999999999"])
def test_a_bad_priority_or_timeout_is_refused(run, flag):
    assert_refused(run(f"generate --max-tokens 6 --raw hello {flag}"), flag.split()[0].strip("-"))


def test_a_text_goes_through_the_chat_template(answers):
    for flag in ("", "--chat"):
        (record,) = answers(f"'What is it?' {flag}")
        assert record["num_prompt_tokens"] == len(encoded("<|user|>What is it?<|end|><|assistant|>"))
        assert record["error"] is None


@pytest.mark.full
def test_without_options_an_answer_goes_on_to_the_end_of_the_context(run):
    (record,) = records(run("generate --raw one --json")[1])
    assert len(record["token_ids"]) == 256 - len(encoded("one"))


@pytest.mark.parametrize(
    "flags, params",
    {
        "--temperature 0.8 --top-k 40 --seed 5": {"temperature": 0.8, "top_k": 40, "seed": 5},
        "--temperature 1 --top-p 0.9 --min-p 0.01 --seed 5": {"temperature": 1, "top_p": 0.9, "min_p": 0.01, "seed": 5},
        "--logit-bias 65=99 --logit-bias 66=98 --presence-penalty 1.5":
            {"logit_bias": {65: 99, 66: 98}, "presence_penalty": 1.5},
        "--logit-bias 65=99 --stop-token-ids 511 --stop-token-ids 65":
            {"logit_bias": {65: 99}, "stop_token_ids": [65]},
    }.items(),
)  # fmt: skip
def test_flags_of_sampling_reach_the_request(answers, folder, flags, params):
    (record,) = answers(f"--raw one {flags}")
    assert record["token_ids"] == generated(folder, "one", **params) != generated(folder, "one")


def test_each_sample_is_a_line_of_json_or_a_piece_of_text(run, answers, folder):
    flags = "--n 3 --temperature 1 --seed 5"
    found = answers(f"--raw one two {flags}")
    assert [f"{r['prompt']} {r['index']}" for r in found] == ["one 0", "one 1", "one 2", "two 0", "two 1", "two 2"]
    assert found[3]["token_ids"] == generated(folder, "two", temperature=1.0, seed=5)
    text = run(f"generate --max-tokens 6 --raw one {flags}")[1]
    assert [line for line in text.splitlines() if line.startswith("--- ")] == [f"--- one [{i}]" for i in range(3)]


def test_log_probabilities_are_shown_as_json(run, answers):
    (record,) = answers("--raw one --logprobs 2 --prompt-logprobs 0")
    assert [reports[0]["token_id"] for reports in record["logprobs"]] == record["token_ids"]
    assert all([report["rank"] for report in reports] == [1, 2] for reports in record["logprobs"])  # greedy
    first, *others = record["prompt_logprobs"]
    assert first is None
    assert [reports[0]["token_id"] for reports in others] == encoded("one")[1:]
    assert_refused(run("generate --max-tokens 6 --raw one --logprobs 2"), "printed with --json only")


def test_flags_of_text_and_prompt_reach_the_request(run, answers):
    word = decoded([65])
    assert answers("--raw 'one two three' --truncate-prompt-tokens 2")[0]["num_prompt_tokens"] == 2
    always = "generate --max-tokens 6 --raw one --logit-bias 65=100"
    assert run(f"{always} --include-stop-str-in-output --stop", 2 * word)[1] == 2 * word + "\n"
    assert word not in run(f"{always} --bad-words", word)[1]
    out = run("generate --max-tokens 6 --raw one --no-skip-special-tokens --logit-bias 3=100")[1]
    assert out == 6 * tiny_tokenizer().decode([3]) + "\n"


def test_a_processor_is_named_by_its_module(run, answers, tmp_path, monkeypatch):
    (tmp_path / "my_processors.py").write_text("def always_65(ids, row):\n    row[65] += 1000\n    return row\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert answers("--raw one --logits-processors my_processors:always_65")[0]["token_ids"] == [65] * 6
    for name in ("my_processors:nothing", "no_such_module:f", "my_processors"):
        assert_refused(run("generate --max-tokens 6 --raw one --logits-processors", name), "MODULE:FUNCTION")
    line = '{"prompt": "one", "logits_processors": ["my_processors:always_65"]}'
    assert_refused(
        run("generate --max-tokens 6 --raw --format jsonl", stdin=line), "logits_processors must hold functions"
    )


def test_engine_flags_reach_the_engine(run, monkeypatch):
    seen = []
    stream = LLM.stream

    def note(self, *arguments, **options):
        seen.append(self.config)
        return stream(self, *arguments, **options)

    monkeypatch.setattr(LLM, "stream", note)
    run("generate --max-tokens 6 --raw one --max-num-seqs 3 --no-enable-prefix-caching --engine-seed 9")
    (config,) = seen
    assert config.max_num_seqs == 3 and not config.enable_prefix_caching and config.seed == 9
    assert config.block_size == 16 and config.num_kv_blocks == 65 and config.max_model_len == 256


def test_a_tokenizer_may_be_named(answers, folder, tmp_path):
    bare = save_tiny(tmp_path / "bare", with_tokenizer=False)
    (record,) = answers(f"--raw one --tokenizer {folder}", model=str(bare))
    assert record["token_ids"] == generated(folder, "one")


def test_a_progress_bar_is_shown_with_its_flag_and_never_on_standard_output(run):
    for flag in ("--progress", ""):
        _, out, err = run(f"generate --max-tokens 6 --raw one two --json {flag}")
        assert ("2/2" in err) == bool(flag) and len(records(out)) == 2


def test_a_request_that_ends_with_an_error_is_reported_and_exits_with_one(tmp_path, run):
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[encoded("zq")[0]] = torch.nan
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    status, out, err = run("generate --max-tokens 6 --raw zq one --json", model=str(tmp_path))
    bad, good = records(out)
    assert status == 1 and "finite" in bad["error"] and "finite" in err
    assert len(good["token_ids"]) == 6


# ---------------------------------------------------------------------------------------------------------------- trace


def test_trace_writes_what_the_run_did_and_the_answers_stay_the_same(run, tmp_path):
    plain = run("generate --max-tokens 6 --raw one two")
    path = tmp_path / "out.json"
    assert run(f"generate --max-tokens 6 --raw one two --trace {path}")[:2] == plain[:2]
    trace = traces.read(path)
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
    assert run(f"generate --max-tokens 6 --raw one two --trace {tmp_path / 'out.json'}")[0] == 130
    trace = traces.read(tmp_path / "out.json")
    assert [trace.lane(name)[-1].arguments["reason"] for name in ("0", "1")] == ["abort", "abort"]
    assert len(trace.steps) == 3


def test_a_disk_that_fills_up_costs_the_trace_and_not_the_answers(run, tmp_path, monkeypatch):
    def fill_up(self, config):
        begin(self, config)
        self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    begin = TraceWriter.begin
    monkeypatch.setattr(TraceWriter, "begin", fill_up)
    plain = run("generate --max-tokens 6 --raw one")
    status, out, err = run(f"generate --max-tokens 6 --raw one --trace {tmp_path / 'out.json'}")
    assert status == 2 and out == plain[1]
    assert "No space left" in err

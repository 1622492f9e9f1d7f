"""Batch jobs on a cluster: texts are an engine's; each row exactly once, whatever dies and is started again."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
import ray

import nanovllm.ray
from nanovllm import LLM, SamplingParams
from nanovllm.ray.batches import Stage, row_seed
from tests.support.llms import comes_true
from tests.support.ray_clusters import ENGINE, NODE_CPUS, die, join
from tests.support.tiny_models import save_tiny, tiny_tokenizer

OPTIONS = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 129, "max_model_len": 512}
NUM_FILES, ROWS_PER_FILE = 4, 15
SAMPLED = {"max_tokens": 24, "temperature": 1.0}
JOB = {"batch_size": 5, "sampling_params": SAMPLED, "num_cpus": NODE_CPUS, "resources": ENGINE} | OPTIONS
DRIVER = """
import json, sys
import nanovllm.ray
import ray
given = json.loads(sys.argv[1])
nanovllm.ray.connect(given["address"])
nanovllm.ray.batch(ray.data.read_json(given["source"]), given["output"], given["model"], **given["options"])
"""


def row_of(number):
    return {"id": f"row-{number}", "prompt": f"The quick brown fox jumps over {number} lazy dogs."}


ROWS = [row_of(number) for number in range(NUM_FILES * ROWS_PER_FILE)]


def write(folder, rows):
    folder.mkdir()
    for first in range(0, len(rows), ROWS_PER_FILE):
        lines = (json.dumps(row) + "\n" for row in rows[first : first + ROWS_PER_FILE])
        (folder / f"{first:04}.jsonl").write_text("".join(lines))
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(model):
    """Each row's text by an engine on its own."""
    with LLM(model, **OPTIONS) as llm:
        params = [SamplingParams(**SAMPLED, seed=row_seed(0, row["id"])) for row in ROWS]
        outputs = llm.generate([row["prompt"] for row in ROWS], params, use_tqdm=False)
    return {row["id"]: output.outputs[0].text for row, output in zip(ROWS, outputs, strict=True)}


def texts(rows):
    found = rows.take_all()
    by_id = {row["id"]: row["text"] for row in found}
    assert len(by_id) == len(found), "a row twice"
    return by_id


def staged(model, rows):
    """What a stage makes of these rows."""

    async def generate():
        stage = Stage(model, sampling_params={"max_tokens": 5}, **OPTIONS)
        return (await anext(stage(pa.Table.from_pylist(rows)))).to_pylist()

    return asyncio.run(generate())


def test_a_bad_row_is_told_in_its_row(model):
    chat = [{"role": "user", "content": "What is two and two?"}]
    given = [
        ("", None, None),
        (None, chat, None),
        ("Once", None, {"max_tokens": 3, "top_p": None}),
        ("Once", None, {"max_tokens": None, "top_p": 7.0}),
        (None, None, None),
    ]
    names = "id", "prompt", "messages", "sampling_params"
    found = staged(model, [dict(zip(names, (number, *row), strict=True)) for number, row in enumerate(given)])
    assert [None if row["token_ids"] is None else len(row["token_ids"]) for row in found] == [None, 5, 3, None, None]
    assert [row["finish_reason"] for row in found] == [None, "length", "length", None, None]
    assert [row["error"] is None for row in found] == [False, True, True, False, False]
    assert "empty" in found[0]["error"] and "top_p is 7" in found[3]["error"] and "one of the two" in found[4]["error"]


def test_options_that_are_structs_are_without_the_fields_of_other_rows(tmp_path):
    model = save_tiny(tmp_path, eos_token_id=tiny_tokenizer().convert_tokens_to_ids("<|end|>"))
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    given = [
        {"logit_bias": {"5": 100.0}, "max_tokens": 2},
        {"logit_bias": {"7": 100.0}, "max_tokens": 2},
        {"structured_output": {"regex": "[0-9]{3}"}},
        {"structured_output": {"json_object": True}, "max_tokens": 2},
        {"structured_output": {"json_schema": json.dumps(schema)}, "max_tokens": 40},
        {"structured_output": {"json_schema": schema}},
    ]
    rows = [{"id": n, "prompt": "Once", "sampling_params": each} for n, each in enumerate(given)]
    found = staged(model, rows[:5])
    assert [row["error"] for row in found] == [None] * 5
    assert (found[0]["token_ids"], found[1]["token_ids"]) == ([5, 5], [7, 7])
    assert re.fullmatch("[0-9]{3}", found[2]["text"]) and set(json.loads(found[4]["text"])) == {"x"}
    (found,) = staged(model, rows[5:])
    assert "json_schema of a row is a struct" in found["error"]


@pytest.mark.parametrize(("rows", "options", "says"), [
    ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], {}, "1 rows have a 'id' .* that others have"),
    ([{"id": 1, "prompt": "a"}, {"id": None, "prompt": "b"}], {}, "a row has no 'id'"),
    ([{"id": 1, "text": "a", "prompt": "b"}], {}, "a column text already"),
    ([{"id": 1, "question": "a"}], {}, "they need prompt or messages"),
    ([{"prompt": "a"}], {}, "no column 'id'"),
    ([{"id": 1, "prompt": "a"}], {"concurrency": 3}, "the engines take 3 CPUs"),
], ids=["twice", "none", "column", "prompt", "id", "cpus"])  # fmt: skip
def test_rows_that_cannot_be_kept_apart_are_refused_before_an_engine_starts(cluster, tmp_path, rows, options, says):
    source = ray.data.read_json(write(tmp_path / "rows", rows))
    with pytest.raises(ValueError, match=says):
        nanovllm.ray.batch(source, tmp_path / "out", "no such model", **options)


def test_rows_that_are_not_in_files_are_refused(cluster, tmp_path):
    with pytest.raises(ValueError, match="not read from files"):
        nanovllm.ray.batch(ray.data.from_items(ROWS), tmp_path / "out", "no such model")


def test_a_node_that_dies_in_the_middle_of_a_job_costs_no_row_and_doubles_none(cluster, model, expected, tmp_path):
    source, out, result = ray.data.read_json(write(tmp_path / "rows", ROWS)), tmp_path / "out", []
    slow = JOB | {"concurrency": 2, "max_num_seqs": 1}
    job = threading.Thread(target=lambda: result.append(nanovllm.ray.batch(source, out, model, **slow)))
    job.start()
    comes_true(lambda: any((out / "rows").glob("*.parquet")), 90.0)
    assert job.is_alive()
    die(cluster)
    join(cluster)
    job.join(120.0)
    assert texts(result[0]) == expected


def test_a_job_whose_process_is_killed_goes_on_where_it_stopped(cluster, model, expected, tmp_path):
    source, out = write(tmp_path / "rows", ROWS), tmp_path / "out"
    arguments = json.dumps(
        {"source": source, "output": str(out), "model": str(model), "address": cluster.address}
        | {"options": JOB | {"max_num_seqs": 1}}
    )
    job = subprocess.Popen([sys.executable, "-c", DRIVER, arguments], stderr=subprocess.DEVNULL)
    try:
        comes_true(lambda: len(list((out / "done").glob("*.parquet"))) > 2, 90.0)
    finally:
        job.kill()
        assert job.wait() == -signal.SIGKILL
    done = {path: path.stat().st_mtime_ns for path in (out / "rows").glob("*.parquet") if is_committed(path)}
    rows = nanovllm.ray.batch(ray.data.read_json(source), out, model, **JOB)
    assert texts(rows) == expected
    assert done and {path: path.stat().st_mtime_ns for path in done} == done


def is_committed(path):
    """Whether Ray has noted the rows of a file as done."""
    return (path.parents[1] / "done" / f"{path.stem.rpartition('-')[0]}.parquet").exists()

"""Batch jobs on Ray: a stage for `map_batches`, and jobs that resume after an interruption."""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import xxhash
from ray.data import ActorPoolStrategy, Dataset
from ray.data.checkpoint import CheckpointConfig

from nanovllm.config import integer
from nanovllm.features.engine_config import EngineConfig
from nanovllm.features.refusals import RAY, check_options
from nanovllm.features.sampling_params import SamplingParams
from nanovllm.models.default_model import DEFAULT_MODEL
from nanovllm.outputs import OutputKind
from nanovllm.ray.cluster import uses_gpu
from nanovllm.serving.async_llm import AsyncLLM

# Columns that a stage adds, with explicit types so that all batches have one schema.
COLUMNS = {
    "text": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "finish_reason": pa.string(),
    "num_prompt_tokens": pa.int32(),
    "error": pa.string(),
}
PROMPTS = ("prompt", "messages")
PARAMS = "sampling_params"
SPARE_CPUS = 2  # CPUs of a task that reads or writes, and of Ray's actor that skips finished rows
# Concurrent batches per engine: rows of the next batch replace rows that end early.
CONCURRENT_BATCHES = 4


def row_seed(seed: int, row_id: Any) -> int:
    """Sampling seed of a row, a function of its id: a row that is computed again gets the same text."""
    return xxhash.xxh3_64_intdigest(f"{seed}:{row_id}".encode())


class Stage:
    """Class for `map_batches(batch_format="pyarrow")`: generates for the rows of a batch; see `stage`.

    A row has a column `prompt` (a string or token ids) or `messages` (a conversation), and may have `sampling_params`
    (a struct of options; null means not set). It gets the columns `text`, `token_ids`, `finish_reason`,
    `num_prompt_tokens` and `error`; an invalid row gets only an error.

    Args:
        model, engine_options: see `AsyncLLM`.
        sampling_params: options of all rows, by name; the defaults are `AsyncLLM.default_sampling_params`.
        id_column: column that seeds a row's sampling, unless its options have a seed. None: not repeatable.
        seed: number that is combined with each row's id.
        raise_errors: True if an invalid row ends the job.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        id_column: str | None = "id",
        seed: int = 0,
        raise_errors: bool = False,
        **engine_options: Any,
    ) -> None:
        self._params = dict(sampling_params or {})
        self._id_column = id_column
        self._seed = seed
        self._raise_errors = raise_errors
        self._llm = AsyncLLM(model, **engine_options)

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        _check_columns(batch.column_names, self._id_column)
        rows = await asyncio.gather(*map(self._generate, batch.to_pylist()))
        for name, kind in COLUMNS.items():
            batch = batch.append_column(pa.field(name, kind), pa.array([row.get(name) for row in rows], kind))
        yield batch

    async def _generate(self, row: dict[str, Any]) -> dict[str, Any]:
        """Compute the new columns of a row."""
        try:
            params = self._sampling_params(row)
            messages = row.get("messages")
            if (messages is None) == (row.get("prompt") is None):
                raise ValueError(f"the row {self._name(row)} needs a prompt or messages, one of the two.")
            if messages is not None:
                outputs = self._llm.chat(list(map(_without_nulls, messages)), params, output_kind=OutputKind.FINAL)
            else:
                outputs = self._llm.generate(row["prompt"], params, output_kind=OutputKind.FINAL)
            (output,) = [output async for output in outputs]
        except (TypeError, ValueError) as error:
            if self._raise_errors:
                raise ValueError(f"the row {self._name(row)}: {error}") from error
            return {"error": str(error)}
        if output.error is not None and self._raise_errors:
            raise RuntimeError(f"the row {self._name(row)}: {output.error}")
        completion = output.outputs[0]
        return {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "error": output.error,
        }

    def _sampling_params(self, row: dict[str, Any]) -> SamplingParams:
        options = self._params | _own_options(row.get(PARAMS) or {})
        if options.get("n", 1) != 1:
            raise ValueError(f"n is {options['n']}; a row has one text. Repeat the row under another id.")
        if self._id_column is not None:
            options.setdefault("seed", row_seed(self._seed, row[self._id_column]))
        unknown = set(options) - set(SamplingParams.__dataclass_fields__)
        if unknown:
            raise TypeError(f"sampling_params has {', '.join(sorted(unknown))}, which is not an option.")
        return replace(self._llm.default_sampling_params, **options)

    def _name(self, row: dict[str, Any]) -> str:
        return "" if self._id_column is None else repr(row[self._id_column])


def stage(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 256,
    num_cpus: float = 1.0,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of `map_batches` for a `Stage`: `dataset.map_batches(**stage("smollm2-135m-instruct"))`.

    Args:
        model: a folder that every machine can read, a hub id, or "smollm2-135m-instruct".
        concurrency: number of engines, or (minimum, maximum).
        batch_size: rows of a task; tasks lost with a machine are computed again.
        num_cpus: CPUs of an engine; reading and writing rows needs further ones.
        num_gpus: GPUs of an engine; None: one if the cluster has GPUs and `device` is not "cpu".
        resources: further resources of an engine, such as {"fast_disk": 1}, which its node must have.
        options: see `Stage`.

    Raises TypeError and ValueError for bad options, before any engine is started.
    """
    engine_options = {name: value for name, value in options.items() if name not in _STAGE_OPTIONS}
    config = EngineConfig.from_options(**engine_options)
    check_options(config, RAY)
    SamplingParams(**(options.get("sampling_params") or {}))
    if num_gpus is None:
        num_gpus = float(uses_gpu(engine_options) * config.tensor_parallel_size)
    low, high = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    return {
        "fn": Stage,
        "fn_constructor_kwargs": {"model": os.fspath(model), **options},
        "batch_format": "pyarrow",
        "batch_size": integer("batch_size", batch_size, 1),
        "compute": ActorPoolStrategy(
            min_size=integer("concurrency", low, 1),
            max_size=integer("concurrency", high, low),
            max_tasks_in_flight_per_actor=2 * CONCURRENT_BATCHES,
            max_concurrent_calls_per_actor=CONCURRENT_BATCHES,
        ),
        "udf_modifying_row_count": False,
        "num_cpus": num_cpus,
        "resources": dict(resources or {}),
        **({"num_gpus": num_gpus} if num_gpus else {}),
    }


def batch(
    dataset: Dataset,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    id_column: str = "id",
    **options: Any,
) -> Dataset:
    """Generate for every row of a dataset exactly once, and return the rows with their texts.

    Called again with the same folder, it resumes: rows in the folder are not computed again.

    Args:
        dataset: rows from files (`ray.data.read_json`, `read_parquet`, ...), with unique ids.
        output: folder or bucket that every machine can write: rows/ has the result as Parquet, done/ the finished ids.
        id_column: column of strings or whole numbers.
        options: see `stage`.

    Raises ValueError, before any engine is started, for duplicate ids and for rows that are not read from files.
    """
    folder = os.fspath(output) if "://" in os.fspath(output) else os.path.abspath(output)
    rows = posixpath.join(folder, "rows")
    arguments = stage(model, id_column=id_column, **options)
    _check_cpus(arguments["compute"].min_size * arguments["num_cpus"])
    _check_columns(dataset.columns() or [], id_column)
    if not dataset.input_files():
        raise ValueError(
            "the dataset is not read from files, so that its finished rows could not be skipped. Write it first "
            "(`dataset.write_parquet`), and read it from there."
        )
    num_ids = _count_ids(dataset, id_column)
    # datasets of one source share the context
    generated = dataset.map_batches(**arguments)
    context = dataset.context
    before = context.checkpoint_config
    context.checkpoint_config = CheckpointConfig(
        id_column, posixpath.join(folder, "done"), delete_checkpoint_on_success=False
    )
    try:
        generated.write_parquet(rows)
    finally:
        context.checkpoint_config = before
    written = ray.data.read_parquet(rows)
    if (num_written := written.count()) != num_ids:
        raise RuntimeError(
            f"{rows} holds {num_written} rows, and the dataset {num_ids}: the folder has rows of another dataset, or "
            "some of the dataset's are not read from files. Give a folder of its own."
        )
    return written


_STAGE_OPTIONS = ("tokenizer", "sampling_params", "id_column", "seed", "raise_errors")


def _without_nulls(struct: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls: Arrow adds the fields of all structs in a column to each of them."""
    return {name: value for name, value in struct.items() if value is not None}


def _own_options(struct: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options of a row, without the fields that Arrow adds to nested structs.

    Raises TypeError for a JSON schema as a struct: a null may be another row's field or part of the schema.
    """
    options = _without_nulls(struct)
    for name in ("logit_bias", "structured_output"):
        if isinstance(own := options.get(name), Mapping):
            options[name] = _without_nulls(own)
            if not options[name]:
                del options[name]
    form = options.get("structured_output")
    if isinstance(form, Mapping) and isinstance(form.get("json_schema"), Mapping):
        raise TypeError(
            "json_schema of a row is a struct, to which Arrow adds the fields of other rows' schemas. Give it as JSON "
            "text (json.dumps), or once for all rows as sampling_params of the stage."
        )
    return options


def _check_cpus(num_needed: float) -> None:
    """Raise ValueError if engines would use every CPU: tasks that read and write would wait forever."""
    num_cpus = ray.cluster_resources().get("CPU", 0.0)
    if num_needed > num_cpus - SPARE_CPUS:
        raise ValueError(
            f"the engines take {num_needed:g} CPUs (concurrency x num_cpus) of the cluster's {num_cpus:g}, of which "
            f"reading, skipping and writing rows need {SPARE_CPUS}. Lower concurrency or num_cpus, or add a node."
        )


def _check_columns(names: list[str], id_column: str | None) -> None:
    if taken := set(names) & set(COLUMNS):
        raise ValueError(f"the rows have a column {', '.join(sorted(taken))} already, which the stage adds. Rename it.")
    if not set(names) & set(PROMPTS):
        raise ValueError(f"the rows have the columns {', '.join(names)}; they need {' or '.join(PROMPTS)}.")
    if id_column is not None and id_column not in names:
        raise ValueError(f"the rows have no column {id_column!r} (id_column); they have {', '.join(names)}.")


def _count_ids(dataset: Dataset, id_column: str) -> int:
    """Count the rows; raises ValueError for a missing or duplicate id."""
    digests: list[np.ndarray] = []  # 8 bytes an id, so that millions fit into this process
    for ids in dataset.select_columns([id_column]).iter_batches(batch_format="pyarrow", batch_size=65536):
        values = ids[id_column].to_pylist()
        if None in values:
            raise ValueError(f"a row has no {id_column!r} (id_column); every row needs one.")
        digests.append(np.array([xxhash.xxh3_64_intdigest(str(value).encode()) for value in values], np.uint64))
    given = np.concatenate(digests or [np.empty(0, np.uint64)])
    if num_doubled := len(given) - len(np.unique(given)):
        raise ValueError(f"{num_doubled} rows have a {id_column!r} (id_column) that others have; ids must differ.")
    return len(given)

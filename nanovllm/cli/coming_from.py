"""Names of other engines' flags and commands, and this engine's: the tables of docs/guide/coming_from.md.

Rows of Markdown: their names, ours, the difference. Ours may be "not needed", or nothing where there is none. None of
their names is an alias: a command line that has one is refused, with the row's answer.
"""

# ruff: noqa: E501
from __future__ import annotations

import re
from collections.abc import Iterator

VLLM = """\
| `vllm serve MODEL` | `nanovllm serve MODEL` | listens on 127.0.0.1, not on all addresses: `--host 0.0.0.0` |
| `--tokenizer`, `--revision`, `--trust-remote-code`, `--dtype` | `--tokenizer`, `--revision`, `--trust-remote-code`, `--dtype` | |
| `--served-model-name A B` | `--served-model-name A B` | answers have the first |
| `--max-model-len` | `--max-model-len` | not set, it yields to the KV cache instead of failing |
| `--gpu-memory-utilization`, `--kv-cache-memory-bytes` | `--gpu-memory-utilization`, `--kv-cache-memory-bytes` | |
| `--num-gpu-blocks-override` | `--num-kv-blocks` | |
| `--block-size` | `--block-size` | 64 |
| `--swap-space`, `--kv-offloading-size` | `--prefix-cache-host-bytes` | keeps prefixes in host memory |
| `--kv-cache-dtype`, `--calculate-kv-scales` | `--kv-cache-dtype` | `fp8` on a GPU; each row has a scale of its own, none is calibrated |
| `--max-num-seqs`, `--max-num-batched-tokens` | `--max-num-seqs`, `--max-num-batched-tokens` | 1,024 and 8,192 on a GPU, 64 and 1,024 on a CPU |
| `--long-prefill-token-threshold`, `--max-num-partial-prefills`, `--max-long-partial-prefills` | `--long-prefill-token-threshold`, `--max-num-partial-prefills`, `--max-long-partial-prefills` | half the budget, 4, 1 |
| `--no-enable-prefix-caching` | `--no-enable-prefix-caching` | |
| `--enforce-eager` | `--enforce-eager` | compiles nothing, captures nothing |
| `--compilation-config`, `-O`, `--max-seq-len-to-capture` | `--cuda-graphs` | measured at start |
| `--no-async-scheduling` | `--no-overlap` | |
| `--tensor-parallel-size`, `-tp` | `--tensor-parallel-size` | one host; more: [many machines](many_machines.md) |
| `--data-parallel-size`, `-dp` | `--data-parallel-size` | the same |
| `--pipeline-parallel-size`, `-pp`, `--distributed-executor-backend`, `--nnodes` | `--tensor-parallel-size` | a model is on one host |
| `--seed` | `--engine-seed` | |
| `--attention-backend` | `--attention-backend` | `flex`, `sdpa`, `cpp` |
| `--scheduling-policy priority` | `--priority-ageing-s`, `--min-priority` | always by priority, then arrival |
| `--kv-events-config` | `--kv-events`, `--kv-events-replay`, `--kv-events-topic` | |
| `--generation-config vllm` | `--generation-config none` | both take the model's own by default |
| `--otlp-traces-endpoint` | `--otlp-traces-endpoint` | |
| `--enable-request-id-headers` | not needed | always: `x-request-id` in, out and in the log |
| `vllm run-batch -i FILE -o FILE --model MODEL` | `nanovllm run-batch -i FILE -o FILE --model MODEL` | |
| `vllm bench serve` | `nanovllm bench` | steps the engine itself, without HTTP |
| `--api-key` | `--api-key`, `--api-key-file`, `NANOVLLM_API_KEY` | `/metrics` needs the key too |
| `--enable-auto-tool-choice`, `--tool-parser-plugin` | not needed | calls are detected from the chat template |
| `--tool-call-parser` | `--tool-format` | detected from the chat template |
| `--reasoning-parser` | `--reasoning-format` | detected; thought is `reasoning_content` |
| `--enable-reasoning` | not needed | detected from the chat template |
| `--allowed-origins` | `--cors-origin` | |
| `--allowed-methods`, `--allowed-headers`, `--allow-credentials` | `--cors-origin` | GET and POST, and any header |
| `--enable-log-requests` | `--log-prompts` | |
| `--disable-uvicorn-access-log` | `--no-access-log` | |
| `--skip-tokenizer-init` | `--skip-tokenizer-init` | |
| `--ssl-certfile`, `--ssl-keyfile`, `--root-path` | `--ssl-certfile`, `--ssl-keyfile`, `--root-path` | |
| `--chat-template` | `--chat-template` | a file |
| `--chat-template-content-format` | `--chat-template-content-format` | `parts` for `openai`; found by rendering, not in the syntax tree |
| `--limit-mm-per-prompt`, `--mm-processor-kwargs` | `--limit-mm-per-prompt`, `--mm-processor-kwargs` | `image=4`; `NAME=JSON` for each argument ([images](images.md)) |
| `--quantization` | `--quantization` | the checkpoint's own format is found; `int8` or `int4` on a CPU ([quantisation](quantisation.md)) |
| `--speculative-config` | `--speculation`, `--draft-model`, `--num-speculative-tokens` | `suffix`, `draft`, `heads` (mtp) or `auto`; tokens are those without drafts ([speculation](speculation.md)) |
| `--lora-modules NAME=PATH` | `--adapter NAME=PATH` | a flag for each ([adapters](server.md#how-are-adapters-served)) |
| `--max-loras`, `--max-lora-rank` | `--max-loras`, `--max-lora-rank` | 8, 64 |
| `--enable-lora` | not needed | adapters can always be loaded; by requests from `--adapter-folder` alone |
| `--cpu-offload-gb`, `--hf-overrides`, `--rope-scaling` | | not there |
| `--enable-chunked-prefill`, `--enable-prompt-tokens-details`, `--enable-force-include-usage`, `--enable-server-load-tracking`, `--use-v2-block-manager` | not needed | always on |
| `--guided-decoding-backend`, `--structured-outputs-config` | not needed | there is one backend |
| `--task`, `--runner`, `--convert` | not needed | every model embeds, and generates if it has a head |
| `--load-format`, `--tokenizer-mode`, `--config-format`, `--model-impl` | not needed | read from the folder |
| `--disable-log-requests`, `--disable-log-stats`, `--max-log-len` | not needed | prompts are not logged; figures are at `/metrics` |
| `--uvicorn-log-level` | `--log-level` | |
| `--download-dir` | `HF_HOME` | |
| `--hf-token` | not needed | `HF_TOKEN` in the environment |
| `--override-generation-config` | `--generation-config` | a request's fields come first |
| `--api-server-count`, `-asc`, `--num-scheduler-steps` | not needed | the engine has a process of its own, and overlaps steps |
| `--enable-expert-parallel`, `-ep` | `--tensor-parallel-size` | experts are split with it |
| `--enable-sleep-mode` | `--allow-weight-updates` | `/sleep` and `/wake_up` need a key |
| `--headless`, `--middleware` | | not there |
"""

OLLAMA = """\
| `ollama run MODEL` | `nanovllm chat MODEL` | a GGUF file, a folder or a hub id |
| `ollama run MODEL "prompt"` | `nanovllm generate --model MODEL "prompt"` | |
| `ollama serve` | `nanovllm serve MODEL` | one model for each process, loaded at once and kept |
| `OLLAMA_HOST` | `--host`, `--port` | 127.0.0.1:8000 |
| `OLLAMA_CONTEXT_LENGTH`, `num_ctx` | `--max-model-len` | the model's own length, if the cache holds it; longer prompts are refused, not cut (`truncate_prompt_tokens` cuts) |
| `OLLAMA_NUM_PARALLEL` | `--max-num-seqs` | 64 on a CPU, 1,024 on a GPU |
| `OLLAMA_MAX_QUEUE` | `--max-queue` | 1,024; beyond it 429, not 503 |
| `OLLAMA_ORIGINS` | `--cors-origin` | |
| `OLLAMA_FLASH_ATTENTION` | not needed | chosen by itself; `--attention-backend` |
| `OLLAMA_KEEP_ALIVE`, `OLLAMA_MAX_LOADED_MODELS`, `--keepalive` | not needed | the process is the model's life |
| `OLLAMA_MODELS` | `HF_HOME`, `NANOVLLM_CACHE` | |
| `ollama list`, `ollama ls` | `nanovllm models` | |
| `ollama pull`, `ollama rm` | `nanovllm pull MODEL`, `nanovllm rm MODEL` | models of the hub, or `ORG/NAME:QUANT` for a GGUF file |
| `ollama ps`, `ollama stop` | `nanovllm ps`, `nanovllm stop` | servers, one model each; more in the live view at `/`, `/metrics` |
| `ollama show MODEL` | `nanovllm chat MODEL` | `/show` within; a server's `POST /api/show`; `nanovllm fit MODEL` without loading it |
| `ollama create`, `ollama cp` | `nanovllm serve MODEL` | no Modelfile: options are flags, as `--chat-template FILE`, `--served-model-name NAME` |
| `ollama push`, `ollama signin`, `ollama signout`, `ollama launch` | | not there |
| `--nowordwrap`, `--hidethinking` | not needed | lines break at words at a terminal only |
| `--insecure` | not needed | models come from the hub, by HTTPS |
"""

LLAMA_SERVER = """\
| `-m FILE.gguf` | `--model FILE.gguf` | Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, F16, BF16 and F32 ([which architectures](gguf.md)) |
| `-hf REPO:QUANT` | `--hf-repo REPO:QUANT` | `-hf` too; without QUANT `Q4_K_M`, or the only one |
| `-a`, `--alias` | `--served-model-name` | |
| `-c`, `--ctx-size` | `--max-model-len` | of each sequence; the cache's size is `--kv-cache-memory-bytes` |
| `-np`, `--parallel` | `--max-num-seqs` | no slots: sequences share the cache block by block |
| `-b`, `--batch-size`, `-ub`, `--ubatch-size` | `--max-num-batched-tokens` | |
| `-t`, `--threads`, `-tb`, `--threads-batch` | `OMP_NUM_THREADS` | |
| `-ngl`, `--gpu-layers`, `--n-gpu-layers`, `-dev`, `--device`, `-sm`, `--split-mode`, `-mg`, `--main-gpu` | `--device` | all layers, or none |
| `-fa`, `--flash-attn` | not needed | chosen by itself; `--attention-backend` |
| `--host`, `--port` | `--host`, `--port` | 8000, not 8080 |
| `--api-key`, `--api-key-file` | `--api-key`, `--api-key-file` | |
| `--metrics`, `--slots`, `--props` | not needed | `/metrics` is always on |
| `--no-webui`, `--webui` | `--no-ui` | |
| `--jinja`, `--no-jinja` | not needed | templates are always Jinja |
| `--chat-template`, `--chat-template-file` | `--chat-template` | a file |
| `--reasoning-format` | `--reasoning-format` | detected; other values |
| `--reasoning-budget`, `--chat-template-kwargs` | | fields of a request: `reasoning_effort`, `thinking_token_budget`, `chat_template_kwargs` |
| `--embeddings`, `--embedding`, `--rerank`, `--reranking`, `--pooling` | not needed | always on |
| `-to`, `--timeout` | `--header-timeout`, `--body-timeout`, `--send-timeout`, `--request-timeout` | |
| `-ctk`, `--cache-type-k`, `-ctv`, `--cache-type-v`, `--lora`, `--lora-scaled`, `--mmproj`, `-ot`, `--override-tensor`, `-ncmoe`, `--n-cpu-moe`, `--rope-freq-base`, `--rope-scale` | | not there |
| `-md`, `--model-draft` | `--draft-model` | with `--speculation draft` |
| `--draft`, `--draft-max`, `--draft-n` | `--num-speculative-tokens` | |
| `-ts`, `--tensor-split` | `--tensor-parallel-size` | equal parts |
| `-cb`, `--cont-batching`, `-kvu`, `--warmup`, `--no-warmup`, `--mlock`, `--mmap`, `--no-mmap`, `--cache-reuse`, `-dt`, `--defrag-thold` | not needed | sequences always share the batch and the cache |
| `--numa`, `--prio`, `--threads-http` | | `numactl`, `nice` |
| `--slot-save-path` | `--prefix-cache-dir` | prefixes in files, found by content |
| `--api-prefix` | `--root-path` | |
| `--ssl-key-file`, `--ssl-cert-file` | `--ssl-keyfile`, `--ssl-certfile` | |
| `-lv`, `--log-verbosity`, `--verbosity`, `--log-disable` | `--log-level` | |
| `-hff`, `--hf-file`, `-mu`, `--model-url` | `--hf-repo` | a file by its quantisation |
"""

LLAMA_CLI = """\
| `-p`, `--prompt`, `-f` | `nanovllm generate` | a prompt as argument, `--file` |
| `-n`, `--predict`, `--n-predict` | `--max-tokens` | |
| `--temp`, `--top-k`, `--top-p`, `--min-p`, `-s` | `--temperature`, `--top-k`, `--top-p`, `--min-p`, `--seed` | |
| `--repeat-penalty` | `--repetition-penalty` | |
| `--grammar-file`, `-j` | `--grammar`, `--json-schema` | |
| `-r`, `--reverse-prompt` | `--stop` | |
| `-cnv`, `--conversation`, `-i`, `--interactive`, `-no-cnv`, `--no-conversation` | `nanovllm chat` | |
| `-sys`, `--system-prompt` | `--system` | |
| `--color`, `-e`, `--escape`, `--simple-io` | not needed | decided by the terminal |
"""

# An engine, the heading of its table on the page, and the rows.
TABLES = (
    ("vLLM", "Flags of the server", VLLM),
    ("Ollama", "Commands and settings", OLLAMA),
    ("llama.cpp", "Flags of llama-server", LLAMA_SERVER),
    ("llama.cpp", "llama-cli", LLAMA_CLI),
)
_PROGRAMS = ("vllm ", "ollama ")


def answer(name: str) -> str | None:
    """Answer to a name of another engine, a sentence; None for a name that none of them has.

    Args:
        name: a flag as typed, or the word of a command.
    """
    found = [f"{name} is {engine}'s: {said}" for engine, said in _answers(name)]
    return " ".join(found) or None


def _answers(name: str) -> Iterator[tuple[str, str]]:
    for engine, _, rows in TABLES:
        for row in rows.splitlines():
            theirs, ours, differs = (cell.strip() for cell in row.strip("|").split("|"))
            if name in _names(theirs) and name not in _names(ours):
                yield engine, _sentence(_plain(ours), _plain(differs))


def _names(cell: str) -> list[str]:
    """Flags and commands among the codes of a cell."""
    codes = re.findall(r"`([^`]*)`", cell)
    flags = [code.split()[0] for code in codes if code.startswith("-")]
    return flags + [code.split()[1] for code in codes if code.startswith(_PROGRAMS)]


def _plain(cell: str) -> str:
    """A cell without marks of Markdown."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "")


def _sentence(ours: str, differs: str) -> str:
    if not ours:
        return "there is none here." if differs == "not there" else f"there is none here ({differs})."
    about = f" ({differs})" if differs else ""
    return f"not needed here{about}." if ours == "not needed" else f"use {ours}{about}."

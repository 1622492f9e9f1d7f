"""Prompts around the borders of tiny models' windows, answered by an engine under pressure and by `transformers`."""

import random
import zlib
from pathlib import Path
from typing import NamedTuple

from nanovllm import LLM, SamplingParams
from tests.support.class_outcomes import CHUNKS
from tests.support.layer_kinds import own_answer
from tests.support.tiny_classes import VOCAB_SIZE, WINDOW
from tests.support.tiny_models import tiny_tokenizer

# Contexts of 0.5, 1, 1.5 and 4 windows, the longest with a common beginning.
LENGTHS = (WINDOW // 2, WINDOW, WINDOW * 3 // 2, WINDOW * 4)
MAX_MODEL_LEN = 96
MAX_NUM_SEQS = 4


class Case(NamedTuple):
    """Options under which a class is tried.

    num_kv_blocks: for MAX_MODEL_LEN and little more, so that requests preempt each other.
    is_warm: whether a second call, whose prompts the cache holds, must answer alike.
    """

    block_size: int = 16
    max_num_batched_tokens: int = 24
    num_kv_blocks: int = 9
    enable_prefix_caching: bool = True
    is_warm: bool = True
    attention_backend: str = "sdpa"

    def for_class(self, class_name):
        """With blocks of whole chunks for a class with recurrent states."""
        chunk = CHUNKS.get(class_name, 1)
        if self.block_size % chunk == 0:
            return self
        num_tokens = max(self.max_num_batched_tokens, chunk + MAX_NUM_SEQS)
        num_kv_blocks = 1 + -(-(self.num_kv_blocks - 1) * self.block_size // chunk)
        return self._replace(block_size=chunk, max_num_batched_tokens=num_tokens, num_kv_blocks=num_kv_blocks)

    @property
    def name(self):
        cache = "warm" if self.is_warm else "cold" if self.enable_prefix_caching else "uncached"
        return f"{self.attention_backend}-{self.block_size}-{self.max_num_batched_tokens}-{self.num_kv_blocks}-{cache}"


CASES = [
    Case(16, 24, 9),
    Case(16, 21, 12),
    Case(16, 40, 33, enable_prefix_caching=False, is_warm=False),
    Case(16, 20, 10, is_warm=False),
    Case(32, 200, 33),
    Case(16, 24, 9, attention_backend="auto"),
    Case(16, 40, 33, attention_backend="auto"),
]


def seeded_case(class_name):
    """One of the cases that need no compiler, another for each class, the same in every run."""
    cases = [case for case in CASES if case.attention_backend == "sdpa"]
    return cases[zlib.crc32(class_name.encode()) % len(cases)].for_class(class_name)


def prompts_of(class_name):
    """Six prompts of ordinary tokens."""
    choice = random.Random(class_name)
    shared = [choice.randrange(3, VOCAB_SIZE) for _ in range(WINDOW * 5 // 2)]
    own = [[choice.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return [*own, shared + own[0], shared + own[1]]


def own_answers(model, prompts, num_tokens, **options):
    """The greedy tokens of the model's own `generate`, to which further options go."""
    return [own_answer(model, prompt, num_tokens, **options) for prompt in prompts]


def open_case(model, case, *, tensor_parallel_size=1):
    """An engine of that case, over a module or a saved model's folder."""
    options = case._asdict()
    del options["is_warm"]
    return LLM(
        model,
        **options,
        tokenizer=tiny_tokenizer() if isinstance(model, Path) else None,
        enforce_eager=case.attention_backend == "sdpa",
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        tensor_parallel_size=tensor_parallel_size,
    )


def engine_answers(llm, case, prompts, num_tokens):
    """The greedy tokens of one call, or of two if the case is warm."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    answers = []
    for _ in range(2 if case.is_warm else 1):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    return answers


def chunk_prompts():
    """Around chunks of 64, one that begins with a decode, and two that share two blocks."""
    choice = random.Random(5)
    own = [[choice.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 60, 64, 125, 190)]
    shared = [choice.randrange(3, VOCAB_SIZE) for _ in range(130)]
    return [*own, shared + own[2][:9], shared + own[3][:40]]

"""Tasks for lm-eval from data of our own: files in a folder, no hub."""

import json
import random

COLOURS = ["red", "green", "blue", "white", "black", "yellow"]
THINGS = ["boxes", "cups", "books", "chairs", "lamps", "keys", "coins", "pens"]
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana"]
TASKS = ("store_choice", "store_text", "store_answer")

_COMMON = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/train.jsonl
    test: {folder}/test.jsonl
training_split: train
fewshot_split: train
test_split: test
fewshot_config:
  sampler: first_n
"""
_CHOICE = """output_type: multiple_choice
num_fewshot: 5
doc_to_text: "{{story}}\\nQuestion: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
_TEXT = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: story
metric_list:
  - {metric: word_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, higher_is_better: false}
"""
_ANSWER = """output_type: generate_until
num_fewshot: 5
doc_to_text: "{{story}}\\nQuestion: {{question}}\\nAnswer:"
doc_to_target: " {{choices[label]}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def story(choice):
    """A count of things, and four answers of which one is right."""
    name, other = choice.sample(NAMES, 2)
    colours, thing = choice.sample(COLOURS, 3), choice.choice(THINGS)
    counts = [choice.randrange(2, 30) for _ in colours]
    parts = ", ".join(f"{count} {colour} ones" for count, colour in zip(counts, colours, strict=True))
    text = (
        f"{name} keeps {thing} in a store behind the house. This morning the shelves held {parts}, and nothing else. "
        f"Before noon {other} came by, looked at all of them and went home with none, since it was raining hard."
    )
    asked = choice.randrange(3)
    wrong = choice.sample([n for n in range(2, 31) if n != counts[asked]], 3)
    answers = [counts[asked], *wrong]
    choice.shuffle(answers)
    return {
        "story": text,
        "question": f"How many {colours[asked]} {thing} did {name} have?",
        "choices": [f"There were {answer} of them in the store" for answer in answers],
        "label": answers.index(counts[asked]),
    }


def write_tasks(folder, num_questions, *, seed=0):
    """Write the three tasks of `TASKS` and their data; returns the folder, for lm-eval's include_path."""
    choice = random.Random(seed)
    for split, count in (("train", 8), ("test", num_questions)):
        lines = [json.dumps(story(choice)) for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    for name, own in zip(TASKS, (_CHOICE, _TEXT, _ANSWER), strict=True):
        (folder / f"{name}.yaml").write_text(_COMMON.format(name=name, folder=folder) + own)
    return folder

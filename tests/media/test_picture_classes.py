"""Every image-text class that a tiny configuration builds: greedy float32 tokens are those of its own `generate`."""

import random
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from nanovllm import LLM, SamplingParams
from nanovllm.features.intake.prompts import ChatPrompt
from nanovllm.features.media.opening import TESTED, why_not_pictures
from nanovllm.features.media.pictures import Registry, placeholder_of
from nanovllm.features.media.reading import media_of
from tests.support.llms import check_engine, generate, token_ids
from tests.support.picture_classes import FORMS, num_features, own_answer, picture_class_model, tensors_of

PAGE = Path(__file__).parents[2] / "docs/guide/images.md"
NUM_NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


def test_the_page_and_the_package_name_the_classes_of_these_tests():
    names = {MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family] for family in FORMS}
    assert {f"{name}ForConditionalGeneration" for name in TESTED.split()} == {
        name.replace("_For", "For") for name in names
    }
    listed = PAGE.read_text().partition("`ForConditionalGeneration`):\n")[2].partition(".\n")[0]
    assert listed.replace(",", "").split() == TESTED.split()


REASONS = {  # a row of the page: part of the refusal
    "with a warning": "processor_config.json", "both ways": "both ways", "no token": "names no token",
    "`pixel_values`": "takes no pixel_values",
}  # fmt: skip


@pytest.mark.full
def test_the_page_has_each_other_class_in_the_row_of_its_default_configuration():
    rows = {}
    for line in PAGE.read_text().partition("| pictures | classes |")[2].partition("\n\n")[0].splitlines()[2:]:
        _, title, names, _ = line.split("|")
        rows |= dict.fromkeys(names.replace(",", "").split(), title)
    found = {}
    for family, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        short = name.removesuffix("ForConditionalGeneration").rstrip("_")
        if short in TESTED.split():
            continue
        try:
            with torch.device("meta"):
                model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family]())
        except Exception:  # the class's own code, for its own default
            found[short] = "not known"
            continue
        model.config._name_or_path = ""
        if model.config.is_encoder_decoder:
            found[short] = "encoder and decoder"
        elif not hasattr(model.base_model, "get_image_features"):
            found[short] = "no `get_image_features`"
        else:
            reason = why_not_pictures(model, has_ranks=False)
            (found[short],) = (title for title, part in REASONS.items() if part in reason)
    assert found.keys() == rows.keys()
    assert {name: rows[name] for name, title in found.items() if title not in rows[name]} == {}


@pytest.mark.full
@pytest.mark.parametrize("family", FORMS)
def test_tokens_are_those_of_the_class_cold_and_warm(family):
    """One picture, another in its place, two; chunks end within pictures."""
    model = picture_class_model(family)
    placeholder = placeholder_of(model.config)
    model.config.image_token_id = placeholder
    pictures = [tensors_of(family, model, seed) for seed in (1, 2)]
    counts = [num_features(model, picture) for picture in pictures]
    choice = random.Random(1)
    has_states = "qwen3_5" in family  # whose snapshots want longer prompts and chunks

    def text(length):
        return [choice.randrange(5, 200) for _ in range(length * (20 if has_states else 4))]

    begin, middle, end = text(5), text(3), text(4)
    first, second = ([placeholder] * count for count in counts)
    cases = [
        (begin + first + end, [0]), (begin + second + end, [1]), (middle + second + begin + first + end, [1, 0])
    ]  # fmt: skip
    own = [own_answer(model, ids, [pictures[index] for index in shown], NUM_NEW_TOKENS) for ids, shown in cases]
    registry = Registry()

    def prompt(ids, shown):
        given = [registry.picture(pictures[index], counts[index]) for index in shown]
        return ChatPrompt(ids, (), media_of(model, ids, placeholder, given))

    sizes = {"block_size": 64, "max_num_batched_tokens": 80} if has_states else {"max_num_batched_tokens": 20}
    with LLM(model, **{"max_num_seqs": 4, "max_model_len": 384, "block_size": 16, "num_kv_blocks": 100} | sizes) as llm:
        for _ in range(2):
            assert token_ids(generate(llm, [prompt(*case) for case in cases], GREEDY)) == own
        assert llm.stats().prefix_cache_hits > 0
        check_engine(llm)

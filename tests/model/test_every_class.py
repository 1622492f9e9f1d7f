"""Every causal language model class of the installed `transformers` is served with its own tokens, or refused by name.

A release of `transformers` that adds a class adds its cases here.
"""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanovllm import UnsupportedModelError
from nanovllm.model.unsupported import REASONS
from tests.support.class_cases import CASES, Case, engine_answers, open_case, own_answers, prompts_of, seeded_case
from tests.support.class_outcomes import NOT_BUILT, REFUSED
from tests.support.models_page import PAGE, VERSION, page, served_row
from tests.support.tiny_classes import class_names, tiny_class_model

NUM_TOKENS = 6


def tiny_model_of(class_name: str) -> Any:
    """A tiny model; None for a class that is known not to be built by itself."""
    try:
        return tiny_class_model(class_name)
    except Exception as error:
        if class_name in NOT_BUILT:
            return None
        raise AssertionError(
            f"{class_name} has sizes that tests/support/tiny_classes.py does not fit together; give it a line there"
        ) from error


def assert_listed(row: str) -> None:
    """Unless another release of `transformers` is installed than the page was made with."""
    text = PAGE.read_text(encoding="utf-8")
    assert VERSION not in text or row in text.splitlines(), "run `python -m tests.support.models_page`"


def test_the_page_of_models_has_the_reasons_and_classes_of_the_tables():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.count("|") == 4 and line[2:3].isupper()]
    served = {row.split(" | ")[0][2:]: row for row in rows}
    if VERSION in text:
        assert text == page(served), "run `python -m tests.support.models_page`"
        assert served.keys() == set(class_names()) - REFUSED.keys() - NOT_BUILT.keys()


def assert_served_or_refused(class_name: str, case: Case, num_tokens: int) -> None:
    model = tiny_model_of(class_name)
    if model is None:
        return
    try:
        llm = open_case(model, case)
    except UnsupportedModelError as error:
        assert error.reason == REFUSED.get(class_name, error.reason), str(error)
        assert error.reason in REFUSED.values(), f"refused for a reason that is not listed: {error}"
        assert REASONS[error.reason].trait in str(error)
        assert class_name in str(error) or "layer" in str(error)
        return
    assert class_name not in REFUSED, "it is served now; move it out of tests/support/class_outcomes.py"
    prompts = prompts_of(class_name)
    with llm:
        assert_listed(served_row(class_name, llm._engine.model_runner.binding))
        answers = engine_answers(llm, case, prompts, num_tokens)
        llm._engine.check_integrity()
    expected = own_answers(model, prompts, num_tokens)
    assert len({token for tokens in expected for token in tokens}) > 2, "its tokens do not depend on the prompts"
    for found in answers:
        assert found == expected


@pytest.mark.parametrize("class_name", class_names())
def test_a_class_is_served_with_its_own_tokens_or_refused_for_a_known_reason(class_name):
    assert_served_or_refused(class_name, seeded_case(class_name), NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("class_name", class_names())
def test_a_class_is_served_with_its_own_tokens_in_every_case(class_name, case):
    assert_served_or_refused(class_name, case, 3 * NUM_TOKENS)


def served_by_name() -> list[str]:
    """Served classes that a folder's config leads to; a part of another model has a config of its own."""
    served = set(class_names()) - REFUSED.keys() - NOT_BUILT.keys()
    types = {name: getattr(transformers, name).config_class.model_type for name in served}
    return sorted(name for name in served if types[name] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("class_name", served_by_name())
def test_a_saved_model_of_the_class_is_served_with_its_own_tokens(class_name, tmp_path):
    """A model of the engine's own: its weights are packed for the C++ products, its experts too."""
    model = tiny_model_of(class_name)
    model.save_pretrained(tmp_path)
    prompts, case = prompts_of(class_name), CASES[-2]
    with open_case(tmp_path, case) as llm:
        answers = engine_answers(llm, case, prompts, NUM_TOKENS)
    expected = own_answers(model, prompts, NUM_TOKENS)
    for found in answers:
        assert found == expected

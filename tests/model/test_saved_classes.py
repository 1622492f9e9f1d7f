"""Every class, saved to a folder, is served from it by two ranks with its own tokens, or by one, or refused by name.

All engines of two ranks have the same two processes.
"""

from __future__ import annotations

import pytest

from nanovllm import UnsupportedModelError
from nanovllm.model.unsupported import REASONS
from tests.support.class_cases import Case, engine_answers, open_case, own_answers, prompts_of
from tests.support.class_outcomes import NOT_BUILT, ONE_RANK, REFUSED
from tests.support.models_page import PAGE, VERSION
from tests.support.rank_pair import one_pair_of_processes
from tests.support.tiny_classes import class_names, tiny_class_model

CASE = Case(16, 40, 12, is_warm=False)
NUM_TOKENS = 3
BUILT = [name for name in class_names() if name not in NOT_BUILT]


@pytest.fixture(scope="module", autouse=True)
def pair():
    with one_pair_of_processes():
        yield


def known_reasons(class_name):
    """Why two ranks may refuse it; of another release of `transformers` than the page's any class may be refused."""
    if class_name in REFUSED:
        return {REFUSED[class_name], "no plan", "part of the plan", "states on ranks"}
    is_listed = VERSION in PAGE.read_text(encoding="utf-8")
    return {ONE_RANK.get(class_name)} if is_listed else {*REFUSED.values(), *ONE_RANK.values()}


def assert_own_tokens(llm, model, prompts):
    prompts = prompts[2:5]  # of 1.5, 4 and 3 windows; `test_every_class` has the others
    (found,) = engine_answers(llm, CASE, prompts, NUM_TOKENS)
    llm._engine.check_integrity()
    expected = own_answers(model, prompts, NUM_TOKENS)
    assert len({token for tokens in expected for token in tokens}) > 1, "its tokens do not depend on the prompts"
    assert found == expected


@pytest.mark.parametrize("class_name", BUILT)
def test_two_ranks_give_the_tokens_of_the_class_or_refuse_it_for_a_known_reason(class_name, tmp_path):
    model = tiny_class_model(class_name)
    model.save_pretrained(tmp_path)
    try:
        llm = open_case(tmp_path, CASE, tensor_parallel_size=2)
    except UnsupportedModelError as error:
        assert error.reason in known_reasons(class_name), str(error)
        assert REASONS[error.reason].trait in str(error)
        assert class_name in str(error) or "layer" in str(error)
        return
    with llm:
        assert class_name not in REFUSED | ONE_RANK, "ranks serve it now; move it out of class_outcomes.py"
        assert_own_tokens(llm, model, prompts_of(class_name))


@pytest.mark.parametrize("class_name", [name for name in ONE_RANK if name in BUILT])
def test_one_rank_gives_the_tokens_of_a_saved_class_that_several_do_not_serve(class_name, tmp_path):
    model = tiny_class_model(class_name)
    model.save_pretrained(tmp_path)
    with open_case(tmp_path, CASE.for_class(class_name)) as llm:
        assert_own_tokens(llm, model, prompts_of(class_name))

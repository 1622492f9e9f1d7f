"""Every causal language model class of the installed `transformers` is served with its own tokens, or refused by name.

So it is as a live module, and saved to a folder by two ranks or one. A release of `transformers` that adds a class adds
its cases here. A class's tests follow one another with one model; all engines of two ranks have the same two processes.
"""

from functools import cached_property, partial

import pytest
import torch

from nanovllm import UnsupportedModelError
from nanovllm.features.unsupported import REASONS
from tests.support.class_cases import CASES, Case, engine_answers, open_case, own_answers, prompts_of, seeded_case
from tests.support.class_outcomes import NOT_BUILT, ONE_RANK, REFUSED
from tests.support.llms import check_engine, generate, greedy
from tests.support.models_page import PAGE, VERSION, page, served_row
from tests.support.rank_pair import one_pair_of_processes
from tests.support.tiny_classes import class_names, tiny_class_model

NUM_TOKENS = 6
SAVED_CASE, SAVED_TOKENS = Case(16, 40, 12, is_warm=False), 3
BUILT = [name for name in class_names() if name not in NOT_BUILT]
NAMES = [*BUILT, *(name for name in class_names() if name in NOT_BUILT)]


class Own:
    """A class's tiny model, None if it is known not to be built by itself, and its greedy tokens, generated once."""

    def __init__(self, class_name):
        self.model, self.prompts = tiny_model_of(class_name), prompts_of(class_name)

    @cached_property
    def answers(self):
        return own_answers(self.model, self.prompts, NUM_TOKENS)


@pytest.fixture(scope="module")
def own(class_name):
    return Own(class_name)


@pytest.fixture(scope="module")
def pair():
    with one_pair_of_processes():
        yield


def tiny_model_of(class_name):
    """A tiny model; None for a class that is known not to be built by itself."""
    try:
        return tiny_class_model(class_name)
    except Exception as error:
        if class_name in NOT_BUILT:
            return None
        raise AssertionError(
            f"{class_name} has sizes that tests/support/tiny_classes.py does not fit together; give it a line there"
        ) from error


def assert_listed(row):
    """Unless another release of `transformers` is installed than the page was made with."""
    text = PAGE.read_text(encoding="utf-8")
    assert VERSION not in text or row in text.splitlines(), "run `python -m tests.support.models_page`"


def test_the_page_of_models_has_the_reasons_and_classes_of_the_tables():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.count("|") == 5 and line[2:3].isupper()]
    served = {row.split(" | ")[0][2:]: row for row in rows}
    if VERSION in text:
        assert text == page(served), "run `python -m tests.support.models_page`"
        assert served.keys() == set(class_names()) - REFUSED.keys() - NOT_BUILT.keys()


def assert_reports(llm, model, prompt):
    """Log-probabilities of a prompt and its embedding are the model's own, or refused where the page says so."""
    params = greedy(1, prompt_logprobs=0)
    if not llm._engine.model_runner.binding.passes.has_base_model:
        for ask in (partial(llm.generate, sampling_params=params), llm.embed):
            with pytest.raises(ValueError, match="has no base model apart from its head"):
                ask([prompt], use_tqdm=False)
        return
    (output,) = generate(llm, [prompt], params)
    (embedded,) = llm.embed([prompt], normalize=False, use_tqdm=False)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logprobs = model(ids).logits[0].float().log_softmax(-1)
        states = model.base_model(ids).last_hidden_state[0]
    found = [logprob[token].logprob for logprob, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(found), logprobs[range(len(prompt) - 1), prompt[1:]], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.tensor(embedded.embedding), states[-1], rtol=1e-3, atol=1e-3)


def assert_says_why(error, class_name):
    assert REASONS[error.reason].trait in str(error)
    assert class_name in str(error) or "layer" in str(error)


def assert_served_or_refused(class_name, case, own, num_tokens):
    model, prompts = own.model, own.prompts
    if model is None:
        return
    try:
        llm = open_case(model, case)
    except UnsupportedModelError as error:
        assert error.reason == REFUSED.get(class_name, error.reason), str(error)
        assert error.reason in REFUSED.values(), f"refused for a reason that is not listed: {error}"
        assert_says_why(error, class_name)
        return
    assert class_name not in REFUSED, "it is served now; move it out of tests/support/class_outcomes.py"
    with llm:
        assert_listed(served_row(class_name, llm._engine.model_runner.binding))
        answers = engine_answers(llm, case, prompts, num_tokens)
        assert_reports(llm, model, prompts[1])
        check_engine(llm)
    expected = own.answers if num_tokens == NUM_TOKENS else own_answers(model, prompts, num_tokens)
    assert len({token for tokens in expected for token in tokens}) > 2, "its tokens do not depend on the prompts"
    for found in answers:
        assert found == expected


@pytest.mark.costly
@pytest.mark.parametrize("class_name", NAMES, scope="module")
def test_a_class_is_served_with_its_own_tokens_or_refused_for_a_known_reason(class_name, own):
    assert_served_or_refused(class_name, seeded_case(class_name), own, NUM_TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("class_name", sorted(REFUSED.keys() - NOT_BUILT.keys()))
def test_a_saved_class_is_refused_as_the_module_is_and_by_its_config_before_weights_are_read(class_name, tmp_path):
    model = tiny_model_of(class_name)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as of_module:
        open_case(model, SAVED_CASE)
    # Types of layers that no class with recurrent states has either; of others the module says whether it has states.
    is_in_config = of_module.value.reason == "sparse attention" and "(of type " in str(of_module.value)
    if is_in_config:
        for file in tmp_path.glob("*.safetensors"):
            file.write_bytes(b"no weights")
    with pytest.raises(UnsupportedModelError) as of_folder:
        open_case(tmp_path, SAVED_CASE)
    assert (str(of_folder.value), of_folder.value.reason) == (str(of_module.value), of_module.value.reason)


def known_reasons(class_name):
    """Why two ranks may refuse it; of another release of `transformers` than the page's any class may be refused."""
    if class_name in REFUSED:
        return {REFUSED[class_name], "no plan", "part of the plan", "states on ranks"}
    is_listed = VERSION in PAGE.read_text(encoding="utf-8")
    return {ONE_RANK.get(class_name)} if is_listed else {*REFUSED.values(), *ONE_RANK.values()}


def assert_own_tokens(llm, own):
    prompts = own.prompts[2:5]  # of 1.5, 4 and 3 windows; the live module has the others
    (found,) = engine_answers(llm, SAVED_CASE, prompts, SAVED_TOKENS)
    check_engine(llm)
    expected = [tokens[:SAVED_TOKENS] for tokens in own.answers[2:5]]
    assert len({token for tokens in expected for token in tokens}) > 1, "its tokens do not depend on the prompts"
    assert found == expected


@pytest.mark.full
@pytest.mark.parametrize("class_name", BUILT, scope="module")
def test_two_ranks_give_the_tokens_of_a_saved_class_or_refuse_it_for_a_known_reason_and_one_gives_them(
    class_name, own, pair, tmp_path
):
    own.model.save_pretrained(tmp_path)
    try:
        llm = open_case(tmp_path, SAVED_CASE, tensor_parallel_size=2)
    except UnsupportedModelError as error:
        assert error.reason in known_reasons(class_name), str(error)
        assert_says_why(error, class_name)
    else:
        with llm:
            assert class_name not in REFUSED | ONE_RANK, "ranks serve it now; move it out of class_outcomes.py"
            assert_own_tokens(llm, own)
    if class_name in ONE_RANK:
        with open_case(tmp_path, SAVED_CASE.for_class(class_name)) as llm:
            assert_own_tokens(llm, own)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("class_name", class_names())
def test_a_class_is_served_with_its_own_tokens_in_every_case(class_name, case):
    assert_served_or_refused(class_name, case.for_class(class_name), Own(class_name), 3 * NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("class_name", sorted(set(class_names()) - REFUSED.keys() - NOT_BUILT.keys()))
def test_a_saved_model_of_the_class_is_served_with_its_own_tokens(class_name, tmp_path):
    """A model of the engine's own: its weights are packed for the C++ products, its experts too."""
    model = tiny_model_of(class_name)
    model.save_pretrained(tmp_path)
    prompts, case = prompts_of(class_name), CASES[-2].for_class(class_name)
    with open_case(tmp_path, case) as llm:
        answers = engine_answers(llm, case, prompts, NUM_TOKENS)
    expected = own_answers(model, prompts, NUM_TOKENS)
    for found in answers:
        assert found == expected

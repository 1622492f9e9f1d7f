"""Pictures of prompts and conversations: read by the model's own processor, or refused by name."""

import asyncio
import base64
import io
import threading

import pytest
from PIL import Image

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.errors import PromptTooLongError
from nanovllm.features.media import features, opening, reading
from tests.support.async_llms import answer
from tests.support.llms import generate, token_ids
from tests.support.picture_models import picture_model, png, random_images, save_llava

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SIZES = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 24}
IMAGES = random_images()
STORED = png(IMAGES[0])
PROMPTS = [
    ("what is <image> here", IMAGES[:1]),
    ("two <image> and <image>", IMAGES[1:]),
    ("what is <image> here", IMAGES[1:2]),
    ("plain text of words", []),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    return folder, *save_llava(folder)


@pytest.fixture(scope="module")
def llm(saved):
    with LLM(saved[0], **SIZES) as opened:
        yield opened


def with_images(text, images):
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}


def test_prompts_and_answers_are_those_of_the_processor_and_the_model(saved, llm):
    _, model, processor = saved
    for _ in range(2):  # cold and warm
        outputs = generate(llm, [with_images(*given) for given in PROMPTS], GREEDY)
        for (text, images), output in zip(PROMPTS, outputs, strict=True):
            given = processor(text=text, images=images or None, return_tensors="pt")
            given = {name: given[name] for name in ("input_ids", "attention_mask", "pixel_values") if name in given}
            answer = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert output.prompt_token_ids == given["input_ids"][0].tolist()
            assert output.outputs[0].token_ids == answer[0, len(output.prompt_token_ids) :].tolist()
    assert llm.stats().prefix_cache_hits > 0


def test_a_conversation_takes_pictures_in_any_form(saved, llm, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(STORED)
    url = f"data:image/png;base64,{base64.b64encode(STORED).decode()}"
    parts = [{"type": "image", "image": given} for given in (IMAGES[0], STORED, path)]
    parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url}]
    conversations = [
        [{"role": "user", "content": [{"type": "text", "text": "what <image> is"}, part]}] for part in parts
    ]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1
    assert token_ids(outputs) == token_ids(outputs[:1]) * 5
    placeholders = outputs[0].prompt_token_ids.count(saved[1].config.image_token_id)
    assert placeholders == 16  # the text that spells one stays text


def test_a_picture_is_turned_as_its_file_says():
    tall = Image.new("RGB", (8, 4))
    exif = Image.Exif()
    exif[274] = 6
    stored = io.BytesIO()
    tall.save(stored, "PNG", exif=exif)
    assert reading.opened(stored.getvalue()).size == (4, 8)


@pytest.mark.parametrize(
    "prompt, error",
    [
        (with_images("no place", IMAGES[:1]), "0 places for pictures"),
        (with_images("<image> <image>", IMAGES[:1]), "2 places for pictures .* 1 pictures"),
        (with_images("a <image>", [b"<svg/>"]), "cannot be read"),
        (with_images("a <image>", [STORED[:40]]), "cannot be read"),
        (with_images("a <image>", [7]), "one of PIL, a path or the bytes"),
        ({"prompt": "a <image>", "multi_modal_data": {"video": [1]}}, "'video'; this engine takes 'image' alone"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(prompt, error, llm):
    with pytest.raises((TypeError, ValueError), match=error):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_more_pixels_than_the_limit_are_not_decoded(monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(ValueError, match="a picture has 90 x 70 pixels, more than 100"):
        reading.opened(STORED, max_pixels=100)


def test_a_prompt_has_as_many_pictures_as_the_option_says(saved):
    with LLM(saved[0], limit_mm_per_prompt={"image": 1}, **SIZES) as llm:
        assert generate(llm, [with_images(*PROMPTS[0])], GREEDY)
        with pytest.raises(ValueError, match=r"has 2 pictures, more than limit_mm_per_prompt allows \(1\)"):
            generate(llm, [with_images(*PROMPTS[1])], GREEDY)


def test_pictures_behind_the_longest_prompt_are_not_read(llm, monkeypatch):
    taken = []
    monkeypatch.setattr(reading, "opened", lambda given: taken.append(given) or given)
    with pytest.raises(PromptTooLongError, match=r"over 2\d\d tokens"):
        generate(llm, [with_images("<image> " * 60, [IMAGES[0]] * 60)], GREEDY)
    assert len(taken) == 16


async def test_a_picture_that_takes_long_to_read_keeps_no_text_waiting(saved, monkeypatch):
    began, go, whole = threading.Event(), threading.Event(), reading.opened

    def slow(image):
        began.set()
        assert go.wait(60)
        return whole(image)

    monkeypatch.setattr(reading, "opened", slow)
    with_picture, text = (with_images(*PROMPTS[number]) for number in (0, 3))
    async with AsyncLLM(saved[0], **SIZES) as llm:
        try:
            held = asyncio.ensure_future(answer(llm.generate(with_picture, GREEDY)))
            assert await asyncio.to_thread(began.wait, 60)
            await asyncio.wait_for(answer(llm.generate(text, GREEDY)), 60)
            assert not held.done()
        finally:
            go.set()
        assert len((await held)[0]) == GREEDY.max_tokens


def test_arguments_of_the_processor_are_tried_at_start(saved):
    with pytest.raises(ValueError, match=r"mm_processor_kwargs is .*'sizes'.*cannot be read"):
        LLM(saved[0], mm_processor_kwargs={"sizes": 3}, **SIZES)
    with LLM(saved[0], mm_processor_kwargs={"do_rescale": False}, **SIZES) as llm:
        (output,) = generate(llm, [with_images(*PROMPTS[0])], GREEDY)
    assert output.prompt_token_ids.count(saved[1].config.image_token_id) == 16


def test_a_picture_that_fails_the_encoder_fails_its_own_request_alone(saved, llm, monkeypatch):
    encode = features.Encoder._encode
    bad = llm._engine.input_processor.process_one("1", with_images("<image>", [Image.new("RGB", (64, 64), "red")]))
    (picture,) = {span.picture for span in bad.prompt_token_ids.media.spans}

    def fail(self, each):
        if picture in each:
            raise RuntimeError("no memory")
        return encode(self, each)

    monkeypatch.setattr(features.Encoder, "_encode", fail)
    own = llm.stream("plain text of words", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    shown = [next(own) for _ in range(3)]
    with pytest.raises(RuntimeError, match="no memory"):
        list(llm.stream(bad.prompt_token_ids, GREEDY))
    assert len([*shown, *own][-1].outputs[0].token_ids) == 40


def test_a_prompt_with_pictures_is_not_truncated(llm):
    params = SamplingParams(max_tokens=2, truncate_prompt_tokens=6)
    with pytest.raises(ValueError, match="would cut a prompt with pictures"):
        llm.generate(with_images(*PROMPTS[0]), params, use_tqdm=False)


def test_pictures_are_not_scored(saved, llm):
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(with_images(*PROMPTS[0]), params, use_tqdm=False)
    placeholder = saved[1].config.image_token_id
    is_scored = [report is not None for report in output.prompt_logprobs]
    assert is_scored == [at > 0 and each != placeholder for at, each in enumerate(output.prompt_token_ids)]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda monkeypatch: monkeypatch.setattr(opening, "PIXELS", "other"), "takes no other"),
        (lambda monkeypatch: monkeypatch.setattr(opening, "check_extra", opening_fails), "pillow"),
    ],
)
def test_an_installation_without_the_means_says_so(change, reason, saved, monkeypatch):
    change(monkeypatch)
    with LLM(saved[0], **SIZES) as llm, pytest.raises(ValueError, match=reason):
        llm.generate(with_images(*PROMPTS[0]), GREEDY, use_tqdm=False)


def opening_fails(*_):
    raise opening.MissingLibraryError("a picture needs pillow")


def test_several_ranks_read_text_alone(saved):
    assert "tensor_parallel_size is above 1" in opening.why_not_pictures(saved[1], has_ranks=True)


def test_a_module_without_a_folder_says_why():
    prompt = {"prompt_token_ids": [5], "multi_modal_data": {"image": IMAGES[:1]}}
    refused = pytest.raises(ValueError, match=r"a module without a folder has no processor_config\.json")
    with LLM(picture_model("llava"), num_kv_blocks=8, max_model_len=64) as llm, refused:
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_replicas_answer_as_one_engine_and_find_their_prefixes(saved, llm):
    own = token_ids(generate(llm, [with_images(*given) for given in PROMPTS], GREEDY))
    with LLM(saved[0], data_parallel_size=2, **SIZES) as pool:
        for _ in range(2):
            for given, tokens in zip(PROMPTS, own, strict=True):
                (output,) = generate(pool, [with_images(*given)], GREEDY)
                assert token_ids([output]) == [tokens]
        pictured = generate(pool, [with_images(*PROMPTS[0])], GREEDY)[0]
        assert pictured.metrics.num_cached_tokens >= 16

"""Pictures of any size are read as the library's own processor reads them; the registry knows them by content."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

from nanovllm.features.media.pictures import Registry
from nanovllm.features.media.reading import PictureReader, opened
from tests.support.picture_models import png
from tests.support.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def processor():
    """One that cuts a picture into tiles by its shape, and has a token at the end of each row of patches."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tiles = [[64, 64], [64, 128], [128, 64], [128, 128]]
    images = LlavaNextImageProcessorPil(size={"shortest_edge": 64}, crop_size=64, image_grid_pinpoints=tiles)
    options = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextProcessor(images, tokenizer, image_token="<image>", **options)


@pytest.fixture(scope="module")
def reader(processor):
    config = SimpleNamespace(image_token_id=processor.tokenizer.convert_tokens_to_ids("<image>"))
    base = SimpleNamespace(get_image_features=lambda pixel_values, image_sizes: None)
    options = SimpleNamespace(limit_mm_per_prompt=None, mm_processor_kwargs=None, max_model_len=10_000)
    return PictureReader(processor, SimpleNamespace(config=config, base_model=base), Registry(), options)


@pytest.mark.parametrize("seed", range(50))
def test_any_size_and_orientation_is_read_as_the_library_does(seed, processor, reader):
    choice = random.Random(seed)
    height, width = choice.choice([(1, 40), (40, 1), *[(choice.randint(2, 300), choice.randint(2, 300))] * 8])
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, choice.choice([3, 4])), np.uint8)
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[274] = choice.randint(1, 8)
    turned = ImageOps.exif_transpose(opened(png(image, exif=exif)))
    text = "what <image> is <image>"
    prompt = reader.prompt(processor.tokenizer(text)["input_ids"], [png(image, exif=exif), image])
    own = processor(text=text, images=[turned, image.convert("RGB")], return_tensors="pt")
    assert list(prompt) == own["input_ids"][0].tolist()
    pictures = list(dict.fromkeys(span.picture for span in prompt.media.spans))
    for index, picture in enumerate((pictures[0], pictures[-1])):
        count = len(picture.inputs["pixel_values"][0])
        assert torch.equal(picture.inputs["pixel_values"][0], own["pixel_values"][index][:count])
        assert torch.equal(picture.inputs["image_sizes"][0], own["image_sizes"][index])


@pytest.mark.parametrize("seed", range(4))
def test_equal_content_is_one_picture_while_it_is_kept(seed):
    choice = random.Random(seed)
    contents = [torch.randn(choice.randint(1, 9), 4) for _ in range(12)]
    contents.append(contents[0].reshape(1, *contents[0].shape))  # the same bytes in another shape
    registry = Registry(max_bytes=300)
    known = {}
    for _ in range(400):
        index = choice.randrange(len(contents))
        picture = registry.picture({"pixel_values": contents[index].clone()}, 3)
        assert torch.equal(picture.inputs["pixel_values"], contents[index])
        assert known.setdefault(index, picture).digest == picture.digest
        assert registry.picture({"pixel_values": contents[index].clone()}, 3) is picture
    assert len({picture.digest for picture in known.values()}) == len(contents)
    assert sum(picture.num_bytes for picture in registry._pictures.values()) <= 300

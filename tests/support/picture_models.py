"""Tiny random models that take pictures, and what their own `generate` answers."""

import copy
import functools
import io

import numpy as np
import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, CLIPImageProcessor, LlavaProcessor

from nanovllm.features.intake.prompts import ChatPrompt
from nanovllm.features.media.pictures import Registry
from nanovllm.features.media.reading import media_of
from tests.support.tiny_models import tiny_tokenizer

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 512,
}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "image_size": 64}
GRIDS = [(8, 8), (8, 4), (8, 12)]  # in patches, of a model that takes pictures of any size
PLACEHOLDER = 264


@functools.cache
def picture_model(family):
    """A model of a `transformers` family, such as "llava"."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family]()
    for part, sizes in ((config.get_text_config(), TEXT), (config.vision_config, VISION)):
        for name, value in sizes.items():
            if hasattr(part, name):
                setattr(part, name, [value] * 2 if isinstance(getattr(part, name), (list, tuple)) else value)
    if family.startswith("qwen"):
        for name, value in {"depth": 2, "num_heads": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}.items():
            setattr(config.vision_config, name, value)
        config.get_text_config().rope_parameters["mrope_section"] = [2, 3, 3]
    else:
        config.vision_config.num_hidden_layers = 2
    config.image_token_id = PLACEHOLDER
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()


def pictures_of(family, count):
    """The encoder's inputs of so many pictures."""
    generator = torch.Generator().manual_seed(1)
    vision = picture_model(family).config.vision_config
    made = []
    for number in range(count):
        if family.startswith("qwen"):
            height, width = GRIDS[number % len(GRIDS)]
            elements = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            pixels = torch.randn(height * width, elements, generator=generator)
            made.append({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])})
        else:
            made.append({"pixel_values": torch.randn(1, 3, 64, 64, generator=generator)})
    return made


REGISTRY = Registry()


def picture_prompt(family, *parts):
    """A prompt of token ids and pictures: a list of ids is text, a dictionary a picture's inputs."""
    model = picture_model(family)
    token_ids, pictures = [], []
    for part in parts:
        if isinstance(part, dict):
            pictures.append(REGISTRY.picture(part, num_tokens(family, part)))
            part = [PLACEHOLDER] * pictures[-1].num_tokens
        token_ids += part
    if not pictures:
        return token_ids
    return ChatPrompt(token_ids, (), media_of(model, token_ids, PLACEHOLDER, pictures))


def mixed_parts(family):
    """Parts of several prompts: one picture, another in its place, two, text alone."""
    first, second, third = pictures_of(family, 3)
    begin, end = [5, 6, 7], [8, 9]
    return [[begin, first, end], [begin, third, end], [begin, second, end, first, end], [begin + end]]


def num_tokens(family, inputs):
    """Rows of a picture's features."""
    with torch.no_grad():
        rows = picture_model(family).base_model.get_image_features(**inputs, return_dict=True).pooler_output
    rows = torch.cat(list(rows)) if isinstance(rows, (list, tuple)) else rows
    return rows.numel() // rows.shape[-1]


def own_inputs(family, *parts, more=()):
    """The arguments of the model's own forward pass for the prompt of `parts` and `more` tokens."""
    ids = torch.tensor([[*picture_prompt(family, *parts), *more]])
    pictures = [part for part in parts if isinstance(part, dict)]
    inputs = {name: torch.cat([picture[name] for picture in pictures]) for name in pictures[0]} if pictures else {}
    if hasattr(picture_model(family).base_model, "get_rope_index") and pictures:
        inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | inputs


def expected(family, *parts, max_tokens=8, **options):
    """The tokens that the model's own `generate` adds to the prompt of `parts`."""
    inputs = own_inputs(family, *parts)
    output = picture_model(family).generate(
        **inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    return output[0, inputs["input_ids"].shape[1] :].tolist()


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_llava(folder):
    """Save a tiny LLaVA with its processor; returns (model, processor)."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.padding_side = "left"
    tokenizer.chat_template = TEMPLATE
    model = copy.deepcopy(picture_model("llava"))
    model.resize_token_embeddings(len(tokenizer) + 8)
    model.config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    vision = model.config.vision_config
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": vision.image_size}, crop_size=vision.image_size), tokenizer,
        chat_template=TEMPLATE, patch_size=vision.patch_size, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def random_images():
    """Pictures of PIL of several shapes."""
    numbers = np.random.default_rng(0)
    return [Image.fromarray(numbers.integers(0, 255, (*size, 3), np.uint8)) for size in ((70, 90), (64, 64), (33, 120))]


def png(image, **options):
    stored = io.BytesIO()
    image.save(stored, "PNG", **options)
    return stored.getvalue()

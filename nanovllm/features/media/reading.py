"""Reads pictures of prompts: opens them within limits, and turns them into placeholders and the encoder's tensors.

Sizes, crops and the text around placeholders are the model's own, by its processor of `transformers`.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nanovllm.errors import too_long
from nanovllm.features.intake.intake import checkpoint, picture_turn
from nanovllm.features.intake.prompts import ChatPrompt, plain_prompt
from nanovllm.features.media.pictures import Media, Picture, Registry, placeholder_of, spans_of

MAX_PIXELS = 64 * 2**20
MAX_PICTURES = 64  # the default of limit_mm_per_prompt


def opened(given: Any, max_pixels: int = MAX_PIXELS) -> Any:
    """An RGB picture of PIL, turned as its EXIF says, from one, its file's bytes or its path.

    Raises ValueError for bytes that are no picture, and for more than `max_pixels`, before they are decoded.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    picture: Any
    try:
        if isinstance(given, (bytes, bytearray, memoryview)):
            picture = Image.open(io.BytesIO(given))
        elif isinstance(given, (str, os.PathLike)):
            picture = Image.open(given)
        elif isinstance(given, Image.Image):
            picture = given
        else:
            raise TypeError(f"a picture is one of PIL, a path or the bytes of a file, not {type(given).__name__}.")
        width, height = picture.size
        if width * height > max_pixels:
            raise ValueError(f"a picture has {width} x {height} pixels, more than {max_pixels}; make it smaller.")
        return ImageOps.exif_transpose(picture).convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ValueError(f"a picture cannot be read: {error}") from error


class PictureReader:
    """Makes prompts with pictures; thread-safe.

    Args:
        processor: the model's processor of `transformers`.
        engine_config: `EngineConfig`; limit_mm_per_prompt, mm_processor_kwargs and max_model_len are read.
        model: the model; its `get_rope_index`, if it has one, gives the rotary positions of prompts with pictures.
    """

    def __init__(self, processor: Any, model: Any, registry: Registry, engine_config: Any) -> None:
        self._limit = (engine_config.limit_mm_per_prompt or {"image": MAX_PICTURES})["image"]
        self._options = dict(engine_config.mm_processor_kwargs or {})
        self._max_model_len: int = engine_config.max_model_len
        self._processor = processor
        self.registry = registry
        self._model = model
        self._placeholder = placeholder_of(model.config)
        self._mark = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        features = inspect.signature(model.base_model.get_image_features).parameters
        self._arguments = {name for name, parameter in features.items() if parameter.kind is not parameter.VAR_KEYWORD}

    def plain(self, given: Mapping[str, Any], tokenize: Callable[..., list[int]]) -> Any:
        """The prompt of a dictionary, with the pictures of {"multi_modal_data": {"image": one or several}}."""
        rest = dict(given)
        media = rest.pop("multi_modal_data", None) or {}
        if others := media.keys() - {"image"}:
            raise ValueError(f"multi_modal_data has {min(others)!r}; this engine takes 'image' alone.")
        images = media.get("image")
        plain = plain_prompt(rest)
        if images is None:
            return plain
        return self.prompt(tokenize(plain), list(images) if isinstance(images, (list, tuple)) else [images])

    def prompt(self, token_ids: list[int], images: list[Any], end_token_ids: tuple[int, ...] = ()) -> ChatPrompt:
        """The prompt with the placeholders of the pictures in place of its marks, one a picture."""
        marks = [index for index, token_id in enumerate(token_ids) if token_id == self._mark]
        if len(marks) != len(images):
            raise ValueError(
                f"the prompt has {len(marks)} places for pictures ({self._processor.image_token!r}), and "
                f"{len(images)} pictures are given."
            )
        if len(images) > self._limit:
            raise ValueError(
                f"the prompt has {len(images)} pictures, more than limit_mm_per_prompt allows ({self._limit}). Send "
                "fewer, or raise it."
            )
        expanded: list[int] = []
        pictures: list[Picture] = []
        begin = 0
        with picture_turn():
            for mark, image in zip(marks, images, strict=True):
                checkpoint()
                picture, tokens = self._read(opened(image))
                expanded += [*token_ids[begin:mark], *tokens]
                pictures.append(picture)
                begin = mark + 1
                if len(expanded) >= self._max_model_len:  # the pictures after it are not read
                    raise too_long(f"over {len(expanded) - 1} tokens", self._max_model_len)
        expanded += token_ids[begin:]
        return ChatPrompt(expanded, end_token_ids, media_of(self._model, expanded, self._placeholder, pictures))

    def trial(self, side: int = 64) -> Picture:
        """A square picture of so many pixels a side as the encoder takes it."""
        from PIL import Image

        return self._read(Image.new("RGB", (side, side)))[0]

    def largest(self) -> Picture:
        """A square picture of about the most placeholders that a prompt can have."""
        found = self.trial()
        for side in (128, 256, 512, 1024, 2048, 4096, 8192):
            larger = self.trial(side)
            if not found.num_tokens < larger.num_tokens < self._max_model_len:
                break
            found = larger
        return found

    def _read(self, image: Any) -> tuple[Picture, list[int]]:
        """The picture, and the tokens that stand for it."""
        processor = self._processor
        found = processor.image_processor([image], return_tensors="pt", **self._options)
        text = processor.replace_image_token(found, image_idx=0)
        tokens = list(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        inputs = {name: value for name, value in found.items() if name in self._arguments}
        return self.registry.picture(inputs, tokens.count(self._placeholder)), tokens


def media_of(model: Any, token_ids: list[int], placeholder: int, pictures: list[Picture]) -> Media:
    """The pictures of a prompt that holds their placeholders, and its rotary positions, where they depend on pictures.

    Raises ValueError if there are more placeholders than the pictures have, or fewer.
    """
    media = Media(spans_of(token_ids, placeholder, pictures))
    base = model.base_model
    if not pictures or not hasattr(base, "get_rope_index"):
        return media
    kinds = torch.zeros(1, len(token_ids), dtype=torch.int32)
    for span in media.spans:
        kinds[0, span.start : span.end] = 1
    names = inspect.signature(base.get_rope_index).parameters
    given = {name: _joined([p.inputs[name] for p in pictures]) for name in pictures[0].inputs if name in names}
    positions, shift = base.get_rope_index(input_ids=torch.tensor([token_ids]), mm_token_type_ids=kinds, **given)
    media.positions = positions[:, 0].numpy()
    media.shift = int(shift.flatten()[0])
    return media


def _joined(values: list[Any]) -> Any:
    return torch.cat(values) if isinstance(values[0], Tensor) else [each for value in values for each in value]

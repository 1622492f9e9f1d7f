"""Opens the reader of pictures of an engine, or tells why its model takes none."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import transformers

from nanovllm.features.extras import MissingLibraryError, check_extra
from nanovllm.features.intake.prompts import plain_prompt
from nanovllm.features.media.features import PIXELS, Encoder
from nanovllm.features.media.pictures import Registry, placeholder_of
from nanovllm.features.media.reading import PictureReader

logger = logging.getLogger("nanovllm")
_END = "ForConditionalGeneration"
TESTED = (  # classes, without their end
    "AyaVision Cohere2Vision Cosmos3Edge Cosmos3Omni DeepseekVL Exaone4_5 Glm46V Glm4v Glm4vMoe GlmOcr GotOcr2 "
    "HyperCLOVAXVisionV2 Idefics2 Idefics3 InternVL Janus Kimi_K25 Lfm2Vl Lfm3Vl LightOnOcr Llava LlavaNext "
    "LlavaNextVideo LlavaOnevision Mistral3 MuseGlimmer MuseSpark Ovis2 PaddleOCRVL QianfanOCR Qwen2VL Qwen2_5_VL "
    "Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe SmolVLM VideoLlava VipLlava "
)


class NoReader:
    """Takes the place of a `PictureReader` and refuses pictures for a reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def plain(self, given: Mapping[str, Any], tokenize: Callable[..., list[int]]) -> Any:
        rest = dict(given)
        if rest.pop("multi_modal_data", None):
            self.prompt()
        return plain_prompt(rest)

    def prompt(self, *_: Any) -> NoReturn:
        raise ValueError(f"the prompt has a picture, and {self._reason}")


def open_front(input_processor: Any, source: str) -> None:
    """Let a front's requests have pictures, which engines in other processes compute, if the model takes them.

    Args:
        source: folder, file or hub id of the model, which is built here without weights.
    """
    path = os.path.join(source, "config.json")
    if not os.path.isfile(path) or "vision_config" not in transformers.PretrainedConfig.get_config_dict(source)[0]:
        return
    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    input_processor.parts.use_pictures(open_reader(model, input_processor.config))


def open_reader(model: Any, config: Any, encoder: Encoder | None = None) -> PictureReader | NoReader:
    """The reader of pictures for a model that has an encoder of them; tries a picture, also with `encoder` if given.

    Raises ValueError for mm_processor_kwargs with which a picture cannot be read.
    """
    reason = why_not_pictures(model, has_ranks=config.tensor_parallel_size > 1)
    if reason is not None:
        return NoReader(reason)
    try:
        reader = PictureReader(_processor_of(model.config._name_or_path), model, Registry(), config)
        picture = reader.trial()
        if encoder is not None:
            encoder.features(picture)
            if encoder.device.type == "cuda":  # the KV cache has its memory already
                encoder.reserve(reader.largest())
    except torch.OutOfMemoryError as error:
        return NoReader(f"its encoder lacks memory; lower gpu_memory_utilization: {error}")
    except Exception as error:  # the model's own code may raise any
        options = config.mm_processor_kwargs
        if options and not isinstance(error, MissingLibraryError):
            raise ValueError(
                f"mm_processor_kwargs is {options}, with which a picture cannot be read: {error}"
            ) from error
        return NoReader(f"its processor or its encoder fails on one: {error}")
    name = type(model).__name__
    if name.removesuffix(_END).rstrip("_") not in TESTED.split():
        logger.warning("%s takes pictures, and no test of this engine runs the class with them", name)
    return reader


def why_not_pictures(model: Any, *, has_ranks: bool) -> str | None:
    """Why an engine takes no pictures, though its model has an encoder of them; None if it does."""
    name = type(model).__name__
    if has_ranks:
        return "tensor_parallel_size is above 1, with which this engine reads text alone."
    arguments = inspect.signature(model.base_model.forward).parameters
    if PIXELS not in arguments:
        return f"the forward pass of {name} takes no {PIXELS}."
    if placeholder_of(model.config) is None:
        return f"the config of {name} names no token that stands for a picture."
    if "token_type_ids" in arguments or getattr(model.config.get_text_config(), "use_bidirectional_attention", None):
        return f"the rows of a picture see each other both ways in {name}, which this engine does not compute."
    source = model.config._name_or_path
    if not os.path.isfile(os.path.join(source, "processor_config.json")):
        return f"{source or 'a module without a folder'} has no processor_config.json, which says how to read pictures."
    return None


def _processor_of(source: str) -> Any:
    check_extra("a picture", "images", "PIL")
    return transformers.AutoProcessor.from_pretrained(source)

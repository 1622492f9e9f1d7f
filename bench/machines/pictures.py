"""Prompts with pictures: throughput and `transformers`', a second question, text that streams meanwhile.

    python bench/machines/pictures.py throughput  # requests of a picture each, and `generate` of one batch
    python bench/machines/pictures.py question    # first token of a second question about a picture
    python bench/machines/pictures.py streams     # longest step of 64 text streams as 8 pictures arrive

Random weights in the shape of Qwen3-VL 2B (`--shape 2b`) or smaller; pictures are random patches."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import Option, Part, random_prompts, run_parts  # beside this file
from random_models import NoText, device
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

from nanovllm import LLM, SamplingParams
from nanovllm.features.intake.prompts import ChatPrompt
from nanovllm.features.media.pictures import Registry
from nanovllm.features.media.reading import media_of

PLACEHOLDER = 7
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2b": (
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
         "deepstack_visual_indexes": [5, 11, 17]},
    ),
    "tiny": (
        {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192},
        {"depth": 4, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 256,
         "deepstack_visual_indexes": [1]},
    ),
}  # fmt: skip
REGISTRY = Registry()


def checkpoint(shape: str) -> Path:
    """Folder of a model with random weights, written once a machine."""
    folder = Path(tempfile.gettempdir()) / f"nanovllm-random-pictures-{shape}"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        text, vision = SHAPES[shape]
        config = Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=PLACEHOLDER)
        config.text_config.rope_parameters["mrope_section"] = [24, 20, 20] if shape == "2b" else [12, 10, 10]
        with torch.device(device()):
            AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def own_model(shape: str) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint(shape), dtype=torch.bfloat16)
    return model.to(device()).eval()


def tensors_of(model: Any, num_patches: int, seed: int) -> dict[str, Any]:
    """A picture of so many patches, 16 a row of them, as the encoder takes it."""
    vision = model.config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(num_patches, width, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, num_patches // 16, 16]])}


def prompt_of(model: Any, tensors: dict[str, Any], text: list[int]) -> ChatPrompt:
    picture = REGISTRY.picture(tensors, len(tensors["pixel_values"]) // 4)
    ids = [PLACEHOLDER] * picture.num_tokens + text
    return ChatPrompt(ids, (), media_of(model, ids, PLACEHOLDER, [picture]))


def texts_of(shape: str, count: int, length: int, *task: object) -> list[list[int]]:
    vocab_size = SHAPES[shape][0]["vocab_size"]
    return [[max(8, each) for each in text] for text in random_prompts(count, length, vocab_size, *task)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def open_llm(shape: str, **options: Any) -> LLM:
    return LLM(checkpoint(shape), tokenizer=NoText(), max_model_len=2048, **options)


def seconds(llm: LLM, prompts: list[Any], num_tokens: int) -> float:
    begin = time.perf_counter()
    llm.generate(prompts, greedy(num_tokens), use_tqdm=False)
    return time.perf_counter() - begin


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of `count` requests of a picture of 256 patches and 32 tokens of text, `tokens` tokens an answer."""
    model = own_model(args.shape)
    texts = texts_of(args.shape, args.count, 32, "throughput")
    theirs, ours = [], []
    with open_llm(args.shape, max_num_seqs=args.count) as llm:
        for turn in range(args.repeats + 1):  # the first compiles and captures
            pictures = [tensors_of(model, 256, 1000 * turn + number) for number in range(args.count)]
            prompts = [prompt_of(model, *each) for each in zip(pictures, texts, strict=True)]
            ours.append(seconds(llm, prompts, args.tokens))
            ids = torch.tensor([list(prompt) for prompt in prompts], device=device())
            begin = time.perf_counter()
            inputs = {name: torch.cat([each[name].to(device()) for each in pictures]) for name in pictures[0]}
            inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
            with torch.inference_mode():
                output = model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == PLACEHOLDER).int(),
                    min_new_tokens=args.tokens, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0, **inputs,
                )  # fmt: skip
            output.cpu()
            theirs.append(time.perf_counter() - begin)
    found = {"ours_s": statistics.median(ours[1:]), "transformers_s": statistics.median(theirs[1:])}
    return found | {"ratio": found["transformers_s"] / found["ours_s"]}


def question(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token of a first and of a second question about a picture of 1,024 patches."""
    model = own_model(args.shape)
    found: list[list[float]] = [[], []]
    with open_llm(args.shape, max_num_seqs=4) as llm:
        for turn in range(args.repeats + 1):
            picture = tensors_of(model, 1024, turn)
            for number, text in enumerate(texts_of(args.shape, 2, 32, "question", turn)):
                found[number].append(seconds(llm, [prompt_of(model, picture, text)], 1))
    first, second = (statistics.median(values[1:]) for values in found)
    return {"first_s": first, "second_s": second, "ratio": second / first}


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Longest step of `count` streams of text, alone and as 8 pictures of 1,024 patches arrive."""
    model = own_model(args.shape)
    gaps: dict[str, float] = {}
    with open_llm(args.shape, max_num_seqs=args.count + 8) as llm:
        engine = llm._open_engine()
        for turn, (name, num_pictures) in enumerate([("first", 8), ("alone", 0), ("beside", 8)]):
            prompts: list[Any] = [*texts_of(args.shape, args.count, 64, "streams", turn)]
            prompts += [prompt_of(model, tensors_of(model, 1024, 100 * turn + n), [9, 10]) for n in range(num_pictures)]
            times = []
            for step in range(120):
                arriving = prompts[: args.count] if step == 0 else prompts[args.count :] if step == 40 else []
                for number, prompt in enumerate(arriving):
                    engine.add(engine.input_processor.process_one(f"{name} {step} {number}", prompt, greedy(150)))
                begin = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - begin)
            gaps[name] = max(times[20:])
            while engine.has_unfinished:
                engine.step()
    encoder = []
    for turn in range(4):
        inputs = {name: value.to(device()) for name, value in tensors_of(model, 1024, 7000 + turn).items()}
        begin = time.perf_counter()
        with torch.inference_mode():
            output = model.base_model.get_image_features(**inputs, return_dict=True)
        _ = output.pooler_output[0].cpu()
        encoder.append(time.perf_counter() - begin)
    return {"gap_alone_s": gaps["alone"], "gap_beside_s": gaps["beside"], "encoder_call_s": statistics.median(encoder)}


PARTS = {"throughput": Part(throughput), "question": Part(question), "streams": Part(streams)}
OPTIONS = {
    "shape": Option("tiny", "of random weights", tuple(SHAPES)),
    "count": Option(64, "requests at once"),
    "tokens": Option(32, "of each answer"),
    "repeats": Option(3, "measured runs"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, OPTIONS)

"""The JSON Schema Test Suite, token by token: what is accepted, what is stopped and what is refused.

    python bench/structured/suite.py PATH_OF_JSON-Schema-Test-Suite [--markdown]

PATH holds draft 2020-12's files, directly or as `tests/draft2020-12`, of json-schema-org/JSON-Schema-Test-Suite. Each
document is written as JSON and tokenised by the default model's tokenizer. A valid one must be accepted to its end; an
invalid one must be stopped at a token, or before its end. A schema that is refused counts by the reason.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nanovllm import StructuredOutput
from nanovllm.core.structured_output import GrammarError
from nanovllm.model.default_model import ensure_default_model
from nanovllm.requests.grammar.compiler import GrammarCompiler

RESULTS = ("valid, accepted", "valid, stopped", "invalid, stopped", "invalid, accepted")


def documents(folder: Path) -> list[tuple[str, Any, Any, bool, str]]:
    """(keyword file, schema, document, whether it is valid, description)."""
    nested = folder / "tests" / "draft2020-12"
    files = sorted((nested if nested.is_dir() else folder).glob("*.json")) or sorted(folder.rglob("*.json"))
    return [
        (path.stem, group["schema"], test["data"], test["valid"], f"{group['description']}: {test['description']}")
        for path in files
        for group in json.loads(path.read_text(encoding="utf-8"))
        for test in group["tests"]
    ]


def accepts(matcher: Any, token_ids: list[int]) -> bool:
    matcher = matcher.copy()
    try:
        for token_id in token_ids:
            matcher.consume(token_id)
    except GrammarError:
        return False
    return bool(matcher.is_complete())


def run(folder: Path) -> tuple[dict[str, Counter[str]], Counter[str], list[str]]:
    """Counts by file, reasons of refusals, and the documents that went wrong."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_default_model())
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    counts: dict[str, Counter[str]] = {}
    refusals: Counter[str] = Counter()
    wrong = []
    for keyword, schema, document, is_valid, description in documents(folder):
        own = counts.setdefault(keyword, Counter())
        try:
            matcher = compiler.matcher(StructuredOutput(json_schema=schema))
        except (TypeError, ValueError) as error:
            own["refused"] += 1
            refusals[f"{keyword}: {error}"] += 1
            continue
        text = json.dumps(document, ensure_ascii=False)
        accepted = accepts(matcher, tokenizer.encode(text, add_special_tokens=False))
        result = f"{'valid' if is_valid else 'invalid'}, {'accepted' if accepted else 'stopped'}"
        own[result] += 1
        if accepted != is_valid:
            wrong.append(f"{result}: {keyword}: {description}: {json.dumps(schema)} {text}")
    return counts, refusals, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation alone")
    options = parser.parse_args()
    counts, refusals, wrong = run(options.folder)
    print("| file | " + " | ".join(RESULTS) + " | refused |\n|" + "---|" * (len(RESULTS) + 2))
    total = sum(counts.values(), Counter())
    for name, own in [*counts.items(), ("all", total)]:
        print(f"| {name} | " + " | ".join(str(own[result]) for result in (*RESULTS, "refused")) + " |")
    if not options.markdown:
        print("\nrefused:", *(f"{count} x {reason}" for reason, count in refusals.most_common()), sep="\n")
        print("\nwrong:", *wrong, sep="\n")


if __name__ == "__main__":
    main()

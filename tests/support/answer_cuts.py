"""Answers that come in pieces, cut anywhere, and what a reader makes of them."""

import json


def cuts(text, chance):
    """The text in pieces: whole, single characters, two pieces, and at random."""
    found = [[text], list(text)]
    found += [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for _ in range(10):
        places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 8))))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


def read(stream, parts):
    """Thought, content and calls, each its name and its arguments as JSON, of an answer in parts."""
    thought, content, calls = "", "", []
    for number, part in enumerate(parts):
        new = stream.add(part, is_last=number == len(parts) - 1)
        thought += new.reasoning
        for piece in new.parts:
            if isinstance(piece, str):
                content += piece
            elif "id" in piece:
                calls.append((piece["function"]["name"], piece["function"]["arguments"]))
            else:  # more of the arguments of the last
                name, arguments = calls.pop()
                calls.append((name, arguments + piece["function"]["arguments"]))
    return thought, content, calls


def loaded(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]

"""Drafts copied from text that repeats: a request's own tokens, and finished outputs of the same prefix root.

An index maps the last tokens of a text to the places where they were seen before; the longest match there is copied on.
Agents, editors and extractors repeat their input or earlier answers for long stretches.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from nanovllm.features.speculation.drafter import DraftRequest
from nanovllm.sequence import Sequence

LEAST_MATCH = 3  # tokens; shorter matches are mostly chance
LONGEST_MATCH = 32  # tokens; no more are compared
MAX_PLACES = 4  # places of each key: the newest
SLICE = 256  # tokens indexed per step, so that no step waits for a long prompt
ROOT_TOKENS = 16  # first tokens of the prompt, which must be equal in texts that share drafts
# MANY running requests index TOGETHER tokens at once: drafts gain less there
MANY = 16
TOGETHER = 4
BYTES_PER_TOKEN = 140  # most bytes of the index, as measured
MAX_UNREAD = 64  # most finished outputs that wait to be indexed
TOKEN_BITS = 20
KEY_MASK = (1 << TOKEN_BITS * LEAST_MATCH) - 1
PLACE_BITS = 32
PLACE_MASK = (1 << PLACE_BITS) - 1


class SuffixIndex:
    """Places of every LEAST_MATCH tokens in texts that grow at their end; O(1) a token.

    Texts are array("i") of token ids, by a number. A place is number << PLACE_BITS | position after the tokens; a key
    has one, or a list with the newest last.
    """

    __slots__ = ("_places", "texts")

    def __init__(self) -> None:
        self.texts: dict[int, array[int]] = {}
        self._places: dict[int, int | list[int]] = {}

    def add(self, number: int, begin: int, end: int) -> bool:
        """Index the tokens of a text that end at the positions after `begin`, up to `end`.

        Returns whether the last ones were there before.
        """
        text = self.texts[number]
        places_of = self._places
        base = number << PLACE_BITS
        first = max(begin + 1, LEAST_MATCH)
        found = None
        key = self._key(text, first - 1)
        for position in range(first, end + 1):
            key = (key << TOKEN_BITS | text[position - 1]) & KEY_MASK
            found = places_of.setdefault(key, place := base | position)
            if found is place:
                found = None
            elif isinstance(found, list):
                found.append(place)
                if len(found) > MAX_PLACES:
                    del found[0]
            else:
                places_of[key] = [found, place]
        return found is not None

    def forget(self, number: int) -> None:
        """Drop a text."""
        text = self.texts.pop(number)
        for position in range(LEAST_MATCH, len(text) + 1):
            key = self._key(text, position)
            left = [place for place in self._places_of(key) if place >> PLACE_BITS != number]
            if left:
                self._places[key] = left
            else:
                self._places.pop(key, None)

    def _places_of(self, key: int) -> list[int]:
        found = self._places.get(key, [])
        return found if isinstance(found, list) else [found]

    @staticmethod
    def _key(text: array[int], position: int) -> int:
        key = 0
        for token_id in text[max(0, position - LEAST_MATCH) : position]:
            key = key << TOKEN_BITS | token_id
        return key

    def continuations(self, text: array[int], count: int) -> Iterator[tuple[int, list[int]]]:
        """(length of the match, at most `count` tokens after it) of each place that matches the text's end."""
        end = len(text)
        for place in self._places_of(self._key(text, end)) if end >= LEAST_MATCH else ():
            other = self.texts[place >> PLACE_BITS]
            position = place & PLACE_MASK
            if position == len(other):  # the end itself
                continue
            length = LEAST_MATCH
            most = min(LONGEST_MATCH, position, end)
            while length < most and other[position - length - 1] == text[end - length - 1]:
                length += 1
            yield length, other[position : position + count].tolist()


@dataclass(slots=True)
class OwnText:
    """Index of one request's own tokens.

    root: prefix root of the finished outputs that it drafts from.
    num_indexed: number of tokens indexed.
    is_repeat: True if the last of these tokens end a match of earlier text.
    """

    root: tuple[object, ...]
    index: SuffixIndex = field(default_factory=SuffixIndex)
    num_indexed: int = 0
    is_repeat: bool = False


class SuffixDrafter:
    """Proposes the tokens after the longest earlier match of a request's last tokens.

    Matches of one length vote for the first token, the newest deciding a tie. A draft is at most as long as its match.
    Outputs serve requests of the same cache salt and first prompt tokens, and are forgotten in their order.

    Args:
        max_bytes: limit of the index; tokens of running requests beyond it are not indexed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._own: dict[Sequence, OwnText] = {}
        self._shared: dict[tuple[object, ...], SuffixIndex] = {}  # prefix root -> index
        self._outputs: OrderedDict[int, tuple[object, ...]] = OrderedDict()  # number -> root, the oldest first
        self._unread: deque[tuple[tuple[object, ...], array[int]]] = deque(maxlen=MAX_UNREAD)  # outputs
        self._next_number = 1
        self._left = 0  # tokens that a step's `expects` may still index

    def begin_step(self) -> None:
        """Index finished outputs, so that they do not pile up while `expects` refuses drafts."""
        self._left = self._index_outputs(SLICE)

    def propose(self, requests: SequenceABC[DraftRequest]) -> list[list[int]]:
        left = self._index_outputs(SLICE)
        drafts = []
        for request in requests:
            _, left = self._index_own(request.sequence, left)
            drafts.append(self._draft(request))
        return drafts

    def expects(self, sequence: Sequence) -> bool:
        """Whether the last known tokens repeat earlier text: otherwise the tokens in flight hardly do."""
        own = self._own.get(sequence)
        num_tokens = len(sequence.token_ids)
        if own is None or own.num_indexed < num_tokens:
            if own is not None and num_tokens - own.num_indexed < TOGETHER and len(self._own) >= MANY:
                return False
            own, self._left = self._index_own(sequence, self._left)
        if own.is_repeat and own.num_indexed == num_tokens:
            return True
        shared = self._shared.get(own.root) if self._shared else None
        return shared is not None and any(True for _ in shared.continuations(sequence.token_ids, 1))

    def _draft(self, request: DraftRequest) -> list[int]:
        text = request.sequence.token_ids
        own = self._own[request.sequence]
        found: list[tuple[int, list[int]]] = []
        if self._shared and (shared := self._shared.get(own.root)) is not None:
            found += shared.continuations(text, request.max_tokens)
        if own.is_repeat and own.num_indexed == len(text):
            found += own.index.continuations(text, request.max_tokens)
        if not found:
            return []
        longest = max(length for length, _ in found)
        best = [tokens for length, tokens in found if length == longest]
        # `most_common` prefers the first seen among equal counts.
        votes = Counter(tokens[0] for tokens in reversed(best))
        first = votes.most_common(1)[0][0]
        return next(tokens for tokens in reversed(best) if tokens[0] == first)[:longest]

    def _index_own(self, sequence: Sequence, left: int) -> tuple[OwnText, int]:
        """Index up to `left` more tokens of a request's text; returns its index, and the rest of `left`."""
        own = self._own.get(sequence)
        if own is None:
            own = self._own[sequence] = OwnText(_root(sequence))
            own.index.texts[0] = sequence.token_ids
        begin = own.num_indexed
        # The newest tokens of a text that is read to its end are few, and always indexed.
        end = min(len(sequence.token_ids), begin + max(left, LONGEST_MATCH))
        if end == begin:
            return own, left
        num_bytes = BYTES_PER_TOKEN * (end - begin)
        if num_bytes > self._max_bytes - self.num_bytes and not self._make_room(end - begin):
            return own, left
        self.num_bytes += num_bytes
        own.is_repeat = own.index.add(0, begin, end)
        own.num_indexed = end
        return own, max(0, left - (end - begin))

    def _index_outputs(self, left: int) -> int:
        """Index finished outputs of up to about `left` tokens; returns the rest of `left`."""
        while self._unread and left > 0:
            root, text = self._unread.popleft()
            index = self._shared.setdefault(root, SuffixIndex())
            number = self._next_number
            self._next_number = self._next_number + 1
            index.texts[number] = text
            index.add(number, 0, len(text))
            self._outputs[number] = root
            self.num_bytes += BYTES_PER_TOKEN * len(text)
            left -= len(text)
            self._make_room(0)
        return max(0, left)

    def _make_room(self, num_tokens: int) -> bool:
        """Forget the oldest outputs until `num_tokens` more can be indexed; False if that does not suffice."""
        limit = self._max_bytes - BYTES_PER_TOKEN * num_tokens
        while self.num_bytes > limit and self._outputs:
            number, root = self._outputs.popitem(last=False)
            index = self._shared[root]
            self.num_bytes -= BYTES_PER_TOKEN * len(index.texts[number])
            index.forget(number)
            if not index.texts:
                del self._shared[root]
        return self.num_bytes <= limit

    def end(self, sequence: Sequence) -> None:
        """Drop the index of a sequence that has ended, and queue its output for the shared index."""
        if (own := self._own.pop(sequence, None)) is not None:
            self.num_bytes -= BYTES_PER_TOKEN * own.num_indexed
        text = sequence.token_ids[max(0, sequence.num_prompt_tokens - LEAST_MATCH) :]
        if BYTES_PER_TOKEN * len(text) <= self._max_bytes and len(text) > LEAST_MATCH:
            self._unread.append((_root(sequence), text))


def _root(sequence: Sequence) -> tuple[object, ...]:
    return (sequence.cache_salt, *sequence.token_ids[: min(ROOT_TOKENS, sequence.num_prompt_tokens)])

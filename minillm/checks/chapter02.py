"""The exercises of chapter 2: count a pair, join it, encode a word by rank, hold back half a character."""

import codecs
from collections import Counter
from itertools import pairwise

from minillm.tokenizer import Tokenizer

from .exercise import Exercise, Mistake


def _most_common_pair(pieces, weights, overlap=True, tie=None):
    counts = Counter()
    for piece, weight in zip(pieces, weights, strict=True):
        last = None
        for i, pair in enumerate(pairwise(piece)):
            if overlap or last != (i - 1, pair):
                counts[pair] += weight
                last = (i, pair)
    return min(counts, key=lambda pair: (-counts[pair], tie(pair) if tie else pair))


def _across_borders(pieces, weights):
    return _most_common_pair(
        [[i for p, w in zip(pieces, weights, strict=True) for i in p * w]], [1]
    )


most_common_pair = Exercise(
    name="most_common_pair",
    reference=_most_common_pair,
    cases=(
        ([[1, 2, 3], [1, 2]], [1, 1]),
        ([[1, 2], [3, 4]], [1, 5]),
        ([[9, 8], [2, 3]], [4, 4]),
        ([[7, 7, 7, 7], [1, 2], [1, 2]], [1, 1, 1]),
        ([[5, 6], [5, 6], [6, 5, 1]], [1, 1, 2]),
    ),
    mistakes=(
        Mistake(
            lambda given, expected, arguments: (
                f"you chose {given}, which is the most frequent only if every piece counts once: "
                f"multiply by the weights {arguments[1]}, then it is {expected}"
            ),
            lambda pieces, weights: _most_common_pair(pieces, [1] * len(pieces)),
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"{given} and {expected} occur equally often, and you took the one that came first: "
                "among equals the smallest pair is next"
            ),
            lambda pieces, weights: _most_common_pair(pieces, weights, tie=lambda pair: 0),
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"{given} and {expected} occur equally often, and you took the larger one: "
                "among equals the smallest pair is next"
            ),
            lambda pieces, weights: _most_common_pair(
                pieces, weights, tie=lambda pair: (-pair[0], -pair[1])
            ),
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"you chose {given}: the pieces have been glued together, so that the end of one and "
                "the beginning of the next count as neighbours"
            ),
            _across_borders,
        ),
        Mistake(
            "[7, 7, 7, 7] holds (7, 7) three times, you counted it twice: when counting, every place "
            "where two neighbours stand counts, even if they overlap",
            lambda pieces, weights: _most_common_pair(pieces, weights, overlap=False),
        ),
    ),
    right="this is the whole decision of a training round; repeat it 50,000 times and you have GPT-2's merges",
)


def _merge(ids, pair, new_id):
    """By way of text, so that it is not the loop that the reader writes."""
    joined = "".join(chr(0x4E00 + i) for i in ids).replace(
        "".join(chr(0x4E00 + i) for i in pair), chr(0x4E00 + new_id)
    )
    return [ord(char) - 0x4E00 for char in joined]


def _first_only(ids, pair, new_id):
    places = [i for i, p in enumerate(pairwise(ids)) if p == pair][:1]
    return [*ids[: places[0]], new_id, *ids[places[0] + 2 :]] if places else ids


def _last_id_lost(ids, pair, new_id):
    result = _merge(ids, pair, new_id)
    return result if result[-1:] == [new_id] else result[:-1]


def _without_jump(ids, pair, new_id):
    result, i = [], 0
    while i < len(ids):
        hit = tuple(ids[i : i + 2]) == pair
        result.append(new_id if hit else ids[i])
        i += 1
    return result


def _overlapping(ids, pair, new_id):
    hits = [i for i, p in enumerate(pairwise(ids)) if p == pair]
    return [
        new_id if i in hits else ids[i] for i in range(len(ids)) if i in hits or i - 1 not in hits
    ]


def _from_the_right(ids, pair, new_id):
    return _merge(ids[::-1], pair[::-1], new_id)[::-1]


def _any_order(ids, pair, new_id):
    result, i = [], 0
    while i < len(ids):
        hit = sorted(ids[i : i + 2]) == sorted(pair)
        result.append(new_id if hit else ids[i])
        i += 1 + hit
    return result


my_merge = Exercise(
    name="my_merge",
    reference=_merge,
    cases=(
        ([1, 2, 3, 1, 2], (1, 2), 9),
        ([1, 2, 3], (1, 2), 9),
        ([7, 7, 7], (7, 7), 9),
        ([7, 7, 7, 7, 7], (7, 7), 9),
        ([2, 1, 2, 1], (1, 2), 9),
        ([5], (5, 5), 9),
        ([], (1, 2), 9),
    ),
    mistakes=(
        Mistake(
            "the last id got lost: a loop that stops one before the end must still copy that id",
            _last_id_lost,
        ),
        Mistake(
            "only the first occurrence has been joined: go on to the end of the list", _first_only
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"{arguments[0]} became {given}: after a join move on by two, "
                "or the second id of the pair stays in the list"
            ),
            _without_jump,
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"{arguments[0]} became {given}: the middle id has been used twice. "
                f"Move on by two after a join, then it is {expected}"
            ),
            _overlapping,
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"{arguments[0]} became {given}: that is from right to left. "
                f"From the left it is {expected}"
            ),
            _from_the_right,
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"{arguments[0]} became {given}: the pair {arguments[1]} has an order, "
                f"{arguments[1][::-1]} is another pair"
            ),
            _any_order,
        ),
    ),
    right="training and encoding both rest on this one walk",
)


def _encode_word(word, merges):
    letters = {char: n for n, char in enumerate("".join(chr(c) for c in range(0x21, 0x7F)))}
    vocab = dict(letters)
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(vocab, merges)
    return [tokenizer.decode([i]) for i in tokenizer.encode(word, engine="own")]


def _greedy(word, merges, choose, rounds=None):
    """Join the pair that `choose` picks out of (rank, place), again and again."""
    rank = {}
    for n, pair in enumerate(merges):
        rank.setdefault(pair, n)
    tokens, done = list(word), 0
    while rounds is None or done < rounds:
        found = [(rank[pair], i) for i, pair in enumerate(pairwise(tokens)) if pair in rank]
        if not found:
            break
        _, i = choose(found)
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
        done += 1
    return tokens


def _last_rank_counts(word, merges):
    last = {pair: n for n, pair in enumerate(merges)}
    return _greedy(word, sorted(last, key=last.get), min)


def _longest_tokens(word, merges):
    vocab, tokens = {left + right for left, right in merges}, []
    while word:
        size = next((n for n in range(len(word), 1, -1) if word[:n] in vocab), 1)
        tokens, word = [*tokens, word[:size]], word[size:]
    return tokens


def _says(reason):
    return lambda given, expected, arguments: (
        f"{arguments[0]!r} became {given} and should be {expected}: {reason}"
    )


encode_word = Exercise(
    name="encode_word",
    reference=_encode_word,
    cases=(
        ("abc", [("b", "c"), ("a", "b"), ("ab", "c")]),
        ("abc", [("a", "b"), ("b", "c"), ("a", "bc")]),
        ("hat", [("a", "t"), ("h", "at")]),
        ("that", [("t", "h"), ("a", "t"), ("th", "at")]),
        ("aaaaa", [("a", "a"), ("aa", "aa")]),
        ("xyz", [("x", "y"), ("y", "z"), ("x", "y")]),
        ("mississippi", [("s", "s"), ("i", "ss"), ("i", "p"), ("iss", "iss"), ("m", "iss")]),
        ("q", [("a", "b")]),
    ),
    mistakes=(
        Mistake(
            _says("you join from left to right. The pair of the lowest rank goes first"),
            lambda word, merges: _greedy(
                word, merges, lambda found: min(found, key=lambda f: f[1])
            ),
        ),
        Mistake(
            _says("you join the highest rank first. Training learned the lowest rank first"),
            lambda word, merges: _greedy(word, merges, lambda found: max(found)),
        ),
        Mistake(
            _says("you stop after one join. Look again: the new token has new neighbours"),
            lambda word, merges: _greedy(word, merges, min, rounds=1),
        ),
        Mistake(
            _says(
                "you take the longest token from the left. BPE knows only its merges, in their order"
            ),
            _longest_tokens,
        ),
        Mistake(
            _says("of equal pairs you take the rightmost one. The leftmost goes first"),
            lambda word, merges: _greedy(
                word, merges, lambda found: min(found, key=lambda f: (f[0], -f[1]))
            ),
        ),
        Mistake(
            _says(
                "a pair that stands in the list twice got its last rank. The first one counts: "
                "`dict(zip(...))` keeps the last, `setdefault` the first"
            ),
            _last_rank_counts,
        ),
    ),
    right="this is how every GPT-2 prompt in the world is encoded, and you know why the order matters",
)


def _safe_prefix(data):
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return len(data) - len(decoder.getstate()[0])


def _waits_for_valid_text(data):
    for end in range(len(data), -1, -1):
        try:
            data[:end].decode()
            return end
        except UnicodeDecodeError:
            continue


safe_prefix = Exercise(
    name="safe_prefix",
    reference=_safe_prefix,
    cases=(
        (b"abc",),
        ("é".encode(),),
        ("a é 漢".encode()[:-1],),
        ("a é 漢".encode()[:-2],),
        ("hi 😀".encode()[:-1],),
        ("hi 😀".encode()[:-3],),
        ("😀".encode()[:2],),
        (b"a\xffb",),
        (b"\xff",),
        (b"\x80\x80\x80\x80",),
        (b"a\xe6A",),
        (b"",),
    ),
    mistakes=(
        Mistake(
            lambda given, expected, arguments: (
                f"you show all {given} bytes of {arguments[0]!r}, half a character included: "
                f"only the first {expected} are certain"
            ),
            len,
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"{arguments[0]!r} holds a byte that never becomes a character, and you wait for it "
                f"({given} instead of {expected} bytes): such a stream would stand still for ever"
            ),
            _waits_for_valid_text,
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"for {arguments[0]!r} you return {given}: that is a number of characters. "
                f"Expected are bytes, {expected}"
            ),
            lambda data: len(data[: _safe_prefix(data)].decode(errors="replace")),
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"of {arguments[0]!r} you hold back a character that is complete "
                f"({given} instead of {expected} bytes): look how long its first byte says it is"
            ),
            lambda data: len(data.rstrip(bytes(range(0x80, 0x100)))),
        ),
        Mistake(
            lambda given, expected, arguments: (
                f"of {arguments[0]!r} you show {given} bytes: only the very last byte has been looked at. "
                "An unfinished character can already be two or three bytes long"
            ),
            lambda data: len(data) - (data[-1:] >= b"\xc2" and data[-1:] <= b"\xf4"),
        ),
    ),
    right="your streams show emoji whole, and no broken byte can stop them",
)

EXERCISES = {
    exercise.name: exercise for exercise in (most_common_pair, my_merge, encode_word, safe_prefix)
}

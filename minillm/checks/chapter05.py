"""The exercises of chapter 5: the nucleus, the order of the steps, the penalty, Gumbel noise, stop strings."""

import torch
from torch.nn import functional as F

from ..generation import StopMatcher
from ..sampling import apply_repetition_penalty, apply_top_k, apply_top_p
from .exercise import Exercise, Mistake, as_tensor, is_bool, same


def ids_of(mask) -> list[int]:
    """The places where a mask is True."""
    return mask.nonzero().flatten().tolist()


def short(values) -> list[float]:
    """A row of numbers without the dust of float32."""
    return [round(value, 4) for value in values.tolist()]


def numbers(given, expected) -> bool:
    """The reader's result has the right shape, and finite numbers in it."""
    given = as_tensor(given)
    return given.shape == expected.shape and bool(given.isfinite().all())


# ---- nucleus --------------------------------------------------------------------------------


def enough(shares, mass, p):
    return mass - shares < p  # the mass before a token


def nucleus_rule(
    keep=enough,
    descending=True,
    back=lambda keep, ids: torch.zeros_like(keep).scatter(-1, ids, keep),
):
    """Top-p with room for one mistake; `keep` sees the sorted shares and their running sum."""

    def rule(probabilities, p):
        shares, ids = probabilities.sort(descending=descending)
        return back(keep(shares, shares.cumsum(dim=-1), p), ids)

    return rule


def skips_first(shares, mass, p):
    """The way to shift a mask that transformers made popular, without `drop[0] = False`."""
    drop = mass > p
    drop[1:] = drop[:-1].clone()
    return ~drop


def drops_crossing(shares, mass, p):
    return (mass < p) | (mass == shares)  # the best token stays in any case


def one_too_many(shares, mass, p):
    return F.pad((mass - shares)[:-1], (1, 0)) < p


def is_mask(given, expected, arguments) -> bool:
    return is_bool(given) and given.shape == expected.shape


def says_crossing(given, expected, arguments):
    probabilities, p = arguments
    return (
        f"you kept the tokens below p but dropped the one that crosses it: with p = {p} yours hold "
        f"{probabilities[given].sum():.2f} of the mass"
    )


def says_more(given, expected, arguments):
    probabilities, p = arguments
    least = torch.where(given, probabilities, 2.0).argmin().item()
    rest = probabilities[given].sum() - probabilities[least]
    return (
        f"you keep more than needed: without token {least} yours still hold {rest:.2f} of the "
        f"mass, which is at least p = {p}"
    )


def says_nucleus(given, expected, arguments):
    probabilities, p = arguments
    return (
        f"of the probabilities {short(probabilities)} with p = {p} the tokens {ids_of(expected)} "
        f"stay, yours are {ids_of(given)}"
    )


nucleus = Exercise(
    name="nucleus",
    reference=lambda probabilities, p: apply_top_p(probabilities.log()[None], p)[0] > -torch.inf,
    cases=(
        (torch.tensor([0.4, 0.3, 0.2, 0.1]), 0.75),
        (torch.tensor([0.1, 0.4, 0.2, 0.3]), 0.75),
        (torch.tensor([0.05, 0.28, 0.6, 0.07]), 0.35),  # the best token alone is enough
        (torch.tensor([0.02, 0.3, 0.08, 0.1, 0.36, 0.14]), 0.7),
    ),
    mistakes=(
        Mistake(
            "when the best token alone holds more than p, you keep nothing: the smallest set is "
            "then that one token",
            nucleus_rule(skips_first),
        ),
        Mistake(
            "you compare each token's own probability with p: p is a bound on what the kept tokens "
            "hold together",
            lambda probabilities, p: probabilities >= p,
        ),
        Mistake(
            "you keep what has at least p times the probability of the best token: that is min-p. "
            "Top-p adds the probabilities up",
            lambda probabilities, p: probabilities >= p * probabilities.max(),
        ),
        Mistake(
            "you add up in the order of the ids: sort first, the most likely token in front",
            lambda probabilities, p: probabilities.cumsum(dim=-1) - probabilities < p,
        ),
        Mistake(
            "you begin with the least likely tokens: `sort` puts the smallest in front unless you "
            "say descending=True",
            nucleus_rule(descending=False),
        ),
        Mistake(
            "your mask is in the order of the ranks: its place 0 speaks of the most likely token, "
            "and it should speak of token 0. Write each answer to the token's own id",
            nucleus_rule(back=lambda keep, ids: keep),
        ),
        Mistake(
            "on the way back to the ids you read where you should write: `result[ids] = keep`, not "
            "`keep[ids]`",
            nucleus_rule(back=lambda keep, ids: keep[ids]),
        ),
        Mistake(
            "your mask is inverted: True means that the token is kept",
            lambda probabilities, p: ~nucleus_rule()(probabilities, p),
        ),
        Mistake(
            "you took the softmax of the probabilities: they are shares already, and a second "
            "softmax makes them almost equal",
            lambda probabilities, p: nucleus_rule()(probabilities.softmax(dim=-1), p),
        ),
        Mistake(says_crossing, nucleus_rule(lambda shares, mass, p: mass < p)),
        Mistake(says_crossing, nucleus_rule(drops_crossing)),
        Mistake(says_more, nucleus_rule(one_too_many)),
        Mistake(  # and whatever else keeps the wrong tokens
            says_nucleus,
            nucleus_rule(lambda shares, mass, p: torch.arange(len(shares)) < p * len(shares)),
            is_mask,
        ),
    ),
    right="you can say which tokens a top_p leaves, and why 0.75 may leave 0.9 of the mass",
)

# ---- sampling_probabilities -----------------------------------------------------------------


def share(x):
    return x.softmax(dim=-1)


def cut_k(x, k, fill=-torch.inf):
    return x.masked_fill(apply_top_k(x[None], k)[0].isinf(), fill)


def cut_p(x, p, fill=-torch.inf):
    return x.masked_fill(apply_top_p(x[None], p)[0].isinf(), fill)


def normalised_late(x, t, k, p):
    """Probabilities divided by the temperature, which add up to 1 only at the end."""
    shares = cut_k(share(x) / t, k, fill=0)
    shares = torch.where(nucleus_rule()(shares, p), shares, 0)
    return shares / shares.sum()


def not_normalised(x, t, k, p, keep=enough):
    shares = share(cut_k(x / t, k))
    return torch.where(nucleus_rule(keep)(shares, p), shares, 0)


def without_crossing(x, t, k, p):
    shares = not_normalised(x, t, k, p, drops_crossing)
    return shares / shares.sum()


def has_negative(given, expected, arguments) -> bool:
    given = as_tensor(given)
    return given.shape == expected.shape and bool((given < 0).any())


def cut_ones_alike(given, expected, arguments) -> bool:
    """The tokens that were cut have a share, the same for all of them."""
    if not numbers(given, expected):
        return False
    cut = as_tensor(given)[expected == 0]
    return bool((cut > 1e-6).all() and (cut - cut[0]).abs().max() < 1e-6)


def sum_is_off(given, expected, arguments) -> bool:
    return numbers(given, expected) and abs(as_tensor(given).sum().item() - 1) > 1e-3


def keeps_others(given, expected, arguments) -> bool:
    return numbers(given, expected) and not torch.equal(as_tensor(given) > 0, expected > 0)


def says_top_p_first(given, expected, arguments):
    _, _, k, p = arguments
    return (
        f"with k = {k} and p = {p} you keep {(as_tensor(given) > 0).sum()} tokens, expected "
        f"{(expected > 0).sum()}: you measured top-p on the whole vocabulary. It comes after "
        f"top-k, when the k tokens that are left hold all of the mass"
    )


def says_times(given, expected, arguments):
    temperature = arguments[1]
    return (
        f"temperature {temperature} made your distribution "
        f"{'sharper' if temperature > 1 else 'flatter'} (the best token got {as_tensor(given).max():.2f}, "
        f"expected {expected.max():.2f}): you multiply where you should divide"
    )


def says_sum(given, expected, arguments):
    return (
        f"your probabilities add up to {as_tensor(given).sum():.2f} and not to 1: after the last "
        f"cut, divide what is left by its sum"
    )


def says_kept(given, expected, arguments):
    logits, temperature, k, p = arguments
    return (
        f"of the logits {short(logits)} with temperature {temperature}, k = {k} and p = {p} the "
        f"tokens {ids_of(expected > 0)} stay, yours are {ids_of(as_tensor(given) > 0)}"
    )


ROW = torch.tensor([1.0, 3.0, 0.0, 2.0, 2.6, -1.0])
sampling_probabilities = Exercise(
    name="sampling_probabilities",
    reference=lambda x, t, k, p: share(cut_p(cut_k(x / t, k), p)),
    cases=(
        (ROW, 2.0, 4, 0.7),
        (ROW, 0.5, 3, 0.6),
        (ROW.flip(0), 1.5, 3, 0.7),
        (ROW, 1.5, 2, 0.95),  # top-k alone cuts
        (torch.tensor([0.5, -1.0, 1.5, 2.0, 0.0]), 1.25, 4, 0.7),
    ),
    mistakes=(
        Mistake(says_top_p_first, lambda x, t, k, p: share(cut_k(cut_p(x / t, p), k))),
        Mistake(
            "your temperature comes too late: top-p has chosen its tokens from the shares at "
            "temperature 1. Divide the logits first, then cut",
            lambda x, t, k, p: share(cut_p(cut_k(x, k), p) / t),
        ),
        Mistake(says_times, lambda x, t, k, p: share(cut_p(cut_k(x * t, k), p))),
        Mistake(
            "the temperature changes nothing in yours. (Probabilities that are divided by it and "
            "then made to add up to 1 are the old ones again: divide the logits)",
            lambda x, t, k, p: share(cut_p(cut_k(x, k), p)),
        ),
        Mistake(
            "you divide probabilities by the temperature, and take the softmax of that: it belongs "
            "to the logits, before the first softmax",
            lambda x, t, k, p: share(cut_p(cut_k(share(x) / t, k), p)),
        ),
        Mistake(
            "you divide probabilities by the temperature: they no longer add up to 1 when top-p "
            "adds them. Divide the logits",
            normalised_late,
        ),
        Mistake(
            "top-k is missing: more than k tokens are left",
            lambda x, t, k, p: share(cut_p(x / t, p)),
        ),
        Mistake(
            "top-p is missing: all k tokens are left",
            lambda x, t, k, p: share(cut_k(x / t, k)),
        ),
        Mistake(
            "your top-p drops the token that crosses p: a token stays as long as the mass before "
            "it is below p",
            without_crossing,
        ),
        Mistake(
            "your probabilities stand in the order of the ranks, the best one in front: put each "
            "back at its token's id",
            lambda x, t, k, p: share(cut_p(cut_k(x / t, k), p)).sort(descending=True).values,
        ),
        Mistake(
            "these are logits, not probabilities: the last softmax is missing",
            lambda x, t, k, p: cut_p(cut_k(x / t, k), p),
            has_negative,
        ),
        Mistake(
            "tokens that were cut got a share all the same: a logit of 0 is no ban, because e⁰ is "
            "1. Cut with minus infinity",
            lambda x, t, k, p: share(cut_p(cut_k(x / t, k, fill=0), p, fill=0)),
            cut_ones_alike,
        ),
        Mistake(says_sum, not_normalised, sum_is_off),
        Mistake(  # and whatever else leaves the wrong tokens
            says_kept, lambda x, t, k, p: share(cut_p(cut_k(x / t, k + 1), p)), keeps_others
        ),
    ),
    right="you can predict what three knobs do together, in the order that transformers turns them",
)

# ---- penalise_repeats -----------------------------------------------------------------------


def penalty_rule(positive=lambda x, c: x / c, negative=lambda x, c: x * c, which=set):
    """The repetition penalty with room for one mistake; `which` picks from the ids."""

    def rule(logits, seen_ids, penalty):
        result = logits.clone()
        for i in which(seen_ids):
            result[i] = (positive if result[i] > 0 else negative)(result[i], penalty)
        return result

    return rule


def seen_in(arguments):
    """Which tokens of a case were seen: bool [V]."""
    logits, seen_ids, _ = arguments
    return torch.zeros(len(logits), dtype=torch.bool).index_fill(0, torch.tensor(seen_ids), True)


def moved(given, arguments):
    """How far each logit went: 0 where it stayed."""
    gap = as_tensor(given).float() - arguments[0]
    return torch.where(gap.abs() > 1e-5, gap, 0.0)


def went(given, arguments, i) -> str:
    return f"token {i} went from {arguments[0][i]:.3g} to {as_tensor(given)[i]:.3g}"


def touches_unseen(given, expected, arguments) -> bool:
    return numbers(given, expected) and bool(moved(given, arguments)[~seen_in(arguments)].any())


def rewards(given, expected, arguments) -> bool:
    """A seen token went up, and all others are at rest."""
    if not numbers(given, expected) or touches_unseen(given, expected, arguments):
        return False
    return bool((moved(given, arguments) > 0).any())


def skips_some(given, expected, arguments) -> bool:
    """What moved went to the right place, but not all that should have moved did."""
    if not numbers(given, expected):
        return False
    at_rest = moved(given, arguments) == 0
    return same(torch.where(at_rest, expected, as_tensor(given).float()), expected)


def says_rewards(given, expected, arguments):
    up = moved(given, arguments) > 0
    signs = {bool(sign) for sign in arguments[0][up] > 0}
    rule = {
        (False,): "A negative logit comes nearer to 0 by division: multiply it",
        (True,): "A positive logit is divided, only a negative one is multiplied",
        (False, True): "Your rule is the wrong way round",
    }[tuple(sorted(signs))]
    steps = " and ".join(went(given, arguments, i) for i in ids_of(up))
    return f"{steps}: {'they were' if up.sum() > 1 else 'it was'} rewarded. {rule}"


def says_every_time(given, expected, arguments):
    seen_ids = arguments[1]
    often = max(seen_ids, key=seen_ids.count)
    return (
        f"{went(given, arguments, often)}, expected {expected[often]:.3g}: it stands in seen_ids "
        f"{seen_ids.count(often)} times and was punished as often. Once is enough"
    )


def says_skips(given, expected, arguments):
    left = ids_of((moved(given, arguments) == 0) & (moved(expected, arguments) != 0))[0]
    return (
        f"token {left} was seen, but it still has {arguments[0][left]:.3g}, expected "
        f"{expected[left]:.3g}. Is the `return` inside the loop, or does each round start from the "
        f"old logits again?"
    )


def says_unseen(given, expected, arguments):
    first = ids_of((moved(given, arguments) != 0) & ~seen_in(arguments))[0]
    return f"{went(given, arguments, first)}, and it was never seen: leave such tokens alone"


def penalty_reference(logits, seen_ids, penalty):
    seen = seen_in((logits, seen_ids, penalty))
    return apply_repetition_penalty(logits[None], seen[None], penalty)[0]


penalise_repeats = Exercise(
    name="penalise_repeats",
    reference=penalty_reference,
    cases=(
        (torch.tensor([2.0, -2.0, 0.5, 1.0]), [3, 1], 1.5),
        (torch.tensor([-1.0, 3.0, 0.5, 4.0, -2.5, 0.0]), [3, 0, 3, 3, 1], 1.25),
        (torch.tensor([0.5, -0.25, 1.5]), [1, 1], 2.0),
    ),
    mistakes=(
        Mistake(
            "nothing changed. (`logits[ids]` with a list of ids is a copy: write the new numbers "
            "back into a tensor of your own)",
            lambda logits, seen_ids, penalty: logits,
        ),
        Mistake(
            "negative logits stay as they are in yours: multiply them, so that a token that was "
            "seen is punished whatever its sign",
            penalty_rule(negative=lambda x, c: x),
        ),
        Mistake(
            "you subtract the penalty: that is another rule, the presence penalty of some engines. "
            "This one divides, or multiplies where the logit is negative",
            penalty_rule(lambda x, c: x - c, lambda x, c: x - c),
        ),
        Mistake(
            "a token that was seen can never come again in yours: a penalty makes it less likely, "
            "it is no ban",
            penalty_rule(lambda x, c: -torch.inf, lambda x, c: -torch.inf),
        ),
        Mistake(says_every_time, penalty_rule(which=list)),
        Mistake(says_rewards, penalty_rule(negative=lambda x, c: x / c), rewards),
        Mistake(says_rewards, penalty_rule(positive=lambda x, c: x * c)),
        Mistake(says_rewards, penalty_rule(lambda x, c: x * c, lambda x, c: x / c)),
        Mistake(says_skips, penalty_rule(which=lambda ids: ids[:1]), skips_some),
        Mistake(
            says_unseen,
            lambda logits, seen_ids, c: torch.where(logits > 0, logits / c, logits * c),
            touches_unseen,
        ),
    ),
    right="a logit below 0 is no trap for you, and neither is a token that was seen three times",
)

# ---- gumbel_max -----------------------------------------------------------------------------


def noisy(noise, join=torch.add, start=lambda logits: logits, pick=lambda x: x.argmax(dim=-1)):
    """Gumbel-max with room for one mistake."""
    return lambda logits, uniform: pick(join(start(logits), noise(uniform)))  # [V] + [N, V]


def gumbel(uniform):
    return -(-uniform.log()).log()


def race(logits, uniform):
    """The same choice without Gumbel: each token waits -log(u) / share, and the first one wins."""
    return (-uniform.log() / logits.softmax(dim=-1)).argmin(dim=-1)  # [N, V] / [V] -> [N]


def uniforms(seed: int, *shape: int) -> torch.Tensor:
    """Numbers between 0 and 1, the same on every run, and none of them 0 itself."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).clamp(1e-6)


def says_always(given, expected, arguments):
    return (
        f"each of your {len(expected)} draws is token {arguments[0].argmax()}, the best one: every "
        f"token needs a noise of its own, or none of them can pass another"
    )


gumbel_max = Exercise(
    name="gumbel_max",
    reference=race,
    cases=(
        (torch.tensor([0.0, 2.0, 1.0]), uniforms(0, 8, 3)),
        (torch.tensor([-1.0, -2.5, 0.5, 0.25, -3.0]), uniforms(1, 64, 5)),
        (torch.tensor([1.0, 1.5, 0.5, 3.0]), uniforms(2, 64, 4)),
    ),
    mistakes=(
        Mistake(
            "your noise has the wrong sign: it is -log(-log(u)), with a minus in front of both "
            "logarithms",
            noisy(lambda u: -gumbel(u)),
        ),
        Mistake(
            "one logarithm is missing: -log(u) is the waiting time, and the noise is minus the "
            "logarithm of that",
            noisy(lambda u: -u.log()),
        ),
        Mistake(
            "one logarithm is missing: log(u) is never above 0. The noise is -log(-log(u))",
            noisy(lambda u: u.log()),
        ),
        Mistake(
            "your noise is NaN: log(u) is below 0, and a negative number has no logarithm. Turn "
            "its sign before the second one",
            noisy(lambda u: -u.log().log()),
        ),
        Mistake(
            "both logarithms are missing: you add the uniform numbers themselves, and these lift "
            "no token past one that is better by 1 or more",
            noisy(lambda u: u),
        ),
        Mistake(
            "you multiply by the noise: it is added to the logits",
            noisy(gumbel, join=torch.mul),
        ),
        Mistake(
            "you add the noise to the probabilities: it belongs to the logits, and no softmax is "
            "needed",
            noisy(gumbel, start=share),
        ),
        Mistake(
            "you take the smallest sum, the bell that rings last: argmin goes with the waiting times, "
            "argmax with the logits",
            noisy(gumbel, pick=lambda x: x.argmin(dim=-1)),
        ),
        Mistake(
            "you return the largest sums themselves: asked for is the place of the largest, argmax",
            noisy(gumbel, pick=lambda x: x.amax(dim=-1)),
        ),
        Mistake(
            "you choose among the draws (dim=0), and get one number for each token: choose among "
            "the tokens of each draw (dim=-1)",
            noisy(gumbel, pick=lambda x: x.argmax(dim=0)),
        ),
        Mistake(says_always, lambda logits, uniform: noisy(gumbel)(logits, uniform[:, :1])),
    ),
    right="you can sample without a softmax: one argmax, and exactly the same distribution",
)

# ---- safe_length ----------------------------------------------------------------------------


def held_back(fits, order=reversed, limit=True):
    """All but the first length that `fits(text, stop, length)`, with room for one mistake."""

    def rule(text, stop):
        longest = min(len(text), len(stop) - 1) if limit else len(stop) - 1
        found = [n for n in order(range(1, longest + 1)) if fits(text, stop, n)]
        return len(text) - (found[0] if found else 0)

    return rule


def begins(text, stop, length):
    return stop.startswith(text[-length:])


def one_counter(retry):
    """Walk through the text once, with a counter that falls back at each surprise."""

    def rule(text, stop):
        matched = 0
        for letter in text:
            fits = letter == stop[matched]
            matched = matched + 1 if fits else int(retry and letter == stop[0])
        return len(text) - matched

    return rule


def up_to(place, text):
    return len(text) if place < 0 else place


def about(sentence):
    """A sentence about one case: it may speak of {text}, {stop}, {end}, {shown}, {given}, …"""

    def says(given, expected, arguments):
        text, stop = arguments
        end = repr(text[expected:]) if expected < len(text) else "nothing"
        return sentence.format(
            text=repr(text),
            stop=repr(stop),
            shown=repr(text[: max(given, 0)]),
            end=end,
            hidden=repr(text[given:]),
            given=given,
            expected=expected,
        )

    return says


ANYWHERE = about(
    "of {text} you show {shown}, and {end} has to wait: the beginning of {stop} counts only where "
    "the text ends with it, not in the middle"
)
ALWAYS = about(
    "you always hold back len(stop) - 1 characters: of {text} with the stop string {stop} you hide "
    "{hidden}, where {end} has to wait"
)
FELL_BACK = about(
    "of {text} with the stop string {stop} you show {given} characters, expected {expected}: where "
    "a character does not fit you begin to count anew, but {end} began earlier than that"
)

safe_length = Exercise(
    name="safe_length",
    reference=lambda text, stop: len(StopMatcher((stop,)).add(text)),
    cases=(
        ("Hi.\nUs", "\nUser:"),
        ("The end #", "###"),
        ("no. # of legs", "###"),
        ("The end ##", "###"),
        ("Once upon a time", "###"),
        ("xaa", "aab"),
        ("caaa", "aab"),
        ("xabab", "ababc"),
        ("tell her", "\nUser:"),
        ("##", "#####"),
        ("", "###"),
    ),
    mistakes=(
        Mistake(
            about(
                "you show all of {text}: its end {end} may become the stop string {stop}, and what "
                "was shown cannot be taken back"
            ),
            lambda text, stop: len(text),
        ),
        Mistake(ALWAYS, lambda text, stop: max(0, len(text) - len(stop) + 1)),
        Mistake(ALWAYS, lambda text, stop: len(text) - len(stop) + 1),
        Mistake(
            about(
                "of {text} with the stop string {stop} you would show {given} characters: where "
                "the text is the shorter one, you hold back more than there is"
            ),
            held_back(begins, limit=False),
        ),
        Mistake(
            about("you look at the last character alone: of {text} the end {end} may begin {stop}"),
            lambda text, stop: len(text) - (text[-1:] == stop[0]),
        ),
        Mistake(
            about(
                "you hold back the shortest end of {text} that begins {stop}, which is {hidden}: "
                "the longest is {end}"
            ),
            held_back(begins, order=iter),
        ),
        Mistake(ANYWHERE, lambda text, stop: up_to(text.find(stop[0]), text)),
        Mistake(ANYWHERE, lambda text, stop: up_to(text.rfind(stop[0]), text)),
        Mistake(ANYWHERE, held_back(lambda text, stop, length: stop[:length] in text)),
        Mistake(
            "this is how many characters have to wait: return how many may be shown",
            lambda text, stop: len(text) - held_back(begins)(text, stop),
        ),
        Mistake(
            "strip takes a set of characters, in any order and number: it is no search for the "
            "beginning of a string",
            lambda text, stop: len(text.rstrip(stop)),
        ),
        Mistake(
            "you look for the end of the stop string at the end of the text: its beginning is what "
            "comes first",
            held_back(lambda text, stop, length: text.endswith(stop[-length:])),
        ),
        Mistake(FELL_BACK, one_counter(retry=False)),
        Mistake(FELL_BACK, one_counter(retry=True)),
        Mistake(  # and whatever else is a number
            about(
                "of {text} with the stop string {stop} {expected} characters may be shown ({end} "
                "has to wait), yours is {given}"
            ),
            held_back(lambda text, stop, length: text[-length:] in stop),
            lambda given, expected, arguments: isinstance(given, int),
        ),
    ),
    right="your stream shows each character as early as it can, and never half of a stop string",
)

EXERCISES = {
    exercise.name: exercise
    for exercise in (nucleus, sampling_probabilities, penalise_repeats, gumbel_max, safe_length)
}

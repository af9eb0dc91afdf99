# SPDX-License-Identifier: Apache-2.0
"""The sampler against docs/arithmetic.md, "Sampling": every choice, and the distribution of many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mxdraft.errors import UsageError
from mxdraft.runtime import Engine, Model, Timeline
from numpy.typing import NDArray

Float = np.float32
Floats = NDArray[np.float32]
_MASK = 2**64 - 1


class Sampler:
    """``mxd_sample()`` with the scalar reference kernels."""

    def __init__(self, ffi: Any, lib: Any, vocab: int = 1024) -> None:
        self.ffi, self.lib = ffi, lib
        self.kernels = ffi.new("mxd_kernels *")
        lib.mxd_kernels_init_ref(self.kernels, ffi.new("mxd_kernel_names *"))
        self._keep = ffi.new("float[]", vocab), ffi.new("uint32_t[]", vocab)
        self.seen = ffi.new("uint8_t[]", vocab // 8 + 1)
        self.scratch = ffi.new("mxd_sampler_scratch *", (*self._keep, self.seen, ffi.NULL))

    def sampling(self, **changes: Any) -> Any:
        """``mxd_sampling`` with the defaults of the library and these changes."""
        sampling = self.ffi.new("mxd_sampling *")
        self.lib.mxd_sampling_default(sampling)
        for name, value in changes.items():
            setattr(sampling, name, value)
        return sampling

    def choose(
        self,
        logits: Iterable[float],
        prefix: Sequence[int] | int = 0,
        exempt: Iterable[int] = (),
        allowed: Sequence[int] | None = None,
        answer: int = 0,
        **changes: Any,
    ) -> int:
        """One choice; a number stands for a prefix of that length whose tokens do not matter."""
        values = self.ffi.new("float[]", list(map(float, logits)))
        ids = self.ffi.NULL if isinstance(prefix, int) else self.ffi.new("uint32_t[]", list(prefix))
        length = prefix if isinstance(prefix, int) else len(prefix)
        spared = self.ffi.new("uint32_t[]", sorted(exempt))
        chosen_from = self.ffi.NULL if allowed is None else self.ffi.new("uint32_t[]", list(allowed))
        candidates = len(values) if allowed is None else len(allowed), chosen_from
        return int(
            self.lib.mxd_sample(
                *(self.kernels, self.sampling(**changes), values, *candidates, (spared, len(spared))),
                *(ids, length, answer, self.scratch),
            )
        )

    def draw(self, logits: Iterable[float], seeds: int, positions: int, **changes: Any) -> NDArray[np.int64]:
        """Choices for seeds 0 … and positions 0 …, int64 [seeds, positions]."""
        values = self.ffi.new("float[]", list(map(float, logits)))
        out = np.empty((seeds, positions), np.int64)
        sampling, sample, nobody = self.sampling(**changes), self.lib.mxd_sample, (self.ffi.NULL, 0)
        for seed in range(seeds):
            sampling.seed = seed
            for position in range(positions):
                out[seed, position] = sample(
                    *(self.kernels, sampling, values, len(values), self.ffi.NULL, nobody, self.ffi.NULL),
                    *(position, position, self.scratch),
                )
        return out

    def weights(self, logits: Floats, temperature: float) -> Floats:
        """w[i] = exp((x[i] - max x) · (1/T)), by the kernel that has tests of its own."""
        scale = Float(1) / Float(temperature)
        x = np.ascontiguousarray(logits)
        out = np.empty_like(x)
        self.kernels.exp_weights(
            self.ffi.from_buffer("float[]", x),
            *(x.size, scale, logits.max()),
            self.ffi.from_buffer("float[]", out),
        )
        return out


@pytest.fixture(scope="session")
def sampler(internals: tuple[Any, Any]) -> Sampler:
    return Sampler(*internals)


# ---- the documented rule, written a second time ----


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def uniform(seed: int, position: int, token: int) -> float:
    h = mix((mix((mix((seed + 0x9E3779B97F4A7C15) & _MASK) + position + 1) & _MASK) + token + 1) & _MASK)
    return ((h >> 12) + 0.5) * 2.0**-52


def log(u: float) -> float:
    m, e = math.frexp(u)
    if m < float.fromhex("0x1.6a09e667f3bcdp-1"):
        m, e = 2 * m, e - 1
    f = (m - 1) / (m + 1)
    term = total = f
    for k in range(3, 22, 2):
        term *= f * f
        total += term / k
    return 2 * total + e * float.fromhex("0x1.62e42fefa39efp-1")


def penalized(
    logits: Iterable[float], prefix: Iterable[int], exempt: Iterable[int], penalty: float
) -> Floats:
    x = np.array(list(logits), Float)
    for token in set(prefix) - set(exempt):
        x[token] = x[token] / Float(penalty) if x[token] > 0 else x[token] * Float(penalty)
    return x


def penalized_answer(x: Floats, answer: Iterable[int], presence: float, frequency: float) -> Floats:
    met: set[int] = set()
    for token in answer:
        x[token] -= Float(frequency)
        if token not in met:
            x[token] -= Float(presence)
        met.add(token)
    return x


def kept(w: Floats, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """The candidates that may be chosen."""
    order = sorted(range(w.size), key=lambda i: (-w[i], i))
    if top_k or top_p != 1:
        cut = 0 < top_k < w.size
        order = order[:top_k] if cut else order
        *_, mass = accumulate(float(w[i]) for i in (order if cut else range(w.size)))
        taken = accumulate(float(w[i]) for i in order)
        enough = (n for n, t in enumerate(taken, 1) if t >= float(Float(top_p)) * mass)
        order = order[: next(enough, w.size)]
    return [i for i in order if w[i] >= Float(min_p) * w.max()]


def choose(
    sampler: Sampler,
    logits: Iterable[float],
    prefix: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
    repeat_penalty: float = 1.0,
    exempt: Iterable[int] = (),
    allowed: Sequence[int] | None = None,
    answer: int = 0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    **limits: Any,
) -> int:
    x = penalized(logits, prefix, exempt, repeat_penalty)
    x = penalized_answer(x, prefix[answer:], presence_penalty, frequency_penalty)
    ids = list(range(x.size)) if allowed is None else list(allowed)
    x = x[ids]
    if temperature == 0:
        return ids[int(np.flatnonzero(x == x.max())[0])]
    w = sampler.weights(x, temperature)
    arrival = {ids[i]: -log(uniform(seed, len(prefix), ids[i])) / float(w[i]) for i in kept(w, **limits)}
    return min(arrival, key=lambda i: (arrival[i], i))


# Few distinct values make ties; the others come anywhere in the range of a model's logits.
logit = st.sampled_from([-3.0, 0.0, 1.0, 2.5]) | st.floats(-40, 40, width=32)
limits = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(0, 70),
        "top_p": st.sampled_from([0.25, 0.5, 0.75, 0.9, 1.0]) | st.floats(2**-7, 1, width=32),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]) | st.floats(0, 1, width=32),
        "repeat_penalty": st.floats(0.125, 8, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
    },
)


@settings(max_examples=400, deadline=None)
@given(
    logits=st.lists(logit, min_size=1, max_size=64),
    temperature=st.sampled_from([0.0, 0.001, 0.7, 1.0, 100.0]) | st.floats(2**-3, 3, width=32),
    seed=st.integers(0, _MASK),
    prefix=st.lists(st.integers(0, 63), max_size=12),
    exempt=st.sets(st.integers(0, 63), max_size=9),
    allowed=st.none() | st.sets(st.integers(0, 63), min_size=1),
    answer=st.integers(0, 12),
    limits=limits,
)
@example([0.0] * 4, 1.0, 0, [], set(), None, 0, {"top_p": 0.5})  # the mass of two of four is exactly enough
@example([0.0] * 4, 1.0, 0, [], set(), {1, 3}, 0, {"top_p": 0.5})
@example([0.0] * 4, 1.0, 0, [], set(), None, 0, {"top_k": 2})  # a tie at the border of top-k
@example([1.0, 1.0, 0.5], 1.0, 1, [], set(), None, 0, {"min_p": 1.0})
def test_every_choice_is_the_documented_one(
    sampler: Sampler,
    logits: list[float],
    temperature: float,
    seed: int,
    prefix: list[int],
    exempt: set[int],
    allowed: set[int] | None,
    answer: int,
    limits: dict[str, Any],
) -> None:
    prefix = [token % len(logits) for token in prefix]
    exempt = {token for token in exempt if token < len(logits)}
    ids = allowed and sorted({token % len(logits) for token in allowed})
    answer = min(answer, len(prefix))
    changes = limits | {"temperature": temperature, "seed": seed, "answer": answer}
    expected = choose(sampler, logits, prefix, exempt=exempt, allowed=ids, **changes)
    assert sampler.choose(logits, prefix, exempt, ids, **changes) == expected
    assert not any(sampler.seen)


# ---- distribution ----

LOGITS = [1.5, -0.5, 0.0, 2.0, 0.75, 2.0, -3.0, 1.0, 0.25, -1.0]


def chi_square(counts: NDArray[np.int64], probability: NDArray[np.float64]) -> tuple[float, float]:
    """The statistic, and what chance exceeds once in 1000 (Wilson and Hilferty 1931)."""
    expected = probability * counts.sum()
    degrees = counts.size - 1
    spread = 2 / (9 * degrees)
    return float(((counts - expected) ** 2 / expected).sum()), degrees * (
        1 - spread + 3.09 * spread**0.5
    ) ** 3


@pytest.mark.parametrize(
    ("changes", "support"),
    [
        ({"temperature": 1.0}, range(10)),
        ({"temperature": 0.7}, range(10)),
        ({"temperature": 1.0, "top_k": 4}, [0, 3, 5, 7]),
        ({"temperature": 1.0, "top_k": 1}, [3]),
        ({"temperature": 1.0, "top_p": 0.75}, [0, 3, 5, 7]),  # .270 .270 .164 .099 of the mass
        ({"temperature": 1.0, "top_p": 0.6}, [0, 3, 5]),
        ({"temperature": 1.0, "top_k": 5, "top_p": 0.6}, [3, 5]),  # .307 .307 of what top-k leaves
        ({"temperature": 1.0, "min_p": 0.25}, [0, 3, 4, 5, 7]),  # the least has .287 of the largest
        ({"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.3}, [0, 3, 5]),
    ],
)
def test_choices_follow_the_softmax_of_what_is_kept(
    sampler: Sampler, changes: dict[str, float], support: Sequence[int]
) -> None:
    drawn = np.bincount(sampler.draw(LOGITS, 200, 500, **changes).ravel(), minlength=len(LOGITS))
    assert np.flatnonzero(drawn).tolist() == list(support)
    exact = np.exp(np.array(LOGITS)[list(support)] / changes["temperature"])
    statistic, bound = chi_square(drawn[list(support)], exact / exact.sum()) if len(support) > 1 else (0, 0)
    assert statistic <= bound


@pytest.mark.parametrize("axis", [0, 1])
def test_neighbouring_seeds_and_positions_are_independent(sampler: Sampler, axis: int) -> None:
    drawn = sampler.draw([0.0, 0.0, 0.0, 0.0], 200, 200, temperature=1.0)
    first, second = (drawn[:-1, :-1], drawn[1:, :-1] if axis == 0 else drawn[:-1, 1:])
    statistic, bound = chi_square(
        np.bincount((4 * first + second).ravel(), minlength=16), np.full(16, 1 / 16)
    )
    assert statistic <= bound
    # Seed + 1 is not position + 1 either.
    assert (drawn[1:, :-1] == drawn[:-1, 1:]).mean() == pytest.approx(0.25, abs=0.01)


# ---- noise ----


def test_noise_depends_on_seed_position_and_id_only(sampler: Sampler) -> None:
    rng = np.random.default_rng(1)
    for position in range(200):
        logits = rng.normal(size=20).astype(Float)
        one, other = rng.integers(0, 20, (2, position)).tolist()
        chosen = sampler.choose(logits, one, temperature=1.0, seed=5)
        assert sampler.choose(logits, other, temperature=1.0, seed=5) == chosen
        # Whoever lost, loses with less, and so does a token that only this vocabulary has.
        loser = int(rng.integers(0, 20))
        if loser != chosen:
            logits[loser] -= Float(rng.random())
        longer = [*logits, -30.0]
        assert sampler.choose(longer, position, temperature=1.0, seed=5) == chosen


def test_seeds_differ_in_all_their_bits(sampler: Sampler) -> None:
    draws = {
        tuple(sampler.choose([0.0] * 8, position, temperature=1.0, seed=seed) for position in range(32))
        for seed in [0, *(1 << bit for bit in range(64)), _MASK]
    }
    assert len(draws) == 66


# ---- edges ----


def test_greedy_takes_the_lowest_id_among_equals(sampler: Sampler) -> None:
    assert sampler.choose([1.0, 3.0, 2.0, 3.0, 3.0]) == 1
    assert sampler.choose([-5.0] * 9) == 0
    assert sampler.choose([0.0, -0.0]) == 0
    assert sampler.choose([-0.0, 0.0]) == 0
    assert sampler.choose([2.0, 1.0, 2.0], top_k=1, top_p=0.1, min_p=1, seed=9) == 0


def test_repetition_penalty_divides_what_is_positive_and_multiplies_the_rest(sampler: Sampler) -> None:
    # 4 / 2 < 3, but only once however often the token came.
    assert sampler.choose([4.0, 3.0, 1.5], [0], repeat_penalty=2) == 1
    assert sampler.choose([4.0, 1.5, 0.0], [0, 0, 0], repeat_penalty=2) == 0
    assert sampler.choose([-1.0, -1.5], [0], repeat_penalty=2) == 1
    assert sampler.choose([-1.0, -1.5], [0, 1], repeat_penalty=2) == 0
    assert sampler.choose([-1.0, -1.5], [1], repeat_penalty=0.5) == 1  # below 1, repetition is favoured
    assert sampler.choose([0.25, 0.2], [0], repeat_penalty=2) == 1  # .125
    assert sampler.choose([0.0, -0.5], [0], repeat_penalty=2) == 0
    # Control tokens are exempt.
    assert sampler.choose([4.0, 3.0, 1.5], [0, 1, 0], exempt=[0], repeat_penalty=2) == 0
    assert sampler.choose([4.0, 3.0, 1.5], [0, 1, 0], exempt=[1, 2], repeat_penalty=2) == 1
    # It comes before the temperature and everything else.
    assert sampler.choose([4.0, 3.0], [0], repeat_penalty=2, temperature=1.0, top_k=1) == 1
    assert not any(sampler.seen)


@pytest.mark.parametrize("limits", [{}, {"top_k": 1}, {"top_k": 9, "top_p": 0.5}, {"min_p": 1.0}])
def test_vocabulary_of_one(sampler: Sampler, limits: dict[str, float]) -> None:
    for seed in range(20):
        assert sampler.choose([-7.0], seed, temperature=1.3, seed=seed, **limits) == 0


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_extreme_logits(sampler: Sampler, limits: dict[str, float]) -> None:
    for seed in range(50):
        for temperature in (0.5, 1.0, 2.0):
            changes: dict[str, Any] = {"temperature": temperature, "seed": seed, **limits}
            assert sampler.choose([-1e30, 1e30, -1e30, 0.0], **changes) == 1
            assert sampler.choose([-3e38, -1e30, -3e38, -3e38], **changes) == 1
    for value in (1e30, -1e30, 0.0):
        drawn = sampler.draw([value] * 3, 30, 30, temperature=1.0, top_k=3)
        assert (np.bincount(drawn.ravel()) > 240).all()  # 300 each


@pytest.mark.parametrize(("temperature", "logits"), [(1.3, [0.0, 1e30]), (1e-4, [19.0, 20.0])])
def test_extreme_logits_and_temperatures_together(
    sampler: Sampler, temperature: float, logits: list[float]
) -> None:
    for seed in range(50):
        assert sampler.choose(logits, temperature=temperature, seed=seed) == 1


def test_temperature_of_a_thousandth_is_nearly_greedy(sampler: Sampler) -> None:
    rng = np.random.default_rng(2)
    for seed in range(200):
        logits = rng.permutation(32) * 0.1 - 1.6
        assert sampler.choose(logits, temperature=1e-3, seed=seed) == logits.argmax()


def test_large_vocabulary_keeps_exactly_its_top_k(sampler: Sampler) -> None:
    logits = np.random.default_rng(3).permutation(1000).astype(Float) / 1000
    for limits in ({"top_k": 40}, {"top_p": 0.03}, {"min_p": 0.98}):
        drawn = sampler.draw(logits, 10, 60, temperature=1.0, **limits)
        support = kept(sampler.weights(logits, 1.0), **limits)  # type: ignore[arg-type]
        assert set(np.unique(drawn)) <= set(support)
        assert np.unique(drawn).size > len(support) // 2


@pytest.mark.parametrize(
    ("setting", "bad"),
    [
        ("temperature", [-0.1, 1e-38, 100.5, math.nan, math.inf]),
        ("top_p", [0.0, -1.0, 1.01, math.nan]),
        ("min_p", [-0.01, 1.01, math.nan]),
        ("repeat_penalty", [0.0, 0.09, 10.1, math.nan, math.inf]),
    ],
)
def test_settings_out_of_range_are_named(bundle: Any, setting: str, bad: list[float]) -> None:
    with Model(bundle) as model, Engine(model, threads=1, ctx=16) as engine:
        for value in bad:
            with pytest.raises(UsageError, match=f"{setting} .* is not in "):
                Timeline(engine, **{setting: value})  # type: ignore[arg-type]


# ---- what is told of the choices ----


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with Model(bundle) as opened:
        yield opened


Told = list[list[tuple[int, float]]]


def _told(engine: Engine, prompt: list[int], **sampling: Any) -> tuple[list[int], Told]:
    """The tokens of an answer, and what was told of each."""
    with Timeline(engine, ignore_eos=True, max_tokens=24, **sampling) as timeline:
        timeline.prompt(prompt)
        told: Told = []
        while timeline.stop == "none":
            engine.step([timeline])
            told += timeline.logprobs
        return timeline.tokens[len(prompt) :], told


@pytest.mark.parametrize("precision", ["base", "full", "auto"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 1.2, "seed": 3}, {"presence_penalty": 1.5, "frequency_penalty": 0.75}],
    ids=["greedy", "drawn", "penalties"],
)
def test_log_probabilities_are_those_of_the_rows(
    model: Model, precision: Any, settings: dict[str, Any]
) -> None:
    """They change no choice, drafts change no bit of them, and they are the softmax of mxd_seq_logits()."""
    prompt = model.encode("The small boat and the small")
    with Engine(model, precision=precision, draft="off") as engine:
        tokens, told = _told(engine, prompt, logprobs=6, **settings)
        assert _told(engine, prompt, **settings) == (tokens, [])
        with Timeline(engine) as timeline:
            logits = timeline.logits(prompt + tokens[:-1])[len(prompt) - 1 :].astype(np.float64)
    with Engine(model, precision=precision, draft="ngram", draft_min=4, threads=2) as engine:
        assert _told(engine, prompt, logprobs=6, **settings) == (tokens, told)
    for token, row, (own, *likely) in zip(tokens, logits, told, strict=True):
        assert (own[0], len(likely)) == (token, 5)
        assert all(a[1] >= b[1] for a, b in itertools.pairwise(likely))
        if precision == "auto":
            continue  # which rows are core depends on where the prompt ended
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert [i for i, _ in likely] == sorted(range(row.size), key=lambda i: (-row[i], i))[:5]
        for i, logprob in [own, *likely]:
            assert logprob == pytest.approx(expected[i], abs=3e-6)


def test_penalties_are_for_the_answer_alone(model: Model) -> None:
    """What a prompt says is not penalized, and a strong penalty lets no token come twice."""
    prompt = model.encode("The small boat and the small")
    with Engine(model) as engine:
        plain, _ = _told(engine, prompt)
        first, _ = _told(engine, [*prompt, *plain[:-1]], presence_penalty=2)
        assert first[0] == plain[-1]
        varied, _ = _told(engine, prompt, presence_penalty=2, frequency_penalty=2)
        assert len(set(varied)) > len(set(plain))
        with pytest.raises(UsageError, match=r"frequency_penalty 3 is not in -2\.\.2"):
            Timeline(engine, frequency_penalty=3)
        with pytest.raises(UsageError, match=r"logprobs 22 is not in 0\.\.21"):
            Timeline(engine, logprobs=22)

"""Counter-based random numbers: a function of seed and step."""

from __future__ import annotations

import numpy as np

from uma_trio.engine.sampling.rng import uniforms


def test_numbers_are_those_of_splitmix64():
    # splitmix64 seeded with the first output of splitmix64(seed=0), in plain integers.
    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    assert mix(gamma) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    for seed in (0, 1, 2**64 - 1):
        start = mix((seed + gamma) % 2**64)
        for step in (0, 1, 1000):
            expected = (mix((start + (step + 1) * gamma) % 2**64) >> 11) / 2**53
            assert uniforms([seed], [step]) == [expected]


def test_numbers_are_uniform_over_steps_and_over_seeds():
    many = range(100_000)
    for numbers in map(np.array, (uniforms([7] * len(many), many), uniforms(many, [7] * len(many)))):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * np.sqrt(2 * 99)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02

"""The definition of sampling, one row at a time, in plain Python numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.sampling.philox import uniform


def final_logits(
    row: Sequence[float], request: GenerateRequest, outputs: Sequence[int]
) -> list[float]:
    """After penalties, early stops, bias and cleaning; before the temperature."""
    s = request.sampling
    logits = list(row)
    for token in set(outputs):
        count = outputs.count(token)
        logits[token] -= s.frequency_penalty * count + s.presence_penalty
        scale = s.repetition_penalty
        logits[token] *= scale if logits[token] <= 0 else 1 / scale
    if len(outputs) < s.min_new_tokens:
        for token in (*request.eos_ids, *s.stop_token_ids):
            logits[token] = -math.inf
    for token, value in s.logit_bias.items():
        logits[int(token)] += value
    return [-math.inf if math.isnan(x) else min(x, 3.4e38) for x in logits]


def choose(row: Sequence[float], request: GenerateRequest, outputs: Sequence[int]) -> int:
    logits = final_logits(row, request, outputs)
    s = request.sampling
    if s.greedy:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    top = max(logits)
    weights = [math.exp((x - top) / s.temperature) for x in logits]
    probs = [w / sum(weights) for w in weights]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    first = order[: s.top_k] if s.top_k > 0 else order
    whole = sum(probs[i] for i in first) if s.min_p > 0 else 1.0
    kept, before = set(), 0.0
    for i in first:
        if before < s.top_p * whole and probs[i] >= s.min_p * probs[order[0]]:
            kept.add(i)
        before += probs[i]
    position = len(request.input_ids) + len(outputs)
    seed, sample = np.array([s.sampling_seed]), np.array([request.sample])
    left = uniform(seed, sample, np.array([position]))[0] * sum(probs[i] for i in kept)
    for i in sorted(kept):
        left -= probs[i]
        if left < 0:
            return i
    return max(kept)

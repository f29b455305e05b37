"""Lives of tensors, told by marks, against sizes that can be counted and against the C library's own allocator."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from capture.profile import profile
from capture.profile.memory import allocated
from capture.traces.dfg import build
from capture.traces.recognise import read_all
from capture.traces.replay import replay_trace

BATCH, WIDTH, INNER, STEPS = 64, 256, 2048, 4


def perceptron():
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, 1)), torch.randn(BATCH, WIDTH)


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 256, 10),
    )  # fmt: skip
    return model, torch.randn(16, 3, 32, 32)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(1000, 64), nn.Linear(64, 192), nn.Linear(64, 1000)

    def forward(self, tokens):
        q, k, v = self.qkv(self.embedding(tokens)).unflatten(-1, (4, 48)).transpose(1, 2).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return functional.log_softmax(self.head(mixed), dim=-1)


def attention():
    return Attention(), torch.randint(1000, (16, 64))


def recorded(folder, made, *, optimizer=torch.optim.Adam, late=False):
    """Lines of a short training; late: gradients are thrown away behind the forward pass."""
    torch.manual_seed(0)
    model, batch = made()
    steps = optimizer(model.parameters(), lr=1e-3)
    with profile(folder):
        for _ in range(STEPS):
            if not late:
                steps.zero_grad()
            loss = model(batch).square().mean()
            if late:
                steps.zero_grad()
            loss.backward()
            steps.step()
    return [json.loads(text) for text in (folder / "rank0.jsonl").read_text().splitlines()[1:]]


def test_a_mark_keeps_what_lives_on_after_it_until_the_mark_that_ends_it(tmp_path):
    events = [event for event in recorded(tmp_path, perceptron) if event["it"] == STEPS - 1]
    named = {event["name"]: event for event in events}
    hidden = 4 * BATCH * INNER
    assert named["FW.0"]["bytes"] == hidden  # which Sequential holds until the ReLU has returned
    assert named["FW.0"]["id"] in named["FW.2"]["deps"]
    assert named["FW.1"]["bytes"] == hidden  # until the last layer's backward has used it
    ends = [name for name, event in named.items() if named["FW.1"]["id"] in event.get("deps", ())]
    assert ends[0].startswith("BW.")
    weights = 4 * (WIDTH * INNER + INNER + INNER + 1)
    assert {named[f"BW.{name}"]["id"] for name in ("0.weight", "0.bias", "2.weight")} <= {*named["UPD"]["deps"]}
    held = named["HELD.kept"]["bytes"]
    assert 3 * weights + 4 * BATCH * WIDTH <= held < 3.02 * weights + 4 * BATCH * WIDTH  # Adam's moments, and steps
    assert named["HELD.freed"]["bytes"] == pytest.approx(weights, rel=0.01)  # the last iteration's gradients


@pytest.mark.skipif(allocated() is None, reason="not a GPU, nor a C library that tells what it has allocated")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("made", [perceptron, convolutions, attention])
def test_the_peak_of_a_replay_is_that_of_the_allocator(tmp_path, made, late):
    recorded(tmp_path, made, late=late)
    traces = read_all([tmp_path / "rank0.jsonl"])
    sampled = traces[0].memory_bytes.max()
    for iteration in replay_trace(build(traces)).iterations:
        assert iteration.peak_bytes[0] == pytest.approx(sampled, rel=0.05)  # what was to be reached


def test_an_iteration_that_has_not_ended_is_not_told(tmp_path):
    events = recorded(tmp_path, perceptron)
    assert {event["it"] for event in events} == {-1, 2, 3}

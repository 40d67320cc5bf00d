"""How the benchmark reads a GPU's time, on one that is played: a clock of the host and one of the device."""

import types

import pytest
import torch

from rlkernel.bench import measure


class Gpu:
    """Each launch costs the host some time, and runs when the device has done what was queued before."""

    def __init__(self):
        self.host = self.device = 0.0

    def launch(self, host, device):
        self.host += host
        self.device = max(self.host, self.device) + device

    def synchronize(self):
        self.host = max(self.host, self.device)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            gpu.launch(1e-6, 0.0)
            self.at = gpu.device

        def synchronize(self):
            gpu.synchronize()

        def elapsed_time(self, end):
            return (end.at - self.at) * 1000

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch(5e-6, cycles / measure._CYCLES))
    flush = types.SimpleNamespace(zero_=lambda: gpu.launch(5e-6, 90e-6))
    monkeypatch.setattr(measure, "_flush", lambda: flush)
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: gpu.host))
    monkeypatch.setattr(measure, "_MAX_ROUNDS", 3)
    return gpu


def test_a_gpu_is_timed_without_the_host(gpu):
    calls = {
        "one launch": lambda: gpu.launch(300e-6, 12e-6),
        "many": lambda: [gpu.launch(20e-6, 2e-6) for _ in range(40)],
        "long kernels": lambda: [gpu.launch(20e-6, 1e-3) for _ in range(3)],
    }
    times = measure.interleave(calls, "cuda", seconds=10)
    for name, want in (("one launch", 12e-6), ("many", 80e-6), ("long kernels", 3e-3)):
        assert times[name] == pytest.approx([want] * 3), name
    assert measure.host_seconds(calls["one launch"]) == pytest.approx(300e-6)
    assert measure.host_seconds(calls["long kernels"]) == pytest.approx(60e-6)


def test_what_takes_the_host_long_is_not_called_often(gpu):
    seen = []
    calls = {"a loop": lambda: (seen.append(1), gpu.launch(0.3, 1e-6))}
    times = measure.interleave(calls, "cuda", seconds=0.2)
    assert len(seen) == 3 and len(times["a loop"]) == 1  # to warm up, for the host's time, for the GPU's


def test_who_waits_for_the_gpu_pays_for_what_comes_after(gpu):
    def call():
        gpu.launch(20e-6, 5e-6)
        gpu.synchronize()
        gpu.launch(50e-6, 5e-6)

    times = measure.interleave({"waits": call}, "cuda", seconds=10)
    assert times["waits"] == pytest.approx([60e-6] * 3, abs=5e-6)


def test_without_the_wait_the_hosts_time_would_be_seen(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    times = measure.interleave({"one launch": lambda: gpu.launch(300e-6, 12e-6)}, "cuda", seconds=10)
    assert min(times["one launch"]) > 200e-6


def test_torch_has_the_wait():
    assert callable(torch.cuda._sleep)

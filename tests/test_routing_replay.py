"""Routes: what is recorded, in what order, and what comes back from a file and from engines."""

import base64
import io
import json

import numpy
import pytest
import torch
from bitwise import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel import routing_replay
from rlkernel.routing_replay import Routes, from_sglang, from_vllm


def ids(layers=3, tokens=5, experts=8, k=2, seed=0):
    scores = torch.rand(layers, tokens, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(k).indices


def routes(tokens=5, experts=8, seed=0, **options):
    return Routes.of(ids(tokens=tokens, experts=experts, seed=seed, **options), experts)


def at(*place):
    return tuple(torch.tensor(x) for x in place)


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.uint8), (256, torch.uint8), (257, torch.uint16)])
def test_ids_are_kept_in_their_order_in_the_smallest_type(experts, dtype):
    want = ids(experts=experts, k=4)
    want[0, 0] = torch.tensor([experts - 1, 0, 1, 2])
    found = Routes.of(want.int(), experts)
    assert found.experts.dtype == dtype and torch.equal(found.ids, want)
    assert (found.layers, found.tokens, found.top_k, len(found)) == (3, 5, 4, 5)
    assert repr(found) == f"Routes(layers=3, tokens=5, top_k=4, num_experts={experts}, known=5)"


def test_a_token_of_minus_ones_has_no_record():
    given = ids()
    given[:, 3] = -1
    found = Routes.of(given, 8)
    assert found.known.tolist() == [True, True, True, False, True]
    assert torch.equal(found.ids, given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[0], r"ids must be integers \[layers, tokens, top_k\], got torch.int64 \(5, 2\)"),
        (lambda x: x.float(), r"ids must be integers .* got torch.float32 \(3, 5, 2\)"),
        (lambda x: x.index_put(at(1, 2), torch.tensor(-1)), r"ids\[:, 2\] must be -1 in every layer"),
        (lambda x: x.index_fill(2, torch.tensor(1), 8), r"ids\[0, 0, 1\] = 8 is outside \[0, 8\)"),
        (lambda x: torch.full_like(x, 4), r"ids\[0, 0\] must be different experts, got \[4, 4\]"),
    ],
)
def test_ids_that_are_no_routes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Routes.of(change(ids()), 8)
    with pytest.raises(ValueError, match=r"num_experts must be in \[1, 65536\], got 65537"):
        Routes.of(ids(), 65537)


@pytest.mark.parametrize("experts", [8, 300])
def test_tokens_are_taken_and_joined(experts):
    whole = routes(7, experts)
    assert torch.equal(whole[2:5].ids, whole.ids[:, 2:5])
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 1]).bool()
    assert torch.equal(whole[mask].ids, whole.ids[:, mask])
    assert torch.equal(whole[[3, 1]].ids, whole.ids[:, [3, 1]])
    assert torch.equal(whole.take_layers([2, 0]).ids, whole.ids[[2, 0]])
    assert routing_replay.cat([whole[:3], whole[3:]]).equal(whole)
    assert [part.tokens for part in whole.split([3, 0, 4])] == [3, 0, 4]
    assert routing_replay.cat(whole.split([3, 0, 4])).equal(whole)
    padded = whole.padded(left=2, right=1)
    assert padded.known.tolist() == [False] * 2 + [True] * 7 + [False]
    assert padded[2:9].equal(whole) and bool((padded.ids[:, :2] == -1).all())
    assert torch.equal(whole.only(mask).known, mask)


@pytest.mark.parametrize("experts", [8, 300])
def test_sequences_are_packed_and_padded(experts):
    rows = [routes(n, experts, n) for n in (4, 1, 6)]
    packed, ends = routing_replay.pack(rows)
    assert ends.tolist() == [0, 4, 5, 11] and ends.dtype == torch.int32
    assert all(a.equal(b) for a, b in zip(packed.unpack(ends), rows, strict=True))
    for side, mask in (("right", [[1] * n + [0] * (7 - n) for n in (4, 1, 6)]),
                       ("left", [[0] * (7 - n) + [1] * n for n in (4, 1, 6)])):  # fmt: skip
        padded = routing_replay.pad(rows, 7, side)
        assert padded.known.tolist() == torch.tensor(mask).bool().flatten().tolist()
        assert padded[torch.tensor(mask).bool()].equal(packed)
        assert routing_replay.pad_like(rows, torch.tensor(mask)).equal(padded)
    short = routing_replay.pad_like([row[:-1] for row in rows], torch.tensor(mask))
    assert int(short.known.sum()) == 8 and not short.known[6]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: routing_replay.cat([]), "parts must be one Routes or more, got none"),
        (lambda r: routing_replay.cat([r, r.take_layers([0])]), r"= \(3, 2, 8\), got \(1, 2, 8\)"),
        (lambda r: r.split([2, 2]), r"lengths must sum to 5 tokens, got \[2, 2\]"),
        (lambda r: r.unpack(torch.tensor([1, 5])), r"cu_seqlens must begin with 0, got \[1\]"),
        (lambda r: routing_replay.pad([r], 4), "length must be >= 5, the longest sequence, got 4"),
        (lambda r: routing_replay.pad([r], side="top"), "side must be 'left' or 'right', got 'top'"),
        (lambda r: routing_replay.pad_like([r], torch.ones(1, 7)), r"sequences\[0\] must have the 7 tokens"),
        (lambda r: routing_replay.pad_like([r], torch.ones(7)), r"mask must be \[1, S\], got \(7,\)"),
        (lambda r: r[torch.ones(4).bool()], "a mask must have 5 tokens, got 4"),
        (lambda r: r.only(torch.ones(4)), "mask must have 5 tokens, got 4"),
        (lambda r: r.take_layers([3]), r"layers must be in \[0, 3\), got 3"),
        (lambda r: r.overlap(r[1:]), r"other must have shape \(3, 5, 2\), got \(3, 4, 2\)"),
        (lambda r: r.padded(-1), "left and right must be >= 0, got -1 and 0"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(routes())


def test_overlap_is_the_share_of_experts_in_any_order():
    a = Routes.of([[[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]]], 8)
    b = Routes.of([[[1, 0], [2, 4], [6, 7]], [[7, 6], [5, 4], [0, 1]]], 8)
    assert a.overlap(b).tolist() == [0.5, 0.0]
    assert a.overlap(b.only(torch.tensor([1, 0, 0]))).tolist() == [1.0, 0.0]
    assert bool(a.overlap(b.only(torch.zeros(3))).isnan().all())


# files


@pytest.mark.parametrize("experts", [8, 300])
def test_a_file_gives_back_what_was_written(experts, tmp_path):
    rows = [routes(n, experts, n) for n in (4, 0, 6)]
    rows[2] = rows[2].only(torch.tensor([1, 1, 1, 1, 1, 0]))
    routing_replay.save(tmp_path / "routes", rows)
    found = routing_replay.load(tmp_path / "routes")
    assert len(found) == 3 and all(a.equal(b) for a, b in zip(found, rows, strict=True))
    assert found[0].experts.dtype == rows[0].experts.dtype
    routing_replay.save(tmp_path / "routes", rows[0])
    assert routing_replay.load(tmp_path / "routes")[0].equal(rows[0])
    assert [path.name for path in tmp_path.iterdir()] == ["routes"]


def test_safetensors_reads_the_file(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
    import safetensors  # which transformers brings

    routing_replay.save(tmp_path / "routes", routes())
    with safetensors.safe_open(tmp_path / "routes", "pt") as file:
        assert file.metadata() == {"format": "rlkernel.routes", "version": "1", "num_experts": "8"}
        assert torch.equal(file.get_tensor("experts"), routes().experts)
        assert file.get_tensor("lengths").tolist() == [5]


def _header(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _file(header, body):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


FAULTS = {
    "without its header": lambda header, body: b"PK\x03\x04",
    "got another": lambda header, body: _file({}, body),
    "version 1, got rlkernel.routes version 2": lambda header, body: (
        header["__metadata__"].update(version="2"),
        _file(header, body),
    )[1],
    "experts must be 30 of the file's 42 bytes": lambda header, body: _file(header, body[:-1]),
    "must tell of known": lambda header, body: (header.pop("known"), _file(header, body))[1],
    "known must have 5 tokens, got 4": lambda header, body: (
        header["known"].update(shape=[4], data_offsets=[38, 42]),
        _file(header, body),
    )[1],
    r"= 255 is outside \[0, 8\)": lambda header, body: _file(header, body[:8] + b"\xff" * 30 + body[38:]),
    "experts must be torch.uint16, got torch.uint8": lambda header, body: (
        header["__metadata__"].update(num_experts="300"),
        _file(header, body),
    )[1],
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_file_that_is_not_whole_is_refused(message, tmp_path):
    path = tmp_path / "routes"
    routing_replay.save(path, routes())
    header, body = _header(path.read_bytes())
    path.write_bytes(FAULTS[message](header, body))
    if "30 of" in message:
        message = "known must be 5 of the file's 42 bytes"
    with pytest.raises(ValueError, match=message):
        routing_replay.load(path)


# engines


def engine_ids(tokens=6, layers=4, experts=8):
    found = ids(layers=layers, tokens=tokens, experts=experts).transpose(0, 1).contiguous()
    found[:, 1] = 0  # a layer without a router
    return found


@pytest.mark.parametrize(("experts", "dtype"), [(8, "uint8"), (300, "uint16")])
def test_vllms_routed_experts(experts, dtype):
    array = engine_ids(experts=experts).numpy().astype(dtype)
    want = Routes.of(engine_ids(experts=experts).transpose(0, 1)[[0, 2, 3]], experts)
    found = from_vllm(array, experts, layers=[0, 2, 3])
    assert found.equal(want)
    assert from_vllm(array, experts, layers=[0, 2, 3], tokens=7).equal(want.padded(right=1))
    file = io.BytesIO()
    numpy.save(file, array, allow_pickle=False)
    text = base64.b64encode(file.getvalue()).decode()
    assert from_vllm(text, experts, layers=[0, 2, 3]).equal(want)


def test_sglangs_routed_experts():
    text = base64.b64encode(bytes(engine_ids().int().untyped_storage())).decode()
    want = Routes.of(engine_ids().transpose(0, 1)[[0, 2, 3]], 8)
    for answer in (text, {"routed_experts": text}, {"text": "", "meta_info": {"routed_experts": text}}):
        found = from_sglang(answer, 8, hidden_layers=4, top_k=2, layers=[0, 2, 3], tokens=7)
        assert found.equal(want.padded(right=1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_vllm(None, 8), "needs enable_return_routed_experts=True"),
        (lambda: from_vllm(engine_ids(), 8), "must be different experts, got"),
        (lambda: from_vllm(engine_ids()[0], 8), r"\[tokens, layers, top_k\], got \(4, 2\)"),
        (lambda: from_vllm(engine_ids(), 8, layers=[4]), r"layers must be in \[0, 4\), the engine's"),
        (lambda: from_vllm(engine_ids(), 8, layers=[0], tokens=9), "tokens = 9 rows, or all but the last"),
        (lambda: from_sglang({"meta_info": {}}, 8, hidden_layers=4, top_k=2), "return_routed_experts"),
        (lambda: from_sglang("AAAA", 8, hidden_layers=4, top_k=2), "32 bytes, got 3 bytes"),
    ],
)
def test_what_an_engine_did_not_give_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# the choice and the sum


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1), st.integers(1, 6))
def test_of_equal_scores_the_lowest_expert_is_chosen(rows, k):
    scores = torch.tensor(rows, dtype=torch.float32)
    values, indices = routing_replay.top_k(scores, k)
    for row, experts in zip(rows, indices.tolist(), strict=True):
        assert experts == sorted(range(6), key=lambda expert: (-row[expert], expert))[:k]
    assert torch.equal(values, scores.topk(k).values)


def test_the_choice_has_its_gradient_and_says_what_it_takes():
    scores = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(4, 3, dtype=torch.float64)
    found = torch.autograd.grad(routing_replay.top_k(scores, 3)[0], scores, upstream)[0]
    assert torch.equal(found, torch.autograd.grad(scores.topk(3).values, scores, upstream)[0])
    with pytest.raises(ValueError, match=r"k must be in \[1, 9\], got 10"):
        routing_replay.top_k(scores, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_depends_on_its_token_alone(dtype):
    g = torch.Generator().manual_seed(0)
    outputs = torch.randn(33, 6, 40, generator=g).mul(torch.tensor([1e-3, 4096, 1, -4096, 1e-2, 3])[:, None])
    outputs, weights = outputs.to(dtype), torch.rand(33, 6, generator=g)
    whole = routing_replay.combine(outputs, weights)
    plain = torch.zeros(33, 40)
    for slot in range(6):
        plain += outputs[:, slot].float() * weights[:, slot, None]
    assert_equal("the sum", whole, plain.to(dtype))
    for rows in ([0], [5, 2], list(range(17)), list(range(32, -1, -1))):
        assert_equal(f"rows {rows}", routing_replay.combine(outputs[rows], weights[rows]), whole[rows])
    cancels = torch.tensor([32768, 1, -32768], dtype=dtype)[:, None], torch.tensor([512.0, 1, 512])
    assert routing_replay.combine(*cancels).item() == 0  # 2^24 + 1 is no fp32: the order of slots is bits
    assert routing_replay.combine(cancels[0].flip(0), cancels[1].flip(0)).item() == 1
    with pytest.raises(ValueError, match=r"weights must have outputs' shape \(33, 6\)"):
        routing_replay.combine(outputs, weights[:, :5])

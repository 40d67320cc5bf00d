"""``Report.plot``: HTML without any package, pictures by matplotlib."""

import sys
import xml.etree.ElementTree

import pytest
import torch

from rlkernel.consistency import compare, statistics


def report(spread=1e-2, shape=(16, 64)):
    g = torch.Generator().manual_seed(1)
    rollout = -3 * torch.rand(shape, generator=g)
    return compare(rollout + spread * torch.randn(shape, generator=g), rollout)


@pytest.mark.parametrize("found", [report(), report(0.0), report(shape=(1, 1)), report(1e4)], ids=range(4))
def test_html_shows_three_panels_and_the_table(found, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found.plot(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "nan" not in page.split("<pre>")[0] and str(found).splitlines()[0] in page
    drawn = [
        xml.etree.ElementTree.fromstring(f"<svg{x.split('</svg>')[0]}</svg>") for x in page.split("<svg")[1:]
    ]
    points, bars, lines = drawn
    assert points.find("path").get("d").count("M") == found.compared
    last = max(k for k, n in enumerate(found.ulp_histogram) if n)
    assert len(bars.findall("rect")) == last + 1
    assert len(lines.findall("polyline")) == 2
    for panel in drawn:  # nothing is drawn outside of the panel
        for mark in (*panel.iter("line"), *panel.iter("rect")):
            for name, most in (("x", 420), ("x1", 420), ("y", 320), ("y1", 320)):
                assert -0.1 <= float(mark.get(name, 0)) <= most


def test_a_tall_bar_is_the_share_of_its_tokens(tmp_path):
    rollout = torch.full((1, 4), -1.0)
    steps = torch.tensor([[0, 0, 0, 1]], dtype=torch.int32)
    compare((rollout.view(torch.int32) + steps).view(torch.float32), rollout).plot(tmp_path / "x.html")
    bars = (tmp_path / "x.html").read_text().split("<svg")[2]
    heights = [float(x.split('height="')[1].split('"')[0]) for x in bars.split("<rect")[1:]]
    assert heights[0] == pytest.approx(3 * heights[1], abs=0.2)


def test_many_tokens_are_shown_by_some(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "CHUNK", 1003)
    rollout = -torch.arange(8 * 4096.0).view(8, 4096)
    mask = torch.rand(8, 4096, generator=torch.Generator().manual_seed(1)) < 0.9
    found = compare(rollout / 2, rollout, mask)
    assert found.points.rollout.equal(rollout[mask][::8].double())
    monkeypatch.undo()
    found = report(shape=(8, 4096))
    found.plot(tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert page.count("h0") == 4096 and "4,096 tokens" in page


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_matplotlibs(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    report().plot(str(tmp_path / f"report.{suffix}"))
    written = (tmp_path / f"report.{suffix}").read_bytes()
    assert written.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_a_missing_package_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"in \.png must have matplotlib \(pip install rlkernel\[bench\]\)"):
        report().plot(tmp_path / "report.png")


def test_nothing_is_not_drawn(tmp_path):
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="must have a compared token, got none"):
        compare(x, x, x > 0).plot(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())

"""The documentation as a reader has it: what is searched, what is highlighted, and that nothing is cut off.

The site is built once for all of these. With Chromium every page is laid out at two widths; what is wider
than its box must scroll there, and a page must not.
"""

import fcntl
import functools
import http.server
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import chromium
import pytest

import rlkernel

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = (1280, 390)  # a laptop's, a telephone's
PAGES = 12  # that are laid out
PICTURES = ROOT / "build/screenshots"  # of the landing page and of the widest ones, for the eye

# Tables and code whose right end no reader can bring into view: something hides it, or it lies outside of the
# page and no box inside of the page scrolls. 1 px is a fraction that was rounded.
MEASURE = """(() => {
  const cut = [], page = document.documentElement, right = page.clientWidth + 1;
  if (page.scrollWidth > right) cut.push(`the page is ${page.scrollWidth} px wide`);
  for (const wide of document.querySelectorAll('article table, article pre > code')) {
    const text = wide.textContent.trim().replace(/\\s+/g, ' ').slice(0, 60);
    const isOutside = box => box.getBoundingClientRect().right > right;
    const isHidden = box => ['hidden', 'clip'].includes(getComputedStyle(box).overflowX);
    const scrolls = box => ['auto', 'scroll'].includes(getComputedStyle(box).overflowX);
    let box = wide, isCut = isOutside(wide);
    for (; box !== document.body; box = box.parentElement) {
      if (isHidden(box) && box.scrollWidth > box.clientWidth + 1) { isCut = true; break; }
      if (scrolls(box) && !isOutside(box)) { isCut = false; break; }
    }
    if (isCut) cut.push(`${wide.tagName} ${text}`);
  }
  return cut;
})()"""
# The same measure must see these, on a page with both.
FAULTS = {
    "hidden": "article pre > code, article .md-typeset__scrollwrap { overflow: hidden !important }",
    "wider than the page": "article table, article code { width: 2000px; overflow: visible !important }"
    " article * { overflow: visible !important }",
}


@pytest.fixture(scope="module")
def site():
    """build/site, as ``make docs`` leaves it; built anew where something is newer. One worker does that."""
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the site's theme needs Python 3.11, and make docs brings it")
    folder = ROOT / "build/site"
    folder.mkdir(parents=True, exist_ok=True)
    with open(ROOT / "build/site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_fresh(folder):
            build(folder)
    return folder


def is_fresh(folder):
    sources = [ROOT / "mkdocs.yml", *(p for p in (ROOT / "docs").rglob("*") if "__pycache__" not in p.parts)]
    sources += [p for name in ("rlkernel", "integrations") for p in (ROOT / name).rglob("*.py")]
    last = folder / "sitemap.xml"  # written behind all pages
    return last.is_file() and last.stat().st_mtime > max(p.stat().st_mtime for p in sources)


def build(folder):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # ruff's
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PATH": path}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if built.returncode != 0:
        (folder / "sitemap.xml").unlink(missing_ok=True)  # or the next test would take it for a whole one
    assert built.returncode == 0, built.stdout + built.stderr


def pages(site):
    return sorted(str(p.parent.relative_to(site)) for p in site.rglob("index.html"))


def test_every_page_and_every_public_name_is_there(site):
    api = "".join(page.read_text(encoding="utf-8") for page in sorted((site / "api").rglob("index.html")))
    for name in rlkernel.__all__:
        assert name.startswith("__") or f'id="rlkernel.{name}"' in api, name
    landing = (site / "index.html").read_text(encoding="utf-8")
    menu = set(re.findall(r'<a href="([^"]+)" class="md-nav__link', landing))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        place = str(page.relative_to(ROOT / "docs").with_suffix(""))
        assert place == "index" or f"{place}/" in menu, f"no menu leads to {place}"


def test_search_finds_what_is_written(site):
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    found = {
        entry["location"].partition("#")[0] for entry in index["docs"] if "inplace_backward" in entry["text"]
    }
    assert {"ops/logprob/", "api/logprob/"} <= found


def test_code_is_highlighted_and_nothing_comes_from_elsewhere(site):
    landing = (site / "index.html").read_text(encoding="utf-8")
    assert '<span class="kn">import</span>' in landing
    assert landing.index('<span class="nn">rlkernel</span>') < landing.index('id="install"')
    example = (site / "api/gae/index.html").read_text(encoding="utf-8")
    assert '<span class="gp">&gt;&gt;&gt; </span>' in example
    for page in pages(site):
        text = (site / page / "index.html").read_text(encoding="utf-8")
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]+src="(http[^"]+)|<link[^>]+(?:stylesheet|preconnect)[^>]+(http[^"]+)',
            text,
        )
        assert not loaded, f"{page} loads {loaded}"


@pytest.fixture(scope="module")
def served(site):
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def widest(site):
    """The landing page, and those with most columns and with the longest lines: what can overflow."""
    text = {page: (site / page / "index.html").read_text(encoding="utf-8") for page in pages(site)}

    def columns(page):
        return max((row.count("<td") for row in re.findall(r"<tr>(.*?)</tr>", text[page], re.S)), default=0)

    def line(page):
        code = "\n".join(re.findall(r"<code>(.*?)</code>", text[page], re.S))
        return max(map(len, re.sub(r"<[^>]+>", "", code).split("\n")))

    by_both = (sorted(text, key=width)[-PAGES // 2 :] for width in (columns, line))
    return sorted({".", *itertools.chain(*by_both)})


def test_no_table_and_no_code_is_cut_off(site, served):
    if chromium.find() is None:
        pytest.skip(chromium.ABSENT)
    problems = []
    with chromium.Browser() as browser:
        browser.call("Network.setBlockedURLs", urls=["*/search_index.json"])  # reading it takes longest
        for page in widest(site):
            asked = browser.open(f"{served}{page}/", WIDTHS[0])
            elsewhere = [url for url in asked if not url.startswith((served, "data:", "blob:"))]
            problems += [f"{page} asks for {url}" for url in elsewhere]
            for width in WIDTHS:
                browser.resize(width)
                problems += [f"{page} at {width} px: {what}" for what in browser.run(MEASURE)]
                name = page.replace("/", "_").strip(".") or "index"
                browser.picture(PICTURES / f"{name}-{width}.png")
        assert not problems, "\n".join(problems)
        browser.open(f"{served}ops/logprob/", WIDTHS[1])
        for fault, style in FAULTS.items():
            insert = "document.head.insertAdjacentHTML('beforeend', '<style id=fault>' + {} + '</style>')"
            browser.run(insert.format(json.dumps(style)))
            seen = {what.split()[0] for what in browser.run(MEASURE)}
            assert {"TABLE", "CODE"} <= seen, f"{fault}: {seen}"
            browser.run("document.getElementById('fault').remove()")
